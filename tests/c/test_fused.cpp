// The fused ops (ops/fused.h) on every instruction set, bit for bit against the scalar reference; the reference against
// the definitions in double precision; the errors that ref/activation.h states; strides, threads, arguments.
#include <algorithm>
#include <cmath>

#include "op_cases.h"
#include "ref/activation.h"

namespace {

class Fused : public Ops {};

const int64_t kCols[] = {1, 7, 15, 16, 17, 63, 64, 65, 100, 773};
const int64_t kRows[] = {1, 3, 70}; // 70: three blocks of partial sums

Array blank(int dt, int64_t n) { return Array{dt, std::vector<uint8_t>((size_t)n * dc_dtype_size(dt), 0x5a)}; }

Fill fill_of(int64_t k) { return (Fill)(k % 3); }

std::string about(const char *op, int dt, int64_t rows, int64_t cols) {
  return std::string(op) + " " + dc_dtype_name(dt) + " " + std::to_string(rows) + "x" + std::to_string(cols);
}

// Half a unit in the last place of a result of dtype dt, relative, and what fp32 arithmetic may add to it.
double half_ulp(int dt) { return dt == DC_F32 ? 0x1p-24 : dt == DC_BF16 ? 0x1p-9 : 0x1p-11; }

// ---- every instruction set -----------------------------------------------------------------------------------------
struct NormCase {
  int dt, wdt;
  int64_t rows, cols, stride;
  bool center, residual, weight, bias;
  float offset;
};

int run_norm(const NormCase &c, const std::vector<uint8_t *> &p) {
  dc_norm_args a = {};
  a.struct_size = sizeof a;
  a.x = p[0], a.residual = c.residual ? p[1] : nullptr, a.weight = c.weight ? p[2] : nullptr;
  a.bias = c.bias ? p[3] : nullptr, a.y = p[4], a.sum = c.residual ? p[5] : nullptr;
  a.mean = c.center ? (float *)p[6] : nullptr, a.rstd = (float *)p[7];
  a.rows = c.rows, a.cols = c.cols, a.x_stride = c.stride, a.residual_stride = c.cols;
  a.eps = 1e-5f, a.offset = c.offset, a.dtype = c.dt, a.weight_dtype = c.wdt;
  return dc_norm(&a);
}

std::vector<Array> norm_arrays(const NormCase &c, Fill fill) {
  const int64_t n = c.rows * c.cols, span = (c.rows - 1) * c.stride + c.cols;
  return {make(c.dt, span, fill, 1),    make(c.dt, n, fill, 2), make(c.wdt, c.cols, fill, 3),
          make(c.wdt, c.cols, fill, 4), blank(c.dt, n),         blank(c.dt, n),
          blank(DC_F32, c.rows),        blank(DC_F32, c.rows)};
}

int run_norm_grad(const NormCase &c, const std::vector<uint8_t *> &p) {
  dc_norm_grad_args a = {};
  a.struct_size = sizeof a;
  a.x = p[0], a.dy = p[1], a.dsum = c.residual ? p[2] : nullptr, a.weight = c.weight ? p[3] : nullptr;
  a.mean = c.center ? (float *)p[4] : nullptr, a.rstd = (float *)p[5], a.dx = p[6];
  a.dweight = c.weight ? p[7] : nullptr, a.dbias = c.bias ? p[8] : nullptr, a.partial = (float *)p[9];
  a.rows = c.rows, a.cols = c.cols, a.x_stride = c.stride, a.offset = c.offset, a.dtype = c.dt, a.weight_dtype = c.wdt;
  return dc_norm_grad(&a);
}

std::vector<Array> norm_grad_arrays(const NormCase &c, Fill fill) {
  const int64_t n = c.rows * c.cols, span = (c.rows - 1) * c.stride + c.cols;
  return {make(c.dt, span, fill, 1),
          make(c.dt, n, fill, 2),
          make(c.dt, n, fill, 3),
          make(c.wdt, c.cols, fill, 4),
          make(DC_F32, c.rows, fill == kAnyBits ? kOrdinary : fill, 5),
          make(DC_F32, c.rows, kOrdinary, 6),
          blank(c.dt, n),
          blank(c.wdt, c.cols),
          blank(c.wdt, c.cols),
          blank(DC_F32, 2 * dc_row_blocks(c.rows) * c.cols)};
}

template <class F> void each_norm(F f) {
  int k = 0;
  for (int dt : kLow)
    for (int wdt : kLow)
      for (int64_t rows : kRows)
        for (int64_t cols : kCols) {
          k++;
          if (cols > 100 && rows == 70 && dt != wdt) continue;
          const NormCase c = {dt,
                              wdt,
                              rows,
                              cols,
                              cols + (k % 2) * 3,
                              k % 3 == 0 || dt == DC_F32,
                              k % 5 == 0,
                              k % 7 != 0,
                              k % 4 != 0,
                              k % 6 == 0 ? 1.0f : 0.0f};
          f(c, fill_of(k), about("norm", dt, rows, cols) + " weights " + dc_dtype_name(wdt));
        }
}

TEST_F(Fused, NormEqualsReference) {
  each_norm([](const NormCase &c, Fill fill, const std::string &what) {
    same_everywhere(norm_arrays(c, fill), [=](auto &p) { return run_norm(c, p); }, what, {kAtEnd, kOffStart});
  });
}

TEST_F(Fused, NormGradEqualsReference) {
  each_norm([](const NormCase &c, Fill fill, const std::string &what) {
    auto arrays = norm_grad_arrays(c, fill);
    same_everywhere(
        arrays,
        [=](auto &p) {
          const int rc = run_norm_grad(c, p);
          memset(p[9], 0, (size_t)(2 * dc_row_blocks(c.rows) * c.cols) * 4); // a NaN in the workspace may have any bits
          return rc;
        },
        what + " gradient", {kAtEnd, kOffStart});
  });
}

int run_swiglu(int dt, int64_t rows, int64_t cols, int64_t stride, const std::vector<uint8_t *> &p) {
  dc_swiglu_args a = {};
  a.struct_size = sizeof a;
  a.gate = p[0], a.up = p[1], a.out = p[2], a.rows = rows, a.cols = cols, a.dtype = dt;
  a.gate_stride = stride, a.up_stride = cols, a.out_stride = cols;
  return dc_swiglu(&a);
}

int run_swiglu_grad(int dt, int64_t rows, int64_t cols, int64_t stride, const std::vector<uint8_t *> &p) {
  dc_swiglu_grad_args a = {};
  a.struct_size = sizeof a;
  a.gate = p[0], a.up = p[1], a.dout = p[2], a.dgate = p[3], a.dup = p[4], a.rows = rows, a.cols = cols, a.dtype = dt;
  a.gate_stride = stride, a.up_stride = a.dout_stride = a.dup_stride = cols, a.dgate_stride = stride;
  return dc_swiglu_grad(&a);
}

int run_gelu(int dt, int bdt, int form, bool bias, int64_t rows, int64_t cols, int64_t stride,
             const std::vector<uint8_t *> &p) {
  dc_gelu_args a = {};
  a.struct_size = sizeof a;
  a.x = p[0], a.bias = bias ? p[1] : nullptr, a.out = p[2], a.rows = rows, a.cols = cols, a.x_stride = stride;
  a.dtype = dt, a.bias_dtype = bdt, a.form = form;
  return dc_gelu(&a);
}

int run_gelu_grad(int dt, int bdt, int form, bool bias, int64_t rows, int64_t cols, int64_t stride,
                  const std::vector<uint8_t *> &p) {
  dc_gelu_grad_args a = {};
  a.struct_size = sizeof a;
  a.x = p[0], a.bias = bias ? p[1] : nullptr, a.dout = p[2], a.dx = p[3], a.dbias = bias ? p[4] : nullptr;
  a.partial = (float *)p[5], a.rows = rows, a.cols = cols, a.x_stride = stride, a.dtype = dt, a.bias_dtype = bdt,
  a.form = form;
  const int rc = dc_gelu_grad(&a);
  if (bias) memset(p[5], 0, (size_t)(dc_row_blocks(rows) * cols) * 4);
  return rc;
}

TEST_F(Fused, ActivationsEqualReference) {
  int k = 0;
  for (int dt : kLow)
    for (int64_t rows : kRows)
      for (int64_t cols : kCols) {
        const Fill fill = fill_of(++k);
        const int64_t stride = cols + (k % 2) * 5, n = rows * cols, span = (rows - 1) * stride + cols;
        const int bdt = kLow[k % 3], form = k % 2 ? DC_GELU_ERF : DC_GELU_TANH;
        const bool bias = k % 5 < 2;
        same_everywhere(
            {make(dt, span, fill, 1), make(dt, n, fill, 2), blank(dt, n)},
            [=](auto &p) { return run_swiglu(dt, rows, cols, stride, p); }, about("swiglu", dt, rows, cols));
        same_everywhere(
            {make(dt, span, fill, 1), make(dt, n, fill, 2), make(dt, n, fill, 3), blank(dt, span), blank(dt, n)},
            [=](auto &p) { return run_swiglu_grad(dt, rows, cols, stride, p); }, about("swiglu_grad", dt, rows, cols));
        same_everywhere(
            {make(dt, span, fill, 1), make(bdt, cols, fill, 2), blank(dt, n)},
            [=](auto &p) { return run_gelu(dt, bdt, form, bias, rows, cols, stride, p); },
            about("gelu", dt, rows, cols));
        same_everywhere(
            {make(dt, span, fill, 1), make(bdt, cols, fill, 2), make(dt, n, fill, 3), blank(dt, n), blank(bdt, cols),
             blank(DC_F32, dc_row_blocks(rows) * cols)},
            [=](auto &p) { return run_gelu_grad(dt, bdt, form, bias, rows, cols, stride, p); },
            about("gelu_grad", dt, rows, cols));
      }
}

// Every bf16 and fp16 value, and many of fp32, through each activation.
TEST_F(Fused, ActivationsOfAllValues) {
  for (int dt : kLow) {
    Array x = blank(dt, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
      const uint16_t h = (uint16_t)i;
      const uint32_t u = i * 65537u;
      memcpy(&x.bytes[i * x.element()], dt == DC_F32 ? (const void *)&u : &h, x.element());
    }
    for (int form : {DC_GELU_ERF, DC_GELU_TANH}) {
      same_everywhere({x, blank(dt, 1), blank(dt, 65536)},
                      [=](auto &p) { return run_gelu(dt, dt, form, false, 1, 65536, 65536, p); }, "gelu of all",
                      {kAtStart, kAtEnd});
      same_everywhere(
          {x, blank(dt, 1), make(dt, 65536, kOrdinary, 9), blank(dt, 65536), blank(dt, 1), blank(DC_F32, 1)},
          [=](auto &p) { return run_gelu_grad(dt, dt, form, false, 1, 65536, 65536, p); }, "gelu_grad of all",
          {kAtStart, kAtEnd});
    }
    same_everywhere(
        {x, make(dt, 65536, kOrdinary, 8), make(dt, 65536, kOrdinary, 9), blank(dt, 65536), blank(dt, 65536)},
        [=](auto &p) { return run_swiglu_grad(dt, 1, 65536, 65536, p); }, "swiglu_grad of all", {kAtStart, kAtEnd});
  }
}

struct RotaryCase {
  int dt, tdt;
  int64_t batch, positions, heads, cols, rotated;
  bool transposed, inverse;
};

dc_rotary_args rotary_args(const RotaryCase &c, const std::vector<uint8_t *> &p) {
  dc_rotary_args a = {};
  a.struct_size = sizeof a;
  a.x = p[0], a.cos = p[1], a.sin = p[2], a.out = p[3], a.cols = c.cols, a.rotated = c.rotated;
  a.dtype = c.dt, a.table_dtype = c.tdt, a.inverse = c.inverse;
  // x [batch, heads, positions, cols], which lies as [batch, positions, heads, cols] if transposed; out lies as x
  const int64_t size[3] = {c.batch, c.heads, c.positions};
  const int64_t plain[3] = {c.heads * c.positions * c.cols, c.positions * c.cols, c.cols};
  const int64_t turned[3] = {c.positions * c.heads * c.cols, c.cols, c.heads * c.cols};
  for (int k = 0; k < 3; k++)
    a.size[k] = size[k], a.x_stride[k] = a.out_stride[k] = c.transposed ? turned[k] : plain[k];
  a.cos_stride[2] = a.sin_stride[2] = c.rotated;
  return a;
}

std::vector<Array> rotary_arrays(const RotaryCase &c, Fill fill) {
  const int64_t n = c.batch * c.positions * c.heads * c.cols, table = c.positions * c.rotated;
  return {make(c.dt, n, fill, 1), make(c.tdt, table, fill, 2), make(c.tdt, table, fill, 3), blank(c.dt, n)};
}

TEST_F(Fused, RotaryEqualsReference) {
  int k = 0;
  for (int dt : kLow)
    for (int tdt : kLow)
      for (int64_t rotated : {0, 2, 30, 32, 34, 64, 128})
        for (int64_t more : {0, 1, 40}) {
          k++;
          const RotaryCase c = {dt, tdt, 2, 5, 3, rotated + more, rotated, k % 2 == 0, k % 3 == 0};
          if (c.cols == 0) continue;
          same_everywhere(rotary_arrays(c, fill_of(k)),
                          [=](auto &p) {
                            const dc_rotary_args a = rotary_args(c, p);
                            return dc_rotary(&a);
                          },
                          about("rotary", dt, rotated, c.cols), {kAtEnd, kOffStart});
        }
}

// ---- the definitions -----------------------------------------------------------------------------------------------
double normal(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double bell(double x) { return 0.39894228040143267794 * std::exp(-0.5 * x * x); }
double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Units in the last place of fp32 at `exact`.
double ulps(float got, double exact) {
  int e;
  std::frexp(exact, &e);
  return std::fabs((double)got - exact) / std::ldexp(1.0, std::max(e, -125) - 24);
}

// About a million fp32 numbers of all sizes and both signs, `least` and up.
template <class F> void each_float(float least, F f) {
  for (uint64_t u = 0; u < (1ull << 32); u += 4099) {
    const float x = f32((uint32_t)u);
    if (std::isfinite(x) && x >= least) f(x);
  }
  for (float x = std::max(least, -20.0f); x < 20.0f; x += 1.3e-4f) f(x);
}

TEST_F(Fused, FunctionsHaveTheErrorsThatAreStated) {
  double worst_logistic = 0, worst_rest = 0, worst_normal = 0, worst_tail = 0, worst_slope = 0;
  each_float(-87.0f, [&](float x) {
    worst_logistic = std::max(worst_logistic, ulps(dc__logistic2(x).at, logistic(x)));
    if (x <= 87.0f) worst_rest = std::max(worst_rest, ulps(dc__logistic2(x).rest, logistic(-(double)x)));
  });
  each_float(-2.0f, [&](float x) { worst_normal = std::max(worst_normal, ulps(dc__normal(x), normal(x))); });
  each_float(-3.4e38f, [&](float x) {
    if (x < -2.0f) worst_tail = std::max(worst_tail, std::fabs(dc__normal(x) - normal(x)));
    worst_slope = std::max(worst_slope, std::fabs(dc__normal_slope(x) - (normal(x) + (double)x * bell(x))));
  });
  EXPECT_LE(worst_logistic, 3.0);
  EXPECT_LE(worst_rest, 3.0);
  EXPECT_LE(worst_normal, 4.0);
  EXPECT_LE(worst_tail, 0x1p-25);
  EXPECT_LE(worst_slope, 0x1p-23);
  EXPECT_GT(worst_logistic + worst_normal, 0.5); // the comparison sees errors
  for (float x : {-88.0f, -1e30f, -INFINITY}) EXPECT_EQ(dc__logistic(x), 0.0f) << x;
  for (float x : {-6.1f, -1e30f, -INFINITY}) EXPECT_EQ(dc__normal(x), 0.0f) << x;
  for (float x : {20.0f, 1e30f, INFINITY}) EXPECT_EQ(dc__normal(x) + dc__logistic(x), 2.0f) << x;
  EXPECT_EQ(dc__normal(0.0f), 0.5f);
  EXPECT_EQ(dc__logistic(-0.0f), 0.5f);
  EXPECT_TRUE(std::isnan(dc__normal(NAN)) && std::isnan(dc__logistic(NAN)) && std::isnan(dc__normal_slope(-NAN)));
}

TEST_F(Fused, ActivationsAreWhatTheySay) {
  const int64_t n = 20000;
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int dt : kLow)
      for (int form : {DC_GELU_ERF, DC_GELU_TANH}) {
        Array x = make(dt, n, kOrdinary, 20), d = make(dt, n, kOrdinary, 21), out = blank(dt, n), dx = blank(dt, n);
        for (int64_t i = 0; i < n; i++) dc__put(x.bytes.data(), dt, i, 4 * dc__get(x.bytes.data(), dt, i));
        std::vector<uint8_t *> p = {x.bytes.data(), nullptr, out.bytes.data()};
        ASSERT_EQ(run_gelu(dt, dt, form, false, 1, n, n, p), DC_OK) << dc_last_error();
        p = {x.bytes.data(), nullptr, d.bytes.data(), dx.bytes.data(), nullptr, nullptr};
        ASSERT_EQ(run_gelu_grad(dt, dt, form, false, 1, n, n, p), DC_OK) << dc_last_error();
        const auto xs = doubles_of(x), ds = doubles_of(d), outs = doubles_of(out), dxs = doubles_of(dx);
        for (size_t i = 0; i < xs.size(); i++) {
          const double v = xs[i], u = std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v), t = std::tanh(u);
          const double tanh_slope = 0.5 * (1 + t) +
                                    0.5 * v * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * v * v);
          const double want = form == DC_GELU_ERF ? v * normal(v) : 0.5 * v * (1 + t);
          const double slope = form == DC_GELU_ERF ? normal(v) + v * bell(v) : tanh_slope;
          ASSERT_NEAR(outs[i], want,
                      2 * half_ulp(dt) * std::fabs(want) + 0x1p-22 * std::fabs(v) * (1 + std::fabs(v)) + 0x1p-25)
              << v;
          ASSERT_NEAR(dxs[i], ds[i] * slope,
                      2 * half_ulp(dt) * std::fabs(ds[i] * slope) + 0x1p-20 * std::fabs(ds[i]) + 0x1p-25)
              << v;
        }
      }
    for (int dt : kLow) {
      Array gate = make(dt, n, kOrdinary, 22), up = make(dt, n, kOrdinary, 23), d = make(dt, n, kOrdinary, 24);
      Array out = blank(dt, n), dgate = blank(dt, n), dup = blank(dt, n);
      for (int64_t i = 0; i < n; i++) dc__put(gate.bytes.data(), dt, i, 6 * dc__get(gate.bytes.data(), dt, i));
      std::vector<uint8_t *> p = {gate.bytes.data(), up.bytes.data(), out.bytes.data()};
      ASSERT_EQ(run_swiglu(dt, 10, n / 10, n / 10, p), DC_OK) << dc_last_error();
      p = {gate.bytes.data(), up.bytes.data(), d.bytes.data(), dgate.bytes.data(), dup.bytes.data()};
      ASSERT_EQ(run_swiglu_grad(dt, 10, n / 10, n / 10, p), DC_OK) << dc_last_error();
      const auto g = doubles_of(gate), u = doubles_of(up), ds = doubles_of(d), o = doubles_of(out),
                 dg = doubles_of(dgate), du = doubles_of(dup);
      for (size_t i = 0; i < g.size(); i++) {
        const double s = logistic(g[i]), silu = g[i] * s, slope = s * (1 + g[i] * (1 - s));
        const double wants[3] = {silu * u[i], ds[i] * silu, ds[i] * u[i] * slope}, got[3] = {o[i], du[i], dg[i]};
        for (int k = 0; k < 3; k++)
          ASSERT_NEAR(got[k], wants[k], 2 * half_ulp(dt) * std::fabs(wants[k]) + 0x1p-21 * (1 + std::fabs(g[i])) * 0.25)
              << g[i];
      }
    }
  }
}

