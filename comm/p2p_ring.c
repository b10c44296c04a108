/* p2p_ring.c: the rings between two ranks, and what ranks show of themselves (message.h has the layout).
 *
 * Owns every access to the area of messages but the texts that tell.c reads. Knows nothing of requests. Cells are
 * published by seq_cst stores: the sleeper's and the waker's side are Dekker's pair (wait.h, dc__ring_bell). A flag in
 * the cell instead of a counter in a line of its own saves a line per message, and 32 bytes in the cell another (64 B:
 * 0.34 against 0.25 us). */
#include <stdlib.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fault.h"
#include "message.h"

static int64_t ring_clamp(int64_t v, int64_t low, int64_t high) { return v < low ? low : v > high ? high : v; }

p2p_shape dc__ring_shape(int size) {
  p2p_shape s;
  int64_t most = size == 1 ? 0 : (4ll << 20) / ((int64_t)size * size);
  for (s.pair_bytes = 2048; s.pair_bytes * 2 <= most && s.pair_bytes < (128 << 10);) s.pair_bytes *= 2;
  s.cells = (uint32_t)ring_clamp(s.pair_bytes / 1024, 8, 128);
  s.payload = (uint32_t)(s.pair_bytes - DC__LINE - s.cells * (int64_t)sizeof(p2p_cell));
  s.chunk = s.payload / 4 / DC__LINE * DC__LINE;
  s.eager = s.chunk < P2P_EAGER_MOST ? s.chunk : P2P_EAGER_MOST;
  return s;
}

int64_t dc__p2p_bytes(int size) {
  int64_t n = (int64_t)sizeof(p2p_seat) * size + dc__ring_shape(size).pair_bytes * size * size;
  return (n + 4095) / 4096 * 4096;
}

/* ---- bells ------------------------------------------------------------------------------------------------------- */
/* After a seq_cst store of what the rank may wait for: either it sees that, or we see that it sleeps. */
void dc__ring_bell(p2p *p, int rank) {
  p2p_seat *s = &p->seats[rank];
  if (__builtin_expect(atomic_load_explicit(&s->sleepers, memory_order_seq_cst) == 0, 1)) return;
  atomic_fetch_add_explicit(&s->bell, 1, memory_order_seq_cst);
  dc__wake(&s->bell);
}

/* ---- caller texts ------------------------------------------------------------------------------------------------ */
/* Loops call from few lines: nearly always the text is the last one. */
uint16_t dc__ring_keep_where(p2p *p, const char *where) {
  if (!where || !where[0]) return 0;
  p2p_seat *s = &p->seats[p->rank];
  uint64_t w[DC__WHERE / 8] = {0};
  memcpy(w, where, strnlen(where, DC__WHERE - 1));
  for (int i = -1; i < P2P_WHERES; i++) {
    int k = i < 0 ? p->row % P2P_WHERES : i;
    bool same = atomic_load_explicit(&s->row_gen[k], memory_order_relaxed) != 0;
    for (int j = 0; j < DC__WHERE / 8 && same; j++)
      same = atomic_load_explicit(&s->row[k][j], memory_order_relaxed) == w[j];
    if (!same) continue;
    uint32_t gen = atomic_load_explicit(&s->row_gen[k], memory_order_relaxed);
    return p->row = (uint16_t)(gen * P2P_WHERES + (uint32_t)k);
  }
  uint32_t k = p->row_next++ % P2P_WHERES, gen = atomic_load_explicit(&s->row_gen[k], memory_order_relaxed);
  gen = gen + 1 < 65536 / P2P_WHERES ? gen + 1 : 1;
  /* 0 while the text changes; a release before and after, so that a reader of a mixed text sees another generation */
  atomic_store_explicit(&s->row_gen[k], 0, memory_order_seq_cst);
  for (int j = 0; j < DC__WHERE / 8; j++) atomic_store_explicit(&s->row[k][j], w[j], memory_order_release);
  atomic_store_explicit(&s->row_gen[k], gen, memory_order_release);
  return p->row = (uint16_t)(gen * P2P_WHERES + k);
}

