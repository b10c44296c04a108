// test_base.cpp: ops/base: statuses, last error, counters, environment rows, threads, memory, CRC-32C.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/base.h"
#include "ops.h"

namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// Sets a variable for one scope.
class ScopedEnv {
public:
  ScopedEnv(const char *name, const char *value) : name_(name) {
    const char *old = getenv(name);
    had_ = old != nullptr;
    if (had_) old_ = old;
    if (value) setenv(name, value, 1);
    else unsetenv(name);
  }
  ~ScopedEnv() {
    if (had_) setenv(name_.c_str(), old_.c_str(), 1);
    else unsetenv(name_.c_str());
  }

private:
  std::string name_, old_;
  bool had_;
};

struct ScopedThreads {
  int before = dc_num_threads();
  explicit ScopedThreads(int n) { EXPECT_EQ(dc_set_num_threads(n), DC_OK) << dc_last_error(); }
  ~ScopedThreads() { dc_set_num_threads(before); }
};

bool contains(const char *text, const char *part) { return strstr(text, part) != nullptr; }

// ---- statuses, errors, dtypes, counters, variables -----------------------------------------------------------------
TEST(Status, RowsAreTheEnumAndUnknownIsSaid) {
  EXPECT_STREQ(dc_version(), DC_VERSION_STRING);
  std::set<int> values;
  std::set<std::string> names;
  const char *name = nullptr;
  int value = 1, rows = 0;
  while (dc_status_at(rows, &name, &value) == DC_OK) {
    EXPECT_STREQ(dc_status_name(value), name);
    EXPECT_GT(strlen(dc_status_text(value)), 0u);
    EXPECT_LE(value, 0);
    values.insert(value);
    names.insert(name);
    rows++;
  }
  EXPECT_EQ((int)values.size(), rows);
  EXPECT_EQ((int)names.size(), rows);
  EXPECT_EQ(values.count(DC_OK), 1u);
  EXPECT_STREQ(dc_status_name(DC_E_NOMEM), "E_NOMEM");
  EXPECT_STREQ(dc_status_name(12345), "E_UNKNOWN");
  EXPECT_EQ(dc_status_at(-1, &name, &value), DC_E_INVALID);
  EXPECT_EQ(dc_status_at(0, nullptr, &value), DC_E_INVALID);
}

TEST(Error, HasTextAndPlaceAndKeepsErrno) {
  errno = EBADF;
  EXPECT_EQ(dc_fail(DC_E_SHAPE, "/a/b/c.c", 17, "dc_thing", "got %d of %d", 3, 4), DC_E_SHAPE);
  EXPECT_EQ(errno, EBADF);
  EXPECT_STREQ(dc_last_error(), "got 3 of 4 (c.c:17, dc_thing)");
  dc_fail(DC_E_SHAPE, "d.c", 1, "dc_outer", "inside: %s", dc_last_error());
  EXPECT_STREQ(dc_last_error(), "inside: got 3 of 4 (c.c:17, dc_thing) (d.c:1, dc_outer)");
}

TEST(Error, LongTextIsCutBeforeThePlace) {
  std::string text(5000, 'x'), function(500, 'f');
  dc_fail(DC_E_INVALID, "e.c", 9, "dc_long", "%s", text.c_str());
  std::string got = dc_last_error();
  EXPECT_LT(got.size(), text.size());
  EXPECT_GT(got.size(), 900u);
  EXPECT_EQ(got.substr(got.size() - 16), " (e.c:9, dc_long)" + 1);
  dc_fail(DC_E_INVALID, "e.c", 9, function.c_str(), "short");
  EXPECT_EQ(std::string(dc_last_error()).rfind("short (e.c:9, fff", 0), 0u);
}

TEST(Error, BelongsToItsThread) {
  dc_fail(DC_E_INVALID, "a.c", 1, "main", "mine");
  std::string other = "unset";
  std::thread([&] {
    other = dc_last_error();
    dc_fail(DC_E_INVALID, "a.c", 1, "thread", "theirs");
  }).join();
  EXPECT_EQ(other, "");
  EXPECT_TRUE(contains(dc_last_error(), "mine"));
}

