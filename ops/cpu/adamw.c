/* adamw.c: bodies of dc_adamw, one pass over memory. The usual layouts (fp32 masters and moments) are constants of
 * their loop; all others share one loop that asks for the dtype at every vector.
 *
 * The limit is memory: with one test for NaN a vector and prefetch (2 KiB ahead on Intel, 128 bytes on AMD), 1.05 of a
 * loop with the same reads and writes and adds only on a Xeon, 1.03 on a Zen 4 (2 KiB: 0.88). docs/lab/kernels.md has
 * the variants. tests/bench/bench_ops.c --only adamw. */
#include "cpu/vec.h"

typedef struct consts {
  vf grad_scale, one_minus_b1, b2, one_minus_b2, decay, step_size_neg, inv_sqrt_bc2, eps, l2;
} consts;

DC_INLINE consts adamw_consts_of(const dc__adamw_coef *c) {
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
  const consts k = adamw_consts_of(c);
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
LOOP(adamw_f32, DC_F32, 0, 0)
LOOP(adamw_f32_to_bf16, DC_F32, DC_BF16, 1)
LOOP(adamw_f32_to_f16, DC_F32, DC_F16, 1)
LOOP(adamw_bf16_to_bf16, DC_BF16, DC_BF16, 1)
LOOP(adamw_f16_to_f16, DC_F16, DC_F16, 1)

static void adamw_any_layout(const dc_adamw_args *t, const dc__adamw_coef *c, int64_t begin, int64_t end) {
  const layout l = {t->param_dtype, t->grad_dtype,   t->state_dtype,
                    t->lowp_dtype,  t->lowp != NULL, t->max_exp_avg_sq != NULL,
                    c->l2 != 0.0f};
  adamw_loop(t, l, c, begin, end);
}

void DC_BODY(adamw)(const dc_adamw_args *t, const dc__adamw_coef *c, int64_t begin, int64_t end) {
  const int plain = t->param_dtype == DC_F32 && t->state_dtype == DC_F32 && !t->max_exp_avg_sq && c->l2 == 0.0f;
  const int g = t->grad_dtype, low = t->lowp ? t->lowp_dtype : -1;
  if (plain && g == DC_F32 && low == -1) adamw_f32(t, c, begin, end);
  else if (plain && g == DC_F32 && low == DC_BF16) adamw_f32_to_bf16(t, c, begin, end);
  else if (plain && g == DC_F32 && low == DC_F16) adamw_f32_to_f16(t, c, begin, end);
  else if (plain && g == DC_BF16 && low == DC_BF16) adamw_bf16_to_bf16(t, c, begin, end);
  else if (plain && g == DC_F16 && low == DC_F16) adamw_f16_to_f16(t, c, begin, end);
  else adamw_any_layout(t, c, begin, end);
}
