/* lamb.c: scalar reference of dc_lamb_moments and dc_lamb_apply, elements [begin, end) of one tensor. */
#include "ref/rules.h"

void dc__lamb_moments_scalar(const dc_lamb_args *t, const dc__lamb_coef *c, int64_t begin, int64_t end, double *sums,
                             double *update_sums) {
  double ps[16] = {0}, us[16] = {0};
  for (int64_t i = begin; i < end; i++) {
    const float p = dc__get(t->param, t->param_dtype, i), g = c->grad_scale * dc__get(t->grad, t->grad_dtype, i);
    const float m = fmaf(c->one_minus_b1, g - t->exp_avg[i], t->exp_avg[i]);
    const float v = fmaf(c->one_minus_b2, g * g, c->b2 * t->exp_avg_sq[i]), u = dc__rule_lamb(c, p, m, v);
    t->exp_avg[i] = dc__canonical_f32(m);
    t->exp_avg_sq[i] = dc__canonical_f32(v);
    ps[(i - begin) % 16] = fma((double)p, (double)p, ps[(i - begin) % 16]);
    us[(i - begin) % 16] = fma((double)u, (double)u, us[(i - begin) % 16]);
  }
  *sums = dc__tree16(ps);
  *update_sums = dc__tree16(us);
}

void dc__lamb_apply_scalar(const dc_lamb_args *t, const dc__lamb_coef *c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    float p = dc__get(t->param, t->param_dtype, i);
    p = fmaf(c->rate, dc__rule_lamb(c, p, t->exp_avg[i], t->exp_avg_sq[i]), p);
    dc__put(t->param, t->param_dtype, i, p);
    if (t->lowp) dc__put(t->lowp, t->lowp_dtype, i, p);
  }
}
