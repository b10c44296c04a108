// lamb.cu: dc_cuda_lamb_moments, dc_cuda_lamb_apply: a launch a tensor; those whose states have a format are
// packed.cu's. Bodies and who does what: lamb.cuh. Checked against the CPU thread by thread, and bit by bit on a GPU.
#include "cuda/packed_launch.cuh"

using dc_gpu::LAMB_LANES;

__global__ void __launch_bounds__(THREADS)
    lamb_moments_kernel(const __grid_constant__ dc_lamb_args t, const __grid_constant__ dc__lamb_coef c,
                        int64_t blocks) {
  for (int64_t block = group_index<LAMB_LANES>(); block < blocks; block += group_count<LAMB_LANES>()) {
    const int lane = (int)(threadIdx.x % LAMB_LANES);
    store_lamb_sums(dc_gpu::lamb_moments(t, c, block, lane), lane, &t.param_sums[block], &t.update_sums[block]);
  }
}

template <bool WIDE>
__global__ void __launch_bounds__(THREADS)
    lamb_apply_kernel(const __grid_constant__ dc_lamb_args t, const __grid_constant__ dc__lamb_coef c) {
  dc_gpu::lamb_apply<WIDE>(t, c, grid_thread(), grid_threads());
}

static void lamb_launch(const dc_lamb_args &t, int apply, cudaStream_t stream) {
  const dc__lamb_coef c = dc__lamb_coef_of(&t, apply);
  const int64_t blocks = dc_lamb_blocks(t.first, t.n);
  if (!apply) lamb_moments_kernel<<<grid_for(blocks * LAMB_LANES), THREADS, 0, stream>>>(t, c, blocks);
  else if (dc_gpu::lamb_wide(t))
    lamb_apply_kernel<true><<<grid_for(t.n / dc_gpu::LAMB_WIDTH + 1), THREADS, 0, stream>>>(t, c);
  else lamb_apply_kernel<false><<<grid_for(t.n), THREADS, 0, stream>>>(t, c);
}

static int lamb_run(const dc_lamb_args *tensors, int64_t count, int apply, cudaStream_t stream) {
  const void *any = nullptr;
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_lamb(&tensors[k], k, apply));
    if (dc_lamb_blocks(tensors[k].first, tensors[k].n) > INT32_MAX)
      return CUDA_FAIL(DC_E_INVALID, "tensor %lld: n = %lld is more than a device can hold", (long long)k,
                       (long long)tensors[k].n);
    if (!any && tensors[k].n > 0) any = tensors[k].param;
  }
  if (!any) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(any, "param"));
  for (int64_t k = 0; k < count; k++) {
    if (tensors[k].n == 0 || tensors[k].format != DC_STATE_NEAREST) continue;
    lamb_launch(tensors[k], apply, stream);
    DC_TRY(launched());
  }
  return dc__cuda_packed_lamb(tensors, count, apply, stream);
}

static int lamb_call(const dc_lamb_args *tensors, int64_t count, int apply, void *stream) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_lamb_args, format, tensors, count, &list, &owned);
  if (rc == DC_OK)
    rc = lamb_run(static_cast<const dc_lamb_args *>(list), count, apply, static_cast<cudaStream_t>(stream));
  free(owned);
  return rc;
}

int dc_cuda_lamb_moments(const dc_lamb_args *tensors, int64_t count, void *stream) {
  return lamb_call(tensors, count, 0, stream);
}
int dc_cuda_lamb_apply(const dc_lamb_args *tensors, int64_t count, void *stream) {
  return lamb_call(tensors, count, 1, stream);
}
