// dc_gemm: every instruction set against the scalar reference bit for bit, the reference against long double, layouts
// of operands, threads, memory, and what it refuses.
#include <cmath>

#include "base/base.h"
#include "op_cases.h"

namespace {

struct Case {
  int64_t m, n, k;
  bool a_columns, b_columns; // how operands are stored
  float alpha, beta;
  int64_t pad; // of rows, or columns
  int dtype = DC_F32;
  enum Kind { kInPlace, kMatrix, kRow } c = kInPlace; // what is added
};

// Arrays in the order a, b, out, c.
std::vector<Array> arrays_of(const Case &c, Fill fill) {
  auto whole = [&](int64_t rows, int64_t cols) { return rows && cols ? (rows - 1) * (cols + c.pad) + cols : 0; };
  return {make(c.dtype, c.a_columns ? whole(c.k, c.m) : whole(c.m, c.k), fill, 31),
          make(c.dtype, c.b_columns ? whole(c.n, c.k) : whole(c.k, c.n), fill, 32),
          make(c.dtype, whole(c.m, c.n), c.beta == 0.0f || c.c != Case::kInPlace ? kAnyBits : fill, 33),
          make(c.dtype, c.c == Case::kInPlace ? 0 : whole(c.c == Case::kRow ? std::min<int64_t>(c.m, 1) : c.m, c.n),
               fill, 34)};
}

dc_gemm_args args_of(const Case &c, const std::vector<uint8_t *> &p) {
  dc_gemm_args t = {};
  t.struct_size = sizeof t;
  t.a = p[0], t.b = p[1], t.c = p[c.c == Case::kInPlace ? 2 : 3], t.out = p[2], t.dtype = c.dtype;
  t.m = c.m, t.n = c.n, t.k = c.k, t.alpha = c.alpha, t.beta = c.beta;
  t.out_stride = c.n + c.pad, t.c_stride = c.c == Case::kRow ? 0 : c.n + c.pad;
  t.a_stride[0] = c.a_columns ? 1 : c.k + c.pad, t.a_stride[1] = c.a_columns ? c.m + c.pad : 1;
  t.b_stride[0] = c.b_columns ? 1 : c.n + c.pad, t.b_stride[1] = c.b_columns ? c.k + c.pad : 1;
  return t;
}

Run run_of(const Case &c) {
  return [=](const std::vector<uint8_t *> &p) {
    const dc_gemm_args t = args_of(c, p);
    return dc_gemm(&t);
  };
}

class Gemm : public Ops {};

TEST_F(Gemm, EqualsReference) {
  const int64_t shapes[][3] = {{1, 1, 1},     {14, 32, 16},  {6, 16, 3},    {13, 31, 15}, {15, 33, 17},
                               {28, 64, 384}, {29, 17, 385}, {3, 130, 800}, {500, 5, 40}, {5, 1100, 20},
                               {40, 40, 769}, {0, 4, 4},     {4, 0, 4},     {5, 7, 0},    {1027, 3, 1537}};
  int turn = 0;
  for (const auto &s : shapes)
    for (int dtype : {DC_F32, DC_BF16})
      for (int layout = 0; layout < 4; layout++, turn++) {
        const float alphas[] = {1.0f, -0.7f, 1.0f}, betas[] = {0.0f, 1.0f, 0.3f};
        const Case c = {s[0],     s[1], s[2], layout % 2 == 1, layout > 1, alphas[turn % 3], betas[turn / 2 % 3],
                        turn % 4, dtype};
        same_everywhere(arrays_of(c, (Fill)(turn / 3 % 3)), run_of(c),
                        std::string("gemm ") + dc_dtype_name(dtype) + " " + std::to_string(c.m) + " x " +
                            std::to_string(c.n) + " x " + std::to_string(c.k) + " layout " + std::to_string(layout),
                        {kAtEnd, kOffStart});
      }
}

// Of bf16: those that operands have, that products and sums come to, and that results would be.
TEST_F(Gemm, DenormalsOfBf16CountAsZero) {
  for (int layout = 0; layout < 4; layout++) {
    const Case c = {30, 40,     33, layout % 2 == 1, layout > 1, layout ? 0.25f : 1.0f, layout > 1 ? 0.5f : 0.0f,
                    0,  DC_BF16};
    auto arrays = arrays_of(c, kOrdinary);
    std::mt19937_64 rng(7);
    for (auto &array : arrays)
      for (size_t i = 0; i < array.bytes.size();
           i += 2) { // exponents whose products are 2^-132 to 2^-120, or 0: denormal
        const bool result = &array == &arrays[2];
        const uint64_t exponent = rng() % 8 == 0 ? 0 : (result ? 1 : 61) + rng() % 6;
        const uint16_t bits = (uint16_t)((rng() & 0x807f) | exponent << 7);
        memcpy(&array.bytes[i], &bits, 2);
      }
    same_everywhere(arrays, run_of(c), "tiny numbers, layout " + std::to_string(layout), {kAtEnd});
    int zeros = 0;
    for (uint16_t bits : as<uint16_t>(run_once(arrays, kAtStart, run_of(c))[2])) {
      EXPECT_TRUE((bits & 0x7f80) || !(bits & 0x7f)) << bits;
      zeros += !(bits & 0x7fff);
    }
    EXPECT_GT(zeros, 0);
  }
}

TEST_F(Gemm, IsItsDefinition) {
  const Case c = {37, 50, 1000, false, true, 1.5f, -2.0f, 3};
  const auto arrays = arrays_of(c, kOrdinary);
  const auto a = as<float>(arrays[0].bytes), b = as<float>(arrays[1].bytes), old = as<float>(arrays[2].bytes);
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    const auto got = as<float>(run_once(arrays, kAtStart, run_of(c))[2]);
    for (int64_t i = 0; i < c.m; i++)
      for (int64_t j = 0; j < c.n; j++) {
        const size_t at = (size_t)(i * (c.n + c.pad) + j);
        long double want = 0, size = 0;
        for (int64_t p = 0; p < c.k; p++) {
          const long double x = (long double)a[(size_t)(i * (c.k + c.pad) + p)] * b[(size_t)(j * (c.k + c.pad) + p)];
          want += x, size += fabsl(x);
        }
        want = c.alpha * want + (long double)c.beta * old[at];
        ASSERT_NEAR((double)got[at], (double)want, (double)(400 * 6e-8L * c.alpha * size)) << i << " " << j;
      }
  }
}