/* ---- out: cells to a peer ---------------------------------------------------------------------------------------- */
static void ring_learn_head(p2p *p, p2p_out *o) {
  /* seq_cst: the sleeper's side of Dekker's pair with publish_head(); acquire: the peer has read those cells */
  uint32_t head = atomic_load_explicit(&o->ring->head, memory_order_seq_cst);
  if (head == o->head) return;
  o->head = head;
  o->pay_head = o->pay_end[(head - 1) & (p->s.cells - 1)];
}

/* Payload is given in one piece: what is left before the end of the ring is skipped if the piece does not fit. */
static bool ring_room(p2p *p, p2p_out *o, uint32_t bytes, uint64_t *begin) {
  uint64_t off = o->pay_tail % p->s.payload;
  *begin = o->pay_tail + (off + bytes > p->s.payload ? p->s.payload - off : 0);
  return o->tail - o->head < p->s.cells && *begin + bytes - o->pay_head <= p->s.payload;
}

/* seq_cst: before the flag, which it leads to, in the same pair with the sleeper. */
static void ring_introduce(p2p *p, int dst) {
  atomic_fetch_or_explicit(&p->seats[dst].senders[p->rank / 64], (uint64_t)1 << p->rank % 64, memory_order_seq_cst);
  p->out[dst].known = true;
}

bool dc__ring_put(p2p *p, int dst, const p2p_cell *head, const char *data, int64_t bytes) {
  p2p_out *o = &p->out[dst];
  bool in_cell = bytes <= P2P_INLINE && head->kind != P2P_RTS;
  uint32_t need = in_cell ? 0 : (uint32_t)((bytes + DC__LINE - 1) / DC__LINE * DC__LINE);
  uint64_t begin;
  if (!ring_room(p, o, need, &begin)) {
    ring_learn_head(p, o);
    if (!ring_room(p, o, need, &begin)) return false;
  }
  p2p_cell *k = &o->ring->cells[o->tail & (p->s.cells - 1)];
  k->kind = head->kind;
  k->dtype = head->dtype;
  k->where = head->where;
  k->count = head->count;
  k->tag = head->tag;
  k->id = head->id;
  k->at = (uint32_t)(begin % p->s.payload);
  if (head->kind == P2P_RTS) k->address = head->address;
  else if (in_cell && bytes) memcpy(k->data, data, (size_t)bytes);
  else if (bytes) memcpy(o->payload + k->at, data, (size_t)bytes);
  if (need) o->pay_tail = begin + need;
  o->pay_end[o->tail & (p->s.cells - 1)] = o->pay_tail;
  o->tail++;
  if (__builtin_expect(!o->known, 0)) ring_introduce(p, dst);
  atomic_store_explicit(&k->flag, o->tail, memory_order_seq_cst);
  dc__ring_bell(p, dst);
  return true;
}

/* ---- in: cells from a peer --------------------------------------------------------------------------------------- */
/* Has src ever sent anything? Only then its ring is looked at. */
static bool ring_known(const p2p *p, int src) {
  p2p_in *x = &p->in[src];
  if (__builtin_expect(atomic_load_explicit(&x->known, memory_order_relaxed), 1)) return true;
  const uint64_t senders = atomic_load_explicit(&p->seats[p->rank].senders[src / 64], memory_order_seq_cst);
  if (!(senders >> src % 64 & 1)) return false;
  atomic_store_explicit(&x->known, true, memory_order_relaxed);
  return true;
}

bool dc__ring_arrived(const p2p *p, int src) {
  const p2p_in *x = &p->in[src];
  if (!ring_known(p, src)) return false;
  uint32_t pos = atomic_load_explicit(&x->pos, memory_order_relaxed);
  /* acquire: pairs with dc__ring_put(); seq_cst: the sleeper's side of Dekker's pair */
  return atomic_load_explicit(&x->ring->cells[pos & (p->s.cells - 1)].flag, memory_order_seq_cst) == pos + 1;
}

const p2p_cell *dc__ring_cell(const p2p *p, int src) {
  const uint32_t pos = atomic_load_explicit(&p->in[src].pos, memory_order_relaxed);
  return &p->in[src].ring->cells[pos & (p->s.cells - 1)];
}

