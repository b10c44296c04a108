/* attention.c: bodies of dc_attention, products of small matrices (tile.h). */
#include "cpu/attention.h"

/* ---- forward ----------------------------------------------------------------------------------------------------- */
typedef struct att_scratch {
  float *k, *v; /* left operands: [keys][words]; v of floats [width / rows of a product][keys][those rows], of pairs
                   [tiles of keys][width][words of a tile] */
  float *q, *p; /* right operands, in panels of nr queries: [words][nr], [words of a chunk][nr] */
  float *score, *out; /* in such panels: [ATT_CHUNK][nr], [width][nr] */
  float *max, *sum; /* [ATT_QUERIES] */
  int64_t keys; /* whole chunks */
} att_scratch;

DC_INLINE att_scratch att_lay_out(float *at, int64_t keys, int64_t width) {
  const int64_t kp = tile_round(keys, ATT_KEYS);
  att_scratch s;
  s.k = at, s.v = s.k + kp * width, s.q = s.v + kp * width, s.out = s.q + ATT_QUERIES * width;
  s.score = s.out + ATT_QUERIES * width, s.p = s.score + ATT_QUERIES * ATT_CHUNK;
  s.max = s.p + ATT_QUERIES * ATT_CHUNK, s.sum = s.max + ATT_QUERIES, s.keys = kp;
  return s;
}

/* What att_floats_down packed of n rows, as a left operand from row `begin` on. */
DC_INLINE tile_left att_columns(const float *at, int64_t begin, int64_t n, int mr) {
  return (tile_left){at + begin * mr, 1, mr, n * mr};
}

/* Scores become probabilities; their sums. A NaN among the scores is one of the sum. */
DC_INLINE vf att_exponentials(float *p, float *at, int64_t n, vf scale, vf max, int nr) {
  vf sum = v_set1(0.0f);
#if TILE_PAIRS
  const vf log2e = v_set1(DC__EXP_LOG2E), unit = v_mul(scale, log2e), base = v_mul(v_sub(sum, max), log2e);
  vf other = sum;
  for (int64_t j = 0; j < n; j += 2) {
    const vf even = v_exp2_low(v_fma(v_load32(at + j * nr, LANES), unit, base));
    const vf odd = v_exp2_low(v_fma(v_load32(at + (j + 1) * nr, LANES), unit, base));
    sum = v_add(sum, even), other = v_add(other, odd);
    vi_store(p + j / 2 * nr, vi_upper_pairs(v_half_up(even), v_half_up(odd)));
  }
  return v_add(sum, other);
#else
  const vf base = v_sub(sum, max);
  for (int64_t j = 0; j < n; j++) {
    const vf e = v_exp_nonpos(v_fma(v_load32(at + j * nr, LANES), scale, base));
    sum = v_add(sum, e);
    v_store32(p + j * nr, LANES, e);
  }
  return sum;
#endif
}

/* What was summed so far counts e^(old - new maximum) of itself. */
DC_INLINE void att_shrink(float *out, int64_t width, vf keep, int nr) {
  for (int64_t c = 0; c < width; c++) v_store32(out + c * nr, LANES, v_mul(v_load32(out + c * nr, LANES), keep));
}

/* Of queries whose scores had the maximum `old` so far; top: the largest of the new ones. */
DC_INLINE vf att_maximum(vf old, vf top) {
  const vf max = v_max(v_max(old, top), v_set1(ATT_LOWEST));
  return v_if_below(max, v_set1(TILE_PAIRS ? ATT_HIGHEST / 4 : ATT_HIGHEST), max, v_set1(dc__f32_of_bits(DC__NAN_F32)));
}

/* Panels of nr queries that hold the first `rows` of a block. */
DC_INLINE int64_t att_panels(int64_t rows, int64_t queries, int nr) { return (att_least(rows, queries) + nr - 1) / nr; }

/* n scores of 16 queries, number g of the block, become probabilities. top: the largest of them; begun: there were keys
 * before. */
