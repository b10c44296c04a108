// lamb.cuh: what one CUDA thread does in dc_cuda_lamb_moments and dc_cuda_lamb_apply, compiled for the CPU by
// tests/c/test_cuda_lamb.cpp. lamb.cu numbers the threads.
//
// Moments: a block of the flat space, as far as it is the tensor's, has a group of LAMB_LANES threads, as many as there
// are accumulators, so that each has one and adds its elements in the order of ops/ref/lamb.c. The step: each element
// alone.
#ifndef DEEPC_CUDA_LAMB_CUH
#define DEEPC_CUDA_LAMB_CUH

#include "cuda/adamw_table.h"
#include "cuda/bodies.cuh"
#include "lamb_coef.h"

namespace dc_gpu {

enum { LAMB_LANES = 16, LAMB_BATCH = 4, LAMB_WIDTH = 4 };

// Whether dc_cuda_lamb_apply may go over the tensor in vectors; on the host.
inline bool lamb_wide(const dc_lamb_args &t) {
  return wide_aligned(t.param, t.param_dtype) && wide_aligned(t.exp_avg, DC_F32) &&
         wide_aligned(t.exp_avg_sq, DC_F32) && (!t.lowp || wide_aligned(t.lowp, t.lowp_dtype));
}

DC_GPU float lamb_update(const dc__lamb_coef &c, float p, float m, float v) {
  const float denominator = __fmaf_rn(__fsqrt_rn(v), c.inv_sqrt_bc2, c.eps);
  return __fmaf_rn(c.weight_decay, p, __fdiv_rn(__fmul_rn(m, c.inv_bc1), denominator));
}

struct LambSums {
  double param, update;
};

// The lane's accumulators of the tensor's part of `block`. LAMB_BATCH elements at a time: the compiler can't move loads
// above the stores of moments, so we do.
DC_GPU LambSums lamb_moments(const dc_lamb_args &t, const dc__lamb_coef &c, int64_t block, int lane) {
  const int64_t edge = (t.first / DC_BLOCK + block) * DC_BLOCK - t.first;
  const int64_t begin = edge > 0 ? edge : 0, end = edge + DC_BLOCK < t.n ? edge + DC_BLOCK : t.n;
  LambSums sums = {0.0, 0.0};
  for (int64_t first = begin + lane; first < end; first += LAMB_BATCH * LAMB_LANES) {
    Raw<1> raw_p[LAMB_BATCH], raw_g[LAMB_BATCH];
    float m[LAMB_BATCH], v[LAMB_BATCH];
    DC_UNROLL
    for (int b = 0; b < LAMB_BATCH; b++) {
      const int64_t i = first + b * LAMB_LANES;
      if (i >= end) break;
      raw_p[b] = load_raw<1>(t.param, t.param_dtype, i), raw_g[b] = load_raw<1>(t.grad, t.grad_dtype, i);
      m[b] = t.exp_avg[i], v[b] = t.exp_avg_sq[i];
    }
    DC_UNROLL
    for (int b = 0; b < LAMB_BATCH; b++) {
      const int64_t i = first + b * LAMB_LANES;
      if (i >= end) break;
      float p, g;
      unpack<1>(&p, raw_p[b], t.param_dtype);
      unpack<1>(&g, raw_g[b], t.grad_dtype);
      g = __fmul_rn(c.grad_scale, g);
      m[b] = __fmaf_rn(c.one_minus_b1, __fsub_rn(g, m[b]), m[b]);
      v[b] = __fmaf_rn(c.one_minus_b2, __fmul_rn(g, g), __fmul_rn(c.b2, v[b]));
      t.exp_avg[i] = canonical(m[b]), t.exp_avg_sq[i] = canonical(v[b]);
      sums.param = add_square(sums.param, p);
      sums.update = add_square(sums.update, lamb_update(c, p, m[b], v[b]));
    }
  }
  return sums;
}

template <int W> DC_GPU void lamb_apply_elements(const dc_lamb_args &t, const dc__lamb_coef &c, int64_t i) {
  const Raw<W> raw = load_raw<W>(t.param, t.param_dtype, i);
  const Pack<float, W> m = load<float, W>(t.exp_avg + i), v = load<float, W>(t.exp_avg_sq + i);
  float p[W];
  unpack<W>(p, raw, t.param_dtype);
  DC_UNROLL
  for (int j = 0; j < W; j++) p[j] = __fmaf_rn(c.rate, lamb_update(c, p[j], m.x[j], v.x[j]), p[j]);
  store_as<W>(t.param, t.param_dtype, i, p);
  if (t.lowp) store_as<W>(t.lowp, t.lowp_dtype, i, p);
}

template <bool WIDE>
DC_GPU void lamb_apply(const dc_lamb_args &t, const dc__lamb_coef &c, int64_t thread, int64_t threads) {
  for_each<WIDE ? LAMB_WIDTH : 1>(t.n, thread, threads,
                                  [&](auto width, int64_t i) { lamb_apply_elements<decltype(width)::value>(t, c, i); });
}

} // namespace dc_gpu
#endif
