/* comm_fault.c: storms of faults against comm/: ranks that die at any moment, and ranks that make other calls than the
 * rest.
 *
 *   comm_fault kills SEED N      cases SEED .. SEED + N - 1; every survivor must name the dead rank, its pid and the
 *                                call, and what calls that succeeded before gave must be right
 *   comm_fault desyncs SEED N    the same; every rank must get DC_E_MISMATCH with a text that names both calls
 *   comm_fault races SEED N      the same; during the calls other threads free a segment, poll requests, fork, and
 * abort at last. Nothing may crash, and nothing may be written into a buffer after its failed call has returned
 *
 * A case follows from its seed (but for the moment at which a death meets the calls), so a failing one is repeated by
 * `comm_fault MODE SEED 1`. Afterwards nothing may be left: see leftovers(). The last line is a JSON summary; exit code
 * 0: all as promised.
 *
 * Ranks are forks of this process, which makes no call of the library itself. They report through shared memory. Times
 * are measured (from the death to each survivor's error), but only a hang fails: other work on the machine may delay
 * anything. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"
#include "comm/flight.h"
#include "comm/p2p.h"

enum { MAX_RANKS = 4, MAX_CALLS = 24, HALF = (1 << 20) + (64 << 10), BUFFER = 2 * HALF /* in and out */, TEXT = 2400 };
#define LABEL "storm_pg"
#define HANG_S 20.0       /* generous: the rule is tens of milliseconds */
#define TIMEOUT_MS 15000  /* below HANG_S, so that a hang comes with the library's own account of it */
#define LAST_TAG 0x5eed

/* ---- randomness -------------------------------------------------------------------------------------------------- */
typedef struct rng {
  uint64_t s;
} rng;

static uint64_t next(rng *g) { /* splitmix64 */
  uint64_t z = g->s += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}
static int below(rng *g, int n) { return (int)(next(g) % (uint64_t)n); }
static rng rng_of(uint64_t seed, uint64_t what) {
  rng g = {seed * 0xd1342543de82ef95u + what * 0x2545f4914f6cdd1du};
  next(&g);
  return g;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- a case ------------------------------------------------------------------------------------------------------ */
typedef struct call {
  int op, dtype, red, root, line; /* DC_CALL_SEND stands for the pair: src sends, dst receives, the others do nothing */
  int src, dst, send_dtype;
  int64_t count, send_count, tag;
  bool registered, blocking; /* blocking: dc_send and dc_recv, else their non-blocking forms */
} call;

enum { DEATH_KILL, DEATH_SEGV, DEATH_EXIT, DEATHS };
static const char *const death_name[] = {"SIGKILL", "SIGSEGV", "_exit(3)"};
static const char *const death_text[] = {"killed by signal 9", "killed by signal 11", "exited with code 3"};

enum { OTHER_OP, OTHER_COUNT, OTHER_DTYPE, OTHER_ROOT, OTHER_RED, OTHER_TAG, LEFT_OUT, SWAPPED, OTHER_PAIR, KINDS };
static const char *const kind_name[] = {"op",  "count",    "dtype",   "root",     "reduction",
                                        "tag", "left_out", "swapped", "send_recv"};

typedef struct plan {
  uint64_t seed;
  int size, who, slots, names; /* who: dies, or differs; global rank names are rank + names */
  int64_t slot_bytes;
  bool segment, reap_late;
  int frees, forks, polls; /* races: ranks whose threads do that; -1: none */
  int death, moment_us;
  /* desyncs: a[]: what the others call; b[]: what `who` calls; both end with a barrier */
  int kind, at, na, nb;
  call a[MAX_CALLS + 2], b[MAX_CALLS + 2];
} plan;

static const int collectives[] = {DC_CALL_BARRIER,   DC_CALL_ALL_REDUCE, DC_CALL_REDUCE_SCATTER, DC_CALL_ALL_GATHER,
                                  DC_CALL_BROADCAST, DC_CALL_ALL_TO_ALL, DC_CALL_ALL_TO_ALLV,    DC_CALL_REDUCE,
                                  DC_CALL_GATHER,    DC_CALL_SCATTER};
enum { OPS = sizeof collectives / sizeof *collectives };
static const int dtypes[] = {DC_F32, DC_I32, DC_BF16, DC_F16, DC_I64, DC_F64, DC_U8, DC_I8};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };
static const int reds[] = {DC_RED_SUM, DC_RED_MIN, DC_RED_MAX, DC_RED_PROD}; /* of every dtype */

static bool reduces(int op) { return op == DC_CALL_ALL_REDUCE || op == DC_CALL_REDUCE_SCATTER || op == DC_CALL_REDUCE; }
static bool rooted(int op) {
  return op == DC_CALL_BROADCAST || op == DC_CALL_REDUCE || op == DC_CALL_GATHER || op == DC_CALL_SCATTER;
}
static bool divided(int op) {
  return op == DC_CALL_REDUCE_SCATTER || op == DC_CALL_ALL_GATHER || op == DC_CALL_ALL_TO_ALL ||
         op == DC_CALL_ALL_TO_ALLV || op == DC_CALL_GATHER || op == DC_CALL_SCATTER;
}

/* Around the sizes at which the ways of the algorithm table, the small slots and eager messages change. */
static int64_t bytes_random(rng *g) {
  static const int64_t around[] = {8, 8, 16, 4096, 4096, 8192, 64 << 10, 64 << 10, 128 << 10, 300 << 10, 1 << 20};
  return around[below(g, sizeof around / sizeof *around)];
}

static int64_t count_for(int op, int dtype, int size, int64_t bytes) {
  const int64_t n = bytes / (int64_t)dc_dtype_size(dtype) / (divided(op) ? size : 1);
  return n > 0 ? n : 1;
}

