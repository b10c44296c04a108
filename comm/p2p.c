/* p2p.c: see p2p.h. Owns requests from their start to their end: arguments, waiting for them, closing beside them.
 *
 * Measured one way between two cores: 8 B 0.25 us, 4 KiB 1.1, 256 KiB 10 (26 GB/s); docs/lab/collectives.md has more.
 */
#include "p2p.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "depend.h"
#include "fault.h"
#include "flight.h"
#include "message.h"
#include "tell.h"
#include "wait.h"

/* relaxed: only for messages */
static void p2p_show_call(p2p *p, const dc_request *r) {
  uint64_t w[P2P_LAST_WAITS];
  dc_call k = dc__match_call(r);
  memcpy(&w[P2P_LAST_CALL], &k, sizeof k);
  w[P2P_LAST_SEQ] = r->seq;
  w[P2P_LAST_WHERE] = r->row;
  for (int i = 0; i < P2P_LAST_WAITS; i++)
    atomic_store_explicit(&p->seats[p->rank].last[i], w[i], memory_order_relaxed);
}

/* With the lock, which it gives back; in a forked child without: there it may be held by a thread that does not
 * exist. */
static void p2p_drop_ref(p2p *p, bool child) {
  bool last = --p->refs == 0;
  if (!child) pthread_mutex_unlock(&p->lock);
  if (!last) return;
  pthread_mutex_destroy(&p->lock);
  free(p);
}

static int p2p_result(const dc_request *r) {
  if (atomic_load_explicit(&r->state, memory_order_acquire) == P2P_DONE) return DC_OK;
  return DC_FAIL(r->status, "%s", r->error ? r->error : "this request failed before");
}

static int p2p_progress(p2p *p) {
  pthread_mutex_lock(&p->lock);
  int rc = dc__match_spread(p, dc__match_progress(p));
  dc__match_unlock(p);
  return rc;
}

/* ---- waiting ----------------------------------------------------------------------------------------------------- */
typedef struct p2p_waiting {
  dc__waiting w; /* first: the waiter gives it back */
  p2p *p;
  dc_request *r;
  int64_t moved; /* when we looked last: while bytes move there is no time-out */
  int64_t look_ns;
  int asked;
} p2p_waiting;

static int p2p_late(p2p *p, const dc_request *r, int64_t timeout_ns) {
  dc__text t = {.n = 0};
  int peer = r->source >= 0 ? r->source : r->peer;
  text_add(&t, "group %s: time-out after %lld ms: ", p->c->label, (long long)(timeout_ns / 1000000));
  text_add_rank(&t, p->c, p->rank);
  text_add(&t, " waits in ");
  dc__match_tell(&t, p->c, r);
  if (r->moved) text_add(&t, ", %lld of %lld bytes are there", (long long)r->moved, (long long)r->bytes);
  text_add(&t, ". Where the others are:");
  for (int s = 0, shown = 0; s < p->size && shown < 12; s++) {
    if (s == p->rank || (peer >= 0 && s != peer)) continue;
    text_add(&t, shown++ ? "; " : " ");
    text_add_rank(&t, p->c, s);
    text_add(&t, " (pid %d) ", p->c->h->seat[s].pid);
    dc__tell_message_position(&t, p->c, s);
    text_add(&t, "; in collectives it ");
    dc__tell_position(&t, p->c, s);
    if (p2p_list_empty(&p->in[s].early)) continue;
    text_add(&t, "; its oldest message here that no receive has asked for is ");
    dc__match_tell_sender(&t, p, s, &P2P_ITEM(p2p_early, p->in[s].early.next, in)->head);
  }
  return dc__break(p->c, DC_E_TIMEOUT, "%s", t.s);
}

/* The peer whose end makes r impossible, or -1. Anybody may be the one that a receive from any source waits for: a
 * death ends it at once, a leaving when nobody is left. */
static int p2p_missing(p2p *p, const dc_request *r) {
  int peer = r->source >= 0 ? r->source : r->peer, one = -1, left = 0;
  if (peer >= 0) return dc__is_dead(p->c, peer) || dc__has_left(p->c, peer) ? peer : -1;
  for (int s = 0; s < p->size; s++) {
    if (s == p->rank) continue;
    if (dc__has_left(p->c, s)) left++;
    else if (dc__is_dead(p->c, s)) return s;
    else continue;
    one = s;
  }
  return left == p->size - 1 ? one : -1;
}

/* Everything that can end a wait other than what is waited for. With the lock; the peers have been looked at.
 * timeout_ns 0: none. */
