/* adafactor_coef.h: the fp32 scalars of one tensor's step of Adafactor. Made in one place, because the CPU's bodies and
 * the GPU's are promised to give equal bits. */
#ifndef DEEPC_OPS_ADAFACTOR_COEF_H
#define DEEPC_OPS_ADAFACTOR_COEF_H

#include "ref/scalar.h"

DC__ANYWHERE dc__adafactor_coef dc__adafactor_coef_of(const dc_adafactor_args *t) {
  dc__adafactor_coef c;
  c.grad_scale = (float)t->grad_scale;
  c.weight = (float)t->weight;
  c.least = (float)(t->eps * t->eps);
  c.keep = (float)t->keep;
  c.rate = (float)-t->rate;
  return c;
}

#endif
