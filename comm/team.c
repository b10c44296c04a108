/* team.c: see team.h. Owns who is in which team, and the words of leaders in the arena.
 *
 * Every rank posts its own cell as ever, and the cells remain what is true: a leader waits for those of its team,
 * compares, and says so in the team's `in`; it waits for the `in` of the other teams, and says that all are there in
 * `go`, which is all that a member waits for. Each line carries the hash of the calls and the least number of steps
 * done, so nothing else needs the others' cells.
 *
 * Who waits looks at all cells now and then (dc__await_word): a step that all have posted goes on without the leader,
 * be it dead or busy, and what is told of deaths, differences and time-outs is what a group without teams tells.
 *
 * A line may be written again when all have done the step before: as with cells, its owner has begun a step then that
 * waited for that. tests/model/team.pml checks both. */
#include "team.h"

#include <errno.h>
#include <stdlib.h>

#include "wait.h"

/* ---- who is in which ----------------------------------------------------------------------------------------------
 */
static int team_most(int size) { return (size + 1) / 2; }

int64_t dc__team_bytes(int size, int cells) {
  return team_most(size) * (int64_t)(sizeof(dc__team_seat) + 2 * sizeof(dc__team_line) * (size_t)cells);
}

int dc__team_wanted(bool crowded, int *wanted) {
  const char *e = getenv("DEEPC_TEAM");
  *wanted = crowded ? DC__TEAM_NONE : DC__TEAM_AUTO;
  if (!e || !*e) return DC_OK;
  char *end;
  const long n = strtol(e, &end, 10);
  if (*end || end == e || n < 0 || n == 1 || n > DC_COMM_MAX_RANKS)
    return DC_FAIL(DC_E_ENV, "DEEPC_TEAM=%s: expected 0 (no teams) or 2 to %d ranks", e, DC_COMM_MAX_RANKS);
  *wanted = (int)n;
  return DC_OK;
}

/* group[r]: the number of the group of ranks with the same key, in the order of their lowest ranks; how many. */
static int team_group(int size, const int32_t *key, int32_t *group) {
  int groups = 0;
  for (int r = 0; r < size; r++) {
    int before = 0;
    while (before < r && key[before] != key[r]) before++;
    group[r] = before < r ? group[before] : groups++;
  }
  return groups;
}

/* Cuts each group into teams of at most `most` ranks, as equal as can be, in rank order. */
static int team_cut(int size, int groups, const int32_t *group, int most, int32_t *team) {
  int32_t key[DC_COMM_MAX_RANKS];
  for (int g = 0; g < groups; g++) {
    int n = 0, at = 0;
    for (int r = 0; r < size; r++) n += group[r] == g;
    const int parts = (n + most - 1) / most;
    for (int r = 0; r < size; r++)
      if (group[r] == g) key[r] = g * DC_COMM_MAX_RANKS + at++ * parts / n;
  }
  return team_group(size, key, team);
}

/* By the last-level caches, or the nodes, if all ranks know theirs: as long as that makes fewer leaders than members.
 */
static int team_by(int size, const dc__spot *spot, bool node, int32_t *team) {
  int32_t key[DC_COMM_MAX_RANKS], group[DC_COMM_MAX_RANKS];
  for (int r = 0; r < size; r++) {
    key[r] = node ? spot[r].node : spot[r].l3;
    if (key[r] < 0) return size;
  }
  return team_cut(size, team_group(size, key, group), group, DC__TEAM_RANKS, team);
}

int dc__team_plan(int size, const dc__spot *spot, int wanted, int32_t *team) {
  const int32_t one[DC_COMM_MAX_RANKS] = {0};
  memset(team, 0, sizeof *team * (size_t)size);
  if (wanted == DC__TEAM_NONE || wanted >= size || (wanted < 0 && size <= DC__TEAM_RANKS)) return 1;
  if (wanted > 0) return team_cut(size, 1, one, wanted, team);
  int teams = team_by(size, spot, false, team);
  if (teams > size / 2) teams = team_by(size, spot, true, team);
  if (teams > size / 2) teams = team_cut(size, 1, one, DC__TEAM_RANKS, team);
  return teams;
}

int dc__team_open(dc_comm *c, void *area) {
  const int teams = c->h->teams;
  if (teams < 2 || teams > team_most(c->size)) return DC_OK;
  dc__team *t = calloc(1, sizeof *t);
  if (!t) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *t);
  t->teams = teams;
  t->mine = c->h->seat[c->rank].team;
  t->seats = area;
  t->lines = (dc__team_line *)(t->seats + teams);
  int leader = c->rank;
  for (int r = c->size - 1; r >= 0; r--)
    if (c->h->seat[r].team == t->mine) leader = r;
  t->leads = leader == c->rank;
  for (int i = 1; i < c->size; i++) { /* from itself on, so that leaders don't queue for one line */
    const int r = (c->rank + i) % c->size;
    if (c->h->seat[r].team == t->mine && r != leader) t->member[t->members++] = (int16_t)r;
  }
  c->team = t;
  return DC_OK;
}

