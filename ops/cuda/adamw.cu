// adamw.cu: dc_cuda_adamw: as many tensors as a kernel's parameters hold go in one launch, cut into chunks of
// ADAMW_CHUNK elements, one per CUDA block, so that a list of small tensors fills the device (the idea of NVIDIA apex's
// multi-tensor apply). The table travels as a kernel parameter: no upload, nothing to keep alive.
#include "cuda/adamw_table.h"
#include "cuda/launch.cuh"

__global__ void __launch_bounds__(THREADS) adamw_kernel(const __grid_constant__ dc_gpu::AdamwTable table) {
  dc_gpu::adamw(table, (int32_t)blockIdx.x, (int)threadIdx.x, (int)blockDim.x);
}

// ---- validation: as in ops/dispatch.c ------------------------------------------------------------------------------
static int check_scalars(const dc_adamw_args *t, int64_t k) {
  const long long i = k;
  if (t->step < 1)
    return CUDA_FAIL(DC_E_INVALID, "tensor %lld: step = %lld; the first step is 1", i, (long long)t->step);
  if (!isfinite(t->lr)) return CUDA_FAIL(DC_E_INVALID, "tensor %lld: lr = %g is not finite", i, t->lr);
  if (!(t->beta1 >= 0 && t->beta1 < 1))
    return CUDA_FAIL(DC_E_INVALID, "tensor %lld: beta1 = %g, not in [0, 1)", i, t->beta1);
  if (!(t->beta2 >= 0 && t->beta2 < 1))
    return CUDA_FAIL(DC_E_INVALID, "tensor %lld: beta2 = %g, not in [0, 1)", i, t->beta2);
  if (!(t->eps >= 0)) return CUDA_FAIL(DC_E_INVALID, "tensor %lld: eps = %g is not >= 0", i, t->eps);
  if (!isfinite(t->weight_decay))
    return CUDA_FAIL(DC_E_INVALID, "tensor %lld: weight_decay = %g is not finite", i, t->weight_decay);
  if (!isfinite(t->grad_scale))
    return CUDA_FAIL(DC_E_INVALID, "tensor %lld: grad_scale = %g is not finite", i, t->grad_scale);
  if (t->flags & ~DC_ADAMW_DECOUPLED)
    return CUDA_FAIL(DC_E_INVALID, "tensor %lld: unknown flags 0x%x", i, (unsigned)t->flags);
  return DC_OK;
}

static int check_arrays(const dc_adamw_args *t) {
  DC_TRY(dc__cuda_check_count(t->n));
  if (dc_gpu::chunks_of(t->n) > INT32_MAX)
    return CUDA_FAIL(DC_E_INVALID, "n = %lld is more than a device can hold", (long long)t->n);
  DC_TRY(dc__cuda_check_low(t->param_dtype, "param"));
  DC_TRY(dc__cuda_check_low(t->grad_dtype, "grad"));
  DC_TRY(dc__cuda_check_low(t->state_dtype, "exp_avg"));
  if (t->lowp) DC_TRY(dc__cuda_check_low(t->lowp_dtype, "lowp"));
  DC_TRY(dc__cuda_check_array(t->param, dc__cuda_dtype_size(t->param_dtype), t->n, "param"));
  DC_TRY(dc__cuda_check_array(t->grad, dc__cuda_dtype_size(t->grad_dtype), t->n, "grad"));
  DC_TRY(dc__cuda_check_array(t->exp_avg, dc__cuda_dtype_size(t->state_dtype), t->n, "exp_avg"));
  DC_TRY(dc__cuda_check_array(t->exp_avg_sq, dc__cuda_dtype_size(t->state_dtype), t->n, "exp_avg_sq"));
  DC_TRY(dc__cuda_check_array(t->max_exp_avg_sq, dc__cuda_dtype_size(t->state_dtype), 0, "max_exp_avg_sq"));
  if (t->lowp) DC_TRY(dc__cuda_check_array(t->lowp, dc__cuda_dtype_size(t->lowp_dtype), 0, "lowp"));
  return DC_OK;
}

int dc_cuda_adamw(const dc_adamw_args *tensors, int64_t count, void *stream) {
  if (count < 0) return CUDA_FAIL(DC_E_INVALID, "count = %lld is negative", (long long)count);
  if (count > 0 && !tensors) return CUDA_FAIL(DC_E_INVALID, "tensors is NULL with count = %lld", (long long)count);
  const void *any = nullptr;
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_scalars(&tensors[k], k));
    DC_TRY(check_arrays(&tensors[k]));
    if (!any && tensors[k].n > 0) any = tensors[k].param;
  }
  if (!any) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(any, "param"));
  for (int64_t next = 0; next < count;) {
    dc_gpu::AdamwTable table;
    next = dc_gpu::fill_table(&table, tensors, next, count);
    if (table.count == 0) break;
    adamw_kernel<<<(unsigned)table.first[table.count], THREADS, 0, static_cast<cudaStream_t>(stream)>>>(table);
    DC_TRY(launched());
  }
  return DC_OK;
}
