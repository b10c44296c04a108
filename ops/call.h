/* call.h: what the public wrappers of the ops share: the checks of check.h with this library's error text, the
 * floating-point environment that the contract promises, and the sizes of a thread's share. Included by dispatch.c,
 * compress.c, find.c, xent.c, gemm.c, fused.c and attention.c. */
#ifndef DEEPC_OPS_CALL_H
#define DEEPC_OPS_CALL_H

#include <stdlib.h>

#define CHECK_FAIL DC_FAIL
#include "check.h"

/* ---- floating-point environment ---------------------------------------------------------------------------------- */
/* The contract is round to nearest with denormals kept; a framework may have set flush-to-zero on its threads
 * (torch.set_flush_denormal), which would make results depend on who runs the range. */
#if defined(__x86_64__)
enum { MXCSR_DEFAULT = 0x1f80, MXCSR_FLUSHING = MXCSR_DEFAULT | 0x8000 | 0x40 }; /* FTZ, DAZ */
static inline unsigned fp_enter(void) {
  const unsigned old = __builtin_ia32_stmxcsr();
  if ((old & ~0x3fu) != MXCSR_DEFAULT) __builtin_ia32_ldmxcsr(MXCSR_DEFAULT);
  return old;
}
/* For arithmetic that is defined with denormals as zero. */
static inline unsigned fp_enter_flushing(void) {
  const unsigned old = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(MXCSR_FLUSHING);
  return old;
}
static inline void fp_leave(unsigned old) {
  if ((old & ~0x3fu) != (__builtin_ia32_stmxcsr() & ~0x3fu)) __builtin_ia32_ldmxcsr(old);
}
#else
static inline unsigned fp_enter(void) { return 0; }
static inline unsigned fp_enter_flushing(void) { return 0; }
static inline void fp_leave(unsigned old) { (void)old; }
#endif

/* Above this a written-only array is stored past the caches: it would push out what they hold and each line would be
 * read before it is overwritten. Measured in the heads of cpu/copy.c, cast.c and reduce.c. */
enum { CALL_STREAM_BYTES = 4 << 20 };

/* Elements of `bytes` each that make a range worth a thread: about 512 KiB, some 30 us of memory traffic, against a few
 * us to wake a thread. A multiple of DC_BLOCK. */
static inline int64_t call_grain(int64_t bytes) {
  const int64_t blocks = ((int64_t)512 << 10) / (bytes * DC_BLOCK);
  return (blocks > 0 ? blocks : 1) * DC_BLOCK;
}

/* ---- scratch of a thread's share --------------------------------------------------------------------------------- */
/* `bytes` on a cache line, or NULL. Pages that are there from the last call: in attention at 5 % of the pairs, zeroing
 * new ones took half of the time (measured). */
static inline float *call_scratch_take(int64_t bytes) {
  const size_t whole = (size_t)dc__round_up(bytes, 64);
  float *p = dc_heap_take(whole);
  return p ? p : aligned_alloc(64, whole);
}
static inline void call_scratch_give(float *p) {
  if (dc_heap_give(p) == 0) free(p);
}

#endif
