/* fused.c: the public wrappers of fused.h: each validates, counts, and splits its rows or elements over
 * dc_parallel_for. */
#include <math.h>
#include <string.h>

#include "call.h"

/* Elements that make a range worth a thread: the kernels here do more per element than a copy (call.h's grain_of). */
enum { SHARE = 16384 };

static int64_t share_rows(int64_t cols) { return cols >= SHARE ? 1 : SHARE / (cols > 0 ? cols : 1); }

static int get_table(const dc__ops **ops) {
  *ops = dc__ops_get();
  return *ops ? DC_OK : dc_isa_current(NULL);
}

/* ---- arrays of rows ---------------------------------------------------------------------------------------------- */
static int check_shape(int64_t rows, int64_t cols) {
  int64_t n;
  if (rows < 0 || cols < 0)
    return DC_FAIL(DC_E_INVALID, "rows = %lld, cols = %lld; neither may be negative", (long long)rows, (long long)cols);
  if (__builtin_mul_overflow(rows, cols, &n)) n = INT64_MAX;
  return check_count(n);
}

static int check_rows(const void *p, int dt, int64_t rows, int64_t cols, int64_t stride, const char *what) {
  int64_t n;
  DC_TRY(check_array(p, dc_dtype_size(dt), rows * cols, what));
  if (rows > 1 && (stride < cols || __builtin_mul_overflow(rows, stride, &n) || n > INT64_MAX / 16))
    return DC_FAIL(DC_E_INVALID, "%s: rows start %lld elements apart; it must be at least cols = %lld, and fit memory",
                   what, (long long)stride, (long long)cols);
  return DC_OK;
}

static int check_maybe(const void *p, int dt, const char *what) {
  return p ? check_array(p, dc_dtype_size(dt), 0, what) : DC_OK;
}

/* ---- sums over rows: block k adds its rows to its own row of `partial` ------------------------------------------- */
typedef struct fold_job {
  const dc__ops *ops;
  void *out;
  int dt;
  const float *partial;
  int64_t rows, stride;
} fold_job;

static void fold_range(int64_t begin, int64_t end, void *ctx) {
  const fold_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->fold_rows(j->out, j->dt, j->partial, j->rows, j->stride, begin, end);
  fp_leave(fp);
}

