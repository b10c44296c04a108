// step.cu: dc_cuda_step: tensors of any rule but Adam's, as adamw.cu does it. Adam's are handed to dc_cuda_adamw, those
// whose states have a format to packed.cu.
#include "cuda/adamw_table.h"
#include "cuda/packed_launch.cuh"

__global__ void __launch_bounds__(THREADS) step_kernel(const __grid_constant__ dc_gpu::StepTable table) {
  dc_gpu::step(table, (int32_t)blockIdx.x, (int)threadIdx.x, (int)blockDim.x);
}

// A tensor of dc_cuda_adamw's.
static int step_is_adamw(const dc_step_args &t) { return t.rule == DC_RULE_ADAMW && t.format == DC_STATE_NEAREST; }

static int step_check(const dc_step_args *tensors, int64_t count, const void **any, int64_t *adamw) {
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_step(&tensors[k], k));
    if (dc_gpu::chunks_of(tensors[k].n) >= INT32_MAX)
      return CUDA_FAIL(DC_E_INVALID, "tensor %lld: n = %lld is more than a device can hold", (long long)k,
                       (long long)tensors[k].n);
    if (!*any && tensors[k].n > 0) *any = tensors[k].param;
    *adamw += step_is_adamw(tensors[k]);
  }
  return DC_OK;
}

static int step_adamw(const dc_step_args *tensors, int64_t count, int64_t adamw, cudaStream_t stream) {
  dc_adamw_args *args = (dc_adamw_args *)calloc((size_t)adamw, sizeof *args);
  if (!args) return CUDA_FAIL(DC_E_NOMEM, "no memory for the arguments of %lld tensors", (long long)adamw);
  int64_t at = 0;
  for (int64_t k = 0; k < count; k++)
    if (step_is_adamw(tensors[k])) args[at++] = dc_gpu::adamw_args_of(tensors[k]);
  const int rc = dc_cuda_adamw(args, adamw, stream);
  free(args);
  return rc;
}

static int step_run(const dc_step_args *tensors, int64_t count, cudaStream_t stream) {
  const void *any = nullptr;
  int64_t adamw = 0;
  DC_TRY(step_check(tensors, count, &any, &adamw));
  if (!any) return DC_OK;
  if (adamw) DC_TRY(step_adamw(tensors, count, adamw, stream));
  if (adamw == count) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(any, "param"));
  for (int64_t next = 0; next < count;) {
    dc_gpu::StepTable table;
    next = dc_gpu::fill_table(&table, tensors, next, count);
    if (table.count == 0) break;
    step_kernel<<<(unsigned)table.first[table.count], THREADS, 0, stream>>>(table);
    DC_TRY(launched());
  }
  return dc__cuda_packed_step(tensors, count, stream);
}

int dc_cuda_step(const dc_step_args *tensors, int64_t count, void *stream) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_step_args, flags, tensors, count, &list, &owned);
  if (rc == DC_OK) rc = step_run(static_cast<const dc_step_args *>(list), count, static_cast<cudaStream_t>(stream));
  free(owned);
  return rc;
}
