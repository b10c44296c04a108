// adafactor_cases.h: tensors for dc_adafactor_tops, sums, factors, norms and apply, shared by the tests of the CPU's
// and the GPU's bodies.
#ifndef DEEPC_TESTS_ADAFACTOR_CASES_H
#define DEEPC_TESTS_ADAFACTOR_CASES_H

#include "op_cases.h"

namespace {

struct Case {
  int64_t matrices, rows, cols; // rows 0: no matrix, of cols elements
  int param = DC_F32, grad = DC_F32, lowp = -1;
  int64_t n() const { return rows ? matrices * rows * cols : cols; }
};

enum { kFirst = 64 };

std::vector<Array> arrays_of(const Case &c, Fill fill) {
  const int64_t r = c.matrices * c.rows, k = c.rows ? c.matrices * c.cols : 0, blocks = dc_lamb_blocks(kFirst, c.n());
  auto zeros = [](int dt, int64_t n) { return Array{dt, std::vector<uint8_t>((size_t)n * dc_dtype_size(dt))}; };
  std::vector<Array> a = {make(c.param, c.n(), fill, 70),
                          make(c.grad, c.n(), fill, 71),
                          make(c.lowp >= 0 ? c.lowp : 0, c.lowp >= 0 ? c.n() : 0, kAnyBits, 72),
                          make(DC_F32, c.rows ? 0 : c.n(), kOrdinary, 73),
                          make(DC_F32, r, kOrdinary, 74),
                          make(DC_F32, k, kOrdinary, 75),
                          zeros(DC_I32, r),
                          zeros(DC_I32, k),
                          zeros(DC_F64, r),
                          zeros(DC_F64, k),
                          zeros(DC_F32, r),
                          doubles(blocks),
                          doubles(blocks)};
  for (int s = 3; s < 6; s++)
    for (size_t i = 3; i < a[s].bytes.size(); i += 4) a[s].bytes[i] &= 0x7f; // squares
  return a;
}

dc_adafactor_args args_of(const Case &c, const std::vector<uint8_t *> &p) {
  dc_adafactor_args t = {};
  t.struct_size = sizeof t;
  t.param = p[0], t.grad = p[1], t.lowp = c.lowp >= 0 ? p[2] : nullptr;
  if (c.rows) {
    t.row_var = (float *)p[4], t.col_var = (float *)p[5];
    t.row_top = (uint32_t *)p[6], t.col_top = (uint32_t *)p[7];
    t.row_sum = (double *)p[8], t.col_sum = (double *)p[9], t.row_factor = (float *)p[10];
    t.matrices = c.matrices, t.rows = c.rows, t.cols = c.cols;
  } else {
    t.variance = (float *)p[3];
  }
  t.param_sums = (double *)p[11], t.update_sums = (double *)p[12];
  t.n = c.n(), t.first = kFirst;
  t.grad_scale = -0.125, t.weight = 0.3, t.eps = 1e-4, t.keep = 0.99, t.rate = 0.02;
  t.param_dtype = c.param, t.grad_dtype = c.grad, t.lowp_dtype = c.lowp >= 0 ? c.lowp : 0;
  return t;
}

int all_passes(const std::vector<dc_adafactor_args> &t) {
  const int64_t count = (int64_t)t.size();
  for (auto pass : {dc_adafactor_tops, dc_adafactor_sums})
    if (int rc = pass(t.data(), count)) return rc;
  if (int rc = dc_adafactor_factors(t.data(), 1)) return rc;
  for (auto pass : {dc_adafactor_norms, dc_adafactor_apply})
    if (int rc = pass(t.data(), count)) return rc;
  return DC_OK;
}

// Of no matrix, of one and of several; rows and columns below, at and above what a thread, a warp or a block of them
// has.
const Case kAdafactorShapes[] = {{1, 0, 0},   {1, 0, 1}, {1, 0, 403},  {1, 0, 9000}, {1, 1, 1},    {1, 3, 5},
                                 {1, 17, 31}, {5, 3, 3}, {2, 130, 64}, {1, 5, 1030}, {1, 2, 5000}, {1, 300, 16}};

// Stretches of the whole that end before each of `cuts`, which are multiples of 4,096 numbers.
[[maybe_unused]] std::vector<dc_adafactor_args> cut_at(const dc_adafactor_args &whole,
                                                       const std::vector<int64_t> &cuts) {
  std::vector<dc_adafactor_args> out;
  int64_t from = 0, blocks = 0;
  for (int64_t k = 0; k <= (int64_t)cuts.size(); k++) {
    dc_adafactor_args t = whole;
    const int64_t to = k < (int64_t)cuts.size() ? cuts[(size_t)k] : whole.n;
    t.n = to - from, t.begin += from, t.first += from;
    t.param = (float *)whole.param + from, t.grad = (const float *)whole.grad + from;
    if (whole.variance) t.variance = whole.variance + from;
    t.param_sums += blocks, t.update_sums += blocks;
    blocks += dc_lamb_blocks(t.first, t.n);
    from = to;
    out.insert(out.begin(), t); // the last stretch first: the order must not show
  }
  return out;
}

} // namespace

#endif
