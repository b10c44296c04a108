/* rules.h: a vector's step of the rules with one state (Lion, Adagrad, SGD), and of LAMB (ref/rules.h). */
#ifndef DEEPC_OPS_CPU_RULES_H
#define DEEPC_OPS_CPU_RULES_H

#include "cpu/vec.h"

typedef struct rule_scalars {
  vf decay, l2, rate, minus_rate, b1, one_minus_b1, b2, one_minus_b2, eps, least;
} rule_scalars;

DC_INLINE rule_scalars rule_scalars_of(const dc__step_coef *c) {
  return (rule_scalars){v_set1(c->decay), v_set1(c->l2),           v_set1(c->rate), v_set1(-c->rate),
                        v_set1(c->b1),    v_set1(c->one_minus_b1), v_set1(c->b2),   v_set1(c->one_minus_b2),
                        v_set1(c->eps),   v_set1(0x1p-149f)};
}

/* What a loop may know of a rule at compile time. */
typedef struct rule_of {
  int rule, has_state, has_l2, nesterov;
} rule_of;

/* p after the step; *s is the rule's state; g: with grad_scale. */
DC_INLINE vf rule_step(rule_of of, const rule_scalars *c, vf p, vf g, vf *s) {
  if (of.rule == DC_RULE_LION) {
    const vf u = v_fma(c->b1, *s, v_mul(c->one_minus_b1, g));
    const vf move = v_zero_below(v_by_sign(u, c->rate, c->minus_rate), v_abs(u), c->least);
    *s = v_fma(c->b2, *s, v_mul(c->one_minus_b2, g));
    return v_nan_of(v_add(v_mul(p, c->decay), move), u);
  }
  if (of.has_l2) g = v_fma(c->l2, p, g);
  if (of.rule == DC_RULE_ADAGRAD) {
    *s = v_add(*s, v_mul(g, g));
    return v_add(p, v_div(v_mul(c->rate, g), v_add(v_sqrt(*s), c->eps)));
  }
  if (of.has_state) {
    *s = v_fma(c->one_minus_b2, g, v_mul(c->b1, *s));
    g = of.nesterov ? v_fma(c->b1, *s, g) : *s;
  }
  return v_fma(c->rate, g, p);
}

typedef struct lamb_scalars {
  vf grad_scale, one_minus_b1, b2, one_minus_b2, inv_bc1, inv_sqrt_bc2, eps, weight_decay, rate;
} lamb_scalars;

DC_INLINE lamb_scalars lamb_scalars_of(const dc__lamb_coef *c) {
  return (lamb_scalars){v_set1(c->grad_scale),   v_set1(c->one_minus_b1), v_set1(c->b2),
                        v_set1(c->one_minus_b2), v_set1(c->inv_bc1),      v_set1(c->inv_sqrt_bc2),
                        v_set1(c->eps),          v_set1(c->weight_decay), v_set1(c->rate)};
}

/* LAMB's step before lr and ratio; m, v: the new moments. */
DC_INLINE vf rule_lamb(const lamb_scalars *c, vf p, vf m, vf v) {
  return v_fma(c->weight_decay, p, v_div(v_mul(m, c->inv_bc1), v_fma(v_sqrt(v), c->inv_sqrt_bc2, c->eps)));
}

typedef struct lamb_sums {
  vd p, u;
} lamb_sums;

#endif
