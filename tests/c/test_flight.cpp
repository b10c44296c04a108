// test_flight.cpp: the flight record: what it holds, how another process reads it, forks, dumps, and files that lie.
// Every rank is a fork of the test body, as in test_comm.cpp.
#include <gtest/gtest.h>

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/flight.h"
#include "ranks.h"

using namespace ranks;

namespace {

enum { SET_ASIDE = 8 }; // rows that a group may have claimed for its next calls

// Wants every rank to report nothing.
void all_fine(int size, const Body &body) { expect_all_fine(run_ranks(size, body, 100)); }

int open_group(const std::string &address, int rank, int size, dc_comm **c, const char *label = "test_pg",
               int timeout_ms = 60000, const int32_t *names = nullptr) {
  dc_comm_config k = config_of(address.c_str(), rank, size, 2, 4096, timeout_ms);
  k.label = label;
  k.global_rank = names;
  return dc_comm_open(&k, c);
}

struct Record {
  std::vector<dc_flight_row> rows;
  std::string json;
  int rc = DC_OK;
};

Record parse(int fd, int64_t capacity = DC_FLIGHT_CALLS) {
  Record out;
  out.rows.resize((size_t)capacity);
  out.json.resize(1 << 20);
  int64_t n = 0;
  out.rc = dc_flight_parse(fd, out.rows.data(), capacity, &n, &out.json[0], (int64_t)out.json.size());
  out.rows.resize(out.rc ? 0 : (size_t)n);
  out.json.resize(out.rc ? 0 : strlen(out.json.c_str()));
  return out;
}

Record own() {
  Record out;
  out.rows.resize(DC_FLIGHT_CALLS);
  int64_t n = 0;
  out.rc = dc_flight_read(out.rows.data(), DC_FLIGHT_CALLS, &n);
  out.rows.resize(out.rc ? 0 : (size_t)n);
  return out;
}

// The descriptor of process `pid`'s record, as `deepc doctor` finds it; -1: none.
int record_of(pid_t pid) {
  std::string dir = "/proc/" + std::to_string(pid) + "/fd";
  DIR *d = opendir(dir.c_str());
  if (!d) return -1;
  int found = -1;
  while (dirent *e = readdir(d)) {
    char name[256] = {0};
    std::string path = dir + "/" + e->d_name;
    if (readlink(path.c_str(), name, sizeof name - 1) > 0 && strstr(name, "memfd:deepc-flight"))
      found = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  }
  closedir(d);
  return found;
}

bool has(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

std::string use(dc_comm *c, int calls) {
  std::vector<float> x(8, 1.0f);
  for (int i = 0; i < calls; i++) {
    FINE(dc_comm_set_caller(c, ("train.py:" + std::to_string(i + 1)).c_str()));
    FINE(dc_all_reduce(c, x.data(), x.data(), i % 8, DC_F32, DC_RED_MAX, 5));
  }
  return "";
}

TEST(Flight, EveryCallIsThere) {
  std::string address = fresh_address();
  all_fine(2, [&](int rank) -> std::string {
    dc_comm *c;
    const int32_t names[] = {4, 7};
    WANT(own().rows.empty() && dc_flight_fd() == -1);
    FINE(open_group(address, rank, 2, &c, "a \"label\"\n", 60000, names));
    std::string s = use(c, 5);
    if (!s.empty()) return s;
    FINE(dc_barrier(c, 3));
    float y[6] = {0};
    FINE(dc_broadcast(c, y, 6, DC_F32, 1, 0));
    Record mine = own(), read = parse(dc_flight_fd());
    WANT(mine.rc == DC_OK && read.rc == DC_OK && mine.rows.size() == read.rows.size());
    for (size_t i = 0; i < mine.rows.size(); i++) { // ticks were turned into time at two moments: a few ns apart
      dc_flight_row &a = mine.rows[i], &b = read.rows[i];
      WANT(std::llabs(a.begin_ns - b.begin_ns) < 100000 && std::llabs(a.end_ns - b.end_ns) < 100000);
      b.begin_ns = a.begin_ns;
      b.end_ns = a.end_ns;
      WANT(memcmp(&a, &b, sizeof a) == 0);
    }
    std::vector<dc_flight_row> calls;
    for (auto &r : mine.rows)
      if (r.op != DC_CALL_USER) calls.push_back(r); // what opening itself called is not of interest here
    size_t at = calls.size() - 7;
    for (int i = 0; i < 5; i++) {
      dc_flight_row &r = calls[at + (size_t)i];
      WANT(r.op == DC_CALL_ALL_REDUCE && r.dtype == DC_F32 && r.red_op == DC_RED_MAX && r.count == i && r.tag == 5 &&
           r.status == DC_OK);
      WANT(r.where == "train.py:" + std::to_string(i + 1));
      WANT(r.begin_ns > 0 && r.end_ns >= r.begin_ns && r.ranks == 2 && r.group == 0);
      if (i)
        WANT(r.seq == calls[at + (size_t)i - 1].seq + 1 && r.number == calls[at + (size_t)i - 1].number + 1 &&
             r.begin_ns >= calls[at + (size_t)i - 1].end_ns);
    }
    WANT(calls[at + 5].op == DC_CALL_BARRIER && calls[at + 5].tag == 3);
    WANT(calls[at + 6].op == DC_CALL_BROADCAST && calls[at + 6].root == 1);
    WANT(has(read.json, "\"rank\": " + std::to_string(names[rank]) + ", \"world\": 2"));
    WANT(has(read.json, "\"label\": \"a \\\"label\\\"\\u000a\""));
    WANT(has(read.json, "{\"rank\": 4, \"pid\": ") &&
         has(read.json, "{\"rank\": 7, \"pid\": " + std::to_string(rank ? getpid() : 0).substr(0, rank ? 20 : 0)));
    WANT(has(read.json, "\"pid\": " + std::to_string(getpid())));
    FINE(dc_comm_close(c));
    return "";
  });
}

TEST(Flight, TheNewestStayOldestFirst) {
  all_fine(1, [&](int) -> std::string {
    dc_comm *c;
    float x = 1;
    FINE(open_group(fresh_address(), 0, 1, &c));
    for (int i = 0; i < 3000; i++) FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, i));
    Record r = own();
    WANT(r.rows.size() >= DC_FLIGHT_CALLS - SET_ASIDE && r.rows.size() <= DC_FLIGHT_CALLS);
    for (size_t i = 0; i < r.rows.size(); i++) WANT(r.rows[i].tag == 3000 - (int64_t)(r.rows.size() - i));
    dc_flight_row few[10];
    int64_t n = 0;
    FINE(dc_flight_read(few, 10, &n));
    WANT(n == 10 && few[0].tag == 2990 && few[9].tag == 2999);
    FINE(dc_flight_read(nullptr, 0, &n));
    WANT(n == 0);
    WANT(dc_flight_read(nullptr, 1, &n) == DC_E_INVALID && dc_flight_read(few, -1, &n) == DC_E_INVALID);
    FINE(dc_comm_close(c));
    return "";
  });
}

