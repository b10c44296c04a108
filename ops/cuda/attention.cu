// attention.cu: dc_cuda_attention and its gradient. Bodies: attention.cuh.
//
// Groups, slopes and layouts are in device memory, so their values are not looked at here.
#include "cuda/attention.cuh"
#include "cuda/launch.cuh"

using dc_gpu::AttPlan;

extern __shared__ __align__(16) char att_room[];

// Blocks on one processor that registers are shared out for: what was fastest on an H200 (docs/lab/attention.md).
enum { ATT_BLOCKS = 2 };
template <class T, int N>
constexpr int att_forward_blocks = N != 8                            ? ATT_BLOCKS
                                   : sizeof(typename T::stored) == 2 ? 4
                                                                     : 3;
template <class T, int N, bool PLAIN>
__global__ void __launch_bounds__(dc_gpu::ATT_THREADS, att_forward_blocks<T, N>)
    att_forward_kernel(const __grid_constant__ dc_attention_args a, const __grid_constant__ AttPlan plan) {
  for (int64_t unit = blockIdx.x; unit < plan.units; unit += gridDim.x)
    dc_gpu::att_forward<T, N, PLAIN>(a, plan, att_room, unit);
}
template <class T, int N, bool PLAIN>
__global__ void __launch_bounds__(dc_gpu::ATT_THREADS, ATT_BLOCKS)
    att_grad_q_kernel(const __grid_constant__ dc_attention_grad_args a, const __grid_constant__ AttPlan plan,
                      const float *deltas) {
  for (int64_t unit = blockIdx.x; unit < plan.units; unit += gridDim.x)
    dc_gpu::att_grad_q<T, N, PLAIN>(a, plan, deltas, att_room, unit);
}
template <class T, int N, bool PLAIN>
__global__ void __launch_bounds__(dc_gpu::ATT_THREADS, ATT_BLOCKS)
    att_grad_kv_kernel(const __grid_constant__ dc_attention_grad_args a, const __grid_constant__ AttPlan plan,
                       const float *deltas) {
  for (int64_t unit = blockIdx.x; unit < plan.units; unit += gridDim.x)
    dc_gpu::att_grad_kv<T, N, PLAIN>(a, plan, deltas, att_room, unit);
}
template <class T>
__global__ void __launch_bounds__(dc_gpu::ATT_THREADS)
    att_grad_bias_kernel(const __grid_constant__ dc_attention_grad_args a, const __grid_constant__ AttPlan plan,
                         const __grid_constant__ dc_gpu::AttBiasUnits n, int64_t units, const float *deltas) {
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x)
    dc_gpu::att_grad_bias<T>(a, plan, n, deltas, att_room, unit);
}
// A warp a query.
template <class T>
__global__ void __launch_bounds__(THREADS)
    att_delta_kernel(const __grid_constant__ dc_attention_grad_args a, float *deltas) {
  const int64_t count = a.batch * a.heads * a.rows;
  for (int64_t row = grid_thread() / dc_gpu::WARP; row < count; row += grid_threads() / dc_gpu::WARP) {
    const float delta = dc_gpu::att_delta<T>(a, row / a.rows / a.heads, row / a.rows % a.heads, row % a.rows);
    if (threadIdx.x % dc_gpu::WARP == 0) deltas[row] = delta;
  }
}

// What the current device has.
static int att_room_of(dc_gpu::AttRoom *room) {
  int device, per_block, per_processor;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return dc__cuda_error(error, "asking for the size of shared memory");
  const int half = per_processor / 2 - 1024; // which CUDA keeps of each block
  room->most = per_block, room->half = half < per_block ? half : per_block;
  return DC_OK;
}

// A block a unit, with more shared memory than a kernel has unasked. The limit is the kernel's, not the launch's: all a
// block can have, so that threads that launch it with other sizes at the same time don't take it from each other.
template <class K, class... Args>
static int att_launch(K kernel, int64_t units, int bytes, const dc_gpu::AttRoom &room, cudaStream_t stream,
                      const Args &...args) {
  if (units == 0) return DC_OK;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room.most);
  if (error != cudaSuccess) return dc__cuda_error(error, "asking for shared memory");
  kernel<<<grid_of(units), dc_gpu::ATT_THREADS, (size_t)bytes, stream>>>(args...);
  return launched();
}

