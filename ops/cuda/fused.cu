// fused.cu: dc_cuda_norm, dc_cuda_swiglu, dc_cuda_gelu, their gradients, and dc_cuda_rotary. Bodies and who does what:
// fused.cuh. Checked against the CPU thread by thread, and on a GPU bit by bit.
#include "cuda/fused.cuh"
#include "cuda/launch.cuh"

using dc_gpu::WARP;

enum { WARPS = THREADS / WARP, MAX_ROWS_Y = 1 << 15 };

// The sum of a row's 64 accumulators, in every lane of its group.
template <int V> __device__ __forceinline__ float row_sum(float *x) {
  constexpr int L = dc_gpu::ROW_SUMS / V;
  const float sum = group_tree<V, L>(x);
  return __shfl_sync(group_mask<L>(), sum, 0, L);
}

// Calls f(row, lane) with a group of L lanes per row.
template <int L, class F> __device__ __forceinline__ void each_group_row(int64_t rows, F f) {
  for (int64_t row = group_index<L>(); row < rows; row += group_count<L>()) f(row, (int)(threadIdx.x % L));
}
template <int L> static unsigned fused_grid_for_groups(int64_t rows) {
  return grid_for(rows > INT64_MAX / L ? INT64_MAX : rows * L);
}

// Calls f(row, lane) with a warp per row.
template <class F> __device__ __forceinline__ void each_row(int64_t rows, F f) {
  for (int64_t row = grid_thread() / WARP; row < rows; row += grid_threads() / WARP) f(row, (int)(threadIdx.x % WARP));
}
static inline unsigned fused_grid_for_rows(int64_t rows) {
  return grid_for(rows > INT64_MAX / WARP ? INT64_MAX : rows * WARP);
}

// ---- sums over rows ------------------------------------------------------------------------------------------------
// 32 columns a CUDA block, a warp for each accumulator: 4,096 columns are 128 CUDA blocks, and a thread adds an eighth
// of the blocks of rows.
enum { FOLD_COLUMNS = 32 };
__global__ void __launch_bounds__(FOLD_COLUMNS *dc_gpu::FOLD)
    fold_kernel(void *out, int dt, const float *partial, int64_t blocks, int64_t cols) {
  __shared__ float part[dc_gpu::FOLD][FOLD_COLUMNS];
  for (int64_t first = (int64_t)blockIdx.x * FOLD_COLUMNS; first < cols; first += (int64_t)gridDim.x * FOLD_COLUMNS) {
    const int64_t i = first + threadIdx.x;
    part[threadIdx.y][threadIdx.x] = i < cols ? dc_gpu::fold_part(partial, blocks, cols, i, (int)threadIdx.y) : 0.0f;
    __syncthreads();
    if (threadIdx.y == 0 && i < cols) dc_gpu::write(out, dt, i, dc_gpu::fold_tree(&part[0][threadIdx.x], FOLD_COLUMNS));
    __syncthreads(); // before the next columns write to the shared array
  }
}

static void fused_launch_fold(void *out, int dt, const float *partial, int64_t blocks, int64_t cols,
                              cudaStream_t stream) {
  const int64_t grid = cols / FOLD_COLUMNS + (cols % FOLD_COLUMNS != 0);
  if (cols > 0)
    fold_kernel<<<grid_of(grid), dim3(FOLD_COLUMNS, dc_gpu::FOLD), 0, stream>>>(out, dt, partial, blocks, cols);
}

// A thread per column in x, blocks of rows in y.
static inline dim3 fused_grid_for_columns(int64_t cols, int64_t blocks) {
  return dim3(grid_for(cols), (unsigned)(blocks < MAX_ROWS_Y ? blocks : (int64_t)MAX_ROWS_Y));
}

