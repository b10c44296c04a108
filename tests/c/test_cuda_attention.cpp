// test_cuda_attention.cpp: the CUDA bodies of attention and its gradient (ops/cuda/attention.cuh, compiled for the
// CPU): whole blocks of threads with their barriers, shuffles and mma fragments (block_stand_in.h), against the
// definition in double, in two orders of the threads; what is hidden is not read. Launches need a GPU:
// tests/python/test_gpu_ops.py.
#include "attention_cases.h"
#include "cuda/attention.cuh"
#include "cuda_fixture.h"

namespace {

using namespace dc_gpu;
using namespace attention_cases;

class CudaAttention : public CudaBlocks {};

// Calls body(unit, shared memory) as the threads of a block, for each unit: a GPU's grid, block by block. Shared memory
// begins full of NaN.
Block::Order order_of_threads = Block::kForwards;
template <class F> void launch(int64_t units, int bytes, F body) {
  static Block block;
  for (int64_t unit = 0; unit < units; unit++) {
    std::vector<uint8_t> memory((size_t)bytes + 16, 0xff);
    char *room = (char *)memory.data() + (16 - (uintptr_t)memory.data() % 16) % 16;
    shared_begin = room, shared_end = room + bytes;
    block.run(ATT_THREADS, order_of_threads, [&] { body(unit, room); });
    shared_begin = shared_end = nullptr;
  }
}
int wide_runs, narrow_runs, ahead_runs, whole_runs, piece_runs;
// Of shared memory: what a Hopper has, an Ampere, and so little that wide tiles come in pieces.
const AttRoom kHopper = {227 << 10, 113 << 10}, kLeast = {24 << 10, 12 << 10};
AttRoom room_of_device;
void note(const AttPlan &plan) {
  wide_runs += plan.wide, narrow_runs += !plan.wide;
  ahead_runs += plan.next > 0, whole_runs += plan.whole && !plan.next, piece_runs += !plan.whole;
}

// What dc_cuda_attention launches.
int run_forward(const dc_attention_args *args) {
  with_low(args->dtype, [&](auto tag) {
    using T = decltype(tag);
    const AttPlan plan = att_forward_plan(*args, room_of_device);
    note(plan);
    launch(plan.units, plan.bytes, [&](int64_t unit, char *room) {
      const bool plain = att_plain(*args);
      if (plan.sums == 64) (plain ? att_forward<T, 8, true> : att_forward<T, 8, false>)(*args, plan, room, unit);
      else (plain ? att_forward<T, 16, true> : att_forward<T, 16, false>)(*args, plan, room, unit);
    });
  });
  return DC_OK;
}
int run_backward(const dc_attention_grad_args *args) {
  const dc_attention_grad_args &a = *args;
  with_low(a.dtype, [&](auto tag) {
    using T = decltype(tag);
    std::vector<float> deltas((size_t)(a.batch * a.heads * a.rows));
    launch((int64_t)deltas.size(), 0, [&](int64_t row, char *) {
      if (block_thread() >= WARP) return;
      const float delta = att_delta<T>(a, row / a.rows / a.heads, row / a.rows % a.heads, row % a.rows);
      if (block_thread() == 7) deltas[(size_t)row] = delta;
    });
    const AttPlan of_q = att_grad_plan(ATT_DQ, a, room_of_device), of_kv = att_grad_plan(ATT_DKV, a, room_of_device);
    note(of_q);
    note(of_kv);
    launch(of_q.units, of_q.bytes, [&](int64_t unit, char *room) {
      const bool plain = att_plain(a);
      const auto narrow = plain ? att_grad_q<T, 8, true> : att_grad_q<T, 8, false>;
      const auto broad = plain ? att_grad_q<T, 16, true> : att_grad_q<T, 16, false>;
      (of_q.sums == 64 ? narrow : broad)(a, of_q, deltas.data(), room, unit);
    });
    launch(of_kv.units, of_kv.bytes, [&](int64_t unit, char *room) {
      const bool plain = att_plain(a);
      const auto narrow = plain ? att_grad_kv<T, 8, true> : att_grad_kv<T, 8, false>;
      const auto broad = plain ? att_grad_kv<T, 16, true> : att_grad_kv<T, 16, false>;
      (of_kv.sums == 64 ? narrow : broad)(a, of_kv, deltas.data(), room, unit);
    });
    if (!a.dbias) return;
    const AttPlan of_bias = att_grad_plan(ATT_DBIAS, a, room_of_device);
    const AttBiasUnits n = att_bias_units(a);
    launch(att_bias_count(n), of_bias.bytes,
           [&](int64_t unit, char *room) { att_grad_bias<T>(a, of_bias, n, deltas.data(), room, unit); });
  });
  return DC_OK;
}

std::vector<std::vector<uint8_t>> forward_on(const Case &c, const std::vector<Array> &arrays, Place place = kAtStart) {
  return run_once(arrays, place, [&](auto &p) { return forward(c, p, run_forward); });
}
std::vector<std::vector<uint8_t>> backward_on(const Case &c, const std::vector<Array> &arrays, Place place = kAtStart) {
  return run_once(arrays, place, [&](auto &p) { return backward(c, p, run_backward); });
}

// Pieces of columns, several units a tile, widths that are no multiple of 8; then rates beside each other.
std::vector<Case> more_cases(int dt) {
  return {{dt, 1, 1, 1, 70, 90, 128, true, 20, false, 16, 1},
          {dt, 1, 2, 1, 66, 40, 200, false, 0, true, 0, 1, false, true, DC_F32, true},
          {dt, 1, 1, 1, 40, 40, 256, true, 0, false, 32, 1, false, false, -1, false, 0, 0.3f},
          {dt, 1, 1, 1, 64, 128, 64, false, 0, false, 64, 1},
          {dt, 1, 1, 1, 20, 20, 33, true, 0, false, 0, 1, false, false, DC_F16, false, 0, 0.875f},
          {dt, 2, 1, 1, 70, 70, 16, false, 0, false, 112, 1, true}};
}

void check(const Case &c, Place place, const std::string &what) {
  const auto after = forward_on(c, arrays_of(c), place);
  const auto more = grad_arrays_of(c, after);
  const auto got = backward_on(c, more, place);
  const Exact want = exact(c, got);
  const double bound = c.dt == DC_F32 ? 4e-6 : c.dt == DC_F16 ? 2e-3 : 1.6e-2;
  EXPECT_LT(off(values(DC_F32, got[4]), want.lse), 1e-5) << what;
  EXPECT_LT(off(values(c.dt, got[3]), want.out), bound) << what;
  EXPECT_LT(off(values(c.dt, got[7]), want.dq), bound) << what;
  EXPECT_LT(off(values(c.dt, got[8]), want.dk), bound) << what;
  EXPECT_LT(off(values(c.dt, got[9]), want.dv), bound) << what;
  EXPECT_LT(off(values(DC_F32, got[10]), want.dbias), bound) << what;
}

// DEEPC_TEST_FULL=1: each case in each dtype, else in one of them.
TEST_F(CudaAttention, IsItsDefinition) {
  const bool full = full_class();
  size_t turn = 0;
  wide_runs = narrow_runs = ahead_runs = whole_runs = piece_runs = 0;
  const AttRoom rooms[] = {AttRoom(), kHopper, kLeast};
  for (int dt : kLow) {
    auto all = cases(dt);
    for (const Case &c : more_cases(dt)) all.push_back(c);
    for (size_t k = 0; k < all.size(); k++) {
      if (!full && k % 3 != turn) continue;
      room_of_device = rooms[(k / 3 + turn) % 3];
      check(all[k], k % 2 ? kOffStart : kAtStart, "case " + std::to_string(k) + ": " + about(all[k]));
    }
    turn++;
  }
  room_of_device = AttRoom();
  for (int runs : {wide_runs, narrow_runs, ahead_runs, whole_runs, piece_runs}) EXPECT_GT(runs, 0);
}

// Sizes, layouts and options drawn at random; DEEPC_TEST_ROUNDS has more of them.
TEST_F(CudaAttention, RandomCases) {
  const char *rounds = getenv("DEEPC_TEST_ROUNDS");
  std::mt19937_64 rng(17);
  const auto below = [&](int64_t n) { return (int64_t)(rng() % (uint64_t)n); };
  for (int round = 0; round < (rounds ? atoi(rounds) : full_class() ? 12 : 6); round++) {
    const int64_t kv = 1 + below(2);
    Case c = {kLow[below(3)], 1 + below(2),  kv * (1 + below(2)), kv,           1 + below(150), 1 + below(150),
              1 + below(80),  below(2) == 0, below(60) - 20,      below(2) == 0};
    if (below(3)) c.block = 16 * (1 + below(8)), c.layout_heads = below(2) ? c.heads : 1;
    c.packed = below(3) == 0, c.biased = below(3) == 0;
    const int dtypes[] = {-1, -1, DC_F32, DC_BF16, DC_F16, DC_U8};
    c.bias = dtypes[below(6)], c.shared = c.bias >= 0 && below(2), c.window = below(3) ? 0 : 1 + below(100);
    c.rate = below(3) ? 0.0f : 0.05f * (float)(1 + below(15));
    check(c, (Place)below(3),
          "round " + std::to_string(round) + ": " + about(c) + ", bias " + std::to_string(c.bias) + ", window " +
              std::to_string(c.window) + ", rate " + std::to_string(c.rate));
  }
}

TEST_F(CudaAttention, ScoresOfAnySize) {
  for (int dt : kLow) {
    check_added_masks(dt, run_forward, dc_dtype_name(dt));
    check_hidden_keys(dt, run_forward, dc_dtype_name(dt));
    check_scores_beyond(dt, run_forward, dc_dtype_name(dt));
  }
}

// A body that lacks a barrier has other results when the threads run in another order. DEEPC_TEST_FULL=1: each case in
// each dtype.
TEST_F(CudaAttention, OrderOfThreadsDoesNotChangeBits) {
  const bool full = full_class();
  for (int dt : kLow) {
    const Case all[] = {{dt, 1, 2, 1, 100, 140, 40, true, 40, false, 16, 1, true, true, DC_F32, true, 90, 0.1f},
                        {dt, 1, 1, 1, 66, 70, 200, false, 0, false, 0, 1, false, false, DC_BF16}};
    for (const Case &c : all) {
      if (!full && (dt == DC_F16 || (dt == DC_F32) != (&c == all))) continue;
      const auto arrays = arrays_of(c);
      const auto one = forward_on(c, arrays);
      const auto more = grad_arrays_of(c, one);
      const auto grads = backward_on(c, more);
      order_of_threads = Block::kBackwards;
      EXPECT_TRUE(same(arrays, forward_on(c, arrays), one)) << about(c);
      EXPECT_TRUE(same(more, backward_on(c, more), grads)) << about(c);
      order_of_threads = Block::kForwards;
    }
  }
}

// Rows of k and v that no query sees, and of q and dout that see nothing, are NaN: no result is.
TEST_F(CudaAttention, WhatIsHiddenIsNotRead) {
  for (int dt : kLow) {
    Case c = {dt, 1, 1, 1, 160, 160, 32, false, 0, false, 16, 1};
    dc_attention_args a = {};
    dc_attention_grad_args g = {};
    auto arrays = arrays_of(c);
    std::vector<uint8_t> layout(100, 0);
    for (int i = 0; i < 10; i++)
      for (int j = 0; j < 10; j++) layout[(size_t)(10 * i + j)] = i % 3 != 1 && j % 4 == 2;
    const size_t row = 32 * dc_dtype_size(dt);
    const auto spoil = [&](Array &x, int modulus, int rest, bool others) {
      for (size_t i = 0; i < 160; i++)
        if (((int)(i / 16) % modulus == rest) != others) memset(x.bytes.data() + i * row, 0xff, row);
    };
    spoil(arrays[0], 3, 1, false), spoil(arrays[1], 4, 2, true), spoil(arrays[2], 4, 2, true);
    const auto run = [&](auto &p) {
      fill_sizes(a, c);
      a.q = p[0], a.k = p[1], a.v = p[2], a.out = p[3], a.lse = (float *)p[4], a.mask.layout = layout.data();
      return run_forward(&a);
    };
    const auto after = run_once(arrays, kAtStart, run);
    auto more = grad_arrays_of(c, after);
    more[0] = arrays[0], more[1] = arrays[1], more[2] = arrays[2];
    const auto back = [&](auto &p) {
      fill_sizes(g, c);
      g.q = p[0], g.k = p[1], g.v = p[2], g.out = p[3], g.lse = (const float *)p[4], g.mask.layout = layout.data();
      g.dout = p[6], g.dq = p[7], g.dk = p[8], g.dv = p[9];
      for (auto *s : {g.dout_stride, g.dq_stride, g.dk_stride, g.dv_stride}) strides(c, 1, 160, s);
      return run_backward(&g);
    };
    const auto got = run_once(more, kAtStart, back);
    for (int k : {3, 7, 8, 9})
      for (double x : values(dt, got[(size_t)k])) ASSERT_FALSE(std::isnan(x)) << "array " << k << " of " << dt;
    for (int i = 16; i < 32; i++) EXPECT_EQ(as<float>(got[4])[(size_t)i], INFINITY);
    for (size_t i = 16 * row; i < 32 * row; i++) ASSERT_EQ(got[3][i], 0) << i;
  }
}

// Scores of some hundreds: the maximum must be taken out before e^x.
TEST_F(CudaAttention, LargeScores) {
  const Case c = {DC_F32, 1, 1, 1, 3, 600, 2, false, 0, false};
  auto arrays = arrays_of(c);
  std::vector<float> q(6, 300.0f), k(1200, -1.0f);
  k[2 * 299] = k[2 * 299 + 1] = 1.0f;
  memcpy(arrays[0].bytes.data(), q.data(), 24), memcpy(arrays[1].bytes.data(), k.data(), 4800);
  const auto got = forward_on(c, arrays);
  const auto v = as<float>(arrays[2].bytes), out = as<float>(got[3]);
  EXPECT_EQ(out[0], v[2 * 299]);
  EXPECT_EQ(out[5], v[2 * 299 + 1]);
}

} // namespace
