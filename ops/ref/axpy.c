/* axpy.c: scalar reference of dc_axpy. */
#include "ref/scalar.h"

void dc__axpy_scalar(float *y, float a, const void *x, int xdt, int64_t n) {
  for (int64_t i = 0; i < n; i++) dc__put(y, DC_F32, i, fmaf(a, dc__get(x, xdt, i), y[i]));
}
