// test_direct.cpp: large collectives where the buffers lie (registered, or through the kernel) give the same bits as
// through the slots (which test_comm.cpp compares with scalar sums), for every op, kind of memory and number of ranks.
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>

#include "comm/comm.h"
#include "ranks.h"

using namespace ranks;

namespace {

struct Closer {
  void operator()(dc_comm *c) const { dc_comm_close(c); }
};
using Comm = std::unique_ptr<dc_comm, Closer>;

std::string open_comm(const std::string &address, int rank, int size, const char *algo, const char *cma, Comm *out) {
  setenv("DEEPC_ALGO", algo, 1);
  setenv("DEEPC_CMA", cma, 1);
  dc_comm_config k = config_of(address.c_str(), rank, size, 3, 64 << 10);
  dc_comm *c = nullptr;
  FINE(dc_comm_open(&k, &c));
  out->reset(c);
  return "";
}

enum Op { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL, ALL_TO_ALLV, REDUCE, GATHER, SCATTER, OPS };
const char *const kNames[OPS] = {"all_reduce",  "reduce_scatter", "all_gather", "broadcast", "all_to_all",
                                 "all_to_allv", "reduce",         "gather",     "scatter"};
const char *const kStaged =
    "all_reduce=staged,reduce_scatter=staged,all_gather=staged,broadcast=staged,all_to_all=staged,"
    "reduce=staged,gather=staged,scatter=staged";
const char *const kDirect =
    "all_reduce=direct,reduce_scatter=direct,all_gather=direct,broadcast=direct,all_to_all=direct,"
    "reduce=direct,gather=direct,scatter=direct";

struct Case {
  Op op;
  int dtype, red, root;
  int64_t count; // of one part
  bool in_place;
  std::vector<int64_t> give, take; // all_to_allv
};

int in_parts(const Case &k, int size) {
  return k.op == REDUCE_SCATTER || k.op == ALL_TO_ALL || k.op == SCATTER ? size : 1;
}
int out_parts(const Case &k, int size) { return k.op == ALL_GATHER || k.op == ALL_TO_ALL || k.op == GATHER ? size : 1; }

int call(dc_comm *c, const Case &k, const void *in, void *out) {
  switch (k.op) {
  case ALL_REDUCE: return dc_all_reduce(c, in, out, k.count, k.dtype, k.red, 0);
  case REDUCE_SCATTER: return dc_reduce_scatter(c, in, out, k.count, k.dtype, k.red, 0);
  case ALL_GATHER: return dc_all_gather(c, in, out, k.count, k.dtype, 0);
  case BROADCAST: return dc_broadcast(c, out, k.count, k.dtype, k.root, 0);
  case ALL_TO_ALL: return dc_all_to_all(c, in, out, k.count, k.dtype, 0);
  case ALL_TO_ALLV: return dc_all_to_allv(c, in, k.give.data(), out, k.take.data(), k.dtype, 0);
  case REDUCE: return dc_reduce_to(c, in, out, k.count, k.dtype, k.red, k.root, 0);
  case GATHER: return dc_gather(c, in, out, k.count, k.dtype, k.root, 0);
  default: return dc_scatter(c, in, out, k.count, k.dtype, k.root, 0);
  }
}

// The same on every rank.
Case draw(std::mt19937 &g, int size, int rank) {
  static const int dtypes[] = {DC_F32, DC_BF16, DC_F16, DC_F64, DC_I8, DC_I32, DC_I64};
  Case k;
  k.op = (Op)(g() % OPS);
  k.dtype = dtypes[g() % 7];
  k.red = (int)(g() % 5);
  if (k.red == DC_RED_AVG && k.dtype > DC_F64) k.red = DC_RED_SUM;
  k.root = (int)(g() % (unsigned)size);
  const int64_t bytes = (int64_t)(g() % 4 == 0 ? g() % 600 : g() % 400000);
  k.count = bytes / (int64_t)dc_dtype_size(k.dtype);
  k.in_place = g() % 2 && (k.op == ALL_REDUCE || k.op == REDUCE || k.op == ALL_GATHER || k.op == BROADCAST);
  std::vector<int64_t> all((size_t)(size * size));
  for (auto &n : all) n = g() % 5 == 0 ? 0 : (int64_t)(g() % (unsigned)(k.count + 1));
  for (int r = 0; r < size; r++) {
    k.give.push_back(all[(size_t)(rank * size + r)]);
    k.take.push_back(all[(size_t)(r * size + rank)]);
  }
  return k;
}

int64_t sum(const std::vector<int64_t> &v) {
  int64_t n = 0;
  for (int64_t x : v) n += x;
  return n;
}

void fill(std::mt19937 &g, unsigned char *p, int64_t n, int dtype) {
  for (int64_t i = 0; i < n; i++) {
    const float x = (float)(int)(g() % 2001 - 1000) / 64;
    const uint32_t bits = [&] {
      uint32_t u;
      memcpy(&u, &x, 4);
      return u;
    }();
    const uint16_t half = (uint16_t)(0x3000 + g() % 0x1000), bf = (uint16_t)(bits >> 16);
    const double d = x;
    const uint64_t whole = g();
    const size_t e = dc_dtype_size(dtype);
    const void *from = dtype == DC_F32    ? (const void *)&x
                       : dtype == DC_F64  ? (const void *)&d
                       : dtype == DC_BF16 ? (const void *)&bf
                       : dtype == DC_F16  ? (const void *)&half
                                          : (const void *)&whole;
    memcpy(p + i * (int64_t)e, from, e);
  }
}

// Runs the case on both communicators with buffers at a, b (direct) and private ones (staged), and compares every byte
// of every out, untouched parts included.
std::string compare(dc_comm *staged, dc_comm *direct, const Case &k, int size, int rank, unsigned char *a,
                    unsigned char *b, uint32_t seed) {
  std::mt19937 g(seed * 64 + (uint32_t)rank);
  const int64_t e = (int64_t)dc_dtype_size(k.dtype);
  const bool v = k.op == ALL_TO_ALLV;
  const int64_t in_bytes = (v ? sum(k.give) : k.count * in_parts(k, size)) * e;
  const int64_t out_bytes = (v ? sum(k.take) : k.count * out_parts(k, size)) * e;
  std::vector<unsigned char> in((size_t)in_bytes + 1), want((size_t)out_bytes + 64, 0xAB);
  fill(g, in.data(), in_bytes / e, k.dtype);
  memset(b, 0xAB, (size_t)out_bytes + 64);
  void *direct_in = a;
  const void *staged_in = in.data();
  memcpy(a, in.data(), (size_t)in_bytes);
  if (k.in_place) { // in is out, or this rank's part of it
    const int64_t at = k.op == ALL_GATHER ? rank * k.count * e : 0;
    memcpy(b + at, in.data(), (size_t)in_bytes);
    memcpy(want.data() + at, in.data(), (size_t)in_bytes);
    direct_in = b + at;
    staged_in = want.data() + at;
  } else if (k.op == BROADCAST && rank == k.root) {
    memcpy(b, in.data(), (size_t)out_bytes);
    memcpy(want.data(), in.data(), (size_t)out_bytes);
  }
  FINE(call(staged, k, staged_in, want.data()));
  FINE(call(direct, k, direct_in, b));
  for (size_t i = 0; i < want.size(); i++)
    WANT(b[i] == want[i], "%s %s red %d root %d count %lld in_place %d seed %u: byte %zu of %lld is %02x, staged %02x",
         kNames[k.op], dc_dtype_name(k.dtype), k.red, k.root, (long long)k.count, k.in_place, seed, i,
         (long long)out_bytes, b[i], want[i]);
  if (!k.in_place) WANT(memcmp(a, in.data(), (size_t)in_bytes) == 0, "%s seed %u wrote its in", kNames[k.op], seed);
  return "";
}

// memory: 0 private everywhere, 1 registered everywhere, 2 each buffer of each rank one or the other.
std::string many(int size, int rank, const std::string &address, const char *algo, const char *cma, int memory,
                 uint32_t seeds) {
  Comm staged, direct;
  std::string failed = open_comm(address + "s", rank, size, kStaged, "1", &staged);
  if (failed.empty()) failed = open_comm(address + "d", rank, size, algo, cma, &direct);
  if (!failed.empty()) return failed;
  const int64_t room = 400000 * (int64_t)size + 4096;
  dc_segment *segment;
  void *base;
  FINE(dc_segment_create(direct.get(), 2 * room * size, &segment, &base));
  unsigned char *registered = (unsigned char *)base + 2 * room * rank;
  std::vector<unsigned char> a((size_t)room), b((size_t)room);
  for (uint32_t seed = 0; seed < seeds; seed++) {
    std::mt19937 g(seed * 7919 + (uint32_t)size);
    const Case k = draw(g, size, rank);
    std::mt19937 own(seed * 31 + (uint32_t)rank);
    const bool a_reg = memory == 1 || (memory == 2 && own() % 2), b_reg = memory == 1 || (memory == 2 && own() % 2);
    std::string s = compare(staged.get(), direct.get(), k, size, rank, a_reg ? registered : a.data(),
                            b_reg ? registered + room : b.data(), seed);
    if (!s.empty()) return s;
  }
  FINE(dc_barrier(direct.get(), 0));
  FINE(dc_segment_free(segment));
  return "";
}

class Direct : public ::testing::TestWithParam<int> {};

TEST_P(Direct, EqualsStagedWhereverTheBuffersLie) {
  const int size = GetParam();
  for (int memory = 0; memory < 3; memory++) {
    SCOPED_TRACE(memory);
    std::string address = fresh_address();
    expect_all_fine(run_ranks(size, [&](int rank) { return many(size, rank, address, kDirect, "1", memory, 24); }));
  }
}

// What the library chooses by itself, trials and changes of mind included.
TEST_P(Direct, EqualsStagedByItsOwnChoice) {
  const int size = GetParam();
  for (const char *cma : {"0", "1"}) {
    SCOPED_TRACE(cma);
    std::string address = fresh_address();
    expect_all_fine(run_ranks(size, [&](int rank) { return many(size, rank, address, "", cma, 2, 48); }));
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Direct, ::testing::Values(2, 3, 4));

TEST(Registered, BytesAreCopiedOnceAndOnlyBetweenRegisteredBuffers) {
  const int64_t n = 1 << 18;
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    Comm c;
    std::string failed = open_comm(address, rank, 2, "", "1", &c);
    if (!failed.empty()) return failed;
    dc_segment *segment;
    void *base;
    FINE(dc_segment_create(c.get(), 2 * n * 4, &segment, &base));
    float *mine = (float *)base + rank * n;
    for (int64_t i = 0; i < n; i++) mine[i] = (float)(i % 1000 + rank);
    dc_counter_reset();
    FINE(dc_all_reduce(c.get(), mine, mine, n, DC_F32, DC_RED_SUM, 0));
    for (int64_t i = 0; i < n; i++) WANT(mine[i] == (float)(2 * (i % 1000) + 1), "element %lld", (long long)i);
    WANT(dc_counter_get(DC_COUNTER_coll_bytes_mapped) == n / 2 * 4, "%lld bytes",
         (long long)dc_counter_get(DC_COUNTER_coll_bytes_mapped));
    WANT(dc_counter_get(DC_COUNTER_coll_bytes_in) == 0 && dc_counter_get(DC_COUNTER_coll_bytes_out) == 0, "staged");
    WANT(dc_counter_get(DC_COUNTER_coll_bytes_single_copy) == 0, "single copy");
    FINE(dc_barrier(c.get(), 0));
    FINE(dc_segment_free(segment));
    // freed on this rank: private memory takes over, and the result is the same
    std::vector<float> x((size_t)n, (float)rank);
    FINE(dc_all_reduce(c.get(), x.data(), x.data(), n, DC_F32, DC_RED_SUM, 0));
    WANT(x[0] == 1 && x[(size_t)n - 1] == 1, "after the segment was freed");
    return "";
  }));
}

