// fused.cu: dc_cuda_norm, dc_cuda_swiglu, dc_cuda_gelu, their gradients, and dc_cuda_rotary. Bodies and who does what:
// fused.cuh. Compiled and checked against the CPU thread by thread; not yet timed on a GPU.
#include "cuda/fused.cuh"
#include "cuda/launch.cuh"

using dc_gpu::Sums;
using dc_gpu::WARP;

enum { WARPS = THREADS / WARP, MAX_ROWS_Y = 1 << 15 };

// The sum of a row's 64 accumulators as fused.h combines them, in every lane. All 32 threads must be here.
__device__ __forceinline__ float warp_tree(Sums s) {
  const unsigned all = 0xffffffffu;
  const float lo = __fadd_rn(s.lo, __shfl_down_sync(all, s.lo, 16)),
              hi = __fadd_rn(s.hi, __shfl_down_sync(all, s.hi, 16));
  float sum = __fadd_rn(lo, hi);
  for (int width = 8; width > 0; width /= 2) sum = __fadd_rn(sum, __shfl_down_sync(all, sum, width, 16));
  return __shfl_sync(all, sum, 0);
}

// Calls f(row, lane) with a warp per row.
template <class F> __device__ __forceinline__ void each_row(int64_t rows, F f) {
  for (int64_t row = grid_thread() / WARP; row < rows; row += grid_threads() / WARP) f(row, (int)(threadIdx.x % WARP));
}
static inline unsigned grid_for_rows(int64_t rows) {
  return grid_for(rows > INT64_MAX / WARP ? INT64_MAX : rows * WARP);
}

// ---- sums over rows ------------------------------------------------------------------------------------------------
__global__ void __launch_bounds__(THREADS)
    fold_kernel(void *out, int dt, const float *partial, int64_t blocks, int64_t cols) {
  for (int64_t i = grid_thread(); i < cols; i += grid_threads()) dc_gpu::fold_column(out, dt, partial, blocks, cols, i);
}

static void launch_fold(void *out, int dt, const float *partial, int64_t blocks, int64_t cols, cudaStream_t stream) {
  if (cols > 0) fold_kernel<<<grid_for(cols), THREADS, 0, stream>>>(out, dt, partial, blocks, cols);
}

// A thread per column in x, blocks of rows in y.
static inline dim3 grid_for_columns(int64_t cols, int64_t blocks) {
  return dim3(grid_for(cols), (unsigned)(blocks < MAX_ROWS_Y ? blocks : (int64_t)MAX_ROWS_Y));
}

// ---- norms ---------------------------------------------------------------------------------------------------------
template <class T> __global__ void __launch_bounds__(THREADS) norm_kernel(const __grid_constant__ dc_norm_args a) {
  each_row(a.rows, [&](int64_t row, int lane) {
    const typename T::stored *x = dc_gpu::norm_source<T>(a, row, lane);
    const float mean = a.mean ? __fdiv_rn(warp_tree(dc_gpu::norm_total<T>(x, a.cols, lane)), (float)a.cols) : 0.0f;
    const float squares = warp_tree(dc_gpu::norm_squares<T>(x, a.cols, lane, mean));
    dc_gpu::norm_out<T>(a, x, row, lane, mean, dc_gpu::norm_rstd(squares, a.cols, a.eps));
  });
}

int dc_cuda_norm(const dc_norm_args *args, void *stream) {
  if (!args) return CUDA_FAIL(DC_E_INVALID, "args is NULL");
  const dc_norm_args a = *args;
  DC_TRY(check_norm(&a));
  if (a.rows == 0 || a.cols == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.y, "y"));
  return with_low(a.dtype, [=](auto t) {
    norm_kernel<decltype(t)><<<grid_for_rows(a.rows), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
    return launched();
  });
}

