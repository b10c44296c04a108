/* coll_direct.c: large collectives that read and write the buffers where they lie, each byte once.
 *
 * Ranks meet (one exchange step in which each shows where its buffers are), work, and meet again. A peer's buffer is
 * reached in one of two ways: through this process's own mapping, if it lies in a segment that all ranks have mapped
 * (a registered buffer); else through the kernel (process_vm_readv and _writev: one copy, no staging). Whoever reduces
 * an element does so over all ranks' elements in rank order, as in coll_staged.c, so the way never changes a bit.
 *
 * Why a push: rank r reduces slice r of an all_reduce and writes it into every rank's out while it is in cache. Memory
 * then carries n reads and n writes per rank, the least that can be; a second phase in which peers fetch the slice
 * would read it from memory once more.
 *
 * docs/lab/collectives.md has what was tried.
 *
 * May assume: dc__meet has agreed on the call and pinned the segments, and dc__reachable holds on all ranks. */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fault.h"
#include "job.h"
#include "segment.h"
#include "sync.h"
#include "team.h"
#include "wait.h"

#define SCRATCH_BYTES ((int64_t)256 << 10) /* of a thread that works: stays in the second-level cache */
enum { SCRATCHES = 64 };                   /* threads of a communicator that work at once; more take turns */
#define MOVE_CHUNK \
  ((int64_t)1      \
   << 20) /* without arithmetic: 1 MiB in place all_gather 14.9 us, in pieces of 128 KiB 17.6; 32 MiB the same */
#define VM_CHUNK ((int64_t)128 << 10)      /* 16 KiB: 5 GB/s, 64 KiB 6.6, 256 KiB 7.0 where memcpy reaches 6.6 */
#define MAPPED_CHUNK ((int64_t)32 << 10)
#define STREAM_BYTES ((int64_t)4 << 20) /* outputs from here on are stored past the caches */

enum { IN = 1, OUT = 2 };

/* ---- what a call touches of its peers ---------------------------------------------------------------------------- */
/* Which of rank r's buffers peers have to reach. Equal on all ranks. */
static int direct_touched(const dc__job *j, int r) {
  const bool root = r == j->call.root;
  switch (j->call.op % DC__ALGO) {
  case DC_CALL_ALL_REDUCE: return IN | OUT;
  case DC_CALL_REDUCE: return root ? IN | OUT : IN;
  case DC_CALL_BROADCAST:
  case DC_CALL_SCATTER: return root ? IN : 0;
  case DC_CALL_GATHER: return root ? 0 : IN;
  default: return IN;
  }
}

/* Which of rank r's outs a peer could fill, in the calls with a root whose work can then be shared. */
static bool direct_fillable(const dc__job *j, int r) {
  switch (j->call.op % DC__ALGO) {
  case DC_CALL_BROADCAST:
  case DC_CALL_SCATTER: return r != j->call.root;
  case DC_CALL_GATHER: return r == j->call.root;
  default: return false;
  }
}

/* ---- meeting ----------------------------------------------------------------------------------------------------- */
static int64_t direct_parts_bytes(const dc__job *j, const int64_t *counts, int parts) {
  int64_t n = counts ? 0 : j->count * parts;
  for (int r = 0; counts && r < j->c->size; r++) n += counts[r];
  return n * j->esz;
}

static dc__info direct_info_of(const dc__job *j) {
  dc__info f = {.in = (uint64_t)j->in, .out = (uint64_t)j->out, .in_seg = -1, .out_seg = -1};
  f.mapped = dc__segments_pin(j->c);
  if (f.mapped && j->in)
    f.in_seg = dc__segment_find(j->c, j->in, direct_parts_bytes(j, j->in_counts, j->in_parts), &f.in_off);
  if (f.mapped && j->out)
    f.out_seg = dc__segment_find(j->c, j->out, direct_parts_bytes(j, j->out_counts, j->out_parts), &f.out_off);
  return f;
}

int dc__meet(const dc__job *j, dc__view *v) {
  const dc__info mine = direct_info_of(j);
  return dc__share(j->c, &j->call, &mine, sizeof mine, v->of);
}

