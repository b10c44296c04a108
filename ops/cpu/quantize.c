/* quantize.c: bodies of dc_quantize, dc_dequantize and dc_dequantize_add. A block is read twice, the second time from
 * the first-level cache: once for its scale, once for codes and error. At half a cycle an element in the cache they
 * wait for memory beyond it (docs/lab/kernels.md): tests/bench/compress.py. So 1 bit reads one block for its scale
 * while it writes the one before: memory is never idle. */
#include "cpu/vec.h"

/* Runs `call` with BITS as a constant: 8, 4 or 1. */
#define FOR_BITS(bits, call) \
  switch (bits) {            \
  case 8: {                  \
    enum { BITS = 8 };       \
    call;                    \
    break;                   \
  }                          \
  case 4: {                  \
    enum { BITS = 4 };       \
    call;                    \
    break;                   \
  }                          \
  default: {                 \
    enum { BITS = 1 };       \
    call;                    \
    break;                   \
  }                          \
  }

/* x + e, or x, of r elements. */
DC_INLINE vf quantize_value(const void *x, int dt, const float *error, int fed, int64_t i, int r) {
  const vf v = v_get(x, dt, i, r);
  return fed ? v_add(v, v_get(error, DC_F32, i, r)) : v;
}

DC_INLINE void quantize_ahead(const void *x, int dt, const float *error, int fed, int64_t i) {
  v_ahead(x, dt, i, AHEAD);
  if (fed) v_ahead(error, DC_F32, i, AHEAD);
}

/* ---- 8 and 4 bits ------------------------------------------------------------------------------------------------ */
DC_INLINE uint32_t quantize_top_of(const void *x, int dt, const float *error, int fed, int64_t begin, int64_t end) {
  vi top = vi_set1(0);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    quantize_ahead(x, dt, error, fed, i);
    top = vi_max(top, v_magnitude(quantize_value(x, dt, error, fed, i, LANES)));
  }
  if (i < end) top = vi_max(top, v_magnitude(quantize_value(x, dt, error, fed, i, (int)(end - i))));
  return vi_top(top);
}

DC_INLINE void quantize_put_codes(uint8_t *codes, int bits, int64_t i, int r, vi q) {
  if (bits == 8) v_store8(codes + i, r, vi_narrow8(q));
  else v_store4(codes + i / 2, r, vi_narrow8(q));
}

DC_INLINE void quantize_levels_step(uint8_t *codes, int bits, vf inverse, vf scale_neg, const void *x, int dt,
                                    float *error, int fed, int64_t i, int r) {
  const vf v = quantize_value(x, dt, error, fed, i, r);
  const vi q = v_round(v_mul(v, inverse));
  quantize_put_codes(codes, bits, i, r, q);
  if (fed) v_put_canonical(error, DC_F32, i, r, v_fma(vi_float(q), scale_neg, v));
}

DC_INLINE void quantize_levels_block(uint8_t *codes, float *scale, int bits, const void *x, int dt, float *error,
                                     int fed, int64_t begin, int64_t end) {
  const uint32_t top = quantize_top_of(x, dt, error, fed, begin, end);
  const dc__levels l = dc__levels_of(top, bits);
  const vf inverse = v_set1(l.inverse), scale_neg = v_set1(-l.scale);
  int64_t i = begin;
  *scale = l.scale;
  if (DC_UNLIKELY(top >= DC__INF_F32)) {
    memset(codes + begin * bits / 8, 0, (size_t)((end - begin) * bits + 7) / 8);
    return;
  }
  for (; i + LANES <= end; i += LANES)
    quantize_levels_step(codes, bits, inverse, scale_neg, x, dt, error, fed, i, LANES);
  if (i < end) quantize_levels_step(codes, bits, inverse, scale_neg, x, dt, error, fed, i, (int)(end - i));
}

/* ---- 1 bit ------------------------------------------------------------------------------------------------------- */
DC_INLINE double quantize_sum_of(const void *x, int dt, const float *error, int fed, int64_t begin, int64_t end) {
  vd sum = vd_zero();
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    quantize_ahead(x, dt, error, fed, i);
    sum = vd_add_abs(sum, quantize_value(x, dt, error, fed, i, LANES));
  }
  if (i < end) sum = vd_add_abs(sum, quantize_value(x, dt, error, fed, i, (int)(end - i)));
  return vd_tree(sum);
}

DC_INLINE void quantize_sign_step(uint8_t *codes, vf scale, const void *x, int dt, float *error, int fed, int64_t i,
                                  int r) {
  const vf v = quantize_value(x, dt, error, fed, i, r);
  const unsigned signs = v_signs(v);
  codes[i / 8] = (uint8_t)signs;
  if (r > 8) codes[i / 8 + 1] = (uint8_t)(signs >> 8);
  if (fed) v_put_canonical(error, DC_F32, i, r, v_sub(v, v_flip(scale, signs)));
}