DC_INLINE void att_absorb(const att_scratch *s, float factor, int64_t g, float *at, vf top, int64_t n, int64_t width,
                          int begun, int nr) {
  const vf scale = v_set1(factor), old = v_load32(s->max + g, LANES);
  float *out = s->out + g / nr * width * nr + g % nr;
  float *p = TILE_PAIRS ? s->p + g / nr * (ATT_CHUNK / 2) * nr + g % nr : at;
  const vf max = att_maximum(old, v_mul(top, scale));
  const vf sum = att_exponentials(p, at, n, scale, max, nr), keep = v_exp_nonpos(v_sub(old, max));
  v_store32(s->sum + g, LANES, v_fma(v_load32(s->sum + g, LANES), keep, sum));
  v_store32(s->max + g, LANES, max);
  if (begun && v_signs(v_sub(old, max))) att_shrink(out, width, keep, nr); /* a maximum grew */
}

/* A query's result, divided by its sum and the share that dropout keeps, and its lse. */
DC_INLINE void att_put(const dc_attention_args *a, int dt, int64_t b, int64_t h, int64_t i, const float *row, float max,
                       float sum, float keep) {
  const tile_rows out = att_head(a->out, dt, a->out_stride, b, h, a->rows, a->dim);
  char *to = (char *)(uintptr_t)out.at + i * out.stride;
  const float by = 1.0f / (sum * keep);
  for (int64_t c = 0; c < a->dim; c += LANES)
    v_put(to, dt, c, a->dim - c < LANES ? (int)(a->dim - c) : LANES,
          sum == 0.0f ? v_set1(0.0f) : v_mul(v_load32(row + c, LANES), v_set1(by)));
  a->lse[(b * a->heads + h) * a->rows + i] = sum == 0.0f ? HUGE_VALF : dc__canonical_f32(max + logf(sum));
}

/* out^T goes to its rows. */
DC_INLINE void att_finish_as(const dc_attention_args *a, const att_scratch *s, float keep, int dt, int64_t b, int64_t h,
                             int64_t i, int64_t queries, int64_t width, int nr) {
  float rows[LANES * TILE_DIM];
  for (int64_t r = 0; r < queries && i + r < a->rows; r++) {
    if (r % LANES == 0) att_rows_of(rows, s->out, r, width, nr);
    att_put(a, dt, b, h, i + r, rows + r % LANES * width, s->max[r], s->sum[r], keep);
  }
}
static __attribute__((noinline)) void att_finish(const dc_attention_args *a, const att_scratch *s, float keep,
                                                 int64_t b, int64_t h, int64_t i, int64_t queries, int64_t width,
                                                 int nr) {
  TILE_FOR(a->dtype, DT, att_finish_as(a, s, keep, DT, b, h, i, queries, width, nr));
}

/* ---- forward, all of the keys --------------------------------------------------------------------------------------
 */
#if !TILE_PAIRS /* pairs go by tiles in any case */
/* Scores of 16 queries (column `at` of a panel) and n keys from c on: hides what they don't see, returns the largest.
 */
DC_INLINE vf att_largest(const dc_attention_args *a, float *at, int64_t i, int64_t c, int64_t n) {
  vf max = v_set1(-HUGE_VALF);
  const int64_t open = att_limit(a->keys, a->causal, a->diagonal, i + 1) - c; /* seen by all 16 */
  int64_t j = 0;
  for (; j < n && j < open; j++) max = v_raise(max, v_load32(at + j * NR, LANES));
  for (; j < n; j++) {
    vf x = v_load32(at + j * NR, LANES);
    if (a->causal) x = att_seen(x, v_set1(-HUGE_VALF), i, c + j, a->diagonal);
    if (c + j >= a->keys) x = v_set1(-HUGE_VALF);
    v_store32(at + j * NR, LANES, x);
    max = v_raise(max, x);
  }
  return max;
}

DC_INLINE void att_softmax(const dc_attention_args *a, const att_scratch *s, int64_t i, int64_t c, int64_t n,
                           int64_t queries, int64_t width) {
  for (int64_t g = 0; g < queries; g += LANES) {
    float *at = s->score + g / NR * ATT_CHUNK * NR + g % NR;
    att_absorb(s, a->scale, g, at, att_largest(a, at, i + g, c, n), n, width, c > 0, NR);
  }
}