/* From here on only what all ranks have seen of each other is used, so that they decide alike. */
static bool direct_everywhere(const dc_comm *c, const dc__view *v, int seg) {
  for (int r = 0; r < c->size && seg >= 0; r++)
    if (!(v->of[r].mapped >> seg & 1)) return false;
  return seg >= 0;
}

bool dc__all_mapped(const dc__job *j, const dc__view *v) {
  for (int r = 0; r < j->c->size; r++) {
    const int bits = direct_touched(j, r);
    if (bits & IN && !direct_everywhere(j->c, v, v->of[r].in_seg)) return false;
    if (bits & OUT && !direct_everywhere(j->c, v, v->of[r].out_seg)) return false;
  }
  return true;
}

bool dc__reachable(const dc__job *j, const dc__view *v) { return j->c->single_copy || dc__all_mapped(j, v); }

static bool direct_can_fill(const dc__job *j, const dc__view *v) {
  for (int r = 0; r < j->c->size && !j->c->single_copy; r++)
    if (direct_fillable(j, r) && !direct_everywhere(j->c, v, v->of[r].out_seg)) return false;
  return true;
}

/* ---- a peer's memory --------------------------------------------------------------------------------------------- */
typedef struct direct {
  const dc__job *j;
  const dc__view *v;
  char *in[DC_COMM_MAX_RANKS]; /* where the peers' buffers are mapped here, NULL: reach through the kernel */
  char *out[DC_COMM_MAX_RANKS];
  int64_t begin, end, chunk; /* elements of this rank's work, and of one piece of it */
  int64_t roots;             /* in calls with a root: elements of each rank's part that the root moves */
  bool stream;
  _Atomic int status; /* the first failure of any thread */
  char text[256];
} direct;

/* The call has failed somewhere: from here on buffers may belong to their owners again. */
static bool direct_is_off(const direct *d) {
  return atomic_load_explicit(&d->j->c->h->broken, memory_order_relaxed) != DC__SOUND;
}

static char *direct_mapped_at(const direct *d, int seg, int64_t off) {
  const dc_comm *c = d->j->c;
  return direct_everywhere(c, d->v, seg) ? (char *)c->pinned[seg]->map.base + off : NULL;
}

static void direct_find_peers(direct *d) {
  const dc_comm *c = d->j->c;
  for (int r = 0; r < c->size; r++) {
    const dc__info *f = &d->v->of[r];
    d->in[r] = r == c->rank ? (char *)d->j->in : direct_mapped_at(d, f->in_seg, f->in_off);
    d->out[r] = r == c->rank ? d->j->out : direct_mapped_at(d, f->out_seg, f->out_off);
  }
}

/* A peer's memory that can't be reached is most often a peer that died: dc__unreachable says so in better words. */
static int direct_vm_fail(const direct *d, int r, const char *what) {
  const int e = errno, name = d->j->c->global_rank[r], pid = d->j->c->h->seat[r].pid;
  if (e == EPERM)
    return DC_FAIL(DC_E_PEER,
                   "%s the memory of rank %d (pid %d): the kernel forbids it now (%s), and did not when the group was "
                   "opened: a seccomp profile, or Yama; DEEPC_CMA=0 does without",
                   what, name, pid, strerror(e));
  return DC_FAIL(DC_E_PEER, "%s the memory of rank %d (pid %d): %s; it died or freed the buffer during the call", what,
                 name, pid, strerror(e));
}

static int direct_vm_read(const direct *d, int r, void *to, int64_t off, int64_t bytes) {
  for (int64_t have = 0; have < bytes;) {
    const struct iovec here = {(char *)to + have, (size_t)(bytes - have)};
    const struct iovec there = {(void *)(uintptr_t)(d->v->of[r].in + (uint64_t)(off + have)), (size_t)(bytes - have)};
    const ssize_t n = process_vm_readv(d->j->c->h->seat[r].pid, &here, 1, &there, 1, 0);
    if (n <= 0) return direct_vm_fail(d, r, "reading");
    have += n;
  }
  dc__count(DC_COUNTER_coll_bytes_single_copy, bytes);
  return DC_OK;
}

/* The kernel knows peers here by their numbers, and that of a dead process is given again some time: not before tens of
 * thousands of others were, which takes longer than from one look to the next. */
