/* packed.c: bodies of dc_step where states have a format: bf16 with stochastic rounding, codes of 8 and of 4 bits. A
 * block of states is unpacked, stepped and kept in the first-level cache until its scale is known, and packed while the
 * next one is stepped; parameter and gradient go through once. tests/bench/bench_ops.c --only packed. */
#include "ref/packed.h"
#include "cpu/rules.h"

/* What a loop may know at compile time. */
typedef struct layout {
  int format, param, grad, lowp, has_lowp;
  int mends; /* a block's numbers are looked at for NaN when it is done: fp32 parameters without a copy, codes */
  rule_of of;
} layout;

DC_INLINE int packed_two(layout l) { return dc__packed_states(l.of.rule) == 2; }
DC_INLINE dc__code_map packed_map(layout l, int state) {
  return dc__code_map_of(l.format, dc__packed_kind(l.of.rule, state));
}

typedef struct scalars {
  vf grad_scale;
  float keep[2]; /* dc__packed_keep */
  vf l2, decay, one_minus_b1, one_minus_b2, step_size_neg, inv_sqrt_bc2, eps; /* Adam's */
  lamb_scalars lamb;
  rule_scalars other; /* of the rules with one state */
} scalars;

DC_INLINE scalars packed_scalars_of(const dc_step_args *t, int rule, const dc__packed_coef *c) {
  const dc__adamw_coef *a = &c->adamw;
  if (rule == DC__RULE_LAMB)
    return (scalars){
        .grad_scale = v_set1(c->lamb.grad_scale),
        .keep = {dc__packed_keep(t->rule, t->beta1, t->beta2, 0), dc__packed_keep(t->rule, t->beta1, t->beta2, 1)},
        .lamb = lamb_scalars_of(&c->lamb)};
  if (rule != DC_RULE_ADAMW)
    return (scalars){
        .grad_scale = v_set1(c->other.grad_scale), .keep = {1.0f, 1.0f}, .other = rule_scalars_of(&c->other)};
  return (scalars){
      .grad_scale = v_set1(a->grad_scale),
      .keep = {dc__packed_keep(t->rule, t->beta1, t->beta2, 0), dc__packed_keep(t->rule, t->beta1, t->beta2, 1)},
      .l2 = v_set1(a->l2),
      .decay = v_set1(a->decay),
      .one_minus_b1 = v_set1(a->one_minus_b1),
      .one_minus_b2 = v_set1(a->one_minus_b2),
      .step_size_neg = v_set1(a->step_size_neg),
      .inv_sqrt_bc2 = v_set1(a->inv_sqrt_bc2),
      .eps = v_set1(a->eps)};
}

/* ---- codes ------------------------------------------------------------------------------------------------------- */
/* What a block's codes of a state are unpacked with. values: of 4 bits, the numbers of the codes by their bits. */
typedef struct unpacking {
  dc__code_map map;
  vf scale;
  float values[LANES];
} unpacking;

/* units: of 4 bits, the values at the scale 1. scale: the block's, times dc__packed_keep. */
DC_INLINE unpacking packed_unpacking(dc__code_map map, const float *units, float scale) {
  unpacking u = {.map = map, .scale = v_set1(scale)};
  if (map.bits == 4) v_store32(u.values, LANES, v_mul(v_load32(units, LANES), u.scale));
  return u;
}

DC_INLINE void packed_units(dc__code_map map, float *units) {
  const uint8_t all[LANES / 2] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
  for (int code = 0; map.bits == 4 && code < LANES; code++) units[code] = dc__code_get(&map, all, code);
}

/* r numbers from codes, the rest zero. */
DC_INLINE vf packed_unpack(const unpacking *u, const uint8_t *codes, int64_t i, int r) {
  const dc__code_map map = u->map;
  if (map.bits == 4) return v_keep(v_lookup(u->values, vi_load_nibbles(codes + i / 2, r)), r);
  const vi stored = vi_widen8(v_load8(codes + i, r));
  if (map.linear) return v_keep(v_mul(v_mul(vi_float(stored), v_set1(map.least)), u->scale), r);
  if (map.squares) {
    const uint32_t base = map.base + ((uint32_t)map.offset << map.shift);
    return v_keep(v_mul(v_of_bits(vi_add(vi_set1((int)base), vi_left(stored, map.shift))), u->scale), r);
  }
  const vf f = v_of_bits(vi_add(vi_set1((int)map.base), vi_left(vi_abs(stored), map.shift)));
  return v_keep(v_mul(v_with_sign_or_zero(f, stored), u->scale), r);
}

