// Attention and its gradient: on every instruction set bit for bit against the scalar reference (bf16 where it is
// multiplied in pairs: within its rounding), the reference against its definition in double; masks, biases, dropout,
// shared heads, odd sizes, strides, arguments, threads.
#include "attention_cases.h"

namespace {

using namespace attention_cases;

class Attention : public Ops {};

bool in_pairs(int dt, int isa) { return dt == DC_BF16 && isa >= DC_ISA_AVX512_BF16; }
// Instruction sets that multiply bf16 in pairs have bodies for bf16 alone; for other dtypes they have AVX-512's.
bool as_below(int dt, int isa) { return dt != DC_BF16 && isa >= DC_ISA_AVX512_BF16; }

// The scalar kernel's results: out, lse; and the gradients behind them. Computed once: it is most of the time of these
// tests.
struct Reference {
  std::vector<std::vector<uint8_t>> forward, backward;
};
const Reference &reference(const Case &c, size_t number) {
  static std::map<std::pair<int, size_t>, Reference> made;
  Reference &r = made[{c.dt, number}];
  if (r.forward.empty() && dc_isa_force(DC_ISA_SCALAR) == DC_OK) {
    const Place place = number % 2 ? kAtStart : kAtEnd;
    r.forward = run_once(arrays_of(c), place, [&](auto &p) { return forward(c, p); });
    r.backward = run_once(grad_arrays_of(c, r.forward), place, [&](auto &p) { return backward(c, p); });
  }
  return r;
}

// What a dtype has of its own is how rows are read and written: DEEPC_TEST_FULL=1 has all cases of fp16, else every
// third.
bool left_out(int dt, size_t number) { return dt == DC_F16 && number % 3 && !full_class(); }

TEST_F(Attention, EqualsReference) {
  for (int dt : kLow) {
    const auto all = cases(dt);
    for (size_t number = 0; number < all.size(); number++) {
      const Case &c = all[number];
      if (left_out(dt, number)) continue;
      const auto arrays = arrays_of(c);
      const auto run = [&](const std::vector<uint8_t *> &p) { return forward(c, p); };
      const auto back = [&](const std::vector<uint8_t *> &p) { return backward(c, p); };
      const auto &want = reference(c, number).forward, &grads = reference(c, number).backward;
      const auto more = grad_arrays_of(c, want);
      for (int isa : isas()) {
        if (in_pairs(dt, isa)) continue;
        if (as_below(dt, isa) && number > 0) continue; // once
        if (isa == DC_ISA_SCALAR && number % 6) continue; // its own bits again
        ASSERT_EQ(dc_isa_force(isa), DC_OK);
        for (Place place : isa == DC_ISA_SCALAR ? std::vector{kAtEnd} : std::vector{kAtEnd, kOffStart}) {
          ASSERT_TRUE(same(arrays, run_once(arrays, place, run), want)) << about(c) << " on " << dc_isa_name(isa);
          ASSERT_TRUE(same(more, run_once(more, place, back), grads)) << about(c) << " on " << dc_isa_name(isa);
        }
      }
    }
  }
}

// Intel's processors make half as many products with VDPBF16PS as with VFMADD: unless a set is named, and without AMX,
// bf16 goes by floats there, and has the bits of every set below.
TEST_F(Attention, BestIsFloatsWherePairsAreSlow) {
  if (!dc_isa_available(DC_ISA_AVX512_BF16) || dc_isa_available(DC_ISA_AMX_BF16) || getenv("DEEPC_ISA"))
    GTEST_SKIP() << "this processor has no AVX512-BF16, or has AMX, or DEEPC_ISA is set";
  const Case c = {DC_BF16, 1, 2, 1, 70, 90, 64, true, 0, false};
  std::map<int, std::vector<std::vector<uint8_t>>> out, grads;
  for (int isa : {DC_ISA_AVX512, DC_ISA_AVX512_BF16, DC_ISA_BEST}) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    out[isa] = run_once(arrays_of(c), kAtStart, [&](auto &p) { return forward(c, p); });
    grads[isa] = run_once(grad_arrays_of(c, out[DC_ISA_AVX512]), kAtStart, [&](auto &p) { return backward(c, p); });
    int now = -1;
    ASSERT_EQ(dc_isa_current(&now), DC_OK);
    EXPECT_EQ(now, isa == DC_ISA_BEST ? DC_ISA_AVX512_BF16 : isa);
  }
  const int as = __builtin_cpu_is("intel") ? DC_ISA_AVX512 : DC_ISA_AVX512_BF16;
  EXPECT_NE(out[DC_ISA_AVX512], out[DC_ISA_AVX512_BF16]) << "the case must tell them apart";
  EXPECT_EQ(out[DC_ISA_BEST], out[as]);
  EXPECT_EQ(grads[DC_ISA_BEST], grads[as]);
}

