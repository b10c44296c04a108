/* sqnorm.c: bodies of dc_sqnorm. Two blocks are summed side by side: the accumulators of one block form a chain of
 * fused multiply-adds (4 cycles for 16 elements) that alone would be slower than memory.
 *
 * Measured (bench_ops --only sqnorm, one thread of a shared machine, best of 31 rounds): fp32 24.8 GB/s, with prefetch
 * 28 to 29.6, a loop that only reads 29.3. bf16 stays at 21 with AVX-512 (12.6 with AVX2) against 30: widening to fp64
 * costs 9 operations on two ports for 16 elements, whatever the prefetch. The engine takes its norm in reduce_acc,
 * where that is hidden. */
#include "cpu/vec.h"

DC_INLINE vd add_at(vd acc, const void *x, int dt, int64_t i) {
  return dt == DC_F32 ? vd_add_sq_f32(acc, (const float *)x + i) : vd_add_sq(acc, v_get(x, dt, i, LANES));
}

DC_INLINE void two_blocks(const void *x, int dt, int64_t begin, double *partial) {
  vd a = vd_zero(), b = vd_zero();
  for (int64_t i = begin; i < begin + DC_BLOCK; i += LANES) {
    v_ahead(x, dt, i, AHEAD);
    v_ahead(x, dt, i + DC_BLOCK, AHEAD);
    a = add_at(a, x, dt, i);
    b = add_at(b, x, dt, i + DC_BLOCK);
  }
  partial[0] = vd_tree(a);
  partial[1] = vd_tree(b);
}

DC_INLINE void one_block(const void *x, int dt, int64_t begin, int64_t end, double *partial) {
  vd a = vd_zero();
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) a = add_at(a, x, dt, i);
  if (i < end) a = vd_add_sq(a, v_get(x, dt, i, (int)(end - i)));
  *partial = vd_tree(a);
}

DC_INLINE void sqnorm_loop(const void *x, int dt, int64_t n, double *partial) {
  int64_t i = 0;
  for (; i + 2 * DC_BLOCK <= n; i += 2 * DC_BLOCK) two_blocks(x, dt, i, partial + i / DC_BLOCK);
  for (; i < n; i += DC_BLOCK) one_block(x, dt, i, n - i < DC_BLOCK ? n : i + DC_BLOCK, partial + i / DC_BLOCK);
}

void DC_BODY(sqnorm)(const void *x, int dt, int64_t n, double *partial) {
  DC_FOR_LOW(dt, DT, sqnorm_loop(x, DT, n, partial));
}
