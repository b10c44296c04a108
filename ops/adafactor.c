/* adafactor.c: dc_adafactor_tops, sums, factors, norms and apply. The first two go over bands of rows, each thread with
 * sums of its own for a strip of a band, which it adds to the parameter's under a lock: they are exact, so the order in
 * which that happens does not show. The last two go over blocks, as LAMB does. */
#include "call.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "adafactor_coef.h"
#include "ref/scalar.h"

enum { BAND_ROWS = 128, STRIP_COLS = 1024, LANES_MORE = 16, BANDS_GRAIN = 4, BLOCKS_GRAIN = 8 };
typedef enum adafactor_pass { PASS_TOPS, PASS_SUMS, PASS_NORMS, PASS_APPLY } adafactor_pass;

typedef struct adafactor_job {
  const dc__ops *ops;
  const dc_adafactor_args *tensor;
  int64_t count;
  adafactor_pass pass;
  pthread_mutex_t lock; /* guards the parameters' rows and columns */
} adafactor_job;

/* ---- rows and columns -------------------------------------------------------------------------------------------- */
/* grid[i]: what a square is added to and taken from again, so that it is a multiple of 2^-52 of it: at least the sum of
 * `count` squares of numbers whose bits are at most top[i]. */
static void adafactor_grids(double *grid, const uint32_t *top, int64_t n, int64_t count) {
  int log2 = 1;
  while (log2 < 62 && (int64_t)1 << log2 < count) log2++;
  for (int64_t i = 0; i < n; i++) {
    const int exponent = (int)(top[i] >> 23);
    grid[i] = exponent == 255 ? (double)NAN : ldexp(1.0, 2 * ((exponent > 0 ? exponent : 1) - 126) + log2);
  }
}

/* Rows [row, end) of a parameter, all of one matrix, that a stretch has a part of. */
typedef struct band {
  int64_t matrix, row, end;
} band;

static int64_t adafactor_band_at(const dc_adafactor_args *t, int64_t row) {
  const int64_t each = (t->rows + BAND_ROWS - 1) / BAND_ROWS;
  return row / t->rows * each + row % t->rows / BAND_ROWS;
}

static int64_t adafactor_bands(const dc_adafactor_args *t) {
  if (t->n == 0 || t->variance) return 0;
  return adafactor_band_at(t, (t->begin + t->n - 1) / t->cols) - adafactor_band_at(t, t->begin / t->cols) + 1;
}

/* Band k of those of a stretch. */
static band adafactor_band(const dc_adafactor_args *t, int64_t k) {
  const int64_t each = (t->rows + BAND_ROWS - 1) / BAND_ROWS, at = adafactor_band_at(t, t->begin / t->cols) + k;
  const int64_t matrix = at / each, row = matrix * t->rows + at % each * BAND_ROWS, last = (matrix + 1) * t->rows;
  return (band){matrix, row, row + BAND_ROWS < last ? row + BAND_ROWS : last};
}

/* A thread's own of a strip of columns, and of the rows of a band. */
typedef struct factors {
  uint32_t col_top[STRIP_COLS + LANES_MORE], row_top[BAND_ROWS];
  double col_sum[STRIP_COLS + LANES_MORE], row_sum[BAND_ROWS];
  double col_grid[STRIP_COLS + LANES_MORE], row_grid[BAND_ROWS];
} factors;

/* Columns [from, to) of a band. */
static void adafactor_strip(const adafactor_job *j, const dc_adafactor_args *t, band b, int64_t from, int64_t to,
                            factors *own) {
  const float scale = (float)t->grad_scale;
  for (int64_t row = b.row; row < b.end; row++) {
    const int64_t edge = row * t->cols - t->begin; /* of the row, in the stretch */
    const int64_t lo = edge + from > 0 ? edge + from : 0, hi = edge + to < t->n ? edge + to : t->n;
    const int64_t at = lo - edge - from, r = row - b.row;
    if (lo >= hi) continue;
    if (j->pass == PASS_TOPS)
      j->ops->adafactor_tops(t->grad, t->grad_dtype, scale, lo, hi - lo, own->col_top + at, &own->row_top[r]);
    else
      j->ops->adafactor_sums(t->grad, t->grad_dtype, scale, lo, hi - lo, own->col_grid + at, own->col_sum + at,
                             own->row_grid[r], &own->row_sum[r]);
  }
}