/* The lower bits of `code`, which is in [-128, 127]. */
DC_INLINE void packed_store(dc__code_map map, uint8_t *codes, int64_t i, int r, vi code) {
  if (map.bits == 8) v_store8(codes + i, r, vi_low8(code));
  else vi_store_nibbles(codes + i / 2, r, code);
}

/* The same of whole vectors that follow on each other: one of 8 bits, four of 4. */
DC_INLINE void packed_store_group(dc__code_map map, uint8_t *codes, int64_t i, int group, const vi *code) {
  if (group == 4) vi_store_nibbles4(codes + i / 2, code);
  else packed_store(map, codes, i, LANES, code[0]);
}

/* noise: with anything above its map.shift bits. */
DC_INLINE vi packed_code(dc__code_map map, vf y, vi noise) {
  const int mask = (1 << map.shift) - 1;
  if (map.squares) { /* base and offset go in with the noise */
    const uint32_t from = 1u - map.base - ((uint32_t)map.offset << map.shift);
    const vi u = vi_max(v_bits(y), vi_set1((int)map.base));
    return vi_right_signed(vi_add(u, vi_and_or(noise, mask, (int)from)), map.shift);
  }
  const vi size = v_magnitude(y);
  const vf f = v_of_bits(size);
  const vf linear = v_mul(f, v_set1(map.per_least));
  const vi u = map.linear ? v_truncate(linear)
                          : vi_truncate_if_below(f, v_set1(map.least), linear, vi_sub(size, vi_set1((int)map.base)));
  return vi_signed_as(vi_right(vi_add(u, vi_and_or(noise, mask, (int)dc__least_noise(&map))), map.shift), y);
}

/* ---- random bits ------------------------------------------------------------------------------------------------- */
/* dc__noise of the LANES numbers from `number` on, with other bits above it. */
DC_INLINE vi packed_noise(dc__keys k, int state, int bits, uint32_t number) {
  return vi_mul(vi_add(vi_set1((int)(number + k.of[state])), vi_lanes()), vi_set1((int)dc__weyl_of(state, bits)));
}

/* Those of the next LANES. */
DC_INLINE vi packed_noise_next(int state, int bits, vi noise) {
  return vi_add(noise, vi_set1((int)(LANES * dc__weyl_of(state, bits))));
}

/* ---- one vector -------------------------------------------------------------------------------------------------- */
/* LAMB's step before lr and ratio. m, v: multiplied with keep already. */
DC_INLINE vf packed_lamb(const lamb_scalars *c, vf p, vf g, vf *m, vf *v) {
  *m = v_fma(c->one_minus_b1, g, *m);
  *v = v_fma(c->one_minus_b2, v_mul(g, g), *v);
  return rule_lamb(c, p, *m, *v);
}

/* m, v: multiplied with keep already. bad: gets a NaN where something is one, or infinite, if the layout mends. */
DC_INLINE void packed_step(const dc_step_args *t, layout l, const scalars *c, int64_t i, int r, vf *m, vf *v, vf *bad) {
  vf p = v_get(t->param, l.param, i, r), g = v_mul(c->grad_scale, v_get(t->grad, l.grad, i, r));
  if (l.of.rule == DC_RULE_ADAMW) {
    if (l.of.has_l2) g = v_fma(c->l2, p, g);
    p = v_mul(p, c->decay);
    *m = v_fma(c->one_minus_b1, g, *m);
    *v = v_fma(c->one_minus_b2, v_mul(g, g), *v);
    p = v_fma(c->step_size_neg, v_div(*m, v_fma(v_sqrt(*v), c->inv_sqrt_bc2, c->eps)), p);
  } else if (l.of.rule == DC__RULE_LAMB) {
    p = v_fma(c->lamb.rate, packed_lamb(&c->lamb, p, g, m, v), p);
  } else {
    p = rule_step(l.of, &c->other, p, g, m);
  }
  /* Where a state is a NaN, p is one; not so Lion's. */
  const vf all = l.of.rule == DC_RULE_LION ? v_add(p, *m) : p;
  if (l.mends) {
    *bad = v_fma(p, v_set1(0.0f), *bad);
  } else if (DC_UNLIKELY(v_any_nan(all))) {
    p = v_canonical(p);
    *m = v_canonical(*m);
    *v = v_canonical(*v);
  }
  v_put_canonical(t->param, l.param, i, r, p);
  if (l.has_lowp) v_put_canonical(t->lowp, l.lowp, i, r, p);
}