TEST_F(Fused, NormsAndTheirGradientsAreWhatTheySay) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (bool center : {true, false})
      for (int64_t rows : {5, 100}) {
        const int64_t cols = 130;
        const NormCase c = {DC_F32, DC_F32, rows, cols, cols, center, true, true, center, center ? 0.0f : 1.0f};
        auto f = norm_arrays(c, kOrdinary);
        auto b = norm_grad_arrays(c, kOrdinary);
        std::vector<uint8_t *> p, q;
        for (auto &a : f) p.push_back(a.bytes.data());
        for (auto &a : b) q.push_back(a.bytes.data());
        ASSERT_EQ(run_norm(c, p), DC_OK) << dc_last_error();
        q[0] = p[5], q[3] = p[2], q[4] = p[6], q[5] = p[7];
        ASSERT_EQ(run_norm_grad(c, q), DC_OK) << dc_last_error();
        const auto x = doubles_of(f[0]), r = doubles_of(f[1]), w = doubles_of(f[2]), bias = doubles_of(f[3]),
                   y = doubles_of(f[4]), s = doubles_of(f[5]);
        const auto dy = doubles_of(b[1]), dsum = doubles_of(b[2]), dx = doubles_of(b[6]), dw = doubles_of(b[7]),
                   db = doubles_of(b[8]);
        std::vector<double> want_dw((size_t)cols), want_db((size_t)cols);
        for (int64_t k = 0; k < rows; k++) {
          double mean = 0, var = 0, along = 0, level = 0;
          const auto at = [&](int64_t i) { return (size_t)(k * cols + i); };
          for (int64_t i = 0; i < cols; i++) ASSERT_NEAR(s[at(i)], x[at(i)] + r[at(i)], 0x1p-22);
          for (int64_t i = 0; i < cols; i++) mean += center ? s[at(i)] / (double)cols : 0.0;
          for (int64_t i = 0; i < cols; i++) var += (s[at(i)] - mean) * (s[at(i)] - mean) / (double)cols;
          const double rstd = 1 / std::sqrt(var + 1e-5);
          const auto h = [&](int64_t i) { return (s[at(i)] - mean) * rstd; };
          const auto weight = [&](int64_t i) { return w[(size_t)i] + (double)c.offset; };
          for (int64_t i = 0; i < cols; i++) {
            ASSERT_NEAR(y[at(i)], h(i) * weight(i) + (center ? bias[(size_t)i] : 0.0), 1e-5);
            along += dy[at(i)] * weight(i) * h(i) / (double)cols;
            level += center ? dy[at(i)] * weight(i) / (double)cols : 0.0;
            want_dw[(size_t)i] += dy[at(i)] * h(i);
            want_db[(size_t)i] += dy[at(i)];
          }
          for (int64_t i = 0; i < cols; i++)
            ASSERT_NEAR(dx[at(i)], (dy[at(i)] * weight(i) - level - h(i) * along) * rstd + dsum[at(i)], 3e-5);
        }
        for (size_t i = 0; i < (size_t)cols; i++) {
          ASSERT_NEAR(dw[i], want_dw[i], 1e-5 * std::sqrt((double)rows) * 4);
          if (center) { ASSERT_NEAR(db[i], want_db[i], 1e-5 * std::sqrt((double)rows) * 4); }
        }
      }
  }
}