TEST(Dtype, SizesAndNames) {
  const std::map<int, std::pair<size_t, const char *>> rows = {
      {DC_F32, {4, "fp32"}},  {DC_BF16, {2, "bf16"}}, {DC_F16, {2, "fp16"}},
      {DC_F64, {8, "fp64"}},  {DC_I8, {1, "int8"}},   {DC_U8, {1, "uint8"}},
      {DC_I16, {2, "int16"}}, {DC_I32, {4, "int32"}}, {DC_I64, {8, "int64"}},
  };
  ASSERT_EQ((int)rows.size(), DC_DTYPE_COUNT);
  for (auto &row : rows) {
    EXPECT_EQ(dc_dtype_size(row.first), row.second.first);
    EXPECT_STREQ(dc_dtype_name(row.first), row.second.second);
  }
  for (int bad : {-1, (int)DC_DTYPE_COUNT, 1 << 30}) {
    EXPECT_EQ(dc_dtype_size(bad), 0u);
    EXPECT_STREQ(dc_dtype_name(bad), "?");
  }
}

TEST(Counter, CountsCallsAndResets) {
  std::set<std::string> names;
  for (int i = 0; i < DC_COUNTER_COUNT; i++) names.insert(dc_counter_name(i));
  EXPECT_EQ((int)names.size(), (int)DC_COUNTER_COUNT);
  EXPECT_EQ(dc_counter_name(-1), nullptr);
  EXPECT_EQ(dc_counter_name(DC_COUNTER_COUNT), nullptr);
  EXPECT_EQ(dc_counter_get(-1), 0);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_COUNT), 0);
  dc_counter_reset();
  float x[3] = {1, 2, 3};
  ASSERT_EQ(dc_scale(x, DC_F32, 2, 3), DC_OK);
  ASSERT_EQ(dc_scale(x, DC_F32, 2, 3), DC_OK);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_scale_calls), 2);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_cast_calls), 0);
  dc_counter_reset();
  EXPECT_EQ(dc_counter_get(DC_COUNTER_scale_calls), 0);
}

