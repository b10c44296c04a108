// Every op of ops.h on every instruction set that this machine has, against the scalar reference bit for bit; the
// reference against exact expectations or double precision with an error bound; guard pages, arguments, threads,
// counters.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/ops.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "op_cases.h"

namespace {

// ---- every op, every instruction set -------------------------------------------------------------------------------
TEST_F(Ops, CastEqualsReference) {
  for (int64_t n : kSizes)
    for (int ddt : kLow)
      for (int sdt : kLow)
        for (int k = 0; k < 3; k++) {
          const float scale = k == 0 ? 1.0f : k == 1 ? -0.37f : 3.5e7f;
          same_everywhere(
              {make(ddt, n, kAnyBits, 1), make(sdt, n, fill_of(n, k), 2 + (uint64_t)k)},
              [=](auto &p) { return dc_cast(p[0], ddt, p[1], sdt, scale, n); }, name_of("cast to", ddt, n));
        }
}

TEST_F(Ops, CastInPlaceOfOneElementSize) {
  for (auto [ddt, sdt] : {std::pair{DC_BF16, DC_F16}, {DC_F16, DC_BF16}, {DC_BF16, DC_BF16}, {DC_F32, DC_F32}})
    same_everywhere(
        {make(sdt, 4097, kSpecial, 3)}, [=](auto &p) { return dc_cast(p[0], ddt, p[0], sdt, 0.5f, 4097); },
        "cast in place");
}

TEST_F(Ops, CastOfLargeArraysStreams) { // large enough for streaming stores, unaligned, with tails
  for (int ddt : kLow) {
    const int64_t n = (4 << 20) / (int64_t)dc_dtype_size(ddt) + 37;
    same_everywhere({make(ddt, n, kAnyBits, 1), make(DC_F32, n, kAnyBits, 2)},
                    [=](auto &p) { return dc_cast(p[0], ddt, p[1], DC_F32, 1.0f, n); },
                    name_of("large cast to", ddt, n), {kAtEnd});
  }
}

TEST_F(Ops, ScaleEqualsReference) {
  for (int64_t n : kSizes)
    for (int dt : kLow)
      for (int k = 0; k < 3; k++)
        same_everywhere(
            {make(dt, n, fill_of(n, k), 4)}, [=](auto &p) { return dc_scale(p[0], dt, -1.7f, n); },
            name_of("scale", dt, n));
}

TEST_F(Ops, AxpyEqualsReference) {
  for (int64_t n : kSizes)
    for (int dt : kLow)
      for (int k = 0; k < 3; k++)
        same_everywhere(
            {make(DC_F32, n, fill_of(n, k), 5), make(dt, n, fill_of(n, k), 6)},
            [=](auto &p) { return dc_axpy((float *)p[0], 0.3f, p[1], dt, n); }, name_of("axpy", dt, n));
}

TEST_F(Ops, SqnormEqualsReference) {
  for (int64_t n : kSizes)
    for (int dt : kLow)
      for (int k = 0; k < 3; k++)
        same_everywhere(
            {make(dt, n, fill_of(n, k), 7), doubles(dc_sqnorm_blocks(n))},
            [=](auto &p) { return dc_sqnorm(p[0], dt, n, (double *)p[1]); }, name_of("sqnorm", dt, n));
}

TEST_F(Ops, CopyEqualsReference) {
  for (int64_t bytes : {0, 1, 63, 64, 65, 255, 4097, 1 << 17, (4 << 20) + 77})
    for (int off : {0, 1}) {
      if (bytes < off) continue;
      same_everywhere(
          {raw(bytes, 8), raw(bytes, 9)}, [=](auto &p) { return dc_copy(p[0] + off, p[1], bytes - off); },
          name_of("copy", DC_U8, bytes));
    }
}

bool reduce_takes(int dt, int op) {
  const bool floating = dt <= DC_F64;
  return floating ? op < DC_RED_BAND : op != DC_RED_AVG;
}

TEST_F(Ops, ReduceEqualsReference) {
  for (int64_t n : {0, 1, 17, 65, 511, 513, 4097})
    for (int dt = 0; dt < DC_DTYPE_COUNT; dt++)
      for (int op = DC_RED_SUM; op <= DC_RED_BXOR; op++)
        for (int nsrc : {1, 2, 5}) {
          if (!reduce_takes(dt, op)) continue;
          std::vector<Array> arrays = {make(dt, n, kAnyBits, 10)};
          for (int k = 0; k < nsrc; k++) arrays.push_back(make(dt, n, fill_of(n, (int)n + k), 11 + (uint64_t)k));
          same_everywhere(
              arrays, [=](auto &p) { return dc_reduce(p[0], (const void *const *)(p.data() + 1), nsrc, dt, op, n); },
              name_of("reduce", dt, n) + " op=" + std::to_string(op) + " nsrc=" + std::to_string(nsrc));
        }
}

TEST_F(Ops, ReduceInPlaceOfAnySource) {
  for (int dt = 0; dt < DC_DTYPE_COUNT; dt++)
    for (int into = 0; into < 3; into++) {
      const int64_t n = 1029;
      same_everywhere(
          {make(dt, n, kOrdinary, 1), make(dt, n, kOrdinary, 2), make(dt, n, kOrdinary, 3)},
          [=](auto &p) { return dc_reduce(p[(size_t)into], (const void *const *)p.data(), 3, dt, DC_RED_SUM, n); },
          name_of("reduce in place", dt, n));
    }
}

TEST_F(Ops, ReduceAccEqualsReference) {
  for (int64_t n : kSizes)
    for (int dt : kLow)
      for (int nsrc : {1, 2, 3})
        for (int assign : {0, 1})
          for (int norm : {0, 1}) {
            if (n == 1 << 17 && nsrc == 2) continue;
            std::vector<Array> arrays = {make(DC_F32, n, fill_of(n, nsrc), 20), doubles(dc_sqnorm_blocks(n))};
            for (int k = 0; k < nsrc; k++) arrays.push_back(make(dt, n, fill_of(n, nsrc), 21 + (uint64_t)k));
            same_everywhere(
                arrays,
                [=](auto &p) {
                  return dc_reduce_acc((float *)p[0], (const void *const *)(p.data() + 2), nsrc, dt, n, assign,
                                       norm ? (double *)p[1] : nullptr);
                },
                name_of("reduce_acc", dt, n) + " nsrc=" + std::to_string(nsrc) + " assign=" + std::to_string(assign));
          }
}

TEST_F(Ops, LargeReductionsStream) { // large enough for streaming stores; aligned and unaligned destinations, tails
  for (int dt : kLow)
    for (int kind = 0; kind < 3; kind++) {
      const int64_t n = (4 << 20) / (kind == 2 ? 4 : (int64_t)dc_dtype_size(dt)) + 21;
      std::vector<Array> arrays = {make(kind < 2 ? dt : (int)DC_F32, n, kAnyBits, 24), doubles(dc_sqnorm_blocks(n)),
                                   make(dt, n, kAnyBits, 25), make(dt, n, kAnyBits, 26)};
      same_everywhere(arrays,
                      [=](auto &p) {
                        const void *const *src = (const void *const *)(p.data() + 2);
                        if (kind == 2) return dc_reduce_acc((float *)p[0], src, 2, dt, n, 1, (double *)p[1]);
                        return dc_reduce(p[0], src, 2, dt, kind ? DC_RED_AVG : DC_RED_SUM, n);
                      },
                      name_of("large reduce", dt, n) + " kind=" + std::to_string(kind),
                      {dt == DC_BF16 ? kOffStart : kAtStart});
    }
}

// ---- AdamW ---------------------------------------------------------------------------------------------------------
struct Layout {
  int param, grad, state, lowp; // lowp < 0: none
  bool amsgrad, decoupled;
};

dc_adamw_args args_of(const Layout &l, const std::vector<uint8_t *> &p, int64_t n) {
  dc_adamw_args t = {};
  t.struct_size = sizeof t;
  t.param = p[0];
  t.grad = p[1];
  t.exp_avg = p[2];
  t.exp_avg_sq = p[3];
  t.max_exp_avg_sq = l.amsgrad ? p[4] : nullptr;
  t.lowp = l.lowp >= 0 ? p[5] : nullptr;
  t.n = n;
  t.step = 7;
  t.lr = 1e-3;
  t.beta1 = 0.9;
  t.beta2 = 0.999;
  t.eps = 1e-8;
  t.weight_decay = 0.01;
  t.grad_scale = 0.125;
  t.param_dtype = l.param;
  t.grad_dtype = l.grad;
  t.state_dtype = l.state;
  t.lowp_dtype = l.lowp >= 0 ? l.lowp : 0;
  t.flags = l.decoupled ? DC_ADAMW_DECOUPLED : 0;
  return t;
}

std::vector<Array> arrays_of(const Layout &l, int64_t n, Fill fill) {
  std::vector<Array> a = {make(l.param, n, fill, 30),
                          make(l.grad, n, fill, 31),
                          make(l.state, n, fill, 32),
                          make(l.state, n, fill, 33),
                          make(l.state, l.amsgrad ? n : 0, fill, 34),
                          make(l.lowp >= 0 ? l.lowp : 0, l.lowp >= 0 ? n : 0, kAnyBits, 35)};
  if (fill == kOrdinary) { // second moments are not negative: clear the sign
    for (size_t k : {3, 4})
      for (size_t i = a[k].element() - 1; i < a[k].bytes.size(); i += a[k].element()) a[k].bytes[i] &= 0x7f;
  }
  return a;
}

void adamw_everywhere(const Layout &l, int64_t n, Fill fill) {
  const std::string what = "adamw p=" + std::to_string(l.param) + " g=" + std::to_string(l.grad) +
                           " s=" + std::to_string(l.state) + " low=" + std::to_string(l.lowp) +
                           " ams=" + std::to_string(l.amsgrad) + " n=" + std::to_string(n);
  same_everywhere(
      arrays_of(l, n, fill),
      [=](auto &p) {
        const dc_adamw_args t = args_of(l, p, n);
        return dc_adamw(&t, 1);
      },
      what);
}

TEST_F(Ops, AdamwEqualsReferenceInEveryLayout) {
  for (int param : kLow)
    for (int grad : kLow)
      for (int state : kLow)
        for (int lowp : {-1, (int)DC_F32, (int)DC_BF16, (int)DC_F16})
          for (int mode = 0; mode < 4; mode++)
            adamw_everywhere({param, grad, state, lowp, (mode & 1) != 0, (mode & 2) != 0}, 83,
                             (Fill)((param + grad + state + mode) % 3));
}

TEST_F(Ops, AdamwEqualsReferenceAtEverySize) {
  const Layout usual[] = {
      {DC_F32, DC_F32, DC_F32, -1, false, true},     {DC_F32, DC_F32, DC_F32, DC_BF16, false, true},
      {DC_F32, DC_F32, DC_F32, DC_F16, false, true}, {DC_F32, DC_BF16, DC_F32, DC_BF16, false, true},
      {DC_F32, DC_F16, DC_F32, DC_F16, false, true}, {DC_F32, DC_F32, DC_F32, -1, false, false},
      {DC_F32, DC_F32, DC_F32, DC_BF16, true, true}, {DC_BF16, DC_BF16, DC_BF16, -1, false, true}};
  for (const Layout &l : usual)
    for (int64_t n : kSizes)
      for (Fill fill : {kOrdinary, kAnyBits, kSpecial}) {
        if (n > 5000 && fill != kAnyBits) continue;
        adamw_everywhere(l, n, fill);
      }
}

TEST_F(Ops, AdamwOfManyTensorsEqualsOneByOne) {
  std::mt19937 rng(5);
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<std::vector<Array>> tensors;
    for (int k = 0; k < 60; k++) {
      const Layout l = {DC_F32, DC_F32, DC_F32, k % 3 ? -1 : (int)DC_BF16, k % 5 == 0, k % 2 == 0};
      tensors.push_back(arrays_of(l, k % 7 == 0 ? 0 : (int64_t)(rng() % (k == 30 ? 200000 : 3000)), kOrdinary));
    }
    auto step = [&](std::vector<std::vector<Array>> &ts, bool together) {
      std::vector<dc_adamw_args> jobs;
      for (size_t k = 0; k < ts.size(); k++) {
        std::vector<uint8_t *> p;
        for (Array &a : ts[k]) p.push_back(a.bytes.data());
        const Layout l = {DC_F32, DC_F32, DC_F32, k % 3 ? -1 : (int)DC_BF16, k % 5 == 0, k % 2 == 0};
        jobs.push_back(args_of(l, p, (int64_t)ts[k][0].bytes.size() / 4));
        jobs.back().lr = 1e-3 * (double)(1 + k / 10);
        jobs.back().step = 1 + (int64_t)k / 20;
        jobs.back().max_exp_avg_sq = ts[k][4].bytes.empty() ? nullptr : p[4];
      }
      if (together) {
        EXPECT_EQ(dc_adamw(jobs.data(), (int64_t)jobs.size()), DC_OK) << dc_last_error();
        return;
      }
      for (const dc_adamw_args &job : jobs) EXPECT_EQ(dc_adamw(&job, 1), DC_OK) << dc_last_error();
    };
    auto apart = tensors, together = tensors, threaded = tensors;
    dc_set_num_threads(1);
    step(apart, false);
    step(together, true);
    dc_set_num_threads(4);
    step(threaded, true);
    dc_set_num_threads(1);
    for (size_t k = 0; k < tensors.size(); k++)
      for (size_t a = 0; a < tensors[k].size(); a++) {
        ASSERT_EQ(apart[k][a].bytes, together[k][a].bytes) << "tensor " << k << " array " << a;
        ASSERT_EQ(apart[k][a].bytes, threaded[k][a].bytes) << "tensor " << k << " array " << a << " with threads";
      }
  }
}