TEST_F(Fused, RotaryTurnsPairsAndItsInverseIsItsTranspose) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    RotaryCase c = {DC_F32, DC_F32, 1, 7, 2, 40, 36, true, false};
    auto arrays = rotary_arrays(c, kOrdinary);
    std::vector<uint8_t *> p;
    for (auto &a : arrays) p.push_back(a.bytes.data());
    dc_rotary_args a = rotary_args(c, p);
    ASSERT_EQ(dc_rotary(&a), DC_OK) << dc_last_error();
    const auto x = doubles_of(arrays[0]), cos = doubles_of(arrays[1]), sin = doubles_of(arrays[2]),
               out = doubles_of(arrays[3]);
    Array g = make(DC_F32, (int64_t)x.size(), kOrdinary, 30), back = blank(DC_F32, (int64_t)x.size());
    a.x = g.bytes.data(), a.out = back.bytes.data(), a.inverse = 1;
    ASSERT_EQ(dc_rotary(&a), DC_OK) << dc_last_error();
    const auto gs = doubles_of(g), bs = doubles_of(back);
    double one = 0, other = 0;
    for (int64_t s = 0; s < 7; s++)
      for (int64_t h = 0; h < 2; h++)
        for (int64_t j = 0; j < 40; j++) {
          const size_t row = (size_t)((s * 2 + h) * 40), i = row + (size_t)j, t = (size_t)(s * 36 + j);
          const double half = j < 18 ? -x[std::min(i + 18, x.size() - 1)] : x[i - 18];
          const double want = j < 36 ? x[i] * cos[t] + half * sin[t] : x[i];
          ASSERT_NEAR(out[i], want, 1e-6) << s << " " << h << " " << j;
          one += out[i] * gs[i], other += x[i] * bs[i]; // <R x, g> = <x, R' g>
        }
    ASSERT_NEAR(one, other, 1e-4);
  }
}