/* The i-th call of the ranks that do as they should. */
static call call_make(const plan *p, rng *g, int i, bool pairs) {
  call k = {.line = i + 1, .op = collectives[below(g, OPS)]};
  if (pairs && below(g, 6) == 0) k.op = DC_CALL_SEND;
  k.dtype = k.send_dtype = below(g, 3) ? dtypes[below(g, DTYPES)] : DC_I32;
  const int64_t bytes = bytes_random(g);
  k.count = count_for(k.op, k.dtype, p->size, bytes) + below(g, 3) - 1;
  if (k.count < 1) k.count = 1;
  k.red = reduces(k.op) ? reds[below(g, 4)] : 0;
  k.root = rooted(k.op) ? below(g, p->size) : 0;
  k.tag = below(g, 2) ? below(g, 1000) : 0;
  k.registered = p->segment && below(g, 2);
  k.blocking = below(g, 2);
  k.src = below(g, p->size);
  k.dst = (k.src + 1 + below(g, p->size - 1)) % p->size;
  if (k.op == DC_CALL_BARRIER) k.count = 0, k.dtype = DC_F32;
  k.send_count = k.count;
  return k;
}

static plan plan_make(uint64_t seed) {
  rng g = rng_of(seed, 1);
  static const int64_t slot_bytes[] = {4096, 16384, 65536, 1 << 20};
  plan p = {.seed = seed,
            .size = 2 + below(&g, MAX_RANKS - 1),
            .slots = 2 + below(&g, 3),
            .slot_bytes = slot_bytes[below(&g, 4)]};
  p.who = below(&g, p.size);
  p.names = below(&g, 3) ? 0 : 10;
  p.segment = below(&g, 2);
  p.reap_late = below(&g, 2);
  p.death = below(&g, DEATHS);
  p.moment_us = 1 + below(&g, below(&g, 4) ? 4000 : 20000);
  return p;
}

/* ---- what the ranks tell the parent ------------------------------------------------------------------------------ */
typedef struct report {
  _Atomic int ready, over; /* over: 1 fine, 2 not as promised (why) */
  _Atomic int64_t died_ns, error_ns;
  int status, calls;
  char text[TEXT], why[TEXT];
} report;

static report *reports; /* [MAX_RANKS], shared */

static int64_t now_ns(void) { return (int64_t)(now() * 1e9); }

__attribute__((format(printf, 2, 3), noreturn)) static void wrong(report *r, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(r->why, sizeof r->why, fmt, ap);
  va_end(ap);
  atomic_store(&r->over, 2);
  _exit(1);
}

/* ---- a rank ------------------------------------------------------------------------------------------------------ */
typedef struct rank_state {
  const plan *p;
  int rank;
  dc_comm *c;
  dc_segment *segment;
  char *private, *shared;
  report *r;
} rank_state;

static void where_of(char s[64], int rank, int line) { snprintf(s, 64, "rank%d.py:%d", rank, line); }

static int make_blocks(const rank_state *s, const call *k, bool registered) {
  char *in = registered ? s->shared : s->private, *out = in + HALF;
  int64_t give[MAX_RANKS], take[MAX_RANKS];
  /* what rank a gives b, by both alike: not equal for all pairs */
  for (int o = 0; o < s->p->size; o++) {
    give[o] = k->count + (s->rank * 2 + o) % 3;
    take[o] = k->count + (o * 2 + s->rank) % 3;
  }
  return dc_all_to_allv(s->c, in, give, out, take, k->dtype, k->tag);
}

/* The blocking forms have no caller in their texts: they may run in other threads than collectives. */
static int make_message(const rank_state *s, const call *k, char *in, char *out) {
  if (s->rank == k->src) return dc_send(s->c, in, k->send_count, k->send_dtype, k->dst, k->tag);
  return dc_recv(s->c, out, k->count, k->dtype, k->src, k->tag, NULL);
}

static int make_request(const rank_state *s, const call *k, char *in, char *out, const char *where) {
  dc_request *q = NULL;
  int rc = s->rank == k->src ? dc_isend(s->c, in, k->send_count, k->send_dtype, k->dst, k->tag, where, &q)
                             : dc_irecv(s->c, out, k->count, k->dtype, k->src, k->tag, where, &q);
  if (!rc) rc = dc_request_wait(q, 0);
  if (!rc) rc = dc_request_free(q);
  return rc; /* the request of a broken group goes with the process */
}

static int make(const rank_state *s, const call *k) {
  dc_comm *c = s->c;
  char where[64], *in = k->registered ? s->shared : s->private, *out = in + HALF;
  where_of(where, s->rank, k->line);
  dc_comm_set_caller(c, where);
  switch (k->op) {
  case DC_CALL_BARRIER: return dc_barrier(c, k->tag);
  case DC_CALL_ALL_REDUCE: return dc_all_reduce(c, in, out, k->count, k->dtype, k->red, k->tag);
  case DC_CALL_REDUCE_SCATTER: return dc_reduce_scatter(c, in, out, k->count, k->dtype, k->red, k->tag);
  case DC_CALL_ALL_GATHER: return dc_all_gather(c, in, out, k->count, k->dtype, k->tag);
  case DC_CALL_BROADCAST: return dc_broadcast(c, in, k->count, k->dtype, k->root, k->tag);
  case DC_CALL_ALL_TO_ALL: return dc_all_to_all(c, in, out, k->count, k->dtype, k->tag);
  case DC_CALL_ALL_TO_ALLV: return make_blocks(s, k, k->registered);
  case DC_CALL_REDUCE: return dc_reduce_to(c, in, out, k->count, k->dtype, k->red, k->root, k->tag);
  case DC_CALL_GATHER: return dc_gather(c, in, out, k->count, k->dtype, k->root, k->tag);
  case DC_CALL_SCATTER: return dc_scatter(c, in, out, k->count, k->dtype, k->root, k->tag);
  default: break;
  }
  if (s->rank != k->src && s->rank != k->dst) return DC_OK;
  return k->blocking ? make_message(s, k, in, out) : make_request(s, k, in, out, where);
}