// ---- the definition, in double -----------------------------------------------------------------------------------
TEST_F(Attention, IsItsDefinition) {
  for (int dt : kLow) {
    const auto all = cases(dt);
    for (size_t number = 0; number < all.size(); number++) {
      const Case &c = all[number];
      if (left_out(dt, number)) continue;
      Exact want;
      for (int isa : isas()) {
        if (isa != DC_ISA_SCALAR && !in_pairs(dt, isa)) continue; // they have the reference's bits (EqualsReference)
        auto got = reference(c, number).backward;
        if (isa != DC_ISA_SCALAR) {
          ASSERT_EQ(dc_isa_force(isa), DC_OK);
          const auto after = run_once(arrays_of(c), kAtStart, [&](auto &p) { return forward(c, p); });
          got = run_once(grad_arrays_of(c, after), kAtStart, [&](auto &p) { return backward(c, p); });
        }
        if (want.lse.empty()) want = exact(c, got); // of q, k, v and dout alone
        const double bound = dt == DC_F32 ? 4e-6 : dt == DC_F16 ? 2e-3 : 1.2e-2;
        EXPECT_LT(off(values(DC_F32, got[4]), want.lse), 1e-5) << about(c) << " on " << dc_isa_name(isa);
        EXPECT_LT(off(values(dt, got[3]), want.out), bound) << about(c) << " on " << dc_isa_name(isa);
        EXPECT_LT(off(values(dt, got[7]), want.dq), bound) << about(c) << " on " << dc_isa_name(isa);
        EXPECT_LT(off(values(dt, got[8]), want.dk), bound) << about(c) << " on " << dc_isa_name(isa);
        EXPECT_LT(off(values(dt, got[9]), want.dv), bound) << about(c) << " on " << dc_isa_name(isa);
        EXPECT_LT(off(values(DC_F32, got[10]), want.dbias), bound) << about(c) << " on " << dc_isa_name(isa);
      }
    }
  }
}

// Scores of some hundreds: the maximum must be taken out before e^x, chunk by chunk.
TEST_F(Attention, LargeScores) {
  const Case c = {DC_F32, 1, 1, 1, 3, 600, 2, false, 0, false};
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    auto arrays = arrays_of(c);
    std::vector<float> q(6, 300.0f), k(1200, -1.0f);
    k[2 * 299] = k[2 * 299 + 1] = 1.0f; // in the second chunk: all others are e^-800 of it
    memcpy(arrays[0].bytes.data(), q.data(), 24), memcpy(arrays[1].bytes.data(), k.data(), 4800);
    const auto got = run_once(arrays, kAtStart, [&](auto &p) { return forward(c, p); });
    const auto v = as<float>(arrays[2].bytes), out = as<float>(got[3]);
    EXPECT_EQ(out[0], v[2 * 299]) << dc_isa_name(isa);
    EXPECT_EQ(out[5], v[2 * 299 + 1]) << dc_isa_name(isa);
  }
}

TEST_F(Attention, ScoresOfAnySize) {
  for (int isa : isas())
    for (int dt : kLow) {
      ASSERT_EQ(dc_isa_force(isa), DC_OK);
      check_added_masks(dt, dc_attention, dc_isa_name(isa));
      check_hidden_keys(dt, dc_attention, dc_isa_name(isa));
      check_scores_beyond(dt, dc_attention, dc_isa_name(isa));
    }
}

