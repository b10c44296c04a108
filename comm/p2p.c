/* p2p.c: messages between two ranks (p2p.h): matching, the pairs' rings, rendezvous, and waiting for all of it.
 *
 * Owns the area at the end of the communicator's shared map. Per rank it holds a seat: a bell (futex word) that peers
 * ring when the rank sleeps, what it called last, and a table of caller texts. Per ordered pair of ranks it holds a
 * ring of cells of one cache line and a ring of payload bytes. Only the source writes cells and payload; only the
 * destination advances `head`. A cell is valid when its flag is its position + 1, so that a message of up to 32 bytes
 * moves one cache line.
 *
 * Everything a pair has to say goes through its cells: EAGER (data inline or in the payload), RTS (a large send, with
 * the buffer's address), and, backwards, ACK (it was copied) or CTS (send it through the ring), then DATA. Who
 * progresses always empties its incoming rings: what no receive wants yet goes to private memory. So a full ring
 * empties whenever its reader is inside any of these functions, and cells that wait for room never wait for a matching
 * receive. A receive is complete only when its ACK lies in the ring, a send only when its cell does: closing loses
 * nothing.
 *
 * Threads: `lock` guards all private state; it is never held while waiting or while copying from another process. Cells
 * and words in shared memory are published by seq_cst stores; the sleeper's and the waker's side are Dekker's pair
 * (doze(), ring()).
 *
 * Measured one way between two cores of a Xeon guest: 8 B 0.25 us, 512 B 0.5, 4 KiB 1.1, 16 KiB 1.6, 256 KiB 10 (26
 * GB/s); through the rings alone 16 KiB 3.3, 256 KiB 26 (10 GB/s). The limit of eager messages: 4 KiB take 1.1 us eager
 * and 1.3 by single copy, 8 KiB 1.7 and 1.4 (in a stream 1.05 and 1.26), 16 KiB 3.0 and 1.6; 8 KiB also leaves the
 * sender free. A flag in the cell instead of a counter in a line of its own saves a line per message, and 32 bytes in
 * the cell another (64 B: 0.34 against 0.25 us). */
#include "p2p.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "comm_impl.h"
#include "flight.h"
#include "text.h"

#define INLINE 32              /* bytes of a message that fit its cell */
#define EAGER_MAX 8192         /* larger messages are a rendezvous: measured, see the head */
#define COPY_PIECE (8ll << 20) /* between pieces of a copy, errors are noticed */
#define WHERE_ROWS 32

/* ---- shared memory ----------------------------------------------------------------------------------------------- */
enum { EAGER = 1, RTS, ACK, CTS, DATA };

typedef struct cell {
  _Alignas(DC__LINE) _Atomic uint32_t flag; /* position + 1, modulo 2^32 */
  uint8_t kind, dtype;
  uint16_t where; /* the sender's row of caller texts, see where_keep() */
  int64_t count;  /* elements; DATA: bytes */
  int64_t tag;    /* DATA: offset */
  uint32_t id;    /* EAGER, RTS: the sender's call; the others: that of the RTS they belong to */
  uint32_t at;    /* offset of the payload */
  union {
    char data[INLINE];
    uint64_t address; /* RTS: of the sender's buffer */
  };
} cell;
_Static_assert(sizeof(cell) == DC__LINE, "a cell is a cache line");

typedef struct pair {
  _Alignas(DC__LINE) _Atomic uint32_t head; /* cells that the destination has taken, with their payload */
  cell cells[];                             /* then the payload */
} pair;

enum { LAST_CALL = 0, LAST_SEQ = 4, LAST_WHERE, LAST_WAITS, LAST_WORDS = 8 };
typedef struct seat {
  _Alignas(DC__LINE) _Atomic uint32_t bell; /* futex */
  _Atomic uint32_t sleepers;
  /* for single copies: whether this rank allows them, and where which number lies in its memory */
  _Alignas(DC__LINE) _Atomic uint64_t cma;
  _Atomic uint64_t nonce_at, nonce[2];
  /* for messages only: atomic because others read them at any time */
  _Alignas(DC__LINE) _Atomic uint64_t last[LAST_WORDS];
  _Atomic uint32_t row_gen[WHERE_ROWS];
  _Atomic uint64_t row[WHERE_ROWS][DC__WHERE / 8];
} seat;

typedef struct shape {
  int64_t pair_bytes;
  uint32_t cells; /* a power of two */
  uint32_t payload, chunk, eager;
} shape;

static int64_t clamp(int64_t v, int64_t low, int64_t high) { return v < low ? low : v > high ? high : v; }

/* By the number of ranks alone: all ranks must agree. */
static shape shape_of(int size) {
  shape s;
  int64_t most = size == 1 ? 0 : (4ll << 20) / ((int64_t)size * size);
  for (s.pair_bytes = 2048; s.pair_bytes * 2 <= most && s.pair_bytes < (128 << 10);) s.pair_bytes *= 2;
  s.cells = (uint32_t)clamp(s.pair_bytes / 1024, 8, 128);
  s.payload = (uint32_t)(s.pair_bytes - DC__LINE - s.cells * (int64_t)sizeof(cell));
  s.chunk = s.payload / 4 / DC__LINE * DC__LINE;
  s.eager = s.chunk < EAGER_MAX ? s.chunk : EAGER_MAX;
  return s;
}

int64_t dc__p2p_bytes(int size) {
  int64_t n = (int64_t)sizeof(seat) * size + shape_of(size).pair_bytes * size * size;
  return (n + 4095) / 4096 * 4096;
}

/* ---- private state ----------------------------------------------------------------------------------------------- */
typedef struct qlink {
  struct qlink *next, *prev;
} qlink;

/* A message that has arrived before its receive. */
typedef struct early {
  qlink in;
  cell head;
  uint64_t order; /* of arrival, over all sources */
  char data[];
} early;

/* A cell of ours that found no room. */
typedef struct answer {
  qlink in;
  uint8_t kind;
  uint32_t id;
  dc_request *done; /* ACK: the receive that is complete with it, or NULL */
} answer;

enum { PENDING, DONE, FAILED };
struct dc_request {
  qlink in;  /* the one queue that it is in, or itself */
  qlink all; /* p2p.live */
  struct p2p *p;
  _Atomic int state;
  int op, dtype, peer, status; /* peer: may be DC_ANY_SOURCE of a receive */
  int source;                  /* of a matched receive, else -1 */
  bool owned, busy;            /* busy: a thread copies into it without the lock */
  int64_t count, bytes, tag, moved;
  char *buf;
  uint64_t seq, order, flight, remote;
  int64_t look_ns; /* when its peers were looked after */
  uint32_t id; /* of a rendezvous */
  uint16_t row;
  char where[DC__WHERE];
  char *error; /* of a failed request; owned */
};