template <class T>
__global__ void __launch_bounds__(THREADS) norm_grad_kernel(const __grid_constant__ dc_norm_grad_args a) {
  each_row(a.rows, [&](int64_t row, int lane) {
    const float along = warp_tree(dc_gpu::grad_along<T>(a, row, lane));
    const float level = a.mean ? warp_tree(dc_gpu::grad_level<T>(a, row, lane)) : 0.0f;
    dc_gpu::grad_out<T>(a, row, lane, along, level);
  });
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    norm_columns_kernel(const __grid_constant__ dc_norm_grad_args a, int64_t block, int64_t blocks, float *dweight,
                        float *dbias) {
  for (int64_t k = blockIdx.y; k < blocks; k += gridDim.y) {
    const int64_t end = (k + 1) * block < a.rows ? (k + 1) * block : a.rows;
    for (int64_t i = grid_thread(); i < a.cols; i += grid_threads())
      dc_gpu::grad_column<T>(a, k * block, end, i, dweight ? dweight + k * a.cols : nullptr,
                             dbias ? dbias + k * a.cols : nullptr);
  }
}

int dc_cuda_norm_grad(const dc_norm_grad_args *args, void *stream_) {
  if (!args) return CUDA_FAIL(DC_E_INVALID, "args is NULL");
  const dc_norm_grad_args a = *args;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  const int sums = (a.dweight != nullptr) + (a.dbias != nullptr);
  DC_TRY(check_norm_grad(&a));
  if (a.cols == 0 || (a.rows == 0 && !sums)) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.rows ? a.dx : a.dweight ? a.dweight : a.dbias, "dx"));
  const int64_t block = dc_row_block(a.rows), blocks = dc_row_blocks(a.rows);
  float *dweight = a.dweight ? a.partial : nullptr;
  float *dbias = a.dbias ? a.partial + (a.dweight ? blocks * a.cols : 0) : nullptr;
  if (a.rows > 0)
    with_low(a.dtype, [=](auto t) {
      using T = decltype(t);
      norm_grad_kernel<T><<<grid_for_rows(a.rows), THREADS, 0, stream>>>(a);
      if (sums)
        norm_columns_kernel<T>
            <<<grid_for_columns(a.cols, blocks), THREADS, 0, stream>>>(a, block, blocks, dweight, dbias);
      return 0;
    });
  if (a.dweight) launch_fold(a.dweight, a.weight_dtype, dweight, blocks, a.cols, stream);
  if (a.dbias) launch_fold(a.dbias, a.weight_dtype, dbias, blocks, a.cols, stream);
  return launched();
}

// ---- activations ---------------------------------------------------------------------------------------------------
// Whether vectors of 16 bytes may be used: pointers and strides are multiples of them.
template <class T, size_t N> static bool wide(const void *const (&p)[N], const int64_t (&stride)[N]) {
  const int V = dc_gpu::vector_width<T, T>();
  for (size_t k = 0; k < N; k++)
    if (!aligned_to(p[k], 16) || stride[k] % V) return false;
  return true;
}

// Blocks of a grid that has a CUDA block per row.
static inline unsigned grid_of_rows(int64_t rows) { return (unsigned)(rows < MAX_GRID ? rows : (int64_t)MAX_GRID); }

#define ROWS_KERNEL(name)                                                                                           \
  template <class T, int V>                                                                                         \
  __global__ void __launch_bounds__(THREADS) name##_kernel(const __grid_constant__ dc_##name##_args a, int64_t n) { \
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x)                                                  \
      dc_gpu::name<T, V>(a, n, row, threadIdx.x, blockDim.x);                                                       \
  }
ROWS_KERNEL(swiglu)
ROWS_KERNEL(swiglu_grad)
ROWS_KERNEL(gelu)
ROWS_KERNEL(gelu_grad)
#undef ROWS_KERNEL

// Arrays without strides as rows of CHUNK, the last one shorter.
static void cut(int64_t n, int64_t *rows, int64_t *cols) {
  *rows = n / dc_gpu::CHUNK + (n % dc_gpu::CHUNK != 0);
  *cols = dc_gpu::CHUNK;
}

int dc_cuda_swiglu(const dc_swiglu_args *args, void *stream_) {
  if (!args) return CUDA_FAIL(DC_E_INVALID, "args is NULL");
  dc_swiglu_args a = *args;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_swiglu(&a));
  const int64_t n = a.rows * a.cols;
  if (n == 0) return DC_OK;
  if (a.gate_stride == a.cols && a.up_stride == a.cols && a.out_stride == a.cols) {
    cut(n, &a.rows, &a.cols);
    a.gate_stride = a.up_stride = a.out_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(a.out, "out"));
  return with_low(a.dtype, [=](auto t) {
    using T = decltype(t);
    if (wide<T>({a.gate, a.up, a.out}, {a.gate_stride, a.up_stride, a.out_stride}))
      swiglu_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
    else swiglu_kernel<T, 1><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
    return launched();
  });
}

