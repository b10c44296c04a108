/* packed.h: states as codes of 8 and 4 bits, and stochastic rounding (dc_state_format), element by element in portable
 * C. The meaning of every code is here; the vector bodies repeat it, CUDA kernels call it (DC__ANYWHERE). */
#ifndef DEEPC_OPS_PACKED_H
#define DEEPC_OPS_PACKED_H

#include "ref/scalar.h"

/* ---- blocks ------------------------------------------------------------------------------------------------------ */
enum { DC__BLOCK_MOST = 256 };
/* Elements that share a scale; DC_STATE_STOCHASTIC has none, and is walked in as many. */
DC__ANYWHERE int64_t dc__state_block(int format) { return format == DC_STATE_4BIT ? 128 : DC__BLOCK_MOST; }
/* The block of element i, counted from that of element 0. */
DC__ANYWHERE int64_t dc__state_block_at(int format, int64_t first, int64_t i) {
  const int64_t block = dc__state_block(format);
  return (first + i) / block - first / block;
}
static inline int64_t dc__state_blocks(int format, int64_t first, int64_t n) {
  return dc__state_block_at(format, first, n - 1) + 1;
}
/* Where the block of element i ends in a tensor of n. */
static inline int64_t dc__state_block_end(int format, int64_t first, int64_t i, int64_t n) {
  const int64_t block = dc__state_block(format), end = ((first + i) / block + 1) * block - first;
  return end < n ? end : n;
}

/* How many states a rule has of those that have a format, and what their codes are spread over. */
DC__ANYWHERE int dc__packed_states(int rule) { return rule == DC_RULE_ADAMW || rule == DC__RULE_LAMB ? 2 : 1; }
DC__ANYWHERE int dc__packed_kind(int rule, int state) {
  return rule == DC_RULE_ADAGRAD || state == 1 ? DC_STATE_SQUARES
         : rule == DC_RULE_SGD                 ? DC_STATE_LINEAR
                                               : DC_STATE_SIGNED;
}

/* What state is multiplied with as it is unpacked: the decay of a moment. Of codes it is the scale that is. */
static inline float dc__packed_keep(int rule, double beta1, double beta2, int state) {
  return dc__packed_states(rule) == 1 ? 1.0f : (float)(state ? beta2 : beta1);
}

/* ---- randomness -------------------------------------------------------------------------------------------------- */
/* For each state of an element as many bits as rounding takes: its number, shifted by a random one of the step, times
 * an odd constant, without what is above them. So each element meets all values equally often in its steps, and
 * neighbours in a step meet different ones (a Weyl sequence); from one vector to the next it takes an addition. */
typedef struct dc__keys {
  uint32_t of[2];
} dc__keys;

/* The shifts of a step, for the elements whose number has these upper 32 bits (splitmix64's finaliser: Steele et al.,
 * OOPSLA 2014). */
DC__ANYWHERE dc__keys dc__keys_of(int64_t step, int64_t number) {
  uint64_t x = (uint64_t)step * 0x9e3779b97f4a7c15u + ((uint64_t)number >> 32) * 0xd1b54a32d192ed03u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  const dc__keys keys = {{(uint32_t)x, (uint32_t)(x >> 32)}};
  return keys;
}

DC__ANYWHERE uint32_t dc__weyl_of(int state, int bits) {
  return (state ? 0x85ebca77u : 0x9e3779b1u) >> (32 - bits) | 1u;
}

static inline uint32_t dc__noise(dc__keys k, int state, int bits, uint32_t number) {
  return ((number + k.of[state]) * dc__weyl_of(state, bits)) & ((1u << bits) - 1);
}

enum { DC__BF16_NOISE = 16 }; /* bits that are cut off */
/* round_to(bf16, f), up with the probability of what is cut off. */
DC__ANYWHERE uint16_t dc__bf16_stochastic(float f, uint32_t noise) {
  return (uint16_t)((dc__bits_of_f32(dc__canonical_f32(f)) + noise) >> 16); /* inf, NaN: nothing is cut off */
}

/* ---- codes ------------------------------------------------------------------------------------------------------- */
/* Code c stands for the fp32 number with the bits base + (c << shift), times the scale; the largest, `top`, for 1. Of a
 * signed state that is the magnitude, and 0 is zero; between it and `least`, the number of code 1, codes are linear. Of
 * a linear one all are: code c stands for c * least, least is 1 / top. */
typedef struct dc__code_map {
  int bits, squares, linear, top, shift,
      offset; /* offset: of what is stored, so that it is a signed number of `bits` */
  uint32_t base;
  float least, per_least; /* per_least: 2^shift / least */
} dc__code_map;

