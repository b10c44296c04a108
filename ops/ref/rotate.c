/* rotate.c: scalar reference of dc_rotate. The range starts at a block. */
#include "ref/rotate.h"

static void rotate_signs(float *x, int64_t length) {
  for (int64_t i = 0; i < length; i++) x[i] = dc__f32_of_bits(dc__bits_of_f32(x[i]) ^ dc__rotate_sign((uint32_t)i));
}

static void rotate_block(float *x, int64_t length) {
  const float factor = dc__rotate_factor(length);
  rotate_signs(x, length);
  for (int64_t h = 1; h < length; h *= 2)
    for (int64_t i = 0; i < length; i += 2 * h)
      for (int64_t j = i; j < i + h; j++) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b, x[j + h] = a - b;
      }
  for (int64_t i = 0; i < length; i++) x[i] *= factor;
  rotate_signs(x, length);
  for (int64_t i = 0; i < length; i++) dc__put(x, DC_F32, i, x[i]); /* makes NaN canonical */
}

void dc__rotate_scalar(float *x, int64_t n) {
  for (int64_t begin = 0, length; begin < n; begin += length) {
    length = dc__rotate_length(n - begin);
    rotate_block(x + begin, length);
  }
}
