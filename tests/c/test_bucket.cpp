// test_bucket.cpp: the gradient reducer (comm/bucket.h) with real processes. Every rank is a forked child; gradients
// follow from (seed, rank, micro-batch, parameter, index), so each rank can compute with scalar code what its
// accumulator must hold.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "comm/bucket.h"

extern "C" int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

namespace {

using Ints = std::vector<int64_t>;
using Bytes = std::vector<char>;

// ---- ranks ---------------------------------------------------------------------------------------------------------
// What a rank finds wrong is thrown; the parent prints it.
struct Wrong {
  std::string text;
};

#define WANT(cond, ...)                                                        \
  do {                                                                         \
    if (!(cond)) throw Wrong{place(__LINE__, #cond) + format("" __VA_ARGS__)}; \
  } while (0)
#define WANT_OK(expr)                                                        \
  do {                                                                       \
    int rc_ = (expr);                                                        \
    if (rc_ != DC_OK) throw Wrong{place(__LINE__, #expr) + dc_last_error()}; \
  } while (0)

std::string place(int line, const char *what) { return "line " + std::to_string(line) + ": " + what + ": "; }

__attribute__((format(printf, 1, 2))) std::string format(const char *fmt, ...) {
  char s[1024];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(s, sizeof s, fmt, ap);
  va_end(ap);
  return s;
}

template <class T> T *shared(size_t n) {
  void *p = mmap(nullptr, n * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(MAP_FAILED, p);
  return static_cast<T *>(p);
}

std::string fresh_address() {
  std::random_device d;
  char s[64];
  snprintf(s, sizeof s, "deepc-test-bucket-%08x%08x%08x", d(), d(), d());
  return s;
}

[[noreturn]] void child(int rank, const std::function<void(int)> &body, char *text, size_t size) {
  alarm(120);
  dc_set_num_threads(1);  // the machine has few cores and the ranks are many
  try {
    body(rank);
    if (__lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check()) throw Wrong{"memory leaked"};
  } catch (const Wrong &w) {
    snprintf(text, size, "%s", w.text.c_str());
    _exit(1);
  }
  _exit(0);
}

// Runs body(rank) in `world` processes. Ranks in `killed` are expected to die of SIGKILL.
void run_ranks(int world, const std::function<void(int)> &body, const Ints &killed = {}) {
  const size_t size = 4096;
  char *text = shared<char>(size * (size_t)world);
  std::vector<pid_t> pid((size_t)world);
  fflush(nullptr);
  for (int r = 0; r < world; r++) {
    pid[(size_t)r] = fork();
    ASSERT_GE(pid[(size_t)r], 0);
    if (pid[(size_t)r] == 0) child(r, body, text + size * (size_t)r, size);
  }
  for (int r = 0; r < world; r++) {
    int status = 0;
    ASSERT_EQ(pid[(size_t)r], waitpid(pid[(size_t)r], &status, 0));
    if (std::count(killed.begin(), killed.end(), r)) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
          << "rank " << r << " was to be killed: " << status;
      continue;
    }
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
        << "rank " << r << " (status " << status << "): " << (text + size * (size_t)r);
  }
  munmap(text, size * (size_t)world);
}

// ---- one configuration ---------------------------------------------------------------------------------------------
struct Config {
  int world = 2;
  int wire = DC_F32, grad = DC_F32;
  Ints numel = {5000, 0, 3, 20000, 64, 4096, 1, 9000, 12345, 8192};
  int64_t bucket = 1;  // the smallest: parameters span buckets
  int slots = 3;
  int64_t limit = 1 << 20;
  float pre_scale = 1;
  int own_all = 0;
  int micro_batches = 3;
  bool shuffled = true, sleepy = false;
  double unused = 0.2;  // probability per rank, micro-batch and parameter
  int never = 7;        // this parameter has no gradient on any rank; -1: all have
  unsigned seed = 1;
  int ring = 0;
  int tree = 0;
  int kept = DC_F32;  // acc's dtype
};

struct Free {
  void operator()(dc_zero_layout *l) const { dc_zero_layout_free(l); }
  void operator()(dc_comm *c) const { dc_comm_close(c); }
  void operator()(dc_reducer *r) const { dc_reducer_free(r); }
};
using Layout = std::unique_ptr<dc_zero_layout, Free>;
using Comm = std::unique_ptr<dc_comm, Free>;
using Reducer = std::unique_ptr<dc_reducer, Free>;

Layout make_layout(const Config &k) {
  dc_zero_layout *l = nullptr;
  WANT_OK(dc_zero_layout_make(k.numel.data(), (int64_t)k.numel.size(), k.world, k.bucket, &l));
  return Layout(l);
}

Comm join(const Config &k, int rank, const std::string &address, int64_t slot_bytes, int64_t timeout_ms = 30000) {
  if (k.world == 1 && !k.ring) return nullptr;
  dc_comm_config c = {};
  c.struct_size = sizeof c;
  c.rank = rank;
  c.size = k.world;
  c.address = address.c_str();
  c.label = "test";
  c.timeout_ms = timeout_ms;
  c.slot_bytes = slot_bytes;
  c.slots = k.slots;
  dc_comm *out = nullptr;
  WANT_OK(dc_comm_open(&c, &out));
  return Comm(out);
}

bool is_used(const Config &k, int rank, int mb, int64_t p) {
  if (p == k.never) return false;
  std::minstd_rand rng(k.seed * 7919u + (unsigned)rank * 131u + (unsigned)mb * 17u + (unsigned)p);
  rng.discard(3);
  return (double)(rng() % 1000) / 1000 >= k.unused;
}

// The gradient in fp32, then in its own dtype.
std::vector<float> raw_gradient(const Config &k, int rank, int mb, int64_t p) {
  std::minstd_rand rng(k.seed + 1000003u * (unsigned)rank + 10007u * (unsigned)mb + 101u * (unsigned)p);
  rng.discard(5);
  std::vector<float> g((size_t)k.numel[(size_t)p]);
  for (float &x : g) x = ((float)(rng() % 20001) - 10000.5f) * 0.00037f;
  return g;
}

Bytes as(const std::vector<float> &x, int dtype, float scale = 1) {
  Bytes out(x.size() * dc_dtype_size(dtype));
  WANT_OK(dc_cast(out.data(), dtype, x.data(), DC_F32, scale, (int64_t)x.size()));
  return out;
}

std::vector<float> back(const Bytes &x, int dtype, float scale = 1) {
  std::vector<float> out(x.size() / dc_dtype_size(dtype));
  WANT_OK(dc_cast(out.data(), DC_F32, x.data(), dtype, scale, (int64_t)out.size()));
  return out;
}

// The sum of micro-batches [first, first + n) of one element: the left half is the largest power of two below n.
float tree_sum(const std::vector<float> &leaf, size_t first, size_t n) {
  if (n == 1) return leaf[first];
  size_t left = 1;
  while (2 * left < n) left *= 2;
  return tree_sum(leaf, first, left) + tree_sum(leaf, first + left, n - left);
}

// The same with the tree, after passes [0, n).
std::vector<float> expected_tree(const Config &k, const dc_zero_layout &l, int n) {
  std::vector<float> acc((size_t)l.total, 0.0f);
  for (int64_t p = 0; p < l.nparams; p++) {
    std::vector<std::vector<float>> g;
    for (int m = 0; m < n * k.world; m++) {
      g.emplace_back(k.numel[(size_t)p], 0.0f);
      if (!is_used(k, m % k.world, m / k.world, p)) continue;
      const Bytes grad = as(raw_gradient(k, m % k.world, m / k.world, p), k.grad);
      g.back() = back(as(back(grad, k.grad), k.wire, k.pre_scale), k.wire);
    }
    std::vector<float> leaf(g.size());
    for (size_t i = 0; i < (size_t)k.numel[(size_t)p]; i++) {
      for (size_t m = 0; m < g.size(); m++) leaf[m] = g[m][i];
      acc[(size_t)l.offset[p] + i] = tree_sum(leaf, 0, leaf.size());
    }
  }
  return acc;
}

// What the accumulator must hold over the whole flat space after micro-batch mb, when it holds `acc` before (any number
// of elements where mb is 0): sums in rank order in fp32.
void expect_pass(const Config &k, const dc_zero_layout &l, int mb, std::vector<float> &acc) {
  if (mb == 0) acc.assign((size_t)l.total, 0.0f);
  for (int64_t p = 0; p < l.nparams; p++) {
    std::vector<float> sum;
    for (int r = 0; r < k.world; r++) {
      std::vector<float> g(k.numel[(size_t)p], 0.0f);
      if (is_used(k, r, mb, p)) {
        const Bytes grad = as(raw_gradient(k, r, mb, p), k.grad);
        if (k.world == 1) g = back(grad, k.grad);  // unrounded
        else g = back(as(back(grad, k.grad), k.wire, k.pre_scale), k.wire);
      }
      if (r == 0) sum = g;
      else
        for (size_t i = 0; i < g.size(); i++) sum[i] += g[i];
    }
    float *to = acc.data() + l.offset[p];
    for (size_t i = 0; i < sum.size(); i++) {
      if (k.world == 1 && k.pre_scale != 1.0f)
        to[i] = mb == 0 ? sum[i] * k.pre_scale : fmaf(k.pre_scale, sum[i], to[i]);
      else to[i] = mb == 0 ? sum[i] : to[i] + sum[i];
    }
    if (k.kept != DC_F32) {  // rounded once a micro-batch
      const std::vector<float> rounded = back(as({to, to + sum.size()}, k.kept), k.kept);
      std::copy(rounded.begin(), rounded.end(), to);
    }
  }
}

// What the accumulator must hold after micro-batch mb, when it holds `acc` before.
void expect(const Config &k, const dc_zero_layout &l, int mb, std::vector<float> &acc) {
  if (k.tree && !k.ring) acc = expected_tree(k, l, mb + 1);
  else expect_pass(k, l, mb, acc);
}

// One rank's reducer with its arrays. acc is filled with rubbish first: the first pass assigns.
struct Rank {
  Config k;
  int rank;
  Layout layout;
  Comm own_comm;
  dc_comm *comm;
  std::vector<float> acc;
  Bytes narrow;  // with 16 bits: what the reducer writes; acc has its values
  std::vector<double> partial;
  std::vector<float> tree;
  std::vector<float> slots;  // with a ring: what the reducer writes; take() moves it to acc
  int64_t taken = 0;
  const float *expected = nullptr;  // after each micro-batch of this step, where it is known
  Reducer reducer;

  int64_t slice() const { return k.own_all ? layout->bucket_elems : layout->bucket_elems / k.world; }

  // With a ring: takes at most `most` buckets that are reduced and not taken yet, as the owner of a ring does.
  void take(int mb, int64_t most) {
    int64_t reduced = -1, begin, end, at;
    WANT_OK(dc_reducer_reduced(reducer.get(), &reduced));
    WANT(reduced >= taken && reduced - taken <= k.ring && reduced <= layout->nbuckets);
    for (; taken < reduced && most > 0; taken++, most--) {
      WANT_OK(dc_zero_bucket(layout.get(), taken, &begin, &end));
      at = begin;
      if (!k.own_all) WANT_OK(dc_zero_slice(layout.get(), taken, rank, &begin, &end, &at));
      float *from = slots.data() + taken % k.ring * slice();
      for (int64_t i = 0; i < end - begin; i++) {
        float *to = &acc[(size_t)(at + i)];
        *to = mb == 0 ? from[i] : *to + from[i];
        from[i] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    WANT_OK(dc_reducer_give_back(reducer.get(), taken));
  }

  void finish_ring(int mb) {
    int64_t reduced = 0;
    for (int calls = 0; dc_reducer_in_pass(reducer.get()); calls++) {
      WANT(calls <= layout->nbuckets + 1, "finish was called %d times", calls);
      take(mb, 1);  // the slowest owner: as much as finish needs
      WANT_OK(dc_reducer_finish(reducer.get()));
    }
    while (taken < layout->nbuckets) take(mb, 2);
    WANT_OK(dc_reducer_reduced(reducer.get(), &reduced));
    WANT(reduced == layout->nbuckets);
  }

  Rank(const Config &config, int r, const std::string &address, dc_comm *borrowed = nullptr)
      : k(config), rank(r), layout(make_layout(k)) {
    const int64_t bytes = layout->bucket_elems * (int64_t)dc_dtype_size(k.wire);
    if (!borrowed) own_comm = join(k, rank, address, (bytes + 4095) / 4096 * 4096);
    comm = borrowed ? borrowed : own_comm.get();
    acc.assign((size_t)(k.own_all ? layout->total : layout->shard_elems), std::numeric_limits<float>::quiet_NaN());
    partial.assign(k.ring ? 0 : acc.size() / DC_BLOCK, -1.0);
    slots.assign((size_t)(k.ring * slice()), std::numeric_limits<float>::quiet_NaN());
    dc_reducer_config c = {};
    c.struct_size = sizeof c;
    c.comm = comm;
    c.layout = layout.get();
    c.dtype = k.wire;
    c.own_all = k.own_all;
    c.rank = rank;
    c.pre_scale = k.pre_scale;
    c.pending_limit_bytes = k.limit;
    if (k.kept != DC_F32) narrow = as(acc, k.kept);
    c.acc_dtype = k.kept;
    c.acc = k.ring ? (void *)slots.data() : k.kept != DC_F32 ? (void *)narrow.data() : (void *)acc.data();
    c.partial = k.ring ? nullptr : partial.data();
    c.ring = k.ring;
    tree.assign(k.tree > 1 ? acc.size() * (size_t)(k.tree - 1) : 0, std::numeric_limits<float>::quiet_NaN());
    c.tree = k.tree;
    c.tree_acc = k.tree > 1 ? tree.data() : nullptr;
    dc_reducer *out = nullptr;
    WANT_OK(dc_reducer_create(&c, &out));
    reducer.reset(out);
  }

  // Gradients are freed as soon as they are released, so that a sanitizer sees every use after that.
  std::vector<std::unique_ptr<Bytes>> held;
  int64_t drop_released() {
    int64_t got[3], n = 0, total = 0;
    do {
      WANT_OK(dc_reducer_released(reducer.get(), got, 3, &n));
      for (int64_t i = 0; i < n; i++) {
        WANT(held[(size_t)got[i]], "parameter %lld was released twice", (long long)got[i]);
        std::fill(held[(size_t)got[i]]->begin(), held[(size_t)got[i]]->end(), (char)0xff);
        held[(size_t)got[i]].reset();
      }
      total += n;
    } while (n > 0);
    return total;
  }
  int64_t held_bytes() const {
    int64_t sum = 0;
    for (const auto &h : held) sum += h ? (int64_t)h->size() : 0;
    return sum;
  }
  int add(int mb, int64_t p) {
    held[(size_t)p] = std::make_unique<Bytes>(as(raw_gradient(k, rank, mb, p), k.grad));
    return dc_reducer_add(reducer.get(), p, held[(size_t)p]->data(), k.grad);
  }

  void pass(int mb, bool norm) {
    std::minstd_rand rng(k.seed * 31u + (unsigned)rank * 7u + (unsigned)mb);
    Ints order;
    for (int64_t p = 0; p < layout->nparams; p++)
      if (is_used(k, rank, mb, p)) order.push_back(p);
    if (k.shuffled) std::shuffle(order.begin(), order.end(), rng);
    held.clear();
    held.resize(k.numel.size());
    taken = 0;
    WANT_OK(dc_reducer_begin(reducer.get(), mb == 0 || k.ring, norm && !k.ring));
    WANT(dc_reducer_in_pass(reducer.get()) == 1);
    for (int64_t p : order) {
      if (k.sleepy && rng() % 3 == 0) usleep(rng() % 1500);
      WANT_OK(add(mb, p));
      drop_released();
      if (k.ring && rng() % 2) take(mb, 1 + (int64_t)(rng() % 3));
    }
    if (k.ring) finish_ring(mb);
    else WANT_OK(dc_reducer_finish(reducer.get()));
    WANT(dc_reducer_in_pass(reducer.get()) == 0);
    drop_released();
    WANT(held_bytes() == 0, "%lld bytes are held after finish", (long long)held_bytes());
  }

  // acc of flat element `flat`, if it is ours.
  bool mine(int64_t flat, int64_t *at) const {
    int64_t owner, index;
    WANT_OK(dc_zero_locate(layout.get(), flat, &owner, &index));
    *at = k.own_all ? flat : index;
    return k.own_all || owner == rank;
  }

  void check(int mb, bool norm) {
    if (k.tree && !norm) return;  // nodes lie in several buffers
    if (k.kept != DC_F32) acc = back(narrow, k.kept);
    std::vector<float> computed;
    if (!expected)
      for (int before = 0; before <= mb; before++) expect(k, *layout, before, computed);
    const float *want = expected ? expected + mb * layout->total : computed.data();
    int64_t at, seen = 0;
    for (int64_t i = 0; i < layout->total; i++) {
      if (!mine(i, &at)) continue;
      seen++;
      WANT(memcmp(&want[i], &acc[(size_t)at], sizeof(float)) == 0, "micro-batch %d, flat %lld: got %.9g, expected %.9g",
           mb, (long long)i, (double)acc[(size_t)at], (double)want[i]);
    }
    WANT(seen == (int64_t)acc.size());
    if (!norm || k.ring) return;
    std::vector<double> p(partial.size());
    WANT_OK(dc_sqnorm(acc.data(), DC_F32, (int64_t)acc.size(), p.data()));
    for (size_t b = 0; b < p.size(); b++)
      WANT(memcmp(&p[b], &partial[b], sizeof(double)) == 0, "micro-batch %d, partial %zu: got %.17g, expected %.17g",
           mb, b, partial[b], p[b]);
  }

  // The norm is asked for in the last micro-batch only: the others must leave `partial` alone.
  void step() {
    std::fill(partial.begin(), partial.end(), -1.0);
    for (int mb = 0; mb < k.micro_batches; mb++) {
      const bool norm = mb == k.micro_batches - 1;
      pass(mb, norm);
      check(mb, norm);
      if (!norm) WANT(std::count(partial.begin(), partial.end(), -1.0) == (int64_t)partial.size());
    }
  }
};

unsigned seed_of(const Config &k, int step) { return k.seed + 100u * (unsigned)step; }

// What the accumulators of a configuration's ranks must hold, step by step (Rank::expected). It is computed once for
// all of them, in a process of its own: this one would keep what it frees for a while (the sanitizer's quarantine), and
// each fork would copy that.
struct Expected {
  const Config k;
  int64_t per_step = 0;
  size_t size;
  float *values;

  Expected(const Config &config, int steps) : k(config) {
    const int64_t total = make_layout(k)->total;
    per_step = k.micro_batches * total;
    size = (size_t)std::max<int64_t>(1, steps * per_step);
    values = shared<float>(size);
    run_ranks(1, [&](int) {
      const Layout layout = make_layout(k);
      Config now = k;
      for (int step = 0; step < steps; step++) {
        std::vector<float> acc;
        now.seed = seed_of(k, step);
        for (int mb = 0; mb < k.micro_batches; mb++) {
          if (k.tree && mb < k.micro_batches - 1) continue; // see Rank::check
          expect(now, *layout, mb, acc);
          std::copy(acc.begin(), acc.end(), values + step * per_step + mb * total);
        }
      }
    });
  }
  ~Expected() { munmap(values, size * sizeof(float)); }

  void step(Rank &r, int step) const {
    r.k.seed = seed_of(k, step);
    r.expected = values + step * per_step;
    r.step();
  }
};

void check_steps(const Config &k, int steps = 1) {
  SCOPED_TRACE(format("world %d, wire %s, gradients %s, own_all %d, slots %d, limit %lld, seed %u", k.world,
                      dc_dtype_name(k.wire), dc_dtype_name(k.grad), k.own_all, k.slots, (long long)k.limit, k.seed));
  const std::string address = fresh_address();
  const Expected expected(k, steps);
  run_ranks(k.world, [&](int rank) {
    Rank r(k, rank, address);
    for (int step = 0; step < steps; step++) expected.step(r, step);
  });
}

// ---- results -------------------------------------------------------------------------------------------------------
TEST(Reducer, DtypesWorldsAndOwners) {
  unsigned seed = 10;
  for (int world : {1, 2, 4})
    for (int wire : {DC_F32, DC_BF16, DC_F16})
      for (int own_all : {0, 1}) {
        Config k;
        k.world = world;
        k.wire = k.grad = wire;
        k.own_all = own_all;
        k.seed = seed++;
        check_steps(k);
      }
}

TEST(Reducer, AccumulatesInSixteenBits) {
  unsigned seed = 400;
  for (int world : {1, 2})
    for (int kept : {DC_BF16, DC_F16})
      for (float scale : {1.0f, 0.375f}) {
        Config k;
        k.world = world;
        k.kept = kept;
        k.wire = k.grad = seed % 2 ? DC_F32 : kept;
        k.own_all = seed / 2 % 2;
        k.pre_scale = scale;
        k.numel = {5000, 17, 40000};  // longer than what is wide at a time
        k.bucket = 100000;
        k.never = 1;
        k.seed = seed++;
        check_steps(k);
      }
}

TEST(Reducer, GradientsOfAnotherDtypeAndPreScale) {
  for (int world : {1, 2})
    for (float scale : {1.0f, 0.375f, 0.1f}) {
      Config k;
      k.world = world;
      k.wire = DC_BF16;
      k.grad = DC_F32;
      k.pre_scale = scale;
      k.seed = 40;
      check_steps(k);
      std::swap(k.wire, k.grad);
      check_steps(k);
      k.wire = k.grad = DC_BF16;
      check_steps(k);
    }
}

TEST(Reducer, DelaysSmallWindowsAndNoRoomForPending) {
  unsigned seed = 60;
  for (int world : {2, 4})
    for (int slots : {2, 5})
      for (int64_t limit : {(int64_t)0, (int64_t)30000, INT64_MAX}) {
        Config k;
        k.world = world;
        k.slots = slots;
        k.limit = limit;
        k.sleepy = true;
        k.seed = seed++;
        check_steps(k);
      }
}

TEST(Reducer, BucketSizes) {
  for (int64_t bucket : {(int64_t)20000, INT64_MAX}) {
    Config k;
    k.bucket = bucket;
    k.seed = 80;
    check_steps(k, 2);
    k.world = 1;
    check_steps(k, 2);
  }
}

TEST(Reducer, Rings) {
  unsigned seed = 200;
  for (int world : {1, 2, 4})
    for (int ring : {1, 2, 5})
      for (int own_all : {0, 1}) {
        Config k;
        k.world = world;
        k.ring = ring;
        k.own_all = own_all;
        k.sleepy = world == 2;
        k.limit = ring == 1 ? 0 : 1 << 20;
        k.seed = seed++;
        k.micro_batches = 2;
        if (own_all == ring % 2) check_steps(k);
        k.numel = {3000, 10};
        k.never = -1;
        check_steps(k);
      }
}

int tree_buffers(int world, int passes) {
  int most = 1;
  for (int p = 1; p < passes; p++) most = std::max(most, __builtin_popcount((unsigned)(world * p)));
  return most;
}

// Every pair of a wire, a number of ranks and a number of passes.
TEST(Tree, AddsAlongTheIndexOfMicroBatches) {
  constexpr int kPasses[] = {1, 2, 3, 7};
  unsigned seed = 300;
  for (int wire : {DC_F32, DC_BF16, DC_F16})
    for (int world : {1, 2, 3, 4})
      for (int at = (world + wire) % 2; at < 4; at += 2) {
        const int passes = kPasses[at];
        Config k;
        k.world = world;
        k.wire = wire;
        k.grad = seed % 3 ? DC_F32 : wire;
        k.own_all = seed % 2;
        k.micro_batches = passes;
        k.tree = tree_buffers(world, passes);
        k.pre_scale = seed % 5 ? 1.0f : 0.5f;
        k.numel = {5000, 0, 3, 9000, 64, 4096, 1, 4500};
        k.seed = seed++;
        check_steps(k, seed % 4 ? 1 : 2);
      }
}

TEST(Tree, EveryInstructionSetAndThreads) {
  for (int world : {1, 3}) {
    Config k;
    k.world = world;
    k.wire = DC_BF16;
    k.grad = DC_BF16;
    k.bucket = 1 << 18;
    k.numel = {1 << 18, 100000, 77777};
    k.micro_batches = 3;
    k.tree = tree_buffers(world, 3);
    k.seed = 400;
    const Expected expected(k, 1);
    for (int isa = 0; isa < DC_ISA_COUNT; isa++) {
      if (!dc_isa_available(isa)) continue;
      const std::string address = fresh_address();
      run_ranks(world, [&](int rank) {
        WANT_OK(dc_isa_force(isa));
        WANT_OK(dc_set_num_threads(2));
        Rank r(k, rank, address);
        expected.step(r, 0);
      });
    }
  }
}

// Eight micro-batches with equal gradients, dealt to 1, 2, 4 and 8 ranks; and six, to 1, 2, 3 and 6.
TEST(Tree, SameBitsInEveryLayout) {
  for (int total : {8, 6}) {
    std::vector<float> first;
    for (int world = 1; world <= total; world++) {
      if (total % world) continue;
      for (int own_all : {0, 1}) {
        Config k;
        k.world = world;
        k.own_all = own_all;
        k.numel = {5000, 4096, 17, 9000};
        k.tree = tree_buffers(world, total / world);
        k.unused = 0;
        k.never = -1;
        Layout l = make_layout(k);
        const size_t bytes = (size_t)l->total * sizeof(float);
        float *whole = (float *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        const std::string address = fresh_address();
        run_ranks(world, [&](int rank) {
          Rank r(k, rank, address);
          for (int pass = 0; pass < total / world; pass++) {
            WANT_OK(dc_reducer_begin(r.reducer.get(), pass == 0, pass == total / world - 1));
            std::vector<std::vector<float>> held;
            for (int64_t p = 0; p < l->nparams; p++) {
              held.push_back(raw_gradient(k, 0, pass * world + rank, p));  // of the micro-batch, not of the rank
              WANT_OK(dc_reducer_add(r.reducer.get(), p, held.back().data(), DC_F32));
            }
            WANT_OK(dc_reducer_finish(r.reducer.get()));
          }
          int64_t at;
          for (int64_t i = 0; i < l->total; i++)
            if (r.mine(i, &at) && (!own_all || rank == 0)) whole[i] = r.acc[(size_t)at];
        });
        const size_t same = 4096 * 4;  // the flat space of one rank is the shortest
        if (first.empty()) first.assign(whole, whole + same);
        EXPECT_EQ(0, memcmp(first.data(), whole, same * sizeof(float)))
            << total << " on " << world << ", own_all " << own_all;
        munmap(whole, bytes);
      }
    }
  }
}

TEST(Tree, MistakesLeaveItUsable) {
  Config k;
  k.world = 1;
  k.tree = 1;
  k.micro_batches = 2;
  run_ranks(1, [&](int) {
    Rank r(k, 0, "");
    dc_reducer *p = r.reducer.get();
    WANT_OK(dc_reducer_begin(p, 1, 0));
    WANT_OK(dc_reducer_finish(p));
    WANT_OK(dc_reducer_begin(p, 0, 0));  // two leaves: one node
    WANT_OK(dc_reducer_finish(p));
    WANT(dc_reducer_begin(p, 0, 0) == DC_E_STATE);
    WANT(strstr(dc_last_error(), "after 3 micro-batches the tree has 2 nodes"), "%s", dc_last_error());
    WANT_OK(dc_reducer_begin(p, 0, 1));  // the last one needs no place
    WANT_OK(dc_reducer_finish(p));
    WANT(dc_reducer_begin(p, 0, 0) == DC_E_STATE);
    WANT(strstr(dc_last_error(), "must assign"), "%s", dc_last_error());
    r.step();
    dc_reducer_config c = {};
    c.struct_size = sizeof c;
    c.layout = r.layout.get();
    c.pre_scale = 1;
    c.acc = r.acc.data();
    dc_reducer *out = nullptr;
    for (int tree : {-1, 2, 33}) {
      c.tree = tree;
      WANT(dc_reducer_create(&c, &out) == DC_E_INVALID, "tree %d", tree);
    }
  });
}

TEST(Tree, ARingTakesTheSumOfItsRanks) {
  for (int world : {1, 2, 4}) {
    Config k;
    k.world = world;
    k.ring = 2;
    k.tree = 1;
    k.micro_batches = 1;
    k.seed = 500u + (unsigned)world;
    const std::string address = fresh_address();
    run_ranks(world, [&](int rank) {
      Rank r(k, rank, address);
      r.pass(0, true);
      const std::vector<float> want = expected_tree(k, *r.layout, 1);
      int64_t at;
      for (int64_t i = 0; i < r.layout->total; i++)
        if (r.mine(i, &at))
          WANT(memcmp(&want[(size_t)i], &r.acc[(size_t)at], sizeof(float)) == 0, "flat %lld", (long long)i);
    });
  }
}

TEST(Reducer, MistakesWithARingLeaveItUsable) {
  Config k;
  k.ring = 2;
  k.unused = 0;
  k.never = -1;
  k.shuffled = false;
  const std::string address = fresh_address();
  run_ranks(k.world, [&](int rank) {
    Rank r(k, rank, address);
    dc_reducer *red = r.reducer.get();
    int64_t n = 0;
    float x = 0;
    WANT(dc_reducer_begin(red, 0, 0) == DC_E_INVALID);
    WANT(dc_reducer_begin(red, 1, 1) == DC_E_INVALID);
    WANT(dc_reducer_add(red, 6, &x, DC_F32) == DC_E_STATE);  // no pass is begun implicitly
    WANT(dc_reducer_reduced(red, nullptr) == DC_E_INVALID);
    r.held.resize(k.numel.size());
    WANT_OK(dc_reducer_begin(red, 1, 0));
    for (int64_t p = 0; p < (int64_t)k.numel.size(); p++) WANT_OK(r.add(0, p));
    WANT_OK(dc_reducer_reduced(red, &n));
    while (n < k.ring) {
      WANT_OK(dc_reducer_finish(red));
      WANT_OK(dc_reducer_reduced(red, &n));
    }
    WANT(n == k.ring && r.layout->nbuckets > n);
    WANT(dc_reducer_finish(red) == DC_E_STATE && strstr(dc_last_error(), "give buckets back"));
    WANT(dc_reducer_give_back(red, n + 1) == DC_E_INVALID);
    WANT_OK(dc_reducer_give_back(red, 1));
    WANT(dc_reducer_give_back(red, 0) == DC_E_INVALID);
    WANT_OK(dc_reducer_give_back(red, n));
    WANT_OK(dc_reducer_finish(red));
    WANT(dc_reducer_in_pass(red) == 1);
    while (dc_reducer_in_pass(red)) {
      WANT_OK(dc_reducer_reduced(red, &n));
      WANT_OK(dc_reducer_give_back(red, n));
      WANT_OK(dc_reducer_finish(red));
    }
    r.drop_released();
    r.step();
  });
  dc_reducer_config c = {};
  c.struct_size = sizeof c;
  Layout l = make_layout(k);
  c.layout = l.get();
  c.ring = 2;
  float acc[1];
  c.acc = acc;
  dc_reducer *out = nullptr;
  EXPECT_EQ(DC_E_INVALID, dc_reducer_create(&c, &out));  // no comm
  EXPECT_NE(nullptr, strstr(dc_last_error(), "ring is 2"));
}

TEST(Reducer, ManySteps) {
  Config k;
  k.numel = {3000, 7000, 100};
  k.never = -1;
  k.limit = 0;
  k.seed = 90;
  check_steps(k, 30);
}

TEST(Reducer, MostParametersUnused) {
  Config k;
  k.unused = 0.9;
  k.world = 4;
  for (k.seed = 95; k.seed < 99; k.seed++) check_steps(k);
  k.world = 1;
  check_steps(k);
}

TEST(Reducer, NoParametersAndOnlyEmptyOnes) {
  for (int world : {1, 2})
    for (const Ints &numel : {Ints{}, Ints{0, 0}}) {
      Config k;
      k.world = world;
      k.numel = numel;
      k.never = -1;
      check_steps(k);
    }
}

TEST(Reducer, EveryInstructionSetAndThreads) {
  for (int isa = 0; isa < DC_ISA_COUNT; isa++) {
    if (!dc_isa_available(isa)) continue;
    const std::string address = fresh_address();
    Config k;
    k.bucket = 20000;
    run_ranks(2, [&](int rank) {
      WANT_OK(dc_isa_force(isa));
      WANT_OK(dc_set_num_threads(3));
      Rank r(k, rank, address);
      r.step();
    });
  }
}

// Two reducers one after the other on one communicator: shards and whole buckets hold the same bits.
TEST(Reducer, OwnAllEqualsShards) {
  Config k;
  k.world = 4;
  k.wire = k.grad = DC_BF16;
  const std::string address = fresh_address();
  run_ranks(k.world, [&](int rank) {
    Rank part(k, rank, address);
    Config whole_config = k;
    whole_config.own_all = 1;
    Rank whole(whole_config, rank, address, part.comm);
    part.step();
    whole.step();
    for (int64_t i = 0, at; i < part.layout->total; i++)
      if (part.mine(i, &at))
        WANT(memcmp(&part.acc[(size_t)at], &whole.acc[(size_t)i], 4) == 0, "flat %lld", (long long)i);
    for (int64_t b = 0; b < part.layout->nbuckets; b++) {
      int64_t begin, end, shard;
      WANT_OK(dc_zero_slice(part.layout.get(), b, rank, &begin, &end, &shard));
      WANT(memcmp(&part.partial[(size_t)(shard / DC_BLOCK)], &whole.partial[(size_t)(begin / DC_BLOCK)],
                  (size_t)((end - begin) / DC_BLOCK) * sizeof(double)) == 0,
           "bucket %lld", (long long)b);
    }
  });
}

// A rank without gradients adds zeros: one rank with all gradients gives the same in every world.
TEST(Reducer, SameBitsInEveryWorld) {
  Config k;
  k.own_all = 1;
  k.unused = 0;
  k.never = -1;
  k.micro_batches = 2;
  const size_t most = 200000;
  float *results = shared<float>(3 * most);
  const int worlds[] = {1, 2, 4};
  for (int w = 0; w < 3; w++) {
    k.world = worlds[w];
    const std::string address = fresh_address();
    run_ranks(k.world, [&](int rank) {
      Rank r(k, rank, address);
      for (int mb = 0; mb < 2; mb++) {
        if (rank == k.world - 1) {
          r.rank = 0;  // the gradients of rank 0, whoever has them
          r.pass(mb, true);
          continue;
        }
        WANT_OK(dc_reducer_begin(r.reducer.get(), mb == 0, 1));
        WANT_OK(dc_reducer_finish(r.reducer.get()));
      }
      WANT(r.acc.size() <= most);
      if (rank == 0) memcpy(results + (size_t)w * most, r.acc.data(), r.acc.size() * 4);
    });
  }
  int64_t nonzero = 0;
  for (size_t i = 0; i < most; i++) nonzero += results[i] != 0;
  EXPECT_GT(nonzero, 50000);
  EXPECT_EQ(0, memcmp(results, results + most, most * 4));
  EXPECT_EQ(0, memcmp(results, results + 2 * most, most * 4));
  munmap(results, 3 * most * 4);
}

TEST(Reducer, NonFiniteGradientsReachTheNorm) {
  for (int world : {1, 2}) {
    Config k;
    k.world = world;
    k.numel = {10000, 9000};
    k.never = -1;
    const std::string address = fresh_address();
    run_ranks(world, [&](int rank) {
      Rank r(k, rank, address);
      std::vector<float> a(10000, 1.0f), b(9000, 1.0f);
      if (rank == 0) a[5000] = INFINITY;
      WANT_OK(dc_reducer_begin(r.reducer.get(), 1, 1));
      WANT_OK(dc_reducer_add(r.reducer.get(), 1, b.data(), DC_F32));
      WANT_OK(dc_reducer_add(r.reducer.get(), 0, a.data(), DC_F32));
      WANT_OK(dc_reducer_finish(r.reducer.get()));
      int64_t owner, at;
      WANT_OK(dc_zero_locate(r.layout.get(), 5000, &owner, &at));
      for (size_t p = 0; p < r.partial.size(); p++)
        WANT(std::isfinite(r.partial[p]) == !(owner == rank && (int64_t)p == at / DC_BLOCK), "partial %zu", p);
    });
  }
}

// ---- how it behaves ------------------------------------------------------------------------------------------------
TEST(Reducer, GradientsAreReleasedAtOnceWhereThereIsRoom) {
  for (int world : {1, 2}) {
    Config k;
    k.world = world;
    k.bucket = INT64_MAX;
    k.never = -1;
    k.unused = 0;
    const std::string address = fresh_address();
    run_ranks(world, [&](int rank) {
      Rank r(k, rank, address);
      r.held.resize(k.numel.size());
      for (int64_t p = 0; p < r.layout->nparams; p++) {
        WANT_OK(r.add(0, p));  // the first one begins the pass
        WANT(r.drop_released() == 1, "parameter %lld", (long long)p);
      }
      WANT_OK(dc_reducer_finish(r.reducer.get()));
      WANT(r.drop_released() == 0);
      r.check(0, true);
    });
  }
}

TEST(Reducer, PendingBytesStayBelowTheLimit) {
  Config k;
  k.numel = Ints(200, 3000);
  k.never = -1;
  k.unused = 0;
  k.shuffled = false;
  k.slots = 2;
  k.limit = 50000;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Rank r(k, rank, address);
    r.held.resize(k.numel.size());
    WANT_OK(dc_reducer_begin(r.reducer.get(), 1, 1));
    for (int64_t p = 0; p < 200; p++) {
      if (rank == 1 && p % 10 == 0) usleep(1000);
      WANT_OK(r.add(0, p));
      r.drop_released();
      WANT(r.held_bytes() <= k.limit, "%lld bytes are held after parameter %lld", (long long)r.held_bytes(),
           (long long)p);
    }
    WANT_OK(dc_reducer_finish(r.reducer.get()));
    r.drop_released();
    r.check(0, true);
  });
}

// Opposite orders and no room: nobody may block, because each waits for gradients that the other adds last.
TEST(Reducer, OppositeOrdersDoNotDeadlock) {
  Config k;
  k.numel = Ints(60, 3000);
  k.never = -1;
  k.unused = 0;
  k.slots = 2;
  k.limit = 0;
  k.micro_batches = 1;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Rank r(k, rank, address);
    r.held.resize(60);
    for (int64_t i = 0; i < 60; i++) WANT_OK(r.add(0, rank ? 59 - i : i));
    WANT_OK(dc_reducer_finish(r.reducer.get()));
    WANT(r.drop_released() == 60);
    r.check(0, true);
  });
}

TEST(Reducer, CountersTellWhatMoved) {
  Config k;
  k.numel = {10000, 5000};
  k.never = -1;
  k.unused = 0;
  k.micro_batches = 1;
  k.wire = k.grad = DC_BF16;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Rank r(k, rank, address);
    dc_counter_reset();
    r.pass(0, true);
    WANT(dc_counter_get(DC_COUNTER_bucket_bytes_in) == 15000 * 2);
    WANT(dc_counter_get(DC_COUNTER_buckets_reduced) == r.layout->nbuckets);
    WANT(dc_counter_get(DC_COUNTER_bucket_bytes_reduced) == r.layout->shard_elems * 2 * 2);
  });
}

// ---- errors --------------------------------------------------------------------------------------------------------
TEST(Reducer, WrongCallsAreNamedAndLeaveThePassAlone) {
  for (int world : {1, 2}) {
    Config k;
    k.world = world;
    k.unused = 0;
    const std::string address = fresh_address();
    run_ranks(world, [&](int rank) {
      Rank r(k, rank, address);
      dc_reducer *x = r.reducer.get();
      alignas(8) static char grad[20000 * 4];
      int64_t n;
      WANT(dc_reducer_finish(x) == DC_E_STATE);
      WANT_OK(dc_reducer_begin(x, 1, 1));
      WANT(dc_reducer_begin(x, 1, 1) == DC_E_STATE);
      r.held.resize(k.numel.size());
      for (int64_t p : {8, 0, 3}) {
        WANT_OK(r.add(0, p));
        WANT(dc_reducer_add(x, p, grad, DC_F32) == DC_E_STATE);
        WANT(strstr(dc_last_error(), ("parameter " + std::to_string(p)).c_str()), "%s", dc_last_error());
      }
      WANT(dc_reducer_add(x, 10, grad, DC_F32) == DC_E_INVALID);
      WANT(dc_reducer_add(x, -1, grad, DC_F32) == DC_E_INVALID);
      WANT(dc_reducer_add(x, 2, nullptr, DC_F32) == DC_E_INVALID);
      WANT(dc_reducer_add(x, 2, grad + 2, DC_F32) == DC_E_INVALID);
      WANT(dc_reducer_add(x, 2, grad, DC_F64) == DC_E_DTYPE);
      WANT(dc_reducer_add(x, 2, grad, 99) == DC_E_DTYPE);
      WANT(dc_reducer_gather(x, grad, DC_F32) == DC_E_STATE);
      WANT(dc_reducer_released(x, nullptr, 1, &n) == DC_E_INVALID);
      WANT(dc_reducer_add(nullptr, 0, grad, DC_F32) == DC_E_INVALID);
      for (int64_t p : {1, 2, 4, 5, 6, 9}) WANT_OK(r.add(0, p));
      WANT_OK(dc_reducer_finish(x));
      WANT(dc_reducer_finish(x) == DC_E_STATE);
      WANT(dc_reducer_gather(x, grad, 99) == DC_E_DTYPE);
      WANT(dc_reducer_gather(x, nullptr, DC_F32) == DC_E_INVALID);
      r.drop_released();
      r.check(0, true);
    });
  }
}

TEST(Reducer, WrongConfigs) {
  Config k;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Layout l = make_layout(k);
    Config alone_config = k;
    alone_config.world = 1;
    Layout alone = make_layout(alone_config);
    Comm comm = join(k, rank, address, 32768);
    std::vector<float> acc((size_t)l->total);
    auto status = [&](auto change) {
      dc_reducer_config c = {};
      c.struct_size = sizeof c;
      c.comm = comm.get();
      c.layout = l.get();
      c.rank = rank;
      c.pre_scale = 1;
      c.acc = acc.data();
      change(c);
      dc_reducer *out = nullptr;
      int rc = dc_reducer_create(&c, &out);
      WANT((rc == DC_OK) == (out != nullptr));
      dc_reducer_free(out);
      return rc;
    };
    WANT_OK(status([](auto &) {}));
    WANT(status([](auto &c) { c.layout = nullptr; }) == DC_E_INVALID);
    WANT(status([](auto &c) { c.dtype = DC_F64; }) == DC_E_DTYPE);
    WANT(status([](auto &c) { c.own_all = 2; }) == DC_E_INVALID);
    WANT(status([](auto &c) { c.rank = 2; }) == DC_E_INVALID);
    WANT(status([&](auto &c) { c.rank = 1 - rank; }) == DC_E_INVALID);
    WANT(status([](auto &c) { c.pre_scale = NAN; }) == DC_E_INVALID);
    WANT(status([](auto &c) { c.pending_limit_bytes = -1; }) == DC_E_INVALID);
    WANT(status([](auto &c) { c.acc = nullptr; }) == DC_E_INVALID);
    WANT(status([](auto &c) { c.acc_dtype = DC_F64; }) == DC_E_DTYPE);
    WANT(status([](auto &c) { c.acc_dtype = DC_BF16, c.tree = 1; }) == DC_E_INVALID);
    WANT(status([](auto &c) { c.acc_dtype = DC_BF16, c.ring = 2; }) == DC_E_INVALID);
    WANT_OK(status([](auto &c) { c.acc_dtype = DC_F16; }));
    WANT_OK(status([](auto &c) { c.struct_size = offsetof(dc_reducer_config, acc_dtype); }));  // an older caller
    WANT(status([](auto &c) { c.comm = nullptr; }) == DC_E_INVALID);
    WANT(status([&](auto &c) { c.layout = alone.get(), c.rank = 0; }) == DC_E_INVALID);
    Config large = k;
    large.bucket = 16384;
    Layout too_large = make_layout(large);
    WANT(status([&](auto &c) { c.layout = too_large.get(); }) == DC_E_INVALID);
    WANT(strstr(dc_last_error(), "does not fit"), "%s", dc_last_error());
    WANT(dc_reducer_create(nullptr, nullptr) == DC_E_INVALID);
    WANT_OK(dc_reducer_free(nullptr));
    // norm without a place for it
    dc_reducer_config c = {};
    c.struct_size = sizeof c;
    c.comm = comm.get();
    c.layout = l.get();
    c.rank = rank;
    c.pre_scale = 1;
    c.acc = acc.data();
    dc_reducer *out = nullptr;
    WANT_OK(dc_reducer_create(&c, &out));
    Reducer r(out);
    WANT(dc_reducer_begin(out, 1, 1) == DC_E_INVALID);
    WANT(dc_reducer_in_pass(out) == 0);
    WANT_OK(dc_barrier(comm.get(), 1));
  });
}

