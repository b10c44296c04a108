/* message.h: what the files of messages share: the layout of their area in the arena, and a rank's private state.
 *
 *   p2p_seat [size] | p2p_pair [size][size]: head | cells | payload
 *
 * A seat is what a rank shows to all. A pair carries everything from one rank to one other: only the source writes
 * cells and payload, only the destination advances `head`. A cell is valid when its flag is its position + 1, so that a
 * message of up to P2P_INLINE bytes moves one cache line. In a large group the memory of a ring comes with its first
 * message. */
#ifndef DEEPC_MESSAGE_H
#define DEEPC_MESSAGE_H

#include <pthread.h>

#include "comm_impl.h"
#include "p2p.h"
#include "text.h"

#define P2P_INLINE 32    /* bytes of a message that fit its cell */
#define P2P_EAGER_MOST 8192   /* larger messages are a rendezvous: measured, docs/lab/collectives.md */
#define P2P_WHERES 32    /* caller texts that a rank shows */
#define P2P_KEPT ((int64_t)256 << 20) /* bytes of messages that no receive has asked for, of one source */

/* ---- shared ------------------------------------------------------------------------------------------------------ */
/* EAGER: the data; RTS: where a large send lies; backwards ACK: it was copied, or CTS: send it through the ring; then
 * DATA. */
enum { P2P_EAGER = 1, P2P_RTS, P2P_ACK, P2P_CTS, P2P_DATA };

typedef struct p2p_cell {
  _Alignas(DC__LINE) _Atomic uint32_t flag; /* position + 1, modulo 2^32 */
  uint8_t kind, dtype;
  uint16_t where; /* the sender's row of caller texts, see dc__tell_where() */
  int64_t count; /* elements; DATA: bytes */
  int64_t tag; /* DATA: offset */
  uint32_t id; /* EAGER, RTS: the sender's call; the others: that of the RTS they belong to */
  uint32_t at; /* offset of the payload */
  union {
    char data[P2P_INLINE];
    uint64_t address; /* RTS: of the sender's buffer */
  };
} p2p_cell;
_Static_assert(sizeof(p2p_cell) == DC__LINE, "a cell is a cache line");

typedef struct p2p_pair {
  _Alignas(DC__LINE) _Atomic uint32_t head; /* cells that the destination has taken, with their payload */
  p2p_cell cells[]; /* then the payload */
} p2p_pair;

enum { P2P_LAST_CALL = 0, P2P_LAST_SEQ = 4, P2P_LAST_WHERE, P2P_LAST_WAITS, P2P_LAST_WORDS = 8 };
typedef struct p2p_seat {
  _Alignas(DC__LINE) _Atomic uint32_t bell; /* of the waits for messages, see dc__publish() */
  _Atomic uint32_t sleepers;
  /* bit r: rank r has sent this one something, so that the rings of the others need not be looked at, which would make
   * memory of them */
  _Alignas(DC__LINE) _Atomic uint64_t senders[DC_COMM_MAX_RANKS / 64];
  /* for single copies: whether this rank allows them, and where which number lies in its memory */
  _Alignas(DC__LINE) _Atomic uint64_t cma;
  _Atomic uint64_t nonce_at, nonce[2];
  /* 1 once this rank closes, before its unfinished sends are withdrawn: from then on their buffers may be other data */
  _Atomic uint32_t closed;
  /* for error texts only: atomic because others read them at any time */
  _Alignas(DC__LINE) _Atomic uint64_t last[P2P_LAST_WORDS];
  _Atomic uint32_t row_gen[P2P_WHERES];
  _Atomic uint64_t row[P2P_WHERES][DC__WHERE_WORDS];
} p2p_seat;

/* By the number of ranks alone: all ranks must agree. */
typedef struct p2p_shape {
  int64_t pair_bytes;
  uint32_t cells; /* a power of two */
  uint32_t payload, chunk, eager;
} p2p_shape;

/* ---- private ----------------------------------------------------------------------------------------------------- */
typedef struct p2p_link {
  struct p2p_link *next, *prev;
} p2p_link;

static inline void p2p_list_init(p2p_link *l) { l->next = l->prev = l; }
static inline bool p2p_list_empty(const p2p_link *l) { return l->next == l; }
static inline void p2p_list_push(p2p_link *list, p2p_link *x) {
  x->prev = list->prev;
  x->next = list;
  list->prev->next = x;
  list->prev = x;
}
static inline void p2p_list_drop(p2p_link *x) {
  x->prev->next = x->next;
  x->next->prev = x->prev;
  p2p_list_init(x);
}
#define P2P_ITEM(type, l, field) ((type *)(void *)((char *)(l) - offsetof(type, field)))
#define P2P_REQUEST(l) P2P_ITEM(dc_request, l, in)

/* A message that has arrived before its receive. */
typedef struct p2p_early {
  p2p_link in;
  p2p_cell head;
  uint64_t order; /* of arrival, over all sources */
  int64_t bytes;
  char data[];
} p2p_early;

/* A cell of ours that found no room. */
typedef struct p2p_answer {
  p2p_link in;
  uint8_t kind;
  uint32_t id;
  dc_request *done; /* ACK: the receive that is complete with it, or NULL */
} p2p_answer;

