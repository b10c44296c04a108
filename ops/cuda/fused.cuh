// fused.cuh: bodies.cuh for the ops of ops/fused.h: what one CUDA thread does, compiled as plain C++ too
// (tests/c/test_cuda_fused.cpp). Operations and their order are those of ops/ref, so results have the CPU's bits.
//
// Norms: a warp has a row; its lane t holds accumulators t and t + 32 of the row's 64, and touches no elements but
// those of index t modulo 32, in every pass: no barrier is needed between them. Gradients of weights and biases: a
// thread has a column of a block of rows. Activations: a CUDA block has a row (arrays without strides come cut into
// rows of CHUNK).
#ifndef DEEPC_CUDA_FUSED_CUH
#define DEEPC_CUDA_FUSED_CUH

#include "cuda/bodies.cuh"
#include "ref/activation.h"

namespace dc_gpu {

enum { WARP = 32, CHUNK = 4096 };

#if defined(__CUDACC__)
static __device__ const float gelu_tail[6][16] = DC__GELU_TAIL, gelu_slope_tail[6][16] = DC__GELU_SLOPE_TAIL;
#else
static const float gelu_tail[6][16] = DC__GELU_TAIL, gelu_slope_tail[6][16] = DC__GELU_SLOPE_TAIL;
#endif

// Element i of an array whose dtype is known at run time: weights and tables, which the caches hold.
DC_GPU float read(const void *p, int dt, int64_t i) {
  if (dt == DC_F32) return static_cast<const float *>(p)[i];
  const uint16_t h = static_cast<const uint16_t *>(p)[i];
  return dt == DC_BF16 ? up_bf16(h) : up_f16(h);
}
DC_GPU void write(void *p, int dt, int64_t i, float f) {
  if (dt == DC_F32) static_cast<float *>(p)[i] = canonical(f);
  else static_cast<uint16_t *>(p)[i] = dt == DC_BF16 ? down_bf16(f) : down_f16(f);
}
DC_GPU bool negative(float f) { return (__float_as_uint(f) >> 31) != 0; }
DC_GPU float magnitude(float f) { return __uint_as_float(__float_as_uint(f) & 0x7fffffffu); }

// ---- ref/exp.h and ref/activation.h --------------------------------------------------------------------------------
DC_GPU float exp_nonpos(float x) {
  const float shifted = __fmaf_rn(x, DC__EXP_LOG2E, DC__EXP_ROUND), n = __fsub_rn(shifted, DC__EXP_ROUND);
  const float r = __fmaf_rn(n, -DC__EXP_LN2_LO, __fmaf_rn(n, -DC__EXP_LN2_HI, x));
  float p = __fmaf_rn(DC__EXP_P6, r, DC__EXP_P5);
  p = __fmaf_rn(p, r, DC__EXP_P4);
  p = __fmaf_rn(p, r, DC__EXP_P3);
  p = __fmaf_rn(p, r, DC__EXP_P2);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  if (x < DC__EXP_LOWEST) return 0.0f;
  return __fmul_rn(p, __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u));
}

struct Logistics {
  float at, rest;
};
DC_GPU Logistics logistic2(float x) {
  const float e = exp_nonpos(-magnitude(x)), q = __fdiv_rn(1.0f, __fadd_rn(1.0f, e)), eq = __fmul_rn(e, q);
  Logistics s;
  s.at = negative(x) ? eq : q;
  s.rest = negative(x) ? q : eq;
  return s;
}
DC_GPU float silu_slope(float x, Logistics s) { return __fmul_rn(s.at, __fmaf_rn(x, s.rest, 1.0f)); }

DC_GPU float gelu_lookup(const float t[6][16], float x) {
  const float most = DC__GELU_MOST, a = most < magnitude(x) ? most : magnitude(x);
  const float n = rintf(__fmul_rn(a, DC__GELU_PER_STEP)), r = __fmaf_rn(n, -DC__GELU_STEP, a);
  const int at = n == n ? (int)n : 0;
  float p = __fmaf_rn(t[5][at], r, t[4][at]);
  p = __fmaf_rn(p, r, t[3][at]);
  p = __fmaf_rn(p, r, t[2][at]);
  p = __fmaf_rn(p, r, t[1][at]);
  p = __fmaf_rn(p, r, t[0][at]);
  return negative(x) ? p : __fsub_rn(1.0f, p);
}
DC_GPU float gelu_inner(float x) {
  return __fmul_rn(DC__SQRT_8_PI, __fmaf_rn(__fmul_rn(DC__GELU_CUBE, __fmul_rn(x, x)), x, x));
}
DC_GPU float gelu_inner_slope(float x) {
  return __fmul_rn(DC__SQRT_8_PI, __fmaf_rn(DC__GELU_CUBE_3, __fmul_rn(x, x), 1.0f));
}
DC_GPU float gelu_of(float x, int form) {
  return __fmul_rn(x, form == DC_GELU_TANH ? logistic2(gelu_inner(x)).at : gelu_lookup(gelu_tail, x));
}
DC_GPU float gelu_slope_of(float x, int form) {
  if (form != DC_GELU_TANH) return gelu_lookup(gelu_slope_tail, x);
  const Logistics s = logistic2(gelu_inner(x));
  return __fmul_rn(s.at, __fmaf_rn(x, __fmul_rn(s.rest, gelu_inner_slope(x)), 1.0f));
}

