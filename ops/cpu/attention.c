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

/* Inner dimension down the rows, in panels of nr columns: [panels of width][words of n][nr]. A right operand, and by
 * nr = the rows of a product a left one. */
DC_INLINE void att_pack_down(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n, int nr, int pairs) {
  float words[TILE_DIM];
  const int64_t k = tile_words(n, pairs);
  for (int64_t i = 0; i < k; i++) {
    tile_down(words, x, dt, begin, i, pairs);
    for (int64_t c = 0; c < x->width; c += nr) memcpy(to + (c / nr * k + i) * nr, words + c, (size_t)nr * sizeof *to);
  }
}
/* What it packed, as a left operand from row `begin` on; n: rows that were packed. */
DC_INLINE tile_left att_columns(const float *at, int64_t begin, int64_t n, int mr, int pairs) {
  return (tile_left){at + tile_words(begin, pairs) * mr, 1, mr, tile_words(n, pairs) * mr};
}

/* Columns of panels [width][nr], 16 of them, become rows of width. */
DC_INLINE void att_rows_of(float *row, const float *panels, int64_t i, int64_t width, int nr) {
  tile_turn(row, width, panels + i / nr * width * nr + i % nr, nr, width, LANES);
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
  float *k, *v; /* left operands: [keys][words], [width / rows of a product][words of keys][those rows] */
  float *q, *p; /* right operands, in panels of nr queries: [words][nr], [words of a chunk][nr] */
  float *score, *out; /* in such panels: [ATT_CHUNK][nr], [width][nr] */
  float *max, *sum; /* [ATT_QUERIES] */
  int64_t keys; /* whole chunks */
} att_scratch;