/* bf16: nothing is shared by a block. */
DC_INLINE void packed_vector_bf16(const dc_step_args *t, layout l, const scalars *c, const vi *noise, int64_t i,
                                  int r) {
  vf x[2] = {v_get(t->state[0], DC_BF16, i, r), v_set1(0.0f)};
  if (packed_two(l)) {
    x[0] = v_mul(x[0], v_set1(c->keep[0]));
    x[1] = v_mul(v_get(t->state[1], DC_BF16, i, r), v_set1(c->keep[1]));
  }
  packed_step(t, l, c, i, r, &x[0], &x[1], NULL);
  for (int s = 0; s < dc__packed_states(l.of.rule); s++) {
    const vi u = vi_add(v_bits(x[s]), vi_and_or(noise[s], (1 << DC__BF16_NOISE) - 1, 0));
    v_store16((uint16_t *)t->state[s] + i, r, vi_narrow16(vi_right(u, 16)));
  }
}

DC_INLINE void packed_block_bf16(const dc_step_args *t, layout l, const scalars *c, int64_t begin, int64_t end) {
  const dc__keys k = dc__keys_of(t->step, t->first + begin);
  const uint32_t number = (uint32_t)(t->first + begin);
  vi noise[2] = {packed_noise(k, 0, DC__BF16_NOISE, number), packed_noise(k, 1, DC__BF16_NOISE, number)};
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES) {
    v_ahead(t->param, l.param, i, AHEAD);
    v_ahead(t->grad, l.grad, i, AHEAD);
    v_ahead(t->state[0], DC_BF16, i, AHEAD);
    if (packed_two(l)) v_ahead(t->state[1], DC_BF16, i, AHEAD);
    packed_vector_bf16(t, l, c, noise, i, LANES);
    for (int s = 0; s < 2; s++) noise[s] = packed_noise_next(s, DC__BF16_NOISE, noise[s]);
  }
  if (i < end) packed_vector_bf16(t, l, c, noise, i, (int)(end - i));
}

/* ---- blocks of codes --------------------------------------------------------------------------------------------- */
/* A block that is stepped, and not packed yet: elements [begin, end). */
typedef struct block {
  float x[2][DC__BLOCK_MOST + LANES];
  uint32_t top[2]; /* the bits of the largest magnitudes of x */
  int64_t begin, end;
} block;

/* A state on its way into codes, block after block. */
typedef struct packing {
  int64_t upper; /* 32 bits of the numbers that noise is of; -1: of none yet */
  vi noise;
  vf inverse;
} packing;

/* Begins the block b, which follows on the one before. Whether its codes are not all zero: it is neither next to
 * nothing nor not finite. */
DC_INLINE int packed_pack_begin(const dc_step_args *t, layout l, int state, packing *to, const block *b) {
  const dc__scaling of = dc__scaling_of(b->top[state]);
  const int64_t number = t->first + b->begin;
  t->scale[state][dc__state_block_at(l.format, t->first, b->begin)] = of.scale;
  to->inverse = v_set1(of.inverse);
  if (DC_UNLIKELY(number >> 32 != to->upper)) {
    to->upper = number >> 32;
    to->noise = packed_noise(dc__keys_of(t->step, number), state, packed_map(l, state).shift, (uint32_t)number);
  }
  return of.inverse != 0.0f;
}

/* The codes of the elements from `i` of the block on. */
DC_INLINE vi packed_pack_some(layout l, int state, packing *to, const block *b, int64_t i) {
  const dc__code_map map = packed_map(l, state);
  const vi code = packed_code(map, v_mul(v_load32(b->x[state] + i, LANES), to->inverse), to->noise);
  to->noise = packed_noise_next(state, map.shift, to->noise);
  return code;
}

/* All of it; some: what packed_pack_begin said. */
DC_INLINE void packed_pack(const dc_step_args *t, layout l, int state, packing *to, const block *b, int some) {
  const dc__code_map map = packed_map(l, state);
  const int64_t n = b->end - b->begin;
  for (int64_t i = 0; i < n; i += LANES) {
    const int r = n - i < LANES ? (int)(n - i) : LANES;
    if (some) {
      packed_store(map, t->state[state], b->begin + i, r, packed_pack_some(l, state, to, b, i));
      continue;
    }
    packed_store(map, t->state[state], b->begin + i, r, vi_set1(-map.offset));
    to->noise = packed_noise_next(state, map.shift, to->noise);
  }
}