static void open_all(rank_state *s, const char *address) {
  const plan *p = s->p;
  int32_t names[MAX_RANKS];
  for (int r = 0; r < p->size; r++) names[r] = r + p->names;
  dc_comm_config k = {.struct_size = sizeof k,
                      .rank = s->rank,
                      .size = p->size,
                      .address = address,
                      .label = LABEL,
                      .global_rank = names,
                      .timeout_ms = TIMEOUT_MS,
                      .slot_bytes = p->slot_bytes,
                      .slots = p->slots};
  if (dc_comm_open(&k, &s->c)) wrong(s->r, "dc_comm_open: %s", dc_last_error());
  void *base = NULL;
  if (p->segment && dc_segment_create(s->c, (int64_t)BUFFER * p->size, &s->segment, &base))
    wrong(s->r, "dc_segment_create: %s", dc_last_error());
  if (base) s->shared = (char *)base + (int64_t)BUFFER * s->rank;
  s->private = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (s->private == MAP_FAILED) wrong(s->r, "mmap: %s", strerror(errno));
  if (dc_barrier(s->c, 1)) wrong(s->r, "the first barrier: %s", dc_last_error()); /* now all ranks have opened */
  atomic_store(&s->r->ready, 1);
}

/* Takes the error down; it must stay the group's error, and leaving must work. */
static void finish(rank_state *s, int rc) {
  report *r = s->r;
  atomic_store(&r->error_ns, now_ns());
  r->status = rc;
  snprintf(r->text, sizeof r->text, "%s", dc_last_error());
  const int again = dc_barrier(s->c, 3);
  if (again != rc) wrong(r, "%s (%s), but the next call gave %s", dc_status_name(rc), r->text, dc_status_name(again));
  char later[TEXT];
  snprintf(later, sizeof later, "%s", dc_comm_error(s->c));
  if (!later[0] || strncmp(later, r->text, strlen(later)))
    wrong(r, "the call said '%s', but the group's error is '%s'", r->text, later);
  if (dc_comm_close(s->c)) wrong(r, "dc_comm_close: %s", dc_last_error());
  if (dc_segment_free(s->segment)) wrong(r, "dc_segment_free: %s", dc_last_error());
  atomic_store(&r->over, 1);
  _exit(0);
}

static struct {
  report *r;
  int death;
} my_death;

static void die(int signal_number) {
  (void)signal_number;
  atomic_store(&my_death.r->died_ns, now_ns());
  if (my_death.death == DEATH_EXIT) _exit(3);
  raise(SIGSEGV); /* not caught: ends the process when the handler is left, or at once */
  struct timespec t = {.tv_sec = 30};
  nanosleep(&t, NULL);
}

static void arm(rank_state *s) {
  if (s->rank != s->p->who || s->p->death == DEATH_KILL) return;
  my_death.r = s->r;
  my_death.death = s->p->death;
  signal(SIGSEGV, SIG_DFL);
  struct sigaction a = {.sa_handler = die, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &a, NULL);
  struct itimerval t = {.it_value = {.tv_usec = s->p->moment_us}};
  setitimer(ITIMER_REAL, &t, NULL);
}

/* ---- what successful calls must give ----------------------------------------------------------------------------- */
/* Calls of int32 are checked: element e of what rank r puts into the call at `line`. */
static int32_t element(int r, int line, int64_t e) { return (r + 1) * (int32_t)(e % 1000 + 1) + line; }

static int32_t reduced(const plan *p, const call *k, int64_t e) {
  uint32_t x = (uint32_t)element(0, k->line, e);
  for (int r = 1; r < p->size; r++) {
    const int32_t y = element(r, k->line, e);
    if (k->red == DC_RED_SUM) x += (uint32_t)y;
    else if (k->red == DC_RED_PROD) x *= (uint32_t)y;
    else if ((k->red == DC_RED_MIN) == (y < (int32_t)x)) x = (uint32_t)y;
  }
  return (int32_t)x;
}

/* Of one block of the output: which elements of rank `from` (or of the reduction) it must hold. */
static void check_block(const rank_state *s, const call *k, const int32_t *out, int64_t n, int from, int64_t first) {
  for (int64_t e = 0; e < n; e++) {
    const int32_t want = reduces(k->op) ? reduced(s->p, k, first + e) : element(from, k->line, first + e);
    if (out[e] != want)
      wrong(s->r,
            "%s(count %lld, reduction %d, root %d) of line %d succeeded, but element %lld of rank %d's block is %d "
            "instead of %d",
            dc_call_name(k->op), (long long)k->count, k->red, k->root, k->line, (long long)e, from, out[e], want);
  }
}

static void check_blocks(const rank_state *s, const call *k, const int32_t *out) {
  for (int j = 0; j < s->p->size; j++) {
    int64_t n = k->count, first = k->op == DC_CALL_ALL_TO_ALL ? s->rank * n : 0;
    if (k->op == DC_CALL_ALL_TO_ALLV) {
      n += (j * 2 + s->rank) % 3;
      for (int o = 0; o < s->rank; o++) first += k->count + (j * 2 + o) % 3;
    }
    check_block(s, k, out, n, j, first);
    out += n;
  }
}

static bool checked(const call *k) { return k->dtype == DC_I32 && k->op != DC_CALL_BARRIER; }

static void fill(const rank_state *s, const call *k) {
  int32_t *in = (int32_t *)(k->registered ? s->shared : s->private);
  const int64_t n = (k->count + 2) * (divided(k->op) ? s->p->size : 1);
  for (int64_t e = 0; e < n; e++) in[e] = element(s->rank, k->line, e);
}