// ---- norms ---------------------------------------------------------------------------------------------------------
// Whether the arrays may be read and written 16 bytes at a time: pointers, and the strides of those that have rows, are
// multiples of them. NULL is.
template <class T, size_t N, size_t M> static bool fused_wide(const void *const (&p)[N], const int64_t (&stride)[M]) {
  for (const void *each : p)
    if (!aligned_to(each, 16)) return false;
  for (int64_t each : stride)
    if (each % dc_gpu::Lane<T, dc_gpu::ROW_SUMS>::width) return false;
  return true;
}

template <class Row, int COUNT>
__global__ void __launch_bounds__(COUNT) norm_kernel(const __grid_constant__ dc_norm_args a) {
  each_group_row<Row::LANES>(a.rows, [&](int64_t row, int lane) {
    Row x;
    float sum[Row::V], mean = 0.0f;
    x.load(a, row, lane);
    if (a.mean) {
      dc_gpu::norm_total(sum, x, a.cols, lane);
      mean = __fdiv_rn(row_sum<Row::V>(sum), (float)a.cols);
    }
    dc_gpu::norm_squares(sum, x, a.cols, lane, mean);
    dc_gpu::norm_out(a, x, row, lane, mean, dc_gpu::norm_rstd(row_sum<Row::V>(sum), a.cols, a.eps));
  });
}
template <class Row, int COUNT> static void fused_launch_rows(const dc_norm_args &a, cudaStream_t stream) {
  constexpr int ROWS = COUNT / Row::LANES; // a block's
  norm_kernel<Row, COUNT><<<grid_of(a.rows / ROWS + (a.rows % ROWS != 0)), COUNT, 0, stream>>>(a);
}

// Rows of up to 16 * ROW_SUMS elements: longer ones were slower than reading them again (docs/lab/kernels.md).
template <class T, class W> static void fused_launch_held(const dc_norm_args &a, cudaStream_t stream) {
  if (a.cols <= 8 * dc_gpu::ROW_SUMS) fused_launch_rows<dc_gpu::HeldRow<T, W, 8>, THREADS / 2>(a, stream);
  else fused_launch_rows<dc_gpu::HeldRow<T, W, 16>, THREADS / 2>(a, stream);
}
template <class T> static void fused_launch_norm(const dc_norm_args &a, bool wide, cudaStream_t stream) {
  const bool held = wide && a.cols <= 16 * dc_gpu::ROW_SUMS;
  if (held && a.weight_dtype == a.dtype) fused_launch_held<T, T>(a, stream);
  else if (held && a.weight_dtype == DC_F32) fused_launch_held<T, dc_gpu::F32>(a, stream);
  else if (wide) fused_launch_rows<dc_gpu::ReadRow<T, true>, THREADS>(a, stream);
  else fused_launch_rows<dc_gpu::ReadRow<T, false>, THREADS>(a, stream);
}

int dc_cuda_norm(const dc_norm_args *args, void *stream) {
  dc_norm_args a;
  DC_TRY(check_norm(args, &a));
  if (a.rows == 0 || a.cols == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.y, "y"));
  return with_low(a.dtype, [=](auto t) {
    using T = decltype(t);
    const bool wide = fused_wide<T>({a.x, a.residual, a.weight, a.bias, a.y, a.sum},
                                    {a.cols, a.x_stride, a.residual_stride});
    fused_launch_norm<T>(a, wide, static_cast<cudaStream_t>(stream));
    return launched();
  });
}

template <class T, bool WIDE>
__global__ void __launch_bounds__(THREADS) norm_grad_kernel(const __grid_constant__ dc_norm_grad_args a) {
  constexpr int V = dc_gpu::Lane<T, dc_gpu::ROW_SUMS>::width;
  each_group_row<dc_gpu::Lane<T, dc_gpu::ROW_SUMS>::count>(a.rows, [&](int64_t row, int lane) {
    const dc_gpu::GradRow<T> r = dc_gpu::grad_row<T>(a, row);
    float along[V], level[V];
    dc_gpu::grad_sums<T, WIDE>(along, level, a, r, lane);
    const float all_along = row_sum<V>(along), all_level = a.mean ? row_sum<V>(level) : 0.0f;
    dc_gpu::grad_out<T, WIDE>(a, r, row, lane, all_along, all_level);
  });
}

