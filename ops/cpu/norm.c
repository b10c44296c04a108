/* norm.c: bodies of dc_norm and dc_norm_grad, rows [begin, end). A row is read from memory once: the passes over it
 * that follow find it in the first-level cache. fp32 costs what a copy costs (0.27 ns an element, docs/lab/kernels.md);
 * bf16 waits for the conversions, which each pass repeats. */
#include "cpu/vec.h"
#include "ref/activation.h"

/* Four chains of additions: one alone would wait 4 cycles for each of them. */
typedef struct sums {
  vf a, b, c, d;
} sums;
DC_INLINE sums norm_sums_zero(void) { return (sums){v_set1(0.0f), v_set1(0.0f), v_set1(0.0f), v_set1(0.0f)}; }
DC_INLINE float norm_sums_total(sums s) { return v_tree(v_add(v_add(s.a, s.b), v_add(s.c, s.d))); }

/* step(chain, i, r) for the columns of a row, vector i / LANES on chain i / LANES % 4. */
#define REST_STEP(step, chain)                                  \
  if (i < cols) {                                               \
    step(chain, i, (int)(cols - i < LANES ? cols - i : LANES)); \
    i += LANES;                                                 \
  }
#define EACH_VECTOR(step)                                                       \
  {                                                                             \
    int64_t i = 0;                                                              \
    for (; i + 4 * LANES <= cols; i += 4 * LANES) {                             \
      step(a, i, LANES);                                                        \
      step(b, i + LANES, LANES);                                                \
      step(c, i + 2 * LANES, LANES);                                            \
      step(d, i + 3 * LANES, LANES);                                            \
    }                                                                           \
    REST_STEP(step, a) REST_STEP(step, b) REST_STEP(step, c) REST_STEP(step, d) \
  }