// A rank that waits is seen from outside, with what it waits for, while its other group goes on a thousand times.
TEST(Flight, AnotherProcessReadsAHungOne) {
  std::string a = fresh_address(), b = fresh_address();
  all_fine(3, [&](int rank) -> std::string {
    dc_comm *c, *d = nullptr;
    float x = 1;
    FINE(open_group(a, rank, 3, &c, "all"));
    if (rank < 2) FINE(open_group(b, rank, 2, &d, "pair"));
    int32_t pid = getpid(), first;
    std::vector<int32_t> pids(3);
    FINE(dc_all_gather(c, &pid, pids.data(), 1, DC_I32, 0));
    first = pids[0];
    if (rank == 0) {
      std::thread stuck([&] {
        dc_comm_set_caller(c, "loop.py:9");
        dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, 1234);
      });
      for (int i = 0; i < 2 * DC_FLIGHT_CALLS; i++) FINE(dc_barrier(d, i));
      stuck.join();
    } else if (rank == 1) {
      for (int i = 0; i < 2 * DC_FLIGHT_CALLS; i++) FINE(dc_barrier(d, i));
      FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, 1234));
    } else {
      int fd = record_of(first), seen = 0, looks = 0;
      WANT(fd >= 0);
      for (; !seen || looks < 50; looks++) {
        Record r = parse(fd);
        if (r.rc) return dc_last_error();
        WANT(has(r.json, "\"pid\": " + std::to_string(first)));
        for (auto &row : r.rows) {
          WANT(row.number > 0 && row.begin_ns > 0 && row.group >= -1 && row.group < 2 && row.ranks >= 2 &&
               row.ranks <= 3);
          if (row.op == DC_CALL_BARRIER) WANT(row.ranks == 2 && row.group == 1 && row.tag < 2 * DC_FLIGHT_CALLS);
          if (row.tag == 1234 && row.op == DC_CALL_ALL_REDUCE) {
            WANT(std::string(row.where) == "loop.py:9" && row.count == 1 && row.end_ns == 0);
            seen++;
          }
        }
      }
      // when the barriers are through, the row of the call that hangs has survived all of them
      for (bool last = false; !last;) {
        for (auto &row : parse(fd).rows)
          last |= row.op == DC_CALL_BARRIER && row.tag == 2 * DC_FLIGHT_CALLS - 1 && row.end_ns;
        poll(nullptr, 0, 1);
      }
      seen = 0;
      for (auto &row : parse(fd).rows) seen += row.tag == 1234 && row.op == DC_CALL_ALL_REDUCE && !row.end_ns;
      WANT(seen == 1);
      close(fd);
      FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, 1234));
    }
    FINE(dc_comm_close(c));
    FINE(dc_comm_close(d));
    return "";
  });
}

