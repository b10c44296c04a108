// fused.cuh: bodies.cuh for the ops of ops/fused.h: what one CUDA thread does, compiled as plain C++ too
// (tests/c/test_cuda_fused.cpp). Operations and their order are those of ops/ref, so results have the CPU's bits.
//
// Norms: a group of lanes has a row (bodies.cuh: 8 threads for 16-bit elements, 16 for fp32); a lane touches no
// elements but its own 16 bytes of every 64 elements, in every pass: no barrier is needed between them. Gradients of
// weights and biases: a thread has 16 bytes of columns of a block of rows. Activations: a CUDA block has a row (arrays
// without strides come cut into rows of CHUNK). WIDE: every array of the call is aligned to 16 bytes at every row.
#ifndef DEEPC_CUDA_FUSED_CUH
#define DEEPC_CUDA_FUSED_CUH

#include "cuda/bodies.cuh"
#include "ref/activation.h"

namespace dc_gpu {

enum { CHUNK = 4096 };

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
  const float e = exp_nonpos(-magnitude(x)), q = __frcp_rn(__fadd_rn(1.0f, e)), eq = __fmul_rn(e, q);
  Logistics s;
  s.at = negative(x) ? eq : q;
  s.rest = negative(x) ? q : eq;
  return s;
}
DC_GPU float silu_slope(float x, Logistics s) { return __fmul_rn(s.at, __fmaf_rn(x, s.rest, 1.0f)); }