// The formula of Loshchilov & Hutter in double precision; the bound adds up the roundings of the fp32 operations.
TEST_F(Ops, AdamwReferenceAgreesWithDouble) {
  ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
  const int64_t n = 4096;
  const double eps32 = 0x1p-23;
  for (bool decoupled : {false, true})
    for (bool amsgrad : {false, true}) {
      const Layout l = {DC_F32, DC_F32, DC_F32, -1, amsgrad, decoupled};
      const auto in = arrays_of(l, n, kOrdinary);
      dc_adamw_args t = {};
      t.struct_size = sizeof t;
      const auto out = run_once(in, kAtEnd, [&](auto &p) {
        t = args_of(l, p, n);
        return dc_adamw(&t, 1);
      });
      const auto p0 = as<float>(in[0].bytes), g0 = as<float>(in[1].bytes), m0 = as<float>(in[2].bytes),
                 v0 = as<float>(in[3].bytes);
      const auto x0 = as<float>(in[4].bytes), p1 = as<float>(out[0]), m1 = as<float>(out[2]), v1 = as<float>(out[3]),
                 x1 = as<float>(out[4]);
      for (size_t i = 0; i < (size_t)n; i++) {
        double p = p0[i], g = t.grad_scale * g0[i];
        if (!decoupled) g += t.weight_decay * p;
        if (decoupled) p *= 1 - t.lr * t.weight_decay;
        const double m = t.beta1 * m0[i] + (1 - t.beta1) * g, v = t.beta2 * v0[i] + (1 - t.beta2) * g * g;
        const double top = amsgrad ? std::max<double>(x0[i], v) : v;
        const double denom = std::sqrt(top) / std::sqrt(1 - std::pow(t.beta2, 7)) + t.eps,
                     rate = t.lr / (1 - std::pow(t.beta1, 7));
        const double m_bound = 4 * eps32 * (std::fabs(m0[i]) + std::fabs(g)), v_bound = 4 * eps32 * v;
        ASSERT_NEAR(m1[i], m, m_bound) << i;
        ASSERT_NEAR(v1[i], v, v_bound) << i;
        if (amsgrad) ASSERT_NEAR(x1[i], top, 4 * eps32 * top) << i;
        ASSERT_NEAR(p1[i], p - rate * m / denom,
                    2 * eps32 * std::fabs(p0[i]) + rate / denom * (m_bound + 8 * eps32 * std::fabs(m)))
            << i;
      }
    }
}