// ---- threads, arguments --------------------------------------------------------------------------------------------
TEST_F(Fused, ThreadsChangeNothing) {
  const NormCase c = {DC_F32, DC_F32, 1500, 96, 96, true, true, true, true, 0.0f};
  const int64_t n = c.rows * c.cols;
  std::vector<std::vector<uint8_t>> first;
  for (int threads : {1, 2, 5}) {
    dc_set_num_threads(threads);
    auto f = norm_arrays(c, kOrdinary);
    auto b = norm_grad_arrays(c, kOrdinary);
    Array x = make(DC_F32, n, kOrdinary, 40), d = make(DC_F32, n, kOrdinary, 41), dx = blank(DC_F32, n),
          db = blank(DC_F32, 96);
    Array bias = make(DC_F32, 96, kOrdinary, 42), partial = blank(DC_F32, dc_row_blocks(c.rows) * 96),
          out = blank(DC_F32, n);
    std::vector<uint8_t *> p, q;
    for (auto &a : f) p.push_back(a.bytes.data());
    for (auto &a : b) q.push_back(a.bytes.data());
    ASSERT_EQ(run_norm(c, p), DC_OK);
    ASSERT_EQ(run_norm_grad(c, q), DC_OK);
    p = {x.bytes.data(), bias.bytes.data(), d.bytes.data(), dx.bytes.data(), db.bytes.data(), partial.bytes.data()};
    ASSERT_EQ(run_gelu_grad(DC_F32, DC_F32, DC_GELU_ERF, true, c.rows, 96, 96, p), DC_OK);
    p = {x.bytes.data(), d.bytes.data(), out.bytes.data()};
    ASSERT_EQ(run_swiglu(DC_F32, c.rows, 96, 96, p), DC_OK);
    std::vector<std::vector<uint8_t>> got = {f[4].bytes, f[5].bytes, f[6].bytes, f[7].bytes, b[6].bytes,
                                             b[7].bytes, b[8].bytes, dx.bytes,   db.bytes,   out.bytes};
    if (first.empty()) first = got;
    for (size_t k = 0; k < got.size(); k++)
      EXPECT_EQ(got[k], first[k]) << "array " << k << " with " << threads << " threads";
  }
}

