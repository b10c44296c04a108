/* packed.c: bodies of dc_step where states have a format: bf16 with stochastic rounding, codes of 8 and of 4 bits. A
 * block of states is unpacked, stepped and kept in the first-level cache until its scale is known; parameter and
 * gradient go through once. tests/bench/bench_ops.c --only packed. */
#include "ref/packed.h"
#include "cpu/vec.h"

/* What a loop may know at compile time. */
typedef struct layout {
  int rule, format, param, grad, lowp, has_lowp, has_l2;
} layout;

typedef struct scalars {
  vf grad_scale, l2, decay;
  vf one_minus_b1, b2, one_minus_b2, step_size_neg, inv_sqrt_bc2, eps; /* Adam's */
  vf b1, rate, minus_rate, least;                                      /* Lion's */
} scalars;

DC_INLINE scalars packed_scalars_of(int rule, const dc__packed_coef *c) {
  const dc__adamw_coef *a = &c->adamw;
  const dc__step_coef *o = &c->other;
  if (rule == DC_RULE_ADAMW)
    return (scalars){.grad_scale = v_set1(a->grad_scale),
                     .l2 = v_set1(a->l2),
                     .decay = v_set1(a->decay),
                     .one_minus_b1 = v_set1(a->one_minus_b1),
                     .b2 = v_set1(a->b2),
                     .one_minus_b2 = v_set1(a->one_minus_b2),
                     .step_size_neg = v_set1(a->step_size_neg),
                     .inv_sqrt_bc2 = v_set1(a->inv_sqrt_bc2),
                     .eps = v_set1(a->eps)};
  return (scalars){.grad_scale = v_set1(o->grad_scale),
                   .decay = v_set1(o->decay),
                   .one_minus_b1 = v_set1(o->one_minus_b1),
                   .b2 = v_set1(o->b2),
                   .one_minus_b2 = v_set1(o->one_minus_b2),
                   .b1 = v_set1(o->b1),
                   .rate = v_set1(o->rate),
                   .minus_rate = v_set1(-o->rate),
                   .least = v_set1(0x1p-149f)};
}

/* ---- codes ------------------------------------------------------------------------------------------------------- */
/* r numbers from codes, the rest zero. */
DC_INLINE vf packed_unpack(dc__code_map map, const uint8_t *codes, vf scale, int64_t i, int r) {
  const vi stored = vi_widen8(map.bits == 8 ? v_load8(codes + i, r) : v_load4(codes + i / 2, r));
  if (map.squares) {
    const uint32_t base = map.base + ((uint32_t)map.offset << map.shift);
    return v_keep(v_mul(v_of_bits(vi_add(vi_set1((int)base), vi_left(stored, map.shift))), scale), r);
  }
  vf f = v_of_bits(vi_add(vi_set1((int)map.base), vi_left(vi_abs(stored), map.shift)));
  f = v_zero_below(f, f, v_set1(map.least)); /* code 0 */
  return v_keep(v_mul(v_with_sign(f, stored), scale), r);
}

DC_INLINE void packed_store(dc__code_map map, uint8_t *codes, int64_t i, int r, vi code) {
  if (map.bits == 8) v_store8(codes + i, r, vi_narrow8(code));
  else v_store4(codes + i / 2, r, vi_narrow8(code));
}

DC_INLINE void packed_pack(dc__code_map map, uint8_t *codes, int64_t i, int r, vf y, vi noise) {
  const vi size = v_magnitude(y), base = vi_set1((int)map.base);
  if (map.squares) {
    const vi code = vi_right(vi_add(vi_sub(vi_max(size, base), base), noise), map.shift);
    packed_store(map, codes, i, r, vi_sub(code, vi_set1(map.offset)));
  } else {
    const vf f = v_of_bits(size);
    const vi near_zero = v_truncate(v_mul(f, v_set1(map.per_least)));
    const vi u = vi_if_below(f, v_set1(map.least), near_zero, vi_sub(size, base));
    packed_store(map, codes, i, r, vi_signed_as(vi_right(vi_add(u, noise), map.shift), y));
  }
}

/* dc__random of the LANES numbers from `number` on. */
DC_INLINE vi packed_random(dc__keys k, int state, uint32_t number) {
  return vi_mul(vi_add(vi_set1((int)(number + k.of[state])), vi_lanes()), vi_set1((int)dc__weyl[state]));
}

