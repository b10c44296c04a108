/* gemm.c: bodies of dc_gemm, after Goto & van de Geijn (Anatomy of High-Performance Matrix Multiplication, TOMS 34,
 * 2008) and BLIS (Van Zee & van de Geijn, TOMS 41, 2015): a panel of b of GEMM_COLS columns and DC__GEMM_DEPTH rows is
 * packed for the outer caches, a block of a of GEMM_ROWS rows for L2, both in the order in which the innermost loop
 * reads them, and that loop keeps TALL x WIDE sums in registers. Operands may be transposed: packing turns squares of
 * 16 x 16.
 *
 * 14 x 32 sums on AVX-512 (28 of 32 registers; two loads of b and 14 of a for 28 FMAs), 6 x 16 on AVX2 (12 of 16).
 * On one core of an EPYC of Zen 5, GFLOP/s of 256: 206 to 241, oneDNN 163 to 255, MKL 93 to 110, which runs its AVX2
 * loop on AMD's processors (docs/lab/kernels.md). */
#include "cpu/vec.h"

#if defined(__AVX512F__)
enum { TALL = 14, VECTORS = 2 };
#else
enum { TALL = 6, VECTORS = 1 };
#endif
enum { WIDE = VECTORS * LANES };
enum { GEMM_ROWS = DC__GEMM_ROWS / TALL * TALL, GEMM_COLS = DC__GEMM_COLS };
_Static_assert((int)TALL <= (int)DC__GEMM_SLACK && (int)WIDE <= (int)DC__GEMM_SLACK && GEMM_COLS % WIDE == 0,
               "what a body takes of scratch");

DC_INLINE int64_t gemm_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- packing ----------------------------------------------------------------------------------------------------- */
/* `have` of `some` elements of each of `depth` rows, zeros behind them. Rows lie `along` elements apart. */
DC_INLINE void gemm_pack_rows(float *dst, int width, const float *src, int64_t along, int64_t depth, int have,
                              int some) {
  for (int64_t p = 0; p < depth; p++) v_store32(dst + p * width, some, v_load32(src + p * along, have));
}

/* The same of columns that lie `across` elements apart. */
DC_INLINE void gemm_pack_columns(float *dst, int width, const float *src, int64_t across, int64_t depth, int have,
                                 int some) {
  for (int64_t p = 0; p < depth; p += LANES) {
    const int deep = (int)gemm_min(LANES, depth - p);
    vf t[LANES];
    for (int j = 0; j < LANES; j++) t[j] = j < have ? v_load32(src + j * across + p, deep) : v_set1(0.0f);
    v_turn(t);
    for (int q = 0; q < deep; q++) v_store32(dst + (p + q) * width, some, t[q]);
  }
}

DC_INLINE void gemm_pack_some(float *dst, int width, const float *src, int64_t along, int64_t across, int64_t depth,
                              int have, int some) {
  if (have <= 0)
    for (int64_t p = 0; p < depth; p++) v_store32(dst + p * width, some, v_set1(0.0f));
  else if (across == 1) gemm_pack_rows(dst, width, src, along, depth, have, some);
  else gemm_pack_columns(dst, width, src, across, depth, have, some);
}

/* dst[p * width + j] = src[p * along + j * across] for j < n, else 0. */
DC_INLINE void gemm_pack(float *dst, int width, const float *src, int64_t along, int64_t across, int64_t depth, int n) {
  int j = 0;
  for (; j + LANES <= width && j + LANES <= n; j += LANES)
    gemm_pack_some(dst + j, width, src + j * across, along, across, depth, LANES, LANES);
  if (j < width && width % LANES && n == width) /* constants */
    gemm_pack_some(dst + j, width, src + j * across, along, across, depth, width % LANES, width % LANES), j = width;
  for (; j < width; j += LANES) {
    const int some = (int)gemm_min(LANES, width - j);
    gemm_pack_some(dst + j, width, src + j * across, along, across, depth, (int)gemm_min(some, n - j), some);
  }
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */
DC_INLINE void gemm_sum(vf sum[TALL][VECTORS], const float *a, const float *b, int64_t depth) {
#pragma GCC unroll 16
  for (int i = 0; i < TALL; i++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) sum[i][v] = v_set1(0.0f);
  for (int64_t p = 0; p < depth; p++, a += TALL, b += WIDE) {
    vf row[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) row[v] = v_load32(b + v * LANES, LANES);
#pragma GCC unroll 16
    for (int i = 0; i < TALL; i++) {
      const vf x = v_set1(a[i]);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) sum[i][v] = v_fma(x, row[v], sum[i][v]);
    }
  }
}

