/* coll_loop.c: calls one collective again and again without Python in between: of libdeepc.so, of an MPI library, or a
 * copy. Loaded by collectives.py, which passes function addresses; so it needs neither library's headers. Handles of
 * MPI are pointers in OpenMPI and int in MPICH: both travel in a 64-bit integer, of which a callee that expects an int
 * reads the low half (System V and AArch64 calling conventions). */
#include <stdint.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BEST_ISA __attribute__((target_clones("default", "avx2", "arch=icelake-server"), optimize("O3")))
#else
#define BEST_ISA
#endif

typedef intptr_t word;
typedef int64_t i64;

/* The same numbers as KIND in coll_rank.py. */
enum {
  DC_BARRIER,
  DC_REDUCES,
  DC_MOVES,
  DC_BROADCAST,
  DC_REDUCE,
  DC_ROOTED,
  DC_PINGPONG,
  MPI_BARRIER,
  MPI_REDUCES,
  MPI_MOVES,
  MPI_BROADCAST,
  MPI_REDUCE,
  MPI_ROOTED,
  MPI_PINGPONG,
  COPY,
  DC_COPY,
  PEER_COPY
};

typedef struct bench_call {
  word fn, fn2, comm, dtype, op;
  void *in, *out;
  i64 count;
  i64 root, ranks; /* ranks > 0: the root of call i is i % ranks */
  i64 peer, first; /* first: of a ping-pong, this rank sends first */
  void *refill;    /* every `every` calls `from` is copied to it, so that sums don't overflow; every 0: never */
  void *from;
  i64 bytes, every;
} bench_call;

typedef int dc_barrier_fn(word, i64);
typedef int dc_reduces_fn(word, void *, void *, i64, int, int, i64);
typedef int dc_moves_fn(word, void *, void *, i64, int, i64);
typedef int dc_one_fn(word, void *, i64, int, int, i64); /* broadcast, send */
typedef int dc_recv_fn(word, void *, i64, int, int, i64, int *);
typedef int dc_reduce_fn(word, void *, void *, i64, int, int, int, i64);
typedef int dc_rooted_fn(word, void *, void *, i64, int, int, i64);
typedef int dc_copy_fn(void *, void *, i64);
typedef int mpi_barrier_fn(word);
typedef int mpi_reduces_fn(void *, void *, int, word, word, word);
typedef int mpi_moves_fn(void *, int, word, void *, int, word, word);
typedef int mpi_broadcast_fn(void *, int, word, int, word);
typedef int mpi_reduce_fn(void *, void *, int, word, word, int, word);
typedef int mpi_rooted_fn(void *, int, word, void *, int, word, int, word);
typedef int mpi_send_fn(void *, int, word, int, int, word);
typedef int mpi_recv_fn(void *, int, word, int, int, word, void *);

static int dc_send(const bench_call *c) {
  return ((dc_one_fn *)c->fn)(c->comm, c->in, c->count, (int)c->dtype, (int)c->peer, 0);
}
static int dc_recv(const bench_call *c) {
  return ((dc_recv_fn *)c->fn2)(c->comm, c->out, c->count, (int)c->dtype, (int)c->peer, 0, NULL);
}
static int mpi_send(const bench_call *c) {
  return ((mpi_send_fn *)c->fn)(c->in, (int)c->count, c->dtype, (int)c->peer, 0, c->comm);
}
static int mpi_recv(const bench_call *c) {
  char status[64]; /* MPI_Status */
  return ((mpi_recv_fn *)c->fn2)(c->out, (int)c->count, c->dtype, (int)c->peer, 0, c->comm, status);
}

/* Of what a peer has written in its last call: all ranks alternate between two arrays. */
static int peer_copy(const bench_call *c, i64 i) {
  void *to = i % 2 ? c->refill : c->out, *from = i % 2 ? c->from : c->in;
  if (c->fn) return ((dc_copy_fn *)c->fn)(to, from, c->count);
  memcpy(to, from, (size_t)c->count);
  return 0;
}

