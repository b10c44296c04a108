/* exp.h: e^x for x <= 0 in fp32, in operations that every instruction set repeats bit for bit (cpu/exp.h's
 * v_exp_nonpos).
 *
 * x = n ln 2 + r with n an integer and |r| <= ln 2 / 2 (ln 2 in two parts, so that r is exact to fp32's last place),
 * then e^x = 2^n p(r). p is a polynomial of degree 6 with p(0) = p'(0) = 1, fitted for the smallest largest relative
 * error (Lawson's weights): 3.1e-9, and 1.3 units of 2^-24 after fp32's roundings, on all of [-87, 0]. Below -87,
 * where e^x nears fp32's denormals, the result is 0. NaN stays NaN. A positive x up to rounding noise is fine; it
 * must stay below 88. */
#ifndef DEEPC_OPS_EXP_H
#define DEEPC_OPS_EXP_H

#include "ref/scalar.h"

#define DC__EXP_LOWEST (-87.0f)
#define DC__EXP_LOG2E 0x1.715476p+0f
#define DC__EXP_LN2_HI 0x1.62e4p-1f
#define DC__EXP_LN2_LO 0x1.7f7d1cp-20f
/* Adding it rounds to an integer (nearest even), which the lowest bits of the sum then hold. */
#define DC__EXP_ROUND 0x1.8p+23f
#define DC__EXP_P2 0x1.fffffcp-2f
#define DC__EXP_P3 0x1.555492p-3f
#define DC__EXP_P4 0x1.5558f2p-5f
#define DC__EXP_P5 0x1.123a2p-7f
#define DC__EXP_P6 0x1.6a23dp-10f

static inline float dc__exp_nonpos(float x) {
  const float shifted = fmaf(x, DC__EXP_LOG2E, DC__EXP_ROUND), n = shifted - DC__EXP_ROUND;
  const float r = fmaf(n, -DC__EXP_LN2_LO, fmaf(n, -DC__EXP_LN2_HI, x));
  float p = fmaf(DC__EXP_P6, r, DC__EXP_P5);
  p = fmaf(p, r, DC__EXP_P4);
  p = fmaf(p, r, DC__EXP_P3);
  p = fmaf(p, r, DC__EXP_P2);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  if (x < DC__EXP_LOWEST) return 0.0f;
  return p * dc__f32_of_bits((dc__bits_of_f32(shifted) << 23) + 0x3f800000u); /* 2^n: n moves into the exponent */
}

#endif
