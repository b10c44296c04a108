// dc_lamb_moments and dc_lamb_apply: every instruction set against the scalar reference, the paper's formula in double
// precision, partitions that must not change a bit, and what is refused.
#include <cmath>

#include "lamb_cases.h"

namespace {

void everywhere(const Case &c, Fill fill) {
  same_everywhere(
      arrays_of(c, fill),
      [=](auto &p) {
        const dc_lamb_args t = args_of(c, p);
        return both(&t, 1);
      },
      "lamb format=" + std::to_string(c.format) + " n=" + std::to_string(c.n) + " first=" + std::to_string(c.first) +
          " fill=" + std::to_string(fill));
}

TEST_F(Ops, LambEqualsReference) {
  for (int64_t first : {(int64_t)0, (int64_t)64, (int64_t)4032})
    for (int64_t n : kSizes)
      for (Fill fill : {kOrdinary, kAnyBits, kSpecial}) {
        if (n > 5000 && (fill != kOrdinary || first)) continue;
        everywhere({n, first}, fill);
      }
  for (int param : kLow)
    for (int grad : kLow)
      for (int lowp : {-1, (int)DC_BF16, (int)DC_F16}) everywhere({403, 64, param, grad, lowp}, kOrdinary);
}

const int kFormats[] = {DC_STATE_STOCHASTIC, DC_STATE_8BIT, DC_STATE_4BIT};

TEST_F(Ops, LambInFormatsEqualsReference) {
  size_t turn = 0;
  for (int format : kFormats) {
    for (int64_t first : {(int64_t)0, (int64_t)64, (int64_t)4032})
      for (int64_t n : kSizes)
        for (Fill fill : {kOrdinary, kAnyBits, kSpecial}) {
          if (left_out_fill(turn++) && n <= 5000) continue;
          if (n > 5000 && (fill != kOrdinary || first)) continue;
          everywhere({n, first, DC_F32, DC_F32, -1, format}, fill);
        }
    for (int param : kLow)
      for (int grad : kLow)
        for (int lowp : {-1, (int)DC_BF16, (int)DC_F16}) everywhere({403, 64, param, grad, lowp, format}, kOrdinary);
  }
}

// The sums and the step are those of fp32 states that hold the numbers of the codes; states are kept rounded.
TEST_F(Ops, LambInAFormatStepsBeforeItRounds) {
  for (int format : kFormats) {
    const Case c = {5000, 64, DC_F32, DC_F32, -1, format}, wide = {5000, 64};
    const auto in = arrays_of(c, kOrdinary);
    auto same_numbers = arrays_of(wide, kOrdinary);
    for (size_t s = 0; s < 2; s++) {
      float *to = (float *)same_numbers[2 + s].bytes.data();
      const void *from = in[2 + s].bytes.data();
      if (format == DC_STATE_STOCHASTIC) ASSERT_EQ(dc_cast(to, DC_F32, from, DC_BF16, 1, 5000), DC_OK);
      else
        ASSERT_EQ(dc_state_unpack(to, from, (const float *)in[7 + s].bytes.data(), format, (int)s, 64, 5000), DC_OK)
            << dc_last_error();
    }
    auto run = [](const Case &of, const std::vector<Array> &arrays) {
      return run_once(arrays, kAtEnd, [&](auto &p) {
        const dc_lamb_args t = args_of(of, p);
        return both(&t, 1);
      });
    };
    const auto got = run(c, in), want = run(wide, same_numbers);
    const auto p0 = as<float>(in[0].bytes), p1 = as<float>(got[0]), exact = as<float>(want[0]);
    for (size_t i = 0; i < p1.size(); i++)
      ASSERT_NEAR(p1[i], exact[i], 1e-5 * std::fabs(exact[i] - p0[i]) + 2.4e-7 * std::fabs(p0[i])) << i;
    for (size_t sums : {5, 6})
      for (size_t i = 0; i < 2; i++) ASSERT_NEAR(as<double>(got[sums])[i] / as<double>(want[sums])[i], 1, 1e-5);
    EXPECT_NE(got[2], in[2].bytes) << "the second pass keeps the moments";
    if (format == DC_STATE_STOCHASTIC) continue;
    std::vector<float> kept(5000);
    const auto m = as<float>(want[2]);
    ASSERT_EQ(dc_state_unpack(kept.data(), got[2].data(), (const float *)got[7].data(), format, 0, 64, 5000), DC_OK);
    double off = 0, all = 0;
    for (size_t i = 0; i < m.size(); i++) off += std::fabs(kept[i] - m[i]), all += std::fabs(m[i]);
    EXPECT_LT(off / all, format == DC_STATE_8BIT ? 0.06 : 0.3);
  }
}

TEST_F(Ops, LambDoesNotDependOnThePartition) {
  const int64_t n = 200000, cut = 20 * 4096 - 64;
  for (int isa : isas())
    for (int format : {(int)DC_STATE_NEAREST, (int)DC_STATE_STOCHASTIC, (int)DC_STATE_8BIT, (int)DC_STATE_4BIT}) {
      ASSERT_EQ(dc_isa_force(isa), DC_OK);
      const Case whole = {n, 64, DC_F32, DC_F32, -1, format};
      const auto in = arrays_of(whole, kOrdinary);
      auto run = [&](bool split) {
        return run_once(in, kAtStart, [&](auto &p) {
          dc_lamb_args t[2] = {args_of(whole, p), args_of(whole, p)};
          if (!split) return both(t, 1);
          const int64_t blocks = dc_lamb_blocks(64, cut);
          t[0].n = cut, t[1].n = n - cut, t[1].first += cut;
          t[1].param = (float *)t[0].param + cut, t[1].grad = (const float *)t[0].grad + cut;
          t[1].param_sums += blocks, t[1].update_sums += blocks;
          if (format == DC_STATE_NEAREST) {
            t[1].exp_avg += cut, t[1].exp_avg_sq += cut;
            return both(t, 2);
          }
          int64_t bytes = 0, scales = 0;
          EXPECT_EQ(dc_state_sizes(format, 64, cut, &bytes, &scales), DC_OK);
          for (int s = 0; s < 2; s++) t[1].state[s] = (uint8_t *)t[0].state[s] + bytes, t[1].scale[s] += scales;
          return both(t, 2);
        });
      };
      const auto want = run(false);
      ASSERT_TRUE(same(in, run(true), want)) << "cut";
      dc_set_num_threads(4);
      ASSERT_TRUE(same(in, run(true), want)) << "cut, threads";
      dc_set_num_threads(1);
    }
}

TEST_F(Ops, LambAgreesWithDouble) {
  ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
  const Case c = {5000, 64};
  const auto in = arrays_of(c, kOrdinary);
  dc_lamb_args t = {};
  const auto out = run_once(in, kAtEnd, [&](auto &p) {
    t = args_of(c, p);
    return both(&t, 1);
  });
  const auto p0 = as<float>(in[0].bytes), g0 = as<float>(in[1].bytes), m0 = as<float>(in[2].bytes),
             v0 = as<float>(in[3].bytes), p1 = as<float>(out[0]), m1 = as<float>(out[2]), v1 = as<float>(out[3]);
  const auto ps = as<double>(out[5]), us = as<double>(out[6]);
  double pp = 0, uu = 0;
  for (size_t i = 0; i < 5000; i++) {
    const double g = t.grad_scale * g0[i], m = 0.9 * m0[i] + 0.1 * g, v = 0.99 * v0[i] + 0.01 * g * g;
    const double denom = std::sqrt(v / (1 - std::pow(0.99, 7))) + 1e-6;
    const double u = m / (1 - std::pow(0.9, 7)) / denom + 0.01 * p0[i];
    ASSERT_NEAR(m1[i], m, 1e-6 * (std::fabs(m0[i]) + std::fabs(g)));
    ASSERT_NEAR(v1[i], v, 1e-6 * v);
    ASSERT_NEAR(p1[i], p0[i] - 0.02 * 0.7 * u, 1e-6 * (std::fabs(p0[i]) + std::fabs(u) + 1 / denom));
    pp += (double)p0[i] * p0[i], uu += u * u;
  }
  ASSERT_EQ(ps.size(), 2u); // 64 + 5000 elements: two blocks
  EXPECT_NEAR(ps[0] + ps[1], pp, 1e-9 * pp);
  EXPECT_NEAR(us[0] + us[1], uu, 1e-4 * uu);
}

TEST_F(Ops, LambRefuses) {
  float p[64] = {}, g[64] = {}, m[64] = {}, v[64] = {};
  double ps[1], us[1];
  auto refused = [&](auto change, const char *text, int status = DC_E_INVALID) {
    dc_lamb_args t = {};
    t.struct_size = sizeof t;
    t.param = p, t.grad = g, t.exp_avg = m, t.exp_avg_sq = v, t.param_sums = ps, t.update_sums = us;
    t.n = 64, t.step = 1, t.lr = 0.1, t.beta1 = 0.9, t.beta2 = 0.9, t.eps = 1e-6, t.grad_scale = 1;
    ASSERT_EQ(both(&t, 1), DC_OK) << dc_last_error();
    change(t);
    EXPECT_EQ(both(&t, 1), status) << text;
    EXPECT_NE(strstr(dc_last_error(), text), nullptr) << dc_last_error();
  };
  refused([](dc_lamb_args &t) { t.step = 0; }, "step = 0");
  refused([](dc_lamb_args &t) { t.beta1 = 1; }, "beta1 = 1");
  refused([](dc_lamb_args &t) { t.lr = INFINITY; }, "lr = inf");
  refused([](dc_lamb_args &t) { t.trust = NAN; }, "trust = nan");
  refused([](dc_lamb_args &t) { t.eps = -1; }, "eps = -1");
  refused([](dc_lamb_args &t) { t.first = 1; }, "first = 1");
  refused([](dc_lamb_args &t) { t.param_sums = nullptr; }, "param_sums is NULL");
  refused([](dc_lamb_args &t) { t.exp_avg = nullptr; }, "exp_avg is NULL");
  refused([](dc_lamb_args &t) { t.format = DC_STATE_FORMATS; }, "format = ");
  refused([](dc_lamb_args &t) { t.format = DC_STATE_STOCHASTIC; }, "state[0] is NULL");
  refused([&](dc_lamb_args &t) { t.format = DC_STATE_8BIT, t.state[0] = m, t.state[1] = v; }, "scale[0] is NULL");
  refused([](dc_lamb_args &t) { t.grad_dtype = DC_I8; }, "grad is dtype", DC_E_DTYPE);
  refused([](dc_lamb_args &t) { t.lowp = t.param, t.lowp_dtype = DC_F64; }, "lowp is dtype", DC_E_DTYPE);
  EXPECT_EQ(dc_lamb_moments(nullptr, 1), DC_E_INVALID);
}

} // namespace
