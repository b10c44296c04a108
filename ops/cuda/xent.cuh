// xent.cuh: bodies.cuh for dc_cross_entropy_rows: what one CUDA thread does, compiled as plain C++ too
// (tests/c/test_cuda_xent.cpp).
//
// A CUDA block has a row: maximum, then sums, then the gradient, three passes over a row that stays in the L2 cache.
// Arithmetic per element is ref/exp.h's. The sums are not the CPU's: every thread has its own accumulator and the row
// one maximum, so loss and gradient equal the CPU's up to rounding, not bit for bit.
#ifndef DEEPC_CUDA_XENT_CUH
#define DEEPC_CUDA_XENT_CUH

#include "cuda/fused.cuh"

namespace dc_gpu {

// The larger; NaN if either is.
DC_GPU float larger(float a, float b) { return a != a || a > b ? a : b; }

// each(Width<W>, i) for what of a row of n falls to this thread: vectors of 16 bytes between the first element that is
// aligned for them and the last whole one. A row of an odd number of classes starts anywhere.
template <class T, class F>
DC_GPU void xent_each(const typename T::stored *x, int64_t n, int64_t thread, int64_t threads, F each) {
  constexpr int V = 16 / (int)sizeof(typename T::stored);
  const int64_t past = (int64_t)((uintptr_t)x % 16 / sizeof *x), to_next = past ? V - past : 0;
  const int64_t head = to_next < n ? to_next : n;
  for (int64_t i = thread; i < head; i += threads) each(Width<1>(), i);
  for_each<V>(n - head, thread, threads, [=](auto width, int64_t i) { each(width, head + i); });
}

template <class T> DC_GPU float xent_max(const typename T::stored *x, int64_t n, int64_t thread, int64_t threads) {
  float max = -INFINITY;
  xent_each<T>(x, n, thread, threads, [=, &max](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<typename T::stored, W> in = load<typename T::stored, W>(x + i);
    DC_UNROLL
    for (int j = 0; j < W; j++) max = larger(max, T::up(in.x[j]));
  });
  return max;
}

struct XentSums {
  double exps, values;
};
template <class T>
DC_GPU XentSums xent_sums(const typename T::stored *x, int64_t n, float max, int64_t thread, int64_t threads) {
  float exps = 0.0f, values = 0.0f;
  xent_each<T>(x, n, thread, threads, [=, &exps, &values](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<typename T::stored, W> in = load<typename T::stored, W>(x + i);
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float v = T::up(in.x[j]);
      exps = __fadd_rn(exps, exp_nonpos(__fsub_rn(v, max)));
      values = __fadd_rn(values, v);
    }
  });
  return XentSums{exps, values};
}

DC_GPU float xent_loss(const dc_xent_args &a, float max, XentSums sums, float at_label) {
  const double smooth = a.label_smoothing, lse = (double)max + log(sums.exps);
  double loss = lse - (1.0 - smooth) * (double)at_label;
  if (smooth != 0.0) loss -= smooth * (sums.values / (double)a.classes);
  return canonical((float)loss);
}

// The gradient of element i: factor * e^(x - max) - spread; at the label that minus `label`.
struct XentRow {
  float max, factor, spread, label;
};
DC_GPU XentRow xent_row(const dc_xent_args &a, int64_t r, float max, double exps) {
  const float scale = a.row_scale ? __fmul_rn(a.scale, a.row_scale[r]) : a.scale;
  return XentRow{max, (float)((double)scale / exps), __fmul_rn(scale, __fdiv_rn(a.label_smoothing, (float)a.classes)),
                 __fmul_rn(scale, __fsub_rn(1.0f, a.label_smoothing))};
}

// A thread writes what it has read, so no barrier is needed after the label's logit was read by all who want it.
template <class T>
DC_GPU void xent_gradient(typename T::stored *x, int64_t n, const XentRow &row, int64_t label, int64_t thread,
                          int64_t threads) {
  xent_each<T>(x, n, thread, threads, [=, &row](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Pack<typename T::stored, W> v = load<typename T::stored, W>(x + i);
    float y[W];
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float g = __fmaf_rn(exp_nonpos(__fsub_rn(T::up(v.x[j]), row.max)), row.factor, -row.spread);
      y[j] = i + j == label ? __fsub_rn(g, row.label) : g;
    }
    down_all<T, W>(v.x, y);
    store<typename T::stored, W>(x + i, v);
  });
}

template <class T> DC_GPU void xent_clear(typename T::stored *x, int64_t n, int64_t thread, int64_t threads) {
  xent_each<T>(x, n, thread, threads, [=](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Pack<typename T::stored, W> zero;
    DC_UNROLL
    for (int j = 0; j < W; j++) zero.x[j] = T::down(0.0f);
    store<typename T::stored, W>(x + i, zero);
  });
}

} // namespace dc_gpu
#endif
