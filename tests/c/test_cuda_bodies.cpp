// test_cuda_bodies.cpp: what each CUDA thread does (ops/cuda/bodies.cuh, compiled for the CPU), thread by thread over
// whole grids, against the C core, bit for bit: index arithmetic, tails, alignment, rounding, the tables of AdamW. No
// GPU is needed; what runs only there (launches, shuffles, the device's own rounding) is in
// tests/python/test_gpu_ops.py.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/adamw_table.h"
#include "cuda/bodies.cuh"
#include "cuda_lanes.h"

namespace {

using namespace dc_gpu;

const int64_t kSizes[] = {0,  1,  2,  3,   4,    5,    7,    8,    9,    15,   16,
                          17, 31, 33, 255, 1023, 4095, 4096, 4097, 8192, 8197, 20011};
const int kGrids[] = {1, 5, 64, 777};
const float kSpecial[] = {0.0f,   -0.0f,   1.0f,    -1.0f,    INFINITY,    -INFINITY,   NAN,      -NAN,
                          1e-45f, -1e-40f, 3.4e38f, -3.4e38f, 65504.0f,    65519.9f,    65520.0f, 6e-8f,
                          3e-8f,  2.9e-8f, 6.1e-5f, 1e-30f,   1.00390625f, 1.01171875f, 3.39e38f};

// n elements of a dtype at `shift` elements past a 64-byte boundary, with a guard behind them.
struct Array {
  int dtype;
  int64_t n;
  size_t size;
  std::vector<unsigned char> memory;
  size_t start;
  Array(int dt, int64_t count, int shift = 0)
      : dtype(dt), n(count), size(dc_dtype_size(dt)), memory(count * size + 64 + 64 + shift * size, 0x5a) {
    uintptr_t base = reinterpret_cast<uintptr_t>(memory.data());
    start = (64 - base % 64) % 64 + shift * size;
  }
  Array(Array &&) = default; // the vector's memory, and with it the alignment, moves along
  Array &operator=(const Array &) = delete;
  unsigned char *data() { return memory.data() + start; }
  const unsigned char *data() const { return memory.data() + start; }
  template <class T> T *as() { return reinterpret_cast<T *>(data()); }
  bool aligned(size_t bytes) const { return reinterpret_cast<uintptr_t>(data()) % bytes == 0; }
  // Numbers of every size; a few special ones; raw bits for integers.
  void fill(unsigned seed, bool special = true) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; i++) {
      float f = normal(random) * std::exp2((float)((int)(random() % 40) - 20));
      if (special && random() % 16 == 0) f = kSpecial[random() % (sizeof kSpecial / sizeof *kSpecial)];
      put(i, f, random());
    }
  }
  void put(int64_t i, float f, uint64_t bits) {
    switch (dtype) {
    case DC_F32: as<float>()[i] = f; break;
    case DC_BF16: as<uint16_t>()[i] = dc__bf16_of_f32(f); break;
    case DC_F16: as<uint16_t>()[i] = dc__f16_of_f32(f); break;
    case DC_F64: as<double>()[i] = f; break;
    default: memcpy(data() + i * size, &bits, size);
    }
  }
  void expect_equal(const Array &other, const std::string &what) const {
    ASSERT_EQ(n, other.n);
    for (int64_t i = 0; i < n; i++)
      ASSERT_EQ(memcmp(data() + i * size, other.data() + i * size, size), 0) << what << ": element " << i << "/" << n;
    for (size_t i = start + n * size; i < memory.size(); i++)
      ASSERT_EQ(memory[i], 0x5a) << what << ": wrote past the end";
    for (size_t i = 0; i < start; i++) ASSERT_EQ(memory[i], 0x5a) << what << ": wrote before the start";
  }
};

class CudaBodies : public testing::Test {
protected:
  void SetUp() override { misaligned_accesses = 0; }
  void TearDown() override { EXPECT_EQ(misaligned_accesses, 0); }
};

template <class F> void each_thread(int threads, F f) {
  for (int t = 0; t < threads; t++) f((int64_t)t, (int64_t)threads);
}

