// dc_step: every rule on every instruction set against the scalar reference bit for bit, that against the papers'
// formulas in double precision, and what is refused.
#include <cmath>

#include "op_cases.h"

namespace {

struct Layout {
  int rule, param, grad, state, lowp; // lowp < 0: none
  bool flag, momentum;                // flag: decoupled or Nesterov's; momentum: of SGD, or amsgrad
};

int states_of(const Layout &l) {
  return l.rule == DC_RULE_ADAMW ? 2 + l.momentum : l.rule == DC_RULE_SGD ? (int)l.momentum : 1;
}

dc_step_args args_of(const Layout &l, const std::vector<uint8_t *> &p, int64_t n, int64_t step) {
  dc_step_args t = {};
  t.struct_size = sizeof t;
  t.param = p[0];
  t.grad = p[1];
  for (int s = 0; s < states_of(l); s++) t.state[s] = p[(size_t)s + 2];
  t.lowp = l.lowp >= 0 ? p[5] : nullptr;
  t.n = n;
  t.step = step;
  t.rule = l.rule;
  t.lr = 0.02;
  t.beta1 = l.rule == DC_RULE_SGD && !l.momentum ? 0.0 : 0.9;
  t.beta2 = l.rule == DC_RULE_SGD ? (l.flag ? 0.0 : 0.25) : 0.99;
  t.eps = 1e-8;
  t.weight_decay = 0.01;
  t.grad_scale = 0.125;
  t.param_dtype = l.param;
  t.grad_dtype = l.grad;
  t.state_dtype = l.state;
  t.lowp_dtype = l.lowp >= 0 ? l.lowp : 0;
  t.flags = !l.flag ? 0 : l.rule == DC_RULE_ADAMW ? DC_STEP_DECOUPLED : l.rule == DC_RULE_SGD ? DC_STEP_NESTEROV : 0;
  return t;
}

std::vector<Array> arrays_of(const Layout &l, int64_t n, Fill fill) {
  const int count = states_of(l);
  std::vector<Array> a = {make(l.param, n, fill, 40), make(l.grad, n, fill, 41)};
  for (int s = 0; s < 3; s++) a.push_back(make(l.state, s < count ? n : 0, fill, 42 + (uint64_t)s));
  a.push_back(make(l.lowp >= 0 ? l.lowp : 0, l.lowp >= 0 ? n : 0, kAnyBits, 45));
  const bool squares = l.rule == DC_RULE_ADAMW || l.rule == DC_RULE_ADAGRAD;
  for (size_t k = l.rule == DC_RULE_ADAGRAD ? 2 : 3; squares && fill == kOrdinary && k < 5; k++)
    for (size_t i = a[k].element() - 1; i < a[k].bytes.size(); i += a[k].element()) a[k].bytes[i] &= 0x7f;
  return a;
}

void step_everywhere(const Layout &l, int64_t n, Fill fill, int64_t step = 7) {
  const std::string what = "rule " + std::to_string(l.rule) + " p=" + std::to_string(l.param) +
                           " g=" + std::to_string(l.grad) + " s=" + std::to_string(l.state) +
                           " low=" + std::to_string(l.lowp) + " flag=" + std::to_string(l.flag) +
                           " momentum=" + std::to_string(l.momentum) + " n=" + std::to_string(n);
  same_everywhere(
      arrays_of(l, n, fill),
      [=](auto &p) {
        const dc_step_args t = args_of(l, p, n, step);
        return dc_step(&t, 1);
      },
      what);
}

TEST_F(Ops, StepEqualsReferenceInEveryLayout) {
  for (int rule = 0; rule < DC_RULE_COUNT; rule++)
    for (int param : kLow)
      for (int grad : kLow)
        for (int state : kLow)
          for (int lowp : {-1, (int)DC_BF16, (int)DC_F16})
            for (int mode = 0; mode < 4; mode++) {
              const bool flag = (mode & 1) != 0, momentum = (mode & 2) != 0;
              if (mode && (rule == DC_RULE_LION || rule == DC_RULE_ADAGRAD)) continue;
              step_everywhere({rule, param, grad, state, lowp, flag, momentum}, 83,
                              (Fill)((param + grad + state + mode) % 3));
            }
}

TEST_F(Ops, StepEqualsReferenceAtEverySize) {
  for (int rule : {(int)DC_RULE_LION, (int)DC_RULE_ADAGRAD, (int)DC_RULE_SGD})
    for (int lowp : {-1, (int)DC_BF16, (int)DC_F16})
      for (int64_t n : kSizes)
        for (Fill fill : {kOrdinary, kAnyBits, kSpecial}) {
          if (n > 5000 && fill != kAnyBits) continue;
          step_everywhere({rule, DC_F32, DC_F32, DC_F32, lowp, false, true}, n, fill);
          if (n < 100) step_everywhere({rule, DC_F32, DC_BF16, DC_F32, DC_BF16, true, true}, n, fill, 1);
        }
}

// Many tensors of several rules as one job, on one thread and on four, end as one by one.
TEST_F(Ops, StepOfManyTensorsEqualsOneByOne) {
  std::mt19937 rng(9);
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<std::vector<Array>> tensors;
    std::vector<Layout> layouts;
    for (int k = 0; k < 60; k++) {
      layouts.push_back({k / 10 % DC_RULE_COUNT, DC_F32, DC_F32, DC_F32, k % 3 ? -1 : (int)DC_BF16, k % 2 == 0, true});
      tensors.push_back(
          arrays_of(layouts.back(), k % 7 == 0 ? 0 : (int64_t)(rng() % (k == 30 ? 200000 : 3000)), kOrdinary));
    }
    auto step = [&](std::vector<std::vector<Array>> &ts, bool together) {
      std::vector<dc_step_args> jobs;
      for (size_t k = 0; k < ts.size(); k++) {
        std::vector<uint8_t *> p;
        for (Array &a : ts[k]) p.push_back(a.bytes.data());
        jobs.push_back(args_of(layouts[k], p, (int64_t)ts[k][0].bytes.size() / 4, 1 + (int64_t)k / 20));
        jobs.back().lr = 1e-3 * (double)(1 + k / 5);
      }
      if (together) {
        EXPECT_EQ(dc_step(jobs.data(), (int64_t)jobs.size()), DC_OK) << dc_last_error();
        return;
      }
      for (const dc_step_args &job : jobs) EXPECT_EQ(dc_step(&job, 1), DC_OK) << dc_last_error();
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

TEST_F(Ops, StepOfAdamsRuleIsDcAdamw) {
  for (bool decoupled : {false, true})
    for (bool amsgrad : {false, true}) {
      const Layout l = {DC_RULE_ADAMW, DC_F32, DC_BF16, DC_F32, DC_BF16, decoupled, amsgrad};
      const auto in = arrays_of(l, 5000, kOrdinary);
      const auto ours = run_once(in, kAtEnd, [&](auto &p) {
        const dc_step_args t = args_of(l, p, 5000, 3);
        return dc_step(&t, 1);
      });
      const auto want = run_once(in, kAtEnd, [&](auto &p) {
        const dc_step_args t = args_of(l, p, 5000, 3);
        dc_adamw_args a = {};
        a.struct_size = sizeof a;
        a.param = t.param, a.grad = t.grad, a.exp_avg = t.state[0], a.exp_avg_sq = t.state[1];
        a.max_exp_avg_sq = t.state[2], a.lowp = t.lowp, a.n = t.n, a.step = t.step;
        a.lr = t.lr, a.beta1 = t.beta1, a.beta2 = t.beta2, a.eps = t.eps, a.weight_decay = t.weight_decay;
        a.grad_scale = t.grad_scale, a.param_dtype = t.param_dtype, a.grad_dtype = t.grad_dtype;
        a.state_dtype = t.state_dtype, a.lowp_dtype = t.lowp_dtype;
        a.flags = decoupled ? DC_ADAMW_DECOUPLED : 0;
        return dc_adamw(&a, 1);
      });
      EXPECT_TRUE(same(in, ours, want)) << decoupled << amsgrad;
    }
}

// The papers' formulas in double precision; the bounds add up the roundings of the fp32 operations.
TEST_F(Ops, StepReferenceAgreesWithDouble) {
  ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
  const int64_t n = 4096;
  const double eps32 = 0x1p-23;
  for (int rule : {(int)DC_RULE_LION, (int)DC_RULE_ADAGRAD, (int)DC_RULE_SGD})
    for (int mode = 0; mode < 6; mode++) { // SGD: without momentum, with, Nesterov's; each at step 1 and later
      if (rule != DC_RULE_SGD && mode) continue;
      const Layout l = {rule, DC_F32, DC_F32, DC_F32, -1, mode % 3 == 2, mode % 3 > 0};
      auto in = arrays_of(l, n, kOrdinary);
      const int64_t step = mode < 3 ? 7 : 1;
      if (step == 1) std::fill(in[2].bytes.begin(), in[2].bytes.end(), (uint8_t)0);
      dc_step_args t = {};
      const auto out = run_once(in, kAtEnd, [&](auto &p) {
        t = args_of(l, p, n, step);
        return dc_step(&t, 1);
      });
      const auto p0 = as<float>(in[0].bytes), g0 = as<float>(in[1].bytes), s0 = as<float>(in[2].bytes),
                 p1 = as<float>(out[0]), s1 = as<float>(out[2]);
      for (size_t i = 0; i < (size_t)n; i++) {
        const double p = p0[i], before = s0.empty() ? 0.0 : (double)s0[i];
        double g = t.grad_scale * g0[i], s, want;
        const double size = std::fabs(g) + t.weight_decay * std::fabs(p);
        if (rule == DC_RULE_LION) {
          const double u = t.beta1 * before + (1 - t.beta1) * g;
          if (std::fabs(u) < 1e-6) continue; // its sign may be that of a rounding
          s = t.beta2 * before + (1 - t.beta2) * g;
          want = p * (1 - t.lr * t.weight_decay) - t.lr * (u > 0 ? 1 : -1);
        } else if (rule == DC_RULE_ADAGRAD) {
          g += t.weight_decay * p;
          s = before + g * g;
          want = p - t.lr * g / (std::sqrt(s) + t.eps);
        } else {
          g += t.weight_decay * p;
          s = step == 1 ? g : t.beta1 * before + (1 - t.beta2) * g;
          want = p - t.lr * (!l.momentum ? g : l.flag ? g + t.beta1 * s : s);
        }
        if (!s1.empty()) ASSERT_NEAR(s1[i], s, 4 * eps32 * (std::fabs(before) + size + size * size)) << rule << mode;
        ASSERT_NEAR(p1[i], want, 4 * eps32 * (std::fabs(p) + t.lr)) << "rule " << rule << " mode " << mode << " " << i;
      }
    }
}

TEST_F(Ops, LionOfZeroMovesNothing) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<float> p(19, 1.5f), g(19, 0.0f), m(19, 0.0f);
    g[3] = -0.0f, m[4] = -0.0f, g[5] = 1e-45f, g[6] = -1e-40f;
    dc_step_args t = {};
    t.struct_size = sizeof t;
    t.param = p.data(), t.grad = g.data(), t.state[0] = m.data();
    t.n = 19, t.step = 1, t.rule = DC_RULE_LION, t.lr = 0.25, t.beta1 = 0.0, t.beta2 = 0.99, t.grad_scale = 1;
    ASSERT_EQ(dc_step(&t, 1), DC_OK) << dc_last_error();
    for (size_t i = 0; i < p.size(); i++)
      EXPECT_EQ(p[i], i == 5 ? 1.25f : i == 6 ? 1.75f : 1.5f) << i << " on " << dc_isa_name(isa);
  }
}

TEST_F(Ops, StepRefusesWhatItCannotDo) {
  float p[8] = {}, g[8] = {}, s[8] = {}, v[8] = {};
  auto refused = [&](int rule, auto change, const char *text, int status = DC_E_INVALID) {
    dc_step_args t = {};
    t.struct_size = sizeof t;
    t.param = p, t.grad = g, t.state[0] = s, t.state[1] = rule == DC_RULE_ADAMW ? v : nullptr;
    t.n = 8, t.step = 1, t.rule = rule, t.lr = 0.1, t.beta1 = 0.9, t.beta2 = 0.9, t.grad_scale = 1;
    ASSERT_EQ(dc_step(&t, 1), DC_OK) << dc_last_error();
    memset(p, 0, sizeof p);
    change(t);
    EXPECT_EQ(dc_step(&t, 1), status) << text;
    EXPECT_NE(strstr(dc_last_error(), text), nullptr) << dc_last_error();
    for (float x : p) EXPECT_EQ(x, 0.0f) << text;
  };
  for (int rule = 0; rule < DC_RULE_COUNT; rule++) {
    refused(rule, [](dc_step_args &t) { t.step = 0; }, "step = 0");
    refused(rule, [](dc_step_args &t) { t.lr = NAN; }, "lr = nan");
    refused(rule, [](dc_step_args &t) { t.eps = -1; }, "eps = -1");
    refused(rule, [](dc_step_args &t) { t.eps = INFINITY; }, "eps = inf");
    refused(rule, [](dc_step_args &t) { t.beta2 = INFINITY; }, "beta2");
    refused(rule, [](dc_step_args &t) { t.weight_decay = NAN; }, "weight_decay");
    refused(rule, [](dc_step_args &t) { t.grad_scale = NAN; }, "grad_scale");
    refused(rule, [](dc_step_args &t) { t.rule = DC_RULE_COUNT; }, "rule = ");
    refused(rule, [](dc_step_args &t) { t.rule = -1; }, "rule = -1");
    refused(rule, [](dc_step_args &t) { t.flags = 64; }, "flags 0x40");
    refused(rule, [](dc_step_args &t) { t.n = -1; }, "n = -1");
    refused(rule, [](dc_step_args &t) { t.grad = nullptr; }, "grad is NULL");
    refused(rule, [](dc_step_args &t) { t.state[0] = (char *)t.state[0] + 1; }, "not aligned");
    refused(rule, [](dc_step_args &t) { t.param_dtype = DC_F64; }, "param is dtype", DC_E_DTYPE);
    refused(rule, [](dc_step_args &t) { t.lowp = t.param, t.lowp_dtype = DC_I8; }, "lowp is dtype", DC_E_DTYPE);
    refused(rule, [](dc_step_args &t) { t.struct_size = 8; }, "struct_size");
    if (rule != DC_RULE_SGD) refused(rule, [](dc_step_args &t) { t.state[0] = nullptr; }, "state[0] is NULL");
  }
  refused(DC_RULE_LION, [](dc_step_args &t) { t.beta1 = 1; }, "beta1 = 1");
  refused(DC_RULE_LION, [](dc_step_args &t) { t.flags = DC_STEP_DECOUPLED; }, "flags 0x1");
  refused(DC_RULE_SGD, [](dc_step_args &t) { t.state[0] = nullptr; }, "momentum 0.9 without a buffer");
  refused(DC_RULE_ADAGRAD, [&](dc_step_args &t) { t.state[1] = v; }, "state[1] is given");
  EXPECT_EQ(dc_step(nullptr, 1), DC_E_INVALID);
  EXPECT_EQ(dc_step(nullptr, -1), DC_E_INVALID);
  EXPECT_EQ(dc_step(nullptr, 0), DC_OK);
}

TEST_F(Ops, StepNamesItsStates) {
  EXPECT_STREQ(dc_step_state_name(DC_RULE_ADAMW, 2), "max_exp_avg_sq");
  EXPECT_STREQ(dc_step_state_name(DC_RULE_LION, 0), "exp_avg");
  EXPECT_STREQ(dc_step_state_name(DC_RULE_ADAGRAD, 0), "sum");
  EXPECT_STREQ(dc_step_state_name(DC_RULE_SGD, 0), "momentum_buffer");
  EXPECT_EQ(dc_step_state_name(DC_RULE_SGD, 1), nullptr);
  EXPECT_EQ(dc_step_state_name(DC_RULE_COUNT, 0), nullptr);
  EXPECT_EQ(dc_step_state_name(-1, 0), nullptr);
  EXPECT_EQ(dc_step_state_name(0, -1), nullptr);
}

} // namespace
