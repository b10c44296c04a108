/* exp.h: ref/exp.h in vectors. */
#ifndef DEEPC_OPS_CPU_EXP_H
#define DEEPC_OPS_CPU_EXP_H

#include "cpu/vec.h"
#include "ref/exp.h"

/* e^x, x <= 0: dc__exp_nonpos in vectors. */
DC_INLINE vf v_exp_nonpos(vf x) {
  const vf n = v_sub(v_fma(x, v_set1(DC__EXP_LOG2E), v_set1(DC__EXP_ROUND)), v_set1(DC__EXP_ROUND));
  const vf r = v_fma(n, v_set1(-DC__EXP_LN2_LO), v_fma(n, v_set1(-DC__EXP_LN2_HI), x));
  vf p = v_fma(v_set1(DC__EXP_P6), r, v_set1(DC__EXP_P5));
  p = v_fma(p, r, v_set1(DC__EXP_P4));
  p = v_fma(p, r, v_set1(DC__EXP_P3));
  p = v_fma(p, r, v_set1(DC__EXP_P2));
  p = v_fma(p, r, v_set1(1.0f));
  p = v_fma(p, r, v_set1(1.0f));
  return v_zero_below(v_ldexp(p, n), x, v_set1(DC__EXP_LOWEST));
}

#endif
