// launch.cu: owns the thread's last error of libdeepc_cuda.so; validation; the device of an array.
#include "cuda/launch.cuh"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *dc_cuda_version(void) { return DC_VERSION_STRING; }

// __thread, not thread_local: no wrapper function, no C++ runtime.
static __thread char last_error[1024];

const char *dc_cuda_last_error(void) { return last_error; }

int dc__cuda_fail(int status, const char *file, int line, const char *func, const char *fmt, ...) {
  char what[sizeof last_error], place[192];
  va_list args;
  va_start(args, fmt);
  vsnprintf(what, sizeof what, fmt, args);
  va_end(args);
  const char *slash = strrchr(file, '/');
  snprintf(place, sizeof place, " (%s:%d, %s)", slash ? slash + 1 : file, line, func);
  snprintf(last_error, sizeof last_error, "%.*s%s", (int)(sizeof last_error - 1 - strlen(place)), what, place);
  return status;
}

static const char *advice(cudaError_t error) {
  switch (error) {
  case cudaErrorInsufficientDriver:
  case cudaErrorNoDevice: return "there is no usable GPU; install a driver for CUDA 13, or use CPU tensors";
  case cudaErrorNoKernelImageForDevice:
  case cudaErrorUnsupportedPtxVersion:
    return "this build has kernels for sm_80, sm_90 and sm_100 and up; build deepc for this GPU";
  default: return "an earlier kernel on this device may be the cause; CUDA_LAUNCH_BLOCKING=1 shows which";
  }
}

int dc__cuda_error(cudaError_t error, const char *what) {
  return CUDA_FAIL(DC_E_CUDA, "%s failed: %s (%s, %d); %s", what, cudaGetErrorString(error), cudaGetErrorName(error),
                   (int)error, advice(error));
}

int DeviceScope::enter(const void *array, const char *what) {
  cudaPointerAttributes attributes;
  memset(&attributes, 0, sizeof attributes);
  cudaError_t error = cudaPointerGetAttributes(&attributes, array);
  if (error != cudaSuccess) {
    (void)cudaGetLastError(); // so that the next launch does not report this one
    return dc__cuda_error(error, "looking up an array");
  }
  if (attributes.type == cudaMemoryTypeUnregistered)
    return CUDA_FAIL(DC_E_INVALID, "%s = %p is ordinary host memory; pass device, managed or pinned memory", what,
                     array);
  if (attributes.type == cudaMemoryTypeHost) return DC_OK; // every device reaches it: the current one will do
  int current = -1;
  if ((error = cudaGetDevice(&current)) != cudaSuccess) return dc__cuda_error(error, "cudaGetDevice");
  if (current == attributes.device) return DC_OK;
  if ((error = cudaSetDevice(attributes.device)) != cudaSuccess) return dc__cuda_error(error, "cudaSetDevice");
  restore_ = current;
  return DC_OK;
}

// ---- validation: the rules of ops/dispatch.c -----------------------------------------------------------------------
static const struct {
  size_t size;
  const char *name;
} dtypes[DC_DTYPE_COUNT] = {{4, "fp32"},  {2, "bf16"},  {2, "fp16"},  {8, "fp64"}, {1, "int8"},
                            {1, "uint8"}, {2, "int16"}, {4, "int32"}, {8, "int64"}};

size_t dc__cuda_dtype_size(int dt) { return dt < 0 || dt >= DC_DTYPE_COUNT ? 0 : dtypes[dt].size; }
const char *dc__cuda_dtype_name(int dt) { return dt < 0 || dt >= DC_DTYPE_COUNT ? "?" : dtypes[dt].name; }

int dc__cuda_check_low(int dt, const char *what) {
  if (dt == DC_F32 || dt == DC_BF16 || dt == DC_F16) return DC_OK;
  return CUDA_FAIL(DC_E_DTYPE, "%s is dtype %d (%s); this op takes fp32, bf16 and fp16", what, dt,
                   dc__cuda_dtype_name(dt));
}

int dc__cuda_check_count(int64_t n) {
  if (n < 0) return CUDA_FAIL(DC_E_INVALID, "n = %lld is negative", (long long)n);
  if (n > INT64_MAX / 16) return CUDA_FAIL(DC_E_INVALID, "n = %lld is more than memory can hold", (long long)n);
  return DC_OK;
}

int dc__cuda_check_array(const void *p, size_t element, int64_t n, const char *what) {
  if (n > 0 && !p) return CUDA_FAIL(DC_E_INVALID, "%s is NULL with n = %lld", what, (long long)n);
  if (!aligned_to(p, element))
    return CUDA_FAIL(DC_E_INVALID, "%s = %p is not aligned to its element of %zu bytes", what, p, element);
  return DC_OK;
}

int dc__cuda_check_sources(const void *const *src, int nsrc, int dt, int64_t n) {
  if (nsrc < 1 || nsrc > MAX_SOURCES)
    return CUDA_FAIL(DC_E_INVALID, "nsrc = %d; one call reduces 1 to %d arrays", nsrc, (int)MAX_SOURCES);
  if (n == 0) return DC_OK;
  if (!src) return CUDA_FAIL(DC_E_INVALID, "src is NULL");
  for (int k = 0; k < nsrc; k++) {
    if (src[k] && aligned_to(src[k], dc__cuda_dtype_size(dt))) continue;
    char what[32];
    snprintf(what, sizeof what, "src[%d]", k);
    return dc__cuda_check_array(src[k], dc__cuda_dtype_size(dt), n, what);
  }
  return DC_OK;
}

int dc__cuda_overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
  const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
  return x < y + (uintptr_t)b_bytes && y < x + (uintptr_t)a_bytes;
}
