/* wait.h: the one way to wait for other ranks: spin, give the core away, sleep on a futex, look after the peers, and
 * stop at the time-out. Collectives and messages say what they wait for; nothing else in comm/ sleeps. */
#ifndef DEEPC_WAIT_H
#define DEEPC_WAIT_H

#include "fault.h"

#define DC__LOOK_NS (20 * 1000 * 1000ll) /* look after the peers at least this often while waiting */

typedef struct dc__waiting dc__waiting;
struct dc__waiting {
  dc_comm *c;
  /* Is it there? Asked again and again; does what can be done for it without blocking. An error ends the wait. */
  int (*poll)(dc__waiting *, bool *there);
  /* Every DC__LOOK_NS and at the time-out: everything else that can end the wait. The peers have been looked at. */
  int (*look)(dc__waiting *);
  _Atomic uint32_t *word, *sleepers; /* see dc__publish(): the word changes whenever poll may answer differently */
  int64_t start_ns;                  /* the time-out counts from here; 0: from the begin of the wait */
  int64_t timeout_ns;
  int64_t *look_ns;  /* when the peers were last looked after */
  bool serves;       /* messages of this process go on meanwhile */
  bool late;         /* for look: the time-out is over */
  bool will_sleep;   /* for poll: what comes after this answer wakes the sleeper, what came before may not */
};

/* Waits until poll says that it is there. */
int dc__await(dc__waiting *w);
/* One look, for callers that poll themselves; dc__look_due() says when. */
int dc__look(dc__waiting *w);
bool dc__look_due(const dc__waiting *w);

/* ---- words that are waited for ----------------------------------------------------------------------------------- */
/* Who stores such a word looks behind the store whether somebody sleeps; who goes to sleep counts itself and then looks
 * at the word once more. One of the two must make its store visible before its look. Here that is the sleeper, by
 * membarrier(2), which runs a fence on all cores, so that posting needs none (reduce of 8 B 137 instead of 143 ns,
 * docs/lab/entry-lock.md); without it everybody fences. */
static inline void dc__publish(const dc_comm *c, _Atomic uint32_t *word, uint32_t value,
                               const _Atomic uint32_t *sleepers) {
  if (c->fences) {
    atomic_store_explicit(word, value, memory_order_seq_cst);
    if (atomic_load_explicit(sleepers, memory_order_seq_cst)) dc__wake(word);
    return;
  }
  atomic_store_explicit(word, value, memory_order_release);
  atomic_signal_fence(memory_order_seq_cst);
  if (__builtin_expect(atomic_load_explicit(sleepers, memory_order_relaxed) != 0, 0)) dc__wake(word);
}

/* Registers this process for membarrier(2); false where there is none. */
bool dc__membarrier_register(void);

/* ---- messages, while a rank waits in a collective ---------------------------------------------------------------- */
/* Progresses them all; set by p2p_match.c. */
extern void (*_Atomic dc__serve)(void);
/* How many requests of this process are unfinished. */
extern _Atomic int dc__unfinished;

#endif