static bool direct_still_there(const direct *d, int r) {
  dc_comm *c = d->j->c;
  const int64_t now = dc__now_ns();
  if (now - atomic_load_explicit(&c->alive_ns, memory_order_relaxed) >= DC__LOOK_NS) {
    dc__look_at_peers(c);
    atomic_store_explicit(&c->alive_ns, now, memory_order_relaxed);
  }
  return !dc__is_dead(c, r);
}

static int direct_vm_write(const direct *d, int r, const void *from, int64_t off, int64_t bytes) {
  errno = ESRCH;
  if (!direct_still_there(d, r)) return direct_vm_fail(d, r, "writing");
  for (int64_t have = 0; have < bytes;) {
    const struct iovec here = {(char *)from + have, (size_t)(bytes - have)};
    const struct iovec there = {(void *)(uintptr_t)(d->v->of[r].out + (uint64_t)(off + have)), (size_t)(bytes - have)};
    const ssize_t n = process_vm_writev(d->j->c->h->seat[r].pid, &here, 1, &there, 1, 0);
    if (n <= 0) return direct_vm_fail(d, r, "writing");
    have += n;
  }
  dc__count(DC_COUNTER_coll_bytes_single_copy, bytes);
  return DC_OK;
}

/* to = bytes of rank r's in from `off`. */
static int direct_fetch(const direct *d, int r, void *to, int64_t off, int64_t bytes) {
  if (!d->in[r]) return direct_vm_read(d, r, to, off, bytes);
  if (to == d->in[r] + off) return DC_OK;
  if (r != d->j->c->rank) dc__count(DC_COUNTER_coll_bytes_mapped, bytes);
  return dc__copy_here(to, d->in[r] + off, bytes, d->stream);
}

/* Rank r's out from `off` = bytes. */
static int direct_deliver(const direct *d, int r, const void *from, int64_t off, int64_t bytes, int stream) {
  if (!d->out[r]) return direct_vm_write(d, r, from, off, bytes);
  if (from == d->out[r] + off) return DC_OK;
  if (r != d->j->c->rank) dc__count(DC_COUNTER_coll_bytes_mapped, bytes);
  return dc__copy_here(d->out[r] + off, from, bytes, stream);
}

/* ---- reductions -------------------------------------------------------------------------------------------------- */
/* Where the sources of elements [at, at + n) (of rank r's in, from element `skip`) can be read; peers' memory that is
 * not mapped is brought into `room`. */
static int direct_gather_sources(const direct *d, int64_t at, int64_t bytes, char *room, const void **src) {
  for (int r = 0; r < d->j->c->size; r++) {
    if (d->in[r]) {
      src[r] = d->in[r] + at;
      continue;
    }
    DC_TRY(direct_vm_read(d, r, room, at, bytes));
    src[r] = room;
    room += bytes;
  }
  return DC_OK;
}

/* One piece of this rank's slice of an all_reduce or reduce. In place the sum lands where it was read, whose lines are
 * in cache; otherwise it is made in `room` and stored to everyone past the caches. */
static int direct_reduce_piece(const direct *d, int64_t at, int64_t n, char *room) {
  const dc__job *j = d->j;
  const dc_comm *c = j->c;
  const void *src[DC_COMM_MAX_RANKS];
  const int64_t off = at * j->esz, bytes = n * j->esz;
  const bool all = j->call.op % DC__ALGO == DC_CALL_ALL_REDUCE;
  char *sum = room + bytes * (c->size - 1);
  DC_TRY(direct_gather_sources(d, off, bytes, room, src));
  const bool own = all || c->rank == j->call.root, in_place = own && j->out == j->in;
  if (in_place) sum = j->out + off;
  DC_TRY(dc__reduce_here(sum, src, c->size, j->call.dtype, j->call.red_op, n, 0));
  for (int i = 0; i < c->size; i++) {
    int r = (c->rank + i) % c->size;
    if (all || r == j->call.root) DC_TRY(direct_deliver(d, r, sum, off, bytes, !in_place && d->stream));
  }
  return DC_OK;
}

