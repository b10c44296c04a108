// xent.cu: dc_cuda_cross_entropy_rows. Bodies: xent.cuh. Compiled and checked against the CPU thread by thread; not
// yet timed on a GPU.
//
// Labels are in device memory, so one out of range can't be an error here: its row has loss NaN and gradient 0.
#include "cuda/launch.cuh"
#include "cuda/xent.cuh"

using dc_gpu::WARP;
using dc_gpu::XentSums;

enum { XENT_WARPS = THREADS / WARP };

// Combined over the block, in every thread. `room`: one element per warp.
__device__ float block_max(float mine, float *room) {
  for (int width = WARP / 2; width > 0; width /= 2)
    mine = dc_gpu::larger(mine, __shfl_down_sync(0xffffffffu, mine, width));
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = mine;
  __syncthreads();
  float all = room[0];
  for (int w = 1; w < XENT_WARPS; w++) all = dc_gpu::larger(all, room[w]);
  return all;
}

__device__ XentSums block_sums(XentSums mine, XentSums *room) {
  for (int width = WARP / 2; width > 0; width /= 2) {
    mine.exps += __shfl_down_sync(0xffffffffu, mine.exps, width);
    mine.values += __shfl_down_sync(0xffffffffu, mine.values, width);
  }
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = mine;
  __syncthreads();
  XentSums all = room[0];
  for (int w = 1; w < XENT_WARPS; w++) all.exps += room[w].exps, all.values += room[w].values;
  return all;
}

template <class T> __device__ void one_row(const dc_xent_args &a, int64_t r, float *maxima, XentSums *sums) {
  typename T::stored *x = static_cast<typename T::stored *>(a.logits) + r * a.stride;
  const int64_t label = a.labels[r];
  if (label == a.ignore_index || label < 0 || label >= a.classes) { /* the same for the whole block */
    if (a.loss && threadIdx.x == 0) a.loss[r] = label == a.ignore_index ? 0.0f : dc_gpu::canonical(NAN);
    if (a.gradient) dc_gpu::xent_clear<T>(x, a.classes, threadIdx.x, THREADS);
    return;
  }
  const float at_label = T::up(x[label]);
  const float max = block_max(dc_gpu::xent_max<T>(x, a.classes, threadIdx.x, THREADS), maxima);
  const XentSums all = block_sums(dc_gpu::xent_sums<T>(x, a.classes, max, threadIdx.x, THREADS), sums);
  if (a.loss && threadIdx.x == 0) a.loss[r] = dc_gpu::xent_loss(a, max, all, at_label);
  if (a.gradient)
    dc_gpu::xent_gradient<T>(x, a.classes, dc_gpu::xent_row(a, r, max, all.exps), label, threadIdx.x, THREADS);
}

template <class T> __global__ void __launch_bounds__(THREADS) xent_kernel(const __grid_constant__ dc_xent_args a) {
  __shared__ float maxima[XENT_WARPS];
  __shared__ XentSums sums[XENT_WARPS];
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    one_row<T>(a, r, maxima, sums);
    __syncthreads(); /* before the next row writes to the shared arrays */
  }
}

int dc_cuda_cross_entropy_rows(const dc_xent_args *args, void *stream) {
  dc_xent_args a;
  DC_TRY(check_xent(args, &a));
  if (a.rows == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.logits, "logits"));
  const unsigned grid = grid_of(a.rows);
  return with_low(a.dtype, [=](auto t) {
    xent_kernel<decltype(t)><<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
    return launched();
  });
}
