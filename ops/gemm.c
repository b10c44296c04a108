/* gemm.c: the public wrapper of the matrix product: checks, cuts the result into pieces for the threads, and gives each
 * piece room for what it packs. */
#include "call.h"

enum { GEMM_LEAST_SIDE = 128, GEMM_UNIT = 32, GEMM_PIECES_PER_THREAD = 4 };

typedef struct gemm_job {
  const dc__ops *ops;
  const dc_gemm_args *args;
  int64_t rows, cols, across; /* of a piece; pieces side by side */
  int64_t bytes; /* of scratch for a piece */
  int no_memory; /* accessed atomically */
} gemm_job;

static int64_t gemm_min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t gemm_pieces(int64_t n, int64_t side) { return (n + side - 1) / side; }

int64_t dc_gemm_bytes(int dtype, int64_t m, int64_t n, int64_t k) {
  const int64_t cols = gemm_min(n, DC__GEMM_COLS);
  int64_t words = gemm_min(k, DC__GEMM_DEPTH(dtype)), sums = 0;
  if (dtype == DC_BF16) {
    int isa;
    const int pairs = dc_isa_current(&isa) == DC_OK && isa >= DC_ISA_AVX512_BF16;
    words = (words + 1) / 2 * (pairs ? 1 : 2);
    sums = k > DC__GEMM_DEPTH(dtype) ? gemm_min(m, DC__GEMM_SUMS) * cols : 0;
  }
  const int64_t sides = gemm_min(m, dc__gemm_rows(words)) + cols + 2 * DC__GEMM_SLACK;
  return (int64_t)sizeof(float) * (sides * words + sums);
}

static void gemm_range(int64_t begin, int64_t end, void *ctx) {
  gemm_job *j = ctx;
  const dc_gemm_args *t = j->args;
  float *scratch = call_scratch_take(j->bytes);
  if (!scratch) {
    __atomic_store_n(&j->no_memory, 1, __ATOMIC_RELAXED);
    return;
  }
  const unsigned fp = t->dtype == DC_BF16 ? fp_enter_flushing() : fp_enter();
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i / j->across * j->rows, col = i % j->across * j->cols;
    j->ops->gemm(t, row, gemm_min(j->rows, t->m - row), col, gemm_min(j->cols, t->n - col), scratch);
  }
  fp_leave(fp);
  call_scratch_give(scratch);
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

int dc_gemm(const dc_gemm_args *args) {
  dc_gemm_args a;
  gemm_job j = {.args = &a};
  DC_TRY(check_gemm(args, &a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_gemm_calls, 1);
  if (!a.m || !a.n) return DC_OK;
  gemm_cut(&j, dc_num_threads());
  j.bytes = dc_gemm_bytes(a.dtype, j.rows, j.cols, a.k ? a.k : 1);
  dc_parallel_for(gemm_pieces(a.m, j.rows) * j.across, 1, gemm_range, &j);
  if (__atomic_load_n(&j.no_memory, __ATOMIC_RELAXED))
    return DC_FAIL(DC_E_NOMEM,
                   "no %lld bytes for what a thread packs of a product; use fewer threads. out is undefined now",
                   (long long)j.bytes);
  return DC_OK;
}
