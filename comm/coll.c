/* coll.c: the collectives, on the exchange.
 *
 * Every call is cut into chunks; a chunk is one step (two for the two-phase all_reduce). A rank fills the slot of its
 * next chunk while peers still work on the last one. How many chunks there are follows only from arguments that are
 * equal on all ranks, and peers compare fingerprints before they read, so that no mistake can make them read what is
 * not there.
 *
 * Results have equal bits on all ranks: whoever reduces an element does so over the slots in rank order (dc_reduce). */
#include <stdio.h>
#include <string.h>

#include "comm_impl.h"

/* Bytes of a slot that one chunk uses: small enough that what one core wrote is still in cache when the others read it.
 * Tried with 2 ranks, 128 MiB all_reduce of fp32: 256 KiB to 512 KiB 54 to 63 ms, 1 MiB 65 ms, 2 MiB and more above 100
 * ms. */
#define CHUNK_BYTES ((int64_t)512 << 10)
#define SMALL_COPY ((int64_t)64 << 10)

typedef struct job {
  dc_comm *c;
  const char *in;
  char *out;
  int64_t count; /* elements of one part */
  int64_t esz;
  int64_t per;    /* elements of one part in one chunk */
  int64_t chunks; /* >= 1, so that calls with count 0 are compared as well */
  dc_call call;
} job;

static int64_t chunk_begin(const job *j, int64_t k) { return k * j->per; }
static int64_t chunk_len(const job *j, int64_t k) {
  int64_t left = j->count - k * j->per;
  return left < j->per ? left : j->per;
}

static int copy(void *dst, const void *src, int64_t bytes) {
  if (bytes > SMALL_COPY) return dc_copy(dst, src, bytes);
  if (bytes) memcpy(dst, src, (size_t)bytes);
  return DC_OK;
}

static int copy_in(void *dst, const void *src, int64_t bytes) {
  dc__count(DC_COUNTER_coll_bytes_in, bytes);
  return copy(dst, src, bytes);
}

static int copy_out(void *dst, const void *src, int64_t bytes) {
  dc__count(DC_COUNTER_coll_bytes_out, bytes);
  return copy(dst, src, bytes);
}

/* out[n] = reduction over ranks of n elements that start `skip` elements into every slot of `step`. */
static int reduce_slots(const job *j, int64_t step, int64_t skip, int64_t n, void *out) {
  const void *src[DC_COMM_MAX_RANKS];
  for (int r = 0; r < j->c->size; r++) src[r] = dc__slot(j->c, r, step) + skip * j->esz;
  dc__count(DC_COUNTER_coll_bytes_out, n * j->esz * j->c->size);
  return dc_reduce(out, src, j->c->size, j->call.dtype, j->call.red_op, n);
}

/* ---- one step per chunk: fill mine, read theirs ------------------------------------------------------------------ */
typedef struct algo {
  int op;
  const char *what;
  int (*fits)(const job *);
  int64_t (*parts)(const job *); /* parts that share a slot */
  int (*fill)(const job *, int64_t chunk, char *slot);
  int (*read)(const job *, int64_t chunk, int64_t step);
} algo;

static int64_t one_part(const job *j) { return 1; }
static int64_t part_per_rank(const job *j) { return j->c->size; }
static int always(const job *j) { return 1; }

static int fill_nothing(const job *j, int64_t k, char *slot) { return DC_OK; }
static int read_nothing(const job *j, int64_t k, int64_t step) { return DC_OK; }

static int fill_chunk(const job *j, int64_t k, char *slot) {
  return copy_in(slot, j->in + chunk_begin(j, k) * j->esz, chunk_len(j, k) * j->esz);
}

static int read_all_reduce(const job *j, int64_t k, int64_t step) {
  return reduce_slots(j, step, 0, chunk_len(j, k), j->out + chunk_begin(j, k) * j->esz);
}

/* Chunk k of every rank's part; part r lies at r * per of the slot. Our own part stays where it is for all_to_all. */
static int fill_parts(const job *j, int64_t k, char *slot) {
  for (int r = 0; r < j->c->size; r++) {
    if (r == j->c->rank && j->call.op == DC_CALL_ALL_TO_ALL) continue;
    DC_TRY(copy_in(slot + r * j->per * j->esz, j->in + (r * j->count + chunk_begin(j, k)) * j->esz,
                   chunk_len(j, k) * j->esz));
  }
  return DC_OK;
}

static int read_reduce_scatter(const job *j, int64_t k, int64_t step) {
  return reduce_slots(j, step, j->c->rank * j->per, chunk_len(j, k), j->out + chunk_begin(j, k) * j->esz);
}