TEST(Env, RowsGiveTheValueOrTheDefault) {
  ScopedEnv debug("DEEPC_DEBUG", "7"), huge("DEEPC_HUGEPAGES", "");
  const char *name, *values, *value, *help;
  std::map<std::string, std::string> rows, possible;
  int n = 0;
  for (; dc_env_at(n, &name, &values, &value, &help) == DC_OK; n++) {
    rows[name] = value;
    possible[name] = values;
    EXPECT_GT(strlen(values), 0u) << name;
    EXPECT_EQ(strncmp(name, "DEEPC_", 6), 0) << name;
    EXPECT_GT(strlen(help), 0u) << name;
  }
  EXPECT_EQ((int)rows.size(), n);
  EXPECT_EQ(rows.at("DEEPC_DEBUG"), "7");
  EXPECT_EQ(rows.at("DEEPC_HUGEPAGES"), "1"); // empty means unset
  EXPECT_EQ(possible.at("DEEPC_HUGEPAGES"), "0|1");
  EXPECT_EQ(possible.at("DEEPC_BIND"), "internal");
  EXPECT_EQ(dc_env_at(-1, &name, &values, &value, &help), DC_E_INVALID);
  EXPECT_EQ(dc_env_at(0, &name, &values, &value, nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_env_at(0, &name, nullptr, &value, &help), DC_E_INVALID);
}

// ---- threads -------------------------------------------------------------------------------------------------------
struct Recorder {
  std::vector<std::atomic<int>> visits;
  std::mutex lock;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  explicit Recorder(int64_t n) : visits(n) {}
  static void run(int64_t begin, int64_t end, void *ctx) {
    auto *self = static_cast<Recorder *>(ctx);
    for (int64_t i = begin; i < end; i++) self->visits[i]++;
    std::lock_guard<std::mutex> hold(self->lock);
    self->ranges.emplace_back(begin, end);
  }
  void expect_whole(int64_t n, int64_t grain) {
    for (int64_t i = 0; i < n; i++)
      ASSERT_EQ(visits[i].load(), 1) << "element " << i << " of " << n << ", grain " << grain;
    for (auto &range : ranges) {
      EXPECT_LT(range.first, range.second);
      EXPECT_EQ(range.first % grain, 0);
      EXPECT_TRUE(range.second % grain == 0 || range.second == n);
    }
  }
};

TEST(ParallelFor, CoversEveryElementOnceAndCutsAtTheGrain) {
  for (int threads : {1, 2, 3, 8}) {
    ScopedThreads scoped(threads);
    EXPECT_EQ(dc_num_threads(), threads);
    for (int64_t n : {0, 1, 2, 7, 63, 64, 65, 1000, 4097})
      for (int64_t grain : {1, 2, 7, 64, 5000}) {
        Recorder recorder(n);
        dc_parallel_for(n, grain, Recorder::run, &recorder);
        recorder.expect_whole(n, grain);
        if (n <= grain || threads == 1) { EXPECT_EQ(recorder.ranges.size(), n > 0 ? 1u : 0u); }
      }
  }
}

TEST(ParallelFor, GrainBelowOneIsOneAndHugeRangesDontOverflow) {
  Recorder recorder(5);
  dc_parallel_for(5, 0, Recorder::run, &recorder);
  recorder.expect_whole(5, 1);
  ScopedThreads scoped(3);
  static std::atomic<int64_t> sum;
  sum = 0;
  int64_t n = INT64_MAX / 2;
  dc_parallel_for(n, n / 7, [](int64_t begin, int64_t end, void *) { sum += end - begin; }, nullptr);
  EXPECT_EQ(sum.load(), n);
}

// Two pieces that wait for each other end only if two threads run them.
TEST(ParallelFor, RunsOnSeveralThreads) {
  ScopedThreads scoped(2);
  struct Meeting {
    std::atomic<int> here{0};
    std::atomic<bool> met{true};
  } meeting;
  dc_parallel_for(
      2, 1,
      [](int64_t, int64_t, void *ctx) {
        auto *m = static_cast<Meeting *>(ctx);
        m->here++;
        auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (m->here < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        if (m->here < 2) m->met = false;
      },
      &meeting);
  EXPECT_TRUE(meeting.met);
}

TEST(ParallelFor, NestedCallsRunInline) {
  ScopedThreads scoped(3);
  static std::atomic<int64_t> total;
  total = 0;
  dc_parallel_for(
      12, 1,
      [](int64_t begin, int64_t end, void *) {
        for (int64_t i = begin; i < end; i++) {
          auto self = std::this_thread::get_id();
          dc_parallel_for(
              10, 1,
              [](int64_t b, int64_t e, void *outer) {
                EXPECT_EQ(*static_cast<std::thread::id *>(outer), std::this_thread::get_id());
                total += e - b;
              },
              &self);
        }
        EXPECT_EQ(dc_set_num_threads(2), DC_E_STATE);
      },
      nullptr);
  EXPECT_EQ(total.load(), 120);
}

TEST(ParallelFor, ConcurrentCallersAllFinish) {
  ScopedThreads scoped(3);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; c++)
    callers.emplace_back([] {
      for (int round = 0; round < 50; round++) {
        Recorder recorder(100);
        dc_parallel_for(100, 3, Recorder::run, &recorder);
        recorder.expect_whole(100, 3);
      }
    });
  for (auto &caller : callers) caller.join();
}

TEST(ParallelFor, ThreadCountIsChecked) {
  EXPECT_EQ(dc_set_num_threads(0), DC_E_INVALID);
  EXPECT_EQ(dc_set_num_threads(-3), DC_E_INVALID);
  EXPECT_EQ(dc_set_num_threads(1 << 20), DC_E_INVALID);
  EXPECT_TRUE(contains(dc_last_error(), "1048576")) << dc_last_error();
}

std::atomic<int> hook_calls;
// A pool that cuts where it likes.
void odd_pool(int64_t begin, int64_t end, int64_t grain, dc_range_fn fn, void *ctx) {
  hook_calls++;
  EXPECT_EQ(begin, 0);
  int64_t step = (end + 2) / 3;
  std::vector<std::thread> threads;
  for (int64_t at = begin; at < end; at += step)
    threads.emplace_back([=] { fn(at, at + step < end ? at + step : end, ctx); });
  for (auto &thread : threads) thread.join();
}

TEST(ParallelFor, HookRunsInsteadOfOurPoolAndStillCutsAtTheGrain) {
  hook_calls = 0;
  int own = dc_num_threads();
  dc_set_parallel_hook(odd_pool, [] { return 17; });
  EXPECT_EQ(dc_num_threads(), 17);
  for (int64_t n : {5, 100, 1001})
    for (int64_t grain : {7, 10}) {
      Recorder recorder(n);
      dc_parallel_for(n, grain, Recorder::run, &recorder);
      recorder.expect_whole(n, grain);
    }
  dc_set_parallel_hook(odd_pool, nullptr);
  EXPECT_EQ(dc_num_threads(), own);
  dc_set_parallel_hook(nullptr, nullptr);
  EXPECT_EQ(dc_num_threads(), own);
  EXPECT_EQ(hook_calls.load(), 4); // n <= grain runs inline
  Recorder recorder(100);
  dc_parallel_for(100, 1, Recorder::run, &recorder);
  EXPECT_EQ(hook_calls.load(), 4);
}

// The child of a fork has no workers and must start its own, also when the fork came in the middle of a job.
TEST(ParallelFor, WorksInTheChildOfAFork) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer allows no threads after a fork of a process with threads";
  ScopedThreads scoped(3);
  Recorder before(64);
  dc_parallel_for(64, 1, Recorder::run, &before);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      Recorder recorder(64);
      dc_parallel_for(64, 1, Recorder::run, &recorder);
    }
  });
  for (int round = 0; round < 5; round++) {
    pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(30);
      std::atomic<int64_t> sum{0};
      dc_parallel_for(
          999, 10, [](int64_t b, int64_t e, void *ctx) { *static_cast<std::atomic<int64_t> *>(ctx) += e - b; }, &sum);
      void *ptr = nullptr;
      bool ok = sum == 999 && dc_mem_alloc(100, 0, &ptr) == DC_OK && dc_mem_free(ptr) == DC_OK;
      _exit(ok ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  }
  stop = true;
  busy.join();
}

