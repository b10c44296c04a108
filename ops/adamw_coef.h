/* adamw_coef.h: the fp32 scalars of one tensor's AdamW step. Made in one place, because the CPU's bodies and the GPU's
 * are promised to give equal bits. */
#ifndef DEEPC_OPS_ADAMW_COEF_H
#define DEEPC_OPS_ADAMW_COEF_H

#include <math.h>

#include "ops.h"

static inline dc__adamw_coef dc__adamw_coef_of(const dc_adamw_args *t) {
  const int decoupled = (t->flags & DC_ADAMW_DECOUPLED) != 0;
  const double bc1 = 1.0 - pow(t->beta1, (double)t->step), bc2 = 1.0 - pow(t->beta2, (double)t->step);
  dc__adamw_coef c;
  c.grad_scale = (float)t->grad_scale;
  c.one_minus_b1 = (float)(1.0 - t->beta1);
  c.b2 = (float)t->beta2;
  c.one_minus_b2 = (float)(1.0 - t->beta2);
  c.decay = decoupled ? (float)(1.0 - t->lr * t->weight_decay) : 1.0f;
  c.step_size_neg = (float)-(t->lr / bc1);
  c.inv_sqrt_bc2 = (float)(1.0 / sqrt(bc2));
  c.eps = (float)t->eps;
  c.l2 = decoupled ? 0.0f : (float)t->weight_decay;
  return c;
}

#endif