// A NaN has one form, whatever it came from, in the sums of dbias as in all that is stored.
TEST_F(Attention, NaNsOfTheBiasAreTheCanonicalOne) {
  Case c = {DC_F32, 1, 1, 1, 20, 40, 24, false, 0, false};
  c.bias = DC_F32;
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    auto arrays = grad_arrays_of(c, run_once(arrays_of(c), kAtStart, [&](auto &p) { return forward(c, p); }));
    const uint32_t nan = 0xffc12345u, canonical = 0x7fc00000u;
    memcpy(arrays[6].bytes.data(), &nan, 4); // of dout, so of the first query's delta
    const auto got = as<uint32_t>(run_once(arrays, kAtStart, [&](auto &p) { return backward(c, p); })[10]);
    for (size_t j = 0; j < 40; j++) EXPECT_EQ(got[j], canonical) << j << " " << dc_isa_name(isa);
    EXPECT_NE(got[40] & canonical, canonical) << dc_isa_name(isa); // the second query's
  }
}

// The numbers of the paper's own tests (Random123's kat_vectors).
TEST_F(Attention, DropoutsNumbersArePhiloxs) {
  uint32_t zero[4] = {0, 0, 0, 0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
  uint32_t pi[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
  dc__philox(zero, 0, 0);
  dc__philox(ones, ~0u, ~0u);
  dc__philox(pi, 0xa4093822, 0x299f31d0);
  const uint32_t want[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                               {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
  EXPECT_EQ(memcmp(zero, want[0], 16), 0);
  EXPECT_EQ(memcmp(ones, want[1], 16), 0);
  EXPECT_EQ(memcmp(pi, want[2], 16), 0);
}

TEST_F(Attention, ThreadsDoNotChangeBits) {
  const Case c = {DC_BF16, 3, 4, 2, 90, 90, 32, true, 0, true, 0, 1, false, false, DC_F32, true, 0, 0.25f};
  const auto arrays = arrays_of(c);
  const auto run = [&](const std::vector<uint8_t *> &p) { return forward(c, p); };
  const auto back = [&](const std::vector<uint8_t *> &p) { return backward(c, p); };
  const auto one = run_once(arrays, kAtStart, run);
  const auto more = grad_arrays_of(c, one);
  const auto grads = run_once(more, kAtStart, back);
  dc_set_num_threads(3);
  EXPECT_TRUE(same(arrays, run_once(arrays, kAtStart, run), one));
  EXPECT_TRUE(same(more, run_once(more, kAtStart, back), grads));
}

// A batch of 1 out of a tensor whose batches lie 2^31 elements and more apart: that stride is any, and so are those of
// one head and of one row.
TEST_F(Attention, TakesAnyStrideOfASizeOfOne) {
  const Case c = {DC_F32, 1, 1, 1, 1, 1, 16, false, 0, false};
  const auto arrays = arrays_of(c);
  const auto run = [&](int64_t stride) {
    return run_once(arrays, kAtStart, [&](const std::vector<uint8_t *> &p) {
      dc_attention_args a = {};
      fill_sizes(a, c);
      a.q = p[0], a.k = p[1], a.v = p[2], a.out = p[3], a.lse = (float *)p[4];
      for (auto *s : {a.q_stride, a.k_stride, a.v_stride, a.out_stride}) std::fill(s, s + 3, stride);
      return dc_attention(&a);
    });
  };
  const auto plain = run(16);
  for (int64_t stride : {int64_t{0}, int64_t{1} << 31, INT64_MAX}) EXPECT_TRUE(same(arrays, run(stride), plain));
}

TEST_F(Attention, RefusesWhatItCannotDo) {
  const Case good = {DC_F32, 1, 2, 1, 3, 3, 4, false, 0, false};
  auto arrays = arrays_of(good);
  std::vector<uint8_t *> p;
  for (auto &a : arrays) p.push_back(a.bytes.data());
  const auto says = [&](const char *what, auto change) {
    dc_attention_args a = {};
    fill_sizes(a, good);
    a.q = p[0], a.k = p[1], a.v = p[2], a.out = p[3], a.lse = (float *)p[4];
    change(a);
    EXPECT_NE(dc_attention(&a), DC_OK) << what;
    EXPECT_NE(std::string(dc_last_error()).find(what), std::string::npos) << dc_last_error();
  };
  says("heads = 2 is no multiple of kv_heads = 3", [](auto &a) { a.kv_heads = 3; });
  says("heads = 0 is no multiple of kv_heads = 1", [](auto &a) { a.heads = 0; }); // its dk and dv would have no sums
  says("dim = 257", [](auto &a) { a.dim = 257; });
  says("scale = 0", [](auto &a) { a.scale = 0; });
  says("scale = nan", [](auto &a) { a.scale = NAN; });
  says("rows = -1", [](auto &a) { a.rows = -1; });
  says("k is NULL", [](auto &a) { a.k = nullptr; });
  says("stride[1] = -4", [](auto &a) { a.v_stride[1] = -4; });
  says("q: stride[2] = 9223372036854775807", [](auto &a) { a.q_stride[2] = INT64_MAX; });
  const uint8_t layout[1] = {1};
  const int32_t groups[3] = {0, 1 << 25, 0};
  const float slopes[2] = {0, HUGE_VALF}, flat[2] = {0, 0};
  says("block = 24", [&](auto &a) { a.mask.layout = layout, a.mask.block = 24, a.mask.layout_heads = 1; });
  says("layout_heads = 3", [&](auto &a) { a.mask.layout = layout, a.mask.block = 16, a.mask.layout_heads = 3; });
  says("one of them is NULL", [&](auto &a) { a.mask.q_group = groups; });
  says("q_group[1] = 33554432", [&](auto &a) { a.mask.q_group = a.mask.k_group = groups; });
  says("slope[1] = inf", [&](auto &a) { a.mask.slope = slopes; });
  says("bias_stride[1] = -1", [&](auto &a) { a.mask.bias = slopes, a.mask.bias_stride[1] = -1; });
  for (int64_t diagonal : {INT64_MIN, -(int64_t{1} << 24) - 1, (int64_t{1} << 24) + 1, INT64_MAX}) {
    const std::string text = "diagonal = " + std::to_string(diagonal);
    says(text.c_str(), [&](auto &a) { a.diagonal = diagonal, a.causal = 1; });
    says(text.c_str(), [&](auto &a) { a.diagonal = diagonal, a.mask.window = 2; }); // which is counted from it
    says(text.c_str(), [&](auto &a) { a.diagonal = diagonal, a.mask.slope = flat; }); // as distances are
  }
  says("window = -1", [](auto &a) { a.mask.window = -1; });
  says("dropout.rate = 1;", [](auto &a) { a.mask.dropout.rate = 1; });
  says("dropout.head = -1", [](auto &a) { a.mask.dropout.head = -1; });
  says("dtype", [](auto &a) { a.dtype = DC_I64; });
  says("struct_size", [](auto &a) { a.struct_size = 8; });
  Case none = good;
  none.rows = 0;
  EXPECT_EQ(forward(none, p), DC_OK);
  none = good, none.batch = 0;
  EXPECT_EQ(backward(none, {p[0], p[1], p[2], p[3], p[4], p[5], p[0], p[0], p[1], p[2], p[4]}), DC_OK);
  dc_attention_grad_args g = {};
  fill_sizes(g, good);
  strides(good, 2, 3, g.dout_stride), strides(good, 2, 3, g.dq_stride);
  strides(good, 2, 3, g.dk_stride), strides(good, 2, 3, g.dv_stride);
  g.q = p[0], g.k = p[1], g.v = p[2], g.out = p[3], g.lse = (float *)p[4], g.dout = p[0], g.dq = p[0], g.dk = p[1],
  g.dv = p[2], g.dbias = (float *)p[4];
  EXPECT_NE(dc_attention_grad(&g), DC_OK);
  EXPECT_NE(std::string(dc_last_error()).find("dbias without a bias"), std::string::npos) << dc_last_error();
}

} // namespace
