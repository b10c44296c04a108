/* attention.h: what the bodies of dc_attention (attention.c) and its gradient (attention_grad.c) share: operands,
 * masks, biases, dropout.
 *
 * Scores are made transposed, keys down and queries across: maximum and sum over the keys are then vertical, 16 queries
 * a vector, and the probabilities are at once the right operand of the next product (out^T = v^T p^T). The gradient's
 * blocks also need them row by row; a store of the same vectors gives that. */
#ifndef DEEPC_OPS_CPU_ATTENTION_H
#define DEEPC_OPS_CPU_ATTENTION_H

#include "cpu/exp.h"
#include "cpu/philox.h"
#include "cpu/tile.h"
#include "ref/attention.h"

/* ---- operands ---------------------------------------------------------------------------------------------------- */
DC_INLINE tile_rows att_head(const void *p, int dt, const int64_t *stride, int64_t b, int64_t h, int64_t count,
                             int64_t dim) {
  const int64_t size = dt == DC_F32 ? 4 : 2;
  return (tile_rows){(const char *)p + size * (b * stride[0] + h * stride[1]), size * stride[2], count, dim,
                     tile_round(dim, TILE_WIDTH)};
}

/* Inner dimension down the rows, in panels of nr columns: [panels of width][n][nr]. A right operand, and by nr = the
 * rows of a product a left one. */
#if !TILE_PAIRS
DC_INLINE void att_floats_down_of(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n, int nr) {
  float words[TILE_DIM];
  for (int64_t i = 0; i < n; i++) {
    const float *row = words;
    if (tile_plain(x, dt, begin + i, 1)) row = (const float *)(const void *)(x->at + (begin + i) * x->stride);
    else tile_floats(words, x, dt, begin + i);
    for (int64_t c = 0; c < x->width; c += nr) memcpy(to + (c / nr * n + i) * nr, row + c, (size_t)nr * sizeof *to);
  }
}
static __attribute__((noinline)) void att_floats_down(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n,
                                                      int nr) {
  if (nr == MR) TILE_FOR(dt, DT, att_floats_down_of(to, x, DT, begin, n, MR)) /* constants: copies of few elements */
  else if (nr == LANES) TILE_FOR(dt, DT, att_floats_down_of(to, x, DT, begin, n, LANES))
  else TILE_FOR(dt, DT, att_floats_down_of(to, x, DT, begin, n, NR))
}
#else
/* How far apart in a run of 32 rows those are that make a pair: 16 is what two vectors of 16 queries give by shifts. */
DC_INLINE int64_t att_apart(int64_t n) { return n < 2 * LANES ? 1 : LANES; }

/* A right operand of pairs: [panels of width][n / 2][NR]; n: 16, or a multiple of 32. */
DC_INLINE void att_pairs_down_of(float *to, const tile_rows *x, int64_t begin, int64_t n, int plain) {
  const int64_t apart = att_apart(n);
  for (int64_t i = 0; i < n / 2; i++) {
    const int64_t row = begin + (apart == 1 ? 2 * i : i / LANES * 2 * LANES + i % LANES);
    for (int64_t c = 0; c < x->width; c += LANES)
      v_store32(to + (c / NR * (n / 2) + i) * NR + c % NR, LANES, tile_pair_words(x, row, row + apart, c, plain));
  }
}
static __attribute__((noinline)) void att_pairs_down(float *to, const tile_rows *x, int64_t begin, int64_t n) {
  if (tile_plain(x, DC_BF16, begin, n)) att_pairs_down_of(to, x, begin, n, 1);
  else att_pairs_down_of(to, x, begin, n, 0);
}

/* A left operand of pairs, its rows being columns of x: a run of `run` rows from i on as [width][run / 2], neighbours
 * in pairs. */
DC_INLINE void att_pairs_turn_run(float *to, const tile_rows *x, int64_t i, int64_t run, int plain) {
  const int64_t words = run / 2, most = words < LANES ? words : LANES;
  for (int64_t w = 0; w < words; w += LANES)
    for (int64_t c = 0; c < x->width; c += LANES) {
      vf t[LANES];
      for (int64_t k = 0; k < LANES; k++)
        t[k] = k < most ? tile_pair_words(x, i + 2 * (w + k), i + 2 * (w + k) + 1, c, plain) : v_set1(0.0f);
      v_turn(t);
      for (int64_t k = 0; k < LANES; k++) v_store32(to + (c + k) * words + w, (int)most, t[k]);
    }
}
/* n rows from `begin` on, run by run. */
static __attribute__((noinline)) void att_pairs_turned(float *to, const tile_rows *x, int64_t begin, int64_t n,
                                                       int64_t run) {
  for (int64_t i = begin; i < begin + n; i += run, to += x->width * run / 2) {
    if (tile_plain(x, DC_BF16, i, run)) att_pairs_turn_run(to, x, i, run, 1);
    else att_pairs_turn_run(to, x, i, run, 0);
  }
}
#endif

/* A right operand, its inner dimension down the rows from `begin` on: [panels of width][words of n][NR]. */
DC_INLINE void att_pack_down(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n) {
#if TILE_PAIRS
  (void)dt;
  att_pairs_down(to, x, begin, n);
#else
  att_floats_down(to, x, dt, begin, n, NR);
#endif
}

