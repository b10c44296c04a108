// test_fuzz_zero.cpp: the body of tests/fuzz/fuzz_zero.c over fixed seeds, so that it runs where there is no libFuzzer.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#define FUZZ_ZERO_NO_MAIN
#include "tests/fuzz/fuzz_zero.c"

namespace {

TEST(FuzzZero, FixedSeeds) {
  int each[4] = {0, 0, 0, 0};
  for (unsigned seed = 0; seed < 6000; seed++) {
    std::mt19937 rng(seed);
    std::vector<uint8_t> data(rng() % 300);
    for (uint8_t &b : data) b = (uint8_t)rng();
    if (!data.empty()) each[data[0] % 4]++;
    const char *why = fuzz_zero_one(data.data(), data.size());
    ASSERT_EQ(nullptr, why) << "seed " << seed << ": " << why << "; last error: " << dc_last_error();
  }
  for (int n : each) EXPECT_GT(n, 1000);
}

// Inputs of few bytes end early: everything after them reads as zero.
TEST(FuzzZero, ShortInputs) {
  EXPECT_EQ(nullptr, fuzz_zero_one(nullptr, 0));
  for (int a = 0; a < 256; a++)
    for (int b = 0; b < 256; b += 5) {
      const uint8_t data[2] = {(uint8_t)a, (uint8_t)b};
      ASSERT_EQ(nullptr, fuzz_zero_one(data, 2)) << a << ", " << b;
    }
}

} // namespace