/* To one peer. */
typedef struct out {
  pair *ring;
  char *payload;
  uint32_t tail, head;            /* cells written; consumed as far as we know */
  uint64_t pay_tail, pay_head;    /* the same for payload bytes */
  uint64_t *pay_end;              /* [cells] pay_tail behind each cell */
  qlink answers, sends, rts, data; /* waiting for room; waiting for ACK or CTS; to be sent as DATA */
} out;

/* From one peer. */
typedef struct in {
  pair *ring;
  const char *payload;
  _Atomic uint32_t pos;     /* the next cell. Written under the lock; a peek reads it without */
  qlink posted, early, data; /* receives; messages; receives that get DATA */
  uint8_t cma;              /* CMA_... */
  bool dead;
} in;
enum { CMA_UNKNOWN, CMA_YES, CMA_NO };

typedef struct p2p {
  struct p2p *next; /* in registry */
  pthread_mutex_t lock;
  dc_comm *c; /* valid for who is counted in `inside` */
  bool closed;
  uint64_t fork_mark;
  int rank, size, inside; /* inside: threads that may touch the area */
  int refs;               /* the communicator and every owned request */
  bool cma;
  shape s;
  seat *seats;
  out *out;
  in *in;
  qlink any, copies, live;  /* receives from any source; receives to be copied; all incomplete requests */
  _Atomic uint32_t queued; /* cells that wait for room */
  uint64_t calls, order;
  bool completed; /* something was: threads of ours may sleep for it */
  uint64_t nonce[2];
  uint16_t row; /* of the last caller text */
  uint32_t row_next;
} p2p;

static void list_init(qlink *l) { l->next = l->prev = l; }
static bool list_empty(const qlink *l) { return l->next == l; }
static void list_push(qlink *list, qlink *x) {
  x->prev = list->prev;
  x->next = list;
  list->prev->next = x;
  list->prev = x;
}
static void list_drop(qlink *x) {
  x->prev->next = x->next;
  x->next->prev = x->prev;
  list_init(x);
}
#define ITEM(type, l, field) ((type *)(void *)((char *)(l) - offsetof(type, field)))
#define REQUEST(l) ITEM(dc_request, l, in)

static inline void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

static bool is_over(const dc_request *r) { return atomic_load_explicit(&r->state, memory_order_acquire) != PENDING; }

