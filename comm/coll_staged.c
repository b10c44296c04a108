/* coll_staged.c: collectives through the slots: works for any memory, and is the fastest way for small calls.
 *
 * A call is cut into chunks; a chunk is one step (two for the two-phase form). A rank fills the slot of its next chunk
 * while peers still work on the last one. How many chunks there are follows only from what is equal on all ranks, and
 * peers compare fingerprints before they read, so that no mistake can make them read what is not there. */
#include <string.h>

#include "job.h"
#include "sync.h"
#include "team.h"

/* Bytes of a slot that one chunk uses: small enough that what one core wrote is still in cache when the others read it.
 */
#define CHUNK_BYTES ((int64_t)512 << 10)
#define HERE_BYTES ((int64_t)64 << 10) /* up to here a copy or reduction is not worth asking for threads */

#define AHEAD_BYTES ((int64_t)1024)

typedef struct staged {
  const dc__job *j;
  int64_t per;    /* elements of one part in one chunk */
  int64_t chunks; /* >= 1, so that calls with count 0 are compared as well */
  int64_t bytes;  /* of the place that a step takes: what peers look it up by */
} staged;

/* Whom a rank waits for before it reads: all, the root, or nobody (it reads nothing, and may run ahead). */
typedef enum { ALL, ROOT, NOBODY } whom;
typedef struct way {
  int op;
  int parts_per_rank; /* 1: one part per rank shares a slot; 0: one part in all */
  whom root_waits, others_wait;
  int (*fill)(const staged *, int64_t chunk, char *slot);
  int (*read)(const staged *, int64_t chunk, int64_t step);
} way;

static int64_t staged_begin_of(const staged *s, int64_t k) { return k * s->per; }
static int64_t staged_length(const staged *s, int64_t k, int64_t count) {
  int64_t left = count - k * s->per;
  return left < 0 ? 0 : left < s->per ? left : s->per;
}
static int64_t staged_len(const staged *s, int64_t k) { return staged_length(s, k, s->j->count); }

static int staged_copy(void *dst, const void *src, int64_t bytes) {
  if (bytes > HERE_BYTES) return dc_copy(dst, src, bytes);
  if (bytes > 0) memcpy(dst, src, (size_t)bytes);
  return DC_OK;
}

/* A slot's lines are in the readers' caches. Stores would bring them back nearly one by one; asked for ahead, they come
 * ten at a time. */
static int staged_copy_in(dc_comm *c, void *dst, const void *src, int64_t bytes) {
  dc__count_in(&c->counts, DC_COUNTER_coll_bytes_in, bytes);
  if (bytes <= 2 * DC__LINE || bytes > HERE_BYTES) return staged_copy(dst, src, bytes);
  for (int64_t at = 0, ahead = 0; at < bytes; at += AHEAD_BYTES) {
    const int64_t end = dc__min64(at + 2 * AHEAD_BYTES, bytes);
    for (; ahead < end; ahead += DC__LINE) dc__prefetch_write((char *)dst + ahead);
    memcpy((char *)dst + at, (const char *)src + at, (size_t)dc__min64(AHEAD_BYTES, bytes - at));
  }
  return DC_OK;
}

static int staged_copy_out(dc_comm *c, void *dst, const void *src, int64_t bytes) {
  dc__count_in(&c->counts, DC_COUNTER_coll_bytes_out, bytes);
  return staged_copy(dst, src, bytes);
}

/* out[n] = reduction over ranks of n elements that start `skip` elements into every slot of `step`; `own`: this rank's
 * elements where they still lie (NULL: its slot), which saves reading the slot back. */
