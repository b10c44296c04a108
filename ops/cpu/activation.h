/* activation.h: ref/activation.h in vectors. */
#ifndef DEEPC_OPS_CPU_ACTIVATION_H
#define DEEPC_OPS_CPU_ACTIVATION_H

#include "cpu/exp.h"
#include "ref/activation.h"

typedef struct v_logistics {
  vf at, rest;
} v_logistics;
DC_INLINE v_logistics v_logistic2(vf x) {
  const vf one = v_set1(1.0f), e = v_exp_nonpos(v_sub(v_set1(-0.0f), v_abs(x))), q = v_div(one, v_add(one, e));
  const vf eq = v_mul(e, q);
  return (v_logistics){v_by_sign(x, eq, q), v_by_sign(x, q, eq)};
}
DC_INLINE vf v_logistic(vf x) { return v_logistic2(x).at; }

DC_INLINE vf v_gelu_lookup(const float t[6][16], vf x) {
  const vf a = v_min(v_set1(DC__GELU_MOST), v_abs(x));
  const vi n = v_round(v_mul(a, v_set1(DC__GELU_PER_STEP)));
  const vf r = v_fma(vi_float(n), v_set1(-DC__GELU_STEP), a);
  vf p = v_fma(v_lookup(t[5], n), r, v_lookup(t[4], n));
  p = v_fma(p, r, v_lookup(t[3], n));
  p = v_fma(p, r, v_lookup(t[2], n));
  p = v_fma(p, r, v_lookup(t[1], n));
  p = v_fma(p, r, v_lookup(t[0], n));
  return v_by_sign(x, p, v_sub(v_set1(1.0f), p));
}

DC_INLINE vf v_silu_slope(vf x, v_logistics s) { return v_mul(s.at, v_fma(x, s.rest, v_set1(1.0f))); }

DC_INLINE vf v_gelu_inner(vf x) {
  return v_mul(v_set1(DC__SQRT_8_PI), v_fma(v_mul(v_set1(DC__GELU_CUBE), v_mul(x, x)), x, x));
}
DC_INLINE vf v_gelu_inner_slope(vf x) {
  return v_mul(v_set1(DC__SQRT_8_PI), v_fma(v_set1(DC__GELU_CUBE_3), v_mul(x, x), v_set1(1.0f)));
}

DC_INLINE vf v_gelu(vf x, int form) {
  return v_mul(x, form == DC_GELU_TANH ? v_logistic(v_gelu_inner(x)) : v_gelu_lookup(dc__gelu_tail, x));
}
DC_INLINE vf v_gelu_slope(vf x, int form) {
  if (form == DC_GELU_TANH) {
    const v_logistics s = v_logistic2(v_gelu_inner(x));
    return v_mul(s.at, v_fma(x, v_mul(s.rest, v_gelu_inner_slope(x)), v_set1(1.0f)));
  }
  return v_gelu_lookup(dc__gelu_slope_tail, x);
}

#endif
