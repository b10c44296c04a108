// test_heap_inside.cpp: what ops/base keeps below the library's surface: heaps with pages of another size, what stays
// free for long, who is refused memory, how memory is faulted in. Linked with the layer's objects, not the library.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/heap.h"

namespace {
int interrupted = 0; // calls of posix_fallocate that a signal ends
} // namespace

// In place of the C library's, for the layer that is linked into this program.
extern "C" int posix_fallocate(int fd, off_t at, off_t bytes) {
  if (interrupted > 0) return interrupted--, EINTR;
  return syscall(SYS_fallocate, fd, 0, at, bytes) ? errno : 0;
}

namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct Close {
  void operator()(dc__heap *h) const { dc__heap_close(h); }
};
using Heap = std::unique_ptr<dc__heap, Close>;

// A kernel whose pages have g_page bytes: it drops whole pages, so it rounds lengths up (madvise(2)).
size_t g_page;
int64_t g_dropped;
int drop_pages(void *at, size_t bytes) {
  EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % g_page, 0u) << "the kernel says EINVAL";
  memset(at, 0, (bytes + g_page - 1) / g_page * g_page);
  g_dropped += static_cast<int64_t>(bytes);
  return 0;
}

Heap open_heap(size_t page, size_t bytes) {
  dc__heap *h = nullptr;
  const dc__heap_system system = {page, bytes, drop_pages, nullptr};
  g_page = page, g_dropped = 0;
  EXPECT_EQ(dc__heap_open(&system, &h), DC_OK) << dc_last_error();
  return Heap(h);
}

struct dc_heap_stats stats_of(const Heap &h) {
  struct dc_heap_stats s{};
  dc__heap_read(h.get(), &s);
  return s;
}

// ---- pages of every size ----------------------------------------------------------------------------------------
class Pages : public ::testing::TestWithParam<size_t> {};

TEST_P(Pages, GivingBackFreeBlocksLeavesTheirNeighboursAlone) {
  const size_t page = GetParam(), granule = std::max(page, size_t{16} << 10);
  Heap h = open_heap(page, 512 * kMiB);
  ASSERT_TRUE(h);
  std::mt19937_64 random(3);
  std::map<char *, size_t> live;
  auto holds = [](char *p, size_t n) {
    const char mark = static_cast<char>(n | 1);
    return std::all_of(p, p + n, [&](char c) { return c == mark; });
  };
  for (int round = 0; round < 12; round++) {
    while (live.size() < 16) {
      size_t n = 1 + random() % (3 * granule) + (random() % 4 ? 0 : 3 * kMiB);
      char *p = static_cast<char *>(dc__heap_take(h.get(), n, random() % 5 == 0));
      ASSERT_NE(p, nullptr);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(p) % granule, 0u);
      memset(p, static_cast<int>(n | 1), n);
      live[p] = n;
    }
    for (int i = 0; i < 7; i++) {
      auto it = std::next(live.begin(), static_cast<long>(random() % live.size()));
      ASSERT_EQ(dc__heap_give(h.get(), it->first), 1);
      live.erase(it);
    }
    if (round % 2) dc__heap_trim(h.get());
    else
      for (int step = 0; step < 16; step++) dc__heap_step(h.get(), 2);
    for (auto &[p, n] : live) ASSERT_TRUE(holds(p, n)) << "a live block lost its bytes, round " << round;
  }
  EXPECT_GT(g_dropped, 0);
  for (auto &[p, n] : live) EXPECT_EQ(dc__heap_give(h.get(), p), 1);
  EXPECT_EQ(stats_of(h).in_use, 0);
}
INSTANTIATE_TEST_SUITE_P(Sizes, Pages, ::testing::Values(size_t{4} << 10, size_t{16} << 10, size_t{64} << 10));