TEST_F(Fused, BadArgumentsAreNamed) {
  float x[64] = {}, y[64], stats[8];
  dc_norm_args n = {};
  n.struct_size = sizeof n;
  n.x = x, n.y = y, n.rstd = stats, n.rows = 4, n.cols = 16, n.x_stride = 16, n.eps = 1e-5f;
  ASSERT_EQ(dc_norm(&n), DC_OK) << dc_last_error();
  const auto refused = [&](auto change, int status, const char *text) {
    dc_norm_args a = n;
    change(a);
    EXPECT_EQ(dc_norm(&a), status);
    EXPECT_NE(std::string(dc_last_error()).find(text), std::string::npos) << dc_last_error();
  };
  refused([](auto &a) { a.x = nullptr; }, DC_E_INVALID, "x is NULL");
  refused([](auto &a) { a.rstd = nullptr; }, DC_E_INVALID, "rstd is NULL");
  refused([](auto &a) { a.x_stride = 15; }, DC_E_INVALID, "15 elements apart");
  refused([](auto &a) { a.rows = -1; }, DC_E_INVALID, "rows = -1");
  refused([](auto &a) { a.rows = INT64_MAX / 4; }, DC_E_INVALID, "more than memory");
  refused([](auto &a) { a.eps = -1.0f; }, DC_E_INVALID, "eps = -1");
  refused([](auto &a) { a.eps = NAN; }, DC_E_INVALID, "eps");
  refused([](auto &a) { a.dtype = DC_F64; }, DC_E_DTYPE, "fp64");
  refused([&](auto &a) { a.residual = x, a.residual_stride = 16; }, DC_E_INVALID, "come together");
  refused([&](auto &a) { a.weight = x, a.weight_dtype = DC_I8; }, DC_E_DTYPE, "weight");
  refused([&](auto &a) { a.x = (const char *)x + 1; }, DC_E_INVALID, "aligned");
  EXPECT_EQ(dc_norm(nullptr), DC_E_INVALID);
  dc_gelu_args g = {};
  g.struct_size = sizeof g;
  g.x = x, g.out = y, g.rows = 1, g.cols = 16, g.x_stride = 16, g.form = 2;
  EXPECT_EQ(dc_gelu(&g), DC_E_INVALID);
  dc_rotary_args r = {};
  r.struct_size = sizeof r;
  r.x = x, r.out = y, r.cos = r.sin = x, r.size[0] = r.size[1] = r.size[2] = 1, r.cols = 8, r.rotated = 3;
  EXPECT_EQ(dc_rotary(&r), DC_E_INVALID);
  r.rotated = 10;
  EXPECT_EQ(dc_rotary(&r), DC_E_INVALID);
  dc_norm_grad_args d = {};
  d.struct_size = sizeof d;
  d.x = d.dy = x, d.dx = y, d.rstd = stats, d.rows = 4, d.cols = 16, d.x_stride = 16, d.dweight = y;
  EXPECT_EQ(dc_norm_grad(&d), DC_E_INVALID);
  EXPECT_NE(std::string(dc_last_error()).find("partial"), std::string::npos) << dc_last_error();
}

