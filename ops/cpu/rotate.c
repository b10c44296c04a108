/* rotate.c: bodies of dc_rotate. A whole block of 8 KiB lies in the first-level cache and is passed over twice: eight
 * levels of butterflies on 16 vectors side by side, four of them inside of vectors, then three on vectors that are
 * 1 KiB apart. Both passes fetch half of the block behind it. tests/bench/compress.py: beside the same traffic. */
#include "cpu/vec.h"

#include "ref/rotate.h"

enum { ROTATE_VECTORS = DC_ROTATE_BLOCK / LANES, ROTATE_GROUP = 16, ROTATE_FAR = ROTATE_VECTORS / ROTATE_GROUP };

/* The signs of the first n elements of D, in whole vectors. */
DC_INLINE void rotate_signs(vi *signs, int64_t n) {
  const vi zero = vi_set1(0), step = vi_set1(LANES);
  vi at = vi_lanes();
  for (int64_t k = 0; k * LANES < n; k++, at = vi_add(at, step)) {
    vi h = vi_mul(vi_xor3(at, vi_right(at, DC__ROTATE_R0), zero), vi_set1((int)DC__ROTATE_M0));
    h = vi_mul(vi_xor3(h, vi_right(h, DC__ROTATE_R1), zero), vi_set1((int)DC__ROTATE_M1));
    signs[k] = vi_and_or(h, INT32_MIN, 0);
  }
}

/* The butterflies inside of a vector: a * 1 + b and b * -1 + a, which are rounded once, as the sum and difference. */
DC_INLINE vf rotate_inside(vf x, int64_t length) {
  const vf one = v_set1(1.0f);
  if (length > 1) x = v_fma(x, v_flip(one, 0xaaaa), v_swap1(x));
  if (length > 2) x = v_fma(x, v_flip(one, 0xcccc), v_swap2(x));
  if (length > 4) x = v_fma(x, v_flip(one, 0xf0f0), v_swap4(x));
  if (length > 8) x = v_fma(x, v_flip(one, 0xff00), v_swap8(x));
  return x;
}

/* Two levels on four vectors: neighbours, then pairs. */
DC_INLINE void rotate_four(vf *a, vf *b, vf *c, vf *d) {
  const vf ab = v_add(*a, *b), a_b = v_sub(*a, *b), cd = v_add(*c, *d), c_d = v_sub(*c, *d);
  *a = v_add(ab, cd), *b = v_add(a_b, c_d), *c = v_sub(ab, cd), *d = v_sub(a_b, c_d);
}

DC_INLINE vf rotate_get(const float *x, const vi *signs, int64_t k, int r) {
  return v_xor(v_load32(x + k * LANES, r), signs[k]);
}
DC_INLINE void rotate_put(float *x, const vi *signs, int64_t k, int r, vf factor, vf a) {
  v_put(x, DC_F32, k * LANES, r, v_xor(v_mul(a, factor), signs[k]));
}

DC_INLINE void rotate_whole(float *x, const vi *signs, vf factor) {
  vf v[ROTATE_GROUP];
  for (int64_t k = 0; k < ROTATE_VECTORS; k += ROTATE_GROUP) {
    for (int i = 0; i < ROTATE_GROUP; i++) v[i] = rotate_inside(rotate_get(x, signs, k + i, LANES), LANES);
    for (int i = 0; i < ROTATE_GROUP; i += 4) rotate_four(v + i, v + i + 1, v + i + 2, v + i + 3);
    for (int i = 0; i < 4; i++) rotate_four(v + i, v + i + 4, v + i + 8, v + i + 12);
    for (int i = 0; i < ROTATE_GROUP; i++) v_store32(x + (k + i) * LANES, LANES, v[i]);
    for (int i = 0; i < ROTATE_GROUP / 2; i++) v_ahead(x, DC_F32, (k / 2 + i) * LANES + DC_ROTATE_BLOCK, 0);
  }
  for (int64_t k = 0; k < ROTATE_GROUP; k++) {
    for (int i = 0; i < ROTATE_FAR; i++) v[i] = v_load32(x + (k + i * ROTATE_GROUP) * LANES, LANES);
    rotate_four(v, v + 1, v + 2, v + 3);
    rotate_four(v + 4, v + 5, v + 6, v + 7);
    for (int i = 0; i < ROTATE_FAR / 2; i++) {
      rotate_put(x, signs, k + i * ROTATE_GROUP, LANES, factor, v_add(v[i], v[i + 4]));
      rotate_put(x, signs, k + (i + 4) * ROTATE_GROUP, LANES, factor, v_sub(v[i], v[i + 4]));
    }
    for (int i = 0; i < 4; i++) v_ahead(x, DC_F32, (ROTATE_VECTORS / 2 + 4 * k + i) * LANES + DC_ROTATE_BLOCK, 0);
  }
}

/* A shorter block, of which there are few. */
DC_INLINE void rotate_short(float *x, const vi *signs, int64_t length) {
  const int64_t vectors = (length + LANES - 1) / LANES;
  const int r = length < LANES ? (int)length : LANES;
  const vf factor = v_set1(dc__rotate_factor(length));
  for (int64_t k = 0; k < vectors; k++) v_store32(x + k * LANES, r, rotate_inside(rotate_get(x, signs, k, r), length));
  for (int64_t h = 1; h < vectors; h *= 2)
    for (int64_t k = 0; k < vectors; k += 2 * h)
      for (int64_t j = k; j < k + h; j++) {
        const vf a = v_load32(x + j * LANES, LANES), b = v_load32(x + (j + h) * LANES, LANES);
        v_store32(x + j * LANES, LANES, v_add(a, b)), v_store32(x + (j + h) * LANES, LANES, v_sub(a, b));
      }
  for (int64_t k = 0; k < vectors; k++) rotate_put(x, signs, k, r, factor, v_load32(x + k * LANES, r));
}

void DC_BODY(rotate)(float *x, int64_t n) {
  vi signs[ROTATE_VECTORS];
  const vf factor = v_set1(dc__rotate_factor(DC_ROTATE_BLOCK));
  int64_t begin = 0;
  rotate_signs(signs, n < DC_ROTATE_BLOCK ? n : DC_ROTATE_BLOCK);
  for (; begin + DC_ROTATE_BLOCK <= n; begin += DC_ROTATE_BLOCK) rotate_whole(x + begin, signs, factor);
  for (int64_t length; begin < n; begin += length) {
    length = dc__rotate_length(n - begin);
    rotate_short(x + begin, signs, length);
  }
}