// A segment that one rank has dropped is no registered buffer any more for the others, but no error either.
TEST(Registered, ASegmentThatOneRankFreedIsPrivateMemory) {
  const int64_t n = 1 << 17;
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    Comm c;
    std::string failed = open_comm(address, rank, 2, "", "1", &c);
    if (!failed.empty()) return failed;
    dc_segment *segment;
    void *base;
    FINE(dc_segment_create(c.get(), n * 4, &segment, &base));
    std::vector<float> own((size_t)n, 2);
    float *x = rank == 0 ? (float *)base : own.data();
    for (int64_t i = 0; i < n; i++) x[i] = 2;
    if (rank == 1) FINE(dc_segment_free(segment));
    FINE(dc_all_reduce(c.get(), x, x, n, DC_F32, DC_RED_SUM, 0));
    for (int64_t i = 0; i < n; i++) WANT(x[i] == 4, "element %lld is %f", (long long)i, x[i]);
    if (rank == 0) FINE(dc_segment_free(segment));
    return "";
  }));
}

// ---- when buffers belong to their owners again
// ----------------------------------------------------------------------- What the ranks of a test share with each
// other.
struct Board {
  std::atomic<int> pid[4], ready;
};
struct SharedBoard {
  SharedBoard() : b((Board *)mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~SharedBoard() { munmap(b, sizeof *b); }
  Board *operator->() const { return b; }
  Board *b;
};

// Rank 0 stops its peer in the middle of a call, aborts, and lets the peer go on later. What its failed call has given
// back must stay as rank 0 then writes it.
std::string abort_in_the_middle(const std::string &address, const Board *board, int rank, bool registered, int after_us,
                                bool *failed) {
  Comm c;
  std::string open = open_comm(address, rank, 2, registered ? "" : "all_reduce=direct", "1", &c);
  if (!open.empty()) return open;
  const int64_t n = 4 << 20;
  dc_segment *segment = nullptr;
  void *base = nullptr;
  if (registered) FINE(dc_segment_create(c.get(), 2 * n * 4, &segment, &base));
  std::vector<float> own(registered ? 0 : (size_t)n, 1);
  float *x = registered ? (float *)base + rank * n : own.data();
  for (int64_t i = 0; i < n; i++) x[i] = 1;
  FINE(dc_barrier(c.get(), 0));
  std::thread t;
  if (rank == 0)
    t = std::thread([&] {
      usleep((useconds_t)after_us);
      kill(board->pid[1], SIGSTOP);
      usleep(1000);
      dc_comm_abort(c.get(), "the test gave up");
      usleep(15000);
      kill(board->pid[1], SIGCONT);
    });
  const int rc = dc_all_reduce(c.get(), x, x, n, DC_F32, DC_RED_SUM, 0);
  *failed = rc != DC_OK;
  int64_t bad = 0;
  if (rank == 0) {
    for (int64_t i = 0; i < n; i++) x[i] = -7;
    t.join();
    nap_ms(25);
    for (int64_t i = 0; i < n; i++) bad += x[i] != -7;
  }
  FINE(dc_segment_free(segment));
  WANT(rc == DC_OK || rc == DC_E_ABORTED, "%s: %s", dc_status_name(rc), dc_last_error());
  WANT(bad == 0, "%lld elements were written after the call had returned", (long long)bad);
  return "";
}

TEST(Failed, NoPeerWritesAfterACallHasReturned) {
  for (bool registered : {false, true}) {
    SCOPED_TRACE(registered);
    SharedBoard board;
    std::string address = fresh_address();
    expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
      board->pid[rank] = getpid();
      int failures = 0;
      for (int i = 0; i < 20; i++) {
        bool failed = false;
        std::string s = abort_in_the_middle(fmt("%s-%d", address.c_str(), i), board.b, rank, registered, i % 10 * 150,
                                            &failed);
        if (!s.empty()) return fmt("round %d: ", i) + s;
        failures += failed;
      }
      WANT(rank || failures > 0, "no call was slow enough to fail");
      return "";
    }));
  }
}

