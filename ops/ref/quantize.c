/* quantize.c: scalar references of dc_quantize, dc_dequantize and dc_dequantize_add. Every range starts at a block. */
#include "ref/scalar.h"

static float quantize_value(const void *x, int dt, const float *error, int64_t i) {
  const float v = dc__get(x, dt, i);
  return error ? v + error[i] : v;
}

/* ---- 8 and 4 bits ------------------------------------------------------------------------------------------------ */
static void quantize_put_code(uint8_t *codes, int bits, int64_t i, int q) {
  if (bits == 8) codes[i] = (uint8_t)q;
  else if (i % 2 == 0) codes[i / 2] = (uint8_t)(q & 15); /* an odd length leaves the upper half zero */
  else codes[i / 2] = (uint8_t)(codes[i / 2] | (q & 15) << 4);
}

static float quantize_get_code(const uint8_t *codes, int bits, int64_t i) {
  if (bits == 8) return (float)(int8_t)codes[i];
  const int half = codes[i / 2] >> (i % 2 * 4) & 15;
  return (float)(half < 8 ? half : half - 16);
}

static void quantize_levels_block(uint8_t *codes, float *scale, int bits, const void *x, int dt, float *error,
                                  int64_t begin, int64_t end) {
  uint32_t top = 0;
  for (int64_t i = begin; i < end; i++) {
    const uint32_t u = dc__bits_of_f32(quantize_value(x, dt, error, i)) & 0x7fffffffu;
    top = u > top ? u : top;
  }
  const dc__levels l = dc__levels_of(top, bits);
  *scale = l.scale;
  for (int64_t i = begin; i < end; i++) {
    const float v = quantize_value(x, dt, error, i);
    const int q = top < DC__INF_F32 ? (int)rintf(v * l.inverse) : 0;
    quantize_put_code(codes, bits, i, q);
    if (error && top < DC__INF_F32) error[i] = fmaf((float)q, -l.scale, v);
  }
}

/* ---- 1 bit ------------------------------------------------------------------------------------------------------- */
static void quantize_sign_block(uint8_t *codes, float *scale, const void *x, int dt, float *error, int64_t begin,
                                int64_t end) {
  double acc[16] = {0};
  for (int64_t i = begin; i < end; i++) acc[(i - begin) % 16] += fabs((double)quantize_value(x, dt, error, i));
  *scale = dc__sign_scale(dc__tree16(acc), end - begin);
  for (int64_t i = begin; i < end; i++) {
    const float v = quantize_value(x, dt, error, i);
    const uint8_t bit = (uint8_t)(dc__bits_of_f32(v) >> 31 << (i % 8));
    codes[i / 8] = (uint8_t)((i % 8 ? codes[i / 8] : 0) | (*scale == *scale ? bit : 0));
    if (error && *scale == *scale) error[i] = v - copysignf(*scale, v);
  }
}

void dc__quantize_scalar(uint8_t *codes, float *scales, int bits, int64_t block, const void *x, int dt, float *error,
                         int64_t n) {
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t end = n - begin < block ? n : begin + block;
    if (bits == 1) quantize_sign_block(codes, scales + begin / block, x, dt, error, begin, end);
    else quantize_levels_block(codes, scales + begin / block, bits, x, dt, error, begin, end);
  }
}

/* ---- the average of 1-bit payloads ------------------------------------------------------------------------------- */
static float quantize_average_value(int64_t block, const uint8_t *rows, int64_t count, int64_t stride, int64_t offset,
                                    int64_t first, const float *error, float factor, int64_t i) {
  float sum = 0.0f;
  for (int64_t k = 0; k < count; k++) {
    const uint8_t *row = rows + k * stride;
    const uint32_t bit = row[offset + (first * block + i) / 8] >> (i % 8) & 1;
    float scale;
    memcpy(&scale, row + (first + i / block) * 4, sizeof scale);
    const float value = dc__f32_of_bits(dc__bits_of_f32(scale) ^ bit << 31);
    sum = k ? sum + value : value;
  }
  return sum * factor + error[i];
}

void dc__average_signs_scalar(uint8_t *codes, float *scales, int64_t block, const uint8_t *rows, int64_t count,
                              int64_t stride, int64_t offset, int64_t first, float *error, float factor, int64_t n) {
  for (int64_t begin = 0; begin < n; begin += block, scales++) {
    const int64_t end = n - begin < block ? n : begin + block;
    double acc[16] = {0};
    for (int64_t i = begin; i < end; i++)
      acc[(i - begin) % 16] += fabs(
          (double)quantize_average_value(block, rows, count, stride, offset, first, error, factor, i));
    const float s = *scales = dc__sign_scale(dc__tree16(acc), end - begin);
    for (int64_t i = begin; i < end; i++) {
      const float v = quantize_average_value(block, rows, count, stride, offset, first, error, factor, i);
      const uint8_t bit = (uint8_t)(dc__bits_of_f32(v) >> 31 << (i % 8));
      codes[i / 8] = (uint8_t)((i % 8 ? codes[i / 8] : 0) | (s == s ? bit : 0));
      if (s == s) error[i] = v - copysignf(s, v);
    }
  }
}

/* ---- back -------------------------------------------------------------------------------------------------------- */
static float quantize_level(const uint8_t *codes, int bits, int64_t i) {
  if (bits == 1) return codes[i / 8] >> (i % 8) & 1 ? -1.0f : 1.0f;
  return quantize_get_code(codes, bits, i);
}

void dc__dequantize_scalar(void *out, int dt, const uint8_t *codes, const float *scales, int bits, int64_t block,
                           int64_t n) {
  for (int64_t i = 0; i < n; i++) dc__put(out, dt, i, scales[i / block] * quantize_level(codes, bits, i));
}

void dc__dequantize_add_scalar(float *acc, const uint8_t *codes, const float *scales, int bits, int64_t block,
                               float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    dc__put(acc, DC_F32, i, fmaf(quantize_level(codes, bits, i), factor * scales[i / block], acc[i]));
}
