/* rotary.c: bodies of dc_rotary. */
#include "cpu/vec.h"

typedef struct rotary_row {
  int64_t x, out, cos, sin;
} rotary_row;

DC_INLINE vf rotary_negated(vf a) { return v_sub(v_set1(-0.0f), a); }

DC_INLINE void rotary_step(const dc_rotary_args *a, int dt, int tdt, int inverse, rotary_row at, int64_t h, int64_t j,
                           int r) {
  const vf lo = v_get(a->x, dt, at.x + j, r), hi = v_get(a->x, dt, at.x + j + h, r);
  const vf cos_lo = v_get(a->cos, tdt, at.cos + j, r), cos_hi = v_get(a->cos, tdt, at.cos + j + h, r);
  const vf sin_lo = v_get(a->sin, tdt, at.sin + j, r), sin_hi = v_get(a->sin, tdt, at.sin + j + h, r);
  const vf from_hi = inverse ? sin_hi : rotary_negated(sin_lo), from_lo = inverse ? rotary_negated(sin_lo) : sin_hi;
  v_put(a->out, dt, at.out + j, r, v_fma(hi, from_hi, v_mul(lo, cos_lo)));
  v_put(a->out, dt, at.out + j + h, r, v_fma(lo, from_lo, v_mul(hi, cos_hi)));
}

DC_INLINE void rotary_one(const dc_rotary_args *a, int dt, int tdt, int inverse, rotary_row at) {
  const int64_t h = a->rotated / 2;
  int64_t j = 0;
  for (; j + LANES <= h; j += LANES) rotary_step(a, dt, tdt, inverse, at, h, j, LANES);
  if (j < h) rotary_step(a, dt, tdt, inverse, at, h, j, (int)(h - j));
  for (j = a->rotated; j < a->cols; j += LANES) {
    const int r = (int)(a->cols - j < LANES ? a->cols - j : LANES);
    v_put(a->out, dt, at.out + j, r, v_get(a->x, dt, at.x + j, r));
  }
}

DC_INLINE void rotary_loop(const dc_rotary_args *args, int dt, int tdt, int inverse, int64_t begin, int64_t end) {
  const dc_rotary_args a = *args;
  int64_t i2 = begin % a.size[2], i1 = begin / a.size[2] % a.size[1], i0 = begin / a.size[2] / a.size[1];
  for (int64_t row = begin; row < end; row++) {
    rotary_one(&a, dt, tdt, inverse,
               (rotary_row){i0 * a.x_stride[0] + i1 * a.x_stride[1] + i2 * a.x_stride[2],
                            i0 * a.out_stride[0] + i1 * a.out_stride[1] + i2 * a.out_stride[2],
                            i0 * a.cos_stride[0] + i1 * a.cos_stride[1] + i2 * a.cos_stride[2],
                            i0 * a.sin_stride[0] + i1 * a.sin_stride[1] + i2 * a.sin_stride[2]});
    if (++i2 < a.size[2]) continue;
    i2 = 0;
    if (++i1 < a.size[1]) continue;
    i1 = 0, i0++;
  }
}

DC_INLINE void rotary_way(const dc_rotary_args *a, int dt, int tdt, int64_t begin, int64_t end) {
  if (a->inverse) rotary_loop(a, dt, tdt, 1, begin, end);
  else rotary_loop(a, dt, tdt, 0, begin, end);
}

DC_INLINE void rotary_table(const dc_rotary_args *a, int dt, int64_t begin, int64_t end) {
  if (a->table_dtype == dt) rotary_way(a, dt, dt, begin, end);
  else rotary_way(a, dt, a->table_dtype, begin, end);
}

void DC_BODY(rotary)(const dc_rotary_args *a, int64_t begin, int64_t end) {
  DC_FOR_LOW(a->dtype, DT, rotary_table(a, DT, begin, end));
}