// A thread per 16 bytes of columns.
template <class T, bool WIDE>
__global__ void __launch_bounds__(THREADS)
    norm_columns_kernel(const __grid_constant__ dc_norm_grad_args a, int64_t block, int64_t blocks, float *dweight,
                        float *dbias) {
  constexpr int V = dc_gpu::Lane<T, dc_gpu::ROW_SUMS>::width;
  for (int64_t k = blockIdx.y; k < blocks; k += gridDim.y) {
    const int64_t end = (k + 1) * block < a.rows ? (k + 1) * block : a.rows;
    for (int64_t i = grid_thread() * V; i < a.cols; i += grid_threads() * V)
      dc_gpu::grad_columns<T, WIDE>(a, k * block, end, i, dweight ? dweight + k * a.cols : nullptr,
                                    dbias ? dbias + k * a.cols : nullptr);
  }
}

template <class T, bool WIDE>
static void fused_launch_norm_grad(const dc_norm_grad_args &a, float *dweight, float *dbias, cudaStream_t stream) {
  const int64_t block = dc_row_block(a.rows), blocks = dc_row_blocks(a.rows);
  norm_grad_kernel<T, WIDE>
      <<<fused_grid_for_groups<dc_gpu::Lane<T, dc_gpu::ROW_SUMS>::count>(a.rows), THREADS, 0, stream>>>(a);
  if (dweight || dbias)
    norm_columns_kernel<T, WIDE>
        <<<fused_grid_for_columns(a.cols / dc_gpu::Lane<T, dc_gpu::ROW_SUMS>::width + 1, blocks), THREADS, 0, stream>>>(
            a, block, blocks, dweight, dbias);
}

int dc_cuda_norm_grad(const dc_norm_grad_args *args, void *stream_) {
  dc_norm_grad_args a;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_norm_grad(args, &a));
  const int sums = (a.dweight != nullptr) + (a.dbias != nullptr);
  if (a.cols == 0 || (a.rows == 0 && !sums)) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.rows ? a.dx : a.dweight ? a.dweight : a.dbias, "dx"));
  const int64_t blocks = dc_row_blocks(a.rows);
  float *dweight = a.dweight ? a.partial : nullptr;
  float *dbias = a.dbias ? a.partial + (a.dweight ? blocks * a.cols : 0) : nullptr;
  if (a.rows > 0)
    with_low(a.dtype, [=](auto t) {
      using T = decltype(t);
      if (fused_wide<T>({a.x, a.dy, a.dsum, a.weight, a.dx}, {a.cols, a.x_stride}))
        fused_launch_norm_grad<T, true>(a, dweight, dbias, stream);
      else fused_launch_norm_grad<T, false>(a, dweight, dbias, stream);
      return 0;
    });
  if (a.dweight) fused_launch_fold(a.dweight, a.weight_dtype, dweight, blocks, a.cols, stream);
  if (a.dbias) fused_launch_fold(a.dbias, a.weight_dtype, dbias, blocks, a.cols, stream);
  return launched();
}

// ---- activations ---------------------------------------------------------------------------------------------------
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
static void fused_cut(int64_t n, int64_t *rows, int64_t *cols) {
  *rows = n / dc_gpu::CHUNK + (n % dc_gpu::CHUNK != 0);
  *cols = dc_gpu::CHUNK;
}

int dc_cuda_swiglu(const dc_swiglu_args *args, void *stream_) {
  dc_swiglu_args a;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_swiglu(args, &a));
  const int64_t n = a.rows * a.cols;
  if (n == 0) return DC_OK;
  if (a.gate_stride == a.cols && a.up_stride == a.cols && a.out_stride == a.cols) {
    fused_cut(n, &a.rows, &a.cols);
    a.gate_stride = a.up_stride = a.out_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(a.out, "out"));
  return with_low(a.dtype, [=](auto t) {
    using T = decltype(t);
    if (fused_wide<T>({a.gate, a.up, a.out}, {a.gate_stride, a.up_stride, a.out_stride}))
      swiglu_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
    else swiglu_kernel<T, 1><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
    return launched();
  });
}

