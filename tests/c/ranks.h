// ranks.h: runs a test body in several processes. Every rank is a fork of the test body (the parent has no threads
// yet); it reports through a pipe: nothing means success.
#ifndef DEEPC_TESTS_RANKS_H
#define DEEPC_TESTS_RANKS_H

#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm.h"

extern "C" int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

namespace ranks {

using Body = std::function<std::string(int rank)>;

inline std::string fmt(const char *f, ...) __attribute__((format(printf, 1, 2)));
inline std::string fmt(const char *f, ...) {
  char s[4096];
  va_list ap;
  va_start(ap, f);
  vsnprintf(s, sizeof s, f, ap);
  va_end(ap);
  return s;
}

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

inline void nap_ms(int ms) { poll(nullptr, 0, ms); }

inline std::string fresh_address() {
  static int count = 0;
  return fmt("deepc-test-%d-%d", getpid(), count++);
}

struct Outcome {
  std::string text;
  int status = 0;
  bool killed() const { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
};

// Runs body(rank) in `size` processes. A rank that is not back after `limit_s` is killed and says so.
inline std::vector<Outcome> run_ranks(int size, const Body &body, int limit_s = 120) {
  std::vector<pid_t> pid(size);
  std::vector<int> fd(size);
  std::vector<Outcome> out(size);
  for (int r = 0; r < size; r++) {
    int p[2];
    if (pipe(p)) abort();
    pid[r] = fork();
    if (pid[r] == 0) {
      close(p[0]);
      for (int i = 0; i < r; i++) close(fd[i]);
      alarm(limit_s + 20);
      dc_set_num_threads(1);
      std::string s = body(r);
      if (s.empty() && __lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check()) s = "leak";
      for (size_t n = 0; n < s.size();) {
        ssize_t w = write(p[1], s.data() + n, s.size() - n);
        if (w <= 0) break;
        n += (size_t)w;
      }
      _exit(0);
    }
    close(p[1]);
    fd[r] = p[0];
  }
  double end = now() + limit_s;
  for (int r = 0; r < size; r++) {
    char buf[1024];
    for (;;) {
      pollfd q = {fd[r], POLLIN, 0};
      int left = (int)((end - now()) * 1000);
      if (left <= 0 || poll(&q, 1, left) == 0) {
        out[r].text += " [hung: killed by the test]";
        kill(pid[r], SIGKILL);
        break;
      }
      ssize_t n = read(fd[r], buf, sizeof buf);
      if (n <= 0) break;
      out[r].text.append(buf, (size_t)n);
    }
    close(fd[r]);
    waitpid(pid[r], &out[r].status, 0);
  }
  return out;
}

inline void expect_all_fine(const std::vector<Outcome> &out) {
  for (size_t r = 0; r < out.size(); r++) {
    EXPECT_EQ(out[r].text, "") << "rank " << r;
    EXPECT_EQ(out[r].status, 0) << "rank " << r;
  }
}

// body(rank) in threads of this process; all their reports.
inline std::string run_threads(int size, const Body &body) {
  std::vector<std::string> said(size);
  std::vector<std::thread> t;
  for (int rank = 0; rank < size; rank++) t.emplace_back([&, rank] { said[rank] = body(rank); });
  for (auto &x : t) x.join();
  std::string all;
  for (auto &s : said) all += s;
  return all;
}

// The address is borrowed.
inline dc_comm_config config_of(const char *address, int rank, int size, int slots = 2, int64_t slot_bytes = 4096,
                                int timeout_ms = 60000) {
  dc_comm_config k;
  memset(&k, 0, sizeof k);
  k.struct_size = sizeof k;
  k.rank = rank;
  k.size = size;
  k.address = address;
  k.label = "test_pg";
  k.timeout_ms = timeout_ms;
  k.slot_bytes = slot_bytes;
  k.slots = slots;
  return k;
}

} // namespace ranks

#define FINE(expr)                                                                                                     \
  do {                                                                                                                 \
    int rc_ = (expr);                                                                                                  \
    if (rc_ != DC_OK) return ranks::fmt("line %d: %s: %s: %s", __LINE__, #expr, dc_status_name(rc_), dc_last_error()); \
  } while (0)
#define WANT(cond, ...)                                                                                   \
  do {                                                                                                    \
    if (!(cond)) return ranks::fmt("line %d: not (%s): ", __LINE__, #cond) + ranks::fmt(" " __VA_ARGS__); \
  } while (0)
#define WANT_STATUS(want, expr)                                                                    \
  do {                                                                                             \
    int rc_ = (expr);                                                                              \
    WANT(rc_ == (want), "%s gave %s: %s", #expr, dc_status_name(rc_), rc_ ? dc_last_error() : ""); \
  } while (0)
#define WANT_TEXT(part) WANT(strstr(dc_last_error(), part), "the error lacks '%s': %s", part, dc_last_error())

#endif
