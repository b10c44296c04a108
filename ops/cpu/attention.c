/* attention.c: bodies of dc_attention and its gradient, products of small matrices (tile.h).
 *
 * Scores are made transposed, keys down and queries across: maximum and sum over the keys are then vertical, 16 queries
 * a vector, and the probabilities are at once the right operand of the next product (out^T = v^T p^T). The gradient's
 * blocks also need them row by row; a store of the same vectors gives that. */
#include "ref/attention.h"
#include "cpu/exp.h"
#include "cpu/tile.h"

enum { PANELS = ATT_QUERIES / NR };
#define ATT_LOWEST (-3e38f) /* a finite maximum for queries that see no key */

/* ---- operands ---------------------------------------------------------------------------------------------------- */
DC_INLINE tile_rows att_head(const void *p, int dt, const int64_t *stride, int64_t b, int64_t h, int64_t count,
                             int64_t dim) {
  const int64_t size = dt == DC_F32 ? 4 : 2;
  return (tile_rows){(const char *)p + size * (b * stride[0] + h * stride[1]), size * stride[2], count, dim,
                     tile_round(dim, TILE_WIDTH)};
}

/* Left operand, inner dimension down the rows: [width][words of n]. */
DC_INLINE void att_pack_columns(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  float words[TILE_DIM];
  const int64_t lda = tile_words(n, pairs);
  for (int64_t i = 0; i < lda; i++) {
    tile_down(words, x, dt, begin, i, pairs);
    for (int64_t c = 0; c < x->width; c++) to[c * lda + i] = words[c];
  }
}

/* Right operand, inner dimension down the rows: [panels of width][words of n][NR]. */
DC_INLINE void att_pack_down(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  float words[TILE_DIM];
  const int64_t k = tile_words(n, pairs);
  for (int64_t i = 0; i < k; i++) {
    tile_down(words, x, dt, begin, i, pairs);
    for (int64_t c = 0; c < x->width; c += NR) memcpy(to + (c / NR * k + i) * NR, words + c, NR * sizeof *to);
  }
}

