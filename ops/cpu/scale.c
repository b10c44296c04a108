/* scale.c: bodies of dc_scale. */
#include "cpu/vec.h"

DC_INLINE void scale_loop(void *x, int dt, float a, int64_t n) {
  const vf va = v_set1(a);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) v_put(x, dt, i, LANES, v_mul(va, v_get(x, dt, i, LANES)));
  if (i < n) v_put(x, dt, i, (int)(n - i), v_mul(va, v_get(x, dt, i, (int)(n - i))));
}

void DC_BODY(scale)(void *x, int dt, float a, int64_t n) { DC_FOR_LOW(dt, DT, scale_loop(x, DT, a, n)); }