static int read_all_gather(const job *j, int64_t k, int64_t step) {
  for (int i = 0; i < j->c->size; i++) {
    int r = (j->c->rank + i) % j->c->size; /* every rank starts elsewhere, so that they don't queue for one slot */
    char *to = j->out + (r * j->count + chunk_begin(j, k)) * j->esz;
    const char *own = j->in + chunk_begin(j, k) * j->esz;
    if (r != j->c->rank) DC_TRY(copy_out(to, dc__slot(j->c, r, step), chunk_len(j, k) * j->esz));
    else if (to != own) DC_TRY(copy(to, own, chunk_len(j, k) * j->esz));
  }
  return DC_OK;
}

static int fill_root(const job *j, int64_t k, char *slot) {
  return j->c->rank == j->call.root ? fill_chunk(j, k, slot) : DC_OK;
}

static int read_root(const job *j, int64_t k, int64_t step) {
  if (j->c->rank == j->call.root) return DC_OK;
  return copy_out(j->out + chunk_begin(j, k) * j->esz, dc__slot(j->c, j->call.root, step), chunk_len(j, k) * j->esz);
}

static int read_all_to_all(const job *j, int64_t k, int64_t step) {
  for (int i = 0; i < j->c->size; i++) {
    int r = (j->c->rank + i) % j->c->size;
    int64_t at = (r * j->count + chunk_begin(j, k)) * j->esz, bytes = chunk_len(j, k) * j->esz;
    if (r == j->c->rank) DC_TRY(copy(j->out + at, j->in + at, bytes));
    else DC_TRY(copy_out(j->out + at, dc__slot(j->c, r, step) + j->c->rank * j->per * j->esz, bytes));
  }
  return DC_OK;
}

static int run_chunks(const job *j, const algo *a) {
  dc_comm *c = j->c;
  int64_t first = c->begun, issued = 0;
  for (int64_t k = 0; k < j->chunks; k++) {
    for (; issued < j->chunks; issued++) {
      int64_t step;
      void *slot;
      int ready = 1;
      if (issued > k)
        DC_TRY(dc__can_begin(c, &ready)); /* chunk k must be out; later ones only if that does not block */
      if (!ready) break;
      DC_TRY(dc__begin(c, &step, &slot));
      DC_TRY(a->fill(j, issued, slot));
      DC_TRY(dc__post(c, &j->call));
    }
    DC_TRY(dc__wait(c, first + k));
    DC_TRY(a->read(j, k, first + k));
    DC_TRY(dc__done(c, first + k));
  }
  return DC_OK;
}

/* ---- two steps per chunk: every rank reduces its slice of the chunk, then all gather the slices ------------------ */
static int64_t slice_begin(const job *j, int64_t k, int rank) {
  int64_t lines = (chunk_len(j, k) * j->esz + DC__LINE - 1) / DC__LINE, per_line = DC__LINE / j->esz;
  int64_t at = lines * rank / j->c->size * per_line; /* cut at cache lines of the slot */
  return at < chunk_len(j, k) ? at : chunk_len(j, k);
}

static int two_phase_fill(const job *j, int64_t k, int64_t *step) {
  void *slot;
  DC_TRY(dc__begin(j->c, step, &slot));
  DC_TRY(fill_chunk(j, k, slot));
  return dc__post(j->c, &j->call);
}

/* Reduces this rank's slice of what lies in `step` into the slot of the next step, *sum. */
static int two_phase_reduce(const job *j, int64_t k, int64_t step, int64_t *sum) {
  dc_comm *c = j->c;
  int64_t from = slice_begin(j, k, c->rank), n = slice_begin(j, k, c->rank + 1) - from;
  void *slot;
  DC_TRY(dc__wait(c, step));
  DC_TRY(dc__begin(c, sum, &slot));
  DC_TRY(reduce_slots(j, step, from, n, (char *)slot + from * j->esz));
  DC_TRY(dc__post(c, &j->call));
  return dc__done(c, step);
}

static int two_phase_gather(const job *j, int64_t k, int64_t step) {
  dc_comm *c = j->c;
  char *out = j->out + chunk_begin(j, k) * j->esz;
  DC_TRY(dc__wait(c, step));
  for (int i = 0; i < c->size; i++) {
    int r = (c->rank + i) % c->size;
    int64_t from = slice_begin(j, k, r), n = slice_begin(j, k, r + 1) - from;
    DC_TRY(copy_out(out + from * j->esz, dc__slot(c, r, step) + from * j->esz, n * j->esz));
  }
  return dc__done(c, step);
}