DC_INLINE const void *norm_at_row(const void *p, int dt, int64_t stride, int64_t k) {
  return (const char *)p + k * stride * (dt == DC_F32 ? 4 : 2);
}
DC_INLINE void *norm_to_row(void *p, int dt, int64_t cols, int64_t k) {
  return (char *)p + k * cols * (dt == DC_F32 ? 4 : 2);
}
/* The weight, to which offset was added; 1 without a weight. */
DC_INLINE vf norm_weight_at(const void *weight, int dt, vf offset, int64_t i, int r) {
  return weight ? v_add(v_get(weight, dt, i, r), offset) : v_set1(1.0f);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */
DC_INLINE void norm_add_rows(void *sum, const void *x, const void *residual, int dt, int64_t cols){
#define STEP(chain, i, r) v_put(sum, dt, i, r, v_add(v_get(x, dt, i, r), v_get(residual, dt, i, r)))
    EACH_VECTOR(STEP)
#undef STEP
}

DC_INLINE float norm_mean_of(const void *x, int dt, int64_t cols) {
  sums s = norm_sums_zero();
#define STEP(chain, i, r)   \
  v_ahead(x, dt, i, AHEAD); \
  s.chain = v_add(s.chain, v_get(x, dt, i, r))
  EACH_VECTOR(STEP)
#undef STEP
  return norm_sums_total(s) / (float)cols;
}

DC_INLINE float norm_rstd_of(const void *x, int dt, int center, int64_t cols, float mean, float eps) {
  const vf m = v_set1(mean);
  sums s = norm_sums_zero();
#define STEP(chain, i, r)                                                             \
  if (!center) v_ahead(x, dt, i, AHEAD);                                              \
  const vf d = center ? v_keep(v_sub(v_get(x, dt, i, r), m), r) : v_get(x, dt, i, r); \
  s.chain = v_fma(d, d, s.chain)
#define BLOCK(chain, i, r) \
  { STEP(chain, i, r); }
  EACH_VECTOR(BLOCK)
#undef BLOCK
#undef STEP
  return 1.0f / sqrtf(norm_sums_total(s) / (float)cols + eps);
}

DC_INLINE void norm_out(const dc_norm_args *a, int dt, int wdt, int center, const void *x, void *y, float mean,
                        float rstd) {
  const int64_t cols = a->cols;
  const vf m = v_set1(mean), scale = v_set1(rstd), offset = v_set1(a->offset);
  int64_t i = 0;
#define STEP(i, r)                                                                      \
  {                                                                                     \
    const vf v = v_get(x, dt, i, r), h = v_mul(center ? v_sub(v, m) : v, scale);        \
    const vf w = norm_weight_at(a->weight, wdt, offset, i, r);                          \
    v_put(y, dt, i, r, a->bias ? v_fma(h, w, v_get(a->bias, wdt, i, r)) : v_mul(h, w)); \
  }
  for (; i + LANES <= cols; i += LANES) STEP(i, LANES)
  if (i < cols) STEP(i, (int)(cols - i))
#undef STEP
}

DC_INLINE void norm_loop(const dc_norm_args *args, int dt, int wdt, int center, int64_t begin, int64_t end) {
  const dc_norm_args a = *args;
  for (int64_t k = begin; k < end; k++) {
    const void *x = norm_at_row(a.x, dt, a.x_stride, k);
    if (a.residual) {
      void *sum = norm_to_row(a.sum, dt, a.cols, k);
      norm_add_rows(sum, x, norm_at_row(a.residual, dt, a.residual_stride, k), dt, a.cols);
      x = sum;
    }
    const float mean = center ? norm_mean_of(x, dt, a.cols) : 0.0f;
    const float rstd = norm_rstd_of(x, dt, center, a.cols, mean, a.eps);
    if (center) a.mean[k] = dc__canonical_f32(mean);
    a.rstd[k] = dc__canonical_f32(rstd);
    norm_out(&a, dt, wdt, center, x, norm_to_row(a.y, dt, a.cols, k), mean, rstd);
  }
}

DC_INLINE void norm_weights(const dc_norm_args *a, int dt, int center, int64_t begin, int64_t end) {
  if (a->weight_dtype == dt) norm_loop(a, dt, dt, center, begin, end);
  else norm_loop(a, dt, a->weight_dtype, center, begin, end);
}

DC_INLINE void norm_dtype(const dc_norm_args *a, int dt, int64_t begin, int64_t end) {
  if (a->mean) norm_weights(a, dt, 1, begin, end);
  else norm_weights(a, dt, 0, begin, end);
}

void DC_BODY(norm)(const dc_norm_args *a, int64_t begin, int64_t end) {
  DC_FOR_LOW(a->dtype, DT, norm_dtype(a, DT, begin, end));
}

/* ---- gradient ---------------------------------------------------------------------------------------------------- */
/* One row of the operands, and the two means that its gradient takes out. */
typedef struct grad_row {
  const void *x, *dy, *dsum;
  void *dx;
  vf mean, rstd, slope, base;
} grad_row;

DC_INLINE vf norm_unit_at(const grad_row *row, int dt, int center, int64_t i, int r) {
  const vf v = v_get(row->x, dt, i, r);
  return v_mul(center ? v_sub(v, row->mean) : v, row->rstd);
}

DC_INLINE void norm_row_means(const dc_norm_grad_args *a, int dt, int wdt, int center, grad_row *row) {
  const int64_t cols = a->cols;
  const vf offset = v_set1(a->offset);
  const grad_row at = *row;
  sums along = norm_sums_zero(), level = norm_sums_zero();
#define STEP(chain, i, r)                                                                     \
  {                                                                                           \
    v_ahead(at.x, dt, i, AHEAD);                                                              \
    v_ahead(at.dy, dt, i, AHEAD);                                                             \
    const vf h = v_keep(norm_unit_at(&at, dt, center, i, r), r);                              \
    const vf g = v_mul(v_get(at.dy, dt, i, r), norm_weight_at(a->weight, wdt, offset, i, r)); \
    along.chain = v_fma(g, h, along.chain);                                                   \
    if (center) level.chain = v_add(level.chain, g);                                          \
  }
  EACH_VECTOR(STEP)
#undef STEP
  row->slope = v_set1(-(norm_sums_total(along) / (float)cols));
  row->base = v_set1(center ? norm_sums_total(level) / (float)cols : 0.0f);
}

DC_INLINE void norm_row_grad(const dc_norm_grad_args *a, int dt, int wdt, int center, const grad_row *row,
                             float *dweight, float *dbias) {
  const int64_t cols = a->cols;
  const vf offset = v_set1(a->offset);
  const grad_row at = *row;
  int64_t i = 0;
#define STEP(i, r)                                                                                     \
  {                                                                                                    \
    const vf d = v_get(at.dy, dt, i, r), h = norm_unit_at(&at, dt, center, i, r);                      \
    const vf g = v_mul(d, norm_weight_at(a->weight, wdt, offset, i, r));                               \
    const vf t = v_fma(at.slope, h, v_sub(g, at.base));                                                \
    v_put(at.dx, dt, i, r, at.dsum ? v_fma(t, at.rstd, v_get(at.dsum, dt, i, r)) : v_mul(t, at.rstd)); \
    if (dweight) v_store32(dweight + i, r, v_fma(d, h, v_get(dweight, DC_F32, i, r)));                 \
    if (dbias) v_store32(dbias + i, r, v_add(v_get(dbias, DC_F32, i, r), d));                          \
  }
  for (; i + LANES <= cols; i += LANES) STEP(i, LANES)
  if (i < cols) STEP(i, (int)(cols - i))
#undef STEP
}

DC_INLINE void norm_grad_loop(const dc_norm_grad_args *args, int dt, int wdt, int center, int64_t begin, int64_t end,
                              float *dweight, float *dbias) {
  const dc_norm_grad_args a = *args;
  for (int64_t k = begin; k < end; k++) {
    grad_row row = {.x = norm_at_row(a.x, dt, a.x_stride, k),
                    .dy = norm_at_row(a.dy, dt, a.cols, k),
                    .dsum = a.dsum ? norm_at_row(a.dsum, dt, a.cols, k) : NULL,
                    .dx = norm_to_row(a.dx, dt, a.cols, k),
                    .mean = v_set1(center ? a.mean[k] : 0.0f),
                    .rstd = v_set1(a.rstd[k])};
    norm_row_means(&a, dt, wdt, center, &row);
    norm_row_grad(&a, dt, wdt, center, &row, dweight, dbias);
  }
}

DC_INLINE void norm_grad_weights(const dc_norm_grad_args *a, int dt, int center, int64_t begin, int64_t end,
                                 float *dweight, float *dbias) {
  if (a->weight_dtype == dt) norm_grad_loop(a, dt, dt, center, begin, end, dweight, dbias);
  else norm_grad_loop(a, dt, a->weight_dtype, center, begin, end, dweight, dbias);
}

DC_INLINE void norm_grad_dtype(const dc_norm_grad_args *a, int dt, int64_t begin, int64_t end, float *dweight,
                               float *dbias) {
  if (a->mean) norm_grad_weights(a, dt, 1, begin, end, dweight, dbias);
  else norm_grad_weights(a, dt, 0, begin, end, dweight, dbias);
}

void DC_BODY(norm_grad)(const dc_norm_grad_args *a, int64_t begin, int64_t end, float *dweight, float *dbias) {
  DC_FOR_LOW(a->dtype, DT, norm_grad_dtype(a, DT, begin, end, dweight, dbias));
}

/* ---- sums of blocks of rows -------------------------------------------------------------------------------------- */
DC_INLINE void fold_step(void *out, int dt, const float *partial, int64_t rows, int64_t stride, int64_t i, int r) {
  vf sum[8];
  for (int j = 0; j < 8; j++) sum[j] = v_set1(0.0f);
  int64_t k = 0;
  for (; k + 8 <= rows; k += 8)
    for (int j = 0; j < 8; j++) sum[j] = v_add(sum[j], v_get(partial + (k + j) * stride, DC_F32, i, r));
  for (int j = 0; k + j < rows; j++) sum[j] = v_add(sum[j], v_get(partial + (k + j) * stride, DC_F32, i, r));
  for (int width = 4; width > 0; width /= 2)
    for (int j = 0; j < width; j++) sum[j] = v_add(sum[j], sum[j + width]);
  v_put(out, dt, i, r, sum[0]);
}

void DC_BODY(fold_rows)(void *out, int dt, const float *partial, int64_t rows, int64_t stride, int64_t begin,
                        int64_t end) {
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) fold_step(out, dt, partial, rows, stride, i, LANES);
  if (i < end) fold_step(out, dt, partial, rows, stride, i, (int)(end - i));
}