TEST_F(Ops, AdamwFirstStepMovesByTheLearningRate) { // m / sqrt(v) is the sign of the gradient at step 1
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<float> p(37, 1.0f), g(37), m(37, 0.0f), v(37, 0.0f);
    for (size_t i = 0; i < g.size(); i++) g[i] = (i % 2 ? -1.0f : 1.0f) * (float)(i + 1);
    dc_adamw_args t = {};
    t.struct_size = sizeof t;
    t.param = p.data(), t.grad = g.data(), t.exp_avg = m.data(), t.exp_avg_sq = v.data();
    t.n = 37, t.step = 1, t.lr = 0.125, t.beta1 = 0.5, t.beta2 = 0.75, t.eps = 0, t.grad_scale = 1,
    t.flags = DC_ADAMW_DECOUPLED;
    ASSERT_EQ(dc_adamw(&t, 1), DC_OK) << dc_last_error();
    for (size_t i = 0; i < p.size(); i++) EXPECT_NEAR(p[i], i % 2 ? 1.125 : 0.875, 1e-6) << i;
  }
}

// ---- the reference itself ------------------------------------------------------------------------------------------
double value_of(uint16_t h, int ebits, int mbits) { // IEEE 754-2019, 3.4, for formats of 16 bits
  const int bias = (1 << (ebits - 1)) - 1, e = (h >> mbits) & ((1 << ebits) - 1), m = h & ((1 << mbits) - 1);
  const double s = h & 0x8000 ? -1 : 1;
  if (e == (1 << ebits) - 1) return m ? std::nan("") : s * INFINITY;
  return e ? s * std::ldexp((1 << mbits) + m, e - bias - mbits) : s * std::ldexp(m, 1 - bias - mbits);
}

// All 65536 values widen exactly; each rounds back to itself; the midpoint to the next goes to the even one, its
// neighbours in fp32 to their side.
TEST_F(Ops, SixteenBitConversionsAreExact) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int dt : {(int)DC_BF16, (int)DC_F16}) {
      const int ebits = dt == DC_BF16 ? 8 : 5, mbits = dt == DC_BF16 ? 7 : 10;
      const uint16_t nan = dt == DC_BF16 ? 0x7fc0 : 0x7e00, inf = dt == DC_BF16 ? 0x7f80 : 0x7c00;
      std::vector<uint16_t> h(65536), back(65536);
      std::vector<float> wide(65536);
      for (size_t i = 0; i < h.size(); i++) h[i] = (uint16_t)i;
      ASSERT_EQ(dc_cast(wide.data(), DC_F32, h.data(), dt, 1.0f, 65536), DC_OK);
      ASSERT_EQ(dc_cast(back.data(), dt, wide.data(), DC_F32, 1.0f, 65536), DC_OK);
      for (size_t i = 0; i < h.size(); i++) {
        const double want = value_of(h[i], ebits, mbits);
        if (std::isnan(want)) {
          ASSERT_EQ(bits(wide[i]), 0x7fc00000u) << i;
          ASSERT_EQ(back[i], nan) << i;
          continue;
        }
        ASSERT_EQ(wide[i], want) << i;
        ASSERT_EQ(std::signbit(wide[i]), std::signbit(want)) << i;
        ASSERT_EQ(back[i], h[i]) << i;
      }
      std::vector<float> mid; // between h and h + 1, for positive finite h; "infinity" counts as the next power of two
      for (uint16_t i = 0; i < inf; i++) {
        const double a = value_of(i, ebits, mbits);
        const double b = i + 1 == inf ? std::ldexp(1.0, 1 << (ebits - 1)) : value_of((uint16_t)(i + 1), ebits, mbits);
        const float half = (float)((a + b) / 2);
        ASSERT_EQ((double)half, (a + b) / 2);
        for (float f : {std::nextafterf(half, 0), half, std::nextafterf(half, INFINITY)})
          for (float s : {f, -f}) mid.push_back(s);
      }
      std::vector<uint16_t> got(mid.size());
      ASSERT_EQ(dc_cast(got.data(), dt, mid.data(), DC_F32, 1.0f, (int64_t)mid.size()), DC_OK);
      for (size_t k = 0; k < mid.size(); k++) {
        const uint16_t i = (uint16_t)(k / 6), side = (uint16_t)(k / 2 % 3), sign = k % 2 ? 0x8000 : 0;
        const uint16_t want = side == 0 ? i : side == 2 ? (uint16_t)(i + 1) : (uint16_t)(i + (i & 1));
        ASSERT_EQ(got[k], (uint16_t)(want | sign))
            << dc_dtype_name(dt) << " of " << mid[k] << " on " << dc_isa_name(isa);
      }
    }
  }
}