DC_INLINE att_scratch att_lay_out(float *at, int64_t keys, int64_t width) {
  const int64_t kp = tile_round(keys, ATT_CHUNK);
  att_scratch s;
  s.k = at, s.v = s.k + kp * width, s.q = s.v + kp * width, s.out = s.q + ATT_QUERIES * width;
  s.score = s.out + ATT_QUERIES * width, s.p = s.score + ATT_QUERIES * ATT_CHUNK;
  s.max = s.p + ATT_QUERIES * ATT_CHUNK, s.sum = s.max + ATT_QUERIES, s.keys = kp;
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
DC_INLINE vf att_exponentials(float *p, float *at, int64_t n, vf scale, vf max, int nr, int pairs) {
  vf sum = v_set1(0.0f);
  const vf base = v_sub(v_set1(0.0f), max);
#if defined(__AVX512BF16__)
  if (pairs) {
    for (int64_t j = 0; j < n; j += 2) {
      const vf even = v_exp_nonpos(v_fma(v_load32(at + j * nr, LANES), scale, base));
      const vf odd = v_exp_nonpos(v_fma(v_load32(at + (j + 1) * nr, LANES), scale, base));
      sum = v_add(v_add(sum, even), odd);
      vi_store(p + j / 2 * nr, v_pair_bf16(even, odd));
    }
    return sum;
  }
#endif
  (void)pairs;
  for (int64_t j = 0; j < n; j++) {
    const vf e = v_exp_nonpos(v_fma(v_load32(at + j * nr, LANES), scale, base));
    sum = v_add(sum, e);
    v_store32(p + j * nr, LANES, e);
  }
  return sum;
}

/* What was summed so far counts e^(old - new maximum) of itself. */
DC_INLINE void att_shrink(float *out, int64_t width, vf keep, int nr) {
  for (int64_t c = 0; c < width; c++) v_store32(out + c * nr, LANES, v_mul(v_load32(out + c * nr, LANES), keep));
}

/* n scores of 16 queries, number g of the block, become probabilities. top: the largest of them; begun: there were keys
 * before. */
DC_INLINE void att_absorb(const att_scratch *s, float factor, int64_t g, float *at, vf top, int64_t n, int64_t width,
                          int begun, int nr, int pairs) {
  const vf scale = v_set1(factor), old = v_load32(s->max + g, LANES);
  float *out = s->out + g / nr * width * nr + g % nr;
  float *p = pairs ? s->p + g / nr * (ATT_CHUNK / 2) * nr + g % nr : at;
  vf max = v_max(old, v_mul(top, scale));
  max = v_max(max, v_set1(ATT_LOWEST));
  const vf sum = att_exponentials(p, at, n, scale, max, nr, pairs), keep = v_exp_nonpos(v_sub(old, max));
  v_store32(s->sum + g, LANES, v_fma(v_load32(s->sum + g, LANES), keep, sum));
  v_store32(s->max + g, LANES, max);
  if (begun) att_shrink(out, width, keep, nr);
}

DC_INLINE void att_softmax(const dc_attention_args *a, const att_scratch *s, int64_t i, int64_t c, int64_t n,
                           int64_t width, int pairs) {
  for (int64_t g = 0; g < ATT_QUERIES; g += LANES) {
    float *at = s->score + g / NR * ATT_CHUNK * NR + g % NR;
    att_absorb(s, a->scale, g, at, att_largest(a, at, i + g, c, n), n, width, c > 0, NR, pairs);
  }
}

/* out^T, divided by the sums, goes to its rows. */
DC_INLINE void att_finish(const dc_attention_args *a, const att_scratch *s, int dt, int64_t b, int64_t h, int64_t i,
                          int64_t queries, int64_t width, int nr) {
  const tile_rows out = att_head(a->out, dt, a->out_stride, b, h, a->rows, a->dim);
  float *lse = a->lse + (b * a->heads + h) * a->rows, rows[LANES * TILE_DIM];
  for (int64_t r = 0; r < queries && i + r < a->rows; r++) {
    const float *row = rows + r % LANES * width, sum = s->sum[r];
    char *to = (char *)(uintptr_t)out.at + (i + r) * out.stride;
    if (r % LANES == 0) att_rows_of(rows, s->out, r, width, nr);
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
  tile_pack_across(s->q, q, dt, i, ATT_QUERIES, NR, pairs);
  for (int64_t c = 0; c < limit; c += ATT_CHUNK) {
    const int64_t n = att_chunk(limit, c);
    tile_multiply(score, tile_by_rows(s->k + c * w, w, MR), query, n, PANELS, w, NR, pairs, 0);
    att_softmax(a, s, i, c, n, width, pairs);
    const tile_left v = att_columns(s->v, c, s->keys, MR, pairs);
    if (c == 0) tile_multiply(out, v, p, width, PANELS, tile_words(n, pairs), NR, pairs, 0);
    else tile_multiply(out, v, p, width, PANELS, tile_words(n, pairs), NR, pairs, 1);
  }
  att_finish(a, s, dt, b, h, i, ATT_QUERIES, width, NR);
}

/* ---- forward, some of the keys -------------------------------------------------------------------------------------
 */
/* As att_largest, of queries g to g + 16 of the tiles, i being the first of them; adds the bias. */
DC_INLINE vf att_largest_seen(const att_sight *s, float *at, int64_t i, int64_t g, const att_tile *tiles, int count,
                              int64_t tile, int nr) {
  const vf hidden = v_set1(-HUGE_VALF), group = s->q_group ? att_group_lanes(s, i) : hidden;
  vf max = hidden;
  for (int t = 0; t < count; t++) {
    const enum att_part part = tiles[t].part[g / ATT_STEP];
    for (int64_t r = 0; r < tile; r++, at += nr) {
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
                               int64_t panels, int64_t w, int nr, int pairs) {
  for (int t = 0, n; t < count; t += n) {
    for (n = 1; t + n < count && tiles[t + n].first == tiles[t].first + n * tile;) n++;
    tile_multiply((tile_panels){s->score + t * tile * nr, ATT_CHUNK * nr},
                  tile_by_rows(s->k + tiles[t].first * w, w, tile_mr(nr)), query, n * tile, panels, w, nr, pairs, 0);
  }
}

/* Probabilities of the tiles times their v. */
DC_INLINE void att_add_tiles(const att_scratch *s, tile_panels out, tile_panels p, const att_tile *tiles, int count,
                             int64_t tile, int64_t width, int64_t panels, int nr, int pairs, int begun) {
  int64_t first[ATT_CHUNK / ATT_STEP];
  for (int t = 0; t < count; t++) first[t] = tile_words(tiles[t].first, pairs);
  const tile_runs runs = {first, count, tile_words(tile, pairs)};
  const tile_left v = att_columns(s->v, 0, s->keys, tile_mr(nr), pairs);
  if (begun) tile_multiply_runs(out, v, p, width, panels, runs, nr, pairs, 1);
  else tile_multiply_runs(out, v, p, width, panels, runs, nr, pairs, 0);
}

/* `queries` from i on; tile: keys that are seen or not together. */
DC_INLINE void att_some_queries(const dc_attention_args *a, const att_sight *sight, const att_scratch *s,
                                const tile_rows *q, int dt, int64_t i, int64_t queries, int64_t tile, int nr,
                                int pairs) {
  const int64_t width = q->width, w = tile_words(width, pairs), chunk = tile_words(ATT_CHUNK, pairs);
  const int64_t panels = queries / nr;
  const tile_panels query = {s->q, w * nr}, out = {s->out, width * nr};
  const tile_panels p = pairs ? (tile_panels){s->p, chunk * nr} : (tile_panels){s->score, ATT_CHUNK * nr};
  att_tile tiles[ATT_CHUNK / ATT_STEP];
  int64_t at = 0;
  int begun = 0;
  for (int64_t r = 0; r < queries; r++) s->max[r] = -HUGE_VALF, s->sum[r] = 0.0f;
  tile_pack_across(s->q, q, dt, i, queries, nr, pairs);
  for (int count; (count = att_next_tiles(sight, i, queries, tile, &at, tiles)) > 0; begun = 1) {
    att_score_tiles(s, query, tiles, count, tile, panels, w, nr, pairs);
    for (int64_t g = 0; g < queries; g += LANES) {
      float *score = s->score + g / nr * ATT_CHUNK * nr + g % nr;
      const vf top = att_largest_seen(sight, score, i + g, g, tiles, count, tile, nr);
      att_absorb(s, a->scale, g, score, top, count * tile, width, begun, nr, pairs);
    }
    att_add_tiles(s, out, p, tiles, count, tile, width, panels, nr, pairs, begun);
  }
  if (!begun) memset(s->out, 0, (size_t)(queries * width) * sizeof *s->out);
}

DC_INLINE void att_some_head(const dc_attention_args *a, const att_scratch *s, int dt, int64_t b, int64_t h,
                             int64_t width, int pairs) {
  const tile_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
  const att_sight sight = ATT_SIGHT(a, b, h);
  const int64_t queries = att_tile_queries(&a->mask), tile = att_tile_keys(&a->mask);
  for (int64_t i = 0; i < a->rows; i += queries) {
    if (tile == 64) att_some_queries(a, &sight, s, &q, dt, i, 64, 64, NR, pairs);
    else if (tile == 32) att_some_queries(a, &sight, s, &q, dt, i, 32, 32, NR, pairs);
    else att_some_queries(a, &sight, s, &q, dt, i, 16, 16, LANES, pairs);
    att_finish(a, s, dt, b, h, i, queries, width, tile == 16 ? LANES : NR);
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
  if (some && att_tile_keys(&a->mask) == 16) att_pack_down(s.v, &v, dt, 0, kp, tile_mr(LANES), pairs);
  else att_pack_down(s.v, &v, dt, 0, kp, MR, pairs);
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
  float *k, *v, *kt; /* left: [keys][words] twice, [words of keys][width] (k itself but for pairs) */
  float *q, *dout, *q_down, *dout_down; /* right, by blocks of queries */
  float *dq, *dk, *dv; /* [panels of nr queries][width][nr]; [blocks][width / NR][keys][NR] */
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
  const int nr = queries < NR ? LANES : NR, both = queries > LANES; /* vectors of 16 queries at a time */
  for (int64_t r = 0; r < keys; r += 2)
    for (int64_t g = 0; g < queries; g += (both + 1) * LANES) {
      att_two t[2][2];
      for (int k = 0; k < 2; k++)
        for (int u = 0; u <= both; u++) {
          const int64_t c = g + u * LANES;
          t[k][u] = att_probability(a, s, sight, part[c / LANES], (c / nr * keys + r + k) * nr + c % nr, i + c,
                                    j + r + k, plain);
        }
#if defined(__AVX512BF16__)
      if (pairs) {
        for (int k = 0; k <= both; k++) { /* a row of 32 queries, or two rows of 16 */
          const att_two *x = &t[k][0], *y = both ? &t[k][1] : &t[1][0];
          vi_store(s->p_rows + ((r + k) * queries + g) / 2, v_join_bf16(x->p, y->p));
          vi_store(s->ds_rows + ((r + k) * queries + g) / 2, v_join_bf16(x->ds, y->ds));
        }
        for (int u = 0; u <= both; u++) {
          const int64_t c = g + u * LANES;
          vi_store(s->ds + (c / nr * (keys / 2) + r / 2) * nr + c % nr, v_pair_bf16(t[0][u].ds, t[1][u].ds));
        }
        continue;
      }
#endif
      (void)pairs;
      for (int k = 0; k < 2; k++)
        for (int u = 0; u <= both; u++) {
          const int64_t c = g + u * LANES;
          v_store32(s->p_rows + (r + k) * queries + c, LANES, t[k][u].p);
          v_store32(s->ds_rows + (r + k) * queries + c, LANES, t[k][u].ds);
          v_store32(s->ds + (c / nr * keys + r + k) * nr + c % nr, LANES, t[k][u].ds);
        }
    }
}

/* One block, if something of it is seen. */
DC_INLINE void att_block(const dc_attention_grad_args *a, const att_back *s, const att_sight *sight, int64_t i,
                         int64_t queries, int64_t j, int64_t keys, int64_t width, int pairs) {
  const int64_t w = tile_words(width, pairs), q_words = tile_words(queries, pairs), k_words = tile_words(keys, pairs);
  const int nr = queries < NR ? LANES : NR, mr = tile_mr(nr);
  const int64_t q = i * w, across = width / NR, panels = queries / nr;
  const tile_panels score = {s->score, keys * nr}, dp = {s->dp, keys * nr};
  att_tile t;
  if (!att_look(sight, i, queries, j, keys, &t)) return;
  int plain = !sight->biased;
  for (int64_t g = 0; g < queries; g += LANES) plain &= t.part[g / LANES] == ATT_WHOLE;
  tile_multiply(score, tile_by_rows(s->k + j * w, w, mr), (tile_panels){s->q + q, w * nr}, keys, panels, w, nr, pairs,
                0);
  tile_multiply(dp, tile_by_rows(s->v + j * w, w, mr), (tile_panels){s->dout + q, w * nr}, keys, panels, w, nr, pairs,
                0);
  if (plain) att_block_ds(a, s, sight, t.part, i, queries, j, keys, 1, pairs);
  else att_block_ds(a, s, sight, t.part, i, queries, j, keys, 0, pairs);
  const tile_panels dk = {s->dk + j * width, keys * NR}, dv = {s->dv + j * width, keys * NR};
  tile_multiply(dv, tile_by_rows(s->p_rows, q_words, MR), (tile_panels){s->dout_down + q, q_words * NR}, keys, across,
                q_words, NR, pairs, 1);
  tile_multiply(dk, tile_by_rows(s->ds_rows, q_words, MR), (tile_panels){s->q_down + q, q_words * NR}, keys, across,
                q_words, NR, pairs, 1);
  tile_multiply((tile_panels){s->dq + i * width, width * nr}, tile_by_columns(s->kt + j * w, width, mr),
                (tile_panels){s->ds, k_words * nr}, width, panels, k_words, nr, pairs, 1);
}

DC_INLINE void att_store_row(void *to, int dt, const float *row, int64_t dim) {
  for (int64_t c = 0; c < dim; c += LANES) {
    const int r = dim - c < LANES ? (int)(dim - c) : LANES;
    v_put(to, dt, c, r, v_load32(row + c, LANES));
  }
}

DC_INLINE void att_give_queries(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h,
                                int64_t width, int nr) {
  const tile_rows to = att_head(a->dq, dt, a->dq_stride, b, h, a->rows, a->dim);
  float rows[LANES * TILE_DIM];
  for (int64_t i = 0; i < a->rows; i++) {
    if (i % LANES == 0) att_rows_of(rows, s->dq, i, width, nr);
    att_store_row((char *)(uintptr_t)to.at + i * to.stride, dt, rows + i % LANES * width, a->dim);
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
  const int nr = queries < NR ? LANES : NR;
  const att_sight sight = ATT_SIGHT(a, b, h);
  for (int64_t i = 0; i < qp; i += queries) {
    tile_pack_across(s->q + i * w, &q, dt, i, queries, nr, pairs);
    tile_pack_across(s->dout + i * w, &dout, dt, i, queries, nr, pairs);
    att_pack_down(s->q_down + i * w, &q, dt, i, queries, NR, pairs);
    att_pack_down(s->dout_down + i * w, &dout, dt, i, queries, NR, pairs);
  }
  att_deltas(a, s, dt, b, h);
  memset(s->dq, 0, (size_t)(qp * q.width) * sizeof *s->dq);
  for (int64_t j = 0; j < a->keys; j += keys)
    for (int64_t i = att_next_query(&sight, 0, j, queries); i < a->rows;
         i = att_next_query(&sight, i + queries, j, queries))
      att_block(a, s, &sight, i, queries, j, keys, q.width, pairs);
  att_give_queries(a, s, dt, b, h, q.width, nr);
}

DC_INLINE void att_backward(const dc_attention_grad_args *a, int dt, int64_t b, int64_t kv, float *scratch) {
  const int pairs = TILE_PAIRS(dt);
  const int64_t group = a->heads / a->kv_heads, kp = tile_round(a->keys, ATT_KEYS);
  const tile_rows k = att_head(a->k, dt, a->k_stride, b, kv, a->keys, a->dim);
  const tile_rows v = att_head(a->v, dt, a->v_stride, b, kv, a->keys, a->dim);
  att_back s = att_lay_out_back(scratch, a->rows, a->keys, k.width);
  if (!pairs) s.kt = s.k;
  tile_pack_rows(s.k, &k, dt, 0, kp, pairs);
  tile_pack_rows(s.v, &v, dt, 0, kp, pairs);
  const int64_t keys = att_tile_keys(&a->mask);
  if (pairs) att_pack_down(s.kt, &k, dt, 0, kp, (int)k.width, pairs);
  memset(s.dk, 0, (size_t)(kp * k.width) * sizeof *s.dk);
  memset(s.dv, 0, (size_t)(kp * k.width) * sizeof *s.dv);
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
    if (keys == ATT_KEYS) att_back_head(a, &s, dt, b, h, ATT_QUERIES, ATT_KEYS, pairs);
    else if (keys == 32) att_back_head(a, &s, dt, b, h, 32, 32, pairs);
    else att_back_head(a, &s, dt, b, h, 16, 16, pairs);
  }
  att_give_keys(a->dk, a->dk_stride, a, dt, b, kv, s.dk, keys, k.width);
  att_give_keys(a->dv, a->dv_stride, a, dt, b, kv, s.dv, keys, k.width);
}

void DC_BODY(attention_grad)(const dc_attention_grad_args *a, int64_t b, int64_t kv, float *scratch) {
  DC_FOR_LOW(a->dtype, DT, att_backward(a, DT, b, kv, scratch));
}