/* Adds what a thread has found of n rows or columns. */
static void adafactor_merge(adafactor_pass pass, int64_t n, uint32_t *top, const uint32_t *own_top, double *sum,
                            const double *own_sum) {
  if (pass == PASS_TOPS)
    for (int64_t i = 0; i < n; i++) top[i] = own_top[i] > top[i] ? own_top[i] : top[i];
  else
    for (int64_t i = 0; i < n; i++) sum[i] = dc__canonical_f64(sum[i] + own_sum[i]);
}

static void adafactor_band_run(adafactor_job *j, const dc_adafactor_args *t, band b) {
  factors own;
  const int64_t cols = b.matrix * t->cols, rows = b.end - b.row; /* cols: where the matrix's columns begin */
  memset(&own, 0, sizeof own);
  if (j->pass == PASS_SUMS) adafactor_grids(own.row_grid, t->row_top + b.row, rows, t->cols);
  for (int64_t from = 0, to; from < t->cols; from = to) {
    to = from + STRIP_COLS < t->cols ? from + STRIP_COLS : t->cols;
    memset(own.col_top, 0, sizeof own.col_top);
    memset(own.col_sum, 0, sizeof own.col_sum);
    if (j->pass == PASS_SUMS) adafactor_grids(own.col_grid, t->col_top + cols + from, to - from, t->rows);
    adafactor_strip(j, t, b, from, to, &own);
    pthread_mutex_lock(&j->lock);
    adafactor_merge(j->pass, to - from, t->col_top + cols + from, own.col_top, t->col_sum + cols + from, own.col_sum);
    pthread_mutex_unlock(&j->lock);
  }
  pthread_mutex_lock(&j->lock);
  adafactor_merge(j->pass, rows, t->row_top + b.row, own.row_top, t->row_sum + b.row, own.row_sum);
  pthread_mutex_unlock(&j->lock);
}

/* ---- the step ---------------------------------------------------------------------------------------------------- */
/* Elements [lo, hi) of a stretch, which lie in one block. */
static void adafactor_block(const adafactor_job *j, const dc_adafactor_args *t, int64_t lo, int64_t hi, double *sum,
                            double *update_sum) {
  const dc__adafactor_coef c = dc__adafactor_coef_of(t);
  for (int64_t i = lo, end; i < hi; i = end) {
    const float *second = t->variance ? t->variance + i : NULL;
    float factor = 1.0f;
    end = hi;
    if (!t->variance) {
      const int64_t row = (t->begin + i) / t->cols, edge = row * t->cols - t->begin;
      second = t->col_var + row / t->rows * t->cols + (i - edge);
      factor = t->row_factor[row];
      end = edge + t->cols < hi ? edge + t->cols : hi;
    }
    if (j->pass == PASS_NORMS) j->ops->adafactor_norms(t, &c, second, factor, i, end - i, sum, update_sum);
    else j->ops->adafactor_apply(t, &c, second, factor, i, end - i);
  }
}