/* What a block has seen of its numbers. */
typedef struct seen {
  vi top[2];
  vf bad;
} seen;

/* Steps r elements; their states go to b. */
DC_INLINE void packed_open_some(const dc_step_args *t, layout l, const scalars *c, const unpacking *from, block *b,
                                seen *of, int64_t i, int r) {
  vf m = packed_unpack(&from[0], t->state[0], b->begin + i, r), v = v_set1(0.0f);
  if (packed_two(l)) v = packed_unpack(&from[1], t->state[1], b->begin + i, r);
  v_ahead(t->param, l.param, b->begin + i, AHEAD);
  v_ahead(t->grad, l.grad, b->begin + i, AHEAD);
  packed_step(t, l, c, b->begin + i, r, &m, &v, &of->bad);
  m = v_keep(m, r);
  v_store32(b->x[0] + i, LANES, m);
  of->top[0] = vi_max(of->top[0], v_magnitude(m));
  if (!packed_two(l)) return;
  v = v_keep(v, r);
  v_store32(b->x[1] + i, LANES, v);
  of->top[1] = vi_max(of->top[1], l.mends ? v_bits(v) : v_magnitude(v));
}

/* A block whose parameters or states hold a NaN, or an infinity. */
static void packed_mend(const dc_step_args *t, block *b, int states) {
  float *param = t->param;
  for (int64_t i = b->begin; i < b->end; i++) param[i] = dc__canonical_f32(param[i]);
  for (int s = 0; s < states; s++)
    for (int64_t i = 0; i < b->end - b->begin; i++) {
      const uint32_t size = dc__bits_of_f32(b->x[s][i]) & 0x7fffffffu;
      if (size > b->top[s]) b->top[s] = size;
    }
}

/* Packs the block `last`, if there is one, and steps b. Both at the same time where they are whole: so the processor
 * need not wait for a scale, and the divider works all the time. */
DC_INLINE void packed_block_codes(const dc_step_args *t, layout l, const scalars *c, const unpacking *from, packing *to,
                                  block *b, const block *last) {
  const int64_t n = b->end - b->begin, whole = dc__state_block(l.format);
  const int two = packed_two(l);
  const int first = last && packed_pack_begin(t, l, 0, &to[0], last);
  const int second = last && two && packed_pack_begin(t, l, 1, &to[1], last);
  seen of = {{vi_set1(0), vi_set1(0)}, v_set1(0.0f)};
  int64_t i = 0;
  if (DC_LIKELY(n == whole && first && second == two && last->end - last->begin == whole)) {
    packing m = to[0], v = to[1];
    /* Codes of 4 bits of four vectors go together: that takes fewer operations. (Of 8 bits it gains nothing.) */
    const int group = l.format == DC_STATE_4BIT ? 4 : 1;
    for (; i < whole; i += group * LANES) {
      vi codes[2][4];
      for (int k = 0; k < group; k++) {
        const int64_t at = i + k * LANES;
        packed_open_some(t, l, c, from, b, &of, at, LANES);
        codes[0][k] = packed_pack_some(l, 0, &m, last, at);
        if (two) codes[1][k] = packed_pack_some(l, 1, &v, last, at);
      }
      packed_store_group(packed_map(l, 0), t->state[0], last->begin + i, group, codes[0]);
      if (two) packed_store_group(packed_map(l, 1), t->state[1], last->begin + i, group, codes[1]);
    }
    to[0] = m, to[1] = v;
  } else {
    if (last) packed_pack(t, l, 0, &to[0], last, first);
    if (last && two) packed_pack(t, l, 1, &to[1], last, second);
    for (; i < n; i += LANES) packed_open_some(t, l, c, from, b, &of, i, n - i < LANES ? (int)(n - i) : LANES);
  }
  b->top[0] = vi_top(of.top[0]), b->top[1] = vi_top(of.top[1]);
  if (l.mends && DC_UNLIKELY(v_any_nan(of.bad))) packed_mend(t, b, 1 + two);
}

