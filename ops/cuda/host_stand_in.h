// host_stand_in.h: the CUDA names that bodies.cuh uses, for a plain C++ compiler (tests only). Misaligned vector
// accesses and stores to global memory that go to shared memory, which trap on a GPU, are counted.
#ifndef DEEPC_CUDA_HOST_STAND_IN_H
#define DEEPC_CUDA_HOST_STAND_IN_H

#include <math.h>
#include <string.h>

#include "ref/scalar.h"

namespace dc_gpu {
inline long misaligned_accesses = 0, misplaced_stores = 0;
inline const char *shared_begin = nullptr, *shared_end = nullptr; // of the block of threads that runs
inline void move_bytes(void *to, const void *from, const void *memory, size_t bytes) {
  misaligned_accesses += (uintptr_t)memory % bytes != 0;
  memcpy(to, from, bytes);
}
inline void store_global(void *to, const void *from, size_t bytes) {
  const char *at = static_cast<char *>(to);
  misplaced_stores += at >= shared_begin && at < shared_end;
  move_bytes(to, from, to, bytes);
}
inline void load_bytes16(void *to, const void *from) { move_bytes(to, from, from, 16); }
inline void store_bytes16(void *to, const void *from) { store_global(to, from, 16); }
inline void load_bytes8(void *to, const void *from) { move_bytes(to, from, from, 8); }
inline void store_bytes8(void *to, const void *from) { store_global(to, from, 8); }
inline void load_bytes4(void *to, const void *from) { move_bytes(to, from, from, 4); }
inline void store_bytes4(void *to, const void *from) { store_global(to, from, 4); }
inline void load_bytes2(void *to, const void *from) { move_bytes(to, from, from, 2); }
inline void store_bytes2(void *to, const void *from) { store_global(to, from, 2); }
} // namespace dc_gpu

// Not inlined, so that no compiler fuses two of them.
#define DC_APART __attribute__((noinline, unused)) static
DC_APART float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
DC_APART float __fmul_rn(float a, float b) { return a * b; }
DC_APART float __fadd_rn(float a, float b) { return a + b; }
DC_APART float __fsub_rn(float a, float b) { return a - b; }
DC_APART float __fdiv_rn(float a, float b) { return a / b; }
DC_APART float __frcp_rn(float a) { return 1.0f / a; }
DC_APART float __fsqrt_rn(float a) { return sqrtf(a); }
DC_APART double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
DC_APART double __dmul_rn(double a, double b) { return a * b; }
DC_APART double __dadd_rn(double a, double b) { return a + b; }
DC_APART double __ddiv_rn(double a, double b) { return a / b; }
#undef DC_APART
inline uint32_t __float_as_uint(float f) { return dc__bits_of_f32(f); }
inline float __uint_as_float(uint32_t u) { return dc__f32_of_bits(u); }
inline double __longlong_as_double(long long u) {
  double d;
  memcpy(&d, &u, sizeof d);
  return d;
}
/* A half is its bits here. */
inline uint16_t __ushort_as_half(uint16_t h) { return h; }
inline uint16_t __half_as_ushort(uint16_t h) { return h; }
inline float __half2float(uint16_t h) { return dc__f32_of_f16(h); }
inline uint16_t __float2half_rn(float f) { return dc__f16_of_f32(f); }

#endif
