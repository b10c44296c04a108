/* call.h: what the public wrappers of the ops share: the floating-point environment that the contract promises, checks
 * of arguments, and the sizes of a thread's share. Included by dispatch.c, compress.c, xent.c and fused.c. */
#ifndef DEEPC_OPS_CALL_H
#define DEEPC_OPS_CALL_H

#include "ops.h"

/* ---- floating-point environment ---------------------------------------------------------------------------------- */
/* The contract is round to nearest with denormals kept; a framework may have set flush-to-zero on its threads
 * (torch.set_flush_denormal), which would make results depend on who runs the range. */
#if defined(__x86_64__)
enum { MXCSR_DEFAULT = 0x1f80 };
static inline unsigned fp_enter(void) {
  const unsigned old = __builtin_ia32_stmxcsr();
  if ((old & ~0x3fu) != MXCSR_DEFAULT) __builtin_ia32_ldmxcsr(MXCSR_DEFAULT);
  return old;
}
static inline void fp_leave(unsigned old) {
  if ((old & ~0x3fu) != MXCSR_DEFAULT) __builtin_ia32_ldmxcsr(old);
}
#else
static inline unsigned fp_enter(void) { return 0; }
static inline void fp_leave(unsigned old) { (void)old; }
#endif

/* ---- validation -------------------------------------------------------------------------------------------------- */
static inline int is_low(int dt) { return dt == DC_F32 || dt == DC_BF16 || dt == DC_F16; }

static inline int check_low(int dt, const char *what) {
  if (is_low(dt)) return DC_OK;
  return DC_FAIL(DC_E_DTYPE, "%s is dtype %d (%s); this op takes fp32, bf16 and fp16", what, dt, dc_dtype_name(dt));
}

/* n bytes or elements; 16 bytes an element is more than any op touches per array, so byte counts can't overflow. */
static inline int check_count(int64_t n) {
  if (n < 0) return DC_FAIL(DC_E_INVALID, "n = %lld is negative", (long long)n);
  if (n > INT64_MAX / 16) return DC_FAIL(DC_E_INVALID, "n = %lld is more than memory can hold", (long long)n);
  return DC_OK;
}

static inline int check_array(const void *p, size_t element, int64_t n, const char *what) {
  if (n > 0 && !p) return DC_FAIL(DC_E_INVALID, "%s is NULL with n = %lld", what, (long long)n);
  if ((uintptr_t)p % element)
    return DC_FAIL(DC_E_INVALID, "%s = %p is not aligned to its element of %zu bytes", what, p, element);
  return DC_OK;
}

static inline int overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
  const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
  return x < y + (uintptr_t)b_bytes && y < x + (uintptr_t)a_bytes;
}

static inline int64_t bytes_of(int dt, int64_t n) { return (int64_t)dc_dtype_size(dt) * n; }

/* Above this a written-only array is stored past the caches: it would push out what they hold and each line would be
 * read before it is overwritten. Measured in the heads of cpu/copy.c, cast.c and reduce.c. */
enum { STREAM_BYTES = 4 << 20 };

/* Elements of `bytes` each that make a range worth a thread: about 512 KiB, some 30 us of memory traffic, against a few
 * us to wake a thread. A multiple of DC_BLOCK. */
static inline int64_t grain_of(int64_t bytes) {
  const int64_t blocks = ((int64_t)512 << 10) / (bytes * DC_BLOCK);
  return (blocks > 0 ? blocks : 1) * DC_BLOCK;
}

#endif