static int direct_reduce_scatter_piece(const direct *d, int64_t at, int64_t n, char *room) {
  const dc__job *j = d->j;
  const void *src[DC_COMM_MAX_RANKS];
  DC_TRY(direct_gather_sources(d, (j->c->rank * j->count + at) * j->esz, n * j->esz, room, src));
  char *to = j->out + at * j->esz;
  bool stream = d->stream;
  for (int r = 0; r < j->c->size; r++) stream = stream && to != src[r];
  return dc__reduce_here(to, src, j->c->size, j->call.dtype, j->call.red_op, n, stream);
}

/* ---- movement ---------------------------------------------------------------------------------------------------- */
static int direct_all_gather_piece(const direct *d, int64_t at, int64_t n, char *room) {
  const dc__job *j = d->j;
  const int64_t r = at / j->count, skip = at % j->count; /* the work is cut at parts: see direct_span_of */
  return direct_fetch(d, (int)r, j->out + at * j->esz, skip * j->esz, n * j->esz);
}

/* Calls with a root: the root moves 1 / size of every rank's part, its owner the rest, so that all work equally long.
 * The root's elements are the last ones of a broadcast and scatter, the first ones of a gather. */
static int direct_deliver_to_all(const direct *d, int64_t per_rank, int64_t off, int64_t bytes) {
  const dc__job *j = d->j;
  for (int i = 1; i < j->c->size; i++) {
    const int r = (j->c->rank + i) % j->c->size;
    DC_TRY(direct_deliver(d, r, j->in + r * per_rank + off, off, bytes, d->stream));
  }
  return DC_OK;
}

static int direct_broadcast_piece(const direct *d, int64_t at, int64_t n, char *room) {
  const dc__job *j = d->j;
  const int64_t off = at * j->esz, bytes = n * j->esz;
  if (j->c->rank == j->call.root) return direct_deliver_to_all(d, 0, (j->count - d->roots) * j->esz + off, bytes);
  return direct_fetch(d, j->call.root, j->out + off, off, bytes);
}

static int direct_scatter_piece(const direct *d, int64_t at, int64_t n, char *room) {
  const dc__job *j = d->j;
  const int64_t off = at * j->esz, bytes = n * j->esz, per_rank = j->count * j->esz;
  if (j->c->rank == j->call.root)
    return direct_deliver_to_all(d, per_rank, (j->count - d->roots) * j->esz + off, bytes);
  return direct_fetch(d, j->call.root, j->out + off, j->c->rank * per_rank + off, bytes);
}

static int direct_gather_piece(const direct *d, int64_t at, int64_t n, char *room) {
  const dc__job *j = d->j;
  const int64_t off = at * j->esz, bytes = n * j->esz, per_rank = j->count * j->esz, mine = d->roots * j->esz + off;
  if (j->c->rank != j->call.root)
    return direct_deliver(d, j->call.root, j->in + mine, j->c->rank * per_rank + mine, bytes, d->stream);
  for (int i = 1; i < j->c->size; i++) {
    const int r = (j->c->rank + i) % j->c->size;
    DC_TRY(direct_fetch(d, r, j->out + r * per_rank + off, off, bytes));
  }
  return DC_OK;
}

/* The root's own part of a scatter or gather. */
static int direct_own_part(const direct *d) {
  const dc__job *j = d->j;
  const int op = j->call.op % DC__ALGO;
  if (j->c->rank != j->call.root || (op != DC_CALL_SCATTER && op != DC_CALL_GATHER)) return DC_OK;
  const int64_t bytes = j->count * j->esz, at = j->c->rank * bytes;
  const char *from = j->in + (op == DC_CALL_SCATTER ? at : 0);
  char *to = j->out + (op == DC_CALL_GATHER ? at : 0);
  return from == to ? DC_OK : dc__copy_here(to, from, bytes, d->stream);
}

static int direct_all_to_all_piece(const direct *d, int64_t at, int64_t n, char *room) {
  const dc__job *j = d->j;
  const int64_t r = at / j->count, skip = at % j->count;
  return direct_fetch(d, (int)r, j->out + at * j->esz, (j->c->rank * j->count + skip) * j->esz, n * j->esz);
}

