// test_p2p.cpp: messages between forked ranks (comm/p2p.h), with single copies and through the rings alone.
#include <sys/prctl.h>
#include <sys/time.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <random>
#include <thread>

#include "comm/p2p.h"
#include "ranks.h"

using namespace ranks;

namespace {

const int64_t kLarge = 300000; // a rendezvous of some ring fulls, for any number of ranks here

void set_cma(bool on) { setenv("DEEPC_CMA", on ? "1" : "0", 1); }

struct CommCloser {
  void operator()(dc_comm *c) const { dc_comm_close(c); }
};
struct RequestFreer {
  void operator()(dc_request *r) const { dc_request_free(r); }
};
using Comm = std::unique_ptr<dc_comm, CommCloser>;
using Request = std::unique_ptr<dc_request, RequestFreer>;

// A buffer with guards, so that a byte too many shows without a sanitizer as well.
struct Buffer {
  explicit Buffer(int64_t bytes) : n((size_t)bytes), v((size_t)bytes + 32, 0x5A) {}
  unsigned char *data() { return v.data() + 16; }
  void fill(uint32_t seed) {
    for (size_t i = 0; i < n; i++) data()[i] = byte(seed, i);
  }
  static unsigned char byte(uint32_t seed, size_t i) {
    return (unsigned char)((i + 1) * 2654435761u + (i >> 8) * 97 + seed * 40503u >> 11);
  }
  std::string check(uint32_t seed) const {
    for (size_t i = 0; i < 16; i++)
      if (v[i] != 0x5A || v[n + 16 + i] != 0x5A) return fmt("a guard of %zu bytes was overwritten", n);
    for (size_t i = 0; i < n; i++)
      if (v[i + 16] != byte(seed, i))
        return fmt("byte %zu of %zu is %02x, expected %02x", i, n, v[i + 16], byte(seed, i));
    return "";
  }
  size_t n;
  std::vector<unsigned char> v;
};

Request isend(dc_comm *c, const void *p, int64_t n, int dtype, int dst, int64_t tag, const char *where = nullptr) {
  dc_request *r = nullptr;
  dc_isend(c, p, n, dtype, dst, tag, where, &r);
  return Request(r);
}

Request irecv(dc_comm *c, void *p, int64_t n, int dtype, int src, int64_t tag, const char *where = nullptr) {
  dc_request *r = nullptr;
  dc_irecv(c, p, n, dtype, src, tag, where, &r);
  return Request(r);
}

struct Mode {
  int size;
  bool cma;
};
std::string name_of(const testing::TestParamInfo<Mode> &i) {
  return fmt("%dranks%s", i.param.size, i.param.cma ? "SingleCopy" : "RingsOnly");
}

// Opens a group in each rank and closes it after the body.
using CommBody = std::function<std::string(dc_comm *c, int rank)>;
std::vector<Outcome> run_group(Mode m, const CommBody &body, int timeout_ms = 20000) {
  std::string address = fresh_address();
  return run_ranks(m.size, [&](int rank) -> std::string {
    set_cma(m.cma);
    dc_comm_config k = config_of(address.c_str(), rank, m.size, 2, 4096, timeout_ms);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    Comm close_it(c);
    return body(c, rank);
  });
}

class Messages : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(All, Messages, testing::Values(Mode{2, true}, Mode{2, false}, Mode{4, true}, Mode{4, false}),
                         name_of);
class Pairs : public testing::TestWithParam<Mode> {};
INSTANTIATE_TEST_SUITE_P(All, Pairs, testing::Values(Mode{2, true}, Mode{2, false}), name_of);

// Around: a cell's inline data, cache lines, the eager limit, a chunk and a whole ring of payload.
TEST_P(Pairs, EverySizeInBothDirectionsAtOnce) {
  expect_all_fine(run_group(GetParam(), [](dc_comm *c, int rank) -> std::string {
    std::vector<int64_t> sizes = {1000003, 20 << 20};
    for (int64_t edge : {0, 32, 64, 128, 4096, 8192, 16384, 30720, 32768, 122816, 131072, 262144})
      for (int64_t d : {-1, 0, 1})
        if (edge + d >= 0) sizes.push_back(edge + d);
    for (int64_t n : sizes) {
      Buffer out(n), in(n);
      out.fill((uint32_t)(n * 2 + rank));
      Request s = isend(c, out.data(), n, DC_U8, 1 - rank, n), r = irecv(c, in.data(), n, DC_U8, 1 - rank, n);
      WANT(s && r, "%s", dc_last_error());
      FINE(dc_request_wait(r.get(), 0));
      FINE(dc_request_wait(s.get(), 0));
      WANT(dc_request_source(r.get()) == 1 - rank, "source %d", dc_request_source(r.get()));
      std::string d = in.check((uint32_t)(n * 2 + 1 - rank));
      WANT(d.empty(), "%ld bytes: %s", (long)n, d.c_str());
      WANT(out.check((uint32_t)(n * 2 + rank)).empty(), "the sender's buffer changed");
    }
    return "";
  }));
}

TEST_P(Pairs, EveryDtypeAndTheBlockingForms) {
  expect_all_fine(run_group(GetParam(), [](dc_comm *c, int rank) -> std::string {
    for (int dtype = 0; dtype < DC_DTYPE_COUNT; dtype++)
      for (int64_t n : {0, 1, 7, 1000, 5000}) {
        Buffer out(n * (int64_t)dc_dtype_size(dtype)), in(n * (int64_t)dc_dtype_size(dtype));
        out.fill((uint32_t)n);
        int src = -7;
        if (rank == 0) FINE(dc_send(c, n ? out.data() : nullptr, n, dtype, 1, -dtype));
        FINE(dc_recv(c, n ? in.data() : nullptr, n, dtype, rank ? 0 : DC_ANY_SOURCE, rank ? -dtype : INT64_MAX, &src));
        if (rank == 1) FINE(dc_send(c, in.data(), n, dtype, 0, INT64_MAX));
        WANT(src == 1 - rank, "source %d", src);
        std::string d = in.check((uint32_t)n);
        WANT(d.empty(), "%s count %ld: %s", dc_dtype_name(dtype), (long)n, d.c_str());
      }
    return "";
  }));
}

// What was counted proves which path the bytes took.
TEST_P(Pairs, BytesTakeThePathThatTheySay) {
  bool cma = GetParam().cma;
  expect_all_fine(run_group(GetParam(), [cma](dc_comm *c, int rank) -> std::string {
    FINE(dc_barrier(c, 0));
    dc_counter_reset();
    Buffer small(100), large(kLarge);
    if (rank == 0) {
      FINE(dc_send(c, small.data(), 100, DC_U8, 1, 0));
      FINE(dc_send(c, large.data(), kLarge, DC_U8, 1, 0));
    } else {
      FINE(dc_recv(c, small.data(), 100, DC_U8, 0, 0, nullptr));
      FINE(dc_recv(c, large.data(), kLarge, DC_U8, 0, 0, nullptr));
    }
    int64_t ring = dc_counter_get(DC_COUNTER_p2p_bytes_ring), copy = dc_counter_get(DC_COUNTER_p2p_bytes_single_copy);
    WANT(ring == (rank ? 0 : 100 + (cma ? 0 : kLarge)), "rings: %ld", (long)ring);
    WANT(copy == (rank && cma ? kLarge : 0), "single copies: %ld", (long)copy);
    WANT(dc_counter_get(DC_COUNTER_p2p_sends) == (rank ? 0 : 2), "sends");
    WANT(dc_counter_get(DC_COUNTER_p2p_recvs) == (rank ? 2 : 0), "receives");
    return "";
  }));
}

// Thousands of messages, small and large mixed, that nobody asks for yet; then the last tag first.
TEST_P(Pairs, TagsPassEachOtherAndKeepTheirOwnOrder) {
  expect_all_fine(run_group(GetParam(), [](dc_comm *c, int rank) -> std::string {
    const int n = 900, tags = 3;
    auto size_of = [](int i) { return i % 50 == 7 ? 20000 + i : (int64_t)(i * 37 % 1500); };
    if (rank == 0) {
      std::deque<Buffer> b;
      std::vector<Request> r;
      for (int i = 0; i < n; i++) {
        b.emplace_back(size_of(i));
        b.back().fill((uint32_t)i);
        r.push_back(isend(c, b.back().data(), size_of(i), DC_U8, 1, i % tags));
        WANT(r.back(), "%s", dc_last_error());
      }
      for (auto &x : r) FINE(dc_request_wait(x.get(), 0));
      return "";
    }
    for (int tag = tags - 1; tag >= 0; tag--)
      for (int i = tag; i < n; i += tags) {
        Buffer b(size_of(i));
        FINE(dc_recv(c, b.data(), size_of(i), DC_U8, i % 2 ? 0 : DC_ANY_SOURCE, tag, nullptr));
        std::string d = b.check((uint32_t)i);
        WANT(d.empty(), "message %d: %s", i, d.c_str());
      }
    return "";
  }));
}

// Receives that were posted first are met in the order of their posting, whether from one source or any.
TEST_P(Pairs, TheOldestReceiveGetsTheMessage) {
  expect_all_fine(run_group(GetParam(), [](dc_comm *c, int rank) -> std::string {
    const int n = 200;
    int64_t x[n];
    std::vector<Request> r;
    for (int i = 0; i < n && rank == 1; i++) {
      x[i] = -1;
      r.push_back(irecv(c, &x[i], 1, DC_I64, i % 3 ? 0 : DC_ANY_SOURCE, 5));
      WANT(r.back(), "%s", dc_last_error());
    }
    FINE(dc_barrier(c, 0));
    for (int64_t i = 0; i < n && rank == 0; i++) FINE(dc_send(c, &i, 1, DC_I64, 1, 5));
    for (int i = n - 1; i >= 0 && rank == 1; i--) {
      FINE(dc_request_wait(r[i].get(), 0));
      WANT(x[i] == i, "receive %d got message %ld", i, (long)x[i]);
    }
    return "";
  }));
}

TEST_P(Messages, FromAnySource) {
  int size = GetParam().size;
  expect_all_fine(run_group(GetParam(), [size](dc_comm *c, int rank) -> std::string {
    const int n = 60, len = 5000; // 20000 bytes: every other one is a rendezvous
    std::vector<int32_t> x(len);
    std::vector<int> next(size, 0);
    std::vector<std::vector<int32_t>> sent;
    std::vector<Request> r;
    for (int i = 0; i < n && rank; i++) {
      sent.emplace_back(len, rank * 1000 + i);
      r.push_back(isend(c, sent.back().data(), i % 2 ? len : 10, DC_I32, 0, i % 2));
      WANT(r.back(), "%s", dc_last_error());
    }
    for (auto &s : r) FINE(dc_request_wait(s.get(), 0));
    for (int tag = 0; tag < 2 && !rank; tag++)
      for (int i = 0; i < n / 2 * (size - 1); i++) {
        int64_t count = tag ? len : 10;
        int src = -1;
        FINE(dc_recv(c, x.data(), count, DC_I32, DC_ANY_SOURCE, tag, &src));
        WANT(src > 0 && src < size, "source %d", src);
        int want = src * 1000 + next[src] * 2 % n + tag;
        next[src]++;
        for (int64_t e = 0; e < count; e++)
          WANT(x[e] == want, "from %d element %ld: %d, expected %d", src, (long)e, x[e], want);
      }
    for (int s = 1; s < size && !rank; s++) WANT(next[s] == n, "%d messages from %d", next[s], s);
    return "";
  }));
}

// Both sides start large sends first: neither needs the other to receive before it may.
TEST_P(Messages, LargeSendsInAllDirectionsDoNotDeadlock) {
  int size = GetParam().size;
  expect_all_fine(run_group(GetParam(), [size](dc_comm *c, int rank) -> std::string {
    const int64_t n = 3 << 20;
    for (int round = 0; round < 2; round++) {
      std::deque<Buffer> out, in;
      std::vector<Request> s, r;
      for (int peer = 0; peer < size; peer++) {
        out.emplace_back(n);
        in.emplace_back(n);
        out.back().fill((uint32_t)(rank * 8 + peer));
        if (peer != rank) s.push_back(isend(c, out.back().data(), n, DC_U8, peer, 0));
      }
      for (int peer = size - 1; peer >= 0; peer--)
        if (peer != rank) r.push_back(irecv(c, in[peer].data(), n, DC_U8, peer, 0));
      for (auto *list : {&s, &r})
        for (auto &x : *list) FINE(dc_request_wait(x.get(), 0));
      for (int peer = 0; peer < size; peer++)
        if (peer != rank) WANT(in[peer].check((uint32_t)(peer * 8 + rank)).empty(), "from %d", peer);
    }
    return "";
  }));
}

struct Plan {
  int src, dst, tag, dtype;
  int64_t count;
};

// Every rank knows all messages of a round; each starts its own sends and receives mixed, in the order that matching
// asks for, and waits for them in any order, by waits and by tests.
TEST_P(Messages, RandomTraffic) {
  int size = GetParam().size;
  expect_all_fine(run_group(GetParam(), [size](dc_comm *c, int rank) -> std::string {
    std::mt19937 same(12345 + (unsigned)size), own(777u + (unsigned)rank);
    for (int round = 0; round < 12; round++) {
      std::vector<Plan> all(80);
      for (Plan &m : all) {
        m.src = (int)(same() % (unsigned)size);
        m.dst = (m.src + 1 + (int)(same() % (unsigned)(size - 1))) % size;
        m.tag = (int)(same() % 3);
        m.dtype = (int)(same() % DC_DTYPE_COUNT);
        const int64_t top[] = {5, 40, 1000, 3000, 12000, 200000};
        m.count = (int64_t)(same() % (unsigned long)top[same() % 6]);
      }
      std::deque<Buffer> b;
      struct Open {
        Request r;
        size_t i;
        Buffer *b;
        bool recv;
      };
      std::vector<Open> open;
      std::vector<size_t> todo[2]; // sends, receives
      for (size_t i = 0; i < all.size(); i++) {
        if (all[i].src == rank) todo[0].push_back(i);
        if (all[i].dst == rank) todo[1].push_back(i);
      }
      size_t at[2] = {0, 0};
      while (at[0] < todo[0].size() || at[1] < todo[1].size()) {
        int k = at[0] == todo[0].size() ? 1 : at[1] == todo[1].size() ? 0 : (int)(own() % 2);
        size_t i = todo[k][at[k]++];
        const Plan &m = all[i];
        b.emplace_back(m.count * (int64_t)dc_dtype_size(m.dtype));
        if (!k) b.back().fill((uint32_t)(i + (size_t)round * 100));
        Request r = k ? irecv(c, b.back().data(), m.count, m.dtype, m.src, m.tag)
                      : isend(c, b.back().data(), m.count, m.dtype, m.dst, m.tag);
        WANT(r, "%s", dc_last_error());
        open.push_back({std::move(r), i, &b.back(), k == 1});
        if (own() % 8 == 0) {
          int done;
          FINE(dc_request_test(open[own() % open.size()].r.get(), &done));
        }
      }
      std::shuffle(open.begin(), open.end(), own);
      for (Open &o : open) {
        FINE(dc_request_wait(o.r.get(), 0));
        std::string d = o.b->check((uint32_t)(o.i + (size_t)round * 100));
        WANT(d.empty(), "round %d message %zu: %s", round, o.i, d.c_str());
        if (o.recv) WANT(dc_request_source(o.r.get()) == all[o.i].src, "source");
      }
    }
    return "";
  }));
}

TEST_P(Pairs, PollingAloneIsProgressOnBothSides) {
  expect_all_fine(run_group(GetParam(), [](dc_comm *c, int rank) -> std::string {
    Buffer b(kLarge);
    if (rank == 0) b.fill(3);
    Request r = rank ? irecv(c, b.data(), kLarge, DC_U8, 0, 1) : isend(c, b.data(), kLarge, DC_U8, 1, 1);
    WANT(r, "%s", dc_last_error());
    int done = 0;
    while (!done) FINE(dc_request_test(r.get(), &done));
    FINE(dc_request_wait(r.get(), 1));
    FINE(dc_request_test(r.get(), &done));
    return b.check(3);
  }));
}

// A rank that waits in a collective, of this group or another, still takes what it has asked for before: the sender
// comes to the collective only then.
TEST_P(Pairs, MessagesGoOnWhileTheirReceiverWaitsInACollective) {
  std::string second = fresh_address();
  expect_all_fine(run_group(GetParam(), [&](dc_comm *c, int rank) -> std::string {
    dc_comm_config k = config_of(second.c_str(), rank, 2, 2, 4096, 20000);
    dc_comm *other;
    FINE(dc_comm_open(&k, &other));
    Comm close_it(other);
    for (int round = 0; round < 6; round++) {
      dc_comm *where = round % 2 ? other : c;
      Buffer b(kLarge);
      if (rank == 0) {
        b.fill((uint32_t)round);
        nap_ms(round == 2 ? 300 : 0); // until the other sleeps
        FINE(dc_send(c, b.data(), kLarge, DC_U8, 1, 0));
        FINE(dc_barrier(where, round));
      } else {
        Request r = irecv(c, b.data(), kLarge, DC_U8, 0, 0);
        WANT(r, "%s", dc_last_error());
        FINE(dc_barrier(where, round));
        FINE(dc_request_wait(r.get(), 0));
        WANT(b.check((uint32_t)round).empty(), "round %d", round);
      }
    }
    return "";
  }));
}

TEST_P(Pairs, AWithdrawnReceiveLeavesItsMessageToTheNext) {
  expect_all_fine(run_group(GetParam(), [](dc_comm *c, int rank) -> std::string {
    for (int64_t n : {(int64_t)4, kLarge}) {
      Buffer b(n), never(n);
      b.fill(9);
      if (rank == 1) {
        Request r = irecv(c, never.data(), n, DC_U8, 0, 0), any = irecv(c, never.data(), n, DC_U8, DC_ANY_SOURCE, 0);
        WANT(r && any, "%s", dc_last_error());
      }
      FINE(dc_barrier(c, 0));
      if (rank == 0) FINE(dc_send(c, b.data(), n, DC_U8, 1, 0));
      Buffer got(n);
      if (rank == 1) FINE(dc_recv(c, got.data(), n, DC_U8, 0, 0, nullptr));
      if (rank == 1) WANT(got.check(9).empty() && never.v == Buffer(n).v, "data");
    }
    return "";
  }));
}

// A receive that is dropped when half of its message is there: the sender's send ends all the same, and the next
// messages are sound.
TEST(Withdrawing, InTheMiddleOfChunks) {
  expect_all_fine(run_group({2, false}, [](dc_comm *c, int rank) -> std::string {
    const int64_t n = 4 << 20;
    for (int round = 0; round < 5; round++) {
      Buffer a(n), b(n);
      a.fill((uint32_t)round);
      b.fill((uint32_t)round + 50);
      if (rank == 0) {
        Request x = isend(c, a.data(), n, DC_U8, 1, 0), y = isend(c, b.data(), n, DC_U8, 1, 1);
        FINE(dc_request_wait(x.get(), 0));
        FINE(dc_request_wait(y.get(), 0));
      } else {
        Buffer lost(n), kept(n), untouched(n);
        Request x = irecv(c, lost.data(), n, DC_U8, 0, 0);
        int done = 0;
        while (memcmp(lost.data(), untouched.data(), 16) == 0) FINE(dc_request_test(x.get(), &done));
        WANT(!done, "four megabytes at once");
        x.reset();
        memset(lost.data(), 0, (size_t)n);
        FINE(dc_recv(c, kept.data(), n, DC_U8, 0, 1, nullptr));
        WANT(kept.check((uint32_t)round + 50).empty(), "the next message");
        for (size_t i = 0; i < (size_t)n; i++)
          WANT(lost.data()[i] == 0, "byte %zu was written after the withdrawal", i);
      }
    }
    return "";
  }));
}

// ---- arguments, mismatch
TEST(MessageArguments, WrongOnesAreRefusedLocallyAndTheGroupStaysSound) {
  expect_all_fine(run_group({2, true}, [](dc_comm *c, int rank) -> std::string {
    float x = 1, y = 0;
    int done;
    dc_request *r = nullptr;
    WANT_STATUS(DC_E_INVALID, dc_isend(c, &x, 1, DC_F32, rank, 0, nullptr, &r));
    WANT_TEXT("oneself");
    WANT_STATUS(DC_E_INVALID, dc_irecv(c, &x, 1, DC_F32, rank, 0, nullptr, &r));
    for (int bad : {2, -2, 1 << 20}) {
      WANT_STATUS(DC_E_INVALID, dc_isend(c, &x, 1, DC_F32, bad, 0, nullptr, &r));
      WANT_STATUS(DC_E_INVALID, dc_recv(c, &x, 1, DC_F32, bad, 0, nullptr));
      WANT_TEXT("from 0 to 1");
    }
    WANT_STATUS(DC_E_INVALID, dc_send(c, &x, 1, DC_F32, DC_ANY_SOURCE, 0));
    WANT_STATUS(DC_E_DTYPE, dc_send(c, &x, 1, 99, 1 - rank, 0));
    WANT_STATUS(DC_E_INVALID, dc_send(c, &x, -1, DC_F32, 1 - rank, 0));
    WANT_STATUS(DC_E_INVALID, dc_send(c, &x, INT64_MAX, DC_F32, 1 - rank, 0));
    WANT_STATUS(DC_E_INVALID, dc_send(c, nullptr, 1, DC_F32, 1 - rank, 0));
    WANT_STATUS(DC_E_INVALID, dc_send(nullptr, &x, 1, DC_F32, 1 - rank, 0));
    WANT_STATUS(DC_E_INVALID, dc_isend(c, &x, 1, DC_F32, 1 - rank, 0, nullptr, nullptr));
    WANT_STATUS(DC_E_INVALID, dc_request_wait(nullptr, 0));
    WANT_STATUS(DC_E_INVALID, dc_request_test(nullptr, &done));
    WANT_STATUS(DC_E_INVALID, dc_request_source(nullptr));
    FINE(dc_request_free(nullptr));
    WANT(r == nullptr, "an output was written on failure");
    Request s = isend(c, &x, 1, DC_F32, 1 - rank, 0), v = irecv(c, &y, 1, DC_F32, 1 - rank, 1);
    WANT_STATUS(DC_E_STATE, dc_request_source(s.get()));
    WANT_STATUS(DC_E_STATE, dc_request_source(v.get()));
    WANT_STATUS(DC_E_INVALID, dc_request_test(s.get(), nullptr));
    FINE(dc_recv(c, &y, 1, DC_F32, 1 - rank, 0, nullptr));
    FINE(dc_barrier(c, 0));
    return y == 1 ? "" : "value";
  }));
  expect_all_fine(run_group({1, true}, [](dc_comm *c, int) -> std::string {
    float x;
    WANT_STATUS(DC_E_INVALID, dc_recv(c, &x, 1, DC_F32, DC_ANY_SOURCE, 0, nullptr)); // alone: nobody could send
    return "";
  }));
  setenv("DEEPC_CMA", "maybe", 1);
  std::string address = fresh_address();
  dc_comm_config k = config_of(address.c_str(), 0, 1);
  dc_comm *c = nullptr;
  EXPECT_EQ(dc_comm_open(&k, &c), DC_E_ENV);
  EXPECT_NE(strstr(dc_last_error(), "DEEPC_CMA='maybe'"), nullptr);
  unsetenv("DEEPC_CMA");
}

TEST(MessageMismatch, NamesBothCallsOnBothSides) {
  struct Case {
    int64_t sent, wanted;
    int sent_type, wanted_type;
    bool posted_first;
  };
  for (Case k : {Case{4, 5, DC_F32, DC_F32, true}, Case{4, 4, DC_F32, DC_BF16, false},
                 Case{kLarge, kLarge - 1, DC_U8, DC_U8, true}, Case{kLarge, kLarge, DC_U8, DC_I8, false},
                 Case{0, 1, DC_F32, DC_F32, true}}) {
    SCOPED_TRACE(k.sent);
    expect_all_fine(run_group({2, true}, [k](dc_comm *c, int rank) -> std::string {
      std::vector<char> b((size_t)kLarge * 4);
      if (rank == 0) {
        if (k.posted_first) FINE(dc_barrier(c, 0));
        Request r = isend(c, b.data(), k.sent, k.sent_type, 1, 3, "left.py:7");
        if (!k.posted_first) FINE(dc_barrier(c, 0));
        while (dc_comm_error(c)[0] == 0) nap_ms(1);
        WANT_STATUS(DC_E_MISMATCH, dc_send(c, b.data(), 1, DC_U8, 1, 0));
        if (k.sent == kLarge) WANT_STATUS(DC_E_MISMATCH, dc_request_wait(r.get(), 0));
        if (k.sent == kLarge) WANT_STATUS(DC_E_MISMATCH, dc_request_wait(r.get(), 0));
      } else {
        Request r;
        if (k.posted_first) r = irecv(c, b.data(), k.wanted, k.wanted_type, 0, 3, "right.py:9");
        FINE(dc_barrier(c, 0));
        if (!k.posted_first) {
          Request later = irecv(c, b.data(), 1, DC_U8, 0, 77); // takes what is there
          int done = 0;
          if (later) dc_request_test(later.get(), &done);
          dc_request *x = nullptr;
          WANT_STATUS(DC_E_MISMATCH, dc_irecv(c, b.data(), k.wanted, k.wanted_type, 0, 3, "right.py:9", &x));
        } else {
          WANT_STATUS(DC_E_MISMATCH, dc_request_wait(r.get(), 0));
        }
      }
      WANT_TEXT(fmt("rank 0 called send(%s, count %ld, tag 3, to rank 1) [message call 1 at left.py:7]",
                    dc_dtype_name(k.sent_type), (long)k.sent)
                    .c_str());
      WANT_TEXT(fmt("rank 1 called recv(%s, count %ld, tag 3, from rank 0) [message call %d at right.py:9]",
                    dc_dtype_name(k.wanted_type), (long)k.wanted, k.posted_first ? 1 : 2)
                    .c_str());
      WANT_STATUS(DC_E_MISMATCH, dc_barrier(c, 0)); // the group is broken for collectives too
      return "";
    }));
  }
}

// Many caller lines at once: an old one may be forgotten, but is never mistaken for another.
TEST(MessageMismatch, ALineIsNeverMistakenForAnother) {
  expect_all_fine(run_group({2, true}, [](dc_comm *c, int rank) -> std::string {
    for (int lines : {20, 100}) {
      int32_t x = 0;
      std::vector<Request> r;
      for (int i = 0; i < lines && rank == 0; i++)
        r.push_back(isend(c, &x, 1, DC_I32, 1, i, fmt("at.py:%d", i).c_str()));
      FINE(dc_barrier(c, 0));
      if (lines == 20) {
        for (int i = 0; i < lines && rank == 1; i++) FINE(dc_recv(c, &x, 1, DC_I32, 0, i, nullptr));
        continue;
      }
      if (rank == 1) WANT_STATUS(DC_E_MISMATCH, dc_recv(c, &x, 1, DC_F32, 0, 3, nullptr));
      while (dc_comm_error(c)[0] == 0) nap_ms(1);
      const char *at = strstr(dc_comm_error(c), "at.py:");
      WANT(!at || strncmp(at, "at.py:3]", 8) == 0, "%s", dc_comm_error(c));
    }
    return "";
  }));
}

// ---- time-outs, aborts
TEST(MessageTimeout, TellsWhereTheOtherIs) {
  expect_all_fine(run_group({3, true}, [](dc_comm *c, int rank) -> std::string {
    FINE(dc_comm_set_caller(c, "warmup.py:3"));
    FINE(dc_barrier(c, 0));
    int32_t x = 0;
    if (rank == 1) {
      Request r = isend(c, &x, 1, DC_I32, 0, 6, "other.py:8"); // another tag than rank 0 waits for
      while (dc_comm_error(c)[0] == 0) nap_ms(2);
      WANT_STATUS(DC_E_TIMEOUT, dc_send(c, &x, 1, DC_I32, 0, 5));
    } else if (rank == 0) {
      Request r = irecv(c, &x, 1, DC_I32, 1, 5, "train.py:50");
      double t = now();
      WANT_STATUS(DC_E_TIMEOUT, dc_request_wait(r.get(), 300));
      WANT(now() - t > 0.25, "too early");
      WANT_STATUS(DC_E_TIMEOUT, dc_request_wait(r.get(), 1000000)); // again, at once
    } else {
      WANT_STATUS(DC_E_TIMEOUT, dc_recv(c, &x, 1, DC_I32, DC_ANY_SOURCE, 0, nullptr)); // learns of it
    }
    WANT_TEXT("time-out after 300 ms: rank 0 waits in recv(int32, count 1, tag 5, from rank 1) [message call 1 at "
              "train.py:50]");
    WANT_TEXT("rank 1 (pid ");
    WANT_TEXT("does not wait for messages, its last call was send(int32, count 1, tag 6, to rank 0) [message call 1 at "
              "other.py:8]");
    WANT_TEXT("in collectives it has finished barrier() [call 1 at warmup.py:3]");
    WANT_TEXT("its oldest message here that no receive has asked for is send(int32, count 1, tag 6");
    return "";
  }));
}

TEST(MessageTimeout, OfALargeSendAndOfARingThatStaysFull) {
  for (bool small : {false, true}) {
    SCOPED_TRACE(small);
    expect_all_fine(run_group(
        {2, true},
        [small](dc_comm *c, int rank) -> std::string {
          FINE(dc_barrier(c, 0));
          Buffer b(kLarge);
          if (rank == 1) {
            while (dc_comm_error(c)[0] == 0) nap_ms(2);
            return "";
          }
          int rc = DC_OK;
          for (int i = 0; i < 1000 && !rc; i++) rc = dc_send(c, b.data(), small ? 4096 : kLarge, DC_U8, 1, 0);
          WANT(rc == DC_E_TIMEOUT, "%s: %s", dc_status_name(rc), dc_last_error());
          WANT_TEXT("time-out after 400 ms: rank 0 waits in send(uint8");
          WANT_TEXT("rank 1 (pid ");
          WANT_TEXT("has sent and received nothing yet");
          return "";
        },
        400));
  }
}

TEST(MessageAbort, EndsEveryWait) {
  expect_all_fine(run_group({3, true}, [](dc_comm *c, int rank) -> std::string {
    FINE(dc_barrier(c, 0));
    Buffer b(kLarge);
    if (rank == 2) {
      nap_ms(40);
      FINE(dc_comm_abort(c, "loss is NaN"));
    }
    if (rank == 0) WANT_STATUS(DC_E_ABORTED, dc_send(c, b.data(), kLarge, DC_U8, 1, 0));
    if (rank == 1) WANT_STATUS(DC_E_ABORTED, dc_recv(c, b.data(), 1, DC_U8, DC_ANY_SOURCE, 1, nullptr));
    if (rank != 2) WANT_TEXT("aborted: loss is NaN");
    WANT_STATUS(DC_E_ABORTED, dc_send(c, b.data(), 1, DC_U8, (rank + 1) % 3, 0));
    return "";
  }));
}

// ---- deaths
enum Phase { BeforeItSends, AfterRts, BeforeItReceives, InTheRing, WhileOthersTakeFromAny };
class Death : public testing::TestWithParam<std::tuple<Phase, bool>> {};
INSTANTIATE_TEST_SUITE_P(Phases, Death,
                         testing::Combine(testing::Values(BeforeItSends, AfterRts, BeforeItReceives, InTheRing,
                                                          WhileOthersTakeFromAny),
                                          testing::Bool()));

// Rank 1 is killed; rank 0 exchanges with it; rank 2 waits for rank 0 and learns of it as well.
TEST_P(Death, IsToldToAll) {
  Phase phase = std::get<0>(GetParam());
  auto out = run_group({3, std::get<1>(GetParam())}, [phase](dc_comm *c, int rank) -> std::string {
    Buffer b(kLarge);
    FINE(dc_barrier(c, 0));
    if (rank == 2) {
      WANT_STATUS(DC_E_PEER_DIED, dc_recv(c, b.data(), 5, DC_U8, 0, 9, nullptr));
      WANT_TEXT("rank 1 (pid ");
      return "";
    }
    if (rank == 1) {
      Request r;
      if (phase == AfterRts) r = isend(c, b.data(), kLarge, DC_U8, 0, 0);
      if (phase == InTheRing) { // begins to receive, and dies while the rest is on its way
        r = irecv(c, b.data(), kLarge, DC_U8, 0, 0);
        int done = 0;
        while (!done && !dc_request_test(r.get(), &done) && dc_counter_get(DC_COUNTER_p2p_bytes_single_copy) == 0)
          if (b.data()[0] != 0x5A) break;
      }
      if (phase == BeforeItSends) nap_ms(30);
      kill(getpid(), SIGKILL);
    }
    if (phase == AfterRts) nap_ms(50);
    b.fill(1);
    int rc = DC_OK;
    if (phase == BeforeItSends) rc = dc_recv(c, b.data(), 5, DC_U8, 1, 0, nullptr);
    if (phase == AfterRts) rc = dc_recv(c, b.data(), kLarge, DC_U8, 1, 0, nullptr);
    if (phase == WhileOthersTakeFromAny) rc = dc_recv(c, b.data(), 5, DC_U8, DC_ANY_SOURCE, 0, nullptr);
    for (int i = 0; rc == DC_OK && (phase == BeforeItReceives || phase == InTheRing) && i < 2; i++)
      rc = dc_send(c, b.data(), kLarge, DC_U8, 1, 0); // the first may just have been taken
    WANT(rc == DC_E_PEER_DIED, "%s: %s", dc_status_name(rc), dc_last_error());
    WANT_TEXT("rank 1 (pid ");
    WANT_TEXT("died");
    WANT_TEXT("rank 0 waits for it in ");
    return "";
  });
  EXPECT_TRUE(out[1].killed()) << out[1].text;
  EXPECT_EQ(out[0].text, "");
  EXPECT_EQ(out[2].text, "");
}

// A timer ends rank 1 at any instruction of any message; the others learn of it, with sound data until then.
TEST(Deaths, AtAnyMoment) {
  for (int round = 0; round < 16; round++) {
    SCOPED_TRACE(round);
    auto out = run_group({3, round % 2 == 0}, [round](dc_comm *c, int rank) -> std::string {
      FINE(dc_barrier(c, 0));
      itimerval t = {{0, 0}, {0, 150 + 617 * round}};
      if (rank == 1) setitimer(ITIMER_REAL, &t, nullptr); // SIGALRM ends a process that does not catch it
      int rc = DC_OK;
      std::vector<int32_t> x(30000), y(30000);
      for (int i = 0; rc == DC_OK; i++) {
        int64_t n = i % 4 == 0 ? 30000 : i % 4 == 1 ? 1500 : 3; // a ring of ranks: to the next, from the last
        for (int64_t e = 0; e < n; e++) x[e] = rank * 7 + i;
        Request s = isend(c, x.data(), n, DC_I32, (rank + 1) % 3, 0);
        Request r = s ? irecv(c, y.data(), n, DC_I32, (rank + 2) % 3, 0) : Request();
        rc = r ? dc_request_wait(r.get(), 0) : DC_E_PEER_DIED;
        for (int64_t e = 0; rc == DC_OK && e < n; e++)
          WANT(y[e] == (rank + 2) % 3 * 7 + i, "message %d element %ld: %d", i, (long)e, y[e]);
        if (rc == DC_OK) rc = dc_request_wait(s.get(), 0);
      }
      WANT_STATUS(DC_E_PEER_DIED, dc_send(c, x.data(), 1, DC_I32, 2 - rank, 0));
      WANT_TEXT("rank 1 (pid ");
      return "";
    });
    EXPECT_EQ(out[0].text, "");
    EXPECT_EQ(out[2].text, "");
    EXPECT_TRUE(WIFSIGNALED(out[1].status)) << out[1].text;
  }
}

TEST(Deaths, TestFindsThemToo) {
  auto out = run_group({2, true}, [](dc_comm *c, int rank) -> std::string {
    FINE(dc_barrier(c, 0));
    if (rank == 1) kill(getpid(), SIGKILL);
    int32_t x;
    Request r = irecv(c, &x, 1, DC_I32, 1, 0);
    WANT(r, "%s", dc_last_error());
    int done = 0, rc;
    double end = now() + 30;
    while ((rc = dc_request_test(r.get(), &done)) == DC_OK && now() < end) WANT(!done, "done");
    WANT(rc == DC_E_PEER_DIED, "%s", dc_status_name(rc));
    WANT_STATUS(DC_E_PEER_DIED, dc_request_wait(r.get(), 0));
    return "";
  });
  EXPECT_EQ(out[0].text, "");
}

// What a rank sent before it went is still delivered; what it did not send is missed at once.
TEST(Deaths, LastWordsCount) {
  for (int how = 0; how < 3; how++) {
    SCOPED_TRACE(how);
    auto out = run_group({2, true}, [how](dc_comm *c, int rank) -> std::string {
      int32_t x = 41;
      if (rank == 1) {
        for (int i = 0; i < 3; i++, x++) FINE(dc_send(c, &x, 1, DC_I32, 0, 0));
        if (how == 1) _exit(3);
        if (how == 2) kill(getpid(), SIGKILL);
        return ""; // closes
      }
      nap_ms(60);
      for (int i = 0; i < 3; i++) {
        FINE(dc_recv(c, &x, 1, DC_I32, i == 1 ? DC_ANY_SOURCE : 1, 0, nullptr));
        WANT(x == 41 + i, "%d", x);
      }
      WANT_STATUS(DC_E_PEER_DIED, dc_recv(c, &x, 1, DC_I32, how == 1 ? DC_ANY_SOURCE : 1, 0, nullptr));
      WANT_TEXT(how == 0 ? "left the group" : how == 1 ? "exited with code 3" : "killed by signal 9");
      WANT_TEXT("its last call was send(int32, count 1, tag 0, to rank 0) [message call 3]");
      return "";
    });
    EXPECT_EQ(out[0].text, "");
  }
}

// With one rank gone a receive from any may still get its message from another.
TEST(Deaths, LeavingDoesNotEndAReceiveFromAny) {
  expect_all_fine(run_group({3, true}, [](dc_comm *c, int rank) -> std::string {
    int32_t x = rank;
    if (rank == 1) return "";
    if (rank == 2) nap_ms(80);
    if (rank == 2) FINE(dc_send(c, &x, 1, DC_I32, 0, 0));
    int src = -1;
    if (rank == 0) FINE(dc_recv(c, &x, 1, DC_I32, DC_ANY_SOURCE, 0, &src));
    if (rank == 0) WANT(src == 2 && x == 2, "source %d value %d", src, x);
    if (rank == 0) WANT_STATUS(DC_E_PEER_DIED, dc_recv(c, &x, 1, DC_I32, DC_ANY_SOURCE, 0, &src));
    return "";
  }));
}

// ---- threads
TEST(MessageThreads, ManyBesideCollectives) {
  for (bool cma : {true, false}) {
    expect_all_fine(run_group({2, cma}, [](dc_comm *c, int rank) -> std::string {
      const int threads = 4, rounds = 60;
      std::vector<std::string> said(threads + 1);
      std::vector<std::thread> t;
      for (int k = 0; k < threads; k++)
        t.emplace_back([&, k] {
          said[k] = [&]() -> std::string {
            for (int i = 0; i < rounds; i++) {
              int64_t n = i % 5 == k ? 40000 : 100 * k + i;
              Buffer out(n), in(n);
              out.fill((uint32_t)(k * 1000 + i * 2 + rank));
              Request s, r;
              if ((i + rank) % 2) s = isend(c, out.data(), n, DC_U8, 1 - rank, k, "t.py:1");
              r = irecv(c, in.data(), n, DC_U8, k % 2 ? 1 - rank : DC_ANY_SOURCE, k);
              if (!s) s = isend(c, out.data(), n, DC_U8, 1 - rank, k, fmt("t.py:%d", i).c_str());
              WANT(s && r, "%s", dc_last_error());
              int done = 0;
              if (i % 3 == 0) FINE(dc_request_test(s.get(), &done));
              FINE(dc_request_wait(r.get(), 0));
              FINE(dc_request_wait(s.get(), 0));
              std::string d = in.check((uint32_t)(k * 1000 + i * 2 + 1 - rank));
              WANT(d.empty(), "thread %d message %d: %s", k, i, d.c_str());
            }
            return "";
          }();
        });
      t.emplace_back([&] {
        said[threads] = [&]() -> std::string {
          for (int i = 0; i < rounds; i++) {
            int32_t x = rank + i;
            FINE(dc_comm_set_caller(c, fmt("coll.py:%d", i).c_str()));
            FINE(dc_all_reduce(c, &x, &x, 1, DC_I32, DC_RED_SUM, 0));
            WANT(x == 2 * i + 1, "all_reduce: %d", x);
          }
          return "";
        }();
      });
      for (auto &x : t) x.join();
      for (auto &s : said)
        if (!s.empty()) return s;
      return "";
    }));
  }
}

TEST(MessageThreads, RanksMayBeThreadsOfOneProcess) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(1, [&](int) -> std::string {
    return run_threads(2, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, 2);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      Comm close_it(c);
      for (int i = 0; i < 50; i++) {
        int64_t n = i % 2 ? kLarge : i;
        Buffer out(n), in(n);
        out.fill((uint32_t)(i * 2 + rank));
        Request s = isend(c, out.data(), n, DC_U8, 1 - rank, 0);
        FINE(dc_recv(c, in.data(), n, DC_U8, 1 - rank, 0, nullptr));
        FINE(dc_request_wait(s.get(), 0));
        WANT(in.check((uint32_t)(i * 2 + 1 - rank)).empty(), "message %d", i);
      }
      return "";
    });
  }));
}