// The variable is read once per process, so each value gets a process: this suite again, only the test below.
int run_self(const char *value) {
  char self[4096];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length < 0) return -1;
  self[length] = 0;
  pid_t child = fork();
  if (child == 0) {
    if (value) setenv("DEEPC_NUM_THREADS", value, 1);
    else unsetenv("DEEPC_NUM_THREADS");
    execl(self, self, "--gtest_filter=ParallelFor.DISABLED_PrintThreads", "--gtest_also_run_disabled_tests",
          (char *)nullptr);
    _exit(255);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Not a test of its own: the exit code tells the number of threads, plus 100 if dc_last_error names the variable.
TEST(ParallelFor, DISABLED_PrintThreads) {
  int n = dc_num_threads();
  _exit((n < 100 ? n : 99) + (contains(dc_last_error(), "DEEPC_NUM_THREADS='") ? 100 : 0));
}

TEST(ParallelFor, NumberOfThreadsComesFromTheVariable) {
  int by_default = run_self(nullptr);
  ASSERT_GE(by_default, 1);
  ASSERT_LT(by_default, 100);
  EXPECT_EQ(run_self("5"), 5);
  EXPECT_EQ(run_self(""), by_default);
  for (const char *bad : {"0", "-2", "two", "3x", "99999999999999999999"})
    EXPECT_EQ(run_self(bad), 100 + by_default) << bad;
}

// ---- memory --------------------------------------------------------------------------------------------------------
constexpr size_t kMiB = 1 << 20;

TEST(Mem, BlocksAreZeroedAlignedAndWritable) {
  for (size_t bytes : {size_t(0), size_t(1), size_t(63), size_t(4096), kMiB - 1, kMiB, 2 * kMiB, 3 * kMiB + 5}) {
    void *ptr = nullptr;
    ASSERT_EQ(dc_mem_alloc(bytes, 3, &ptr), DC_OK) << dc_last_error();
    ASSERT_NE(ptr, nullptr);
    EXPECT_EQ((uintptr_t)ptr % 64, 0u);
    auto *p = static_cast<unsigned char *>(ptr);
    size_t nonzero = 0;
    for (size_t i = 0; i < bytes; i++) nonzero += p[i] != 0;
    EXPECT_EQ(nonzero, 0u) << bytes;
    memset(p, 0xab, bytes);
    EXPECT_EQ(dc_mem_free(ptr), DC_OK) << dc_last_error();
    EXPECT_EQ(dc_mem_free(ptr), DC_E_INVALID) << "second free of " << bytes;
  }
}

TEST(Mem, ColorsStaggerWithinAHugePage) {
  std::vector<uintptr_t> offsets;
  for (int color = 0; color < 16; color++) {
    void *ptr = nullptr;
    ASSERT_EQ(dc_mem_alloc(kMiB, color, &ptr), DC_OK) << dc_last_error();
    offsets.push_back((uintptr_t)ptr % DC_HUGE_PAGE);
    ASSERT_EQ(dc_mem_free(ptr), DC_OK);
  }
  for (size_t a = 0; a < offsets.size(); a++)
    for (size_t b = 0; b < a; b++) {
      uintptr_t apart = offsets[a] > offsets[b] ? offsets[a] - offsets[b] : offsets[b] - offsets[a];
      EXPECT_GE(apart, 4096u);
      EXPECT_LE(apart, 70u * 1024);
      EXPECT_NE(apart % 4096, 0u) << a << " " << b;
    }
}

TEST(Mem, RefusesWhatIsNotItsOwn) {
  int local = 0;
  void *ptr = nullptr;
  EXPECT_EQ(dc_mem_free(nullptr), DC_OK);
  EXPECT_EQ(dc_mem_free(&local), DC_E_INVALID);
  EXPECT_EQ(dc_mem_alloc(1, -1, &ptr), DC_E_INVALID);
  EXPECT_EQ(dc_mem_alloc(1, 16, &ptr), DC_E_INVALID);
  EXPECT_EQ(dc_mem_alloc(1, 0, nullptr), DC_E_INVALID);
  EXPECT_EQ(ptr, nullptr);
  ASSERT_EQ(dc_mem_alloc(2 * kMiB, 1, &ptr), DC_OK);
  EXPECT_EQ(dc_mem_free(static_cast<char *>(ptr) + 64), DC_E_INVALID);
  EXPECT_EQ(dc_mem_free(ptr), DC_OK);
}

TEST(Mem, TooMuchIsRefusedBeforeTheKernelKills) {
  int64_t available = 0;
  ASSERT_EQ(dc_mem_available(&available), DC_OK) << dc_last_error();
  EXPECT_GT(available, 0);
  EXPECT_EQ(dc_mem_available(nullptr), DC_E_INVALID);
  void *ptr = nullptr;
  size_t bytes = (size_t)available + (size_t)(1ull << 40);
  EXPECT_EQ(dc_mem_alloc(bytes, 0, &ptr), DC_E_NOMEM);
  EXPECT_TRUE(contains(dc_last_error(), std::to_string(bytes).c_str())) << dc_last_error();
  EXPECT_TRUE(contains(dc_last_error(), "available")) << dc_last_error();
  for (size_t absurd : {SIZE_MAX, SIZE_MAX - 4 * DC_HUGE_PAGE, (size_t)PTRDIFF_MAX})
    EXPECT_EQ(dc_mem_alloc(absurd, 15, &ptr), DC_E_NOMEM) << absurd;
  EXPECT_EQ(ptr, nullptr);
}

TEST(Mem, ManyBlocksInRandomOrder) {
  std::mt19937 random(7);
  std::map<void *, std::pair<size_t, unsigned char>> live;
  for (int i = 0; i < 3000; i++) {
    if (live.size() < 400 && random() % 3) {
      size_t bytes = 1 + random() % 300;
      void *ptr = nullptr;
      ASSERT_EQ(dc_mem_alloc(bytes, 0, &ptr), DC_OK);
      ASSERT_EQ(live.count(ptr), 0u);
      memset(ptr, i & 0xff, bytes);
      live[ptr] = {bytes, (unsigned char)(i & 0xff)};
    } else if (!live.empty()) {
      auto it = live.begin();
      std::advance(it, random() % live.size());
      for (size_t k = 0; k < it->second.first; k++)
        ASSERT_EQ(static_cast<unsigned char *>(it->first)[k], it->second.second);
      ASSERT_EQ(dc_mem_free(it->first), DC_OK) << dc_last_error();
      live.erase(it);
    }
  }
  for (auto &block : live) ASSERT_EQ(dc_mem_free(block.first), DC_OK) << dc_last_error();
}

TEST(Mem, BlocksFromManyThreads) {
  std::vector<std::thread> threads;
  std::atomic<int> bad{0};
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&] {
      for (int i = 0; i < 200; i++) {
        void *ptr = nullptr;
        if (dc_mem_alloc(128, 0, &ptr) != DC_OK || dc_mem_free(ptr) != DC_OK) bad++;
      }
    });
  for (auto &thread : threads) thread.join();
  EXPECT_EQ(bad.load(), 0);
}

