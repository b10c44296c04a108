// sqnorm.cu: dc_cuda_sqnorm. The lane structure of ops.h fixes the order of the sums: 16 accumulators a block of
// DC_BLOCK. So half a warp takes a block, a thread an accumulator; a step of the half warp reads 16 neighbours. Wider
// loads would need fewer threads per block, and small arrays have too few blocks already.
#include "cuda/launch.cuh"

// A warp takes two neighbouring blocks. Its loop is the same for all 32 threads (tree16 needs them all); past the end a
// half has no elements and writes nothing.
template <class T>
__global__ void __launch_bounds__(THREADS)
    sqnorm_kernel(const typename T::stored *x, int64_t n, int64_t blocks, double *partial) {
  const int half = threadIdx.x % 32 / dc_gpu::LANES, lane = threadIdx.x % dc_gpu::LANES;
  for (int64_t pair = grid_thread() / 32; pair * 2 < blocks; pair += grid_threads() / 32) {
    const int64_t block = pair * 2 + half;
    const double sum = tree16(block < blocks ? dc_gpu::sqnorm_lane<T>(x, n, block, lane) : 0.0);
    if (lane == 0 && block < blocks) partial[block] = sum;
  }
}

template <class T> static int launch_sqnorm(const void *x, int64_t n, double *partial, cudaStream_t stream) {
  const int64_t blocks = dc_sqnorm_blocks(n);
  const typename T::stored *p = static_cast<const typename T::stored *>(x);
  sqnorm_kernel<T><<<grid_for(blocks * dc_gpu::LANES), THREADS, 0, stream>>>(p, n, blocks, partial);
  return launched();
}

int dc_cuda_sqnorm(const void *x, int dt, int64_t n, double *partial, void *stream) {
  DC_TRY(check_sqnorm(x, dt, n, partial));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(x, "x"));
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  return with_low(dt, [=](auto t) { return launch_sqnorm<decltype(t)>(x, n, partial, queue); });
}