TEST(MessageThreads, ClosingEndsAWaitAndRequestsOutliveTheGroup) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    int32_t x = 5, y = 0;
    Buffer b(kLarge);
    Request never = irecv(c, &y, 1, DC_I32, 1 - rank, 1), sent = isend(c, &x, 1, DC_I32, 1 - rank, 2),
            large = isend(c, b.data(), kLarge, DC_U8, 1 - rank, 3);
    WANT(never && sent && large, "%s", dc_last_error());
    std::atomic<int> rc{1};
    std::string text;
    std::thread t([&] {
      rc = dc_request_wait(never.get(), 0);
      text = dc_last_error();
    });
    if (rank == 1) t.join(); // rank 0 leaves, which ends it
    nap_ms(30);
    FINE(dc_comm_close(c));
    if (rank == 0) t.join();
    WANT(rc == (rank ? DC_E_PEER_DIED : DC_E_STATE), "%d: %s", rc.load(), text.c_str());
    WANT(dc_request_wait(never.get(), 0) == rc, "%s", dc_last_error());
    int done = 0;
    FINE(dc_request_test(sent.get(), &done));
    WANT(done, "done");
    int ended = dc_request_wait(large.get(), 0);
    WANT(ended == DC_E_STATE, "%d: %s", ended, dc_last_error());
    WANT(y == 0, "a receive without a message was written");
    return "";
  }));
}