/* The same by tiles of n rows: [tiles][width][words of n]. */
DC_INLINE void att_pack_tiles(float *to, const tile_rows *x, int dt, int64_t end, int64_t n, int pairs) {
  for (int64_t c = 0; c < end; c += n) att_pack_columns(to + c * tile_words(x->width, pairs), x, dt, c, n, pairs);
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

/* ---- forward ----------------------------------------------------------------------------------------------------- */
typedef struct att_scratch {
  float *k, *v; /* [keys][words], [chunks][width][words] */
  float *q, *p; /* right operands: [PANELS][words][NR], [PANELS][words of a chunk][NR] */
  float *score, *out; /* [PANELS][ATT_CHUNK][NR], [PANELS][width][NR] */
  float *max, *sum; /* [ATT_QUERIES] */
  float *chosen; /* of v: [width][words of a chunk] */
} att_scratch;

DC_INLINE att_scratch att_lay_out(float *at, int64_t keys, int64_t width) {
  const int64_t kp = tile_round(keys, ATT_CHUNK);
  att_scratch s;
  s.k = at, s.v = s.k + kp * width, s.q = s.v + kp * width, s.out = s.q + ATT_QUERIES * width;
  s.score = s.out + ATT_QUERIES * width, s.p = s.score + ATT_QUERIES * ATT_CHUNK;
  s.max = s.p + ATT_QUERIES * ATT_CHUNK, s.sum = s.max + ATT_QUERIES, s.chosen = s.sum + 3 * ATT_QUERIES;
  return s;
}

/* Scores of 16 queries (column `at` of a panel) and n keys from c on: hides what they don't see, returns the largest.
 */
DC_INLINE vf att_largest(const dc_attention_args *a, float *at, int64_t i, int64_t c, int64_t n) {
  vf max = v_set1(-HUGE_VALF);
  const int64_t open = att_limit(a->keys, a->causal, a->diagonal, i + 1) - c; /* seen by all 16 */
  int64_t j = 0;
  for (; j < n && j < open; j++) max = v_max(max, v_load32(at + j * NR, LANES));
  for (; j < n; j++) {
    vf x = v_load32(at + j * NR, LANES);
    if (a->causal) x = att_seen(x, v_set1(-HUGE_VALF), i, c + j, a->diagonal);
    if (c + j >= a->keys) x = v_set1(-HUGE_VALF);
    v_store32(at + j * NR, LANES, x);
    max = v_max(max, x);
  }
  return max;
}

/* Scores become probabilities; their sums. */
DC_INLINE vf att_exponentials(float *p, float *at, int64_t n, vf scale, vf max, int pairs) {
  vf sum = v_set1(0.0f);
  const vf base = v_sub(v_set1(0.0f), max);
#if defined(__AVX512BF16__)
  if (pairs) {
    for (int64_t j = 0; j < n; j += 2) {
      const vf even = v_exp_nonpos(v_fma(v_load32(at + j * NR, LANES), scale, base));
      const vf odd = v_exp_nonpos(v_fma(v_load32(at + (j + 1) * NR, LANES), scale, base));
      sum = v_add(v_add(sum, even), odd);
      vi_store(p + j / 2 * NR, v_pair_bf16(even, odd));
    }
    return sum;
  }
#endif
  (void)pairs;
  for (int64_t j = 0; j < n; j++) {
    const vf e = v_exp_nonpos(v_fma(v_load32(at + j * NR, LANES), scale, base));
    sum = v_add(sum, e);
    v_store32(p + j * NR, LANES, e);
  }
  return sum;
}

/* What was summed so far counts e^(old - new maximum) of itself. */
DC_INLINE void att_shrink(float *out, int64_t width, vf keep) {
  for (int64_t c = 0; c < width; c++) v_store32(out + c * NR, LANES, v_mul(v_load32(out + c * NR, LANES), keep));
}

/* n scores of 16 queries, number g of the block, become probabilities. top: the largest of them; begun: there were keys
 * before. */
DC_INLINE void att_absorb(const att_scratch *s, float factor, int64_t g, float *at, vf top, int64_t n, int64_t width,
                          int begun, int pairs) {
  const vf scale = v_set1(factor), old = v_load32(s->max + g, LANES);
  float *out = s->out + g / NR * width * NR + g % NR;
  float *p = pairs ? s->p + g / NR * (ATT_CHUNK / 2) * NR + g % NR : at;
  vf max = v_max(old, v_mul(top, scale));
  max = v_max(max, v_set1(ATT_LOWEST));
  const vf sum = att_exponentials(p, at, n, scale, max, pairs), keep = v_exp_nonpos(v_sub(old, max));
  v_store32(s->sum + g, LANES, v_fma(v_load32(s->sum + g, LANES), keep, sum));
  v_store32(s->max + g, LANES, max);
  if (begun) att_shrink(out, width, keep);
}

DC_INLINE void att_softmax(const dc_attention_args *a, const att_scratch *s, int64_t i, int64_t c, int64_t n,
                           int64_t width, int pairs) {
  for (int64_t g = 0; g < ATT_QUERIES; g += LANES) {
    float *at = s->score + g / NR * ATT_CHUNK * NR + g % NR;
    att_absorb(s, a->scale, g, at, att_largest(a, at, i + g, c, n), n, width, c > 0, pairs);
  }
}

/* out^T, divided by the sums, goes to its rows. */
DC_INLINE void att_finish(const dc_attention_args *a, const att_scratch *s, int dt, int64_t b, int64_t h, int64_t i,
                          int64_t queries, int64_t width) {
  const tile_rows out = att_head(a->out, dt, a->out_stride, b, h, a->rows, a->dim);
  float *lse = a->lse + (b * a->heads + h) * a->rows, row[TILE_DIM];
  for (int64_t r = 0; r < queries && i + r < a->rows; r++) {
    const float *from = s->out + r / NR * width * NR + r % NR, sum = s->sum[r];
    char *to = (char *)(uintptr_t)out.at + (i + r) * out.stride;
    for (int64_t c = 0; c < width; c++) row[c] = from[c * NR];
    for (int64_t c = 0; c < a->dim; c += LANES)
      v_put(to, dt, c, a->dim - c < LANES ? (int)(a->dim - c) : LANES,
            sum == 0.0f ? v_set1(0.0f) : v_div(v_load32(row + c, LANES), v_set1(sum)));
    lse[i + r] = sum == 0.0f ? HUGE_VALF : dc__canonical_f32(s->max[r] + logf(sum));
  }
}

DC_INLINE void att_queries(const dc_attention_args *a, const att_scratch *s, const tile_rows *q, int dt, int64_t b,
                           int64_t h, int64_t i, int pairs) {
  const int64_t width = q->width, w = tile_words(width, pairs), chunk = tile_words(ATT_CHUNK, pairs);
  const int64_t limit = att_limit(a->keys, a->causal, a->diagonal, i + ATT_QUERIES);
  const tile_panels score = {s->score, ATT_CHUNK * NR}, query = {s->q, w * NR}, out = {s->out, width * NR};
  const tile_panels p = pairs ? (tile_panels){s->p, chunk * NR} : score;
  for (int r = 0; r < ATT_QUERIES; r++) s->max[r] = -HUGE_VALF, s->sum[r] = 0.0f;
  if (limit <= 0) memset(s->out, 0, (size_t)(ATT_QUERIES * width) * sizeof *s->out);
  tile_pack_across(s->q, q, dt, i, ATT_QUERIES, pairs);
  for (int64_t c = 0; c < limit; c += ATT_CHUNK) {
    const int64_t n = att_chunk(limit, c);
    tile_multiply(score, s->k + c * w, w, query, n, PANELS, w, pairs, 0);
    att_softmax(a, s, i, c, n, width, pairs);
    if (c == 0) tile_multiply(out, s->v, chunk, p, width, PANELS, tile_words(n, pairs), pairs, 0);
    else
      tile_multiply(out, s->v + c * tile_words(width, pairs), chunk, p, width, PANELS, tile_words(n, pairs), pairs, 1);
  }
  att_finish(a, s, dt, b, h, i, ATT_QUERIES, width);
}

/* ---- forward, some of the keys -------------------------------------------------------------------------------------
 */
/* As att_largest, of queries g to g + 16 of the tiles, i being the first of them; adds the bias. */
DC_INLINE vf att_largest_seen(const att_sight *s, float *at, int64_t i, int64_t g, const att_tile *tiles, int count,
                              int64_t tile) {
  const vf hidden = v_set1(-HUGE_VALF), group = s->q_group ? att_group_lanes(s, i) : hidden;
  vf max = hidden;
  for (int t = 0; t < count; t++) {
    const enum att_part part = tiles[t].part[g / ATT_STEP];
    for (int64_t r = 0; r < tile; r++, at += NR) {
      vf x = v_load32(at, LANES);
      if (part == ATT_WHOLE && !s->biased) {
        max = v_max(max, x);
        continue;
      }
      if (s->biased) x = att_add_bias(x, s, i, tiles[t].first + r);
      if (part == ATT_SOME) x = att_mask_some(x, hidden, s, group, i, tiles[t].first + r);
      if (part == ATT_HIDDEN) x = hidden;
      v_store32(at, LANES, x);
      max = v_max(max, x);
    }
  }
  return max;
}

/* Scores of the tiles: neighbours in one product. */
DC_INLINE void att_score_tiles(const att_scratch *s, tile_panels query, const att_tile *tiles, int count, int64_t tile,
                               int64_t panels, int64_t w, int pairs) {
  for (int t = 0, n; t < count; t += n) {
    for (n = 1; t + n < count && tiles[t + n].first == tiles[t].first + n * tile;) n++;
    tile_multiply((tile_panels){s->score + t * tile * NR, ATT_CHUNK * NR}, s->k + tiles[t].first * w, w, query,
                  n * tile, panels, w, pairs, 0);
  }
}

/* v of the tiles, side by side. */
DC_INLINE void att_choose(const att_scratch *s, const att_tile *tiles, int count, int64_t tile, int64_t width,
                          int pairs) {
  const int64_t words = tile_words(tile, pairs), chunk = tile_words(ATT_CHUNK, pairs);
  for (int t = 0; t < count; t++) {
    const float *from = s->v + tiles[t].first * tile_words(width, pairs);
    for (int64_t c = 0; c < width; c++)
      memcpy(s->chosen + c * chunk + t * words, from + c * words, (size_t)words * sizeof *from);
  }
}

/* `queries` from i on; tile: keys that are seen or not together. */
DC_INLINE void att_some_queries(const dc_attention_args *a, const att_sight *sight, const att_scratch *s,
                                const tile_rows *q, int dt, int64_t i, int64_t queries, int64_t tile, int pairs) {
  const int64_t width = q->width, w = tile_words(width, pairs), chunk = tile_words(ATT_CHUNK, pairs);
  const int64_t panels = queries / NR;
  const tile_panels query = {s->q, w * NR}, out = {s->out, width * NR};
  const tile_panels p = pairs ? (tile_panels){s->p, chunk * NR} : (tile_panels){s->score, ATT_CHUNK * NR};
  att_tile tiles[ATT_CHUNK / ATT_STEP];
  int64_t at = 0;
  int begun = 0;
  for (int64_t r = 0; r < queries; r++) s->max[r] = -HUGE_VALF, s->sum[r] = 0.0f;
  memset(s->out, 0, (size_t)(queries * width) * sizeof *s->out);
  tile_pack_across(s->q, q, dt, i, queries, pairs);
  for (int count; (count = att_next_tiles(sight, i, queries, tile, &at, tiles)) > 0; begun = 1) {
    const int64_t n = count * tile;
    att_score_tiles(s, query, tiles, count, tile, panels, w, pairs);
    for (int64_t g = 0; g < queries; g += LANES) {
      float *score = s->score + g / NR * ATT_CHUNK * NR + g % NR;
      const vf top = att_largest_seen(sight, score, i + g, g, tiles, count, tile);
      att_absorb(s, a->scale, g, score, top, n, width, begun, pairs);
    }
    att_choose(s, tiles, count, tile, width, pairs);
    tile_multiply(out, s->chosen, chunk, p, width, panels, tile_words(n, pairs), pairs, 1);
  }
}

DC_INLINE void att_some_head(const dc_attention_args *a, const att_scratch *s, int dt, int64_t b, int64_t h,
                             int64_t width, int pairs) {
  const tile_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
  const att_sight sight = ATT_SIGHT(a, b, h);
  const int64_t queries = att_tile_queries(&a->mask), tile = att_tile_keys(&a->mask);
  for (int64_t i = 0; i < a->rows; i += queries) {
    if (tile == 64) att_some_queries(a, &sight, s, &q, dt, i, 64, 64, pairs);
    else att_some_queries(a, &sight, s, &q, dt, i, 32, tile, pairs);
    att_finish(a, s, dt, b, h, i, queries, width);
  }
}

DC_INLINE void att_forward(const dc_attention_args *a, int dt, int64_t b, int64_t kv, float *scratch) {
  const int pairs = TILE_PAIRS(dt);
  const int64_t group = a->heads / a->kv_heads, kp = tile_round(a->keys, ATT_CHUNK);
  const tile_rows k = att_head(a->k, dt, a->k_stride, b, kv, a->keys, a->dim);
  const tile_rows v = att_head(a->v, dt, a->v_stride, b, kv, a->keys, a->dim);
  const att_scratch s = att_lay_out(scratch, a->keys, k.width);
  tile_pack_rows(s.k, &k, dt, 0, kp, pairs);
  const int some = att_masked(&a->mask);
  att_pack_tiles(s.v, &v, dt, kp, some ? att_tile_keys(&a->mask) : ATT_CHUNK, pairs);
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
    if (some) {
      att_some_head(a, &s, dt, b, h, k.width, pairs);
      continue;
    }
    const tile_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
    for (int64_t i = 0; i < a->rows; i += ATT_QUERIES) att_queries(a, &s, &q, dt, b, h, i, pairs);
  }
}

