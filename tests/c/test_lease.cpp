// Memory for one phase (ops/base/lease.c): it comes from what the heap has free, without faults or copies, and goes
// back; the range reads as zeros between.
#include <gtest/gtest.h>

#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "heap_probe.h"

namespace {
bool gives_up = false; // every mremap, when what it was to replace is unmapped already
} // namespace

// In place of the C library's, for the library too.
extern "C" void *mremap(void *from, size_t bytes, size_t size, int flags, ...) noexcept {
  va_list rest;
  va_start(rest, flags);
  void *to = va_arg(rest, void *);
  va_end(rest);
  if (!gives_up) return reinterpret_cast<void *>(syscall(SYS_mremap, from, bytes, size, flags, to));
  munmap(to, size);
  errno = ENOMEM;
  return MAP_FAILED;
}

namespace {

class Lease : public ::testing::Test {
protected:
  void SetUp() override {
    if (!dc_heap_usable()) GTEST_SKIP() << "this process may not reserve addresses";
    in_use_ = stats().in_use;
  }
  void TearDown() override {
    if (!IsSkipped()) EXPECT_EQ(stats().in_use, in_use_) << "the test left blocks behind";
  }
  char *Open(size_t bytes, int color = 1) {
    void *at = nullptr;
    EXPECT_EQ(dc_lease_open(bytes, color, &lease_, &at), DC_OK) << dc_last_error();
    return static_cast<char *>(at);
  }
  int64_t Borrowed() {
    int64_t borrowed = -1, own = -1;
    EXPECT_EQ(dc_lease_bytes(lease_, &borrowed, &own), DC_OK);
    own_ = own;
    return borrowed;
  }
  dc_lease *lease_ = nullptr;
  int64_t in_use_ = 0, own_ = 0;
};

TEST_F(Lease, ReadsAsZerosWhereItHasNothing) {
  char *at = Open(5 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % 64, 0u);
  EXPECT_TRUE(std::all_of(at, at + 5 * kMiB, [](char c) { return c == 0; }));
  EXPECT_EQ(Borrowed(), 0);
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

TEST_F(Lease, TakesOnlyWhatIsNeededAndGivesItBack) {
  char *at = Open(9 * kMiB);
  ASSERT_EQ(dc_lease_need(lease_, 4 * kMiB, 10), DC_OK) << dc_last_error();
  if (Borrowed() == 0) {
    dc_lease_close(lease_);
    GTEST_SKIP() << "this kernel can't move pages";
  }
  EXPECT_EQ(Borrowed(), static_cast<int64_t>(2 * kMiB));
  EXPECT_EQ(stats().in_use - in_use_, static_cast<int64_t>(2 * kMiB));
  ASSERT_EQ(dc_lease_need(lease_, 0, 9 * kMiB), DC_OK);
  memset(at, 7, 9 * kMiB);
  EXPECT_EQ(Borrowed(), static_cast<int64_t>(10 * kMiB));
  EXPECT_EQ(dc_lease_end(lease_), DC_OK);
  EXPECT_EQ(Borrowed(), 0);
  EXPECT_EQ(own_, 0);
  EXPECT_EQ(stats().in_use, in_use_);
  EXPECT_TRUE(std::all_of(at, at + 9 * kMiB, [](char c) { return c == 0; }));
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

// The point of it: the pages are those of blocks that were given back, and no page is faulted in.
TEST_F(Lease, LivesInTheHolesOfTheHeap) {
  std::vector<char *> blocks;
  for (int i = 0; i < 12; i++) {
    blocks.push_back(static_cast<char *>(dc_heap_take(6 * kMiB)));
    memset(blocks.back(), i, 6 * kMiB);
  }
  for (char *b : blocks) ASSERT_EQ(dc_heap_give(b), 1);
  int64_t extent = stats().extent;
  char *at = Open(40 * kMiB);
  for (int round = 0; round < 3; round++) {
    long before = faults();
    ASSERT_EQ(dc_lease_need(lease_, 0, 40 * kMiB), DC_OK);
    if (Borrowed() == 0) {
      dc_lease_close(lease_);
      GTEST_SKIP() << "this kernel can't move pages";
    }
    for (size_t i = 0; i < 40 * kMiB; i += 4096) at[i] = static_cast<char>(round);
    ASSERT_EQ(dc_lease_end(lease_), DC_OK);
    if (round) EXPECT_LT(faults() - before, 500) << "40 MiB of fresh pages are 10,240 faults, or 20 of huge ones";
    EXPECT_EQ(stats().extent, extent);
  }
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

// Blocks and leases come and go at random: nobody's bytes change.
TEST_F(Lease, NeverTouchesWhatOthersHold) {
  std::mt19937 random(5);
  struct Block {
    char *at;
    size_t bytes;
    char mark;
  };
  std::vector<Block> live;
  auto holds = [](const Block &b) { return std::all_of(b.at, b.at + b.bytes, [&](char c) { return c == b.mark; }); };
  char *at = Open(23 * kMiB + 77, 3);
  std::vector<char> needed(24, 0);
  for (int step = 0; step < 400; step++) {
    unsigned what = random() % 8;
    if (what < 4) {
      Block b{nullptr, (random() % 40 + 1) * kMiB / 8, static_cast<char>(step | 1)};
      b.at = static_cast<char *>(dc_heap_take(b.bytes));
      ASSERT_TRUE(b.at);
      memset(b.at, b.mark, b.bytes);
      live.push_back(b);
    }
    if (what >= 3 && what < 6 && !live.empty()) {
      size_t i = random() % live.size();
      ASSERT_TRUE(holds(live[i]));
      ASSERT_EQ(dc_heap_give(live[i].at), 1);
      live.erase(live.begin() + static_cast<long>(i));
    }
    if (what == 6) {
      size_t k = random() % 23;
      ASSERT_EQ(dc_lease_need(lease_, k * kMiB, kMiB), DC_OK);
      memset(at + k * kMiB, static_cast<int>(k + 1), kMiB);
      needed[k] = 1;
    }
    for (size_t k = 0; k < 23; k++)
      if (needed[k])
        ASSERT_TRUE(at[k * kMiB] == static_cast<char>(k + 1) && at[(k + 1) * kMiB - 1] == static_cast<char>(k + 1))
            << k;
    if (what == 7 && random() % 6 == 0) {
      ASSERT_EQ(dc_lease_end(lease_), DC_OK);
      std::fill(needed.begin(), needed.end(), 0);
    }
  }
  for (const Block &b : live) {
    EXPECT_TRUE(holds(b));
    EXPECT_EQ(dc_heap_give(b.at), 1);
  }
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

// Pieces stay out of the way of large blocks: the low part of a free stretch is left in one piece.
TEST_F(Lease, TakesTheHighEndOfWhatIsFree) {
  char *whole = static_cast<char *>(dc_heap_take(64 * kMiB));
  ASSERT_EQ(dc_heap_give(whole), 1);
  int64_t extent = stats().extent;
  Open(16 * kMiB);
  ASSERT_EQ(dc_lease_need(lease_, 0, 16 * kMiB), DC_OK);
  if (Borrowed() == 0) {
    dc_lease_close(lease_);
    GTEST_SKIP() << "this kernel can't move pages";
  }
  void *large = dc_heap_take(40 * kMiB);
  EXPECT_EQ(stats().extent, extent);
  EXPECT_EQ(dc_heap_give(large), 1);
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

TEST_F(Lease, IsLeftOutOfCoreDumps) {
  char *at = Open(3 * kMiB);
  for (int i = 0; i < 2; i++) {
    std::string flags = mapping_flags(at);
    if (!flags.empty()) EXPECT_NE(flags.find(" dd "), std::string::npos) << (i ? "borrowed: " : "empty: ") << flags;
    ASSERT_EQ(dc_lease_need(lease_, 0, 3 * kMiB), DC_OK);
  }
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

// Where the process has too many mappings the range gets memory of its own; when they are gone it borrows again.
TEST_F(Lease, BorrowsAgainWhenItCan) {
  constexpr size_t bytes = 8 * kMiB, reserved = size_t{70000} * 8192;
  char *block = static_cast<char *>(dc_heap_take(3 * bytes));
  memset(block, 1, 3 * bytes);
  ASSERT_EQ(dc_heap_give(block), 1);
  char *at = Open(bytes, 0);
  ASSERT_EQ(dc_lease_need(lease_, 0, bytes), DC_OK);
  if (Borrowed() == 0) {
    dc_lease_close(lease_);
    GTEST_SKIP() << "this kernel can't move pages";
  }
  ASSERT_EQ(dc_lease_end(lease_), DC_OK);
  char *many = static_cast<char *>(
      mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  ASSERT_NE(static_cast<void *>(many), MAP_FAILED);
  size_t n = 0;
  while (n < reserved / 8192 && !mprotect(many + n * 8192, 4096, PROT_READ)) n++;
  bool full = n < reserved / 8192;
  int rc = dc_lease_need(lease_, 0, bytes);
  int64_t borrowed = 0, own = 0;
  dc_lease_bytes(lease_, &borrowed, &own);
  munmap(many, reserved);
  ASSERT_EQ(rc, DC_OK);
  memset(at, 2, bytes);
  ASSERT_EQ(dc_lease_end(lease_), DC_OK);
  if (full) EXPECT_GT(own, 0) << "the limit on mappings was to be met";
  ASSERT_EQ(dc_lease_need(lease_, 0, bytes), DC_OK);
  EXPECT_EQ(Borrowed(), static_cast<int64_t>(bytes));
  EXPECT_EQ(own_, 0);
  memset(at, 3, bytes);
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

// A kernel that has no memory for page tables finds out behind the point where it has unmapped what a piece was to
// replace, in the range or in the heap: there is memory again, of the one it belongs to.
TEST_F(Lease, LeavesNoHoleWhereAPieceCannotBeMoved) {
  constexpr size_t bytes = 6 * kMiB;
  char *block = static_cast<char *>(dc_heap_take(2 * bytes));
  memset(block, 1, 2 * bytes);
  ASSERT_EQ(dc_heap_give(block), 1);
  char *at = Open(bytes, 0);
  gives_up = true;
  EXPECT_EQ(dc_lease_need(lease_, 0, bytes), DC_OK);
  gives_up = false;
  EXPECT_FALSE(mapping_flags(at).empty());
  EXPECT_EQ(Borrowed(), 0);
  memset(at, 2, bytes);
  ASSERT_EQ(dc_lease_end(lease_), DC_OK);
  ASSERT_EQ(dc_lease_need(lease_, 0, bytes), DC_OK);
  if (Borrowed() == 0) {
    dc_lease_close(lease_);
    GTEST_SKIP() << "this kernel can't move pages";
  }
  memset(at, 3, bytes);
  gives_up = true;
  EXPECT_EQ(dc_lease_end(lease_), DC_OK);
  gives_up = false;
  EXPECT_EQ(Borrowed(), 0);
  block = static_cast<char *>(dc_heap_take(2 * bytes));
  memset(block, 4, 2 * bytes);
  EXPECT_EQ(dc_heap_give(block), 1);
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
}

TEST_F(Lease, RefusesWhatIsOutsideAndNull) {
  void *at = nullptr;
  EXPECT_EQ(dc_lease_open(1, 16, &lease_, &at), DC_E_INVALID);
  EXPECT_EQ(dc_lease_open(1, 0, nullptr, &at), DC_E_INVALID);
  EXPECT_EQ(dc_lease_open(SIZE_MAX / 2, 0, &lease_, &at), DC_E_NOMEM);
  Open(kMiB);
  EXPECT_EQ(dc_lease_need(lease_, kMiB, 1), DC_E_INVALID);
  EXPECT_EQ(dc_lease_need(lease_, 1, kMiB), DC_E_INVALID);
  EXPECT_EQ(dc_lease_need(lease_, kMiB, 0), DC_OK);
  EXPECT_EQ(dc_lease_need(nullptr, 0, 1), DC_E_INVALID);
  EXPECT_EQ(dc_lease_end(nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_lease_close(lease_), DC_OK);
  EXPECT_EQ(dc_lease_close(nullptr), DC_OK);
}

}  // namespace