std::string first_line(const char *path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

TEST(Mem, HugePagesCanBeTurnedOff) {
  const size_t bytes = 8 * kMiB;
  int64_t huge = -1;
  void *ptr = nullptr;
  {
    ScopedEnv off("DEEPC_HUGEPAGES", "0");
    ASSERT_EQ(dc_mem_alloc(bytes, 0, &ptr), DC_OK) << dc_last_error();
    ASSERT_EQ(dc_mem_huge_bytes(ptr, bytes, &huge), DC_OK) << dc_last_error();
    EXPECT_EQ(huge, 0);
    ASSERT_EQ(dc_mem_free(ptr), DC_OK);
  }
  {
    ScopedEnv bad("DEEPC_HUGEPAGES", "yes");
    EXPECT_EQ(dc_mem_alloc(bytes, 0, &ptr), DC_E_ENV);
    EXPECT_TRUE(contains(dc_last_error(), "DEEPC_HUGEPAGES='yes'")) << dc_last_error();
  }
  EXPECT_EQ(dc_mem_huge_bytes(ptr, bytes, nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_mem_huge_bytes(nullptr, bytes, &huge), DC_E_INVALID);
}

TEST(Mem, HugePagesAreUsedWhereTheKernelHasThem) {
  std::string mode = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  if (mode.empty() || mode.find("[never]") != std::string::npos)
    GTEST_SKIP() << "this kernel gives no transparent huge pages";
  ScopedEnv on("DEEPC_HUGEPAGES", "1");
  const size_t bytes = 8 * kMiB;
  int64_t huge = -1;
  void *ptr = nullptr;
  ASSERT_EQ(dc_mem_alloc(bytes, 1, &ptr), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_mem_huge_bytes(ptr, bytes, &huge), DC_OK) << dc_last_error();
  EXPECT_GE(huge, 0);
  EXPECT_LE(huge, (int64_t)bytes);
  ASSERT_EQ(dc_mem_free(ptr), DC_OK);
  if (huge == 0) GTEST_SKIP() << "memory is too fragmented for huge pages now";
}

// A procfs and cgroup tree of our own making, to see which limits are read.
class FakeProc : public testing::Test {
protected:
  void SetUp() override {
    char dir[] = "/tmp/deepc_proc_XXXXXX";
    ASSERT_NE(mkdtemp(dir), nullptr);
    root_ = dir;
    make("self/");
    make("cg/job/step/");
    write("meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n");
  }
  void TearDown() override { EXPECT_EQ(system(("rm -rf " + root_).c_str()), 0); }
  void make(const std::string &path) {
    for (size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', slash + 1))
      mkdir((root_ + "/" + path.substr(0, slash)).c_str(), 0755);
  }
  void write(const std::string &path, const std::string &text) { std::ofstream(root_ + "/" + path) << text; }
  void mount_v2(const std::string &mount_root) {
    write("self/mountinfo", "22 1 0:3 / /proc rw - proc proc rw\n41 31 0:38 " + mount_root + " " + root_ +
                                "/cg rw,relatime shared:5 - cgroup2 cgroup2 rw\n");
  }
  void mount_v1() {
    write("self/mountinfo", "32 31 0:29 / " + root_ + "/other rw - cgroup cgroup rw,cpu\n35 31 0:32 / " + root_ +
                                "/cg rw,relatime - cgroup cgroup rw,memory\n");
  }
  int64_t available() {
    int64_t bytes = -1;
    EXPECT_EQ(dc_mem_available_in(root_.c_str(), &bytes), DC_OK) << dc_last_error();
    return bytes;
  }
  std::string root_;
};

TEST_F(FakeProc, MemAvailableWithoutCgroups) { EXPECT_EQ(available(), 8000 * 1024); }

TEST_F(FakeProc, CgroupV2ReadsTheWholePath) {
  mount_v2("/");
  write("self/cgroup", "0::/job/step\n");
  write("cg/job/step/memory.max", "max\n");
  write("cg/job/step/memory.current", "1000\n");
  EXPECT_EQ(available(), 8000 * 1024);
  write("cg/job/memory.max", "500000\n");
  write("cg/job/memory.current", "300000\n");
  EXPECT_EQ(available(), 200000);
  write("cg/job/memory.stat", "anon 1\ninactive_file 100000\nactive_file 7\n"); // clean cache can go
  EXPECT_EQ(available(), 300000);
  write("cg/job/step/memory.max", "1500\n");
  EXPECT_EQ(available(), 500);
  write("cg/memory.max", "100\n");
  write("cg/memory.current", "200\n"); // above its limit: nothing left, not a negative number
  EXPECT_EQ(available(), 0);
}

TEST_F(FakeProc, CgroupV2InAContainerThatSeesPartOfTheTree) {
  write("self/cgroup", "0::/docker/abc/job\n");
  write("cg/job/memory.max", "5000\n");
  write("cg/job/memory.current", "1000\n");
  mount_v2("/docker/abc");
  EXPECT_EQ(available(), 4000);
  mount_v2("/docker/ab"); // a name that is only a prefix is another cgroup; the mount's root is all that is visible
  EXPECT_EQ(available(), 8000 * 1024);
  write("cg/memory.max", "3000\n");
  write("cg/memory.current", "1000\n");
  EXPECT_EQ(available(), 2000);
  mount_v2("/");
  write("self/cgroup", "0::/../../job\n");
  EXPECT_EQ(available(), 2000);
}

TEST_F(FakeProc, CgroupV1ReadsTheMemoryController) {
  mount_v1();
  write("self/cgroup", "5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/job/step\n0::/\n");
  write("cg/job/step/memory.limit_in_bytes", "9223372036854771712\n"); // what v1 says for: no limit
  write("cg/job/step/memory.usage_in_bytes", "700\n");
  EXPECT_EQ(available(), 8000 * 1024);
  write("cg/job/memory.limit_in_bytes", "90000\n");
  write("cg/job/memory.usage_in_bytes", "50000\n");
  write("cg/job/memory.stat", "inactive_file 1\ntotal_inactive_file 20000\n");
  EXPECT_EQ(available(), 60000);
}

TEST_F(FakeProc, OddFilesAreNoLimits) {
  write("self/cgroup", "garbage\n::\n0:\n0::/job\n");
  write("self/mountinfo", "x\n - cgroup2\n1 2 3 4 5 - cgroup2\n");
  EXPECT_EQ(available(), 8000 * 1024);
  mount_v2("/");
  write("cg/job/memory.max", "nonsense\n");
  write("cg/job/memory.current", "\n");
  EXPECT_EQ(available(), 8000 * 1024);
  write("meminfo", "MemAvailable: 99999999999999999999999 kB\n");
  EXPECT_GT(available(), 0);
  int64_t bytes;
  EXPECT_EQ(dc_mem_available_in(nullptr, &bytes), DC_E_INVALID);
}

// ---- CRC-32C -------------------------------------------------------------------------------------------------------
uint32_t crc_bitwise(const unsigned char *p, size_t n) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < n; i++) {
    crc ^= p[i];
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0);
  }
  return ~crc;
}