void DC_BODY(attention)(const dc_attention_args *a, int64_t b, int64_t kv, float *scratch) {
  DC_FOR_LOW(a->dtype, DT, att_forward(a, DT, b, kv, scratch));
}

/* ---- gradient ---------------------------------------------------------------------------------------------------- */
/* A block is `queries` x `keys`, of which the scratch has room for ATT_QUERIES x ATT_KEYS. */
typedef struct att_back {
  float *k, *v, *kt; /* left: [keys][words] twice, [blocks][width][words of keys] */
  float *q, *dout, *q_down, *dout_down; /* right, by blocks of queries */
  float *dq, *dk, *dv; /* [panels of NR queries][width][NR]; [blocks][width / NR][keys][NR] */
  float *lse, *delta; /* [queries] */
  float *score, *dp, *p_rows, *ds_rows, *ds; /* a block */
} att_back;

DC_INLINE att_back att_lay_out_back(float *at, int64_t rows, int64_t keys, int64_t width) {
  const int64_t kp = tile_round(keys, ATT_CHUNK) * width, qp = tile_round(rows, ATT_QUERIES) * width;
  const int64_t q = tile_round(rows, ATT_QUERIES), block = ATT_QUERIES * ATT_KEYS;
  att_back s;
  s.k = at, s.v = s.k + kp, s.kt = s.v + kp, s.dk = s.kt + kp, s.dv = s.dk + kp;
  s.q = s.dv + kp, s.dout = s.q + qp, s.q_down = s.dout + qp, s.dout_down = s.q_down + qp, s.dq = s.dout_down + qp;
  s.lse = s.dq + qp, s.delta = s.lse + q;
  s.score = s.delta + q, s.dp = s.score + block, s.p_rows = s.dp + block, s.ds_rows = s.p_rows + block,
  s.ds = s.ds_rows + block;
  return s;
}