/* All keys, or those up to the diagonal; floats. */
DC_INLINE void att_queries(const dc_attention_args *a, const att_scratch *s, const tile_rows *q, int64_t b, int64_t h,
                           int64_t i) {
  const int64_t width = q->width, limit = att_limit(a->keys, a->causal, a->diagonal, i + ATT_QUERIES);
  const int64_t panels = att_panels(a->rows - i, ATT_QUERIES, NR), queries = panels * NR;
  const tile_panels score = {s->score, ATT_CHUNK * NR}, query = {s->q, width * NR}, out = {s->out, width * NR};
  for (int r = 0; r < ATT_QUERIES; r++) s->max[r] = -HUGE_VALF, s->sum[r] = 0.0f;
  if (limit <= 0) memset(s->out, 0, (size_t)(ATT_QUERIES * width) * sizeof *s->out);
  tile_pack_across(s->q, q, a->dtype, i, queries, NR);
  for (int64_t c = 0; c < limit; c += ATT_CHUNK) {
    const int64_t n = att_chunk(limit, c);
    tile_multiply(score, tile_by_rows(s->k + c * width, width, MR), query, n, panels, width, NR, 0);
    att_softmax(a, s, i, c, n, queries, width);
    const tile_left v = att_columns(s->v, c, s->keys, MR);
    if (c == 0) tile_multiply(out, v, score, width, panels, n, NR, 0);
    else tile_multiply(out, v, score, width, panels, n, NR, 1);
  }
  att_finish(a, s, 1.0f, b, h, i, queries, width, NR);
}

/* ---- forward, few queries and all of the keys ----------------------------------------------------------------------
 */
/* Of the heads that share one of k and v together, as when a text is generated token by token: vectors are of keys,
 * then of columns, nothing is packed, and the sums are those of the blocks. */
enum { ATT_FEW = 8 };

typedef struct att_one {
  float *q, *out, *score; /* [width], [width], [ATT_CHUNK] */
  float max, sum;
  int64_t h, i;
} att_one;

/* Scores of `count` queries and 16 keys from j on. */
DC_INLINE void att_few_scores(const att_one *few, int64_t count, int dt, const tile_rows *k, int64_t j, int64_t to) {
  vf sum[ATT_FEW];
  for (int64_t n = 0; n < count; n++) sum[n] = v_set1(0.0f);
  for (int64_t c = 0; c < k->width; c += LANES) {
    vf t[LANES];
    if (j + LANES <= k->count && c + LANES <= k->dim)
      for (int r = 0; r < LANES; r++) t[r] = v_get(k->at + (j + r) * k->stride, dt, c, LANES);
    else
      for (int r = 0; r < LANES; r++) t[r] = tile_some_floats(k, dt, j + r, c);
    v_turn(t);
    for (int64_t n = 0; n < count; n++)
      TILE_UNROLL for (int r = 0; r < LANES; r++) sum[n] = v_fma(t[r], v_set1(few[n].q[c + r]), sum[n]);
  }
  for (int64_t n = 0; n < count; n++) v_store32(few[n].score + to, LANES, sum[n]);
}

/* The n scores from key c on become probabilities. Returns what was summed so far counts of itself. */
DC_INLINE vf att_one_absorb(const dc_attention_args *a, att_one *one, int64_t c, int64_t n) {
  const int64_t seen = a->causal ? att_least(a->keys, one->i + a->diagonal + 1) : a->keys; /* keys below it */
  const vf scale = v_set1(a->scale), old = v_set1(one->max), hidden = v_set1(-HUGE_VALF);
  vf top = hidden;
  for (int64_t j = 0; j < n; j += LANES) {
    vf x = v_load32(one->score + j, LANES);
    if (c + j + LANES > seen) {
      x = v_if_below(v_add(vi_float(vi_lanes()), v_set1((float)(c + j))), v_set1((float)seen), x, hidden);
      v_store32(one->score + j, LANES, x);
    }
    top = v_raise(top, x);
  }
  top = v_raise(top, v_swap8(top)), top = v_raise(top, v_swap4(top));
  top = v_raise(top, v_swap2(top)), top = v_raise(top, v_swap1(top));
  const vf max = att_maximum(old, v_mul(top, scale)), keep = v_exp_nonpos(v_sub(old, max));
  const vf base = v_sub(v_set1(0.0f), max);
  float sum = 0.0f, first[LANES];
  for (int64_t j = 0; j < n; j += LANES)
    v_store32(one->score + j, LANES, v_exp_nonpos(v_fma(v_load32(one->score + j, LANES), scale, base)));
  for (int64_t j = 0; j < n; j++) sum += one->score[j];
  v_store32(first, LANES, v_fma(v_set1(one->sum), keep, v_set1(sum))), one->sum = first[0];
  v_store32(first, LANES, max), one->max = first[0];
  return keep;
}

