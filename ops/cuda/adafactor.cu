// adafactor.cu: dc_cuda_adafactor_tops, sums, factors, norms and apply: as many tensors as a kernel's parameters hold
// go in one launch. Bodies: adafactor.cuh. Checked against the CPU thread by thread; not run on a GPU yet.
#include "cuda/adafactor.cuh"
#include "cuda/launch.cuh"

using dc_gpu::FACTOR_THREADS;
using dc_gpu::FactorTable;
using dc_gpu::LAMB_LANES;

// A kernel's tensor, and which of the tensor's blocks of threads this one is.
struct FactorBlock {
  const dc_adafactor_args &tensor;
  int64_t number;
};
__device__ __forceinline__ FactorBlock adafactor_block(const FactorTable &table) {
  const int which = dc_gpu::adamw_find(table, (int32_t)blockIdx.x);
  return {table.tensor[which], (int64_t)blockIdx.x - table.first[which]};
}

__global__ void __launch_bounds__(FACTOR_THREADS) adafactor_tops_kernel(const __grid_constant__ FactorTable table) {
  __shared__ dc_gpu::FactorRoom<uint32_t> room;
  const FactorBlock block = adafactor_block(table);
  dc_gpu::factor_tops(block.tensor, block.number, &room);
}

__global__ void __launch_bounds__(FACTOR_THREADS) adafactor_sums_kernel(const __grid_constant__ FactorTable table) {
  __shared__ dc_gpu::FactorRoom<double> room;
  const FactorBlock block = adafactor_block(table);
  dc_gpu::factor_sums(block.tensor, block.number, &room);
}

__global__ void __launch_bounds__(FACTOR_THREADS) adafactor_rows_kernel(const __grid_constant__ FactorTable table) {
  __shared__ dc_gpu::FactorRows room;
  const FactorBlock block = adafactor_block(table);
  dc_gpu::factor_rows(block.tensor, block.number, &room);
}

__global__ void __launch_bounds__(FACTOR_THREADS) adafactor_columns_kernel(const __grid_constant__ FactorTable table) {
  const FactorBlock block = adafactor_block(table);
  dc_gpu::factor_column_vars(block.tensor, block.number, (int)threadIdx.x, FACTOR_THREADS);
}

__global__ void __launch_bounds__(FACTOR_THREADS) adafactor_norms_kernel(const __grid_constant__ FactorTable table) {
  const FactorBlock block = adafactor_block(table);
  const dc_adafactor_args &t = block.tensor;
  const int64_t k = block.number * (FACTOR_THREADS / LAMB_LANES) + threadIdx.x / LAMB_LANES;
  if (k >= dc_gpu::factor_block_count(t)) return; // all threads of a group
  const dc__adafactor_coef c = dc__adafactor_coef_of(&t);
  const int lane = (int)(threadIdx.x % LAMB_LANES);
  const dc_gpu::FactorRange range = dc_gpu::factor_range(t, k);
  double param = 0.0, update = 0.0;
  for (int64_t i = range.begin; i < range.end;) {
    const dc_gpu::FactorPart part = dc_gpu::factor_part(t, i, range.end);
    dc_gpu::LambSums sums = dc_gpu::factor_norms(t, c, part, lane);
    const double p = group_tree<1, LAMB_LANES>(&sums.param), u = group_tree<1, LAMB_LANES>(&sums.update);
    param = dc_gpu::canonical(__dadd_rn(param, p)), update = dc_gpu::canonical(__dadd_rn(update, u));
    i = part.end;
  }
  if (lane == 0) t.param_sums[k] = param, t.update_sums[k] = update;
}

__global__ void __launch_bounds__(FACTOR_THREADS) adafactor_apply_kernel(const __grid_constant__ FactorTable table) {
  const FactorBlock block = adafactor_block(table);
  dc_gpu::factor_apply(block.tensor, block.number, (int)threadIdx.x, FACTOR_THREADS);
}

typedef void (*Kernel)(FactorTable);
typedef int64_t (*Blocks)(const dc_adafactor_args &);
struct FactorPass {
  Kernel kernel;
  Blocks blocks; // of threads that a tensor has
};

static int adafactor_launch(const FactorPass &pass, const dc_adafactor_args *tensors, int64_t count,
                            cudaStream_t stream) {
  for (int64_t next = 0; next < count;) {
    FactorTable table;
    next = dc_gpu::fill_factors(&table, tensors, next, count, pass.blocks);
    if (table.count == 0) break;
    pass.kernel<<<(unsigned)table.first[table.count], FACTOR_THREADS, 0, stream>>>(table);
    DC_TRY(launched());
  }
  return DC_OK;
}

static int adafactor_run(const dc_adafactor_args *tensors, int64_t count, const FactorPass *passes, int n,
                         cudaStream_t stream) {
  const void *any = nullptr;
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_adafactor(&tensors[k], k));
    for (int j = 0; j < n; j++)
      if (passes[j].blocks(tensors[k]) > INT32_MAX)
        return CUDA_FAIL(DC_E_INVALID, "tensor %lld: %lld elements are more than a device can hold", (long long)k,
                         (long long)tensors[k].n);
    if (!any) any = tensors[k].param ? tensors[k].param : tensors[k].row_var;
  }
  if (!any) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(any, "param"));
  for (int j = 0; j < n; j++) DC_TRY(adafactor_launch(passes[j], tensors, count, stream));
  return DC_OK;
}

static int adafactor_call(const dc_adafactor_args *tensors, int64_t count, const FactorPass *passes, int n,
                          void *stream) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_adafactor_args, reserved, tensors, count, &list, &owned);
  if (rc == DC_OK)
    rc = adafactor_run(static_cast<const dc_adafactor_args *>(list), count, passes, n,
                       static_cast<cudaStream_t>(stream));
  free(owned);
  return rc;
}

int dc_cuda_adafactor_tops(const dc_adafactor_args *stretches, int64_t count, void *stream) {
  const FactorPass pass = {adafactor_tops_kernel, dc_gpu::factor_tiles};
  return adafactor_call(stretches, count, &pass, 1, stream);
}
int dc_cuda_adafactor_sums(const dc_adafactor_args *stretches, int64_t count, void *stream) {
  const FactorPass pass = {adafactor_sums_kernel, dc_gpu::factor_tiles};
  return adafactor_call(stretches, count, &pass, 1, stream);
}
int dc_cuda_adafactor_factors(const dc_adafactor_args *parameters, int64_t count, void *stream) {
  const FactorPass passes[] = {{adafactor_rows_kernel, dc_gpu::factor_matrices},
                               {adafactor_columns_kernel, dc_gpu::factor_column_blocks}};
  return adafactor_call(parameters, count, passes, 2, stream);
}
int dc_cuda_adafactor_norms(const dc_adafactor_args *stretches, int64_t count, void *stream) {
  const FactorPass pass = {adafactor_norms_kernel, dc_gpu::factor_norm_blocks};
  return adafactor_call(stretches, count, &pass, 1, stream);
}
int dc_cuda_adafactor_apply(const dc_adafactor_args *stretches, int64_t count, void *stream) {
  const FactorPass pass = {adafactor_apply_kernel, dc_gpu::factor_chunks};
  return adafactor_call(stretches, count, &pass, 1, stream);
}
