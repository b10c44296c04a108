/* sync.c: the exchange (begin, post, wait, done), waiting, looking after peers, and the errors that all ranks share.
 *
 * Owns every access to the words of the shared header after the handshake. Assumes that ranks are at most `slots` steps
 * apart, so that 32-bit counters compare by their difference. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm_impl.h"

enum { WORD_POSTED, WORD_DONE };

/* One wait for all ranks to bring `kind` to `target`. */
typedef struct waiting {
  int kind;
  uint32_t target;
  int64_t step;
  int64_t start_ns;
} waiting;

int64_t dc__now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

static dc__word *word_of(const dc_comm *c, int rank, int kind) {
  dc__seat *s = &c->h->seat[rank];
  return kind == WORD_POSTED ? &s->posted : &s->done;
}

/* True if counter `value` is at or past `target`; both are modulo 2^32 and less than 2^31 apart. */
static bool at_least(uint32_t value, uint32_t target) { return (int32_t)(value - target) >= 0; }

static bool reached(const dc_comm *c, int rank, const waiting *w) {
  /* acquire: pairs with advance(); what the peer wrote before it advanced (slot, fingerprint, its last reads of ours)
   * lies before us. */
  return at_least(atomic_load_explicit(&word_of(c, rank, w->kind)->value, memory_order_acquire), w->target);
}

/* ---- futex ------------------------------------------------------------------------------------------------------- */
static void futex_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
  struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
  dc__count(DC_COUNTER_futex_waits, 1);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0); /* every outcome is handled by looking again */
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static void advance(dc__word *w, uint32_t value) {
  /* seq_cst on both, against the seq_cst pair in doze(): either we see the sleeper, or it sees the new value (Dekker).
   * The store is also the release that publishes what we wrote. */
  atomic_store_explicit(&w->value, value, memory_order_seq_cst);
  if (atomic_load_explicit(&w->sleepers, memory_order_seq_cst)) futex_wake(&w->value);
}

/* Sleeps until the word changes, somebody wakes us, or it is time to look after the peers. */
static void doze(dc__word *w, const waiting *wt) {
  atomic_fetch_add_explicit(&w->sleepers, 1, memory_order_seq_cst);
  uint32_t seen = atomic_load_explicit(&w->value, memory_order_seq_cst);
  if (!at_least(seen, wt->target)) futex_sleep(&w->value, seen, DC__LOOK_NS);
  /* relaxed: only a hint whether a wake is needed; a stale count costs one syscall */
  atomic_fetch_sub_explicit(&w->sleepers, 1, memory_order_relaxed);
}

void dc__wake_all(dc_comm *c) {
  for (int r = 0; r < c->size; r++) {
    futex_wake(&c->h->seat[r].posted.value);
    futex_wake(&c->h->seat[r].done.value);
  }
}

/* ---- text -------------------------------------------------------------------------------------------------------- */
typedef struct text {
  char s[DC__TEXT];
  size_t n;
} text;

__attribute__((format(printf, 2, 3))) static void add(text *t, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  int n = vsnprintf(t->s + t->n, sizeof t->s - t->n, fmt, ap);
  va_end(ap);
  if (n > 0) t->n += (size_t)n < sizeof t->s - t->n ? (size_t)n : sizeof t->s - t->n - 1;
}

static const char *op_name(int op) {
  static const char *const name[] = {"?",         "barrier",    "all_reduce",     "reduce_scatter", "all_gather",
                                     "broadcast", "all_to_all", "segment_create", "bucket",         "user_exchange",
                                     "all_to_all", "reduce",    "gather",         "scatter",        "send",
                                     "recv"};
  return op >= 1 && op < (int)(sizeof name / sizeof *name) ? name[op] : "?";
}

static const char *red_name(int op) {
  static const char *const name[] = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};
  return op >= 0 && op < (int)(sizeof name / sizeof *name) ? name[op] : "?";
}

static void add_rank(text *t, const dc_comm *c, int rank) {
  add(t, "rank %d", c->global_rank[rank]);
  if (c->global_rank[rank] != rank) add(t, " (%d in the group)", rank);
}

