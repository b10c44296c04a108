/* open.c: opening and closing a communicator: the mark of forks, what the configuration and the environment say, and
 * the order in which the parts are made (rendezvous.c, arena.c, p2p.c, coll.c) and given back. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "comm_impl.h"
#include "deadlock.h"
#include "depend.h"
#include "fault.h"
#include "flight.h"
#include "job.h"
#include "open.h"
#include "p2p.h"
#include "segment.h"
#include "sync.h"
#include "team.h"

/* ---- open, close ------------------------------------------------------------------------------------------------- */
static int open_env_us(const char *name, int64_t *ns) {
  const char *e = getenv(name);
  if (!e || !*e) return DC_OK;
  char *end;
  long us = strtol(e, &end, 10);
  if (*end || us < 0 || us > 10000000)
    return DC_FAIL(DC_E_ENV, "%s=%s: expected microseconds from 0 to 10000000", name, e);
  *ns = us * 1000;
  return DC_OK;
}

static int open_wait_defaults(dc_comm *c) {
  cpu_set_t set;
  int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  /* ranks are often bound to cores of their own each: then the machine's count says whether they fit */
  if (cpus < (int)sysconf(_SC_NPROCESSORS_ONLN)) cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
  c->crowded = c->size > cpus;
  c->spin_ns = c->crowded ? 0 : 20000; /* with fewer cores a spinning rank only keeps the others from arriving */
  c->yield_ns = 200000;
  DC_TRY(open_env_us("DEEPC_SPIN_US", &c->spin_ns));
  return open_env_us("DEEPC_YIELD_US", &c->yield_ns);
}

/* A process that all ranks may come from: their launcher where it says so, else their parent. Not pid 1 unasked: what
 * comes from that is everything. */
static int open_tracer(dc_comm *c) {
  const char *e = getenv("DEEPC_TRACER_PID");
  c->tracer = getppid() > 1 ? getppid() : 0;
  if (!e || !*e) return DC_OK;
  char *end;
  c->tracer = strtoll(e, &end, 10);
  if (*end || c->tracer < 1 || c->tracer > INT32_MAX)
    return DC_FAIL(DC_E_ENV, "DEEPC_TRACER_PID=%s: expected the number of a process", e);
  return DC_OK;
}

/* Everything that the environment says, before peers depend on this rank. */
static int open_environment(dc_comm *c) {
  DC_TRY(open_wait_defaults(c));
  DC_TRY(dc__force_algos(c));
  DC_TRY(dc__env_switch("DEEPC_CMA", true, &c->may_copy));
  DC_TRY(dc__env_switch("DEEPC_MEMBARRIER", true, &c->may_membarrier));
  DC_TRY(dc__team_wanted(c->crowded, &c->team_wanted));
  return open_tracer(c);
}

static int open_check(const dc_comm_config *k) {
  if (!k->address || !k->label) return DC_FAIL(DC_E_INVALID, "address or label is NULL");
  if (k->size < 1 || k->size > DC_COMM_MAX_RANKS || k->rank < 0 || k->rank >= k->size)
    return DC_FAIL(DC_E_INVALID, "rank %d of %d: expected 0 <= rank < size <= %d", k->rank, k->size, DC_COMM_MAX_RANKS);
  size_t n = strlen(k->address);
  if (n < 1 || n > DC__ADDRESS)
    return DC_FAIL(DC_E_INVALID, "the address has %zu bytes: expected 1 to %d", n, DC__ADDRESS);
  if (k->timeout_ms <= 0 || k->timeout_ms > INT64_MAX / 2000000)
    return DC_FAIL(DC_E_INVALID, "timeout_ms %lld", (long long)k->timeout_ms);
  DC_TRY(dc__slots_check(k->slots, k->slot_bytes));
  if (k->flags) return DC_FAIL(DC_E_INVALID, "flags %d: none is defined", k->flags);
  return DC_OK;
}