static void check(const rank_state *s, const call *k) {
  const char *in = k->registered ? s->shared : s->private;
  const int32_t *out = (const int32_t *)(in + HALF);
  switch (k->op) {
  case DC_CALL_ALL_REDUCE: check_block(s, k, out, k->count, 0, 0); break;
  case DC_CALL_REDUCE_SCATTER: check_block(s, k, out, k->count, 0, s->rank * k->count); break;
  case DC_CALL_BROADCAST: check_block(s, k, (const int32_t *)in, k->count, k->root, 0); break;
  case DC_CALL_SCATTER: check_block(s, k, out, k->count, k->root, s->rank * k->count); break;
  case DC_CALL_REDUCE:
    if (s->rank == k->root) check_block(s, k, out, k->count, 0, 0);
    break;
  case DC_CALL_GATHER:
    if (s->rank == k->root) check_blocks(s, k, out);
    break;
  case DC_CALL_SEND:
    if (s->rank == k->dst) check_block(s, k, out, k->count, k->src, 0);
    break;
  default: check_blocks(s, k, out);
  }
}

static void rank_killed(rank_state *s) {
  rng g = rng_of(s->p->seed, 2);
  arm(s);
  for (int i = 0;; i++) {
    const call k = call_make(s->p, &g, i, true);
    if (checked(&k)) fill(s, &k);
    const int rc = make(s, &k);
    s->r->calls = i;
    if (rc) finish(s, rc);
    if (checked(&k)) check(s, &k);
  }
}

static void rank_desynced(rank_state *s) {
  const plan *p = s->p;
  const call *list = s->rank == p->who ? p->b : p->a;
  const int n = s->rank == p->who ? p->nb : p->na;
  for (int i = 0; i < n; i++) {
    const int rc = make(s, &list[i]);
    s->r->calls = i;
    if (rc) finish(s, rc);
  }
  wrong(s->r, "all calls were taken for equal");
}

/* ---- running a case ---------------------------------------------------------------------------------------------- */
typedef struct run {
  const plan *p;
  pid_t pid[MAX_RANKS];
  int status[MAX_RANKS];
  bool reaped[MAX_RANKS];
  int64_t died_ns;
  char why[2 * TEXT];
} run;

static void fork_ranks(run *x, const char *address, void (*body)(rank_state *)) {
  for (int r = 0; r < x->p->size; r++) {
    memset(&reports[r], 0, sizeof reports[r]);
    fflush(NULL);
    x->pid[r] = fork();
    if (x->pid[r]) continue;
    alarm(60); /* should the parent end before us */
    dc_set_num_threads(1);
    rank_state s = {.p = x->p, .rank = r, .r = &reports[r]};
    open_all(&s, address);
    alarm(0);
    body(&s);
    _exit(9);
  }
}

static void reap(run *x, int r) {
  if (!x->reaped[r] && waitpid(x->pid[r], &x->status[r], WNOHANG) == x->pid[r]) x->reaped[r] = true;
}

static bool all_ready(const run *x) {
  for (int r = 0; r < x->p->size; r++)
    if (!atomic_load(&reports[r].ready) && !atomic_load(&reports[r].over)) return false;
  return true;
}

/* True when every rank whose end is waited for has ended. A victim that is reaped late stays a zombie meanwhile. */
static bool all_ended(run *x, int not_yet) {
  bool all = true;
  for (int r = 0; r < x->p->size; r++) {
    if (r == not_yet) continue;
    reap(x, r);
    all = all && x->reaped[r];
  }
  return all;
}

static void end_all(run *x) {
  for (int r = 0; r < x->p->size; r++)
    if (!x->reaped[r]) kill(x->pid[r], SIGKILL);
  for (int r = 0; r < x->p->size; r++)
    if (!x->reaped[r]) waitpid(x->pid[r], &x->status[r], 0), x->reaped[r] = true;
}

__attribute__((format(printf, 2, 3))) static void blame(run *x, const char *fmt, ...) {
  if (x->why[0]) return; /* the first reason */
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(x->why, sizeof x->why, fmt, ap);
  va_end(ap);
}

static void wait_ready(run *x) {
  for (double end = now() + 60; !all_ready(x); usleep(100))
    if (now() > end) {
      blame(x, "the ranks were not ready within 60 s");
      return;
    }
}

static void wait_end(run *x, int not_yet) {
  for (double end = now() + HANG_S; !all_ended(x, not_yet); usleep(300)) {
    if (now() < end) continue;
    for (int r = 0; r < x->p->size; r++)
      if (r != not_yet && !x->reaped[r])
        blame(x, "rank %d hangs: no end within %.0f s, after %d calls", r, HANG_S, reports[r].calls);
    return;
  }
}

/* ---- the promised texts ------------------------------------------------------------------------------------------ */
static void has(run *x, int r, const char *part) {
  if (!strstr(reports[r].text, part)) blame(x, "rank %d: the error lacks '%s': %s", r, part, reports[r].text);
}

static void rank_name(char s[64], const plan *p, int r) {
  if (p->names) snprintf(s, 64, "rank %d (%d in the group)", r + p->names, r);
  else snprintf(s, 64, "rank %d", r);
}

static bool fine_report(run *x, int r, int status) {
  const report *t = &reports[r];
  if (atomic_load(&t->over) == 2) blame(x, "rank %d: %s", r, t->why);
  else if (atomic_load(&t->over) != 1) blame(x, "rank %d ended without a report, wait status %d", r, x->status[r]);
  else if (t->status != status) blame(x, "rank %d got %s: %s", r, dc_status_name(t->status), t->text);
  return !x->why[0];
}

static void check_survivor(run *x, int r) {
  const plan *p = x->p;
  if (!fine_report(x, r, DC_E_PEER_DIED)) return;
  char who[64], dead[128];
  rank_name(who, p, p->who);
  snprintf(dead, sizeof dead, "%s (pid %d) died", who, (int)x->pid[p->who]);
  has(x, r, "group " LABEL ": ");
  has(x, r, dead);
  has(x, r, " waits for it in ");
  if (p->reap_late) has(x, r, death_text[p->death]);
  /* the call: "name(..) [call 12 at rank0.py:9]"; all see the text of the one who found out */
  const char *at = strstr(reports[r].text, " waits for it in "), *call = at ? strstr(at, "call ") : NULL;
  int rank = -1, line = 0;
  unsigned long long number = 0;
  const int got = call ? sscanf(call, "call %llu at rank%d.py:%d]", &number, &rank, &line) : 0;
  const bool blocking = got == 1 && call[-1] == ' ' && strncmp(call - 8, "message ", 8) == 0;
  if (!blocking && (got != 3 || rank == p->who || rank >= p->size))
    blame(x, "rank %d: the error does not name a survivor's call: %s", r, reports[r].text);
}