static int staged_reduce_slots(const staged *s, int64_t step, int64_t skip, int64_t n, const char *own, void *out) {
  const dc__job *j = s->j;
  const void *src[DC_COMM_MAX_RANKS];
  for (int r = 0; r < j->c->size; r++) src[r] = dc__place(j->c, r, step, s->bytes) + skip * j->esz;
  if (own) src[j->c->rank] = own;
  dc__count_in(&j->c->counts, DC_COUNTER_coll_bytes_out, n * j->esz * j->c->size);
  if (n * j->esz <= HERE_BYTES) return dc__reduce_here(out, src, j->c->size, j->call.dtype, j->call.red_op, n, 0);
  return dc_reduce(out, src, j->c->size, j->call.dtype, j->call.red_op, n);
}

/* ---- what is filled in, what is read ----------------------------------------------------------------------------- */
static int staged_fill_nothing(const staged *s, int64_t k, char *slot) { return DC_OK; }
static int staged_read_nothing(const staged *s, int64_t k, int64_t step) { return DC_OK; }

static int staged_fill_chunk(const staged *s, int64_t k, char *slot) {
  return staged_copy_in(s->j->c, slot, s->j->in + staged_begin_of(s, k) * s->j->esz, staged_len(s, k) * s->j->esz);
}

static int staged_read_all_reduce(const staged *s, int64_t k, int64_t step) {
  const int64_t at = staged_begin_of(s, k) * s->j->esz;
  return staged_reduce_slots(s, step, 0, staged_len(s, k), s->j->in + at, s->j->out + at);
}

static int staged_read_reduce(const staged *s, int64_t k, int64_t step) {
  return s->j->c->rank == s->j->call.root ? staged_read_all_reduce(s, k, step) : DC_OK;
}

/* Chunk k of every rank's part; part r lies at r * per of the slot. Our own part stays where it is. */
static int staged_fill_parts(const staged *s, int64_t k, char *slot) {
  const dc__job *j = s->j;
  for (int r = 0; r < j->c->size; r++) {
    if (r == j->c->rank) continue;
    DC_TRY(staged_copy_in(j->c, slot + r * s->per * j->esz, j->in + (r * j->count + staged_begin_of(s, k)) * j->esz,
                          staged_len(s, k) * j->esz));
  }
  return DC_OK;
}

static int staged_fill_parts_of_root(const staged *s, int64_t k, char *slot) {
  return s->j->c->rank == s->j->call.root ? staged_fill_parts(s, k, slot) : DC_OK;
}

static int staged_read_reduce_scatter(const staged *s, int64_t k, int64_t step) {
  const dc__job *j = s->j;
  const char *own = j->in + (j->c->rank * j->count + staged_begin_of(s, k)) * j->esz;
  return staged_reduce_slots(s, step, j->c->rank * s->per, staged_len(s, k), own,
                             j->out + staged_begin_of(s, k) * j->esz);
}

static int staged_read_all_gather(const staged *s, int64_t k, int64_t step) {
  const dc__job *j = s->j;
  for (int i = 0; i < j->c->size; i++) {
    int r = (j->c->rank + i) % j->c->size; /* every rank starts elsewhere, so that they don't queue for one slot */
    char *to = j->out + (r * j->count + staged_begin_of(s, k)) * j->esz;
    const char *own = j->in + staged_begin_of(s, k) * j->esz;
    if (r != j->c->rank)
      DC_TRY(staged_copy_out(j->c, to, dc__place(j->c, r, step, s->bytes), staged_len(s, k) * j->esz));
    else if (to != own) DC_TRY(staged_copy(to, own, staged_len(s, k) * j->esz));
  }
  return DC_OK;
}

/* The root reads its own elements where they are. */
static int staged_fill_of_others(const staged *s, int64_t k, char *slot) {
  return s->j->c->rank == s->j->call.root ? DC_OK : staged_fill_chunk(s, k, slot);
}

static int staged_read_gather(const staged *s, int64_t k, int64_t step) {
  return s->j->c->rank == s->j->call.root ? staged_read_all_gather(s, k, step) : DC_OK;
}