static void add_call(text *t, const dc_comm *c, const dc_call *k, int64_t seq, const char *where) {
  add(t, "%s(", op_name(k->op));
  if (k->op != DC_CALL_BARRIER && k->op != DC_CALL_SEGMENT) add(t, "%s, ", dc_dtype_name(k->dtype));
  if (k->op == DC_CALL_SEGMENT) add(t, "bytes %lld", (long long)k->count);
  else if (k->op != DC_CALL_BARRIER) add(t, "count %lld", (long long)k->count);
  if (k->op == DC_CALL_ALL_REDUCE || k->op == DC_CALL_REDUCE_SCATTER) add(t, ", %s", red_name(k->red_op));
  if (k->op == DC_CALL_BROADCAST) add(t, ", root %d", k->root);
  if (k->tag) add(t, "%stag %lld", k->op == DC_CALL_BARRIER ? "" : ", ", (long long)k->tag);
  add(t, ") [call %lld%s%s]", (long long)seq, where[0] ? " at " : "", where);
}

/* ---- fingerprints ------------------------------------------------------------------------------------------------ */
static dc__fp *fp_of(const dc_comm *c, int rank, int64_t step) {
  return &c->fp[(int64_t)rank * c->slots + step % c->slots];
}

/* relaxed throughout: the order comes from the word `posted`; see dc__fp for why these are atomic at all */
static void fp_write(dc__fp *f, const dc_comm *c, const dc_call *call, int64_t step) {
  uint64_t w[DC__FP_WORDS] = {0};
  memcpy(&w[DC__FP_CALL], call, sizeof *call);
  w[DC__FP_SEQ] = (uint64_t)c->seq;
  w[DC__FP_STEP] = (uint64_t)step;
  memcpy(&w[DC__FP_WHERE], c->where, DC__WHERE);
  for (int i = 0; i < DC__FP_WORDS; i++) atomic_store_explicit(&f->w[i], w[i], memory_order_relaxed);
}

static void fp_read(const dc__fp *f, uint64_t w[DC__FP_WORDS]) {
  for (int i = 0; i < DC__FP_WORDS; i++) w[i] = atomic_load_explicit(&f->w[i], memory_order_relaxed);
}

static bool fp_same(const dc__fp *a, const dc__fp *b) {
  uint64_t diff = 0;
  for (int i = DC__FP_CALL; i < DC__FP_SEQ; i++)
    diff |= atomic_load_explicit(&a->w[i], memory_order_relaxed) ^ atomic_load_explicit(&b->w[i], memory_order_relaxed);
  return diff == 0;
}
_Static_assert(sizeof(dc_call) == (DC__FP_SEQ - DC__FP_CALL) * sizeof(uint64_t),
               "a call fills its words of the fingerprint, without padding");

static void add_fp(text *t, const dc_comm *c, const dc__fp *f) {
  uint64_t w[DC__FP_WORDS];
  char where[DC__WHERE];
  dc_call call;
  fp_read(f, w);
  memcpy(&call, &w[DC__FP_CALL], sizeof call);
  memcpy(where, &w[DC__FP_WHERE], sizeof where);
  where[DC__WHERE - 1] = 0;
  add_call(t, c, &call, (int64_t)w[DC__FP_SEQ], where);
}

/* What `rank` did last, from what it has shown. */
static void add_position(text *t, const dc_comm *c, int rank) {
  const dc__seat *s = &c->h->seat[rank];
  uint32_t posted = atomic_load_explicit(&s->posted.value, memory_order_acquire);
  uint32_t done = atomic_load_explicit(&s->done.value, memory_order_acquire);
  if (posted == 0) {
    add(t, "has called nothing yet");
    return;
  }
  add(t, posted == done ? "has finished " : "is in ");
  /* our own step counters are at most `slots` away: lift the peer's 32 bits to 64 near ours */
  int64_t step = c->posted + (int32_t)(posted - (uint32_t)c->posted) - 1;
  add_fp(t, c, fp_of(c, rank, step));
}