DC_INLINE void packed_loop_codes(const dc_step_args *t, layout l, const scalars *c, int64_t begin, int64_t end) {
  const int two = packed_two(l);
  float units[2][LANES] = {{0}};
  packing to[2] = {{.upper = -1}, {.upper = -1}};
  block blocks[2], *now = blocks, *last = NULL;
  packed_units(packed_map(l, 0), units[0]);
  packed_units(packed_map(l, 1), units[1]);
  for (int64_t i = begin; i < end; i = last->end) {
    const int64_t at = dc__state_block_at(l.format, t->first, i);
    const unpacking from[2] = {packed_unpacking(packed_map(l, 0), units[0], t->scale[0][at] * c->keep[0]),
                               packed_unpacking(packed_map(l, 1), units[1], two ? t->scale[1][at] * c->keep[1] : 0.0f)};
    now->begin = i, now->end = dc__state_block_end(l.format, t->first, i, end);
    packed_block_codes(t, l, c, from, to, now, last);
    last = now;
    now = now == blocks ? blocks + 1 : blocks;
  }
  if (last) packed_pack(t, l, 0, &to[0], last, packed_pack_begin(t, l, 0, &to[0], last));
  if (last && two) packed_pack(t, l, 1, &to[1], last, packed_pack_begin(t, l, 1, &to[1], last));
}

DC_INLINE void packed_loop(const dc_step_args *args, layout l, const dc__packed_coef *c, int64_t begin, int64_t end) {
  const dc_step_args t = *args; /* a copy that no store can alias */
  const scalars k = packed_scalars_of(&t, l.of.rule, c);
  if (l.format != DC_STATE_STOCHASTIC) {
    packed_loop_codes(&t, l, &k, begin, end);
    return;
  }
  for (int64_t i = begin, stop; i < end; i = stop) {
    stop = dc__state_block_end(l.format, t.first, i, end);
    packed_block_bf16(&t, l, &k, i, stop);
  }
}

/* fp32 parameters and gradients without a copy are constants of their loop. */
#define PACKED_LOOP(name, rule, format)                                                                    \
  static void name(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end) {          \
    const int adamw = rule == DC_RULE_ADAMW; /* whose decay is seldom of this kind */                      \
    const int has_l2 = (adamw ? c->adamw.l2 : c->other.l2) != 0.0f;                                        \
    const rule_of of = {rule, 1, has_l2, (t->flags & DC_STEP_NESTEROV) != 0};                              \
    const rule_of none = {rule, 1, 0, 0};                                                                  \
    const layout plain = {format, DC_F32, DC_F32, 0, 0, format != DC_STATE_STOCHASTIC, adamw ? none : of}; \
    const layout any = {format, t->param_dtype, t->grad_dtype, t->lowp_dtype, t->lowp != NULL, 0, of};     \
    if (t->param_dtype == DC_F32 && t->grad_dtype == DC_F32 && !t->lowp && !(adamw && has_l2))             \
      packed_loop(t, plain, c, begin, end);                                                                \
    else packed_loop(t, any, c, begin, end);                                                               \
  }