template <class F> void each_low(F f) {
  f(F32(), DC_F32);
  f(BF16(), DC_BF16);
  f(F16(), DC_F16);
}

std::string label(int a, int b, int64_t n, int shift) {
  const std::string types = std::string(dc_dtype_name(a)) + "/" + dc_dtype_name(b);
  return types + " n=" + std::to_string(n) + " shift=" + std::to_string(shift);
}

TEST_F(CudaBodies, Cast) {
  each_low([](auto d, int ddt) {
    each_low([ddt](auto s, int sdt) {
      using D = decltype(d);
      using S = decltype(s);
      constexpr int V = vector_width<D, S>();
      for (int64_t n : kSizes)
        for (int shift : {0, 1, 3})
          for (float scale : {1.0f, 0.37f}) {
            Array src(sdt, n, shift), dst(ddt, n, shift), expected(ddt, n);
            src.fill((unsigned)n + shift);
            ASSERT_EQ(dc_cast(expected.data(), ddt, src.data(), sdt, scale, n), DC_OK) << dc_last_error();
            auto *to = dst.template as<typename D::stored>();
            auto *from = src.template as<typename S::stored>();
            bool wide = dst.aligned(V * dst.size) && src.aligned(V * src.size);
            EXPECT_TRUE(wide || shift != 0);
            each_thread(kGrids[n % 4], [&](int64_t t, int64_t all) {
              if (wide) cast<D, S, V>(to, from, scale, n, t, all);
              else cast<D, S, 1>(to, from, scale, n, t, all);
            });
            dst.expect_equal(expected, label(ddt, sdt, n, shift));
          }
    });
  });
}

TEST_F(CudaBodies, CastInPlaceIsScale) {
  each_low([](auto d, int dt) {
    using D = decltype(d);
    constexpr int V = vector_width<D, D>();
    for (int64_t n : kSizes) {
      Array x(dt, n), expected(dt, n);
      x.fill((unsigned)n);
      memcpy(expected.data(), x.data(), n * x.size);
      ASSERT_EQ(dc_scale(expected.data(), dt, 0.1f, n), DC_OK);
      auto *p = x.template as<typename D::stored>();
      each_thread(33, [&](int64_t t, int64_t all) { cast<D, D, V>(p, p, 0.1f, n, t, all); });
      x.expect_equal(expected, label(dt, dt, n, 0));
    }
  });
}

TEST_F(CudaBodies, Axpy) {
  each_low([](auto s, int sdt) {
    using S = decltype(s);
    constexpr int V = vector_width<F32, S>();
    for (int64_t n : kSizes)
      for (int shift : {0, 1}) {
        Array x(sdt, n, shift), y(DC_F32, n, shift), expected(DC_F32, n);
        x.fill((unsigned)n);
        y.fill((unsigned)n + 1);
        memcpy(expected.data(), y.data(), n * 4);
        ASSERT_EQ(dc_axpy(expected.as<float>(), -0.3f, x.data(), sdt, n), DC_OK);
        bool wide = y.aligned(V * 4) && x.aligned(V * x.size);
        each_thread(kGrids[n % 4], [&](int64_t t, int64_t all) {
          if (wide) axpy<S, V>(y.as<float>(), -0.3f, x.template as<typename S::stored>(), n, t, all);
          else axpy<S, 1>(y.as<float>(), -0.3f, x.template as<typename S::stored>(), n, t, all);
        });
        y.expect_equal(expected, label(DC_F32, sdt, n, shift));
      }
  });
}

TEST_F(CudaBodies, Sqnorm) {
  each_low([](auto tag, int dt) {
    using T = decltype(tag);
    for (int64_t n : kSizes)
      for (bool special : {false, true}) {
        const int64_t blocks = dc_sqnorm_blocks(n);
        Array x(dt, n, (int)(n % 3)), partial(DC_F64, blocks), expected(DC_F64, blocks);
        x.fill((unsigned)n, special);
        ASSERT_EQ(dc_sqnorm(x.data(), dt, n, expected.as<double>()), DC_OK);
        for (int64_t block = 0; block < blocks; block++) {
          const auto *p = x.template as<typename T::stored>();
          partial.as<double>()[block] = canonical(
              sum_of_lanes<Lane<T, BLOCK_SUMS>::width, Lane<T, BLOCK_SUMS>::count, double>([&](int lane, double *sum) {
                if (x.aligned(16)) sqnorm_lane<T, true>(sum, p, n, block, lane);
                else sqnorm_lane<T, false>(sum, p, n, block, lane);
              }));
        }
        partial.expect_equal(expected, label(dt, dt, n, 0));
      }
  });
}