/* ---- shared errors ----------------------------------------------------------------------------------------------- */
int dc__broken(dc_comm *c) {
  dc__header *h = c->h;
  uint32_t state = atomic_load_explicit(&h->broken, memory_order_acquire); /* pairs with the release in dc__break */
  if (__builtin_expect(state == DC__SOUND, 1)) return DC_OK;
  for (int i = 0; state == DC__BREAKING && i < 1000;
       i++) { /* bounded: the rank that writes the text may be killed meanwhile */
    struct timespec ms = {0, 1000000};
    nanosleep(&ms, NULL);
    state = atomic_load_explicit(&h->broken, memory_order_acquire);
  }
  if (state == DC__BREAKING)
    return DC_FAIL(DC_E_PEER_DIED, "group %s: a rank died while it reported an error", c->label);
  return DC_FAIL(h->status, "%.*s", DC__TEXT - 1, h->text); /* not written again */
}

int dc__break(dc_comm *c, int status, const char *fmt, ...) {
  char s[DC__TEXT];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(s, sizeof s, fmt, ap);
  va_end(ap);
  uint32_t sound = DC__SOUND;
  if (atomic_compare_exchange_strong_explicit(&c->h->broken, &sound, DC__BREAKING, memory_order_acq_rel,
                                              memory_order_acquire)) {
    memcpy(c->h->text, s, sizeof s);
    c->h->status = status;
    /* release: who sees BROKEN sees status and text */
    atomic_store_explicit(&c->h->broken, DC__BROKEN, memory_order_release);
    /* A peer that is about to sleep now may miss this; it looks again after DC__LOOK_NS. */
    dc__wake_all(c);
  }
  return dc__broken(c);
}

/* "rank 0, rank 2" of those that have posted the same call as `f`; returns how many. */
static int add_callers(text *t, const dc_comm *c, const waiting *w, const dc__fp *f) {
  int n = 0;
  for (int r = 0; r < c->size; r++) {
    if (!reached(c, r, w) || !fp_same(f, fp_of(c, r, w->step))) continue;
    if (n++ >= 16) continue;
    add(t, n == 1 ? " " : ", ");
    add_rank(t, c, r);
  }
  if (n > 16) add(t, " and %d more", n - 16);
  return n;
}

static int mismatch(dc_comm *c, const waiting *w, int a, int b) {
  text t = {.n = 0};
  int told = 0;
  add(&t, "ranks called different collectives in group %s (step %lld):", c->label, (long long)w->step);
  for (int side = 0; side < 2; side++) {
    const dc__fp *f = fp_of(c, side ? b : a, w->step);
    told += add_callers(&t, c, w, f);
    add(&t, " called ");
    add_fp(&t, c, f);
    add(&t, side ? "." : ";");
  }
  if (told < c->size) add(&t, " Others have not arrived or called something else again.");
  add(&t, " All ranks of a group must make the same calls in the same order with the same dtype, count and reduction.");
  return dc__break(c, DC_E_MISMATCH, "%s", t.s);
}

/* Compares what has arrived of `step`: everyone with the lowest rank that is there. */
static int compare(dc_comm *c, int64_t step) {
  const waiting w = {.kind = WORD_POSTED, .target = (uint32_t)(step + 1), .step = step};
  int first = -1;
  for (int r = 0; r < c->size; r++) {
    if (!reached(c, r, &w)) continue;
    if (first < 0) first = r;
    else if (!fp_same(fp_of(c, first, step), fp_of(c, r, step))) return mismatch(c, &w, first, r);
  }
  return DC_OK;
}

static void add_everyone(text *t, const dc_comm *c, const waiting *w) {
  add(t, " Where every rank is:");
  int shown = 0;
  for (int late = 1; late >= 0; late--) { /* those that are waited for come first */
    for (int r = 0; r < c->size; r++) {
      if ((reached(c, r, w) ? 0 : 1) != late) continue;
      if (shown++ == 12) {
        add(t, " ... (%d more)", c->size - 12);
        return;
      }
      add(t, shown == 1 ? " " : "; ");
      add_rank(t, c, r);
      add(t, " (pid %d) ", c->h->seat[r].pid);
      add_position(t, c, r);
    }
  }
}

static void add_me(text *t, const dc_comm *c, const waiting *w) {
  add_rank(t, c, c->rank);
  add(t, " waits for it in ");
  add_call(t, c, &c->call, c->seq, c->where);
}