// What nobody receives is kept, but not without end: the sender and the receiver get an error instead of a full memory.
TEST(Flood, OfMessagesThatNobodyReceivesIsAnError) {
  expect_all_fine(run_group({2, true}, [](dc_comm *c, int rank) -> std::string {
    Buffer b(8192);
    int rc = DC_OK;
    if (rank == 0)
      for (int i = 0; i < 40000 && !rc; i++) rc = dc_send(c, b.data(), 8192, DC_U8, 1, 0);
    else rc = dc_recv(c, b.data(), 8192, DC_U8, 0, 1, nullptr); // another tag
    WANT(rc == DC_E_NOMEM, "%s: %s", dc_status_name(rc), rc ? dc_last_error() : "");
    WANT_TEXT("rank 0 has sent more than 256 MiB of messages that no receive here has asked for");
    return "";
  }));
}

// Threads that poll while another one closes find a closed communicator, and touch nothing of its memory.
TEST(MessageThreads, ClosingBesideThreadsThatPoll) {
  for (int round = 0; round < 60; round++) {
    std::string address = fresh_address();
    std::vector<Outcome> out = run_ranks(2, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, 2);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      Comm close_it(rank ? c : nullptr);
      if (rank) {
        WANT_STATUS(DC_E_PEER_DIED, dc_barrier(c, 0)); // stays until rank 0 has left
        return "";
      }
      float x[3];
      Request never[3];
      std::vector<std::thread> t;
      std::vector<std::string> said(3);
      for (int i = 0; i < 3; i++) {
        never[i] = irecv(c, &x[i], 1, DC_F32, 1, i);
        WANT(never[i], "%s", dc_last_error());
        t.emplace_back([&, i] {
          int rc = DC_OK, done = 0;
          while (rc == DC_OK) rc = dc_request_test(never[i].get(), &done);
          if (rc != DC_E_STATE) said[i] = fmt("%s: %s", dc_status_name(rc), dc_last_error());
        });
      }
      usleep((useconds_t)(100 + round * 7));
      FINE(dc_comm_close(c));
      for (auto &x : t) x.join();
      for (auto &s : said)
        if (!s.empty()) return s;
      return "";
    });
    expect_all_fine(out);
    if (HasFailure()) break;
  }
}