static int p2p_look_at(p2p *p, dc_request *r, int64_t timeout_ns) {
  DC_TRY(dc__match_check(p));
  const int gone = p2p_missing(p, r); /* before taking what has arrived: its last words count */
  DC_TRY(dc__match_progress(p));
  if (p2p_is_over(r) || r->busy) return DC_OK;
  if (gone >= 0) return dc__match_lost(p, r, gone);
  return timeout_ns ? p2p_late(p, r, timeout_ns) : DC_OK;
}

static int p2p_look(dc__waiting *x) {
  p2p_waiting *w = (p2p_waiting *)(void *)x;
  pthread_mutex_lock(&w->p->lock);
  if (w->r->moved != w->moved) {
    w->moved = w->r->moved;
    x->start_ns = *x->look_ns;
    x->late = false;
  }
  const int rc = dc__match_spread(w->p, p2p_look_at(w->p, w->r, x->late ? x->timeout_ns : 0));
  dc__match_unlock(w->p);
  return rc;
}

static int p2p_poll(dc__waiting *x, bool *there) {
  p2p_waiting *w = (p2p_waiting *)(void *)x;
  if (x->will_sleep || dc__match_peek(w->p, w->r, ++w->asked)) DC_TRY(p2p_progress(w->p));
  *there = p2p_is_over(w->r);
  return DC_OK;
}

static int p2p_wait_over(p2p *p, dc_request *r, int64_t timeout_ns) {
  p2p_seat *own = &p->seats[p->rank];
  p2p_waiting w = {.p = p,
                   .r = r,
                   .w = {.c = p->c,
                         .poll = p2p_poll,
                         .look = p2p_look,
                         .word = &own->bell,
                         .sleepers = &own->sleepers,
                         .timeout_ns = timeout_ns,
                         .look_ns = &w.look_ns}};
  bool there = false;
  for (int n = 0; n < 64; n++) { /* without a look at the clock: as long as an answer takes that is on its way */
    DC_TRY(p2p_poll(&w.w, &there));
    if (there) return DC_OK;
    dc__cpu_relax();
  }
  return dc__await(&w.w);
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */
static int p2p_check_args(const dc_comm *c, const void *buf, int64_t count, int dtype, int op, int peer) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  if (c->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process; open a new one here",
                   c->label);
  const char *name = op == DC_CALL_SEND ? "dst" : "src";
  if (!dc_dtype_size(dtype)) return DC_FAIL(DC_E_DTYPE, "dtype %d", dtype);
  if (count < 0 || count > (int64_t)1 << 56) return DC_FAIL(DC_E_INVALID, "count %lld", (long long)count);
  if (!buf && count) return DC_FAIL(DC_E_INVALID, "buf is NULL and count %lld", (long long)count);
  if (peer == c->rank)
    return DC_FAIL(DC_E_INVALID, "%s is %d, this rank itself: a message to oneself has no other end", name, peer);
  if (op == DC_CALL_RECV && peer == DC_ANY_SOURCE && c->size > 1) return DC_OK;
  if (peer < 0 || peer >= c->size)
    return DC_FAIL(DC_E_INVALID, "%s is %d: group %s has other ranks than this from 0 to %d%s", name, peer, c->label,
                   c->size - 1, op == DC_CALL_RECV && c->size > 1 ? " (or DC_ANY_SOURCE)" : "");
  return DC_OK;
}

/* Fills r and starts it. On failure r is in no queue. */
static int p2p_start(dc_comm *c, dc_request *r, const char *where) {
  p2p *p = c->p2p;
  p2p_list_init(&r->in);
  r->p = p;
  r->source = -1;
  r->bytes = r->count * (int64_t)dc_dtype_size(r->dtype);
  if (where) memcpy(r->where, where, strnlen(where, DC__WHERE - 1));
  pthread_mutex_lock(&p->lock);
  int rc = dc__match_check(p);
  if (rc) {
    pthread_mutex_unlock(&p->lock);
    return rc;
  }
  p->inside++;
  r->seq = ++p->calls;
  r->id = (uint32_t)r->seq;
  r->row = dc__ring_keep_where(p, where);
  p2p_show_call(p, r);
  dc_call k = dc__match_call(r);
  r->flight = dc__flight_begin_as(c, &k, r->where, (int64_t)r->seq);
  p2p_list_push(&p->live, &r->all);
  /* relaxed: a hint. The blocking forms progress themselves */
  if (r->owned) atomic_fetch_add_explicit(&dc__unfinished, 1, memory_order_relaxed);
  rc = dc__match_spread(p, r->op == DC_CALL_SEND ? dc__match_send(p, r) : dc__match_recv(p, r));
  if (rc) dc__match_withdraw(p, r, rc, dc_last_error());
  else if (r->owned) p->refs++;
  p->inside--;
  dc__match_unlock(p);
  return rc;
}