// A peer that is never heard of again holds up the error for the time-out, and the text says what that means. "missed":
// it was stopped before it had begun to work, or was through.
std::string stop_for_good(const std::string &address, Board *board, int rank, int after_us) {
  setenv("DEEPC_ALGO", "all_reduce=direct", 1);
  setenv("DEEPC_CMA", "1", 1);
  dc_comm_config k = config_of(address.c_str(), rank, 2, 3, 64 << 10, 2000);
  dc_comm *c = nullptr;
  FINE(dc_comm_open(&k, &c));
  Comm close_it(c);
  std::vector<float> x(16 << 20, 1);
  FINE(dc_barrier(c, 0));
  std::thread t;
  if (rank == 0)
    t = std::thread([&] {
      usleep((useconds_t)after_us);
      kill(board->pid[1], SIGSTOP);
      dc_comm_abort(c, "the test gave up");
    });
  const int rc = dc_all_reduce(c, x.data(), x.data(), (int64_t)x.size(), DC_F32, DC_RED_SUM, 0);
  const std::string text = dc_last_error();
  if (rank == 0) {
    t.join();
    kill(board->pid[1], SIGKILL);
  }
  if (rc == DC_OK) return "missed";
  WANT(rc == DC_E_ABORTED, "%s: %s", dc_status_name(rc), text.c_str());
  WANT(text.find("the test gave up") != std::string::npos, "%s", text.c_str());
  const std::string named = fmt("rank 1 (pid %d) was stopped within this call", board->pid[1].load());
  return text.find(named) != std::string::npos ? "" : "missed";
}

