// The heap for large blocks (ops/base/heap.c): blocks never overlap, holes are joined and found again, foreign and
// doubled pointers are refused.
#include <gtest/gtest.h>

#include <malloc.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "heap_probe.h"

namespace {

constexpr size_t kGranule = size_t{16} << 10;

class Heap : public ::testing::Test {
protected:
  void SetUp() override {
    if (!dc_heap_usable()) GTEST_SKIP() << "this process may not reserve addresses";
    before_ = stats();
  }
  void TearDown() override {
    if (!IsSkipped()) EXPECT_EQ(stats().in_use, before_.in_use) << "the test left blocks behind";
  }
  struct dc_heap_stats before_{};
};

TEST_F(Heap, BlocksAreAlignedAndApart) {
  char *a = static_cast<char *>(dc_heap_take(3 * kMiB)), *b = static_cast<char *>(dc_heap_take(5 * kMiB + 1));
  ASSERT_TRUE(a && b);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % kGranule, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b) % kGranule, 0u);
  memset(a, 1, 3 * kMiB);
  memset(b, 2, 5 * kMiB + 1);
  EXPECT_EQ(a[3 * kMiB - 1], 1);
  EXPECT_EQ(b[0], 2);
  EXPECT_EQ(dc_heap_give(a), 1);
  EXPECT_EQ(dc_heap_give(b), 1);
}

TEST_F(Heap, RefusesWhatIsNotABlock) {
  int local = 0;
  char *a = static_cast<char *>(dc_heap_take(kMiB));
  EXPECT_EQ(dc_heap_give(nullptr), 0);
  EXPECT_EQ(dc_heap_give(&local), 0);
  EXPECT_EQ(dc_heap_give(a + 1), -1);
  EXPECT_EQ(dc_heap_give(a + kGranule), -1);
  EXPECT_EQ(dc_heap_give(a), 1);
  EXPECT_EQ(dc_heap_give(a), -1);
  EXPECT_EQ(dc_heap_take(0), nullptr);
  EXPECT_EQ(dc_heap_take(SIZE_MAX), nullptr);
  EXPECT_EQ(dc_heap_take(static_cast<size_t>(stats().limit) + 1), nullptr);
  EXPECT_EQ(dc_heap_stats(nullptr), DC_E_INVALID);
  EXPECT_EQ(stats().foreign_frees - before_.foreign_frees, 3);
  EXPECT_EQ(stats().refusals - before_.refusals, 2);
  EXPECT_GE(dc_counter_get(DC_COUNTER_heap_foreign_frees), 3);
  EXPECT_GE(dc_counter_get(DC_COUNTER_heap_refusals), 2);
}

TEST_F(Heap, StatisticsHaveASizeThatMayGrow) {
  struct dc_heap_stats s{};
  EXPECT_EQ(dc_heap_stats(&s), DC_E_INVALID);
  EXPECT_NE(strstr(dc_last_error(), "struct_size"), nullptr) << dc_last_error();
  s.struct_size = sizeof s + 8;
  EXPECT_EQ(dc_heap_stats(&s), DC_E_INVALID);
  s.struct_size = sizeof s;
  EXPECT_EQ(dc_heap_stats(&s), DC_OK) << dc_last_error();
  EXPECT_EQ(s.struct_size, sizeof s);
}

