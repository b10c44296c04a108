// Ranges of a GPU's memory that grow and shrink in place (ops/base/dynamic_cuda.c), over a driver that is a stand-in
// (stand_in_cuda.c): what they hold, what they ask of the driver, what happens when it fails. A GPU's own:
// tests/python/test_gpu_dynamic.py.
#if __has_include(<cuda.h>)
#include <cuda.h> // first: it renames some functions by macros, and then those of the table too
#endif
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/cuda_driver.h"
#include "base/dynamic.h"
#include "stand_in_cuda.h"

#ifdef CUDA_VERSION
#define SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs), #theirs)
SAME(sizeof(dc__cuda_location), sizeof(CUmemLocation));
SAME(sizeof(dc__cuda_access), sizeof(CUmemAccessDesc));
SAME(offsetof(dc__cuda_access, flags), offsetof(CUmemAccessDesc, flags));
SAME(sizeof(dc__cuda_allocation), sizeof(CUmemAllocationProp));
SAME(offsetof(dc__cuda_allocation, location), offsetof(CUmemAllocationProp, location));
SAME(offsetof(dc__cuda_allocation, of_windows), offsetof(CUmemAllocationProp, win32HandleMetaData));
SAME(offsetof(dc__cuda_allocation, flags), offsetof(CUmemAllocationProp, allocFlags));
SAME(DC__CUDA_INVALID, CUDA_ERROR_INVALID_VALUE);
SAME(DC__CUDA_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(DC__CUDA_SHUT_DOWN, CUDA_ERROR_DEINITIALIZED);
SAME(DC__CUDA_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(DC__CUDA_OF_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(DC__CUDA_READ_AND_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(DC__CUDA_LEAST, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME(DC__CUDA_HAS_VIRTUAL_MEMORY, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
// Arguments may differ in the names of their types, not in how they are passed.
template <class> struct Passed;
template <class R, class... A> struct Passed<R (*)(A...)> {
  static constexpr size_t count = sizeof...(A);
  static constexpr size_t bytes[] = {sizeof(R), sizeof(A)...};
};
template <class Ours, class Theirs> constexpr bool PassedAlike() {
  if (Passed<Ours>::count != Passed<Theirs>::count) return false;
  for (size_t i = 0; i <= Passed<Ours>::count; i++)
    if (Passed<Ours>::bytes[i] != Passed<Theirs>::bytes[i]) return false;
  return true;
}
#define ALIKE(name, symbol, ...) \
  static_assert(PassedAlike<decltype(dc__cuda_driver::name), decltype(&::name)>(), symbol);
DC__CUDA_FUNCTIONS(ALIKE)
#endif

namespace {

constexpr size_t kMiB = 1 << 20, kPage = 2 * kMiB;

TEST(DynamicCudaAlone, SaysThatThereIsNoDriver) {
  const pid_t child = fork(); // where there is one, it must not be loaded before the stand-in
  ASSERT_GE(child, 0);
  if (!child) {
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) _exit(2);
    dc_dynamic_cuda *range = nullptr;
    void *at = nullptr;
    const int rc = dc_dynamic_cuda_open(0, kMiB, 0, &range, &at);
    _exit(rc != DC_E_UNSUPPORTED || !strstr(dc_last_error(), "no NVIDIA driver"));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 2)
    GTEST_SKIP() << "this machine has an NVIDIA driver: what is said without one can't be seen here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

class DynamicCuda : public ::testing::Test {
protected:
  static void SetUpTestSuite() { // once it is there, dlopen("libcuda.so.1") finds it by that name
    void *library = dlopen(STAND_IN_CUDA, RTLD_NOW | RTLD_GLOBAL);
    ASSERT_NE(library, nullptr) << dlerror();
    gpu_ = static_cast<struct stand_in_cuda *>(dlsym(library, "stand_in_cuda"));
    ASSERT_NE(gpu_, nullptr);
  }
  void SetUp() override { room_ = gpu_->room; }
  void TearDown() override {
    EXPECT_EQ(dc_dynamic_cuda_close(range_), DC_OK) << dc_last_error();
    EXPECT_EQ(gpu_->pieces, 0) << "memory is left";
    EXPECT_EQ(gpu_->mapped, 0);
    EXPECT_EQ(gpu_->reserved, 0);
    EXPECT_EQ(gpu_->room, room_);
    EXPECT_EQ(gpu_->contexts, 0);
    EXPECT_EQ(gpu_->current, 0);
    EXPECT_EQ(gpu_->unsynced, 0) << "memory went while something might have used it";
  }
  unsigned char *Open(size_t bytes, double slack = 1.0 / 32) {
    void *at = nullptr;
    EXPECT_EQ(dc_dynamic_cuda_open(1, bytes, slack, &range_, &at), DC_OK) << dc_last_error();
    return base_ = static_cast<unsigned char *>(at);
  }
  int Resize(size_t bytes) { return dc_dynamic_cuda_resize(range_, bytes, nullptr); }
  dc_dynamic_stats Stats() {
    dc_dynamic_stats s{};
    s.struct_size = sizeof s;
    EXPECT_EQ(dc_dynamic_cuda_read(range_, &s), DC_OK) << dc_last_error();
    return s;
  }
  static struct stand_in_cuda *gpu_;
  int64_t room_ = 0;
  dc_dynamic_cuda *range_ = nullptr;
  unsigned char *base_ = nullptr;
};
struct stand_in_cuda *DynamicCuda::gpu_ = nullptr;

bool AllAre(const unsigned char *begin, const unsigned char *end, unsigned char value) {
  return begin == end || (*begin == value && !memcmp(begin, begin + 1, static_cast<size_t>(end - begin) - 1));
}

TEST_F(DynamicCuda, HasNoMemoryUntilItIsAskedFor) {
  Open((size_t)80 << 30);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(base_) % kPage, 0u);
  EXPECT_EQ(Stats().reserved, (int64_t)80 << 30);
  EXPECT_EQ(Stats().committed, 0);
  EXPECT_EQ(gpu_->mapped, 0);
}

TEST_F(DynamicCuda, GrowsWhereItLiesAndGivesBackWhatItLeaves) {
  unsigned char *at = Open(96 * kMiB);
  const int64_t syncs = gpu_->syncs;
  ASSERT_EQ(Resize(3 * kMiB + 5), DC_OK) << dc_last_error();
  memset(at, 7, 3 * kMiB + 5);
  ASSERT_EQ(Resize(90 * kMiB), DC_OK) << dc_last_error();
  EXPECT_TRUE(AllAre(at, at + 3 * kMiB + 5, 7));
  EXPECT_TRUE(AllAre(at + 3 * kMiB + 5, at + 90 * kMiB, 0));
  EXPECT_EQ(Stats().most_committed, gpu_->mapped);
  EXPECT_EQ(gpu_->syncs, syncs) << "growing waits for nothing";
  memset(at, 9, 90 * kMiB);
  ASSERT_EQ(Resize(5 * kMiB + 1), DC_OK) << dc_last_error();
  EXPECT_EQ(gpu_->syncs, syncs + 1);
  EXPECT_EQ(gpu_->mapped, (int64_t)(6 * kMiB));
  EXPECT_TRUE(AllAre(at, at + 5 * kMiB + 1, 9));
  ASSERT_EQ(Resize(7 * kMiB), DC_OK);
  EXPECT_TRUE(AllAre(at + 5 * kMiB + 1, at + 7 * kMiB, 0)) << "what was there is not to be seen";
  ASSERT_EQ(Resize(0), DC_OK);
  EXPECT_EQ(gpu_->mapped, 0);
  EXPECT_EQ(Stats().granted, Stats().released);
  EXPECT_EQ(Stats().grows, 3);
  EXPECT_EQ(Stats().shrinks, 2);
}

TEST_F(DynamicCuda, PiecesGrowWithWhatLiesBeforeThem) {
  Open(1024 * kMiB);
  const int64_t before = gpu_->creates;
  ASSERT_EQ(Resize(200 * kMiB), DC_OK);
  EXPECT_LT(gpu_->creates - before, 85); // of 100 pages
  EXPECT_LE(Stats().committed, (int64_t)(200 * kMiB + 200 * kMiB / 32));
}

TEST_F(DynamicCuda, RandomSizesKeepWhatTheyShouldAndNoMore) {
  std::mt19937 rng(5);
  for (double slack : {0.0, 1.0 / 32, 1.0, (double)INFINITY}) {
    const size_t most = 24 * kMiB;
    unsigned char *at = Open(most, slack);
    std::vector<unsigned char> want;
    for (int i = 0; i < 40; i++) {
      size_t bytes = i % 7 == 6 ? want.size() : std::uniform_int_distribution<size_t>(0, most)(rng);
      ASSERT_EQ(Resize(bytes), DC_OK) << dc_last_error();
      want.resize(bytes, 0);
      ASSERT_EQ(memcmp(at, want.data(), bytes), 0) << "size " << bytes << ", slack " << slack;
      const dc_dynamic_stats s = Stats();
      ASSERT_EQ(s.used, (int64_t)bytes);
      ASSERT_EQ(s.committed, gpu_->mapped);
      ASSERT_GE(s.committed, s.used);
      const double page = (double)std::max(bytes / 32, kPage);
      ASSERT_LE((double)s.committed, bytes       ? std::max((double)bytes * (1 + slack), (double)bytes + page)
                                     : slack > 1 ? INFINITY
                                                 : 0.0);
      const unsigned char value = (unsigned char)rng();
      const size_t from = bytes / 2;
      if (bytes > from) memset(at + from, value, bytes - from), std::fill(want.begin() + (long)from, want.end(), value);
    }
    EXPECT_EQ(Stats().granted - Stats().released, Stats().committed);
    EXPECT_EQ(dc_dynamic_cuda_close(range_), DC_OK);
    range_ = nullptr;
  }
}

TEST_F(DynamicCuda, AnInfiniteSlackKeepsAll) {
  Open(96 * kMiB, INFINITY);
  ASSERT_EQ(Resize(50 * kMiB), DC_OK);
  const int64_t creates = gpu_->creates, syncs = gpu_->syncs;
  for (size_t bytes : {(size_t)0, 20 * kMiB, 1 * kMiB, 50 * kMiB}) ASSERT_EQ(Resize(bytes), DC_OK);
  EXPECT_EQ(gpu_->creates, creates);
  EXPECT_EQ(gpu_->syncs, syncs);
}

TEST_F(DynamicCuda, WhereTheDriverFailsNothingHasChanged) {
  unsigned char *at = Open(96 * kMiB);
  for (int64_t which : {STAND_IN_CREATE, STAND_IN_MAP, STAND_IN_ACCESS, STAND_IN_SET, STAND_IN_SYNC})
    for (int64_t after : {0, 1, 5}) {
      if (after && which >= STAND_IN_SYNC) continue; // one call of it
      for (int64_t error : {(int64_t)DC__CUDA_OUT_OF_MEMORY, (int64_t)719}) {
        ASSERT_EQ(Resize(20 * kMiB), DC_OK) << dc_last_error();
        memset(at, 3, 20 * kMiB);
        const dc_dynamic_stats was = Stats();
        gpu_->fails = which, gpu_->after = after, gpu_->error = error;
        const int rc = Resize(which == STAND_IN_SYNC ? kMiB : 60 * kMiB);
        const bool memory = error == DC__CUDA_OUT_OF_MEMORY && which != STAND_IN_SYNC && which != STAND_IN_SET &&
                            which != STAND_IN_MAP;
        EXPECT_EQ(rc, memory ? DC_E_NOMEM : DC_E_CUDA) << which << ": " << dc_last_error();
        EXPECT_EQ(gpu_->fails, 0) << "was not called";
        if (error == 719) {
          EXPECT_NE(strstr(dc_last_error(), "unspecified launch failure (719)"), nullptr) << dc_last_error();
        }
        const dc_dynamic_stats is = Stats();
        EXPECT_EQ(is.used, was.used);
        EXPECT_EQ(is.committed, gpu_->mapped);
        if (which != STAND_IN_SET) { // has its memory by then
          EXPECT_EQ(memcmp(&is, &was, sizeof is), 0) << which;
        }
        EXPECT_TRUE(AllAre(at, at + 20 * kMiB, 3));
      }
    }
}

TEST_F(DynamicCuda, AGpuWithoutMemorySaysHowMuchThereIs) {
  Open(96 * kMiB);
  gpu_->room = 12 * kMiB;
  EXPECT_EQ(Resize(40 * kMiB), DC_E_NOMEM);
  EXPECT_NE(strstr(dc_last_error(), std::to_string(40 * kMiB).c_str()), nullptr) << dc_last_error();
  EXPECT_NE(strstr(dc_last_error(), "GPU 1"), nullptr) << dc_last_error();
  EXPECT_EQ(gpu_->room, (int64_t)(12 * kMiB)) << "what had been taken is back";
  EXPECT_EQ(Resize(12 * kMiB), DC_OK) << dc_last_error();
  EXPECT_EQ(Resize(0), DC_OK);
  gpu_->room = room_;
}

TEST_F(DynamicCuda, WrongArgumentsAreNamed) {
  void *at = nullptr;
  EXPECT_EQ(dc_dynamic_cuda_open(0, 0, 0, &range_, &at), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_cuda_open(0, 1, -1, &range_, &at), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_cuda_open(0, 1, NAN, &range_, &at), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_cuda_open(0, 1, 0, nullptr, &at), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_cuda_open(0, SIZE_MAX / 2, 0, &range_, &at), DC_E_NOMEM);
  EXPECT_EQ(dc_dynamic_cuda_open(0, (size_t)1 << 60, 0, &range_, &at), DC_E_NOMEM);
  for (int device : {-1, 2}) {
    EXPECT_EQ(dc_dynamic_cuda_open(device, 1, 0, &range_, &at), DC_E_INVALID);
    EXPECT_NE(strstr(dc_last_error(), "2 are visible"), nullptr) << dc_last_error();
  }
  gpu_->able = 0;
  EXPECT_EQ(dc_dynamic_cuda_open(0, 1, 0, &range_, &at), DC_E_UNSUPPORTED);
  gpu_->able = 1;
  ASSERT_EQ(range_, nullptr);
  Open(kMiB);
  EXPECT_EQ(Resize(kMiB + 1), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_cuda_resize(nullptr, 1, nullptr), DC_E_INVALID);
  dc_dynamic_stats s{};
  EXPECT_EQ(dc_dynamic_cuda_read(range_, &s), DC_E_INVALID);
  EXPECT_EQ(dc_dynamic_cuda_close(nullptr), DC_OK);
}

TEST_F(DynamicCuda, AtTheEndOfAProcessTheDriverIsGoneFirst) {
  Open(kMiB);
  gpu_->shut_down = 1;
  EXPECT_EQ(dc_dynamic_cuda_close(range_), DC_OK) << dc_last_error();
  range_ = nullptr;
  gpu_->shut_down = 0;
  gpu_->contexts = gpu_->reserved = 0; // the driver has taken all
}

} // namespace