/* How a process ended, where that can still be read: its zombie's exit status is the last field of /proc/PID/stat. */
static void add_death(text *t, int pid) {
  char path[64], buf[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *f = fopen(path, "re");
  size_t n = f ? fread(buf, 1, sizeof buf - 1, f) : 0;
  if (f) fclose(f);
  buf[n] = 0;
  const char *comm_end = strrchr(buf, ')'), *last = strrchr(buf, ' ');
  int code = 0;
  if (!comm_end || strncmp(comm_end, ") Z", 3) != 0 || !last || sscanf(last, "%d", &code) != 1) {
    add(t, " died: it was killed or exited without leaving the group");
  } else if (code & 0x7f) {
    add(t, " died: killed by signal %d (%s)", code & 0x7f, strsignal(code & 0x7f));
  } else {
    add(t, " died: it exited with code %d without leaving the group", (code >> 8) & 0xff);
  }
}

static void look_at_pidfds(dc_comm *c) {
  struct pollfd p[DC_COMM_MAX_RANKS];
  int who[DC_COMM_MAX_RANKS], n = 0;
  for (int r = 0; r < c->size; r++) {
    if (r == c->rank || c->dead[r]) continue;
    p[n] = (struct pollfd){.fd = c->pidfd[r], .events = POLLIN};
    who[n++] = r;
  }
  if (n == 0 || poll(p, (nfds_t)n, 0) <= 0) return;
  for (int i = 0; i < n; i++)
    if (p[i].revents) c->dead[who[i]] = 1; /* readable once the process is a zombie */
}

/* A rank that died or left matters only if it had not yet given what we wait for: what it gave stays valid. */
static int find_missing(dc_comm *c, const waiting *w) {
  look_at_pidfds(c);
  for (int r = 0; r < c->size; r++) {
    bool left = atomic_load_explicit(&c->h->seat[r].left, memory_order_acquire);
    if ((!c->dead[r] && !left) || reached(c, r, w)) continue; /* reached() after left/dead: its last words count */
    text t = {.n = 0};
    add(&t, "group %s: ", c->label);
    add_rank(&t, c, r);
    add(&t, " (pid %d)", c->h->seat[r].pid);
    if (left) add(&t, " left the group");
    else add_death(&t, c->h->seat[r].pid);
    add(&t, "; ");
    add_me(&t, c, w);
    add(&t, "; ");
    add_rank(&t, c, r);
    add(&t, " ");
    add_position(&t, c, r);
    return dc__break(c, DC_E_PEER_DIED, "%s", t.s);
  }
  return DC_OK;
}

static int late(dc_comm *c, const waiting *w) {
  text t = {.n = 0};
  add(&t, "group %s: time-out after %lld ms: ", c->label, (long long)(c->timeout_ns / 1000000));
  const char *sep = "";
  for (int r = 0, shown = 0; r < c->size && shown < 16; r++) {
    if (reached(c, r, w)) continue;
    add(&t, "%s", sep);
    add_rank(&t, c, r);
    sep = ", ";
    shown++;
  }
  add(&t, " did not arrive; ");
  add_me(&t, c, w);
  add(&t, ".");
  add_everyone(&t, c, w);
  return dc__break(c, DC_E_TIMEOUT, "%s", t.s);
}

/* Everything that can end a wait other than what is waited for. */
static int look(dc_comm *c, const waiting *w) {
  c->look_ns = dc__now_ns();
  DC_TRY(dc__broken(c));
  if (w->kind == WORD_POSTED)
    DC_TRY(compare(c, w->step)); /* a mismatch is told at once, even if some rank never arrives */
  DC_TRY(find_missing(c, w));
  return c->look_ns - w->start_ns >= c->timeout_ns ? late(c, w) : DC_OK;
}

static int wait_for(dc_comm *c, int rank, const waiting *w) {
  dc__word *word = word_of(c, rank, w->kind);
  int64_t spin_end = dc__now_ns() + c->spin_ns,
          look_at = spin_end < w->start_ns + DC__LOOK_NS ? spin_end : w->start_ns + DC__LOOK_NS;
  for (int64_t now = 0; now < spin_end; now = dc__now_ns()) {
    for (int i = 0; i < 64; i++) {
      if (reached(c, rank, w)) return DC_OK;
      cpu_relax();
    }
    if (now > look_at) { /* only with a very long DEEPC_SPIN_US */
      DC_TRY(look(c, w));
      look_at = now + DC__LOOK_NS;
    }
  }
  while (!reached(c, rank, w)) {
    /* looking costs a syscall, so not at every wake-up */
    DC_TRY(dc__now_ns() - c->look_ns >= DC__LOOK_NS ? look(c, w) : dc__broken(c));
    doze(word, w);
  }
  return DC_OK;
}

static int wait_all(dc_comm *c, waiting *w) {
  w->target = (uint32_t)(w->step + 1);
  w->start_ns = 0;
  for (int r = 0; r < c->size; r++) {
    if (reached(c, r, w)) continue;
    if (!w->start_ns) w->start_ns = dc__now_ns();
    DC_TRY(wait_for(c, r, w));
  }
  return DC_OK;
}

/* Without blocking; looks after the peers now and then, so that polling callers learn of a death as well. */
static int test_all(dc_comm *c, waiting *w, int *ready) {
  w->target = (uint32_t)(w->step + 1);
  DC_TRY(dc__broken(c));
  for (int r = 0; r < c->size; r++) {
    if (reached(c, r, w)) continue;
    w->start_ns = dc__now_ns(); /* a test has no time-out */
    if (w->start_ns - c->look_ns >= DC__LOOK_NS) DC_TRY(look(c, w));
    *ready = 0;
    return DC_OK;
  }
  *ready = 1;
  return DC_OK;
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */
int dc__enter(dc_comm *c) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  if (c->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process; open a new one here",
                   c->label);
  /* acquire/release around a call: the next thread that enters sees what the last one left */
  if (atomic_exchange_explicit(&c->busy, 1, memory_order_acquire))
    return DC_FAIL(DC_E_STATE, "group %s is in use by another thread; one call at a time per communicator", c->label);
  int rc = dc__broken(c);
  if (rc) dc__leave(c);
  return rc;
}

void dc__leave(dc_comm *c) { atomic_store_explicit(&c->busy, 0, memory_order_release); }

/* ---- the exchange ------------------------------------------------------------------------------------------------ */
int dc__begin(dc_comm *c, int64_t *step, void **slot) {
  if (c->begun - c->done >= c->slots)
    return DC_FAIL(DC_E_STATE, "group %s: all %d slots are open; mark step %lld done first", c->label, c->slots,
                   (long long)c->done);
  if (c->begun - c->slots >= c->all_done) {
    waiting w = {.kind = WORD_DONE, .step = c->begun - c->slots};
    DC_TRY(wait_all(c, &w));
    c->all_done = c->begun - c->slots + 1;
  }
  *step = c->begun++;
  *slot = dc__slot(c, c->rank, *step);
  return DC_OK;
}

int dc__can_begin(dc_comm *c, int *ready) {
  *ready = 0;
  if (c->begun - c->done >= c->slots) return DC_OK;
  *ready = 1;
  if (c->begun - c->slots < c->all_done) return DC_OK;
  waiting w = {.kind = WORD_DONE, .step = c->begun - c->slots};
  return test_all(c, &w, ready);
}

int dc__post(dc_comm *c, const dc_call *call) {
  if (c->posted >= c->begun) return DC_FAIL(DC_E_STATE, "group %s: post without begin", c->label);
  c->call = *call;
  fp_write(fp_of(c, c->rank, c->posted), c, call, c->posted);
  c->posted++;
  advance(&c->h->seat[c->rank].posted, (uint32_t)c->posted);
  return DC_OK;
}

int dc__wait(dc_comm *c, int64_t step) {
  if (step < c->done || step >= c->posted)
    return DC_FAIL(DC_E_STATE, "group %s: wait for step %lld, but only %lld to %lld are posted and not done", c->label,
                   (long long)step, (long long)c->done, (long long)c->posted - 1);
  for (; c->arrived <= step; c->arrived++) {
    waiting w = {.kind = WORD_POSTED, .step = c->arrived};
    DC_TRY(wait_all(c, &w));
    DC_TRY(compare(c, c->arrived));
  }
  return DC_OK;
}

int dc__done(dc_comm *c, int64_t step) {
  if (step != c->done || step >= c->arrived)
    return DC_FAIL(DC_E_STATE, "group %s: done for step %lld, but step %lld is next and %lld have been waited for",
                   c->label, (long long)step, (long long)c->done, (long long)c->arrived);
  c->done++;
  /* seq_cst store: our reads of the peers' slots stay before it, so they may fill them again */
  advance(&c->h->seat[c->rank].done, (uint32_t)c->done);
  return DC_OK;
}

int dc_exchange_begin(dc_comm *c, int64_t *step, void **slot) {
  if (!step || !slot) return DC_FAIL(DC_E_INVALID, "step or slot is NULL");
  DC_TRY(dc__enter(c));
  int rc = dc__begin(c, step, slot);
  dc__leave(c);
  return rc;
}

int dc_exchange_can_begin(dc_comm *c, int *ready) {
  if (!ready) return DC_FAIL(DC_E_INVALID, "ready is NULL");
  DC_TRY(dc__enter(c));
  int yes = 0, rc = dc__can_begin(c, &yes);
  if (!rc) *ready = yes;
  dc__leave(c);
  return rc;
}

int dc_exchange_post(dc_comm *c, const dc_call *call) {
  if (!call) return DC_FAIL(DC_E_INVALID, "call is NULL");
  DC_TRY(dc__enter(c));
  c->seq++;
  int rc = dc__post(c, call);
  dc__leave(c);
  return rc;
}

int dc_exchange_wait(dc_comm *c, int64_t step) {
  DC_TRY(dc__enter(c));
  int rc = dc__wait(c, step);
  dc__leave(c);
  return rc;
}

int dc_exchange_test(dc_comm *c, int64_t step, int *ready) {
  if (!ready) return DC_FAIL(DC_E_INVALID, "ready is NULL");
  DC_TRY(dc__enter(c));
  int yes = step < c->arrived && step >= c->done, rc = DC_OK;
  if (!yes && (step < c->done || step >= c->posted)) {
    rc = DC_FAIL(DC_E_STATE, "group %s: test of step %lld, but only %lld to %lld are posted and not done", c->label,
                 (long long)step, (long long)c->done, (long long)c->posted - 1);
  } else if (!yes) {
    waiting w = {.kind = WORD_POSTED, .step = step};
    rc = test_all(c, &w, &yes);
    if (!rc && yes) rc = dc__wait(c, step); /* does not block; compares */
  }
  if (!rc) *ready = yes;
  dc__leave(c);
  return rc;
}

const void *dc_exchange_peer(const dc_comm *c, int rank, int64_t step) {
  if (!c || rank < 0 || rank >= c->size || step < 0) return NULL;
  return dc__slot(c, rank, step);
}

int dc_exchange_done(dc_comm *c, int64_t step) {
  DC_TRY(dc__enter(c));
  int rc = dc__done(c, step);
  dc__leave(c);
  return rc;
}

/* ---- abort, texts ------------------------------------------------------------------------------------------------ */
int dc_comm_abort(dc_comm *c, const char *reason) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  if (c->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process", c->label);
  text t = {.n = 0};
  add(&t, "group %s: ", c->label);
  add_rank(&t, c, c->rank);
  add(&t, " (pid %d) aborted: %s", c->h->seat[c->rank].pid, reason && reason[0] ? reason : "no reason given");
  dc__break(c, DC_E_ABORTED, "%s", t.s); /* its status is for the waits; the abort itself succeeded */
  return DC_OK;
}

int dc_comm_set_timeout(dc_comm *c, int64_t timeout_ms) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  if (timeout_ms <= 0 || timeout_ms > INT64_MAX / 2000000)
    return DC_FAIL(DC_E_INVALID, "timeout_ms %lld: expected a positive number of milliseconds", (long long)timeout_ms);
  c->timeout_ns = timeout_ms * 1000000;
  return DC_OK;
}

int dc_comm_set_caller(dc_comm *c, const char *where) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  char *end = stpncpy(c->where, where ? where : "", DC__WHERE - 1); /* pads with zeros */
  *end = 0;
  return DC_OK;
}

const char *dc_comm_error(const dc_comm *c) {
  if (!c || c->fork_mark != dc__fork_mark()) return "";
  if (atomic_load_explicit(&c->h->broken, memory_order_acquire) != DC__BROKEN) return "";
  return c->h->text;
}