/* ---- one vector, one block --------------------------------------------------------------------------------------- */
DC_INLINE void packed_step(const dc_step_args *t, layout l, const scalars *c, int64_t i, int r, vf *m, vf *v) {
  vf p = v_get(t->param, l.param, i, r), g = v_mul(c->grad_scale, v_get(t->grad, l.grad, i, r));
  if (l.rule == DC_RULE_ADAMW) {
    if (l.has_l2) g = v_fma(c->l2, p, g);
    p = v_mul(p, c->decay);
    *m = v_fma(c->one_minus_b1, v_sub(g, *m), *m);
    *v = v_fma(c->one_minus_b2, v_mul(g, g), v_mul(c->b2, *v));
    p = v_fma(c->step_size_neg, v_div(*m, v_fma(v_sqrt(*v), c->inv_sqrt_bc2, c->eps)), p);
  } else {
    const vf u = v_fma(c->b1, *m, v_mul(c->one_minus_b1, g));
    const vf move = v_zero_below(v_by_sign(u, c->rate, c->minus_rate), v_abs(u), c->least);
    *m = v_fma(c->b2, *m, v_mul(c->one_minus_b2, g));
    p = v_nan_of(v_add(v_mul(p, c->decay), move), u);
  }
  if (DC_UNLIKELY(v_any_nan(p))) p = v_canonical(p);
  v_put_canonical(t->param, l.param, i, r, p);
  if (l.has_lowp) v_put_canonical(t->lowp, l.lowp, i, r, p);
}

/* bf16: nothing is shared by a block. */
DC_INLINE void packed_vector_bf16(const dc_step_args *t, layout l, const scalars *c, dc__keys k, int64_t i, int r) {
  vf x[2] = {v_get(t->state[0], DC_BF16, i, r), v_set1(0.0f)};
  if (l.rule == DC_RULE_ADAMW) x[1] = v_get(t->state[1], DC_BF16, i, r);
  packed_step(t, l, c, i, r, &x[0], &x[1]);
  for (int s = 0; s < (l.rule == DC_RULE_ADAMW ? 2 : 1); s++) {
    const vi random = vi_right(packed_random(k, s, (uint32_t)(t->first + i)), 16);
    v_store16((uint16_t *)t->state[s] + i, r, vi_narrow16(vi_right(vi_add(v_bits(v_canonical(x[s])), random), 16)));
  }
}

typedef struct block {
  float x[2][DC__BLOCK_MOST + LANES];
} block;

DC_INLINE void packed_block_bf16(const dc_step_args *t, layout l, const scalars *c, int64_t begin, int64_t end) {
  const dc__keys k = dc__keys_of(t->step, t->first + begin);
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    v_ahead(t->param, l.param, i, AHEAD);
    v_ahead(t->grad, l.grad, i, AHEAD);
    v_ahead(t->state[0], DC_BF16, i, AHEAD);
    if (l.rule == DC_RULE_ADAMW) v_ahead(t->state[1], DC_BF16, i, AHEAD);
    packed_vector_bf16(t, l, c, k, i, LANES);
  }
  if (i < end) packed_vector_bf16(t, l, c, k, i, (int)(end - i));
}

/* Codes of r elements of a state, of which x are the numbers. */
DC_INLINE void packed_close(const dc_step_args *t, dc__code_map map, int state, dc__keys k, vf inverse, const float *x,
                            int64_t i, int r) {
  const vi random = packed_random(k, state, (uint32_t)(t->first + i));
  const vi noise = vi_or(vi_right(random, 32 - map.shift), vi_set1(1));
  packed_pack(map, t->state[state], i, r, v_mul(v_load32(x, LANES), inverse), noise);
}

DC_INLINE void packed_close_block(const dc_step_args *t, layout l, int state, dc__keys k, const float *x, vi top,
                                  int64_t begin, int64_t end) {
  const dc__code_map map = dc__code_map_of(l.format, state);
  const dc__scaling of = dc__scaling_of(vi_top(top));
  const vf inverse = v_set1(of.inverse);
  int64_t i = begin;
  t->scale[state][dc__state_block_at(l.format, t->first, begin)] = of.scale;
  if (DC_UNLIKELY(of.inverse == 0.0f)) { /* nothing, or not finite: all codes are that of zero */
    for (; i < end; i += LANES)
      packed_store(map, t->state[state], i, end - i < LANES ? (int)(end - i) : LANES, vi_set1(-map.offset));
    return;
  }
  for (; i + LANES <= end; i += LANES) packed_close(t, map, state, k, inverse, x + (i - begin), i, LANES);
  if (i < end) packed_close(t, map, state, k, inverse, x + (i - begin), i, (int)(end - i));
}

