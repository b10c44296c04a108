// test_team.cpp: groups whose ranks wait in teams (comm/team.h): the same bits and the same errors as without. Teams
// are forced by DEEPC_TEAM, so that few ranks do; rank 0 says for all.
#include <gtest/gtest.h>

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "comm/p2p.h"
#include "ranks.h"

using namespace ranks;

namespace {

int open_group(const std::string &address, int rank, int size, int team, dc_comm **c, int timeout_ms = 60000,
               int slots = 3, int64_t slot_bytes = 16384) {
  setenv("DEEPC_TEAM", std::to_string(team).c_str(), 1);
  const dc_comm_config k = config_of(address.c_str(), rank, size, slots, slot_bytes, timeout_ms);
  const int rc = dc_comm_open(&k, c);
  unsetenv("DEEPC_TEAM");
  return rc;
}

struct Shape {
  int size, team;
};

void PrintTo(const Shape &s, std::ostream *os) { *os << s.size << " ranks in teams of " << s.team; }

// body(rank, c) on each rank of a group in teams. Who returns a text keeps its communicator.
template <class Body> auto run_teams(const Shape &s, Body body) {
  const std::string address = fresh_address();
  return run_ranks(s.size, [&](int rank) -> std::string {
    dc_comm *c = nullptr;
    FINE(open_group(address, rank, s.size, s.team, &c));
    const std::string said = body(rank, c);
    if (!said.empty()) return said;
    FINE(dc_comm_close(c));
    return "";
  });
}

template <class Outcomes> void expect_survivors_fine(const Outcomes &out, int dead, const std::string &when) {
  for (int r = 0; r < (int)out.size(); r++)
    if (r != dead) EXPECT_EQ(out[(size_t)r].text, "") << "rank " << r << ", " << when;
}

dc_call call_of(int op) {
  dc_call call;
  memset(&call, 0, sizeof call);
  call.op = op;
  return call;
}

class Teams : public testing::TestWithParam<Shape> {};
// DEEPC_TEST_FULL=1 (scripts/test full): the shapes between.
std::vector<Shape> shapes() {
  const char *full = getenv("DEEPC_TEST_FULL");
  if (!full || strcmp(full, "1")) return {Shape{3, 2}, Shape{5, 3}, Shape{7, 2}};
  return {Shape{3, 2}, Shape{4, 2}, Shape{4, 3}, Shape{5, 2}, Shape{5, 3}, Shape{6, 3}, Shape{7, 2}, Shape{7, 3}};
}
INSTANTIATE_TEST_SUITE_P(Forced, Teams, testing::ValuesIn(shapes()));

// ---- bits ----------------------------------------------------------------------------------------------------------
// Floats of many magnitudes, so that another order of summation gives other bits. Of 16-bit floats only the exponents
// of small numbers are used.
std::vector<char> values(int dtype, int64_t count, uint64_t seed) {
  std::vector<char> out(dc_dtype_size(dtype) * (size_t)count + (count == 0)); // data() is never NULL
  uint64_t s = seed * 0x9e3779b97f4a7c15u + 1;
  for (int64_t i = 0; i < count; i++) {
    s = s * 6364136223846793005u + 1442695040888963407u;
    const uint64_t bits = s >> 20;
    char *p = out.data() + i * (int64_t)dc_dtype_size(dtype);
    if (dtype == DC_F32) {
      const float f = (float)(int64_t)(bits % 2000001) * (bits % 3 ? 1e-3f : 1e4f) - 1000;
      memcpy(p, &f, sizeof f);
    } else if (dtype == DC_F64) {
      const double f = (double)(int64_t)(bits % 2000001) * (bits % 3 ? 1e-9 : 1e7) - 1000;
      memcpy(p, &f, sizeof f);
    } else if (dtype == DC_F16 || dtype == DC_BF16) {
      const uint16_t h = (uint16_t)(bits & 0xbfff & (dtype == DC_F16 ? 0xabff : 0xbeff));
      memcpy(p, &h, sizeof h);
    } else {
      memcpy(p, &bits, dc_dtype_size(dtype));
    }
  }
  return out;
}

struct Call {
  dc_comm *c;
  int size, dtype;
  int64_t n;
  const char *in; // of size * n
  char *out;
};

// Every collective; *out grows by what each of them gave.
std::string every_call(const Call &k, int rank, std::vector<char> *all) {
  const size_t part = dc_dtype_size(k.dtype) * (size_t)k.n, whole = part * (size_t)k.size;
  const auto keep = [&](size_t bytes) { all->insert(all->end(), k.out, k.out + bytes); };
  FINE(dc_barrier(k.c, 3));
  for (int op : {DC_RED_SUM, DC_RED_MAX}) {
    FINE(dc_all_reduce(k.c, k.in, k.out, k.n, k.dtype, op, 0));
    keep(part);
    memcpy(k.out, k.in, part); // in place
    FINE(dc_all_reduce(k.c, k.out, k.out, k.n, k.dtype, op, 0));
    keep(part);
    FINE(dc_reduce_scatter(k.c, k.in, k.out, k.n, k.dtype, op, 0));
    keep(part);
    for (int root = 0; root < k.size; root++) {
      FINE(dc_reduce_to(k.c, k.in, rank == root ? k.out : nullptr, k.n, k.dtype, op, root, 0));
      if (rank == root) keep(part);
    }
  }
  FINE(dc_all_gather(k.c, k.in, k.out, k.n, k.dtype, 0));
  keep(whole);
  FINE(dc_all_to_all(k.c, k.in, k.out, k.n, k.dtype, 0));
  keep(whole);
  std::vector<int64_t> give((size_t)k.size), take((size_t)k.size);
  for (int r = 0; r < k.size; r++) give[(size_t)r] = (rank + r) % 2 ? k.n : k.n / 2, take[(size_t)r] = give[(size_t)r];
  memset(k.out, 0, whole);
  FINE(dc_all_to_allv(k.c, k.in, give.data(), k.out, take.data(), k.dtype, 0));
  keep(whole);
  for (int root = 0; root < k.size; root++) {
    memset(k.out, 0, whole);
    FINE(dc_gather(k.c, k.in, k.out, k.n, k.dtype, root, 0));
    if (rank == root) keep(whole);
    FINE(dc_scatter(k.c, k.in, k.out, k.n, k.dtype, root, 0));
    keep(part);
    if (rank == root) memcpy(k.out, k.in, part);
    FINE(dc_broadcast(k.c, k.out, k.n, k.dtype, root, 0));
    keep(part);
  }
  return "";
}

std::string equal_bits(const std::string &address, int rank, int size, int team) {
  dc_comm *with = nullptr, *without = nullptr;
  FINE(open_group(address + "-t", rank, size, team, &with));
  FINE(open_group(address + "-f", rank, size, 0, &without));
  for (int dtype : {DC_F32, DC_BF16, DC_F16, DC_F64, DC_I8, DC_I32, DC_I64}) {
    for (int64_t n : {0, 1, 2, 4, 5, 33, 700, 6000}) {
      const std::vector<char> in = values(dtype, n * size, (uint64_t)(rank + 1) * 1000 + (uint64_t)n);
      std::vector<char> out(in.size() + 1), a, b;
      const std::string one = every_call({with, size, dtype, n, in.data(), out.data()}, rank, &a);
      if (!one.empty()) return one;
      memset(out.data(), 0, out.size());
      const std::string two = every_call({without, size, dtype, n, in.data(), out.data()}, rank, &b);
      if (!two.empty()) return two;
      WANT(a == b, "%s, count %lld", dc_dtype_name(dtype), (long long)n);
    }
  }
  FINE(dc_comm_close(with));
  FINE(dc_comm_close(without));
  return "";
}

TEST_P(Teams, GiveTheBitsOfAGroupWithoutTeams) {
  const Shape s = GetParam();
  const std::string address = fresh_address();
  expect_all_fine(run_ranks(s.size, [&](int rank) { return equal_bits(address, rank, s.size, s.team); }));
}

// As a group that is larger than a team makes them, where each rank has a core.
TEST(TeamsOfEight, GiveTheBitsOfAGroupWithoutTeams) {
  const std::string address = fresh_address();
  expect_all_fine(run_ranks(11, [&](int rank) -> std::string {
    dc_comm *c = nullptr, *flat = nullptr;
    FINE(open_group(address, rank, 11, 8, &c));
    FINE(open_group(address + "-f", rank, 11, 0, &flat));
    for (int64_t n : {1, 4, 5, 700, 9000}) {
      const std::vector<char> in = values(DC_F32, n * 11, (uint64_t)rank + 7);
      std::vector<char> out(in.size() + 1), a, b;
      std::string said = every_call({c, 11, DC_F32, n, in.data(), out.data()}, rank, &a);
      memset(out.data(), 0, out.size());
      said += every_call({flat, 11, DC_F32, n, in.data(), out.data()}, rank, &b);
      if (!said.empty()) return said;
      WANT(a == b, "count %lld", (long long)n);
    }
    FINE(dc_comm_close(c));
    FINE(dc_comm_close(flat));
    return "";
  }));
}

// Often around the ring of cells, with calls for which some run ahead in between.
TEST_P(Teams, ManySmallCallsInARow) {
  const Shape s = GetParam();
  expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
    for (int i = 0; i < 1500; i++) {
      int64_t mine[2] = {rank * 1000 + i, i}, sum[2] = {0, 0};
      FINE(dc_all_reduce(c, mine, sum, 1 + i % 2, DC_I64, DC_RED_SUM, 0));
      WANT(sum[0] == 500ll * s.size * (s.size - 1) + (int64_t)i * s.size, "step %d: %lld", i, (long long)sum[0]);
      if (i % 2) WANT(sum[1] == (int64_t)i * s.size, "step %d", i);
      int64_t told = rank == i % s.size ? i : -1;
      if (i % 3 == 0) FINE(dc_broadcast(c, &told, 1, DC_I64, i % s.size, 0));
      if (i % 3 == 0) WANT(told == i, "%lld in step %d", (long long)told, i);
      if (i % 5 == 0) FINE(dc_reduce_to(c, mine, sum, 1, DC_I64, DC_RED_MAX, i % s.size, 0));
      if (i % 7 == 0) FINE(dc_barrier(c, 0));
    }
    return "";
  }));
}

