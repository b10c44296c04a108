// adamw.cu: dc_cuda_adamw: as many tensors as a kernel's parameters hold go in one launch, cut into chunks of ADAMW_CHUNK
// elements, one per CUDA block, so that a list of small tensors fills the device (the idea of NVIDIA apex's multi-tensor apply). The
// table travels as a kernel parameter: no upload, nothing to keep alive.
#include "cuda/launch.cuh"

#include <math.h>
#include <string.h>

using dc_gpu::ADAMW_CHUNK;
using dc_gpu::ADAMW_TENSORS;
using dc_gpu::ADAMW_WIDTH;
using dc_gpu::AdamwTable;
using dc_gpu::AdamwTensor;

__global__ void __launch_bounds__(THREADS) adamw_kernel(const __grid_constant__ AdamwTable table) {
  dc_gpu::adamw(table, (int32_t)blockIdx.x, (int)threadIdx.x, (int)blockDim.x);
}

/* Must stay the bits of make_coef in ops/dispatch.c; tests/python/test_gpu_ops.py compares. */
static dc__adamw_coef make_coef(const dc_adamw_args *t) {
  const bool decoupled = (t->flags & DC_ADAMW_DECOUPLED) != 0;
  const double bc1 = 1.0 - pow(t->beta1, (double)t->step), bc2 = 1.0 - pow(t->beta2, (double)t->step);
  dc__adamw_coef c;
  c.grad_scale = (float)t->grad_scale;
  c.one_minus_b1 = (float)(1.0 - t->beta1);
  c.b2 = (float)t->beta2;
  c.one_minus_b2 = (float)(1.0 - t->beta2);
  c.decay = decoupled ? (float)(1.0 - t->lr * t->weight_decay) : 1.0f;
  c.step_size_neg = (float)-(t->lr / bc1);
  c.inv_sqrt_bc2 = (float)(1.0 / sqrt(bc2));
  c.eps = (float)t->eps;
  c.l2 = decoupled ? 0.0f : (float)t->weight_decay;
  return c;
}

static int wide_aligned(const void *p, int dt) { return aligned_to(p, ADAMW_WIDTH * dc__cuda_dtype_size(dt)); }

static AdamwTensor make_row(const dc_adamw_args *t) {
  AdamwTensor row;
  memset(&row, 0, sizeof row);
  row.param = t->param;
  row.grad = t->grad;
  row.exp_avg = t->exp_avg;
  row.exp_avg_sq = t->exp_avg_sq;
  row.max_exp_avg_sq = t->max_exp_avg_sq;
  row.lowp = t->lowp;
  row.n = t->n;
  row.coef = make_coef(t);
  row.param_dtype = (int8_t)t->param_dtype;
  row.grad_dtype = (int8_t)t->grad_dtype;
  row.state_dtype = (int8_t)t->state_dtype;
  row.lowp_dtype = (int8_t)(t->lowp ? t->lowp_dtype : DC_F32);
  row.vectors = wide_aligned(t->param, t->param_dtype) && wide_aligned(t->grad, t->grad_dtype) &&
                wide_aligned(t->exp_avg, t->state_dtype) && wide_aligned(t->exp_avg_sq, t->state_dtype) &&
                wide_aligned(t->max_exp_avg_sq, t->state_dtype) && wide_aligned(t->lowp, row.lowp_dtype);
  return row;
}

static int64_t chunks_of(int64_t n) { return (n + ADAMW_CHUNK - 1) / ADAMW_CHUNK; }

/* Adds the tensors from `from` on until the table or the grid is full; returns the index of the first that did not fit. */
static int64_t fill_table(AdamwTable *table, const dc_adamw_args *tensors, int64_t from, int64_t count) {
  memset(table, 0, sizeof *table);
  int64_t i = from;
  for (; i < count && table->count < ADAMW_TENSORS; i++) {
    if (tensors[i].n == 0) continue;
    const int64_t next = table->first[table->count] + chunks_of(tensors[i].n);
    if (next > INT32_MAX) break;
    table->tensor[table->count++] = make_row(&tensors[i]);
    table->first[table->count] = (int32_t)next;
  }
  return i;
}

// ---- validation: as in ops/dispatch.c --------------------------------------------------------------------------------------------
static int check_scalars(const dc_adamw_args *t, int64_t k) {
  const long long i = k;
  if (t->step < 1) return CUDA_FAIL(DC_E_INVALID, "tensor %lld: step = %lld; the first step is 1", i, (long long)t->step);
  if (!isfinite(t->lr)) return CUDA_FAIL(DC_E_INVALID, "tensor %lld: lr = %g is not finite", i, t->lr);
  if (!(t->beta1 >= 0 && t->beta1 < 1)) return CUDA_FAIL(DC_E_INVALID, "tensor %lld: beta1 = %g, not in [0, 1)", i, t->beta1);
  if (!(t->beta2 >= 0 && t->beta2 < 1)) return CUDA_FAIL(DC_E_INVALID, "tensor %lld: beta2 = %g, not in [0, 1)", i, t->beta2);
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
  if (chunks_of(t->n) > INT32_MAX)
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
    AdamwTable table;
    next = fill_table(&table, tensors, next, count);
    if (table.count == 0) break;
    adamw_kernel<<<(unsigned)table.first[table.count], THREADS, 0, static_cast<cudaStream_t>(stream)>>>(table);
    DC_TRY(launched());
  }
  return DC_OK;
}
