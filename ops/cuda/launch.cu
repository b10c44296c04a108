// launch.cu: owns the thread's last error of libdeepc_cuda.so, and finds the device of an array.
#include "cuda/launch.cuh"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *dc_cuda_version(void) { return DC_VERSION_STRING; }
int dc_cuda_runtime_version(void) { return CUDART_VERSION; }

// __thread, not thread_local: no wrapper function, no C++ runtime.
static __thread char launch_last_error[1024];

const char *dc_cuda_last_error(void) { return launch_last_error; }

int dc__cuda_fail(int status, const char *file, int line, const char *func, const char *fmt, ...) {
  char what[sizeof launch_last_error], place[192];
  va_list args;
  va_start(args, fmt);
  vsnprintf(what, sizeof what, fmt, args);
  va_end(args);
  const char *slash = strrchr(file, '/');
  snprintf(place, sizeof place, " (%s:%d, %s)", slash ? slash + 1 : file, line, func);
  snprintf(launch_last_error, sizeof launch_last_error, "%.*s%s", (int)(sizeof launch_last_error - 1 - strlen(place)),
           what, place);
  return status;
}

// Drivers that run the CUDA runtime in this library.
#if CUDART_VERSION >= 13000
#define OLDEST_DRIVER "580"
#else
#define OLDEST_DRIVER "525"
#endif

static const char *launch_advice(cudaError_t error) {
  switch (error) {
  case cudaErrorInsufficientDriver:
  case cudaErrorNoDevice:
    return "there is no usable GPU; install an NVIDIA driver of " OLDEST_DRIVER " or later, or use CPU tensors";
  case cudaErrorNoKernelImageForDevice:
    return "deepc's kernels are for GPUs of sm_80 (Ampere) and later; use CPU tensors on an older one, or on a "
           "later one a build that was not made for another (CMAKE_CUDA_ARCHITECTURES)";
  case cudaErrorUnsupportedPtxVersion:
    return "the driver is too old for this build's kernels on this GPU; install the newest NVIDIA driver, or "
           "build deepc for this GPU (CMAKE_CUDA_ARCHITECTURES)";
  default: return "an earlier kernel on this device may be the cause; CUDA_LAUNCH_BLOCKING=1 shows which";
  }
}

int dc__cuda_error(cudaError_t error, const char *what) {
  (void)cudaGetLastError(); // so that the next launch does not report this one
  return CUDA_FAIL(DC_E_CUDA, "%s failed: %s (%s, %d); %s", what, cudaGetErrorString(error), cudaGetErrorName(error),
                   (int)error, launch_advice(error));
}

int DeviceScope::enter(const void *array, const char *what) {
  cudaPointerAttributes attributes;
  memset(&attributes, 0, sizeof attributes);
  cudaError_t error = cudaPointerGetAttributes(&attributes, array);
  if (error != cudaSuccess) return dc__cuda_error(error, "looking up an array");
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
