/* sync.c: see sync.h. Owns who is inside a communicator, the numbers of its steps, its cells and slots.
 *
 * Assumes that ranks are at most `slots` steps apart, so that 32-bit counters compare by their difference. A call of 8
 * B takes 100 to 200 ns between two cores; where they go, and what was tried, is in docs/lab/collectives.md. */
#include "sync.h"

#include <limits.h>
#include <stdio.h>

#include "deadlock.h"
#include "flight.h"
#include "tell.h"
#include "wait.h"

/* ---- waiting for ranks ------------------------------------------------------------------------------------------- */
/* All ranks, or one, are to bring `kind` to `target`. */
typedef struct sync_waiting {
  int kind;
  uint32_t target;
  int64_t step, start_ns;
} sync_waiting;

/* The same for the waiter, when it takes longer. */
typedef struct sync_long {
  dc__waiting w; /* first: the waiter gives it back */
  const sync_waiting *of;
  int rank;       /* that is waited for, if it is one */
  bool tests;     /* does not wait: it goes on with something else */
  bool team, all; /* team: the word is not a rank's, see dc__await_word(); all: which need not be waited for any more */
} sync_long;

static inline _Atomic uint32_t *sync_word(const dc_comm *c, int rank, const sync_waiting *w) {
  return w->kind == DC__POSTED ? &dc__cell_of(c, rank, w->step)->posted : &c->h->seat[rank].done;
}

static inline bool sync_there(const _Atomic uint32_t *word, const sync_waiting *w) {
  /* acquire: pairs with dc__publish(); what the peer wrote before (slot, fingerprint, its last reads of ours) lies
   * before us. */
  return dc__at_least(atomic_load_explicit(word, memory_order_acquire), w->target);
}

static inline bool sync_reached(const dc_comm *c, int rank, const sync_waiting *w) {
  return sync_there(sync_word(c, rank, w), w);
}

/* Compares what has arrived of `step`: everyone with the lowest rank that is there. */
static int sync_compare(dc_comm *c, int64_t step) {
  int first = -1;
  for (int r = 0; r < c->size; r++) {
    if (!dc__holds(c, r, step)) continue;
    if (first < 0) first = r;
    else if (!dc__same_hash(dc__cell_of(c, first, step), dc__cell_of(c, r, step))) {
      dc__text t = {.n = 0};
      dc__tell_mismatch(&t, c, step, first, r);
      return dc__break(c, DC_E_MISMATCH, "%s", t.s);
    }
  }
  return DC_OK;
}

/* A rank that died or left matters only if it had not yet given what we wait for: what it gave stays valid. */
static int sync_find_missing(dc_comm *c, const sync_waiting *w) {
  for (int r = 0; r < c->size; r++) {
    const bool gone = dc__is_dead(c, r) || dc__has_left(c, r);
    if (!gone || sync_reached(c, r, w)) continue; /* reached() after left and dead: its last words count */
    dc__text mine = {.n = 0}, theirs = {.n = 0};
    dc__tell_own_call(&mine, c);
    dc__tell_position(&theirs, c, r);
    return dc__break_lost(c, r, &mine, &theirs);
  }
  return DC_OK;
}

static void sync_tell_everyone(dc__text *t, const dc_comm *c, const sync_waiting *w) {
  text_add(t, " Where every rank is:");
  int shown = 0;
  for (int late = 1; late >= 0; late--) { /* those that are waited for come first */
    for (int r = 0; r < c->size; r++) {
      if ((sync_reached(c, r, w) ? 0 : 1) != late) continue;
      if (shown++ == 12) {
        text_add(t, " ... (%d more)", c->size - 12);
        return;
      }
      text_add(t, shown == 1 ? " " : "; ");
      text_add_pid(t, c, r);
      text_add(t, " ");
      dc__tell_position(t, c, r);
    }
  }
}

static int sync_late(dc_comm *c, const sync_waiting *w) {
  dc__text t = {.n = 0};
  text_add(&t, "group %s: time-out after %lld ms: ", c->label, (long long)(c->timeout_ns / 1000000));
  const char *sep = "";
  for (int r = 0, shown = 0; r < c->size && shown < 16; r++) {
    if (sync_reached(c, r, w)) continue;
    text_add(&t, "%s", sep);
    text_add_rank(&t, c, r);
    sep = ", ";
    shown++;
  }
  text_add(&t, " did not arrive; ");
  text_add_rank(&t, c, c->rank);
  text_add(&t, " waits for it in ");
  dc__tell_own_call(&t, c);
  text_add(&t, ".");
  sync_tell_everyone(&t, c, w);
  return dc__break(c, DC_E_TIMEOUT, "%s", t.s);
}

