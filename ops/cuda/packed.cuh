// packed.cuh: dc_cuda_step, dc_cuda_lamb_moments and dc_cuda_lamb_apply where states have a format (bf16 with
// stochastic rounding, codes of 8 and of 4 bits): what one CUDA thread does, compiled for the CPU by
// tests/c/test_cuda_packed.cpp, and the tables of tensors that a launch takes. packed.cu launches.
//
// The step: a chunk of DC_BLOCK numbers of one tensor per CUDA block, whose warps take a unit of PACKED_UNIT after the
// other. A lane has four elements of either half of its unit, so that every load and store of a warp is one piece of
// memory; a half is a block of 4 bits, the unit one of 8. The new states stay in registers until the warp knows their
// largest magnitude, so that everything goes through once. Chunks are those of an element's number, and so no chunk has
// two shifts of random bits (dc__keys).
//
// LAMB's first pass reads the states and leaves them: LAMB_LANES threads a block of the flat space, as in lamb.cuh.
//
// The codes are ref/packed.h's own functions: with the map a constant they become a few instructions.
#ifndef DEEPC_CUDA_PACKED_CUH
#define DEEPC_CUDA_PACKED_CUH

#include "cuda/lamb.cuh"
#include "cuda/warp.cuh"
#include "ref/packed.h"

