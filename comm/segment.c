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

/* One lock for all: the last reference may go in any thread, before or after the communicator. */
static pthread_mutex_t segment_lock = PTHREAD_MUTEX_INITIALIZER;
DC__AT_FORK(segment_at_fork, DC__FORK_SEGMENTS, &segment_lock, NULL)

/* ---- the table --------------------------------------------------------------------------------------------------- */
/* Gives a new segment its number, a place in c while there is one, and its owner's reference. */
static void segment_add(dc_comm *c, dc_segment *s) {
  pthread_mutex_lock(&segment_lock);
  s->refs = 1;
  s->id = c->segments++;
  if (s->id < DC__SEGMENTS) {
    s->owner = c;
    c->segment[s->id] = s;
  }
  pthread_mutex_unlock(&segment_lock);
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
/* What ranks tell each other in a slot about their part of a segment's creation. */
typedef struct segment_verdict {
  int32_t status;
  char text[1020];
} segment_verdict;

/* Every rank gives its status; the first that is not DC_OK becomes everyone's. */
static int segment_agree(dc_comm *c, const dc_call *call, int status) {
  int64_t step;
  void *slot;
  DC_TRY(dc__begin(c, &step, &slot));
  segment_verdict *v = slot;
  v->status = status;
  snprintf(v->text, sizeof v->text, "%s", status ? dc_last_error() : "");
  DC_TRY(dc__post(c, call));
  DC_TRY(dc__wait(c, step));
  int rc = DC_OK;
  for (int r = 0; r < c->size && !rc; r++) {
    const segment_verdict *p = (const segment_verdict *)dc__slot(c, r, step);
    if (p->status) rc = DC_FAIL(p->status, "group %s: on rank %d: %.1000s", c->label, c->global_rank[r], p->text);
  }
  DC_TRY(dc__done(c, step));
  return rc;
}

static int segment_make(dc_comm *c, int64_t bytes, int *fd, dc__map *map) {
  DC_TRY(dc__arena_fits(bytes));
  DC_TRY(dc__arena_memfd(bytes, fd));
  DC_TRY(dc__arena_map(*fd, bytes, true, map));
  dc__msg m = dc__msg_of(DC__MSG_SEGMENT);
  m.bytes = bytes;
  for (int r = 1; r < c->size; r++) DC_TRY(dc__msg_send(c->sock[r], &m, fd, 1, dc__now_ns() + c->timeout_ns));
  return DC_OK;
}

/* Its message was sent before rank 0 posted, so it is there. */
static int segment_take(dc_comm *c, int64_t bytes, int *fd, dc__map *map) {
  dc__msg m;
  dc__fds f;
  DC_TRY(dc__msg_await(c->sock[0], c->label, "rank 0", &m, &f, dc__now_ns() + c->timeout_ns));
  if (m.kind != DC__MSG_SEGMENT || f.n != 1) {
    dc__fds_close(&f);
    return DC_FAIL(DC_E_PEER, "group %s: rank 0 sent something unexpected", c->label);
  }
  *fd = f.fd[0];
  DC_TRY(dc__arena_memfd_check(*fd, bytes));
  return dc__arena_map(*fd, bytes, false, map);
}

/* Three agreements: all ask for the same; rank 0 has made it (a refusal leaves the group sound); all have mapped it. */
static int segment_build(dc_comm *c, int64_t bytes, dc__map *map) {
  const dc_call call = {.op = DC_CALL_SEGMENT, .count = bytes};
  int fd = -1;
  c->seq++;
  c->call = call;
  const uint64_t flight = dc__flight_begin(c, &call);
  int rc = segment_agree(c, &call, DC_OK);
  if (!rc) {
    rc = segment_agree(c, &call, c->rank == 0 ? segment_make(c, bytes, &fd, map) : DC_OK);
    if (!rc) rc = segment_agree(c, &call, c->rank == 0 ? DC_OK : segment_take(c, bytes, &fd, map));
  }
  if (fd >= 0) close(fd);
  if (rc) dc__arena_unmap(map);
  /* after a refusal for memory all messages have been read; after anything else they may not */
  if (rc && rc != DC_E_NOMEM) rc = dc__break(c, rc, "%s", dc_last_error());
  dc__flight_end(flight, rc);
  return rc;
}

int dc_segment_create(dc_comm *c, int64_t bytes, dc_segment **out, void **base) {
  if (!out || !base) return DC_FAIL(DC_E_INVALID, "out or base is NULL");
  if (bytes <= 0 || bytes > ((int64_t)1 << 50))
    return DC_FAIL(DC_E_INVALID, "a segment of %lld bytes", (long long)bytes);
  DC_TRY(dc__enter(c));
  int rc = DC_OK;
  dc_segment *s = NULL;
  if (c->begun != c->done) {
    rc = DC_FAIL(DC_E_STATE, "group %s: %lld exchange steps are open", c->label, (long long)(c->begun - c->done));
    goto out;
  }
  s = calloc(1, sizeof *s);
  if (!s) {
    rc = DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *s);
    goto out;
  }
  s->fork_mark = c->fork_mark;
  rc = segment_build(c, dc__round_up(bytes, (int64_t)DC_HUGE_PAGE), &s->map);
  if (!rc) segment_add(c, s);
out:
  dc__leave(c);
  if (rc) {
    free(s);
    return rc;
  }
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