static int sync_poll(dc__waiting *x, bool *there) {
  const sync_long *l = (const sync_long *)(const void *)x;
  *there = l->all || sync_there(x->word, l->of);
  return DC_OK;
}

static bool sync_all_reached(const dc_comm *c, const sync_waiting *w) {
  for (int r = 0; r < c->size; r++)
    if (!sync_reached(c, r, w)) return false;
  return true;
}

/* Whom a rank that waits for its team's word waits for in truth. */
static int sync_first_missing(const dc_comm *c, const sync_waiting *w) {
  int r = 0;
  while (r + 1 < c->size && sync_reached(c, r, w)) r++;
  return r;
}

static int sync_look(dc__waiting *x) {
  sync_long *l = (sync_long *)(void *)x;
  const sync_waiting *w = l->of;
  DC_TRY(dc__broken(x->c));
  if (l->team && sync_all_reached(x->c, w)) {
    l->all = true;
    return DC_OK;
  }
  /* a mismatch is told at once, even if some rank never arrives */
  if (w->kind == DC__POSTED) DC_TRY(sync_compare(x->c, w->step));
  DC_TRY(sync_find_missing(x->c, w));
  if (dc__deadlock_is_served()) dc__deadlock_forget(x->c);
  else if (!l->tests) DC_TRY(dc__deadlock_look(x->c, l->team ? sync_first_missing(x->c, w) : l->rank, false));
  return x->late ? sync_late(x->c, w) : DC_OK;
}

/* For step `step` of all ranks. */
static sync_waiting sync_for(int kind, int64_t step) {
  return (sync_waiting){.kind = kind, .step = step, .target = (uint32_t)(step + 1)};
}

/* The long wait. What comes behind the brief spin counts as waiting: 50 ns of clock in 10 us and more. */
static int sync_wait_long(dc_comm *c, sync_long *l, sync_waiting *w) {
  dc__show(c);
  const int64_t began = dc__now_ns();
  if (!w->start_ns) w->start_ns = began;
  l->of = w;
  l->w.c = c;
  l->w.poll = sync_poll;
  l->w.look = sync_look;
  l->w.start_ns = w->start_ns;
  l->w.timeout_ns = c->timeout_ns;
  l->w.look_ns = &c->look_ns;
  l->w.serves = true;
  const int rc = dc__await(&l->w);
  dc__deadlock_forget(c);
  dc__count(DC_COUNTER_wait_ns, dc__now_ns() - began);
  return rc;
}

static int sync_wait(dc_comm *c, int rank, sync_waiting *w) {
  sync_long l = {.rank = rank, .w = {.word = sync_word(c, rank, w), .sleepers = &c->h->seat[rank].sleepers[w->kind]}};
  return sync_wait_long(c, &l, w);
}

/* Spins without a look at the clock: as long as a peer takes that is about to arrive. The first polls do without
 * `pause`, which would add its own length (40 ns) to the latency. */
static bool sync_spin(const _Atomic uint32_t *word, const sync_waiting *w) {
  for (int i = 0; i < 64; i++)
    if (sync_there(word, w)) return true;
  for (int i = 0; i < 256; i++) {
    if (sync_there(word, w)) return true;
    dc__cpu_relax();
  }
  return false;
}

static int sync_wait_rank(dc_comm *c, int rank, sync_waiting *w) {
  const _Atomic uint32_t *word = sync_word(c, rank, w);
  return sync_there(word, w) || (c->spin_ns && sync_spin(word, w)) ? DC_OK : sync_wait(c, rank, w);
}

/* The rank behind `r`, in a circle. */
static inline int sync_next(const dc_comm *c, int r) { return r + 1 < c->size ? r + 1 : 0; }

/* Every rank starts behind itself: if all began with rank 0, they would queue for its line. */
static int sync_wait_all(dc_comm *c, sync_waiting *w) {
  for (int i = 0, r = sync_next(c, c->rank); i < c->size; i++, r = sync_next(c, r)) DC_TRY(sync_wait_rank(c, r, w));
  return DC_OK;
}

int dc__await_posted(dc_comm *c, int64_t step, int rank) {
  sync_waiting w = sync_for(DC__POSTED, step);
  return sync_wait_rank(c, rank, &w);
}