TEST(Failed, APeerThatIsStoppedForTooLongIsNamed) {
  SharedBoard board;
  std::string said = "missed";
  for (int i = 0; i < 20 && said == "missed"; i++) {
    std::string address = fresh_address();
    std::vector<Outcome> out = run_ranks(2, [&](int rank) -> std::string {
      board->pid[rank] = getpid();
      return stop_for_good(address, board.b, rank, 1000 + i * 1500);
    });
    said = out[0].text;
  }
  EXPECT_EQ(said, "");
}

// A segment that is freed in another thread while a call of this rank copies out of it.
TEST(Registered, ASegmentFreedDuringACallStaysMappedForIt) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    Comm c;
    std::string failed = open_comm(address, rank, 2, "", "1", &c);
    if (!failed.empty()) return failed;
    const int64_t n = 1 << 20;
    std::vector<float> own((size_t)n);
    for (int round = 0; round < 40; round++) {
      dc_segment *segment;
      void *base;
      FINE(dc_segment_create(c.get(), n * 4, &segment, &base));
      float *x = rank == 0 ? (float *)base : own.data();
      for (int64_t i = 0; i < n; i++) x[i] = rank == 0 ? (float)(round + i % 100) : -1.0f;
      std::thread t;
      if (rank == 1)
        t = std::thread([&] {
          usleep((useconds_t)(round * 37 % 1500));
          dc_segment_free(segment);
        });
      FINE(dc_broadcast(c.get(), x, n, DC_F32, 0, 0));
      if (rank == 1) t.join();
      for (int64_t i = 0; i < n; i++)
        WANT(x[i] == (float)(round + i % 100), "round %d: element %lld", round, (long long)i);
      FINE(dc_barrier(c.get(), 0));
      if (rank == 0) FINE(dc_segment_free(segment));
    }
    return "";
  }));
}

