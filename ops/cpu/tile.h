/* tile.h: products of small matrices, for attention.c.
 *
 * `tile_product` holds MR x NR sums in registers and walks the inner dimension. Its left operand lies row by row, its
 * right one in panels of NR columns. Elements are 4-byte words: a float, or, where the processor has VDPBF16PS, a pair
 * of bf16 that are neighbours in the inner dimension (`pairs`), so one text serves both. */
#ifndef DEEPC_OPS_CPU_TILE_H
#define DEEPC_OPS_CPU_TILE_H

#include "cpu/vec.h"
#include "ref/tile.h"

#if defined(__AVX512F__)
enum { MR = 8, NV = 2 };
#else
enum { MR = 4, NV = 1 };
#endif
enum { NR = NV * LANES };
#define TILE_UNROLL _Pragma("GCC unroll 8")

#if defined(__AVX512BF16__)
#define TILE_PAIRS(dt) ((dt) == DC_BF16)
#else
#define TILE_PAIRS(dt) 0
#endif

DC_INLINE int64_t tile_words(int64_t n, int pairs) { return pairs ? n / 2 : n; }

/* ---- product ----------------------------------------------------------------------------------------------------- */
DC_INLINE vf tile_madd(vf sum, const float *a, vf b, int pairs) {
#if defined(__AVX512BF16__)
  if (pairs) return v_dot_pairs(sum, v_bits(v_set1(*a)), v_bits(b));
#endif
  (void)pairs;
  return v_fma(v_set1(*a), b, sum);
}

/* c[MR][NR] (+)= a[MR][k] b[k][NR]; k in words. */
DC_INLINE void tile_product(float *c, const float *a, int64_t lda, const float *b, int64_t k, int pairs, int add) {
  vf sum[MR][NV];
  TILE_UNROLL for (int r = 0; r < MR; r++) TILE_UNROLL for (int j = 0; j < NV; j++)
      sum[r][j] = add ? v_load32(c + r * NR + j * LANES, LANES) : v_set1(0.0f);
  for (int64_t i = 0; i < k; i++) {
    vf right[NV];
    TILE_UNROLL for (int j = 0; j < NV; j++) right[j] = v_load32(b + i * NR + j * LANES, LANES);
    TILE_UNROLL for (int r = 0; r < MR; r++) TILE_UNROLL for (int j = 0; j < NV; j++)
        sum[r][j] = tile_madd(sum[r][j], a + r * lda + i, right[j], pairs);
  }
  TILE_UNROLL for (int r = 0; r < MR; r++) TILE_UNROLL for (int j = 0; j < NV; j++)
      v_store32(c + r * NR + j * LANES, LANES, sum[r][j]);
}

typedef struct tile_panels { /* [panels][rows][NR], and the words from one panel to the next */
  float *at;
  int64_t step;
} tile_panels;

/* c[panels][rows][NR] (+)= a[rows][k] b[panels][k][NR]; rows a multiple of MR. */
DC_INLINE void tile_multiply(tile_panels c, const float *a, int64_t lda, tile_panels b, int64_t rows, int64_t panels,
                             int64_t k, int pairs, int add) {
  for (int64_t p = 0; p < panels; p++)
    for (int64_t r = 0; r < rows; r += MR)
      tile_product(c.at + p * c.step + r * NR, a + r * lda, lda, b.at + p * b.step, k, pairs, add);
}

/* ---- operands from rows ------------------------------------------------------------------------------------------ */
typedef struct tile_rows { /* rows of `dim` elements of a head; those from `count` on are zeros */
  const char *at;
  int64_t stride, count, dim, width; /* width: dim rounded up to whole panels */
} tile_rows;

/* Row i as floats, zeros behind it. */
DC_INLINE void tile_floats(float *to, const tile_rows *x, int dt, int64_t i) {
  const char *row = x->at + i * x->stride;
  for (int64_t c = 0; c < x->width; c += LANES) {
    const int64_t left = i < x->count ? x->dim - c : 0;
    v_store32(to + c, LANES, left <= 0 ? v_set1(0.0f) : v_get(row, dt, c, left < LANES ? (int)left : LANES));
  }
}

/* Row i as words: floats, or bf16 as they lie. */
DC_INLINE void tile_row(float *to, const tile_rows *x, int dt, int64_t i, int pairs) {
  if (!pairs) {
    tile_floats(to, x, dt, i);
    return;
  }
  const int64_t bytes = i < x->count ? 2 * x->dim : 0;
  if (bytes) memcpy(to, x->at + i * x->stride, (size_t)bytes);
  memset((char *)to + bytes, 0, (size_t)(2 * x->width - bytes));
}

/* Words of rows i and i + 1 that are neighbours down: row i's in the lower halves. */
DC_INLINE void tile_row_pair(uint32_t *to, const tile_rows *x, int64_t i) {
  uint16_t row[2][TILE_DIM];
  for (int k = 0; k < 2; k++) tile_row((float *)row[k], x, DC_BF16, i + k, 1);
  for (int64_t c = 0; c < x->width; c++) to[c] = (uint32_t)row[0][c] | (uint32_t)row[1][c] << 16;
}

/* Words number i down the rows from `begin` on: row begin + i, or a pair of rows. */
DC_INLINE void tile_down(float *to, const tile_rows *x, int dt, int64_t begin, int64_t i, int pairs) {
  if (pairs) tile_row_pair((uint32_t *)to, x, begin + 2 * i);
  else tile_floats(to, x, dt, begin + i);
}

/* Left operand, inner dimension across the rows: [n][words of width]. */
DC_INLINE void tile_pack_rows(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  const int64_t w = tile_words(x->width, pairs);
  for (int64_t i = 0; i < n; i++) tile_row(to + i * w, x, dt, begin + i, pairs);
}

/* Right operand, inner dimension across the rows: [panels of n][words of width][NR]. */
DC_INLINE void tile_pack_across(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  float words[TILE_DIM];
  const int64_t w = tile_words(x->width, pairs);
  for (int64_t i = 0; i < n; i++) {
    float *column = to + i / NR * w * NR + i % NR;
    tile_row(words, x, dt, begin + i, pairs);
    for (int64_t c = 0; c < w; c++) column[c * NR] = words[c];
  }
}

#endif
