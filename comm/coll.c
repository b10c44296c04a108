/* coll.c: the collectives: which way a call runs, and the public functions.
 *
 * Results have equal bits on all ranks and in every way: whoever reduces an element does so over all ranks' elements in
 * rank order (dc_reduce).
 *
 * Small calls go through the slots. From the smallest size at which thresholds.def names `direct` the ranks first meet
 * and show where their buffers lie: registered ones are used where they are; for others staging and single copy are
 * both tried on the first calls of each kind and size, and rank 0's clock decides for all (single copy costs system
 * calls and page tables, staging a second copy in cache: which is less differs between machines). DEEPC_ALGO forces
 * rows of the table. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flight.h"
#include "job.h"
#include "segment.h"
#include "sync.h"
#include "team.h"
#include "tell.h"
#include "wait.h"

#define TRIALS 8 /* calls of a kind and size that take turns, now and then */

/* run NULL: direct, after a meeting. */
static const dc__algo coll_algos[] = {
    {DC_CALL_BARRIER, "staged", "an empty step", dc__staged},
    {DC_CALL_ALL_REDUCE, "staged", "every rank reduces everything from all slots: one synchronisation", dc__staged},
    {DC_CALL_ALL_REDUCE, "two_phase",
     "every rank reduces one slice and gathers the others: reads 2 n instead of ranks * n elements", dc__two_phase},
    {DC_CALL_ALL_REDUCE, "direct", "every rank reduces one slice where it lies and writes it to all", NULL},
    {DC_CALL_REDUCE, "staged", "root reduces everything from all slots", dc__staged},
    {DC_CALL_REDUCE, "two_phase", "every rank reduces one slice, root gathers them", dc__two_phase},
    {DC_CALL_REDUCE, "direct", "every rank reduces one slice where it lies and writes it to root", NULL},
    {DC_CALL_REDUCE_SCATTER, "staged", "parts for the others into the slot; every rank reduces its part from all slots",
     dc__staged},
    {DC_CALL_REDUCE_SCATTER, "direct", "every rank reduces its part where it lies", NULL},
    {DC_CALL_ALL_GATHER, "staged", "every rank copies all slots", dc__staged},
    {DC_CALL_ALL_GATHER, "direct", "every rank copies from where the parts lie", NULL},
    {DC_CALL_GATHER, "staged", "root copies all slots", dc__staged},
    {DC_CALL_GATHER, "direct", "root copies from where the parts lie", NULL},
    {DC_CALL_SCATTER, "staged", "parts into the root's slot", dc__staged},
    {DC_CALL_SCATTER, "direct", "every rank copies its part from where it lies", NULL},
    {DC_CALL_BROADCAST, "staged", "all copy the root's slot", dc__staged},
    {DC_CALL_BROADCAST, "direct", "all copy from where it lies", NULL},
    {DC_CALL_ALL_TO_ALL, "staged", "parts for the others into the slot; every rank copies its part from all slots",
     dc__staged},
    {DC_CALL_ALL_TO_ALL, "direct", "every rank copies its parts from where they lie", NULL},
    {DC_CALL_ALL_TO_ALLV, "staged", "as all_to_all", dc__staged},
    {DC_CALL_ALL_TO_ALLV, "direct", "as all_to_all", NULL},
};
enum { ROWS = sizeof coll_algos / sizeof *coll_algos };

typedef struct threshold {
  int op, ranks, registered;
  int64_t bytes;
  const char *row;
} threshold;

static const threshold coll_thresholds[] = {
#define DC_THRESHOLD(op, ranks, registered, bytes, row) {DC_CALL_##op, ranks, registered, bytes, #row},
#include "thresholds.def"
#undef DC_THRESHOLD
};
enum { THRESHOLDS = sizeof coll_thresholds / sizeof *coll_thresholds };

static const dc__algo *coll_row_named(int op, const char *name) {
  for (int i = 0; i < ROWS; i++)
    if (coll_algos[i].op == op && strcmp(coll_algos[i].name, name) == 0) return &coll_algos[i];
  return NULL;
}

/* The numbers of ranks of thresholds.def: the smallest one that holds `size`, else the largest there is. */
static int coll_ranks_for(int op, int size) {
  int best = 0;
  for (int i = 0; i < THRESHOLDS; i++) {
    const int n = coll_thresholds[i].ranks;
    if (coll_thresholds[i].op != op) continue;
    if (best == 0 || (best < size ? n > best : n >= size && n < best)) best = n;
  }
  return best;
}