TEST(Flight, ManyThreadsWriteWhileOthersRead) {
  enum { THREADS = 4, CALLS = 800 };
  all_fine(1, [&](int) -> std::string {
    dc_comm *c[THREADS];
    for (auto &g : c) FINE(open_group(fresh_address(), 0, 1, &g));
    std::atomic<int> left{THREADS};
    std::atomic<int> bad{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < THREADS; t++)
      threads.emplace_back([&, t] {
        float x = 1;
        for (int i = 0; i < CALLS; i++)
          if (dc_all_reduce(c[t], &x, &x, 1, DC_F32, DC_RED_SUM, t * CALLS + i)) bad++;
        left--;
      });
    while (left > 0) {
      for (auto &r : own().rows) // each row is of one thread's call: no mixture
        if (r.op != DC_CALL_ALL_REDUCE || r.group != r.tag / CALLS || r.seq != r.tag % CALLS + 1) bad++;
      Record seen = parse(dc_flight_fd());
      if (seen.rc) bad++;
      for (auto &r : seen.rows)
        if (r.group != r.tag / CALLS || r.seq != r.tag % CALLS + 1) bad++;
    }
    for (auto &t : threads) t.join();
    WANT(bad == 0);
    WANT(own().rows.size() >= DC_FLIGHT_CALLS - THREADS * SET_ASIDE);
    for (auto *g : c) FINE(dc_comm_close(g));
    return "";
  });
}

TEST(Flight, GroupsComeAndGoMoreOftenThanThereAreEntries) {
  all_fine(1, [&](int) -> std::string {
    dc_comm *kept, *c;
    float x = 1;
    FINE(open_group(fresh_address(), 0, 1, &kept, "kept"));
    FINE(dc_all_reduce(kept, &x, &x, 1, DC_F32, DC_RED_SUM, 1));
    for (int i = 0; i < DC_FLIGHT_GROUPS + 5; i++) {
      FINE(open_group(fresh_address(), 0, 1, &c, ("g" + std::to_string(i)).c_str()));
      FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, 2));
      FINE(dc_comm_close(c));
    }
    Record r = parse(dc_flight_fd());
    if (r.rc) return dc_last_error();
    WANT(has(r.json, "\"label\": \"kept\"") && has(r.json, "\"label\": \"g260\"") && !has(r.json, "\"label\": \"g0\""));
    WANT(r.rows.front().group == 0 && r.rows.front().tag == 1);
    WANT(r.rows[1].group == -1); // of g0, whose entry another group has now
    WANT(r.rows.back().group > 0);
    FINE(dc_comm_close(kept));
    return "";
  });
}