static void open_release(dc_comm *c) {
  dc__p2p_close(c); /* before its area goes */
  dc__segments_orphan(c);
  dc__deadlock_leave(c);
  dc__depend_leave(c);
  dc__counts_detach(&c->counts);
  bool ours = c->fork_mark == dc__fork_mark();
  if (ours) dc__arena_unmap(&c->map); /* in a forked child nothing of it is mapped */
  for (int r = 0; r < DC_COMM_MAX_RANKS; r++) {
    if (c->pidfd[r] >= 0) dc__peer_drop(c->pidfd[r]);
  }
  dc__direct_close(c);
  dc__team_close(c);
  free(c->shown);
  free(c->slot_used);
  free(c);
}

/* The nodes of memory that ranks run on, if all ranks know theirs. */
static void open_nodes(dc_comm *c) {
  for (int r = 0; r < c->size; r++) {
    const int node = c->h->seat[r].node;
    if (node < 0 || node >= 64) c->nodes = 0;
    if (node < 0 || node >= 64) return;
    c->nodes |= (uint64_t)1 << node;
  }
}

/* What is left when all are in. From here on peers wait in the arena, so that is where they are told of a failure. */
static int open_together(dc_comm *c) {
  open_nodes(c);
  int rc = dc__team_open(c, c->teams);
  if (!rc) rc = dc__p2p_open(c, (char *)c->map.base + dc__stage_end(c));
  if (!rc && c->size > 1) rc = dc__probe(c);
  if (!rc || dc__broken(c)) return rc;
  char why[1024];
  snprintf(why, sizeof why, "%s", dc_last_error());
  return dc__break(c, rc, "group %s: rank %d could not open it: %s", c->label, c->global_rank[c->rank], why);
}

int dc_comm_open(const dc_comm_config *config, dc_comm **out) {
  dc_comm_config taken;
  const dc_comm_config *k = &taken;
  DC_TRY(DC__SIZED(dc_comm_config, flags, config, &taken));
  DC_TRY(open_check(k));
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  DC_TRY(dc__fork_mark_set());
  dc_comm *c = calloc(1, sizeof *c);
  if (!c) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *c);
  c->rank = k->rank;
  dc__slots_set(c, k->size, k->slots, k->slot_bytes);
  c->timeout_ns = k->timeout_ms * 1000000;
  c->look_ns = dc__now_ns();
  c->fork_mark = dc__fork_mark();
  dc__deadlock_enter(c);
  snprintf(c->label, sizeof c->label, "%s", k->label);
  for (int r = 0; r < DC_COMM_MAX_RANKS; r++) {
    c->pidfd[r] = -1;
    c->global_rank[r] = k->global_rank && r < k->size ? k->global_rank[r] : r;
  }
  dc__counts_attach(&c->counts);
  c->fences = true; /* until all ranks have agreed on membarrier */
  c->shown = calloc((size_t)c->cells, sizeof *c->shown);
  c->slot_used = calloc((size_t)k->slots, sizeof *c->slot_used);
  int rc = c->shown && c->slot_used ? open_environment(c) : DC_FAIL(DC_E_NOMEM, "%d slots", k->slots);
  dc__choices_make(c);
  rc = dc__join(c, k, rc);
  if (!rc) rc = open_together(c);
  c->base = c->begun;
  if (rc) {
    open_release(c);
    return rc;
  }
  c->id = dc__flight_id(k->address);
  c->flight_group = dc__flight_group_open(c);
  *out = c;
  return DC_OK;
}

int dc_comm_close(dc_comm *c) {
  if (!c) return DC_OK;
  if (c->fork_mark == dc__fork_mark()) {
    if (!dc__go_in(c)) return DC_FAIL(DC_E_STATE, "group %s is in use by another thread and can't be closed", c->label);
    dc__p2p_close(c); /* first: its waits here end because of this call, not because a peer saw us leave */
    /* release: peers that see it also see the last steps that we posted */
    atomic_store_explicit(&c->h->seat[c->rank].left, 1, memory_order_release);
    dc__wake_all(c);
    dc__flight_group_close(c->flight_group);
  }
  open_release(c);
  return DC_OK;
}

int dc_comm_rank(const dc_comm *c) { return c ? c->rank : DC_FAIL(DC_E_INVALID, "the communicator is NULL"); }

int dc_comm_size(const dc_comm *c) { return c ? c->size : DC_FAIL(DC_E_INVALID, "the communicator is NULL"); }