// ---- errors --------------------------------------------------------------------------------------------------------
// Who is wrong in turn: each rank, so members and leaders.
TEST_P(Teams, AMismatchNamesBothCallsOnAllRanks) {
  const Shape s = GetParam();
  for (int wrong = 0; wrong < s.size; wrong++) {
    expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
      float in[4] = {1, 2, 3, 4}, out[4];
      for (int i = 0; i < 3; i++) FINE(dc_all_reduce(c, in, out, 4, DC_F32, DC_RED_SUM, 0));
      if (rank == wrong) WANT_STATUS(DC_E_MISMATCH, dc_all_reduce(c, in, out, 3, DC_F32, DC_RED_SUM, 0));
      else WANT_STATUS(DC_E_MISMATCH, dc_barrier(c, 9));
      WANT_TEXT("all_reduce(fp32, count 3, sum)");
      WANT_TEXT("barrier(tag 9)");
      WANT_TEXT(fmt("rank %d", wrong).c_str());
      return "";
    }));
  }
}

TEST_P(Teams, AMismatchIsToldBeforeTheLastRankArrives) {
  const Shape s = GetParam();
  if (s.size < 4) return;
  const int late = s.size - 1, wrong = 1;
  expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
    if (rank == late) {
      while (!dc_comm_error(c)[0]) nap_ms(1);
      WANT(strstr(dc_comm_error(c), "barrier(tag 2)"), "%s", dc_comm_error(c));
    } else {
      WANT_STATUS(DC_E_MISMATCH, dc_barrier(c, rank == wrong ? 2 : 1));
    }
    return "";
  }));
}

