// test_fork.cpp: a child that is forked at any moment, while other threads are inside the core, can use all of it
// (ops/base/fork.c). Before each of the locks had a row there, children hung in dc_segment_free and dc_comm_close.
#include <gtest/gtest.h>

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/base.h"
#include "comm/comm.h"
#include "comm/flight.h"
#include "ranks.h"

namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

constexpr int64_t kElements = 1 << 14;

// DEEPC_TEST_FULL=1: a thousand forks.
int forks() {
  const char *full = getenv("DEEPC_TEST_FULL");
  return full && !strcmp(full, "1") ? 1000 : 60; // of the rows that it can see a missing one shows within 40
}

std::string fresh_address() {
  static std::atomic<int> count{0};
  return ranks::fmt("deepc-fork-%d-%d", getpid(), count++);
}

dc_comm *open_group(const std::string &address, int rank, int size) {
  dc_comm_config k = {};
  k.struct_size = sizeof k;
  k.rank = rank, k.size = size, k.address = address.c_str(), k.label = "fork";
  k.timeout_ms = 60000, k.slot_bytes = 1 << 16, k.slots = 2;
  dc_comm *c = nullptr;
  EXPECT_EQ(dc_comm_open(&k, &c), DC_OK) << dc_last_error();
  return c;
}

