/* scalar.h: one element of each floating dtype to and from binary32, in portable C. The meaning of every conversion of
 * the ops is here; the vector bodies repeat it.
 *
 * NaN: whatever arithmetic made or passed on is stored as the one canonical quiet NaN of the dtype (sign 0, payload 0).
 * Hardware propagates payload and sign by operand order, which compilers swap; the canonical NaN makes results equal
 * bit for bit on every instruction set. Assumes round to nearest even and denormals on (dispatch.c sets both). */
#ifndef DEEPC_OPS_SCALAR_H
#define DEEPC_OPS_SCALAR_H

#include <math.h>
#include <string.h>

#include "ops.h"

#define DC__NAN_F32 0x7fc00000u
#define DC__NAN_BF16 0x7fc0u
#define DC__NAN_F16 0x7e00u
#define DC__NAN_F64 0x7ff8000000000000ull

/* Functions that are alike on the CPU and in CUDA kernels. */
#if defined(__CUDACC__)
#define DC__ANYWHERE __host__ __device__ static inline
#else
#define DC__ANYWHERE static inline
#endif

DC__ANYWHERE uint32_t dc__bits_of_f32(float f) {
  uint32_t u;
  memcpy(&u, &f, sizeof u);
  return u;
}

DC__ANYWHERE float dc__f32_of_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

DC__ANYWHERE float dc__canonical_f32(float f) { return f != f ? dc__f32_of_bits(DC__NAN_F32) : f; }

static inline double dc__canonical_f64(double d) {
  const uint64_t nan = DC__NAN_F64;
  if (d != d) memcpy(&d, &nan, sizeof d);
  return d;
}

static inline float dc__f32_of_bf16(uint16_t h) { return dc__f32_of_bits((uint32_t)h << 16); }

static inline uint16_t dc__bf16_of_f32(float f) {
  const uint32_t u = dc__bits_of_f32(f);
  if (f != f) return DC__NAN_BF16;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16); /* a carry out of the mantissa rounds up to infinity */
}

static inline float dc__f32_of_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 0x1f) return dc__f32_of_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return dc__f32_of_bits(sign | dc__bits_of_f32((float)mantissa * 0x1p-24f)); /* denormal: exact */
  return dc__f32_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t dc__f16_of_f32(float f) {
  uint32_t u = dc__bits_of_f32(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return DC__NAN_F16;
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and up round to infinity */
  if (u < 0x38800000u) { /* below 2^-14: 0.5f has the spacing of fp16 denormals, so the addition rounds to it */
    const float sum = dc__f32_of_bits(u) + 0.5f;
    return (uint16_t)(sign | (dc__bits_of_f32(sum) - 0x3f000000u));
  }
  u += 0xfffu + ((u >> 13) & 1u);
  return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
}

/* float(p[i]) of dtype dt: fp32, bf16 or fp16. */
static inline float dc__get(const void *p, int dt, int64_t i) {
  switch (dt) {
  case DC_F32: return ((const float *)p)[i];
  case DC_BF16: return dc__f32_of_bf16(((const uint16_t *)p)[i]);
  default: return dc__f32_of_f16(((const uint16_t *)p)[i]);
  }
}

/* p[i] = round_to(dt, f). */
static inline void dc__put(void *p, int dt, int64_t i, float f) {
  switch (dt) {
  case DC_F32: ((float *)p)[i] = dc__canonical_f32(f); return;
  case DC_BF16: ((uint16_t *)p)[i] = dc__bf16_of_f32(f); return;
  default: ((uint16_t *)p)[i] = dc__f16_of_f32(f); return;
  }
}

/* The larger (smaller) of a and b; NaN if either is; b where they compare equal (which only shows for zeros of both
 * signs). */
static inline float dc__max_f32(float a, float b) { return a != a || a > b ? a : b; }
static inline float dc__min_f32(float a, float b) { return a != a || a < b ? a : b; }
static inline double dc__max_f64(double a, double b) { return a != a || a > b ? a : b; }
static inline double dc__min_f64(double a, double b) { return a != a || a < b ? a : b; }

/* ---- scales of quantised blocks (ops.h) -------------------------------------------------------------------------- */
#define DC__INF_F32 0x7f800000u
/* Below this largest magnitude the reciprocal of a scale would leave fp32's normal range. */
#define DC__TINY_F32 0x1p-100f

typedef struct dc__levels {
  float scale, inverse; /* multiplied with a code; with a value, before it is rounded to a code */
} dc__levels;

/* top: the bits of the largest |v| of the block. */
static inline dc__levels dc__levels_of(uint32_t top, int bits) {
  const float most = bits == 8 ? 127.0f : 7.0f, largest = dc__f32_of_bits(top);
  if (top >= DC__INF_F32) return (dc__levels){dc__f32_of_bits(DC__NAN_F32), 0.0f};
  if (largest < DC__TINY_F32) return (dc__levels){0.0f, 0.0f};
  const float scale = largest / most; /* rounded up, the largest fp32 would come back as an infinity */
  return (dc__levels){most * scale < HUGE_VALF ? scale : dc__f32_of_bits(dc__bits_of_f32(scale) - 1), most / largest};
}

/* sum: of |v| over the n elements of the block. */
static inline float dc__sign_scale(double sum, int64_t n) {
  return sum < HUGE_VAL ? (float)(sum / (double)n) : dc__f32_of_bits(DC__NAN_F32);
}

/* 16 accumulators, combined as ops.h says: (0+8), (1+9) .., then +4, +2, +1. Destroys a. */
static inline double dc__tree16(double *a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) a[i] += a[i + width];
  return dc__canonical_f64(a[0]);
}

/* 32 accumulators, combined as ops.h says: first to 16, then these. Destroys a. */
static inline double dc__tree32_f64(double *a) {
  for (int j = 0; j < 16; j++) a[j] += a[16 + j];
  return dc__tree16(a);
}

#define DC_OP(name, params) void dc__##name##_scalar params;
#include "ops.def"
#undef DC_OP

#endif