/* sum(dout * out) of every query, in 16 sums. */
DC_INLINE void att_deltas(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h) {
  const tile_rows dout = att_head(a->dout, dt, a->dout_stride, b, h, a->rows, a->dim);
  const tile_rows out = att_head(a->out, dt, a->out_stride, b, h, a->rows, a->dim);
  const float *lse = a->lse + (b * a->heads + h) * a->rows;
  for (int64_t i = 0; i < tile_round(a->rows, ATT_QUERIES); i++) {
    s->lse[i] = HUGE_VALF, s->delta[i] = 0.0f;
    if (i >= a->rows) continue;
    vf sum = v_set1(0.0f);
    float lane[LANES];
    for (int64_t c = 0; c < a->dim; c += LANES) {
      const int r = a->dim - c < LANES ? (int)(a->dim - c) : LANES;
      sum = v_fma(v_get(dout.at + i * dout.stride, dt, c, r), v_get(out.at + i * out.stride, dt, c, r), sum);
    }
    v_store32(lane, LANES, sum);
    for (int width = 8; width > 0; width /= 2)
      for (int k = 0; k < width; k++) lane[k] += lane[k + width];
    s->lse[i] = lse[i], s->delta[i] = lane[0];
  }
}

typedef struct att_two {
  vf p, ds;
} att_two;

