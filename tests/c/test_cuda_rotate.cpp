// test_cuda_rotate.cpp: the CUDA body of dc_rotate (ops/cuda/rotate.cuh, compiled for the CPU): whole warps with their
// shuffles (block_stand_in.h), several of them or one alone, in two orders of the threads, against the scalar
// reference, bit for bit, with forbidden pages around the array. Launches need a GPU: tests/python/test_gpu_ops.py.
#include "cuda/rotate.cuh"
#include "cuda_fixture.h"

namespace {

using namespace dc_gpu;

class CudaRotate : public CudaBlocks {
protected:
  void SetUp() override {
    CudaBlocks::SetUp();
    if (!IsSkipped()) ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
  }
};

int wide_runs, narrow_runs;

// What dc_cuda_rotate launches, on `warps` warps.
void run_warps(float *x, int64_t n, int warps, Block::Order order) {
  static Block block;
  const bool wide = (uintptr_t)x % 16 == 0;
  wide_runs += wide, narrow_runs += !wide;
  block.run(warps * WARP, order, [&] {
    const int warp = block_thread() / WARP;
    if (wide) rotate<true>(x, n, dc__rotate_factor(2), warp, warps);
    else rotate<false>(x, n, dc__rotate_factor(2), warp, warps);
  });
}

void check(int64_t n, Fill fill, int warps, Place place, Block::Order order) {
  const std::vector<Array> arrays = {make(DC_F32, n, fill, 68)};
  const auto want = run_once(arrays, kAtStart, [=](auto &p) { return dc_rotate((float *)p[0], n); });
  const auto got = run_once(arrays, place, [=](auto &p) {
    run_warps((float *)p[0], n, warps, order);
    return (int)DC_OK;
  });
  ASSERT_TRUE(same(arrays, got, want)) << "n=" << n << " fill=" << fill << " warps=" << warps << " placement " << place
                                       << " order " << order;
}

// Fewer warps than there are blocks, and more.
TEST_F(CudaRotate, EqualsReference) {
  std::vector<int64_t> sizes = {63,   64,   65,   127,  128,  129,  130,
                                255,  256,  257,  511,  513,  1023, 1024,
                                1025, 2047, 2048, 2049, 4095, 4096, 3 * 2048 + 1234};
  for (int64_t n = 0; n <= 40; n++) sizes.push_back(n);
  wide_runs = narrow_runs = 0;
  for (int64_t n : sizes)
    for (Fill fill : {kOrdinary, kAnyBits, kSpecial})
      for (Place place : {kAtStart, kAtEnd, kOffStart}) {
        if (n > 600 && (int)fill != (n + (int)place) % 3) continue;
        check(n, fill, 1 + 2 * ((int)place % 2), place, fill == kOrdinary ? Block::kForwards : Block::kBackwards);
      }
  EXPECT_GT(wide_runs, 100);
  EXPECT_GT(narrow_runs, 100);
}

// The same bits in both orders of the threads.
TEST_F(CudaRotate, OrderOfThreads) {
  for (Block::Order order : {Block::kForwards, Block::kBackwards})
    for (int warps : {1, 2, 3, 4}) check(3 * 2048 + 1234, kOrdinary, warps, kAtStart, order);
}

// A NaN or an infinity fills its block; alone it can be followed through every butterfly. So can a denormal and -0.
TEST_F(CudaRotate, OneOddElement) {
  for (int64_t n : {2048, 1024 + 64 + 2 + 1})
    for (int64_t at : {(int64_t)0, (int64_t)5, (int64_t)1023, n - 2, n - 1})
      for (uint32_t odd :
           {0x7fc00000u, 0xff800001u, 0x7f800000u, 0xff800000u, 0x80000000u, 0x00000001u, 0x807fffffu, 0x7f7fffffu}) {
        Array x = {DC_F32, std::vector<uint8_t>((size_t)n * 4)};
        memcpy(&x.bytes[(size_t)at * 4], &odd, 4);
        const auto want = run_once({x}, kAtStart, [=](auto &p) { return dc_rotate((float *)p[0], n); });
        const auto got = run_once({x}, kAtStart, [=](auto &p) {
          run_warps((float *)p[0], n, 2, Block::kForwards);
          return (int)DC_OK;
        });
        ASSERT_TRUE(same({x}, got, want)) << "n=" << n << ", element " << at << " is " << std::hex << odd;
      }
}

TEST_F(CudaRotate, FactorsAndSigns) {
  for (int log = 0; log <= ROTATE_LOG; log++)
    EXPECT_EQ(rotate_factor(log, dc__rotate_factor(2)), dc__rotate_factor(1 << log)) << log;
  for (uint32_t i = 0; i < DC_ROTATE_BLOCK; i++) ASSERT_EQ(rotate_sign(i), dc__rotate_sign(i)) << i;
  EXPECT_EQ(rotate_units(0), 0);
  EXPECT_EQ(rotate_units(1), 1);
  EXPECT_EQ(rotate_units(DC_ROTATE_BLOCK), 1);
  EXPECT_EQ(rotate_units(DC_ROTATE_BLOCK + 1), 2);
}

} // namespace
