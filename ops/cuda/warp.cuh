// warp.cuh: what the threads of a warp or of a CUDA block do together: barriers, shuffles, products of small matrices
// on tensor cores. Compiled as plain C++ too, where block_stand_in.h runs the threads of a block in turn.
//
// mma is PTX's mma.sync.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16 with floating-point type"), which sm_80
// and all later GPUs have. Lane l of a warp, with g = l / 4 and q = l % 4, has of
//   a, 16 x 16   a[0]: (g, 2q), (g, 2q + 1); a[1]: row g + 8; a[2]: columns 8 further; a[3]: both
//   b, 16 x 8    b[0]: (2q, g), (2q + 1, g); b[1]: rows 8 further
//   c, 16 x 8    c[0], c[1]: (g, 2q), (g, 2q + 1); c[2], c[3]: row g + 8
// two elements a register, the first in the lower half.
#ifndef DEEPC_CUDA_WARP_CUH
#define DEEPC_CUDA_WARP_CUH

#include "cuda/bodies.cuh"

#if !defined(__CUDACC__)
#include "cuda/block_stand_in.h"
#endif

namespace dc_gpu {

#if defined(__CUDACC__)
DC_GPU int block_thread(void) { return (int)threadIdx.x; }
DC_GPU void block_sync(void) { __syncthreads(); }
DC_GPU void warp_sync(void) { __syncwarp(); }
DC_GPU float from_lane(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
DC_GPU uint32_t from_lane(uint32_t v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
DC_GPU uint32_t ballot(bool yes) { return __ballot_sync(0xffffffffu, yes); } // bit l: what lane l says
DC_GPU int bits_of(uint32_t mask) { return __popc(mask); }
DC_GPU uint32_t most_of_warp(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); } // the largest v
DC_GPU double from_lane(double v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
// Of all threads of the grid, in any order.
DC_GPU void raise_to(uint32_t *at, uint32_t v) { atomicMax(at, v); }
DC_GPU void add_to(double *at, double v) { atomicAdd(at, v); }

// 16 bytes from global to shared memory, zeros unless `there`: this thread has them after copies_wait.
DC_GPU void copy_ahead16(void *to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
               : "memory");
}
DC_GPU void copies_wait(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// c += a b
template <class T> DC_GPU void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> DC_GPU void mma<BF16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DC_GPU void mma<F16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 x 8 in shared memory; row: this lane's of the 32 rows (matrix lane / 8, row lane % 8), 16 bytes.
// m[k] gets elements (g, 2q), (g, 2q + 1) of matrix k; turned: (2q, g), (2q + 1, g).
template <bool TURNED> DC_GPU void load_matrices(uint32_t (&m)[4], const void *row) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
  if constexpr (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// 2^x to 2^-22; 0 below -126.
DC_GPU float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// y, or 0 if that is less; NaN of a NaN.
DC_GPU float not_above_0(float y) {
  float least;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(least) : "f"(y));
  return least;
}
DC_GPU uint32_t high_half(uint32_t a, uint32_t b) { return __umulhi(a, b); }
#endif

DC_GPU double from_lane_beside(double v, int distance) { return from_lane(v, block_thread() % 32 ^ distance); }
DC_GPU float from_lane_beside(float v, int distance) { return from_lane(v, block_thread() % 32 ^ distance); }

} // namespace dc_gpu
#endif