// ---- norms ---------------------------------------------------------------------------------------------------------
struct Sums {
  float lo, hi; // accumulators t and t + 32 of the row
};
// Adds step(i) of the elements of this lane.
template <class F> DC_GPU Sums lane_sums(int64_t cols, int lane, F step) {
  Sums s = {0.0f, 0.0f};
  for (int64_t i = lane; i < cols; i += 2 * WARP) {
    s.lo = step(i, s.lo);
    if (i + WARP < cols) s.hi = step(i + WARP, s.hi);
  }
  return s;
}

template <class T> DC_GPU const typename T::stored *row_of(const void *p, int64_t stride, int64_t row) {
  return static_cast<const typename T::stored *>(p) + row * stride;
}
template <class T> DC_GPU typename T::stored *row_to(void *p, int64_t cols, int64_t row) {
  return static_cast<typename T::stored *>(p) + row * cols;
}
DC_GPU float weight_at(const void *weight, int dt, float offset, int64_t i) {
  return weight ? __fadd_rn(read(weight, dt, i), offset) : 1.0f;
}

// What is normalised: x, or x + residual, which this lane then stores.
template <class T> DC_GPU const typename T::stored *norm_source(const dc_norm_args &a, int64_t row, int lane) {
  const typename T::stored *x = row_of<T>(a.x, a.x_stride, row);
  if (!a.residual) return x;
  const typename T::stored *residual = row_of<T>(a.residual, a.residual_stride, row);
  typename T::stored *sum = row_to<T>(a.sum, a.cols, row);
  for (int64_t i = lane; i < a.cols; i += WARP) sum[i] = T::down(__fadd_rn(T::up(x[i]), T::up(residual[i])));
  return sum;
}
template <class T> DC_GPU Sums norm_total(const typename T::stored *x, int64_t cols, int lane) {
  return lane_sums(cols, lane, [=](int64_t i, float sum) { return __fadd_rn(sum, T::up(x[i])); });
}
template <class T> DC_GPU Sums norm_squares(const typename T::stored *x, int64_t cols, int lane, float mean) {
  return lane_sums(cols, lane, [=](int64_t i, float sum) {
    const float d = __fsub_rn(T::up(x[i]), mean);
    return __fmaf_rn(d, d, sum);
  });
}
DC_GPU float norm_rstd(float squares, int64_t cols, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)cols), eps)));
}
template <class T>
DC_GPU void norm_out(const dc_norm_args &a, const typename T::stored *x, int64_t row, int lane, float mean,
                     float rstd) {
  typename T::stored *y = row_to<T>(a.y, a.cols, row);
  if (lane == 0 && a.mean) a.mean[row] = canonical(mean);
  if (lane == 0) a.rstd[row] = canonical(rstd);
  for (int64_t i = lane; i < a.cols; i += WARP) {
    const float h = __fmul_rn(__fsub_rn(T::up(x[i]), mean), rstd), w = weight_at(a.weight, a.weight_dtype, a.offset, i);
    y[i] = T::down(a.bias ? __fmaf_rn(h, w, read(a.bias, a.weight_dtype, i)) : __fmul_rn(h, w));
  }
}