TEST_P(Teams, ADeathIsDiagnosedOnAllSurvivors) {
  const Shape s = GetParam();
  for (int dead = 0; dead < s.size; dead++) {
    const auto out = run_teams(s, [&](int rank, dc_comm *c) -> std::string {
      float in[2] = {1, 2}, sum[2];
      for (int i = 0; i < 5; i++) FINE(dc_all_reduce(c, in, sum, 2, DC_F32, DC_RED_SUM, 0));
      if (rank == dead) raise(SIGKILL);
      const double began = now();
      WANT_STATUS(DC_E_PEER_DIED, dc_all_reduce(c, in, sum, 2, DC_F32, DC_RED_SUM, 0));
      WANT_TEXT(fmt("rank %d (pid", dead).c_str());
      WANT_TEXT("waits for it in all_reduce(fp32, count 2, sum)");
      WANT(now() - began < 30, "%g s: the time-out", now() - began);
      return "";
    });
    expect_survivors_fine(out, dead, "dead " + std::to_string(dead));
  }
}

// At any moment of a row of calls, also between a leader's arrival and its word.
TEST_P(Teams, ADeathAtAnyMomentEndsEveryWait) {
  const Shape s = GetParam();
  for (int i = 0; i < 10; i++) {
    const int dead = i % s.size;
    const auto out = run_teams(s, [&](int rank, dc_comm *c) -> std::string {
      FINE(dc_barrier(c, 0));
      if (rank == dead && fork() == 0) {
        usleep((useconds_t)(i * 300));
        kill(getppid(), SIGKILL);
        _exit(0);
      }
      int64_t one = 1, sum = 0;
      int rc = DC_OK;
      while (rc == DC_OK) {
        rc = dc_all_reduce(c, &one, &sum, 1, DC_I64, DC_RED_SUM, 0);
        if (rc == DC_OK) WANT(sum == s.size, "%lld", (long long)sum);
      }
      WANT(rc == DC_E_PEER_DIED, "%s", dc_last_error());
      WANT_TEXT(fmt("rank %d (pid", dead).c_str());
      return "";
    });
    expect_survivors_fine(out, dead, "round " + std::to_string(i));
  }
}

