// test_cuda_load.cpp: libdeepc_cuda.so loads on machines without a GPU, checks its arguments, and says cleanly why it
// can't launch.
#include <gtest/gtest.h>

#include <dlfcn.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <string>

#include "cuda/cuda_ops.h"

namespace {

bool has_gpu() {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return false;
  auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  auto count = reinterpret_cast<int (*)(int *)>(dlsym(driver, "cuDeviceGetCount"));
  int n = 0;
  return init && count && init(0) == 0 && count(&n) == 0 && n > 0;
}

class CudaLoad : public testing::Test {
protected:
  void SetUp() override {
    Dl_info info;
    ASSERT_NE(dladdr(reinterpret_cast<void *>(&dc_version), &info), 0);
    std::string path(info.dli_fname);
    path = path.substr(0, path.rfind('/') + 1) + "libdeepc_cuda.so";
    if (access(path.c_str(), F_OK) != 0)
      GTEST_SKIP() << path << " was not built: nvcc is missing here, or DEEPC_CUDA=OFF";
    library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
    get(version_, "dc_cuda_version");
    get(last_error_, "dc_cuda_last_error");
    get(cast_, "dc_cuda_cast");
    get(scale_, "dc_cuda_scale");
    get(axpy_, "dc_cuda_axpy");
    get(sqnorm_, "dc_cuda_sqnorm");
    get(copy_, "dc_cuda_copy");
    get(reduce_, "dc_cuda_reduce");
    get(reduce_acc_, "dc_cuda_reduce_acc");
    get(adamw_, "dc_cuda_adamw");
    get(step_, "dc_cuda_step");
  }
  template <class F> void get(F &slot, const char *name) {
    slot = reinterpret_cast<F>(dlsym(library_, name));
    ASSERT_NE(slot, nullptr) << name;
  }
  // Good arguments in host memory: no driver or device is DC_E_CUDA; where there is a GPU, host memory is refused.
  void expect_cannot_launch(int rc) {
    EXPECT_EQ(rc, has_gpu() ? DC_E_INVALID : DC_E_CUDA) << last_error_();
    EXPECT_NE(strstr(last_error_(), has_gpu() ? "host memory" : "GPU"), nullptr) << last_error_();
    EXPECT_NE(strstr(last_error_(), ".cu:"), nullptr) << last_error_();
  }

  void *library_ = nullptr;
  decltype(&dc_cuda_version) version_ = nullptr;
  decltype(&dc_cuda_last_error) last_error_ = nullptr;
  decltype(&dc_cuda_cast) cast_ = nullptr;
  decltype(&dc_cuda_scale) scale_ = nullptr;
  decltype(&dc_cuda_axpy) axpy_ = nullptr;
  decltype(&dc_cuda_sqnorm) sqnorm_ = nullptr;
  decltype(&dc_cuda_copy) copy_ = nullptr;
  decltype(&dc_cuda_reduce) reduce_ = nullptr;
  decltype(&dc_cuda_reduce_acc) reduce_acc_ = nullptr;
  decltype(&dc_cuda_adamw) adamw_ = nullptr;
  decltype(&dc_cuda_step) step_ = nullptr;

  static constexpr int64_t kN = 64;
  alignas(64) float x_[kN] = {}, y_[kN] = {}, m_[kN] = {}, v_[kN] = {};
  double partial_[1] = {};

