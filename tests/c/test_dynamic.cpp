// Ranges that grow and shrink in place (ops/base/dynamic.c): what they hold, what memory they have, what they refuse.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/dynamic.h"

namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;

class Dynamic : public ::testing::Test {
protected:
  void TearDown() override { EXPECT_EQ(dc_dynamic_close(range_), DC_OK); }
  unsigned char *Open(size_t bytes, double slack = 1.0 / 32) {
    void *at = nullptr;
    EXPECT_EQ(dc_dynamic_open(bytes, slack, &range_, &at), DC_OK) << dc_last_error();
    reserved_ = bytes;
    return base_ = static_cast<unsigned char *>(at);
  }
  dc_dynamic_stats Stats() {
    dc_dynamic_stats s{};
    s.struct_size = sizeof s;
    EXPECT_EQ(dc_dynamic_read(range_, &s), DC_OK) << dc_last_error();
    return s;
  }
  int64_t Resident() { // bytes that the kernel says have memory
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), pages = (reserved_ + page - 1) / page;
    std::vector<unsigned char> in(pages);
    EXPECT_EQ(mincore(base_, reserved_, in.data()), 0);
    return static_cast<int64_t>(page) * std::count_if(in.begin(), in.end(), [](unsigned char c) { return c & 1; });
  }
  dc_dynamic *range_ = nullptr;
  unsigned char *base_ = nullptr;
  size_t reserved_ = 0;
};

bool AllAre(const unsigned char *begin, const unsigned char *end, unsigned char value) {
  return std::all_of(begin, end, [value](unsigned char c) { return c == value; });
}

TEST_F(Dynamic, HasNoMemoryUntilItIsAskedFor) {
  Open(96 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(base_) % DC_HUGE_PAGE, 0u);
  EXPECT_EQ(Resident(), 0);
  EXPECT_EQ(Stats().reserved, static_cast<int64_t>(96 * kMiB));
  EXPECT_EQ(Stats().committed, 0);
}

TEST_F(Dynamic, GrowsWhereItLiesAndKeepsWhatItHeld) {
  unsigned char *at = Open(96 * kMiB);
  ASSERT_EQ(dc_dynamic_resize(range_, 3 * kMiB + 5), DC_OK) << dc_last_error();
  memset(at, 7, 3 * kMiB + 5);
  ASSERT_EQ(dc_dynamic_resize(range_, 90 * kMiB), DC_OK) << dc_last_error();
  EXPECT_TRUE(AllAre(at, at + 3 * kMiB + 5, 7));
  EXPECT_TRUE(AllAre(at + 3 * kMiB + 5, at + 90 * kMiB, 0));
  EXPECT_EQ(Stats().grows, 2);
}

TEST_F(Dynamic, GivesMemoryBackWhenItShrinks) {
  unsigned char *at = Open(96 * kMiB);
  ASSERT_EQ(dc_dynamic_resize(range_, 96 * kMiB), DC_OK);
  memset(at, 9, 96 * kMiB);
  ASSERT_EQ(dc_dynamic_resize(range_, 5 * kMiB + 1), DC_OK);
  EXPECT_TRUE(AllAre(at, at + 5 * kMiB + 1, 9));
  EXPECT_EQ(Resident(), Stats().committed);
  EXPECT_LE(Stats().committed, static_cast<int64_t>(5 * kMiB + 5 * kMiB / 32 + 4 * kKiB));
  EXPECT_EQ(Stats().most_committed, static_cast<int64_t>(96 * kMiB));
  ASSERT_EQ(dc_dynamic_resize(range_, 0), DC_OK);
  EXPECT_EQ(Resident(), 0);
  EXPECT_EQ(Stats().granted, Stats().released);
}

// The kept part of a page, and what is kept to grow into, must not show what was there before.
TEST_F(Dynamic, WhatItGrowsByIsZero) {
  unsigned char *at = Open(8 * kMiB);
  ASSERT_EQ(dc_dynamic_resize(range_, 4 * kMiB), DC_OK);
  memset(at, 3, 4 * kMiB);
  for (size_t bytes : {4 * kMiB - 1, 4 * kMiB - 100, 4 * kMiB - 60 * kKiB, 2 * kMiB, 1 * kKiB}) {
    ASSERT_EQ(dc_dynamic_resize(range_, bytes), DC_OK);
    ASSERT_EQ(dc_dynamic_resize(range_, 4 * kMiB), DC_OK);
    EXPECT_TRUE(AllAre(at, at + bytes, 3)) << bytes;
    EXPECT_TRUE(AllAre(at + bytes, at + 4 * kMiB, 0)) << bytes;
    memset(at, 3, 4 * kMiB);
  }
}

// Against a plain vector, with what the kernel says of every page beside what is counted.
class DynamicSlack : public Dynamic, public ::testing::WithParamInterface<double> {};

