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