// Adding 1.5 * 2^23 rounds to whole numbers, ties to even as rintf does, and leaves them in the low bits: conversions
// run at a quarter of an addition's rate. 0 <= n < 16; of a NaN any entry will do.
DC_GPU float gelu_lookup(const float t[6][16], float x) {
  const float most = DC__GELU_MOST, a = most < magnitude(x) ? most : magnitude(x), whole = 12582912.0f;
  const float shifted = __fadd_rn(__fmul_rn(a, DC__GELU_PER_STEP), whole), n = __fsub_rn(shifted, whole);
  const float r = __fmaf_rn(n, -DC__GELU_STEP, a);
  const uint32_t at = __float_as_uint(shifted) & 15u;
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
template <class T> DC_GPU const typename T::stored *row_of(const void *p, int64_t stride, int64_t row) {
  return static_cast<const typename T::stored *>(p) + row * stride;
}
template <class T> DC_GPU typename T::stored *row_to(void *p, int64_t cols, int64_t row) {
  return static_cast<typename T::stored *>(p) + row * cols;
}

// V elements from i on of a weight or bias, whose dtype is known at run time.
template <int V, bool WIDE> DC_GPU void get_as(float *to, const void *p, int dt, int64_t i, int64_t n) {
  if (dt == DC_F32) get<F32, V, WIDE>(to, static_cast<const float *>(p), i, n);
  else if (dt == DC_BF16) get<BF16, V, WIDE>(to, static_cast<const uint16_t *>(p), i, n);
  else get<F16, V, WIDE>(to, static_cast<const uint16_t *>(p), i, n);
}
// weight + offset, or 1 without a weight.
template <int V, bool WIDE>
DC_GPU void get_weights(float *to, const void *weight, int dt, float offset, int64_t i, int64_t n) {
  if (weight) get_as<V, WIDE>(to, weight, dt, i, n);
  DC_UNROLL
  for (int j = 0; j < V; j++) to[j] = weight ? __fadd_rn(to[j], offset) : 1.0f;
}

// f(i, x[V]) for this lane's elements of a row, from i on; zero past the end.
template <class T, bool WIDE, class F>
DC_GPU void each_of_row(const typename T::stored *x, int64_t cols, int lane, F f) {
  constexpr int V = Lane<T, ROW_SUMS>::width;
  float v[V];
  int64_t i = lane * V;
  for (; Ahead<T, WIDE>::fits(i, cols); i += AHEAD * ROW_SUMS) {
    Ahead<T, WIDE> ahead;
    ahead.load(x + i);
    DC_UNROLL
    for (int b = 0; b < AHEAD; b++) {
      ahead.get(v, b);
      f(i + b * ROW_SUMS, v);
    }
  }
  for (; i < cols; i += ROW_SUMS) {
    get<T, V, WIDE>(v, x, i, cols);
    f(i, v);
  }
}
// The same of two rows of one length: f(i, x[V], y[V]).
template <class T, bool WIDE, class F>
DC_GPU void each_of_rows(const typename T::stored *x, const typename T::stored *y, int64_t cols, int lane, F f) {
  constexpr int V = Lane<T, ROW_SUMS>::width;
  float v[V], w[V];
  int64_t i = lane * V;
  for (; Ahead<T, WIDE>::fits(i, cols); i += AHEAD * ROW_SUMS) {
    Ahead<T, WIDE> first, second;
    first.load(x + i);
    second.load(y + i);
    DC_UNROLL
    for (int b = 0; b < AHEAD; b++) {
      first.get(v, b);
      second.get(w, b);
      f(i + b * ROW_SUMS, v, w);
    }
  }
  for (; i < cols; i += ROW_SUMS) {
    get<T, V, WIDE>(v, x, i, cols);
    get<T, V, WIDE>(w, y, i, cols);
    f(i, v, w);
  }
}

// What is normalised: x, or x + residual, which this lane then stores.
template <class T, bool WIDE>
DC_GPU const typename T::stored *norm_source(const dc_norm_args &a, int64_t row, int lane) {
  constexpr int V = Lane<T, ROW_SUMS>::width;
  const typename T::stored *x = row_of<T>(a.x, a.x_stride, row);
  if (!a.residual) return x;
  const typename T::stored *residual = row_of<T>(a.residual, a.residual_stride, row);
  typename T::stored *sum = row_to<T>(a.sum, a.cols, row);
  each_of_rows<T, WIDE>(x, residual, a.cols, lane, [&](int64_t i, float *s, const float *r) {
    DC_UNROLL
    for (int j = 0; j < V; j++) s[j] = __fadd_rn(s[j], r[j]);
    put<T, V, WIDE>(sum, i, a.cols, s);
  });
  return sum;
}

// A row for the passes of norm_total, norm_squares and norm_out: each(cols, lane, f) calls f(i, v[V]) for this lane's
// elements from i on, zero past the end. ReadRow reads memory at every pass.
template <class T, bool WIDE> struct ReadRow {
  typedef T type;
  static constexpr int V = Lane<T, ROW_SUMS>::width, LANES = Lane<T, ROW_SUMS>::count;
  const typename T::stored *x;
  DC_GPU void load(const dc_norm_args &a, int64_t row, int lane) { x = norm_source<T, WIDE>(a, row, lane); }
  template <class F> DC_GPU void each(int64_t cols, int lane, F f) const { each_of_row<T, WIDE>(x, cols, lane, f); }
  static DC_GPU bool inside(int64_t i, int64_t cols) { return i < cols; }
  static DC_GPU void weights(float *w, float *b, const dc_norm_args &a, int64_t i) {
    get_weights<V, WIDE>(w, a.weight, a.weight_dtype, a.offset, i, a.cols);
    if (a.bias) get_as<V, WIDE>(b, a.bias, a.weight_dtype, i, a.cols);
  }
  static DC_GPU void give(typename T::stored *y, int64_t i, int64_t cols, const float *f) {
    put<T, V, WIDE>(y, i, cols, f);
  }
};

// A row of up to N * ROW_SUMS elements whose lanes keep theirs, N pieces of V, in registers: memory is read once. Every
// array can be read and written in whole pieces. All N pieces are written out, so the dtype of weights and biases, W,
// is known at compile time: code for each would be more than a processor keeps.
template <class T, class W, int N> struct HeldRow {
  typedef T type;
  static constexpr int V = Lane<T, ROW_SUMS>::width, LANES = Lane<T, ROW_SUMS>::count;
  alignas(16) uint32_t words[N][4]; // 16 bits have no register of their own
  DC_GPU void unpack(float *v, int k) const {
    DC_UNROLL
    for (int j = 0; j < V; j++)
      if constexpr (sizeof(typename T::stored) == 4) v[j] = __uint_as_float(words[k][j]);
      else v[j] = T::up((uint16_t)(words[k][j / 2] >> (j % 2 * 16)));
  }
  // f(k, i) for each piece of this lane, from element i on.
  template <class F> static DC_GPU void pieces(int64_t cols, int lane, F f) {
    DC_UNROLL
    for (int k = 0; k < N; k++)
      if (lane * V + k * ROW_SUMS < cols) f(k, lane * V + k * ROW_SUMS);
  }
  DC_GPU void load(const dc_norm_args &a, int64_t row, int lane) {
    const typename T::stored *x = row_of<T>(a.x, a.x_stride, row);
    pieces(a.cols, lane, [&](int k, int i) { load_bytes16(words[k], x + i); });
    if (!a.residual) return;
    const typename T::stored *residual = row_of<T>(a.residual, a.residual_stride, row);
    typename T::stored *to = row_to<T>(a.sum, a.cols, row);
    pieces(a.cols, lane, [&](int k, int i) {
      float s[V], r[V];
      unpack(s, k);
      get_whole<T, V>(r, residual + i);
      DC_UNROLL
      for (int j = 0; j < V; j++) s[j] = __fadd_rn(s[j], r[j]);
      Pack<typename T::stored, V> rounded;
      down_all<T, V>(rounded.x, s);
      memcpy(words[k], rounded.x, 16);
      store<typename T::stored, V>(to + i, rounded);
    });
  }
  template <class F> DC_GPU void each(int64_t cols, int lane, F f) const {
    pieces(cols, lane, [&](int k, int i) {
      float v[V];
      unpack(v, k);
      f(i, v);
    });
  }
  static DC_GPU bool inside(int64_t, int64_t) { return true; }
  static DC_GPU void weights(float *w, float *b, const dc_norm_args &a, int64_t i) {
    if (a.weight) get_whole<W, V>(w, static_cast<const typename W::stored *>(a.weight) + i);
    if (a.bias) get_whole<W, V>(b, static_cast<const typename W::stored *>(a.bias) + i);
    DC_UNROLL
    for (int j = 0; j < V; j++) w[j] = a.weight ? __fadd_rn(w[j], a.offset) : 1.0f;
  }
  static DC_GPU void give(typename T::stored *y, int64_t i, int64_t, const float *f) {
    Pack<typename T::stored, V> rounded;
    down_all<T, V>(rounded.x, f);
    store<typename T::stored, V>(y + i, rounded);
  }
};

// sum[V]: this lane's accumulators, here and below.
template <class Row> DC_GPU void norm_total(float *sum, const Row &x, int64_t cols, int lane) {
  DC_UNROLL
  for (int j = 0; j < Row::V; j++) sum[j] = 0.0f;
  x.each(cols, lane, [&](auto, const float *f) {
    DC_UNROLL
    for (int j = 0; j < Row::V; j++) sum[j] = __fadd_rn(sum[j], f[j]); // a sum is never -0, so adding 0 changes none
  });
}
template <class Row> DC_GPU void norm_squares(float *sum, const Row &x, int64_t cols, int lane, float mean) {
  DC_UNROLL
  for (int j = 0; j < Row::V; j++) sum[j] = 0.0f;
  x.each(cols, lane, [&](auto i, const float *f) {
    DC_UNROLL
    for (int j = 0; j < Row::V; j++) {
      const float d = Row::inside(i + j, cols) ? __fsub_rn(f[j], mean) : 0.0f;
      sum[j] = __fmaf_rn(d, d, sum[j]);
    }
  });
}
DC_GPU float norm_rstd(float squares, int64_t cols, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)cols), eps)));
}
template <class Row>
DC_GPU void norm_out(const dc_norm_args &a, const Row &x, int64_t row, int lane, float mean, float rstd) {
  auto *y = row_to<typename Row::type>(a.y, a.cols, row);
  if (lane == 0 && a.mean) a.mean[row] = canonical(mean);
  if (lane == 0) a.rstd[row] = canonical(rstd);
  x.each(a.cols, lane, [&](auto i, float *f) {
    float w[Row::V], b[Row::V];
    Row::weights(w, b, a, i);
    DC_UNROLL
    for (int j = 0; j < Row::V; j++) {
      const float h = __fmul_rn(__fsub_rn(f[j], mean), rstd);
      f[j] = a.bias ? __fmaf_rn(h, w[j], b[j]) : __fmul_rn(h, w[j]);
    }
    Row::give(y, i, a.cols, f);
  });
}