/* `abreast` vectors of columns from `at` on of one query's result get the n keys' from c on. */
DC_INLINE void att_one_add(const att_one *one, int dt, const tile_rows *v, int64_t c, int64_t n, int64_t at,
                           int abreast, vf keep) {
  const int64_t there = att_least(n, v->count - c);
  vf sum[4];
  TILE_UNROLL for (int k = 0; k < abreast; k++) sum[k] = c ? v_mul(v_load32(one->out + at + k * LANES, LANES), keep)
                                                           : v_set1(0.0f);
  if (at + abreast * LANES <= v->dim)
    for (int64_t j = 0; j < there; j++)
      TILE_UNROLL for (int k = 0; k < abreast; k++)
          sum[k] = v_fma(v_get(v->at + (c + j) * v->stride, dt, at + k * LANES, LANES), v_set1(one->score[j]), sum[k]);
  else
    for (int64_t j = 0; j < there; j++)
      for (int k = 0; k < abreast; k++)
        sum[k] = v_fma(tile_some_floats(v, dt, c + j, at + k * LANES), v_set1(one->score[j]), sum[k]);
  for (int64_t j = there; j < n; j++) /* zeros, which a NaN of the scores does not leave so */
    for (int k = 0; k < abreast; k++) sum[k] = v_fma(v_set1(0.0f), v_set1(one->score[j]), sum[k]);
  TILE_UNROLL for (int k = 0; k < abreast; k++) v_store32(one->out + at + k * LANES, LANES, sum[k]);
}

DC_INLINE void att_few(const dc_attention_args *a, int dt, const tile_rows *k, const tile_rows *v, int64_t b,
                       int64_t kv, float *scratch) {
  const int64_t group = a->heads / a->kv_heads, count = group * a->rows, width = k->width;
  const int64_t limit = att_limit(a->keys, a->causal, a->diagonal, ATT_QUERIES);
  att_one few[ATT_FEW];
  for (int64_t n = 0; n < count; n++, scratch += 2 * width + ATT_CHUNK) {
    const int64_t h = kv * group + n / a->rows, i = n % a->rows;
    const tile_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
    few[n] = (att_one){scratch, scratch + width, scratch + 2 * width, -HUGE_VALF, 0.0f, h, i};
    tile_floats(few[n].q, &q, dt, i);
    memset(few[n].out, 0, (size_t)width * sizeof *few[n].out);
  }
  for (int64_t c = 0; c < limit; c += ATT_CHUNK) {
    const int64_t chunk = att_chunk(limit, c);
    for (int64_t j = 0; j < chunk; j += LANES) att_few_scores(few, count, dt, k, c + j, j);
    for (int64_t n = 0; n < count; n++) {
      const vf keep = att_one_absorb(a, &few[n], c, chunk);
      int64_t at = 0;
      for (; at + 4 * LANES <= width; at += 4 * LANES) att_one_add(&few[n], dt, v, c, chunk, at, 4, keep);
      for (; at < width; at += LANES) att_one_add(&few[n], dt, v, c, chunk, at, 1, keep);
    }
  }
  for (int64_t n = 0; n < count; n++) att_put(a, dt, b, few[n].h, few[n].i, few[n].out, few[n].max, few[n].sum, 1.0f);
}
#endif

/* ---- forward, some of the keys -------------------------------------------------------------------------------------
 */