/* out[cols] = the sum of the blocks, or zero of no rows. */
static void fold(const dc__ops *ops, void *out, int dt, const float *partial, int64_t blocks, int64_t cols) {
  fold_job j = {ops, out, dt, partial, blocks, cols};
  const int64_t columns = 4 * SHARE / (blocks > 0 ? blocks : 1) / 16 * 16; /* an addition each: a second job must pay */
  if (blocks == 0) memset(out, 0, (size_t)bytes_of(dt, cols));
  else dc_parallel_for(cols, columns < 64 ? 64 : columns, fold_range, &j);
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */
typedef struct norm_job {
  const dc__ops *ops;
  const dc_norm_args *args;
} norm_job;

static void norm_range(int64_t begin, int64_t end, void *ctx) {
  const norm_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->norm(j->args, begin, end);
  fp_leave(fp);
}

static int check_norm(const dc_norm_args *a) {
  DC_TRY(check_low(a->dtype, "x"));
  if (a->weight || a->bias) DC_TRY(check_low(a->weight_dtype, "weight"));
  DC_TRY(check_shape(a->rows, a->cols));
  if (!(a->eps >= 0 && isfinite(a->eps))) return DC_FAIL(DC_E_INVALID, "eps = %g; it must be >= 0 and finite", a->eps);
  if (!isfinite(a->offset)) return DC_FAIL(DC_E_INVALID, "offset = %g is not finite", a->offset);
  if (!a->residual != !a->sum) return DC_FAIL(DC_E_INVALID, "residual and sum come together: pass both, or neither");
  DC_TRY(check_rows(a->x, a->dtype, a->rows, a->cols, a->x_stride, "x"));
  if (a->residual) DC_TRY(check_rows(a->residual, a->dtype, a->rows, a->cols, a->residual_stride, "residual"));
  DC_TRY(check_maybe(a->sum, a->dtype, "sum"));
  DC_TRY(check_maybe(a->weight, a->weight_dtype, "weight"));
  DC_TRY(check_maybe(a->bias, a->weight_dtype, "bias"));
  DC_TRY(check_maybe(a->mean, DC_F32, "mean"));
  DC_TRY(check_array(a->y, dc_dtype_size(a->dtype), a->rows * a->cols, "y"));
  return check_array(a->rstd, sizeof *a->rstd, a->rows, "rstd");
}

int dc_norm(const dc_norm_args *args) {
  norm_job j = {.args = args};
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  DC_TRY(check_norm(args));
  DC_TRY(get_table(&j.ops));
  dc__count(DC_COUNTER_norm_calls, 1);
  dc_parallel_for(args->rows, share_rows(args->cols), norm_range, &j);
  return DC_OK;
}

typedef struct norm_grad_job {
  const dc__ops *ops;
  const dc_norm_grad_args *args;
  float *dweight, *dbias; /* partial sums, or NULL */
  int64_t block;
} norm_grad_job;

/* Ranges are of blocks. */
static void norm_grad_range(int64_t begin, int64_t end, void *ctx) {
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

static int check_norm_grad(const dc_norm_grad_args *a) {
  const int sums = (a->dweight != NULL) + (a->dbias != NULL);
  DC_TRY(check_low(a->dtype, "x"));
  if (a->weight || sums) DC_TRY(check_low(a->weight_dtype, "weight"));
  DC_TRY(check_shape(a->rows, a->cols));
  if (!isfinite(a->offset)) return DC_FAIL(DC_E_INVALID, "offset = %g is not finite", a->offset);
  DC_TRY(check_rows(a->x, a->dtype, a->rows, a->cols, a->x_stride, "x"));
  DC_TRY(check_array(a->dy, dc_dtype_size(a->dtype), a->rows * a->cols, "dy"));
  DC_TRY(check_array(a->dx, dc_dtype_size(a->dtype), a->rows * a->cols, "dx"));
  DC_TRY(check_array(a->rstd, sizeof *a->rstd, a->rows, "rstd"));
  DC_TRY(check_maybe(a->dsum, a->dtype, "dsum"));
  DC_TRY(check_maybe(a->mean, DC_F32, "mean"));
  DC_TRY(check_maybe(a->weight, a->weight_dtype, "weight"));
  DC_TRY(check_maybe(a->dweight, a->weight_dtype, "dweight"));
  DC_TRY(check_maybe(a->dbias, a->weight_dtype, "dbias"));
  return check_array(a->partial, sizeof *a->partial, sums ? a->rows * a->cols : 0, "partial");
}

int dc_norm_grad(const dc_norm_grad_args *args) {
  norm_grad_job j = {.args = args};
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  DC_TRY(check_norm_grad(args));
  DC_TRY(get_table(&j.ops));
  dc__count(DC_COUNTER_norm_calls, 1);
  const int64_t blocks = dc_row_blocks(args->rows);
  j.block = dc_row_block(args->rows);
  j.dweight = args->dweight ? args->partial : NULL;
  j.dbias = args->dbias ? args->partial + (args->dweight ? blocks * args->cols : 0) : NULL;
  dc_parallel_for(blocks, share_rows(args->cols * j.block), norm_grad_range, &j);
  if (args->dweight) fold(j.ops, args->dweight, args->weight_dtype, j.dweight, blocks, args->cols);
  if (args->dbias) fold(j.ops, args->dbias, args->weight_dtype, j.dbias, blocks, args->cols);
  return DC_OK;
}

/* ---- activations ------------------------------------------------------------------------------------------------- */
typedef struct flat_job {
  const dc__ops *ops;
  const void *args;
  float *dbias;
  int64_t block; /* elements of a partial sum */
} flat_job;

static void swiglu_range(int64_t begin, int64_t end, void *ctx) {
  const flat_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->swiglu(j->args, begin, end);
  fp_leave(fp);
}

int dc_swiglu(const dc_swiglu_args *args) {
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  dc_swiglu_args a = *args;
  flat_job j = {.args = &a};
  DC_TRY(check_low(a.dtype, "gate"));
  DC_TRY(check_shape(a.rows, a.cols));
  DC_TRY(check_rows(a.gate, a.dtype, a.rows, a.cols, a.gate_stride, "gate"));
  DC_TRY(check_rows(a.up, a.dtype, a.rows, a.cols, a.up_stride, "up"));
  DC_TRY(check_rows(a.out, a.dtype, a.rows, a.cols, a.out_stride, "out"));
  DC_TRY(get_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (a.gate_stride == a.cols && a.up_stride == a.cols && a.out_stride == a.cols) a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, SHARE, swiglu_range, &j);
  return DC_OK;
}

static void swiglu_grad_range(int64_t begin, int64_t end, void *ctx) {
  const flat_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->swiglu_grad(j->args, begin, end);
  fp_leave(fp);
}

int dc_swiglu_grad(const dc_swiglu_grad_args *args) {
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  dc_swiglu_grad_args a = *args;
  flat_job j = {.args = &a};
  DC_TRY(check_low(a.dtype, "gate"));
  DC_TRY(check_shape(a.rows, a.cols));
  DC_TRY(check_rows(a.dout, a.dtype, a.rows, a.cols, a.dout_stride, "dout"));
  DC_TRY(check_rows(a.gate, a.dtype, a.rows, a.cols, a.gate_stride, "gate"));
  DC_TRY(check_rows(a.up, a.dtype, a.rows, a.cols, a.up_stride, "up"));
  DC_TRY(check_rows(a.dgate, a.dtype, a.rows, a.cols, a.dgate_stride, "dgate"));
  DC_TRY(check_rows(a.dup, a.dtype, a.rows, a.cols, a.dup_stride, "dup"));
  DC_TRY(get_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (a.dout_stride == a.cols && a.gate_stride == a.cols && a.up_stride == a.cols && a.dgate_stride == a.cols &&
      a.dup_stride == a.cols)
    a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, SHARE, swiglu_grad_range, &j);
  return DC_OK;
}

static int check_form(int form) {
  if (form == DC_GELU_ERF || form == DC_GELU_TANH) return DC_OK;
  return DC_FAIL(DC_E_INVALID, "form = %d; it is DC_GELU_ERF (0) or DC_GELU_TANH (1)", form);
}

static void gelu_range(int64_t begin, int64_t end, void *ctx) {
  const flat_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->gelu(j->args, begin, end);
  fp_leave(fp);
}

int dc_gelu(const dc_gelu_args *args) {
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  dc_gelu_args a = *args;
  flat_job j = {.args = &a};
  DC_TRY(check_low(a.dtype, "x"));
  if (a.bias) DC_TRY(check_low(a.bias_dtype, "bias"));
  DC_TRY(check_form(a.form));
  DC_TRY(check_shape(a.rows, a.cols));
  DC_TRY(check_rows(a.x, a.dtype, a.rows, a.cols, a.x_stride, "x"));
  DC_TRY(check_maybe(a.bias, a.bias_dtype, "bias"));
  DC_TRY(check_array(a.out, dc_dtype_size(a.dtype), a.rows * a.cols, "out"));
  DC_TRY(get_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (!a.bias && a.x_stride == a.cols) a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, SHARE, gelu_range, &j);
  return DC_OK;
}

static void gelu_grad_range(int64_t begin, int64_t end, void *ctx) {
  const flat_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->gelu_grad(j->args, begin, end, NULL);
  fp_leave(fp);
}

/* Ranges are of blocks of rows. */
static void gelu_bias_range(int64_t begin, int64_t end, void *ctx) {
  const flat_job *j = ctx;
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
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  dc_gelu_grad_args a = *args;
  flat_job j = {.args = &a, .dbias = a.dbias ? a.partial : NULL};
  DC_TRY(check_low(a.dtype, "x"));
  if (a.bias || a.dbias) DC_TRY(check_low(a.bias_dtype, "bias"));
  DC_TRY(check_form(a.form));
  DC_TRY(check_shape(a.rows, a.cols));
  DC_TRY(check_rows(a.x, a.dtype, a.rows, a.cols, a.x_stride, "x"));
  DC_TRY(check_maybe(a.bias, a.bias_dtype, "bias"));
  DC_TRY(check_maybe(a.dbias, a.bias_dtype, "dbias"));
  DC_TRY(check_array(a.dout, dc_dtype_size(a.dtype), a.rows * a.cols, "dout"));
  DC_TRY(check_array(a.dx, dc_dtype_size(a.dtype), a.rows * a.cols, "dx"));
  DC_TRY(check_array(a.partial, sizeof *a.partial, a.dbias ? a.rows * a.cols : 0, "partial"));
  DC_TRY(get_table(&j.ops));
  dc__count(DC_COUNTER_activation_calls, 1);
  if (a.dbias) {
    const int64_t blocks = dc_row_blocks(a.rows);
    j.block = dc_row_block(a.rows) * a.cols;
    dc_parallel_for(blocks, share_rows(j.block), gelu_bias_range, &j);
    fold(j.ops, a.dbias, a.bias_dtype, a.partial, blocks, a.cols);
    return DC_OK;
  }
  if (!a.bias && a.x_stride == a.cols) a.cols *= a.rows, a.rows = 1;
  dc_parallel_for(a.rows * a.cols, SHARE, gelu_grad_range, &j);
  return DC_OK;
}

/* ---- rotary embedding -------------------------------------------------------------------------------------------- */
static void rotary_range(int64_t begin, int64_t end, void *ctx) {
  const flat_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->rotary(j->args, begin, end);
  fp_leave(fp);
}

static void swap_dims(dc_rotary_args *a, int k) {
  int64_t *const all[] = {a->size, a->x_stride, a->out_stride, a->cos_stride, a->sin_stride};
  for (int i = 0; i < 5; i++) {
    const int64_t other = all[i][k];
    all[i][k] = all[i][k + 1];
    all[i][k + 1] = other;
  }
}

/* The rows in the order in which x lies in memory: heads before positions, where that is how a projection made them. */
static void sort_dims(dc_rotary_args *a) {
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < 2; k++)
      if (a->x_stride[k] < a->x_stride[k + 1]) swap_dims(a, k);
}

static int check_rotary(const dc_rotary_args *a, int64_t *rows) {
  DC_TRY(check_low(a->dtype, "x"));
  DC_TRY(check_low(a->table_dtype, "cos and sin"));
  *rows = 1;
  for (int k = 0; k < 3; k++)
    if (a->size[k] < 0 || __builtin_mul_overflow(*rows, a->size[k], rows))
      return DC_FAIL(DC_E_INVALID, "size[%d] = %lld is no number of rows", k, (long long)a->size[k]);
  DC_TRY(check_shape(*rows, a->cols));
  if (a->rotated < 0 || a->rotated % 2 || a->rotated > a->cols)
    return DC_FAIL(DC_E_INVALID, "rotated = %lld; it must be even, and at most cols = %lld", (long long)a->rotated,
                   (long long)a->cols);
  DC_TRY(check_array(a->x, dc_dtype_size(a->dtype), *rows * a->cols, "x"));
  DC_TRY(check_array(a->out, dc_dtype_size(a->dtype), *rows * a->cols, "out"));
  DC_TRY(check_array(a->cos, dc_dtype_size(a->table_dtype), *rows * a->rotated, "cos"));
  return check_array(a->sin, dc_dtype_size(a->table_dtype), *rows * a->rotated, "sin");
}

int dc_rotary(const dc_rotary_args *args) {
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  dc_rotary_args a = *args;
  flat_job j = {.args = &a};
  int64_t rows;
  DC_TRY(check_rotary(&a, &rows));
  DC_TRY(get_table(&j.ops));
  dc__count(DC_COUNTER_rotary_calls, 1);
  sort_dims(&a);
  if (a.cols > 0) dc_parallel_for(rows, share_rows(a.cols), rotary_range, &j);
  return DC_OK;
}
