/* p2p_match.c: requests and messages: which belongs to which, and what can be done for them without waiting.
 *
 * Everything a pair has to say goes through its cells: EAGER (data inline or in the payload), RTS (a large send, with
 * the buffer's address), and, backwards, ACK (it was copied) or CTS (send it through the ring), then DATA. Who
 * progresses always empties its incoming rings: what no receive wants yet goes to private memory. So a full ring
 * empties whenever its reader is inside any of these functions, and cells that wait for room never wait for a matching
 * receive. A receive is complete only when its ACK lies in the ring, a send only when its cell does: closing loses
 * nothing.
 *
 * Owns all queues. `lock` guards them; it is never held while waiting or while copying from another process. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "fault.h"
#include "flight.h"
#include "message.h"
#include "tell.h"
#include "wait.h"

#define COPY_PIECE (8ll << 20) /* between pieces of a copy, errors are noticed */

/* ---- texts ------------------------------------------------------------------------------------------------------- */
dc_call dc__match_call(const dc_request *r) {
  return (dc_call){.op = r->op, .dtype = r->dtype, .root = r->peer, .count = r->count, .tag = r->tag};
}

void dc__match_tell(dc__text *t, const dc_comm *c, const dc_request *r) {
  dc_call k = dc__match_call(r);
  dc__tell_message(t, c, &k, r->seq, r->where);
}

void dc__match_tell_sender(dc__text *t, const p2p *p, int src, const p2p_cell *m) {
  char where[DC__WHERE];
  dc_call k = {.op = DC_CALL_SEND, .dtype = m->dtype, .root = p->rank, .count = m->count, .tag = m->tag};
  dc__tell_where(p->c, src, m->where, where);
  dc__tell_message(t, p->c, &k, m->id, where);
}

static int match_mismatch(p2p *p, const dc_request *r, int src, const p2p_cell *m) {
  dc__text t = {.n = 0};
  text_add(&t, "group %s: a send and its receive differ: ", p->c->label);
  text_add_rank(&t, p->c, src);
  text_add(&t, " called ");
  dc__match_tell_sender(&t, p, src, m);
  text_add(&t, "; ");
  text_add_rank(&t, p->c, p->rank);
  text_add(&t, " called ");
  dc__match_tell(&t, p->c, r);
  text_add(&t, ". A receive must have the dtype and the count of the oldest message of its source and tag.");
  return dc__break(p->c, DC_E_MISMATCH, "%s", t.s);
}

