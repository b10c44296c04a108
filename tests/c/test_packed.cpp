// dc_step where states are bf16 with stochastic rounding or codes of 8 and 4 bits: every instruction set against the
// scalar reference, what a partition must not change, what rounding promises, and what is refused.
#include <cmath>

#include "op_cases.h"
#include "ref/packed.h"

namespace {

struct Case {
  int rule, format;
  int64_t n, first;
  int param = DC_F32, grad = DC_F32, lowp = -1;
};

int states_of(int rule) { return rule == DC_RULE_ADAMW ? 2 : 1; }

dc_step_args args_of(const Case &c, const std::vector<uint8_t *> &p) {
  dc_step_args t = {};
  t.struct_size = sizeof t;
  t.param = p[0];
  t.grad = p[1];
  for (int s = 0; s < states_of(c.rule); s++) t.state[s] = p[(size_t)s + 2], t.scale[s] = (float *)p[(size_t)s + 4];
  t.lowp = c.lowp >= 0 ? p[6] : nullptr;
  t.n = c.n;
  t.step = 7;
  t.rule = c.rule;
  t.lr = 0.02, t.beta1 = 0.9, t.beta2 = 0.99, t.eps = 1e-8, t.weight_decay = 0.01, t.grad_scale = 0.125;
  t.param_dtype = c.param, t.grad_dtype = c.grad, t.state_dtype = DC_BF16;
  t.lowp_dtype = c.lowp >= 0 ? c.lowp : 0;
  t.flags = c.rule == DC_RULE_ADAMW ? DC_STEP_DECOUPLED : 0;
  if (c.rule == DC_RULE_SGD && c.n / 2 % 2) t.flags = DC_STEP_NESTEROV;
  if (c.rule > DC_RULE_LION && c.n % 2) t.weight_decay = 0; // a loop of its own
  if (c.rule == DC_RULE_LION && c.n % 2) t.beta2 = 0; // an infinite state becomes NaN, and the step of it is a number
  t.format = c.format;
  t.first = c.first;
  return t;
}

// Codes are any bytes; scales ordinary, or with NaN, infinity and zero among them.
std::vector<Array> arrays_of(const Case &c, Fill fill) {
  int64_t bytes = 0, scales = 0;
  EXPECT_EQ(dc_state_sizes(c.format, c.first, c.n, &bytes, &scales), DC_OK) << dc_last_error();
  std::vector<Array> a = {make(c.param, c.n, fill, 50), make(c.grad, c.n, fill, 51)};
  for (int s = 0; s < 2; s++) {
    const bool have = s < states_of(c.rule);
    if (c.format == DC_STATE_STOCHASTIC) {
      a.push_back(make(DC_BF16, have ? c.n : 0, fill, 52 + (uint64_t)s));
      if (s == 1 && fill == kOrdinary)
        for (size_t i = 1; i < a.back().bytes.size(); i += 2) a.back().bytes[i] &= 0x7f;
    } else {
      a.push_back(raw(have ? bytes : 0, 52 + (uint64_t)s));
      // Halves without an element are written by the step.
    }
  }
  for (int s = 0; s < 2; s++) {
    a.push_back(make(DC_F32, s < states_of(c.rule) ? scales : 0, fill, 54 + (uint64_t)s));
    if (fill == kOrdinary)
      for (size_t i = 3; i < a.back().bytes.size(); i += 4) a.back().bytes[i] &= 0x7f;
  }
  a.push_back(make(c.lowp >= 0 ? c.lowp : 0, c.lowp >= 0 ? c.n : 0, kAnyBits, 56));
  return a;
}

void everywhere(const Case &c, Fill fill) {
  const std::string what = "rule " + std::to_string(c.rule) + " format " + std::to_string(c.format) +
                           " n=" + std::to_string(c.n) + " first=" + std::to_string(c.first) +
                           " fill=" + std::to_string(fill);
  same_everywhere(
      arrays_of(c, fill),
      [=](auto &p) {
        const dc_step_args t = args_of(c, p);
        return dc_step(&t, 1);
      },
      what);
}

const int kRules[] = {DC_RULE_ADAMW, DC_RULE_LION, DC_RULE_ADAGRAD, DC_RULE_SGD};
const int kFormats[] = {DC_STATE_STOCHASTIC, DC_STATE_8BIT, DC_STATE_4BIT};

TEST_F(Ops, PackedEqualsReferenceAtEverySize) {
  size_t turn = 0;
  for (int rule : kRules)
    for (int format : kFormats)
      for (int64_t first : {(int64_t)0, (int64_t)64, (int64_t)192, ((int64_t)1 << 33) - 64})
        for (int64_t n : kSizes)
          for (Fill fill : {kOrdinary, kAnyBits, kSpecial}) {
            if (left_out_fill(turn++) && n <= 5000) continue;
            if (n > 5000 && (fill != kOrdinary || first)) continue;
            everywhere({rule, format, n, first}, fill);
          }
}

TEST_F(Ops, PackedEqualsReferenceInEveryLayout) {
  for (int rule : kRules)
    for (int format : kFormats)
      for (int param : kLow)
        for (int grad : kLow)
          for (int lowp : {-1, (int)DC_BF16, (int)DC_F16})
            everywhere({rule, format, 403, 64, param, grad, lowp}, kOrdinary);
}

// A cut at multiples of a block, threads, and several tensors in a call change nothing.
TEST_F(Ops, PackedDoesNotDependOnThePartition) {
  const int64_t n = 200000, cut = 131072 + 256 - 64;
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int rule : kRules)
      for (int format : kFormats) {
        const Case whole = {rule, format, n, 64};
        const auto in = arrays_of(whole, kOrdinary);
        auto run = [&](bool split) {
          return run_once(in, kAtStart, [&](auto &p) {
            dc_step_args t[2] = {args_of(whole, p), args_of(whole, p)};
            if (!split) return dc_step(t, 1);
            t[0].n = cut;
            t[1].n = n - cut, t[1].first += cut;
            t[1].param = (float *)t[0].param + cut, t[1].grad = (const float *)t[0].grad + cut;
            int64_t bytes = 0, scales = 0;
            EXPECT_EQ(dc_state_sizes(format, 64, cut, &bytes, &scales), DC_OK);
            for (int s = 0; s < states_of(rule); s++) {
              t[1].state[s] = (uint8_t *)t[0].state[s] + bytes;
              t[1].scale[s] = t[0].scale[s] + scales;
            }
            return dc_step(t, 2);
          });
        };
        const auto want = run(false);
        ASSERT_TRUE(same(in, run(true), want)) << rule << format << " cut";
        dc_set_num_threads(4);
        ASSERT_TRUE(same(in, run(false), want)) << rule << format << " threads";
        ASSERT_TRUE(same(in, run(true), want)) << rule << format << " cut, threads";
        dc_set_num_threads(1);
      }
  }
}

