/* deadlock.h: ranks that wait for each other in different communicators of one family (dc_comm_relate). */
#ifndef DEEPC_DEADLOCK_H
#define DEEPC_DEADLOCK_H

#include "comm_impl.h"

/* Shows that this rank waits in c for `rank`, looks along who waits for whom, and breaks the communicators of a circle
 * that has lasted for DEADLOCK_NS. For a waiting rank's look: c is entered. */
int dc__deadlock_look(dc_comm *c, int rank);
/* The wait in c is over. Cheap when nothing was shown. */
void dc__deadlock_forget(dc_comm *c);
/* c leaves its family; before its arena goes. */
void dc__deadlock_leave(dc_comm *c);

#endif
