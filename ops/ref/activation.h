/* activation.h: the logistic function and the normal distribution in fp32, in portable C, and the activations made of
 * them: the meaning of what cpu/activation.h and cuda/fused.cuh compute, operation for operation. Errors against the
 * exact value, found by tests/c/test_fused.cpp (ulp of the fp32 result):
 *
 *   dc__logistic  3 ulp for x >= -87; 0 below, where it is under 2^-125
 *   dc__normal    4 ulp for x >= -2; 2^-25 absolute below (as much is lost where 0.5 * (1 + erf(x / sqrt 2)) is
 *                 computed in fp32); 0 below -6.1
 *   dc__normal_slope  2^-23 absolute
 *
 * The polynomials are minimax fits of our own (iteratively reweighted least squares on Chebyshev nodes). */
#ifndef DEEPC_OPS_ACTIVATION_H
#define DEEPC_OPS_ACTIVATION_H

#include "ref/exp.h"

#define DC__SQRT_8_PI 1.59576912f /* 2 sqrt(2/pi) */
#define DC__GELU_CUBE 0.044715f
#define DC__GELU_CUBE_3 0.134145f

/* 1 / (1 + exp(-x)) and one minus it, neither of which cancels: exp of what is not positive, and one division. */
typedef struct dc__logistics {
  float at, rest;
} dc__logistics;
static inline dc__logistics dc__logistic2(float x) {
  const float e = dc__exp_nonpos(-fabsf(x)), q = 1.0f / (1.0f + e);
  return signbit(x) ? (dc__logistics){e * q, q} : (dc__logistics){q, e * q};
}
static inline float dc__logistic(float x) { return dc__logistic2(x).at; }

/* Of GELU by the normal distribution P, for a >= 0: the tail P(-a) and the slope P(-a) - a P'(-a), as 15 polynomials of
 * degree 5 around n * DC__GELU_STEP, n = 0 to 14; from there on both are 0. Row k: the coefficients of the k-th power.
 * The tail is fitted for its relative, the slope for its absolute error. Sixteen columns are one register: a lookup is
 * one instruction. exp and a division instead (Abramowitz & Stegun 7.1.26, longer) keep relative precision down to the
 * last tail, and took twice the time. */
#define DC__GELU_STEP 0.40625f
#define DC__GELU_PER_STEP 2.46153846f
#define DC__GELU_MOST (15.0f * DC__GELU_STEP)
#define DC__GELU_TAIL                                                                                               \
  {                                                                                                                 \
      {0.5f, 0.342279464f, 0.2082524f, 0.111469552f, 0.0520812757f, 0.0211148169f, 0.00739460578f, 0.00222930079f,  \
       0.000577025348f, 0.000127966123f, 2.42750812e-05f, 3.9339352e-06f, 5.44050522e-07f, 6.41542854e-08f,         \
       6.44586118e-09f, 0.0f},                                                                                      \
      {-0.398942262f, -0.367343396f, -0.286786646f, -0.189832285f, -0.106538296f, -0.0506950915f, -0.0204526894f,   \
       -0.00699614687f, -0.00202904083f, -0.000498936337f, -0.000104020881f, -1.8387178e-05f, -2.75566299e-06f,     \
       -3.50147076e-07f, -3.77210903e-08f, 0.0f},                                                                   \
      {-5.49676997e-07f, 0.0746140257f, 0.116504394f, 0.115678325f, 0.0865633115f, 0.0514883697f, 0.0249272678f,    \
       0.00994766224f, 0.00329704117f, 0.000912001298f, 0.000211239283f, 4.10665416e-05f, 6.71263706e-06f,          \
       9.23770415e-07f, 1.07138881e-07f, 0.0f},                                                                     \
      {0.0665009394f, 0.0511152595f, 0.0162405968f, -0.0153555851f, -0.0291285198f, -0.0264088959f, -0.0168428868f, \
       -0.00826372206f, -0.00323452451f, -0.00102905545f, -0.000269066019f, -5.82327593e-05f, -1.04832761e-05f,     \
       -1.57537454e-06f, -1.98142047e-07f, 0.0f},                                                                   \
      {-8.74447433e-05f, -0.0174579266f, -0.0225419588f, -0.0145543525f, -0.00265673618f, 0.00475108391f,           \
       0.0060716616f, 0.00421597995f, 0.00208922359f, 0.000797047745f, 0.000241987451f, 5.95245911e-05f,            \
       1.19935567e-05f, 1.99389933e-06f, 2.74901396e-07f, 0.0f},                                                    \
      {-0.00969061721f, -0.0061269491f, 0.00129599147f, 0.00582052581f, 0.00513691595f, 0.0019462232f,              \
       -0.000465126621f, -0.0011486084f, -0.000850605313f, -0.000412285764f, -0.000148522711f, -4.17397387e-05f,    \
       -9.37667664e-06f, -1.70836995e-06f, -2.54824187e-07f, 0.0f},                                                 \
  }
