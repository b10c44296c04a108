/* sync.h: calls on a communicator, and the exchange: begin, fill, post, wait, read, done (comm.h has the protocol).
 * Steps that all wait for at once: team.h. */
#ifndef DEEPC_SYNC_H
#define DEEPC_SYNC_H

#include "comm_impl.h"

/* Enters a call: DC_E_INVALID for NULL, DC_E_STATE after a fork or when another thread is inside, or the error that
 * broke c. */
int dc__enter(dc_comm *c);
void dc__leave(dc_comm *c);
/* dc__enter's lock alone: false if a thread is inside. */
bool dc__go_in(dc_comm *c);
/* Puts the call in progress into the flight record. Done behind its first post, where there is time while the post
 * travels, and before any longer wait. */
void dc__show(dc_comm *c);
/* The exchange, inside a call. A step has a slot (dc__begin) or room for `bytes` <= slot_bytes, where little has a
 * cheaper place (dc__begin_for; peers read it at dc__place with the same number of bytes). */
int dc__begin(dc_comm *c, int64_t *step, void **slot);
int dc__begin_for(dc_comm *c, int64_t bytes, int64_t *step, void **place);
int dc__can_begin(dc_comm *c, int *ready);
int dc__post(dc_comm *c, const dc_call *call);
/* Between post and wait of `step`, whose place took `bytes`: while peers have not posted it, asks for the lines of our
 * next place, which are in the caches of those who read it. */
void dc__warm(dc_comm *c, int64_t step, int64_t bytes);
int dc__wait(dc_comm *c, int64_t step);
/* Waits for `rank` only, and compares with it. */
int dc__wait_rank(dc_comm *c, int64_t step, int rank);
/* For team.c, which compares by itself. Waits until `rank` has posted `step`. */
int dc__await_posted(dc_comm *c, int64_t step, int rank);
/* Until *word, which is published when all ranks have posted `step` (or some of them), is at step + 1. *all: it is not
 * yet, but all ranks have posted: what was waited for may never come. */
int dc__await_word(dc_comm *c, _Atomic uint32_t *word, _Atomic uint32_t *sleepers, int64_t step, bool *all);
/* Instead of wait, by a rank that reads nothing of the posted step: it may be done before the others post. */
int dc__skip(dc_comm *c, int64_t step);
int dc__done(dc_comm *c, int64_t step);

#endif
