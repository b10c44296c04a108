/* depend.h: communicators of one model, whose waits end with the ranks of the others (dc_comm_depend). */
#ifndef DEEPC_DEPEND_H
#define DEEPC_DEPEND_H

#include "comm_impl.h"

/* Breaks c if what it depends on is broken, or has lost a rank. For a waiting rank's look. */
int dc__depend_look(dc_comm *c);
/* Nothing depends on c any more, and c on nothing; before its arena goes. */
void dc__depend_leave(const dc_comm *c);

#endif