TEST_F(Ops, SpecialValuesSurvive) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    float x[] = {NAN, -NAN, f32(0x7f800001), INFINITY, -INFINITY, -0.0f, f32(1), FLT_MAX, -1e-41f};
    uint16_t low[9];
    ASSERT_EQ(dc_cast(low, DC_BF16, x, DC_F32, 1.0f, 9), DC_OK);
    const uint16_t bf16[] = {0x7fc0, 0x7fc0, 0x7fc0, 0x7f80, 0xff80, 0x8000, 0, 0x7f80, 0x8000};
    for (int i = 0; i < 8; i++) EXPECT_EQ(low[i], bf16[i]) << i;
    EXPECT_EQ(low[8], 0x8000 | (bits(1e-41f) + 0x7fff) >> 16); // a denormal is not zero
    ASSERT_EQ(dc_cast(low, DC_F16, x, DC_F32, 1.0f, 9), DC_OK);
    const uint16_t f16[] = {0x7e00, 0x7e00, 0x7e00, 0x7c00, 0xfc00, 0x8000, 0, 0x7c00, 0x8000};
    for (int i = 0; i < 9; i++) EXPECT_EQ(low[i], f16[i]) << i;
    ASSERT_EQ(dc_scale(x, DC_F32, 0.5f, 9), DC_OK);
    for (int i = 0; i < 3; i++) EXPECT_EQ(bits(x[i]), 0x7fc00000u) << i;
    EXPECT_EQ(x[3], INFINITY);
    EXPECT_EQ(bits(x[5]), 0x80000000u);
    EXPECT_EQ(bits(x[6]), 0u); // half of the least denormal: tie to even
    EXPECT_EQ(x[8], -1e-41f * 0.5f);
  }
}

TEST_F(Ops, AxpyIsAFusedMultiplyAdd) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<float> y(21, -1.0f), x(21, 1.0f + 0x1p-12f);
    ASSERT_EQ(dc_axpy(y.data(), 1.0f + 0x1p-12f, x.data(), DC_F32, 21), DC_OK);
    for (float f : y) EXPECT_EQ(f, 0x1p-11f + 0x1p-24f); // the product's last bit is kept
  }
}

TEST_F(Ops, SqnormIsExactWhereItCanBeAndFollowsTheTree) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    const int64_t n = 2 * DC_BLOCK + 100;
    const Array a = make(DC_F32, n, kOrdinary, 40);
    const auto x = as<float>(a.bytes);
    double partial[3];
    ASSERT_EQ(dc_sqnorm(x.data(), DC_F32, n, partial), DC_OK);
    for (int64_t k = 0; k < 3; k++) {
      double all[32] = {}, lane[16];
      long double exact = 0;
      for (int64_t i = k * DC_BLOCK; i < std::min<int64_t>(n, (k + 1) * DC_BLOCK); i++) {
        all[i % 32] += (double)x[(size_t)i] * (double)x[(size_t)i];
        exact += (long double)x[(size_t)i] * (long double)x[(size_t)i];
      }
      for (int j = 0; j < 16; j++) lane[j] = all[j] + all[16 + j];
      const double eight[8] = {lane[0] + lane[8],  lane[1] + lane[9],  lane[2] + lane[10], lane[3] + lane[11],
                               lane[4] + lane[12], lane[5] + lane[13], lane[6] + lane[14], lane[7] + lane[15]};
      const double four[4] = {eight[0] + eight[4], eight[1] + eight[5], eight[2] + eight[6], eight[3] + eight[7]};
      EXPECT_EQ(partial[k], (four[0] + four[2]) + (four[1] + four[3])) << k;
      EXPECT_NEAR(partial[k], (double)exact, 1e-13 * (double)exact);
    }
    EXPECT_EQ(dc_sum_partials(partial, 3), (partial[0] + partial[1]) + partial[2]);
    EXPECT_EQ(dc_sum_partials(partial, 0), 0.0);
    const std::vector<float> big(100, 3e38f);
    ASSERT_EQ(dc_sqnorm(big.data(), DC_F32, 100, partial), DC_OK);
    EXPECT_NEAR(partial[0] / (100 * 9e76), 1.0, 1e-6); // far beyond fp32
  }
}

TEST_F(Ops, OnlyNonFiniteInputsMakeAPartialNonFinite) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int dt : kLow)
      for (int64_t at : {0, 15, 4095, 4096, 8191, 9000, 9999})
        for (int kind = 0; kind < 3; kind++) {
          Array a = make(dt, 10000, kOrdinary, 41);
          const uint32_t f = kind == 0 ? 0x7f800000u : kind == 1 ? 0xff800000u : 0x7fc00000u;
          const uint16_t b = (uint16_t)(f >> 16), h = kind == 0 ? 0x7c00 : kind == 1 ? 0xfc00 : 0x7e00;
          memcpy(&a.bytes[(size_t)at * a.element()],
                 dt == DC_F32    ? (const void *)&f
                 : dt == DC_BF16 ? (const void *)&b
                                 : (const void *)&h,
                 a.element());
          double partial[3];
          int64_t index = -7;
          ASSERT_EQ(dc_sqnorm(a.bytes.data(), dt, 10000, partial), DC_OK);
          for (int64_t k = 0; k < 3; k++)
            EXPECT_EQ(std::isfinite(partial[k]), k != at / DC_BLOCK) << at << " block " << k;
          ASSERT_EQ(dc_find_nonfinite(a.bytes.data(), dt, 10000, &index), DC_OK);
          EXPECT_EQ(index, at);
          ASSERT_EQ(dc_find_nonfinite(a.bytes.data(), dt, at, &index), DC_OK);
          EXPECT_EQ(index, -1);
        }
  }
}

TEST_F(Ops, FindNonfiniteReturnsTheFirst) {
  std::vector<float> x(9000, FLT_MAX);
  x[8999] = NAN, x[5000] = INFINITY, x[5001] = NAN;
  int64_t index = 0;
  ASSERT_EQ(dc_find_nonfinite(x.data(), DC_F32, 9000, &index), DC_OK);
  EXPECT_EQ(index, 5000);
  ASSERT_EQ(dc_find_nonfinite(nullptr, DC_F32, 0, &index), DC_OK);
  EXPECT_EQ(index, -1);
}