/* Codes and error of the whole block at `begin`, of scale s, and the sum of the whole block behind it. */
DC_INLINE double quantize_sign_pair(uint8_t *codes, float s, const void *x, int dt, float *error, int fed,
                                    int64_t begin, int64_t block) {
  vd sum = vd_zero();
  for (int64_t i = begin; i < begin + block; i += LANES) {
    quantize_ahead(x, dt, error, fed, i + block);
    sum = vd_add_abs(sum, quantize_value(x, dt, error, fed, i + block, LANES));
    quantize_sign_step(codes, v_set1(s), x, dt, error, fed, i, LANES);
  }
  return vd_tree(sum);
}

/* The same of a block that nothing whole follows. */
DC_INLINE void quantize_sign_last(uint8_t *codes, float s, const void *x, int dt, float *error, int fed, int64_t begin,
                                  int64_t end) {
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) quantize_sign_step(codes, v_set1(s), x, dt, error, fed, i, LANES);
  if (i < end) quantize_sign_step(codes, v_set1(s), x, dt, error, fed, i, (int)(end - i));
}

DC_INLINE void quantize_signs(uint8_t *codes, float *scales, int64_t block, const void *x, int dt, float *error,
                              int fed, int64_t n) {
  int known = 0; /* whether `sum` is that of the block at `begin` */
  double sum = 0.0;
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = n - begin < block ? n : begin + block;
    if (!known) sum = quantize_sum_of(x, dt, error, fed, begin, end);
    const float s = *scales++ = dc__sign_scale(sum, end - begin);
    known = s == s && n - end >= block;
    if (DC_UNLIKELY(s != s)) memset(codes + begin / 8, 0, (size_t)(end - begin + 7) / 8);
    else if (known) sum = quantize_sign_pair(codes, s, x, dt, error, fed, begin, block);
    else quantize_sign_last(codes, s, x, dt, error, fed, begin, end);
  }
}

/* ---- the average of 1-bit payloads ------------------------------------------------------------------------------- */
/* One block of `count` payloads: their codes at its first element, their scales at it. */
typedef struct quantize_rows {
  const uint8_t *codes, *scales;
  int64_t count, stride;
  vf factor;
} quantize_rows;

DC_INLINE vf quantize_average_of(const quantize_rows *b, int64_t k, int64_t i, int r) {
  const uint8_t *codes = b->codes + k * b->stride + i / 8;
  float scale;
  memcpy(&scale, b->scales + k * b->stride, sizeof scale);
  unsigned signs = codes[0];
  if (r > 8) signs |= (unsigned)codes[1] << 8;
  return v_flip(v_set1(scale), signs);
}

/* Elements i to i + r of the block. */
DC_INLINE vf quantize_average_value(const quantize_rows *b, const float *error, int64_t i, int r) {
  vf sum = quantize_average_of(b, 0, i, r);
  for (int64_t k = 1; k < b->count; k++) sum = v_add(sum, quantize_average_of(b, k, i, r));
  return v_keep(v_add(v_mul(sum, b->factor), v_get(error, DC_F32, i, r)), r);
}

DC_INLINE void quantize_average_step(uint8_t *codes, vf scale, const quantize_rows *b, float *error, int64_t i, int r) {
  const vf v = quantize_average_value(b, error, i, r);
  const unsigned signs = v_signs(v);
  codes[i / 8] = (uint8_t)signs;
  if (r > 8) codes[i / 8 + 1] = (uint8_t)(signs >> 8);
  v_put_canonical(error, DC_F32, i, r, v_sub(v, v_flip(scale, signs)));
}

DC_INLINE double quantize_average_sum(const quantize_rows *b, const float *error, int64_t n) {
  vd sum = vd_zero();
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    v_ahead(error, DC_F32, i, AHEAD);
    sum = vd_add_abs(sum, quantize_average_value(b, error, i, LANES));
  }
  if (i < n) sum = vd_add_abs(sum, quantize_average_value(b, error, i, (int)(n - i)));
  return vd_tree(sum);
}

/* Codes and error of the whole block b, of scale s, and the sum of `next`, the whole one behind it. */
DC_INLINE double quantize_average_pair(uint8_t *codes, float s, const quantize_rows *b, const quantize_rows *next,
                                       float *error, int64_t block) {
  vd sum = vd_zero();
  for (int64_t i = 0; i < block; i += LANES) {
    v_ahead(error + block, DC_F32, i, AHEAD);
    sum = vd_add_abs(sum, quantize_average_value(next, error + block, i, LANES));
    quantize_average_step(codes, v_set1(s), b, error, i, LANES);
  }
  return vd_tree(sum);
}

DC_INLINE void quantize_average_last(uint8_t *codes, float s, const quantize_rows *b, float *error, int64_t n) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) quantize_average_step(codes, v_set1(s), b, error, i, LANES);
  if (i < n) quantize_average_step(codes, v_set1(s), b, error, i, (int)(n - i));
}