TEST_P(Teams, ATimeOutNamesWhoIsMissing) {
  const Shape s = GetParam();
  for (int missing : {0, 1, s.size - 1}) {
    expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
      FINE(dc_comm_set_timeout(c, 300));
      if (rank == missing) {
        while (!dc_comm_error(c)[0]) nap_ms(1);
      } else {
        WANT_STATUS(DC_E_TIMEOUT, dc_barrier(c, 4));
        WANT_TEXT(fmt("rank %d did not arrive", missing).c_str());
      }
      return "";
    }));
  }
}

TEST_P(Teams, WhoLeavesAndWhoAbortsIsTold) {
  const Shape s = GetParam();
  for (bool leaves : {true, false}) {
    expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
      int rc = dc_barrier(c, 0); // of which some have not returned when rank 0 aborts
      if (rank == 0 && !leaves) FINE(dc_comm_abort(c, "on purpose"));
      if (rank != 0) {
        if (rc == DC_OK) rc = dc_barrier(c, 0);
        WANT(rc == (leaves ? DC_E_PEER_DIED : DC_E_ABORTED), "%s", dc_last_error());
        WANT_TEXT(leaves ? "left the group" : "on purpose");
      }
      return "";
    }));
  }
}

// ---- without a leader ----------------------------------------------------------------------------------------------
// The leaders post what a barrier posts, and then do not look at it: nobody says `go`. The cells say it.
TEST_P(Teams, MembersGoOnWhereLeadersAreBusy) {
  const Shape s = GetParam();
  const std::string address = fresh_address();
  expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
    dc_comm *flat = nullptr;
    FINE(open_group(address + "-f", rank, s.size, 0, &flat));
    const dc_call call = call_of(DC_CALL_BARRIER);
    for (int i = 0; i < 5; i++) {
      int64_t step = 0;
      void *slot;
      if (rank % s.team == 0) {
        FINE(dc_exchange_begin(c, &step, &slot));
        FINE(dc_exchange_post(c, &call));
        FINE(dc_barrier(flat, 0)); // all others are through the step
        FINE(dc_exchange_wait(c, step));
        FINE(dc_exchange_done(c, step));
      } else {
        FINE(dc_barrier(c, 0));
        FINE(dc_barrier(flat, 0));
      }
      int64_t one = 1, sum = 0;
      FINE(dc_all_reduce(c, &one, &sum, 1, DC_I64, DC_RED_SUM, 0));
      WANT(sum == s.size, "%lld", (long long)sum);
    }
    FINE(dc_comm_close(flat));
    return "";
  }));
}