/* 16 queries from i on and key j; part: of the runs that they belong to. */
DC_INLINE att_two att_probability(const dc_attention_grad_args *a, const att_back *s, const att_sight *sight,
                                  enum att_part part, int64_t at, int64_t i, int64_t j, int plain) {
  const vf scale = v_set1(a->scale), lse = v_load32(s->lse + i, LANES), none = v_set1(0.0f);
  vf x = v_sub(none, lse), score = v_load32(s->score + at, LANES);
  if (!plain && sight->biased) score = att_add_bias(score, sight, i, j);
  x = v_min(v_fma(score, scale, x), none);
  att_two t = {v_exp_nonpos(x), x};
  if (!plain && part == ATT_SOME) {
    const vf group = sight->q_group ? att_group_lanes(sight, i) : none;
    t.p = att_mask_some(t.p, none, sight, group, i, j);
  }
  if (!plain && part == ATT_HIDDEN) t.p = none;
  t.ds = v_mul(v_mul(t.p, v_sub(v_load32(s->dp + at, LANES), v_load32(s->delta + i, LANES))), scale);
  return t;
}

/* The block's scores and dp become p and ds: row by row (left operands of dv and dk), and ds in panels (right one of
 * dq). plain: all of it is seen, without a bias. */
DC_INLINE void att_block_ds(const dc_attention_grad_args *a, const att_back *s, const att_sight *sight,
                            const enum att_part *part, int64_t i, int64_t queries, int64_t j, int64_t keys, int plain,
                            int pairs) {
  for (int64_t r = 0; r < keys; r += 2)
    for (int64_t g = 0; g < queries; g += 2 * LANES) {
      att_two t[2][2];
      for (int k = 0; k < 2; k++)
        for (int u = 0; u < 2; u++) {
          const int64_t c = g + u * LANES;
          t[k][u] = att_probability(a, s, sight, part[c / LANES], (c / NR * keys + r + k) * NR + c % NR, i + c,
                                    j + r + k, plain);
        }
#if defined(__AVX512BF16__)
      if (pairs) {
        for (int k = 0; k < 2; k++) {
          vi_store(s->p_rows + ((r + k) * queries + g) / 2, v_join_bf16(t[k][0].p, t[k][1].p));
          vi_store(s->ds_rows + ((r + k) * queries + g) / 2, v_join_bf16(t[k][0].ds, t[k][1].ds));
        }
        for (int u = 0; u < 2; u++) {
          const int64_t c = g + u * LANES;
          vi_store(s->ds + (c / NR * (keys / 2) + r / 2) * NR + c % NR, v_pair_bf16(t[0][u].ds, t[1][u].ds));
        }
        continue;
      }
#endif
      (void)pairs;
      for (int k = 0; k < 2; k++)
        for (int u = 0; u < 2; u++) {
          const int64_t c = g + u * LANES;
          v_store32(s->p_rows + (r + k) * queries + c, LANES, t[k][u].p);
          v_store32(s->ds_rows + (r + k) * queries + c, LANES, t[k][u].ds);
          v_store32(s->ds + (c / NR * keys + r + k) * NR + c % NR, LANES, t[k][u].ds);
        }
    }
}

