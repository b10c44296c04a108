// test_cuda_packed.cpp: dc_cuda_step and LAMB's two passes where states have a format (ops/cuda/packed.cuh, compiled
// for the CPU, a block of threads at a time) against the scalar reference, bit for bit, with forbidden pages around the
// arrays. What runs only on a GPU (launches, shuffles) is in tests/python/test_gpu_ops.py.
#include <cmath>

#include "cuda/packed.cuh"
#include "cuda_fixture.h"
#include "cuda_lanes.h"
#include "lamb_cases.h"

namespace {

using namespace dc_gpu;

int whole_runs, part_runs; // of tensors, with loads of four elements and without

class CudaPacked : public CudaBlocks {
protected:
  void SetUp() override {
    CudaBlocks::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
    whole_runs = part_runs = 0;
  }
  void TearDown() override {
    if (!IsSkipped()) {
      EXPECT_GT(whole_runs, 0);
      EXPECT_GT(part_runs, 0);
    }
    CudaBlocks::TearDown();
  }
};

// What packed_each of packed.cu does for one rule and format: all blocks of all tables.
template <class Args> void launch(const Args *t, int64_t count, int rule, int format, int apply) {
  static Block block;
  for (int64_t next = 0; next < count;) {
    PackedTable table;
    next = fill_packed(&table, t, next, count, rule, format, apply);
    for (int k = 0; k < table.count; k++) whole_runs += table.tensor[k].vectors, part_runs += !table.tensor[k].vectors;
    for (int32_t b = 0; b < table.first[table.count]; b++)
      with_rule(rule, [&](auto r) {
        with_format(format, [&](auto f) {
          constexpr int RULE = decltype(r)::value, FORMAT = decltype(f)::value;
          const int threads = b % 3 ? 256 : 64; // who has which unit does not matter
          block.run(threads, b % 2 ? Block::kBackwards : Block::kForwards,
                    [&] { packed_step<RULE, FORMAT>(table, b, threads); });
        });
      });
  }
}

// What packed_sums_kernel does.
void sums(const dc_lamb_args *t, int64_t count, int format) {
  for (int64_t next = 0; next < count;) {
    PackedTable table;
    next = fill_packed(&table, t, next, count, DC__RULE_LAMB, format, 0);
    for (int32_t group = 0; group < table.first[table.count]; group++) {
      const int which = adamw_find(table, group);
      const PackedTensor &row = table.tensor[which];
      const int64_t block = group - table.first[which];
      with_format(format, [&](auto f) {
        LambSums of[LAMB_LANES];
        for (int lane = 0; lane < LAMB_LANES; lane++) of[lane] = packed_sums<decltype(f)::value>(row, block, lane);
        store_sums_of_lanes(of, &row.param_sums[block], &row.update_sums[block]);
      });
    }
  }
}

// ---- dc_step -------------------------------------------------------------------------------------------------------
struct StepCase {
  int rule, format;
  int64_t n, first;
  int param = DC_F32, grad = DC_F32, lowp = -1;
};

dc_step_args step_of(const StepCase &c, const std::vector<uint8_t *> &p) {
  dc_step_args t = {};
  t.struct_size = sizeof t;
  t.param = p[0], t.grad = p[1];
  for (int s = 0; s < dc__packed_states(c.rule); s++)
    t.state[s] = p[(size_t)s + 2], t.scale[s] = (float *)p[(size_t)s + 4];
  t.lowp = c.lowp >= 0 ? p[6] : nullptr;
  t.n = c.n, t.step = 7, t.rule = c.rule, t.format = c.format, t.first = c.first;
  t.lr = 0.02, t.beta1 = 0.9, t.beta2 = 0.99, t.eps = 1e-8, t.weight_decay = 0.01, t.grad_scale = 0.125;
  t.param_dtype = c.param, t.grad_dtype = c.grad, t.state_dtype = DC_BF16;
  t.lowp_dtype = c.lowp >= 0 ? c.lowp : 0;
  t.flags = c.rule == DC_RULE_ADAMW && c.n % 3 ? DC_STEP_DECOUPLED : 0;
  if (c.rule == DC_RULE_SGD && c.n / 2 % 2) t.flags = DC_STEP_NESTEROV;
  if (c.rule > DC_RULE_LION && c.n % 2) t.weight_decay = 0;
  return t;
}

// Codes are any bytes.
std::vector<Array> step_arrays(const StepCase &c, Fill fill) {
  int64_t bytes = 0, scales = 0;
  EXPECT_EQ(dc_state_sizes(c.format, c.first, c.n, &bytes, &scales), DC_OK) << dc_last_error();
  const auto positive = [&](Array &a) {
    for (size_t i = a.element() - 1; fill == kOrdinary && i < a.bytes.size(); i += a.element()) a.bytes[i] &= 0x7f;
  };
  std::vector<Array> a = {make(c.param, c.n, fill, 80), make(c.grad, c.n, fill, 81)};
  for (int s = 0; s < 2; s++) {
    const bool have = s < dc__packed_states(c.rule);
    a.push_back(c.format == DC_STATE_STOCHASTIC ? make(DC_BF16, have ? c.n : 0, fill, 82 + (uint64_t)s)
                                                : raw(have ? bytes : 0, 82 + (uint64_t)s));
    if (c.format == DC_STATE_STOCHASTIC && dc__packed_kind(c.rule, s) == DC_STATE_SQUARES) positive(a.back());
  }
  for (int s = 0; s < 2; s++) {
    a.push_back(make(DC_F32, s < dc__packed_states(c.rule) ? scales : 0, fill, 84 + (uint64_t)s));
    positive(a.back());
  }
  a.push_back(make(c.lowp >= 0 ? c.lowp : 0, c.lowp >= 0 ? c.n : 0, kAnyBits, 86));
  return a;
}

void check_arrays(const StepCase &c, const std::vector<Array> &arrays, const std::string &fill,
                  const std::vector<Place> &places = {kAtStart, kAtEnd, kOffStart}) {
  std::ostringstream what;
  what << "rule " << c.rule << " format " << c.format << " n=" << c.n << " first=" << c.first << " param=" << c.param
       << " grad=" << c.grad << " lowp=" << c.lowp << " fill=" << fill;
  const auto reference = [=](auto &p) {
    const dc_step_args t = step_of(c, p);
    return dc_step(&t, 1);
  };
  const auto gpu = [=](auto &p) {
    const dc_step_args t = step_of(c, p);
    launch(&t, 1, c.rule, c.format, 0);
    return (int)DC_OK;
  };
  same_on_gpu(arrays, reference, gpu, what.str(), places);
}
// A case's place: one of them by turn, in the full class all.
std::vector<Place> places_of_case() {
  static size_t turn = 0; // fills come in threes: each has all places
  const std::vector<Place> all = {kAtStart, kAtEnd, kOffStart};
  turn++;
  return full_class() ? all : std::vector<Place>{all[(turn + turn / 3) % 3]};
}
void check(const StepCase &c, Fill fill) {
  check_arrays(c, step_arrays(c, fill), std::to_string(fill), places_of_case());
}

const int kRules[] = {DC_RULE_ADAMW, DC_RULE_LION, DC_RULE_ADAGRAD, DC_RULE_SGD};
const int kFormats[] = {DC_STATE_STOCHASTIC, DC_STATE_8BIT, DC_STATE_4BIT};
// Of numbers: the start, within a block, within a chunk, where the upper 32 bits change.
const int64_t kFirsts[] = {0, 64, 192, 4096 - 64, 5 * 4096, ((int64_t)1 << 33) - 64};

TEST_F(CudaPacked, StepEqualsReference) {
  size_t turn = 0;
  for (int rule : kRules)
    for (int format : kFormats)
      for (int64_t first : kFirsts)
        for (int64_t n : {0, 1, 7, 63, 64, 65, 127, 255, 257, 515, 4097})
          for (Fill fill : {kOrdinary, kAnyBits, kSpecial})
            if (!left_out_fill(turn++) && (n < 4000 || fill == kOrdinary)) check({rule, format, n, first}, fill);
}

TEST_F(CudaPacked, EveryDtype) {
  for (int rule : kRules)
    for (int format : kFormats)
      for (int param : kLow)
        for (int grad : kLow)
          for (int lowp : {-1, (int)DC_F32, (int)DC_BF16, (int)DC_F16})
            check({rule, format, 833, 64, param, grad, lowp}, grad == DC_F16 ? kSpecial : kOrdinary);
}

// Blocks of nothing, of next to nothing, of denormals, of the largest numbers.
TEST_F(CudaPacked, ExtremeBlocks) {
  for (int rule : kRules)
    for (int format : kFormats)
      for (float value : {0.0f, -0.0f, 1e-45f, 1e-38f, 7.8e-31f, 3.4028235e38f, -3.4028235e38f}) {
        const StepCase c = {rule, format, 600, 64};
        auto arrays = step_arrays(c, kOrdinary);
        for (size_t i = 0; i < 600; i++) memcpy(&arrays[1].bytes[i * 4], &value, 4);
        for (size_t s = 4; s < 6; s++)
          for (size_t i = 0; i + 4 <= arrays[s].bytes.size(); i += 4) {
            const float scale = std::fabs(value);
            memcpy(&arrays[s].bytes[i], &scale, 4);
          }
        check_arrays(c, arrays, std::to_string(value), {kAtStart, kOffStart});
      }
}

// A block's largest square becomes the largest code, also where its number is the one before 1 and the random bits are
// 0.
TEST_F(CudaPacked, TheLargestHasTheLargestCode) {
  float g = 1.0f, square = 1.0f;
  while (square * (1.0f / square) >= 1.0f) g = std::nextafterf(g, 2.0f), square = g * g;
  for (int format : {(int)DC_STATE_8BIT, (int)DC_STATE_4BIT}) {
    const uint32_t bits = dc__code_map_of(format, DC_STATE_SQUARES).shift;
    const uint32_t number = (0u - dc__keys_of(7, 0).of[0]) & ((1u << bits) - 1);
    const StepCase c = {DC_RULE_ADAGRAD, format, 300, number / 64 * 64};
    auto arrays = step_arrays(c, kOrdinary);
    for (size_t k : {(size_t)1, (size_t)4}) std::fill(arrays[k].bytes.begin(), arrays[k].bytes.end(), (uint8_t)0);
    g *= 8.0f; // grad_scale is 0.125
    memcpy(&arrays[1].bytes[number % 64 * 4], &g, 4);
    g /= 8.0f;
    for (Place place : {kAtStart, kOffStart}) {
      const auto got = run_once(arrays, place, [=](auto &p) {
        dc_step_args t = step_of(c, p);
        t.weight_decay = 0;
        launch(&t, 1, c.rule, format, 0);
        return (int)DC_OK;
      });
      const size_t i = number % 64;
      EXPECT_EQ(format == DC_STATE_8BIT ? got[2][i] : got[2][i / 2] >> i % 2 * 4 & 15,
                format == DC_STATE_8BIT ? 127 : 7);
    }
  }
}

// More tensors than one launch takes, of rules and formats in turn: each goes along with its like.
TEST_F(CudaPacked, ManyTensorsOfManyKinds) {
  std::vector<StepCase> cases;
  for (int k = 0; k < 200; k++)
    cases.push_back({kRules[k % 4], kFormats[k / 4 % 3], (int64_t)(k * 37 % 700), (int64_t)(k % 5) * 64,
                     kLow[k % 3 ? 0 : k / 3 % 3]});
  std::vector<Array> all;
  std::vector<size_t> at;
  for (const StepCase &c : cases) {
    at.push_back(all.size());
    for (Array &a : step_arrays(c, kOrdinary)) all.push_back(std::move(a));
  }
  const auto list = [&](auto &p) {
    std::vector<dc_step_args> t;
    for (size_t k = 0; k < cases.size(); k++)
      t.push_back(step_of(cases[k], {p.begin() + (long)at[k], p.begin() + (long)at[k] + 7}));
    return t;
  };
  const auto reference = [&](auto &p) {
    const auto t = list(p);
    return dc_step(t.data(), (int64_t)t.size());
  };
  const auto gpu = [&](auto &p) {
    const auto t = list(p);
    for (int rule : kRules)
      for (int format : kFormats) launch(t.data(), (int64_t)t.size(), rule, format, 0);
    return (int)DC_OK;
  };
  same_on_gpu(all, reference, gpu, "200 tensors", {kAtStart, kOffStart});
}

// A tensor of the most chunks that a grid has does not share a launch with another one.
TEST_F(CudaPacked, TablesKeepWithinTheGrid) {
  float memory[4] = {};
  dc_step_args t[3] = {};
  for (dc_step_args &a : t) {
    a.struct_size = sizeof a, a.param = a.state[0] = memory, a.grad = memory, a.scale[0] = memory;
    a.rule = DC_RULE_LION, a.format = DC_STATE_8BIT, a.step = 1, a.n = (int64_t)DC_BLOCK * INT32_MAX;
  }
  t[0].n = t[2].n = DC_BLOCK, t[2].first = DC_BLOCK - 64;
  PackedTable table;
  EXPECT_EQ(fill_packed(&table, t, 0, 3, DC_RULE_LION, DC_STATE_8BIT, 0), 1);
  EXPECT_EQ(fill_packed(&table, t, 1, 3, DC_RULE_LION, DC_STATE_8BIT, 0), 2);
  EXPECT_EQ(table.first[1], INT32_MAX);
  EXPECT_EQ(fill_packed(&table, t, 2, 3, DC_RULE_LION, DC_STATE_8BIT, 0), 3);
  EXPECT_EQ(table.first[1], 2); // `first` lies within a chunk
  EXPECT_EQ(fill_packed(&table, t, 0, 3, DC_RULE_SGD, DC_STATE_8BIT, 0), 3);
  EXPECT_EQ(table.count, 0);
  whole_runs = part_runs = 1;
}

// ---- LAMB ----------------------------------------------------------------------------------------------------------
void check_lamb_of(const Case &c, Fill fill) {
  const auto gpu = [=](auto &p) {
    const dc_lamb_args t = args_of(c, p);
    sums(&t, 1, c.format);
    launch(&t, 1, DC__RULE_LAMB, c.format, 1);
    return (int)DC_OK;
  };
  same_on_gpu(arrays_of(c, fill), both_of(c), gpu, about(c, fill), places_of_case());
}

TEST_F(CudaPacked, LambEqualsReference) {
  size_t turn = 0;
  for (int format : kFormats)
    for (int64_t first : kFirsts)
      for (int64_t n : {0, 1, 7, 63, 64, 65, 127, 255, 257, 515, 4097, 9001})
        for (Fill fill : {kOrdinary, kAnyBits, kSpecial})
          if (!left_out_fill(turn++) && (n < 4000 || fill == kOrdinary))
            check_lamb_of({n, first, DC_F32, DC_F32, -1, format}, fill);
}

TEST_F(CudaPacked, LambOfEveryDtype) {
  for (int format : kFormats)
    for (int param : kLow)
      for (int grad : kLow)
        for (int lowp : {-1, (int)DC_F32, (int)DC_BF16, (int)DC_F16})
          check_lamb_of({833, 64, param, grad, lowp, format}, grad == DC_F16 ? kSpecial : kOrdinary);
}

} // namespace
