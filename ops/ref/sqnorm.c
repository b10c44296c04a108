/* sqnorm.c: scalar reference of dc_sqnorm. */
#include "ref/scalar.h"

void dc__sqnorm_scalar(const void *x, int dt, int64_t n, double *partial) {
  for (int64_t begin = 0; begin < n; begin += DC_BLOCK) {
    const int64_t len = n - begin < DC_BLOCK ? n - begin : DC_BLOCK;
    double acc[32] = {0};
    for (int64_t i = 0; i < len; i++) {
      const double d = dc__get(x, dt, begin + i);
      acc[i % 32] += d * d; /* exact square, so a fused multiply-add gives the same bits */
    }
    partial[begin / DC_BLOCK] = dc__tree32_f64(acc);
  }
}
