// packed_launch.cuh: what packed.cu has for step.cu and lamb.cu, and what LAMB's kernels share.
#ifndef DEEPC_CUDA_PACKED_LAUNCH_CUH
#define DEEPC_CUDA_PACKED_LAUNCH_CUH

#include "cuda/lamb.cuh"
#include "cuda/launch.cuh"

// The tensors of a call whose states have a format; those without are left to the caller. Arguments are checked, and
// the device is the current one.
int dc__cuda_packed_step(const dc_step_args *tensors, int64_t count, cudaStream_t stream);
int dc__cuda_packed_lamb(const dc_lamb_args *tensors, int64_t count, int apply, cudaStream_t stream);

// The sums of a block of the flat space from those of its LAMB_LANES threads; for all of them.
__device__ __forceinline__ void store_lamb_sums(dc_gpu::LambSums sums, int lane, double *param, double *update) {
  const double p = group_tree<1, dc_gpu::LAMB_LANES>(&sums.param), u = group_tree<1, dc_gpu::LAMB_LANES>(&sums.update);
  if (lane == 0) *param = dc_gpu::canonical(p), *update = dc_gpu::canonical(u);
}

#endif