enum { P2P_PENDING, P2P_DONE, P2P_FAILED };
struct dc_request {
  p2p_link in; /* the one queue that it is in, or itself */
  p2p_link all; /* p2p.live */
  struct p2p *p;
  _Atomic int state;
  int op, dtype, peer, status; /* peer: may be DC_ANY_SOURCE of a receive */
  int source; /* of a matched receive, else -1 */
  bool owned, busy; /* busy: a thread copies into it without the lock */
  int64_t count, bytes, tag, moved;
  char *buf;
  uint64_t seq, order, flight, remote;
  int64_t look_ns; /* when a test of it looked after the peers */
  uint32_t id; /* of a rendezvous */
  uint16_t row;
  char where[DC__WHERE];
  char *error; /* of a failed request; owned */
};

/* To one peer. */
typedef struct p2p_out {
  p2p_pair *ring;
  char *payload;
  uint32_t tail, head; /* cells written; consumed as far as we know */
  uint64_t pay_tail, pay_head; /* the same for payload bytes */
  uint64_t *pay_end; /* [cells] pay_tail behind each cell */
  bool known; /* the peer's `senders` has our bit */
  p2p_link answers, sends, rts, data; /* waiting for room; waiting for ACK or CTS; to be sent as DATA */
} p2p_out;

/* From one peer. */
enum { P2P_CMA_UNKNOWN, P2P_CMA_YES, P2P_CMA_NO };
typedef struct p2p_in {
  p2p_pair *ring;
  const char *payload;
  _Atomic bool known; /* it has sent something */
  _Atomic uint32_t pos; /* the next cell. Written under the lock; a peek reads it without */
  p2p_link posted, early, data; /* receives; messages; receives that get DATA */
  int64_t kept; /* bytes of the messages in `early` */
  uint8_t cma; /* P2P_CMA_... */
} p2p_in;

typedef struct p2p {
  struct p2p *next; /* of this process's */
  pthread_mutex_t lock;
  dc_comm *c; /* valid for who is counted in `inside` */
  bool closed;
  uint64_t fork_mark;
  int rank, size, inside; /* inside: threads that may touch the area */
  int refs; /* the communicator and every owned request */
  bool cma;
  p2p_shape s;
  p2p_seat *seats;
  p2p_out *out;
  p2p_in *in;
  p2p_link any, copies, live; /* receives from any source; receives to be copied; all incomplete requests */
  _Atomic uint32_t queued; /* cells that wait for room */
  uint64_t calls, order;
  bool completed; /* something was: threads of ours may sleep for it */
  uint64_t nonce[2];
  uint16_t row; /* of the last caller text */
  uint32_t row_next;
} p2p;

static inline bool p2p_is_over(const dc_request *r) {
  return atomic_load_explicit(&r->state, memory_order_acquire) != P2P_PENDING;
}

/* ---- p2p_ring.c: cells and bytes between two ranks. All with the lock -------------------------------------------- */
p2p_shape dc__ring_shape(int size);
/* After what the threads of a rank may wait for was stored seq_cst. */
void dc__ring_bell(p2p *p, int rank);
/* Writes a cell with `bytes` of payload; false if there is no room. */
bool dc__ring_put(p2p *p, int dst, const p2p_cell *head, const char *data, int64_t bytes);
/* A cell is there. Without the lock. */
bool dc__ring_arrived(const p2p *p, int src);
/* The next cell, which has arrived, and its payload of `bytes`; dc__ring_next() goes on to the one behind it, and
 * dc__ring_give_back() tells the source that there is room up to there. */
const p2p_cell *dc__ring_cell(const p2p *p, int src);
const char *dc__ring_payload(const p2p *p, int src, const p2p_cell *m, int64_t bytes);
void dc__ring_next(p2p *p, int src);
void dc__ring_give_back(p2p *p, int src);
/* Keeps the text of a caller; its row number with the row's generation, so that a reader sees when the row was used
 * again; 0: no text. */
uint16_t dc__ring_keep_where(p2p *p, const char *where);
/* Bytes of rank src's memory, through the kernel; what process_vm_readv returns. Without the lock. */
int64_t dc__ring_read(const p2p *p, int src, void *to, uint64_t from, int64_t bytes);
/* Whether src's memory can be read; asked once per source. */
bool dc__ring_can_read(p2p *p, int src);
void dc__ring_open(p2p *p);

/* ---- p2p_match.c: messages and requests. All with the lock ------------------------------------------------------- */
dc_call dc__match_call(const dc_request *r);
/* Gives the lock back, and wakes the threads of this rank whose requests have become complete. */
void dc__match_unlock(p2p *p);
/* The error that broke the communicator, or that it is closed. */
int dc__match_check(p2p *p);
int dc__match_send(p2p *p, dc_request *r);
int dc__match_recv(p2p *p, dc_request *r);
/* Does everything that can be done without waiting. May give the lock away meanwhile. */
int dc__match_progress(p2p *p);
/* A failure that is not yet everybody's (memory) becomes it. */
int dc__match_spread(p2p *p, int rc);
/* Takes r out of everything, from whatever state. A message that it has begun to receive is lost. */
void dc__match_withdraw(p2p *p, dc_request *r, int status, const char *why);
/* Is there something to do? n: how often this was asked; the peer of r is asked each time, the others now and then.
 * Without the lock. */
bool dc__match_peek(const p2p *p, const dc_request *r, int n);
/* r's peer died or left. */
int dc__match_lost(p2p *p, const dc_request *r, int peer);
void dc__match_tell(dc__text *t, const dc_comm *c, const dc_request *r);
void dc__match_tell_sender(dc__text *t, const p2p *p, int src, const p2p_cell *m);
/* In and out of the list of what waiting collectives progress (dc__serve). */
void dc__match_add(p2p *p);
void dc__match_remove(p2p *p);

#endif