template <class T> void integers_reduce(int dt) {
  const int64_t n = 700;
  const Array a = make(dt, n, kAnyBits, 50), b = make(dt, n, kAnyBits, 51);
  const auto x = as<T>(a.bytes), y = as<T>(b.bytes);
  const void *src[] = {x.data(), y.data()};
  std::vector<T> out((size_t)n);
  for (int op : {(int)DC_RED_SUM, (int)DC_RED_MIN, (int)DC_RED_MAX, (int)DC_RED_PROD, (int)DC_RED_BAND, (int)DC_RED_BOR,
                 (int)DC_RED_BXOR}) {
    ASSERT_EQ(dc_reduce(out.data(), src, 2, dt, op, n), DC_OK);
    for (size_t i = 0; i < (size_t)n; i++) {
      const unsigned __int128 u = (unsigned __int128)(__int128)x[i], v = (unsigned __int128)(__int128)y[i];
      const T want = op == DC_RED_SUM    ? (T)(u + v)
                     : op == DC_RED_MIN  ? std::min(x[i], y[i])
                     : op == DC_RED_MAX  ? std::max(x[i], y[i])
                     : op == DC_RED_PROD ? (T)(u * v)
                     : op == DC_RED_BAND ? (T)(x[i] & y[i])
                     : op == DC_RED_BOR  ? (T)(x[i] | y[i])
                                         : (T)(x[i] ^ y[i]);
      ASSERT_EQ(out[i], want) << dc_dtype_name(dt) << " op " << op << " element " << i;
    }
  }
}

TEST_F(Ops, IntegerReductionsWrapAround) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    integers_reduce<int8_t>(DC_I8);
    integers_reduce<uint8_t>(DC_U8);
    integers_reduce<int16_t>(DC_I16);
    integers_reduce<int32_t>(DC_I32);
    integers_reduce<int64_t>(DC_I64);
  }
}

TEST_F(Ops, FloatReductionsRoundOnceInSourceOrder) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    // bf16: 256 + 1 + 1: two roundings would give 256, one gives 258
    std::vector<uint16_t> a(33, bf16_of(256)), b(33, bf16_of(1)), c(33, bf16_of(1)), out(33);
    const void *src[] = {a.data(), b.data(), c.data()};
    ASSERT_EQ(dc_reduce(out.data(), src, 3, DC_BF16, DC_RED_SUM, 33), DC_OK);
    for (uint16_t h : out) EXPECT_EQ(h, bf16_of(258));
    // fp32: the order shows
    std::vector<float> x(33, 1e30f), y(33, -1e30f), z(33, 1.0f), got(33);
    const void *front[] = {x.data(), y.data(), z.data()}, *back[] = {z.data(), x.data(), y.data()};
    ASSERT_EQ(dc_reduce(got.data(), front, 3, DC_F32, DC_RED_SUM, 33), DC_OK);
    for (float f : got) EXPECT_EQ(f, 1.0f);
    ASSERT_EQ(dc_reduce(got.data(), back, 3, DC_F32, DC_RED_SUM, 33), DC_OK);
    for (float f : got) EXPECT_EQ(f, 0.0f);
    ASSERT_EQ(dc_reduce(got.data(), front, 3, DC_F32, DC_RED_AVG, 33), DC_OK);
    for (float f : got) EXPECT_EQ(f, (float)(1.0 / 3));
    z[3] = NAN;
    for (int op : {(int)DC_RED_MIN, (int)DC_RED_MAX}) {
      ASSERT_EQ(dc_reduce(got.data(), front, 3, DC_F32, op, 33), DC_OK);
      for (size_t i = 0; i < got.size(); i++)
        EXPECT_TRUE(i == 3 ? std::isnan(got[i]) : got[i] == (op == DC_RED_MIN ? -1e30f : 1e30f));
      ASSERT_EQ(dc_reduce(got.data(), back, 3, DC_F32, op, 33), DC_OK);
      EXPECT_TRUE(std::isnan(got[3])); // NaN first or last
    }
    std::vector<double> d(33, 1.0), e(33, 0x1p-50), f64(33);
    const void *wide[] = {d.data(), e.data()};
    ASSERT_EQ(dc_reduce(f64.data(), wide, 2, DC_F64, DC_RED_SUM, 33), DC_OK);
    for (double v : f64) EXPECT_EQ(v, 1.0 + 0x1p-50);
  }
}

TEST_F(Ops, ReduceAccAddsToWhatIsThere) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<float> acc(5000, 10.0f), a(5000, 1.0f), b(5000, 2.0f);
    const void *src[] = {a.data(), b.data()};
    double partial[2];
    ASSERT_EQ(dc_reduce_acc(acc.data(), src, 2, DC_F32, 5000, 0, partial), DC_OK);
    EXPECT_EQ(acc[4999], 13.0f);
    EXPECT_EQ(partial[0], 169.0 * DC_BLOCK);
    EXPECT_EQ(partial[1], 169.0 * (5000 - DC_BLOCK));
    ASSERT_EQ(dc_reduce_acc(acc.data(), src, 2, DC_F32, 5000, 1, nullptr), DC_OK);
    EXPECT_EQ(acc[0], 3.0f);
  }
}

// ---- threads, counters, environment --------------------------------------------------------------------------------
TEST_F(Ops, ThreadsDoNotChangeABit) {
  const int64_t n = 600011;
  const std::vector<Array> arrays = {make(DC_F32, n, kOrdinary, 60), make(DC_F32, n, kOrdinary, 61),
                                     make(DC_F32, n, kOrdinary, 62), doubles(dc_sqnorm_blocks(n)),
                                     doubles(dc_sqnorm_blocks(n)),   make(DC_BF16, n, kOrdinary, 63)};
  auto everything = [=](auto &p) {
    const void *src[] = {p[1], p[2]};
    int rc = dc_cast(p[5], DC_BF16, p[0], DC_F32, 0.3f, n);
    if (!rc) rc = dc_sqnorm(p[0], DC_F32, n, (double *)p[3]);
    if (!rc) rc = dc_reduce_acc((float *)p[0], src, 2, DC_F32, n, 0, (double *)p[4]);
    if (!rc) rc = dc_axpy((float *)p[0], 0.7f, p[5], DC_BF16, n);
    if (!rc) rc = dc_scale(p[1], DC_F32, 1.3f, n);
    if (!rc) rc = dc_reduce(p[1], src, 2, DC_F32, DC_RED_PROD, n);
    return rc ? rc : dc_copy(p[2], p[0], 4 * n);
  };
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    dc_set_num_threads(1);
    const auto one = run_once(arrays, kAtEnd, everything);
    dc_set_num_threads(4);
    const auto four = run_once(arrays, kAtEnd, everything);
    dc_set_num_threads(1);
    ASSERT_TRUE(same(arrays, four, one)) << dc_isa_name(isa);
  }
}