void DC_BODY(average_signs)(uint8_t *codes, float *scales, int64_t block, const uint8_t *rows, int64_t count,
                            int64_t stride, int64_t offset, int64_t first, float *error, float factor, int64_t n) {
  int known = 0; /* as in quantize_signs */
  double sum = 0.0;
  for (int64_t begin = 0; begin < n; begin += block, first++) {
    const quantize_rows b = {rows + offset + first * block / 8, rows + first * 4, count, stride, v_set1(factor)};
    const quantize_rows next = {b.codes + block / 8, b.scales + 4, count, stride, b.factor};
    const int64_t len = n - begin < block ? n - begin : block;
    uint8_t *to = codes + begin / 8;
    if (!known) sum = quantize_average_sum(&b, error + begin, len);
    const float s = *scales++ = dc__sign_scale(sum, len);
    known = s == s && n - begin - len >= block;
    if (DC_UNLIKELY(s != s)) memset(to, 0, (size_t)(len + 7) / 8);
    else if (known) sum = quantize_average_pair(to, s, &b, &next, error + begin, block);
    else quantize_average_last(to, s, &b, error + begin, len);
  }
}

/* ---- loops of constants ------------------------------------------------------------------------------------------ */
DC_INLINE void quantize_blocks(uint8_t *codes, float *scales, int bits, int64_t block, const void *x, int dt,
                               float *error, int fed, int64_t n) {
  if (bits == 1) {
    quantize_signs(codes, scales, block, x, dt, error, fed, n);
    return;
  }
  for (int64_t begin = 0; begin < n; begin += block, scales++) {
    const int64_t end = n - begin < block ? n : begin + block;
    quantize_levels_block(codes, scales, bits, x, dt, error, fed, begin, end);
  }
}

DC_INLINE void quantize_fed(uint8_t *codes, float *scales, int bits, int64_t block, const void *x, int dt, float *error,
                            int64_t n) {
  if (error) quantize_blocks(codes, scales, bits, block, x, dt, error, 1, n);
  else quantize_blocks(codes, scales, bits, block, x, dt, error, 0, n);
}

DC_INLINE void quantize_bits(uint8_t *codes, float *scales, int bits, int64_t block, const void *x, int dt,
                             float *error, int64_t n) {
  DC_FOR_LOW(dt, DT, quantize_fed(codes, scales, bits, block, x, DT, error, n));
}

void DC_BODY(quantize)(uint8_t *codes, float *scales, int bits, int64_t block, const void *x, int dt, float *error,
                       int64_t n) {
  FOR_BITS(bits, quantize_bits(codes, scales, BITS, block, x, dt, error, n));
}

/* ---- back -------------------------------------------------------------------------------------------------------- */
/* The codes of r elements as numbers. */
DC_INLINE vf quantize_levels(const uint8_t *codes, int bits, int64_t i, int r) {
  unsigned signs = 0;
  switch (bits) {
  case 8: return vi_float(vi_widen8(v_load8(codes + i, r)));
  case 4: return vi_float(vi_widen8(v_load4(codes + i / 2, r)));
  default:
    signs = codes[i / 8];
    if (r > 8) signs |= (unsigned)codes[i / 8 + 1] << 8;
    return v_flip(v_set1(1.0f), signs);
  }
}

DC_INLINE void dequantize_bits(void *out, int dt, const uint8_t *codes, const float *scales, int bits, int64_t block,
                               int64_t n) {
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = n - begin < block ? n : begin + block;
    const vf scale = v_set1(*scales++);
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) v_put(out, dt, i, LANES, v_mul(scale, quantize_levels(codes, bits, i, LANES)));
    if (i < end) v_put(out, dt, i, (int)(end - i), v_mul(scale, quantize_levels(codes, bits, i, (int)(end - i))));
  }
}

DC_INLINE void dequantize_to(void *out, int dt, const uint8_t *codes, const float *scales, int bits, int64_t block,
                             int64_t n) {
  DC_FOR_LOW(dt, DT, dequantize_bits(out, DT, codes, scales, bits, block, n));
}

void DC_BODY(dequantize)(void *out, int dt, const uint8_t *codes, const float *scales, int bits, int64_t block,
                         int64_t n) {
  FOR_BITS(bits, dequantize_to(out, dt, codes, scales, BITS, block, n));
}

DC_INLINE void quantize_add_step(float *acc, const uint8_t *codes, vf factor, int bits, int64_t i, int r) {
  v_put(acc, DC_F32, i, r, v_fma(quantize_levels(codes, bits, i, r), factor, v_get(acc, DC_F32, i, r)));
}

DC_INLINE void quantize_add_bits(float *acc, const uint8_t *codes, const float *scales, int bits, int64_t block,
                                 float factor, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = n - begin < block ? n : begin + block;
    const vf f = v_set1(factor * *scales++);
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) quantize_add_step(acc, codes, f, bits, i, LANES);
    if (i < end) quantize_add_step(acc, codes, f, bits, i, (int)(end - i));
  }
}

void DC_BODY(dequantize_add)(float *acc, const uint8_t *codes, const float *scales, int bits, int64_t block,
                             float factor, int64_t n) {
  FOR_BITS(bits, quantize_add_bits(acc, codes, scales, BITS, block, factor, n));
}
