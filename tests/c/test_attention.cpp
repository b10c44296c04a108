// Attention and its gradient: on every instruction set bit for bit against the scalar reference (bf16 where it is
// multiplied in pairs: within its rounding), the reference against its definition in double; masks, biases, dropout,
// shared heads, odd sizes, strides, arguments, threads.
#include <cmath>
#include <map>

#include "op_cases.h"
#include "ref/philox.h"

namespace {

class Attention : public Ops {};

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

bool masks(const Case &c) { return c.bias == DC_U8; }
// Strides of the bias and of its gradient.
void bias_strides(const Case &c, int64_t *to) {
  to[0] = c.shared ? 0 : c.heads * c.rows * c.keys, to[1] = c.shared ? 0 : c.rows * c.keys;
  to[2] = c.shared && masks(c) ? 0 : c.keys;
}
int64_t bias_count(const Case &c) {
  if (c.bias < 0) return 1;
  return (c.shared ? 1 : c.batch * c.heads) * (c.shared && masks(c) ? 1 : c.rows) * c.keys;
}
const uint64_t kSeed = 0x0123456789abcdefull;
const int64_t kFirstBatch = 3, kFirstHead = 40;
// What dropout makes of a probability.
double kept(const Case &c, int64_t b, int64_t h, int64_t i, int64_t j) {
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

const Mask &mask_of(const Case &c) {
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

void fill_mask(dc_attention_mask &to, const Case &c) {
  const Mask &m = mask_of(c);
  if (c.block) to.layout = m.layout.data(), to.block = c.block, to.layout_heads = c.layout_heads;
  if (c.packed) to.q_group = m.q_group.data(), to.k_group = m.k_group.data();
  if (c.biased) to.slope = m.slope.data();
  to.window = c.window;
  if (c.rate > 0) to.dropout = {kSeed, kFirstBatch, kFirstHead, c.rate};
}

// The score that query i gives key j beyond the product; -HUGE_VAL: none. bias: the array of the case.
double bias_of(const Case &c, const std::vector<double> &bias, int64_t b, int64_t h, int64_t i, int64_t j) {
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

int64_t count_of(const Case &c, int64_t heads, int64_t rows) { return c.batch * heads * rows * c.dim; }

void strides(const Case &c, int64_t heads, int64_t rows, int64_t *to) {
  to[0] = heads * rows * c.dim;
  to[1] = c.turned ? c.dim : rows * c.dim;
  to[2] = c.turned ? heads * c.dim : c.dim;
}

float scale_of(const Case &c) { return 1.0f / std::sqrt((float)c.dim); }

template <class Args> void fill_sizes(Args &a, const Case &c) {
  a.struct_size = sizeof a;
  a.batch = c.batch, a.heads = c.heads, a.kv_heads = c.kv_heads, a.rows = c.rows, a.keys = c.keys, a.dim = c.dim;
  a.diagonal = c.diagonal, a.scale = scale_of(c), a.dtype = c.dt, a.causal = c.causal;
  fill_mask(a.mask, c);
  strides(c, c.heads, c.rows, a.q_stride), strides(c, c.heads, c.rows, a.out_stride);
  strides(c, c.kv_heads, c.keys, a.k_stride), strides(c, c.kv_heads, c.keys, a.v_stride);
}

void set_bias(dc_attention_mask &to, const Case &c, const uint8_t *bias) {
  if (c.bias < 0) return;
  to.bias = bias, to.bias_dtype = c.bias;
  bias_strides(c, to.bias_stride);
}

// q, k, v, out, lse, bias
std::vector<Array> arrays_of(const Case &c) {
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

int forward(const Case &c, const std::vector<uint8_t *> &p) {
  dc_attention_args a = {};
  fill_sizes(a, c);
  a.q = p[0], a.k = p[1], a.v = p[2], a.out = p[3], a.lse = (float *)p[4];
  set_bias(a.mask, c, p[5]);
  return dc_attention(&a);
}

// The same and dout, dq, dk, dv, dbias behind; out and lse are what they are. dbias is not empty: it is added to.
std::vector<Array> grad_arrays_of(const Case &c, const std::vector<std::vector<uint8_t>> &after) {
  auto arrays = arrays_of(c);
  arrays[3].bytes = after[3], arrays[4].bytes = after[4];
  const int64_t n = count_of(c, c.heads, c.rows), m = count_of(c, c.kv_heads, c.keys);
  for (int64_t k : {n, n, m, m}) arrays.push_back(make(c.dt, k, arrays.size() == 6 ? kOrdinary : kAnyBits, 6));
  arrays.push_back(make(DC_F32, bias_count(c), kOrdinary, 8));
  return arrays;
}

int backward(const Case &c, const std::vector<uint8_t *> &p) {
  dc_attention_grad_args a = {};
  fill_sizes(a, c);
  a.q = p[0], a.k = p[1], a.v = p[2], a.out = p[3], a.lse = (const float *)p[4];
  a.dout = p[6], a.dq = p[7], a.dk = p[8], a.dv = p[9];
  set_bias(a.mask, c, p[5]);
  if (c.bias >= 0 && !masks(c)) a.dbias = (float *)p[10], bias_strides(c, a.dbias_stride);
  strides(c, c.heads, c.rows, a.dout_stride), strides(c, c.heads, c.rows, a.dq_stride);
  strides(c, c.kv_heads, c.keys, a.dk_stride), strides(c, c.kv_heads, c.keys, a.dv_stride);
  return dc_attention_grad(&a);
}

std::string about(const Case &c) {
  return "dtype " + std::to_string(c.dt) + ", rows " + std::to_string(c.rows) + ", keys " + std::to_string(c.keys) +
         ", dim " + std::to_string(c.dim) + (c.causal ? ", causal" : "") + ", block " + std::to_string(c.block);
}

std::vector<Case> cases(int dt) {
  return {{dt, 2, 4, 2, 37, 37, 24, true, 0, true},
          {dt, 1, 2, 2, 64, 64, 64, false, 0, false},
          {dt, 1, 2, 1, 65, 257, 40, true, 192, true},
          {dt, 1, 1, 1, 130, 300, 33, false, 0, false},
          {dt, 1, 3, 1, 1, 100, 128, false, 0, true},
          {dt, 1, 1, 1, 100, 70, 16, true, -20, false},
          {dt, 1, 1, 1, 5, 1, 1, true, 0, false},
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
bool left_out(int dt, size_t number) { return dt == DC_F16 && number % 3 && getenv("DEEPC_TEST_FULL") == nullptr; }

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

// ---- the definition, in double -----------------------------------------------------------------------------------
std::vector<double> values(int dt, const std::vector<uint8_t> &bytes) { return doubles_of(Array{dt, bytes}); }

struct Exact {
  std::vector<double> out, lse, dq, dk, dv, dbias;
};

Exact exact(const Case &c, const std::vector<std::vector<uint8_t>> &b) {
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
double off(const std::vector<double> &got, const std::vector<double> &want) {
  double most = 0, worst = 0;
  for (size_t i = 0; i < want.size(); i++) {
    if (got[i] == want[i]) continue; // infinities
    if (!(std::fabs(got[i] - want[i]) <= 1e30)) return HUGE_VAL;
    worst = std::max(worst, std::fabs(got[i] - want[i]));
    most = std::max(most, std::fabs(want[i]));
  }
  return most > 0 ? worst / most : worst;
}

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
  says("dim = 257", [](auto &a) { a.dim = 257; });
  says("scale = 0", [](auto &a) { a.scale = 0; });
  says("scale = nan", [](auto &a) { a.scale = NAN; });
  says("rows = -1", [](auto &a) { a.rows = -1; });
  says("k is NULL", [](auto &a) { a.k = nullptr; });
  says("stride[1] = -4", [](auto &a) { a.v_stride[1] = -4; });
  const uint8_t layout[1] = {1};
  const int32_t groups[3] = {0, 1 << 25, 0};
  const float slopes[2] = {0, HUGE_VALF};
  says("block = 24", [&](auto &a) { a.mask.layout = layout, a.mask.block = 24, a.mask.layout_heads = 1; });
  says("layout_heads = 3", [&](auto &a) { a.mask.layout = layout, a.mask.block = 16, a.mask.layout_heads = 3; });
  says("one of them is NULL", [&](auto &a) { a.mask.q_group = groups; });
  says("q_group[1] = 33554432", [&](auto &a) { a.mask.q_group = a.mask.k_group = groups; });
  says("slope[1] = inf", [&](auto &a) { a.mask.slope = slopes; });
  says("bias_stride[1] = -1", [&](auto &a) { a.mask.bias = slopes, a.mask.bias_stride[1] = -1; });
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