int dc__await_word(dc_comm *c, _Atomic uint32_t *word, _Atomic uint32_t *sleepers, int64_t step, bool *all) {
  sync_waiting w = sync_for(DC__POSTED, step);
  sync_long l = {.team = true, .w = {.word = word, .sleepers = sleepers}};
  int rc = sync_there(word, &w) || (c->spin_ns && sync_spin(word, &w)) ? DC_OK : sync_wait_long(c, &l, &w);
  *all = l.all || (rc && sync_all_reached(c, &w)); /* the group broke behind this step, which is whole */
  return *all ? DC_OK : rc;
}

/* Without blocking; looks after the peers now and then, so that polling callers learn of a death as well. */
static int sync_test_all(dc_comm *c, sync_waiting *w, int *ready) {
  DC_TRY(dc__broken(c));
  for (int r = 0; r < c->size; r++) {
    if (sync_reached(c, r, w)) continue;
    /* a test has no time-out */
    sync_long l = {
        .of = w, .tests = true, .w = {.c = c, .look = sync_look, .timeout_ns = INT64_MAX, .look_ns = &c->look_ns}};
    if (dc__look_due(&l.w)) DC_TRY(dc__look(&l.w));
    *ready = 0;
    return DC_OK;
  }
  *ready = 1;
  return DC_OK;
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */
/* acquire and release: a thread that enters sees what the last one left */
bool dc__go_in(dc_comm *c) {
  uint32_t out = 0;
  return atomic_compare_exchange_strong_explicit(&c->inside, &out, 1, memory_order_acquire, memory_order_relaxed);
}

void dc__leave(dc_comm *c) { atomic_store_explicit(&c->inside, 0, memory_order_release); }

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

void dc__show(dc_comm *c) {
  if (!c->unshown) return;
  c->unshown = false;
  c->flight = dc__flight_begin(c, &c->call);
}

int dc_comm_set_timeout(dc_comm *c, int64_t timeout_ms) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  if (timeout_ms <= 0 || timeout_ms > INT64_MAX / 2000000)
    return DC_FAIL(DC_E_INVALID, "timeout_ms %lld: expected a positive number of milliseconds", (long long)timeout_ms);
  c->timeout_ns = timeout_ms * 1000000;
  return DC_OK;
}

int dc_comm_waits(dc_comm *c, int rank, const char *what) {
  if (c && rank < 0 && c->fork_mark == dc__fork_mark()) {
    dc__deadlock_forget_outside(c);
    return DC_OK;
  }
  DC_TRY(dc__enter(c));
  int rc = DC_OK;
  if (rank >= c->size || rank == c->rank || !what) {
    rc = DC_FAIL(DC_E_INVALID, "rank %d waits for rank %d of %d", c->rank, rank, c->size);
  } else if (dc__look_at_peer(c, rank)) {
    dc__text t = {.n = 0};
    text_add_pid(&t, c, rank);
    dc__tell_end(&t, c, rank);
    rc = DC_FAIL(DC_E_PEER_DIED, "%s; rank %d waits for it %s", t.s, c->global_rank[c->rank], what);
  } else {
    rc = dc__deadlock_look(c, rank, true);
  }
  dc__leave(c);
  return rc;
}

/* relaxed: a text that is set while another thread's call shows it may be mixed with the one before */
int dc_comm_set_caller(dc_comm *c, const char *where) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  uint64_t w[DC__WHERE_WORDS] = {0};
  if (where) memcpy(w, where, strnlen(where, DC__WHERE - 1));
  for (int i = 0; i < DC__WHERE_WORDS; i++) atomic_store_explicit(&c->where[i], w[i], memory_order_relaxed);
  const uint32_t number = atomic_load_explicit(&c->where_number, memory_order_relaxed) + 1;
  atomic_store_explicit(&c->where_number, number ? number : 1, memory_order_release);
  return DC_OK;
}

/* ---- fingerprints ------------------------------------------------------------------------------------------------ */
static void sync_pack(const dc_call *k, uint64_t w[DC__CALL_WORDS]) {
  w[0] = (uint64_t)(uint16_t)k->op | (uint64_t)(uint8_t)k->dtype << 16 | (uint64_t)(uint8_t)k->red_op << 24 |
         (uint64_t)(uint32_t)k->root << 32;
  w[1] = (uint64_t)k->count;
  w[2] = (uint64_t)k->tag;
}

/* Each step is a bijection of h (odd factors), so two histories that differ in one call never meet again by it. */
static uint64_t sync_mix(uint64_t h, const uint64_t w[DC__CALL_WORDS]) {
  for (int i = 0; i < DC__CALL_WORDS; i++) {
    h = (h ^ w[i]) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
  }
  return h;
}