/* As att_largest, of queries g to g + 16 of the tiles, i being the first of them; adds the biases. */
DC_INLINE vf att_largest_seen(const att_sight *s, float *at, int64_t i, int64_t g, const att_tile *tiles, int count,
                              int64_t tile, int nr) {
  const vf hidden = v_set1(-HUGE_VALF), group = s->q_group ? att_group_lanes(s, i) : hidden;
  vf max = hidden;
  for (int t = 0; t < count; t++) {
    const enum att_part part = tiles[t].part[g / ATT_STEP];
    if (s->bias && part != ATT_HIDDEN) att_add_rows(at, s, i, tiles[t].first, tile, nr);
    for (int64_t r = 0; r < tile; r++, at += nr) {
      vf x = v_load32(at, LANES);
      if (part == ATT_WHOLE && !s->biased) {
        max = v_raise(max, x);
        continue;
      }
      if (s->biased) x = att_add_bias(x, s, i, tiles[t].first + r);
      if (part == ATT_SOME) x = att_mask_some(x, hidden, s, group, i, tiles[t].first + r);
      if (part == ATT_HIDDEN) x = hidden;
      v_store32(at, LANES, x);
      max = v_raise(max, x);
    }
  }
  return max;
}

/* Dropout of probabilities of queries g to g + 16 of the tiles, i being the first of them. */
static __attribute__((noinline)) void att_drop(float *p, const att_sight *s, int64_t i, int64_t g,
                                               const att_tile *tiles, int count, int64_t tile, int nr) {
  uint16_t keep[ATT_KEYS];
  for (int t = 0; t < count; t++, p += tile_words(tile) * nr) {
    if (tiles[t].part[g / ATT_STEP] == ATT_HIDDEN) continue;
    att_keep(keep, s, i, tiles[t].first, tile);
    if (TILE_PAIRS) {
      for (int64_t r = 0; r < tile; r += 2) {
        const vi both = vi_load(p + r / 2 * nr), low = vi_only(vi_and_or(both, 0xffff, 0), keep[r]);
        vi_store(p + r / 2 * nr, vi_or(low, vi_only(vi_and_or(both, (int)0xffff0000, 0), keep[r + 1])));
      }
      continue;
    }
    for (int64_t r = 0; r < tile; r++) v_store32(p + r * nr, LANES, v_only(v_load32(p + r * nr, LANES), keep[r]));
  }
}

/* Scores of the tiles and a panel of queries: neighbours in one product. */
DC_INLINE void att_score_tiles(const att_scratch *s, tile_panels query, tile_panels score, const att_tile *tiles,
                               int count, int64_t tile, int64_t w, int nr) {
  for (int t = 0, n; t < count; t += n) {
    for (n = 1; t + n < count && tiles[t + n].first == tiles[t].first + n * tile;) n++;
    tile_multiply((tile_panels){score.at + t * tile * nr, 0}, tile_by_rows(s->k + tiles[t].first * w, w, tile_mr(nr)),
                  query, n * tile, 1, w, nr, 0);
  }
}

/* A panel's probabilities of the tiles times their v. */
DC_INLINE void att_add_tiles(const att_scratch *s, tile_panels out, tile_panels p, const att_tile *tiles, int count,
                             int64_t tile, int64_t width, int nr, int begun) {
  const int64_t words = tile_words(tile);
  int64_t first[ATT_CHUNK / ATT_STEP];
  for (int t = 0; t < count; t++) first[t] = TILE_PAIRS ? tiles[t].first / 2 * width : tiles[t].first;
  const tile_runs runs = {first, count, words};
  const tile_left v = TILE_PAIRS ? tile_by_rows(s->v, words, tile_mr(nr)) : att_columns(s->v, 0, s->keys, tile_mr(nr));
  if (begun) tile_multiply_runs(out, v, p, width, 1, runs, nr, 1);
  else tile_multiply_runs(out, v, p, width, 1, runs, nr, 0);
}