DC_INLINE void gemm_put(float *c, int r, vf sum, vf alpha, vf beta, int reads) {
  v_store32(c, r, v_canonical(reads ? v_fma(alpha, sum, v_mul(beta, v_load32(c, r))) : v_mul(alpha, sum)));
}

/* One tile of c: beta c + alpha (a b), of rows x cols of it. */
DC_INLINE void gemm_tile(const float *a, const float *b, int64_t depth, float *c, int64_t stride, int rows, int cols,
                         float alpha, float beta) {
  const vf factor = v_set1(alpha), old = v_set1(beta);
  vf sum[TALL][VECTORS];
  for (int i = 0; i < rows; i++) v_prefetch(c + i * stride, 0), v_prefetch(c + i * stride, (WIDE - 1) * 4);
  gemm_sum(sum, a, b, depth);
  if (rows == TALL && cols == WIDE) {
#pragma GCC unroll 16
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++)
        gemm_put(c + i * stride + v * LANES, LANES, sum[i][v], factor, old, beta != 0.0f);
    return;
  }
  for (int i = 0; i < rows; i++)
    for (int v = 0; v * LANES < cols; v++)
      gemm_put(c + i * stride + v * LANES, (int)gemm_min(LANES, cols - v * LANES), sum[i][v], factor, old,
               beta != 0.0f);
}

void DC_BODY(gemm)(const dc_gemm_args *t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *scratch) {
  float *packed_a = scratch;
  float *packed_b = scratch + (gemm_min(rows, GEMM_ROWS) + DC__GEMM_SLACK) * gemm_min(t->k, DC__GEMM_DEPTH);
  for (int64_t j0 = col; j0 < col + cols; j0 += GEMM_COLS)
    for (int64_t p = 0; p < t->k; p += DC__GEMM_DEPTH) {
      const int64_t wide = gemm_min(GEMM_COLS, col + cols - j0), depth = gemm_min(DC__GEMM_DEPTH, t->k - p);
      const float beta = p ? 1.0f : t->beta;
      for (int64_t j = 0; j < wide; j += WIDE)
        gemm_pack(packed_b + j * depth, WIDE, t->b + p * t->b_stride[0] + (j0 + j) * t->b_stride[1], t->b_stride[0],
                  t->b_stride[1], depth, (int)gemm_min(WIDE, wide - j));
      for (int64_t i0 = row; i0 < row + rows; i0 += GEMM_ROWS) {
        const int64_t tall = gemm_min(GEMM_ROWS, row + rows - i0);
        for (int64_t i = 0; i < tall; i += TALL)
          gemm_pack(packed_a + i * depth, TALL, t->a + (i0 + i) * t->a_stride[0] + p * t->a_stride[1], t->a_stride[1],
                    t->a_stride[0], depth, (int)gemm_min(TALL, tall - i));
        for (int64_t j = 0; j < wide; j += WIDE)
          for (int64_t i = 0; i < tall; i += TALL)
            gemm_tile(packed_a + i * depth, packed_b + j * depth, depth, t->c + (i0 + i) * t->c_stride + j0 + j,
                      t->c_stride, (int)gemm_min(TALL, tall - i), (int)gemm_min(WIDE, wide - j), t->alpha, beta);
      }
    }
}
