/* deadlock.h: ranks that wait for each other in different communicators of one family (dc_comm_relate). */
#ifndef DEEPC_DEADLOCK_H
#define DEEPC_DEADLOCK_H

#include "comm_impl.h"

/* Shows that this rank waits in c for `rank`, looks along who waits for whom, and breaks the communicators of a circle
 * that has lasted for DEADLOCK_NS. For a waiting rank's look: c is entered. Between two looks the caller tests whether
 * the wait is over. outside: it is for something else than a step of c (dc_comm_waits). */
int dc__deadlock_look(dc_comm *c, int rank, bool outside);
/* Whether this thread calls for one that does something else just now (dc_comm_thread_serves). */
bool dc__deadlock_is_served(void);
/* The wait in c is over. Cheap when nothing was shown. */
void dc__deadlock_forget(dc_comm *c);
/* The one outside of c is; beside any call in c, which needs not be entered. */
void dc__deadlock_forget_outside(dc_comm *c);
/* c is a family of its own, when it is opened. */
void dc__deadlock_enter(dc_comm *c);
/* c leaves its family; before its arena goes. */
void dc__deadlock_leave(dc_comm *c);

#endif
