/* step_coef.h: the fp32 scalars of one tensor's step of a rule (dc_step). Made in one place, because the CPU's bodies
 * and the GPU's are promised to give equal bits. */
#ifndef DEEPC_OPS_STEP_COEF_H
#define DEEPC_OPS_STEP_COEF_H

#include "ops.h"

static inline dc__step_coef dc__step_coef_of(const dc_step_args *t) {
  const int lion = t->rule == DC_RULE_LION, first = t->rule == DC_RULE_SGD && t->step == 1;
  dc__step_coef c;
  c.grad_scale = (float)t->grad_scale;
  c.decay = lion ? (float)(1.0 - t->lr * t->weight_decay) : 1.0f;
  c.l2 = lion ? 0.0f : (float)t->weight_decay;
  c.rate = lion ? (float)t->lr : (float)-t->lr;
  c.b1 = (float)t->beta1;
  c.one_minus_b1 = (float)(1.0 - t->beta1);
  c.b2 = (float)t->beta2;
  c.one_minus_b2 = first ? 1.0f : (float)(1.0 - t->beta2);
  c.eps = (float)t->eps;
  return c;
}

#endif
