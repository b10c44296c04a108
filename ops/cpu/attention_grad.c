/* attention_grad.c: bodies of dc_attention_grad, products of small matrices (tile.h). */
#include "cpu/attention.h"

/* A block is `queries` x `keys`, of which the scratch has room for ATT_QUERIES x ATT_KEYS. */
typedef struct att_back {
  float *k, *v, *kt; /* left, of ATT_ABREAST blocks: [keys][words] twice; of floats k itself, of pairs [width][words of
                          keys] */
  float *q, *dout, *q_down, *dout_down; /* right, by blocks of queries */
  float *dq, *dk, *dv; /* [panels of nr queries][width][nr]; of ATT_ABREAST blocks, or of all where heads share them:
                          [blocks][width / NR][keys][NR] */
  float *lse, *delta; /* [queries] */
  float *score, *dp, *p_rows, *ds_rows, *ds; /* a block */
} att_back;

DC_INLINE att_back att_lay_out_back(float *at, int64_t rows, int64_t keys, int64_t width, int64_t group) {
  const int64_t one = ATT_ABREAST * ATT_KEYS * width, all = group > 1 ? tile_round(keys, ATT_KEYS) * width : one;
  const int64_t q = tile_round(rows, ATT_QUERIES), qp = q * width, block = ATT_QUERIES * ATT_KEYS;
  att_back s;
  s.k = at, s.v = s.k + one, s.kt = s.v + one, s.dk = s.kt + one, s.dv = s.dk + all;
  s.q = s.dv + all, s.dout = s.q + qp, s.q_down = s.dout + qp, s.dout_down = s.q_down + qp, s.dq = s.dout_down + qp;
  s.lse = s.dq + qp, s.delta = s.lse + q;
  s.score = s.delta + q, s.dp = s.score + block, s.p_rows = s.dp + block, s.ds_rows = s.p_rows + block,
  s.ds = s.ds_rows + block;
  return s;
}

/* sum(dout * out) of every query, in 16 sums; and lse, of pairs as a power of 2. */
DC_INLINE void att_deltas_of(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h) {
  const tile_rows dout = att_head(a->dout, dt, a->dout_stride, b, h, a->rows, a->dim);
  const tile_rows out = att_head(a->out, dt, a->out_stride, b, h, a->rows, a->dim);
  const float *lse = a->lse + (b * a->heads + h) * a->rows;
  for (int64_t i = 0; i < tile_round(a->rows, ATT_QUERIES); i++) {
    s->lse[i] = HUGE_VALF, s->delta[i] = 0.0f;
    if (i >= a->rows) continue;
    vf sum = v_set1(0.0f);
    for (int64_t c = 0; c < a->dim; c += LANES) {
      const int r = a->dim - c < LANES ? (int)(a->dim - c) : LANES;
      sum = v_fma(v_get(dout.at + i * dout.stride, dt, c, r), v_get(out.at + i * out.stride, dt, c, r), sum);
    }
    s->lse[i] = TILE_PAIRS ? lse[i] * DC__EXP_LOG2E : lse[i], s->delta[i] = v_tree(sum);
  }
}
static __attribute__((noinline)) void att_deltas(const dc_attention_grad_args *a, const att_back *s, int64_t b,
                                                 int64_t h) {
  TILE_FOR(a->dtype, DT, att_deltas_of(a, s, DT, b, h));
}

typedef struct att_two {
  vf p, ds;
} att_two;

/* Of one block: how its scores become p and ds. */
typedef struct att_turn {
  const att_sight *sight;
  const enum att_part *part; /* of each 16 queries */
  const uint16_t *keep; /* dropout's: [queries / 16][ATT_KEYS]; NULL: none */
  int64_t i, j;
  vf scale;
  int raw; /* ds before it is scaled takes the place of the scores */
} att_turn;