/* Block r of out comes from block `rank` of rank r's in, which begins behind its blocks for lower ranks. */
static int direct_blocks(const direct *d) {
  const dc__job *j = d->j;
  char *to = j->out;
  for (int r = 0; r < j->c->size; to += j->out_counts[r++] * j->esz) {
    const int64_t bytes = j->out_counts[r] * j->esz;
    int64_t from = 0;
    for (int k = 0; k < j->c->rank; k++) from += j->theirs[r][k] * j->esz;
    for (int64_t at = 0; at < bytes && !direct_is_off(d); at += MOVE_CHUNK)
      DC_TRY(direct_fetch(d, r, to + at, from + at, dc__min64(bytes - at, MOVE_CHUNK)));
  }
  return DC_OK;
}

/* ---- the work of a rank ------------------------------------------------------------------------------------------ */
typedef int piece_fn(const direct *, int64_t at, int64_t n, char *room);

static piece_fn *direct_piece_of(int op) {
  switch (op % DC__ALGO) {
  case DC_CALL_ALL_REDUCE:
  case DC_CALL_REDUCE: return direct_reduce_piece;
  case DC_CALL_REDUCE_SCATTER: return direct_reduce_scatter_piece;
  case DC_CALL_ALL_GATHER: return direct_all_gather_piece;
  case DC_CALL_GATHER: return direct_gather_piece;
  case DC_CALL_SCATTER: return direct_scatter_piece;
  case DC_CALL_ALL_TO_ALL: return direct_all_to_all_piece;
  default: return direct_broadcast_piece;
  }
}

/* Slices of a reduction are cut at cache lines. */
static int64_t direct_slice(const dc__job *j, int rank) {
  const int64_t per_line = DC__LINE / j->esz, lines = (j->count + per_line - 1) / per_line;
  return dc__min64(lines * rank / j->c->size * per_line, j->count);
}

/* Root in turns, 64 KiB, 2 ranks: a scatter whose root writes half takes 5.9 us, one whose root only copies its own
 * part 3.4. */
static bool direct_worth_sharing(const dc__job *j) {
  return j->call.op % DC__ALGO == DC_CALL_BROADCAST || direct_parts_bytes(j, NULL, j->in_parts) >= ((int64_t)256 << 10);
}

static void direct_span_of(direct *d) {
  const dc__job *j = d->j;
  const int me = j->c->rank;
  const bool root = me == j->call.root;
  const int64_t per_line = DC__LINE / j->esz, share = j->count / j->c->size / per_line * per_line;
  d->begin = 0;
  switch (j->call.op % DC__ALGO) {
  case DC_CALL_ALL_REDUCE:
  case DC_CALL_REDUCE:
    d->begin = direct_slice(j, me);
    d->end = direct_slice(j, me + 1);
    return;
  case DC_CALL_ALL_GATHER:
  case DC_CALL_ALL_TO_ALL: d->end = j->count * j->c->size; return;
  case DC_CALL_BROADCAST:
  case DC_CALL_SCATTER:
    d->roots = direct_can_fill(j, d->v) && direct_worth_sharing(j) ? share : 0;
    d->end = root ? d->roots : j->count - d->roots;
    return;
  case DC_CALL_GATHER:
    d->roots = direct_can_fill(j, d->v) ? share : j->count;
    d->end = root ? d->roots : j->count - d->roots;
    return;
  default: d->end = j->count; return;
  }
}

static void direct_note_failure(direct *d, int rc) {
  int fine = DC_OK;
  if (atomic_compare_exchange_strong(&d->status, &fine, rc)) snprintf(d->text, sizeof d->text, "%s", dc_last_error());
}

/* Scratch memory belongs to the communicator: the stacks of callers' threads may be small. Pages that no thread has
 * used cost nothing. */
static int direct_scratch_make(dc_comm *c) {
  if (c->scratch) return DC_OK;
  const size_t bytes = (size_t)SCRATCH_BYTES * SCRATCHES;
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return DC_FAIL(DC_E_NOMEM, "%zu bytes of scratch memory: %s", bytes, strerror(errno));
  c->scratch = p;
  return DC_OK;
}