static int staged_read_scatter(const staged *s, int64_t k, int64_t step) {
  const dc__job *j = s->j;
  const int64_t bytes = staged_len(s, k) * j->esz, at = staged_begin_of(s, k) * j->esz;
  const char *own = j->in + j->c->rank * j->count * j->esz + at;
  if (j->c->rank != j->call.root)
    return staged_copy_out(j->c, j->out + at,
                           dc__place(j->c, j->call.root, step, s->bytes) + j->c->rank * s->per * j->esz, bytes);
  return own == j->out + at ? DC_OK : staged_copy(j->out + at, own, bytes);
}

static int staged_fill_root(const staged *s, int64_t k, char *slot) {
  return s->j->c->rank == s->j->call.root ? staged_fill_chunk(s, k, slot) : DC_OK;
}

static int staged_read_root(const staged *s, int64_t k, int64_t step) {
  const dc__job *j = s->j;
  if (j->c->rank == j->call.root) return DC_OK;
  return staged_copy_out(j->c, j->out + staged_begin_of(s, k) * j->esz, dc__place(j->c, j->call.root, step, s->bytes),
                         staged_len(s, k) * j->esz);
}

static int staged_read_all_to_all(const staged *s, int64_t k, int64_t step) {
  const dc__job *j = s->j;
  for (int i = 0; i < j->c->size; i++) {
    int r = (j->c->rank + i) % j->c->size;
    int64_t at = (r * j->count + staged_begin_of(s, k)) * j->esz, bytes = staged_len(s, k) * j->esz;
    if (r == j->c->rank) DC_TRY(staged_copy(j->out + at, j->in + at, bytes));
    else
      DC_TRY(
          staged_copy_out(j->c, j->out + at, dc__place(j->c, r, step, s->bytes) + j->c->rank * s->per * j->esz, bytes));
  }
  return DC_OK;
}

static int staged_fill_blocks(const staged *s, int64_t k, char *slot) {
  const dc__job *j = s->j;
  const char *block = j->in;
  for (int r = 0; r < j->c->size; block += j->in_counts[r++] * j->esz) {
    if (r == j->c->rank) continue;
    DC_TRY(staged_copy_in(j->c, slot + r * s->per * j->esz, block + staged_begin_of(s, k) * j->esz,
                          staged_length(s, k, j->in_counts[r]) * j->esz));
  }
  return DC_OK;
}

static const char *staged_own_block(const dc__job *j) {
  const char *own = j->in;
  for (int r = 0; r < j->c->rank; r++) own += j->in_counts[r] * j->esz;
  return own;
}

static int staged_read_blocks(const staged *s, int64_t k, int64_t step) {
  const dc__job *j = s->j;
  char *block = j->out;
  for (int r = 0; r < j->c->size; block += j->out_counts[r++] * j->esz) {
    const int64_t at = staged_begin_of(s, k) * j->esz, bytes = staged_length(s, k, j->out_counts[r]) * j->esz;
    if (bytes == 0) continue;
    if (r == j->c->rank) DC_TRY(staged_copy(block + at, staged_own_block(j) + at, bytes));
    else
      DC_TRY(
          staged_copy_out(j->c, block + at, dc__place(j->c, r, step, s->bytes) + j->c->rank * s->per * j->esz, bytes));
  }
  return DC_OK;
}

static const way staged_ways[] = {
    {DC_CALL_BARRIER, 0, ALL, ALL, staged_fill_nothing, staged_read_nothing},
    {DC_CALL_ALL_REDUCE, 0, ALL, ALL, staged_fill_chunk, staged_read_all_reduce},
    {DC_CALL_REDUCE, 0, ALL, NOBODY, staged_fill_of_others, staged_read_reduce},
    {DC_CALL_REDUCE_SCATTER, 1, ALL, ALL, staged_fill_parts, staged_read_reduce_scatter},
    {DC_CALL_ALL_GATHER, 0, ALL, ALL, staged_fill_chunk, staged_read_all_gather},
    {DC_CALL_GATHER, 0, ALL, NOBODY, staged_fill_of_others, staged_read_gather},
    {DC_CALL_SCATTER, 1, NOBODY, ROOT, staged_fill_parts_of_root, staged_read_scatter},
    {DC_CALL_BROADCAST, 0, NOBODY, ROOT, staged_fill_root, staged_read_root},
    {DC_CALL_ALL_TO_ALL, 1, ALL, ALL, staged_fill_parts, staged_read_all_to_all},
    {DC_CALL_ALL_TO_ALLV, 1, ALL, ALL, staged_fill_blocks, staged_read_blocks},
};

