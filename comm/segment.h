/* segment.h: the segments of a communicator that its calls may use where they lie, and how long each stays mapped.
 *
 * A segment has a reference of its owner, which dc_segment_free gives up, and one of every call in progress that may
 * touch it; the last one unmaps. So a segment may be freed in any thread at any time: calls that have begun keep it,
 * calls that begin later don't see it. */
#ifndef DEEPC_SEGMENT_H
#define DEEPC_SEGMENT_H

#include "comm_impl.h"

struct dc_segment {
  dc__map map;
  uint64_t fork_mark;
  dc_comm *owner; /* NULL when that was closed */
  int id;         /* place in its communicator, the same on all ranks */
  int refs;
};

/* c is closed: its segments live on without it. */
void dc__segments_orphan(dc_comm *c);
/* Takes a reference of every segment that is mapped here, for the call in progress; bit i: c->pinned[i] is there. Calls
 * pin once and unpin at their end. */
uint64_t dc__segments_pin(dc_comm *c);
void dc__segments_unpin(dc_comm *c);
/* Which pinned segment holds [p, p + bytes), and where in it; -1: none. */
int dc__segment_find(const dc_comm *c, const char *p, int64_t bytes, int64_t *off);

#endif