TEST(Flight, AForkedChildHasNoneOfItsParents) {
  std::string address = fresh_address();
  all_fine(2, [&](int rank) -> std::string {
    dc_comm *c;
    FINE(open_group(address, rank, 2, &c));
    std::string s = use(c, 3);
    if (!s.empty()) return s;
    size_t before = own().rows.size();
    pid_t child = fork();
    if (child == 0) {
      int64_t n = 9;
      dc_flight_row row;
      bool none = dc_flight_read(&row, 1, &n) == DC_OK && n == 0 && dc_flight_fd() == -1 && record_of(getpid()) == -1;
      dc_comm *d;
      float x = 1;
      none = none && dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, 0) == DC_E_STATE;
      none = none && open_group(fresh_address(), 0, 1, &d) == DC_OK &&
             dc_all_reduce(d, &x, &x, 1, DC_F32, DC_RED_SUM, 0) == DC_OK;
      none = none && own().rows.size() == 1 && has(parse(dc_flight_fd()).json, "\"pid\": " + std::to_string(getpid()));
      _exit(none ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    WANT(status == 0);
    WANT(own().rows.size() == before);
    FINE(dc_comm_close(c));
    return "";
  });
}

struct Folder {
  char path[64] = "/tmp/deepc-flight-XXXXXX";
  Folder() {
    if (!mkdtemp(path)) abort();
  }
  std::vector<std::string> files() const {
    std::vector<std::string> out;
    DIR *d = opendir(path);
    while (dirent *e = readdir(d))
      if (e->d_name[0] != '.') out.push_back(e->d_name);
    closedir(d);
    return out;
  }
  ~Folder() {
    for (auto &f : files()) unlink((std::string(path) + "/" + f).c_str());
    rmdir(path);
  }
};

TEST(Flight, AnErrorThatBreaksWritesADump) {
  Folder folder;
  std::string address = fresh_address();
  all_fine(2, [&](int rank) -> std::string {
    setenv("DEEPC_FLIGHT_DIR", folder.path, 1);
    dc_comm *c;
    float x[8] = {0};
    FINE(open_group(address, rank, 2, &c, "grads"));
    WANT(dc_all_reduce(c, x, x, -1, DC_F32, DC_RED_SUM, 0) == DC_E_SHAPE); // a local mistake breaks nothing
    FINE(dc_barrier(c, 0));
    std::string name = std::string(folder.path) + "/deepc-flight-" + std::to_string(rank) + "-" +
                       std::to_string(getpid()) + ".bin";
    WANT(access(name.c_str(), F_OK) != 0);
    FINE(dc_comm_set_caller(c, rank ? "one.py:11" : "zero.py:10"));
    int rc = rank ? dc_all_gather(c, x, x, 2, DC_F32, 0) : dc_all_reduce(c, x, x, 2, DC_F32, DC_RED_SUM, 0);
    WANT(rc == DC_E_MISMATCH);
    WANT(has(dc_last_error(), "zero.py:10") && has(dc_last_error(), "one.py:11"));
    int fd = open(name.c_str(), O_RDONLY | O_CLOEXEC);
    WANT(fd >= 0);
    Record r = parse(fd);
    close(fd);
    if (r.rc) return dc_last_error();
    WANT(r.rows.back().status == DC_E_MISMATCH && r.rows.back().end_ns);
    WANT(std::string(r.rows.back().where) == (rank ? "one.py:11" : "zero.py:10"));
    WANT(has(r.json, "\"status\": \"E_MISMATCH\"") && has(r.json, "zero.py:10") && has(r.json, "one.py:11"));
    FINE(dc_comm_close(c));
    return "";
  });
  EXPECT_EQ(folder.files().size(), 2u);
}

TEST(Flight, AFolderThatCannotBeWrittenChangesNoError) {
  std::string address = fresh_address();
  all_fine(2, [&](int rank) -> std::string {
    setenv("DEEPC_FLIGHT_DIR", "/proc/none/such", 1);
    dc_comm *c;
    float x[8] = {0};
    FINE(open_group(address, rank, 2, &c));
    int log = open("/dev/null", O_WRONLY | O_CLOEXEC), err = dup(2);
    dup2(log, 2);
    int rc = rank ? dc_barrier(c, 0) : dc_all_reduce(c, x, x, 2, DC_F32, DC_RED_SUM, 0);
    dup2(err, 2);
    close(log);
    close(err);
    WANT(rc == DC_E_MISMATCH && has(dc_last_error(), "different collectives"));
    FINE(dc_comm_close(c));
    return "";
  });
}

TEST(Flight, StepsOfTheExchangeAreRows) {
  std::string address = fresh_address();
  all_fine(2, [&](int rank) -> std::string {
    dc_comm *c;
    FINE(open_group(address, rank, 2, &c));
    size_t before = own().rows.size();
    const dc_call call = {DC_CALL_BUCKET, DC_BF16, 0, 0, 100, 6};
    for (int i = 0; i < 3; i++) {
      int64_t step;
      void *slot;
      FINE(dc_exchange_begin(c, &step, &slot));
      FINE(dc_exchange_post(c, &call));
      auto rows = own().rows;
      WANT(rows.size() == before + (size_t)i + 1 && rows.back().end_ns == 0 && rows.back().op == DC_CALL_BUCKET &&
           rows.back().tag == 6);
      FINE(dc_exchange_wait(c, step));
      WANT(dc_exchange_wait(c, step + 5) == DC_E_STATE && dc_exchange_wait(c, -3) == DC_E_STATE &&
           dc_exchange_post(c, &call) == DC_E_STATE);
      WANT(own().rows.back().end_ns == 0);
      FINE(dc_exchange_done(c, step));
      WANT(own().rows.back().end_ns != 0 && own().rows.back().status == DC_OK);
    }
    FINE(dc_comm_close(c));
    return "";
  });
}

TEST(Flight, TheLogHoldsWhatTheRecordHasForgotten) {
  all_fine(1, [&](int) -> std::string {
    dc_comm *c;
    float x = 1;
    int64_t n = -1, lost = -1;
    std::vector<dc_flight_row> rows(6000);
    FINE(open_group(fresh_address(), 0, 1, &c));
    WANT(dc_flight_log(-1) == DC_E_INVALID);
    FINE(dc_flight_log_take(rows.data(), 6000, &n, &lost));
    WANT(n == 0 && lost == 0);
    FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, 999));
    FINE(dc_flight_log(4000));
    for (int i = 0; i < 3500; i++) FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, i));
    FINE(dc_flight_log_take(rows.data(), 1000, &n, &lost));
    WANT(n == 1000 && lost == 0 && rows[0].tag == 0 && rows[999].tag == 999 && rows[999].end_ns >= rows[999].begin_ns &&
         rows[999].ranks == 1);
    FINE(dc_flight_log_take(rows.data(), 6000, &n, &lost));
    WANT(n == 2500 && lost == 0 && rows[0].tag == 1000 && rows[2499].tag == 3499);
    for (int i = 0; i < 5000; i++) FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, i));
    FINE(dc_flight_log_take(rows.data(), 6000, &n, &lost));
    WANT(n == 4000 && lost == 1000 && rows[0].tag == 1000);
    FINE(dc_flight_log(0));
    FINE(dc_all_reduce(c, &x, &x, 1, DC_F32, DC_RED_SUM, 1));
    FINE(dc_flight_log(4000));
    FINE(dc_flight_log_take(rows.data(), 6000, &n, &lost));
    WANT(n == 0 && lost == 0); // what happened while it was off is not in it
    FINE(dc_comm_close(c));
    return "";
  });
}

