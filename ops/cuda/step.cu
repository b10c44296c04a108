// step.cu: dc_cuda_step: tensors of any rule but Adam's, as adamw.cu does it. Adam's are handed to dc_cuda_adamw.
#include "cuda/adamw_table.h"
#include "cuda/launch.cuh"

__global__ void __launch_bounds__(THREADS) step_kernel(const __grid_constant__ dc_gpu::StepTable table) {
  dc_gpu::step(table, (int32_t)blockIdx.x, (int)threadIdx.x, (int)blockDim.x);
}

static int step_check(const dc_step_args *tensors, int64_t count, const void **any, int64_t *adamw) {
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_step(&tensors[k], k));
    if (tensors[k].format != DC_STATE_NEAREST)
      return CUDA_FAIL(DC_E_UNSUPPORTED, "tensor %lld: states of format %d exist on CPU only", (long long)k,
                       tensors[k].format);
    if (dc_gpu::chunks_of(tensors[k].n) > INT32_MAX)
      return CUDA_FAIL(DC_E_INVALID, "tensor %lld: n = %lld is more than a device can hold", (long long)k,
                       (long long)tensors[k].n);
    if (!*any && tensors[k].n > 0) *any = tensors[k].param;
    *adamw += tensors[k].rule == DC_RULE_ADAMW;
  }
  if (*adamw && *adamw < count)
    return CUDA_FAIL(DC_E_INVALID, "%lld of %lld tensors have Adam's rule; on CUDA all of a call have it or none",
                     (long long)*adamw, (long long)count);
  return DC_OK;
}

static int step_adamw(const dc_step_args *tensors, int64_t count, cudaStream_t stream) {
  dc_adamw_args *args = (dc_adamw_args *)calloc((size_t)count, sizeof *args);
  if (!args) return CUDA_FAIL(DC_E_NOMEM, "no memory for the arguments of %lld tensors", (long long)count);
  for (int64_t k = 0; k < count; k++) {
    const dc_step_args *t = &tensors[k];
    dc_adamw_args *a = &args[k];
    a->struct_size = sizeof *a;
    a->param = t->param, a->grad = t->grad, a->exp_avg = t->state[0], a->exp_avg_sq = t->state[1];
    a->max_exp_avg_sq = t->state[2], a->lowp = t->lowp, a->n = t->n, a->step = t->step;
    a->lr = t->lr, a->beta1 = t->beta1, a->beta2 = t->beta2, a->eps = t->eps, a->weight_decay = t->weight_decay;
    a->grad_scale = t->grad_scale;
    a->param_dtype = t->param_dtype, a->grad_dtype = t->grad_dtype, a->state_dtype = t->state_dtype;
    a->lowp_dtype = t->lowp_dtype, a->flags = t->flags & DC_STEP_DECOUPLED ? DC_ADAMW_DECOUPLED : 0;
  }
  const int rc = dc_cuda_adamw(args, count, stream);
  free(args);
  return rc;
}

static int step_run(const dc_step_args *tensors, int64_t count, cudaStream_t stream) {
  const void *any = nullptr;
  int64_t adamw = 0;
  DC_TRY(step_check(tensors, count, &any, &adamw));
  if (!any) return DC_OK;
  if (adamw) return step_adamw(tensors, count, stream);
  DeviceScope device;
  DC_TRY(device.enter(any, "param"));
  for (int64_t next = 0; next < count;) {
    dc_gpu::StepTable table;
    next = dc_gpu::fill_table(&table, tensors, next, count);
    if (table.count == 0) break;
    step_kernel<<<(unsigned)table.first[table.count], THREADS, 0, stream>>>(table);
    DC_TRY(launched());
  }
  return DC_OK;
}

int dc_cuda_step(const dc_step_args *tensors, int64_t count, void *stream) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_step_args, flags, tensors, count, &list, &owned);
  if (rc == DC_OK) rc = step_run(static_cast<const dc_step_args *>(list), count, static_cast<cudaStream_t>(stream));
  free(owned);
  return rc;
}
