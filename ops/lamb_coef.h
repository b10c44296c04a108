/* lamb_coef.h: the fp32 scalars of one tensor's step of LAMB. Made in one place, because the CPU's bodies and the GPU's
 * are promised to give equal bits. */
#ifndef DEEPC_OPS_LAMB_COEF_H
#define DEEPC_OPS_LAMB_COEF_H

#include <math.h>

#include "ops.h"

/* apply: of dc_lamb_apply; dc_lamb_moments does not look at the rate. */
static inline dc__lamb_coef dc__lamb_coef_of(const dc_lamb_args *t, int apply) {
  const double bc1 = 1.0 - pow(t->beta1, (double)t->step), bc2 = 1.0 - pow(t->beta2, (double)t->step);
  dc__lamb_coef c;
  c.grad_scale = (float)t->grad_scale;
  c.one_minus_b1 = (float)(1.0 - t->beta1);
  c.b2 = (float)t->beta2;
  c.one_minus_b2 = (float)(1.0 - t->beta2);
  c.inv_bc1 = (float)(1.0 / bc1);
  c.inv_sqrt_bc2 = (float)(1.0 / sqrt(bc2));
  c.eps = (float)t->eps;
  c.weight_decay = (float)t->weight_decay;
  c.rate = apply ? (float)-(t->lr * t->trust) : 0.0f;
  return c;
}

#endif