TEST_F(Fused, NoRowsGiveZeroSums) {
  float dweight[3] = {1, 2, 3};
  dc_norm_grad_args d = {};
  d.struct_size = sizeof d;
  d.rows = 0, d.cols = 3, d.x_stride = 3, d.dweight = dweight;
  ASSERT_EQ(dc_norm_grad(&d), DC_OK) << dc_last_error();
  for (float f : dweight) EXPECT_EQ(f, 0.0f);
}

template <class Args> void expect_sized(int (*call)(const Args *), const char *name) {
  Args a = {};
  const std::string zero = std::string(name) + ".struct_size is 0: set it to sizeof(" + name + ")";
  EXPECT_EQ(call(&a), DC_E_INVALID);
  EXPECT_NE(strstr(dc_last_error(), zero.c_str()), nullptr) << dc_last_error();
  a.struct_size = sizeof a + 8;
  EXPECT_EQ(call(&a), DC_E_INVALID);
  EXPECT_NE(strstr(dc_last_error(), "the caller was built for a newer one"), nullptr) << dc_last_error();
  EXPECT_EQ(call(nullptr), DC_E_INVALID);
  a.struct_size = sizeof a;
  const int rc = call(&a); // nothing to do, or what is missing is named
  EXPECT_TRUE(rc == DC_OK || strstr(dc_last_error(), "struct_size") == nullptr) << dc_last_error();
}

TEST_F(Ops, StructsOfArgumentsSayTheirSize) {
  expect_sized(dc_norm, "dc_norm_args");
  expect_sized(dc_norm_grad, "dc_norm_grad_args");
  expect_sized(dc_swiglu, "dc_swiglu_args");
  expect_sized(dc_swiglu_grad, "dc_swiglu_grad_args");
  expect_sized(dc_gelu, "dc_gelu_args");
  expect_sized(dc_gelu_grad, "dc_gelu_grad_args");
  expect_sized(dc_rotary, "dc_rotary_args");
  expect_sized(dc_cross_entropy_rows, "dc_xent_args");
}

} // namespace