// What is unpacked packs to the same codes and scales, whatever the codes were.
TEST_F(Ops, UnpackedStatesPackAsTheyWere) {
  for (int format : {(int)DC_STATE_8BIT, (int)DC_STATE_4BIT})
    for (int kind : {DC_STATE_SIGNED, DC_STATE_SQUARES, DC_STATE_LINEAR})
      for (int64_t first : {0, 64, 192}) {
        const int64_t n = 1003;
        const bool squares = kind == DC_STATE_SQUARES, linear = kind == DC_STATE_LINEAR && format == DC_STATE_8BIT;
        std::vector<float> x((size_t)n), back((size_t)n);
        std::mt19937 rng(3);
        for (auto &f : x)
          f = std::ldexp((float)(rng() % 1000) / 1000.0f, -(int)(rng() % 20)) * (squares || rng() % 2 ? 1.0f : -1.0f);
        std::fill(x.begin() + 300, x.begin() + 600, 0.0f);
        x[900] = 3e38f, x[1002] = 1e-30f;
        int64_t bytes = 0, scales = 0;
        ASSERT_EQ(dc_state_sizes(format, first, n, &bytes, &scales), DC_OK);
        std::vector<uint8_t> codes((size_t)bytes), again((size_t)bytes);
        std::vector<float> scale((size_t)scales), scale2((size_t)scales);
        ASSERT_EQ(dc_state_pack(codes.data(), scale.data(), x.data(), format, kind, first, n), DC_OK)
            << dc_last_error();
        ASSERT_EQ(dc_state_unpack(back.data(), codes.data(), scale.data(), format, kind, first, n), DC_OK);
        ASSERT_EQ(dc_state_pack(again.data(), scale2.data(), back.data(), format, kind, first, n), DC_OK);
        EXPECT_EQ(codes, again) << format << kind << first;
        EXPECT_EQ(scale, scale2) << format << kind << first;
        // Half a gap between neighbouring codes, of which 8 bits have 8 an octave and 4 bits 2.
        const double half = linear ? 0 : format == DC_STATE_8BIT ? 1.0 / 16 : 0.25;
        const double least = linear                    ? 0.5 / 127
                             : squares                 ? (format == DC_STATE_8BIT ? 0x1p-31 : 0x1p-7)
                             : format == DC_STATE_8BIT ? 0x1p-15
                                                       : 0.125;
        const int64_t block = format == DC_STATE_8BIT ? 256 : 128;
        for (int64_t i = 0; i < n; i++) {
          const double s = scale[(size_t)((first + i) / block - first / block)];
          ASSERT_NEAR(back[(size_t)i], x[(size_t)i], std::max(half * std::fabs(x[(size_t)i]), least * s) * (1 + 1e-6))
              << i;
        }
      }
}

