/* sync.c: the exchange (begin, post, wait, done), waiting, looking after peers, and the errors that all ranks share.
 *
 * Owns every access to the words of the shared header after the handshake. Assumes that ranks are at most `slots` steps
 * apart, so that 32-bit counters compare by their difference.
 *
 * What a small call waits for are lines that another core has, and stores that wait for such lines. Tried on 2 ranks,
 * in turn with the state before (2 virtual cores with AVX-512; us a call): who runs ahead and is blocked waits for half
 * a ring, not for one step   8 B gather 0.23 -> 0.17, reduce 0.25 -> 0.16 the number of sleepers beside the word -> in
 * a line of its own, and the call stored from registers instead of copied (a vector load of fields just stored waits
 * for the store buffer)            8 B broadcast 0.155 -> 0.115, barrier 0.31 -> 0.28 the cell after next asked for
 * (prefetchw) behind each post               barrier 0.28 -> 0.245; GCC's builtin reads it instead: nothing peers' next
 * cells asked for by who reads                                 nothing: not kept 4 KiB and 16 KiB: next slot asked for
 * while waiting (dc__warm)           4 KiB gather, root in turns, 0.72 -> 0.52; 16 KiB reduce 3.5 -> 2.5; three slots
 * go round for it: with the first free one nothing a slot's lines asked for 1 KiB ahead of the copy into it 4 KiB
 * gather 0.63 -> 0.45 16 small slots of 16 KiB instead of 8 of 4 KiB                           16 KiB gather, fixed
 * root, 1.15 -> 0.72, broadcast 1.45 -> 0.89 With a fixed root and 8 B OpenMPI stays ahead (0.07 to 0.10 against 0.11
 * to 0.16): what is left is about 100 ns of instructions on each side, of which 25 are the flight record and 20 its
 * clock. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm_impl.h"
#include "flight.h"
#include "p2p.h"
#include "text.h"

enum { UNREACHABLE_MS = 1000 }; /* a dying process loses its memory some time before its pidfd says that it is dead */

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

static dc__cell *cell_of(const dc_comm *c, int rank, int64_t step) {
  return &c->cell[(int64_t)rank * c->cells + step % c->cells];
}

static _Atomic uint32_t *word_of(const dc_comm *c, int rank, const waiting *w) {
  return w->kind == DC__POSTED ? &cell_of(c, rank, w->step)->posted : &c->h->seat[rank].done;
}

/* True if counter `value` is at or past `target`; both are modulo 2^32 and less than 2^31 apart. */
static bool at_least(uint32_t value, uint32_t target) { return (int32_t)(value - target) >= 0; }

static bool reached(const dc_comm *c, int rank, const waiting *w) {
  /* acquire: pairs with advance(); what the peer wrote before it advanced (slot, fingerprint, its last reads of ours)
   * lies before us. */
  return at_least(atomic_load_explicit(word_of(c, rank, w), memory_order_acquire), w->target);
}

/* ---- futex ------------------------------------------------------------------------------------------------------- */
static void futex_sleep(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
  struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
  dc__count(DC_COUNTER_futex_waits, 1);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0); /* every outcome is handled by looking again */
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* ---- fences that only the slow side pays for --------------------------------------------------------------------- */
/* Two pairs of threads here need a store to be seen before the following load is done, each towards the other (Dekker):
 * who posts and who goes to sleep; who enters a communicator and who takes it over. The frequent side would pay a full
 * fence, which waits for its stores to reach the other cores (70 to 100 ns a call here). membarrier(2) runs that fence
 * on all cores on behalf of the rare side instead; the frequent side only must not be reordered by the compiler. */
enum { MB_GLOBAL_EXPEDITED = 2, MB_REGISTER_GLOBAL = 4, MB_PRIVATE_EXPEDITED = 8, MB_REGISTER_PRIVATE = 16 };

static bool membarrier(int cmd) { return syscall(SYS_membarrier, cmd, 0, 0) == 0; }

bool dc__membarrier_register(void) { return membarrier(MB_REGISTER_GLOBAL) && membarrier(MB_REGISTER_PRIVATE); }

/* Only this rank stores its words. */
static void advance(const dc_comm *c, int kind, _Atomic uint32_t *word, uint32_t value) {
  /* release: publishes what we wrote. Then the store against the load of sleepers, see doze(): either we see the
   * sleeper, or it sees the new value. */
  const _Atomic uint32_t *sleepers = &c->h->seat[c->rank].sleepers[kind];
  if (c->fences) {
    atomic_store_explicit(word, value, memory_order_seq_cst);
    if (atomic_load_explicit(sleepers, memory_order_seq_cst)) futex_wake(word);
    return;
  }
  atomic_store_explicit(word, value, memory_order_release);
  atomic_signal_fence(memory_order_seq_cst);
  if (__builtin_expect(atomic_load_explicit(sleepers, memory_order_relaxed) != 0, 0)) futex_wake(word);
}

/* Peers may need an answer to their messages before they come to the collective that we wait for. */
static bool unfinished_messages(void) { return atomic_load_explicit(&dc__p2p_unfinished, memory_order_relaxed) > 0; }
static void serve_messages(void) {
  if (unfinished_messages()) dc__p2p_idle();
}