#define PACKED_LOOPS(rule_name, rule)                                                                           \
  PACKED_LOOP(packed_##rule_name##_bf16, rule, DC_STATE_STOCHASTIC)                                             \
  PACKED_LOOP(packed_##rule_name##_8bit, rule, DC_STATE_8BIT)                                                   \
  PACKED_LOOP(packed_##rule_name##_4bit, rule, DC_STATE_4BIT)                                                   \
  static void packed_##rule_name(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end) { \
    switch (t->format) {                                                                                        \
    case DC_STATE_STOCHASTIC: packed_##rule_name##_bf16(t, c, begin, end); return;                              \
    case DC_STATE_8BIT: packed_##rule_name##_8bit(t, c, begin, end); return;                                    \
    default: packed_##rule_name##_4bit(t, c, begin, end); return;                                               \
    }                                                                                                           \
  }
PACKED_LOOPS(adamw, DC_RULE_ADAMW)
PACKED_LOOPS(lamb_step, DC__RULE_LAMB)
PACKED_LOOPS(lion, DC_RULE_LION)
PACKED_LOOPS(adagrad, DC_RULE_ADAGRAD)
PACKED_LOOPS(sgd, DC_RULE_SGD)

void DC_BODY(step_packed)(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end) {
  switch (t->rule) {
  case DC_RULE_ADAMW: packed_adamw(t, c, begin, end); return;
  case DC__RULE_LAMB: packed_lamb_step(t, c, begin, end); return;
  case DC_RULE_LION: packed_lion(t, c, begin, end); return;
  case DC_RULE_ADAGRAD: packed_adagrad(t, c, begin, end); return;
  default: packed_sgd(t, c, begin, end); return;
  }
}

/* ---- LAMB's sums ------------------------------------------------------------------------------------------------- */
DC_INLINE lamb_sums packed_sums_some(const dc_step_args *t, layout l, const scalars *c, const unpacking *from,
                                     lamb_sums s, int64_t i, int r) {
  vf x[2];
  for (int k = 0; k < 2; k++)
    x[k] = l.format == DC_STATE_STOCHASTIC ? v_mul(v_get(t->state[k], DC_BF16, i, r), v_set1(c->keep[k]))
                                           : packed_unpack(&from[k], t->state[k], i, r);
  const vf p = v_get(t->param, l.param, i, r), g = v_mul(c->grad_scale, v_get(t->grad, l.grad, i, r));
  const vf u = v_keep(packed_lamb(&c->lamb, p, g, &x[0], &x[1]), r); /* 0 / (0 + eps) of what is not there may be NaN */
  return (lamb_sums){vd_add_sq(s.p, p), vd_add_sq(s.u, u)};
}

DC_INLINE void packed_sums_loop(const dc_step_args *args, layout l, const dc__packed_coef *coef, int64_t begin,
                                int64_t end, double *param_sums, double *update_sums) {
  const dc_step_args t = *args; /* a copy that no store can alias */
  const scalars c = packed_scalars_of(&t, DC__RULE_LAMB, coef);
  lamb_sums s = {vd_zero(), vd_zero()};
  float units[2][LANES] = {{0}};
  if (l.format != DC_STATE_STOCHASTIC)
    for (int k = 0; k < 2; k++) packed_units(packed_map(l, k), units[k]);
  for (int64_t at = begin, stop; at < end; at = stop) {
    unpacking from[2] = {{.scale = v_set1(0.0f)}, {.scale = v_set1(0.0f)}};
    stop = dc__state_block_end(l.format, t.first, at, end);
    if (l.format != DC_STATE_STOCHASTIC)
      for (int k = 0; k < 2; k++)
        from[k] = packed_unpacking(packed_map(l, k), units[k],
                                   t.scale[k][dc__state_block_at(l.format, t.first, at)] * c.keep[k]);
    int64_t i = at;
    for (; i + LANES <= stop; i += LANES) {
      v_ahead(t.param, l.param, i, AHEAD);
      v_ahead(t.grad, l.grad, i, AHEAD);
      s = packed_sums_some(&t, l, &c, from, s, i, LANES);
    }
    if (i < stop) s = packed_sums_some(&t, l, &c, from, s, i, (int)(stop - i));
  }
  *param_sums = vd_tree(s.p);
  *update_sums = vd_tree(s.u);
}

#define PACKED_SUMS(name, format)                                                                             \
  static void name(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end, double *sums, \
                   double *update_sums) {                                                                     \
    const rule_of of = {DC__RULE_LAMB, 1, 0, 0};                                                              \
    const layout plain = {format, DC_F32, DC_F32, 0, 0, 0, of};                                               \
    const layout any = {format, t->param_dtype, t->grad_dtype, 0, 0, 0, of};                                  \
    if (t->param_dtype == DC_F32 && t->grad_dtype == DC_F32)                                                  \
      packed_sums_loop(t, plain, c, begin, end, sums, update_sums);                                           \
    else packed_sums_loop(t, any, c, begin, end, sums, update_sums);                                          \
  }
PACKED_SUMS(packed_sums_bf16, DC_STATE_STOCHASTIC)
PACKED_SUMS(packed_sums_8bit, DC_STATE_8BIT)
PACKED_SUMS(packed_sums_4bit, DC_STATE_4BIT)

void DC_BODY(lamb_packed_sums)(const dc_step_args *t, const dc__packed_coef *c, int64_t begin, int64_t end,
                               double *sums, double *update_sums) {
  switch (t->format) {
  case DC_STATE_STOCHASTIC: packed_sums_bf16(t, c, begin, end, sums, update_sums); return;
  case DC_STATE_8BIT: packed_sums_8bit(t, c, begin, end, sums, update_sums); return;
  default: packed_sums_4bit(t, c, begin, end, sums, update_sums); return;
  }
}