// Integers, whose sums fp32 has exactly: so only the rounding of the end is left.
TEST_F(Gemm, Bf16IsRoundedOnce) {
  const Case c = {23, 41, 1700, true, false, 1.0f, 1.0f, 2, DC_BF16};
  auto arrays = arrays_of(c, kOrdinary);
  std::mt19937_64 rng(5);
  for (auto &array : arrays)
    for (size_t i = 0; i < array.bytes.size(); i += 2) {
      const uint16_t bits = dc__bf16_of_f32((float)((int)(rng() % 17) - 8));
      memcpy(&array.bytes[i], &bits, 2);
    }
  const auto a = as<uint16_t>(arrays[0].bytes), b = as<uint16_t>(arrays[1].bytes), old = as<uint16_t>(arrays[2].bytes);
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    const auto got = as<uint16_t>(run_once(arrays, kAtStart, run_of(c))[2]);
    for (int64_t i = 0; i < c.m; i++)
      for (int64_t j = 0; j < c.n; j++) {
        const size_t at = (size_t)(i * (c.n + c.pad) + j);
        float want = dc__f32_of_bf16(old[at]);
        for (int64_t p = 0; p < c.k; p++)
          want += dc__f32_of_bf16(a[(size_t)(p * (c.m + c.pad) + i)]) *
                  dc__f32_of_bf16(b[(size_t)(p * (c.n + c.pad) + j)]);
        ASSERT_EQ(got[at], dc__bf16_of_f32(want)) << i << " " << j << " on " << dc_isa_name(isa);
      }
  }
}

TEST_F(Gemm, NothingBesideTheMatrixIsWritten) {
  const Case c = {15, 33, 5, false, false, 1.0f, 0.0f, 4};
  const auto arrays = arrays_of(c, kAnyBits);
  const auto before = as<uint32_t>(arrays[2].bytes), after = as<uint32_t>(run_once(arrays, kAtStart, run_of(c))[2]);
  for (size_t i = 0; i < before.size(); i++)
    if (i % 37 >= 33) ASSERT_EQ(after[i], before[i]) << i;
}