/* Sleeps until rank's word changes, somebody wakes us, or it is time to look after the peers. */
static void doze(const dc_comm *c, int rank, const waiting *w) {
  _Atomic uint32_t *word = word_of(c, rank, w), *sleepers = &c->h->seat[rank].sleepers[w->kind];
  atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
  if (!c->fences) membarrier(MB_GLOBAL_EXPEDITED);
  uint32_t seen = atomic_load_explicit(word, memory_order_seq_cst);
  if (!at_least(seen, w->target)) futex_sleep(word, seen, unfinished_messages() ? DC__LOOK_NS / 20 : DC__LOOK_NS);
  /* relaxed: only a hint whether a wake is needed; a stale count costs one syscall */
  atomic_fetch_sub_explicit(sleepers, 1, memory_order_relaxed);
}

void dc__wake_all(dc_comm *c) {
  for (int r = 0; r < c->size; r++) {
    futex_wake(&c->h->seat[r].done);
    for (int s = 0; s < c->cells; s++) futex_wake(&cell_of(c, r, s)->posted);
  }
}

/* ---- text -------------------------------------------------------------------------------------------------------- */
static const char *red_name(int op) {
  static const char *const name[] = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};
  return op >= 0 && op < (int)(sizeof name / sizeof *name) ? name[op] : "?";
}

static void add_call(text *t, const dc_comm *c, const dc_call *k, int64_t seq, const char *where) {
  const int op = k->op % DC__ALGO; /* without the forced row that a fingerprint carries */
  add(t, "%s(", dc_call_name(op));
  if (op != DC_CALL_BARRIER && op != DC_CALL_SEGMENT) add(t, "%s", dc_dtype_name(k->dtype));
  if (op == DC_CALL_SEGMENT) add(t, "bytes %lld", (long long)k->count);
  else if (op != DC_CALL_BARRIER && op != DC_CALL_ALL_TO_ALLV)
    add(t, ", count %lld", (long long)k->count); /* that has many */
  if (op == DC_CALL_ALL_REDUCE || op == DC_CALL_REDUCE_SCATTER || op == DC_CALL_REDUCE)
    add(t, ", %s", red_name(k->red_op));
  if (op == DC_CALL_BROADCAST || op == DC_CALL_REDUCE || op == DC_CALL_GATHER || op == DC_CALL_SCATTER)
    add(t, ", root %d", k->root);
  if (k->tag) add(t, "%stag %lld", op == DC_CALL_BARRIER ? "" : ", ", (long long)k->tag);
  add(t, ") [call %lld%s%s]", (long long)seq, where[0] ? " at " : "", where);
}

/* ---- fingerprints ------------------------------------------------------------------------------------------------ */
_Static_assert(sizeof(dc__cell) == DC__LINE, "one line to wait for");
_Static_assert(sizeof(dc__where) == DC__LINE && DC__WHERE_WORDS * 8 == DC__WHERE, "and one for the text");

static void pack(const dc_call *k, uint64_t w[DC__CALL_WORDS]) {
  w[0] = (uint64_t)(uint16_t)k->op | (uint64_t)(uint8_t)k->dtype << 16 | (uint64_t)(uint8_t)k->red_op << 24 |
         (uint64_t)(uint32_t)k->root << 32;
  w[1] = (uint64_t)k->count;
  w[2] = (uint64_t)k->tag;
}

static dc_call unpack(const uint64_t w[DC__CALL_WORDS]) {
  return (dc_call){.op = (uint16_t)w[0],
                   .dtype = (uint8_t)(w[0] >> 16),
                   .red_op = (uint8_t)(w[0] >> 24),
                   .root = (int32_t)(w[0] >> 32),
                   .count = (int64_t)w[1],
                   .tag = (int64_t)w[2]};
}

/* Each step is a bijection of h (odd factors), so two histories that differ in one call never meet again by it. */
static uint64_t mix(uint64_t h, const uint64_t w[DC__CALL_WORDS]) {
  for (int i = 0; i < DC__CALL_WORDS; i++) {
    h = (h ^ w[i]) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
  }
  return h;
}

/* relaxed throughout: the order comes from the word `posted`; see dc__cell for why these are atomic at all */
static void cell_write(dc_comm *c, const dc_call *call, int64_t step) {
  dc__cell *cell = cell_of(c, c->rank, step);
  uint64_t w[DC__WHERE_WORDS];
  pack(call, w);
  c->hash = mix(c->hash, w);
  for (int i = 0; i < DC__CALL_WORDS; i++) atomic_store_explicit(&cell->call[i], w[i], memory_order_relaxed);
  atomic_store_explicit(&cell->hash, c->hash, memory_order_relaxed);
  atomic_store_explicit(&cell->seq, (uint32_t)c->seq, memory_order_relaxed);
  atomic_store_explicit(&cell->done, (uint32_t)c->done, memory_order_relaxed);
  if (c->shown[step % c->cells] == c->where_number) return;
  c->shown[step % c->cells] = c->where_number;
  memcpy(w, c->where, DC__WHERE);
  dc__where *where = &c->wheres[(int64_t)c->rank * c->cells + step % c->cells];
  for (int i = 0; i < DC__WHERE_WORDS; i++) atomic_store_explicit(&where->w[i], w[i], memory_order_relaxed);
}