static int once(const bench_call *c, int kind, i64 i) {
  const int n = (int)c->count, dtype = (int)c->dtype, op = (int)c->op; /* as MPI and the core take them */
  const int root = (int)(c->ranks ? i % c->ranks : c->root);
  int rc;
  switch (kind) {
  case DC_BARRIER: return ((dc_barrier_fn *)c->fn)(c->comm, 0);
  case DC_REDUCES: return ((dc_reduces_fn *)c->fn)(c->comm, c->in, c->out, c->count, dtype, op, 0);
  case DC_MOVES: return ((dc_moves_fn *)c->fn)(c->comm, c->in, c->out, c->count, dtype, 0);
  case DC_BROADCAST: return ((dc_one_fn *)c->fn)(c->comm, c->out, c->count, dtype, root, 0);
  case DC_REDUCE: return ((dc_reduce_fn *)c->fn)(c->comm, c->in, c->out, c->count, dtype, op, root, 0);
  case DC_ROOTED: return ((dc_rooted_fn *)c->fn)(c->comm, c->in, c->out, c->count, dtype, root, 0);
  case DC_PINGPONG: rc = c->first ? dc_send(c) : dc_recv(c); return rc ? rc : c->first ? dc_recv(c) : dc_send(c);
  case MPI_BARRIER: return ((mpi_barrier_fn *)c->fn)(c->comm);
  case MPI_REDUCES: return ((mpi_reduces_fn *)c->fn)(c->in, c->out, n, c->dtype, c->op, c->comm);
  case MPI_MOVES: return ((mpi_moves_fn *)c->fn)(c->in, n, c->dtype, c->out, n, c->dtype, c->comm);
  case MPI_BROADCAST: return ((mpi_broadcast_fn *)c->fn)(c->out, n, c->dtype, root, c->comm);
  case MPI_REDUCE: return ((mpi_reduce_fn *)c->fn)(c->in, c->out, n, c->dtype, c->op, root, c->comm);
  case MPI_ROOTED: return ((mpi_rooted_fn *)c->fn)(c->in, n, c->dtype, c->out, n, c->dtype, root, c->comm);
  case MPI_PINGPONG: rc = c->first ? mpi_send(c) : mpi_recv(c); return rc ? rc : c->first ? mpi_recv(c) : mpi_send(c);
  case COPY: memcpy(c->out, c->in, (size_t)c->count); return 0;
  case DC_COPY: return ((dc_copy_fn *)c->fn)(c->out, c->in, c->count);
  case PEER_COPY: return peer_copy(c, i);
  default: return -1;
  }
}

/* `loops` calls; *seconds: what they took. Returns the first status that is not 0. */
EXPORT int bench_loop(const bench_call *c, int kind, i64 loops, double *seconds) {
  struct timespec a, b;
  clock_gettime(CLOCK_MONOTONIC, &a);
  for (i64 i = 0, left = c->every; i < loops; i++) {
    int rc = once(c, kind, i);
    if (rc) return rc;
    if (c->every && --left == 0) memcpy(c->refill, c->from, (size_t)c->bytes), left = c->every;
  }
  clock_gettime(CLOCK_MONOTONIC, &b);
  *seconds = (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
  return 0;
}

/* MPI has no bf16: its sum as a user's MPI_Op, as good as a user would write it. */
static inline float widen(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
BEST_ISA static void sum_bf16(const uint16_t *restrict in, uint16_t *restrict inout, i64 n) {
  for (i64 i = 0; i < n; i++) {
    float f = widen(in[i]) + widen(inout[i]);
    uint32_t u;
    memcpy(&u, &f, 4);
    inout[i] = (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
}
EXPORT void bench_sum_bf16(void *in, void *inout, int *n, void *dtype) {
  (void)dtype;
  sum_bf16(in, inout, *n);
}
