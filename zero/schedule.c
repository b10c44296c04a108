/* schedule.c: makes pipeline schedules, and writes and reads their text. A rank's schedule is a few phases, each a
 * string of letters that is repeated: a letter stands for the next action of its sort, and is passed over if there is
 * no micro-batch for it. So warm-up and cool-down need no cases of their own, and a schedule for few micro-batches is
 * the one for more without the actions of those that are not there: order, and with it freedom from deadlock, stays. */
#include "schedule.h"

#include <stdio.h>
#include <string.h>

#define LETTERS "FBIW" /* by enum dc_schedule_work */
#define MAX_PHASES 8

typedef struct phase {
  int64_t times;
  const char *letters; /* upper case: of all chunks in turn (ZB-V: of the first); lower case: of ZB-V's second chunk */
} phase;

typedef struct shape {
  int64_t p, v, m, rank;
} shape;

static void schedule_gpipe(const shape *s, phase *out) {
  out[0] = (phase){s->m, "F"};
  out[1] = (phase){s->m, "B"};
}

static void schedule_1f1b(const shape *s, phase *out) {
  out[0] = (phase){s->p - 1 - s->rank, "F"};
  out[1] = (phase){s->m, "FB"};
}

static void schedule_interleaved(const shape *s, phase *out) {
  out[0] = (phase){(s->v - 1) * s->p + 2 * (s->p - 1 - s->rank), "F"};
  out[1] = (phase){s->v * ((s->m + s->p - 1) / s->p * s->p), "FB"}; /* whole groups, see schedule_turn */
}

/* Rank r puts W off by r micro-batches, so that all ranks have as many in flight as rank 0 (p). */
static void schedule_zb_h1(const shape *s, phase *out) {
  out[0] = (phase){s->p - 1 - s->rank, "F"};
  out[1] = (phase){s->rank, "FI"};
  out[2] = (phase){s->m, "FIW"};
}

/* With equal times of F, I and W, micro-batch 0 reaches rank r's second chunk 2 (p - r) - 1 actions after its first,
 * and comes back to it 2 r actions later: the first two phases fill that time, the third until it is back at the first
 * chunk. */
static void schedule_zb_v(const shape *s, phase *out) {
  const int64_t p = s->p, r = s->rank, n = s->m > 2 * p - 1 ? s->m : 2 * p - 1;
  const phase phases[MAX_PHASES] = {{2 * (p - r) - 1, "F"}, {r, "fF"}, {p - r, "fiw"}, {n - p, "FIWfiw"}, {r, "Ii"},
                                    {p - r, "IW"},          {r, "w"},  {r, "W"}};
  memcpy(out, phases, sizeof phases);
}

static const struct schedule_row {
  const char *name;
  void (*phases)(const shape *s, phase *out); /* [MAX_PHASES], zeroed */
  int64_t min_chunks, max_chunks;
  int split; /* backward is I and W */
} schedule_kinds[DC_SCHEDULE_COUNT] = {
    [DC_SCHEDULE_GPIPE] = {"gpipe", schedule_gpipe, 1, 1, 0},
    [DC_SCHEDULE_1F1B] = {"1f1b", schedule_1f1b, 1, 1, 0},
    [DC_SCHEDULE_INTERLEAVED] = {"interleaved", schedule_interleaved, 2, DC_SCHEDULE_MAX_STAGES, 0},
    [DC_SCHEDULE_ZB_H1] = {"zb-h1", schedule_zb_h1, 1, 1, 1},
    [DC_SCHEDULE_ZB_V] = {"zb-v", schedule_zb_v, 2, 2, 1},
};

const char *dc_schedule_name(int kind) {
  return kind >= 0 && kind < DC_SCHEDULE_COUNT ? schedule_kinds[kind].name : NULL;
}

