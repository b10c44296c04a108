// The cross-entropy of rows on every instruction set, bit for bit against the scalar reference; the reference against
// its definition in long double; ignored rows, masked and non-finite logits, smoothing, factors per row, arguments,
// threads.
#include <cmath>

#include "op_cases.h"

namespace {

class Xent : public Ops {};

const int64_t kIgnored = -100;

Array labels_of(int64_t rows, int64_t classes, bool ignore) {
  Array a{DC_I64, std::vector<uint8_t>((size_t)rows * 8)};
  std::mt19937_64 rng(7);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t y = ignore && r % 3 == 1 ? kIgnored : r == 0 ? classes - 1 : (int64_t)(rng() % (uint64_t)classes);
    memcpy(a.bytes.data() + r * 8, &y, 8);
  }
  return a;
}

struct Case {
  int dt;
  int64_t rows, classes, stride;
  float smoothing;
  bool per_row, gradient;
};

// Arrays in the order logits, labels, row_scale, loss.
std::vector<Array> arrays_of(const Case &c, Fill fill) {
  return {make(c.dt, c.rows * c.stride, fill, 71), labels_of(c.rows, c.classes, true),
          make(DC_F32, c.per_row ? c.rows : 0, kOrdinary, 72), make(DC_F32, c.rows, kAnyBits, 73)};
}

dc_xent_args args_of(const Case &c, const std::vector<uint8_t *> &p) {
  dc_xent_args a = {};
  a.struct_size = sizeof a;
  a.logits = p[0];
  a.labels = (const int64_t *)p[1];
  a.row_scale = c.per_row ? (const float *)p[2] : nullptr;
  a.loss = (float *)p[3];
  a.rows = c.rows, a.classes = c.classes, a.stride = c.stride, a.ignore_index = kIgnored;
  a.scale = 0.7f, a.label_smoothing = c.smoothing, a.dtype = c.dt, a.gradient = c.gradient;
  return a;
}

TEST_F(Xent, EqualsReference) {
  for (int64_t classes : {1, 7, 16, 17, 65, 4096, 4097, 2 * 4096 + 3})
    for (int dt : kLow)
      for (int k = 0; k < 6; k++) {
        const Case c = {dt, 4, classes, classes + (k % 2) * 5, k % 3 ? 0.1f : 0.0f, k % 2 == 1, k < 5};
        same_everywhere(arrays_of(c, (Fill)(k % 3)),
                        [=](auto &p) {
                          const dc_xent_args a = args_of(c, p);
                          return dc_cross_entropy_rows(&a);
                        },
                        name_of("xent", dt, classes) + " case " + std::to_string(k), {kAtEnd, kOffStart});
      }
}

std::vector<float> run(const Case &c, std::vector<float> &logits, const std::vector<int64_t> &labels) {
  std::vector<float> loss((size_t)c.rows, -1.0f);
  dc_xent_args a = {};
  a.struct_size = sizeof a;
  a.logits = logits.data(), a.labels = labels.data(), a.loss = loss.data();
  a.rows = c.rows, a.classes = c.classes, a.stride = c.stride, a.ignore_index = kIgnored;
  a.scale = 1.0f, a.label_smoothing = c.smoothing, a.dtype = DC_F32, a.gradient = c.gradient;
  EXPECT_EQ(dc_cross_entropy_rows(&a), DC_OK) << dc_last_error();
  return loss;
}

TEST_F(Xent, IsItsDefinition) {
  const int64_t classes = 9001;
  for (int isa : isas())
    for (float range : {0.5f, 8.0f, 80.0f})
      for (float smoothing : {0.0f, 0.2f}) {
        ASSERT_EQ(dc_isa_force(isa), DC_OK);
        std::mt19937_64 rng(3);
        std::uniform_real_distribution<float> any(-range, range);
        std::vector<float> x((size_t)(2 * classes));
        for (float &v : x) v = any(rng);
        std::vector<float> grad = x;
        const std::vector<int64_t> labels = {17, classes - 1};
        const auto loss = run({DC_F32, 2, classes, classes, smoothing, false, true}, grad, labels);
        for (int64_t r = 0; r < 2; r++) {
          const float *row = x.data() + r * classes;
          long double sum = 0, total = 0;
          for (int64_t j = 0; j < classes; j++) sum += expl(row[j]), total += row[j];
          const long double lse = logl(sum), y = (long double)row[labels[(size_t)r]], e = smoothing;
          const long double want = lse - (1 - e) * y - e * total / classes;
          EXPECT_NEAR(loss[(size_t)r], want, 4e-7L * fabsl(want) + 2e-7L * range * (smoothing > 0));
          for (int64_t j = 0; j < classes; j++) {
            const long double p = expl(row[j] - lse), g = p - (j == labels[(size_t)r] ? 1 - e : 0) - e / classes;
            ASSERT_NEAR(grad[(size_t)(r * classes + j)], g,
                        2e-6L * p + 1.2e-7L * (1 + e) * (j == labels[(size_t)r]) + 2e-7L * e / classes + 2e-38L)
                << "row " << r << ", class " << j << ", range " << range << " on " << dc_isa_name(isa);
          }
        }
      }
}