// A blocking send lies on its thread's stack, and another thread of the rank may be the one that completes it.
TEST(MessageThreads, ABlockingSendThatAnotherThreadCompletes) {
  expect_all_fine(run_group({2, false}, [](dc_comm *c, int rank) -> std::string {
    const int rounds = 200;
    std::atomic<bool> stop{false};
    int32_t never = 0;
    Request poll = irecv(c, &never, 1, DC_I32, 1 - rank, 99);
    WANT(poll, "%s", dc_last_error());
    std::thread t([&] {
      int done = 0;
      while (!stop) dc_request_test(poll.get(), &done);
    });
    std::string said = [&]() -> std::string {
      Buffer b(20000);
      for (int i = 0; i < rounds; i++) {
        if (rank == 0) {
          b.fill((uint32_t)i);
          FINE(dc_send(c, b.data(), 20000, DC_U8, 1, 0));
        } else {
          FINE(dc_recv(c, b.data(), 20000, DC_U8, 0, 0, nullptr));
          std::string d = b.check((uint32_t)i);
          WANT(d.empty(), "message %d: %s", i, d.c_str());
        }
      }
      return "";
    }();
    stop = true;
    t.join();
    FINE(dc_barrier(c, 0));
    return said;
  }));
}

TEST(MessageFork, AChildCanNotUseTheParentsRequests) {
  expect_all_fine(run_group({2, true}, [](dc_comm *c, int rank) -> std::string {
    int32_t x = 5, y = 0;
    Request r = irecv(c, &y, 1, DC_I32, 1 - rank, 0);
    WANT(r, "%s", dc_last_error());
    auto out = run_ranks(1, [&](int) -> std::string {
      int done;
      WANT_STATUS(DC_E_STATE, dc_send(c, &x, 1, DC_I32, 1 - rank, 0));
      WANT_TEXT("forked");
      WANT_STATUS(DC_E_STATE, dc_request_wait(r.get(), 0));
      WANT_TEXT("forked");
      WANT_STATUS(DC_E_STATE, dc_request_test(r.get(), &done));
      if (rank == 0) r.reset();
      FINE(dc_comm_close(c));
      if (rank == 1) r.reset(); // in either order
      return "";
    });
    WANT(out[0].text.empty() && out[0].status == 0, "child: %s", out[0].text.c_str());
    FINE(dc_send(c, &x, 1, DC_I32, 1 - rank, 0));
    FINE(dc_request_wait(r.get(), 0));
    WANT(y == 5, "%d", y);
    return "";
  }));
}