/* What is compared while all wait is ordered by the word `posted`. release: who sees one of these words sees `filling`,
 * see dc__cell; it costs nothing on x86. */
static void sync_write(dc_comm *c, const dc_call *call, int64_t step) {
  dc__cell *cell = dc__cell_of(c, c->rank, step);
  uint64_t w[DC__CALL_WORDS];
  sync_pack(call, w);
  c->hash = sync_mix(c->hash, w);
  atomic_store_explicit(&cell->filling, (uint32_t)(step + 1), memory_order_relaxed);
  for (int i = 0; i < DC__CALL_WORDS; i++) atomic_store_explicit(&cell->call[i], w[i], memory_order_release);
  atomic_store_explicit(&cell->hash, c->hash, memory_order_relaxed);
  atomic_store_explicit(&cell->seq, (uint32_t)c->seq, memory_order_release);
  atomic_store_explicit(&cell->done, (uint32_t)c->done, memory_order_relaxed);
  const uint32_t number = atomic_load_explicit(&c->where_number, memory_order_acquire);
  if (c->shown[step % c->cells] == number) return;
  c->shown[step % c->cells] = number;
  dc__where *where = &c->wheres[(int64_t)c->rank * c->cells + step % c->cells];
  for (int i = 0; i < DC__WHERE_WORDS; i++)
    atomic_store_explicit(&where->w[i], atomic_load_explicit(&c->where[i], memory_order_relaxed), memory_order_release);
}

/* All have posted `step`: compares it, and takes from the same lines how far everyone was, which saves begin() a wait.
 */
static int sync_learn(dc_comm *c, int64_t step) {
  const dc__cell *own = dc__cell_of(c, c->rank, step);
  int64_t least = c->done;
  for (int i = 1, r = sync_next(c, c->rank); i < c->size; i++, r = sync_next(c, r)) {
    const dc__cell *cell = dc__cell_of(c, r, step);
    if (__builtin_expect(!dc__same_hash(own, cell), 0)) return sync_compare(c, step);
    int64_t done = c->done + (int32_t)(atomic_load_explicit(&cell->done, memory_order_relaxed) - (uint32_t)c->done);
    if (done < least) least = done;
  }
  if (least > c->all_done) c->all_done = least;
  return DC_OK;
}

/* ---- the exchange ------------------------------------------------------------------------------------------------ */
/* A place may be filled again when all have done the step that used it last, a cell when all have done the step before.
 */
static int64_t sync_needed_for_cell(const dc_comm *c) { return c->begun - c->cells + 1; }
static int64_t sync_needed_for_slot(const dc_comm *c) {
  const int64_t used = c->slot_used[c->begun % c->slots];
  return used > sync_needed_for_cell(c) ? used : sync_needed_for_cell(c);
}