// A step that all have posted is whole, also where somebody aborts before a leader has said so.
TEST_P(Teams, AnAbortBehindAWholeStepDoesNotUndoIt) {
  const Shape s = GetParam();
  expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
    const dc_call call = call_of(DC_CALL_BARRIER);
    if (rank == 0) { // says nothing to its team, and aborts as soon as all are there
      int64_t step = 0;
      void *slot;
      FINE(dc_exchange_begin(c, &step, &slot));
      FINE(dc_exchange_post(c, &call));
      for (int ready = 0; !ready; sched_yield()) FINE(dc_exchange_test(c, step, &ready));
      FINE(dc_comm_abort(c, "on purpose"));
    } else {
      FINE(dc_barrier(c, 0));
      WANT_STATUS(DC_E_ABORTED, dc_barrier(c, 0));
    }
    return "";
  }));
}

// A leader that has posted its step and died has given what others wait for; the next call tells of its death.
TEST_P(Teams, WhatADeadLeaderPostedCounts) {
  const Shape s = GetParam();
  const auto out = run_teams(s, [&](int rank, dc_comm *c) -> std::string {
    const dc_call call = call_of(DC_CALL_BARRIER);
    int64_t step = 0;
    void *slot;
    if (rank == 0) {
      FINE(dc_exchange_begin(c, &step, &slot));
      FINE(dc_exchange_post(c, &call));
      raise(SIGKILL);
    }
    FINE(dc_barrier(c, 0));
    WANT_STATUS(DC_E_PEER_DIED, dc_barrier(c, 0));
    WANT_TEXT("rank 0 (pid");
    return "";
  });
  EXPECT_TRUE(out[0].killed());
  expect_survivors_fine(out, 0, "dead 0");
}

TEST_P(Teams, StepsOfTheExchangeAreTestedBesideCalls) {
  const Shape s = GetParam();
  expect_all_fine(run_teams(s, [&](int rank, dc_comm *c) -> std::string {
    dc_call call = call_of(DC_CALL_USER);
    for (int i = 0; i < 100; i++) { // more than there are cells
      int64_t step[2];
      void *slot;
      for (int k = 0; k < 2; k++) {
        FINE(dc_exchange_begin(c, &step[k], &slot));
        memcpy(slot, &i, sizeof i);
        call.tag = i + k;
        FINE(dc_exchange_post(c, &call));
      }
      for (int k = 0; k < 2; k++) {
        for (int ready = 0; !ready; sched_yield()) FINE(dc_exchange_test(c, step[k], &ready));
        for (int r = 0; r < s.size; r++) WANT(*(const int *)dc_exchange_peer(c, r, step[k]) == i, "rank %d", r);
        FINE(dc_exchange_done(c, step[k]));
      }
      if (i % 4 == rank % 4) usleep(50);
      FINE(dc_barrier(c, i));
    }
    return "";
  }));
}

// ---- the variable --------------------------------------------------------------------------------------------------
TEST(TeamVariable, IsChecked) {
  for (const char *bad : {"1", "-2", "x", "3x", "257", ""}) {
    setenv("DEEPC_TEAM", bad, 1);
    const std::string address = fresh_address();
    const dc_comm_config k = config_of(address.c_str(), 0, 1);
    dc_comm *c = nullptr;
    const int rc = dc_comm_open(&k, &c);
    EXPECT_EQ(rc, bad[0] ? DC_E_ENV : DC_OK) << bad;
    if (bad[0]) EXPECT_NE(strstr(dc_last_error(), fmt("DEEPC_TEAM=%s", bad).c_str()), nullptr) << dc_last_error();
    dc_comm_close(c);
  }
  unsetenv("DEEPC_TEAM");
}

