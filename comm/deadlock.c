/* deadlock.c: see deadlock.h. Owns the families of communicators, and the words `waits` and `looks` of the own seats.
 *
 * An engine has several communicators and calls them all in one order. A rank that leaves a call out (rank 0 alone
 * saves a checkpoint, one rank skips a step) then waits in one of them while the others wait in another: in none of
 * them do two calls differ, so none can tell. What can be seen is that the waits make a circle. Each rank shows in its
 * seat for whom it waits, and in which communicator; who waits follows that from rank to rank. A circle of ranks that
 * wait with their only thread can't open again, so one that stands for DEADLOCK_NS is an error. (The graph of waits:
 * Coffman, Elphick, Shoshani, System Deadlocks, 1971. Each rank shows one of those that it waits for, the first one
 * that is missing: when all of a circle are stuck, that is enough.)
 *
 * What a rank shows is taken back by itself, when it wakes: one that is stopped (a debugger, a frozen container, memory
 * that is swapped in) shows a wait that may long be over. So a circle counts only when each of its ranks has looked
 * twice since it was seen. Who waits tests between two looks whether it is there: then all were still waiting after the
 * moment at which the circle stood, and what they wait for had not come before it.
 *
 * A call that a thread makes for another one (an asynchronous collective) is no wait of the rank until that one waits
 * for it: what is missing may come from there (dc_comm_thread_serves).
 *
 * Assumes what dc_comm_relate asks for: the same ranks, one call at a time over the whole family.
 *
 * A script has communicators of its own beside an engine's, or two engines, and may call them from any thread
 * (dc_comm_meet). A thread waits in one place: so of a circle that leads through more than one family only waits count
 * that are of one thread of each process, the one that said so. */
#include "deadlock.h"

#include <pthread.h>

#include "fault.h"
#include "tell.h"

#define DEADLOCK_NS (2 * 1000 * 1000 * 1000ll) /* long beside a wake-up, short beside a person's patience */

/* Of all families of this process: the rings, and that their members stay mapped while they are walked. */
static pthread_mutex_t deadlock_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t deadlock_meetings;  /* calls of dc_comm_meet */
static _Thread_local uint64_t deadlock_met; /* the number of this thread's last one */
DC__AT_FORK(deadlock_at_fork, DC__FORK_FAMILIES, &deadlock_lock, NULL)

/* A wait of one rank: where, and for whom. */
typedef struct deadlock_edge {
  dc_comm *c;
  uint32_t shown, looks;
  int from, to;
} deadlock_edge;

/* seat.waits: rank + 1; whether the wait is outside of c; whether it is of the one thread; above them a number that
 * differs from wait to wait. */
enum {
  WAITS_RANK_BITS = 15,
  WAITS_OUTSIDE = 1 << WAITS_RANK_BITS,
  WAITS_ONE_THREAD = 2 * WAITS_OUTSIDE,
  WAITS_NUMBER = 4 * WAITS_OUTSIDE
};
_Static_assert(DC_COMM_MAX_RANKS < WAITS_OUTSIDE, "a rank fits");

/* Whether this is the one thread: that which called dc_comm_meet last. */
static bool deadlock_is_one_thread(void) {
  return deadlock_met && deadlock_met == atomic_load_explicit(&deadlock_meetings, memory_order_relaxed);
}

static void deadlock_show(dc_comm *c, int rank, bool outside) {
  dc__seat *own = &c->h->seat[c->rank];
  const uint32_t whom = (uint32_t)(rank + 1) | (outside ? WAITS_OUTSIDE : 0) |
                        (deadlock_is_one_thread() ? WAITS_ONE_THREAD : 0);
  /* relaxed: written by this process alone, and looked at by others */
  atomic_fetch_add_explicit(&own->looks, 1, memory_order_relaxed);
  if (atomic_load_explicit(&own->waits, memory_order_relaxed) % WAITS_NUMBER == whom) return;
  c->waits++;
  c->waits_shown = true;
  c->circle_ns = 0;
  /* release: who sees it also sees the call that we posted */
  atomic_store_explicit(&own->waits, c->waits * WAITS_NUMBER | whom, memory_order_release);
}

static _Thread_local const _Atomic int32_t *deadlock_joined;

void dc_comm_thread_serves(const int32_t *joined) { deadlock_joined = (const _Atomic int32_t *)joined; }

bool dc__deadlock_is_served(void) {
  /* relaxed: nothing but the number is read; a look that comes too early is made again */
  return deadlock_joined && !atomic_load_explicit(deadlock_joined, memory_order_relaxed);
}

void dc__deadlock_forget(dc_comm *c) {
  if (!c->waits_shown) return;
  c->waits_shown = false;
  atomic_store_explicit(&c->h->seat[c->rank].waits, 0, memory_order_release);
}

void dc__deadlock_forget_outside(dc_comm *c) {
  _Atomic uint32_t *waits = &c->h->seat[c->rank].waits;
  uint32_t shown = atomic_load_explicit(waits, memory_order_relaxed);
  if (shown & WAITS_OUTSIDE) /* fails where a call in progress shows its own by now */
    atomic_compare_exchange_strong_explicit(waits, &shown, 0, memory_order_release, memory_order_relaxed);
}