TEST_F(Ops, CountersCount) {
  float x[4] = {1, 2, 3, 4}, y[4] = {}, m[4] = {}, v[4] = {};
  double partial;
  const void *src[] = {x};
  dc_counter_reset();
  ASSERT_EQ(dc_cast(y, DC_F32, x, DC_F32, 1, 4), DC_OK);
  ASSERT_EQ(dc_scale(y, DC_F32, 1, 4), DC_OK);
  ASSERT_EQ(dc_axpy(y, 1, x, DC_F32, 4), DC_OK);
  ASSERT_EQ(dc_sqnorm(y, DC_F32, 4, &partial), DC_OK);
  ASSERT_EQ(dc_copy(y, x, 16), DC_OK);
  ASSERT_EQ(dc_reduce(y, src, 1, DC_F32, DC_RED_SUM, 4), DC_OK);
  ASSERT_EQ(dc_reduce_acc(y, src, 1, DC_F32, 4, 1, nullptr), DC_OK);
  dc_adamw_args t[2] = {};
  for (auto &a : t) a.struct_size = sizeof a;
  for (auto &a : t) { a.param = y, a.grad = x, a.exp_avg = m, a.exp_avg_sq = v, a.n = 4, a.step = 1, a.grad_scale = 1; }
  t[1].n = 3;
  ASSERT_EQ(dc_adamw(t, 2), DC_OK) << dc_last_error();
  EXPECT_NE(dc_cast(y, 99, x, DC_F32, 1, 4), DC_OK); // a refused call is not counted
  for (int c : {(int)DC_COUNTER_cast_calls, (int)DC_COUNTER_scale_calls, (int)DC_COUNTER_axpy_calls,
                (int)DC_COUNTER_sqnorm_calls, (int)DC_COUNTER_copy_calls, (int)DC_COUNTER_adamw_calls})
    EXPECT_EQ(dc_counter_get(c), 1) << dc_counter_name(c);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_reduce_calls), 2);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_adamw_elements), 7);
}

#if defined(__x86_64__)
TEST_F(Ops, FlushToZeroOfTheCallerIsIgnoredAndKept) {
  const unsigned old = _mm_getcsr(), flush_and_upward = (old & ~0x6000u) | 0x8040u | 0x4000u;
  const std::vector<Array> arrays = {make(DC_F32, 999, kSpecial, 70), make(DC_F32, 999, kSpecial, 71),
                                     make(DC_BF16, 999, kAnyBits, 72), doubles(1)};
  auto several = [](auto &p) {
    int rc = dc_axpy((float *)p[0], 1e-5f, p[1], DC_F32, 999);
    if (!rc) rc = dc_cast(p[2], DC_BF16, p[1], DC_F32, 1, 999);
    return rc ? rc : dc_sqnorm(p[1], DC_F32, 999, (double *)p[3]);
  };
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    const auto want = run_once(arrays, kAtEnd, several);
    _mm_setcsr(flush_and_upward);
    const auto got = run_once(arrays, kAtEnd, several);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(old);
    EXPECT_EQ(after & ~0x3fu, flush_and_upward & ~0x3fu);
    ASSERT_TRUE(same(arrays, got, want)) << dc_isa_name(isa);
  }
}
#endif

// The variable is read once per process, so each value gets a process: this test runs itself again.
TEST(OpsIsa, EnvironmentVariable) {
  const char *probe = getenv("DEEPC_TEST_PROBE");
  if (probe) {
    int isa = -5;
    const int rc = dc_isa_current(&isa);
    if (strcmp(probe, "bad") == 0) {
      float x = 1;
      ASSERT_EQ(rc, DC_E_ENV);
      EXPECT_EQ(isa, -5);
      EXPECT_NE(strstr(dc_last_error(), getenv("DEEPC_ISA")), nullptr) << dc_last_error();
      EXPECT_NE(strstr(dc_last_error(), "scalar"), nullptr) << dc_last_error();
      EXPECT_EQ(dc_scale(&x, DC_F32, 2, 1), DC_E_ENV);
      EXPECT_EQ(x, 1.0f);
    } else {
      ASSERT_EQ(rc, DC_OK) << dc_last_error();
      EXPECT_STREQ(dc_isa_name(isa), probe);
    }
    return;
  }
  char self[4096] = {};
  ASSERT_GT(readlink("/proc/self/exe", self, sizeof self - 1), 0);
  std::vector<std::pair<std::string, std::string>> cases = {
      {"bogus", "bad"}, {"AVX2", "bad"}, {"avx", "bad"}, {"", dc_isa_name(isas().back())}};
  for (int isa : isas()) cases.push_back({dc_isa_name(isa), dc_isa_name(isa)});
  for (const auto &[value, expect] : cases) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      setenv("DEEPC_ISA", value.c_str(), 1);
      setenv("DEEPC_TEST_PROBE", expect.c_str(), 1);
      unsetenv("GTEST_OUTPUT");
      execl(self, self, "--gtest_filter=OpsIsa.EnvironmentVariable", "--gtest_brief=1", (char *)nullptr);
      _exit(127);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "DEEPC_ISA=" << value << " status " << status;
  }
}

TEST_F(Ops, IsaNamesAndForce) {
  EXPECT_STREQ(dc_isa_name(DC_ISA_SCALAR), "scalar");
  EXPECT_STREQ(dc_isa_name(DC_ISA_AVX512_BF16), "avx512_bf16");
  EXPECT_STREQ(dc_isa_name(DC_ISA_AMX_BF16), "amx_bf16");
  EXPECT_STREQ(dc_isa_name(-1), "?");
  EXPECT_STREQ(dc_isa_name(DC_ISA_COUNT), "?");
  EXPECT_EQ(dc_isa_available(DC_ISA_SCALAR), 1);
  EXPECT_EQ(dc_isa_available(-1), 0);
  EXPECT_EQ(dc_isa_left_out(), -1); // what is built here has all that runs here
  EXPECT_EQ(dc_isa_force(DC_ISA_COUNT), DC_E_UNSUPPORTED);
  for (int isa = 0; isa < DC_ISA_COUNT; isa++) {
    int now = -1;
    if (!dc_isa_available(isa)) {
      EXPECT_EQ(dc_isa_force(isa), DC_E_UNSUPPORTED);
      continue;
    }
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    ASSERT_EQ(dc_isa_current(&now), DC_OK);
    EXPECT_EQ(now, isa);
  }
}

