// reduce.cu: dc_cuda_reduce and dc_cuda_reduce_acc.
#include "cuda/launch.cuh"

#include <string.h>

using dc_gpu::Sources;

static bool all_aligned(const void *const *src, int nsrc, size_t bytes) {
  for (int k = 0; k < nsrc; k++)
    if (!aligned_to(src[k], bytes)) return false;
  return true;
}

template <int CAPACITY> static Sources<CAPACITY> pack_sources(const void *const *src, int nsrc) {
  Sources<CAPACITY> packed;
  memset(&packed, 0, sizeof packed);
  memcpy(packed.p, src, (size_t)nsrc * sizeof *src);
  return packed;
}

// ---- reduce --------------------------------------------------------------------------------------------------------
template <class T, int V, int CAPACITY>
__global__ void __launch_bounds__(THREADS)
    reduce_kernel(typename T::stored *dst, const __grid_constant__ Sources<CAPACITY> src, int nsrc, int op,
                  double share, int64_t n) {
  dc_gpu::reduce<T, V>(dst, src, nsrc, op, share, n, grid_thread(), grid_threads());
}

template <class T, int CAPACITY>
static int launch_reduce(void *to, const void *const *src, int nsrc, int op, int64_t n, cudaStream_t stream) {
  typedef typename T::stored stored;
  constexpr int V = dc_gpu::vector_width<T, T>();
  stored *dst = static_cast<stored *>(to);
  const Sources<CAPACITY> packed = pack_sources<CAPACITY>(src, nsrc);
  const double share = 1.0 / nsrc;
  if (aligned_to(dst, 16) && all_aligned(src, nsrc, 16))
    reduce_kernel<T, V, CAPACITY><<<grid_for(n / V + 1), THREADS, 0, stream>>>(dst, packed, nsrc, op, share, n);
  else reduce_kernel<T, 1, CAPACITY><<<grid_for(n), THREADS, 0, stream>>>(dst, packed, nsrc, op, share, n);
  return launched();
}

template <class T>
static int launch_reduce_for(void *dst, const void *const *src, int nsrc, int op, int64_t n, cudaStream_t stream) {
  return nsrc <= FEW_SOURCES ? launch_reduce<T, FEW_SOURCES>(dst, src, nsrc, op, n, stream)
                             : launch_reduce<T, CHECK_MAX_SOURCES>(dst, src, nsrc, op, n, stream);
}

static int launch_reduce_of(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n,
                            cudaStream_t stream) {
  switch (dt) {
  case DC_F32: return launch_reduce_for<dc_gpu::F32>(dst, src, nsrc, op, n, stream);
  case DC_BF16: return launch_reduce_for<dc_gpu::BF16>(dst, src, nsrc, op, n, stream);
  case DC_F16: return launch_reduce_for<dc_gpu::F16>(dst, src, nsrc, op, n, stream);
  case DC_F64: return launch_reduce_for<dc_gpu::F64>(dst, src, nsrc, op, n, stream);
  case DC_I8: return launch_reduce_for<dc_gpu::Int<int8_t>>(dst, src, nsrc, op, n, stream);
  case DC_U8: return launch_reduce_for<dc_gpu::Int<uint8_t>>(dst, src, nsrc, op, n, stream);
  case DC_I16: return launch_reduce_for<dc_gpu::Int<int16_t>>(dst, src, nsrc, op, n, stream);
  case DC_I32: return launch_reduce_for<dc_gpu::Int<int32_t>>(dst, src, nsrc, op, n, stream);
  default: return launch_reduce_for<dc_gpu::Int<int64_t>>(dst, src, nsrc, op, n, stream);
  }
}

int dc_cuda_reduce(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, void *stream) {
  DC_TRY(check_reduce(dst, src, nsrc, dt, op, n));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(dst, "dst"));
  return launch_reduce_of(dst, src, nsrc, dt, op, n, static_cast<cudaStream_t>(stream));
}

// ---- reduce_acc ----------------------------------------------------------------------------------------------------
template <class S, int V, int CAPACITY>
__global__ void __launch_bounds__(THREADS)
    reduce_acc_kernel(float *acc, const __grid_constant__ Sources<CAPACITY> src, int nsrc, int assign, int64_t n) {
  dc_gpu::reduce_acc<S, V>(acc, src, nsrc, assign, n, grid_thread(), grid_threads());
}

// As sqnorm_kernel: half a warp a block, all 32 threads in the loop together.
template <class S, int CAPACITY>
__global__ void __launch_bounds__(THREADS)
    reduce_acc_norm_kernel(float *acc, const __grid_constant__ Sources<CAPACITY> src, int nsrc, int assign, int64_t n,
                           int64_t blocks, double *partial) {
  const int half = threadIdx.x % 32 / dc_gpu::LANES, lane = threadIdx.x % dc_gpu::LANES;
  for (int64_t pair = grid_thread() / 32; pair * 2 < blocks; pair += grid_threads() / 32) {
    const int64_t block = pair * 2 + half;
    double sum = 0;
    if (block < blocks) sum = dc_gpu::reduce_acc_lane<S>(acc, src, nsrc, assign, n, block, lane);
    sum = tree16(sum);
    if (lane == 0 && block < blocks) partial[block] = sum;
  }
}

template <class S, int CAPACITY>
static int launch_reduce_acc(float *acc, const void *const *src, int nsrc, int64_t n, int assign, double *partial,
                             cudaStream_t stream) {
  constexpr int V = dc_gpu::vector_width<dc_gpu::F32, S>();
  const Sources<CAPACITY> packed = pack_sources<CAPACITY>(src, nsrc);
  const int64_t blocks = dc_sqnorm_blocks(n);
  if (partial)
    reduce_acc_norm_kernel<S, CAPACITY>
        <<<grid_for(blocks * dc_gpu::LANES), THREADS, 0, stream>>>(acc, packed, nsrc, assign, n, blocks, partial);
  else if (aligned_to(acc, V * sizeof *acc) && all_aligned(src, nsrc, V * sizeof(typename S::stored)))
    reduce_acc_kernel<S, V, CAPACITY><<<grid_for(n / V + 1), THREADS, 0, stream>>>(acc, packed, nsrc, assign, n);
  else reduce_acc_kernel<S, 1, CAPACITY><<<grid_for(n), THREADS, 0, stream>>>(acc, packed, nsrc, assign, n);
  return launched();
}

int dc_cuda_reduce_acc(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial,
                       void *stream) {
  DC_TRY(check_reduce_acc(acc, src, nsrc, dt, n, partial));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(acc, "acc"));
  return with_low(dt, [=](auto tag) {
    typedef decltype(tag) S;
    const cudaStream_t queue = static_cast<cudaStream_t>(stream);
    return nsrc <= FEW_SOURCES
               ? launch_reduce_acc<S, FEW_SOURCES>(acc, src, nsrc, n, assign != 0, partial, queue)
               : launch_reduce_acc<S, CHECK_MAX_SOURCES>(acc, src, nsrc, n, assign != 0, partial, queue);
  });
}