/* The steps of chunk k are numbered 2k and 2k + 1 on every rank, whether the next chunk is filled early or late. */
static int run_two_phase(const job *j) {
  int64_t next, sum;
  DC_TRY(two_phase_fill(j, 0, &next));
  for (int64_t k = 0; k < j->chunks; k++) {
    int early = 0;
    DC_TRY(two_phase_reduce(j, k, next, &sum));
    if (k + 1 < j->chunks) DC_TRY(dc__can_begin(j->c, &early));
    if (early) DC_TRY(two_phase_fill(j, k + 1, &next));
    DC_TRY(two_phase_gather(j, k, sum));
    if (k + 1 < j->chunks && !early) DC_TRY(two_phase_fill(j, k + 1, &next));
  }
  return DC_OK;
}

static int fits_direct(const job *j) { return j->c->size <= 2 || j->count * j->esz <= 32 << 10; }

/* The first row of a call's op that fits is taken; `fits` looks only at what is equal on all ranks. A row without
 * `read` is two-phase. */
static const algo algos[] = {
    {DC_CALL_BARRIER, "an empty step", always, one_part, fill_nothing, read_nothing},
    {DC_CALL_ALL_REDUCE,
     "direct: every rank reduces everything from all slots; one synchronisation, best for 2 ranks and for small counts",
     fits_direct, one_part, fill_chunk, read_all_reduce},
    {DC_CALL_ALL_REDUCE,
     "two-phase: every rank reduces one slice and gathers the others; reads 2 n instead of ranks * n elements", always,
     one_part, NULL, NULL},
    {DC_CALL_REDUCE_SCATTER, "all parts into the slot; every rank reduces its part from all slots", always,
     part_per_rank, fill_parts, read_reduce_scatter},
    {DC_CALL_ALL_GATHER, "every rank copies all slots", always, one_part, fill_chunk, read_all_gather},
    {DC_CALL_BROADCAST, "all copy the root's slot", always, one_part, fill_root, read_root},
    {DC_CALL_ALL_TO_ALL, "parts for the others into the slot; every rank copies its part from all slots", always,
     part_per_rank, fill_parts, read_all_to_all},
};

static const algo *choose(const job *j) {
  const algo *a = algos;
  while (a->op != j->call.op || !a->fits(j)) a++; /* every op has a row that always fits */
  return a;
}

static void cut(job *j, const algo *a) {
  int64_t room = (j->c->slot_bytes < CHUNK_BYTES ? j->c->slot_bytes : CHUNK_BYTES) / a->parts(j);
  if (room < j->esz) room = j->c->slot_bytes / a->parts(j);
  if (room >= DC__LINE) room -= room % DC__LINE;
  j->per = room / j->esz;
  j->chunks = j->count ? (j->count + j->per - 1) / j->per : 1;
}

static int run_alone(const job *j) {
  int64_t bytes = j->count * j->esz;
  if (j->call.op == DC_CALL_ALL_REDUCE || j->call.op == DC_CALL_REDUCE_SCATTER) {
    const void *src = j->in;
    return dc_reduce(j->out, &src, 1, j->call.dtype, j->call.red_op, j->count);
  }
  return j->out == j->in ? DC_OK : copy(j->out, j->in, bytes);
}

/* Runs the call. Whatever fails after the first step has begun would leave the ranks at different steps, so it breaks
 * the group. */