int dc_cuda_swiglu_grad(const dc_swiglu_grad_args *args, void *stream_) {
  if (!args) return CUDA_FAIL(DC_E_INVALID, "args is NULL");
  dc_swiglu_grad_args a = *args;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_swiglu_grad(&a));
  const int64_t n = a.rows * a.cols;
  if (n == 0) return DC_OK;
  if (a.dout_stride == a.cols && a.gate_stride == a.cols && a.up_stride == a.cols && a.dgate_stride == a.cols &&
      a.dup_stride == a.cols) {
    cut(n, &a.rows, &a.cols);
    a.dout_stride = a.gate_stride = a.up_stride = a.dgate_stride = a.dup_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(a.dgate, "dgate"));
  return with_low(a.dtype, [=](auto t) {
    using T = decltype(t);
    if (wide<T>({a.dout, a.gate, a.up, a.dgate, a.dup},
                {a.dout_stride, a.gate_stride, a.up_stride, a.dgate_stride, a.dup_stride}))
      swiglu_grad_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
    else swiglu_grad_kernel<T, 1><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
    return launched();
  });
}

int dc_cuda_gelu(const dc_gelu_args *args, void *stream_) {
  if (!args) return CUDA_FAIL(DC_E_INVALID, "args is NULL");
  dc_gelu_args a = *args;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_gelu(&a));
  const int64_t n = a.rows * a.cols;
  if (n == 0) return DC_OK;
  if (!a.bias && a.x_stride == a.cols) {
    cut(n, &a.rows, &a.cols);
    a.x_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(a.out, "out"));
  return with_low(a.dtype, [=](auto t) {
    using T = decltype(t);
    if (wide<T>({a.x, a.out}, {a.x_stride, a.cols}))
      gelu_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
    else gelu_kernel<T, 1><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
    return launched();
  });
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    gelu_columns_kernel(const __grid_constant__ dc_gelu_grad_args a, int64_t block, int64_t blocks) {
  for (int64_t k = blockIdx.y; k < blocks; k += gridDim.y) {
    const int64_t end = (k + 1) * block < a.rows ? (k + 1) * block : a.rows;
    for (int64_t i = grid_thread(); i < a.cols; i += grid_threads())
      dc_gpu::gelu_column<T>(a, k * block, end, i, a.partial + k * a.cols);
  }
}

int dc_cuda_gelu_grad(const dc_gelu_grad_args *args, void *stream_) {
  if (!args) return CUDA_FAIL(DC_E_INVALID, "args is NULL");
  const dc_gelu_grad_args whole = *args;
  dc_gelu_grad_args a = whole;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_gelu_grad(&a));
  const int64_t n = a.rows * a.cols, block = dc_row_block(a.rows), blocks = dc_row_blocks(a.rows);
  if (a.cols == 0 || (n == 0 && !a.dbias)) return DC_OK;
  if (!a.bias && a.x_stride == a.cols) {
    cut(n, &a.rows, &a.cols);
    a.x_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(n ? a.dx : a.dbias, "dx"));
  if (n > 0)
    with_low(a.dtype, [=](auto t) {
      using T = decltype(t);
      if (wide<T>({a.x, a.dout, a.dx}, {a.x_stride, a.cols, a.cols}))
        gelu_grad_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
      else gelu_grad_kernel<T, 1><<<grid_of_rows(a.rows), THREADS, 0, stream>>>(a, n);
      if (a.dbias)
        gelu_columns_kernel<T><<<grid_for_columns(whole.cols, blocks), THREADS, 0, stream>>>(whole, block, blocks);
      return 0;
    });
  if (a.dbias) launch_fold(a.dbias, a.bias_dtype, a.partial, blocks, whole.cols, stream);
  return launched();
}

// ---- rotary embedding ----------------------------------------------------------------------------------------------
template <class T>
__global__ void __launch_bounds__(THREADS) rotary_kernel(const __grid_constant__ dc_rotary_args a, int64_t rows) {
  each_row(rows, [&](int64_t row, int lane) { dc_gpu::rotary<T>(a, row, lane); });
}

int dc_cuda_rotary(const dc_rotary_args *args, void *stream) {
  if (!args) return CUDA_FAIL(DC_E_INVALID, "args is NULL");
  const dc_rotary_args a = *args;
  int64_t rows;
  DC_TRY(check_rotary(&a, &rows));
  if (rows == 0 || a.cols == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.out, "out"));
  return with_low(a.dtype, [=](auto t) {
    rotary_kernel<decltype(t)><<<grid_for_rows(rows), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a, rows);
    return launched();
  });
}