class Crc : public testing::TestWithParam<int> {
protected:
  void SetUp() override {
    ASSERT_EQ(dc_isa_current(&before_), DC_OK) << dc_last_error();
    if (!dc_isa_available(GetParam())) GTEST_SKIP() << "this processor or this build lacks " << dc_isa_name(GetParam());
    ASSERT_EQ(dc_isa_force(GetParam()), DC_OK);
  }
  void TearDown() override { dc_isa_force(before_); }
  int before_ = 0;
};

TEST_P(Crc, KnownVectors) { // RFC 3720, appendix B.4
  unsigned char data[32] = {0};
  EXPECT_EQ(dc_crc32c(0, "123456789", 9), 0xE3069283u);
  EXPECT_EQ(dc_crc32c(0, data, 32), 0x8A9136AAu);
  memset(data, 0xff, 32);
  EXPECT_EQ(dc_crc32c(0, data, 32), 0x62A8AB43u);
  for (int i = 0; i < 32; i++) data[i] = (unsigned char)i;
  EXPECT_EQ(dc_crc32c(0, data, 32), 0x46DD794Eu);
  for (int i = 0; i < 32; i++) data[i] = (unsigned char)(31 - i);
  EXPECT_EQ(dc_crc32c(0, data, 32), 0x113FDB5Cu);
  EXPECT_EQ(dc_crc32c(0, data, 0), 0u);
  EXPECT_EQ(dc_crc32c(123, nullptr, 0), 123u);
}