template <int CAPACITY> Sources<CAPACITY> sources(const std::vector<const void *> &src) {
  Sources<CAPACITY> s = {};
  for (size_t k = 0; k < src.size(); k++) s.p[k] = src[k];
  return s;
}

template <class T> void check_reduce(int dt, int op, int nsrc, int64_t n, int shift, bool in_place) {
  constexpr int V = vector_width<T, T>();
  std::vector<Array> arrays;
  arrays.reserve(nsrc);
  std::vector<const void *> src;
  bool wide = true;
  for (int k = 0; k < nsrc; k++) {
    arrays.emplace_back(dt, n, shift);
    arrays.back().fill((unsigned)(n * 31 + k), k != 0 || nsrc == 1);
    src.push_back(arrays.back().data());
    wide = wide && arrays.back().aligned(16);
  }
  Array own(dt, n, shift), expected(dt, n);
  Array &dst = in_place ? arrays[nsrc - 1] : own;
  wide = wide && dst.aligned(16);
  ASSERT_EQ(dc_reduce(expected.data(), src.data(), nsrc, dt, op, n), DC_OK) << dc_last_error();
  const auto few = sources<8>(nsrc <= 8 ? src : std::vector<const void *>());
  const auto many = sources<MANY_SOURCES>(src);
  const SourceList list = {src.data()};
  auto *to = dst.template as<typename T::stored>();
  each_thread(kGrids[n % 4], [&](int64_t t, int64_t all) {
    if (nsrc <= 8 && wide) reduce<T, V>(to, few, nsrc, op, 1.0 / nsrc, n, t, all);
    else if (nsrc <= 8) reduce<T, 1>(to, few, nsrc, op, 1.0 / nsrc, n, t, all);
    else if (n % 2) reduce<T, 1>(to, many, nsrc, op, 1.0 / nsrc, n, t, all);
    else reduce<T, 1>(to, list, nsrc, op, 1.0 / nsrc, n, t, all);
  });
  dst.expect_equal(expected, label(dt, op, n, shift) + " nsrc=" + std::to_string(nsrc));
}

template <class T> void check_reduce_all(int dt) {
  const bool floating = dt <= DC_F64;
  for (int op = DC_RED_SUM; op <= DC_RED_BXOR; op++) {
    if (floating ? op >= DC_RED_BAND : op == DC_RED_AVG) continue;
    for (int64_t n : {1, 7, 8, 16, 33, 4097})
      for (int nsrc : {1, 2, 3, 9})
        for (int shift : {0, 1}) check_reduce<T>(dt, op, nsrc, n, shift, n % 2 == 0);
  }
}

TEST_F(CudaBodies, ReduceFloating) {
  check_reduce_all<F32>(DC_F32);
  check_reduce_all<BF16>(DC_BF16);
  check_reduce_all<F16>(DC_F16);
  check_reduce_all<F64>(DC_F64);
}

TEST_F(CudaBodies, ReduceIntegers) {
  check_reduce_all<Int<int8_t>>(DC_I8);
  check_reduce_all<Int<uint8_t>>(DC_U8);
  check_reduce_all<Int<int16_t>>(DC_I16);
  check_reduce_all<Int<int32_t>>(DC_I32);
  check_reduce_all<Int<int64_t>>(DC_I64);
}