  dc_adamw_args adamw_args() {
    dc_adamw_args a = {};
    a.struct_size = sizeof a;
    a.param = x_, a.grad = y_, a.exp_avg = m_, a.exp_avg_sq = v_;
    a.n = kN, a.step = 1, a.lr = 1e-3, a.beta1 = 0.9, a.beta2 = 0.999, a.eps = 1e-8, a.grad_scale = 1;
    return a;
  }
};

TEST_F(CudaLoad, StepChecksAsOnTheCpuAndTakesRulesAndFormatsTogether) {
  dc_step_args t[2] = {};
  for (auto &a : t) {
    a.struct_size = sizeof a;
    a.param = x_, a.grad = y_, a.state[0] = m_, a.n = kN, a.step = 1, a.rule = DC_RULE_LION, a.lr = 1e-3;
    a.beta1 = 0.9, a.beta2 = 0.99, a.grad_scale = 1;
  }
  expect_cannot_launch(step_(t, 2, nullptr));
  t[1].rule = DC_RULE_ADAMW, t[1].state[1] = v_;
  expect_cannot_launch(step_(t, 2, nullptr));
  expect_cannot_launch(step_(t + 1, 1, nullptr));
  float scales[1] = {};
  t[0].format = DC_STATE_8BIT, t[0].state_dtype = DC_BF16, t[0].scale[0] = scales;
  expect_cannot_launch(step_(t, 2, nullptr));
  t[0].scale[0] = nullptr;
  EXPECT_EQ(step_(t, 2, nullptr), DC_E_INVALID);
  t[0].format = DC_STATE_NEAREST, t[0].state_dtype = DC_F32;
  t[1].rule = DC_RULE_COUNT;
  EXPECT_EQ(step_(t, 2, nullptr), DC_E_INVALID);
  t[0].n = t[1].n = 0, t[1].rule = DC_RULE_LION, t[1].state[1] = nullptr;
  EXPECT_EQ(step_(t, 2, nullptr), DC_OK) << last_error_();
}

TEST_F(CudaLoad, VersionAgrees) { EXPECT_STREQ(version_(), dc_version()); }

TEST_F(CudaLoad, SaysWhichRuntimeItHas) {
  decltype(&dc_cuda_runtime_version) runtime = nullptr;
  get(runtime, "dc_cuda_runtime_version");
  if (HasFatalFailure()) return;
  EXPECT_GE(runtime(), 12000) << "the kernels are written for a toolkit of 12 or later";
}

TEST_F(CudaLoad, EveryOpSaysThatItCannotLaunch) {
  const void *src[2] = {y_, m_};
  expect_cannot_launch(cast_(x_, DC_F32, y_, DC_BF16, 2, 16, nullptr));
  expect_cannot_launch(scale_(x_, DC_F16, 2, kN, nullptr));
  expect_cannot_launch(axpy_(x_, 2, y_, DC_F32, kN, nullptr));
  expect_cannot_launch(sqnorm_(x_, DC_F32, kN, partial_, nullptr));
  expect_cannot_launch(copy_(x_, y_, sizeof x_, nullptr));
  expect_cannot_launch(reduce_(x_, src, 2, DC_F32, DC_RED_MAX, kN, nullptr));
  expect_cannot_launch(reduce_acc_(x_, src, 2, DC_F32, kN, 1, nullptr, nullptr));
  dc_adamw_args args = adamw_args();
  expect_cannot_launch(adamw_(&args, 1, nullptr));
}

TEST_F(CudaLoad, NothingToDoNeedsNoGpu) {
  EXPECT_EQ(cast_(nullptr, DC_F32, nullptr, DC_BF16, 2, 0, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(scale_(nullptr, DC_F32, 2, 0, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(axpy_(nullptr, 2, nullptr, DC_F32, 0, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(sqnorm_(nullptr, DC_F32, 0, nullptr, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(copy_(nullptr, nullptr, 0, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(reduce_(nullptr, nullptr, 1, DC_I8, DC_RED_SUM, 0, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(reduce_acc_(nullptr, nullptr, 1, DC_F32, 0, 1, nullptr, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(adamw_(nullptr, 0, nullptr), DC_OK) << last_error_();
  dc_adamw_args args = adamw_args();
  args.n = 0;
  EXPECT_EQ(adamw_(&args, 1, nullptr), DC_OK) << last_error_();
}

// The same refusals as on the CPU, before any device is touched.
TEST_F(CudaLoad, ArgumentsAreCheckedAsOnTheCpu) {
  const void *src[2] = {y_, nullptr};
  float *odd = reinterpret_cast<float *>(reinterpret_cast<char *>(x_) + 2);
  EXPECT_EQ(cast_(x_, DC_F64, y_, DC_F32, 1, kN, nullptr), DC_E_DTYPE);
  EXPECT_EQ(cast_(x_, DC_F32, y_, 99, 1, kN, nullptr), DC_E_DTYPE);
  EXPECT_EQ(cast_(x_, DC_F32, y_, DC_F32, 1, -1, nullptr), DC_E_INVALID);
  EXPECT_EQ(cast_(x_, DC_F32, y_, DC_F32, 1, INT64_MAX, nullptr), DC_E_INVALID);
  EXPECT_EQ(cast_(x_, DC_F32, nullptr, DC_F32, 1, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(cast_(x_, DC_F32, x_ + 1, DC_F32, 1, 8, nullptr), DC_E_INVALID);
  EXPECT_EQ(cast_(x_, DC_F32, x_, DC_BF16, 1, 8, nullptr), DC_E_INVALID);
  EXPECT_EQ(scale_(odd, DC_F32, 1, 8, nullptr), DC_E_INVALID);
  EXPECT_EQ(scale_(x_, DC_I32, 1, 8, nullptr), DC_E_DTYPE);
  EXPECT_EQ(axpy_(x_, 1, x_, DC_BF16, 8, nullptr), DC_E_INVALID);
  EXPECT_EQ(axpy_(x_, 1, x_ + 1, DC_F32, 8, nullptr), DC_E_INVALID);
  EXPECT_EQ(sqnorm_(x_, DC_F32, kN, nullptr, nullptr), DC_E_INVALID);
  EXPECT_EQ(copy_(x_, x_ + 1, 64, nullptr), DC_E_INVALID);
  EXPECT_EQ(reduce_(x_, src, 0, DC_F32, DC_RED_SUM, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(reduce_(x_, src, 1025, DC_F32, DC_RED_SUM, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(reduce_(x_, src, 2, DC_F32, DC_RED_SUM, kN, nullptr), DC_E_INVALID);
  EXPECT_NE(strstr(last_error_(), "src[1]"), nullptr) << last_error_();
  EXPECT_EQ(reduce_(x_, src, 1, DC_F32, 8, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(reduce_(x_, src, 1, DC_F32, DC_RED_BOR, kN, nullptr), DC_E_DTYPE);
  EXPECT_EQ(reduce_(x_, src, 1, DC_I32, DC_RED_AVG, kN, nullptr), DC_E_DTYPE);
  EXPECT_EQ(reduce_(x_, src, 1, DC_DTYPE_COUNT, DC_RED_SUM, kN, nullptr), DC_E_DTYPE);
  EXPECT_EQ(reduce_acc_(y_, src, 1, DC_F32, kN, 0, nullptr, nullptr), DC_E_INVALID);
  EXPECT_EQ(reduce_acc_(x_, src, 1, DC_F64, kN, 0, nullptr, nullptr), DC_E_DTYPE);
  EXPECT_EQ(adamw_(nullptr, 1, nullptr), DC_E_INVALID);
  EXPECT_EQ(adamw_(nullptr, -1, nullptr), DC_E_INVALID);
  auto refused = [&](auto change, int status) {
    dc_adamw_args args[2] = {adamw_args(), adamw_args()};
    change(args[1]);
    EXPECT_EQ(adamw_(args, 2, nullptr), status) << last_error_();
  };
  refused([](dc_adamw_args &a) { a.step = 0; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.lr = INFINITY; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.beta1 = 1; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.beta2 = NAN; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.eps = -1; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.weight_decay = NAN; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.grad_scale = NAN; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.flags = 2; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.n = -1; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.n = INT64_MAX / 16; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.exp_avg = nullptr; }, DC_E_INVALID);
  refused([](dc_adamw_args &a) { a.grad_dtype = DC_I8; }, DC_E_DTYPE);
  refused([](dc_adamw_args &a) { a.lowp = a.param, a.lowp_dtype = DC_F64; }, DC_E_DTYPE);
}

// The ops of fused.h: looked up, refuse what is wrong, and reach the device with what is right.
TEST_F(CudaLoad, FusedOps) {
  decltype(&dc_cuda_norm) norm = nullptr;
  decltype(&dc_cuda_norm_grad) norm_grad = nullptr;
  decltype(&dc_cuda_swiglu) swiglu = nullptr;
  decltype(&dc_cuda_swiglu_grad) swiglu_grad = nullptr;
  decltype(&dc_cuda_gelu) gelu = nullptr;
  decltype(&dc_cuda_gelu_grad) gelu_grad = nullptr;
  decltype(&dc_cuda_rotary) rotary = nullptr;
  get(norm, "dc_cuda_norm");
  get(norm_grad, "dc_cuda_norm_grad");
  get(swiglu, "dc_cuda_swiglu");
  get(swiglu_grad, "dc_cuda_swiglu_grad");
  get(gelu, "dc_cuda_gelu");
  get(gelu_grad, "dc_cuda_gelu_grad");
  get(rotary, "dc_cuda_rotary");
  if (HasFatalFailure()) return;
  dc_norm_args n = {};
  n.struct_size = sizeof n;
  n.x = x_, n.y = y_, n.rstd = m_, n.rows = 4, n.cols = 16, n.x_stride = 16, n.eps = 1e-5f;
  expect_cannot_launch(norm(&n, nullptr));
  n.x_stride = 15;
  EXPECT_EQ(norm(&n, nullptr), DC_E_INVALID);
  dc_norm_grad_args ng = {};
  ng.struct_size = sizeof ng;
  ng.x = x_, ng.dy = v_, ng.dx = y_, ng.rstd = m_, ng.rows = 4, ng.cols = 16, ng.x_stride = 16;
  expect_cannot_launch(norm_grad(&ng, nullptr));
  ng.dweight = x_;
  EXPECT_EQ(norm_grad(&ng, nullptr), DC_E_INVALID); // no workspace
  dc_swiglu_args s = {};
  s.struct_size = sizeof s;
  s.gate = x_, s.up = v_, s.out = y_, s.rows = 4, s.cols = s.gate_stride = s.up_stride = s.out_stride = 16;
  expect_cannot_launch(swiglu(&s, nullptr));
  s.dtype = DC_F64;
  EXPECT_EQ(swiglu(&s, nullptr), DC_E_DTYPE);
  dc_swiglu_grad_args sg = {};
  sg.struct_size = sizeof sg;
  sg.gate = x_, sg.up = v_, sg.dout = m_, sg.dgate = y_, sg.dup = y_, sg.rows = 1;
  sg.cols = sg.gate_stride = sg.up_stride = sg.dout_stride = sg.dgate_stride = sg.dup_stride = 16;
  expect_cannot_launch(swiglu_grad(&sg, nullptr));
  dc_gelu_args g = {};
  g.struct_size = sizeof g;
  g.x = x_, g.out = y_, g.rows = 4, g.cols = g.x_stride = 16;
  expect_cannot_launch(gelu(&g, nullptr));
  g.form = 2;
  EXPECT_EQ(gelu(&g, nullptr), DC_E_INVALID);
  dc_gelu_grad_args gg = {};
  gg.struct_size = sizeof gg;
  gg.x = x_, gg.dout = v_, gg.dx = y_, gg.rows = 4, gg.cols = gg.x_stride = 16;
  expect_cannot_launch(gelu_grad(&gg, nullptr));
  dc_rotary_args r = {};
  r.struct_size = sizeof r;
  r.x = x_, r.cos = r.sin = v_, r.out = y_, r.size[0] = r.size[1] = r.size[2] = 1, r.cols = 16, r.rotated = 16;
  expect_cannot_launch(rotary(&r, nullptr));
  r.rotated = 15;
  EXPECT_EQ(rotary(&r, nullptr), DC_E_INVALID);
}

// The blockwise codecs.
TEST_F(CudaLoad, Codecs) {
  decltype(&dc_cuda_quantize) quantize = nullptr;
  decltype(&dc_cuda_dequantize) dequantize = nullptr;
  decltype(&dc_cuda_dequantize_add) dequantize_add = nullptr;
  decltype(&dc_cuda_average_signs) average_signs = nullptr;
  get(quantize, "dc_cuda_quantize");
  get(dequantize, "dc_cuda_dequantize");
  get(dequantize_add, "dc_cuda_dequantize_add");
  get(average_signs, "dc_cuda_average_signs");
  if (HasFatalFailure()) return;
  uint8_t *payload = reinterpret_cast<uint8_t *>(m_), *rows = reinterpret_cast<uint8_t *>(v_);
  for (int bits : {8, 4, 1}) {
    expect_cannot_launch(quantize(payload, bits, 64, x_, DC_F32, y_, kN, nullptr));
    expect_cannot_launch(dequantize(x_, DC_BF16, payload, bits, 64, kN, nullptr));
    expect_cannot_launch(dequantize_add(x_, payload, bits, 64, 2, kN, nullptr));
    EXPECT_EQ(quantize(nullptr, bits, 64, nullptr, DC_F32, nullptr, 0, nullptr), DC_OK) << last_error_();
    EXPECT_EQ(dequantize(nullptr, DC_F32, nullptr, bits, 64, 0, nullptr), DC_OK) << last_error_();
    EXPECT_EQ(dequantize_add(nullptr, nullptr, bits, 64, 1, 0, nullptr), DC_OK) << last_error_();
  }
  expect_cannot_launch(average_signs(payload, 64, rows, 2, 12, 0.5f, y_, kN, nullptr));
  EXPECT_EQ(average_signs(nullptr, 64, nullptr, 1, 0, 1, nullptr, 0, nullptr), DC_OK) << last_error_();
  EXPECT_EQ(quantize(payload, 2, 64, x_, DC_F32, y_, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(quantize(payload, 1, 65, x_, DC_F32, y_, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(quantize(payload, 1, 64, x_, DC_F64, y_, kN, nullptr), DC_E_DTYPE);
  EXPECT_EQ(quantize(payload, 1, 64, x_, DC_F32, x_, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(dequantize(payload, DC_F32, payload, 1, 64, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(dequantize_add(nullptr, payload, 1, 64, 1, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(average_signs(payload, 64, rows, 0, 12, 0.5f, y_, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(average_signs(payload, 64, rows, 2, 8, 0.5f, y_, kN, nullptr), DC_E_INVALID);
  EXPECT_EQ(average_signs(payload, 64, payload, 1, 12, 1, y_, kN, nullptr), DC_E_INVALID);
}

} // namespace
