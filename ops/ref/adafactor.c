/* adafactor.c: scalar reference of dc_adafactor_tops, sums, norms and apply, a part of one row. */
#include "ref/scalar.h"

void dc__adafactor_tops_scalar(const void *grad, int dt, float grad_scale, int64_t i, int64_t n, uint32_t *col_top,
                               uint32_t *row_top) {
  for (int64_t j = 0; j < n; j++) {
    const uint32_t size = dc__bits_of_f32(grad_scale * dc__get(grad, dt, i + j)) & 0x7fffffffu;
    if (size > col_top[j]) col_top[j] = size;
    if (size > *row_top) *row_top = size;
  }
}

/* g^2, which is exact in fp64, to the nearest multiple of 2^-52 * grid. */
static double adafactor_square(double g, double grid) { return fma(g, g, grid) - grid; }

void dc__adafactor_sums_scalar(const void *grad, int dt, float grad_scale, int64_t i, int64_t n, const double *col_grid,
                               double *col_sum, double row_grid, double *row_sum) {
  for (int64_t j = 0; j < n; j++) {
    const float g = grad_scale * dc__get(grad, dt, i + j);
    col_sum[j] += adafactor_square(g, col_grid[j]);
    *row_sum += adafactor_square(g, row_grid);
  }
}

static float adafactor_update(const dc__adafactor_coef *c, float g, float v) {
  return g / sqrtf(dc__max_f32(v, c->least));
}

void dc__adafactor_norms_scalar(const dc_adafactor_args *t, const dc__adafactor_coef *c, const float *second,
                                float factor, int64_t i, int64_t n, double *sum, double *update_sum) {
  double ps[16] = {0}, us[16] = {0};
  for (int64_t j = 0; j < n; j++) {
    const double p = dc__get(t->param, t->param_dtype, i + j);
    const float g = c->grad_scale * dc__get(t->grad, t->grad_dtype, i + j);
    if (t->variance) t->variance[i + j] = dc__canonical_f32(fmaf(c->weight, g * g - second[j], second[j]));
    const double u = adafactor_update(c, g, factor * second[j]);
    ps[j % 16] = fma(p, p, ps[j % 16]);
    us[j % 16] = fma(u, u, us[j % 16]);
  }
  *sum = dc__canonical_f64(*sum + dc__tree16(ps));
  *update_sum = dc__canonical_f64(*update_sum + dc__tree16(us));
}

void dc__adafactor_apply_scalar(const dc_adafactor_args *t, const dc__adafactor_coef *c, const float *second,
                                float factor, int64_t i, int64_t n) {
  for (int64_t j = 0; j < n; j++) {
    const float g = c->grad_scale * dc__get(t->grad, t->grad_dtype, i + j);
    float p = dc__get(t->param, t->param_dtype, i + j);
    p = fmaf(c->rate, adafactor_update(c, g, factor * second[j]), p * c->keep);
    dc__put(t->param, t->param_dtype, i + j, p);
    if (t->lowp) dc__put(t->lowp, t->lowp_dtype, i + j, p);
  }
}