/* Looked up once per op and communicator: from which sizes on which rows run. */
static void coll_choice_make(dc__choice *k, int op, int size) {
  const int ranks = coll_ranks_for(op, size);
  *k = (dc__choice){.rows = 1,
                    .meet = {INT64_MAX, INT64_MAX},
                    .row[0].algo = coll_row_named(op, "staged")}; /* every op has that one */
  for (int i = 0; i < THRESHOLDS; i++) {
    const threshold *t = &coll_thresholds[i];
    const dc__algo *row = coll_row_named(t->op, t->row);
    if (t->op != op || t->ranks != ranks || !row) continue;
    if (!row->run && !t->registered) k->meet[0] = dc__min64(k->meet[0], t->bytes);
    if (!row->run) k->meet[1] = dc__min64(k->meet[1], t->bytes);
    if (row->run && !t->registered && k->rows < DC__CHOICES)
      k->row[k->rows].bytes = t->bytes, k->row[k->rows++].algo = row;
  }
}

void dc__choices_make(dc_comm *c) {
  for (int op = 0; op < DC__CALL_OPS; op++) coll_choice_make(&c->choice[op], op, c->size);
}

/* The row with `run` for a call of so many bytes. */
static const dc__algo *coll_fitting(const dc__job *j, int64_t bytes) {
  const dc__choice *k = &j->c->choice[j->call.op];
  const dc__algo *best = k->row[0].algo;
  for (int i = 1; i < k->rows && k->row[i].bytes <= bytes; i++) best = k->row[i].algo;
  return best;
}

/* ---- DEEPC_ALGO -------------------------------------------------------------------------------------------------- */
static int coll_force_one(dc_comm *c, const char *item, size_t n) {
  bool found = false;
  for (int i = 0; i < ROWS; i++) {
    char text[64];
    snprintf(text, sizeof text, "%s=%s", dc_call_name(coll_algos[i].op), coll_algos[i].name);
    if (strlen(text) != n || memcmp(text, item, n) != 0) continue;
    c->forced[coll_algos[i].op] = (uint8_t)(i + 1);
    found = true; /* the two kinds of all_to_all have one name and the same rows */
  }
  if (found) return DC_OK;
  char known[1024];
  size_t at = 0;
  for (int i = 0; i < ROWS && at < sizeof known; i++)
    at += (size_t)snprintf(known + at, sizeof known - at, "%s%s=%s", i ? ", " : "", dc_call_name(coll_algos[i].op),
                           coll_algos[i].name);
  return DC_FAIL(DC_E_ENV, "DEEPC_ALGO: '%.*s' is not one of %s", (int)n, item, known);
}

int dc__force_algos(dc_comm *c) {
  const char *e = getenv("DEEPC_ALGO");
  while (e && *e) {
    const size_t n = strcspn(e, ",");
    if (n) DC_TRY(coll_force_one(c, e, n));
    e += n + (e[n] == ',');
  }
  return DC_OK;
}

/* ---- staging or single copy, by measurement ---------------------------------------------------------------------- */
/* Below 64 KiB, 256 KiB, 1 MiB, 4 MiB, 16 MiB, and above. */
static int coll_class_of(int64_t bytes) {
  int class = 0;
  for (int64_t end = 64 << 10; class < DC__CLASSES - 1 && bytes >= end; end *= 4) class++;
  return class;
}

/* The n-th call is a trial if it lies in one of the windows [0, W), [32, 32 + W), [128, ..), [512, ..), ...: so that a
 * choice made in a noisy moment is not for ever. */
static bool coll_in_trial(int64_t n, bool *ends) {
  int64_t begin = 0;
  for (int64_t next = 32; next <= n; next *= 4) begin = next;
  *ends = n == begin + TRIALS - 1;
  return n < begin + TRIALS;
}

/* Whether this call runs directly. Equal on all ranks: it follows from the number of calls so far, and from a word that
 * rank 0 wrote before it came to the last call, which all ranks have finished. The call after a window still runs by
 * the choice before it, which every rank has of its own. */
static bool coll_try_direct(dc_comm *c, int op, int class) {
  dc__trial *t = &c->trial[op][class];
  bool ends;
  const int64_t n = t->calls++;
  if (coll_in_trial(n, &ends)) return n & 2; /* in pairs: with a root in turns each way has both roles */
  if (n > 0 && coll_in_trial(n - 1, &ends)) return t->direct;
  return t->direct = atomic_load_explicit(&c->h->prefer_direct[op][class], memory_order_relaxed);
}