TEST(HeapSize, TheLargestMachineHasOneToo) {
  const size_t needed = (size_t{1} << 46) + (size_t{1} << 37); // the range and the description of its granules
  void *probe = mmap(nullptr, needed, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (probe == MAP_FAILED) GTEST_SKIP() << "this process has no 64 TiB of addresses";
  munmap(probe, needed);
  for (size_t bytes : {size_t{1} << 46, size_t{1} << 47}) { // 2^32 granules and more, counted in 32 bits
    dc__heap *h = nullptr;
    const dc__heap_system system = {4096, bytes, nullptr, nullptr};
    ASSERT_EQ(dc__heap_open(&system, &h), DC_OK) << dc_last_error();
    Heap owned(h);
    EXPECT_GT(stats_of(owned).limit, static_cast<int64_t>(size_t{1} << 45));
    void *p = dc__heap_take(h, kMiB, false);
    EXPECT_NE(p, nullptr);
    EXPECT_EQ(dc__heap_give(h, p), 1);
  }
}

// ---- what stays free --------------------------------------------------------------------------------------------
TEST(HeapDecay, GivesBackWhatNoStepHasUsedAndNothingElse) {
  Heap h = open_heap(4096, 512 * kMiB);
  ASSERT_TRUE(h);
  auto step = [&](size_t mib) { // tensors of a step, all at once
    std::vector<void *> all;
    for (size_t i = 0; i < mib / 4; i++) all.push_back(dc__heap_take(h.get(), 4 * kMiB - 32768, false));
    for (void *p : all) EXPECT_EQ(dc__heap_give(h.get(), p), 1);
    return dc__heap_step(h.get(), 32);
  };
  for (int i = 0; i < 100; i++) EXPECT_EQ(step(64), 0) << "a steady step gave back, step " << i;
  EXPECT_EQ(step(256), 0); // an evaluation
  int64_t resident = stats_of(h).free_resident, given = 0;
  EXPECT_GE(resident, static_cast<int64_t>(250 * kMiB));
  for (int i = 1; i < 32; i++) EXPECT_EQ(step(64), 0) << "too early, step " << i;
  for (int i = 0; i < 8; i++) given += step(64);
  EXPECT_GE(given, static_cast<int64_t>(180 * kMiB));
  EXPECT_LE(given, static_cast<int64_t>(196 * kMiB));
  EXPECT_EQ(given, g_dropped);
  struct dc_heap_stats s = stats_of(h);
  EXPECT_EQ(s.decayed, given);
  EXPECT_EQ(s.free_resident, resident - given);
  EXPECT_EQ(s.steps, 140);
  for (int i = 0; i < 100; i++) EXPECT_EQ(step(64), 0) << "once is enough, step " << i;
  EXPECT_EQ(step(256), 0); // comes back
  EXPECT_EQ(stats_of(h).free_resident, resident);
}

TEST(HeapDecay, ABlockThatLivesLongStays) {
  Heap h = open_heap(4096, 512 * kMiB);
  char *p = static_cast<char *>(dc__heap_take(h.get(), 10 * kMiB, false));
  memset(p, 7, 10 * kMiB);
  for (int i = 0; i < 100; i++) EXPECT_EQ(dc__heap_step(h.get(), 2), 0);
  EXPECT_TRUE(std::all_of(p, p + 10 * kMiB, [](char c) { return c == 7; }));
  EXPECT_EQ(dc__heap_give(h.get(), p), 1);
  EXPECT_EQ(dc__heap_trim(h.get()), static_cast<int64_t>(10 * kMiB));
  EXPECT_EQ(stats_of(h).decayed, 0) << "a trim is no decay";
  EXPECT_LT(stats_of(h).free_resident, static_cast<int64_t>(2 * kMiB));
}

TEST(HeapDecay, WhenMemoryIsShortItWaitsLess) {
  const int64_t gib = int64_t{1} << 30;
  EXPECT_EQ(dc__heap_patience(100 * gib, 8 * gib), 32u);
  EXPECT_EQ(dc__heap_patience(2 * gib, 8 * gib), 32u);
  EXPECT_EQ(dc__heap_patience(2 * gib - 1, 8 * gib), 2u);
  EXPECT_EQ(dc__heap_patience(0, 8 * gib), 2u);
  EXPECT_EQ(dc__heap_patience(0, 0), 32u);
}

// ---- whose memory -----------------------------------------------------------------------------------------------
class Memory : public ::testing::Test {
protected:
  void open(bool (*move)(void *, void *, size_t)) {
    dc__heap *h = nullptr;
    const dc__heap_system system = {4096, 1024 * kMiB, nullptr, move};
    ASSERT_EQ(dc__heap_open(&system, &h), DC_OK) << dc_last_error();
    heap_.reset(h);
  }
  void take(size_t bytes, bool high) {
    char *p = static_cast<char *>(dc__heap_take(heap_.get(), bytes, high));
    ASSERT_NE(p, nullptr);
    memset(p, static_cast<int>(bytes | 1), bytes);
    live_[p] = bytes;
  }
  void give(std::map<char *, size_t>::iterator it) {
    const char mark = static_cast<char>(it->second | 1);
    EXPECT_TRUE(*it->first == mark && !memcmp(it->first, it->first + 1, it->second - 1)) << "a block lost its bytes";
    EXPECT_EQ(dc__heap_give(heap_.get(), it->first), 1);
    live_.erase(it);
  }
  int64_t covered() { // by the definition
    std::set<uintptr_t> pages;
    for (auto &[p, n] : live_)
      for (uintptr_t at = reinterpret_cast<uintptr_t>(p) / (2 * kMiB);
           at * 2 * kMiB < reinterpret_cast<uintptr_t>(p + n); at++)
        pages.insert(at);
    return static_cast<int64_t>(pages.size() * 2 * kMiB);
  }
  int64_t resident() {
    const auto s = stats_of(heap_);
    std::vector<unsigned char> pages(static_cast<size_t>(s.extent) / 4096);
    EXPECT_EQ(mincore(s.base, static_cast<size_t>(s.extent), pages.data()), 0);
    return 4096 * std::count_if(pages.begin(), pages.end(), [](int c) { return c & 1; });
  }
  // Blocks come and go, in no step as in another; then one comes that is larger than every hole. Returns the most that
  // blocks covered.
  int64_t train() {
    std::mt19937_64 random(5);
    int64_t most = 0;
    auto takes = [&](size_t bytes, bool high) {
      take(bytes, high);
      EXPECT_EQ(stats_of(heap_).covered, covered());
      most = std::max(most, covered());
    };
    for (int round = 0; round < 12; round++) {
      for (size_t held = 0; held < 40 * kMiB;) {
        const size_t bytes = random() % 3 ? (1 + random() % 9) * 700'000 : 130'000 + random() % 400'000;
        takes(bytes, random() % 6 == 0), held += bytes;
      }
      while (live_.size() > 4 + random() % 8)
        give(std::next(live_.begin(), static_cast<long>(random() % live_.size())));
      dc__heap_step(heap_.get(), 32);
    }
    takes(static_cast<size_t>(stats_of(heap_).largest_free) + 3 * kMiB, false);
    return most;
  }
  Heap heap_{nullptr};
  std::map<char *, size_t> live_;
};

TEST_F(Memory, FollowsTheBlocks) {
  open(nullptr);
  const int64_t most = train();
  EXPECT_GT(stats_of(heap_).extent, most + 16 * static_cast<int64_t>(kMiB));
  EXPECT_LE(resident(), most);
  EXPECT_LE(dc__heap_trim(heap_.get()), most);
  EXPECT_LE(resident(), stats_of(heap_).covered);
}

TEST_F(Memory, IsGivenBackWhereItCannotBeMoved) {
  open([](void *, void *, size_t) { return false; });
  const int64_t most = train();
  EXPECT_LE(resident(), most);
  EXPECT_EQ(stats_of(heap_).moved, 0);
}

TEST_F(Memory, ABlockTakesNoneOfItsOwn) {
  open(nullptr);
  take(8 * kMiB, true), take(8 * kMiB, true);
  give(live_.begin());
  EXPECT_EQ(dc__heap_trim(heap_.get()), static_cast<int64_t>(8 * kMiB));
  give(live_.begin());
  take(16 * kMiB, true); // half of its place has memory
  EXPECT_EQ(stats_of(heap_).moved, 0);
}

// Each place whose memory came from another one may be a mapping, and a process may have 65,530.
int g_moves;
TEST_F(Memory, MovesAreLimitedToSomeThousandPlaces) {
  const size_t page = 2 * kMiB, places = 12'000;
  dc__heap *h = nullptr;
  const dc__heap_system system = {4096, 2 * places * page, [](void *, size_t) { return 0; },
                                  [](void *, void *, size_t) { return ++g_moves > 0; }};
  ASSERT_EQ(dc__heap_open(&system, &h), DC_OK) << dc_last_error();
  heap_.reset(h);
  g_moves = 0;
  void *low = dc__heap_take(h, places * page, true);
  ASSERT_EQ(dc__heap_give(h, low), 1); // has memory
  dc__heap_take(h, 100 * page, true); // its end
  void *high = dc__heap_take(h, places * page, true);
  EXPECT_EQ(g_moves, 8192) << "places";
  ASSERT_EQ(dc__heap_give(h, high), 1);
  dc__heap_take(h, (places - 101) * page, false); // where the first was: the smallest room
  EXPECT_EQ(g_moves, 8192) << "a place more";
}

// ---- who is refused ---------------------------------------------------------------------------------------------
// A procfs whose meminfo says something else each time it is read.
TEST(MemRoom, WhatTheHeapHoldsFreeIsGivenBackBeforeSomebodyIsRefused) {
  char folder[] = "/tmp/deepc-room-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string meminfo = std::string(folder) + "/meminfo";
  auto look = [&](std::vector<int> says_kib, int64_t bytes) {
    const std::string next = meminfo + ".next";
    EXPECT_EQ(mkfifo(meminfo.c_str(), 0600), 0);
    std::thread writer([&] {
      for (size_t i = 0; i < says_kib.size(); i++) {
        int fd = open(meminfo.c_str(), O_WRONLY); // until somebody looks
        // Each look has a pipe of its own: the next one takes its place before this one says anything.
        if (i + 1 < says_kib.size()) {
          EXPECT_EQ(mkfifo(next.c_str(), 0600), 0);
          EXPECT_EQ(rename(next.c_str(), meminfo.c_str()), 0);
        }
        std::string line = "MemAvailable: " + std::to_string(says_kib[i]) + " kB\n";
        EXPECT_EQ(write(fd, line.data(), line.size()), static_cast<ssize_t>(line.size()));
        close(fd);
      }
    });
    int64_t available = -1;
    EXPECT_EQ(dc__mem_room(folder, bytes, &available), DC_OK) << dc_last_error();
    writer.join();
    unlink(meminfo.c_str());
    return available;
  };
  EXPECT_EQ(look({1000}, 1000 * 1024), 1000 * 1024); // it fits: one look
  void *p = dc_heap_take(8 * kMiB);
  struct dc_heap_stats s{};
  s.struct_size = sizeof s;
  if (p) {
    memset(p, 1, 8 * kMiB);
    ASSERT_EQ(dc_heap_give(p), 1);
  }
  EXPECT_EQ(look({1000, 9000}, 1000 * 1024 + 1), 9000 * 1024);
  ASSERT_EQ(dc_heap_stats(&s), DC_OK) << dc_last_error();
  EXPECT_LT(s.free_resident, static_cast<int64_t>(2 * kMiB));
  rmdir(folder);
}

// ---- faulting in ------------------------------------------------------------------------------------------------
// Forbids madvise(MADV_POPULATE_WRITE), as containers' filters and sandboxes' kernels do.
bool forbid_populate(int error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 23, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program = {sizeof code / sizeof *code, code};
  return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

bool resident(void *at, size_t bytes) {
  std::vector<unsigned char> pages(bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  return !mincore(at, bytes, pages.data()) && std::all_of(pages.begin(), pages.end(), [](int c) { return c & 1; });
}

// Exit code of a child: 0 fine, 77 no seccomp here, else the step that failed.
int fault_in_without(int error, bool refused) {
  pid_t child = fork();
  if (!child) {
    const size_t bytes = 4 * kMiB;
    int fd = static_cast<int>(syscall(SYS_memfd_create, "test", 0));
    if (fd < 0 || ftruncate(fd, bytes)) _exit(2);
    char *own = static_cast<char *>(dc__map_aligned(bytes, 0, -1));
    char *file = static_cast<char *>(dc__map_aligned(bytes, 0, fd));
    if (!own || !file || reinterpret_cast<uintptr_t>(file) % DC_HUGE_PAGE) _exit(3);
    own[5] = file[6] = 9;
    if (!forbid_populate(error)) _exit(77);
    int a = dc__fault_in(own, bytes, -1, 0), b = dc__fault_in(file, bytes, fd, 0);
    if (refused) _exit(a == error && b == error ? 0 : 4);
    _exit(a ? 5 : b ? 6 : !resident(own, bytes) ? 7 : !resident(file, bytes) ? 8 : own[5] != 9 || file[6] != 9 ? 9 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(FaultIn, WhereTheCallIsForbiddenPagesAreTouchedByHand) {
  for (int error : {EINVAL, EPERM, ENOSYS}) {
    int rc = fault_in_without(error, false);
    if (rc == 77) GTEST_SKIP() << "this process may not set a seccomp filter";
    EXPECT_EQ(rc, 0) << strerror(error);
  }
}

// Of a file that several processes bring, each its own part: no page more has memory, however often a signal comes.
TEST(FaultIn, APartOfAFileByHandIsThatPart) {
  pid_t child = fork();
  if (!child) {
    const size_t bytes = 8 * kMiB, at = 3 * kMiB, part = 4 * kMiB;
    int fd = static_cast<int>(syscall(SYS_memfd_create, "test", 0));
    struct stat st;
    if (fd < 0 || ftruncate(fd, bytes)) _exit(2);
    char *file = static_cast<char *>(dc__map_aligned(bytes, 0, fd));
    if (!file || madvise(file, bytes, MADV_NOHUGEPAGE)) _exit(3);
    if (!forbid_populate(EINVAL)) _exit(77);
    interrupted = 3;
    if (dc__fault_in(file + at, part, fd, at)) _exit(4);
    _exit(interrupted ? 5 : !resident(file + at, part) ? 6 : fstat(fd, &st) || st.st_blocks * 512 != part ? 7 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) GTEST_SKIP() << "this process may not set a seccomp filter";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(FaultIn, NoMemoryIsARefusal) {
  for (int error : {ENOMEM, EFAULT, EHWPOISON}) {
    int rc = fault_in_without(error, true);
    if (rc == 77) GTEST_SKIP() << "this process may not set a seccomp filter";
    EXPECT_EQ(rc, 0) << strerror(error);
  }
}

} // namespace