#define DC__GELU_SLOPE_TAIL                                                                                            \
  {                                                                                                                    \
      {0.5f, 0.193046227f, -0.0247617364f, -0.119888552f, -0.121043429f, -0.0818595365f, -0.0424587838f,               \
       -0.0176659897f, -0.0060173776f, -0.00169629033f, -0.000398321718f, -7.82386778e-05f, -1.28913271e-05f,          \
       -1.78542564e-06f, -2.08162731e-07f, 0.0f},                                                                      \
      {-0.797884464f, -0.674060822f, -0.384249389f, -0.09769696f, 0.0682510734f, 0.107776545f, 0.0806123167f,          \
       0.042584952f, 0.0173737165f, 0.00567205111f, 0.00150874956f, 0.000330431212f, 5.99851446e-05f, 9.06756668e-06f, \
       1.14510044e-06f, 0.0f},                                                                                         \
      {-4.18160153e-06f, 0.286131918f, 0.389099032f, 0.290893704f, 0.117681779f, -0.00647931965f, -0.0483930148f,      \
       -0.0406577997f, -0.0216394849f, -0.00854527857f, -0.00264189811f, -0.00065598503f, -0.000132712914f,            \
       -2.20750899e-05f, -3.03749744e-06f, 0.0f},                                                                      \
      {0.266043007f, 0.175825655f, -0.00884528738f, -0.132591948f, -0.133375496f, -0.0664006472f, -0.00780787226f,     \
       0.0149131408f, 0.014078984f, 0.00741248624f, 0.00278883451f, 0.000805958756f, 0.000184802106f, 3.42249587e-05f, \
       5.17630133e-06f, 0.0f},                                                                                         \
      {-0.000682465383f, -0.0995118245f, -0.107424721f, -0.0373863168f, 0.0286686029f, 0.044015862f, 0.0250541139f,    \
       0.00477692159f, -0.00357328588f, -0.00375460787f, -0.00192644796f, -0.000684555736f, -0.000184096265f,          \
       -3.89245106e-05f, -6.60513069e-06f, 0.0f},                                                                      \
      {-0.0576125272f, -0.0303607155f, 0.0210158993f, 0.0402020961f, 0.0208362471f, -0.0038698127f, -0.0117935147f,    \
       -0.00717285834f, -0.00150011003f, 0.000777918031f, 0.000828770164f, 0.000398460776f, 0.000130223692f,           \
       3.18928687e-05f, 6.09985091e-06f, 0.0f},                                                                        \
  }
static const float dc__gelu_tail[6][16] = DC__GELU_TAIL, dc__gelu_slope_tail[6][16] = DC__GELU_SLOPE_TAIL;

static inline float dc__gelu_lookup(const float t[6][16], float x) {
  const float a = dc__min_f32(DC__GELU_MOST, fabsf(x)), n = rintf(a * DC__GELU_PER_STEP),
              r = fmaf(n, -DC__GELU_STEP, a);
  const int at = n == n ? (int)n : 0;
  float p = fmaf(t[5][at], r, t[4][at]);
  p = fmaf(p, r, t[3][at]);
  p = fmaf(p, r, t[2][at]);
  p = fmaf(p, r, t[1][at]);
  p = fmaf(p, r, t[0][at]);
  return signbit(x) ? p : 1.0f - p;
}
static inline float dc__normal(float x) { return dc__gelu_lookup(dc__gelu_tail, x); }
static inline float dc__normal_slope(float x) { return dc__gelu_lookup(dc__gelu_slope_tail, x); }

/* ---- activations of one number ----------------------------------------------------------------------------------- */
static inline float dc__silu_slope(float x, dc__logistics s) { return s.at * fmaf(x, s.rest, 1.0f); }

/* 2u of the tanh form of GELU, and d(2u)/dx. */
static inline float dc__gelu_inner(float x) { return DC__SQRT_8_PI * fmaf(DC__GELU_CUBE * (x * x), x, x); }
static inline float dc__gelu_inner_slope(float x) { return DC__SQRT_8_PI * fmaf(DC__GELU_CUBE_3, x * x, 1.0f); }

static inline float dc__gelu_f32(float x, int form) {
  return x * (form == DC_GELU_TANH ? dc__logistic(dc__gelu_inner(x)) : dc__normal(x));
}
static inline float dc__gelu_slope(float x, int form) {
  if (form == DC_GELU_TANH) {
    const dc__logistics s = dc__logistic2(dc__gelu_inner(x));
    return s.at * fmaf(x, s.rest * dc__gelu_inner_slope(x), 1.0f);
  }
  return dc__normal_slope(x);
}

/* ---- sums over a row --------------------------------------------------------------------------------------------- */
/* The 64 accumulators combined as fused.h says. Destroys a. */
static inline float dc__tree64(float *a) {
  for (int j = 0; j < 16; j++) a[j] = (a[j] + a[16 + j]) + (a[32 + j] + a[48 + j]);
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; j++) a[j] += a[j + width];
  return a[0];
}

#endif