/* `queries` from i on; tile: keys that are seen or not together. */
DC_INLINE void att_some_queries(const dc_attention_args *a, const att_sight *sight, const att_scratch *s,
                                const tile_rows *q, int64_t i, int64_t queries, int64_t tile, int nr) {
  const int64_t width = q->width, w = tile_words(width), chunk = tile_words(ATT_CHUNK);
  const int64_t panels = att_panels(a->rows - i, queries, nr);
  const tile_panels query = {s->q, w * nr}, out = {s->out, width * nr};
  const tile_panels p = TILE_PAIRS ? (tile_panels){s->p, chunk * nr} : (tile_panels){s->score, ATT_CHUNK * nr};
  att_tile tiles[ATT_CHUNK / ATT_STEP];
  int64_t at = 0;
  int begun = 0;
  for (int64_t r = 0; r < queries; r++) s->max[r] = -HUGE_VALF, s->sum[r] = 0.0f;
  tile_pack_across(s->q, q, a->dtype, i, panels * nr, nr);
  for (int count; (count = att_next_tiles(sight, i, queries, tile, &at, tiles)) > 0; begun = 1)
    for (int64_t n = 0; n < panels; n++) { /* one by one: a panel's scores and probabilities stay in the first cache */
      const tile_panels one = {s->score + n * ATT_CHUNK * nr, 0};
      att_score_tiles(s, (tile_panels){query.at + n * query.step, 0}, one, tiles, count, tile, w, nr);
      for (int64_t g = n * nr; g < (n + 1) * nr; g += LANES) {
        float *score = one.at + g % nr;
        const vf top = att_largest_seen(sight, score, i + g, g, tiles, count, tile, nr);
        att_absorb(s, a->scale, g, score, top, count * tile, width, begun, nr);
        if (sight->threshold) att_drop(p.at + n * p.step + g % nr, sight, i + g, g, tiles, count, tile, nr);
      }
      att_add_tiles(s, (tile_panels){out.at + n * out.step, 0}, (tile_panels){p.at + n * p.step, 0}, tiles, count, tile,
                    width, nr, begun);
    }
  if (!begun) memset(s->out, 0, (size_t)(queries * width) * sizeof *s->out);
}

DC_INLINE void att_some_head(const dc_attention_args *a, const att_scratch *s, int64_t b, int64_t h, int64_t width) {
  const tile_rows q = att_head(a->q, a->dtype, a->q_stride, b, h, a->rows, a->dim);
  const att_sight sight = ATT_SIGHT(a, b, h);
  const int64_t queries = att_tile_queries(&a->mask), tile = att_tile_keys(&a->mask);
  for (int64_t i = 0; i < a->rows; i += queries) {
    if (tile == 64) att_some_queries(a, &sight, s, &q, i, 64, 64, NR);
    else if (tile == 32) att_some_queries(a, &sight, s, &q, i, 32, 32, NR);
    else att_some_queries(a, &sight, s, &q, i, 16, 16, LANES);
    att_finish(a, s, sight.keep, b, h, i, queries, width, tile == 16 ? LANES : NR);
  }
}

/* v of a head as a left operand. */
DC_INLINE void att_pack_values(const att_scratch *s, const tile_rows *v, int dt, int64_t tile) {
#if TILE_PAIRS
  (void)dt;
  att_pairs_turned(s->v, v, 0, s->keys, tile);
#else
  att_floats_down(s->v, v, dt, 0, s->keys, tile == 16 ? tile_mr(LANES) : MR);
#endif
}

void DC_BODY(attention)(const dc_attention_args *a, int64_t b, int64_t kv, float *scratch) {
  TILE_OTHERS(attention, (a, b, kv, scratch));
  const int dt = a->dtype;
  const int64_t group = a->heads / a->kv_heads;
  const tile_rows k = att_head(a->k, dt, a->k_stride, b, kv, a->keys, a->dim);
  const tile_rows v = att_head(a->v, dt, a->v_stride, b, kv, a->keys, a->dim);
  const att_scratch s = att_lay_out(scratch, a->keys, k.width);
#if !TILE_PAIRS
  if (!att_masked(&a->mask) && group * a->rows <= ATT_FEW) {
    TILE_FOR(dt, DT, att_few(a, DT, &k, &v, b, kv, scratch));
    return;
  }
#endif
  tile_pack_rows(s.k, &k, dt, 0, s.keys);
  att_pack_values(&s, &v, dt, att_tile_keys(&a->mask));
  att_begin();
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
#if !TILE_PAIRS
    if (!att_masked(&a->mask)) {
      const tile_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
      for (int64_t i = 0; i < a->rows; i += ATT_QUERIES) att_queries(a, &s, &q, b, h, i);
      continue;
    }
#endif
    att_some_head(a, &s, b, h, k.width);
  }
  att_end();
}
