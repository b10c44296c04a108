// packed.cu: launches of the steps where states have a format, for step.cu and lamb.cu, which have checked the
// arguments and entered the device. Each rule and format is a kernel of its own; a call may mix them.
#include "cuda/packed.cuh"
#include "cuda/packed_launch.cuh"

using dc_gpu::LAMB_LANES;
using dc_gpu::PackedTable;

// Blocks of threads that a multiprocessor has room for at least: 64 registers a thread, where those do without memory
// (117 when nobody asks), for 4 bits 80.
template <int FORMAT> inline constexpr int PACKED_BLOCKS = FORMAT == DC_STATE_4BIT ? 3 : 4;

template <int RULE, int FORMAT>
__global__ void __launch_bounds__(THREADS, PACKED_BLOCKS<FORMAT>)
    packed_kernel(const __grid_constant__ PackedTable table) {
  dc_gpu::packed_step<RULE, FORMAT>(table, (int32_t)blockIdx.x, THREADS);
}

// A group of LAMB_LANES threads a chunk.
template <int FORMAT>
__global__ void __launch_bounds__(THREADS) packed_sums_kernel(const __grid_constant__ PackedTable table) {
  const int64_t group = group_index<LAMB_LANES>();
  if (group >= table.first[table.count]) return;
  const int which = dc_gpu::adamw_find(table, (int32_t)group), lane = (int)(threadIdx.x % LAMB_LANES);
  const dc_gpu::PackedTensor &t = table.tensor[which];
  const int64_t block = group - table.first[which];
  store_lamb_sums(dc_gpu::packed_sums<FORMAT>(t, block, lane), lane, &t.param_sums[block], &t.update_sums[block]);
}

// launch(table) for the tensors of each rule and format that the call has.
template <class Args, class F> static int packed_each(const Args *tensors, int64_t count, int apply, F launch) {
  uint32_t done = 0;
  for (int64_t k = 0; k < count; k++) {
    const int rule = dc_gpu::packed_rule_of(tensors[k]), format = tensors[k].format;
    const uint32_t kind = 1u << (rule * DC_STATE_FORMATS + format);
    if (format == DC_STATE_NEAREST || tensors[k].n == 0 || done & kind) continue;
    done |= kind;
    for (int64_t next = k; next < count;) {
      PackedTable table;
      next = dc_gpu::fill_packed(&table, tensors, next, count, rule, format, apply);
      if (table.count == 0) break;
      launch(table, rule, format);
      DC_TRY(launched());
    }
  }
  return DC_OK;
}
static_assert((DC__RULE_LAMB + 1) * DC_STATE_FORMATS <= 32, "a bit for each rule and format");

static void packed_step_launch(const PackedTable &table, int rule, int format, cudaStream_t stream) {
  const unsigned grid = (unsigned)table.first[table.count];
  dc_gpu::with_rule(rule, [&](auto r) {
    dc_gpu::with_format(format, [&](auto f) {
      packed_kernel<decltype(r)::value, decltype(f)::value><<<grid, THREADS, 0, stream>>>(table);
    });
  });
}

int dc__cuda_packed_step(const dc_step_args *tensors, int64_t count, cudaStream_t stream) {
  return packed_each(tensors, count, 0, [=](const PackedTable &table, int rule, int format) {
    packed_step_launch(table, rule, format, stream);
  });
}

int dc__cuda_packed_lamb(const dc_lamb_args *tensors, int64_t count, int apply, cudaStream_t stream) {
  return packed_each(tensors, count, apply, [=](const PackedTable &table, int rule, int format) {
    if (apply) {
      packed_step_launch(table, rule, format, stream);
      return;
    }
    const unsigned grid = (unsigned)(((int64_t)table.first[table.count] * LAMB_LANES + THREADS - 1) / THREADS);
    dc_gpu::with_format(format,
                        [&](auto f) { packed_sums_kernel<decltype(f)::value><<<grid, THREADS, 0, stream>>>(table); });
  });
}