/* 16 queries from g on and key r of the block; of pairs ds is not scaled: dq and dk are, at the end. */
DC_INLINE att_two att_probability(const att_back *s, const att_turn *o, int64_t at, int64_t g, int64_t r, int plain) {
  const vf lse = v_load32(s->lse + o->i + g, LANES), none = v_set1(0.0f);
  const int64_t i = o->i + g, j = o->j + r;
  vf x = v_sub(none, lse), score = v_load32(s->score + at, LANES), dp = v_load32(s->dp + at, LANES);
  att_two t;
  if (!plain && o->sight->biased) score = att_add_bias(score, o->sight, i, j);
#if TILE_PAIRS
  t.p = v_exp2_low(v_fma(score, o->scale, x));
#else
  t.p = v_exp_nonpos(v_min(v_fma(score, o->scale, x), none));
#endif
  if (!plain && o->part[g / ATT_STEP] == ATT_SOME) {
    const vf group = o->sight->q_group ? att_group_lanes(o->sight, i) : none;
    t.p = att_mask_some(t.p, none, o->sight, group, i, j);
  }
  if (!plain && o->part[g / ATT_STEP] == ATT_HIDDEN) t.p = none;
  const vf whole = t.p;
  if (!plain && o->keep) {
    const vf factor = v_only(v_set1(o->sight->factor), o->keep[g / ATT_STEP * ATT_KEYS + r]);
    t.p = v_mul(t.p, factor), dp = v_mul(dp, factor);
  }
  t.ds = v_mul(whole, v_sub(dp, v_load32(s->delta + i, LANES)));
  if (!plain && o->raw) v_store32(s->score + at, LANES, t.ds);
  if (!TILE_PAIRS) t.ds = v_mul(t.ds, o->scale);
  return t;
}

/* The block's scores and dp become p and ds: row by row (left operands of dv and dk), and ds in panels (right one of
 * dq). plain: all of it is seen, without biases and dropout. */
DC_INLINE void att_block_ds(const att_back *s, const att_turn *o, int64_t queries, int64_t keys, int plain) {
  const int nr = queries < NR ? LANES : NR, both = queries > LANES; /* vectors of 16 queries at a time */
  for (int64_t r = 0; r < keys; r += 2)
    for (int64_t g = 0; g < queries; g += (both + 1) * LANES) {
      att_two t[2][2];
      for (int k = 0; k < 2; k++)
        for (int u = 0; u <= both; u++) {
          const int64_t c = g + u * LANES;
          t[k][u] = att_probability(s, o, (c / nr * keys + r + k) * nr + c % nr, c, r + k, plain);
        }
#if TILE_PAIRS
      if (both) { /* a row's queries in pairs 16 apart; ds also in pairs of rows */
        vi ds[2][2];
        for (int k = 0; k < 2; k++) {
          for (int u = 0; u < 2; u++) ds[k][u] = v_half_up(t[k][u].ds);
          vi_store(s->p_rows + ((r + k) * queries + g) / 2, vi_upper_pairs(v_half_up(t[k][0].p), v_half_up(t[k][1].p)));
          vi_store(s->ds_rows + ((r + k) * queries + g) / 2, vi_upper_pairs(ds[k][0], ds[k][1]));
        }
        for (int u = 0; u < 2; u++)
          vi_store(s->ds + (g / nr * (keys / 2) + r / 2) * nr + u * LANES, vi_upper_pairs(ds[0][u], ds[1][u]));
        continue;
      }
      /* two rows of 16 queries */
      vi_store(s->p_rows + r * queries / 2, v_join_bf16(t[0][0].p, t[1][0].p));
      vi_store(s->ds_rows + r * queries / 2, v_join_bf16(t[0][0].ds, t[1][0].ds));
      vi_store(s->ds + r / 2 * nr, vi_upper_pairs(v_half_up(t[0][0].ds), v_half_up(t[1][0].ds)));
#else
      for (int k = 0; k < 2; k++)
        for (int u = 0; u <= both; u++) {
          const int64_t c = g + u * LANES;
          v_store32(s->p_rows + (r + k) * queries + c, LANES, t[k][u].p);
          v_store32(s->ds_rows + (r + k) * queries + c, LANES, t[k][u].ds);
          v_store32(s->ds + (c / nr * keys + r + k) * nr + c % nr, LANES, t[k][u].ds);
        }
#endif
    }
}