static int run(job *j) {
  dc_comm *c = j->c;
  if (c->begun != c->done)
    return DC_FAIL(DC_E_STATE, "group %s: %lld exchange steps are open; finish them before a collective", c->label,
                   (long long)(c->begun - c->done));
  c->seq++;
  c->call = j->call;
  if (c->size == 1) return run_alone(j);
  const algo *a = choose(j);
  cut(j, a);
  int rc = a->read ? run_chunks(j, a) : run_two_phase(j);
  if (!rc || dc__broken(c)) return rc;
  char why[512];
  snprintf(why, sizeof why, "%s", dc_last_error());
  return dc__break(c, rc, "group %s: %s", c->label, why);
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */
static int floating(int dtype) { return dtype == DC_F32 || dtype == DC_BF16 || dtype == DC_F16 || dtype == DC_F64; }

static int check_reduction(int dtype, int op) {
  if (op < DC_RED_SUM || op > DC_RED_BXOR)
    return DC_FAIL(DC_E_INVALID, "reduction %d: expected 0 to %d (dc_reduce_op)", op, DC_RED_BXOR);
  if (op == DC_RED_AVG && !floating(dtype))
    return DC_FAIL(DC_E_DTYPE, "avg of %s: only floating types have an average", dc_dtype_name(dtype));
  if (op >= DC_RED_BAND && floating(dtype))
    return DC_FAIL(DC_E_DTYPE, "bitwise reduction of %s: only integers have one", dc_dtype_name(dtype));
  return DC_OK;
}

/* Checks the arguments and fills the job; `parts` is what in or out hold at most. Nothing is shared yet: a failure here
 * is local. */
static int prepare(job *j, dc_comm *c, const void *in, void *out, int64_t count, int parts) {
  size_t esz = dc_dtype_size(j->call.dtype);
  int64_t total;
  if (!esz) return DC_FAIL(DC_E_DTYPE, "dtype %d: expected 0 to %d (dc_dtype)", j->call.dtype, DC_DTYPE_COUNT - 1);
  if (count < 0) return DC_FAIL(DC_E_SHAPE, "count %lld is negative", (long long)count);
  if (count > 0 && (!in || !out)) return DC_FAIL(DC_E_INVALID, "in or out is NULL with count %lld", (long long)count);
  if (__builtin_mul_overflow(count, (int64_t)esz * parts, &total))
    return DC_FAIL(DC_E_OVERFLOW, "count %lld overflows 64 bits of bytes", (long long)count);
  j->c = c;
  j->in = in;
  j->out = out;
  j->count = j->call.count = count;
  j->esz = (int64_t)esz;
  return DC_OK;
}

int dc_barrier(dc_comm *c, int64_t tag) {
  job j = {.c = c, .esz = 1, .call = {.op = DC_CALL_BARRIER, .tag = tag}};
  DC_TRY(dc__enter(c));
  int rc = run(&j);
  if (!rc) dc__count(DC_COUNTER_coll_barrier, 1);
  dc__leave(c);
  return rc;
}

int dc_all_reduce(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int64_t tag) {
  job j = {.call = {.op = DC_CALL_ALL_REDUCE, .dtype = dtype, .red_op = op, .tag = tag}};
  DC_TRY(dc__enter(c));
  int rc = prepare(&j, c, in, out, count, 1);
  if (!rc) rc = check_reduction(dtype, op);
  if (!rc) rc = run(&j);
  if (!rc) dc__count(DC_COUNTER_coll_all_reduce, 1);
  dc__leave(c);
  return rc;
}

int dc_reduce_scatter(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int64_t tag) {
  job j = {.call = {.op = DC_CALL_REDUCE_SCATTER, .dtype = dtype, .red_op = op, .tag = tag}};
  DC_TRY(dc__enter(c));
  int rc = prepare(&j, c, in, out, count, c->size);
  if (!rc) rc = check_reduction(dtype, op);
  if (!rc) rc = run(&j);
  if (!rc) dc__count(DC_COUNTER_coll_reduce_scatter, 1);
  dc__leave(c);
  return rc;
}

int dc_all_gather(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int64_t tag) {
  job j = {.call = {.op = DC_CALL_ALL_GATHER, .dtype = dtype, .tag = tag}};
  DC_TRY(dc__enter(c));
  int rc = prepare(&j, c, in, out, count, c->size);
  if (!rc) rc = run(&j);
  if (!rc) dc__count(DC_COUNTER_coll_all_gather, 1);
  dc__leave(c);
  return rc;
}

int dc_broadcast(dc_comm *c, void *buf, int64_t count, int dtype, int root, int64_t tag) {
  job j = {.call = {.op = DC_CALL_BROADCAST, .dtype = dtype, .root = root, .tag = tag}};
  DC_TRY(dc__enter(c));
  int rc = prepare(&j, c, buf, buf, count, 1);
  if (!rc && (root < 0 || root >= c->size)) rc = DC_FAIL(DC_E_INVALID, "root %d of %d ranks", root, c->size);
  if (!rc) rc = run(&j);
  if (!rc) dc__count(DC_COUNTER_coll_broadcast, 1);
  dc__leave(c);
  return rc;
}

int dc_all_to_all(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int64_t tag) {
  job j = {.call = {.op = DC_CALL_ALL_TO_ALL, .dtype = dtype, .tag = tag}};
  DC_TRY(dc__enter(c));
  int rc = prepare(&j, c, in, out, count, c->size);
  if (!rc && in == out && count > 0 && c->size > 1)
    rc = DC_FAIL(DC_E_INVALID, "all_to_all can't work in place: in equals out");
  if (!rc) rc = run(&j);
  if (!rc) dc__count(DC_COUNTER_coll_all_to_all, 1);
  dc__leave(c);
  return rc;
}