static void check_victim(run *x) {
  const plan *p = x->p;
  const int s = x->status[p->who];
  const bool as_planned = p->death == DEATH_EXIT
                              ? WIFEXITED(s) && WEXITSTATUS(s) == 3
                              : WIFSIGNALED(s) && WTERMSIG(s) == (p->death == DEATH_KILL ? SIGKILL : SIGSEGV);
  if (!as_planned)
    blame(x, "rank %d should have died by %s; its wait status is %d: %s", p->who, death_name[p->death], s,
          reports[p->who].why);
}

static void address_of(char s[90], uint64_t seed) {
  static int count;
  snprintf(s, 90, "deepc-storm-%d-%llu-%d", (int)getpid(), (unsigned long long)seed, count++);
}

/* ---- kills ------------------------------------------------------------------------------------------------------- */
static double *times; /* milliseconds from a death to a survivor's error */
static int ntimes;
static double slowest_ms;
static uint64_t slowest_seed;

static void kill_now(run *x) {
  usleep((useconds_t)x->p->moment_us);
  atomic_store(&reports[x->p->who].died_ns, now_ns());
  kill(x->pid[x->p->who], SIGKILL);
}

static void note_times(const run *x) {
  const int64_t died = atomic_load(&reports[x->p->who].died_ns);
  for (int r = 0; r < x->p->size; r++) {
    const int64_t error = atomic_load(&reports[r].error_ns);
    if (r == x->p->who || !died || !error) continue;
    const double ms = 1e-6 * (double)(error - died);
    times[ntimes++] = ms;
    if (ms > slowest_ms) slowest_ms = ms, slowest_seed = x->p->seed;
  }
}

static void case_killed(run *x, const char *address) {
  const plan *p = x->p;
  fork_ranks(x, address, rank_killed);
  wait_ready(x);
  if (p->death == DEATH_KILL && !x->why[0]) kill_now(x);
  wait_end(x, p->reap_late ? p->who : -1);
  if (x->why[0]) {
    end_all(x);
    return;
  }
  if (p->reap_late) waitpid(x->pid[p->who], &x->status[p->who], 0), x->reaped[p->who] = true;
  check_victim(x);
  for (int r = 0; r < p->size && !x->why[0]; r++)
    if (r != p->who) check_survivor(x, r);
  note_times(x);
}

/* ---- desyncs ----------------------------------------------------------------------------------------------------- */
static bool same(const call *a, const call *b) {
  return a->op == b->op && a->dtype == b->dtype && a->red == b->red && a->root == b->root && a->tag == b->tag &&
         a->src == b->src && a->dst == b->dst && a->send_count == b->send_count && a->send_dtype == b->send_dtype &&
         a->count == b->count;
}

static int other_of(rng *g, const int *of, int n, int than, bool no_larger) {
  for (;;) {
    const int x = of[below(g, n)];
    if (x != than && !(no_larger && dc_dtype_size(x) > dc_dtype_size(than))) return x;
  }
}

/* Makes `k` another call than it was; false if it has no such part. */
static bool differ(const plan *p, rng *g, call *k, int kind) {
  switch (kind) {
  case OTHER_OP:
    if (k->op == DC_CALL_BARRIER) k->count = 2;
    k->op = other_of(g, collectives, OPS, k->op, false);
    if (divided(k->op)) k->count = k->count / p->size + 1; /* fits the buffers */
    if (k->op == DC_CALL_BARRIER) k->count = 0, k->dtype = DC_F32;
    k->red = reduces(k->op) ? k->red : 0;
    k->root = rooted(k->op) ? k->root : 0;
    return true;
  case OTHER_COUNT: k->count += k->count > 1 && below(g, 2) ? -1 : 1 + below(g, 40); return k->op != DC_CALL_BARRIER;
  case OTHER_DTYPE: k->dtype = other_of(g, dtypes, DTYPES, k->dtype, true); return k->op != DC_CALL_BARRIER;
  case OTHER_ROOT: k->root = (k->root + 1 + below(g, p->size - 1)) % p->size; return rooted(k->op);
  case OTHER_RED: k->red = other_of(g, reds, 4, k->red, false); return reduces(k->op);
  case OTHER_TAG: k->tag += 1 + below(g, 5); return true;
  default: return true;
  }
}

/* A receive that differs from its send. */
static void differ_pair(const plan *p, rng *g, call *k) {
  call both = *k;
  const int kind = below(g, 2) ? OTHER_COUNT : OTHER_DTYPE;
  differ(p, g, &both, kind);
  if (p->who == k->src) k->send_count = both.count, k->send_dtype = both.dtype;
  else k->count = both.count, k->dtype = both.dtype;
}

/* The difference. Messages come only before it: a rank that waits for a message while the others wait in a collective
 * is a time-out, not a mismatch, as nothing tells that the message will not come. */
