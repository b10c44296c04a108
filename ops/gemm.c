/* gemm.c: the public wrapper of the matrix product: checks, cuts c into pieces for the threads, and gives each piece
 * room for what it packs. */
#include "call.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { GEMM_LEAST_SIDE = 128, GEMM_UNIT = 32, GEMM_PIECES_PER_THREAD = 4 };

typedef struct gemm_job {
  const dc__ops *ops;
  const dc_gemm_args *args;
  int64_t rows, cols, across; /* of a piece; pieces side by side */
  atomic_bool no_room;
} gemm_job;

static int64_t gemm_pieces(int64_t n, int64_t side) { return (n + side - 1) / side; }

int64_t dc__gemm_words(int64_t rows, int64_t cols, int64_t depth) {
  const int64_t tall = rows < DC__GEMM_ROWS ? rows : DC__GEMM_ROWS, wide = cols < DC__GEMM_COLS ? cols : DC__GEMM_COLS;
  const int64_t deep = depth < DC__GEMM_DEPTH ? depth : DC__GEMM_DEPTH;
  return (tall + wide + 2 * DC__GEMM_SLACK) * deep;
}

/* Large room is the heap's, which has its pages from the call before. */
static float *gemm_room(int64_t words, bool *of_heap) {
  const size_t bytes = (size_t)words * sizeof(float);
  void *room = bytes < dc_heap_smallest() ? NULL : dc_heap_take(bytes);
  *of_heap = room != NULL;
  return room || posix_memalign(&room, 64, bytes) == 0 ? room : NULL;
}

static void gemm_piece(gemm_job *j, int64_t piece) {
  const dc_gemm_args *t = j->args;
  const int64_t row = piece / j->across * j->rows, col = piece % j->across * j->cols;
  const int64_t rows = t->m - row < j->rows ? t->m - row : j->rows, cols = t->n - col < j->cols ? t->n - col : j->cols;
  bool of_heap;
  float *room = gemm_room(dc__gemm_words(rows, cols, t->k), &of_heap);
  if (!room) {
    atomic_store(&j->no_room, true);
    return;
  }
  j->ops->gemm(t, row, rows, col, cols, room);
  if (of_heap) (void)dc_heap_give(room);
  else free(room);
}

static void gemm_range(int64_t begin, int64_t end, void *ctx) {
  const unsigned fp = fp_enter();
  for (int64_t i = begin; i < end; i++) gemm_piece(ctx, i);
  fp_leave(fp);
}

/* Where there are threads, pieces are halved along the longer side until each thread has a few. */
static void gemm_cut(gemm_job *j, int threads) {
  const dc_gemm_args *t = j->args;
  j->rows = t->m, j->cols = t->n;
  while (threads > 1 && (j->rows > GEMM_LEAST_SIDE || j->cols > GEMM_LEAST_SIDE) &&
         gemm_pieces(t->m, j->rows) * gemm_pieces(t->n, j->cols) < (int64_t)threads * GEMM_PIECES_PER_THREAD) {
    int64_t *side = j->rows > j->cols ? &j->rows : &j->cols;
    *side = (*side / 2 + GEMM_UNIT - 1) / GEMM_UNIT * GEMM_UNIT;
  }
  j->across = gemm_pieces(t->n, j->cols);
}

static void gemm_scale(const dc_gemm_args *t) {
  for (int64_t i = 0; i < t->m; i++)
    for (int64_t j = 0; j < t->n; j++) {
      float *c = &t->c[i * t->c_stride + j];
      *c = t->beta == 0.0f ? 0.0f : t->beta * *c;
    }
}

int dc_gemm(const dc_gemm_args *args) {
  dc_gemm_args a;
  gemm_job j = {.args = &a};
  DC_TRY(check_gemm(args, &a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_gemm_calls, 1);
  if (!a.m || !a.n) return DC_OK;
  if (!a.k) {
    gemm_scale(&a);
    return DC_OK;
  }
  gemm_cut(&j, dc_num_threads());
  dc_parallel_for(gemm_pieces(a.m, j.rows) * j.across, 1, gemm_range, &j);
  if (atomic_load(&j.no_room))
    return DC_FAIL(DC_E_NOMEM,
                   "no memory for the packed operands of a product of %lld x %lld x %lld, at most %lld bytes "
                   "a thread; c is undefined now",
                   (long long)a.m, (long long)a.k, (long long)a.n,
                   (long long)(4 * dc__gemm_words(j.rows, j.cols, a.k)));
  return DC_OK;
}
