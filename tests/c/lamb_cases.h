// lamb_cases.h: what the tests of LAMB step: one tensor of any length, place and dtypes.
#ifndef DEEPC_TESTS_LAMB_CASES_H
#define DEEPC_TESTS_LAMB_CASES_H

#include <sstream>

#include "op_cases.h"

namespace {

struct Case {
  int64_t n, first;
  int param = DC_F32, grad = DC_F32, lowp = -1, format = DC_STATE_NEAREST;
};

dc_lamb_args args_of(const Case &c, const std::vector<uint8_t *> &p) {
  dc_lamb_args t = {};
  t.struct_size = sizeof t;
  t.param = p[0], t.grad = p[1], t.exp_avg = (float *)p[2], t.exp_avg_sq = (float *)p[3];
  t.lowp = c.lowp >= 0 ? p[4] : nullptr;
  t.param_sums = (double *)p[5], t.update_sums = (double *)p[6];
  t.n = c.n, t.first = c.first, t.step = 7;
  t.lr = 0.02, t.beta1 = 0.9, t.beta2 = 0.99, t.eps = 1e-6, t.weight_decay = 0.01, t.grad_scale = 0.125, t.trust = 0.7;
  t.format = c.format;
  if (c.format != DC_STATE_NEAREST) {
    t.exp_avg = t.exp_avg_sq = nullptr;
    for (size_t s = 0; s < 2; s++) t.state[s] = p[2 + s], t.scale[s] = (float *)p[7 + s];
  }
  t.param_dtype = c.param, t.grad_dtype = c.grad, t.lowp_dtype = c.lowp >= 0 ? c.lowp : 0;
  return t;
}

std::vector<Array> arrays_of(const Case &c, Fill fill) {
  std::vector<Array> a = {make(c.param, c.n, fill, 60),
                          make(c.grad, c.n, fill, 61),
                          make(DC_F32, c.n, fill, 62),
                          make(DC_F32, c.n, fill, 63),
                          make(c.lowp >= 0 ? c.lowp : 0, c.lowp >= 0 ? c.n : 0, kAnyBits, 64),
                          doubles(dc_lamb_blocks(c.first, c.n)),
                          doubles(dc_lamb_blocks(c.first, c.n))};
  if (c.format == DC_STATE_NEAREST) {
    if (fill == kOrdinary)
      for (size_t i = 3; i < a[3].bytes.size(); i += 4) a[3].bytes[i] &= 0x7f;
    return a;
  }
  int64_t bytes = 0, scales = 0;
  EXPECT_EQ(dc_state_sizes(c.format, c.first, c.n, &bytes, &scales), DC_OK) << dc_last_error();
  for (size_t s = 0; s < 2; s++) { // codes are any bytes
    a[2 + s] = c.format == DC_STATE_STOCHASTIC ? make(DC_BF16, c.n, fill, 62 + s) : raw(bytes, 62 + s);
    a.push_back(make(DC_F32, scales, fill, 67 + s));
    if (fill == kOrdinary)
      for (size_t i = 3; i < a.back().bytes.size(); i += 4) a.back().bytes[i] &= 0x7f;
  }
  if (fill == kOrdinary && c.format == DC_STATE_STOCHASTIC)
    for (size_t i = 1; i < a[3].bytes.size(); i += 2) a[3].bytes[i] &= 0x7f;
  return a;
}

int both(const dc_lamb_args *t, int64_t count) {
  const int rc = dc_lamb_moments(t, count);
  return rc ? rc : dc_lamb_apply(t, count);
}

// The reference's run of one tensor.
[[maybe_unused]] Run both_of(const Case &c) {
  return [=](const std::vector<uint8_t *> &p) {
    const dc_lamb_args t = args_of(c, p);
    return both(&t, 1);
  };
}

[[maybe_unused]] std::string about(const Case &c, Fill fill) {
  std::ostringstream what;
  what << "format " << c.format << " n=" << c.n << " first=" << c.first << " param=" << c.param << " grad=" << c.grad
       << " lowp=" << c.lowp << " fill=" << fill;
  return what.str();
}

} // namespace

#endif
