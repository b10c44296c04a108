/* step.c: bodies of dc_step, one pass over memory: Lion, Adagrad and SGD. As in adamw.c the usual layouts (fp32 masters
 * and states) are constants of their loop, and all others share one loop a rule that asks for the dtype at every
 * vector. tests/bench/bench_ops.c --only step. */
#include "cpu/rules.h"

/* What a loop may know at compile time. */
typedef struct layout {
  int param, grad, state, lowp, has_lowp;
  rule_of of;
} layout;

DC_INLINE void step_some(const dc_step_args *t, layout l, vf grad_scale, const rule_scalars *c, int64_t i, int r) {
  vf s = l.of.has_state ? v_get(t->state[0], l.state, i, r) : v_set1(0.0f);
  const vf g = v_mul(grad_scale, v_get(t->grad, l.grad, i, r));
  vf p = rule_step(l.of, c, v_get(t->param, l.param, i, r), g, &s);
  if (DC_UNLIKELY(v_any_nan(v_add(p, s)))) { /* an infinity less another one comes here too, and stays */
    p = v_canonical(p);
    s = v_canonical(s);
  }
  if (l.of.has_state) v_put_canonical(t->state[0], l.state, i, r, s);
  v_put_canonical(t->param, l.param, i, r, p);
  if (l.has_lowp) v_put_canonical(t->lowp, l.lowp, i, r, p);
}

DC_INLINE void step_loop(const dc_step_args *args, layout l, const dc__step_coef *c, int64_t begin, int64_t end) {
  const dc_step_args t = *args; /* a copy that no store can alias */
  const rule_scalars k = rule_scalars_of(c);
  const vf grad_scale = v_set1(c->grad_scale);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    v_ahead(t.param, l.param, i, AHEAD);
    v_ahead(t.grad, l.grad, i, AHEAD);
    if (l.of.has_state) v_ahead(t.state[0], l.state, i, AHEAD);
    step_some(&t, l, grad_scale, &k, i, LANES);
  }
  if (i < end) step_some(&t, l, grad_scale, &k, i, (int)(end - i));
}

/* The loops of a rule: fp32 throughout, with a 16-bit copy, and with 16-bit gradients as well; then all others. */
#define STEP_LOOP(name, rule, grad_dt, low_dt, low)                                             \
  static void name(const dc_step_args *t, const dc__step_coef *c, int64_t begin, int64_t end) { \
    const rule_of of = {rule, 1, rule != DC_RULE_LION && c->l2 != 0.0f,                         \
                        rule == DC_RULE_SGD && (t->flags & DC_STEP_NESTEROV) != 0};             \
    step_loop(t, (layout){DC_F32, grad_dt, DC_F32, low_dt, low, of}, c, begin, end);            \
  }
#define STEP_LOOPS(rule_name, rule)                                                                               \
  STEP_LOOP(step_##rule_name##_f32, rule, DC_F32, 0, 0)                                                           \
  STEP_LOOP(step_##rule_name##_f32_to_bf16, rule, DC_F32, DC_BF16, 1)                                             \
  STEP_LOOP(step_##rule_name##_f32_to_f16, rule, DC_F32, DC_F16, 1)                                               \
  STEP_LOOP(step_##rule_name##_bf16_to_bf16, rule, DC_BF16, DC_BF16, 1)                                           \
  static void step_##rule_name##_any(const dc_step_args *t, const dc__step_coef *c, int64_t begin, int64_t end) { \
    const rule_of of = {rule, t->state[0] != NULL, c->l2 != 0.0f, (t->flags & DC_STEP_NESTEROV) != 0};            \
    const layout l = {t->param_dtype, t->grad_dtype, t->state_dtype, t->lowp_dtype, t->lowp != NULL, of};         \
    step_loop(t, l, c, begin, end);                                                                               \
  }                                                                                                               \
  static void step_##rule_name(const dc_step_args *t, const dc__step_coef *c, int64_t begin, int64_t end) {       \
    const int plain = t->param_dtype == DC_F32 && t->state_dtype == DC_F32 && t->state[0];                        \
    const int g = t->grad_dtype, low = t->lowp ? t->lowp_dtype : -1;                                              \
    if (plain && g == DC_F32 && low == -1) step_##rule_name##_f32(t, c, begin, end);                              \
    else if (plain && g == DC_F32 && low == DC_BF16) step_##rule_name##_f32_to_bf16(t, c, begin, end);            \
    else if (plain && g == DC_F32 && low == DC_F16) step_##rule_name##_f32_to_f16(t, c, begin, end);              \
    else if (plain && g == DC_BF16 && low == DC_BF16) step_##rule_name##_bf16_to_bf16(t, c, begin, end);          \
    else step_##rule_name##_any(t, c, begin, end);                                                                \
  }
STEP_LOOPS(lion, DC_RULE_LION)
STEP_LOOPS(adagrad, DC_RULE_ADAGRAD)
STEP_LOOPS(sgd, DC_RULE_SGD)

void DC_BODY(step)(const dc_step_args *t, const dc__step_coef *c, int64_t begin, int64_t end) {
  switch (t->rule) {
  case DC_RULE_LION: step_lion(t, c, begin, end); return;
  case DC_RULE_ADAGRAD: step_adagrad(t, c, begin, end); return;
  default: step_sgd(t, c, begin, end); return;
  }
}