// ---- single copies
// One rank alone forbids them: its memory is not read, and it reads no other's.
TEST(SingleCopy, OneSideMayForbidIt) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    set_cma(rank == 0);
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    Comm close_it(c);
    FINE(dc_barrier(c, 0));
    dc_counter_reset();
    Buffer out(kLarge), in(kLarge);
    out.fill(1);
    Request s = isend(c, out.data(), kLarge, DC_U8, 1 - rank, 0);
    FINE(dc_recv(c, in.data(), kLarge, DC_U8, 1 - rank, 0, nullptr));
    FINE(dc_request_wait(s.get(), 0));
    WANT(dc_counter_get(DC_COUNTER_p2p_bytes_single_copy) == 0, "copied");
    return in.check(1);
  }));
}

// The permission goes away after it was found: the message that finds out goes through the ring, whole.
TEST(SingleCopy, PermissionTakenAwayLater) {
  expect_all_fine(run_group({2, true}, [](dc_comm *c, int rank) -> std::string {
    for (int round = 0; round < 3; round++) {
      FINE(dc_barrier(c, 0));
      if (round == 1) { // not dumpable, and without the right to look all the same
        if (geteuid() == 0) WANT(setresuid(65534, 65534, 65534) == 0, "setresuid: %s", strerror(errno));
        WANT(prctl(PR_SET_DUMPABLE, 0) == 0, "prctl: %s", strerror(errno));
        FINE(dc_barrier(c, 0));
      }
      int64_t before = dc_counter_get(DC_COUNTER_p2p_bytes_single_copy);
      Buffer out(kLarge), in(kLarge);
      out.fill((uint32_t)round);
      Request s = isend(c, out.data(), kLarge, DC_U8, 1 - rank, 0);
      FINE(dc_recv(c, in.data(), kLarge, DC_U8, 1 - rank, 0, nullptr));
      FINE(dc_request_wait(s.get(), 0));
      int64_t copied = dc_counter_get(DC_COUNTER_p2p_bytes_single_copy) - before;
      WANT(copied == (round ? 0 : kLarge), "round %d: %ld bytes by single copy", round, (long)copied);
      std::string d = in.check((uint32_t)round);
      WANT(d.empty(), "round %d: %s", round, d.c_str());
    }
    WANT(prctl(PR_SET_DUMPABLE, 1) == 0, "prctl"); // for the leak check
    return "";
  }));
}

} // namespace