static void plan_desync(plan *p) {
  rng g = rng_of(p->seed, 3);
  const int n = 2 + below(&g, MAX_CALLS - 2);
  p->kind = below(&g, KINDS);
  p->at = below(&g, p->kind == SWAPPED ? n - 1 : n);
  for (int i = 0; i < n; i++) p->a[i] = call_make(p, &g, i, i < p->at);
  call mine = p->a[p->at];
  if (p->kind == OTHER_PAIR) {
    do mine = call_make(p, &g, p->at, true);
    while (mine.op != DC_CALL_SEND || (mine.src != p->who && mine.dst != p->who));
    p->a[p->at] = mine;
    differ_pair(p, &g, &mine);
  } else {
    while (!differ(p, &g, &mine, p->kind)) mine = p->a[p->at] = call_make(p, &g, p->at, false);
  }
  p->na = p->nb = n;
  memcpy(p->b, p->a, sizeof p->a);
  if (p->kind == LEFT_OUT) memmove(&p->b[p->at], &p->a[p->at + 1], sizeof(call) * (size_t)(--p->nb - p->at));
  else if (p->kind == SWAPPED) p->b[p->at] = p->a[p->at + 1], p->b[p->at + 1] = p->a[p->at];
  else p->b[p->at] = mine;
  const call last = {.op = DC_CALL_BARRIER, .dtype = DC_F32, .tag = LAST_TAG, .line = n + 1};
  p->a[p->na++] = last;
  p->b[p->nb++] = last;
  if (p->kind == LEFT_OUT)
    p->b[p->nb++] = (call){.op = DC_CALL_BARRIER, .dtype = DC_F32, .tag = LAST_TAG + 1, .line = n + 2};
}

/* The first call that differs; -1: swapped ones that were equal. */
static int first_difference(const plan *p) {
  for (int i = 0; i < p->na; i++)
    if (!same(&p->a[i], &p->b[i])) return i;
  return -1;
}

static const char *red_text(int red) {
  return red == DC_RED_SUM ? "sum" : red == DC_RED_MIN ? "min" : red == DC_RED_MAX ? "max" : "prod";
}

/* "all_reduce(fp32, count 16, sum, tag 77) [call 2 at rank1.py:2]" up to the rank */
static void expect_call(char *s, size_t room, const plan *p, const call *k, int i) {
  int number = 1 + (p->segment ? 1 : 0); /* what open_all() called */
  for (int j = 0; j <= i; j++) number += p->a[j].op != DC_CALL_SEND;
  size_t n = (size_t)snprintf(s, room, "%s(", dc_call_name(k->op));
  if (k->op != DC_CALL_BARRIER) n += (size_t)snprintf(s + n, room - n, "%s", dc_dtype_name(k->dtype));
  if (k->op != DC_CALL_BARRIER && k->op != DC_CALL_ALL_TO_ALLV)
    n += (size_t)snprintf(s + n, room - n, ", count %lld", (long long)k->count);
  if (reduces(k->op)) n += (size_t)snprintf(s + n, room - n, ", %s", red_text(k->red));
  if (rooted(k->op)) n += (size_t)snprintf(s + n, room - n, ", root %d", k->root);
  if (k->tag)
    n += (size_t)snprintf(s + n, room - n, "%stag %lld", k->op == DC_CALL_BARRIER ? "" : ", ", (long long)k->tag);
  snprintf(s + n, room - n, ") [call %d at rank", number);
}

/* The text holds `start` followed by the rank and line of one of the ranks on that side. */
static void has_call(run *x, int r, const char *start, int line, bool of_who) {
  for (const char *s = reports[r].text; (s = strstr(s, start)); s++) {
    int rank, at;
    if (sscanf(s + strlen(start), "%d.py:%d]", &rank, &at) == 2 && at == line && (rank == x->p->who) == of_who) return;
  }
  blame(x, "rank %d: the error lacks the call '%s%s.py:%d]': %s", r, start, of_who ? "(who)" : "(others)", line,
        reports[r].text);
}

static void check_pair(run *x, int r, int i) {
  const plan *p = x->p;
  const call *k = &p->b[i], *o = &p->a[i];
  const bool sends = p->who == k->src;
  unsigned nsend = 0, nrecv = 0;
  for (int j = 0; j <= i; j++) {
    const call *m = &p->a[j];
    if (m->op != DC_CALL_SEND) continue;
    nsend += m->src == k->src || m->dst == k->src;
    nrecv += m->src == k->dst || m->dst == k->dst;
  }
  char src[64], dst[64], at[2][40] = {"", ""}, text[400];
  rank_name(src, p, k->src);
  rank_name(dst, p, k->dst);
  if (!k->blocking) {
    snprintf(at[0], sizeof at[0], " at rank%d.py:%d", k->src, k->line);
    snprintf(at[1], sizeof at[1], " at rank%d.py:%d", k->dst, k->line);
  }
  const call *send = sends ? k : o, *recv = sends ? o : k;
  snprintf(text, sizeof text, "%s called send(%s, count %lld, tag %lld, to %s) [message call %u%s]", src,
           dc_dtype_name(send->send_dtype), (long long)send->send_count, (long long)k->tag, dst, nsend, at[0]);
  has(x, r, text);
  snprintf(text, sizeof text, "%s called recv(%s, count %lld, tag %lld, from %s) [message call %u%s]", dst,
           dc_dtype_name(recv->dtype), (long long)recv->count, (long long)k->tag, src, nrecv, at[1]);
  has(x, r, text);
}

static void check_desynced(run *x, int r, int i) {
  const plan *p = x->p;
  if (!fine_report(x, r, DC_E_MISMATCH)) return;
  has(x, r, "group " LABEL);
  if (p->kind == OTHER_PAIR) {
    check_pair(x, r, i);
    return;
  }
  char text[400], who[64];
  rank_name(who, p, p->who);
  if (p->a[i].op == DC_CALL_ALL_TO_ALLV &&
      p->kind == OTHER_COUNT) { /* differs only in the counts, which are compared behind the call */
    has(x, r, " elements to rank ");
    has(x, r, "which expects");
  }
  expect_call(text, sizeof text, p, &p->a[i], i);
  has_call(x, r, text, p->a[i].line, false);
  expect_call(text, sizeof text, p, &p->b[i], i);
  has_call(x, r, text, p->b[i].line, true);
  snprintf(text, sizeof text, "%s called %s(", who, dc_call_name(p->b[i].op));
  has(x, r, text);
}

