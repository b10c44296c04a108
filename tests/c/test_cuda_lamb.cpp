// test_cuda_lamb.cpp: what each CUDA thread of dc_cuda_lamb_moments and dc_cuda_lamb_apply does (ops/cuda/lamb.cuh,
// compiled for the CPU), lane by lane over all blocks, against the scalar reference, bit for bit, with forbidden pages
// around the arrays. What runs only on a GPU (launches, shuffles) is in tests/python/test_gpu_ops.py.
#include "cuda/lamb.cuh"
#include "cuda_fixture.h"
#include "cuda_lanes.h"
#include "lamb_cases.h"

namespace {

using namespace dc_gpu;

int wide_runs, narrow_runs; // of the step

class CudaLamb : public CudaOps {
protected:
  void SetUp() override {
    CudaOps::SetUp();
    ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
    wide_runs = narrow_runs = 0;
  }
  void TearDown() override {
    EXPECT_GT(wide_runs, 0);
    EXPECT_GT(narrow_runs, 0);
    CudaOps::TearDown();
  }
};

// What lamb_moments_kernel does for all blocks. A lane writes moments once, so its sums are kept for the second tree.
void moments(const dc_lamb_args &t) {
  const dc__lamb_coef c = dc__lamb_coef_of(&t, 0);
  for (int64_t block = 0; block < dc_lamb_blocks(t.first, t.n); block++) {
    LambSums sums[LAMB_LANES];
    for (int lane = LAMB_LANES - 1; lane >= 0; lane--) sums[lane] = lamb_moments(t, c, block, lane);
    store_sums_of_lanes(sums, &t.param_sums[block], &t.update_sums[block]);
  }
}

// What lamb_apply_kernel does, on `threads` threads, the last one first.
void apply(const dc_lamb_args &t, int64_t threads) {
  const dc__lamb_coef c = dc__lamb_coef_of(&t, 1);
  const bool wide = lamb_wide(t);
  wide_runs += wide, narrow_runs += !wide;
  for (int64_t thread = threads - 1; thread >= 0; thread--)
    if (wide) lamb_apply<true>(t, c, thread, threads);
    else lamb_apply<false>(t, c, thread, threads);
}

void check(const Case &c, Fill fill) {
  const auto gpu = [=](auto &p) {
    const dc_lamb_args t = args_of(c, p);
    moments(t);
    apply(t, 1 + c.n % 37);
    return (int)DC_OK;
  };
  same_on_gpu(arrays_of(c, fill), both_of(c), gpu, about(c, fill));
}

TEST_F(CudaLamb, EqualsReference) {
  for (int64_t first : {(int64_t)0, (int64_t)64, (int64_t)4032, (int64_t)(5 * 4096)})
    for (int64_t n : kSizes)
      for (Fill fill : {kOrdinary, kAnyBits, kSpecial}) {
        if (n > 5000 && (fill != kOrdinary || first > 64)) continue;
        check({n, first}, fill);
      }
}

TEST_F(CudaLamb, EveryDtype) {
  for (int param : kLow)
    for (int grad : kLow)
      for (int lowp : {-1, (int)DC_F32, (int)DC_BF16, (int)DC_F16})
        for (Fill fill : {kOrdinary, kSpecial}) check({4403, 64, param, grad, lowp}, fill);
}

} // namespace
