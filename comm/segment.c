/* segment.c: shared segments of a communicator: made and mapped together, freed by each rank on its own.
 *
 * Owns the table of a communicator's segments (registered: collectives read and write them where they lie), their
 * references and the lock of both. A segment may outlive its communicator. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fault.h"
#include "flight.h"
#include "open.h"
#include "segment.h"
#include "sync.h"
#include "team.h"

/* One lock for all: the last reference may go in any thread, before or after the communicator. */
static pthread_mutex_t segment_lock = PTHREAD_MUTEX_INITIALIZER;
DC__AT_FORK(segment_at_fork, DC__FORK_SEGMENTS, &segment_lock, NULL)

/* ---- the table --------------------------------------------------------------------------------------------------- */
/* Gives a new segment its place in c and its owner's reference. */
static void segment_add(dc_comm *c, dc_segment *s, int id) {
  pthread_mutex_lock(&segment_lock);
  s->refs = 1;
  s->id = id;
  s->owner = c;
  c->segment[id] = s;
  c->segments++;
  pthread_mutex_unlock(&segment_lock);
}

/* Bit i: place i is taken here. */
static uint64_t segment_places(dc_comm *c) {
  uint64_t taken = 0;
  pthread_mutex_lock(&segment_lock);
  for (int i = 0; i < DC__SEGMENTS; i++)
    if (c->segment[i]) taken |= (uint64_t)1 << i;
  pthread_mutex_unlock(&segment_lock);
  return taken;
}

void dc__segments_orphan(dc_comm *c) {
  pthread_mutex_lock(&segment_lock);
  for (int i = 0; i < DC__SEGMENTS; i++)
    if (c->segment[i]) c->segment[i]->owner = NULL;
  pthread_mutex_unlock(&segment_lock);
}

static void segment_drop(dc_segment *s) {
  dc__arena_unmap(&s->map);
  free(s);
}

uint64_t dc__segments_pin(dc_comm *c) {
  pthread_mutex_lock(&segment_lock);
  for (int i = 0; i < DC__SEGMENTS; i++) {
    if (!c->segment[i]) continue;
    c->pinned[i] = c->segment[i];
    c->pinned[i]->refs++;
    c->pins |= (uint64_t)1 << i;
  }
  pthread_mutex_unlock(&segment_lock);
  return c->pins;
}

void dc__segments_unpin(dc_comm *c) {
  if (!c->pins) return;
  dc_segment *last[DC__SEGMENTS];
  int n = 0;
  pthread_mutex_lock(&segment_lock);
  for (int i = 0; i < DC__SEGMENTS; i++)
    if (c->pins >> i & 1 && --c->pinned[i]->refs == 0) last[n++] = c->pinned[i];
  c->pins = 0;
  pthread_mutex_unlock(&segment_lock);
  while (n) segment_drop(last[--n]);
}

int dc__segment_find(const dc_comm *c, const char *p, int64_t bytes, int64_t *off) {
  for (int i = 0; i < DC__SEGMENTS; i++) {
    if (!(c->pins >> i & 1)) continue;
    const char *base = c->pinned[i]->map.base;
    if (p < base || p + bytes > base + c->pinned[i]->map.bytes) continue;
    *off = p - base;
    return i;
  }
  return -1;
}

int dc_segment_free(dc_segment *s) {
  if (!s) return DC_OK;
  pthread_mutex_lock(&segment_lock);
  if (s->owner) s->owner->segment[s->id] = NULL;
  s->owner = NULL;
  /* a forked child inherited the mapping and drops its own: the calls that may have held it are the parent's */
  const bool last = --s->refs == 0 || s->fork_mark != dc__fork_mark();
  pthread_mutex_unlock(&segment_lock);
  if (last) segment_drop(s);
  return DC_OK;
}

/* ---- making ------------------------------------------------------------------------------------------------------ */
/* One creation, on this rank. */
typedef struct segment_making {
  int64_t bytes;
  dc__map map;
  int id;               /* the place that it will have */
  int sock, fd;         /* our mailbox, and what came there */
  uint64_t taken;       /* places that are taken on some rank */
  dc__mailbox mail[DC_COMM_MAX_RANKS];
} segment_making;

/* What ranks tell each other in a slot about their part of a creation. */
typedef struct segment_verdict {
  int32_t status;
  dc__mailbox mail;
  uint64_t taken;
  char text[1020];
} segment_verdict;
_Static_assert(sizeof(segment_verdict) <= 4096, "the smallest slot");

/* Every rank gives its status; the first that is not DC_OK becomes everyone's. `m`: ranks also show their mailboxes and
 * places; NULL: that was before. */