static void adafactor_block_at(const adafactor_job *j, const dc_adafactor_args *t, int64_t k) {
  const int64_t edge = (t->first / DC_BLOCK + k) * DC_BLOCK - t->first;
  double sum = 0, update_sum = 0;
  adafactor_block(j, t, edge > 0 ? edge : 0, edge + DC_BLOCK < t->n ? edge + DC_BLOCK : t->n, &sum, &update_sum);
  if (j->pass == PASS_NORMS) t->param_sums[k] = sum, t->update_sums[k] = update_sum;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */
static int64_t adafactor_parts(const dc_adafactor_args *t, adafactor_pass pass) {
  return pass == PASS_TOPS || pass == PASS_SUMS ? adafactor_bands(t) : dc_lamb_blocks(t->first, t->n);
}

static void adafactor_range(int64_t begin, int64_t end, void *ctx) {
  adafactor_job *j = ctx;
  int64_t start = 0; /* of tensor t among all parts */
  const unsigned fp = fp_enter();
  for (const dc_adafactor_args *t = j->tensor; start < end && t < j->tensor + j->count; t++) {
    const int64_t parts = adafactor_parts(t, j->pass), hi = end - start < parts ? end - start : parts;
    for (int64_t k = begin > start ? begin - start : 0; k < hi; k++) {
      if (j->pass == PASS_NORMS || j->pass == PASS_APPLY) adafactor_block_at(j, t, k);
      else adafactor_band_run(j, t, adafactor_band(t, k));
    }
    start += parts;
  }
  fp_leave(fp);
}

static int adafactor_run(const dc_adafactor_args *tensors, int64_t count, adafactor_pass pass) {
  adafactor_job j = {.tensor = tensors, .count = count, .pass = pass, .lock = PTHREAD_MUTEX_INITIALIZER};
  int64_t parts = 0;
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_adafactor(&tensors[k], k));
    if (__builtin_add_overflow(parts, adafactor_parts(&tensors[k], pass), &parts))
      return DC_FAIL(DC_E_OVERFLOW, "the elements of %lld tensors overflow 64 bits", (long long)count);
  }
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_adafactor_calls, 1);
  if (parts > 0)
    dc_parallel_for(parts, pass == PASS_TOPS || pass == PASS_SUMS ? BANDS_GRAIN : BLOCKS_GRAIN, adafactor_range, &j);
  return DC_OK;
}

/* var: the moving average of `mean`s; n of them, of sums of `each` squares. Returns the sum of the new ones. */
static double adafactor_average(float *var, const double *sum, int64_t n, int64_t each, float weight) {
  double total[16] = {0};
  for (int64_t i = 0; i < n; i++) {
    const float mean = (float)(sum[i] / (double)each);
    var[i] = dc__canonical_f32(fmaf(weight, mean - var[i], var[i]));
    total[i % 16] += var[i];
  }
  return dc__tree16(total);
}

static void adafactor_factors_of(const dc_adafactor_args *t) {
  const float weight = (float)t->weight, eps = (float)t->eps;
  for (int64_t m = 0; m < t->matrices; m++) {
    float *row = t->row_var + m * t->rows;
    const double total = adafactor_average(row, t->row_sum + m * t->rows, t->rows, t->cols, weight);
    const float mean = dc__max_f32((float)(total / (double)t->rows), eps);
    for (int64_t i = 0; i < t->rows; i++) t->row_factor[m * t->rows + i] = dc__canonical_f32(row[i] / mean);
    adafactor_average(t->col_var + m * t->cols, t->col_sum + m * t->cols, t->cols, t->rows, weight);
  }
}

static int adafactor_factors_run(const dc_adafactor_args *parameters, int64_t count) {
  const unsigned fp = fp_enter();
  int rc = DC_OK;
  for (int64_t k = 0; k < count && rc == DC_OK; k++) rc = check_adafactor(&parameters[k], k);
  for (int64_t k = 0; k < count && rc == DC_OK; k++)
    if (!parameters[k].variance) adafactor_factors_of(&parameters[k]);
  fp_leave(fp);
  dc__count(DC_COUNTER_adafactor_calls, 1);
  return rc;
}

/* pass: an adafactor_pass, or -1: the factors. */
static int adafactor_call(const dc_adafactor_args *tensors, int64_t count, int pass) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_adafactor_args, reserved, tensors, count, &list, &owned);
  if (rc == DC_OK)
    rc = pass < 0 ? adafactor_factors_run(list, count) : adafactor_run(list, count, (adafactor_pass)pass);
  free(owned);
  return rc;
}

int dc_adafactor_tops(const dc_adafactor_args *stretches, int64_t count) {
  return adafactor_call(stretches, count, PASS_TOPS);
}
int dc_adafactor_sums(const dc_adafactor_args *stretches, int64_t count) {
  return adafactor_call(stretches, count, PASS_SUMS);
}
int dc_adafactor_factors(const dc_adafactor_args *parameters, int64_t count) {
  return adafactor_call(parameters, count, -1);
}
int dc_adafactor_norms(const dc_adafactor_args *stretches, int64_t count) {
  return adafactor_call(stretches, count, PASS_NORMS);
}
int dc_adafactor_apply(const dc_adafactor_args *stretches, int64_t count) {
  return adafactor_call(stretches, count, PASS_APPLY);
}