TEST_P(Crc, EveryLengthAndAlignmentAndContinuation) {
  std::mt19937 random(1);
  std::vector<unsigned char> data(400);
  for (auto &byte : data) byte = (unsigned char)random();
  for (size_t begin = 0; begin < 9; begin++)
    for (size_t n = 0; n < 130; n++) {
      uint32_t expected = crc_bitwise(data.data() + begin, n);
      ASSERT_EQ(dc_crc32c(0, data.data() + begin, n), expected) << begin << " " << n;
      size_t cut = n ? random() % n : 0;
      ASSERT_EQ(dc_crc32c(dc_crc32c(0, data.data() + begin, cut), data.data() + begin + cut, n - cut), expected);
    }
}

// Large blocks are walked in three stretches that are joined: at every size where another kind of stretch ends.
TEST_P(Crc, StretchesAreJoined) {
  std::mt19937 random(2);
  std::vector<unsigned char> data(2 * 3 * 8192 + 3 * 256 + 40);
  for (auto &byte : data) byte = (unsigned char)random();
  for (size_t n : {3 * 256 - 1, 3 * 256, 3 * 256 + 9, 2 * 3 * 256 + 8, 3 * 8192 - 1, 3 * 8192, 3 * 8192 + 3 * 256 + 17,
                   2 * 3 * 8192 + 3 * 256 + 31}) {
    for (size_t begin : {0, 3}) {
      ASSERT_EQ(dc_crc32c(0, data.data() + begin, n), crc_bitwise(data.data() + begin, n)) << begin << " " << n;
      ASSERT_EQ(dc_crc32c(dc_crc32c(0, data.data() + begin, n / 3), data.data() + begin + n / 3, n - n / 3),
                crc_bitwise(data.data() + begin, n));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Crc, testing::Range(0, (int)DC_ISA_COUNT),
                         [](const testing::TestParamInfo<int> &info) { return std::string(dc_isa_name(info.param)); });

} // namespace
