// reduce.cu: dc_cuda_reduce and dc_cuda_reduce_acc.
#include "cuda/launch.cuh"

#include <string.h>

using dc_gpu::SourceList;
using dc_gpu::Sources;

static bool reduce_all_aligned(const void *const *src, int nsrc, size_t bytes) {
  for (int k = 0; k < nsrc; k++)
    if (!aligned_to(src[k], bytes)) return false;
  return true;
}

template <int CAPACITY> static Sources<CAPACITY> reduce_pack_sources(const void *const *src, int nsrc) {
  Sources<CAPACITY> packed;
  memset(&packed, 0, sizeof packed);
  memcpy(packed.p, src, (size_t)nsrc * sizeof *src);
  return packed;
}

// Calls f with the sources as a kernel takes them.
template <class F> static int reduce_with_sources(const void *const *src, int nsrc, cudaStream_t stream, F f) {
  if (nsrc <= dc_gpu::FEW_SOURCES) return f(reduce_pack_sources<dc_gpu::FEW_SOURCES>(src, nsrc));
  if (nsrc <= dc_gpu::MANY_SOURCES) return f(reduce_pack_sources<dc_gpu::MANY_SOURCES>(src, nsrc));
  const size_t bytes = (size_t)nsrc * sizeof *src;
  void *table = nullptr;
  cudaError_t error = cudaMallocAsync(&table, bytes, stream);
  if (error != cudaSuccess) return dc__cuda_error(error, "memory for the table of sources");
  error = cudaMemcpyAsync(table, src, bytes, cudaMemcpyHostToDevice, stream); // staged before it returns
  const int rc = error == cudaSuccess ? f(SourceList{static_cast<const void *const *>(table)})
                                      : dc__cuda_error(error, "copying the table of sources");
  (void)cudaFreeAsync(table, stream);
  return rc;
}

// ---- reduce --------------------------------------------------------------------------------------------------------
template <class T, int V, class Src>
__global__ void __launch_bounds__(THREADS)
    reduce_kernel(typename T::stored *dst, const __grid_constant__ Src src, int nsrc, int op, double share, int64_t n) {
  dc_gpu::reduce<T, V>(dst, src, nsrc, op, share, n, grid_thread(), grid_threads());
}

template <class T>
static int reduce_launch(void *to, const void *const *src, int nsrc, int op, int64_t n, cudaStream_t stream) {
  typedef typename T::stored stored;
  constexpr int V = dc_gpu::vector_width<T, T>();
  stored *dst = static_cast<stored *>(to);
  const double share = 1.0 / nsrc;
  const bool wide = aligned_to(dst, 16) && reduce_all_aligned(src, nsrc, 16);
  return reduce_with_sources(src, nsrc, stream, [=](auto table) {
    using Src = decltype(table);
    if (wide) reduce_kernel<T, V, Src><<<grid_for(n / V + 1), THREADS, 0, stream>>>(dst, table, nsrc, op, share, n);
    else reduce_kernel<T, 1, Src><<<grid_for(n), THREADS, 0, stream>>>(dst, table, nsrc, op, share, n);
    return launched();
  });
}

static int reduce_launch_of(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n,
                            cudaStream_t stream) {
  switch (dt) {
  case DC_F64: return reduce_launch<dc_gpu::F64>(dst, src, nsrc, op, n, stream);
  case DC_I8: return reduce_launch<dc_gpu::Int<int8_t>>(dst, src, nsrc, op, n, stream);
  case DC_U8: return reduce_launch<dc_gpu::Int<uint8_t>>(dst, src, nsrc, op, n, stream);
  case DC_I16: return reduce_launch<dc_gpu::Int<int16_t>>(dst, src, nsrc, op, n, stream);
  case DC_I32: return reduce_launch<dc_gpu::Int<int32_t>>(dst, src, nsrc, op, n, stream);
  case DC_I64: return reduce_launch<dc_gpu::Int<int64_t>>(dst, src, nsrc, op, n, stream);
  default: return with_low(dt, [=](auto t) { return reduce_launch<decltype(t)>(dst, src, nsrc, op, n, stream); });
  }
}

int dc_cuda_reduce(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, void *stream) {
  DC_TRY(check_reduce(dst, src, nsrc, dt, op, n));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(dst, "dst"));
  return reduce_launch_of(dst, src, nsrc, dt, op, n, static_cast<cudaStream_t>(stream));
}

// ---- reduce_acc ----------------------------------------------------------------------------------------------------
template <class S, int V, class Src>
__global__ void __launch_bounds__(THREADS)
    reduce_acc_kernel(float *acc, const __grid_constant__ Src src, int nsrc, int assign, int64_t n) {
  dc_gpu::reduce_acc<S, V>(acc, src, nsrc, assign, n, grid_thread(), grid_threads());
}

// As sqnorm_kernel: a group of lanes a block.
template <class S, bool WIDE, class Src>
__global__ void __launch_bounds__(THREADS)
    reduce_acc_norm_kernel(float *acc, const __grid_constant__ Src src, int nsrc, int assign, int64_t n, int64_t blocks,
                           double *partial) {
  constexpr int V = dc_gpu::Lane<S, dc_gpu::BLOCK_SUMS>::width, L = dc_gpu::Lane<S, dc_gpu::BLOCK_SUMS>::count;
  for (int64_t block = group_index<L>(); block < blocks; block += group_count<L>()) {
    const int lane = (int)(threadIdx.x % L);
    double square[V];
    dc_gpu::reduce_acc_lane<S, WIDE>(square, acc, src, nsrc, assign, n, block, lane);
    const double all = group_tree<V, L>(square);
    if (lane == 0) partial[block] = dc_gpu::canonical(all);
  }
}

template <class S>
static int reduce_launch_acc(float *acc, const void *const *src, int nsrc, int64_t n, int assign, double *partial,
                             cudaStream_t stream) {
  constexpr int V = dc_gpu::vector_width<dc_gpu::F32, S>();
  const int64_t blocks = dc_sqnorm_blocks(n);
  const unsigned groups = grid_for(blocks * dc_gpu::Lane<S, dc_gpu::BLOCK_SUMS>::count);
  const bool wide = aligned_to(acc, 16) && reduce_all_aligned(src, nsrc, 16);
  const bool vectors = aligned_to(acc, V * sizeof *acc) &&
                       reduce_all_aligned(src, nsrc, V * sizeof(typename S::stored));
  return reduce_with_sources(src, nsrc, stream, [=](auto table) {
    using Src = decltype(table);
    if (partial && wide)
      reduce_acc_norm_kernel<S, true, Src>
          <<<groups, THREADS, 0, stream>>>(acc, table, nsrc, assign, n, blocks, partial);
    else if (partial)
      reduce_acc_norm_kernel<S, false, Src>
          <<<groups, THREADS, 0, stream>>>(acc, table, nsrc, assign, n, blocks, partial);
    else if (vectors)
      reduce_acc_kernel<S, V, Src><<<grid_for(n / V + 1), THREADS, 0, stream>>>(acc, table, nsrc, assign, n);
    else reduce_acc_kernel<S, 1, Src><<<grid_for(n), THREADS, 0, stream>>>(acc, table, nsrc, assign, n);
    return launched();
  });
}

int dc_cuda_reduce_acc(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial,
                       void *stream) {
  DC_TRY(check_reduce_acc(acc, src, nsrc, dt, n, partial));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(acc, "acc"));
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  return with_low(
      dt, [=](auto t) { return reduce_launch_acc<decltype(t)>(acc, src, nsrc, n, assign != 0, partial, queue); });
}