/* ---- bells ------------------------------------------------------------------------------------------------------- */
/* After a seq_cst store of what the rank may wait for: either it sees that, or we see that it sleeps. */
static void ring(p2p *p, int rank) {
  seat *s = &p->seats[rank];
  if (__builtin_expect(atomic_load_explicit(&s->sleepers, memory_order_seq_cst) == 0, 1)) return;
  atomic_fetch_add_explicit(&s->bell, 1, memory_order_seq_cst);
  syscall(SYS_futex, &s->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void unlock(p2p *p) {
  if (p->completed && !p->closed) ring(p, p->rank); /* other threads of this rank; the states were stored seq_cst */
  p->completed = false;
  pthread_mutex_unlock(&p->lock);
}

/* ---- caller texts ------------------------------------------------------------------------------------------------ */
/* A row number and its generation, so that a reader sees when the row was used again; 0: no text. Loops call from few
 * lines: nearly always the text is the last one. */
static uint16_t where_keep(p2p *p, const char *where) {
  if (!where || !where[0]) return 0;
  seat *s = &p->seats[p->rank];
  uint64_t w[DC__WHERE / 8] = {0};
  memcpy(w, where, strnlen(where, DC__WHERE - 1));
  for (int i = -1; i < WHERE_ROWS; i++) {
    int k = i < 0 ? p->row % WHERE_ROWS : i;
    bool same = atomic_load_explicit(&s->row_gen[k], memory_order_relaxed) != 0;
    for (int j = 0; j < DC__WHERE / 8 && same; j++)
      same = atomic_load_explicit(&s->row[k][j], memory_order_relaxed) == w[j];
    if (!same) continue;
    uint32_t gen = atomic_load_explicit(&s->row_gen[k], memory_order_relaxed);
    return p->row = (uint16_t)(gen * WHERE_ROWS + (uint32_t)k);
  }
  uint32_t k = p->row_next++ % WHERE_ROWS, gen = atomic_load_explicit(&s->row_gen[k], memory_order_relaxed);
  gen = gen + 1 < 65536 / WHERE_ROWS ? gen + 1 : 1;
  /* 0 while the text changes; a release before and after, so that a reader of a mixed text sees another generation */
  atomic_store_explicit(&s->row_gen[k], 0, memory_order_seq_cst);
  for (int j = 0; j < DC__WHERE / 8; j++) atomic_store_explicit(&s->row[k][j], w[j], memory_order_release);
  atomic_store_explicit(&s->row_gen[k], gen, memory_order_release);
  return p->row = (uint16_t)(gen * WHERE_ROWS + k);
}

static void where_read(const p2p *p, int rank, uint16_t row, char text[DC__WHERE]) {
  const seat *s = &p->seats[rank];
  uint32_t k = row % WHERE_ROWS, gen = row / WHERE_ROWS;
  uint64_t w[DC__WHERE / 8] = {0};
  if (row && atomic_load_explicit(&s->row_gen[k], memory_order_acquire) == gen) {
    for (int j = 0; j < DC__WHERE / 8; j++) w[j] = atomic_load_explicit(&s->row[k][j], memory_order_acquire);
    if (atomic_load_explicit(&s->row_gen[k], memory_order_relaxed) != gen) memset(w, 0, sizeof w);
  }
  memcpy(text, w, DC__WHERE);
  text[DC__WHERE - 1] = 0;
}

/* ---- text -------------------------------------------------------------------------------------------------------- */
static void add_call(text *t, const dc_comm *c, const dc_call *k, uint64_t seq, const char *where) {
  add(t, "%s(%s, count %lld, tag %lld, %s ", k->op == DC_CALL_SEND ? "send" : "recv", dc_dtype_name(k->dtype),
      (long long)k->count, (long long)k->tag, k->op == DC_CALL_SEND ? "to" : "from");
  if (k->root >= 0 && k->root < c->size) add_rank(t, c, k->root);
  else add(t, "any source");
  add(t, ") [message call %llu%s%s]", (unsigned long long)seq, where[0] ? " at " : "", where);
}

static dc_call call_of(const dc_request *r) {
  return (dc_call){.op = r->op, .dtype = r->dtype, .root = r->peer, .count = r->count, .tag = r->tag};
}

static void add_request(text *t, const dc_comm *c, const dc_request *r) {
  dc_call k = call_of(r);
  add_call(t, c, &k, r->seq, r->where);
}

static void add_sender(text *t, const p2p *p, int src, const cell *m) {
  char where[DC__WHERE];
  dc_call k = {.op = DC_CALL_SEND, .dtype = m->dtype, .root = p->rank, .count = m->count, .tag = m->tag};
  where_read(p, src, m->where, where);
  add_call(t, p->c, &k, m->id, where);
}

/* What `rank` did last with messages, from what it has shown. */
static void add_position(text *t, const p2p *p, int rank) {
  uint64_t w[LAST_WORDS];
  char where[DC__WHERE];
  dc_call k;
  for (int i = 0; i < LAST_WORDS; i++) w[i] = atomic_load_explicit(&p->seats[rank].last[i], memory_order_relaxed);
  memcpy(&k, &w[LAST_CALL], sizeof k);
  if (!k.op) {
    add(t, "has sent and received nothing yet");
    return;
  }
  add(t, w[LAST_WAITS] ? "waits for messages, its last call is " : "does not wait for messages, its last call was ");
  where_read(p, rank, (uint16_t)w[LAST_WHERE], where);
  add_call(t, p->c, &k, w[LAST_SEQ], where);
}

/* Adds what sync.c knows of a rank. */
static void tell(text *t, const dc_comm *c, int rank, void (*what)(const dc_comm *, int, char *, size_t)) {
  what(c, rank, t->s + t->n, sizeof t->s - t->n);
  t->n += strlen(t->s + t->n);
}

/* relaxed: only for messages */
static void show_call(p2p *p, const dc_request *r) {
  uint64_t w[LAST_WAITS];
  dc_call k = call_of(r);
  memcpy(&w[LAST_CALL], &k, sizeof k);
  w[LAST_SEQ] = r->seq;
  w[LAST_WHERE] = r->row;
  for (int i = 0; i < LAST_WAITS; i++) atomic_store_explicit(&p->seats[p->rank].last[i], w[i], memory_order_relaxed);
}

static int break_all(p2p *p, int status, const text *t) {
  int rc = dc__break(p->c, status, "%s", t->s);
  for (int r = 0; r < p->size; r++) ring(p, r); /* dc__break does not know these bells */
  return rc;
}

static int mismatch(p2p *p, const dc_request *r, int src, const cell *m) {
  text t = {.n = 0};
  add(&t, "group %s: a send and its receive differ: ", p->c->label);
  add_rank(&t, p->c, src);
  add(&t, " called ");
  add_sender(&t, p, src, m);
  add(&t, "; ");
  add_rank(&t, p->c, p->rank);
  add(&t, " called ");
  add_request(&t, p->c, r);
  add(&t, ". A receive must have the dtype and the count of the oldest message of its source and tag.");
  return break_all(p, DC_E_MISMATCH, &t);
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */
/* Out of all queues; the owner may look at it from now on without the lock. */
static void finish(p2p *p, dc_request *r, int state, int status) {
  list_drop(&r->in);
  list_drop(&r->all);
  if (r->owned) atomic_fetch_sub_explicit(&dc__p2p_unfinished, 1, memory_order_relaxed);
  r->status = status;
  dc__flight_end(r->flight, status);
  atomic_store_explicit(&r->state, state, memory_order_seq_cst);
  p->completed = true;
}

/* With the lock, which it gives back; in a forked child without: there it may be held by a thread that does not
 * exist. */
static void drop_ref(p2p *p, bool child) {
  bool last = --p->refs == 0;
  if (!child) pthread_mutex_unlock(&p->lock);
  if (!last) return;
  pthread_mutex_destroy(&p->lock);
  free(p);
}

/* ---- out: cells to a peer ---------------------------------------------------------------------------------------- */
static void learn_head(p2p *p, out *o) {
  /* seq_cst: the sleeper's side of Dekker's pair with publish_head(); acquire: the peer has read those cells */
  uint32_t head = atomic_load_explicit(&o->ring->head, memory_order_seq_cst);
  if (head == o->head) return;
  o->head = head;
  o->pay_head = o->pay_end[(head - 1) & (p->s.cells - 1)];
}

/* Payload is given in one piece: what is left before the end of the ring is skipped if the piece does not fit. */
static bool room(p2p *p, out *o, uint32_t bytes, uint64_t *begin) {
  uint64_t off = o->pay_tail % p->s.payload;
  *begin = o->pay_tail + (off + bytes > p->s.payload ? p->s.payload - off : 0);
  return o->tail - o->head < p->s.cells && *begin + bytes - o->pay_head <= p->s.payload;
}

/* Writes a cell with `bytes` of payload; false if there is no room. */
static bool put(p2p *p, int dst, const cell *head, const char *data, int64_t bytes) {
  out *o = &p->out[dst];
  bool in_cell = bytes <= INLINE && head->kind != RTS;
  uint32_t need = in_cell ? 0 : (uint32_t)((bytes + DC__LINE - 1) / DC__LINE * DC__LINE);
  uint64_t begin;
  if (!room(p, o, need, &begin)) {
    learn_head(p, o);
    if (!room(p, o, need, &begin)) return false;
  }
  cell *k = &o->ring->cells[o->tail & (p->s.cells - 1)];
  k->kind = head->kind;
  k->dtype = head->dtype;
  k->where = head->where;
  k->count = head->count;
  k->tag = head->tag;
  k->id = head->id;
  k->at = (uint32_t)(begin % p->s.payload);
  if (head->kind == RTS) k->address = head->address;
  else if (in_cell && bytes) memcpy(k->data, data, (size_t)bytes);
  else if (bytes) memcpy(o->payload + k->at, data, (size_t)bytes);
  if (need) o->pay_tail = begin + need;
  o->pay_end[o->tail & (p->s.cells - 1)] = o->pay_tail;
  o->tail++;
  atomic_store_explicit(&k->flag, o->tail, memory_order_seq_cst);
  ring(p, dst);
  return true;
}

static void count_queued(p2p *p, int n) {
  uint32_t v = atomic_load_explicit(&p->queued, memory_order_relaxed) + (uint32_t)n;
  atomic_store_explicit(&p->queued, v, memory_order_relaxed); /* written under the lock only */
}

static bool put_send(p2p *p, dc_request *r) {
  cell k = {.kind = EAGER, .dtype = (uint8_t)r->dtype, .where = r->row, .count = r->count, .tag = r->tag};
  k.id = (uint32_t)r->seq;
  if (r->bytes <= p->s.eager) {
    if (!put(p, r->peer, &k, r->buf, r->bytes)) return false;
    dc__count(DC_COUNTER_p2p_bytes_ring, r->bytes);
    finish(p, r, DONE, DC_OK);
    return true;
  }
  k.kind = RTS;
  k.address = (uint64_t)(uintptr_t)r->buf;
  if (!put(p, r->peer, &k, NULL, 0)) return false;
  list_drop(&r->in);
  list_push(&p->out[r->peer].rts, &r->in);
  return true;
}

static bool put_data(p2p *p, dc_request *r) {
  int64_t n = r->bytes - r->moved < p->s.chunk ? r->bytes - r->moved : p->s.chunk;
  cell k = {.kind = DATA, .id = r->id, .count = n, .tag = r->moved};
  if (!put(p, r->peer, &k, r->buf + r->moved, n)) return false;
  dc__count(DC_COUNTER_p2p_bytes_ring, n);
  r->moved += n;
  if (r->moved < r->bytes) return true;
  count_queued(p, -1); /* before: from finish() on a blocking send may be its owner's stack again */
  finish(p, r, DONE, DC_OK);
  return true;
}

static bool put_answer(p2p *p, int dst, int kind, uint32_t id) {
  cell k = {.kind = (uint8_t)kind, .id = id};
  return put(p, dst, &k, NULL, 0);
}

/* Sends what waits for room. Answers first: nothing but room holds them up, and somebody waits for them. */
static void flush(p2p *p, int dst) {
  out *o = &p->out[dst];
  while (!list_empty(&o->answers)) {
    answer *a = ITEM(answer, o->answers.next, in);
    if (!put_answer(p, dst, a->kind, a->id)) return;
    if (a->done) finish(p, a->done, DONE, DC_OK);
    list_drop(&a->in);
    free(a);
    count_queued(p, -1);
  }
  while (!list_empty(&o->sends)) {
    if (!put_send(p, REQUEST(o->sends.next))) return;
    count_queued(p, -1);
  }
  while (!list_empty(&o->data))
    if (!put_data(p, REQUEST(o->data.next))) return;
}

/* `done`: the receive that is complete once the answer is in the ring, or NULL. */
static int send_answer(p2p *p, int dst, int kind, uint32_t id, dc_request *done) {
  out *o = &p->out[dst];
  if (list_empty(&o->answers) && put_answer(p, dst, kind, id)) {
    if (done) finish(p, done, DONE, DC_OK);
    return DC_OK;
  }
  answer *a = malloc(sizeof *a);
  if (!a) return DC_FAIL(DC_E_NOMEM, "group %s: %zu bytes for a message's answer", p->c->label, sizeof *a);
  *a = (answer){.kind = (uint8_t)kind, .id = id, .done = done};
  list_push(&o->answers, &a->in);
  count_queued(p, 1);
  return DC_OK;
}

/* ---- single copies ----------------------------------------------------------------------------------------------- */
static int64_t read_from(const p2p *p, int src, void *to, uint64_t from, int64_t bytes) {
  struct iovec here = {to, (size_t)bytes}, there = {(void *)(uintptr_t)from, (size_t)bytes};
  return process_vm_readv(p->c->h->seat[src].pid, &here, 1, &there, 1, 0);
}

/* Once per source: are we allowed to, and is that process number the process that we mean (another pid namespace)? */
static bool cma_works(p2p *p, int src) {
  in *x = &p->in[src];
  if (x->cma == CMA_UNKNOWN) {
    const seat *s = &p->seats[src];
    uint64_t got[2] = {0, 0}, want[2];
    x->cma = CMA_NO;
    /* acquire: pairs with the release in publish_nonce() */
    if (p->cma && atomic_load_explicit(&s->cma, memory_order_acquire)) {
      for (int i = 0; i < 2; i++) want[i] = atomic_load_explicit(&s->nonce[i], memory_order_relaxed);
      uint64_t at = atomic_load_explicit(&s->nonce_at, memory_order_relaxed);
      if (read_from(p, src, got, at, sizeof got) == sizeof got && memcmp(got, want, sizeof got) == 0) x->cma = CMA_YES;
    }
  }
  return x->cma == CMA_YES;
}

static void publish_nonce(p2p *p) {
  seat *s = &p->seats[p->rank];
  if (getrandom(p->nonce, sizeof p->nonce, GRND_NONBLOCK) != sizeof p->nonce) { /* early in boot: no pool yet */
    p->nonce[0] = (uint64_t)dc__now_ns() * 0x9e3779b97f4a7c15ull;
    p->nonce[1] = (uint64_t)getpid() << 32 ^ (uint64_t)(uintptr_t)p;
  }
  for (int i = 0; i < 2; i++) atomic_store_explicit(&s->nonce[i], p->nonce[i], memory_order_relaxed);
  atomic_store_explicit(&s->nonce_at, (uint64_t)(uintptr_t)p->nonce, memory_order_relaxed);
  atomic_store_explicit(&s->cma, p->cma, memory_order_release);
}

/* ---- in: cells from a peer --------------------------------------------------------------------------------------- */
static void take_chunk(p2p *p, dc_request *r, int64_t offset, const char *data, int64_t bytes) {
  memcpy(r->buf + offset, data, (size_t)bytes);
  r->moved = offset + bytes;
  if (r->moved == r->bytes) finish(p, r, DONE, DC_OK);
}

/* A message has met its receive. */
static int deliver(p2p *p, dc_request *r, int src, const cell *m, const char *data) {
  if (r->dtype != m->dtype || r->count != m->count) return mismatch(p, r, src, m);
  list_drop(&r->in);
  r->source = src;
  if (m->kind == EAGER) {
    if (r->bytes) memcpy(r->buf, data, (size_t)r->bytes);
    finish(p, r, DONE, DC_OK);
    return DC_OK;
  }
  r->id = m->id;
  r->remote = m->address;
  if (cma_works(p, src)) {
    list_push(&p->copies, &r->in);
    return DC_OK;
  }
  list_push(&p->in[src].data, &r->in);
  return send_answer(p, src, CTS, r->id, NULL);
}

static dc_request *find_tag(qlink *list, int64_t tag) {
  for (qlink *l = list->next; l != list; l = l->next)
    if (REQUEST(l)->tag == tag) return REQUEST(l);
  return NULL;
}

/* The oldest receive for a message of this source and tag. */
static dc_request *match(p2p *p, int src, int64_t tag) {
  dc_request *a = find_tag(&p->in[src].posted, tag), *b = find_tag(&p->any, tag);
  return !a || (b && b->order < a->order) ? b : a;
}

static int keep(p2p *p, int src, const cell *m, const char *data) {
  int64_t bytes = m->kind == EAGER ? m->count * (int64_t)dc_dtype_size(m->dtype) : 0;
  early *e = malloc(sizeof *e + (size_t)bytes);
  if (!e)
    return DC_FAIL(DC_E_NOMEM, "group %s: %lld bytes for a message that no receive is posted for", p->c->label,
                   (long long)bytes);
  memcpy(&e->head, m, sizeof e->head);
  if (bytes) memcpy(e->data, data, (size_t)bytes);
  e->order = p->order++;
  list_push(&p->in[src].early, &e->in);
  return DC_OK;
}

static dc_request *find_id(qlink *list, uint32_t id) {
  for (qlink *l = list->next; l != list; l = l->next)
    if (REQUEST(l)->id == id) return REQUEST(l);
  return NULL;
}

static int take(p2p *p, int src, const cell *m) {
  dc_request *r;
  int64_t bytes = m->kind == DATA ? m->count : m->kind == EAGER ? m->count * (int64_t)dc_dtype_size(m->dtype) : 0;
  const char *data = bytes <= INLINE ? m->data : p->in[src].payload + m->at;
  switch (m->kind) {
  case ACK:
    r = find_id(&p->out[src].rts, m->id);
    if (r) finish(p, r, DONE, DC_OK);
    return DC_OK;
  case CTS:
    r = find_id(&p->out[src].rts, m->id);
    if (!r) return DC_OK;
    list_drop(&r->in);
    list_push(&p->out[src].data, &r->in);
    count_queued(p, 1);
    return DC_OK;
  case DATA: /* of a withdrawn receive: nobody wants it */
    r = find_id(&p->in[src].data, m->id);
    if (r) take_chunk(p, r, m->tag, data, bytes);
    return DC_OK;
  default: r = match(p, src, m->tag); return r ? deliver(p, r, src, m, data) : keep(p, src, m, data);
  }
}

static bool arrived(const p2p *p, int src) {
  const in *x = &p->in[src];
  uint32_t pos = atomic_load_explicit(&x->pos, memory_order_relaxed);
  /* acquire: pairs with put(); seq_cst: the sleeper's side of Dekker's pair */
  return atomic_load_explicit(&x->ring->cells[pos & (p->s.cells - 1)].flag, memory_order_seq_cst) == pos + 1;
}

/* Takes what has arrived; at most one ring full, so that one busy peer does not hold up the others. */
static int drain(p2p *p, int src) {
  in *x = &p->in[src];
  uint32_t pos = atomic_load_explicit(&x->pos, memory_order_relaxed), begin = pos, told = pos;
  int rc = DC_OK;
  while (!rc && pos - begin < p->s.cells && arrived(p, src)) {
    rc = take(p, src, &x->ring->cells[pos & (p->s.cells - 1)]);
    pos++;
    atomic_store_explicit(&x->pos, pos, memory_order_relaxed);
    if (pos - told < p->s.cells / 4) continue;
    told = pos;
    atomic_store_explicit(&x->ring->head, told, memory_order_seq_cst);
    ring(p, src);
  }
  if (told != pos) {
    atomic_store_explicit(&x->ring->head, pos, memory_order_seq_cst);
    ring(p, src);
  }
  return rc;
}

/* ---- peers that are gone ----------------------------------------------------------------------------------------- */
static bool has_left(const p2p *p, int rank) {
  return atomic_load_explicit(&p->c->h->seat[rank].left, memory_order_acquire);
}

static bool is_dead(p2p *p, int rank) {
  if (p->in[rank].dead) return true;
  struct pollfd f = {.fd = p->c->pidfd[rank], .events = POLLIN}; /* readable once the process is a zombie */
  if (poll(&f, 1, 0) > 0 && f.revents) p->in[rank].dead = true;
  return p->in[rank].dead;
}

static void look_at_all(p2p *p) {
  struct pollfd f[DC_COMM_MAX_RANKS];
  for (int r = 0; r < p->size; r++)
    f[r] = (struct pollfd){.fd = r == p->rank || p->in[r].dead ? -1 : p->c->pidfd[r], .events = POLLIN};
  if (poll(f, (nfds_t)p->size, 0) <= 0) return;
  for (int r = 0; r < p->size; r++)
    if (f[r].revents) p->in[r].dead = true;
}

static int lost(p2p *p, const dc_request *r, int peer) {
  text t = {.n = 0};
  int pid = p->c->h->seat[peer].pid;
  add(&t, "group %s: ", p->c->label);
  add_rank(&t, p->c, peer);
  add(&t, " (pid %d)", pid);
  if (has_left(p, peer)) add(&t, " left the group");
  else tell(&t, p->c, peer, dc__tell_death);
  add(&t, "; ");
  add_rank(&t, p->c, p->rank);
  add(&t, " waits for it in ");
  add_request(&t, p->c, r);
  add(&t, "; ");
  add_rank(&t, p->c, peer);
  add(&t, " ");
  add_position(&t, p, peer);
  return break_all(p, DC_E_PEER_DIED, &t);
}

/* ---- progress ---------------------------------------------------------------------------------------------------- */
/* Copies in pieces, without the lock: others go on meanwhile. Sets r->moved. */
static void copy_unlocked(p2p *p, dc_request *r) {
  r->busy = true;
  unlock(p);
  int64_t moved = 0;
  while (moved < r->bytes && !dc__broken(p->c)) {
    int64_t n = r->bytes - moved < COPY_PIECE ? r->bytes - moved : COPY_PIECE;
    n = read_from(p, r->source, r->buf + moved, r->remote + (uint64_t)moved, n);
    if (n <= 0) break;
    moved += n;
  }
  dc__count(DC_COUNTER_p2p_bytes_single_copy, moved);
  pthread_mutex_lock(&p->lock);
  r->busy = false;
  r->moved = moved;
}

static int copy_one(p2p *p, dc_request *r) {
  int src = r->source;
  list_drop(&r->in);
  copy_unlocked(p, r);
  DC_TRY(dc__broken(p->c));
  /* Alive afterwards means that it was this process that we read (and not another one of the same number); not left,
   * that the buffer was still the message. */
  if (is_dead(p, src) || has_left(p, src)) return lost(p, r, src);
  if (r->moved == r->bytes) return send_answer(p, src, ACK, r->id, r);
  /* Not readable from outside (device memory, a permission taken away): through the ring. */
  r->moved = 0;
  list_push(&p->in[src].data, &r->in);
  return send_answer(p, src, CTS, r->id, NULL);
}

static int run_copies(p2p *p) {
  while (!list_empty(&p->copies)) DC_TRY(copy_one(p, REQUEST(p->copies.next)));
  return DC_OK;
}

/* With the lock: the error that broke the communicator, or that it is closed. */
static int check_open(p2p *p) {
  if (p->closed) return DC_FAIL(DC_E_STATE, "the communicator of this request was closed");
  return dc__broken(p->c);
}

static int progress(p2p *p) {
  DC_TRY(check_open(p));
  for (int r = 0; r < p->size; r++) {
    if (r == p->rank) continue;
    DC_TRY(drain(p, r));
    if (atomic_load_explicit(&p->queued, memory_order_relaxed)) flush(p, r);
  }
  return run_copies(p);
}

/* A failure that is not yet everybody's (memory) becomes it. */
static int spread(p2p *p, int rc) {
  if (!rc || p->closed || dc_comm_error(p->c)[0]) return rc;
  text t = {.n = 0};
  add(&t, "%s", dc_last_error());
  return break_all(p, rc, &t);
}

static int locked_progress(p2p *p) {
  pthread_mutex_lock(&p->lock);
  int rc = spread(p, progress(p));
  unlock(p);
  return rc;
}

/* ---- progress for others ----------------------------------------------------------------------------------------- */
/* All open p2p of this process. Held while one of them is progressed for others, so that it can't be closed meanwhile;
 * taken before p2p.lock. */
static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static p2p *registry;
_Atomic int dc__p2p_unfinished;

static void registry_hold(void) { pthread_mutex_lock(&registry_lock); }
static void registry_give(void) { pthread_mutex_unlock(&registry_lock); }
DC__AT_FORK(p2p_at_fork, DC__FORK_REGISTRY, &registry_lock, NULL)

static void registry_add(p2p *p) {
  registry_hold();
  p->next = registry;
  registry = p;
  registry_give();
}

static void registry_remove(p2p *p) {
  registry_hold();
  for (p2p **at = &registry; *at; at = &(*at)->next) {
    if (*at != p) continue;
    *at = p->next;
    break;
  }
  registry_give();
}

static bool is_broken(const p2p *p) { /* without a text */
  return atomic_load_explicit(&p->c->h->broken, memory_order_relaxed) != DC__SOUND;
}

void dc__p2p_idle(void) {
  if (pthread_mutex_trylock(&registry_lock)) return; /* another thread does it */
  uint64_t mark = dc__fork_mark();
  for (p2p *p = registry; p; p = p->next) {
    if (p->fork_mark != mark || is_broken(p) || pthread_mutex_trylock(&p->lock)) continue;
    if (!list_empty(&p->live)) spread(p, progress(p)); /* whoever waits there is told of an error */
    unlock(p);
  }
  registry_give();
}

/* ---- waiting ----------------------------------------------------------------------------------------------------- */
/* Takes r out of everything, from whatever state. A message that it has begun to receive is lost. */
static void withdraw(p2p *p, dc_request *r, int status, const char *why) {
  while (r->busy) { /* another thread copies into it */
    pthread_mutex_unlock(&p->lock);
    sched_yield();
    pthread_mutex_lock(&p->lock);
  }
  if (is_over(r)) return;
  if (r->op == DC_CALL_RECV && r->source >= 0) {
    out *o = &p->out[r->source];
    for (qlink *l = o->answers.next; l != &o->answers; l = l->next)
      if (ITEM(answer, l, in)->done == r) ITEM(answer, l, in)->done = NULL;
  }
  r->error = strdup(why); /* NULL: result() has a text */
  finish(p, r, FAILED, status);
}

static int result(const dc_request *r) {
  if (atomic_load_explicit(&r->state, memory_order_acquire) == DONE) return DC_OK;
  return DC_FAIL(r->status, "%s", r->error ? r->error : "this request failed before");
}

/* Is there something to do? Without the lock. */
static bool peek(const p2p *p, const dc_request *r, int n) {
  if (r->peer >= 0 && arrived(p, r->peer)) return true;
  if (r->peer >= 0 && n % 16) return false;
  if (atomic_load_explicit(&p->queued, memory_order_relaxed)) return true;
  for (int s = 0; s < p->size; s++)
    if (s != p->rank && arrived(p, s)) return true;
  return false;
}

static int late(p2p *p, const dc_request *r, int64_t timeout_ns) {
  text t = {.n = 0};
  int peer = r->source >= 0 ? r->source : r->peer;
  add(&t, "group %s: time-out after %lld ms: ", p->c->label, (long long)(timeout_ns / 1000000));
  add_rank(&t, p->c, p->rank);
  add(&t, " waits in ");
  add_request(&t, p->c, r);
  if (r->moved) add(&t, ", %lld of %lld bytes are there", (long long)r->moved, (long long)r->bytes);
  add(&t, ". Where the others are:");
  for (int s = 0, shown = 0; s < p->size && shown < 12; s++) {
    if (s == p->rank || (peer >= 0 && s != peer)) continue;
    add(&t, shown++ ? "; " : " ");
    add_rank(&t, p->c, s);
    add(&t, " (pid %d) ", p->c->h->seat[s].pid);
    add_position(&t, p, s);
    add(&t, "; in collectives it ");
    tell(&t, p->c, s, dc__tell_position);
    if (list_empty(&p->in[s].early)) continue;
    add(&t, "; its oldest message here that no receive has asked for is ");
    add_sender(&t, p, s, &ITEM(early, p->in[s].early.next, in)->head);
  }
  return break_all(p, DC_E_TIMEOUT, &t);
}

/* The peer whose end makes r impossible, or -1. Anybody may be the one that a receive from any source waits for: a
 * death ends it at once, a leaving when nobody is left. */
static int missing(p2p *p, const dc_request *r) {
  int peer = r->source >= 0 ? r->source : r->peer, one = -1, left = 0;
  if (peer >= 0) return p->in[peer].dead || has_left(p, peer) ? peer : -1;
  for (int s = 0; s < p->size; s++) {
    if (s == p->rank) continue;
    if (has_left(p, s)) left++;
    else if (p->in[s].dead) return s;
    else continue;
    one = s;
  }
  return left == p->size - 1 ? one : -1;
}

/* Everything that can end a wait other than what is waited for. With the lock. timeout_ns 0: none. */
static int look(p2p *p, dc_request *r, int64_t start_ns, int64_t timeout_ns) {
  DC_TRY(check_open(p));
  r->look_ns = dc__now_ns();
  look_at_all(p);
  int gone = missing(p, r); /* before taking what has arrived: its last words count */
  DC_TRY(progress(p));
  if (is_over(r) || r->busy) return DC_OK;
  if (gone >= 0) return lost(p, r, gone);
  return timeout_ns && r->look_ns - start_ns >= timeout_ns ? late(p, r, timeout_ns) : DC_OK;
}

/* Sleeps until somebody rings or it is time to look after the peers. */
static int doze(p2p *p, const dc_request *r, int64_t ns) {
  seat *s = &p->seats[p->rank];
  atomic_fetch_add_explicit(&s->sleepers, 1, memory_order_seq_cst);
  uint32_t seen = atomic_load_explicit(&s->bell, memory_order_seq_cst);
  int rc = locked_progress(p); /* after `sleepers`: what comes later than this rings */
  if (!rc && !is_over(r)) {
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    dc__count(DC_COUNTER_futex_waits, 1);
    syscall(SYS_futex, &s->bell, FUTEX_WAIT, seen, &t, NULL, 0); /* every outcome is handled by looking again */
  }
  atomic_fetch_sub_explicit(&s->sleepers, 1, memory_order_relaxed);
  return rc;
}

typedef struct waiting {
  int64_t start_ns, begin_ns, timeout_ns, moved; /* start_ns: begin of the wait, or when bytes moved last */
  bool yields;                                   /* spinning was not enough */
} waiting;

/* One round of a wait that is no longer short: yields for a while (another rank may need this core), then sleeps. */
static int long_wait(p2p *p, dc_request *r, waiting *w) {
  int64_t now = dc__now_ns();
  pthread_mutex_lock(&p->lock);
  int rc = DC_OK;
  if (r->moved != w->moved) {
    w->moved = r->moved;
    w->start_ns = now;
  }
  int64_t left = w->start_ns + w->timeout_ns - now;
  if (now - r->look_ns >= DC__LOOK_NS || left <= 0) rc = spread(p, look(p, r, w->start_ns, w->timeout_ns));
  unlock(p);
  if (rc || is_over(r)) return rc;
  if (now - w->begin_ns < p->c->spin_ns + p->c->yield_ns) {
    sched_yield();
    return DC_OK;
  }
  return doze(p, r, left > 0 && left < DC__LOOK_NS ? left : DC__LOOK_NS);
}

static int wait_over(p2p *p, dc_request *r, int64_t timeout_ns) {
  int rc = DC_OK;
  waiting w = {.timeout_ns = timeout_ns, .moved = -1};
  for (int n = 1; !rc && !is_over(r); n++) {
    if (peek(p, r, n)) rc = locked_progress(p);
    else cpu_relax();
    if (rc || is_over(r) || (n % 64 && !w.yields)) continue;
    int64_t now = dc__now_ns();
    if (!w.begin_ns) w.begin_ns = w.start_ns = now;
    w.yields = now - w.begin_ns >= p->c->spin_ns;
    if (w.yields) rc = long_wait(p, r, &w);
  }
  return rc;
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */
static int check_args(const dc_comm *c, const void *buf, int64_t count, int dtype, int op, int peer) {
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

static int start_send(p2p *p, dc_request *r) {
  dc__count(DC_COUNTER_p2p_sends, 1);
  list_push(&p->out[r->peer].sends, &r->in);
  count_queued(p, 1);
  flush(p, r->peer);
  return DC_OK;
}

static early *find_early(p2p *p, int src, int64_t tag) {
  qlink *list = &p->in[src].early;
  for (qlink *l = list->next; l != list; l = l->next)
    if (ITEM(early, l, in)->head.tag == tag) return ITEM(early, l, in);
  return NULL;
}

static int start_recv(p2p *p, dc_request *r) {
  early *e = NULL;
  int src = r->peer;
  dc__count(DC_COUNTER_p2p_recvs, 1);
  if (r->peer >= 0) e = find_early(p, r->peer, r->tag);
  for (int s = 0; s < p->size && r->peer < 0; s++) {
    early *x = s == p->rank ? NULL : find_early(p, s, r->tag);
    if (!x || (e && e->order < x->order)) continue;
    e = x;
    src = s;
  }
  if (e) {
    int rc = deliver(p, r, src, &e->head, e->data);
    list_drop(&e->in);
    free(e);
    DC_TRY(rc);
  } else {
    r->order = p->order++;
    list_push(r->peer >= 0 ? &p->in[r->peer].posted : &p->any, &r->in);
  }
  if (r->peer < 0) return progress(p);
  if (!e) DC_TRY(drain(p, r->peer));
  return run_copies(p);
}

/* Fills r and starts it. On failure r is in no queue. */
static int start(dc_comm *c, dc_request *r, const char *where) {
  p2p *p = c->p2p;
  list_init(&r->in);
  r->p = p;
  r->source = -1;
  r->bytes = r->count * (int64_t)dc_dtype_size(r->dtype);
  if (where) memcpy(r->where, where, strnlen(where, DC__WHERE - 1));
  pthread_mutex_lock(&p->lock);
  int rc = check_open(p);
  if (rc) {
    pthread_mutex_unlock(&p->lock);
    return rc;
  }
  p->inside++;
  r->seq = ++p->calls;
  r->id = (uint32_t)r->seq;
  r->row = where_keep(p, where);
  show_call(p, r);
  dc_call k = call_of(r);
  r->flight = dc__flight_begin_as(c, &k, r->where, (int64_t)r->seq);
  list_push(&p->live, &r->all);
  /* relaxed: a hint. The blocking forms progress themselves */
  if (r->owned) atomic_fetch_add_explicit(&dc__p2p_unfinished, 1, memory_order_relaxed);
  rc = spread(p, r->op == DC_CALL_SEND ? start_send(p, r) : start_recv(p, r));
  if (rc) withdraw(p, r, rc, dc_last_error());
  else if (r->owned) p->refs++;
  p->inside--;
  unlock(p);
  return rc;
}

static int start_owned(dc_comm *c, int op, void *buf, int64_t count, int dtype, int peer, int64_t tag,
                       const char *where, dc_request **out) {
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  DC_TRY(check_args(c, buf, count, dtype, op, peer));
  dc_request *r = calloc(1, sizeof *r);
  if (!r) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *r);
  r->op = op;
  r->buf = buf;
  r->count = count;
  r->dtype = dtype;
  r->peer = peer;
  r->tag = tag;
  r->owned = true;
  int rc = start(c, r, where);
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
  return start_owned(c, DC_CALL_SEND, (void *)buf, count, dtype, dst, tag, where, out); /* only read */
}

int dc_irecv(dc_comm *c, void *buf, int64_t count, int dtype, int src, int64_t tag, const char *where,
             dc_request **out) {
  return start_owned(c, DC_CALL_RECV, buf, count, dtype, src, tag, where, out);
}

static void show_wait(p2p *p, int n) {
  atomic_fetch_add_explicit(&p->seats[p->rank].last[LAST_WAITS], (uint64_t)(int64_t)n, memory_order_relaxed);
}

/* Blocks until r is over; a failure is r's from then on. */
static int wait_for(p2p *p, dc_request *r, int64_t timeout_ms) {
  if (is_over(r)) goto over;
  pthread_mutex_lock(&p->lock);
  int rc = check_open(p);
  if (!rc) {
    p->inside++;
    show_wait(p, 1);
    int64_t ns = timeout_ms > 0 ? (timeout_ms > INT64_MAX / 2000000 ? INT64_MAX / 4 : timeout_ms * 1000000)
                                : p->c->timeout_ns;
    pthread_mutex_unlock(&p->lock);
    rc = wait_over(p, r, ns);
    pthread_mutex_lock(&p->lock);
    show_wait(p, -1);
    p->inside--;
  }
  if (rc && !is_over(r)) withdraw(p, r, rc, dc_last_error());
  pthread_mutex_unlock(&p->lock);
over:
  return result(r);
}

static int check_request(const dc_request *r) {
  if (!r) return DC_FAIL(DC_E_INVALID, "the request is NULL");
  if (r->p->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "this request was made by the parent of this forked process");
  return DC_OK;
}

int dc_request_wait(dc_request *r, int64_t timeout_ms) {
  DC_TRY(check_request(r));
  return wait_for(r->p, r, timeout_ms);
}

int dc_request_test(dc_request *r, int *done) {
  if (!done) return DC_FAIL(DC_E_INVALID, "done is NULL");
  DC_TRY(check_request(r));
  p2p *p = r->p;
  if (!is_over(r)) {
    pthread_mutex_lock(&p->lock);
    int rc = check_open(p);
    if (!rc) {
      p->inside++;
      rc = progress(p);
      if (!rc && !is_over(r) && dc__now_ns() - r->look_ns >= DC__LOOK_NS)
        rc = look(p, r, 0, 0); /* so that polling callers learn of a death as well */
      rc = spread(p, rc);
      p->inside--;
    }
    if (rc && !is_over(r)) withdraw(p, r, rc, dc_last_error());
    unlock(p);
  }
  bool over = is_over(r);
  if (over) DC_TRY(result(r));
  *done = over;
  return DC_OK;
}

int dc_request_source(const dc_request *r) {
  if (!r) return DC_FAIL(DC_E_INVALID, "the request is NULL");
  if (r->op != DC_CALL_RECV || !is_over(r)) return DC_FAIL(DC_E_STATE, "only a completed receive has a source");
  return r->source;
}

int dc_request_free(dc_request *r) {
  if (!r) return DC_OK;
  p2p *p = r->p;
  bool child = p->fork_mark != dc__fork_mark();
  int rc = !child && !is_over(r) && r->op == DC_CALL_SEND ? wait_for(p, r, 0) : DC_OK;
  if (!child) {
    pthread_mutex_lock(&p->lock);
    if (!is_over(r)) withdraw(p, r, DC_E_STATE, "withdrawn");
  }
  drop_ref(p, child);
  free(r->error);
  free(r);
  return rc;
}

static int blocking(dc_comm *c, int op, void *buf, int64_t count, int dtype, int peer, int64_t tag, int *source) {
  DC_TRY(check_args(c, buf, count, dtype, op, peer));
  dc_request r = {.op = op, .buf = buf, .count = count, .dtype = dtype, .peer = peer, .tag = tag};
  int rc = start(c, &r, NULL);
  if (!rc) rc = wait_for(c->p2p, &r, 0);
  free(r.error);
  if (rc) return rc;
  if (source) *source = r.source;
  return DC_OK;
}

int dc_send(dc_comm *c, const void *buf, int64_t count, int dtype, int dst, int64_t tag) {
  return blocking(c, DC_CALL_SEND, (void *)buf, count, dtype, dst, tag, NULL);
}

int dc_recv(dc_comm *c, void *buf, int64_t count, int dtype, int src, int64_t tag, int *source) {
  return blocking(c, DC_CALL_RECV, buf, count, dtype, src, tag, source);
}

/* ---- open, close ------------------------------------------------------------------------------------------------- */
static void open_pair(p2p *p, char *pairs, uint64_t *pay_end, int peer) {
  out *o = &p->out[peer];
  in *x = &p->in[peer];
  o->ring = (pair *)(pairs + p->s.pair_bytes * ((int64_t)p->rank * p->size + peer));
  x->ring = (pair *)(pairs + p->s.pair_bytes * ((int64_t)peer * p->size + p->rank));
  o->payload = (char *)&o->ring->cells[p->s.cells];
  x->payload = (const char *)&x->ring->cells[p->s.cells];
  o->pay_end = pay_end + (int64_t)peer * p->s.cells;
  qlink *all[] = {&o->answers, &o->sends, &o->rts, &o->data, &x->posted, &x->early, &x->data};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) list_init(all[i]);
}

int dc__p2p_open(dc_comm *c, void *area) {
  bool cma = false;
  DC_TRY(dc__env_switch("DEEPC_CMA", true, &cma));
  shape s = shape_of(c->size);
  size_t n = (size_t)c->size;
  /* one block: p2p, in, out, pay_end */
  size_t bytes = sizeof(p2p) + n * (sizeof(in) + sizeof(out) + s.cells * sizeof(uint64_t));
  p2p *p = calloc(1, bytes);
  if (!p) return DC_FAIL(DC_E_NOMEM, "%zu bytes", bytes);
  pthread_mutex_init(&p->lock, NULL);
  p->c = c;
  p->fork_mark = c->fork_mark;
  p->rank = c->rank;
  p->size = c->size;
  p->refs = 1;
  p->cma = cma;
  p->s = s;
  p->seats = area;
  p->in = (in *)(p + 1);
  p->out = (out *)(p->in + n);
  list_init(&p->any);
  list_init(&p->copies);
  list_init(&p->live);
  for (int r = 0; r < c->size; r++) open_pair(p, (char *)(p->seats + n), (uint64_t *)(p->out + n), r);
  publish_nonce(p);
  registry_add(p);
  c->p2p = p;
  return DC_OK;
}

static void free_early(p2p *p, int src) {
  qlink *list = &p->in[src].early;
  while (!list_empty(list)) {
    early *e = ITEM(early, list->next, in);
    list_drop(&e->in);
    free(e);
  }
}

static void free_answers(p2p *p, int dst) {
  qlink *list = &p->out[dst].answers;
  while (!list_empty(list)) {
    answer *a = ITEM(answer, list->next, in);
    list_drop(&a->in);
    free(a);
  }
}

static void turn_out(p2p *p) {
  pthread_mutex_lock(&p->lock);
  p->closed = true;
  while (p->inside) {
    pthread_mutex_unlock(&p->lock);
    ring(p, p->rank);
    sched_yield();
    pthread_mutex_lock(&p->lock);
  }
  while (!list_empty(&p->live))
    withdraw(p, ITEM(dc_request, p->live.next, all), DC_E_STATE, "the communicator of this request was closed");
}

/* Threads that still wait leave with DC_E_STATE; requests that their owners still have say the same. In a forked child
 * only memory is freed. */
void dc__p2p_close(dc_comm *c) {
  p2p *p = c->p2p;
  if (!p) return;
  bool child = c->fork_mark != dc__fork_mark();
  registry_remove(p);
  if (!child) turn_out(p);
  for (int r = 0; r < p->size; r++) free_early(p, r);
  for (int r = 0; r < p->size; r++) free_answers(p, r);
  c->p2p = NULL;
  drop_ref(p, child);
}