int dc__match_lost(p2p *p, const dc_request *r, int peer) {
  dc__text mine = {.n = 0}, theirs = {.n = 0};
  dc__match_tell(&mine, p->c, r);
  dc__tell_message_position(&theirs, p->c, peer);
  return dc__break_lost(p->c, peer, &mine, &theirs);
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */
/* Out of all queues; the owner may look at it from now on without the lock. */
static void match_finish(p2p *p, dc_request *r, int state, int status) {
  p2p_list_drop(&r->in);
  p2p_list_drop(&r->all);
  if (r->owned) atomic_fetch_sub_explicit(&dc__unfinished, 1, memory_order_relaxed);
  r->status = status;
  dc__flight_end(r->flight, status);
  atomic_store_explicit(&r->state, state, memory_order_seq_cst);
  p->completed = true;
}

void dc__match_unlock(p2p *p) {
  if (p->completed && !p->closed)
    dc__ring_bell(p, p->rank); /* other threads of this rank; the states were stored seq_cst */
  p->completed = false;
  pthread_mutex_unlock(&p->lock);
}

/* ---- out --------------------------------------------------------------------------------------------------------- */
static void match_count_queued(p2p *p, int n) {
  uint32_t v = atomic_load_explicit(&p->queued, memory_order_relaxed) + (uint32_t)n;
  atomic_store_explicit(&p->queued, v, memory_order_relaxed); /* written under the lock only */
}

static bool match_put_send(p2p *p, dc_request *r) {
  p2p_cell k = {.kind = P2P_EAGER, .dtype = (uint8_t)r->dtype, .where = r->row, .count = r->count, .tag = r->tag};
  k.id = (uint32_t)r->seq;
  if (r->bytes <= p->s.eager) {
    if (!dc__ring_put(p, r->peer, &k, r->buf, r->bytes)) return false;
    dc__count(DC_COUNTER_p2p_bytes_ring, r->bytes);
    match_finish(p, r, P2P_DONE, DC_OK);
    return true;
  }
  k.kind = P2P_RTS;
  k.address = (uint64_t)(uintptr_t)r->buf;
  if (!dc__ring_put(p, r->peer, &k, NULL, 0)) return false;
  p2p_list_drop(&r->in);
  p2p_list_push(&p->out[r->peer].rts, &r->in);
  return true;
}

static bool match_put_data(p2p *p, dc_request *r) {
  int64_t n = r->bytes - r->moved < p->s.chunk ? r->bytes - r->moved : p->s.chunk;
  p2p_cell k = {.kind = P2P_DATA, .id = r->id, .count = n, .tag = r->moved};
  if (!dc__ring_put(p, r->peer, &k, r->buf + r->moved, n)) return false;
  dc__count(DC_COUNTER_p2p_bytes_ring, n);
  r->moved += n;
  if (r->moved < r->bytes) return true;
  match_count_queued(p, -1); /* before: from match_finish() on a blocking send may be its owner's stack again */
  match_finish(p, r, P2P_DONE, DC_OK);
  return true;
}

static bool match_put_answer(p2p *p, int dst, int kind, uint32_t id) {
  p2p_cell k = {.kind = (uint8_t)kind, .id = id};
  return dc__ring_put(p, dst, &k, NULL, 0);
}

/* Sends what waits for room. Answers first: nothing but room holds them up, and somebody waits for them. */
static void match_flush(p2p *p, int dst) {
  p2p_out *o = &p->out[dst];
  while (!p2p_list_empty(&o->answers)) {
    p2p_answer *a = P2P_ITEM(p2p_answer, o->answers.next, in);
    if (!match_put_answer(p, dst, a->kind, a->id)) return;
    if (a->done) match_finish(p, a->done, P2P_DONE, DC_OK);
    p2p_list_drop(&a->in);
    free(a);
    match_count_queued(p, -1);
  }
  while (!p2p_list_empty(&o->sends)) {
    if (!match_put_send(p, P2P_REQUEST(o->sends.next))) return;
    match_count_queued(p, -1);
  }
  while (!p2p_list_empty(&o->data))
    if (!match_put_data(p, P2P_REQUEST(o->data.next))) return;
}

/* `done`: the receive that is complete once the answer is in the ring, or NULL. */
static int match_answer(p2p *p, int dst, int kind, uint32_t id, dc_request *done) {
  p2p_out *o = &p->out[dst];
  if (p2p_list_empty(&o->answers) && match_put_answer(p, dst, kind, id)) {
    if (done) match_finish(p, done, P2P_DONE, DC_OK);
    return DC_OK;
  }
  p2p_answer *a = malloc(sizeof *a);
  if (!a) return DC_FAIL(DC_E_NOMEM, "group %s: %zu bytes for a message's answer", p->c->label, sizeof *a);
  *a = (p2p_answer){.kind = (uint8_t)kind, .id = id, .done = done};
  p2p_list_push(&o->answers, &a->in);
  match_count_queued(p, 1);
  return DC_OK;
}

/* ---- in ---------------------------------------------------------------------------------------------------------- */
static void match_chunk(p2p *p, dc_request *r, int64_t offset, const char *data, int64_t bytes) {
  memcpy(r->buf + offset, data, (size_t)bytes);
  r->moved = offset + bytes;
  if (r->moved == r->bytes) match_finish(p, r, P2P_DONE, DC_OK);
}

/* A message has met its receive. */
static int match_deliver(p2p *p, dc_request *r, int src, const p2p_cell *m, const char *data) {
  if (r->dtype != m->dtype || r->count != m->count) return match_mismatch(p, r, src, m);
  p2p_list_drop(&r->in);
  r->source = src;
  if (m->kind == P2P_EAGER) {
    if (r->bytes) memcpy(r->buf, data, (size_t)r->bytes);
    match_finish(p, r, P2P_DONE, DC_OK);
    return DC_OK;
  }
  r->id = m->id;
  r->remote = m->address;
  if (dc__ring_can_read(p, src)) {
    p2p_list_push(&p->copies, &r->in);
    return DC_OK;
  }
  p2p_list_push(&p->in[src].data, &r->in);
  return match_answer(p, src, P2P_CTS, r->id, NULL);
}

static dc_request *match_find_tag(p2p_link *list, int64_t tag) {
  for (p2p_link *l = list->next; l != list; l = l->next)
    if (P2P_REQUEST(l)->tag == tag) return P2P_REQUEST(l);
  return NULL;
}

/* The oldest receive for a message of this source and tag. */
static dc_request *match_find(p2p *p, int src, int64_t tag) {
  dc_request *a = match_find_tag(&p->in[src].posted, tag), *b = match_find_tag(&p->any, tag);
  return !a || (b && b->order < a->order) ? b : a;
}

static int match_keep(p2p *p, int src, const p2p_cell *m, const char *data) {
  const int64_t bytes = m->kind == P2P_EAGER ? m->count * (int64_t)dc_dtype_size(m->dtype) : 0;
  p2p_in *in = &p->in[src];
  dc__text who = {.n = 0};
  if (in->kept + bytes > P2P_KEPT) {
    text_add_rank(&who, p->c, src);
    return DC_FAIL(DC_E_NOMEM,
                   "group %s: %s has sent more than %lld MiB of messages that no receive here has asked for; receive "
                   "them in time, or send messages of more than %u bytes, which wait for their receive",
                   p->c->label, who.s, (long long)(P2P_KEPT >> 20), p->s.eager);
  }
  p2p_early *e = malloc(sizeof *e + (size_t)bytes);
  if (!e)
    return DC_FAIL(DC_E_NOMEM, "group %s: %lld bytes for a message that no receive is posted for", p->c->label,
                   (long long)bytes);
  memcpy(&e->head, m, sizeof e->head);
  if (bytes) memcpy(e->data, data, (size_t)bytes);
  e->order = p->order++;
  e->bytes = bytes;
  in->kept += bytes;
  p2p_list_push(&in->early, &e->in);
  return DC_OK;
}

static dc_request *match_find_id(p2p_link *list, uint32_t id) {
  for (p2p_link *l = list->next; l != list; l = l->next)
    if (P2P_REQUEST(l)->id == id) return P2P_REQUEST(l);
  return NULL;
}

static int match_take(p2p *p, int src, const p2p_cell *m) {
  dc_request *r;
  int64_t bytes = m->kind == P2P_DATA    ? m->count
                  : m->kind == P2P_EAGER ? m->count * (int64_t)dc_dtype_size(m->dtype)
                                         : 0;
  const char *data = dc__ring_payload(p, src, m, bytes);
  switch (m->kind) {
  case P2P_ACK:
    r = match_find_id(&p->out[src].rts, m->id);
    if (r) match_finish(p, r, P2P_DONE, DC_OK);
    return DC_OK;
  case P2P_CTS:
    r = match_find_id(&p->out[src].rts, m->id);
    if (!r) return DC_OK;
    p2p_list_drop(&r->in);
    p2p_list_push(&p->out[src].data, &r->in);
    match_count_queued(p, 1);
    return DC_OK;
  case P2P_DATA: /* of a withdrawn receive: nobody wants it */
    r = match_find_id(&p->in[src].data, m->id);
    if (r) match_chunk(p, r, m->tag, data, bytes);
    return DC_OK;
  default: r = match_find(p, src, m->tag); return r ? match_deliver(p, r, src, m, data) : match_keep(p, src, m, data);
  }
}

/* Takes what has arrived; at most one ring full, so that one busy peer does not hold up the others. Tells the source
 * about room now and then. */
static int match_drain(p2p *p, int src) {
  uint32_t taken = 0, told = 0;
  int rc = DC_OK;
  while (!rc && taken < p->s.cells && dc__ring_arrived(p, src)) {
    rc = match_take(p, src, dc__ring_cell(p, src));
    dc__ring_next(p, src);
    if (++taken - told < p->s.cells / 4) continue;
    told = taken;
    dc__ring_give_back(p, src);
  }
  if (told != taken) dc__ring_give_back(p, src);
  return rc;
}

/* ---- progress ---------------------------------------------------------------------------------------------------- */
/* Copies in pieces, without the lock: others go on meanwhile. Sets r->moved. */
static void match_copy_unlocked(p2p *p, dc_request *r) {
  r->busy = true;
  dc__match_unlock(p);
  int64_t moved = 0;
  while (moved < r->bytes && !dc__broken(p->c)) {
    int64_t n = r->bytes - moved < COPY_PIECE ? r->bytes - moved : COPY_PIECE;
    n = dc__ring_read(p, r->source, r->buf + moved, r->remote + (uint64_t)moved, n);
    if (n <= 0) break;
    moved += n;
  }
  dc__count(DC_COUNTER_p2p_bytes_single_copy, moved);
  pthread_mutex_lock(&p->lock);
  r->busy = false;
  r->moved = moved;
}

static bool match_has_closed(const p2p *p, int rank) {
  return atomic_load_explicit(&p->seats[rank].closed, memory_order_seq_cst);
}

static int match_copy(p2p *p, dc_request *r) {
  int src = r->source;
  p2p_list_drop(&r->in);
  match_copy_unlocked(p, r);
  DC_TRY(dc__broken(p->c));
  /* Alive afterwards means that it was this process that we read (and not another one of the same number); its messages
   * not closed, that the buffer was still the message. */
  if (dc__look_at_peer(p->c, src) || match_has_closed(p, src)) return dc__match_lost(p, r, src);
  if (r->moved == r->bytes) return match_answer(p, src, P2P_ACK, r->id, r);
  /* Not readable from outside (device memory, a permission taken away): through the ring. */
  r->moved = 0;
  p2p_list_push(&p->in[src].data, &r->in);
  return match_answer(p, src, P2P_CTS, r->id, NULL);
}

static int match_copies(p2p *p) {
  while (!p2p_list_empty(&p->copies)) DC_TRY(match_copy(p, P2P_REQUEST(p->copies.next)));
  return DC_OK;
}

int dc__match_check(p2p *p) {
  if (p->closed) return DC_FAIL(DC_E_STATE, "the communicator of this request was closed");
  return dc__broken(p->c);
}

int dc__match_progress(p2p *p) {
  DC_TRY(dc__match_check(p));
  for (int r = 0; r < p->size; r++) {
    if (r == p->rank) continue;
    DC_TRY(match_drain(p, r));
    if (atomic_load_explicit(&p->queued, memory_order_relaxed)) match_flush(p, r);
  }
  return match_copies(p);
}

int dc__match_spread(p2p *p, int rc) {
  if (!rc || p->closed || !dc__is_sound(p->c)) return rc;
  char why[DC__TEXT];
  snprintf(why, sizeof why, "%s", dc_last_error());
  return dc__break(p->c, rc, "%s", why);
}

bool dc__match_peek(const p2p *p, const dc_request *r, int n) {
  if (r->peer >= 0 && dc__ring_arrived(p, r->peer)) return true;
  if (r->peer >= 0 && n % 16) return false;
  if (atomic_load_explicit(&p->queued, memory_order_relaxed)) return true;
  for (int s = 0; s < p->size; s++)
    if (s != p->rank && dc__ring_arrived(p, s)) return true;
  return false;
}

/* ---- starting and withdrawing ------------------------------------------------------------------------------------ */
int dc__match_send(p2p *p, dc_request *r) {
  dc__count(DC_COUNTER_p2p_sends, 1);
  p2p_list_push(&p->out[r->peer].sends, &r->in);
  match_count_queued(p, 1);
  match_flush(p, r->peer);
  return DC_OK;
}

static p2p_early *match_find_early(p2p *p, int src, int64_t tag) {
  p2p_link *list = &p->in[src].early;
  for (p2p_link *l = list->next; l != list; l = l->next)
    if (P2P_ITEM(p2p_early, l, in)->head.tag == tag) return P2P_ITEM(p2p_early, l, in);
  return NULL;
}

int dc__match_recv(p2p *p, dc_request *r) {
  p2p_early *e = NULL;
  int src = r->peer;
  dc__count(DC_COUNTER_p2p_recvs, 1);
  if (r->peer >= 0) e = match_find_early(p, r->peer, r->tag);
  for (int s = 0; s < p->size && r->peer < 0; s++) {
    p2p_early *x = s == p->rank ? NULL : match_find_early(p, s, r->tag);
    if (!x || (e && e->order < x->order)) continue;
    e = x;
    src = s;
  }
  if (e) {
    int rc = match_deliver(p, r, src, &e->head, e->data);
    p2p_list_drop(&e->in);
    p->in[src].kept -= e->bytes;
    free(e);
    DC_TRY(rc);
  } else {
    r->order = p->order++;
    p2p_list_push(r->peer >= 0 ? &p->in[r->peer].posted : &p->any, &r->in);
  }
  if (r->peer < 0) return dc__match_progress(p);
  if (!e) DC_TRY(match_drain(p, r->peer));
  return match_copies(p);
}

void dc__match_withdraw(p2p *p, dc_request *r, int status, const char *why) {
  while (r->busy) { /* another thread copies into it */
    pthread_mutex_unlock(&p->lock);
    sched_yield();
    pthread_mutex_lock(&p->lock);
  }
  if (p2p_is_over(r)) return;
  if (r->op == DC_CALL_RECV && r->source >= 0) {
    p2p_out *o = &p->out[r->source];
    for (p2p_link *l = o->answers.next; l != &o->answers; l = l->next)
      if (P2P_ITEM(p2p_answer, l, in)->done == r) P2P_ITEM(p2p_answer, l, in)->done = NULL;
  }
  r->error = strdup(why); /* NULL: result() has a text */
  match_finish(p, r, P2P_FAILED, status);
}

/* ---- progress for others ----------------------------------------------------------------------------------------- */
/* All open p2p of this process. Held while one of them is progressed for others, so that it can't be closed meanwhile;
 * taken before p2p.lock. */
static pthread_mutex_t match_lock = PTHREAD_MUTEX_INITIALIZER;
static p2p *match_first;
DC__AT_FORK(match_at_fork, DC__FORK_REGISTRY, &match_lock, NULL)

/* For dc__serve: never blocks (but copies what is due). Leaves dc_last_error() alone unless a communicator breaks. */
static void match_serve(void) {
  if (pthread_mutex_trylock(&match_lock)) return; /* another thread does it */
  const uint64_t mark = dc__fork_mark();
  for (p2p *p = match_first; p; p = p->next) {
    if (p->fork_mark != mark || !dc__is_sound(p->c) || pthread_mutex_trylock(&p->lock)) continue;
    /* whoever waits there is told of an error */
    if (!p2p_list_empty(&p->live)) dc__match_spread(p, dc__match_progress(p));
    dc__match_unlock(p);
  }
  pthread_mutex_unlock(&match_lock);
}

void dc__match_add(p2p *p) {
  pthread_mutex_lock(&match_lock);
  p->next = match_first;
  match_first = p;
  atomic_store_explicit(&dc__serve, match_serve, memory_order_release);
  pthread_mutex_unlock(&match_lock);
}

void dc__match_remove(p2p *p) {
  pthread_mutex_lock(&match_lock);
  for (p2p **at = &match_first; *at; at = &(*at)->next) {
    if (*at != p) continue;
    *at = p->next;
    break;
  }
  pthread_mutex_unlock(&match_lock);
}
