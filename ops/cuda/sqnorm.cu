// sqnorm.cu: dc_cuda_sqnorm. A group of lanes (4 threads for 16-bit elements, 8 for fp32) has a block of DC_BLOCK.
#include "cuda/launch.cuh"

template <class T, bool WIDE>
__global__ void __launch_bounds__(THREADS)
    sqnorm_kernel(const typename T::stored *x, int64_t n, int64_t blocks, double *partial) {
  constexpr int V = dc_gpu::Lane<T, dc_gpu::BLOCK_SUMS>::width, L = dc_gpu::Lane<T, dc_gpu::BLOCK_SUMS>::count;
  for (int64_t block = group_index<L>(); block < blocks; block += group_count<L>()) {
    const int lane = (int)(threadIdx.x % L);
    double sum[V];
    dc_gpu::sqnorm_lane<T, WIDE>(sum, x, n, block, lane);
    const double all = group_tree<V, L>(sum);
    if (lane == 0) partial[block] = dc_gpu::canonical(all);
  }
}

template <class T> static int sqnorm_launch(const void *x, int64_t n, double *partial, cudaStream_t stream) {
  const int64_t blocks = dc_sqnorm_blocks(n);
  const unsigned grid = grid_for(blocks * dc_gpu::Lane<T, dc_gpu::BLOCK_SUMS>::count);
  const typename T::stored *p = static_cast<const typename T::stored *>(x);
  if (aligned_to(x, 16)) sqnorm_kernel<T, true><<<grid, THREADS, 0, stream>>>(p, n, blocks, partial);
  else sqnorm_kernel<T, false><<<grid, THREADS, 0, stream>>>(p, n, blocks, partial);
  return launched();
}

int dc_cuda_sqnorm(const void *x, int dt, int64_t n, double *partial, void *stream) {
  DC_TRY(check_sqnorm(x, dt, n, partial));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(x, "x"));
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  return with_low(dt, [=](auto t) { return sqnorm_launch<decltype(t)>(x, n, partial, queue); });
}