TEST_F(CudaBodies, ReduceAcc) {
  each_low([](auto tag, int dt) {
    using S = decltype(tag);
    constexpr int V = vector_width<F32, S>();
    for (int64_t n : kSizes)
      for (int nsrc : {1, 3})
        for (int assign : {0, 1})
          for (int shift : {0, 1}) {
            if (n == 0) continue;
            const int64_t blocks = dc_sqnorm_blocks(n);
            std::vector<Array> arrays;
            arrays.reserve(nsrc);
            std::vector<const void *> src;
            for (int k = 0; k < nsrc; k++) {
              arrays.emplace_back(dt, n, shift);
              arrays.back().fill((unsigned)(n + k), n % 2);
              src.push_back(arrays.back().data());
            }
            Array start(DC_F32, n), plain(DC_F32, n, shift), normed(DC_F32, n, shift), partial(DC_F64, blocks),
                sums(DC_F64, blocks);
            start.fill((unsigned)n + 99, false);
            memcpy(plain.data(), start.data(), n * 4);
            memcpy(normed.data(), start.data(), n * 4);
            ASSERT_EQ(dc_reduce_acc(start.as<float>(), src.data(), nsrc, dt, n, assign, sums.as<double>()), DC_OK);
            const auto table = sources<8>(src);
            bool wide = plain.aligned(V * 4) && arrays[0].aligned(V * arrays[0].size);
            for (auto &array : arrays) wide = wide && array.aligned(V * array.size);
            each_thread(kGrids[n % 4], [&](int64_t t, int64_t all) {
              if (wide) reduce_acc<S, V>(plain.as<float>(), table, nsrc, assign, n, t, all);
              else reduce_acc<S, 1>(plain.as<float>(), table, nsrc, assign, n, t, all);
            });
            plain.expect_equal(start, label(dt, dt, n, shift) + " vectors");
            for (int64_t block = 0; block < blocks; block++) {
              partial.as<double>()[block] = canonical(
                  sum_of_lanes<Lane<S, BLOCK_SUMS>::width, Lane<S, BLOCK_SUMS>::count, double>(
                      [&](int lane, double *sum) {
                        if (shift == 0)
                          reduce_acc_lane<S, true>(sum, normed.as<float>(), table, nsrc, assign, n, block, lane);
                        else reduce_acc_lane<S, false>(sum, normed.as<float>(), table, nsrc, assign, n, block, lane);
                      }));
            }
            normed.expect_equal(start, label(dt, dt, n, shift) + " lanes");
            partial.expect_equal(sums, label(dt, dt, n, shift) + " partials");
          }
  });
}

// One tensor of a random kind, twice: for the GPU's bodies and for the reference.
struct AdamwPair {
  std::vector<Array> ours, theirs;
  dc_adamw_args a, b;
  AdamwPair(std::mt19937 &random, int64_t n) {
    const int low[3] = {DC_F32, DC_BF16, DC_F16};
    memset(&a, 0, sizeof a);
    a.struct_size = sizeof a;
    a.n = n;
    a.step = 1 + random() % 1000;
    a.lr = 1e-3 * (1 + random() % 7);
    a.beta1 = 0.9;
    a.beta2 = random() % 2 ? 0.999 : 0.95;
    a.eps = 1e-8;
    a.weight_decay = random() % 3 ? 0.1 : 0.0;
    a.grad_scale = random() % 2 ? 1.0 : -0.125;
    a.flags = random() % 2 ? DC_ADAMW_DECOUPLED : 0;
    a.param_dtype = low[random() % 3];
    a.grad_dtype = low[random() % 3];
    a.state_dtype = low[random() % 3];
    a.lowp_dtype = low[random() % 3];
    const bool amsgrad = random() % 2, lowp = random() % 2;
    const int dtypes[6] = {a.param_dtype, a.grad_dtype, a.state_dtype, a.state_dtype, a.state_dtype, a.lowp_dtype};
    // All aligned, or one array aligned to half a vector only, or each as it comes.
    const int kind = random() % 3, odd_one = (int)(random() % 6), seed = (int)random();
    ours.reserve(6);
    theirs.reserve(6);
    for (int k = 0; k < 6; k++) {
      const int shift = kind == 0 ? 0 : kind == 1 ? 2 * (k == odd_one) : (int)(random() % 4);
      ours.emplace_back(dtypes[k], n, shift);
      theirs.emplace_back(dtypes[k], n);
      ours.back().fill((unsigned)(seed + k), k < 2);
      if (k == 3 || k == 4) // second moments are not negative
        for (int64_t i = 0; i < n; i++) ours.back().put(i, std::fabs(dc__get(ours.back().data(), dtypes[k], i)), 0);
      memcpy(theirs.back().data(), ours.back().data(), n * ours.back().size);
    }
    b = a;
    point(a, ours, amsgrad, lowp);
    point(b, theirs, amsgrad, lowp);
  }
  static void point(dc_adamw_args &args, std::vector<Array> &arrays, bool amsgrad, bool lowp) {
    args.param = arrays[0].data();
    args.grad = arrays[1].data();
    args.exp_avg = arrays[2].data();
    args.exp_avg_sq = arrays[3].data();
    args.max_exp_avg_sq = amsgrad ? arrays[4].data() : nullptr;
    args.lowp = lowp ? arrays[5].data() : nullptr;
  }
};