/* kind: dc_state_kind. */
DC__ANYWHERE dc__code_map dc__code_map_of(int format, int kind) {
  const int squares = kind == DC_STATE_SQUARES;
  dc__code_map m;
  m.bits = format == DC_STATE_8BIT ? 8 : 4;
  m.squares = squares;
  m.linear = kind == DC_STATE_LINEAR && m.bits == 8;
  m.shift = m.bits == 8 ? 20 : 22;
  m.top = squares ? (1 << m.bits) - 1 : (1 << (m.bits - 1)) - 1;
  m.offset = squares ? 1 << (m.bits - 1) : 0;
  m.base = 0x3f800000u - ((uint32_t)m.top << m.shift);
  m.least = dc__f32_of_bits(m.base + (1u << m.shift));
  m.per_least = (float)(1 << m.shift) / m.least;
  if (m.linear) m.least = 1.0f / 127.0f, m.per_least = (float)(127 << m.shift); /* 127 * least is 1 */
  return m;
}

static inline dc__code_map dc__state_map(const dc_step_args *t, int state) {
  return dc__code_map_of(t->format, dc__packed_kind(t->rule, state));
}

DC__ANYWHERE float dc__code_value(const dc__code_map *m, int stored) {
  const int code = stored + m->offset, size = code < 0 ? -code : code;
  if (m->linear) return (float)code * m->least;
  if (!m->squares && size == 0) return 0.0f;
  const float f = dc__f32_of_bits(m->base + ((uint32_t)size << m->shift));
  return code < 0 ? -f : f;
}

/* What is stored for y, |y| <= 1, of squares the least for y < 0; noise: in [0, 2^shift). */
DC__ANYWHERE int dc__code_of(const dc__code_map *m, float y, uint32_t noise) {
  const uint32_t size = m->squares && y < 0 ? 0 : dc__bits_of_f32(y) & 0x7fffffffu;
  const float f = dc__f32_of_bits(size);
  const uint32_t u = m->squares                  ? (size > m->base ? size : m->base) - m->base
                     : m->linear || f < m->least ? (uint32_t)(int32_t)(f * m->per_least)
                                                 : size - m->base;
  const int code = (int)((u + noise) >> m->shift);
  return (y < 0 && !m->squares ? -code : code) - m->offset;
}

static inline float dc__code_get(const dc__code_map *m, const void *codes, int64_t i) {
  const uint8_t *at = (const uint8_t *)codes;
  if (m->bits == 8) return dc__code_value(m, (int8_t)at[i]);
  const int half = (at[i / 2] >> (i % 2 * 4)) & 15;
  return dc__code_value(m, half - (half & 8) * 2);
}

/* What a block's numbers are divided by. A number becomes y = x * inverse, the largest 1 or the number before it (or up
 * to the seventh, where inverse is denormal), which noise of at least dc__least_noise takes to the largest code;
 * inverse 0: of a block of next to nothing (as in dc_quantize) or with a NaN or an infinity all become zero. */
typedef struct dc__scaling {
  float scale, inverse;
} dc__scaling;

/* top: the bits of the largest magnitude. From 2^126 on its inverse is a denormal number, and times one that was
 * rounded up it is more than 1: noise would make that a code too many, which has the other sign, or of squares is the
 * least. */
DC__ANYWHERE dc__scaling dc__scaling_of(uint32_t top) {
  const float largest = dc__f32_of_bits(top), inverse = 1.0f / largest;
  const int bad = top >= DC__INF_F32, none = bad || largest < DC__TINY_F32;
  const float below = largest * inverse > 1.0f ? dc__f32_of_bits(dc__bits_of_f32(inverse) - 1) : inverse;
  const dc__scaling of = {bad ? dc__f32_of_bits(DC__NAN_F32) : none ? 0.0f : largest, none ? 0.0f : below};
  return of;
}

/* Set in all noise: what the number before 1 lacks to the largest code. Linear codes multiply it in fp32, where numbers
 * below 127 << 20 are 8 apart. */
DC__ANYWHERE uint32_t dc__least_noise(const dc__code_map *m) { return m->linear ? 8u : 1u; }

/* The scale and codes of one block, elements [begin, end) of which x[0] is the first; noise: of map->shift bits for
 * each, or NULL to round to nearest. */
static inline void dc__codes_put(const dc__code_map *m, void *codes, float *scale, const float *x, int64_t begin,
                                 int64_t end, const uint32_t *noise) {
  uint8_t *at = (uint8_t *)codes;
  uint32_t top = 0;
  for (int64_t i = begin; i < end; i++) {
    const uint32_t size = dc__bits_of_f32(x[i - begin]) & 0x7fffffffu;
    if (size > top) top = size;
  }
  const dc__scaling of = dc__scaling_of(top);
  *scale = of.scale;
  for (int64_t i = begin; i < end; i++) {
    const uint32_t added = noise ? noise[i - begin] | dc__least_noise(m) : 1u << (m->shift - 1);
    const int code = of.inverse != 0.0f ? dc__code_of(m, x[i - begin] * of.inverse, added) : -m->offset;
    if (m->bits == 8) at[i] = (uint8_t)(code & 255);
    else if (i % 2) at[i / 2] = (uint8_t)((at[i / 2] & 15) | (code & 15) << 4);
    else at[i / 2] = (uint8_t)((code & 15) | (-m->offset & 15) << 4); /* the half without an element holds code 0 */
  }
}

#endif