/* The block's ds before it is scaled, which lies where its scores did, is added to the bias's gradient. */
static __attribute__((noinline)) void att_give_bias(const dc_attention_grad_args *a, const att_back *s,
                                                    const att_turn *o, int64_t b, int64_t h, int64_t queries,
                                                    int64_t keys, int nr) {
  float *head = a->dbias + b * a->dbias_stride[0] + h * a->dbias_stride[1];
  for (int64_t g = 0; g < queries; g += LANES)
    for (int64_t k = 0; k < keys && o->j + k < a->keys; k += LANES) {
      const int64_t left = a->keys - o->j - k;
      const int n = left < LANES ? (int)left : LANES;
      vf x[LANES];
      if (o->part[g / ATT_STEP] == ATT_HIDDEN) continue;
      for (int64_t t = 0; t < LANES; t++) x[t] = v_load32(s->score + (g / nr * keys + k + t) * nr + g % nr, LANES);
      v_turn(x);
      for (int64_t r = 0; r < LANES && o->i + g + r < a->rows; r++) {
        float *row = head + (o->i + g + r) * a->dbias_stride[2] + o->j + k;
        v_put(row, DC_F32, 0, n, v_add(v_load32(row, n), x[r]));
      }
    }
}

/* One block, if something of it is seen. */
DC_INLINE void att_block(const dc_attention_grad_args *a, const att_back *s, const att_sight *sight, int64_t b,
                         int64_t h, int64_t i, int64_t queries, int64_t j, int64_t keys, int64_t width) {
  const int64_t at = j / keys % ATT_ABREAST * keys; /* of what is there of the keys */
  const int64_t w = tile_words(width), q_words = tile_words(queries), k_words = tile_words(keys);
  const int nr = queries < NR ? LANES : NR, mr = tile_mr(nr);
  const int64_t q = i * w, across = width / NR, panels = queries / nr, sums = (a->heads > a->kv_heads ? j : at) * width;
  const tile_panels score = {s->score, keys * nr}, dp = {s->dp, keys * nr};
  att_tile t;
  if (!att_look(sight, i, queries, j, keys, &t)) return;
  uint16_t keep[ATT_QUERIES / ATT_STEP * ATT_KEYS];
  const float scale = TILE_PAIRS ? a->scale * DC__EXP_LOG2E : a->scale;
  const att_turn turn = {sight, t.part, sight->threshold ? keep : NULL, i, j, v_set1(scale), a->dbias != NULL};
  int plain = !sight->biased && !sight->bias && !sight->threshold;
  for (int64_t g = 0; g < queries; g += LANES) plain &= t.part[g / LANES] == ATT_WHOLE;
  tile_multiply(score, tile_by_rows(s->k + at * w, w, mr), (tile_panels){s->q + q, w * nr}, keys, panels, w, nr, 0);
  tile_multiply(dp, tile_by_rows(s->v + at * w, w, mr), (tile_panels){s->dout + q, w * nr}, keys, panels, w, nr, 0);
  for (int64_t g = 0; !plain && g < queries; g += LANES) {
    if (t.part[g / LANES] == ATT_HIDDEN) continue;
    if (sight->bias) att_add_rows(s->score + g / nr * keys * nr + g % nr, sight, i + g, j, keys, nr);
    if (sight->threshold) att_keep(keep + g / LANES * ATT_KEYS, sight, i + g, j, keys);
  }
  if (plain) att_block_ds(s, &turn, queries, keys, 1);
  else att_block_ds(s, &turn, queries, keys, 0);
  if (a->dbias) att_give_bias(a, s, &turn, b, h, queries, keys, nr);
  const tile_panels dk = {s->dk + sums, keys * NR}, dv = {s->dv + sums, keys * NR};
  tile_multiply(dv, tile_by_rows(s->p_rows, q_words, MR), (tile_panels){s->dout_down + q, q_words * NR}, keys, across,
                q_words, NR, 1);
  tile_multiply(dk, tile_by_rows(s->ds_rows, q_words, MR), (tile_panels){s->q_down + q, q_words * NR}, keys, across,
                q_words, NR, 1);
  const tile_left kt = TILE_PAIRS ? tile_by_rows(s->kt + at * w, k_words, mr)
                                  : tile_by_columns(s->kt + at * w, width, mr);
  tile_multiply((tile_panels){s->dq + i * width, width * nr}, kt, (tile_panels){s->ds, k_words * nr}, width, panels,
                k_words, nr, 1);
}