// One loop per lock: each keeps a thread inside of what it guards.
class Busy {
public:
  ~Busy() {
    stop_ = true;
    for (auto &t : threads_) t.join();
  }
  void loop(std::function<void()> once) {
    threads_.emplace_back([this, once] {
      while (!stop_) once();
    });
  }
  void start() {
    loop([] {
      void *p = dc_heap_take(3 << 20), *q = dc_heap_take(1 << 20);
      dc_heap_give(p);
      dc_heap_give(q);
    });
    loop([] {
      void *p = nullptr;
      if (dc_mem_alloc(1000, 0, &p) == DC_OK) dc_mem_free(p);
    });
    loop([] {
      for (int i = 0; i < DC_COUNTER_COUNT; i++) dc_counter_get(i);
    });
    if (!kThreadSanitizer)
      loop([] {
        std::atomic<int64_t> sum{0};
        dc_parallel_for(
            64, 1, [](int64_t b, int64_t e, void *ctx) { *static_cast<std::atomic<int64_t> *>(ctx) += e - b; }, &sum);
      });
    loop([] { // the mark, the list of endpoints, segments, the record, the list of counters
      dc_comm *c = open_group(fresh_address(), 0, 1);
      dc_segment *s = nullptr;
      void *base = nullptr;
      if (c && dc_segment_create(c, 4096, &s, &base) == DC_OK) dc_segment_free(s);
      dc_comm_close(c);
    });
    loop([] {
      dc_flight_log(64);
      dc_flight_fd();
      dc_flight_log(0);
    });
  }

private:
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// What a child does: uses each of the locks, and frees what it inherited, as the garbage collector of a data loader's
// worker does. Returns the number of the step that failed.
int use_everything(dc_comm *inherited, dc_segment *segment, const std::string &address) {
  if (dc_segment_free(segment) != DC_OK) return 1;
  if (dc_comm_close(inherited) != DC_OK) return 2;
  void *p = dc_heap_take(1 << 20), *q = nullptr;
  if (dc_heap_usable() && dc_heap_give(p) != 1) return 3;
  if (dc_mem_alloc(100, 0, &q) != DC_OK || dc_mem_free(q) != DC_OK) return 4;
  dc_counter_get(DC_COUNTER_coll_barrier);
  std::atomic<int64_t> sum{0};
  if (!kThreadSanitizer)
    dc_parallel_for(
        99, 1, [](int64_t b, int64_t e, void *ctx) { *static_cast<std::atomic<int64_t> *>(ctx) += e - b; }, &sum);
  if (!kThreadSanitizer && sum != 99) return 5;
  if (dc_flight_log(16) != DC_OK || dc_flight_log(0) != DC_OK) return 6;
  dc_comm *mine = open_group(address, 0, 1);
  if (!mine || dc_comm_close(mine) != DC_OK) return 7;
  return 0;
}

enum { SANITIZERS_LOCK = 99 }; // exit status

#if defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)
// Up to GCC 13 libasan's allocator leaves its locks at a fork in the hands of threads that the child has not: a child
// that waits inside of libasan is none of ours to mend.
void where_it_hangs(int, siginfo_t *, void *context) {
  static int times;
  Dl_info found;
  void *at = (void *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  if (dladdr(at, &found) && found.dli_fname && strstr(found.dli_fname, "libasan")) _exit(SANITIZERS_LOCK);
  if (++times == 3) signal(SIGALRM, SIG_DFL);
  alarm(times == 3 ? 1 : 20);
}
#endif

// SIGALRM ends a child that hangs for a minute.
void end_if_it_hangs() {
#if defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)
  struct sigaction action = {};
  action.sa_sigaction = where_it_hangs;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGALRM, &action, nullptr);
  alarm(20);
#else
  alarm(60);
#endif
}

TEST(Fork, NoChildHangsWhateverOtherThreadsDo) {
  int threads_before = dc_num_threads();
  ASSERT_EQ(dc_set_num_threads(2), DC_OK);
  const std::string address = fresh_address();
  dc_comm *c[2] = {};
  dc_segment *s[2] = {};
  void *base[2] = {};
  std::thread other([&] {
    c[1] = open_group(address, 1, 2);
    if (c[1]) EXPECT_EQ(dc_segment_create(c[1], kElements * 4, &s[1], &base[1]), DC_OK) << dc_last_error();
  });
  c[0] = open_group(address, 0, 2);
  if (c[0]) EXPECT_EQ(dc_segment_create(c[0], kElements * 4, &s[0], &base[0]), DC_OK) << dc_last_error();
  other.join();
  ASSERT_TRUE(s[0] && s[1]);
  {
    Busy busy;
    busy.start();
    for (int r = 0; r < 2; r++) // registered buffers: the list of segments at each call; ends when the group is aborted
      busy.loop([&, r] {
        if (dc_all_reduce(c[r], base[r], base[r], kElements, DC_F32, DC_RED_SUM, 0) != DC_OK) ranks::nap_ms(1);
      });
    std::mt19937 random(11);
    int n = forks(), in_sanitizer = 0;
    for (int i = 0; i < n; i++) {
      usleep(random() % 300);
      const std::string own = fresh_address();
      pid_t child = fork();
      ASSERT_GE(child, 0) << strerror(errno);
      if (!child) {
        end_if_it_hangs();
        _exit(use_everything(c[i % 2], s[i % 2], own + "c"));
      }
      int status = -1;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      if (WIFEXITED(status) && WEXITSTATUS(status) == SANITIZERS_LOCK) {
        in_sanitizer++;
        continue;
      }
      if (status) {
        ADD_FAILURE() << "child " << i << " of " << n << ": "
                      << (WIFSIGNALED(status) ? "hung or crashed, signal " : "failed at step ")
                      << (WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        break;
      }
    }
    EXPECT_LE(in_sanitizer, n / 10);
    EXPECT_EQ(dc_comm_abort(c[0], "the test is over"), DC_OK);
  }
  for (int r = 0; r < 2; r++) {
    EXPECT_EQ(dc_segment_free(s[r]), DC_OK);
    EXPECT_EQ(dc_comm_close(c[r]), DC_OK) << dc_last_error();
  }
  dc_set_num_threads(threads_before);
}

// Forks from several threads at once.
TEST(Fork, ThreadsMayForkTogether) {
  Busy busy;
  busy.start();
  std::vector<std::thread> forkers;
  for (int t = 0; t < 3; t++)
    forkers.emplace_back([] {
      for (int i = 0; i < forks() / 10; i++) {
        pid_t child = fork();
        ASSERT_GE(child, 0) << strerror(errno);
        if (!child) {
          end_if_it_hangs();
          void *p = nullptr;
          _exit(dc_mem_alloc(100, 0, &p) == DC_OK && dc_mem_free(p) == DC_OK && dc_flight_log(0) == DC_OK ? 0 : 1);
        }
        int status = -1;
        EXPECT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(status == 0 || (WIFEXITED(status) && WEXITSTATUS(status) == SANITIZERS_LOCK)) << status;
      }
    });
  for (auto &t : forkers) t.join();
}

} // namespace