static int p2p_start_owned(dc_comm *c, int op, void *buf, int64_t count, int dtype, int peer, int64_t tag,
                           const char *where, dc_request **out) {
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  DC_TRY(p2p_check_args(c, buf, count, dtype, op, peer));
  dc_request *r = calloc(1, sizeof *r);
  if (!r) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *r);
  r->op = op;
  r->buf = buf;
  r->count = count;
  r->dtype = dtype;
  r->peer = peer;
  r->tag = tag;
  r->owned = true;
  int rc = p2p_start(c, r, where);
  if (rc) {
    free(r->error);
    free(r);
    return rc;
  }
  *out = r;
  return DC_OK;
}

int dc_isend(dc_comm *c, const void *buf, int64_t count, int dtype, int dst, int64_t tag, const char *where,
             dc_request **out) {
  return p2p_start_owned(c, DC_CALL_SEND, (void *)buf, count, dtype, dst, tag, where, out); /* only read */
}

int dc_irecv(dc_comm *c, void *buf, int64_t count, int dtype, int src, int64_t tag, const char *where,
             dc_request **out) {
  return p2p_start_owned(c, DC_CALL_RECV, buf, count, dtype, src, tag, where, out);
}

static void p2p_show_wait(p2p *p, int n) {
  atomic_fetch_add_explicit(&p->seats[p->rank].last[P2P_LAST_WAITS], (uint64_t)(int64_t)n, memory_order_relaxed);
}

/* Blocks until r is over; a failure is r's from then on. */
static int p2p_wait_for(p2p *p, dc_request *r, int64_t timeout_ms) {
  if (p2p_is_over(r)) goto over;
  pthread_mutex_lock(&p->lock);
  int rc = dc__match_check(p);
  if (!rc) {
    p->inside++;
    p2p_show_wait(p, 1);
    int64_t ns = timeout_ms > 0 ? (timeout_ms > INT64_MAX / 2000000 ? INT64_MAX / 4 : timeout_ms * 1000000)
                                : p->c->timeout_ns;
    pthread_mutex_unlock(&p->lock);
    rc = p2p_wait_over(p, r, ns);
    pthread_mutex_lock(&p->lock);
    p2p_show_wait(p, -1);
    p->inside--;
  }
  if (rc && !p2p_is_over(r)) dc__match_withdraw(p, r, rc, dc_last_error());
  pthread_mutex_unlock(&p->lock);
over:
  return p2p_result(r);
}

static int p2p_check_request(const dc_request *r) {
  if (!r) return DC_FAIL(DC_E_INVALID, "the request is NULL");
  if (r->p->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "this request was made by the parent of this forked process");
  return DC_OK;
}

int dc_request_wait(dc_request *r, int64_t timeout_ms) {
  DC_TRY(p2p_check_request(r));
  return p2p_wait_for(r->p, r, timeout_ms);
}

int dc_request_test(dc_request *r, int *done) {
  if (!done) return DC_FAIL(DC_E_INVALID, "done is NULL");
  DC_TRY(p2p_check_request(r));
  p2p *p = r->p;
  if (!p2p_is_over(r)) {
    pthread_mutex_lock(&p->lock);
    int rc = dc__match_check(p);
    if (!rc) {
      p->inside++;
      rc = dc__match_progress(p);
      const int64_t now = dc__now_ns();
      if (!rc && !p2p_is_over(r) && now - r->look_ns >= DC__LOOK_NS) { /* polling callers learn of a death as well */
        r->look_ns = now;
        dc__look_at_peers(p->c);
        rc = p2p_look_at(p, r, 0);
        if (!rc && !p2p_is_over(r)) rc = dc__depend_look(p->c);
      }
      rc = dc__match_spread(p, rc);
      p->inside--;
    }
    if (rc && !p2p_is_over(r)) dc__match_withdraw(p, r, rc, dc_last_error());
    dc__match_unlock(p);
  }
  bool over = p2p_is_over(r);
  if (over) DC_TRY(p2p_result(r));
  *done = over;
  return DC_OK;
}

int dc_request_source(const dc_request *r) {
  if (!r) return DC_FAIL(DC_E_INVALID, "the request is NULL");
  if (r->op != DC_CALL_RECV || !p2p_is_over(r)) return DC_FAIL(DC_E_STATE, "only a completed receive has a source");
  return r->source;
}

