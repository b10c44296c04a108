// cuda_fixture.h: what the tests of CUDA bodies on the CPU share: no access that would trap on a GPU.
#ifndef DEEPC_TESTS_CUDA_FIXTURE_H
#define DEEPC_TESTS_CUDA_FIXTURE_H

#include "cuda/bodies.cuh"
#include "op_cases.h"

namespace {

class CudaOps : public Ops {
protected:
  void SetUp() override {
    Ops::SetUp();
    dc_gpu::misaligned_accesses = dc_gpu::misplaced_stores = 0;
  }
  void TearDown() override {
    EXPECT_EQ(dc_gpu::misaligned_accesses, 0);
    EXPECT_EQ(dc_gpu::misplaced_stores, 0);
    Ops::TearDown();
  }
};

// `gpu` leaves all arrays as the reference leaves them, bit for bit, wherever they lie.
[[maybe_unused]] void same_on_gpu(const std::vector<Array> &arrays, const Run &reference, const Run &gpu,
                                  const std::string &what,
                                  const std::vector<Place> &places = {kAtStart, kAtEnd, kOffStart}) {
  const auto want = run_once(arrays, kAtStart, reference);
  for (Place place : places)
    ASSERT_TRUE(same(arrays, run_once(arrays, place, gpu), want)) << what << ", placement " << place;
}

// Of blocks of threads (block_stand_in.h).
class CudaBlocks : public CudaOps {
protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the stand-in changes stacks, which ThreadSanitizer does not follow; it is one thread";
#endif
    CudaOps::SetUp();
  }
};

} // namespace

#endif