const char *dc__ring_payload(const p2p *p, int src, const p2p_cell *m, int64_t bytes) {
  return bytes <= P2P_INLINE ? m->data : p->in[src].payload + m->at;
}

void dc__ring_next(p2p *p, int src) {
  p2p_in *x = &p->in[src];
  atomic_store_explicit(&x->pos, atomic_load_explicit(&x->pos, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* seq_cst: the waker's side of Dekker's pair with a source that waits for room */
void dc__ring_give_back(p2p *p, int src) {
  const uint32_t pos = atomic_load_explicit(&p->in[src].pos, memory_order_relaxed);
  atomic_store_explicit(&p->in[src].ring->head, pos, memory_order_seq_cst);
  dc__ring_bell(p, src);
}

/* ---- single copies ----------------------------------------------------------------------------------------------- */
int64_t dc__ring_read(const p2p *p, int src, void *to, uint64_t from, int64_t bytes) {
  struct iovec here = {to, (size_t)bytes}, there = {(void *)(uintptr_t)from, (size_t)bytes};
  return process_vm_readv(p->c->h->seat[src].pid, &here, 1, &there, 1, 0);
}

/* Once per source: are we allowed to, and is that process number the process that we mean (another pid namespace)? */
bool dc__ring_can_read(p2p *p, int src) {
  p2p_in *x = &p->in[src];
  if (x->cma == P2P_CMA_UNKNOWN) {
    const p2p_seat *s = &p->seats[src];
    uint64_t got[2] = {0, 0}, want[2];
    x->cma = P2P_CMA_NO;
    /* acquire: pairs with the release in ring_publish_nonce() */
    if (p->cma && atomic_load_explicit(&s->cma, memory_order_acquire)) {
      for (int i = 0; i < 2; i++) want[i] = atomic_load_explicit(&s->nonce[i], memory_order_relaxed);
      uint64_t at = atomic_load_explicit(&s->nonce_at, memory_order_relaxed);
      if (dc__ring_read(p, src, got, at, sizeof got) == sizeof got && memcmp(got, want, sizeof got) == 0)
        x->cma = P2P_CMA_YES;
    }
  }
  return x->cma == P2P_CMA_YES;
}

static void ring_publish_nonce(p2p *p) {
  p2p_seat *s = &p->seats[p->rank];
  if (getrandom(p->nonce, sizeof p->nonce, GRND_NONBLOCK) != sizeof p->nonce) { /* early in boot: no pool yet */
    p->nonce[0] = (uint64_t)dc__now_ns() * 0x9e3779b97f4a7c15ull;
    p->nonce[1] = (uint64_t)getpid() << 32 ^ (uint64_t)(uintptr_t)p;
  }
  for (int i = 0; i < 2; i++) atomic_store_explicit(&s->nonce[i], p->nonce[i], memory_order_relaxed);
  atomic_store_explicit(&s->nonce_at, (uint64_t)(uintptr_t)p->nonce, memory_order_relaxed);
  atomic_store_explicit(&s->cma, p->cma, memory_order_release);
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */
static void ring_open_pair(p2p *p, char *pairs, uint64_t *pay_end, int peer) {
  p2p_out *o = &p->out[peer];
  p2p_in *x = &p->in[peer];
  o->ring = (p2p_pair *)(pairs + p->s.pair_bytes * ((int64_t)p->rank * p->size + peer));
  x->ring = (p2p_pair *)(pairs + p->s.pair_bytes * ((int64_t)peer * p->size + p->rank));
  o->payload = (char *)&o->ring->cells[p->s.cells];
  x->payload = (const char *)&x->ring->cells[p->s.cells];
  o->pay_end = pay_end + (int64_t)peer * p->s.cells;
  p2p_link *all[] = {&o->answers, &o->sends, &o->rts, &o->data, &x->posted, &x->early, &x->data};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) p2p_list_init(all[i]);
}

void dc__ring_open(p2p *p) {
  char *pairs = (char *)(p->seats + p->size);
  uint64_t *pay_end = (uint64_t *)(p->out + p->size);
  for (int r = 0; r < p->size; r++) ring_open_pair(p, pairs, pay_end, r);
  ring_publish_nonce(p);
}
