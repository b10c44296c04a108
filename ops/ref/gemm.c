/* gemm.c: scalar reference of dc_gemm. */
#include "ref/scalar.h"

/* The stretch of k that begins at `begin`. Of bf16 the second of a pair comes first: q is p with its last bit turned.
 */
static float gemm_dot(const dc_gemm_args *t, int64_t i, int64_t j, int64_t begin) {
  const int turn = t->dtype == DC_BF16;
  float sum = 0.0f;
  for (int64_t p = begin; p < begin + DC__GEMM_DEPTH(t->dtype) && p < t->k + (t->k & turn); p++) {
    const int64_t q = p ^ turn;
    const float x = q < t->k ? dc__get(t->a, t->dtype, i * t->a_stride[0] + q * t->a_stride[1]) : 0.0f;
    const float y = q < t->k ? dc__get(t->b, t->dtype, q * t->b_stride[0] + j * t->b_stride[1]) : 0.0f;
    sum = fmaf(x, y, sum); /* a pair has both, which decides whether a zero has a sign */
  }
  return sum;
}

/* What c holds is nothing where beta is 0, NaN too. */
static float gemm_first(const dc_gemm_args *t, int64_t i, int64_t j, float sum) {
  if (t->beta == 0.0f) return t->alpha * sum;
  return fmaf(t->alpha, sum, t->beta * dc__get(t->c, t->dtype, i * t->c_stride + j));
}

static float gemm_fp32(const dc_gemm_args *t, int64_t i, int64_t j) {
  float out = gemm_first(t, i, j, gemm_dot(t, i, j, 0));
  for (int64_t p = DC__GEMM_DEPTH(DC_F32); p < t->k; p += DC__GEMM_DEPTH(DC_F32))
    out = fmaf(t->alpha, gemm_dot(t, i, j, p), out);
  return out;
}

static float gemm_bf16(const dc_gemm_args *t, int64_t i, int64_t j) {
  float sum = gemm_dot(t, i, j, 0);
  for (int64_t p = DC__GEMM_DEPTH(DC_BF16); p < t->k; p += DC__GEMM_DEPTH(DC_BF16)) sum += gemm_dot(t, i, j, p);
  return gemm_first(t, i, j, sum);
}

void dc__gemm_scalar(const dc_gemm_args *t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *scratch) {
  (void)scratch;
  for (int64_t i = row; i < row + rows; i++)
    for (int64_t j = col; j < col + cols; j++)
      dc__put(t->out, t->dtype, i * t->out_stride + j, t->dtype == DC_F32 ? gemm_fp32(t, i, j) : gemm_bf16(t, i, j));
}