// The mean and 1 / deviation of a row, and its elements from i on: what was normalised as h, dy as d.
template <class T> struct GradRow {
  const typename T::stored *x, *dy;
  float mean, rstd;
};
template <class T> DC_GPU GradRow<T> grad_row(const dc_norm_grad_args &a, int64_t row) {
  return GradRow<T>{row_of<T>(a.x, a.x_stride, row), row_of<T>(a.dy, a.cols, row), a.mean ? a.mean[row] : 0.0f,
                    a.rstd[row]};
}
// x becomes what was normalised.
template <class T, int V> DC_GPU void normalised(float *x, const GradRow<T> &r) {
  DC_UNROLL
  for (int j = 0; j < V; j++) x[j] = __fmul_rn(__fsub_rn(x[j], r.mean), r.rstd);
}

// along[V], level[V]: sums of g * h and of g; level for layer norm only.
template <class T, bool WIDE>
DC_GPU void grad_sums(float *along, float *level, const dc_norm_grad_args &a, const GradRow<T> &r, int lane) {
  constexpr int V = Lane<T, ROW_SUMS>::width;
  DC_UNROLL
  for (int j = 0; j < V; j++) along[j] = level[j] = 0.0f;
  each_of_rows<T, WIDE>(r.x, r.dy, a.cols, lane, [&](int64_t i, float *h, const float *d) {
    float w[V];
    normalised<T, V>(h, r);
    get_weights<V, WIDE>(w, a.weight, a.weight_dtype, a.offset, i, a.cols);
    DC_UNROLL
    for (int j = 0; j < V; j++) {
      if (i + j >= a.cols) break;
      const float g = __fmul_rn(d[j], w[j]);
      along[j] = __fmaf_rn(g, h[j], along[j]);
      level[j] = __fadd_rn(level[j], g);
    }
  });
}
// along, level: the sums over the row.
template <class T, bool WIDE>
DC_GPU void grad_out(const dc_norm_grad_args &a, const GradRow<T> &r, int64_t row, int lane, float along, float level) {
  constexpr int V = Lane<T, ROW_SUMS>::width;
  const float slope = __fdiv_rn(along, (float)a.cols), base = a.mean ? __fdiv_rn(level, (float)a.cols) : 0.0f;
  const typename T::stored *dsum = a.dsum ? row_of<T>(a.dsum, a.cols, row) : nullptr;
  typename T::stored *dx = row_to<T>(a.dx, a.cols, row);
  each_of_rows<T, WIDE>(r.x, r.dy, a.cols, lane, [&](int64_t i, float *h, float *d) {
    float w[V], more[V];
    normalised<T, V>(h, r);
    get_weights<V, WIDE>(w, a.weight, a.weight_dtype, a.offset, i, a.cols);
    if (dsum) get<T, V, WIDE>(more, dsum, i, a.cols);
    DC_UNROLL
    for (int j = 0; j < V; j++) {
      const float t = __fmaf_rn(-slope, h[j], __fsub_rn(__fmul_rn(d[j], w[j]), base));
      d[j] = dsum ? __fmaf_rn(t, r.rstd, more[j]) : __fmul_rn(t, r.rstd);
    }
    put<T, V, WIDE>(dx, i, a.cols, d);
  });
}
// Columns [i, i + V) of rows [begin, end): one partial sum each of dweight and dbias, either of which may be NULL.
// Several rows' loads are under way at once: there are few threads, with many rows each.
template <class T, bool WIDE>
DC_GPU void grad_columns(const dc_norm_grad_args &a, int64_t begin, int64_t end, int64_t i, float *dweight,
                         float *dbias) {
  constexpr int V = Lane<T, ROW_SUMS>::width, ROWS = 8;
  float weight[V], bias[V];
  DC_UNROLL
  for (int j = 0; j < V; j++) weight[j] = bias[j] = 0.0f;
  const auto add = [&](float *h, const float *d, const GradRow<T> &r) {
    normalised<T, V>(h, r);
    DC_UNROLL
    for (int j = 0; j < V; j++) {
      weight[j] = __fmaf_rn(d[j], h[j], weight[j]);
      bias[j] = __fadd_rn(bias[j], d[j]);
    }
  };
  int64_t row = begin;
  float h[V], d[V];
  if (WIDE && i + V <= a.cols)
    for (; row + ROWS <= end; row += ROWS) {
      typename T::stored x[ROWS][V], dy[ROWS][V];
      GradRow<T> r[ROWS];
      DC_UNROLL
      for (int k = 0; k < ROWS; k++) {
        r[k] = grad_row<T>(a, row + k);
        load_wide<typename T::stored, V>(x[k], r[k].x + i);
        load_wide<typename T::stored, V>(dy[k], r[k].dy + i);
      }
      DC_UNROLL
      for (int k = 0; k < ROWS; k++) {
        DC_UNROLL
        for (int j = 0; j < V; j++) h[j] = T::up(x[k][j]), d[j] = T::up(dy[k][j]);
        add(h, d, r[k]);
      }
    }
  for (; row < end; row++) {
    const GradRow<T> r = grad_row<T>(a, row);
    get<T, V, WIDE>(h, r.x, i, a.cols);
    get<T, V, WIDE>(d, r.dy, i, a.cols);
    add(h, d, r);
  }
  DC_UNROLL
  for (int j = 0; j < V; j++) {
    if (i + j >= a.cols) break;
    if (dweight) dweight[i + j] = weight[j];
    if (dbias) dbias[i + j] = bias[j];
  }
}

