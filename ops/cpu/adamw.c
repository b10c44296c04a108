/* adamw.c: bodies of dc_adamw, one pass over memory. The usual layouts (fp32 masters and moments) are constants of
 * their loop; all others share one loop that asks for the dtype at every vector.
 *
 * The limit is memory: 28 bytes an element in fp32. What was tried, as the ratio to a 4-read-3-write loop with adds
 * only, medians of 21 to 41 interleaved rounds, 8 Mi elements on huge pages, AVX-512, two cores that other jobs shared
 * (loads of 5 to 10; bandwidth swung between 9 and 30 GB/s, so a difference below 0.03 is noise):
 *                                                       1 thread       2 threads    malloc'd, 1 thread
 *   every store tests for NaN, no prefetch              0.94-0.98      0.95         0.91
 *   one test for NaN (below)                            0.97-1.01      0.98         0.93
 *   + prefetch 512 B ahead                              1.01
 *   + prefetch 1 KiB ahead                              1.00-1.03      1.04         1.03
 *   + prefetch 2 KiB ahead                     (kept)   1.04-1.05      1.05         1.08
 *   + prefetch 4 KiB ahead                              1.01-1.02      1.00         1.04
 *   + the same into the second-level cache only         1.00-1.02      1.01         1.13
 *   + prefetch 1 KiB ahead for writing                  1.02
 *   two vectors per turn, no prefetch                   0.99
 *   division by Newton steps (Markstein), no prefetch   0.98-1.00
 * In the second-level cache the divider is the limit: sqrt and division take 22 cycles for 16 elements, 0.41 ns an
 * element against 0.29 with Newton steps. Arrays of a training step are larger than that cache, so the plain division
 * stays: it needs no proof. tests/bench/bench_ops.c --only adamw shows the ratio on any machine.
 *
 * On a quiet machine (docs/bench.md) the step runs at 1.05 to 1.08 of that limit on huge pages and at 0.96 to 1.05 on a
 * user's own tensors, and torch's fused step as it comes takes 1.1 to 1.2 times the limit: what is left to win over it
 * in fp32 is that 1.1 to 1.2, not the 1.5 (engine) and 1.2 (drop-in) that were aimed at. Only fewer bytes (narrower
 * states) can do more. */
#include "cpu/vec.h"

typedef struct consts {
  vf grad_scale, one_minus_b1, b2, one_minus_b2, decay, step_size_neg, inv_sqrt_bc2, eps, l2;
} consts;

DC_INLINE consts consts_of(const dc__adamw_coef *c) {
  return (consts){v_set1(c->grad_scale),   v_set1(c->one_minus_b1), v_set1(c->b2),
                  v_set1(c->one_minus_b2), v_set1(c->decay),        v_set1(c->step_size_neg),
                  v_set1(c->inv_sqrt_bc2), v_set1(c->eps),          v_set1(c->l2)};
}

/* What a loop may know at compile time. */
typedef struct layout {
  int param, grad, state, lowp, has_lowp, amsgrad, has_l2;
} layout;

DC_INLINE void adamw_step(const dc_adamw_args *t, layout l, const consts *c, int64_t i, int r) {
  vf p = v_get(t->param, l.param, i, r);
  vf g = v_mul(c->grad_scale, v_get(t->grad, l.grad, i, r));
  vf m = v_get(t->exp_avg, l.state, i, r);
  vf v = v_get(t->exp_avg_sq, l.state, i, r);
  if (l.has_l2) g = v_fma(c->l2, p, g);
  p = v_mul(p, c->decay);
  m = v_fma(c->one_minus_b1, v_sub(g, m), m);
  v = v_fma(c->one_minus_b2, v_mul(g, g), v_mul(c->b2, v));
  vf top = l.amsgrad ? v_max(v_get(t->max_exp_avg_sq, l.state, i, r), v) : v;
  p = v_fma(c->step_size_neg, v_div(m, v_fma(v_sqrt(top), c->inv_sqrt_bc2, c->eps)), p);
  if (DC_UNLIKELY(v_any_nan(p))) { /* a NaN in m, v or top has made one in p, so no other test is needed */
    p = v_canonical(p);
    m = v_canonical(m);
    v = v_canonical(v);
    top = v_canonical(top);
  }
  v_put_canonical(t->exp_avg, l.state, i, r, m);
  v_put_canonical(t->exp_avg_sq, l.state, i, r, v);
  if (l.amsgrad) v_put_canonical(t->max_exp_avg_sq, l.state, i, r, top);
  v_put_canonical(t->param, l.param, i, r, p);
  if (l.has_lowp) v_put_canonical(t->lowp, l.lowp, i, r, p);
}

DC_INLINE void adamw_ahead(const dc_adamw_args *t, layout l, int64_t i) {
  v_ahead(t->param, l.param, i, AHEAD);
  v_ahead(t->grad, l.grad, i, AHEAD);
  v_ahead(t->exp_avg, l.state, i, AHEAD);
  v_ahead(t->exp_avg_sq, l.state, i, AHEAD);
}

DC_INLINE void adamw_loop(const dc_adamw_args *args, layout l, const dc__adamw_coef *c, int64_t begin, int64_t end) {
  const dc_adamw_args t = *args; /* a copy that no store can alias */
  const consts k = consts_of(c);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    adamw_ahead(&t, l, i);
    adamw_step(&t, l, &k, i, LANES);
  }
  if (i < end) adamw_step(&t, l, &k, i, (int)(end - i));
}

#define LOOP(name, grad_dt, low_dt, low)                                                          \
  static void name(const dc_adamw_args *t, const dc__adamw_coef *c, int64_t begin, int64_t end) { \
    const layout l = {DC_F32, grad_dt, DC_F32, low_dt, low, 0, 0};                                \
    adamw_loop(t, l, c, begin, end);                                                              \
  }
LOOP(f32, DC_F32, 0, 0)
LOOP(f32_to_bf16, DC_F32, DC_BF16, 1)
LOOP(f32_to_f16, DC_F32, DC_F16, 1)
LOOP(bf16_to_bf16, DC_BF16, DC_BF16, 1)
LOOP(f16_to_f16, DC_F16, DC_F16, 1)

static void any_layout(const dc_adamw_args *t, const dc__adamw_coef *c, int64_t begin, int64_t end) {
  const layout l = {t->param_dtype, t->grad_dtype,   t->state_dtype,
                    t->lowp_dtype,  t->lowp != NULL, t->max_exp_avg_sq != NULL,
                    c->l2 != 0.0f};
  adamw_loop(t, l, c, begin, end);
}

void DC_BODY(adamw)(const dc_adamw_args *t, const dc__adamw_coef *c, int64_t begin, int64_t end) {
  const int plain = t->param_dtype == DC_F32 && t->state_dtype == DC_F32 && !t->max_exp_avg_sq && c->l2 == 0.0f;
  const int g = t->grad_dtype, low = t->lowp ? t->lowp_dtype : -1;
  if (plain && g == DC_F32 && low == -1) f32(t, c, begin, end);
  else if (plain && g == DC_F32 && low == DC_BF16) f32_to_bf16(t, c, begin, end);
  else if (plain && g == DC_F32 && low == DC_F16) f32_to_f16(t, c, begin, end);
  else if (plain && g == DC_BF16 && low == DC_BF16) bf16_to_bf16(t, c, begin, end);
  else if (plain && g == DC_F16 && low == DC_F16) f16_to_f16(t, c, begin, end);
  else any_layout(t, c, begin, end);
}