// After a failure: every call returns it, and all gradients are given back.
void expect_broken(Rank &r, int rc) {
  float one = 1;
  WANT(dc_reducer_add(r.reducer.get(), 2, &one, DC_F32) == rc, "got another status than %d", rc);
  WANT(dc_reducer_finish(r.reducer.get()) == rc);
  WANT(dc_reducer_begin(r.reducer.get(), 1, 1) == rc);
  WANT(dc_reducer_gather(r.reducer.get(), &one, DC_F32) == rc);
  WANT(dc_reducer_in_pass(r.reducer.get()) == 0);
  r.drop_released();
  WANT(r.held_bytes() == 0);
}

TEST(Reducer, AKilledRankRaisesOnTheOthers) {
  for (int64_t limit : {(int64_t)0, INT64_MAX}) {
    Config k;
    k.world = 4;
    k.limit = limit;
    k.shuffled = false;
    k.slots = 2;
    k.unused = 0;
    const std::string address = fresh_address();
    run_ranks(k.world,
              [&](int rank) {
                Rank r(k, rank, address);
                r.step();
                r.held.clear();
                r.held.resize(k.numel.size());
                WANT_OK(dc_reducer_begin(r.reducer.get(), 1, 1));
                int rc = DC_OK;
                for (int64_t p = 0; p < r.layout->nparams && rc == DC_OK; p++) {
                  if (rank == 2 && p == 4) raise(SIGKILL);
                  rc = r.add(0, p);
                  r.drop_released();
                }
                if (rc == DC_OK) rc = dc_reducer_finish(r.reducer.get());
                WANT(rc == DC_E_PEER_DIED, "status %d: %s", rc, dc_last_error());
                WANT(strstr(dc_last_error(), "rank 2"), "%s", dc_last_error());
                expect_broken(r, rc);
              },
              {2});
  }
}