void dc__direct_close(dc_comm *c) {
  if (c->scratch) munmap(c->scratch, (size_t)SCRATCH_BYTES * SCRATCHES);
  c->scratch = NULL;
}

static char *direct_scratch_take(dc_comm *c, int *part) {
  for (;;) {
    uint64_t taken = atomic_load_explicit(&c->scratch_taken, memory_order_relaxed);
    while (~taken) {
      *part = __builtin_ctzll(~taken);
      if (atomic_compare_exchange_weak_explicit(&c->scratch_taken, &taken, taken | (uint64_t)1 << *part,
                                                memory_order_acquire, memory_order_relaxed))
        return c->scratch + *part * SCRATCH_BYTES;
    }
    sched_yield(); /* who has one gives it back at the end of its range */
  }
}

static void direct_scratch_give(dc_comm *c, int part) {
  atomic_fetch_and_explicit(&c->scratch_taken, ~((uint64_t)1 << part), memory_order_release);
}

/* Elements [begin, end) of the work, in pieces that stay in cache and don't cross from one rank's part to the next. */
static void direct_work_range(int64_t begin, int64_t end, void *ctx) {
  direct *d = ctx;
  const dc__job *j = d->j;
  piece_fn *piece = direct_piece_of(j->call.op);
  const bool per_part = piece == direct_all_gather_piece || piece == direct_all_to_all_piece;
  int part;
  char *room = direct_scratch_take(j->c, &part);
  for (int64_t at = begin; at < end && atomic_load(&d->status) == DC_OK && !direct_is_off(d);) {
    int64_t n = dc__min64(d->chunk, end - at);
    if (per_part) n = dc__min64(n, j->count - at % j->count);
    int rc = piece(d, d->begin + at, n, room);
    if (rc) direct_note_failure(d, rc);
    at += n;
  }
  direct_scratch_give(j->c, part);
}

static int direct_work(direct *d) {
  const dc__job *j = d->j;
  if (j->in_counts) return direct_blocks(d);
  DC_TRY(direct_scratch_make(j->c));
  bool mapped = true;
  for (int r = 0; r < j->c->size; r++) mapped = mapped && d->in[r];
  int64_t bytes = mapped ? MAPPED_CHUNK : VM_CHUNK;
  if (dc__reduces(j->call.op)) bytes = dc__min64(bytes, SCRATCH_BYTES / j->c->size / DC__LINE * DC__LINE);
  else bytes = MOVE_CHUNK;
  d->chunk = bytes / j->esz;
  DC_TRY(direct_own_part(d));
  dc_parallel_for(d->end - d->begin, d->chunk * 4, direct_work_range, d);
  return d->status ? DC_FAIL(d->status, "%s", d->text) : DC_OK;
}

/* A rank whose call fails waits for the peers that work (dc__await_calm) before it gives its buffers back. It reads
 * `working` after it has seen `broken`, and here it is the other way round, all sequentially consistent: so either it
 * sees that we work, or we see that the group is broken and leave its buffers alone. */
static int direct_work_if_sound(direct *d) {
  dc_comm *c = d->j->c;
  _Atomic uint32_t *working = &c->h->seat[c->rank].working;
  atomic_store_explicit(working, 1, memory_order_seq_cst);
  int rc = atomic_load_explicit(&c->h->broken, memory_order_seq_cst) == DC__SOUND ? direct_work(d) : DC_OK;
  atomic_store_explicit(working, 0, memory_order_release);
  return direct_is_off(d) ? dc__broken(c) : rc;
}

int dc__direct(const dc__job *j, const dc__view *v) {
  direct d = {.j = j, .v = v, .stream = direct_parts_bytes(j, j->out_counts, j->out_parts) >= STREAM_BYTES};
  direct_find_peers(&d);
  direct_span_of(&d);
  int rc = direct_work_if_sound(&d);
  if (rc == DC_E_PEER) { /* no step is posted: where the dead rank posted its own, others would take their results for
                            complete */
    char why[512];
    snprintf(why, sizeof why, "%s", dc_last_error());
    return dc__unreachable(j->c, why);
  }
  /* all have finished reading and writing: buffers belong to their owners again */
  return rc ? rc : dc__share(j->c, &j->call, NULL, 0, NULL);
}
