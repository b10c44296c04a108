// test_cuda_xent.cpp: what each CUDA thread of the cross-entropy does (ops/cuda/xent.cuh, compiled for the CPU),
// thread by thread over blocks of several sizes, against the C core: equal up to the rounding of sums in another
// order. Launches and shuffles need a GPU.
#include <cmath>

#include "cuda/xent.cuh"
#include "op_cases.h"

namespace {

using namespace dc_gpu;

class CudaXent : public Ops {};

template <class T> void check(int dt, int64_t classes, int threads, float smoothing, Fill fill) {
  const int64_t rows = 3, stride = classes + 3;
  Array logits = make(dt, rows * stride, fill, 81);
  std::vector<int64_t> labels = {classes - 1, 0, classes / 2};
  std::vector<float> row_scale = {0.5f, -2.0f, 1.0f}, loss(3);
  auto mine = as<typename T::stored>(logits.bytes), core = mine;
  dc_xent_args a = {};
  a.struct_size = sizeof a;
  a.logits = core.data(), a.labels = labels.data(), a.row_scale = row_scale.data(), a.loss = loss.data();
  a.rows = rows, a.classes = classes, a.stride = stride, a.ignore_index = -100;
  a.scale = 0.7f, a.label_smoothing = smoothing, a.dtype = dt, a.gradient = 1;
  ASSERT_EQ(dc_cross_entropy_rows(&a), DC_OK) << dc_last_error();
  const float step = dt == DC_F32    ? 1e-6f
                     : dt == DC_BF16 ? 0x1p-7f
                                     : 0x1p-9f; // of a rounding that falls to the other side
  for (int64_t r = 0; r < rows; r++) {
    typename T::stored *x = mine.data() + r * stride;
    const float at_label = T::up(x[labels[(size_t)r]]);
    float max = -INFINITY;
    XentSums sums = {0, 0};
    for (int t = 0; t < threads; t++) max = larger(max, xent_max<T>(x, classes, t, threads));
    for (int t = 0; t < threads; t++) {
      const XentSums part = xent_sums<T>(x, classes, max, t, threads);
      sums.exps += part.exps, sums.values += part.values;
    }
    const float got = xent_loss(a, max, sums, at_label);
    if (std::isnan(loss[(size_t)r])) {
      ASSERT_TRUE(std::isnan(got));
    } else {
      ASSERT_NEAR(got, loss[(size_t)r], 2e-6f * (1.0f + std::fabs(got)));
    }
    const XentRow row = xent_row(a, r, max, sums.exps);
    for (int t = 0; t < threads; t++) xent_gradient<T>(x, classes, row, labels[(size_t)r], t, threads);
    for (int64_t i = 0; i < stride; i++) {
      const float g = T::up(x[i]), want = T::up(core[(size_t)(r * stride + i)]);
      if (std::isnan(want) || i >= classes) {
        ASSERT_EQ(memcmp(&x[i], &core[(size_t)(r * stride + i)], sizeof *x), 0) << "element " << i << " of " << classes;
      } else {
        ASSERT_NEAR(g, want, step * std::fabs(want) + 1e-7f)
            << "element " << i << " of " << classes << " in " << dc_dtype_name(dt);
      }
    }
  }
}

TEST_F(CudaXent, ThreadByThreadEqualsTheCore) {
  for (int64_t classes : {1, 31, 256, 257, 5003})
    for (int threads : {1, 32, 256})
      for (float smoothing : {0.0f, 0.1f})
        for (Fill fill : {kOrdinary, kSpecial}) {
          if (fill == kSpecial && smoothing != 0.0f)
            continue; // sums of +-3e38: their order decides whether they overflow
          check<F32>(DC_F32, classes, threads, smoothing, fill);
          check<BF16>(DC_BF16, classes, threads, smoothing, fill);
          check<F16>(DC_F16, classes, threads, smoothing, fill);
        }
}

TEST_F(CudaXent, ClearsARowThreadByThread) {
  std::vector<uint16_t> x(300, 7);
  for (int t = 0; t < 64; t++) xent_clear<BF16>(x.data(), 299, t, 64);
  for (size_t i = 0; i < 299; i++) ASSERT_EQ(x[i], 0);
  EXPECT_EQ(x[299], 7);
}

} // namespace