TEST(Reducer, DifferentBucketsAreAMismatchOnAllRanks) {
  Config k;
  k.world = 2;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Comm comm = join(k, rank, address, 65536);
    Config mine = k;
    mine.wire = mine.grad = rank ? DC_BF16 : DC_F32;
    Rank r(mine, rank, address, comm.get());
    r.held.resize(k.numel.size());
    WANT_OK(dc_reducer_begin(r.reducer.get(), 1, 0));
    int rc = dc_reducer_finish(r.reducer.get());
    WANT(rc == DC_E_MISMATCH, "status %d: %s", rc, dc_last_error());
    expect_broken(r, rc);
  });
}

TEST(Reducer, FreedInsideAPassTellsThePeers) {
  Config k;
  k.world = 2;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Rank r(k, rank, address);
    r.held.resize(k.numel.size());
    int rc = r.add(0, 3);
    if (rank == 1) {
      WANT_OK(rc);
      r.reducer.reset();
      r.held.clear();
      return;
    }
    if (rc == DC_OK) rc = dc_reducer_finish(r.reducer.get()); /* the add may have seen it already */
    WANT(rc == DC_E_ABORTED, "status %d: %s", rc, dc_last_error());
    expect_broken(r, rc);
  });
}

// A gradient that lies in the slot it goes to can't be cast there: a failure of this rank alone, in the middle of a
// pass.
TEST(Reducer, AFailureInsideAPassTellsThePeers) {
  Config k;
  k.wire = DC_BF16;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Rank r(k, rank, address);
    r.held.resize(k.numel.size());
    const void *slot = dc_exchange_peer(r.comm, 0, 0);
    int rc = rank == 0 ? dc_reducer_add(r.reducer.get(), 0, slot, DC_F32) : DC_OK;
    if (rank == 0) {
      WANT(rc == DC_E_INVALID, "status %d: %s", rc, dc_last_error());
      int64_t given, n;
      WANT_OK(dc_reducer_released(r.reducer.get(), &given, 1, &n));
      WANT(n == 1 && given == 0);
    } else {
      WANT_OK(dc_reducer_begin(r.reducer.get(), 1, 1));
      rc = dc_reducer_finish(r.reducer.get());
      WANT(rc == DC_E_ABORTED, "status %d: %s", rc, dc_last_error());
      WANT(strstr(dc_last_error(), "overlap"), "%s", dc_last_error());
    }
    expect_broken(r, rc);
  });
}