TEST_P(DynamicSlack, RandomSizesHoldTheirBytesAndLittleMore) {
  const size_t limit = 80 * kMiB;
  const double slack = GetParam();
  unsigned char *at = Open(limit, slack);
  std::vector<unsigned char> model;
  std::mt19937_64 rng(1);
  const int64_t page = sysconf(_SC_PAGESIZE);
  int64_t granted = 0, most = 0;
  for (int i = 0; i < 60; i++) {
    size_t bytes = i % 3 ? rng() % limit : rng() % (256 * kKiB);
    ASSERT_EQ(dc_dynamic_resize(range_, bytes), DC_OK) << dc_last_error();
    model.resize(bytes);
    ASSERT_EQ(bytes ? memcmp(at, model.data(), bytes) : 0, 0) << "step " << i;
    dc_dynamic_stats s = Stats();
    EXPECT_EQ(s.used, static_cast<int64_t>(bytes));
    EXPECT_GE(s.committed, s.used);
    double spare = std::max(static_cast<double>(s.used) * slack, static_cast<double>(page));
    EXPECT_LE(static_cast<double>(s.committed - s.used), spare) << "step " << i;
    if (std::isinf(slack)) EXPECT_GE(s.committed, most);
    most = std::max(most, s.committed);
    EXPECT_EQ(Resident(), s.committed) << "step " << i;
    EXPECT_GE(s.granted, granted);
    granted = s.granted;
    for (size_t k = 0; k < bytes; k += 997) at[k] = model[k] = static_cast<unsigned char>(rng());
    if (bytes) at[bytes - 1] = model[bytes - 1] = 0xEE;
  }
  EXPECT_EQ(Stats().granted - Stats().released, Stats().committed);
}
INSTANTIATE_TEST_SUITE_P(Slacks, DynamicSlack, ::testing::Values(0.0, 1.0 / 32, 0.5, INFINITY));

// A slack is for memory that was used once: it takes none for itself.
TEST_P(DynamicSlack, GrowingCommitsNoMoreThanALittleAhead) {
  Open(256 * kMiB, GetParam());
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (size_t bytes : {1 * kKiB, 3 * kMiB, 40 * kMiB, 70 * kMiB}) {
    ASSERT_EQ(dc_dynamic_resize(range_, bytes), DC_OK) << dc_last_error();
    dc_dynamic_stats s = Stats();
    EXPECT_LE(s.committed - s.used, std::max(s.used / 32, page)) << bytes;
    EXPECT_EQ(Resident(), s.committed);
  }
}

TEST_F(Dynamic, AppendingAsksTheKernelSeldom) {
  Open(64 * kMiB);
  for (size_t bytes = 0; bytes <= 32 * kMiB; bytes += 512) ASSERT_EQ(dc_dynamic_resize(range_, bytes), DC_OK);
  EXPECT_EQ(Stats().grows, static_cast<int64_t>(32 * kMiB / 512));
  EXPECT_LT(Stats().commits, 300); // log(32 MiB / 128 KiB) / log(33 / 32) = 180, and a page each until 128 KiB: 32
}

TEST_F(Dynamic, ARefusalChangesNothing) {
  unsigned char *at = Open(size_t{1} << 44);
  ASSERT_EQ(dc_dynamic_resize(range_, 1 * kMiB), DC_OK) << dc_last_error();
  memset(at, 5, 1 * kMiB);
  dc_dynamic_stats before = Stats();
  EXPECT_EQ(dc_dynamic_resize(range_, size_t{1} << 44), DC_E_NOMEM);
  EXPECT_NE(strstr(dc_last_error(), "available"), nullptr) << dc_last_error();
  EXPECT_EQ(dc_dynamic_resize(range_, (size_t{1} << 44) + 1), DC_E_INVALID);
  EXPECT_NE(strstr(dc_last_error(), "17592186044417"), nullptr) << dc_last_error();
  dc_dynamic_stats after = Stats();
  EXPECT_EQ(memcmp(&before, &after, sizeof before), 0);
  EXPECT_TRUE(AllAre(at, at + 1 * kMiB, 5));
}

TEST(DynamicArguments, AreChecked) {
  dc_dynamic *d = nullptr;
  void *at = nullptr;
  dc_dynamic_stats s{};
  EXPECT_EQ(dc_dynamic_open(0, 0, &d, &at), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_open(1, -0.5, &d, &at), DC_E_INVALID);
  EXPECT_NE(strstr(dc_last_error(), "-0.5"), nullptr) << dc_last_error();
  EXPECT_EQ(dc_dynamic_open(1, std::nan(""), &d, &at), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_open(1, 0, nullptr, &at), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_open(1, 0, &d, nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_open(SIZE_MAX / 2, 0, &d, &at), DC_E_NOMEM);
  EXPECT_EQ(dc_dynamic_open(SIZE_MAX / 8, 0, &d, &at), DC_E_NOMEM);
  EXPECT_EQ(dc_dynamic_resize(nullptr, 1), DC_E_INVALID);
  ASSERT_EQ(dc_dynamic_open(100, 0, &d, &at), DC_OK);
  EXPECT_EQ(dc_dynamic_read(d, &s), DC_E_INVALID) << "struct_size is not set";
  EXPECT_EQ(dc_dynamic_read(nullptr, &s), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_close(d), DC_OK);
  EXPECT_EQ(dc_dynamic_close(nullptr), DC_OK);
}

} // namespace