// Near fp32's end the inverse of a scale is denormal: the largest noise must not make the largest number a code too
// many.
TEST_F(Ops, HugeStatesKeepTheirSignAndSize) {
  const int64_t n = DC__BLOCK_MOST;
  for (int isa : isas())
    for (int format : {(int)DC_STATE_8BIT, (int)DC_STATE_4BIT})
      for (int rule : kRules) {
        const int state = rule == DC_RULE_ADAMW, kind = dc__packed_kind(rule, state);
        const dc__code_map map = dc__code_map_of(format, kind);
        Case c = {rule, format, n, 0};
        const dc__keys keys = dc__keys_of(7, 0);
        uint32_t number = 0; // whose noise is the largest
        while (dc__noise(keys, state, map.shift, number) + 1 != 1u << map.shift) number++;
        c.first = number / n * n;
        auto in = arrays_of(c, kOrdinary);
        std::vector<uint8_t *> p;
        for (Array &a : in) p.push_back(a.bytes.data());
        float grad = kind == DC_STATE_SQUARES ? 0x1p63f : 0x1p126f, huge = grad;
        for (; huge * (1.0f / huge) <= 1.0f; huge = kind == DC_STATE_SQUARES ? grad * grad : grad)
          grad = std::nextafter(grad, INFINITY);
        std::fill((float *)p[1], (float *)p[1] + n, grad);
        for (int k = 2; k < 6; k++) std::fill(in[(size_t)k].bytes.begin(), in[(size_t)k].bytes.end(), 0);
        dc_step_args t = args_of(c, p);
        t.lr = t.weight_decay = 0, t.grad_scale = 1, t.flags = 0;
        t.beta2 = 0; // the whole gradient, or its square, becomes the state
        ASSERT_EQ(dc_isa_force(isa), DC_OK);
        ASSERT_EQ(dc_step(&t, 1), DC_OK) << dc_last_error();
        std::vector<float> got((size_t)n);
        ASSERT_EQ(
            dc_state_unpack(got.data(), p[2 + (size_t)state], (float *)p[4 + (size_t)state], format, kind, c.first, n),
            DC_OK);
        for (int64_t i = 0; i < n; i++)
          ASSERT_GE(got[(size_t)i], 0.7f * huge)
              << "element " << i << ", rule " << rule << ", format " << format << " on " << dc_isa_name(isa);
      }
}

// The mean of many roundings is the number: a state whose gradient is zero decays as it does in fp32.
TEST_F(Ops, StochasticRoundingKeepsTheMean) {
  for (int isa : {isas().back()}) { // the others have its bits (PackedEqualsReference), and the slow ones take seconds
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int format : kFormats) {
      const int64_t n = 1 << 14, steps = 200;
      const Case c = {DC_RULE_ADAMW, format, n, 0};
      auto in = arrays_of(c, kOrdinary);
      std::vector<float> start((size_t)n);
      std::mt19937 rng(11);
      // Squares between the scale (one element a block keeps it) and a quarter of it.
      for (int64_t i = 0; i < n; i++)
        start[(size_t)i] = i % 128 == 0 ? 1.0f : 0.3f + 0.6f * (float)(rng() % 1024) / 1024.0f;
      std::vector<float> zero((size_t)n, 0.0f), param((size_t)n, 0.0f), grad((size_t)n, 0.0f);
      std::vector<float> got((size_t)n);
      for (int64_t i = 0; i < n; i += 128) grad[(size_t)i] = 8.0f; // times 0.125: a gradient of 1 keeps the square at 1
      if (format == DC_STATE_STOCHASTIC) {
        ASSERT_EQ(dc_cast(in[2].bytes.data(), DC_BF16, zero.data(), DC_F32, 1, n), DC_OK);
        ASSERT_EQ(dc_cast(in[3].bytes.data(), DC_BF16, start.data(), DC_F32, 1, n), DC_OK);
        ASSERT_EQ(dc_cast(start.data(), DC_F32, in[3].bytes.data(), DC_BF16, 1, n), DC_OK);
      } else {
        ASSERT_EQ(dc_state_pack(in[2].bytes.data(), (float *)in[4].bytes.data(), zero.data(), format, 0, 0, n), DC_OK);
        ASSERT_EQ(dc_state_pack(in[3].bytes.data(), (float *)in[5].bytes.data(), start.data(), format, 1, 0, n), DC_OK);
        ASSERT_EQ(dc_state_unpack(start.data(), in[3].bytes.data(), (float *)in[5].bytes.data(), format, 1, 0, n),
                  DC_OK);
      }
      memcpy(in[0].bytes.data(), param.data(), (size_t)n * 4);
      memcpy(in[1].bytes.data(), grad.data(), (size_t)n * 4);
      std::vector<uint8_t *> p;
      for (Array &a : in) p.push_back(a.bytes.data());
      dc_step_args t = args_of(c, p);
      t.beta2 = 0.999, t.lr = 0;
      for (t.step = 1; t.step <= steps; t.step++) ASSERT_EQ(dc_step(&t, 1), DC_OK) << dc_last_error();
      if (format == DC_STATE_STOCHASTIC) ASSERT_EQ(dc_cast(got.data(), DC_F32, p[3], DC_BF16, 1, n), DC_OK);
      else ASSERT_EQ(dc_state_unpack(got.data(), p[3], (float *)p[5], format, 1, 0, n), DC_OK);
      double want = 0, have = 0;
      for (int64_t i = 0; i < n; i++) {
        if (i % 128 == 0) continue;
        want += start[(size_t)i] * std::pow(0.999, (double)steps);
        have += got[(size_t)i];
      }
      // Rounding to nearest would have left bf16 and 8 bits at the start, 1.22 times as much. 16,256 elements: the
      // mean's own scatter is below 0.4 %.
      EXPECT_NEAR(have / want, 1.0, 0.01) << "format " << format << " on " << dc_isa_name(isa);
    }
  }
}