void dc__team_close(dc_comm *c) {
  free(c->team);
  c->team = NULL;
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */
/* What is known of those that have been waited for. */
typedef struct team_found {
  bool same;    /* all called what this rank called */
  bool all;     /* all ranks have posted, and nobody's word was needed for that */
  int64_t done; /* the least of all */
} team_found;

static void team_note(const dc_comm *c, team_found *f, uint64_t hash, uint32_t done) {
  const int64_t lifted = c->done + (int32_t)(done - (uint32_t)c->done);
  if (hash != c->team->hash) f->same = false;
  if (lifted < f->done) f->done = lifted;
}

/* Waits for `what` of a team. */
static int team_await(dc_comm *c, int64_t step, int team, int what, team_found *f) {
  dc__team_line *l = dc__team_at(c, team, what, step);
  DC_TRY(dc__await_word(c, &l->posted, &c->team->seats[team].sleepers[what], step, &f->all));
  if (f->all) return DC_OK;
  /* relaxed: ordered by `posted` */
  team_note(c, f, atomic_load_explicit(&l->hash, memory_order_relaxed),
            atomic_load_explicit(&l->done, memory_order_relaxed));
  return DC_OK;
}

static void team_say(dc_comm *c, int64_t step, int what, const team_found *f) {
  dc__team_line *l = dc__team_at(c, c->team->mine, what, step);
  atomic_store_explicit(&l->hash, c->team->hash, memory_order_relaxed);
  atomic_store_explicit(&l->done, (uint32_t)f->done, memory_order_relaxed);
  dc__publish(c, &l->posted, (uint32_t)(step + 1), &c->team->seats[c->team->mine].sleepers[what]);
}

static team_found team_begin(dc_comm *c, int64_t step) {
  c->team->hash = atomic_load_explicit(&dc__cell_of(c, c->rank, step)->hash, memory_order_relaxed);
  return (team_found){.same = true, .done = c->done};
}

/* The teams have said that all are there. Where that is not known of them, or somebody called something else, the cells
 * are asked. */
static int team_arrived(dc_comm *c, int64_t step, team_found *f) {
  if (f->all || !f->same) {
    DC_TRY(dc__wait(c, step));
    *f = (team_found){.same = true, .all = true, .done = c->all_done};
    return DC_OK;
  }
  if (f->done > c->all_done) c->all_done = f->done;
  c->arrived++;
  return DC_OK;
}

/* Up to the point where a leader can say `go`. A difference is told before anybody is told to go on. */
static int team_lead(dc_comm *c, int64_t step, team_found *f) {
  const dc__team *t = c->team;
  *f = team_begin(c, step);
  for (int i = 0; i < t->members; i++) {
    DC_TRY(dc__await_posted(c, step, t->member[i]));
    const dc__cell *cell = dc__cell_of(c, t->member[i], step);
    team_note(c, f, atomic_load_explicit(&cell->hash, memory_order_relaxed),
              atomic_load_explicit(&cell->done, memory_order_relaxed));
  }
  if (!f->same) return team_arrived(c, step, f);
  team_say(c, step, DC__TEAM_IN, f);
  for (int i = 1; i < t->teams && !f->all; i++) DC_TRY(team_await(c, step, (t->mine + i) % t->teams, DC__TEAM_IN, f));
  return team_arrived(c, step, f);
}

static int team_follow(dc_comm *c, int64_t step, team_found *f) {
  *f = team_begin(c, step);
  DC_TRY(team_await(c, step, c->team->mine, DC__TEAM_GO, f));
  return team_arrived(c, step, f);
}

int dc__team_wait(dc_comm *c, int64_t step) {
  team_found f;
  if (step != c->arrived || step >= c->posted) return dc__wait(c, step);
  if (!c->team->leads) return team_follow(c, step, &f);
  DC_TRY(team_lead(c, step, &f));
  team_say(c, step, DC__TEAM_GO, &f);
  return DC_OK;
}

int dc__team_take(dc_comm *c, int64_t step, void *out, int64_t bytes, int *what) {
  team_found f;
  *what = DC__TEAM_READ_ALONE;
  if (step != c->arrived || step >= c->posted) return dc__wait(c, step);
  if (c->team->leads) {
    DC_TRY(team_lead(c, step, &f));
    c->team->done = f.done;
    *what = DC__TEAM_READ;
    return DC_OK;
  }
  DC_TRY(team_follow(c, step, &f));
  if (f.all) return DC_OK;
  if (bytes) memcpy(out, dc__team_at(c, c->team->mine, DC__TEAM_GO, step)->data, (size_t)bytes);
  *what = DC__TEAM_TAKEN;
  return DC_OK;
}

void dc__team_give(dc_comm *c, int64_t step, const void *result, int64_t bytes) {
  const team_found f = {.same = true, .done = c->team->done};
  if (bytes) memcpy(dc__team_at(c, c->team->mine, DC__TEAM_GO, step)->data, result, (size_t)bytes);
  team_say(c, step, DC__TEAM_GO, &f);
}

int dc__share(dc_comm *c, const dc_call *call, const void *mine, int64_t bytes, void *all) {
  int64_t step;
  void *place;
  DC_TRY(dc__begin_for(c, bytes, &step, &place));
  if (bytes) memcpy(place, mine, (size_t)bytes);
  DC_TRY(dc__post(c, call));
  DC_TRY(dc__wait_all(c, step));
  for (int i = 0; i < c->size && bytes; i++) {
    const int r = (c->rank + i) % c->size; /* every rank starts elsewhere */
    memcpy((char *)all + r * bytes, dc__place(c, r, step, bytes), (size_t)bytes);
  }
  return dc__done(c, step);
}