static void coll_note_time(dc_comm *c, int op, int class, bool direct, int64_t ns, bool ends) {
  dc__trial *t = &c->trial[op][class];
  if (c->rank != 0) return;
  if (t->best_ns[direct] == 0 || ns < t->best_ns[direct]) t->best_ns[direct] = ns; /* noise only adds */
  if (ends) atomic_store_explicit(&c->h->prefer_direct[op][class], t->best_ns[1] < t->best_ns[0], memory_order_relaxed);
}

/* In calls with a root some ranks are through before others have begun; a trial is timed until all are. */
static int coll_meet_again(const dc__job *j) {
  switch (j->call.op % DC__ALGO) {
  case DC_CALL_BROADCAST:
  case DC_CALL_REDUCE:
  case DC_CALL_GATHER:
  case DC_CALL_SCATTER: return dc__share(j->c, &j->call, NULL, 0, NULL);
  default: return DC_OK;
  }
}

static int coll_run_tuned(const dc__job *j, const dc__view *v, const dc__algo *staged, int64_t bytes) {
  const int class = coll_class_of(bytes), op = j->call.op;
  const int64_t start = dc__now_ns();
  bool ends;
  const bool direct = coll_try_direct(j->c, op, class), trial = coll_in_trial(j->c->trial[op][class].calls - 1, &ends);
  DC_TRY(direct ? dc__direct(j, v) : staged->run(j));
  if (!trial) return DC_OK;
  if (!direct) DC_TRY(coll_meet_again(j)); /* direct ends with a meeting */
  coll_note_time(j->c, op, class, direct, dc__now_ns() - start, ends);
  return DC_OK;
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */
static int64_t coll_larger_bytes(const dc__job *j) {
  const int64_t n = j->in_counts ? j->longest : j->count;
  return n * j->esz * (j->in_parts > j->out_parts ? j->in_parts : j->out_parts);
}

static int coll_run_large(const dc__job *j, const dc__algo *staged, bool forced) {
  dc__view v;
  DC_TRY(dc__meet(j, &v));
  if (forced && !dc__reachable(j, &v))
    return DC_FAIL(DC_E_UNSUPPORTED,
                   "DEEPC_ALGO forces direct, but the buffers are not registered and the kernel does not "
                   "let ranks read each other's memory (process_vm_readv)");
  if (forced || dc__all_mapped(j, &v)) return dc__direct(j, &v);
  return dc__reachable(j, &v) ? coll_run_tuned(j, &v, staged, coll_larger_bytes(j)) : staged->run(j);
}

static int coll_run_ranks(dc__job *j) {
  dc_comm *c = j->c;
  const int op = j->call.op, row = c->forced[op];
  const int64_t bytes = coll_larger_bytes(j);
  const dc__algo *a = row ? &coll_algos[row - 1] : coll_fitting(j, bytes);
  j->call.op += row * DC__ALGO;
  if (!a->run) return coll_run_large(j, a, true);
  const bool large = bytes >= c->choice[op].meet[c->segments > 0] && (c->single_copy || c->segments);
  return large && !row ? coll_run_large(j, a, false) : a->run(j);
}

static int coll_run_alone(const dc__job *j) {
  const int64_t count = j->in_counts ? j->in_counts[0] : j->count, bytes = count * j->esz;
  if (dc__reduces(j->call.op)) {
    const void *src = j->in;
    return dc_reduce(j->out, &src, 1, j->call.dtype, j->call.red_op, j->count);
  }
  return j->out == j->in || bytes == 0 ? DC_OK : dc_copy(j->out, j->in, bytes);
}

/* Whatever fails after the first step has begun would leave the ranks at different steps, so it breaks the group. The
 * buffers are the caller's again when the call returns: so not before the peers have let go of them. */
static int coll_settle(dc_comm *c, int rc) {
  if (!rc) return DC_OK;
  char why[DC__TEXT];
  if (!dc__broken(c)) {
    snprintf(why, sizeof why, "%s", dc_last_error());
    rc = dc__break(c, rc, "group %s: %s", c->label, why);
  }
  const int busy = dc__await_calm(c);
  if (busy < 0) return rc;
  snprintf(why, sizeof why, "%s", dc_last_error());
  return DC_FAIL(rc,
                 "%s; rank %d (pid %d) was stopped within this call and may still write into its buffers when it goes "
                 "on: don't reuse them",
                 why, c->global_rank[busy], c->h->seat[busy].pid);
}

/* `call`: j->call once more, for a caller that has it in registers: see coll_call(). */
static inline int coll_start(dc__job *j, dc_call call) {
  dc_comm *c = j->c;
  if (c->begun != c->done)
    return DC_FAIL(DC_E_STATE, "group %s: %lld exchange steps are open; finish them before a collective", c->label,
                   (long long)(c->begun - c->done));
  c->seq++;
  c->call = call;
  c->unshown = true;
  return DC_OK;
}

static int coll_end(dc_comm *c, int rc) {
  if (c->size > 1) rc = coll_settle(c, rc);
  dc__segments_unpin(c);
  dc__show(c); /* alone, or failed before the first post */
  dc__flight_end(c->flight, rc);
  return rc;
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */
static int coll_floating(int dtype) {
  return dtype == DC_F32 || dtype == DC_BF16 || dtype == DC_F16 || dtype == DC_F64;
}

static int coll_check_reduction(int dtype, int op) {
  if (op < DC_RED_SUM || op > DC_RED_BXOR)
    return DC_FAIL(DC_E_INVALID, "reduction %d: expected 0 to %d (dc_reduce_op)", op, DC_RED_BXOR);
  if (op == DC_RED_AVG && !coll_floating(dtype))
    return DC_FAIL(DC_E_DTYPE, "avg of %s: only floating types have an average", dc_dtype_name(dtype));
  if (op >= DC_RED_BAND && coll_floating(dtype))
    return DC_FAIL(DC_E_DTYPE, "bitwise reduction of %s: only integers have one", dc_dtype_name(dtype));
  return DC_OK;
}

typedef struct buffers {
  const void *in;
  void *out;
  int in_parts, out_parts; /* of ranks that have them whole */
  bool needs_in, needs_out; /* this rank's may not be NULL */
} buffers;

/* Checks the arguments and fills the job. Nothing is shared yet: a failure here is local. */
static int coll_prepare(dc__job *j, const buffers *b, int64_t count) {
  const size_t esz = dc_dtype_size(j->call.dtype);
  const int parts = b->in_parts > b->out_parts ? b->in_parts : b->out_parts;
  int64_t total;
  if (!esz) return DC_FAIL(DC_E_DTYPE, "dtype %d: expected 0 to %d (dc_dtype)", j->call.dtype, DC_DTYPE_COUNT - 1);
  if (count < 0) return DC_FAIL(DC_E_SHAPE, "count %lld is negative", (long long)count);
  if (count > 0 && ((b->needs_in && !b->in) || (b->needs_out && !b->out)))
    return DC_FAIL(DC_E_INVALID, "in or out is NULL with count %lld", (long long)count);
  if (__builtin_mul_overflow(count, (int64_t)esz * parts, &total))
    return DC_FAIL(DC_E_OVERFLOW, "count %lld overflows 64 bits of bytes", (long long)count);
  if (j->call.root < 0 || j->call.root >= j->c->size)
    return DC_FAIL(DC_E_INVALID, "root %d of %d ranks", j->call.root, j->c->size);
  j->in = b->in;
  j->out = b->out;
  j->in_parts = b->in_parts;
  j->out_parts = b->out_parts;
  j->count = count;
  j->esz = (int64_t)esz;
  return DC_OK;
}

static int coll_run(dc__job *j) { return coll_end(j->c, j->c->size == 1 ? coll_run_alone(j) : coll_run_ranks(j)); }

/* Inlined, so that `call` stays in registers and is stored twice. A structure that is copied right after its fields
 * were stored is read back in vectors, which waits until those stores have left the store buffer; in front of them
 * there is the cell of the call before, which waits for its line: together 40 of the 155 ns of a call that runs ahead.
 */
static inline __attribute__((always_inline)) int coll_call(dc_comm *c, dc_call call, const buffers *b, int64_t count,
                                                           int counter) {
  call.count = count;
  dc__job j = {.c = c, .call = call};
  int rc = coll_prepare(&j, b, count);
  if (!rc && dc__reduces(call.op)) rc = coll_check_reduction(call.dtype, call.red_op);
  if (!rc) rc = coll_start(&j, call);
  if (!rc) rc = coll_run(&j);
  if (!rc) dc__count_in(&c->counts, counter, 1);
  dc__leave(c);
  return rc;
}

int dc_barrier(dc_comm *c, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {.in_parts = 1, .out_parts = 1};
  return coll_call(c, (dc_call){.op = DC_CALL_BARRIER, .tag = tag}, &b, 0, DC_COUNTER_coll_barrier);
}

int dc_all_reduce(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {in, out, 1, 1, true, true};
  const dc_call call = {.op = DC_CALL_ALL_REDUCE, .dtype = dtype, .red_op = op, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_all_reduce);
}

int dc_reduce_to(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int root, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {in, out, 1, 1, true, c->rank == root};
  const dc_call call = {.op = DC_CALL_REDUCE, .dtype = dtype, .red_op = op, .root = root, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_reduce);
}

int dc_reduce_scatter(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {in, out, c->size, 1, true, true};
  const dc_call call = {.op = DC_CALL_REDUCE_SCATTER, .dtype = dtype, .red_op = op, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_reduce_scatter);
}

int dc_all_gather(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {in, out, 1, c->size, true, true};
  const dc_call call = {.op = DC_CALL_ALL_GATHER, .dtype = dtype, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_all_gather);
}

int dc_gather(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int root, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {in, out, 1, c->size, true, c->rank == root};
  const dc_call call = {.op = DC_CALL_GATHER, .dtype = dtype, .root = root, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_gather);
}

int dc_scatter(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int root, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {in, out, c->size, 1, c->rank == root, true};
  const dc_call call = {.op = DC_CALL_SCATTER, .dtype = dtype, .root = root, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_scatter);
}

int dc_broadcast(dc_comm *c, void *buf, int64_t count, int dtype, int root, int64_t tag) {
  DC_TRY(dc__enter(c));
  const buffers b = {buf, buf, 1, 1, true, true};
  const dc_call call = {.op = DC_CALL_BROADCAST, .dtype = dtype, .root = root, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_broadcast);
}

int dc_all_to_all(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int64_t tag) {
  DC_TRY(dc__enter(c));
  if (in == out && count > 0 && c->size > 1) {
    dc__leave(c);
    return DC_FAIL(DC_E_INVALID, "all_to_all can't work in place: in equals out");
  }
  const buffers b = {in, out, c->size, c->size, true, true};
  const dc_call call = {.op = DC_CALL_ALL_TO_ALL, .dtype = dtype, .tag = tag};
  return coll_call(c, call, &b, count, DC_COUNTER_coll_all_to_all);
}

/* ---- blocks of any sizes ----------------------------------------------------------------------------------------- */
typedef struct blocks {
  int64_t sum_in, sum_out;
  const int64_t *theirs[DC_COMM_MAX_RANKS];
} blocks;

static int coll_check_counts(const dc__job *j, blocks *b) {
  const int n = j->c->size;
  if (!j->in_counts || !j->out_counts) return DC_FAIL(DC_E_INVALID, "in_counts or out_counts is NULL");
  for (int r = 0; r < n; r++) {
    if (j->in_counts[r] < 0 || j->out_counts[r] < 0)
      return DC_FAIL(DC_E_SHAPE, "in_counts[%d] = %lld, out_counts[%d] = %lld: counts can't be negative", r,
                     (long long)j->in_counts[r], r, (long long)j->out_counts[r]);
    if (__builtin_add_overflow(b->sum_in, j->in_counts[r], &b->sum_in) ||
        __builtin_add_overflow(b->sum_out, j->out_counts[r], &b->sum_out) || b->sum_in > INT64_MAX / 16 ||
        b->sum_out > INT64_MAX / 16)
      return DC_FAIL(DC_E_OVERFLOW, "the counts of all_to_all overflow 64 bits of bytes");
  }
  if ((b->sum_in && !j->in) || (b->sum_out && !j->out)) return DC_FAIL(DC_E_INVALID, "in or out is NULL");
  if (n == 1 && j->in_counts[0] != j->out_counts[0]) /* with more ranks coll_compare_counts() sees it */
    return DC_FAIL(DC_E_MISMATCH,
                   "group %s: all_to_all(%s): the only rank sends %lld elements to itself and expects %lld",
                   j->c->label, dc_dtype_name(j->call.dtype), (long long)j->in_counts[0], (long long)j->out_counts[0]);
  if (j->in == j->out && b->sum_in && n > 1)
    return DC_FAIL(DC_E_INVALID, "all_to_all can't work in place: in equals out");
  if (j->c->slot_bytes < 2 * n * (int64_t)sizeof(int64_t))
    return DC_FAIL(DC_E_UNSUPPORTED, "all_to_allv of %d ranks needs slots of %lld bytes, they have %lld", n,
                   (long long)(2 * n * (int64_t)sizeof(int64_t)), (long long)j->c->slot_bytes);
  return DC_OK;
}

static int coll_counts_differ(const dc__job *j, int64_t step, int r, int k, int64_t given, int64_t taken) {
  const dc_comm *c = j->c;
  dc__text giver = {.n = 0}, taker = {.n = 0};
  char where[DC__WHERE];
  dc__where_text(c->where, where);
  text_add_rank(&giver, c, r);
  text_add(&giver, " called ");
  dc__tell_step(&giver, c, r, step);
  text_add_rank(&taker, c, k);
  text_add(&taker, " called ");
  dc__tell_step(&taker, c, k, step);
  return DC_FAIL(DC_E_MISMATCH,
                 "all_to_all(%s) [call %lld%s%s]: rank %d sends %lld elements to rank %d, which expects %lld: %s; %s",
                 dc_dtype_name(j->call.dtype), (long long)c->seq, where[0] ? " at " : "", where, c->global_rank[r],
                 (long long)given, c->global_rank[k], (long long)taken, giver.s, taker.s);
}

/* What rank r gives must be what rank k takes, for every pair: all ranks check all pairs, so all see the same mistake.
 */
static int coll_compare_counts(const dc__job *j, int64_t step, int64_t *all, int64_t *longest) {
  const dc_comm *c = j->c;
  const int n = c->size;
  *longest = 0;
  for (int r = 0; r < n; r++) {
    for (int k = 0; k < n; k++) {
      const int64_t given = all[r * 2 * n + k], taken = all[k * 2 * n + n + r];
      if (given > *longest) *longest = given;
      if (given != taken) return coll_counts_differ(j, step, r, k, given, taken);
    }
  }
  return DC_OK;
}

static int coll_exchange_counts(dc__job *j, int64_t *all) {
  dc_comm *c = j->c;
  int64_t mine[2 * DC_COMM_MAX_RANKS];
  const size_t row = sizeof(int64_t) * (size_t)c->size;
  memcpy(mine, j->in_counts, row);
  memcpy(mine + c->size, j->out_counts, row);
  DC_TRY(dc__share(c, &j->call, mine, 2 * (int64_t)row, all));
  return coll_compare_counts(j, c->done - 1, all, &j->longest);
}

static int coll_run_blocks(dc__job *j, blocks *b) {
  dc_comm *c = j->c;
  int64_t *all = malloc(2 * sizeof(int64_t) * (size_t)c->size * (size_t)c->size);
  if (!all) return DC_FAIL(DC_E_NOMEM, "the counts of %d ranks", c->size);
  int rc = coll_start(j, j->call);
  if (rc) goto out;
  dc_call shown = j->call; /* ranks give different counts, so the call they compare has none */
  for (int r = 0; r < c->size; r++) shown.count += j->in_counts[r];
  c->unshown = false;
  c->flight = dc__flight_begin(c, &shown);
  if (c->size > 1) rc = coll_exchange_counts(j, all);
  for (int r = 0; r < c->size; r++) b->theirs[r] = &all[r * 2 * c->size];
  j->theirs = b->theirs;
  if (!rc) rc = c->size == 1 ? coll_run_alone(j) : coll_run_ranks(j);
  rc = coll_end(c, rc);
out:
  free(all);
  return rc;
}

int dc_all_to_allv(dc_comm *c, const void *in, const int64_t *in_counts, void *out, const int64_t *out_counts,
                   int dtype, int64_t tag) {
  DC_TRY(dc__enter(c));
  dc__job j = {.c = c,
               .in = in,
               .out = out,
               .esz = (int64_t)dc_dtype_size(dtype),
               .in_parts = c->size,
               .out_parts = c->size,
               .in_counts = in_counts,
               .out_counts = out_counts,
               .call = {.op = DC_CALL_ALL_TO_ALLV, .dtype = dtype, .tag = tag}};
  blocks b = {0};
  int rc = j.esz ? coll_check_counts(&j, &b)
                 : DC_FAIL(DC_E_DTYPE, "dtype %d: expected 0 to %d (dc_dtype)", dtype, DC_DTYPE_COUNT - 1);
  if (!rc) rc = coll_run_blocks(&j, &b);
  if (!rc) dc__count_in(&c->counts, DC_COUNTER_coll_all_to_all, 1);
  dc__leave(c);
  return rc;
}