/* One block, if something of it is seen. */
DC_INLINE void att_block(const dc_attention_grad_args *a, const att_back *s, const att_sight *sight, int64_t i,
                         int64_t queries, int64_t j, int64_t keys, int64_t width, int pairs) {
  const int64_t w = tile_words(width, pairs), q_words = tile_words(queries, pairs), k_words = tile_words(keys, pairs);
  const int64_t q = i * w, down = i * tile_words(width, pairs), across = width / NR, panels = queries / NR;
  const tile_panels score = {s->score, keys * NR}, dp = {s->dp, keys * NR};
  att_tile t;
  if (!att_look(sight, i, queries, j, keys, &t)) return;
  int plain = !sight->biased;
  for (int64_t g = 0; g < queries; g += LANES) plain &= t.part[g / LANES] == ATT_WHOLE;
  tile_multiply(score, s->k + j * w, w, (tile_panels){s->q + q, w * NR}, keys, panels, w, pairs, 0);
  tile_multiply(dp, s->v + j * w, w, (tile_panels){s->dout + q, w * NR}, keys, panels, w, pairs, 0);
  if (plain) att_block_ds(a, s, sight, t.part, i, queries, j, keys, 1, pairs);
  else att_block_ds(a, s, sight, t.part, i, queries, j, keys, 0, pairs);
  const tile_panels dk = {s->dk + j * width, keys * NR}, dv = {s->dv + j * width, keys * NR};
  tile_multiply(dv, s->p_rows, q_words, (tile_panels){s->dout_down + down, q_words * NR}, keys, across, q_words, pairs,
                1);
  tile_multiply(dk, s->ds_rows, q_words, (tile_panels){s->q_down + down, q_words * NR}, keys, across, q_words, pairs,
                1);
  tile_multiply((tile_panels){s->dq + i * width, width * NR}, s->kt + j * w, k_words,
                (tile_panels){s->ds, k_words * NR}, width, panels, k_words, pairs, 1);
}

DC_INLINE void att_store_row(void *to, int dt, const float *row, int64_t dim) {
  for (int64_t c = 0; c < dim; c += LANES) {
    const int r = dim - c < LANES ? (int)(dim - c) : LANES;
    v_put(to, dt, c, r, v_load32(row + c, LANES));
  }
}