// ---- memory --------------------------------------------------------------------------------------------------------
// Pages of the arena that are there, whoever brought them.
int64_t arena_pages() {
  FILE *f = fopen("/proc/self/maps", "r");
  char line[512];
  int64_t pages = 0;
  while (f && fgets(line, sizeof line, f)) {
    unsigned long begin, end;
    if (!strstr(line, "memfd:deepc") || sscanf(line, "%lx-%lx", &begin, &end) != 2) continue;
    std::vector<unsigned char> there((end - begin) / (unsigned long)sysconf(_SC_PAGESIZE));
    if (mincore((void *)begin, end - begin, there.data())) continue;
    for (unsigned char x : there) pages += x & 1;
  }
  if (f) fclose(f);
  return pages;
}

// 400 rings of 8 KiB, of which none has carried a message.
TEST(LargeGroup, RingsAreMadeByTheirFirstMessage) {
  const int size = 20;
  const std::string address = fresh_address();
  expect_all_fine(run_ranks(size, [&](int rank) -> std::string {
    dc_comm *c = nullptr;
    const dc_comm_config k = config_of(address.c_str(), rank, size);
    const int64_t rings = (int64_t)size * size * 8192 / sysconf(_SC_PAGESIZE);
    int64_t number = 7;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    const int64_t before = arena_pages();
    WANT(before < rings / 2, "%lld pages after opening, the rings are %lld", (long long)before, (long long)rings);
    FINE(dc_barrier(c, 0));
    if (rank == 3) FINE(dc_send(c, &number, 1, DC_I64, 5, 0));
    if (rank == 5) FINE(dc_recv(c, &number, 1, DC_I64, 3, 0, nullptr));
    FINE(dc_barrier(c, 0));
    const int64_t after = arena_pages();
    WANT(after > before && after <= before + 4, "%lld and %lld pages", (long long)before, (long long)after);
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    return "";
  }));
}

// ---- messages where opening brought no rings ---------------------------------------------------------------------
TEST(LargeGroup, AnyTwoRanksMayTalk) {
  const int size = 10;
  const std::string address = fresh_address();
  expect_all_fine(run_ranks(size, [&](int rank) -> std::string {
    dc_comm *c = nullptr;
    const dc_comm_config k = config_of(address.c_str(), rank, size);
    FINE(dc_comm_open(&k, &c));
    for (int64_t n : {1, 100, 20000}) {
      std::vector<int32_t> mine((size_t)n, rank), theirs((size_t)n * (size_t)size);
      std::vector<dc_request *> all;
      for (int i = 1; i < size; i++) {
        const int peer = (rank + i) % size;
        dc_request *r = nullptr;
        FINE(dc_irecv(c, &theirs[(size_t)n * (size_t)peer], n, DC_I32, peer, n, "", &r));
        all.push_back(r);
        FINE(dc_isend(c, mine.data(), n, DC_I32, peer, n, "", &r));
        all.push_back(r);
      }
      for (dc_request *r : all) FINE(dc_request_wait(r, 0));
      for (dc_request *r : all) FINE(dc_request_free(r));
      for (int r = 0; r < size; r++)
        for (int64_t i = 0; i < n && r != rank; i++) WANT(theirs[(size_t)(r * n + i)] == r, "from %d", r);
      if (rank == 0) { // and from whoever comes first
        for (int i = 1; i < size; i++) {
          int32_t got = 0;
          int source = -1;
          FINE(dc_recv(c, &got, 1, DC_I32, DC_ANY_SOURCE, 5, &source));
          WANT(got == source, "%d from %d", got, source);
        }
      } else {
        FINE(dc_send(c, &rank, 1, DC_I32, 0, 5));
      }
    }
    FINE(dc_comm_close(c));
    return "";
  }));
}

} // namespace
