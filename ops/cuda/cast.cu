// cast.cu: dc_cuda_cast, dc_cuda_scale, dc_cuda_copy.
#include "cuda/launch.cuh"

template <class D, class S, int V>
__global__ void __launch_bounds__(THREADS)
    cast_kernel(typename D::stored *dst, const typename S::stored *src, float scale, int64_t n) {
  dc_gpu::cast<D, S, V>(dst, src, scale, n, grid_thread(), grid_threads());
}

template <class D, class S>
static int cast_launch(void *dst, const void *src, float scale, int64_t n, cudaStream_t stream) {
  typedef typename D::stored to;
  typedef typename S::stored from;
  constexpr int V = dc_gpu::vector_width<D, S>();
  to *d = static_cast<to *>(dst);
  const from *s = static_cast<const from *>(src);
  if (aligned_to(dst, V * sizeof(to)) && aligned_to(src, V * sizeof(from)))
    cast_kernel<D, S, V><<<grid_for(n / V + 1), THREADS, 0, stream>>>(d, s, scale, n);
  else cast_kernel<D, S, 1><<<grid_for(n), THREADS, 0, stream>>>(d, s, scale, n);
  return launched();
}

static int cast_run(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, void *stream) {
  DeviceScope device;
  DC_TRY(device.enter(dst, "dst"));
  return with_low(ddt, [=](auto d) {
    return with_low(sdt, [=](auto s) {
      return cast_launch<decltype(d), decltype(s)>(dst, src, scale, n, static_cast<cudaStream_t>(stream));
    });
  });
}

int dc_cuda_cast(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, void *stream) {
  DC_TRY(check_cast(dst, ddt, src, sdt, n));
  return n == 0 ? (int)DC_OK : cast_run(dst, ddt, src, sdt, scale, n, stream);
}

/* a * float(x) in place is a cast to itself. */
int dc_cuda_scale(void *x, int dt, float a, int64_t n, void *stream) {
  DC_TRY(check_scale(x, dt, n));
  return n == 0 ? (int)DC_OK : cast_run(x, dt, x, dt, a, n, stream);
}

/* The driver's copy takes any alignment and reaches the memory's limit. */
int dc_cuda_copy(void *dst, const void *src, int64_t bytes, void *stream) {
  DC_TRY(check_copy(dst, src, bytes));
  if (bytes == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(dst, "dst"));
  const cudaError_t error = cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault,
                                            static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return DC_OK;
  return dc__cuda_error(error, "a copy");
}
