/* lamb.c: bodies of dc_lamb_moments and dc_lamb_apply. fp32 parameters and gradients are constants of their loop. */
#include "cpu/rules.h"

DC_INLINE lamb_sums lamb_moments_some(const dc_lamb_args *t, int param, int grad, const lamb_scalars *c, lamb_sums s,
                                      int64_t i, int r) {
  const vf p = v_get(t->param, param, i, r), g = v_mul(c->grad_scale, v_get(t->grad, grad, i, r));
  vf m = v_load32(t->exp_avg + i, r), v = v_load32(t->exp_avg_sq + i, r);
  m = v_fma(c->one_minus_b1, v_sub(g, m), m);
  v = v_fma(c->one_minus_b2, v_mul(g, g), v_mul(c->b2, v));
  const vf u = v_keep(rule_lamb(c, p, m, v), r); /* 0 / (0 + eps) of what is not there may be NaN */
  v_put(t->exp_avg, DC_F32, i, r, m);
  v_put(t->exp_avg_sq, DC_F32, i, r, v);
  return (lamb_sums){vd_add_sq(s.p, p), vd_add_sq(s.u, u)};
}

DC_INLINE void lamb_moments_loop(const dc_lamb_args *args, int param, int grad, const dc__lamb_coef *c, int64_t begin,
                                 int64_t end, double *param_sums, double *update_sums) {
  const dc_lamb_args t = *args; /* a copy that no store can alias */
  const lamb_scalars k = lamb_scalars_of(c);
  lamb_sums s = {vd_zero(), vd_zero()};
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    v_ahead(t.param, param, i, AHEAD);
    v_ahead(t.grad, grad, i, AHEAD);
    v_ahead(t.exp_avg, DC_F32, i, AHEAD);
    v_ahead(t.exp_avg_sq, DC_F32, i, AHEAD);
    s = lamb_moments_some(&t, param, grad, &k, s, i, LANES);
  }
  if (i < end) s = lamb_moments_some(&t, param, grad, &k, s, i, (int)(end - i));
  *param_sums = vd_tree(s.p);
  *update_sums = vd_tree(s.u);
}

void DC_BODY(lamb_moments)(const dc_lamb_args *t, const dc__lamb_coef *c, int64_t begin, int64_t end, double *sums,
                           double *update_sums) {
  if (t->param_dtype == DC_F32 && t->grad_dtype == DC_F32)
    lamb_moments_loop(t, DC_F32, DC_F32, c, begin, end, sums, update_sums);
  else lamb_moments_loop(t, t->param_dtype, t->grad_dtype, c, begin, end, sums, update_sums);
}

DC_INLINE void lamb_apply_some(const dc_lamb_args *t, int param, int lowp, int has_lowp, const lamb_scalars *c,
                               int64_t i, int r) {
  vf p = v_get(t->param, param, i, r);
  p = v_canonical(v_fma(c->rate, rule_lamb(c, p, v_load32(t->exp_avg + i, r), v_load32(t->exp_avg_sq + i, r)), p));
  v_put_canonical(t->param, param, i, r, p);
  if (has_lowp) v_put_canonical(t->lowp, lowp, i, r, p);
}

DC_INLINE void lamb_apply_loop(const dc_lamb_args *args, int param, int lowp, int has_lowp, const dc__lamb_coef *c,
                               int64_t begin, int64_t end) {
  const dc_lamb_args t = *args;
  const lamb_scalars k = lamb_scalars_of(c);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    v_ahead(t.param, param, i, AHEAD);
    v_ahead(t.exp_avg, DC_F32, i, AHEAD);
    v_ahead(t.exp_avg_sq, DC_F32, i, AHEAD);
    lamb_apply_some(&t, param, lowp, has_lowp, &k, i, LANES);
  }
  if (i < end) lamb_apply_some(&t, param, lowp, has_lowp, &k, i, (int)(end - i));
}

void DC_BODY(lamb_apply)(const dc_lamb_args *t, const dc__lamb_coef *c, int64_t begin, int64_t end) {
  if (t->param_dtype == DC_F32 && !t->lowp) lamb_apply_loop(t, DC_F32, 0, 0, c, begin, end);
  else lamb_apply_loop(t, t->param_dtype, t->lowp_dtype, t->lowp != NULL, c, begin, end);
}