// Python's threading.stack_size(256k) and smaller.
TEST(Direct1, AThreadWithASmallStackMayCall) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    struct Call {
      Comm c;
      std::vector<float> x;
      int rc;
    } call;
    std::string failed = open_comm(address, rank, 2, kDirect, "1", &call.c);
    if (!failed.empty()) return failed;
    call.x.assign(1 << 20, 1.5f);
    pthread_attr_t a;
    pthread_t t;
    pthread_attr_init(&a);
    pthread_attr_setstacksize(&a, 192 << 10);
    auto body = [](void *p) -> void * {
      Call *k = (Call *)p;
      k->rc = dc_all_reduce(k->c.get(), k->x.data(), k->x.data(), (int64_t)k->x.size(), DC_F32, DC_RED_SUM, 0);
      return nullptr;
    };
    WANT(pthread_create(&t, &a, body, &call) == 0, "pthread_create");
    pthread_join(t, nullptr);
    pthread_attr_destroy(&a);
    WANT(call.rc == DC_OK && call.x[0] == 3 && call.x.back() == 3, "%s", dc_status_name(call.rc));
    return "";
  }));
}

TEST(Forced, AnUnknownRowNamesTheKnownOnes) {
  setenv("DEEPC_ALGO", "all_reduce=ring", 1);
  std::string address = fresh_address();
  dc_comm_config k = config_of(address.c_str(), 0, 1);
  dc_comm *c = nullptr;
  EXPECT_EQ(dc_comm_open(&k, &c), DC_E_ENV);
  EXPECT_NE(strstr(dc_last_error(), "all_reduce=two_phase"), nullptr) << dc_last_error();
  unsetenv("DEEPC_ALGO");
}