template <class T> DC_GPU float unit_at(const dc_norm_grad_args &a, int64_t row, int64_t i) {
  const float x = T::up(row_of<T>(a.x, a.x_stride, row)[i]);
  return __fmul_rn(__fsub_rn(x, a.mean ? a.mean[row] : 0.0f), a.rstd[row]);
}
template <class T> DC_GPU float slope_at(const dc_norm_grad_args &a, int64_t row, int64_t i) {
  const float d = T::up(row_of<T>(a.dy, a.cols, row)[i]);
  return __fmul_rn(d, weight_at(a.weight, a.weight_dtype, a.offset, i));
}
template <class T> DC_GPU Sums grad_along(const dc_norm_grad_args &a, int64_t row, int lane) {
  return lane_sums(a.cols, lane, [&, row](int64_t i, float sum) {
    return __fmaf_rn(slope_at<T>(a, row, i), unit_at<T>(a, row, i), sum);
  });
}
template <class T> DC_GPU Sums grad_level(const dc_norm_grad_args &a, int64_t row, int lane) {
  return lane_sums(a.cols, lane, [&, row](int64_t i, float sum) { return __fadd_rn(sum, slope_at<T>(a, row, i)); });
}
// along, level: the sums over the row; level counts for layer norm only.
template <class T> DC_GPU void grad_out(const dc_norm_grad_args &a, int64_t row, int lane, float along, float level) {
  const float slope = __fdiv_rn(along, (float)a.cols), base = a.mean ? __fdiv_rn(level, (float)a.cols) : 0.0f;
  typename T::stored *dx = row_to<T>(a.dx, a.cols, row);
  for (int64_t i = lane; i < a.cols; i += WARP) {
    const float t = __fmaf_rn(-slope, unit_at<T>(a, row, i), __fsub_rn(slope_at<T>(a, row, i), base));
    const float rstd = a.rstd[row];
    dx[i] = T::down(a.dsum ? __fmaf_rn(t, rstd, T::up(row_of<T>(a.dsum, a.cols, row)[i])) : __fmul_rn(t, rstd));
  }
}
// Column i of rows [begin, end): one partial sum each of dweight and dbias, either of which may be NULL.
template <class T>
DC_GPU void grad_column(const dc_norm_grad_args &a, int64_t begin, int64_t end, int64_t i, float *dweight,
                        float *dbias) {
  float weight = 0.0f, bias = 0.0f;
  for (int64_t row = begin; row < end; row++) {
    const float d = T::up(row_of<T>(a.dy, a.cols, row)[i]);
    if (dweight) weight = __fmaf_rn(d, unit_at<T>(a, row, i), weight);
    bias = __fadd_rn(bias, d);
  }
  if (dweight) dweight[i] = weight;
  if (dbias) dbias[i] = bias;
}
DC_GPU void fold_column(void *out, int dt, const float *partial, int64_t blocks, int64_t stride, int64_t i) {
  float sum = blocks > 0 ? partial[i] : 0.0f;
  for (int64_t k = 1; k < blocks; k++) sum = __fadd_rn(sum, partial[k * stride + i]);
  write(out, dt, i, sum);
}

// ---- activations: row `row` of n elements in rows of cols ----------------------------------------------------------
DC_GPU int64_t row_length(int64_t n, int64_t cols, int64_t row) {
  const int64_t left = n - row * cols;
  return left < cols ? left : cols;
}

template <class T, int V>
DC_GPU void swiglu(const dc_swiglu_args &a, int64_t n, int64_t row, int64_t thread, int64_t threads) {
  typedef typename T::stored stored;
  const stored *gate = row_of<T>(a.gate, a.gate_stride, row), *up = row_of<T>(a.up, a.up_stride, row);
  stored *out = row_to<T>(a.out, a.out_stride, row);
  for_each<V>(row_length(n, a.cols, row), thread, threads, [=](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<stored, W> g = load<stored, W>(gate + i), u = load<stored, W>(up + i);
    Pack<stored, W> o;
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float x = T::up(g.x[j]);
      o.x[j] = T::down(__fmul_rn(__fmul_rn(x, logistic2(x).at), T::up(u.x[j])));
    }
    store<stored, W>(out + i, o);
  });
}

template <class T, int V>
DC_GPU void swiglu_grad(const dc_swiglu_grad_args &a, int64_t n, int64_t row, int64_t thread, int64_t threads) {
  typedef typename T::stored stored;
  const stored *gate = row_of<T>(a.gate, a.gate_stride, row), *up = row_of<T>(a.up, a.up_stride, row);
  const stored *dout = row_of<T>(a.dout, a.dout_stride, row);
  stored *dgate = row_to<T>(a.dgate, a.dgate_stride, row), *dup = row_to<T>(a.dup, a.dup_stride, row);
  for_each<V>(row_length(n, a.cols, row), thread, threads, [=](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<stored, W> g = load<stored, W>(gate + i), u = load<stored, W>(up + i), d = load<stored, W>(dout + i);
    Pack<stored, W> dg, du;
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float x = T::up(g.x[j]), at = T::up(d.x[j]);
      const Logistics s = logistic2(x);
      du.x[j] = T::down(__fmul_rn(at, __fmul_rn(x, s.at)));
      dg.x[j] = T::down(__fmul_rn(__fmul_rn(at, T::up(u.x[j])), silu_slope(x, s)));
    }
    store<stored, W>(dup + i, du);
    store<stored, W>(dgate + i, dg);
  });
}

