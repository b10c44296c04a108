/* axpy.c: bodies of dc_axpy. */
#include "cpu/vec.h"

DC_INLINE void axpy_step(float *y, vf a, const void *x, int xdt, int64_t i, int r) {
  v_put(y, DC_F32, i, r, v_fma(a, v_get(x, xdt, i, r), v_get(y, DC_F32, i, r)));
}

DC_INLINE void axpy_loop(float *y, float a, const void *x, int xdt, int64_t n) {
  const vf va = v_set1(a);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) axpy_step(y, va, x, xdt, i, LANES);
  if (i < n) axpy_step(y, va, x, xdt, i, (int)(n - i));
}

void DC_BODY(axpy)(float *y, float a, const void *x, int xdt, int64_t n) {
  DC_FOR_LOW(xdt, DT, axpy_loop(y, a, x, DT, n));
}