TEST(Forced, DifferentRowsOnTwoRanksAreTold) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    Comm c;
    std::string failed = open_comm(address, rank, 2, rank ? "all_reduce=two_phase" : "all_reduce=staged", "1", &c);
    if (!failed.empty()) return failed;
    std::vector<float> x(100000);
    int rc = dc_all_reduce(c.get(), x.data(), x.data(), 100000, DC_F32, DC_RED_SUM, 0);
    WANT(rc == DC_E_MISMATCH, "gave %s: %s", dc_status_name(rc), dc_last_error());
    WANT_TEXT("all_reduce(fp32, count 100000, sum)");
    return "";
  }));
}

TEST(AllToAllV, CountsThatDisagreeNameBothRanks) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    Comm c;
    std::string failed = open_comm(address, rank, 2, "", "1", &c);
    if (!failed.empty()) return failed;
    std::vector<float> in(10), out(10);
    const int64_t give[2] = {3, 4}, take[2] = {rank ? 4 : 3, rank ? 4 : 5}; // rank 1 gives 3 to rank 0, which takes 5
    int rc = dc_all_to_allv(c.get(), in.data(), give, out.data(), take, DC_F32, 0);
    WANT(rc == DC_E_MISMATCH, "gave %s: %s", dc_status_name(rc), dc_last_error());
    WANT(strstr(dc_last_error(), "rank 1 sends 3 elements to rank 0, which expects 5"), "%s", dc_last_error());
    return "";
  }));
}

TEST(AllToAllV, OneRankThatExpectsOtherThanItSendsIsTold) {
  Comm c;
  ASSERT_EQ(open_comm(fresh_address(), 0, 1, "", "1", &c), "");
  std::vector<float> in(8, 1.0f), out(8, 7.0f);
  for (int64_t give : {8, 1}) {
    const int64_t take = 2;
    EXPECT_EQ(dc_all_to_allv(c.get(), in.data(), &give, out.data(), &take, DC_F32, 0), DC_E_MISMATCH);
    EXPECT_NE(strstr(dc_last_error(), "elements to itself and expects 2"), nullptr) << dc_last_error();
  }
  EXPECT_EQ(out, std::vector<float>(8, 7.0f));
  const int64_t same = 3;
  EXPECT_EQ(dc_all_to_allv(c.get(), in.data(), &same, out.data(), &same, DC_F32, 0), DC_OK) << dc_last_error();
  EXPECT_EQ(out[2], 1.0f);
  EXPECT_EQ(out[3], 7.0f);
}

}  // namespace