TEST_F(Gemm, ThreadsDoNotChangeBits) {
  for (const Case &c : {Case{300, 700, 500, false, true, 1.0f, 0.5f, 0}, Case{900, 40, 390, true, false, 2.0f, 0.0f, 1},
                        Case{1100, 40, 790, true, false, 2.0f, 0.5f, 1, DC_BF16}}) {
    const auto arrays = arrays_of(c, kOrdinary);
    dc_set_num_threads(1);
    const auto one = run_once(arrays, kAtStart, run_of(c));
    dc_set_num_threads(3);
    EXPECT_TRUE(same(arrays, run_once(arrays, kAtStart, run_of(c)), one));
  }
}

// What a call packs is the heap's, which has it from the call before.
TEST_F(Gemm, TakesAndGivesItsRoom) {
  const Case c = {480, 480, 400, false, false, 1.0f, 0.0f, 0};
  const auto arrays = arrays_of(c, kOrdinary);
  struct dc_heap_stats before = {}, after = {};
  before.struct_size = after.struct_size = sizeof before;
  ASSERT_EQ(dc_heap_stats(&before), DC_OK);
  for (int i = 0; i < 5; i++) run_once(arrays, kAtStart, run_of(c));
  ASSERT_EQ(dc_heap_stats(&after), DC_OK);
  EXPECT_EQ(after.in_use, before.in_use);
  if (dc_heap_usable()) {
    EXPECT_GE(after.extent, int64_t{1} << 20);
    EXPECT_LE(after.extent - before.extent, int64_t{3} << 20);
  }
  const int64_t calls = dc_counter_get(DC_COUNTER_gemm_calls);
  run_once(arrays, kAtStart, run_of(c));
  EXPECT_EQ(dc_counter_get(DC_COUNTER_gemm_calls), calls + 1);
}

TEST_F(Gemm, RefusesWrongArguments) {
  std::vector<float> a(12, 1.0f), b(20, 1.0f), c(15, 5.0f);
  dc_gemm_args good = {};
  good.struct_size = sizeof good;
  good.a = a.data(), good.b = b.data(), good.c = good.out = c.data(), good.m = 3, good.n = 5, good.k = 4,
  good.alpha = 1.0f;
  good.a_stride[0] = 4, good.a_stride[1] = 1, good.b_stride[0] = 5, good.b_stride[1] = 1,
  good.c_stride = good.out_stride = 5;
  const auto refuses = [&](auto change, const char *says) {
    dc_gemm_args t = good;
    change(t);
    EXPECT_EQ(dc_gemm(&t), DC_E_INVALID);
    EXPECT_NE(strstr(dc_last_error(), says), nullptr) << dc_last_error();
    EXPECT_EQ(c, std::vector<float>(15, 5.0f));
  };
  refuses([](auto &t) { t.m = -1; }, "m = -1");
  refuses([](auto &t) { t.a = nullptr; }, "a is NULL");
  refuses([](auto &t) { t.b = nullptr; }, "b is NULL");
  refuses([](auto &t) { t.out = nullptr; }, "out is NULL");
  refuses([](auto &t) { t.c = nullptr, t.beta = 1.0f; }, "c is NULL");
  refuses([](auto &t) { t.out_stride = 4; }, "out_stride = 4 with m = 3 and n = 5");
  refuses([](auto &t) { t.c_stride = 4, t.beta = 1.0f; }, "c_stride = 4 with m = 3 and n = 5");
  refuses([](auto &t) { t.a_stride[1] = 2; }, "a has strides 4 and 2");
  refuses([](auto &t) { t.b_stride[0] = -1; }, "b has strides -1 and 1");
  refuses([](auto &t) { t.b_stride[0] = INT64_MAX / 2; }, "b has strides");
  refuses([](auto &t) { t.struct_size = 0; }, "dc_gemm_args");
  refuses([](auto &t) { t.dtype = DC_F16; }, "dtype = 2; a product is of fp32 (0) or bf16 (1)");
  EXPECT_EQ(dc_gemm(nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_gemm(&good), DC_OK) << dc_last_error();
  EXPECT_EQ(c, std::vector<float>(15, 4.0f));
}

} // namespace
