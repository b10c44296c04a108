/* sqnorm.c: bodies of dc_sqnorm. The 32 accumulators of a block are two chains of fused multiply-adds, and 8 registers
 * of AVX2. fp32 waits for memory; bf16 for the 9 operations that widen 16 elements to fp64 (docs/lab/kernels.md). */
#include "cpu/vec.h"

DC_INLINE vd sqnorm_add(vd acc, const void *x, int dt, int64_t i) {
  return dt == DC_F32 ? vd_add_sq_f32(acc, (const float *)x + i) : vd_add_sq(acc, v_get(x, dt, i, LANES));
}

DC_INLINE double sqnorm_block(const void *x, int dt, int64_t begin, int64_t end) {
  vd a[2] = {vd_zero(), vd_zero()};
  int64_t i = begin;
  for (; i + 2 * LANES <= end; i += 2 * LANES) {
    v_ahead(x, dt, i, AHEAD);
    if (dt == DC_F32) v_ahead(x, dt, i + LANES, AHEAD); /* once per cache line */
    a[0] = sqnorm_add(a[0], x, dt, i);
    a[1] = sqnorm_add(a[1], x, dt, i + LANES);
  }
  for (int k = 0; i < end; k++, i += LANES) /* less than two vectors */
    a[k] = vd_add_sq(a[k], v_get(x, dt, i, (int)(end - i < LANES ? end - i : LANES)));
  return vd_tree2(a);
}

DC_INLINE void sqnorm_loop(const void *x, int dt, int64_t n, double *partial) {
  for (int64_t i = 0; i < n; i += DC_BLOCK)
    partial[i / DC_BLOCK] = sqnorm_block(x, dt, i, n - i < DC_BLOCK ? n : i + DC_BLOCK);
}

void DC_BODY(sqnorm)(const void *x, int dt, int64_t n, double *partial) {
  DC_FOR_LOW(dt, DT, sqnorm_loop(x, DT, n, partial));
}