/* Steps r elements; their states go to b, and their largest magnitudes into top. */
DC_INLINE void packed_open(const dc_step_args *t, layout l, const scalars *c, const vf *scale, block *b, vi *top,
                           int64_t begin, int64_t i, int r) {
  const int two = l.rule == DC_RULE_ADAMW;
  vf m = packed_unpack(dc__code_map_of(l.format, 0), t->state[0], scale[0], i, r), v = v_set1(0.0f);
  if (two) v = packed_unpack(dc__code_map_of(l.format, 1), t->state[1], scale[1], i, r);
  packed_step(t, l, c, i, r, &m, &v);
  m = v_keep(m, r);
  v_store32(b->x[0] + (i - begin), LANES, m);
  top[0] = vi_max(top[0], v_magnitude(m));
  if (!two) return;
  v = v_keep(v, r);
  v_store32(b->x[1] + (i - begin), LANES, v);
  top[1] = vi_max(top[1], v_magnitude(v));
}

DC_INLINE void packed_block_codes(const dc_step_args *t, layout l, const scalars *c, int64_t begin, int64_t end) {
  const int two = l.rule == DC_RULE_ADAMW;
  const int64_t at = dc__state_block_at(l.format, t->first, begin);
  const dc__keys k = dc__keys_of(t->step, t->first + begin);
  const vf scale[2] = {v_set1(t->scale[0][at]), v_set1(two ? t->scale[1][at] : 0.0f)};
  vi top[2] = {vi_set1(0), vi_set1(0)};
  block b;
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    v_ahead(t->param, l.param, i, AHEAD);
    v_ahead(t->grad, l.grad, i, AHEAD);
    packed_open(t, l, c, scale, &b, top, begin, i, LANES);
  }
  if (i < end) packed_open(t, l, c, scale, &b, top, begin, i, (int)(end - i));
  packed_close_block(t, l, 0, k, b.x[0], top[0], begin, end);
  if (two) packed_close_block(t, l, 1, k, b.x[1], top[1], begin, end);
}

DC_INLINE void packed_loop(const dc_step_args *args, layout l, const dc__packed_coef *c, int64_t begin, int64_t end) {
  const dc_step_args t = *args; /* a copy that no store can alias */
  const scalars k = packed_scalars_of(l.rule, c);
  for (int64_t i = begin, stop; i < end; i = stop) {
    stop = dc__state_block_end(l.format, t.first, i, end);
    if (l.format == DC_STATE_STOCHASTIC) packed_block_bf16(&t, l, &k, i, stop);
    else packed_block_codes(&t, l, &k, i, stop);
  }
}

/* fp32 parameters and gradients without a copy are constants of their loop. */
#define PACKED_LOOP(name, rule, format)                                                                        \
  static void name(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end) {              \
    const int has_l2 = rule == DC_RULE_ADAMW && c->adamw.l2 != 0.0f;                                           \
    const layout plain = {rule, format, DC_F32, DC_F32, 0, 0, has_l2};                                         \
    const layout any = {rule, format, t->param_dtype, t->grad_dtype, t->lowp_dtype, t->lowp != NULL, has_l2};  \
    if (t->param_dtype == DC_F32 && t->grad_dtype == DC_F32 && !t->lowp) packed_loop(t, plain, c, begin, end); \
    else packed_loop(t, any, c, begin, end);                                                                   \
  }
PACKED_LOOP(packed_adamw_bf16, DC_RULE_ADAMW, DC_STATE_STOCHASTIC)
PACKED_LOOP(packed_adamw_8bit, DC_RULE_ADAMW, DC_STATE_8BIT)
PACKED_LOOP(packed_adamw_4bit, DC_RULE_ADAMW, DC_STATE_4BIT)
PACKED_LOOP(packed_lion_bf16, DC_RULE_LION, DC_STATE_STOCHASTIC)
PACKED_LOOP(packed_lion_8bit, DC_RULE_LION, DC_STATE_8BIT)
PACKED_LOOP(packed_lion_4bit, DC_RULE_LION, DC_STATE_4BIT)

void DC_BODY(step_packed)(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end) {
  const int adamw = t->rule == DC_RULE_ADAMW;
  switch (t->format) {
  case DC_STATE_STOCHASTIC: (adamw ? packed_adamw_bf16 : packed_lion_bf16)(t, c, begin, end); return;
  case DC_STATE_8BIT: (adamw ? packed_adamw_8bit : packed_lion_8bit)(t, c, begin, end); return;
  default: (adamw ? packed_adamw_4bit : packed_lion_4bit)(t, c, begin, end); return;
  }
}