TEST(Flight, TheLogLosesNothingThatIsJustBeingWritten) {
  enum { THREADS = 4, CALLS = 4000 };
  all_fine(1, [&](int) -> std::string {
    dc_comm *c[THREADS];
    for (auto &g : c) FINE(open_group(fresh_address(), 0, 1, &g));
    FINE(dc_flight_log(THREADS * CALLS));
    std::atomic<int> left{THREADS};
    std::vector<std::thread> threads;
    for (int t = 0; t < THREADS; t++)
      threads.emplace_back([&, t] {
        float x = 1;
        for (int i = 0; i < CALLS; i++)
          if (dc_all_reduce(c[t], &x, &x, 1, DC_F32, DC_RED_SUM, i)) abort();
        left--;
      });
    std::vector<dc_flight_row> rows(THREADS * CALLS);
    int64_t all = 0, next[THREADS] = {}, mixed = 0, missed = 0;
    for (bool more = true; more;) {
      int64_t n = 0, lost = 0;
      more = left > 0;
      FINE(dc_flight_log_take(rows.data(), (int64_t)rows.size(), &n, &lost));
      all += n, missed += lost;
      for (int64_t i = 0; i < n; i++) mixed += rows[(size_t)i].tag != next[rows[(size_t)i].group]++;
    }
    for (auto &t : threads) t.join();
    FINE(dc_flight_log(0));
    WANT(missed == 0 && all == THREADS * CALLS && mixed == 0);
    for (auto *g : c) FINE(dc_comm_close(g));
    return "";
  });
}

// ---- files that lie ------------------------------------------------------------------------------------------------
std::string bytes_of(int fd) {
  std::string s;
  char buf[65536];
  for (ssize_t n; (n = pread(fd, buf, sizeof buf, (off_t)s.size())) > 0;) s.append(buf, (size_t)n);
  return s;
}

Record parse_bytes(const std::string &s) {
  FILE *f = tmpfile();
  if (!f || (s.size() && fwrite(s.data(), s.size(), 1, f) != 1) || fflush(f)) abort();
  Record r = parse(fileno(f));
  fclose(f);
  return r;
}

