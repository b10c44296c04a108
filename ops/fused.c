/* fused.c: the public wrappers of fused.h: each validates, counts, and splits its rows or elements over
 * dc_parallel_for. */
#include <string.h>

#include "call.h"

/* Elements that make a range worth a thread: the kernels here do more per element than a copy (call.h's grain_of). */
enum { FUSED_SHARE = 16384 };

static int64_t fused_share_rows(int64_t cols) { return cols >= FUSED_SHARE ? 1 : FUSED_SHARE / (cols > 0 ? cols : 1); }

/* ---- sums over rows: block k adds its rows to its own row of `partial` ------------------------------------------- */
typedef struct fold_job {
  const dc__ops *ops;
  void *out;
  int dt;
  const float *partial;
  int64_t rows, stride;
} fold_job;

static void fused_fold_range(int64_t begin, int64_t end, void *ctx) {
  const fold_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->fold_rows(j->out, j->dt, j->partial, j->rows, j->stride, begin, end);
  fp_leave(fp);
}

/* out[cols] = the sum of the blocks, or zero of no rows. */
static void fused_fold_blocks(const dc__ops *ops, void *out, int dt, const float *partial, int64_t blocks,
                              int64_t cols) {
  fold_job j = {ops, out, dt, partial, blocks, cols};
  const int64_t columns = 4 * FUSED_SHARE / (blocks > 0 ? blocks : 1) / 16 *
                          16; /* an addition each: a second job must pay */
  if (blocks == 0) memset(out, 0, (size_t)check_bytes(dt, cols));
  else dc_parallel_for(cols, columns < 64 ? 64 : columns, fused_fold_range, &j);
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */
typedef struct norm_job {
  const dc__ops *ops;
  const dc_norm_args *args;
} norm_job;

static void fused_norm_range(int64_t begin, int64_t end, void *ctx) {
  const norm_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->norm(j->args, begin, end);
  fp_leave(fp);
}

int dc_norm(const dc_norm_args *args) {
  dc_norm_args a;
  norm_job j = {.args = &a};
  DC_TRY(check_norm(args, &a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_norm_calls, 1);
  dc_parallel_for(a.rows, fused_share_rows(a.cols), fused_norm_range, &j);
  return DC_OK;
}

typedef struct norm_grad_job {
  const dc__ops *ops;
  const dc_norm_grad_args *args;
  float *dweight, *dbias; /* partial sums, or NULL */
  int64_t block;
} norm_grad_job;

/* Ranges are of blocks. */
static void fused_norm_grad_range(int64_t begin, int64_t end, void *ctx) {
  const norm_grad_job *j = ctx;
  const int64_t rows = j->args->rows, cols = j->args->cols;
  const unsigned fp = fp_enter();
  for (int64_t k = begin; k < end; k++) {
    float *dweight = j->dweight ? j->dweight + k * cols : NULL, *dbias = j->dbias ? j->dbias + k * cols : NULL;
    if (dweight) memset(dweight, 0, (size_t)cols * sizeof *dweight);
    if (dbias) memset(dbias, 0, (size_t)cols * sizeof *dbias);
    j->ops->norm_grad(j->args, k * j->block, rows - k * j->block < j->block ? rows : (k + 1) * j->block, dweight,
                      dbias);
  }
  fp_leave(fp);
}

int dc_norm_grad(const dc_norm_grad_args *args) {
  dc_norm_grad_args a;
  norm_grad_job j = {.args = &a};
  DC_TRY(check_norm_grad(args, &a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_norm_calls, 1);
  const int64_t blocks = dc_row_blocks(a.rows);
  j.block = dc_row_block(a.rows);
  j.dweight = a.dweight ? a.partial : NULL;
  j.dbias = a.dbias ? a.partial + (a.dweight ? blocks * a.cols : 0) : NULL;
  dc_parallel_for(blocks, fused_share_rows(a.cols * j.block), fused_norm_grad_range, &j);
  if (a.dweight) fused_fold_blocks(j.ops, a.dweight, a.weight_dtype, j.dweight, blocks, a.cols);
  if (a.dbias) fused_fold_blocks(j.ops, a.dbias, a.weight_dtype, j.dbias, blocks, a.cols);
  return DC_OK;
}

/* ---- activations ------------------------------------------------------------------------------------------------- */
typedef struct fused_job {
  const dc__ops *ops;
  const void *args;
  float *dbias;
  int64_t block; /* elements of a partial sum */
} fused_job;

static void fused_swiglu_range(int64_t begin, int64_t end, void *ctx) {
  const fused_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->swiglu(j->args, begin, end);
  fp_leave(fp);
}

int dc_swiglu(const dc_swiglu_args *args) {
  dc_swiglu_args a;
  fused_job j = {.args = &a};
  DC_TRY(check_swiglu(args, &a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (a.gate_stride == a.cols && a.up_stride == a.cols && a.out_stride == a.cols) a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, FUSED_SHARE, fused_swiglu_range, &j);
  return DC_OK;
}

static void fused_swiglu_grad_range(int64_t begin, int64_t end, void *ctx) {
  const fused_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->swiglu_grad(j->args, begin, end);
  fp_leave(fp);
}

int dc_swiglu_grad(const dc_swiglu_grad_args *args) {
  dc_swiglu_grad_args a;
  fused_job j = {.args = &a};
  DC_TRY(check_swiglu_grad(args, &a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (a.dout_stride == a.cols && a.gate_stride == a.cols && a.up_stride == a.cols && a.dgate_stride == a.cols &&
      a.dup_stride == a.cols)
    a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, FUSED_SHARE, fused_swiglu_grad_range, &j);
  return DC_OK;
}

static void fused_gelu_range(int64_t begin, int64_t end, void *ctx) {
  const fused_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->gelu(j->args, begin, end);
  fp_leave(fp);
}

int dc_gelu(const dc_gelu_args *args) {
  dc_gelu_args a;
  fused_job j = {.args = &a};
  DC_TRY(check_gelu(args, &a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (!a.bias && a.x_stride == a.cols) a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, FUSED_SHARE, fused_gelu_range, &j);
  return DC_OK;
}

static void fused_gelu_grad_range(int64_t begin, int64_t end, void *ctx) {
  const fused_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->gelu_grad(j->args, begin, end, NULL);
  fp_leave(fp);
}

/* Ranges are of blocks of rows. */
static void fused_gelu_bias_range(int64_t begin, int64_t end, void *ctx) {
  const fused_job *j = ctx;
  const dc_gelu_grad_args *a = j->args;
  const int64_t n = a->rows * a->cols;
  const unsigned fp = fp_enter();
  for (int64_t k = begin; k < end; k++) {
    float *dbias = j->dbias + k * a->cols;
    memset(dbias, 0, (size_t)a->cols * sizeof *dbias);
    j->ops->gelu_grad(a, k * j->block, n - k * j->block < j->block ? n : (k + 1) * j->block, dbias);
  }
  fp_leave(fp);
}

int dc_gelu_grad(const dc_gelu_grad_args *args) {
  dc_gelu_grad_args a;
  fused_job j = {.args = &a};
  DC_TRY(check_gelu_grad(args, &a));
  j.dbias = a.dbias ? a.partial : NULL;
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (a.dbias) {
    const int64_t blocks = dc_row_blocks(a.rows);
    j.block = dc_row_block(a.rows) * a.cols;
    dc_parallel_for(blocks, fused_share_rows(j.block), fused_gelu_bias_range, &j);
    fused_fold_blocks(j.ops, a.dbias, a.bias_dtype, a.partial, blocks, a.cols);
    return DC_OK;
  }
  if (!a.bias && a.x_stride == a.cols) a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, FUSED_SHARE, fused_gelu_grad_range, &j);
  return DC_OK;
}

/* ---- rotary embedding -------------------------------------------------------------------------------------------- */
static void fused_rotary_range(int64_t begin, int64_t end, void *ctx) {
  const fused_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->rotary(j->args, begin, end);
  fp_leave(fp);
}

static void fused_rotary_swap_dims(dc_rotary_args *a, int k) {
  int64_t *const all[] = {a->size, a->x_stride, a->out_stride, a->cos_stride, a->sin_stride};
  for (int i = 0; i < 5; i++) {
    const int64_t other = all[i][k];
    all[i][k] = all[i][k + 1];
    all[i][k + 1] = other;
  }
}

/* The rows in the order in which x lies in memory: heads before positions, where that is how a projection made them. */
static void fused_rotary_sort_dims(dc_rotary_args *a) {
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < 2; k++)
      if (a->x_stride[k] < a->x_stride[k + 1]) fused_rotary_swap_dims(a, k);
}

int dc_rotary(const dc_rotary_args *args) {
  dc_rotary_args a;
  fused_job j = {.args = &a};
  int64_t rows;
  DC_TRY(check_rotary(args, &a, &rows));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_rotary_calls, 1);
  fused_rotary_sort_dims(&a);
  if (a.cols > 0) dc_parallel_for(rows, fused_share_rows(a.cols), fused_rotary_range, &j);
  return DC_OK;
}