DC_GPU float biased(float x, const void *bias, int dt, int64_t i) { return bias ? __fadd_rn(x, read(bias, dt, i)) : x; }

template <class T, int V>
DC_GPU void gelu(const dc_gelu_args &a, int64_t n, int64_t row, int64_t thread, int64_t threads) {
  typedef typename T::stored stored;
  const stored *x = row_of<T>(a.x, a.x_stride, row);
  stored *out = row_to<T>(a.out, a.cols, row);
  for_each<V>(row_length(n, a.cols, row), thread, threads, [=, &a](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<stored, W> in = load<stored, W>(x + i);
    Pack<stored, W> o;
    DC_UNROLL
    for (int j = 0; j < W; j++) o.x[j] = T::down(gelu_of(biased(T::up(in.x[j]), a.bias, a.bias_dtype, i + j), a.form));
    store<stored, W>(out + i, o);
  });
}

template <class T, int V>
DC_GPU void gelu_grad(const dc_gelu_grad_args &a, int64_t n, int64_t row, int64_t thread, int64_t threads) {
  typedef typename T::stored stored;
  const stored *x = row_of<T>(a.x, a.x_stride, row), *dout = row_of<T>(a.dout, a.cols, row);
  stored *dx = row_to<T>(a.dx, a.cols, row);
  for_each<V>(row_length(n, a.cols, row), thread, threads, [=, &a](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<stored, W> in = load<stored, W>(x + i), d = load<stored, W>(dout + i);
    Pack<stored, W> o;
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float v = biased(T::up(in.x[j]), a.bias, a.bias_dtype, i + j);
      o.x[j] = T::down(__fmul_rn(T::up(d.x[j]), gelu_slope_of(v, a.form)));
    }
    store<stored, W>(dx + i, o);
  });
}
// Column i of rows [begin, end): one partial sum of dbias.
template <class T>
DC_GPU void gelu_column(const dc_gelu_grad_args &a, int64_t begin, int64_t end, int64_t i, float *dbias) {
  float sum = 0.0f;
  for (int64_t row = begin; row < end; row++) {
    const float v = biased(T::up(row_of<T>(a.x, a.x_stride, row)[i]), a.bias, a.bias_dtype, i);
    sum = __fadd_rn(sum, __fmul_rn(T::up(row_of<T>(a.dout, a.cols, row)[i]), gelu_slope_of(v, a.form)));
  }
  dbias[i] = sum;
}

// ---- rotary embedding: lane `lane` of the warp that has row `row` --------------------------------------------------
template <class T> DC_GPU void rotary(const dc_rotary_args &a, int64_t row, int lane) {
  typedef typename T::stored stored;
  const int64_t at[3] = {row / a.size[2] / a.size[1], row / a.size[2] % a.size[1], row % a.size[2]};
  int64_t from = 0, to = 0, cos = 0, sin = 0;
  DC_UNROLL
  for (int k = 0; k < 3; k++) {
    from += at[k] * a.x_stride[k], to += at[k] * a.out_stride[k];
    cos += at[k] * a.cos_stride[k], sin += at[k] * a.sin_stride[k];
  }
  const stored *x = static_cast<const stored *>(a.x) + from;
  stored *out = static_cast<stored *>(a.out) + to;
  const int64_t h = a.rotated / 2;
  for (int64_t j = lane; j < h; j += WARP) {
    const float lo = T::up(x[j]), hi = T::up(x[j + h]);
    const float sin_lo = read(a.sin, a.table_dtype, sin + j), sin_hi = read(a.sin, a.table_dtype, sin + j + h);
    const float from_hi = a.inverse ? sin_hi : -sin_lo, from_lo = a.inverse ? -sin_lo : sin_hi;
    out[j] = T::down(__fmaf_rn(hi, from_hi, __fmul_rn(lo, read(a.cos, a.table_dtype, cos + j))));
    out[j + h] = T::down(__fmaf_rn(lo, from_lo, __fmul_rn(hi, read(a.cos, a.table_dtype, cos + j + h))));
  }
  for (int64_t j = a.rotated + lane; j < a.cols; j += WARP) out[j] = T::down(T::up(x[j]));
}

} // namespace dc_gpu
#endif
