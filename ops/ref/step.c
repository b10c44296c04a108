/* step.c: scalar reference of dc_step, elements [begin, end) of one tensor; dc_adamw's rule is in adamw.c. */
#include "ref/rules.h"

void dc__step_scalar(const dc_step_args *t, const dc__step_coef *c, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const float g = c->grad_scale * dc__get(t->grad, t->grad_dtype, i);
    float s = t->state[0] ? dc__get(t->state[0], t->state_dtype, i) : 0.0f;
    const float p = dc__rule_step(t, c, dc__get(t->param, t->param_dtype, i), g, t->state[0] ? &s : NULL);
    if (t->state[0]) dc__put(t->state[0], t->state_dtype, i, s);
    dc__put(t->param, t->param_dtype, i, p);
    if (t->lowp) dc__put(t->lowp, t->lowp_dtype, i, p);
  }
}
