// axpy.cu: dc_cuda_axpy.
#include "cuda/launch.cuh"

template <class X, int V>
__global__ void __launch_bounds__(THREADS) axpy_kernel(float *y, float a, const typename X::stored *x, int64_t n) {
  dc_gpu::axpy<X, V>(y, a, x, n, grid_thread(), grid_threads());
}

template <class X> static int axpy_launch(float *y, float a, const void *from, int64_t n, cudaStream_t stream) {
  typedef typename X::stored stored;
  constexpr int V = dc_gpu::vector_width<dc_gpu::F32, X>();
  const stored *x = static_cast<const stored *>(from);
  if (aligned_to(y, V * sizeof *y) && aligned_to(x, V * sizeof *x))
    axpy_kernel<X, V><<<grid_for(n / V + 1), THREADS, 0, stream>>>(y, a, x, n);
  else axpy_kernel<X, 1><<<grid_for(n), THREADS, 0, stream>>>(y, a, x, n);
  return launched();
}

int dc_cuda_axpy(float *y, float a, const void *x, int xdt, int64_t n, void *stream) {
  DC_TRY(check_axpy(y, x, xdt, n));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(y, "y"));
  return with_low(xdt, [=](auto t) { return axpy_launch<decltype(t)>(y, a, x, n, static_cast<cudaStream_t>(stream)); });
}