/* The same call, and the same calls before it. */
static bool same_hash(const dc__cell *a, const dc__cell *b) {
  return atomic_load_explicit(&a->hash, memory_order_relaxed) == atomic_load_explicit(&b->hash, memory_order_relaxed);
}

static bool same_call(const dc__cell *a, const dc__cell *b) {
  uint64_t diff = 0;
  for (int i = 0; i < DC__CALL_WORDS; i++)
    diff |= atomic_load_explicit(&a->call[i], memory_order_relaxed) ^
            atomic_load_explicit(&b->call[i], memory_order_relaxed);
  return diff == 0;
}

static void add_cell(text *t, const dc_comm *c, const dc__cell *cell) {
  const dc__where *at = &c->wheres[cell - c->cell];
  uint64_t w[DC__WHERE_WORDS];
  char where[DC__WHERE];
  for (int i = 0; i < DC__CALL_WORDS; i++) w[i] = atomic_load_explicit(&cell->call[i], memory_order_relaxed);
  dc_call call = unpack(w);
  for (int i = 0; i < DC__WHERE_WORDS; i++) w[i] = atomic_load_explicit(&at->w[i], memory_order_relaxed);
  memcpy(where, w, sizeof where);
  where[DC__WHERE - 1] = 0;
  int64_t seq = c->seq + (int32_t)(atomic_load_explicit(&cell->seq, memory_order_relaxed) - (uint32_t)c->seq);
  add_call(t, c, &call, seq, where);
}

/* The cell that `rank` posted last, NULL if it has posted nothing; *posted: its steps, modulo 2^32. */
static const dc__cell *last_cell(const dc_comm *c, int rank, uint32_t *posted) {
  const dc__cell *last = NULL;
  *posted = 0;
  for (int s = 0; s < c->cells; s++) {
    const dc__cell *cell = cell_of(c, rank, s);
    uint32_t v = atomic_load_explicit(&cell->posted, memory_order_acquire);
    if (v == 0 || (last && !at_least(v, *posted))) continue;
    *posted = v;
    last = cell;
  }
  return last;
}