/* Columns of panels [width][nr], 16 of them, become rows of width. */
DC_INLINE void att_rows_of(float *row, const float *panels, int64_t i, int64_t width, int nr) {
  tile_turn(row, width, panels + i / nr * width * nr + i % nr, nr, width, LANES);
}

/* The tiles that a call uses are the thread's. */
DC_INLINE void att_begin(void) {
#if defined(DC_TILES)
  v_tiles_begin();
#endif
}
DC_INLINE void att_end(void) {
#if defined(DC_TILES)
  v_tiles_end();
#endif
}

/* ---- masks ------------------------------------------------------------------------------------------------------- */
/* Of 16 queries from i on: instead of `hidden`, x where they see key j. */
DC_INLINE vf att_seen(vf x, vf hidden, int64_t i, int64_t j, int64_t diagonal) {
  const vf last = v_add(vi_float(vi_lanes()), v_set1((float)(i + diagonal)));
  return v_if_below(last, v_set1((float)j), hidden, x);
}

/* Groups as floats, which have room for them. */
DC_INLINE vf att_group_lanes(const att_sight *s, int64_t i) {
  float lane[LANES] = {0};
  for (int64_t k = 0; k < LANES && i + k < s->rows; k++) lane[k] = (float)s->q_group[i + k];
  return v_load32(lane, LANES);
}

/* x of 16 queries from i on and key j, of a pair of runs of which some is hidden. */
DC_INLINE vf att_mask_some(vf x, vf hidden, const att_sight *s, vf group, int64_t i, int64_t j) {
  if (j >= s->keys) return hidden;
  if (s->causal) x = att_seen(x, hidden, i, j, s->diagonal);
  if (s->window) { /* queries from j + window - diagonal on do not see it any more */
    const vf query = v_add(vi_float(vi_lanes()), v_set1((float)(i + s->diagonal - s->window)));
    x = v_if_below(query, v_set1((float)j), x, hidden);
  }
  if (s->q_group) {
    const vf own = v_set1((float)s->k_group[j]);
    x = v_if_below(group, own, hidden, v_if_below(own, group, hidden, x));
  }
  return x;
}

/* Scores of 16 queries and key j with their bias. */
DC_INLINE vf att_add_bias(vf x, const att_sight *s, int64_t i, int64_t j) {
  const vf from = v_add(vi_float(vi_lanes()), v_set1((float)(i + s->diagonal)));
  return v_fma(v_set1(s->slope), v_sub(v_set1((float)j), from), x);
}

/* ---- biases ------------------------------------------------------------------------------------------------------ */
/* r elements of a row of the bias from j on, zeros behind them. */
DC_INLINE vf att_bias_row(const att_sight *s, int64_t i, int64_t j, int r) {
  const char *row = s->bias + i * s->bias_row;
  switch (s->bias_dtype) {
  case DC_U8: {
    const vf x = v_abs(vi_float(vi_widen8(v_load8((const uint8_t *)row + j, r))));
    return v_if_below(x, v_set1(0.5f), v_set1(-HUGE_VALF), v_set1(0.0f));
  }
  case DC_F32: return v_get(row, DC_F32, j, r);
  case DC_BF16: return v_get(row, DC_BF16, j, r);
  default: return v_get(row, DC_F16, j, r);
  }
}

/* Scores of 16 queries from i on (16 columns of a panel of nr) and n keys from j on get their bias. */
static __attribute__((noinline)) void att_add_rows(float *at, const att_sight *s, int64_t i, int64_t j, int64_t n,
                                                   int nr) {
  const vf unit = v_set1(s->unit);
  for (int64_t k = 0; k < n && j + k < s->keys; k += LANES, at += LANES * nr) {
    const int64_t left = s->keys - j - k;
    vf x[LANES];
    for (int64_t r = 0; r < LANES; r++)
      x[r] = i + r < s->rows ? att_bias_row(s, i + r, j + k, left < LANES ? (int)left : LANES) : v_set1(0.0f);
    v_turn(x);
    for (int64_t t = 0; t < LANES; t++) {
      vf score = v_fma(x[t], unit, v_load32(at + t * nr, LANES));
      if (s->bias_dtype == DC_U8) score = v_if_below(x[t], v_set1(0.0f), x[t], score); /* whatever it was: hidden */
      v_store32(at + t * nr, LANES, score);
    }
  }
}

/* ---- dropout ----------------------------------------------------------------------------------------------------- */
/* keep[t]: bit k: query i + k keeps key j + t. n keys, a multiple of 8 as j is. */
static __attribute__((noinline)) void att_keep(uint16_t *keep, const att_sight *s, int64_t i, int64_t j, int64_t n) {
  const vi least = vi_set1(s->threshold);
  for (int64_t t = 0; t < n; t += 8) {
    vi c[4] = {vi_set1((int)((j + t) / 8)), vi_add(vi_set1((int)i), vi_lanes()), vi_set1((int)s->who[0]),
               vi_set1((int)s->who[1])};
    v_philox(c, s->key[0], s->key[1]);
    for (int w = 0; w < 4; w++) {
      keep[t + 2 * w] = (uint16_t)vi_ge(vi_and_or(c[w], 0xffff, 0), least);
      keep[t + 2 * w + 1] = (uint16_t)vi_ge(vi_right(c[w], 16), least);
    }
  }
}

#endif