int dc_request_free(dc_request *r) {
  if (!r) return DC_OK;
  p2p *p = r->p;
  bool child = p->fork_mark != dc__fork_mark();
  int rc = !child && !p2p_is_over(r) && r->op == DC_CALL_SEND ? p2p_wait_for(p, r, 0) : DC_OK;
  if (!child) {
    pthread_mutex_lock(&p->lock);
    if (!p2p_is_over(r)) dc__match_withdraw(p, r, DC_E_STATE, "withdrawn");
  }
  p2p_drop_ref(p, child);
  free(r->error);
  free(r);
  return rc;
}

static int p2p_blocking(dc_comm *c, int op, void *buf, int64_t count, int dtype, int peer, int64_t tag, int *source) {
  DC_TRY(p2p_check_args(c, buf, count, dtype, op, peer));
  dc_request r = {.op = op, .buf = buf, .count = count, .dtype = dtype, .peer = peer, .tag = tag};
  int rc = p2p_start(c, &r, NULL);
  if (!rc) rc = p2p_wait_for(c->p2p, &r, 0);
  free(r.error);
  if (rc) return rc;
  if (source) *source = r.source;
  return DC_OK;
}

int dc_send(dc_comm *c, const void *buf, int64_t count, int dtype, int dst, int64_t tag) {
  return p2p_blocking(c, DC_CALL_SEND, (void *)buf, count, dtype, dst, tag, NULL);
}

int dc_recv(dc_comm *c, void *buf, int64_t count, int dtype, int src, int64_t tag, int *source) {
  return p2p_blocking(c, DC_CALL_RECV, buf, count, dtype, src, tag, source);
}

/* ---- open, close ------------------------------------------------------------------------------------------------- */
int dc__p2p_open(dc_comm *c, void *area) {
  p2p_shape s = dc__ring_shape(c->size);
  size_t n = (size_t)c->size;
  /* one block: p2p, in, out, pay_end */
  size_t bytes = sizeof(p2p) + n * (sizeof(p2p_in) + sizeof(p2p_out) + s.cells * sizeof(uint64_t));
  p2p *p = calloc(1, bytes);
  if (!p) return DC_FAIL(DC_E_NOMEM, "%zu bytes", bytes);
  pthread_mutex_init(&p->lock, NULL);
  p->c = c;
  p->fork_mark = c->fork_mark;
  p->rank = c->rank;
  p->size = c->size;
  p->refs = 1;
  p->cma = c->may_copy;
  p->s = s;
  p->seats = area;
  p->in = (p2p_in *)(p + 1);
  p->out = (p2p_out *)(p->in + n);
  p2p_list_init(&p->any);
  p2p_list_init(&p->copies);
  p2p_list_init(&p->live);
  c->messages = p->seats;
  dc__ring_open(p);
  dc__match_add(p);
  c->p2p = p;
  return DC_OK;
}

static void p2p_free_early(p2p *p, int src) {
  p2p_link *list = &p->in[src].early;
  while (!p2p_list_empty(list)) {
    p2p_early *e = P2P_ITEM(p2p_early, list->next, in);
    p2p_list_drop(&e->in);
    free(e);
  }
}

static void p2p_free_answers(p2p *p, int dst) {
  p2p_link *list = &p->out[dst].answers;
  while (!p2p_list_empty(list)) {
    p2p_answer *a = P2P_ITEM(p2p_answer, list->next, in);
    p2p_list_drop(&a->in);
    free(a);
  }
}

static void p2p_turn_out(p2p *p) {
  pthread_mutex_lock(&p->lock);
  p->closed = true;
  while (p->inside) {
    pthread_mutex_unlock(&p->lock);
    dc__ring_bell(p, p->rank);
    sched_yield();
    pthread_mutex_lock(&p->lock);
  }
  /* before the owners of the buffers are told, and not when the rank has left: see match_copy() */
  atomic_store_explicit(&p->seats[p->rank].closed, 1, memory_order_seq_cst);
  while (!p2p_list_empty(&p->live))
    dc__match_withdraw(p, P2P_ITEM(dc_request, p->live.next, all), DC_E_STATE,
                       "the communicator of this request was closed");
}

/* Threads that still wait leave with DC_E_STATE; requests that their owners still have say the same. In a forked child
 * only memory is freed. */
void dc__p2p_close(dc_comm *c) {
  p2p *p = c->p2p;
  if (!p) return;
  bool child = c->fork_mark != dc__fork_mark();
  dc__match_remove(p);
  if (!child) p2p_turn_out(p);
  for (int r = 0; r < p->size; r++) p2p_free_early(p, r);
  for (int r = 0; r < p->size; r++) p2p_free_answers(p, r);
  c->p2p = NULL;
  p2p_drop_ref(p, child);
}
