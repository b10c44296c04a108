/* adamw.c: scalar reference of dc_adamw, elements [begin, end) of one tensor. */
#include "ref/scalar.h"

void dc__adamw_scalar(const dc_adamw_args *t, const dc__adamw_coef *c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    float p = dc__get(t->param, t->param_dtype, i);
    float g = c->grad_scale * dc__get(t->grad, t->grad_dtype, i);
    float m = dc__get(t->exp_avg, t->state_dtype, i);
    float v = dc__get(t->exp_avg_sq, t->state_dtype, i);
    if (c->l2 != 0.0f) g = fmaf(c->l2, p, g);
    p = p * c->decay;
    m = fmaf(c->one_minus_b1, g - m, m);
    v = fmaf(c->one_minus_b2, g * g, c->b2 * v);
    dc__put(t->exp_avg, t->state_dtype, i, m);
    dc__put(t->exp_avg_sq, t->state_dtype, i, v);
    if (t->max_exp_avg_sq) {
      v = dc__max_f32(dc__get(t->max_exp_avg_sq, t->state_dtype, i), v);
      dc__put(t->max_exp_avg_sq, t->state_dtype, i, v);
    }
    p = fmaf(c->step_size_neg, m / fmaf(sqrtf(v), c->inv_sqrt_bc2, c->eps), p);
    dc__put(t->param, t->param_dtype, i, p);
    if (t->lowp) dc__put(t->lowp, t->lowp_dtype, i, p);
  }
}
