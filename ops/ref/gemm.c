/* gemm.c: scalar reference of dc_gemm. */
#include "ref/scalar.h"

static float gemm_dot(const dc_gemm_args *t, int64_t i, int64_t j, int64_t begin, int64_t end) {
  float sum = 0.0f;
  for (int64_t p = begin; p < end; p++)
    sum = fmaf(t->a[i * t->a_stride[0] + p * t->a_stride[1]], t->b[p * t->b_stride[0] + j * t->b_stride[1]], sum);
  return sum;
}

static float gemm_element(const dc_gemm_args *t, int64_t i, int64_t j) {
  const float *c = &t->c[i * t->c_stride + j];
  float sum = t->beta == 0.0f ? 0.0f : t->beta * *c; /* what c holds is nothing, NaN too */
  for (int64_t p = 0; p < t->k; p += DC__GEMM_DEPTH) {
    const float part = gemm_dot(t, i, j, p, p + DC__GEMM_DEPTH < t->k ? p + DC__GEMM_DEPTH : t->k);
    sum = p == 0 && t->beta == 0.0f ? t->alpha * part : fmaf(t->alpha, part, sum);
  }
  return sum;
}

void dc__gemm_scalar(const dc_gemm_args *t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *scratch) {
  (void)scratch;
  for (int64_t i = row; i < row + rows; i++)
    for (int64_t j = col; j < col + cols; j++) dc__put(&t->c[i * t->c_stride + j], DC_F32, 0, gemm_element(t, i, j));
}
