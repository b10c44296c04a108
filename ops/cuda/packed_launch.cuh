// packed_launch.cuh: what packed.cu has for step.cu and lamb.cu.
#ifndef DEEPC_CUDA_PACKED_LAUNCH_CUH
#define DEEPC_CUDA_PACKED_LAUNCH_CUH

#include "cuda/launch.cuh"

// The tensors of a call whose states have a format; those without are left to the caller. Arguments are checked, and
// the device is the current one.
int dc__cuda_packed_step(const dc_step_args *tensors, int64_t count, cudaStream_t stream);
int dc__cuda_packed_lamb(const dc_lamb_args *tensors, int64_t count, int apply, cudaStream_t stream);

#endif
