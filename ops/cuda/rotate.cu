// rotate.cu: dc_cuda_rotate. Body and who does what: rotate.cuh. Run as warps of threads on the CPU
// against the reference, and on a GPU bit by bit.
#include "cuda/launch.cuh"
#include "cuda/rotate.cuh"

#include "check_compress.h"

// Two blocks of threads a multiprocessor: 128 registers, so that one loads while the other computes.
template <bool WIDE> __global__ void __launch_bounds__(THREADS, 2) rotate_kernel(float *x, int64_t n, float root) {
  dc_gpu::rotate<WIDE>(x, n, root, grid_thread() / dc_gpu::WARP, grid_threads() / dc_gpu::WARP);
}

int dc_cuda_rotate(float *x, int64_t n, void *stream) {
  DC_TRY(check_rotate(x, n));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(x, "x"));
  const unsigned grid = grid_for(dc_gpu::rotate_units(n) * dc_gpu::WARP);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  const float root = dc__rotate_factor(2);
  if (aligned_to(x, 16)) rotate_kernel<true><<<grid, THREADS, 0, queue>>>(x, n, root);
  else rotate_kernel<false><<<grid, THREADS, 0, queue>>>(x, n, root);
  return launched();
}