TEST_F(CudaBodies, AdamwOfManyTensors) {
  std::mt19937 random(5);
  std::vector<AdamwPair> pairs;
  std::vector<dc_adamw_args> ours, theirs;
  pairs.reserve(300);
  for (int i = 0; i < 300; i++) {
    const int64_t sizes[] = {0, 1, 3, 4, 6, 100, 4095, 4096, 4097, 9001};
    pairs.emplace_back(random, sizes[random() % 10]);
    ours.push_back(pairs.back().a);
    theirs.push_back(pairs.back().b);
  }
  ASSERT_EQ(dc_adamw(theirs.data(), (int64_t)theirs.size()), DC_OK) << dc_last_error();
  int launches = 0, vectors = 0;
  for (int64_t next = 0; next < (int64_t)ours.size(); launches++) {
    AdamwTable table;
    const int64_t from = next;
    next = fill_table(&table, ours.data(), from, (int64_t)ours.size());
    ASSERT_GT(next, from);
    for (int t = 0; t < table.count; t++) vectors += table.tensor[t].vectors;
    for (int32_t block = 0; block < table.first[table.count]; block++)
      for (int thread = 0; thread < 256; thread++) adamw(table, block, thread, 256);
  }
  EXPECT_GE(launches, 7);
  EXPECT_GT(vectors, 10);
  for (size_t i = 0; i < pairs.size(); i++)
    for (int k = 0; k < 6; k++)
      pairs[i].ours[k].expect_equal(pairs[i].theirs[k], "tensor " + std::to_string(i) + " array " + std::to_string(k));
}

// The other rules of dc_step in the same way, of all dtypes and alignments.
struct StepPair {
  std::vector<Array> ours, theirs; // param, grad, state, lowp
  dc_step_args a, b;
  StepPair(std::mt19937 &random, int64_t n) {
    const int low[3] = {DC_F32, DC_BF16, DC_F16};
    a = {};
    a.struct_size = sizeof a;
    a.n = n;
    a.rule = 1 + (int)(random() % 3);
    a.step = 1 + (int64_t)(random() % 3);
    a.lr = 0.01 * (double)(random() % 5), a.beta1 = 0.9, a.beta2 = 0.25, a.eps = 1e-8, a.weight_decay = 0.1;
    a.grad_scale = random() % 2 ? 0.5 : -1.0;
    const bool sgd = a.rule == DC_RULE_SGD, state = !sgd || random() % 2, lowp = random() % 2;
    if (!state) a.beta1 = 0;
    a.flags = sgd && random() % 2 ? DC_STEP_NESTEROV : 0;
    if (random() % 3 == 0) a.weight_decay = 0;
    a.param_dtype = low[random() % 3], a.grad_dtype = low[random() % 3];
    a.state_dtype = low[random() % 3], a.lowp_dtype = low[random() % 3];
    const int dtypes[4] = {a.param_dtype, a.grad_dtype, a.state_dtype, a.lowp_dtype};
    const int kind = random() % 3, odd_one = (int)(random() % 4), seed = (int)random();
    ours.reserve(4);
    theirs.reserve(4);
    for (int k = 0; k < 4; k++) {
      const int shift = kind == 0 ? 0 : kind == 1 ? 2 * (k == odd_one) : (int)(random() % 4);
      ours.emplace_back(dtypes[k], n, shift);
      theirs.emplace_back(dtypes[k], n);
      ours.back().fill((unsigned)(seed + k), k < 2);
      memcpy(theirs.back().data(), ours.back().data(), n * ours.back().size);
    }
    b = a;
    point(a, ours, state, lowp);
    point(b, theirs, state, lowp);
  }
  static void point(dc_step_args &args, std::vector<Array> &arrays, bool state, bool lowp) {
    args.param = arrays[0].data();
    args.grad = arrays[1].data();
    args.state[0] = state ? arrays[2].data() : nullptr;
    args.lowp = lowp ? arrays[3].data() : nullptr;
  }
};