/* For whom `rank` waits, in any communicator of c's family, or by its one thread in another that it meets. */
static bool deadlock_next(dc_comm *c, int rank, deadlock_edge *e) {
  dc_comm *k = c;
  do {
    dc__seat *seat = &k->h->seat[rank];
    const uint32_t shown = atomic_load_explicit(&seat->waits, memory_order_acquire);
    const int to = (int)(shown % WAITS_OUTSIDE) - 1;
    if (to >= 0 && to < c->size && (k->kin == c->kin || shown & WAITS_ONE_THREAD)) {
      const uint32_t looks = atomic_load_explicit(&seat->looks, memory_order_relaxed);
      *e = (deadlock_edge){.c = k, .shown = shown, .looks = looks, .from = rank, .to = to};
      return true;
    }
    k = k->family;
  } while (k != c);
  return false;
}

/* Follows the waits from this rank: the number of edges if they come back to it, else 0. *mark differs from circle to
 * circle. */
static int deadlock_follow(dc_comm *c, deadlock_edge edge[], uint64_t *mark) {
  int n = 0, at = c->rank;
  bool mixed = false, one_thread = true;
  *mark = 0;
  do {
    if (n == c->size || !deadlock_next(c, at, &edge[n])) return 0;
    mixed |= edge[n].c->kin != c->kin;
    one_thread &= (edge[n].shown & WAITS_ONE_THREAD) != 0;
    *mark = (*mark ^ edge[n].shown ^ (uint64_t)(uintptr_t)edge[n].c) * 0x9e3779b97f4a7c15u;
    at = edge[n++].to;
  } while (at != c->rank);
  return mixed && !one_thread ? 0 : n;
}

/* Each of its ranks has found since the circle was first seen that it still waits. */
static bool deadlock_stands(const dc_comm *c, const deadlock_edge edge[], int n) {
  for (int i = 0; i < n; i++)
    if (edge[i].looks - c->circle_looks[i] < 2) return false;
  return true;
}

/* All communicators of the circle get one text: their ranks raise at once, whichever they wait in. */
static int deadlock_break(dc_comm *c, const deadlock_edge edge[], int n) {
  dc__text t = {.n = 0};
  text_add(&t, "ranks wait for each other in different groups, so no call can end:");
  for (int i = 0; i < n; i++) {
    if (i == 6 && n > 7) {
      text_add(&t, "; and so on over %d ranks", n);
      break;
    }
    text_add(&t, i ? "; " : " ");
    text_add_rank(&t, c, edge[i].from);
    text_add(&t, " ");
    dc__tell_position(&t, edge[i].c, edge[i].from);
    text_add(&t, " of group %s and waits for ", edge[i].c->label);
    text_add_rank(&t, c, edge[i].to);
  }
  text_add(
      &t, ". All ranks must make the same calls in the same order. Does one rank alone save or load a checkpoint, skip "
          "a step, or call torch.distributed?");
  for (int i = 0; i < n; i++)
    if (edge[i].c != c) dc__break(edge[i].c, DC_E_MISMATCH, "%s", t.s);
  return dc__break(c, DC_E_MISMATCH, "%s", t.s);
}

int dc__deadlock_look(dc_comm *c, int rank, bool outside) {
  deadlock_show(c, rank, outside);
  deadlock_edge edge[DC_COMM_MAX_RANKS];
  uint64_t mark;
  int rc = DC_OK;
  pthread_mutex_lock(&deadlock_lock);
  const int n = deadlock_follow(c, edge, &mark);
  if (!n || !c->circle_ns || mark != c->circle) {
    c->circle = mark;
    c->circle_ns = n ? dc__now_ns() : 0;
    for (int i = 0; i < n; i++) c->circle_looks[i] = edge[i].looks;
  } else if (dc__now_ns() - c->circle_ns >= DEADLOCK_NS && deadlock_stands(c, edge, n)) {
    rc = deadlock_break(c, edge, n);
  }
  pthread_mutex_unlock(&deadlock_lock);
  return rc;
}

void dc__deadlock_leave(dc_comm *c) {
  pthread_mutex_lock(&deadlock_lock);
  dc_comm *before = c;
  while (before->family != c) before = before->family;
  before->family = c->family;
  c->family = c;
  pthread_mutex_unlock(&deadlock_lock);
}

static int deadlock_join(dc_comm *c, dc_comm *to, bool kin) {
  if (!c || !to) return DC_FAIL(DC_E_INVALID, "a communicator is NULL");
  if (c->fork_mark != dc__fork_mark() || to->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process", c->label);
  if (c->size != to->size || c->rank != to->rank)
    return DC_FAIL(DC_E_INVALID, "group %s (rank %d of %d) and group %s (rank %d of %d) have different ranks", c->label,
                   c->rank, c->size, to->label, to->rank, to->size);
  pthread_mutex_lock(&deadlock_lock);
  dc_comm *k = c;
  while (k != to && k->family != c) k = k->family;
  if (k != to) { /* two rings become one */
    dc_comm *next = c->family;
    c->family = to->family;
    to->family = next;
  }
  if (kin) {
    const uint64_t of_c = c->kin;
    c->kin = to->kin;
    for (k = c->family; k != c; k = k->family)
      if (k->kin == of_c) k->kin = to->kin;
  }
  pthread_mutex_unlock(&deadlock_lock);
  return DC_OK;
}

int dc_comm_relate(dc_comm *c, dc_comm *to) { return deadlock_join(c, to, true); }

int dc_comm_meet(dc_comm *c, dc_comm *to) {
  DC_TRY(deadlock_join(c, to, false));
  deadlock_met = 1 + atomic_fetch_add_explicit(&deadlock_meetings, 1, memory_order_relaxed);
  return DC_OK;
}

void dc__deadlock_enter(dc_comm *c) {
  static _Atomic uint64_t number;
  c->family = c;
  c->kin = 1 + atomic_fetch_add(&number, 1);
}