TEST(Reducer, AForkedChildMayNotUseIt) {
  Config k;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Rank r(k, rank, address);
    r.held.resize(k.numel.size());
    pid_t pid = fork();
    if (pid == 0) {
      static float grad[20000];
      _exit(dc_reducer_add(r.reducer.get(), 3, grad, DC_F32) == DC_E_STATE ? 0 : 1);
    }
    int status = -1;
    WANT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
    r.step();  // the parents are unharmed
  });
}

// ---- gather --------------------------------------------------------------------------------------------------------
unsigned char byte_at(int64_t i, int round) { return (unsigned char)(i * 131 + (i >> 9) * 7 + round * 13 + 5); }

TEST(Reducer, GatherRestoresReplicas) {
  for (int world : {1, 2, 4})
    for (int dtype : {DC_F32, DC_BF16, DC_F64, DC_U8}) {
      Config k;
      k.world = world;
      k.wire = k.grad = DC_BF16;  // slots of 8 KiB per rank: an fp64 slice does not fit in one piece
      k.bucket = dtype == DC_U8 ? 30000 : 1;
      const std::string address = fresh_address();
      run_ranks(world, [&](int rank) {
        Rank r(k, rank, address);
        const int64_t elem = (int64_t)dc_dtype_size(dtype), total = r.layout->total;
        for (int round = 0; round < 3; round++) {
          // exactly `total` elements, so that a sanitizer sees a step too far
          Bytes flat((size_t)(total * elem), (char)0xee);
          for (int64_t i = 0; i < total; i++) {
            int64_t owner, at;
            WANT_OK(dc_zero_locate(r.layout.get(), i, &owner, &at));
            for (int64_t b = i * elem; owner == rank && b < (i + 1) * elem; b++)
              flat[(size_t)b] = (char)byte_at(b, round);
          }
          WANT_OK(dc_reducer_gather(r.reducer.get(), flat.data(), dtype));
          for (int64_t b = 0; b < total * elem; b++)
            WANT(flat[(size_t)b] == (char)byte_at(b, round), "round %d, byte %lld", round, (long long)b);
          if (round == 1) r.step();  // passes and gathers share the slots
        }
      });
    }
}

TEST(Reducer, GatherAgainstAPassIsAMismatch) {
  Config k;
  const std::string address = fresh_address();
  run_ranks(2, [&](int rank) {
    Rank r(k, rank, address);
    r.held.resize(k.numel.size());
    int rc;
    if (rank == 0) {
      WANT_OK(dc_reducer_begin(r.reducer.get(), 1, 0));
      rc = dc_reducer_finish(r.reducer.get());
    } else {
      std::vector<float> flat((size_t)r.layout->total);
      rc = dc_reducer_gather(r.reducer.get(), flat.data(), DC_F32);
    }
    WANT(rc == DC_E_MISMATCH, "status %d: %s", rc, dc_last_error());
    expect_broken(r, rc);
  });
}

}  // namespace