static int schedule_check_kind(int kind, int64_t ranks, int64_t chunks) {
  if (!dc_schedule_name(kind)) return DC_FAIL(DC_E_INVALID, "kind %d is no schedule; see enum dc_schedule_kind", kind);
  const struct schedule_row *row = &schedule_kinds[kind];
  if (ranks < 1) return DC_FAIL(DC_E_INVALID, "%s: ranks is %lld; it must be >= 1", row->name, (long long)ranks);
  if (chunks < row->min_chunks || chunks > row->max_chunks)
    return DC_FAIL(DC_E_INVALID, "%s: chunks is %lld; this schedule has %s%lld a rank", row->name, (long long)chunks,
                   row->max_chunks > row->min_chunks ? "at least " : "", (long long)row->min_chunks);
  if (ranks > DC_SCHEDULE_MAX_STAGES / chunks)
    return DC_FAIL(DC_E_INVALID, "%s: %lld ranks of %lld chunks are more than %d stages", row->name, (long long)ranks,
                   (long long)chunks, DC_SCHEDULE_MAX_STAGES);
  return DC_OK;
}

static int64_t schedule_rank_of(int kind, int64_t p, int64_t stage) {
  if (kind == DC_SCHEDULE_ZB_V && stage >= p) return 2 * p - 1 - stage;
  return stage % p;
}

int dc_schedule_stage_rank(int kind, int64_t ranks, int64_t chunks, int64_t stage, int64_t *rank) {
  if (!rank) return DC_FAIL(DC_E_INVALID, "rank is NULL");
  DC_TRY(schedule_check_kind(kind, ranks, chunks));
  if (stage < 0 || stage >= ranks * chunks)
    return DC_FAIL(DC_E_INVALID, "stage %lld is outside of [0, %lld)", (long long)stage, (long long)(ranks * chunks));
  *rank = schedule_rank_of(kind, ranks, stage);
  return DC_OK;
}

/* ---- the actions of a rank --------------------------------------------------------------------------------------- */
/* The k-th action of a sort: groups of p micro-batches, each through one chunk after the other, backwards from the
 * last. */
static dc_schedule_action schedule_turn(const shape *s, int work, int64_t k) {
  const int64_t group = k / (s->p * s->v), turn = k % (s->p * s->v) / s->p;
  const int64_t chunk = work == DC_SCHEDULE_F ? turn : s->v - 1 - turn;
  return (dc_schedule_action){work, (int32_t)(chunk * s->p + s->rank), (int32_t)(group * s->p + k % s->p)};
}

/* The k-th action of a sort in one of the two chunks of a V. */
static dc_schedule_action schedule_turn_v(const shape *s, int chunk, int work, int64_t k) {
  return (dc_schedule_action){work, (int32_t)(chunk ? 2 * s->p - 1 - s->rank : s->rank), (int32_t)k};
}

static void schedule_play(int kind, const shape *s, const phase *phases, dc_schedule_action *out) {
  int64_t done[2][DC_SCHEDULE_WORKS] = {{0}};
  for (int i = 0; i < MAX_PHASES; i++)
    for (int64_t t = 0; t < phases[i].times; t++)
      for (const char *c = phases[i].letters; *c; c++) {
        const int chunk = *c >= 'a', work = (int)(strchr(LETTERS, chunk ? *c - 'a' + 'A' : *c) - LETTERS);
        const int64_t k = done[chunk][work]++;
        const dc_schedule_action a = kind == DC_SCHEDULE_ZB_V ? schedule_turn_v(s, chunk, work, k)
                                                              : schedule_turn(s, work, k);
        if (a.micro < s->m) *out++ = a;
      }
}

int dc_schedule_actions(int kind, int64_t ranks, int64_t chunks, int64_t micro_batches, int64_t rank,
                        dc_schedule_action *actions, int64_t capacity, int64_t *count) {
  if (!count) return DC_FAIL(DC_E_INVALID, "count is NULL");
  DC_TRY(schedule_check_kind(kind, ranks, chunks));
  const struct schedule_row *row = &schedule_kinds[kind];
  if (micro_batches < 1)
    return DC_FAIL(DC_E_INVALID, "%s: micro_batches is %lld; it must be >= 1", row->name, (long long)micro_batches);
  if (rank < 0 || rank >= ranks)
    return DC_FAIL(DC_E_INVALID, "%s: rank %lld is outside of [0, %lld)", row->name, (long long)rank, (long long)ranks);
  if (micro_batches > INT32_MAX / (3 * chunks))
    return DC_FAIL(DC_E_OVERFLOW, "%s: %lld micro-batches through %lld chunks are more actions than 32 bits count",
                   row->name, (long long)micro_batches, (long long)chunks);
  const int64_t need = (row->split ? 3 : 2) * chunks * micro_batches;
  if (actions) {
    if (capacity < need)
      return DC_FAIL(DC_E_INVALID, "capacity is %lld, but rank %lld has %lld actions; ask with actions == NULL first",
                     (long long)capacity, (long long)rank, (long long)need);
    const shape s = {.p = ranks, .v = chunks, .m = micro_batches, .rank = rank};
    phase phases[MAX_PHASES] = {{0, NULL}};
    row->phases(&s, phases);
    schedule_play(kind, &s, phases, actions);
  }
  *count = need;
  return DC_OK;
}