static int staged_await(const staged *s, const way *w, int64_t step) {
  dc_comm *c = s->j->c;
  switch (c->rank == s->j->call.root ? w->root_waits : w->others_wait) {
  case NOBODY: return dc__skip(c, step);
  case ROOT: return dc__wait_rank(c, step, s->j->call.root);
  default: dc__warm(c, step, s->bytes); return w->others_wait == ALL ? dc__wait_all(c, step) : dc__wait(c, step);
  }
}

/* A tiny all_reduce in a group with teams: leaders reduce, in rank order as everybody would, and their teams take the
 * result with the word that all are there. */
static int staged_await_and_read_tiny(const staged *s, const way *w, int64_t step) {
  dc_comm *c = s->j->c;
  const int64_t bytes = s->bytes;
  int what;
  DC_TRY(dc__team_take(c, step, s->j->out, bytes, &what));
  if (what == DC__TEAM_TAKEN) return DC_OK;
  DC_TRY(w->read(s, 0, step));
  if (what == DC__TEAM_READ) dc__team_give(c, step, s->j->out, bytes);
  return DC_OK;
}

static int staged_await_and_read(const staged *s, const way *w, int64_t step) {
  if (s->j->c->team && w->op == DC_CALL_ALL_REDUCE && s->bytes <= DC__INLINE)
    return staged_await_and_read_tiny(s, w, step);
  DC_TRY(staged_await(s, w, step));
  return w->read(s, 0, step);
}

static int staged_run_one(const staged *s, const way *w) {
  dc_comm *c = s->j->c;
  int64_t step;
  void *slot;
  DC_TRY(dc__begin_for(c, s->bytes, &step, &slot));
  DC_TRY(w->fill(s, 0, slot));
  DC_TRY(dc__post(c, &s->j->call));
  DC_TRY(staged_await_and_read(s, w, step));
  return dc__done(c, step);
}

static int staged_run_chunks(const staged *s, const way *w) {
  dc_comm *c = s->j->c;
  int64_t first = c->begun, issued = 0;
  for (int64_t k = 0; k < s->chunks; k++) {
    for (; issued < s->chunks; issued++) {
      int64_t step;
      void *slot;
      int ready = 1;
      if (issued > k)
        DC_TRY(dc__can_begin(c, &ready)); /* chunk k must be out; later ones only if that does not block */
      if (!ready) break;
      DC_TRY(dc__begin(c, &step, &slot));
      DC_TRY(w->fill(s, issued, slot));
      DC_TRY(dc__post(c, &s->j->call));
    }
    DC_TRY(staged_await(s, w, first + k));
    DC_TRY(w->read(s, k, first + k));
    DC_TRY(dc__done(c, first + k));
  }
  return DC_OK;
}

static staged staged_cut(const dc__job *j, int parts) {
  const int64_t count = j->in_counts ? j->longest : j->count, slot = j->c->slot_bytes;
  staged s = {.j = j, .per = count, .chunks = 1, .bytes = count * parts * j->esz};
  if (s.bytes <= DC__SMALL) return s; /* the divisions below take longer than such a call may */
  int64_t room = dc__min64(slot, CHUNK_BYTES) / parts;
  if (room < j->esz) room = slot / parts;
  if (room >= DC__LINE) room -= room % DC__LINE;
  s.per = room / j->esz;
  s.chunks = count && s.per ? (count + s.per - 1) / s.per : 1;
  if (s.chunks == 1 && s.per) s.per = count;
  s.bytes = s.chunks == 1 ? count * parts * j->esz : INT64_MAX; /* several chunks always go through slots */
  return s;
}