namespace dc_gpu {

enum { PACKED_UNIT = 256, PACKED_HALF = PACKED_UNIT / 2, QUAD = 4, PACKED_TENSORS = 22 };
static_assert(PACKED_HALF == WARP * QUAD && DC_BLOCK % PACKED_UNIT == 0, "a half is a quad for each lane");

struct PackedTensor {
  void *param;
  const void *grad;
  void *state[2], *lowp; // lowp, state[1] may be NULL
  float *scale[2];
  double *param_sums, *update_sums; // of LAMB's first pass
  int64_t n, first, step;
  dc__keys keys; // of the numbers with the upper bits of `first`
  union {
    dc__adamw_coef adamw;
    dc__step_coef other;
    dc__lamb_coef lamb;
  };
  float keep[2]; // dc__packed_keep
  int8_t param_dtype, grad_dtype, lowp_dtype, nesterov;
  int32_t vectors; // every array is aligned to QUAD of its elements
};

typedef TensorTable<PackedTensor, PACKED_TENSORS> PackedTable;
static_assert(sizeof(PackedTable) <= PARAMETER_BYTES, "fewer tensors a launch");

template <int FORMAT> inline constexpr bool HAS_CODES = FORMAT != DC_STATE_STOCHASTIC;
template <int RULE> inline constexpr bool HAS_TWO = RULE == DC_RULE_ADAMW || RULE == DC__RULE_LAMB; // states

// ---- a quad: elements [i, i + r) in memory, r at most QUAD; WHOLE: all of them, aligned ----------------------------
// As it lies there, so that all loads are under way before the first is used; elements of 16 bits two a word.
struct Quad {
  alignas(16) uint32_t word[QUAD];
};

template <bool WHOLE> DC_GPU Quad quad_load(const void *p, int dtype, int64_t i, int r) {
  Quad q = {};
  const float *wide = static_cast<const float *>(p) + i;
  const uint16_t *narrow = static_cast<const uint16_t *>(p) + i;
  if constexpr (WHOLE) {
    if (dtype == DC_F32) load_bytes16(q.word, wide);
    else load_bytes8(q.word, narrow);
  } else {
    DC_UNROLL
    for (int j = 0; j < QUAD; j++) {
      if (j >= r) continue;
      if (dtype == DC_F32) q.word[j] = __float_as_uint(wide[j]);
      else q.word[j / 2] |= (uint32_t)narrow[j] << (j % 2 * 16);
    }
  }
  return q;
}

DC_GPU void quad_get(float *to, const Quad &q, int dtype) {
  DC_UNROLL
  for (int j = 0; j < QUAD; j++) {
    const uint16_t half = (uint16_t)(q.word[j / 2] >> (j % 2 * 16));
    to[j] = dtype == DC_F32 ? __uint_as_float(q.word[j]) : dtype == DC_BF16 ? up_bf16(half) : up_f16(half);
  }
}

template <class T, bool WHOLE> DC_GPU void quad_store_as(void *p, int64_t i, int r, const float *from) {
  typename T::stored *to = static_cast<typename T::stored *>(p) + i;
  Pack<typename T::stored, QUAD> out;
  down_all<T, QUAD>(out.x, from);
  if constexpr (WHOLE) {
    store<typename T::stored, QUAD>(to, out);
  } else {
    DC_UNROLL
    for (int j = 0; j < QUAD; j++)
      if (j < r) to[j] = out.x[j];
  }
}
template <bool WHOLE> DC_GPU void quad_store(void *p, int dtype, int64_t i, int r, const float *from) {
  if (dtype == DC_F32) quad_store_as<F32, WHOLE>(p, i, r, from);
  else if (dtype == DC_BF16) quad_store_as<BF16, WHOLE>(p, i, r, from);
  else quad_store_as<F16, WHOLE>(p, i, r, from);
}

// A quad of a state as it lies in memory: 8, 4 or 2 bytes.
struct Codes {
  alignas(8) uint32_t word[2];
};
template <int FORMAT>
inline constexpr int CODES_BYTES = FORMAT == DC_STATE_STOCHASTIC ? 8
                                   : FORMAT == DC_STATE_8BIT     ? 4
                                                                 : 2;
// Bytes of r elements.
template <int FORMAT> DC_GPU int codes_bytes_of(int r) {
  return FORMAT == DC_STATE_STOCHASTIC ? 2 * r : FORMAT == DC_STATE_8BIT ? r : (r + 1) / 2;
}
template <int FORMAT> DC_GPU int64_t codes_at(int64_t i) {
  return FORMAT == DC_STATE_STOCHASTIC ? 2 * i : FORMAT == DC_STATE_8BIT ? i : i / 2;
}

template <int FORMAT, bool WHOLE> DC_GPU Codes codes_load(const void *state, int64_t i, int r) {
  const uint8_t *from = static_cast<const uint8_t *>(state) + codes_at<FORMAT>(i);
  Codes c = {{0, 0}};
  if constexpr (WHOLE) {
    if constexpr (FORMAT == DC_STATE_STOCHASTIC) load_bytes8(c.word, from);
    else if constexpr (FORMAT == DC_STATE_8BIT) load_bytes4(c.word, from);
    else load_bytes2(c.word, from);
  } else {
    const int bytes = codes_bytes_of<FORMAT>(r);
    DC_UNROLL
    for (int k = 0; k < CODES_BYTES<FORMAT>; k++)
      if (k < bytes) c.word[k / 4] |= (uint32_t)from[k] << (k % 4 * 8);
  }
  return c;
}

template <int FORMAT, bool WHOLE> DC_GPU void codes_store(void *state, int64_t i, int r, const Codes &c) {
  uint8_t *to = static_cast<uint8_t *>(state) + codes_at<FORMAT>(i);
  if constexpr (WHOLE) {
    if constexpr (FORMAT == DC_STATE_STOCHASTIC) store_bytes8(to, c.word);
    else if constexpr (FORMAT == DC_STATE_8BIT) store_bytes4(to, c.word);
    else store_bytes2(to, c.word);
  } else {
    const int bytes = codes_bytes_of<FORMAT>(r);
    DC_UNROLL
    for (int k = 0; k < CODES_BYTES<FORMAT>; k++)
      if (k < bytes) to[k] = (uint8_t)(c.word[k / 4] >> (k % 4 * 8));
  }
}

// ---- states to numbers, and back -----------------------------------------------------------------------------------
// Element j of a quad. scale: the block's, multiplied with `keep`; without codes, `keep`.
template <int RULE, int FORMAT, int STATE> DC_GPU float packed_value(const Codes &c, int j, float scale) {
  if constexpr (!HAS_CODES<FORMAT>) {
    return __fmul_rn(scale, up_bf16((uint16_t)(c.word[j / 2] >> (j % 2 * 16))));
  } else {
    const dc__code_map map = dc__code_map_of(FORMAT, dc__packed_kind(RULE, STATE));
    const int stored = FORMAT == DC_STATE_8BIT ? (int)(int8_t)(c.word[0] >> (j * 8))
                                               : (int)(c.word[0] << (28 - j * 4)) >> 28; // the sign goes along
    return __fmul_rn(dc__code_value(&map, stored), scale);
  }
}

// Bits that rounding a state takes.
template <int RULE, int FORMAT, int STATE> DC_GPU int packed_bits() {
  return HAS_CODES<FORMAT> ? dc__code_map_of(FORMAT, dc__packed_kind(RULE, STATE)).shift : (int)DC__BF16_NOISE;
}

// The quad whose first element has the number `number`, rounded. inverse: dc__scaling's; without codes unused.
template <int RULE, int FORMAT, int STATE>
DC_GPU Codes packed_round(const float *x, float inverse, const dc__keys &keys, uint32_t number) {
  const int bits = packed_bits<RULE, FORMAT, STATE>();
  const uint32_t step = dc__weyl_of(STATE, bits), from = (number + keys.of[STATE]) * step, mask = (1u << bits) - 1;
  Codes c = {{0, 0}};
  DC_UNROLL
  for (int j = 0; j < QUAD; j++) {
    const uint32_t noise = (from + (uint32_t)j * step) & mask; // dc__noise
    if constexpr (!HAS_CODES<FORMAT>) {
      c.word[j / 2] |= (uint32_t)dc__bf16_stochastic(x[j], noise) << (j % 2 * 16);
    } else {
      const dc__code_map map = dc__code_map_of(FORMAT, dc__packed_kind(RULE, STATE));
      const uint32_t code = (uint32_t)dc__code_of(&map, __fmul_rn(x[j], inverse), noise | dc__least_noise(&map));
      c.word[0] |= FORMAT == DC_STATE_8BIT ? (code & 255) << (j * 8) : (code & 15) << (j * 4);
    }
  }
  return c;
}

// ---- the step of an element ----------------------------------------------------------------------------------------
// p after the step; s: states, multiplied with their decay where there are two.
template <int RULE> DC_GPU float packed_rule(const PackedTensor &t, float p, float g, float (&s)[2]) {
  if constexpr (RULE == DC_RULE_ADAMW) {
    const dc__adamw_coef &c = t.adamw;
    g = __fmul_rn(c.grad_scale, g);
    if (c.l2 != 0.0f) g = __fmaf_rn(c.l2, p, g);
    p = __fmul_rn(p, c.decay);
    s[0] = __fmaf_rn(c.one_minus_b1, g, s[0]);
    s[1] = __fmaf_rn(c.one_minus_b2, __fmul_rn(g, g), s[1]);
    const float denominator = __fmaf_rn(__fsqrt_rn(s[1]), c.inv_sqrt_bc2, c.eps);
    return __fmaf_rn(c.step_size_neg, __fdiv_rn(s[0], denominator), p);
  } else {
    return step_rule(RULE, true, t.nesterov, t.other, p, __fmul_rn(t.other.grad_scale, g), s[0]);
  }
}

// LAMB's step before lr and ratio.
DC_GPU float packed_lamb(const dc__lamb_coef &c, float p, float g, float (&s)[2]) {
  g = __fmul_rn(c.grad_scale, g);
  s[0] = __fmaf_rn(c.one_minus_b1, g, s[0]);
  s[1] = __fmaf_rn(c.one_minus_b2, __fmul_rn(g, g), s[1]);
  return lamb_update(c, p, s[0], s[1]);
}
template <> DC_GPU float packed_rule<DC__RULE_LAMB>(const PackedTensor &t, float p, float g, float (&s)[2]) {
  const float u = packed_lamb(t.lamb, p, g, s);
  return __fmaf_rn(t.lamb.rate, u, p);
}

// ---- a unit --------------------------------------------------------------------------------------------------------
// The scale of a half of the unit that begins at element `at`, of 8 bits the unit's; whether a half is the tensor's.
template <int FORMAT> DC_GPU int64_t packed_scale_at(const PackedTensor &t, int64_t at, int half) {
  return dc__state_block_at(FORMAT, t.first, FORMAT == DC_STATE_4BIT ? at + half * PACKED_HALF : at);
}
template <bool WHOLE> DC_GPU bool packed_has_half(const PackedTensor &t, int64_t at, int half) {
  return WHOLE || (at + half * PACKED_HALF < t.n && at + (half + 1) * PACKED_HALF > 0);
}

// Rounds state STATE of the unit at element `at`, and writes it; for all lanes of a warp. x: the lane's two quads.
template <int RULE, int FORMAT, int STATE, bool WHOLE>
DC_GPU void packed_close(const PackedTensor &t, const dc__keys &keys, int64_t at, int lane, const int (&r)[2],
                         float (&x)[2][QUAD]) {
  float inverse[2] = {1.0f, 1.0f};
  if constexpr (HAS_CODES<FORMAT>) {
    uint32_t top[2] = {0, 0};
    DC_UNROLL
    for (int h = 0; h < 2; h++) DC_UNROLL
    for (int j = 0; j < QUAD; j++) {
      const uint32_t size = __float_as_uint(x[h][j]) & 0x7fffffffu;
      top[h] = size > top[h] ? size : top[h];
    }
    if constexpr (FORMAT == DC_STATE_8BIT) top[0] = top[1] = most_of_warp(top[0] > top[1] ? top[0] : top[1]);
    else top[0] = most_of_warp(top[0]), top[1] = most_of_warp(top[1]);
    DC_UNROLL
    for (int h = 0; h < 2; h++) {
      const dc__scaling of = dc__scaling_of(top[h]);
      inverse[h] = of.inverse;
      if (of.inverse == 0.0f) { // codes of zero: what is next to nothing, or not finite
        DC_UNROLL
        for (int j = 0; j < QUAD; j++) x[h][j] = 0.0f;
      }
      if ((FORMAT == DC_STATE_4BIT || h == 0) && lane == 0 &&
          (FORMAT == DC_STATE_8BIT || packed_has_half<WHOLE>(t, at, h)))
        t.scale[STATE][packed_scale_at<FORMAT>(t, at, h)] = of.scale;
    }
  }
  DC_UNROLL
  for (int h = 0; h < 2; h++) {
    const int64_t i = at + h * PACKED_HALF + lane * QUAD;
    const Codes c = packed_round<RULE, FORMAT, STATE>(x[h], inverse[h], keys, (uint32_t)(t.first + i));
    codes_store<FORMAT, WHOLE>(t.state[STATE], i, r[h], c);
  }
}

// The unit of the numbers [first + at, first + at + PACKED_UNIT), as far as it is the tensor's; for all lanes of a
// warp. WHOLE: all of it is, and every array is aligned.
template <int RULE, int FORMAT, bool WHOLE>
DC_GPU void packed_unit(const PackedTensor &t, const dc__keys &keys, int64_t at, int lane) {
  constexpr bool two = HAS_TWO<RULE>;
  Quad raw_p[2], raw_g[2];
  Codes codes[2][2];
  float scale[2][2], x[2][2][QUAD]; // of state, half
  int r[2];
  DC_UNROLL
  for (int h = 0; h < 2; h++) {
    const int64_t i = at + h * PACKED_HALF + lane * QUAD;
    r[h] = QUAD;
    if (!WHOLE) r[h] = i < 0 || i >= t.n ? 0 : t.n - i < QUAD ? (int)(t.n - i) : (int)QUAD;
    raw_p[h] = quad_load<WHOLE>(t.param, t.param_dtype, i, r[h]);
    raw_g[h] = quad_load<WHOLE>(t.grad, t.grad_dtype, i, r[h]);
    codes[0][h] = codes_load<FORMAT, WHOLE>(t.state[0], i, r[h]);
    if (two) codes[1][h] = codes_load<FORMAT, WHOLE>(t.state[1], i, r[h]);
    DC_UNROLL
    for (int s = 0; s < 2; s++) {
      scale[s][h] = t.keep[s];
      if (HAS_CODES<FORMAT> && (s == 0 || two) && packed_has_half<WHOLE>(t, at, h))
        scale[s][h] = __fmul_rn(t.keep[s], t.scale[s][packed_scale_at<FORMAT>(t, at, h)]);
    }
  }
  DC_UNROLL
  for (int h = 0; h < 2; h++) {
    float p[QUAD], g[QUAD];
    quad_get(p, raw_p[h], t.param_dtype);
    quad_get(g, raw_g[h], t.grad_dtype);
    DC_UNROLL
    for (int j = 0; j < QUAD; j++) {
      float s[2] = {packed_value<RULE, FORMAT, 0>(codes[0][h], j, scale[0][h]), 0.0f};
      if (two) s[1] = packed_value<RULE, FORMAT, 1>(codes[1][h], j, scale[1][h]);
      p[j] = packed_rule<RULE>(t, p[j], g[j], s);
      const bool there = WHOLE || j < r[h]; // nobody else's magnitude counts
      x[0][h][j] = there ? s[0] : 0.0f, x[1][h][j] = there ? s[1] : 0.0f;
    }
    const int64_t i = at + h * PACKED_HALF + lane * QUAD;
    quad_store<WHOLE>(t.param, t.param_dtype, i, r[h], p);
    if (t.lowp) quad_store<WHOLE>(t.lowp, t.lowp_dtype, i, r[h], p);
  }
  packed_close<RULE, FORMAT, 0, WHOLE>(t, keys, at, lane, r, x[0]);
  if constexpr (two) packed_close<RULE, FORMAT, 1, WHOLE>(t, keys, at, lane, r, x[1]);
}

// The warp's units of a chunk at element `edge`: those that are whole, or the others. Two passes, so that the one in
// which the time goes has the registers for itself.
template <int RULE, int FORMAT, bool WHOLE>
DC_GPU void packed_units(const PackedTensor &t, const dc__keys &keys, int64_t edge, int thread, int threads) {
  for (int unit = thread / WARP * PACKED_UNIT; unit < DC_BLOCK; unit += threads / WARP * PACKED_UNIT) {
    const int64_t at = edge + unit;
    const bool whole = t.vectors && at >= 0 && at + PACKED_UNIT <= t.n;
    if (at < t.n && at + PACKED_UNIT > 0 && whole == WHOLE)
      packed_unit<RULE, FORMAT, WHOLE>(t, keys, at, thread % WARP);
  }
}

// Block `block` of the grid, with `threads` threads.
template <int RULE, int FORMAT> DC_GPU void packed_step(const PackedTable &table, int32_t block, int threads) {
  const int which = adamw_find(table, block), thread = block_thread();
  const PackedTensor &t = table.tensor[which];
  const int64_t chunk = t.first / DC_BLOCK + (block - table.first[which]), edge = chunk * DC_BLOCK - t.first;
  const dc__keys keys = (chunk * DC_BLOCK) >> 32 == t.first >> 32 ? t.keys : dc__keys_of(t.step, chunk * DC_BLOCK);
  packed_units<RULE, FORMAT, true>(t, keys, edge, thread, threads);
  packed_units<RULE, FORMAT, false>(t, keys, edge, thread, threads);
}

// ---- LAMB's first pass ---------------------------------------------------------------------------------------------
// The lane's accumulators of the tensor's part of `block`. A batch of LAMB_BATCH elements a lane is within one block of
// codes.
template <int FORMAT> DC_GPU LambSums packed_sums(const PackedTensor &t, int64_t block, int lane) {
  static_assert(64 % (LAMB_BATCH * LAMB_LANES) == 0, "`first` is a multiple of 64");
  const int64_t edge = (t.first / DC_BLOCK + block) * DC_BLOCK - t.first;
  const int64_t begin = edge > 0 ? edge : 0, end = edge + DC_BLOCK < t.n ? edge + DC_BLOCK : t.n;
  LambSums sums = {0.0, 0.0};
  for (int64_t at = begin; at < end; at += LAMB_BATCH * LAMB_LANES) {
    Raw<1> raw_p[LAMB_BATCH], raw_g[LAMB_BATCH];
    Codes codes[2][LAMB_BATCH];
    float scale[2];
    DC_UNROLL
    for (int s = 0; s < 2; s++) {
      scale[s] = t.keep[s];
      if (HAS_CODES<FORMAT>) scale[s] = __fmul_rn(scale[s], t.scale[s][dc__state_block_at(FORMAT, t.first, at)]);
    }
    DC_UNROLL
    for (int b = 0; b < LAMB_BATCH; b++) {
      const int64_t i = at + lane + b * LAMB_LANES;
      if (i >= end) break;
      raw_p[b] = load_raw<1>(t.param, t.param_dtype, i), raw_g[b] = load_raw<1>(t.grad, t.grad_dtype, i);
      DC_UNROLL
      for (int s = 0; s < 2; s++) {
        const uint8_t *from = static_cast<const uint8_t *>(t.state[s]) + codes_at<FORMAT>(i);
        codes[s][b].word[0] = HAS_CODES<FORMAT> ? (uint32_t)*from : *reinterpret_cast<const uint16_t *>(from);
        if (FORMAT == DC_STATE_4BIT) codes[s][b].word[0] >>= lane % 2 * 4; // `at` is even
      }
    }
    DC_UNROLL
    for (int b = 0; b < LAMB_BATCH; b++) {
      if (at + lane + b * LAMB_LANES >= end) break;
      float p, g,
          s[2] = {packed_value<DC__RULE_LAMB, FORMAT, 0>(codes[0][b], 0, scale[0]),
                  packed_value<DC__RULE_LAMB, FORMAT, 1>(codes[1][b], 0, scale[1])};
      unpack<1>(&p, raw_p[b], t.param_dtype);
      unpack<1>(&g, raw_g[b], t.grad_dtype);
      sums.update = add_square(sums.update, packed_lamb(t.lamb, p, g, s));
      sums.param = add_square(sums.param, p);
    }
  }
  return sums;
}

// ---- the host's part: rows of the tables ---------------------------------------------------------------------------
inline bool codes_aligned(const void *state, int format) {
  return (uintptr_t)state % (format == DC_STATE_STOCHASTIC ? 8 : format == DC_STATE_8BIT ? 4 : 2) == 0;
}

// What rows of both kinds of arguments share.
template <class Args> PackedTensor packed_row_of(const Args &t, int rule) {
  PackedTensor row;
  memset(&row, 0, sizeof row);
  row.param = t.param, row.grad = t.grad, row.lowp = t.lowp;
  row.n = t.n, row.first = t.first, row.step = t.step;
  row.keys = dc__keys_of(t.step, t.first);
  row.param_dtype = (int8_t)t.param_dtype, row.grad_dtype = (int8_t)t.grad_dtype;
  row.lowp_dtype = (int8_t)(t.lowp ? t.lowp_dtype : DC_F32);
  row.vectors = wide_aligned(t.param, t.param_dtype) && wide_aligned(t.grad, t.grad_dtype) &&
                wide_aligned(t.lowp, row.lowp_dtype);
  const int states = dc__packed_states(rule);
  for (int s = 0; s < states; s++) {
    row.state[s] = t.state[s], row.scale[s] = t.scale[s];
    row.keep[s] = dc__packed_keep(rule, t.beta1, t.beta2, s);
    row.vectors = row.vectors && codes_aligned(t.state[s], t.format);
  }
  return row;
}
inline PackedTensor packed_row(const dc_step_args &t, int) {
  PackedTensor row = packed_row_of(t, t.rule);
  row.nesterov = (t.flags & DC_STEP_NESTEROV) != 0;
  if (t.rule == DC_RULE_ADAMW) {
    const dc_adamw_args a = adamw_args_of(t);
    row.adamw = dc__adamw_coef_of(&a);
  } else {
    row.other = dc__step_coef_of(&t);
  }
  return row;
}
inline PackedTensor packed_row(const dc_lamb_args &t, int apply) {
  PackedTensor row = packed_row_of(t, DC__RULE_LAMB);
  row.param_sums = t.param_sums, row.update_sums = t.update_sums;
  row.lamb = dc__lamb_coef_of(&t, apply);
  return row;
}
inline int packed_rule_of(const dc_step_args &t) { return t.rule; }
inline int packed_rule_of(const dc_lamb_args &) { return DC__RULE_LAMB; }

// Adds the tensors of this rule and format from `from` on until the table or the grid is full; returns the index of the
// first that did not fit. apply: of LAMB.
template <class Args>
int64_t fill_packed(PackedTable *table, const Args *tensors, int64_t from, int64_t count, int rule, int format,
                    int apply) {
  const auto blocks = [=](const Args &t) {
    return t.n == 0 || t.format != format || packed_rule_of(t) != rule ? 0 : dc_lamb_blocks(t.first, t.n);
  };
  return fill_rows(table, tensors, from, count, blocks, [=](const Args &t) { return packed_row(t, apply); });
}

// Calls f(Width<FORMAT>) with a format but DC_STATE_NEAREST, which was checked.
template <class F> auto with_format(int format, F f) {
  switch (format) {
  case DC_STATE_STOCHASTIC: return f(Width<DC_STATE_STOCHASTIC>());
  case DC_STATE_8BIT: return f(Width<DC_STATE_8BIT>());
  default: return f(Width<DC_STATE_4BIT>());
  }
}
// The same of a rule.
template <class F> auto with_rule(int rule, F f) {
  switch (rule) {
  case DC_RULE_ADAMW: return f(Width<DC_RULE_ADAMW>());
  case DC_RULE_LION: return f(Width<DC_RULE_LION>());
  case DC_RULE_ADAGRAD: return f(Width<DC_RULE_ADAGRAD>());
  case DC_RULE_SGD: return f(Width<DC_RULE_SGD>());
  default: return f(Width<DC__RULE_LAMB>());
  }
}

} // namespace dc_gpu
#endif