/* ---- text -------------------------------------------------------------------------------------------------------- */
enum { MAX_TEXT = 32 }; /* of an action: two numbers of 32 bits, a letter, a blank, NUL */

int dc_schedule_print(const dc_schedule_action *actions, int64_t count, char *text, int64_t capacity_bytes,
                      int64_t *length) {
  if (!length || count < 0 || (count > 0 && !actions))
    return DC_FAIL(DC_E_INVALID, "length or actions is NULL, or count (%lld) is negative", (long long)count);
  int64_t at = 0;
  for (int64_t i = 0; i < count; i++) {
    const dc_schedule_action *a = &actions[i];
    if (a->work < 0 || a->work >= DC_SCHEDULE_WORKS || a->stage < 0 || a->micro < 0)
      return DC_FAIL(DC_E_INVALID, "action %lld (work %d, stage %d, micro-batch %d) is none", (long long)i, a->work,
                     a->stage, a->micro);
    char one[MAX_TEXT];
    int n = snprintf(one, sizeof one, "%s%d%c%d", i ? " " : "", a->stage, LETTERS[a->work], a->micro);
    if (text && at + n < capacity_bytes) memcpy(text + at, one, (size_t)n);
    at += n;
  }
  if (text) {
    if (at >= capacity_bytes)
      return DC_FAIL(DC_E_INVALID, "capacity_bytes is %lld, but the text has %lld and a NUL", (long long)capacity_bytes,
                     (long long)at);
    text[at] = '\0';
  }
  *length = at;
  return DC_OK;
}

/* Reads digits at *at and moves it behind them. 0 if there are none, or more than 32 bits hold. */
static int schedule_read_number(const char **at, int32_t *out) {
  int64_t value = 0;
  const char *c = *at;
  for (; *c >= '0' && *c <= '9' && value <= INT32_MAX; c++) value = 10 * value + (*c - '0');
  if (c == *at || value > INT32_MAX) return 0;
  *at = c;
  *out = (int32_t)value;
  return 1;
}

/* Reads one action at *at and moves it behind. 0 if none stands there. */
static int schedule_read_action(const char **at, dc_schedule_action *out) {
  if (!schedule_read_number(at, &out->stage)) return 0;
  const char *letter = **at ? strchr(LETTERS, **at) : NULL;
  if (!letter) return 0;
  ++*at;
  out->work = (int32_t)(letter - LETTERS);
  return schedule_read_number(at, &out->micro);
}

#define SEPARATORS " \t,"

int dc_schedule_parse(const char *text, dc_schedule_action *actions, int64_t capacity, int64_t *count) {
  if (!text || !count) return DC_FAIL(DC_E_INVALID, "text or count is NULL");
  int64_t n = 0;
  for (const char *at = text + strspn(text, SEPARATORS); *at; at += strspn(at, SEPARATORS), n++) {
    const char *begin = at;
    const int length = (int)strcspn(begin, SEPARATORS), shown = length < MAX_TEXT ? length : MAX_TEXT;
    dc_schedule_action a;
    if (!schedule_read_action(&at, &a) || at != begin + length)
      return DC_FAIL(DC_E_INVALID,
                     "column %lld: '%.*s' is no action; an action is a stage, one of F, B, I, W, and a micro-batch,"
                     " as in 2F0",
                     (long long)(begin - text + 1), shown, begin);
    if (!actions) continue;
    if (n >= capacity)
      return DC_FAIL(DC_E_INVALID, "capacity is %lld, but there are more actions; ask with actions == NULL first",
                     (long long)capacity);
    actions[n] = a;
  }
  *count = n;
  return DC_OK;
}