// A record of this process with some groups and calls.
std::string sample() {
  dc_comm *c[3];
  float x = 1;
  for (auto &g : c)
    if (open_group(fresh_address(), 0, 1, &g, "sample")) abort();
  for (int i = 0; i < 30; i++)
    if (dc_all_reduce(c[i % 3], &x, &x, 1, DC_F32, DC_RED_SUM, i)) abort();
  std::string s = bytes_of(dc_flight_fd());
  for (auto *g : c) dc_comm_close(g);
  return s;
}

TEST(FlightFile, WhatIsWrongIsNamed) {
  std::string good = sample();
  ASSERT_EQ(parse_bytes(good).rc, DC_OK) << dc_last_error();
  EXPECT_EQ(parse_bytes("").rc, DC_E_INVALID);
  EXPECT_TRUE(has(dc_last_error(), "is cut: it has 0 bytes")) << dc_last_error();
  EXPECT_EQ(parse_bytes(good.substr(0, 5000)).rc, DC_E_INVALID);
  EXPECT_TRUE(has(dc_last_error(), "is cut: it has 5000 bytes")) << dc_last_error();
  EXPECT_EQ(parse_bytes(std::string(good.size(), 'x')).rc, DC_E_INVALID);
  EXPECT_TRUE(has(dc_last_error(), "no flight record")) << dc_last_error();
  std::string bad = good;
  bad[8] = 9;
  EXPECT_EQ(parse_bytes(bad).rc, DC_E_INVALID);
  EXPECT_TRUE(has(dc_last_error(), "version 9")) << dc_last_error();
  bad = good;
  bad[20] = (char)(bad[20] + 1);
  EXPECT_EQ(parse_bytes(bad).rc, DC_E_INVALID);
  EXPECT_TRUE(has(dc_last_error(), "rows of")) << dc_last_error();
  int64_t n;
  char text[40];
  EXPECT_EQ(dc_flight_parse(-1, nullptr, 0, &n, nullptr, 0), DC_E_SYSTEM);
  EXPECT_EQ(dc_flight_parse(0, nullptr, 1, &n, nullptr, 0), DC_E_INVALID);
  FILE *f = tmpfile();
  ASSERT_EQ(fwrite(good.data(), good.size(), 1, f), 1u);
  fflush(f);
  EXPECT_EQ(dc_flight_parse(fileno(f), nullptr, 0, &n, text, sizeof text), DC_E_SHAPE);
  EXPECT_TRUE(has(dc_last_error(), "needs")) << dc_last_error();
  fclose(f);
}

// Any bytes, and good records with some bytes changed: an error or a record whose fields are in range, never a crash.
TEST(FlightFile, AnyBytesAreAnErrorOrARecord) {
  std::string good = sample();
  std::mt19937_64 random(20240607);
  int fine = 0;
  for (int i = 0; i < 250; i++) {
    std::string s = good;
    int changes = 1 + (int)(random() % 40);
    for (int k = 0; k < changes; k++) {
      // mostly where something is: header, the first rows, the first groups
      static const size_t base[] = {0, 64, 4096, 4096 + 1024 * 128}, span[] = {64, 4032, 30 * 128, 3 * 2176};
      size_t part = random() % 4;
      if (part == 0 && random() % 8) part = 2;
      size_t at = base[part] + random() % span[part];
      s[at] = random() % 2 ? (char)random() : (char)(random() % 2 ? 0xff : 0x80);
    }
    if (random() % 10 == 0) s.resize(random() % s.size());
    Record r = parse_bytes(s);
    if (r.rc) {
      EXPECT_TRUE(r.rc == DC_E_INVALID || r.rc == DC_E_SHAPE) << dc_last_error();
      continue;
    }
    fine++;
    EXPECT_LE(r.rows.size(), (size_t)DC_FLIGHT_CALLS);
    for (auto &row : r.rows) {
      EXPECT_GE(row.group, -1);
      EXPECT_LT(row.group, DC_FLIGHT_GROUPS);
      EXPECT_LT(strnlen(row.where, sizeof row.where), sizeof row.where);
      EXPECT_NE(dc_call_name(row.op), nullptr);
    }
    for (char ch : r.json) EXPECT_TRUE((unsigned char)ch >= 0x20);
  }
  EXPECT_GT(fine, 50);
}

TEST(Flight, NamesOfCalls) {
  EXPECT_STREQ(dc_call_name(DC_CALL_ALL_REDUCE), "all_reduce");
  EXPECT_STREQ(dc_call_name(DC_CALL_RECV), "recv");
  EXPECT_STREQ(dc_call_name(0), "?");
  EXPECT_STREQ(dc_call_name(-1), "?");
  EXPECT_STREQ(dc_call_name(99), "?");
}

} // namespace
