/* fault.h: how a group breaks: the error that all ranks share, who has died, and the calm after it. */
#ifndef DEEPC_FAULT_H
#define DEEPC_FAULT_H

#include "text.h"

/* The error that broke c (as this thread's failure), or DC_OK. */
int dc__broken(dc_comm *c);
/* Breaks c on all ranks with this error; the first one wins. Returns the status of the winner. */
int dc__break(dc_comm *c, int status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Without a text. */
static inline bool dc__is_sound(const dc_comm *c) {
  return atomic_load_explicit(&c->h->broken, memory_order_relaxed) == DC__SOUND;
}
/* Wakes who sleeps on this word; all ranks that sleep in a wait of c. */
void dc__wake(_Atomic uint32_t *word);
void dc__wake_all(dc_comm *c);

/* Looks after all peers at once; what it finds is for dc__is_dead() and stays. */
void dc__look_at_peers(dc_comm *c);
/* After this one alone; true: it is dead. */
bool dc__look_at_peer(dc_comm *c, int rank);
static inline bool dc__is_dead(const dc_comm *c, int rank) {
  return atomic_load_explicit(&c->dead[rank], memory_order_relaxed);
}
static inline bool dc__has_left(const dc_comm *c, int rank) {
  return atomic_load_explicit(&c->h->seat[rank].left, memory_order_acquire);
}
/* Breaks c because `rank` died or left: `mine` is the call in which this rank waits for it, `theirs` what it did
 * last. */
int dc__break_lost(dc_comm *c, int rank, const dc__text *mine, const dc__text *theirs);
/* A peer's memory could not be reached: breaks c, with the peer's death as soon as that shows, else with `why`. */
int dc__unreachable(dc_comm *c, const char *why);
/* c is broken and this rank's call is about to fail: waits until no living peer reads or writes the buffers of ranks
 * any more, at most for the time-out. Returns the rank that was still at it then, or -1. */
int dc__await_calm(dc_comm *c);

#endif
