/* adafactor.c: bodies of dc_adafactor_tops, sums, norms and apply, a part of one row each. fp32 gradients and
 * parameters are constants of their loop. */
#include "cpu/vec.h"

DC_INLINE vf adafactor_grad(const void *grad, int dt, vf scale, int64_t i, int r) {
  return v_mul(scale, v_keep(v_get(grad, dt, i, r), r));
}

/* ---- rows and columns -------------------------------------------------------------------------------------------- */
DC_INLINE void adafactor_tops_loop(const void *grad, int dt, float grad_scale, int64_t i, int64_t n, uint32_t *col_top,
                                   uint32_t *row_top) {
  const vf scale = v_set1(grad_scale);
  vi row = vi_set1(0);
  for (int64_t j = 0; j < n; j += LANES) {
    const int r = n - j < LANES ? (int)(n - j) : LANES;
    v_ahead(grad, dt, i + j, AHEAD);
    const vi size = v_magnitude(adafactor_grad(grad, dt, scale, i + j, r));
    vi_store(col_top + j, vi_max(vi_load(col_top + j), size));
    row = vi_max(row, size);
  }
  const uint32_t top = vi_top(row);
  if (top > *row_top) *row_top = top;
}

void DC_BODY(adafactor_tops)(const void *grad, int dt, float grad_scale, int64_t i, int64_t n, uint32_t *col_top,
                             uint32_t *row_top){
    DC_FOR_LOW(dt, DT, adafactor_tops_loop(grad, DT, grad_scale, i, n, col_top, row_top))}

DC_INLINE void adafactor_sums_loop(const void *grad, int dt, float grad_scale, int64_t i, int64_t n,
                                   const double *col_grid, double *col_sum, double row_grid, double *row_sum) {
  const vf scale = v_set1(grad_scale);
  const vd grid = vd_set1(row_grid);
  vd row = vd_zero();
  for (int64_t j = 0; j < n; j += LANES) {
    const int r = n - j < LANES ? (int)(n - j) : LANES;
    v_ahead(grad, dt, i + j, AHEAD);
    const vd g = vd_of(adafactor_grad(grad, dt, scale, i + j, r)), col = vd_load(col_grid + j);
    vd_store(col_sum + j, vd_add(vd_load(col_sum + j), vd_sub(vd_fma(g, g, col), col)));
    row = vd_add(row, vd_sub(vd_fma(g, g, grid), grid));
  }
  *row_sum += vd_tree(row); /* exact: in any order */
}

void DC_BODY(adafactor_sums)(const void *grad, int dt, float grad_scale, int64_t i, int64_t n, const double *col_grid,
                             double *col_sum, double row_grid, double *row_sum) {
  DC_FOR_LOW(dt, DT, adafactor_sums_loop(grad, DT, grad_scale, i, n, col_grid, col_sum, row_grid, row_sum))
}

/* ---- the step ---------------------------------------------------------------------------------------------------- */
typedef struct consts {
  vf grad_scale, weight, least, keep, rate, factor;
} consts;

DC_INLINE consts adafactor_consts_of(const dc__adafactor_coef *c, float factor) {
  return (consts){v_set1(c->grad_scale), v_set1(c->weight), v_set1(c->least),
                  v_set1(c->keep),       v_set1(c->rate),   v_set1(factor)};
}

DC_INLINE vf adafactor_update(const consts *c, vf g, vf v) { return v_div(g, v_sqrt(v_max(v, c->least))); }

DC_INLINE void adafactor_norms_loop(const dc_adafactor_args *args, int param, int grad, const dc__adafactor_coef *coef,
                                    const float *second, float factor, int64_t i, int64_t n, double *sum,
                                    double *update_sum) {
  const dc_adafactor_args t = *args; /* a copy that no store can alias */
  const consts c = adafactor_consts_of(coef, factor);
  vd ps = vd_zero(), us = vd_zero();
  for (int64_t j = 0; j < n; j += LANES) {
    const int r = n - j < LANES ? (int)(n - j) : LANES;
    v_ahead(t.param, param, i + j, AHEAD);
    v_ahead(t.grad, grad, i + j, AHEAD);
    const vf p = v_get(t.param, param, i + j, r), g = adafactor_grad(t.grad, grad, c.grad_scale, i + j, r);
    vf v = v_load32(second + j, r);
    if (t.variance) {
      v = v_canonical(v_fma(c.weight, v_sub(v_mul(g, g), v), v));
      v_store32(t.variance + i + j, r, v);
    }
    const vf u = v_keep(adafactor_update(&c, g, v_mul(c.factor, v)), r); /* 0 / 0 of what is not there is NaN */
    ps = vd_add_sq(ps, p);
    us = vd_add_sq(us, u);
  }
  *sum = dc__canonical_f64(*sum + vd_tree(ps));
  *update_sum = dc__canonical_f64(*update_sum + vd_tree(us));
}

void DC_BODY(adafactor_norms)(const dc_adafactor_args *t, const dc__adafactor_coef *c, const float *second,
                              float factor, int64_t i, int64_t n, double *sum, double *update_sum) {
  if (t->param_dtype == DC_F32 && t->grad_dtype == DC_F32)
    adafactor_norms_loop(t, DC_F32, DC_F32, c, second, factor, i, n, sum, update_sum);
  else adafactor_norms_loop(t, t->param_dtype, t->grad_dtype, c, second, factor, i, n, sum, update_sum);
}

DC_INLINE void adafactor_apply_loop(const dc_adafactor_args *args, int param, int grad, int has_lowp,
                                    const dc__adafactor_coef *coef, const float *second, float factor, int64_t i,
                                    int64_t n) {
  const dc_adafactor_args t = *args;
  const consts c = adafactor_consts_of(coef, factor);
  for (int64_t j = 0; j < n; j += LANES) {
    const int r = n - j < LANES ? (int)(n - j) : LANES;
    v_ahead(t.param, param, i + j, AHEAD);
    v_ahead(t.grad, grad, i + j, AHEAD);
    const vf g = adafactor_grad(t.grad, grad, c.grad_scale, i + j, r);
    const vf u = adafactor_update(&c, g, v_mul(c.factor, v_load32(second + j, r)));
    const vf p = v_canonical(v_fma(c.rate, u, v_mul(v_get(t.param, param, i + j, r), c.keep)));
    v_put_canonical(t.param, param, i + j, r, p);
    if (has_lowp) v_put_canonical(t.lowp, t.lowp_dtype, i + j, r, p);
  }
}

void DC_BODY(adafactor_apply)(const dc_adafactor_args *t, const dc__adafactor_coef *c, const float *second,
                              float factor, int64_t i, int64_t n) {
  if (t->param_dtype == DC_F32 && t->grad_dtype == DC_F32 && !t->lowp)
    adafactor_apply_loop(t, DC_F32, DC_F32, 0, c, second, factor, i, n);
  else adafactor_apply_loop(t, t->param_dtype, t->grad_dtype, t->lowp != NULL, c, second, factor, i, n);
}