TEST_F(Xent, MaskedAndNonFiniteLogits) {
  const float inf = HUGE_VALF;
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    const int64_t classes = 3 * 4096 + 9;
    std::vector<float> x((size_t)(5 * classes), 0.25f);
    for (int64_t j = 0; j < 2 * 4096; j++) x[(size_t)j] = -inf; // two whole blocks and more: the rest is uniform
    x[(size_t)(classes + 5000)] = NAN;
    x[(size_t)(2 * classes + 3)] = inf;
    for (int64_t j = 0; j < classes; j++) x[(size_t)(3 * classes + j)] = -inf;
    x[(size_t)(4 * classes + 77)] = 3e38f; // all others underflow
    const std::vector<int64_t> labels = {classes - 1, 1, 2, 3, 77};
    const auto loss = run({DC_F32, 5, classes, classes, 0.0f, false, true}, x, labels);
    const float alive = (float)(classes - 2 * 4096);
    EXPECT_FLOAT_EQ(loss[0], logf(alive));
    EXPECT_EQ(x[0], 0.0f);
    EXPECT_FLOAT_EQ(x[3 * 4096], 1.0f / alive);
    for (int r : {1, 2, 3}) {
      EXPECT_TRUE(std::isnan(loss[(size_t)r])) << "row " << r << " on " << dc_isa_name(isa);
      EXPECT_EQ(bits(x[(size_t)(r * classes + 9)]), 0x7fc00000u);
    }
    EXPECT_EQ(loss[4], 0.0f);
    EXPECT_EQ(x[(size_t)(4 * classes + 77)], 0.0f);
    EXPECT_EQ(x[(size_t)(4 * classes + 78)], 0.0f);
  }
}

TEST_F(Xent, ThreadsDoNotChangeBits) {
  const Case c = {DC_BF16, 70, 5003, 5008, 0.1f, true, true};
  const auto arrays = arrays_of(c, kOrdinary);
  const auto all = [=](const std::vector<uint8_t *> &p) {
    const dc_xent_args a = args_of(c, p);
    return dc_cross_entropy_rows(&a);
  };
  const auto one = run_once(arrays, kAtStart, all);
  dc_set_num_threads(3);
  EXPECT_TRUE(same(arrays, run_once(arrays, kAtStart, all), one));
}

TEST_F(Xent, RefusesWrongArguments) {
  std::vector<float> x(20, 1.0f), loss(2, 5.0f);
  std::vector<int64_t> labels = {1, 9};
  dc_xent_args good = {};
  good.struct_size = sizeof good;
  good.logits = x.data(), good.labels = labels.data(), good.loss = loss.data(), good.rows = 2,
  good.classes = good.stride = 10;
  good.ignore_index = kIgnored, good.scale = 1.0f, good.gradient = 1;
  const auto refuses = [&](auto change, int status, const char *says) {
    dc_xent_args a = good;
    change(a);
    EXPECT_EQ(dc_cross_entropy_rows(&a), status);
    EXPECT_NE(strstr(dc_last_error(), says), nullptr) << dc_last_error();
    EXPECT_EQ(x, std::vector<float>(20, 1.0f));
    EXPECT_EQ(loss, std::vector<float>(2, 5.0f));
  };
  refuses([](auto &a) { a.dtype = DC_F64; }, DC_E_DTYPE, "logits");
  refuses([](auto &a) { a.rows = -1; }, DC_E_INVALID, "n = -1");
  refuses([](auto &a) { a.classes = 0; }, DC_E_INVALID, "classes = 0");
  refuses([](auto &a) { a.stride = 9; }, DC_E_INVALID, "stride = 9");
  refuses([](auto &a) { a.label_smoothing = 1.5f; }, DC_E_INVALID, "label_smoothing = 1.5");
  refuses([](auto &a) { a.label_smoothing = NAN; }, DC_E_INVALID, "label_smoothing");
  refuses([](auto &a) { a.logits = nullptr; }, DC_E_INVALID, "logits is NULL");
  refuses([](auto &a) { a.labels = nullptr; }, DC_E_INVALID, "labels is NULL");
  labels[1] = 10;
  refuses([](auto &) {}, DC_E_INVALID, "labels[1] = 10 is outside [0, 10)");
  labels[1] = -1;
  refuses([](auto &) {}, DC_E_INVALID, "labels[1] = -1");
  EXPECT_EQ(dc_cross_entropy_rows(nullptr), DC_E_INVALID);
}

} // namespace
