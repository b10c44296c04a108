// attention_cases.h: cases of attention with all it can do, their arrays, and the definition in double: for the tests
// of the CPU's bodies and of CUDA's.
#ifndef DEEPC_TESTS_ATTENTION_CASES_H
#define DEEPC_TESTS_ATTENTION_CASES_H

#include <cmath>
#include <functional>
#include <map>

#include "op_cases.h"
#include "ref/philox.h"

namespace attention_cases {

struct Case {
  int dt;
  int64_t batch, heads, kv_heads, rows, keys, dim;
  bool causal;
  int64_t diagonal;
  bool turned; // [batch, rows, heads, dim] in memory
  int64_t block = 0, layout_heads = 1; // with a block: about half of the pairs of blocks are hidden
  bool packed = false, biased = false; // groups of the rows and keys; slopes
  int bias = -1; // its dtype
  bool shared = false; // the bias: by entries of the batch and heads; by rows too where it has 1 byte an element
  int64_t window = 0;
  float rate = 0.0f;
};

inline bool masks(const Case &c) { return c.bias == DC_U8; }
// Strides of the bias and of its gradient.
inline void bias_strides(const Case &c, int64_t *to) {
  to[0] = c.shared ? 0 : c.heads * c.rows * c.keys, to[1] = c.shared ? 0 : c.rows * c.keys;
  to[2] = c.shared && masks(c) ? 0 : c.keys;
}
inline int64_t bias_count(const Case &c) {
  if (c.bias < 0) return 1;
  return (c.shared ? 1 : c.batch * c.heads) * (c.shared && masks(c) ? 1 : c.rows) * c.keys;
}
inline const uint64_t kSeed = 0x0123456789abcdefull;
inline const int64_t kFirstBatch = 3, kFirstHead = 40;
// What dropout makes of a probability.
inline double kept(const Case &c, int64_t b, int64_t h, int64_t i, int64_t j) {
  const uint32_t below = (uint32_t)std::lround((double)c.rate * 65536);
  uint32_t n[4] = {(uint32_t)(j / 8), (uint32_t)i, (uint32_t)(kFirstHead + h), (uint32_t)(kFirstBatch + b)};
  if (below == 0) return 1;
  dc__philox(n, (uint32_t)kSeed, (uint32_t)(kSeed >> 32));
  const uint32_t number = j % 2 ? n[j % 8 / 2] >> 16 : n[j % 8 / 2] & 0xffff;
  return number < below ? 0 : 65536.0 / (65536 - below);
}

// What a case's mask points to; the same for every case of its sizes.
struct Mask {
  std::vector<uint8_t> layout;
  std::vector<int32_t> q_group, k_group;
  std::vector<float> slope;
};

inline const Mask &mask_of(const Case &c) {
  static std::map<std::string, Mask> made;
  const std::string key = std::to_string(c.rows) + " " + std::to_string(c.keys) + " " + std::to_string(c.block) + " " +
                          std::to_string(c.heads) + " " + std::to_string(c.batch) + std::to_string(c.layout_heads);
  const auto found = made.find(key);
  if (found != made.end()) return found->second;
  Mask &m = made[key];
  std::mt19937_64 rng(5);
  if (c.block)
    m.layout.resize((size_t)(c.layout_heads * ((c.rows + c.block - 1) / c.block) * ((c.keys + c.block - 1) / c.block)));
  for (auto &x : m.layout) x = rng() % 2;
  for (auto [group, n] : {std::pair{&m.q_group, c.rows}, std::pair{&m.k_group, c.keys}})
    for (int64_t b = 0; b < c.batch; b++)
      for (int64_t i = 0; i < n; i++) group->push_back((int32_t)(b + i * 5 / n) - 2); // five in a row
  for (int64_t h = 0; h < c.heads; h++) m.slope.push_back(0.5f / (float)(1 << h));
  return m;
}

inline void fill_mask(dc_attention_mask &to, const Case &c) {
  const Mask &m = mask_of(c);
  if (c.block) to.layout = m.layout.data(), to.block = c.block, to.layout_heads = c.layout_heads;
  if (c.packed) to.q_group = m.q_group.data(), to.k_group = m.k_group.data();
  if (c.biased) to.slope = m.slope.data();
  to.window = c.window;
  if (c.rate > 0) to.dropout = {kSeed, kFirstBatch, kFirstHead, c.rate};
}

// The score that query i gives key j beyond the product; -HUGE_VAL: none. bias: the array of the case.
inline double bias_of(const Case &c, const std::vector<double> &bias, int64_t b, int64_t h, int64_t i, int64_t j) {
  const Mask &m = mask_of(c);
  int64_t at[3];
  bias_strides(c, at);
  const double more = c.bias < 0 ? 0 : bias[(size_t)(b * at[0] + h * at[1] + i * at[2] + j)];
  if (c.causal && j > i + c.diagonal) return -HUGE_VAL;
  if (c.window && j <= i + c.diagonal - c.window) return -HUGE_VAL;
  if (masks(c) && more == 0) return -HUGE_VAL;
  const int64_t down = c.block ? (c.rows + c.block - 1) / c.block : 0,
                across = c.block ? (c.keys + c.block - 1) / c.block : 0;
  if (c.block && !m.layout[(size_t)(((c.layout_heads == 1 ? 0 : h) * down + i / c.block) * across + j / c.block)])
    return -HUGE_VAL;
  if (c.packed && m.q_group[(size_t)(b * c.rows + i)] != m.k_group[(size_t)(b * c.keys + j)]) return -HUGE_VAL;
  return (masks(c) ? 0 : more) + (c.biased ? (double)m.slope[(size_t)h] * (double)(j - i - c.diagonal) : 0);
}

inline int64_t count_of(const Case &c, int64_t heads, int64_t rows) { return c.batch * heads * rows * c.dim; }

inline void strides(const Case &c, int64_t heads, int64_t rows, int64_t *to) {
  to[0] = heads * rows * c.dim;
  to[1] = c.turned ? c.dim : rows * c.dim;
  to[2] = c.turned ? heads * c.dim : c.dim;
}

inline float scale_of(const Case &c) { return 1.0f / std::sqrt((float)c.dim); }

template <class Args> void fill_sizes(Args &a, const Case &c) {
  a.struct_size = sizeof a;
  a.batch = c.batch, a.heads = c.heads, a.kv_heads = c.kv_heads, a.rows = c.rows, a.keys = c.keys, a.dim = c.dim;
  a.diagonal = c.diagonal, a.scale = scale_of(c), a.dtype = c.dt, a.causal = c.causal;
  fill_mask(a.mask, c);
  strides(c, c.heads, c.rows, a.q_stride), strides(c, c.heads, c.rows, a.out_stride);
  strides(c, c.kv_heads, c.keys, a.k_stride), strides(c, c.kv_heads, c.keys, a.v_stride);
}

inline void set_bias(dc_attention_mask &to, const Case &c, const uint8_t *bias) {
  if (c.bias < 0) return;
  to.bias = bias, to.bias_dtype = c.bias;
  bias_strides(c, to.bias_stride);
}

// q, k, v, out, lse, bias
inline std::vector<Array> arrays_of(const Case &c) {
  const int64_t n = count_of(c, c.heads, c.rows), m = count_of(c, c.kv_heads, c.keys);
  Array bias = make(c.bias < 0 ? (int)DC_F32 : c.bias, bias_count(c), kOrdinary, 7);
  for (auto &x : bias.bytes)
    if (masks(c)) x = x % 3;
  return {make(c.dt, n, kOrdinary, 1),
          make(c.dt, m, kOrdinary, 2),
          make(c.dt, m, kOrdinary, 3),
          make(c.dt, n, kAnyBits, 4),
          make(DC_F32, c.batch * c.heads * c.rows, kAnyBits, 5),
          bias};
}

// run: dc_attention, or what stands for it; so below.
inline int forward(const Case &c, const std::vector<uint8_t *> &p,
                   const std::function<int(const dc_attention_args *)> &run = dc_attention) {
  dc_attention_args a = {};
  fill_sizes(a, c);
  a.q = p[0], a.k = p[1], a.v = p[2], a.out = p[3], a.lse = (float *)p[4];
  set_bias(a.mask, c, p[5]);
  return run(&a);
}

// The same and dout, dq, dk, dv, dbias behind; out and lse are what they are. dbias is not empty: it is added to.
inline std::vector<Array> grad_arrays_of(const Case &c, const std::vector<std::vector<uint8_t>> &after) {
  auto arrays = arrays_of(c);
  arrays[3].bytes = after[3], arrays[4].bytes = after[4];
  const int64_t n = count_of(c, c.heads, c.rows), m = count_of(c, c.kv_heads, c.keys);
  for (int64_t k : {n, n, m, m}) arrays.push_back(make(c.dt, k, arrays.size() == 6 ? kOrdinary : kAnyBits, 6));
  arrays.push_back(make(DC_F32, bias_count(c), kOrdinary, 8));
  return arrays;
}

inline int backward(const Case &c, const std::vector<uint8_t *> &p,
                    const std::function<int(const dc_attention_grad_args *)> &run = dc_attention_grad) {
  dc_attention_grad_args a = {};
  fill_sizes(a, c);
  a.q = p[0], a.k = p[1], a.v = p[2], a.out = p[3], a.lse = (const float *)p[4];
  a.dout = p[6], a.dq = p[7], a.dk = p[8], a.dv = p[9];
  set_bias(a.mask, c, p[5]);
  if (c.bias >= 0 && !masks(c)) a.dbias = (float *)p[10], bias_strides(c, a.dbias_stride);
  strides(c, c.heads, c.rows, a.dout_stride), strides(c, c.heads, c.rows, a.dq_stride);
  strides(c, c.kv_heads, c.keys, a.dk_stride), strides(c, c.kv_heads, c.keys, a.dv_stride);
  return run(&a);
}

inline std::string about(const Case &c) {
  return "dtype " + std::to_string(c.dt) + ", rows " + std::to_string(c.rows) + ", keys " + std::to_string(c.keys) +
         ", dim " + std::to_string(c.dim) + (c.causal ? ", causal" : "") + ", block " + std::to_string(c.block);
}

inline std::vector<Case> cases(int dt) {
  return {{dt, 2, 4, 2, 37, 37, 24, true, 0, true},
          {dt, 1, 2, 2, 64, 64, 64, false, 0, false},
          {dt, 1, 2, 1, 65, 257, 40, true, 192, true},
          {dt, 1, 1, 1, 130, 300, 33, false, 0, false},
          {dt, 1, 3, 1, 1, 100, 128, false, 0, true},
          {dt, 1, 1, 1, 100, 70, 16, true, -20, false},
          {dt, 1, 1, 1, 5, 1, 1, true, 0, false},
          // few queries, of which a block is not full: one by one, or by panels
          {dt, 2, 2, 2, 1, 530, 80, true, 529, false},
          {dt, 1, 4, 1, 2, 300, 136, true, 290, true},
          {dt, 1, 2, 2, 4, 20, 64, true, 0, false},
          {dt, 1, 3, 1, 3, 70, 20, false, 0, false},
          {dt, 1, 2, 1, 17, 280, 64, true, 263, true},
          {dt, 1, 2, 2, 3, 290, 24, true, 287, false, 64, 2, true},
          // some of the keys
          {dt, 1, 2, 1, 130, 330, 24, false, 0, true, 16, 2},
          {dt, 2, 2, 2, 90, 90, 33, true, 0, false, 32, 1, true},
          {dt, 1, 2, 2, 200, 200, 16, true, 0, true, 64, 2, false, true},
          {dt, 1, 1, 1, 150, 400, 16, true, 250, false, 128, 1, true, true},
          {dt, 2, 2, 1, 70, 100, 16, false, 0, false, 0, 1, true},
          {dt, 1, 2, 2, 40, 40, 8, true, 0, false, 0, 1, false, true},
          {dt, 1, 1, 1, 100, 100, 8, true, 0, false, 48, 1},
          // windows, biases, dropout: full and by rows alone, shared by heads, beside each other
          {dt, 1, 2, 1, 200, 200, 16, true, 0, false, 0, 1, false, false, -1, false, 70},
          {dt, 1, 1, 1, 90, 150, 8, true, 60, true, 16, 1, false, false, -1, false, 33},
          {dt, 2, 2, 1, 70, 90, 24, false, 0, true, 32, 2, false, false, dt},
          {dt, 2, 2, 2, 40, 75, 8, true, 30, false, 0, 1, false, true, DC_F32, true},
          {dt, 1, 2, 1, 80, 100, 8, false, 0, false, 16, 1, false, false, DC_U8},
          {dt, 2, 1, 1, 50, 70, 8, false, 0, false, 0, 1, false, false, DC_U8, true},
          {dt, 2, 4, 2, 70, 130, 24, true, 60, true, 0, 1, false, false, -1, false, 0, 0.25f},
          {dt, 1, 2, 1, 100, 100, 16, true, 0, false, 16, 2, true, false, -1, false, 0, 0.5f},
          {dt, 2, 2, 1, 100, 140, 40, true, 40, false, 64, 1, true, true, DC_BF16, true, 90, 0.1f}};
}

// ---- scores of any size ------------------------------------------------------------------------------------------
using Forward = std::function<int(const dc_attention_args *)>;

// Of three rows the second one is hidden whole by what is added to its scores, the others in part: however it is
// written, it hides as -infinity does.
inline void check_added_masks(int dt, const Forward &run, const std::string &what) {
  Case c = {dt, 1, 1, 1, 3, 300, 24, false, 0, false};
  c.bias = DC_F32;
  const auto with = [&](float hidden) {
    auto arrays = arrays_of(c);
    std::vector<float> bias((size_t)(c.rows * c.keys), 0.5f);
    for (size_t i = 0; i < bias.size(); i++)
      if (i / (size_t)c.keys == 1 || i % 3) bias[i] = hidden;
    memcpy(arrays[5].bytes.data(), bias.data(), bias.size() * sizeof(float));
    return run_once(arrays, kAtStart, [&](auto &p) { return forward(c, p, run); });
  };
  const auto want = with(-INFINITY);
  const auto out = doubles_of(Array{dt, want[3]}), lse = doubles_of(Array{DC_F32, want[4]});
  for (size_t i = 0; i < 24; i++) ASSERT_EQ(out[24 + i], 0) << what;
  ASSERT_EQ(lse[1], HUGE_VAL) << what;
  ASSERT_TRUE(std::isfinite(lse[0]) && std::isfinite(lse[2])) << what;
  for (float hidden : {-1e9f, -1e10f, -1e12f, -1e20f, -1e30f, -std::numeric_limits<float>::max()}) {
    const auto got = with(hidden);
    EXPECT_EQ(got[3], want[3]) << hidden << " " << what;
    EXPECT_EQ(got[4], want[4]) << hidden << " " << what;
  }
}

// A mask of bytes hides a pair whatever its score: keys that nobody sees may hold anything.
inline void check_hidden_keys(int dt, const Forward &run, const std::string &what) {
  Case c = {dt, 1, 1, 1, 70, 100, 24, false, 0, false};
  c.bias = DC_U8, c.shared = true;
  const auto with = [&](float hidden) {
    auto arrays = arrays_of(c);
    std::vector<float> k((size_t)c.dim, hidden);
    for (int64_t j = 0; j < c.keys; j++) {
      arrays[5].bytes[(size_t)j] = j % 3 != 0;
      if (j % 3) continue;
      uint8_t *at = arrays[1].bytes.data() + (size_t)(j * c.dim) * dc_dtype_size(dt);
      EXPECT_EQ(dc_cast(at, dt, k.data(), DC_F32, 1, c.dim), DC_OK);
    }
    return run_once(arrays, kAtStart, [&](auto &p) { return forward(c, p, run); });
  };
  const auto want = with(0);
  for (float hidden : {NAN, INFINITY, -INFINITY}) {
    const auto got = with(hidden);
    EXPECT_EQ(got[3], want[3]) << hidden << " " << what;
    EXPECT_EQ(got[4], want[4]) << hidden << " " << what;
  }
}

// Scores that fp32 can't tell apart, with steps larger than what e^x may be given, are no numbers; beside them others
// are.
inline void check_scores_beyond(int dt, const Forward &run, const std::string &what) {
  const Case c = {dt, 1, 1, 1, 2, 300, 24, false, 0, false};
  auto arrays = arrays_of(c);
  std::vector<float> q(48, 0.0f), k(7200, 3e4f);
  std::fill(q.begin(), q.begin() + 24, 3e4f);
  for (size_t i = 0; i < k.size(); i++) k[i] -= (float)(i % 7);
  EXPECT_EQ(dc_cast(arrays[0].bytes.data(), dt, q.data(), DC_F32, 1, 48), DC_OK);
  EXPECT_EQ(dc_cast(arrays[1].bytes.data(), dt, k.data(), DC_F32, 1, 7200), DC_OK);
  const auto got = run_once(arrays, kAtStart, [&](auto &p) { return forward(c, p, run); });
  const auto out = doubles_of(Array{dt, got[3]}), lse = doubles_of(Array{DC_F32, got[4]});
  for (size_t i = 0; i < 48; i++) EXPECT_EQ(std::isnan(out[i]), i < 24) << i << " " << what;
  EXPECT_TRUE(std::isnan(lse[0]) && std::fabs(lse[1] - std::log(300.0)) < 1e-5) << lse[1] << " " << what;
}

// ---- the definition, in double -----------------------------------------------------------------------------------
inline std::vector<double> values(int dt, const std::vector<uint8_t> &bytes) { return doubles_of(Array{dt, bytes}); }

struct Exact {
  std::vector<double> out, lse, dq, dk, dv, dbias;
};

inline Exact exact(const Case &c, const std::vector<std::vector<uint8_t>> &b) {
  const auto q = values(c.dt, b[0]), k = values(c.dt, b[1]), v = values(c.dt, b[2]), g = values(c.dt, b[6]);
  const auto bias = masks(c) ? std::vector<double>(b[5].begin(), b[5].end())
                             : values(c.bias < 0 ? (int)DC_F32 : c.bias, b[5]);
  int64_t qs[3], ks[3], bs[3];
  bias_strides(c, bs);
  strides(c, c.heads, c.rows, qs), strides(c, c.kv_heads, c.keys, ks);
  Exact e = {std::vector<double>(q.size()), {},
             std::vector<double>(q.size()), std::vector<double>(k.size()),
             std::vector<double>(k.size()), values(DC_F32, make(DC_F32, bias_count(c), kOrdinary, 8).bytes)};
  for (int64_t x = 0; x < c.batch; x++)
    for (int64_t h = 0; h < c.heads; h++)
      for (int64_t i = 0; i < c.rows; i++) {
        const size_t row = (size_t)(x * qs[0] + h * qs[1] + i * qs[2]);
        const auto key = [&](int64_t j) { return (size_t)(x * ks[0] + h * c.kv_heads / c.heads * ks[1] + j * ks[2]); };
        std::vector<double> p((size_t)c.keys), dp((size_t)c.keys);
        double sum = 0, delta = 0;
        for (int64_t j = 0; j < c.keys; j++) {
          double s = 0;
          for (int64_t d = 0; d < c.dim; d++) s += q[row + (size_t)d] * k[key(j) + (size_t)d];
          p[(size_t)j] = std::exp(s * (double)scale_of(c) + bias_of(c, bias, x, h, i, j));
          sum += p[(size_t)j];
        }
        e.lse.push_back(sum > 0 ? std::log(sum) : HUGE_VAL);
        for (int64_t j = 0; j < c.keys; j++) {
          p[(size_t)j] = sum > 0 ? p[(size_t)j] / sum : 0;
          const double factor = kept(c, x, h, i, j), some = p[(size_t)j] * factor;
          for (int64_t d = 0; d < c.dim; d++) {
            e.out[row + (size_t)d] += some * v[key(j) + (size_t)d];
            dp[(size_t)j] += factor * g[row + (size_t)d] * v[key(j) + (size_t)d];
            e.dv[key(j) + (size_t)d] += some * g[row + (size_t)d];
          }
          delta += p[(size_t)j] * dp[(size_t)j];
        }
        for (int64_t j = 0; j < c.keys; j++) {
          const double raw = p[(size_t)j] * (dp[(size_t)j] - delta), ds = raw * (double)scale_of(c);
          if (c.bias >= 0 && !masks(c)) e.dbias[(size_t)(x * bs[0] + h * bs[1] + i * bs[2] + j)] += raw;
          for (int64_t d = 0; d < c.dim; d++) {
            e.dq[row + (size_t)d] += ds * k[key(j) + (size_t)d];
            e.dk[key(j) + (size_t)d] += ds * q[row + (size_t)d];
          }
        }
      }
  return e;
}

// The largest difference, relative to the largest value.
inline double off(const std::vector<double> &got, const std::vector<double> &want) {
  double most = 0, worst = 0;
  for (size_t i = 0; i < want.size(); i++) {
    if (got[i] == want[i]) continue; // infinities
    if (!(std::fabs(got[i] - want[i]) <= 1e30)) return HUGE_VAL;
    worst = std::max(worst, std::fabs(got[i] - want[i]));
    most = std::max(most, std::fabs(want[i]));
  }
  return most > 0 ? worst / most : worst;
}

} // namespace attention_cases
#endif
