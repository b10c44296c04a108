/* step.c: scalar reference of dc_step, elements [begin, end) of one tensor; dc_adamw's rule is in adamw.c. */
#include "ref/scalar.h"

/* p after a step of Lion; *m is its state. */
static float step_lion(const dc__step_coef *c, float p, float g, float *m) {
  const float u = fmaf(c->b1, *m, c->one_minus_b1 * g);
  *m = fmaf(c->b2, *m, c->one_minus_b2 * g);
  if (u != u) return u;
  return p * c->decay + (u == 0.0f ? 0.0f : u < 0.0f ? c->rate : -c->rate);
}

static float step_adagrad(const dc__step_coef *c, float p, float g, float *sum) {
  if (c->l2 != 0.0f) g = fmaf(c->l2, p, g);
  *sum = *sum + g * g;
  return p + c->rate * g / (sqrtf(*sum) + c->eps);
}

/* buffer: NULL without momentum. */
static float step_sgd(const dc__step_coef *c, float p, float g, float *buffer, int nesterov) {
  if (c->l2 != 0.0f) g = fmaf(c->l2, p, g);
  if (buffer) {
    *buffer = fmaf(c->one_minus_b2, g, c->b1 * *buffer);
    g = nesterov ? fmaf(c->b1, *buffer, g) : *buffer;
  }
  return fmaf(c->rate, g, p);
}

void dc__step_scalar(const dc_step_args *t, const dc__step_coef *c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const float g = c->grad_scale * dc__get(t->grad, t->grad_dtype, i);
    float p = dc__get(t->param, t->param_dtype, i), s = t->state[0] ? dc__get(t->state[0], t->state_dtype, i) : 0.0f;
    switch (t->rule) {
    case DC_RULE_LION: p = step_lion(c, p, g, &s); break;
    case DC_RULE_ADAGRAD: p = step_adagrad(c, p, g, &s); break;
    default: p = step_sgd(c, p, g, t->state[0] ? &s : NULL, (t->flags & DC_STEP_NESTEROV) != 0); break;
    }
    if (t->state[0]) dc__put(t->state[0], t->state_dtype, i, s);
    dc__put(t->param, t->param_dtype, i, p);
    if (t->lowp) dc__put(t->lowp, t->lowp_dtype, i, p);
  }
}
