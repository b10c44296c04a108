// launch.cuh: what all launchers share: the error text, the checks of ops/check.h with it, the device of the arrays,
// grid sizes. Included by *.cu only.
#ifndef DEEPC_CUDA_LAUNCH_CUH
#define DEEPC_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include "cuda/bodies.cuh"
#include "cuda/cuda_ops.h"

// Records the failure for dc_cuda_last_error() and returns `status` (this library does not use libdeepc.so's dc_fail).
int dc__cuda_fail(int status, const char *file, int line, const char *func, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
#define CUDA_FAIL(status, ...) dc__cuda_fail((status), __FILE__, __LINE__, __func__, __VA_ARGS__)
#define CHECK_FAIL CUDA_FAIL
#define CHECK_VALUES 0
#define CHECK_ROW_STRIDE INT32_MAX // att_fill multiplies it in 32 bits
#include "check.h"

// DC_E_CUDA with what the call said and what to do about it.
int dc__cuda_error(cudaError_t error, const char *what);

// 1 if p is aligned to `bytes`.
static inline int aligned_to(const void *p, size_t bytes) { return (uintptr_t)p % bytes == 0; }

enum { THREADS = 256, MAX_GRID = 1 << 16 };

// Makes the device that holds `array` current for one scope. A launch goes to the current device, whatever its stream
// is.
class DeviceScope {
public:
  ~DeviceScope() {
    if (restore_ >= 0) (void)cudaSetDevice(restore_);
  }
  int enter(const void *array, const char *what);

private:
  int restore_ = -1;
};

// Blocks for a grid that strides over so many blocks' work.
static inline unsigned grid_of(int64_t blocks) {
  return (unsigned)(blocks < 1 ? 1 : blocks < MAX_GRID ? blocks : (int64_t)MAX_GRID);
}
// The same for threads that stride over `work` items.
static inline unsigned grid_for(int64_t work) { return grid_of(work / THREADS + (work % THREADS != 0)); }

static inline int launched(void) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? (int)DC_OK : dc__cuda_error(error, "a launch");
}

using dc_gpu::with_low;

__device__ __forceinline__ int64_t grid_thread(void) { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t grid_threads(void) { return (int64_t)gridDim.x * blockDim.x; }

// Groups of L neighbouring threads of a warp, each of which has a row or a block. A group's shuffles name its own
// threads only, so groups need not run in step.
template <int L> __device__ __forceinline__ unsigned group_mask(void) {
  static_assert(L < 32, "1u << 32 is not defined");
  return ((1u << L) - 1u) << (threadIdx.x % 32 / L * L);
}
template <int L> __device__ __forceinline__ int64_t group_index(void) { return grid_thread() / L; }
template <int L> __device__ __forceinline__ int64_t group_count(void) { return grid_threads() / L; }

// dc_gpu::lane_tree over a group; the sum is its lane 0's.
template <int V, int L, class N> __device__ __forceinline__ N group_tree(N *x) {
  const unsigned mask = group_mask<L>();
  return dc_gpu::lane_tree<V, L>(x, [=](N v, int lanes) { return __shfl_down_sync(mask, v, lanes, L); });
}

#endif
