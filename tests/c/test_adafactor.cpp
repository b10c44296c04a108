// dc_adafactor_tops, sums, factors, norms and apply: every instruction set against the scalar reference, the formula in
// double precision, partitions and threads that must not change a bit, and what is refused.
#include <cmath>

#include "adafactor_cases.h"

namespace {

TEST_F(Ops, AdafactorEqualsReference) {
  for (const Case &c : kAdafactorShapes)
    for (Fill fill : {kOrdinary, kAnyBits, kSpecial})
      same_everywhere(
          arrays_of(c, fill), [=](auto &p) { return all_passes({args_of(c, p)}); },
          "adafactor " + std::to_string(c.matrices) + " x " + std::to_string(c.rows) + " x " + std::to_string(c.cols) +
              " fill=" + std::to_string(fill));
  for (int param : kLow)
    for (int grad : kLow)
      for (int lowp : {-1, (int)DC_BF16, (int)DC_F16})
        for (int64_t rows : {0, 3}) {
          const Case c = {1, rows, 45, param, grad, lowp};
          same_everywhere(
              arrays_of(c, kOrdinary), [=](auto &p) { return all_passes({args_of(c, p)}); }, "adafactor dtypes");
        }
}

TEST_F(Ops, AdafactorDoesNotDependOnThePartition) {
  for (const Case &c : {Case{1, 500, 300}, Case{3, 200, 171}, Case{1, 7, 20000}, Case{1, 0, 100000}}) {
    const auto in = arrays_of(c, kOrdinary);
    for (int isa : {(int)DC_ISA_SCALAR, isas().back()}) {
      ASSERT_EQ(dc_isa_force(isa), DC_OK);
      const auto want = run_once(in, kAtStart, [&](auto &p) { return all_passes({args_of(c, p)}); });
      for (int threads : {1, 4}) {
        dc_set_num_threads(threads);
        const auto got = run_once(in, kAtStart, [&](auto &p) {
          return all_passes(cut_at(args_of(c, p), {4096 - kFirst, 5 * 4096 - kFirst, 17 * 4096 - kFirst}));
        });
        ASSERT_TRUE(same(in, got, want)) << c.rows << " rows on " << dc_isa_name(isa) << ", threads " << threads;
      }
      dc_set_num_threads(1);
    }
  }
}

TEST_F(Ops, AdafactorAgreesWithDouble) {
  ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
  const Case c = {2, 40, 130};
  auto in = arrays_of(c, kOrdinary);
  auto *g0 = (float *)in[1].bytes.data();
  for (int i = 0; i < 130; i++) g0[130 + i] *= 1e-12f; // a row and a column far below the others keep their digits
  for (int i = 0; i < 40; i++) g0[130 * i + 7] *= 1e-9f;
  dc_adafactor_args t = {};
  const auto out = run_once(in, kAtEnd, [&](auto &p) {
    t = args_of(c, p);
    return all_passes({t});
  });
  const auto p0 = as<float>(in[0].bytes), g = as<float>(in[1].bytes), r0 = as<float>(in[4].bytes),
             c0 = as<float>(in[5].bytes), p1 = as<float>(out[0]), r1 = as<float>(out[4]), c1 = as<float>(out[5]);
  const auto ps = as<double>(out[11]), us = as<double>(out[12]);
  double pp = 0, uu = 0, want_pp = 0, want_uu = 0;
  for (double s : ps) pp += s;
  for (double s : us) uu += s;
  for (int64_t m = 0; m < 2; m++) {
    std::vector<double> row(40), col(130);
    double mean = 0;
    auto at = [&](int64_t i, int64_t j) { return (size_t)((m * 40 + i) * 130 + j); };
    for (int64_t i = 0; i < 40; i++) {
      double sum = 0;
      for (int64_t j = 0; j < 130; j++) sum += std::pow(0.125 * (double)g[at(i, j)], 2);
      row[(size_t)i] = 0.7 * (double)r0[(size_t)(m * 40 + i)] + 0.3 * sum / 130;
      mean += row[(size_t)i] / 40;
      ASSERT_NEAR(r1[(size_t)(m * 40 + i)], row[(size_t)i], 1e-6 * row[(size_t)i]);
      ASSERT_NEAR(as<double>(out[8])[(size_t)(m * 40 + i)], sum, 1e-7 * sum);
    }
    for (int64_t j = 0; j < 130; j++) {
      double sum = 0;
      for (int64_t i = 0; i < 40; i++) sum += std::pow(0.125 * (double)g[at(i, j)], 2);
      col[(size_t)j] = 0.7 * (double)c0[(size_t)(m * 130 + j)] + 0.3 * sum / 40;
      ASSERT_NEAR(c1[(size_t)(m * 130 + j)], col[(size_t)j], 1e-6 * col[(size_t)j]);
      ASSERT_NEAR(as<double>(out[9])[(size_t)(m * 130 + j)], sum, 1e-7 * sum);
    }
    for (int64_t i = 0; i < 40; i++)
      for (int64_t j = 0; j < 130; j++) {
        const size_t e = at(i, j);
        const double v = row[(size_t)i] * col[(size_t)j] / mean,
                     u = -0.125 * (double)g[e] / std::sqrt(std::max(v, 1e-8));
        ASSERT_NEAR(p1[e], (double)p0[e] * 0.99 - 0.02 * u, 1e-6 * (std::fabs((double)p0[e]) + std::fabs(u)));
        want_pp += (double)p0[e] * (double)p0[e], want_uu += u * u;
      }
  }
  EXPECT_NEAR(pp, want_pp, 1e-9 * want_pp);
  EXPECT_NEAR(uu, want_uu, 1e-5 * want_uu);
}

TEST_F(Ops, AdafactorRefuses) {
  float p[64] = {}, g[64] = {}, r[8] = {}, k[8] = {}, f[8] = {};
  uint32_t rt[8] = {}, kt[8] = {};
  double rs[8] = {}, ks[8] = {}, ps[1], us[1];
  auto refused = [&](auto change, const char *text, int status = DC_E_INVALID) {
    dc_adafactor_args t = {};
    t.struct_size = sizeof t;
    t.param = p, t.grad = g, t.row_var = r, t.col_var = k, t.row_top = rt, t.col_top = kt, t.row_sum = rs,
    t.col_sum = ks;
    t.row_factor = f, t.param_sums = ps, t.update_sums = us, t.n = 64, t.matrices = 1, t.rows = 8, t.cols = 8;
    t.grad_scale = 1, t.weight = 1, t.keep = 1;
    ASSERT_EQ(all_passes({t}), DC_OK) << dc_last_error();
    change(t);
    for (auto pass :
         {dc_adafactor_tops, dc_adafactor_sums, dc_adafactor_factors, dc_adafactor_norms, dc_adafactor_apply}) {
      EXPECT_EQ(pass(&t, 1), status) << text;
      EXPECT_NE(strstr(dc_last_error(), text), nullptr) << dc_last_error();
    }
  };
  refused([](dc_adafactor_args &t) { t.weight = NAN; }, "weight = nan");
  refused([](dc_adafactor_args &t) { t.keep = INFINITY; }, "keep = inf");
  refused([](dc_adafactor_args &t) { t.eps = -1; }, "eps = -1");
  refused([](dc_adafactor_args &t) { t.first = 1; }, "first = 1");
  refused([](dc_adafactor_args &t) { t.rows = -8; }, "1 matrices of -8 x 8");
  refused([](dc_adafactor_args &t) { t.begin = 1; }, "[1, 1 + 64) of a parameter of 64");
  refused([](dc_adafactor_args &t) { t.matrices = INT64_MAX; }, "overflow 64 bits", DC_E_OVERFLOW);
  refused([](dc_adafactor_args &t) { t.col_sum = nullptr; }, "col_sum is NULL");
  refused([](dc_adafactor_args &t) { t.grad_dtype = DC_I8; }, "grad is dtype", DC_E_DTYPE);
  refused([](dc_adafactor_args &t) { t.lowp = t.param, t.lowp_dtype = DC_F64; }, "lowp is dtype", DC_E_DTYPE);
  EXPECT_EQ(dc_adafactor_tops(nullptr, 1), DC_E_INVALID);
}

} // namespace
