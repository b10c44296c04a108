/* cuda_driver.h: what dynamic_cuda.c uses of the CUDA driver's API, as cuda.h declares it (11.2 and up). Below
 * libdeepc.so's surface. Names and values are the driver's ABI: never change one. */
#ifndef DEEPC_BASE_CUDA_DRIVER_H
#define DEEPC_BASE_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

enum {
  DC__CUDA_INVALID = 1,       /* CUDA_ERROR_INVALID_VALUE */
  DC__CUDA_OUT_OF_MEMORY = 2, /* CUDA_ERROR_OUT_OF_MEMORY */
  DC__CUDA_SHUT_DOWN = 4,     /* CUDA_ERROR_DEINITIALIZED */
  DC__CUDA_PINNED = 1,        /* CU_MEM_ALLOCATION_TYPE_PINNED */
  DC__CUDA_OF_DEVICE = 1,     /* CU_MEM_LOCATION_TYPE_DEVICE */
  DC__CUDA_READ_AND_WRITE = 3, /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
  DC__CUDA_LEAST = 0,         /* CU_MEM_ALLOC_GRANULARITY_MINIMUM */
  DC__CUDA_HAS_VIRTUAL_MEMORY = 102, /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
};

typedef struct { /* CUmemLocation */
  int type, id;
} dc__cuda_location;

typedef struct { /* CUmemAllocationProp */
  int type, handle_types;
  dc__cuda_location location;
  void *of_windows;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
} dc__cuda_allocation;

typedef struct { /* CUmemAccessDesc */
  dc__cuda_location location;
  int flags;
} dc__cuda_access;

/* X(name, symbol, arguments): CUresult name(arguments). CUdevice is int; CUdeviceptr and CUmemGenericAllocationHandle
 * are uint64_t; CUcontext and CUstream are pointers. */
#define DC__CUDA_FUNCTIONS(X)                                                                                   \
  X(cuInit, "cuInit", unsigned)                                                                                 \
  X(cuGetErrorString, "cuGetErrorString", int, const char **)                                                   \
  X(cuDeviceGetCount, "cuDeviceGetCount", int *)                                                                \
  X(cuDeviceGet, "cuDeviceGet", int *, int)                                                                     \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", int *, int, int)                                              \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", void **, int)                                         \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", int)                                             \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", void *)                                                            \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", void **)                                                             \
  X(cuCtxSynchronize, "cuCtxSynchronize", void)                                                                 \
  X(cuMemGetInfo, "cuMemGetInfo_v2", size_t *, size_t *)                                                        \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", size_t *, const dc__cuda_allocation *, int) \
  X(cuMemAddressReserve, "cuMemAddressReserve", uint64_t *, size_t, size_t, uint64_t, unsigned long long)       \
  X(cuMemAddressFree, "cuMemAddressFree", uint64_t, size_t)                                                     \
  X(cuMemCreate, "cuMemCreate", uint64_t *, size_t, const dc__cuda_allocation *, unsigned long long)            \
  X(cuMemRelease, "cuMemRelease", uint64_t)                                                                     \
  X(cuMemMap, "cuMemMap", uint64_t, size_t, size_t, uint64_t, unsigned long long)                               \
  X(cuMemUnmap, "cuMemUnmap", uint64_t, size_t)                                                                 \
  X(cuMemSetAccess, "cuMemSetAccess", uint64_t, size_t, const dc__cuda_access *, size_t)                        \
  X(cuMemsetD8Async, "cuMemsetD8Async", uint64_t, unsigned char, size_t, void *)

struct dc__cuda_driver {
#define DC__CUDA_POINTER(name, symbol, ...) int (*name)(__VA_ARGS__);
  DC__CUDA_FUNCTIONS(DC__CUDA_POINTER)
#undef DC__CUDA_POINTER
};

#endif
