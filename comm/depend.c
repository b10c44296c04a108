/* depend.c: see depend.h. Owns which communicators of this process depend on which.
 *
 * The ranks of a model are in several groups: along each of its axes, and all together. A rank that dies is seen by who
 * waits for it. Who waits for one of these, in a group that the dead rank is not in, would wait until the time-out:
 * what it waits for is alive, and will not come. So each wait looks at the groups that its own depends on as well.
 *
 * What broke another group ends a wait at once, with that group's words. A death gets DEPEND_GRACE_NS: who waits for
 * the dead rank itself says more, and a wait for something that is on its way ends as it would have. */
#include "depend.h"

#include <pthread.h>
#include <stdlib.h>

#include "fault.h"
#include "tell.h"

#define DEPEND_GRACE_NS (2 * 1000 * 1000 * 1000ll) /* as long as ranks that wait for each other get (deadlock.c) */

typedef struct depend_edge {
  struct depend_edge *next;
  dc_comm *c, *on;
  int64_t since_ns; /* when a look first found a dead rank there; 0: none has */
} depend_edge;

/* Of all edges: what they lead to stays mapped while it is looked at. */
static pthread_mutex_t depend_lock = PTHREAD_MUTEX_INITIALIZER;
static depend_edge *depend_edges;
DC__AT_FORK(depend_at_fork, DC__FORK_DEPENDS, &depend_lock, NULL)

static int depend_lost(dc_comm *c, const dc_comm *on, int rank) {
  dc__text t = {.n = 0};
  text_add(&t, "group %s: ", on->label);
  text_add_pid(&t, on, rank);
  dc__tell_end(&t, on, rank);
  text_add(&t, "; rank %d waits in group %s of the same model for what can't come any more", c->global_rank[c->rank],
           c->label);
  return dc__break(c, DC_E_PEER_DIED, "%s", t.s);
}

static int depend_look_along(depend_edge *e) {
  dc_comm *on = e->on;
  const int broken = dc__broken(on); /* its status, not the header's: who writes that may have died over it */
  if (broken) return dc__break(e->c, broken, "%s", dc_last_error());
  dc__look_at_peers(on);
  for (int r = 0; r < on->size; r++) {
    if (!dc__is_dead(on, r) || dc__has_left(on, r)) continue;
    if (!e->since_ns) e->since_ns = dc__now_ns();
    return dc__now_ns() - e->since_ns < DEPEND_GRACE_NS ? DC_OK : depend_lost(e->c, on, r);
  }
  return DC_OK;
}

int dc__depend_look(dc_comm *c) {
  int rc = DC_OK;
  pthread_mutex_lock(&depend_lock);
  for (depend_edge *e = depend_edges; e && !rc; e = e->next)
    if (e->c == c) rc = depend_look_along(e);
  pthread_mutex_unlock(&depend_lock);
  return rc;
}

void dc__depend_leave(const dc_comm *c) {
  pthread_mutex_lock(&depend_lock);
  for (depend_edge **at = &depend_edges; *at;) {
    depend_edge *e = *at;
    if (e->c != c && e->on != c) {
      at = &e->next;
      continue;
    }
    *at = e->next;
    free(e);
  }
  pthread_mutex_unlock(&depend_lock);
}

int dc_comm_depend(dc_comm *c, dc_comm *on) {
  if (!c || !on) return DC_FAIL(DC_E_INVALID, "a communicator is NULL");
  if (c->fork_mark != dc__fork_mark() || on->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process", c->label);
  if (c == on) return DC_OK;
  int rc = DC_OK;
  pthread_mutex_lock(&depend_lock);
  depend_edge *e = depend_edges;
  while (e && (e->c != c || e->on != on)) e = e->next;
  if (!e && (e = malloc(sizeof *e))) {
    *e = (depend_edge){.next = depend_edges, .c = c, .on = on};
    depend_edges = e;
  } else if (!e) {
    rc = DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *e);
  }
  pthread_mutex_unlock(&depend_lock);
  return rc;
}