static int segment_agree(dc_comm *c, const dc_call *call, int status, segment_making *m) {
  int64_t step;
  void *slot;
  DC_TRY(dc__begin(c, &step, &slot));
  segment_verdict *v = slot;
  v->status = status;
  snprintf(v->text, sizeof v->text, "%s", status ? dc_last_error() : "");
  if (m) {
    v->mail = m->mail[c->rank];
    v->taken = m->taken;
  }
  DC_TRY(dc__post(c, call));
  DC_TRY(dc__wait_all(c, step));
  int rc = DC_OK;
  for (int r = 0; r < c->size && !rc; r++) {
    const segment_verdict *p = (const segment_verdict *)dc__slot(c, r, step);
    if (p->status) rc = DC_FAIL(p->status, "group %s: on rank %d: %.1000s", c->label, c->global_rank[r], p->text);
    if (!m) continue;
    m->mail[r] = p->mail;
    m->taken |= p->taken;
  }
  DC_TRY(dc__done(c, step));
  return rc;
}

static int segment_make(dc_comm *c, segment_making *m) {
  DC_TRY(dc__arena_fits(m->bytes));
  DC_TRY(dc__arena_memfd(m->bytes, &m->fd));
  DC_TRY(dc__arena_map(m->fd, m->bytes, c->nodes, true, &m->map));
  return dc__mail(m->mail, c->size, m->fd, m->bytes, dc__now_ns() + c->timeout_ns);
}

/* It was sent before rank 0 posted, so it is there. */
static int segment_take(dc_comm *c, segment_making *m) {
  DC_TRY(dc__mail_take(m->sock, &m->mail[c->rank], m->bytes, &m->fd));
  DC_TRY(dc__arena_memfd_check(m->fd, m->bytes));
  return dc__arena_map(m->fd, m->bytes, 0, false, &m->map);
}

/* Three agreements: all ask for the same; rank 0 has made it (a refusal leaves the group sound); all have mapped it.
 * *refused: the group is sound. */
static int segment_steps(dc_comm *c, const dc_call *call, segment_making *m, bool *refused) {
  int rc = c->rank == 0 ? DC_OK : dc__mailbox_open(&m->sock, &m->mail[c->rank]);
  m->taken = segment_places(c);
  DC_TRY(segment_agree(c, call, rc, m));
  *refused = true;
  if (m->taken == UINT64_MAX)
    return DC_FAIL(DC_E_STATE, "group %s has %d segments already: free some, or make fewer and larger ones", c->label,
                   DC__SEGMENTS);
  m->id = __builtin_ctzll(~m->taken); /* the lowest that is free everywhere: all ranks find the same */
  rc = segment_agree(c, call, c->rank == 0 ? segment_make(c, m) : DC_OK, NULL);
  *refused = rc == DC_E_NOMEM;
  DC_TRY(rc);
  rc = segment_agree(c, call, c->rank == 0 ? DC_OK : segment_take(c, m), NULL);
  *refused = rc == DC_E_NOMEM;
  return rc;
}

static int segment_build(dc_comm *c, segment_making *m) {
  const dc_call call = {.op = DC_CALL_SEGMENT, .count = m->bytes};
  bool refused = false;
  c->seq++;
  c->call = call;
  const uint64_t flight = dc__flight_begin(c, &call);
  int rc = segment_steps(c, &call, m, &refused);
  if (m->sock >= 0) close(m->sock);
  if (m->fd >= 0) close(m->fd); /* the mapping keeps it */
  if (rc) dc__arena_unmap(&m->map);
  if (rc && !refused) rc = dc__break(c, rc, "%s", dc_last_error());
  dc__flight_end(flight, rc);
  return rc;
}

static int segment_new(dc_comm *c, int64_t bytes, dc_segment **out) {
  if (c->begun != c->done)
    return DC_FAIL(DC_E_STATE, "group %s: %lld exchange steps are open", c->label, (long long)(c->begun - c->done));
  dc_segment *s = calloc(1, sizeof *s);
  segment_making *m = calloc(1, sizeof *m);
  int rc = s && m ? DC_OK : DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *s + sizeof *m);
  if (!rc) {
    m->bytes = dc__round_up(bytes, (int64_t)DC_HUGE_PAGE);
    m->sock = m->fd = -1;
    rc = segment_build(c, m);
  }
  if (!rc) {
    s->map = m->map;
    s->fork_mark = c->fork_mark;
    segment_add(c, s, m->id);
    *out = s;
  } else {
    free(s);
  }
  free(m);
  return rc;
}

int dc_segment_create(dc_comm *c, int64_t bytes, dc_segment **out, void **base) {
  if (!out || !base) return DC_FAIL(DC_E_INVALID, "out or base is NULL");
  if (bytes <= 0 || bytes > ((int64_t)1 << 50))
    return DC_FAIL(DC_E_INVALID, "a segment of %lld bytes", (long long)bytes);
  DC_TRY(dc__enter(c));
  dc_segment *s = NULL;
  int rc = segment_new(c, bytes, &s);
  dc__leave(c);
  DC_TRY(rc);
  *base = s->map.base;
  *out = s;
  return DC_OK;
}

int dc_segment_info(const dc_segment *s, int64_t *bytes, int64_t *huge_bytes) {
  if (!s || !bytes || !huge_bytes) return DC_FAIL(DC_E_INVALID, "segment, bytes or huge_bytes is NULL");
  int64_t huge;
  DC_TRY(dc_mem_huge_bytes(s->map.base, (size_t)s->map.bytes, &huge));
  *bytes = s->map.bytes;
  *huge_bytes = huge;
  return DC_OK;
}
