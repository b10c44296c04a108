/* packed.c: scalar reference of dc_step where states have a format, elements [begin, end) of one tensor: whole blocks,
 * but for the tensor's first and last. */
#include "ref/packed.h"
#include "ref/rules.h"

typedef struct packed_states {
  float x[2][DC__BLOCK_MOST];
  uint32_t noise[2][DC__BLOCK_MOST];
} packed_states;

static void packed_get(const dc_step_args *t, int state, int64_t begin, int64_t end, float *x) {
  const float keep = dc__packed_keep(t->rule, t->beta1, t->beta2, state);
  if (t->format == DC_STATE_STOCHASTIC) {
    for (int64_t i = begin; i < end; i++) x[i - begin] = keep * dc__get(t->state[state], DC_BF16, i);
    return;
  }
  const dc__code_map map = dc__state_map(t, state);
  const float scale = keep * t->scale[state][dc__state_block_at(t->format, t->first, begin)];
  for (int64_t i = begin; i < end; i++) x[i - begin] = dc__code_get(&map, t->state[state], i) * scale;
}

static void packed_put(const dc_step_args *t, int state, int64_t begin, int64_t end, const packed_states *s) {
  if (t->format == DC_STATE_STOCHASTIC) {
    for (int64_t i = begin; i < end; i++)
      ((uint16_t *)t->state[state])[i] = dc__bf16_stochastic(s->x[state][i - begin], s->noise[state][i - begin]);
    return;
  }
  const dc__code_map map = dc__state_map(t, state);
  float *scale = &t->scale[state][dc__state_block_at(t->format, t->first, begin)];
  dc__codes_put(&map, t->state[state], scale, s->x[state], begin, end, s->noise[state]);
}

/* m, v: multiplied with their decay already. */
static float packed_adamw(const dc__adamw_coef *c, float p, float g, float *m, float *v) {
  if (c->l2 != 0.0f) g = fmaf(c->l2, p, g);
  p = p * c->decay;
  *m = fmaf(c->one_minus_b1, g, *m);
  *v = fmaf(c->one_minus_b2, g * g, *v);
  return fmaf(c->step_size_neg, *m / fmaf(sqrtf(*v), c->inv_sqrt_bc2, c->eps), p);
}

/* LAMB's step before the ratio; m, v as above. */
static float packed_lamb(const dc__lamb_coef *c, float p, float g, float *m, float *v) {
  *m = fmaf(c->one_minus_b1, g, *m);
  *v = fmaf(c->one_minus_b2, g * g, *v);
  return dc__rule_lamb(c, p, *m, *v);
}

static float packed_grad(const dc_step_args *t, const dc__packed_coef *c, int64_t i) {
  const float scale = t->rule == DC_RULE_ADAMW   ? c->adamw.grad_scale
                      : t->rule == DC__RULE_LAMB ? c->lamb.grad_scale
                                                 : c->other.grad_scale;
  return scale * dc__get(t->grad, t->grad_dtype, i);
}

/* p after the step; v: of the rules with two states. */
static float packed_rule(const dc_step_args *t, const dc__packed_coef *c, float p, float g, float *m, float *v) {
  switch (t->rule) {
  case DC_RULE_ADAMW: return packed_adamw(&c->adamw, p, g, m, v);
  case DC__RULE_LAMB: return fmaf(c->lamb.rate, packed_lamb(&c->lamb, p, g, m, v), p);
  default: return dc__rule_step(t, &c->other, p, g, m);
  }
}

static void packed_block(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end) {
  const int states = dc__packed_states(t->rule);
  const int bits = t->format == DC_STATE_STOCHASTIC ? DC__BF16_NOISE : dc__state_map(t, 0).shift;
  packed_states s;
  for (int k = 0; k < states; k++) packed_get(t, k, begin, end, s.x[k]);
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i - begin;
    const float g = packed_grad(t, c, i);
    const float p = packed_rule(t, c, dc__get(t->param, t->param_dtype, i), g, &s.x[0][at], &s.x[1][at]);
    dc__put(t->param, t->param_dtype, i, p);
    if (t->lowp) dc__put(t->lowp, t->lowp_dtype, i, p);
    for (int k = 0; k < states; k++)
      s.noise[k][at] = dc__noise(dc__keys_of(t->step, t->first + begin), k, bits, (uint32_t)(t->first + i));
  }
  for (int k = 0; k < states; k++) packed_put(t, k, begin, end, &s);
}

void dc__step_packed_scalar(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end) {
  for (int64_t i = begin, stop; i < end; i = stop) {
    stop = dc__state_block_end(t->format, t->first, i, end);
    packed_block(t, c, i, stop);
  }
}

void dc__lamb_packed_sums_scalar(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end,
                                 double *sums, double *update_sums) {
  double ps[16] = {0}, us[16] = {0};
  packed_states s;
  for (int64_t at = begin, stop; at < end; at = stop) {
    stop = dc__state_block_end(t->format, t->first, at, end);
    for (int k = 0; k < 2; k++) packed_get(t, k, at, stop, s.x[k]);
    for (int64_t i = at; i < stop; i++) {
      const float p = dc__get(t->param, t->param_dtype, i), g = packed_grad(t, c, i);
      const float u = packed_lamb(&c->lamb, p, g, &s.x[0][i - at], &s.x[1][i - at]);
      ps[(i - begin) % 16] = fma((double)p, (double)p, ps[(i - begin) % 16]);
      us[(i - begin) % 16] = fma((double)u, (double)u, us[(i - begin) % 16]);
    }
  }
  *sums = dc__tree16(ps);
  *update_sums = dc__tree16(us);
}