/* What `rank` did last, from what it has shown. */
static void add_position(text *t, const dc_comm *c, int rank) {
  uint32_t posted, done = atomic_load_explicit(&c->h->seat[rank].done, memory_order_acquire);
  const dc__cell *cell = last_cell(c, rank, &posted);
  if (!cell) {
    add(t, "has called nothing yet");
    return;
  }
  add(t, posted == done ? "has finished " : "is in ");
  add_cell(t, c, cell);
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
  /* seq_cst: see dc__await_calm() */
  if (atomic_compare_exchange_strong_explicit(&c->h->broken, &sound, DC__BREAKING, memory_order_seq_cst,
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

/* The cell of `rank` still holds (or already holds) just this step. */
static bool holds(const dc_comm *c, int rank, int64_t step) {
  return atomic_load_explicit(&cell_of(c, rank, step)->posted, memory_order_acquire) == (uint32_t)(step + 1);
}

/* "rank 0, rank 2" of those that have posted the same call as `f`; returns how many. */
static int add_callers(text *t, const dc_comm *c, int64_t step, const dc__cell *f) {
  int n = 0;
  for (int r = 0; r < c->size; r++) {
    if (!holds(c, r, step) || !same_call(f, cell_of(c, r, step))) continue;
    if (n++ >= 16) continue;
    add(t, n == 1 ? " " : ", ");
    add_rank(t, c, r);
  }
  if (n > 16) add(t, " and %d more", n - 16);
  return n;
}

/* The first step at which the calls of a and b differ; -1 if that is too long ago. */
static int64_t first_difference(const dc_comm *c, int64_t step, int a, int b) {
  for (int64_t s = step - c->cells + 1 > 0 ? step - c->cells + 1 : 0; s <= step; s++)
    /* held before and after the look: a rank that runs ahead may fill the cell meanwhile */
    if (holds(c, a, s) && holds(c, b, s) && !same_call(cell_of(c, a, s), cell_of(c, b, s)) && holds(c, a, s) &&
        holds(c, b, s))
      return s;
  return -1;
}

static int mismatch(dc_comm *c, int64_t now, int a, int b) {
  text t = {.n = 0};
  int told = 0;
  const int64_t found = first_difference(c, now, a, b), step = found < 0 ? now : found;
  add(&t, "ranks called different collectives in group %s (step %lld%s):", c->label, (long long)(step - c->base),
      found < 0 ? "; the first difference was earlier, in calls that are not kept any more" : "");
  for (int side = 0; side < 2; side++) {
    const dc__cell *f = cell_of(c, side ? b : a, step);
    told += add_callers(&t, c, step, f);
    add(&t, " called ");
    add_cell(&t, c, f);
    add(&t, side ? "." : ";");
  }
  if (told < c->size) add(&t, " Others have not arrived or called something else again.");
  add(&t, " All ranks of a group must make the same calls in the same order with the same dtype, count and reduction.");
  return dc__break(c, DC_E_MISMATCH, "%s", t.s);
}

/* Compares what has arrived of `step`: everyone with the lowest rank that is there. */
static int compare(dc_comm *c, int64_t step) {
  int first = -1;
  for (int r = 0; r < c->size; r++) {
    if (!holds(c, r, step)) continue;
    if (first < 0) first = r;
    else if (!same_hash(cell_of(c, first, step), cell_of(c, r, step))) return mismatch(c, step, first, r);
  }
  return DC_OK;
}

/* All have posted `step`: compares it, and takes from the same lines how far everyone was, which saves begin() a wait.
 */
static int learn(dc_comm *c, int64_t step) {
  const dc__cell *own = cell_of(c, c->rank, step);
  int64_t least = c->done;
  for (int r = 0; r < c->size; r++) {
    const dc__cell *cell = cell_of(c, r, step);
    if (__builtin_expect(!same_hash(own, cell), 0)) return compare(c, step);
    int64_t done = c->done + (int32_t)(atomic_load_explicit(&cell->done, memory_order_relaxed) - (uint32_t)c->done);
    if (done < least) least = done;
  }
  if (least > c->all_done) c->all_done = least;
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

static void add_me(text *t, const dc_comm *c) {
  add_rank(t, c, c->rank);
  add(t, " waits for it in ");
  add_call(t, c, &c->call, c->seq, c->where);
}

/* The wait status of a zombie: the last field of /proc/PID/stat. */
static bool zombie_status(int pid, int *status) {
  char path[64], buf[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *f = fopen(path, "re");
  size_t n = f ? fread(buf, 1, sizeof buf - 1, f) : 0;
  if (f) fclose(f);
  buf[n] = 0;
  const char *comm_end = strrchr(buf, ')'), *last = strrchr(buf, ' ');
  return comm_end && strncmp(comm_end, ") Z", 3) == 0 && last && sscanf(last, "%d", status) == 1;
}

/* The same of a process that its parent has collected: since Linux 6.15 the pidfd keeps it (PIDFD_GET_INFO). */
static bool pidfd_status(int pidfd, int *status) {
  struct {
    uint64_t mask, cgroup;
    uint32_t ids[11];
    int32_t exit_code;
  } info = {.mask = 1u << 3 /* PIDFD_INFO_EXIT */};
  if (ioctl(pidfd, _IOWR(0xFF, 11, info), &info) || !(info.mask & 1u << 3)) return false;
  *status = info.exit_code;
  return true;
}

/* How a process ended, where that can still be read. */
static void add_death(text *t, int pid, int pidfd) {
  int status = 0;
  /* the zombie once more: it may have been collected by neither look, between them */
  if (!zombie_status(pid, &status) && !pidfd_status(pidfd, &status) && !zombie_status(pid, &status)) {
    add(t, " died: it was killed or exited without leaving the group");
  } else if (status & 0x7f) {
    add(t, " died: killed by signal %d (%s)", status & 0x7f, strsignal(status & 0x7f));
  } else {
    add(t, " died: it exited with code %d without leaving the group", (status >> 8) & 0xff);
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

static int gone(dc_comm *c, int r, bool left) {
  text t = {.n = 0};
  add(&t, "group %s: ", c->label);
  add_rank(&t, c, r);
  add(&t, " (pid %d)", c->h->seat[r].pid);
  if (left) add(&t, " left the group");
  else add_death(&t, c->h->seat[r].pid, c->pidfd[r]);
  add(&t, "; ");
  add_me(&t, c);
  add(&t, "; ");
  add_rank(&t, c, r);
  add(&t, " ");
  add_position(&t, c, r);
  return dc__break(c, DC_E_PEER_DIED, "%s", t.s);
}

int dc__await_calm(dc_comm *c) {
  const struct timespec nap = {0, 100000};
  const int64_t deadline = dc__now_ns() + c->timeout_ns;
  int busy = -1;
  atomic_load_explicit(&c->h->broken, memory_order_seq_cst); /* before `working`: see work_if_sound() */
  for (int r = 0; r < c->size; r++) {
    if (r == c->rank) continue;
    while (!c->dead[r] && atomic_load_explicit(&c->h->seat[r].working, memory_order_seq_cst)) {
      if (dc__now_ns() >= deadline) {
        busy = r;
        break;
      }
      nanosleep(&nap, NULL);
      look_at_pidfds(c);
    }
  }
  return busy;
}

int dc__unreachable(dc_comm *c, const char *why) {
  struct pollfd p[DC_COMM_MAX_RANKS];
  for (int r = 0; r < c->size; r++) p[r] = (struct pollfd){.fd = r == c->rank ? -1 : c->pidfd[r], .events = POLLIN};
  while (poll(p, (nfds_t)c->size, UNREACHABLE_MS) < 0 && errno == EINTR) continue;
  look_at_pidfds(c);
  for (int r = 0; r < c->size; r++)
    if (c->dead[r]) return gone(c, r, false);
  return dc__break(c, DC_E_PEER, "group %s: %s", c->label, why);
}

/* A rank that died or left matters only if it had not yet given what we wait for: what it gave stays valid. */
static int find_missing(dc_comm *c, const waiting *w) {
  look_at_pidfds(c);
  for (int r = 0; r < c->size; r++) {
    bool left = atomic_load_explicit(&c->h->seat[r].left, memory_order_acquire);
    if ((!c->dead[r] && !left) || reached(c, r, w)) continue; /* reached() after left/dead: its last words count */
    return gone(c, r, left);
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
  add_me(&t, c);
  add(&t, ".");
  add_everyone(&t, c, w);
  return dc__break(c, DC_E_TIMEOUT, "%s", t.s);
}

/* Everything that can end a wait other than what is waited for. */
static int look(dc_comm *c, const waiting *w) {
  c->look_ns = dc__now_ns();
  DC_TRY(dc__broken(c));
  if (w->kind == DC__POSTED)
    DC_TRY(compare(c, w->step)); /* a mismatch is told at once, even if some rank never arrives */
  DC_TRY(find_missing(c, w));
  return c->look_ns - w->start_ns >= c->timeout_ns ? late(c, w) : DC_OK;
}

/* Spins without a look at the clock: as long as a peer takes that is about to arrive. The first polls do without
 * `pause`, which would add its own length (40 ns here) to the latency. */
static bool spin_briefly(const dc_comm *c, int rank, const waiting *w) {
  for (int i = 0; i < 64; i++)
    if (reached(c, rank, w)) return true;
  for (int i = 0; i < 256; i++) {
    if (reached(c, rank, w)) return true;
    cpu_relax();
  }
  return false;
}

/* Spins for c->spin_ns, then offers the core to others for c->yield_ns: with more ranks than cores the peer that is
 * waited for may need this one, and a core that sleeps takes tens of microseconds to wake. */
static int wait_awake(dc_comm *c, int rank, const waiting *w, bool *there) {
  int64_t now = dc__now_ns(), spin_end = now + c->spin_ns, end = spin_end + c->yield_ns, look_at = now + DC__LOOK_NS;
  *there = true;
  for (; now < end; now = dc__now_ns()) {
    for (int i = 0; i < (now < spin_end ? 64 : 1); i++) {
      if (reached(c, rank, w)) return DC_OK;
      cpu_relax();
    }
    if (now >= spin_end) sched_yield();
    serve_messages();
    if (now < look_at) continue; /* longer only with a very long DEEPC_SPIN_US */
    DC_TRY(look(c, w));
    look_at = now + DC__LOOK_NS;
  }
  *there = reached(c, rank, w);
  return DC_OK;
}

static int wait_long(dc_comm *c, int rank, const waiting *w) {
  bool there;
  DC_TRY(wait_awake(c, rank, w, &there));
  if (there) return DC_OK;
  while (!reached(c, rank, w)) {
    /* looking costs a syscall, so not at every wake-up */
    DC_TRY(dc__now_ns() - c->look_ns >= DC__LOOK_NS ? look(c, w) : dc__broken(c));
    serve_messages();
    doze(c, rank, w);
  }
  return DC_OK;
}

/* What comes behind the brief spin counts as waiting: 50 ns of clock in 10 us and more. */
static int wait_for(dc_comm *c, int rank, const waiting *w) {
  dc__show(c);
  const int64_t began = dc__now_ns();
  const int rc = wait_long(c, rank, w);
  dc__count(DC_COUNTER_wait_ns, dc__now_ns() - began);
  return rc;
}

static int wait_all(dc_comm *c, waiting *w) {
  w->target = (uint32_t)(w->step + 1);
  w->start_ns = 0;
  for (int r = 0; r < c->size; r++) {
    if (reached(c, r, w) || (c->spin_ns && spin_briefly(c, r, w))) continue;
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
/* One thread at a time. The holder of the current bias has a word of its own and enters with two plain stores and
 * loads. Another thread takes over: it makes the next bias current, makes all cores see that, and then looks at the
 * holder's word: the holder has either shown itself there before, or sees that its bias is not the current one any
 * more. No word ever gets a second holder, because one that was taken over between its look and its store still sets
 * and clears its word later. Behind the last bias all threads share a word by compare and exchange, which is cheaper
 * than taking over once threads keep taking turns. tests/model/entry.pml checks this. */
typedef enum { IN, REFUSED, AGAIN } entry;

static bool exchange_in(dc_comm *c, uint32_t bias) {
  uint32_t out = 0;
  return atomic_compare_exchange_strong_explicit(&c->inside[bias], &out, 1, memory_order_seq_cst, memory_order_relaxed);
}

static uint32_t current(const dc_comm *c) { return atomic_load_explicit(&c->bias, memory_order_seq_cst); }

static void clear(dc_comm *c, uint32_t bias) { atomic_store_explicit(&c->inside[bias], 0, memory_order_release); }

static entry go_in_held(dc_comm *c, uint32_t bias) {
  if (atomic_load_explicit(&c->inside[bias], memory_order_relaxed)) return REFUSED; /* from inside, by a callback */
  atomic_store_explicit(&c->inside[bias], 1, memory_order_relaxed);
  atomic_signal_fence(memory_order_seq_cst);
  if (__builtin_expect(atomic_load_explicit(&c->bias, memory_order_relaxed) == bias, 1)) return IN;
  clear(c, bias);
  return AGAIN;
}

static entry go_in_shared(dc_comm *c) {
  if (!exchange_in(c, DC__BIASES)) return REFUSED;
  if (current(c) == DC__BIASES) return IN;
  clear(c, DC__BIASES); /* making it everybody's was tried and given up */
  return AGAIN;
}

/* With c->taking. The acquire in the last load: what the last one inside left. */
static entry next_bias(dc_comm *c, uint32_t bias, uintptr_t me) {
  if (!exchange_in(c, bias + 1)) return REFUSED;
  if (bias + 1 < DC__BIASES) atomic_store_explicit(&c->holder[bias + 1], me, memory_order_relaxed);
  atomic_store_explicit(&c->bias, bias + 1, memory_order_seq_cst);
  membarrier(MB_PRIVATE_EXPEDITED);
  if (atomic_load_explicit(&c->inside[bias], memory_order_seq_cst) == 0) return IN;
  atomic_store_explicit(&c->bias, bias, memory_order_seq_cst);
  clear(c, bias + 1);
  return REFUSED;
}

static entry take_over(dc_comm *c, uint32_t bias, uintptr_t me) {
  uint32_t idle = 0;
  while (!atomic_compare_exchange_weak_explicit(&c->taking, &idle, 1, memory_order_acquire, memory_order_relaxed)) {
    idle = 0;
    sched_yield();
  }
  const entry got = current(c) == bias ? next_bias(c, bias, me) : AGAIN;
  atomic_store_explicit(&c->taking, 0, memory_order_release);
  return got;
}

bool dc__go_in(dc_comm *c) {
  const uintptr_t me = (uintptr_t)pthread_self();
  for (;;) {
    uint32_t bias = atomic_load_explicit(&c->bias, memory_order_acquire);
    const bool shared = bias == DC__BIASES;
    const bool held = !shared && atomic_load_explicit(&c->holder[bias], memory_order_relaxed) == me;
    entry got = held ? go_in_held(c, bias) : shared ? go_in_shared(c) : AGAIN;
    if (got == AGAIN && !shared) {
      got = take_over(c, bias, me);
      bias++;
    }
    if (got == AGAIN) continue;
    if (got == IN) c->entered = bias;
    return got == IN;
  }
}

/* By the thread that opens. */
void dc__use_membarrier(dc_comm *c, bool yes) {
  c->fences = !yes;
  atomic_store_explicit(&c->holder[0], (uintptr_t)pthread_self(), memory_order_relaxed);
  atomic_store_explicit(&c->bias, yes ? 0 : DC__BIASES, memory_order_release);
}

int dc__enter(dc_comm *c) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  if (c->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process; open a new one here",
                   c->label);
  if (!dc__go_in(c))
    return DC_FAIL(DC_E_STATE, "group %s is in use by another thread; one call at a time per communicator", c->label);
  int rc = dc__broken(c);
  if (rc) dc__leave(c);
  return rc;
}

/* release: the next thread that enters sees what this one left */
void dc__leave(dc_comm *c) { clear(c, c->entered); }

void dc__show(dc_comm *c) {
  if (!c->unshown) return;
  c->unshown = false;
  c->flight = dc__flight_begin(c, &c->call, c->where);
}

/* ---- the exchange ------------------------------------------------------------------------------------------------ */
/* A place may be filled again when all have done the step that used it last, a cell when all have done the step before.
 */
static int64_t needed_for_cell(const dc_comm *c) { return c->begun - c->cells + 1; }
static int64_t needed_for_slot(const dc_comm *c) {
  const int64_t used = c->slot_used[c->begun % c->slots];
  return used > needed_for_cell(c) ? used : needed_for_cell(c);
}

/* What all have done, as far as it can be seen now. */
static void refresh_done(dc_comm *c, int64_t steps) {
  int64_t least = c->done;
  for (int r = 0; r < c->size; r++) {
    const uint32_t done = atomic_load_explicit(&c->h->seat[r].done, memory_order_acquire);
    const int64_t lifted = steps + (int32_t)(done - (uint32_t)steps);
    if (lifted < least) least = lifted;
  }
  if (least > c->all_done) c->all_done = least;
}

/* Waits until every rank has done `steps` steps. Who has to wait because it ran ahead waits for up to `more` further
 * ones as well: otherwise it would follow its peers step by step, and take the line of their counter away from them
 * every time. Steps that we have posted get done without us, so this can't be for ever. */
static int await_done(dc_comm *c, int64_t steps, int64_t more) {
  if (steps <= c->all_done) return DC_OK;
  refresh_done(c, steps);
  if (steps <= c->all_done) return DC_OK;
  const int64_t target = steps + more <= c->done ? steps + more : steps > c->done ? steps : c->done;
  waiting w = {.kind = DC__DONE, .step = target - 1};
  DC_TRY(wait_all(c, &w));
  refresh_done(c, target);
  return DC_OK;
}

static int check_open(const dc_comm *c) {
  if (__builtin_expect(c->begun - c->done < c->slots, 1)) return DC_OK;
  return DC_FAIL(DC_E_STATE, "group %s: all %d slots are open; mark step %lld done first", c->label, c->slots,
                 (long long)(c->done - c->base));
}

int dc__begin(dc_comm *c, int64_t *step, void **slot) {
  DC_TRY(check_open(c));
  DC_TRY(await_done(c, needed_for_slot(c), 0));
  *step = c->begun++;
  c->slot_used[*step % c->slots] = c->begun;
  *slot = dc__slot(c, c->rank, *step);
  return DC_OK;
}

/* The small slot for the next call: a few go round, so that the next one can be asked for while peers still read the
 * last (dc__warm) and all stay in cache; if it is not free, the first one that is, else the one that was used longest
 * ago. */
static uint32_t choose_small(const dc_comm *c) {
  const uint32_t next = (c->small_last + 1) % DC__SMALLS_ROUND;
  if (c->small_used[next] <= c->all_done) return next;
  uint32_t oldest = 0;
  for (uint32_t i = 0; i < DC__SMALLS; i++) {
    if (c->small_used[i] <= c->all_done) return i;
    if (c->small_used[i] < c->small_used[oldest]) oldest = i;
  }
  return oldest;
}

void dc__warm(dc_comm *c, int64_t step, int64_t bytes) {
  if (bytes <= DC__INLINE || c->spin_ns == 0) return;
  const waiting w = {.kind = DC__POSTED, .step = step, .target = (uint32_t)(step + 1)};
  const char *next = bytes <= DC__SMALL ? dc__small(c, c->rank, (c->small_last + 1) % DC__SMALLS_ROUND)
                                        : dc__slot(c, c->rank, c->begun);
  if (bytes > c->slot_bytes) bytes = c->slot_bytes;
  for (int64_t at = 0; at < bytes; at += 4 * DC__LINE) {
    bool here = true;
    for (int r = 0; r < c->size && here; r++) here = reached(c, r, &w);
    if (here) return;
    for (int i = 0; i < 4; i++) dc__prefetch_write(next + at + i * DC__LINE);
  }
}

int dc__begin_for(dc_comm *c, int64_t bytes, int64_t *step, void **place) {
  if (bytes > DC__SMALL) return dc__begin(c, step, place);
  DC_TRY(check_open(c));
  DC_TRY(await_done(c, needed_for_cell(c), c->cells / 2));
  dc__cell *cell = cell_of(c, c->rank, c->begun);
  *place = cell->data;
  if (bytes > DC__INLINE) {
    const uint32_t i = choose_small(c);
    DC_TRY(await_done(c, c->small_used[i], DC__SMALLS / 2));
    c->small_used[i] = c->begun + 1;
    c->small_last = i;
    cell->data[0] = i;
    *place = dc__small(c, c->rank, i);
  }
  *step = c->begun++;
  return DC_OK;
}

int dc__can_begin(dc_comm *c, int *ready) {
  *ready = 0;
  if (c->begun - c->done >= c->slots) return DC_OK;
  *ready = 1;
  const int64_t needed = needed_for_slot(c);
  if (needed <= c->all_done) return DC_OK;
  waiting w = {.kind = DC__DONE, .step = needed - 1};
  return test_all(c, &w, ready);
}

int dc__post(dc_comm *c, const dc_call *call) {
  if (c->posted >= c->begun) return DC_FAIL(DC_E_STATE, "group %s: post without begin", c->label);
  cell_write(c, call, c->posted);
  _Atomic uint32_t *word = &cell_of(c, c->rank, c->posted)->posted;
  c->posted++;
  advance(c, DC__POSTED, word, (uint32_t)c->posted);
  dc__prefetch_write(cell_of(c, c->rank, c->posted + 1));
  dc__show(c);
  return DC_OK;
}

int dc__wait(dc_comm *c, int64_t step) {
  if (step < c->done || step >= c->posted)
    return DC_FAIL(DC_E_STATE, "group %s: wait for step %lld, but only %lld to %lld are posted and not done", c->label,
                   (long long)(step - c->base), (long long)(c->done - c->base), (long long)(c->posted - c->base - 1));
  for (; c->arrived <= step; c->arrived++) {
    waiting w = {.kind = DC__POSTED, .step = c->arrived};
    DC_TRY(wait_all(c, &w));
    DC_TRY(learn(c, c->arrived));
  }
  return DC_OK;
}

int dc__wait_rank(dc_comm *c, int64_t step, int rank) {
  if (step != c->arrived || step >= c->posted) return dc__wait(c, step);
  waiting w = {.kind = DC__POSTED, .step = step, .target = (uint32_t)(step + 1)};
  if (!reached(c, rank, &w) && !(c->spin_ns && spin_briefly(c, rank, &w))) {
    w.start_ns = dc__now_ns();
    DC_TRY(wait_for(c, rank, &w));
  }
  if (!same_hash(cell_of(c, c->rank, step), cell_of(c, rank, step))) return compare(c, step);
  c->arrived++;
  return DC_OK;
}

int dc__skip(dc_comm *c, int64_t step) {
  if (step != c->arrived || step >= c->posted) return dc__wait(c, step);
  c->arrived++;
  return DC_OK;
}

int dc__share(dc_comm *c, const dc_call *call, const void *mine, int64_t bytes, void *all) {
  int64_t step;
  void *place;
  DC_TRY(dc__begin_for(c, bytes, &step, &place));
  if (bytes) memcpy(place, mine, (size_t)bytes);
  DC_TRY(dc__post(c, call));
  DC_TRY(dc__wait(c, step));
  for (int r = 0; r < c->size && bytes; r++)
    memcpy((char *)all + r * bytes, dc__place(c, r, step, bytes), (size_t)bytes);
  return dc__done(c, step);
}

int dc__done(dc_comm *c, int64_t step) {
  if (step != c->done || step >= c->arrived)
    return DC_FAIL(DC_E_STATE, "group %s: done for step %lld, but step %lld is next and %lld have been waited for",
                   c->label, (long long)(step - c->base), (long long)(c->done - c->base),
                   (long long)(c->arrived - c->base));
  c->done++;
  /* a release at least: our reads of the peers' slots stay before it, so they may fill them again */
  advance(c, DC__DONE, &c->h->seat[c->rank].done, (uint32_t)c->done);
  return DC_OK;
}

int dc_exchange_begin(dc_comm *c, int64_t *step, void **slot) {
  if (!step || !slot) return DC_FAIL(DC_E_INVALID, "step or slot is NULL");
  DC_TRY(dc__enter(c));
  int rc = dc__begin(c, step, slot);
  if (!rc) *step -= c->base;
  if (rc) dc__flight_end(dc__flight_begin(c, &c->call, c->where), rc); /* nothing shows what it waited for otherwise */
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
  if (c->posted < c->begun) dc__flight_step_begin(c, call, c->posted);
  c->call = *call;
  int rc = dc__post(c, call);
  dc__leave(c);
  return rc;
}

int dc_exchange_wait(dc_comm *c, int64_t step) {
  DC_TRY(dc__enter(c));
  step += c->base;
  int rc = dc__wait(c, step);
  if (rc) dc__flight_step_end(c, step, rc);
  dc__leave(c);
  return rc;
}

int dc_exchange_test(dc_comm *c, int64_t step, int *ready) {
  if (!ready) return DC_FAIL(DC_E_INVALID, "ready is NULL");
  DC_TRY(dc__enter(c));
  step += c->base;
  int yes = step < c->arrived && step >= c->done, rc = DC_OK;
  if (!yes && (step < c->done || step >= c->posted)) {
    rc = DC_FAIL(DC_E_STATE, "group %s: test of step %lld, but only %lld to %lld are posted and not done", c->label,
                 (long long)(step - c->base), (long long)(c->done - c->base), (long long)(c->posted - c->base - 1));
  } else if (!yes) {
    waiting w = {.kind = DC__POSTED, .step = step};
    rc = test_all(c, &w, &yes);
    if (!rc && yes) rc = dc__wait(c, step); /* does not block; compares */
  }
  if (rc) dc__flight_step_end(c, step, rc);
  else *ready = yes;
  dc__leave(c);
  return rc;
}

const void *dc_exchange_peer(const dc_comm *c, int rank, int64_t step) {
  if (!c || rank < 0 || rank >= c->size || step < 0) return NULL;
  return dc__slot(c, rank, step + c->base);
}

int dc_exchange_done(dc_comm *c, int64_t step) {
  DC_TRY(dc__enter(c));
  step += c->base;
  int rc = dc__done(c, step);
  if (!rc) dc__flight_step_end(c, step, DC_OK);
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
  c->where_number++;
  return DC_OK;
}

const char *dc_comm_error(const dc_comm *c) {
  if (!c || c->fork_mark != dc__fork_mark()) return "";
  if (atomic_load_explicit(&c->h->broken, memory_order_acquire) != DC__BROKEN) return "";
  return c->h->text;
}

/* ---- for p2p.c --------------------------------------------------------------------------------------------------- */
void dc__tell_death(const dc_comm *c, int rank, char *s, size_t room) {
  text t = {.n = 0};
  add_death(&t, c->h->seat[rank].pid, c->pidfd[rank]);
  snprintf(s, room, "%s", t.s);
}

void dc__tell_call(const dc_comm *c, int rank, int64_t step, char *s, size_t room) {
  text t = {.n = 0};
  add_rank(&t, c, rank);
  add(&t, " called ");
  add_cell(&t, c, cell_of(c, rank, step));
  snprintf(s, room, "%s", t.s);
}

void dc__tell_position(const dc_comm *c, int rank, char *s, size_t room) {
  text t = {.n = 0};
  add_position(&t, c, rank);
  snprintf(s, room, "%s", t.s);
}