DC_INLINE void att_store_row(void *to, int dt, const float *row, float factor, int64_t dim) {
  for (int64_t c = 0; c < dim; c += LANES) {
    const int r = dim - c < LANES ? (int)(dim - c) : LANES;
    v_put(to, dt, c, r, v_mul(v_load32(row + c, LANES), v_set1(factor)));
  }
}

DC_INLINE void att_give_queries_as(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h,
                                   int64_t width, int nr, float factor) {
  const tile_rows to = att_head(a->dq, dt, a->dq_stride, b, h, a->rows, a->dim);
  float rows[LANES * TILE_DIM];
  for (int64_t i = 0; i < a->rows; i++) {
    if (i % LANES == 0) att_rows_of(rows, s->dq, i, width, nr);
    att_store_row((char *)(uintptr_t)to.at + i * to.stride, dt, rows + i % LANES * width, factor, a->dim);
  }
}
static __attribute__((noinline)) void att_give_queries(const dc_attention_grad_args *a, const att_back *s, int64_t b,
                                                       int64_t h, int64_t width, int nr, float factor) {
  TILE_FOR(a->dtype, DT, att_give_queries_as(a, s, DT, b, h, width, nr, factor));
}

/* A block of dk or dv goes to its rows. */
DC_INLINE void att_give_keys_as(void *p, const int64_t *stride, const dc_attention_grad_args *a, int dt, int64_t b,
                                int64_t kv, const float *from, float factor, int64_t j, int64_t keys, int64_t width) {
  const tile_rows to = att_head(p, dt, stride, b, kv, a->keys, a->dim);
  const vf by = v_set1(factor);
  for (int64_t r = 0; r < keys && j + r < a->keys; r++)
    for (int64_t c = 0; c < a->dim; c += LANES)
      v_put((char *)(uintptr_t)to.at + (j + r) * to.stride, dt, c, a->dim - c < LANES ? (int)(a->dim - c) : LANES,
            v_mul(v_load32(from + (c / NR * keys + r) * NR + c % NR, LANES), by));
}
static __attribute__((noinline)) void att_give_keys(void *p, const int64_t *stride, const dc_attention_grad_args *a,
                                                    int64_t b, int64_t kv, const float *from, float factor, int64_t j,
                                                    int64_t keys, int64_t width) {
  TILE_FOR(a->dtype, DT, att_give_keys_as(p, stride, a, DT, b, kv, from, factor, j, keys, width));
}

/* Operands of a block of keys, number t of those abreast. */
DC_INLINE void att_pack_keys(const att_back *s, const tile_rows *k, const tile_rows *v, int dt, int64_t j, int64_t t,
                             int64_t keys) {
  const int64_t at = t * keys * tile_words(k->width);
  tile_pack_rows(s->k + at, k, dt, j, keys);
  tile_pack_rows(s->v + at, v, dt, j, keys);
#if TILE_PAIRS
  att_pairs_turned(s->kt + at, k, j, keys, keys);
#endif
}