// A data loader's worker gets what lives, but not what is free: that would stay resident twice as long as it lives, and
// the parent's next step would copy it page by page.
TEST_F(Heap, AForkedChildHasNoFreePages) {
  constexpr size_t bytes = 64 * kMiB;
  char *live = static_cast<char *>(dc_heap_take(2 * kMiB)), *free_ = static_cast<char *>(dc_heap_take(bytes));
  memset(live, 3, 2 * kMiB);
  memset(free_, 4, bytes);
  ASSERT_EQ(dc_heap_give(free_), 1);
  ASSERT_GE(resident_pages(free_, bytes), bytes / 4096 / 2);
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (!child) {
    bool kept = true;
    for (size_t i = 0; i < 2 * kMiB; i++) kept = kept && live[i] == 3;
    _exit(!kept ? 1 : resident_pages(free_, bytes) ? 2 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "exit code 1: a live block changed; 2: free pages are resident in the child";
  EXPECT_GE(resident_pages(free_, bytes), bytes / 4096 / 2) << "the parent's are its own business";
  EXPECT_EQ(dc_heap_give(live), 1);
}

TEST_F(Heap, IsTrimmedBeforeAnAllocationIsRefused) {
  char *p = static_cast<char *>(dc_heap_take(32 * kMiB));
  memset(p, 1, 32 * kMiB);
  ASSERT_EQ(dc_heap_give(p), 1);
  ASSERT_GT(resident_pages(p, 32 * kMiB), 0u);
  void *q = nullptr;
  EXPECT_EQ(dc_mem_alloc(size_t{1} << 46, 0, &q), DC_E_NOMEM);
  EXPECT_EQ(resident_pages(p, 32 * kMiB), 0u);
}

TEST_F(Heap, StepsGiveBackWhatStaysFree) {
  constexpr size_t bytes = 32 * kMiB;
  char *p = static_cast<char *>(dc_heap_take(bytes));
  memset(p, 1, bytes);
  ASSERT_EQ(dc_heap_give(p), 1);
  for (int i = 0; i < 40; i++) ASSERT_EQ(dc_heap_step(), DC_OK);
  EXPECT_LE(resident_pages(p, bytes), 2 * DC_HUGE_PAGE / 4096) << "all but the ends in huge pages of neighbours";
  EXPECT_GE(stats().decayed - before_.decayed, static_cast<int64_t>(bytes - 2 * DC_HUGE_PAGE));
}

TEST_F(Heap, IsLeftOutOfCoreDumps) {
  void *p = dc_heap_take(kMiB);
  std::string flags = mapping_flags(p);
  if (!flags.empty()) EXPECT_NE(flags.find(" dd "), std::string::npos) << flags;
  EXPECT_EQ(dc_heap_give(p), 1);
}

TEST_F(Heap, ABlockComesBackWithoutFaults) {
  constexpr size_t bytes = 64 * kMiB;
  void *a = dc_heap_take(bytes);
  memset(a, 1, bytes);
  dc_heap_give(a);
  long before = faults();
  void *b = dc_heap_take(bytes);
  memset(b, 2, bytes);
  EXPECT_EQ(b, a);
  EXPECT_LE(faults() - before, 1);
  dc_heap_give(b);
  ASSERT_EQ(dc_heap_trim(), DC_OK);
  before = faults();
  b = dc_heap_take(bytes);
  memset(b, 3, bytes);
  EXPECT_GT(faults() - before, 1);
  dc_heap_give(b);
}

TEST_F(Heap, HolesAreJoinedAndTheTightestIsTaken) {
  constexpr size_t n = 8;
  std::vector<char *> blocks;
  for (size_t i = 0; i < n; i++) blocks.push_back(static_cast<char *>(dc_heap_take((10 + i) * kMiB + 1)));
  const int64_t extent = stats().extent;
  dc_heap_give(blocks[2]);
  dc_heap_give(blocks[4]);
  EXPECT_EQ(dc_heap_take(14 * kMiB), blocks[4]);  // the smaller hole is too small
  EXPECT_EQ(dc_heap_take(11 * kMiB), blocks[2]);
  for (size_t i : {1, 3, 2}) dc_heap_give(blocks[i]);  // 2 joins both neighbours
  char *joined = static_cast<char *>(dc_heap_take(36 * kMiB));
  EXPECT_EQ(joined, blocks[1]);
  EXPECT_EQ(stats().extent, extent);
  dc_heap_give(joined);
  for (size_t i : {0, 4, 5, 6, 7}) dc_heap_give(blocks[i]);
}

// A step that repeats needs no more room the second time.
TEST_F(Heap, APeriodicPatternDoesNotGrow) {
  std::mt19937_64 rng(7);
  std::vector<size_t> sizes;
  for (int i = 0; i < 120; i++) sizes.push_back(kMiB + rng() % (4 * kMiB));
  int64_t extent = 0;
  for (int step = 0; step < 6; step++) {
    std::vector<void *> live;
    for (size_t i = 0; i < sizes.size(); i++) {
      live.push_back(dc_heap_take(sizes[i]));
      if (i % 3 == 2) dc_heap_give(live[live.size() - 2]), live.erase(live.end() - 2);
    }
    while (!live.empty()) dc_heap_give(live.back()), live.pop_back();
    if (step == 1) extent = stats().extent;
  }
  EXPECT_EQ(stats().extent, extent);
}

TEST_F(Heap, RandomBlocksNeverOverlap) {
  std::mt19937_64 rng(1);
  std::map<char *, size_t> live;
  for (int i = 0; i < 20000; i++) {
    if (live.size() < 40 || rng() % 2) {
      size_t bytes = 1 + rng() % (rng() % 8 ? 3 * kMiB : 40 * kMiB);
      char *p = static_cast<char *>(dc_heap_take(bytes));
      ASSERT_NE(p, nullptr);
      auto after = live.lower_bound(p);
      if (after != live.end()) ASSERT_LE(p + bytes, after->first);
      if (after != live.begin()) {
        auto prior = std::prev(after);
        ASSERT_LE(prior->first + prior->second, p);
      }
      live[p] = bytes;
    }
    while (live.size() > 60 || (live.size() && rng() % 2)) {
      auto it = std::next(live.begin(), static_cast<long>(rng() % live.size()));
      ASSERT_EQ(dc_heap_give(it->first), 1);
      live.erase(it);
    }
  }
  const struct dc_heap_stats s = stats();
  EXPECT_EQ(s.in_use + s.free, s.extent);
  for (auto &[p, bytes] : live) ASSERT_EQ(dc_heap_give(p), 1);
  if (!before_.in_use) EXPECT_EQ(stats().free_blocks, 1);  // all joined again
}

TEST_F(Heap, ThreadsAndAFork) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([t] {
      std::mt19937_64 rng(static_cast<uint64_t>(t));
      for (int i = 0; i < 500; i++) {
        size_t bytes = kMiB + rng() % kMiB;
        char *p = static_cast<char *>(dc_heap_take(bytes));
        p[0] = p[bytes - 1] = static_cast<char>(t);
        std::this_thread::yield();
        EXPECT_EQ(p[0], static_cast<char>(t));
        EXPECT_EQ(p[bytes - 1], static_cast<char>(t));
        EXPECT_EQ(dc_heap_give(p), 1);
      }
    });
  for (int i = 0; i < 5; i++) {  // a child made while others hold the lock
    pid_t child = fork();
    ASSERT_GE(child, 0);
    if (!child) {
      void *p = dc_heap_take(kMiB);
      _exit(p && dc_heap_give(p) == 1 ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  for (auto &t : threads) t.join();
}

// Runs one disabled test of this program anew, as the heap is opened once per process. Returns its exit code.
int run_self(const char *test, const char *variable = nullptr, const char *value = nullptr) {
  char self[4096];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length < 0) return -1;
  self[length] = 0;
  pid_t child = fork();
  if (child == 0) {
    if (variable) setenv(variable, value, 1);
    std::string filter = std::string("--gtest_filter=") + test;
    execl(self, self, filter.c_str(), "--gtest_also_run_disabled_tests", static_cast<char *>(nullptr));
    _exit(255);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Not tests of their own: the exit code tells.
TEST(HeapAlone, DISABLED_Locked) {
  if (mlockall(MCL_FUTURE)) _exit(77);
  void *probe = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (probe == MAP_FAILED || !madvise(probe, 4096, MADV_DONTNEED)) _exit(78); // a sanitizer's mlockall does nothing
  bool usable = dc_heap_usable();
  bool named = strstr(dc_last_error(), "mlockall") != nullptr;
  _exit(usable ? 1 : !named ? 2 : dc_heap_take(kMiB) ? 3 : 0);
}
TEST(HeapAlone, DISABLED_BadSwitch) {
  _exit(dc_heap_usable() ? 1 : strstr(dc_last_error(), "DEEPC_HUGEPAGES='off'") ? 0 : 2);
}
TEST(HeapAlone, DISABLED_Kept) {
  int kept = -1;
  _exit(dc_heap_keep_small(1, &kept) != DC_OK ? 9 : kept);
}
// Blocks that malloc maps by itself, of 100 of 4 MiB, after it kept and does not any more.
TEST(HeapAlone, DISABLED_AfterKeeping) {
  int kept = -1, mapped = 0;
  if (dc_heap_keep_small(1, &kept) != DC_OK || !kept) _exit(77);
  dc_heap_keep_small(0, &kept);
  for (int i = 0; i < 100; i++) {
    char *volatile p = static_cast<char *>(malloc(4 * kMiB));
    p[0] = 1;
    mapped += mallinfo2().hblks > 0;
    free(p);
  }
  char *large = static_cast<char *>(malloc(30 * kMiB)), *larger = static_cast<char *>(malloc(31 * kMiB)),
       *last = static_cast<char *>(malloc(31 * kMiB));
  size_t before = mallinfo2().arena;
  free(last), free(larger), free(large);
  _exit(mapped ? 1 : mallinfo2().arena + 64 * kMiB > before ? 2 : 0); // what is free at the top went back
}

TEST(HeapAlone, IsNotThereWhereAllMemoryIsLocked) {
  int rc = run_self("HeapAlone.DISABLED_Locked");
  if (rc == 77 || rc == 78) GTEST_SKIP() << "this process may not lock memory";
  EXPECT_EQ(rc, 0) << "1: it is there; 2: the error does not tell why; 3: it gave memory";
}

TEST(HeapAlone, ASwitchThatIsNotUnderstoodIsAnErrorHereToo) {
  EXPECT_EQ(run_self("HeapAlone.DISABLED_BadSwitch", "DEEPC_HUGEPAGES", "off"), 0);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__GLIBC__)
TEST(HeapAlone, AnotherMallocDoesNotKeep) {
  EXPECT_EQ(run_self("HeapAlone.DISABLED_Kept"), 1);
  EXPECT_EQ(run_self("HeapAlone.DISABLED_Kept", "LD_PRELOAD", OTHER_MALLOC), 0);
}

TEST(HeapAlone, AfterKeepingMallocIsNoWorseThanBefore) {
  EXPECT_EQ(run_self("HeapAlone.DISABLED_AfterKeeping"), 0) << "1: blocks are mapped one by one; 2: it does not trim";
}
#else
TEST(HeapAlone, AnotherMallocDoesNotKeep) { EXPECT_EQ(run_self("HeapAlone.DISABLED_Kept"), 0); }
#endif

TEST(HeapSmall, KeepingIsHarmlessEverywhere) {
  int kept = -1;
  EXPECT_EQ(dc_heap_keep_small(1, nullptr), DC_E_INVALID);
  ASSERT_EQ(dc_heap_keep_small(1, &kept), DC_OK) << dc_last_error();
  EXPECT_TRUE(kept == 0 || kept == 1);
  ASSERT_EQ(dc_heap_keep_small(0, &kept), DC_OK) << dc_last_error();
  EXPECT_EQ(kept, 0);
}

TEST(HeapSmall, TorchsTensorsLieInItFromWhereMallocMapsThem) { EXPECT_EQ(dc_heap_smallest(), size_t{128} << 10); }

TEST(HeapSmall, WhatTheUserChoseStays) {
  int kept = -1;
  setenv("MALLOC_TRIM_THRESHOLD_", "1048576", 1);
  EXPECT_EQ(dc_heap_keep_small(1, &kept), DC_OK);
  EXPECT_EQ(kept, 0);
  unsetenv("MALLOC_TRIM_THRESHOLD_");
  setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0", 1);
  EXPECT_EQ(dc_heap_keep_small(1, &kept), DC_OK);
  EXPECT_EQ(kept, 0);
  unsetenv("GLIBC_TUNABLES");
}

}  // namespace
