/* rules.h: one element's step in portable C, of the rules with one state (Lion, Adagrad, SGD) and of LAMB (formulas:
 * ops.h). Whatever states are stored as, this is what is done of them. */
#ifndef DEEPC_OPS_RULES_H
#define DEEPC_OPS_RULES_H

#include "ref/scalar.h"

/* p after a step of Lion; *m is its state. */
static inline float dc__rule_lion(const dc__step_coef *c, float p, float g, float *m) {
  const float u = fmaf(c->b1, *m, c->one_minus_b1 * g);
  *m = fmaf(c->b2, *m, c->one_minus_b2 * g);
  if (u != u) return u;
  return p * c->decay + (u == 0.0f ? 0.0f : u < 0.0f ? c->rate : -c->rate);
}

static inline float dc__rule_adagrad(const dc__step_coef *c, float p, float g, float *sum) {
  if (c->l2 != 0.0f) g = fmaf(c->l2, p, g);
  *sum = *sum + g * g;
  return p + c->rate * g / (sqrtf(*sum) + c->eps);
}

/* buffer: NULL without momentum. */
static inline float dc__rule_sgd(const dc__step_coef *c, float p, float g, float *buffer, int nesterov) {
  if (c->l2 != 0.0f) g = fmaf(c->l2, p, g);
  if (buffer) {
    *buffer = fmaf(c->one_minus_b2, g, c->b1 * *buffer);
    g = nesterov ? fmaf(c->b1, *buffer, g) : *buffer;
  }
  return fmaf(c->rate, g, p);
}

/* p after a step of t's rule; state: NULL where it has none; g: with grad_scale. */
static inline float dc__rule_step(const dc_step_args *t, const dc__step_coef *c, float p, float g, float *state) {
  switch (t->rule) {
  case DC_RULE_LION: return dc__rule_lion(c, p, g, state);
  case DC_RULE_ADAGRAD: return dc__rule_adagrad(c, p, g, state);
  default: return dc__rule_sgd(c, p, g, state, (t->flags & DC_STEP_NESTEROV) != 0);
  }
}

/* LAMB's step before lr and ratio; m, v: the new moments. */
static inline float dc__rule_lamb(const dc__lamb_coef *c, float p, float m, float v) {
  return fmaf(c->weight_decay, p, m * c->inv_bc1 / fmaf(sqrtf(v), c->inv_sqrt_bc2, c->eps));
}

#endif