static void case_desynced(run *x, const char *address) {
  const plan *p = x->p;
  const int i = first_difference(p);
  if (i < 0) return; /* two equal calls were swapped */
  fork_ranks(x, address, rank_desynced);
  wait_end(x, -1);
  if (x->why[0]) {
    end_all(x);
    return;
  }
  for (int r = 0; r < p->size && !x->why[0]; r++) check_desynced(x, r, i);
}

/* ---- races ------------------------------------------------------------------------------------------------------- */
enum { POLLS = 2, GUARD = 0xA5 };

static void plan_race(plan *p) {
  rng g = rng_of(p->seed, 4);
  p->segment = true;
  p->frees = below(&g, p->size + 1) - 1;
  p->forks = below(&g, 3) ? -1 : below(&g, p->size);
  p->polls = below(&g, p->size + 1) - 1;
  p->moment_us = 1 + below(&g, below(&g, 3) ? 3000 : 12000);
}

static void *thread_frees(void *arg) {
  rank_state *s = arg;
  rng g = rng_of(s->p->seed, 5);
  usleep((useconds_t)below(&g, s->p->moment_us + 1));
  dc_segment_free(s->segment);
  return NULL;
}

static void *thread_aborts(void *arg) {
  rank_state *s = arg;
  usleep((useconds_t)s->p->moment_us);
  dc_comm_abort(s->c, "the storm is over");
  return NULL;
}

/* What a forked child may do with what it inherited. */
static void child(rank_state *s) {
  alarm(10);
  if (dc_barrier(s->c, 0) != DC_E_STATE) _exit(7);
  if (s->rank != s->p->frees && dc_segment_free(s->segment)) _exit(8);
  if (dc_comm_close(s->c)) _exit(9);
  _exit(0);
}

static void *thread_forks(void *arg) {
  rank_state *s = arg;
  rng g = rng_of(s->p->seed, 6);
  for (int i = 0; i < 2; i++) {
    usleep((useconds_t)below(&g, s->p->moment_us + 1));
    int status = 0;
    const pid_t pid = fork();
    if (pid == 0) child(s);
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status) return (void *)(intptr_t)(status ? status : -1);
  }
  return NULL;
}

static void *thread_polls(void *arg) {
  int rc = DC_OK, done = 0;
  while (rc == DC_OK && !done) rc = dc_request_test(arg, &done);
  return (void *)(intptr_t)rc;
}

/* Every byte of a buffer that a failed call gave back is ours: nobody else writes there from now on. */
static void guard(const rank_state *s, char *buffer, const char *name, bool look) {
  if (!look) memset(buffer, GUARD, BUFFER);
  for (int64_t i = 0; look && i < BUFFER; i++)
    if ((unsigned char)buffer[i] != GUARD)
      wrong(s->r, "byte %lld of the %s buffer was written after the call had failed and returned", (long long)i, name);
}

static void start_thread(rank_state *s, pthread_t *t, void *(*body)(void *), void *arg) {
  if (pthread_create(t, NULL, body, arg)) wrong(s->r, "pthread_create failed");
}

static int call_until_error(rank_state *s) {
  rng g = rng_of(s->p->seed, 2);
  for (int i = 0;; i++) {
    call k = call_make(s->p, &g, i, false);
    k.registered = k.registered && s->rank != s->p->frees;
    if (checked(&k)) fill(s, &k);
    const int rc = make(s, &k);
    s->r->calls = i;
    if (rc) return rc;
    if (checked(&k)) check(s, &k);
  }
}

static void rank_raced(rank_state *s) {
  const plan *p = s->p;
  pthread_t frees, forks, aborts, polls[POLLS];
  dc_request *never[POLLS] = {NULL};
  float to[POLLS];
  const bool does_poll = s->rank == p->polls;
  for (int i = 0; i < POLLS && does_poll; i++) {
    const int rc = dc_irecv(s->c, &to[i], 1, DC_F32, (s->rank + 1) % p->size, 100 + i, "", &never[i]);
    if (rc && rc != DC_E_ABORTED) wrong(s->r, "dc_irecv: %s", dc_last_error());
    if (never[i]) start_thread(s, &polls[i], thread_polls, never[i]);
  }
  if (s->rank == p->frees) start_thread(s, &frees, thread_frees, s);
  if (s->rank == p->forks) start_thread(s, &forks, thread_forks, s);
  if (s->rank == p->who) start_thread(s, &aborts, thread_aborts, s);
  const int rc = call_until_error(s);
  s->r->status = rc;
  snprintf(s->r->text, sizeof s->r->text, "%s", dc_last_error());
  guard(s, s->private, "private", false);
  if (s->rank != p->frees) guard(s, s->shared, "registered", false);
  usleep(1500);
  guard(s, s->private, "private", true);
  if (s->rank != p->frees) guard(s, s->shared, "registered", true);
  void *said = NULL;
  if (s->rank == p->who) pthread_join(aborts, NULL);
  if (s->rank == p->forks) pthread_join(forks, &said);
  if (said) wrong(s->r, "a forked child ended with wait status %d", (int)(intptr_t)said);
  if (s->rank == p->frees) pthread_join(frees, NULL);
  if (dc_comm_close(s->c)) wrong(s->r, "dc_comm_close: %s", dc_last_error()); /* beside those that poll */
  for (int i = 0; i < POLLS && does_poll; i++) {
    if (!never[i]) continue; /* the abort came first */
    pthread_join(polls[i], &said);
    const int got = (int)(intptr_t)said;
    if (got != DC_E_ABORTED && got != DC_E_STATE) wrong(s->r, "dc_request_test gave %s", dc_status_name(got));
    dc_request_free(never[i]);
  }
  if (s->rank != p->frees && dc_segment_free(s->segment)) wrong(s->r, "dc_segment_free: %s", dc_last_error());
  atomic_store(&s->r->over, 1);
  _exit(0);
}