DC_INLINE void att_back_head(const dc_attention_grad_args *a, const att_back *s, int64_t b, int64_t h, int64_t queries,
                             int64_t keys) {
  const int dt = a->dtype;
  const tile_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
  const tile_rows dout = att_head(a->dout, dt, a->dout_stride, b, h, a->rows, a->dim);
  const int64_t group = a->heads / a->kv_heads, kv = h / group;
  const tile_rows k = att_head(a->k, dt, a->k_stride, b, kv, a->keys, a->dim);
  const tile_rows v = att_head(a->v, dt, a->v_stride, b, kv, a->keys, a->dim);
  const int64_t w = tile_words(q.width), qp = tile_round(a->rows, ATT_QUERIES);
  const int nr = queries < NR ? LANES : NR;
  const att_sight sight = ATT_SIGHT(a, b, h);
  for (int64_t i = 0; i < qp; i += queries) {
    tile_pack_across(s->q + i * w, &q, dt, i, queries, nr);
    tile_pack_across(s->dout + i * w, &dout, dt, i, queries, nr);
    att_pack_down(s->q_down + i * w, &q, dt, i, queries);
    att_pack_down(s->dout_down + i * w, &dout, dt, i, queries);
  }
  att_deltas(a, s, b, h);
  memset(s->dq, 0, (size_t)(qp * q.width) * sizeof *s->dq);
  const int64_t size = keys * q.width;
  for (int64_t j = 0; j < a->keys; j += ATT_ABREAST * keys) {
    int64_t next[ATT_ABREAST]; /* queries, of each of the blocks */
    const int64_t left = (a->keys - j + keys - 1) / keys, n = att_least(left, ATT_ABREAST);
    float *dk = s->dk + (group > 1 ? j * q.width : 0), *dv = s->dv + (dk - s->dk);
    for (int64_t t = 0; t < n; t++) {
      att_pack_keys(s, &k, &v, dt, j + t * keys, t, keys);
      next[t] = att_next_query(&sight, 0, j + t * keys, queries);
    }
    if (h % group == 0) memset(dk, 0, (size_t)(n * size) * sizeof *dk), memset(dv, 0, (size_t)(n * size) * sizeof *dv);
    for (;;) {
      int64_t i = a->rows;
      for (int64_t t = 0; t < n; t++) i = att_least(i, next[t]);
      if (i >= a->rows) break;
      for (int64_t t = 0; t < n; t++) {
        if (next[t] != i) continue;
        att_block(a, s, &sight, b, h, i, queries, j + t * keys, keys, q.width);
        next[t] = att_next_query(&sight, i + queries, j + t * keys, queries);
      }
    }
    for (int64_t t = 0; h % group == group - 1 && t < n; t++) {
      att_give_keys(a->dk, a->dk_stride, a, b, kv, dk + t * size, TILE_PAIRS ? a->scale : 1.0f, j + t * keys, keys,
                    q.width);
      att_give_keys(a->dv, a->dv_stride, a, b, kv, dv + t * size, 1.0f, j + t * keys, keys, q.width);
    }
  }
  att_give_queries(a, s, b, h, q.width, nr, TILE_PAIRS ? a->scale : 1.0f);
}

void DC_BODY(attention_grad)(const dc_attention_grad_args *a, int64_t b, int64_t kv, float *scratch) {
  TILE_OTHERS(attention_grad, (a, b, kv, scratch));
  const int64_t group = a->heads / a->kv_heads, keys = att_tile_keys(&a->mask);
  att_back s = att_lay_out_back(scratch, a->rows, a->keys, tile_round(a->dim, TILE_WIDTH), group);
  if (!TILE_PAIRS) s.kt = s.k;
  att_begin();
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
    if (keys == ATT_KEYS) att_back_head(a, &s, b, h, ATT_QUERIES, ATT_KEYS);
    else if (keys == 32) att_back_head(a, &s, b, h, 32, 32);
    else att_back_head(a, &s, b, h, 16, 16);
  }
  att_end();
}