int dc__staged(const dc__job *j) {
  const way *w = staged_ways;
  while (w->op != j->call.op % DC__ALGO) w++; /* every op has one */
  const staged s = staged_cut(j, w->parts_per_rank ? j->c->size : 1);
  if (s.per == 0 && (j->in_counts ? j->longest : j->count))
    return DC_FAIL(DC_E_INVALID, "group %s: slots of %lld bytes are too small for %d parts of %lld bytes", j->c->label,
                   (long long)j->c->slot_bytes, j->c->size, (long long)j->esz);
  return s.chunks == 1 ? staged_run_one(&s, w) : staged_run_chunks(&s, w);
}

/* ---- two steps per chunk: every rank reduces its slice of the chunk, then all gather the slices ------------------ */
static int64_t staged_slice_begin(const staged *s, int64_t k, int rank) {
  int64_t lines = (staged_len(s, k) * s->j->esz + DC__LINE - 1) / DC__LINE, per_line = DC__LINE / s->j->esz;
  int64_t at = lines * rank / s->j->c->size * per_line; /* cut at cache lines of the slot */
  return dc__min64(at, staged_len(s, k));
}

static int staged_two_phase_fill(const staged *s, int64_t k, int64_t *step) {
  void *slot;
  DC_TRY(dc__begin_for(s->j->c, s->bytes, step, &slot));
  DC_TRY(staged_fill_chunk(s, k, slot));
  return dc__post(s->j->c, &s->j->call);
}

/* Reduces this rank's slice of what lies in `step` into the slot of the next step, *sum. */
static int staged_two_phase_reduce(const staged *s, int64_t k, int64_t step, int64_t *sum) {
  const dc__job *j = s->j;
  dc_comm *c = j->c;
  int64_t from = staged_slice_begin(s, k, c->rank), n = staged_slice_begin(s, k, c->rank + 1) - from;
  void *slot;
  DC_TRY(dc__wait_all(c, step));
  DC_TRY(dc__begin_for(c, s->bytes, sum, &slot));
  DC_TRY(staged_reduce_slots(s, step, from, n, NULL, (char *)slot + from * j->esz));
  DC_TRY(dc__post(c, &j->call));
  return dc__done(c, step);
}

static int staged_two_phase_gather(const staged *s, int64_t k, int64_t step) {
  const dc__job *j = s->j;
  dc_comm *c = j->c;
  char *out = j->out + staged_begin_of(s, k) * j->esz;
  DC_TRY(dc__wait_all(c, step));
  bool mine = j->call.op % DC__ALGO == DC_CALL_ALL_REDUCE || c->rank == j->call.root;
  for (int i = 0; i < c->size && mine; i++) {
    int r = (c->rank + i) % c->size;
    int64_t from = staged_slice_begin(s, k, r), n = staged_slice_begin(s, k, r + 1) - from;
    DC_TRY(staged_copy_out(c, out + from * j->esz, dc__place(c, r, step, s->bytes) + from * j->esz, n * j->esz));
  }
  return dc__done(c, step);
}

/* The steps of chunk k are numbered 2k and 2k + 1 on every rank, whether the next chunk is filled early or late. */
int dc__two_phase(const dc__job *j) {
  const staged s = staged_cut(j, 1);
  int64_t next, sum;
  DC_TRY(staged_two_phase_fill(&s, 0, &next));
  for (int64_t k = 0; k < s.chunks; k++) {
    int early = 0;
    DC_TRY(staged_two_phase_reduce(&s, k, next, &sum));
    if (k + 1 < s.chunks) DC_TRY(dc__can_begin(j->c, &early));
    if (early) DC_TRY(staged_two_phase_fill(&s, k + 1, &next));
    DC_TRY(staged_two_phase_gather(&s, k, sum));
    if (k + 1 < s.chunks && !early) DC_TRY(staged_two_phase_fill(&s, k + 1, &next));
  }
  return DC_OK;
}
