/* fork.c: what a child of fork() gets of the core's locks, threads, mappings and descriptors.
 *
 * Python's data loaders fork in the middle of training, while other threads of the process are inside the core. fork()
 * copies the memory as it is at that moment, with the locks that those threads hold, but not the threads. So every
 * process-wide lock of the core is a row here, taken before a fork and given back after it on both sides: the child
 * finds it free and what it guards whole. A row's `child` says what else changes there.
 *
 * - comm/p2p_match.c: the list of open endpoints stays; they are the parent's (dc__fork_mark) and are not used
 * - comm/open.c, comm/segment.c: arenas are not mapped (MADV_DONTFORK), segments are
 * - comm/deadlock.c: the rings stay; a child that closes what it inherited leaves them
 * - comm/peers.c: pidfds stay open until the child closes the communicators that it inherited
 * - comm/flight.c: no record: its mapping is the parent's, its descriptor is closed
 * - offload/file.c: files stay open; they are the parent's and are only closed (their requests are not here)
 * - ops/base/pool.c: no workers and no job; threads start at the next call
 * - ops/base/mem.c: blocks are the child's own copies
 * - ops/base/heap.c: so are blocks in use; free ones have no memory, which would cost the parent a copy of each page
 * - ops/base/base.c: counters go on from the parent's values
 *
 * A communicator and its requests have locks of their own, which no child takes: dc__fork_mark() tells it first.
 * Leases are like any private memory: what a child writes there is its own. Not covered, as nothing can be: a child of
 * vfork(), clone() or _Fork() by hand, which runs no handlers, and a fork from a signal handler.
 *
 * Owns the rows. Assumes that the order of enum dc__fork_order is the order in which any thread takes two of the locks,
 * and that no thread forks while it holds one. */
#include "base.h"

#include <pthread.h>
#include <stdatomic.h>

static const dc__fork_entry *_Atomic fork_rows[DC__FORK_COUNT];
static pthread_mutex_t fork_turn = PTHREAD_MUTEX_INITIALIZER; /* two threads may fork at once */
static const dc__fork_entry
    *fork_held[DC__FORK_COUNT]; /* under fork_turn: a row that comes during a fork is not here */

/* Atomic, not under fork_turn: a library that is loaded during a fork must not wait for it. */
void dc__at_fork(const dc__fork_entry *entry) {
  atomic_store_explicit(&fork_rows[entry->order], entry, memory_order_release);
}

const dc__fork_entry *dc__fork_row(int order) {
  return order < 0 || order >= DC__FORK_COUNT ? NULL : atomic_load_explicit(&fork_rows[order], memory_order_acquire);
}

static void fork_before(void) {
  pthread_mutex_lock(&fork_turn);
  for (int i = 0; i < DC__FORK_COUNT; i++) {
    fork_held[i] = dc__fork_row(i);
    if (fork_held[i]) pthread_mutex_lock(fork_held[i]->lock);
  }
}

static void fork_after(bool child) {
  for (int i = DC__FORK_COUNT; i-- > 0;) {
    if (!fork_held[i]) continue;
    if (child && fork_held[i]->child) fork_held[i]->child();
    pthread_mutex_unlock(fork_held[i]->lock);
  }
  pthread_mutex_unlock(&fork_turn);
}

static void fork_in_parent(void) { fork_after(false); }
static void fork_in_child(void) { fork_after(true); }

__attribute__((constructor)) static void fork_watch(void) {
  pthread_atfork(fork_before, fork_in_parent, fork_in_child);
}