// f(Width<N>, Width<PLAIN>) for results of `sums` columns a unit.
template <class F> static int att_with_shape(int sums, bool plain, F f) {
  using dc_gpu::Width;
  if (sums == 64) return plain ? f(Width<8>(), Width<1>()) : f(Width<8>(), Width<0>());
  return plain ? f(Width<16>(), Width<1>()) : f(Width<16>(), Width<0>());
}

int dc_cuda_attention(const dc_attention_args *args, void *stream) {
  dc_attention_args a;
  DC_TRY(check_attention(args, &a));
  if (a.batch == 0 || a.heads == 0 || a.rows == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.lse, "lse"));
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  dc_gpu::AttRoom room;
  DC_TRY(att_room_of(&room));
  const AttPlan plan = dc_gpu::att_forward_plan(a, room);
  return with_low(a.dtype, [&](auto t) {
    using T = decltype(t);
    return att_with_shape(plan.sums, dc_gpu::att_plain(a), [&](auto pieces, auto plain) {
      constexpr int N = decltype(pieces)::value;
      constexpr bool PLAIN = decltype(plain)::value != 0;
      return att_launch(att_forward_kernel<T, N, PLAIN>, plan.units, plan.bytes, room, queue, a, plan);
    });
  });
}

template <class T> static int att_launch_grad(const dc_attention_grad_args &a, float *deltas, cudaStream_t queue) {
  const float *const of = deltas;
  dc_gpu::AttRoom room;
  DC_TRY(att_room_of(&room));
  const AttPlan of_q = dc_gpu::att_grad_plan(dc_gpu::ATT_DQ, a, room);
  const AttPlan of_kv = dc_gpu::att_grad_plan(dc_gpu::ATT_DKV, a, room);
  const int64_t rows = a.batch * a.heads * a.rows;
  if (rows > 0) {
    att_delta_kernel<T><<<grid_for(rows * dc_gpu::WARP), THREADS, 0, queue>>>(a, deltas);
    DC_TRY(launched());
  }
  DC_TRY(att_with_shape(of_q.sums, dc_gpu::att_plain(a), [&](auto pieces, auto plain) {
    constexpr int N = decltype(pieces)::value;
    constexpr bool PLAIN = decltype(plain)::value != 0;
    DC_TRY(att_launch(att_grad_q_kernel<T, N, PLAIN>, of_q.units, of_q.bytes, room, queue, a, of_q, of));
    return att_launch(att_grad_kv_kernel<T, N, PLAIN>, of_kv.units, of_kv.bytes, room, queue, a, of_kv, of);
  }));
  if (!a.dbias) return DC_OK;
  const AttPlan of_bias = dc_gpu::att_grad_plan(dc_gpu::ATT_DBIAS, a, room);
  const dc_gpu::AttBiasUnits n = dc_gpu::att_bias_units(a);
  const int64_t units = dc_gpu::att_bias_count(n);
  return att_launch(att_grad_bias_kernel<T>, units, of_bias.bytes, room, queue, a, of_bias, n, units, of);
}

int dc_cuda_attention_grad(const dc_attention_grad_args *args, float *deltas, void *stream) {
  dc_attention_grad_args a;
  DC_TRY(check_attention_grad(args, &a));
  if (a.batch == 0 || a.heads == 0 || (a.rows == 0 && a.keys == 0)) return DC_OK;
  DC_TRY(check_array(deltas, sizeof *deltas, a.batch * a.heads * a.rows, "deltas"));
  DeviceScope device;
  DC_TRY(device.enter(a.rows ? (const void *)a.lse : a.dk, "lse"));
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  return with_low(a.dtype, [&](auto t) { return att_launch_grad<decltype(t)>(a, deltas, queue); });
}

int dc_cuda_zero(void *array, int64_t bytes, void *stream) {
  if (bytes < 0) return CUDA_FAIL(DC_E_INVALID, "bytes = %lld; it must not be negative", (long long)bytes);
  if (bytes == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(array, "array"));
  const cudaError_t error = cudaMemsetAsync(array, 0, (size_t)bytes, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? (int)DC_OK : dc__cuda_error(error, "cudaMemsetAsync");
}