DC_INLINE void att_give_queries(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h,
                                int64_t width) {
  const tile_rows to = att_head(a->dq, dt, a->dq_stride, b, h, a->rows, a->dim);
  float row[TILE_DIM];
  for (int64_t i = 0; i < a->rows; i++) {
    const float *from = s->dq + i / NR * NR * width + i % NR;
    for (int64_t c = 0; c < width; c++) row[c] = from[c * NR];
    att_store_row((char *)(uintptr_t)to.at + i * to.stride, dt, row, a->dim);
  }
}

DC_INLINE void att_give_keys(void *p, const int64_t *stride, const dc_attention_grad_args *a, int dt, int64_t b,
                             int64_t kv, const float *from, int64_t keys, int64_t width) {
  const tile_rows to = att_head(p, dt, stride, b, kv, a->keys, a->dim);
  float row[TILE_DIM];
  for (int64_t j = 0; j < a->keys; j++) {
    const int64_t r = j % keys;
    for (int64_t c = 0; c < width; c += NR)
      memcpy(row + c, from + (j - r) * width + (c / NR * keys + r) * NR, NR * sizeof *row);
    att_store_row((char *)(uintptr_t)to.at + j * to.stride, dt, row, a->dim);
  }
}

DC_INLINE void att_back_head(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h,
                             int64_t queries, int64_t keys, int pairs) {
  const tile_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
  const tile_rows dout = att_head(a->dout, dt, a->dout_stride, b, h, a->rows, a->dim);
  const int64_t w = tile_words(q.width, pairs), qp = tile_round(a->rows, ATT_QUERIES);
  const att_sight sight = ATT_SIGHT(a, b, h);
  for (int64_t i = 0; i < qp; i += queries) {
    tile_pack_across(s->q + i * w, &q, dt, i, queries, pairs);
    tile_pack_across(s->dout + i * w, &dout, dt, i, queries, pairs);
    att_pack_down(s->q_down + i * w, &q, dt, i, queries, pairs);
    att_pack_down(s->dout_down + i * w, &dout, dt, i, queries, pairs);
  }
  att_deltas(a, s, dt, b, h);
  memset(s->dq, 0, (size_t)(qp * q.width) * sizeof *s->dq);
  for (int64_t j = 0; j < a->keys; j += keys)
    for (int64_t i = 0; i < a->rows; i += queries) att_block(a, s, &sight, i, queries, j, keys, q.width, pairs);
  att_give_queries(a, s, dt, b, h, q.width);
}

DC_INLINE void att_backward(const dc_attention_grad_args *a, int dt, int64_t b, int64_t kv, float *scratch) {
  const int pairs = TILE_PAIRS(dt);
  const int64_t group = a->heads / a->kv_heads, kp = tile_round(a->keys, ATT_KEYS);
  const tile_rows k = att_head(a->k, dt, a->k_stride, b, kv, a->keys, a->dim);
  const tile_rows v = att_head(a->v, dt, a->v_stride, b, kv, a->keys, a->dim);
  const att_back s = att_lay_out_back(scratch, a->rows, a->keys, k.width);
  tile_pack_rows(s.k, &k, dt, 0, kp, pairs);
  tile_pack_rows(s.v, &v, dt, 0, kp, pairs);
  const int64_t keys = att_tile_keys(&a->mask);
  att_pack_tiles(s.kt, &k, dt, kp, keys, pairs);
  memset(s.dk, 0, (size_t)(kp * k.width) * sizeof *s.dk);
  memset(s.dv, 0, (size_t)(kp * k.width) * sizeof *s.dv);
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
    if (keys == ATT_KEYS) att_back_head(a, &s, dt, b, h, ATT_QUERIES, ATT_KEYS, pairs);
    else att_back_head(a, &s, dt, b, h, 32, keys, pairs);
  }
  att_give_keys(a->dk, a->dk_stride, a, dt, b, kv, s.dk, keys, k.width);
  att_give_keys(a->dv, a->dv_stride, a, dt, b, kv, s.dv, keys, k.width);
}

void DC_BODY(attention_grad)(const dc_attention_grad_args *a, int64_t b, int64_t kv, float *scratch) {
  DC_FOR_LOW(a->dtype, DT, att_backward(a, DT, b, kv, scratch));
}