TEST_F(CudaBodies, StepOfManyTensors) {
  std::mt19937 random(6);
  std::vector<StepPair> pairs;
  std::vector<dc_step_args> ours, theirs;
  pairs.reserve(300);
  for (int i = 0; i < 300; i++) {
    const int64_t sizes[] = {0, 1, 3, 4, 6, 100, 4095, 4096, 4097, 9001};
    pairs.emplace_back(random, sizes[random() % 10]);
    ours.push_back(pairs.back().a);
    theirs.push_back(pairs.back().b);
  }
  ASSERT_EQ(dc_step(theirs.data(), (int64_t)theirs.size()), DC_OK) << dc_last_error();
  int vectors = 0;
  for (int64_t next = 0; next < (int64_t)ours.size();) {
    StepTable table;
    const int64_t from = next;
    next = fill_table(&table, ours.data(), from, (int64_t)ours.size());
    ASSERT_GT(next, from);
    for (int t = 0; t < table.count; t++) vectors += table.tensor[t].vectors;
    for (int32_t block = 0; block < table.first[table.count]; block++)
      for (int thread = 0; thread < 256; thread++) step(table, block, thread, 256);
  }
  EXPECT_GT(vectors, 10);
  for (size_t i = 0; i < pairs.size(); i++)
    for (int k = 0; k < 4; k++)
      pairs[i].ours[k].expect_equal(pairs[i].theirs[k], "rule " + std::to_string(pairs[i].a.rule) + " tensor " +
                                                            std::to_string(i) + " array " + std::to_string(k));
}

TEST_F(CudaBodies, AdamwTablesFindEveryChunkOfLargeTensors) {
  float memory[64] alignas(64) = {};
  std::vector<dc_adamw_args> tensors;
  for (int64_t n : {(int64_t)1, (int64_t)ADAMW_CHUNK * INT32_MAX / 2, (int64_t)0,
                    (int64_t)ADAMW_CHUNK * INT32_MAX / 2 + 1, (int64_t)5}) {
    dc_adamw_args a = {};
    a.struct_size = sizeof a;
    a.param = a.exp_avg = a.exp_avg_sq = memory;
    a.grad = memory;
    a.n = n, a.step = 1, a.beta1 = 0.9, a.beta2 = 0.99;
    tensors.push_back(a);
  }
  AdamwTable table;
  // The third large one would overflow the grid, so it starts the next launch.
  EXPECT_EQ(fill_table(&table, tensors.data(), 0, 5), 3);
  EXPECT_EQ(table.count, 2);
  EXPECT_EQ(adamw_find(table, 0), 0);
  EXPECT_EQ(adamw_find(table, 1), 1);
  EXPECT_EQ(adamw_find(table, table.first[2] - 1), 1);
  EXPECT_EQ(fill_table(&table, tensors.data(), 3, 5), 5);
  EXPECT_EQ(table.count, 2);
  EXPECT_EQ(adamw_find(table, table.first[1] - 1), 0);
  EXPECT_EQ(adamw_find(table, table.first[1]), 1);
  EXPECT_EQ(table.tensor[1].n, 5);
  EXPECT_EQ(fill_table(&table, tensors.data(), 2, 3), 3);
  EXPECT_EQ(table.count, 0);
}

} // namespace