static void case_raced(run *x, const char *address) {
  fork_ranks(x, address, rank_raced);
  wait_end(x, -1);
  if (x->why[0]) end_all(x);
  for (int r = 0; r < x->p->size && !x->why[0]; r++)
    if (fine_report(x, r, DC_E_ABORTED)) has(x, r, "aborted: the storm is over");
}

/* ---- leftovers --------------------------------------------------------------------------------------------------- */
static int entries(const char *dir, const char *with) {
  int n = 0;
  DIR *d = opendir(dir);
  for (struct dirent *e; d && (e = readdir(d));) n += strstr(e->d_name, with) != NULL;
  if (d) closedir(d);
  return n;
}

static bool file_has(const char *path, const char *part) {
  char line[4096];
  bool found = false;
  FILE *f = fopen(path, "re");
  while (f && !found && fgets(line, sizeof line, f)) found = strstr(line, part) != NULL;
  if (f) fclose(f);
  return found;
}

typedef struct traces {
  int fds, shm;
} traces;

static traces traces_now(void) { return (traces){entries("/proc/self/fd", ""), entries("/dev/shm", "deepc")}; }

/* What is left of the cases so far; NULL: nothing. Names in /dev/shm: of deepc only, others use it too. */
static const char *leftovers(traces before) {
  char address[64];
  snprintf(address, sizeof address, "@deepc-storm-%d-", (int)getpid());
  const traces t = traces_now();
  if (t.fds != before.fds) return "open descriptors";
  if (t.shm > before.shm) return "entries in /dev/shm";
  if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD) return "child processes";
  if (file_has("/proc/net/unix", address)) return "abstract sockets";
  if (file_has("/proc/self/maps", "memfd:")) return "mappings of memory files";
  return NULL;
}

/* ---- main -------------------------------------------------------------------------------------------------------- */
static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static double part_of_times(double share) { return ntimes ? times[(int)(share * (ntimes - 1) + 0.5)] : 0; }

static void no_core_dumps(void) {
  const struct rlimit one = {1, 1}; /* 0 would still feed a piped core pattern */
  setrlimit(RLIMIT_CORE, &one);
}

/* ---- the modes --------------------------------------------------------------------------------------------------- */
enum { RACE_FREES, RACE_FORKS, RACE_POLLS, RACES };
static const char *const race_name[] = {"frees", "forks", "polls"};

typedef struct mode {
  const char *name;
  void (*make)(plan *);
  void (*run)(run *, const char *address);
  const char *const *kinds; /* counted by count() */
  int nkinds;
} mode;

static void plan_kill(plan *p) { (void)p; }

static const mode modes[] = {{"kills", plan_kill, case_killed, death_name, DEATHS},
                             {"desyncs", plan_desync, case_desynced, kind_name, KINDS},
                             {"races", plan_race, case_raced, race_name, RACES}};

static void count(const mode *m, const plan *p, int by[KINDS]) {
  if (m->run == case_killed) by[p->death]++;
  if (m->run == case_desynced) by[p->kind]++;
  if (m->run != case_raced) return;
  by[RACE_FREES] += p->frees >= 0;
  by[RACE_FORKS] += p->forks >= 0;
  by[RACE_POLLS] += p->polls >= 0;
}

static void fail(const mode *m, const plan *p, const char *why) {
  const char *kind = m->run == case_killed     ? death_name[p->death]
                     : m->run == case_desynced ? kind_name[p->kind]
                                               : "aborts";
  printf("FAILED %s seed %llu (%d ranks, rank %d: %s): %s\nrepeat with: comm_fault %s %llu 1\n", m->name,
         (unsigned long long)p->seed, p->size, p->who, kind, why, m->name, (unsigned long long)p->seed);
  fflush(stdout);
}

int main(int argc, char **argv) {
  const mode *m = NULL;
  for (size_t i = 0; argc == 4 && i < sizeof modes / sizeof *modes; i++)
    if (strcmp(argv[1], modes[i].name) == 0) m = &modes[i];
  if (!m) {
    fprintf(stderr, "usage: comm_fault kills|desyncs|races SEED N\n");
    return 2;
  }
  const uint64_t seed = strtoull(argv[2], NULL, 10);
  const int n = atoi(argv[3]);
  int failed = 0, by[KINDS] = {0};
  int64_t calls = 0;
  reports = mmap(NULL, sizeof *reports * MAX_RANKS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  times = calloc((size_t)n * MAX_RANKS + 1, sizeof *times);
  if (reports == MAP_FAILED || !times) return 2;
  no_core_dumps();
  const traces before = traces_now();
  const double start = now();
  for (int i = 0; i < n && failed < 20; i++) {
    plan p = plan_make(seed + (uint64_t)i);
    m->make(&p);
    run x = {.p = &p};
    char address[90];
    address_of(address, p.seed);
    m->run(&x, address);
    count(m, &p, by);
    for (int r = 0; r < p.size; r++) calls += reports[r].calls;
    const char *left = x.why[0] ? NULL : leftovers(before);
    if (left) blame(&x, "%s are left", left);
    if (x.why[0]) failed++, fail(m, &p, x.why);
  }
  qsort(times, (size_t)ntimes, sizeof *times, by_size);
  printf("{\"mode\": \"%s\", \"seed\": %llu, \"cases\": %d, \"failed\": %d, \"seconds\": %.1f", m->name,
         (unsigned long long)seed, n, failed, now() - start);
  for (int i = 0; i < m->nkinds; i++) printf(", \"%s\": %d", m->kinds[i], by[i]);
  printf(", \"calls\": %lld", (long long)calls);
  if (m->run == case_killed)
    printf(", \"errors\": %d, \"median_ms\": %.3f, \"p99_ms\": %.3f, \"max_ms\": %.3f, \"slowest_seed\": %llu", ntimes,
           part_of_times(0.5), part_of_times(0.99), part_of_times(1), (unsigned long long)slowest_seed);
  printf("}\n");
  free(times);
  return failed ? 1 : 0;
}