// ---- arguments -----------------------------------------------------------------------------------------------------
TEST_F(Ops, BadArgumentsAreRefusedAndNothingIsWritten) {
  alignas(64) float a[64], b[64];
  double partial[2] = {-1, -1};
  int64_t index = -9;
  for (int i = 0; i < 64; i++) a[i] = b[i] = (float)i;
  const void *src[] = {b, b + 32}, *hole[] = {b, nullptr}, *odd[] = {b, (const char *)b + 2}, *close[] = {b, a + 8};
  uint8_t *bytes = (uint8_t *)a;
  auto expect = [&](int want, int rc, const char *part) {
    EXPECT_EQ(rc, want) << part << ": " << dc_last_error();
    EXPECT_NE(strstr(dc_last_error(), part), nullptr) << dc_last_error();
    for (int i = 0; i < 64; i++) ASSERT_TRUE(a[i] == (float)i && b[i] == (float)i) << part;
    ASSERT_TRUE(partial[0] == -1 && partial[1] == -1 && index == -9) << part;
  };
  expect(DC_E_DTYPE, dc_cast(a, DC_I32, b, DC_F32, 1, 8), "int32");
  expect(DC_E_DTYPE, dc_cast(a, DC_F32, b, DC_F64, 1, 8), "src");
  expect(DC_E_DTYPE, dc_cast(a, -1, b, DC_F32, 1, 8), "-1");
  expect(DC_E_INVALID, dc_cast(a, DC_F32, b, DC_F32, 1, -3), "-3");
  expect(DC_E_INVALID, dc_cast(a, DC_F32, b, DC_F32, 1, INT64_MAX / 2), "more than memory");
  expect(DC_E_INVALID, dc_cast(nullptr, DC_F32, b, DC_F32, 1, 8), "dst is NULL");
  expect(DC_E_INVALID, dc_cast(a, DC_F32, nullptr, DC_F32, 1, 8), "src is NULL");
  expect(DC_E_INVALID, dc_cast(a, DC_BF16, a, DC_F32, 1, 8), "overlap");
  expect(DC_E_INVALID, dc_cast(a + 1, DC_F32, a, DC_F32, 1, 8), "overlap");
  expect(DC_E_INVALID, dc_cast(bytes + 2, DC_F32, b, DC_F32, 1, 8), "aligned");
  expect(DC_E_DTYPE, dc_scale(a, DC_I8, 1, 8), "int8");
  expect(DC_E_INVALID, dc_scale(nullptr, DC_F32, 1, 8), "NULL");
  expect(DC_E_INVALID, dc_scale(a, DC_F32, 1, -1), "-1");
  expect(DC_E_DTYPE, dc_axpy(a, 1, b, DC_U8, 8), "x is dtype");
  expect(DC_E_INVALID, dc_axpy(nullptr, 1, b, DC_F32, 8), "y is NULL");
  expect(DC_E_INVALID, dc_axpy(a, 1, a + 1, DC_F32, 8), "overlap");
  expect(DC_E_INVALID, dc_axpy(a, 1, a, DC_BF16, 8), "two dtypes");
  expect(DC_E_DTYPE, dc_sqnorm(a, DC_F64, 8, partial), "fp64");
  expect(DC_E_INVALID, dc_sqnorm(a, DC_F32, 8, nullptr), "partial is NULL");
  expect(DC_E_INVALID, dc_sqnorm(nullptr, DC_F32, 8, partial), "x is NULL");
  expect(DC_E_DTYPE, dc_find_nonfinite(a, DC_I64, 8, &index), "int64");
  expect(DC_E_INVALID, dc_find_nonfinite(nullptr, DC_F32, 8, &index), "x is NULL");
  expect(DC_E_INVALID, dc_find_nonfinite(a, DC_F32, 8, nullptr), "index is NULL");
  expect(DC_E_INVALID, dc_find_nonfinite(a, DC_F32, -8, &index), "-8");
  expect(DC_E_INVALID, dc_find_nonfinite(bytes + 1, DC_F32, 8, &index), "aligned");
  expect(DC_E_INVALID, dc_copy(a, b, -1), "-1");
  expect(DC_E_INVALID, dc_copy(a, nullptr, 1), "src is NULL");
  expect(DC_E_INVALID, dc_copy(bytes + 3, bytes, 8), "overlap");
  expect(DC_E_DTYPE, dc_reduce(a, src, 2, 77, DC_RED_SUM, 8), "77");
  expect(DC_E_INVALID, dc_reduce(a, src, 2, DC_F32, 8, 8), "reduce op");
  expect(DC_E_INVALID, dc_reduce(a, src, 2, DC_F32, -1, 8), "reduce op");
  expect(DC_E_DTYPE, dc_reduce(a, src, 2, DC_F32, DC_RED_BXOR, 8), "bitwise");
  expect(DC_E_DTYPE, dc_reduce(a, src, 2, DC_I32, DC_RED_AVG, 8), "average");
  expect(DC_E_INVALID, dc_reduce(a, src, 0, DC_F32, DC_RED_SUM, 8), "nsrc = 0");
  expect(DC_E_INVALID, dc_reduce(a, src, 1025, DC_F32, DC_RED_SUM, 8), "nsrc = 1025");
  expect(DC_E_INVALID, dc_reduce(a, nullptr, 2, DC_F32, DC_RED_SUM, 8), "src is NULL");
  expect(DC_E_INVALID, dc_reduce(a, hole, 2, DC_F32, DC_RED_SUM, 8), "src[1]");
  expect(DC_E_INVALID, dc_reduce(a, odd, 2, DC_F32, DC_RED_SUM, 8), "src[1]");
  expect(DC_E_INVALID, dc_reduce(a, close, 2, DC_F32, DC_RED_SUM, 16), "src[1] overlap");
  expect(DC_E_INVALID, dc_reduce(nullptr, src, 2, DC_F32, DC_RED_SUM, 8), "dst is NULL");
  expect(DC_E_DTYPE, dc_reduce_acc(a, src, 2, DC_F64, 8, 0, partial), "fp64");
  expect(DC_E_INVALID, dc_reduce_acc(nullptr, src, 2, DC_F32, 8, 0, partial), "acc is NULL");
  expect(DC_E_INVALID, dc_reduce_acc(a, hole, 2, DC_F32, 8, 0, partial), "src[1]");
  expect(DC_E_INVALID, dc_reduce_acc(b, src, 2, DC_F32, 8, 0, partial), "overlap");
  expect(DC_E_INVALID, dc_reduce_acc(a, src, -1, DC_F32, 8, 0, partial), "nsrc = -1");
}