/* What all have done, as far as it can be seen now. */
static void sync_refresh_done(dc_comm *c, int64_t steps) {
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
static int sync_await_done(dc_comm *c, int64_t steps, int64_t more) {
  if (steps <= c->all_done) return DC_OK;
  sync_refresh_done(c, steps);
  if (steps <= c->all_done) return DC_OK;
  const int64_t target = steps + more <= c->done ? steps + more : steps > c->done ? steps : c->done;
  sync_waiting w = sync_for(DC__DONE, target - 1);
  DC_TRY(sync_wait_all(c, &w));
  sync_refresh_done(c, target);
  return DC_OK;
}

static int sync_check_open(const dc_comm *c) {
  if (__builtin_expect(c->begun - c->done < c->slots, 1)) return DC_OK;
  return DC_FAIL(DC_E_STATE, "group %s: all %d slots are open; mark step %lld done first", c->label, c->slots,
                 (long long)(c->done - c->base));
}

int dc__begin(dc_comm *c, int64_t *step, void **slot) {
  DC_TRY(sync_check_open(c));
  DC_TRY(sync_await_done(c, sync_needed_for_slot(c), 0));
  *step = c->begun++;
  c->slot_used[*step % c->slots] = c->begun;
  *slot = dc__slot(c, c->rank, *step);
  return DC_OK;
}

/* The small slot for the next call: a few go round, so that the next one can be asked for while peers still read the
 * last (dc__warm) and all stay in cache; if it is not free, the first one that is, else the one that was used longest
 * ago. */
static uint32_t sync_choose_small(const dc_comm *c) {
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
  const sync_waiting w = sync_for(DC__POSTED, step);
  const char *next = bytes <= DC__SMALL ? dc__small(c, c->rank, (c->small_last + 1) % DC__SMALLS_ROUND)
                                        : dc__slot(c, c->rank, c->begun);
  if (bytes > c->slot_bytes) bytes = c->slot_bytes;
  for (int64_t at = 0; at < bytes; at += 4 * DC__LINE) {
    bool here = true;
    for (int i = 0, r = sync_next(c, c->rank); i < c->size && here; i++, r = sync_next(c, r))
      here = sync_reached(c, r, &w);
    if (here) return;
    for (int i = 0; i < 4; i++) dc__prefetch_write(next + at + i * DC__LINE);
  }
}

int dc__begin_for(dc_comm *c, int64_t bytes, int64_t *step, void **place) {
  if (bytes > DC__SMALL) return dc__begin(c, step, place);
  DC_TRY(sync_check_open(c));
  DC_TRY(sync_await_done(c, sync_needed_for_cell(c), c->cells / 2));
  dc__cell *cell = dc__cell_of(c, c->rank, c->begun);
  *place = cell->data;
  if (bytes > DC__INLINE) {
    const uint32_t i = sync_choose_small(c);
    DC_TRY(sync_await_done(c, c->small_used[i], DC__SMALLS / 2));
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
  const int64_t needed = sync_needed_for_slot(c);
  if (needed <= c->all_done) return DC_OK;
  sync_waiting w = sync_for(DC__DONE, needed - 1);
  return sync_test_all(c, &w, ready);
}

int dc__post(dc_comm *c, const dc_call *call) {
  if (c->posted >= c->begun) return DC_FAIL(DC_E_STATE, "group %s: post without begin", c->label);
  sync_write(c, call, c->posted);
  _Atomic uint32_t *word = &dc__cell_of(c, c->rank, c->posted)->posted;
  c->posted++;
  dc__publish(c, word, (uint32_t)c->posted, &c->h->seat[c->rank].sleepers[DC__POSTED]);
  dc__prefetch_write(dc__cell_of(c, c->rank, c->posted + 1));
  dc__show(c);
  return DC_OK;
}

int dc__wait(dc_comm *c, int64_t step) {
  if (step < c->done || step >= c->posted)
    return DC_FAIL(DC_E_STATE, "group %s: wait for step %lld, but only %lld to %lld are posted and not done", c->label,
                   (long long)(step - c->base), (long long)(c->done - c->base), (long long)(c->posted - c->base - 1));
  for (; c->arrived <= step; c->arrived++) {
    sync_waiting w = sync_for(DC__POSTED, c->arrived);
    DC_TRY(sync_wait_all(c, &w));
    DC_TRY(sync_learn(c, c->arrived));
  }
  return DC_OK;
}

int dc__wait_rank(dc_comm *c, int64_t step, int rank) {
  if (step != c->arrived || step >= c->posted) return dc__wait(c, step);
  sync_waiting w = sync_for(DC__POSTED, step);
  DC_TRY(sync_wait_rank(c, rank, &w));
  if (!dc__same_hash(dc__cell_of(c, c->rank, step), dc__cell_of(c, rank, step))) return sync_compare(c, step);
  c->arrived++;
  return DC_OK;
}

int dc__skip(dc_comm *c, int64_t step) {
  if (step != c->arrived || step >= c->posted) return dc__wait(c, step);
  c->arrived++;
  return DC_OK;
}

int dc__done(dc_comm *c, int64_t step) {
  if (step != c->done || step >= c->arrived)
    return DC_FAIL(DC_E_STATE, "group %s: done for step %lld, but step %lld is next and %lld have been waited for",
                   c->label, (long long)(step - c->base), (long long)(c->done - c->base),
                   (long long)(c->arrived - c->base));
  c->done++;
  /* a release at least: our reads of the peers' slots stay before it, so they may fill them again */
  dc__seat *own = &c->h->seat[c->rank];
  dc__publish(c, &own->done, (uint32_t)c->done, &own->sleepers[DC__DONE]);
  return DC_OK;
}

int dc_exchange_begin(dc_comm *c, int64_t *step, void **slot) {
  if (!step || !slot) return DC_FAIL(DC_E_INVALID, "step or slot is NULL");
  DC_TRY(dc__enter(c));
  int rc = dc__begin(c, step, slot);
  if (!rc) *step -= c->base;
  if (rc) dc__flight_end(dc__flight_begin(c, &c->call), rc); /* nothing shows what it waited for otherwise */
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
    sync_waiting w = sync_for(DC__POSTED, step);
    rc = sync_test_all(c, &w, &yes);
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
