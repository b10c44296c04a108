/* tell.h: what errors say: calls, where ranks are, how one ended, how two calls differ. Reads what ranks have shown;
 * never waits and breaks nothing. */
#ifndef DEEPC_TELL_H
#define DEEPC_TELL_H

#include "text.h"

/* "all_reduce(fp32, count 8, sum) [call 3 at train.py:31]"; `where` may be "". */
void dc__tell_call(dc__text *t, const dc_call *call, int64_t seq, const char *where);
/* The call in progress of this rank. */
void dc__tell_own_call(dc__text *t, const dc_comm *c);
/* What `rank` posted as `step`, while it can't be DC__CELLS steps further. */
void dc__tell_step(dc__text *t, const dc_comm *c, int rank, int64_t step);
/* "is in all_reduce(...) ...": what `rank` did last in collectives. */
void dc__tell_position(dc__text *t, const dc_comm *c, int rank);
/* " left the group" or " died: killed by signal 9 (Killed)". */
void dc__tell_end(dc__text *t, const dc_comm *c, int rank);
/* Ranks a and b differ at `step`: who called what where they first differed. */
void dc__tell_mismatch(dc__text *t, const dc_comm *c, int64_t step, int a, int b);

/* ---- messages ---------------------------------------------------------------------------------------------------- */
/* "send(fp32, count 8, tag 0, to rank 1) [message call 3 at train.py:31]" */
void dc__tell_message(dc__text *t, const dc_comm *c, const dc_call *call, uint64_t seq, const char *where);
/* "waits for messages, its last call is ...": what `rank` did last with messages. */
void dc__tell_message_position(dc__text *t, const dc_comm *c, int rank);
/* The text of a row of `rank`'s caller texts ("" if the row was used again). */
void dc__tell_where(const dc_comm *c, int rank, uint16_t row, char where[DC__WHERE]);

#endif