TEST_F(Ops, PackedRefusesWhatItCannotDo) {
  float p[64] = {}, g[64] = {}, scale[2] = {};
  uint8_t m[64] = {}, v[64] = {};
  auto refused = [&](auto change, const char *text, int status = DC_E_INVALID) {
    dc_step_args t = {};
    t.struct_size = sizeof t;
    t.param = p, t.grad = g, t.state[0] = m, t.state[1] = v, t.scale[0] = scale, t.scale[1] = scale + 1;
    t.n = 64, t.step = 1, t.lr = 0.1, t.beta1 = 0.9, t.beta2 = 0.9, t.grad_scale = 1, t.format = DC_STATE_8BIT;
    ASSERT_EQ(dc_step(&t, 1), DC_OK) << dc_last_error();
    change(t);
    EXPECT_EQ(dc_step(&t, 1), status) << text;
    EXPECT_NE(strstr(dc_last_error(), text), nullptr) << dc_last_error();
  };
  refused([](dc_step_args &t) { t.format = DC_STATE_FORMATS; }, "format = ");
  refused([](dc_step_args &t) { t.format = -1; }, "format = -1");
  refused([](dc_step_args &t) { t.first = 32; }, "first = 32");
  refused([](dc_step_args &t) { t.first = -64; }, "first = -64");
  refused([](dc_step_args &t) { t.scale[1] = nullptr; }, "scale[1] is NULL");
  refused([](dc_step_args &t) { t.state[0] = nullptr; }, "state[0] is NULL");
  refused([&](dc_step_args &t) { t.state[2] = m; }, "with amsgrad", DC_E_UNSUPPORTED);
  refused([&](dc_step_args &t) { t.rule = DC_RULE_ADAGRAD; }, "state[1] is given");
  refused([](dc_step_args &t) { t.rule = DC_RULE_SGD, t.beta1 = 0, t.state[0] = t.state[1] = nullptr; },
          "state[0] is NULL");
  refused([](dc_step_args &t) { t.format = DC_STATE_STOCHASTIC, t.state_dtype = DC_F16; }, "to bf16", DC_E_DTYPE);
  int64_t a = 0, b = 0;
  EXPECT_EQ(dc_state_sizes(DC_STATE_8BIT, 1, 5, &a, &b), DC_E_INVALID);
  EXPECT_EQ(dc_state_sizes(DC_STATE_NEAREST, 0, 5, &a, &b), DC_E_INVALID);
  EXPECT_EQ(dc_state_sizes(DC_STATE_8BIT, 0, 5, nullptr, &b), DC_E_INVALID);
  EXPECT_EQ(dc_state_sizes(DC_STATE_4BIT, 64, 129, &a, &b), DC_OK);
  EXPECT_EQ(a, 65);
  EXPECT_EQ(b, 2);
  EXPECT_EQ(dc_state_unpack(p, m, scale, DC_STATE_STOCHASTIC, 0, 0, 5), DC_E_INVALID);
  EXPECT_EQ(dc_state_unpack(p, nullptr, scale, DC_STATE_8BIT, 0, 0, 5), DC_E_INVALID);
  EXPECT_EQ(dc_state_unpack(p, m, scale, DC_STATE_8BIT, 3, 0, 5), DC_E_INVALID);
  EXPECT_EQ(dc_state_pack(m, nullptr, p, DC_STATE_8BIT, 0, 0, 5), DC_E_INVALID);
}

} // namespace
