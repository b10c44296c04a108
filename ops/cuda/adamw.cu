// adamw.cu: dc_cuda_adamw: as many tensors as a kernel's parameters hold go in one launch, cut into chunks of
// ADAMW_CHUNK elements, one per CUDA block, so that a list of small tensors fills the device (the idea of NVIDIA apex's
// multi-tensor apply). The table travels as a kernel parameter: no upload, nothing to keep alive.
#include "cuda/adamw_table.h"
#include "cuda/launch.cuh"

__global__ void __launch_bounds__(THREADS) adamw_kernel(const __grid_constant__ dc_gpu::AdamwTable table) {
  dc_gpu::adamw(table, (int32_t)blockIdx.x, (int)threadIdx.x, (int)blockDim.x);
}

static int adamw_run(const dc_adamw_args *tensors, int64_t count, cudaStream_t stream) {
  const void *any = nullptr;
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_adamw(&tensors[k], k));
    if (dc_gpu::chunks_of(tensors[k].n) > INT32_MAX)
      return CUDA_FAIL(DC_E_INVALID, "tensor %lld: n = %lld is more than a device can hold", (long long)k,
                       (long long)tensors[k].n);
    if (!any && tensors[k].n > 0) any = tensors[k].param;
  }
  if (!any) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(any, "param"));
  for (int64_t next = 0; next < count;) {
    dc_gpu::AdamwTable table;
    next = dc_gpu::fill_table(&table, tensors, next, count);
    if (table.count == 0) break;
    adamw_kernel<<<(unsigned)table.first[table.count], THREADS, 0, stream>>>(table);
    DC_TRY(launched());
  }
  return DC_OK;
}

int dc_cuda_adamw(const dc_adamw_args *tensors, int64_t count, void *stream) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_adamw_args, flags, tensors, count, &list, &owned);
  if (rc == DC_OK) rc = adamw_run(static_cast<const dc_adamw_args *>(list), count, static_cast<cudaStream_t>(stream));
  free(owned);
  return rc;
}