// The sums of the blocks of rows: accumulator `part` of column i, and their combination.
enum { FOLD = 8 };
DC_GPU float fold_part(const float *partial, int64_t blocks, int64_t stride, int64_t i, int part) {
  float sum = 0.0f;
  DC_UNROLL_8
  for (int64_t k = part; k < blocks; k += FOLD) sum = __fadd_rn(sum, partial[k * stride + i]);
  return sum;
}
DC_GPU float fold_tree(const float *part, int stride) {
  float s[FOLD];
  DC_UNROLL
  for (int j = 0; j < FOLD; j++) s[j] = part[j * stride];
  DC_UNROLL
  for (int width = FOLD / 2; width > 0; width /= 2) {
    DC_UNROLL
    for (int j = 0; j < width; j++) s[j] = __fadd_rn(s[j], s[j + width]);
  }
  return s[0];
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
    float y[W];
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float x = T::up(g.x[j]);
      y[j] = __fmul_rn(__fmul_rn(x, logistic2(x).at), T::up(u.x[j]));
    }
    down_all<T, W>(o.x, y);
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
    float to_gate[W], to_up[W];
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float x = T::up(g.x[j]), at = T::up(d.x[j]);
      const Logistics s = logistic2(x);
      to_up[j] = __fmul_rn(at, __fmul_rn(x, s.at));
      to_gate[j] = __fmul_rn(__fmul_rn(at, T::up(u.x[j])), silu_slope(x, s));
    }
    down_all<T, W>(du.x, to_up);
    down_all<T, W>(dg.x, to_gate);
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
    float y[W];
    DC_UNROLL
    for (int j = 0; j < W; j++) y[j] = gelu_of(biased(T::up(in.x[j]), a.bias, a.bias_dtype, i + j), a.form);
    down_all<T, W>(o.x, y);
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
    float y[W];
    DC_UNROLL
    for (int j = 0; j < W; j++) {
      const float v = biased(T::up(in.x[j]), a.bias, a.bias_dtype, i + j);
      y[j] = __fmul_rn(T::up(d.x[j]), gelu_slope_of(v, a.form));
    }
    down_all<T, W>(o.x, y);
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
