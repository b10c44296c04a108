/* rotary.c: scalar reference of dc_rotary, rows [begin, end), the last of the three indices running fastest. */
#include "ref/scalar.h"

void dc__rotary_scalar(const dc_rotary_args *a, int64_t begin, int64_t end) {
  const int64_t h = a->rotated / 2;
  for (int64_t row = begin; row < end; row++) {
    const int64_t at[3] = {row / a->size[2] / a->size[1], row / a->size[2] % a->size[1], row % a->size[2]};
    int64_t x = 0, out = 0, cos = 0, sin = 0;
    for (int k = 0; k < 3; k++) {
      x += at[k] * a->x_stride[k], out += at[k] * a->out_stride[k];
      cos += at[k] * a->cos_stride[k], sin += at[k] * a->sin_stride[k];
    }
    for (int64_t j = 0; j < h; j++) {
      const float lo = dc__get(a->x, a->dtype, x + j), hi = dc__get(a->x, a->dtype, x + j + h);
      const float cos_lo = dc__get(a->cos, a->table_dtype, cos + j),
                  cos_hi = dc__get(a->cos, a->table_dtype, cos + j + h);
      const float sin_lo = dc__get(a->sin, a->table_dtype, sin + j),
                  sin_hi = dc__get(a->sin, a->table_dtype, sin + j + h);
      const float from_hi = a->inverse ? sin_hi : -sin_lo, from_lo = a->inverse ? -sin_lo : sin_hi;
      dc__put(a->out, a->dtype, out + j, fmaf(hi, from_hi, lo * cos_lo));
      dc__put(a->out, a->dtype, out + j + h, fmaf(lo, from_lo, hi * cos_hi));
    }
    for (int64_t j = a->rotated; j < a->cols; j++) dc__put(a->out, a->dtype, out + j, dc__get(a->x, a->dtype, x + j));
  }
}
