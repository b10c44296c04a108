/* xent.c: bodies of dc_cross_entropy_rows. A row is read twice: block by block for maximum and sum (the block stays
 * in L1 between the two), then for the gradient, which is written over it (a row of 50,257 fp32 stays in L2). e^x is
 * computed twice rather than kept: keeping it would cost a write more and, in 16 bits, a rounding. 1.2 to 1.4 ns an
 * element (docs/lab/kernels.md). */
#include "ref/xent.h"
#include "cpu/exp.h"

/* The last r elements, -inf behind them: e^(-inf) adds nothing. */
DC_INLINE vf xent_padded(const void *x, int dt, int64_t i, int r) {
  float part[LANES];
  for (int k = 0; k < LANES; k++) part[k] = k < r ? dc__get(x, dt, i + k) : -HUGE_VALF;
  return v_load32(part, LANES);
}

DC_INLINE float xent_max_lane(vf a) {
  float lane[LANES], max = -HUGE_VALF;
  v_store32(lane, LANES, a);
  for (int k = 0; k < LANES; k++) max = dc__max_f32(max, lane[k]);
  return max;
}

DC_INLINE float xent_block_max(const void *x, int dt, int64_t begin, int64_t end) {
  vf a = v_set1(-HUGE_VALF), b = a, c = a, d = a;
  int64_t i = begin;
  for (; i + 4 * LANES <= end; i += 4 * LANES) {
    v_ahead(x, dt, i, AHEAD);
    v_ahead(x, dt, i + 2 * LANES, AHEAD);
    a = v_max(a, v_get(x, dt, i, LANES));
    b = v_max(b, v_get(x, dt, i + LANES, LANES));
    c = v_max(c, v_get(x, dt, i + 2 * LANES, LANES));
    d = v_max(d, v_get(x, dt, i + 3 * LANES, LANES));
  }
  for (; i + LANES <= end; i += LANES) a = v_max(a, v_get(x, dt, i, LANES));
  if (i < end) a = v_max(a, xent_padded(x, dt, i, (int)(end - i)));
  return xent_max_lane(v_max(v_max(a, b), v_max(c, d)));
}

/* totals: also the sum of x, for smoothing. */
DC_INLINE void xent_add_block(dc__online *o, const void *x, int dt, int64_t begin, int64_t end, int totals) {
  const float max = xent_block_max(x, dt, begin, end);
  const vf top = v_set1(max);
  vf sum = v_set1(0.0f), total = sum;
  float sums[LANES], all[LANES] = {0};
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    const vf v = v_get(x, dt, i, LANES);
    sum = v_add(sum, v_exp_nonpos(v_sub(v, top)));
    if (totals) total = v_add(total, v);
  }
  if (i < end) {
    sum = v_add(sum, v_exp_nonpos(v_sub(xent_padded(x, dt, i, (int)(end - i)), top)));
    if (totals) total = v_add(total, v_get(x, dt, i, (int)(end - i)));
  }
  v_store32(sums, LANES, sum);
  if (totals) v_store32(all, LANES, total);
  dc__online_add(o, max, sums, all);
}

DC_INLINE void xent_write_gradient(void *x, int dt, int64_t n, const dc__row *row) {
  const vf max = v_set1(row->max), factor = v_set1(row->factor), spread = v_set1(-row->spread);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    v_put(x, dt, i, LANES, v_fma(v_exp_nonpos(v_sub(v_get(x, dt, i, LANES), max)), factor, spread));
  if (i < n) {
    const int r = (int)(n - i);
    v_put(x, dt, i, r, v_fma(v_exp_nonpos(v_sub(v_get(x, dt, i, r), max)), factor, spread));
  }
}

DC_INLINE void xent_one_row(const dc_xent_args *a, int dt, int64_t r) {
  char *x = (char *)a->logits + (int64_t)(dt == DC_F32 ? 4 : 2) * r * a->stride;
  const int64_t n = a->classes, label = a->labels[r];
  if (label == a->ignore_index) {
    if (a->loss) a->loss[r] = 0.0f;
    if (a->gradient) memset(x, 0, (size_t)n * (dt == DC_F32 ? 4 : 2));
    return;
  }
  dc__online o = DC__ONLINE_EMPTY;
  const int totals = a->label_smoothing != 0.0f;
  for (int64_t i = 0; i < n; i += DC_BLOCK) {
    const int64_t end = n - i < DC_BLOCK ? n : i + DC_BLOCK;
    if (totals) xent_add_block(&o, x, dt, i, end, 1);
    else xent_add_block(&o, x, dt, i, end, 0);
  }
  const float at_label = dc__get(x, dt, label);
  if (a->loss) a->loss[r] = dc__row_loss(a, &o, at_label);
  if (!a->gradient) return;
  const dc__row row = dc__row_of(a, r, &o);
  xent_write_gradient(x, dt, n, &row);
  dc__put(x, dt, label, dc__row_gradient(&row, at_label) - row.label);
}

DC_INLINE void xent_rows_loop(const dc_xent_args *a, int dt, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) xent_one_row(a, dt, r);
}

void DC_BODY(xent)(const dc_xent_args *a, int64_t begin, int64_t end) {
  DC_FOR_LOW(a->dtype, DT, xent_rows_loop(a, DT, begin, end));
}
