/* reduce.c: scalar reference of dc_reduce and dc_reduce_acc. */
#include "ref/scalar.h"

static float reduce_step_f32(int op, float a, float b) {
  switch (op) {
  case DC_RED_MIN: return dc__min_f32(a, b);
  case DC_RED_MAX: return dc__max_f32(a, b);
  case DC_RED_PROD: return a * b;
  default: return a + b;
  }
}

static double reduce_step_f64(int op, double a, double b) {
  switch (op) {
  case DC_RED_MIN: return dc__min_f64(a, b);
  case DC_RED_MAX: return dc__max_f64(a, b);
  case DC_RED_PROD: return a * b;
  default: return a + b;
  }
}

static void reduce_low(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n) {
  const float share = (float)(1.0 / nsrc);
  for (int64_t i = 0; i < n; i++) {
    float s = dc__get(src[0], dt, i);
    for (int k = 1; k < nsrc; k++) s = reduce_step_f32(op, s, dc__get(src[k], dt, i));
    dc__put(dst, dt, i, op == DC_RED_AVG ? s * share : s);
  }
}

static void reduce_f64(double *dst, const void *const *src, int nsrc, int op, int64_t n) {
  const double share = 1.0 / nsrc;
  for (int64_t i = 0; i < n; i++) {
    double s = ((const double *)src[0])[i];
    for (int k = 1; k < nsrc; k++) s = reduce_step_f64(op, s, ((const double *)src[k])[i]);
    dst[i] = dc__canonical_f64(op == DC_RED_AVG ? s * share : s);
  }
}

/* Integers wrap around: sums and products are taken in the unsigned 64-bit type, whose low bits are those of any width.
 */
#define STEP_INT(suffix, type)                                                                  \
  static type step_##suffix(int op, type a, type b) {                                           \
    switch (op) {                                                                               \
    case DC_RED_MIN: return a < b ? a : b;                                                      \
    case DC_RED_MAX: return a > b ? a : b;                                                      \
    case DC_RED_PROD: return (type)((uint64_t)a * (uint64_t)b);                                 \
    case DC_RED_BAND: return (type)(a & b);                                                     \
    case DC_RED_BOR: return (type)(a | b);                                                      \
    case DC_RED_BXOR: return (type)(a ^ b);                                                     \
    default: return (type)((uint64_t)a + (uint64_t)b);                                          \
    }                                                                                           \
  }                                                                                             \
  static void reduce_##suffix(type *dst, const void *const *src, int nsrc, int op, int64_t n) { \
    for (int64_t i = 0; i < n; i++) {                                                           \
      type s = ((const type *)src[0])[i];                                                       \
      for (int k = 1; k < nsrc; k++) s = step_##suffix(op, s, ((const type *)src[k])[i]);       \
      dst[i] = s;                                                                               \
    }                                                                                           \
  }
STEP_INT(i8, int8_t)
STEP_INT(u8, uint8_t)
STEP_INT(i16, int16_t)
STEP_INT(i32, int32_t)
STEP_INT(i64, int64_t)
#undef STEP_INT

void dc__reduce_scalar(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, int stream) {
  (void)stream;
  switch (dt) {
  case DC_F64: reduce_f64(dst, src, nsrc, op, n); return;
  case DC_I8: reduce_i8(dst, src, nsrc, op, n); return;
  case DC_U8: reduce_u8(dst, src, nsrc, op, n); return;
  case DC_I16: reduce_i16(dst, src, nsrc, op, n); return;
  case DC_I32: reduce_i32(dst, src, nsrc, op, n); return;
  case DC_I64: reduce_i64(dst, src, nsrc, op, n); return;
  default: reduce_low(dst, src, nsrc, dt, op, n); return;
  }
}

void dc__reduce_acc_scalar(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial,
                           int stream) {
  (void)stream;
  for (int64_t i = 0; i < n; i++) {
    float s = dc__get(src[0], dt, i);
    for (int k = 1; k < nsrc; k++) s += dc__get(src[k], dt, i);
    acc[i] = dc__canonical_f32(assign ? s : acc[i] + s);
  }
  if (partial) dc__sqnorm_scalar(acc, DC_F32, n, partial);
}