TEST_F(Ops, AdamwRefusesBeforeTheFirstWrite) {
  std::vector<float> p(8, 1), g(8, 1), m(8, 1), v(8, 1);
  dc_adamw_args good = {};
  good.struct_size = sizeof good;
  good.param = p.data(), good.grad = g.data(), good.exp_avg = m.data(), good.exp_avg_sq = v.data();
  good.n = 8, good.step = 1, good.lr = 0.1, good.beta1 = 0.9, good.beta2 = 0.99, good.eps = 1e-8, good.grad_scale = 1;
  auto expect = [&](int want, const char *part, const std::function<void(dc_adamw_args &)> &spoil) {
    dc_adamw_args two[] = {good, good}; // the first is fine, and must not be stepped
    spoil(two[1]);
    EXPECT_EQ(dc_adamw(two, 2), want) << part;
    EXPECT_NE(strstr(dc_last_error(), part), nullptr) << dc_last_error();
    for (int i = 0; i < 8; i++) ASSERT_TRUE(p[(size_t)i] == 1 && m[(size_t)i] == 1 && v[(size_t)i] == 1) << part;
  };
  expect(DC_E_INVALID, "step = 0", [](auto &t) { t.step = 0; });
  expect(DC_E_INVALID, "tensor 1: lr = inf", [](auto &t) { t.lr = INFINITY; });
  expect(DC_E_INVALID, "beta1 = 1", [](auto &t) { t.beta1 = 1; });
  expect(DC_E_INVALID, "beta1 = -0.1", [](auto &t) { t.beta1 = -0.1; });
  expect(DC_E_INVALID, "beta2", [](auto &t) { t.beta2 = NAN; });
  expect(DC_E_INVALID, "eps = -1", [](auto &t) { t.eps = -1; });
  expect(DC_E_INVALID, "weight_decay", [](auto &t) { t.weight_decay = NAN; });
  expect(DC_E_INVALID, "grad_scale", [](auto &t) { t.grad_scale = INFINITY; });
  expect(DC_E_INVALID, "flags 0x2", [](auto &t) { t.flags = 2; });
  expect(DC_E_INVALID, "n = -1", [](auto &t) { t.n = -1; });
  expect(DC_E_INVALID, "param is NULL", [](auto &t) { t.param = nullptr; });
  expect(DC_E_INVALID, "grad is NULL", [](auto &t) { t.grad = nullptr; });
  expect(DC_E_INVALID, "exp_avg is NULL", [](auto &t) { t.exp_avg = nullptr; });
  expect(DC_E_INVALID, "exp_avg_sq is NULL", [](auto &t) { t.exp_avg_sq = nullptr; });
  expect(DC_E_INVALID, "lowp", [&](auto &t) { t.lowp = (char *)p.data() + 1, t.lowp_dtype = DC_BF16; });
  expect(DC_E_DTYPE, "param is dtype 3", [](auto &t) { t.param_dtype = DC_F64; });
  expect(DC_E_DTYPE, "grad is dtype 7", [](auto &t) { t.grad_dtype = DC_I32; });
  expect(DC_E_DTYPE, "exp_avg is dtype 4", [](auto &t) { t.state_dtype = DC_I8; });
  expect(DC_E_DTYPE, "lowp is dtype", [&](auto &t) { t.lowp = p.data(), t.lowp_dtype = DC_I64; });
  EXPECT_EQ(dc_adamw(nullptr, 1), DC_E_INVALID);
  EXPECT_EQ(dc_adamw(&good, -1), DC_E_INVALID);
  EXPECT_EQ(dc_adamw(nullptr, 0), DC_OK);
}

TEST_F(Ops, NothingToDoIsFine) {
  const void *src[] = {nullptr};
  int64_t index = 5;
  dc_adamw_args t = {};
  t.struct_size = sizeof t;
  t.step = 1, t.grad_scale = 1;
  EXPECT_EQ(dc_cast(nullptr, DC_F32, nullptr, DC_BF16, 1, 0), DC_OK);
  EXPECT_EQ(dc_scale(nullptr, DC_F16, 1, 0), DC_OK);
  EXPECT_EQ(dc_axpy(nullptr, 1, nullptr, DC_F32, 0), DC_OK);
  EXPECT_EQ(dc_sqnorm(nullptr, DC_F32, 0, nullptr), DC_OK);
  EXPECT_EQ(dc_copy(nullptr, nullptr, 0), DC_OK);
  EXPECT_EQ(dc_reduce(nullptr, src, 1, DC_I8, DC_RED_SUM, 0), DC_OK);
  EXPECT_EQ(dc_reduce_acc(nullptr, src, 1, DC_F32, 0, 1, nullptr), DC_OK);
  EXPECT_EQ(dc_find_nonfinite(nullptr, DC_BF16, 0, &index), DC_OK);
  EXPECT_EQ(dc_adamw(&t, 1), DC_OK) << dc_last_error();
}

// An older caller's struct lacks the padding behind its last field, at least: its tensors lie that much closer.
TEST_F(Ops, AdamwTakesOlderStructsAndRefusesNewerOnes) {
  const size_t older = offsetof(dc_adamw_args, flags) + sizeof(int32_t);
  ASSERT_LT(older, sizeof(dc_adamw_args));
  float ours[2][4][3], theirs[2][4][3];
  dc_adamw_args t[2] = {};
  std::vector<char> packed(2 * older);
  for (int k = 0; k < 2; k++) {
    for (int a = 0; a < 4; a++)
      for (int i = 0; i < 3; i++) ours[k][a][i] = theirs[k][a][i] = 0.5f + (float)(k + a * i);
    t[k].struct_size = sizeof *t, t[k].n = 3, t[k].step = 4, t[k].lr = 0.1, t[k].beta1 = 0.9, t[k].beta2 = 0.99;
    t[k].eps = 1e-8, t[k].weight_decay = 0.1, t[k].grad_scale = 1, t[k].flags = DC_ADAMW_DECOUPLED;
    t[k].param = ours[k][0], t[k].grad = ours[k][1], t[k].exp_avg = ours[k][2], t[k].exp_avg_sq = ours[k][3];
    dc_adamw_args old = t[k];
    old.struct_size = older;
    old.param = theirs[k][0], old.grad = theirs[k][1], old.exp_avg = theirs[k][2], old.exp_avg_sq = theirs[k][3];
    memcpy(&packed[(size_t)k * older], &old, older);
  }
  ASSERT_EQ(dc_adamw(t, 2), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_adamw(reinterpret_cast<const dc_adamw_args *>(packed.data()), 2), DC_OK) << dc_last_error();
  EXPECT_EQ(memcmp(ours, theirs, sizeof ours), 0);
  const auto refused = [&](const char *text) {
    EXPECT_EQ(dc_adamw(t, 2), DC_E_INVALID);
    EXPECT_NE(strstr(dc_last_error(), text), nullptr) << dc_last_error();
  };
  t[1].struct_size = older;
  refused("tensor 1: its struct_size is not that of tensor 0");
  t[0].struct_size = t[1].struct_size = 0;
  refused("dc_adamw_args.struct_size is 0: set it to sizeof(dc_adamw_args)");
  t[0].struct_size = t[1].struct_size = sizeof *t + 8;
  refused("the caller was built for a newer one");
}

} // namespace