int dc_cuda_swiglu_grad(const dc_swiglu_grad_args *args, void *stream_) {
  dc_swiglu_grad_args a;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_swiglu_grad(args, &a));
  const int64_t n = a.rows * a.cols;
  if (n == 0) return DC_OK;
  if (a.dout_stride == a.cols && a.gate_stride == a.cols && a.up_stride == a.cols && a.dgate_stride == a.cols &&
      a.dup_stride == a.cols) {
    fused_cut(n, &a.rows, &a.cols);
    a.dout_stride = a.gate_stride = a.up_stride = a.dgate_stride = a.dup_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(a.dgate, "dgate"));
  return with_low(a.dtype, [=](auto t) {
    using T = decltype(t);
    if (fused_wide<T>({a.dout, a.gate, a.up, a.dgate, a.dup},
                      {a.dout_stride, a.gate_stride, a.up_stride, a.dgate_stride, a.dup_stride}))
      swiglu_grad_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
    else swiglu_grad_kernel<T, 1><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
    return launched();
  });
}

int dc_cuda_gelu(const dc_gelu_args *args, void *stream_) {
  dc_gelu_args a;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_gelu(args, &a));
  const int64_t n = a.rows * a.cols;
  if (n == 0) return DC_OK;
  if (!a.bias && a.x_stride == a.cols) {
    fused_cut(n, &a.rows, &a.cols);
    a.x_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(a.out, "out"));
  return with_low(a.dtype, [=](auto t) {
    using T = decltype(t);
    if (fused_wide<T>({a.x, a.out}, {a.x_stride, a.cols}))
      gelu_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
    else gelu_kernel<T, 1><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
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
  dc_gelu_grad_args a;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  DC_TRY(check_gelu_grad(args, &a));
  const dc_gelu_grad_args whole = a; // before it is cut
  const int64_t n = a.rows * a.cols, block = dc_row_block(a.rows), blocks = dc_row_blocks(a.rows);
  if (a.cols == 0 || (n == 0 && !a.dbias)) return DC_OK;
  if (!a.bias && a.x_stride == a.cols) {
    fused_cut(n, &a.rows, &a.cols);
    a.x_stride = a.cols;
  }
  DeviceScope device;
  DC_TRY(device.enter(n ? a.dx : a.dbias, "dx"));
  if (n > 0)
    with_low(a.dtype, [=](auto t) {
      using T = decltype(t);
      if (fused_wide<T>({a.x, a.dout, a.dx}, {a.x_stride, a.cols, a.cols}))
        gelu_grad_kernel<T, dc_gpu::vector_width<T, T>()><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
      else gelu_grad_kernel<T, 1><<<grid_of(a.rows), THREADS, 0, stream>>>(a, n);
      if (a.dbias)
        gelu_columns_kernel<T>
            <<<fused_grid_for_columns(whole.cols, blocks), THREADS, 0, stream>>>(whole, block, blocks);
      return 0;
    });
  if (a.dbias) fused_launch_fold(a.dbias, a.bias_dtype, a.partial, blocks, whole.cols, stream);
  return launched();
}

// ---- rotary embedding ----------------------------------------------------------------------------------------------
template <class T>
__global__ void __launch_bounds__(THREADS) rotary_kernel(const __grid_constant__ dc_rotary_args a, int64_t rows) {
  each_row(rows, [&](int64_t row, int lane) { dc_gpu::rotary<T>(a, row, lane); });
}

int dc_cuda_rotary(const dc_rotary_args *args, void *stream) {
  dc_rotary_args a;
  int64_t rows;
  DC_TRY(check_rotary(args, &a, &rows));
  if (rows == 0 || a.cols == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(a.out, "out"));
  return with_low(a.dtype, [=](auto t) {
    rotary_kernel<decltype(t)><<<fused_grid_for_rows(rows), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a, rows);
    return launched();
  });
}
