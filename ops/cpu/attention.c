/* attention.c: bodies of dc_attention and its gradient.
 *
 * Everything is a product of small matrices: `att_tile` holds MR x NR sums in registers and walks the inner dimension.
 * Its left operand lies row by row, its right one in panels of NR columns. Elements are 4-byte words: a float, or,
 * where the processor has VDPBF16PS, a pair of bf16 that are neighbours in the inner dimension (`pairs`), so one text
 * serves both.
 *
 * Scores are made transposed, keys down and queries across: maximum and sum over the keys are then vertical, 16 queries
 * a vector, and the probabilities are at once the right operand of the next product (out^T = v^T p^T). The gradient's
 * blocks also need them row by row; a store of the same vectors gives that. */
#include "ref/attention.h"
#include "cpu/exp.h"

#if defined(__AVX512F__)
enum { MR = 8, NV = 2 };
#else
enum { MR = 4, NV = 1 };
#endif
enum { NR = NV * LANES, PANELS = ATT_QUERIES / NR };
#define ATT_UNROLL _Pragma("GCC unroll 8")
#define ATT_LOWEST (-3e38f) /* a finite maximum for queries that see no key */

#if defined(__AVX512BF16__)
#define ATT_PAIRS(dt) ((dt) == DC_BF16)
#else
#define ATT_PAIRS(dt) 0
#endif

DC_INLINE int64_t att_words(int64_t n, int pairs) { return pairs ? n / 2 : n; }

/* ---- product ----------------------------------------------------------------------------------------------------- */
DC_INLINE vf att_madd(vf sum, const float *a, vf b, int pairs) {
#if defined(__AVX512BF16__)
  if (pairs) return v_dot_pairs(sum, v_bits(v_set1(*a)), v_bits(b));
#endif
  (void)pairs;
  return v_fma(v_set1(*a), b, sum);
}

/* c[MR][NR] (+)= a[MR][k] b[k][NR]; k in words. */
DC_INLINE void att_tile(float *c, const float *a, int64_t lda, const float *b, int64_t k, int pairs, int add) {
  vf sum[MR][NV];
  ATT_UNROLL for (int r = 0; r < MR; r++)
    ATT_UNROLL for (int j = 0; j < NV; j++)
      sum[r][j] = add ? v_load32(c + r * NR + j * LANES, LANES) : v_set1(0.0f);
  for (int64_t i = 0; i < k; i++) {
    vf right[NV];
    ATT_UNROLL for (int j = 0; j < NV; j++) right[j] = v_load32(b + i * NR + j * LANES, LANES);
    ATT_UNROLL for (int r = 0; r < MR; r++)
      ATT_UNROLL for (int j = 0; j < NV; j++) sum[r][j] = att_madd(sum[r][j], a + r * lda + i, right[j], pairs);
  }
  ATT_UNROLL for (int r = 0; r < MR; r++)
    ATT_UNROLL for (int j = 0; j < NV; j++) v_store32(c + r * NR + j * LANES, LANES, sum[r][j]);
}

typedef struct att_panels { /* [panels][rows][NR], and the words from one panel to the next */
  float *at;
  int64_t step;
} att_panels;

/* c[panels][rows][NR] (+)= a[rows][k] b[panels][k][NR]; rows a multiple of MR. */
DC_INLINE void att_multiply(att_panels c, const float *a, int64_t lda, att_panels b, int64_t rows, int64_t panels,
                            int64_t k, int pairs, int add) {
  for (int64_t p = 0; p < panels; p++)
    for (int64_t r = 0; r < rows; r += MR)
      att_tile(c.at + p * c.step + r * NR, a + r * lda, lda, b.at + p * b.step, k, pairs, add);
}

/* ---- operands from rows ------------------------------------------------------------------------------------------ */
typedef struct att_rows { /* rows of `dim` elements of a head; those from `count` on are zeros */
  const char *at;
  int64_t stride, count, dim, width; /* width: dim rounded up to whole panels */
} att_rows;

DC_INLINE att_rows att_head(const void *p, int dt, const int64_t *stride, int64_t b, int64_t h, int64_t count,
                            int64_t dim) {
  const int64_t size = dt == DC_F32 ? 4 : 2;
  return (att_rows){(const char *)p + size * (b * stride[0] + h * stride[1]), size * stride[2], count, dim,
                    att_round(dim, ATT_WIDTH)};
}

/* Row i as floats, zeros behind it. */
DC_INLINE void att_floats(float *to, const att_rows *x, int dt, int64_t i) {
  const char *row = x->at + i * x->stride;
  for (int64_t c = 0; c < x->width; c += LANES) {
    const int64_t left = i < x->count ? x->dim - c : 0;
    v_store32(to + c, LANES, left <= 0 ? v_set1(0.0f) : v_get(row, dt, c, left < LANES ? (int)left : LANES));
  }
}

/* Row i as words: floats, or bf16 as they lie. */
DC_INLINE void att_row(float *to, const att_rows *x, int dt, int64_t i, int pairs) {
  if (!pairs) {
    att_floats(to, x, dt, i);
    return;
  }
  const int64_t bytes = i < x->count ? 2 * x->dim : 0;
  if (bytes) memcpy(to, x->at + i * x->stride, (size_t)bytes);
  memset((char *)to + bytes, 0, (size_t)(2 * x->width - bytes));
}

/* Words of rows i and i + 1 that are neighbours down: row i's in the lower halves. */
DC_INLINE void att_row_pair(uint32_t *to, const att_rows *x, int64_t i) {
  uint16_t row[2][ATT_DIM];
  for (int k = 0; k < 2; k++) att_row((float *)row[k], x, DC_BF16, i + k, 1);
  for (int64_t c = 0; c < x->width; c++) to[c] = (uint32_t)row[0][c] | (uint32_t)row[1][c] << 16;
}

/* Left operand, inner dimension across the rows: [n][words of width]. */
DC_INLINE void att_pack_rows(float *to, const att_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  const int64_t w = att_words(x->width, pairs);
  for (int64_t i = 0; i < n; i++) att_row(to + i * w, x, dt, begin + i, pairs);
}

/* Left operand, inner dimension down the rows: [width][words of n]. */
DC_INLINE void att_pack_columns(float *to, const att_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  float words[ATT_DIM];
  const int64_t lda = att_words(n, pairs);
  for (int64_t i = 0; i < lda; i++) {
    if (pairs) att_row_pair((uint32_t *)words, x, begin + 2 * i);
    else att_floats(words, x, dt, begin + i);
    for (int64_t c = 0; c < x->width; c++) to[c * lda + i] = words[c];
  }
}

/* Right operand, inner dimension across the rows: [panels of n][words of width][NR]. */
DC_INLINE void att_pack_across(float *to, const att_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  float words[ATT_DIM];
  const int64_t w = att_words(x->width, pairs);
  for (int64_t i = 0; i < n; i++) {
    float *column = to + i / NR * w * NR + i % NR;
    att_row(words, x, dt, begin + i, pairs);
    for (int64_t c = 0; c < w; c++) column[c * NR] = words[c];
  }
}

/* Right operand, inner dimension down the rows: [panels of width][words of n][NR]. */
DC_INLINE void att_pack_down(float *to, const att_rows *x, int dt, int64_t begin, int64_t n, int pairs) {
  float words[ATT_DIM];
  const int64_t k = att_words(n, pairs);
  for (int64_t i = 0; i < k; i++) {
    if (pairs) att_row_pair((uint32_t *)words, x, begin + 2 * i);
    else att_floats(words, x, dt, begin + i);
    for (int64_t c = 0; c < x->width; c += NR) memcpy(to + (c / NR * k + i) * NR, words + c, NR * sizeof *to);
  }
}

/* ---- masks ------------------------------------------------------------------------------------------------------- */
/* Of 16 queries from i on: instead of `hidden`, x where they see key j. */
DC_INLINE vf att_seen(vf x, vf hidden, int64_t i, int64_t j, int64_t diagonal) {
  const vf last = v_add(vi_float(vi_lanes()), v_set1((float)(i + diagonal)));
  return v_if_below(last, v_set1((float)j), hidden, x);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */
typedef struct att_scratch {
  float *k, *v;            /* [keys][words], [chunks][width][words] */
  float *q, *p;            /* right operands: [PANELS][words][NR], [PANELS][words of a chunk][NR] */
  float *score, *out;      /* [PANELS][ATT_CHUNK][NR], [PANELS][width][NR] */
  float *max, *sum;        /* [ATT_QUERIES] */
} att_scratch;

DC_INLINE att_scratch att_lay_out(float *at, int64_t keys, int64_t width) {
  const int64_t kp = att_round(keys, ATT_CHUNK);
  att_scratch s;
  s.k = at, s.v = s.k + kp * width, s.q = s.v + kp * width, s.out = s.q + ATT_QUERIES * width;
  s.score = s.out + ATT_QUERIES * width, s.p = s.score + ATT_QUERIES * ATT_CHUNK;
  s.max = s.p + ATT_QUERIES * ATT_CHUNK, s.sum = s.max + ATT_QUERIES;
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

DC_INLINE void att_softmax(const dc_attention_args *a, const att_scratch *s, int64_t i, int64_t c, int64_t n,
                           int64_t width, int pairs) {
  const vf scale = v_set1(a->scale);
  for (int64_t g = 0; g < ATT_QUERIES; g += LANES) {
    float *at = s->score + g / NR * ATT_CHUNK * NR + g % NR, *out = s->out + g / NR * width * NR + g % NR;
    float *p = pairs ? s->p + g / NR * (ATT_CHUNK / 2) * NR + g % NR : at;
    const vf old = v_load32(s->max + g, LANES);
    vf max = v_max(old, v_mul(att_largest(a, at, i + g, c, n), scale));
    max = v_max(max, v_set1(ATT_LOWEST));
    const vf sum = att_exponentials(p, at, n, scale, max, pairs), keep = v_exp_nonpos(v_sub(old, max));
    v_store32(s->sum + g, LANES, v_fma(v_load32(s->sum + g, LANES), keep, sum));
    v_store32(s->max + g, LANES, max);
    if (c > 0) att_shrink(out, width, keep);
  }
}

/* out^T, divided by the sums, goes to its rows. */
DC_INLINE void att_finish(const dc_attention_args *a, const att_scratch *s, int dt, int64_t b, int64_t h, int64_t i,
                          int64_t width) {
  const att_rows out = att_head(a->out, dt, a->out_stride, b, h, a->rows, a->dim);
  float *lse = a->lse + (b * a->heads + h) * a->rows, row[ATT_DIM];
  for (int64_t r = 0; r < ATT_QUERIES && i + r < a->rows; r++) {
    const float *from = s->out + r / NR * width * NR + r % NR, sum = s->sum[r];
    char *to = (char *)(uintptr_t)out.at + (i + r) * out.stride;
    for (int64_t c = 0; c < width; c++) row[c] = from[c * NR];
    for (int64_t c = 0; c < a->dim; c += LANES)
      v_put(to, dt, c, a->dim - c < LANES ? (int)(a->dim - c) : LANES,
            sum == 0.0f ? v_set1(0.0f) : v_div(v_load32(row + c, LANES), v_set1(sum)));
    lse[i + r] = sum == 0.0f ? HUGE_VALF : dc__canonical_f32(s->max[r] + logf(sum));
  }
}

DC_INLINE void att_queries(const dc_attention_args *a, const att_scratch *s, const att_rows *q, int dt, int64_t b,
                           int64_t h, int64_t i, int pairs) {
  const int64_t width = q->width, w = att_words(width, pairs), chunk = att_words(ATT_CHUNK, pairs);
  const int64_t limit = att_limit(a->keys, a->causal, a->diagonal, i + ATT_QUERIES);
  const att_panels score = {s->score, ATT_CHUNK * NR}, query = {s->q, w * NR}, out = {s->out, width * NR};
  const att_panels p = pairs ? (att_panels){s->p, chunk * NR} : score;
  for (int r = 0; r < ATT_QUERIES; r++) s->max[r] = -HUGE_VALF, s->sum[r] = 0.0f;
  if (limit <= 0) memset(s->out, 0, (size_t)(ATT_QUERIES * width) * sizeof *s->out);
  att_pack_across(s->q, q, dt, i, ATT_QUERIES, pairs);
  for (int64_t c = 0; c < limit; c += ATT_CHUNK) {
    const int64_t n = att_chunk(limit, c);
    att_multiply(score, s->k + c * w, w, query, n, PANELS, w, pairs, 0);
    att_softmax(a, s, i, c, n, width, pairs);
    if (c == 0) att_multiply(out, s->v, chunk, p, width, PANELS, att_words(n, pairs), pairs, 0);
    else att_multiply(out, s->v + c * att_words(width, pairs), chunk, p, width, PANELS, att_words(n, pairs), pairs, 1);
  }
  att_finish(a, s, dt, b, h, i, width);
}

DC_INLINE void att_forward(const dc_attention_args *a, int dt, int64_t b, int64_t kv, float *scratch) {
  const int pairs = ATT_PAIRS(dt);
  const int64_t group = a->heads / a->kv_heads, kp = att_round(a->keys, ATT_CHUNK);
  const att_rows k = att_head(a->k, dt, a->k_stride, b, kv, a->keys, a->dim);
  const att_rows v = att_head(a->v, dt, a->v_stride, b, kv, a->keys, a->dim);
  const att_scratch s = att_lay_out(scratch, a->keys, k.width);
  att_pack_rows(s.k, &k, dt, 0, kp, pairs);
  for (int64_t c = 0; c < kp; c += ATT_CHUNK)
    att_pack_columns(s.v + c * att_words(v.width, pairs), &v, dt, c, ATT_CHUNK, pairs);
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
    const att_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
    for (int64_t i = 0; i < a->rows; i += ATT_QUERIES) att_queries(a, &s, &q, dt, b, h, i, pairs);
  }
}

void DC_BODY(attention)(const dc_attention_args *a, int64_t b, int64_t kv, float *scratch) {
  DC_FOR_LOW(a->dtype, DT, att_forward(a, DT, b, kv, scratch));
}

/* ---- gradient ---------------------------------------------------------------------------------------------------- */
typedef struct att_back {
  float *k, *v, *kt;                           /* left: [keys][words] twice, [blocks][width][words of ATT_KEYS] */
  float *q, *dout, *q_down, *dout_down;        /* right, by blocks of queries */
  float *dq, *dk, *dv;                         /* [blocks][PANELS][width][NR]; [blocks][width / NR][ATT_KEYS][NR] */
  float *lse, *delta;                          /* [queries] */
  float *score, *dp, *p_rows, *ds_rows, *ds;   /* a block */
} att_back;

DC_INLINE att_back att_lay_out_back(float *at, int64_t rows, int64_t keys, int64_t width) {
  const int64_t kp = att_round(keys, ATT_CHUNK) * width, qp = att_round(rows, ATT_QUERIES) * width;
  const int64_t q = att_round(rows, ATT_QUERIES), block = ATT_QUERIES * ATT_KEYS;
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
  const att_rows dout = att_head(a->dout, dt, a->dout_stride, b, h, a->rows, a->dim);
  const att_rows out = att_head(a->out, dt, a->out_stride, b, h, a->rows, a->dim);
  const float *lse = a->lse + (b * a->heads + h) * a->rows;
  for (int64_t i = 0; i < att_round(a->rows, ATT_QUERIES); i++) {
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

/* 16 queries from i on and key j. */
DC_INLINE att_two att_probability(const dc_attention_grad_args *a, const att_back *s, int64_t at, int64_t i, int64_t j,
                                  int masked) {
  const vf scale = v_set1(a->scale), lse = v_load32(s->lse + i, LANES);
  vf x = v_sub(v_set1(0.0f), lse);
  x = v_min(v_fma(v_load32(s->score + at, LANES), scale, x), v_set1(0.0f));
  att_two t = {v_exp_nonpos(x), x};
  if (masked && a->causal) t.p = att_seen(t.p, v_set1(0.0f), i, j, a->diagonal);
  if (masked && j >= a->keys) t.p = v_set1(0.0f);
  t.ds = v_mul(v_mul(t.p, v_sub(v_load32(s->dp + at, LANES), v_load32(s->delta + i, LANES))), scale);
  return t;
}

/* The block's scores and dp become p and ds: row by row (left operands of dv and dk), and ds in panels (right one of
 * dq). */
DC_INLINE void att_block_ds(const dc_attention_grad_args *a, const att_back *s, int64_t i, int64_t j, int masked,
                            int pairs) {
  for (int64_t r = 0; r < ATT_KEYS; r += 2)
    for (int64_t g = 0; g < ATT_QUERIES; g += 2 * LANES) {
      att_two t[2][2];
      for (int k = 0; k < 2; k++)
        for (int u = 0; u < 2; u++) {
          const int64_t c = g + u * LANES;
          t[k][u] = att_probability(a, s, (c / NR * ATT_KEYS + r + k) * NR + c % NR, i + c, j + r + k, masked);
        }
#if defined(__AVX512BF16__)
      if (pairs) {
        for (int k = 0; k < 2; k++) {
          vi_store(s->p_rows + ((r + k) * ATT_QUERIES + g) / 2, v_join_bf16(t[k][0].p, t[k][1].p));
          vi_store(s->ds_rows + ((r + k) * ATT_QUERIES + g) / 2, v_join_bf16(t[k][0].ds, t[k][1].ds));
        }
        for (int u = 0; u < 2; u++) {
          const int64_t c = g + u * LANES;
          vi_store(s->ds + (c / NR * (ATT_KEYS / 2) + r / 2) * NR + c % NR, v_pair_bf16(t[0][u].ds, t[1][u].ds));
        }
        continue;
      }
#endif
      (void)pairs;
      for (int k = 0; k < 2; k++)
        for (int u = 0; u < 2; u++) {
          const int64_t c = g + u * LANES;
          v_store32(s->p_rows + (r + k) * ATT_QUERIES + c, LANES, t[k][u].p);
          v_store32(s->ds_rows + (r + k) * ATT_QUERIES + c, LANES, t[k][u].ds);
          v_store32(s->ds + (c / NR * ATT_KEYS + r + k) * NR + c % NR, LANES, t[k][u].ds);
        }
    }
}

DC_INLINE void att_block(const dc_attention_grad_args *a, const att_back *s, int64_t i, int64_t j, int64_t width,
                         int pairs) {
  const int64_t w = att_words(width, pairs), q_words = att_words(ATT_QUERIES, pairs), k_words = att_words(ATT_KEYS, pairs);
  const int64_t q = i * w, down = i * att_words(width, pairs), panels = width / NR;
  const att_panels score = {s->score, ATT_KEYS * NR}, dp = {s->dp, ATT_KEYS * NR};
  att_multiply(score, s->k + j * w, w, (att_panels){s->q + q, w * NR}, ATT_KEYS, PANELS, w, pairs, 0);
  att_multiply(dp, s->v + j * w, w, (att_panels){s->dout + q, w * NR}, ATT_KEYS, PANELS, w, pairs, 0);
  const int masked = j + ATT_KEYS > att_limit(a->keys, a->causal, a->diagonal, i + 1);
  if (masked) att_block_ds(a, s, i, j, 1, pairs);
  else att_block_ds(a, s, i, j, 0, pairs);
  const att_panels dk = {s->dk + j * width, ATT_KEYS * NR}, dv = {s->dv + j * width, ATT_KEYS * NR};
  att_multiply(dv, s->p_rows, q_words, (att_panels){s->dout_down + down, q_words * NR}, ATT_KEYS, panels, q_words, pairs,
               1);
  att_multiply(dk, s->ds_rows, q_words, (att_panels){s->q_down + down, q_words * NR}, ATT_KEYS, panels, q_words, pairs,
               1);
  att_multiply((att_panels){s->dq + i * width, width * NR}, s->kt + j * w, k_words,
               (att_panels){s->ds, k_words * NR}, width, PANELS, k_words, pairs, 1);
}

DC_INLINE void att_store_row(void *to, int dt, const float *row, int64_t dim) {
  for (int64_t c = 0; c < dim; c += LANES) {
    const int r = dim - c < LANES ? (int)(dim - c) : LANES;
    v_put(to, dt, c, r, v_load32(row + c, LANES));
  }
}

DC_INLINE void att_give_queries(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h,
                                int64_t width) {
  const att_rows to = att_head(a->dq, dt, a->dq_stride, b, h, a->rows, a->dim);
  float row[ATT_DIM];
  for (int64_t i = 0; i < a->rows; i++) {
    const int64_t r = i % ATT_QUERIES;
    const float *from = s->dq + (i - r) * width + r / NR * width * NR + r % NR;
    for (int64_t c = 0; c < width; c++) row[c] = from[c * NR];
    att_store_row((char *)(uintptr_t)to.at + i * to.stride, dt, row, a->dim);
  }
}

DC_INLINE void att_give_keys(void *p, const int64_t *stride, const dc_attention_grad_args *a, int dt, int64_t b,
                             int64_t kv, const float *from, int64_t width) {
  const att_rows to = att_head(p, dt, stride, b, kv, a->keys, a->dim);
  float row[ATT_DIM];
  for (int64_t j = 0; j < a->keys; j++) {
    const int64_t r = j % ATT_KEYS;
    for (int64_t c = 0; c < width; c += NR)
      memcpy(row + c, from + (j - r) * width + (c / NR * ATT_KEYS + r) * NR, NR * sizeof *row);
    att_store_row((char *)(uintptr_t)to.at + j * to.stride, dt, row, a->dim);
  }
}

DC_INLINE void att_back_head(const dc_attention_grad_args *a, const att_back *s, int dt, int64_t b, int64_t h,
                             int pairs) {
  const att_rows q = att_head(a->q, dt, a->q_stride, b, h, a->rows, a->dim);
  const att_rows dout = att_head(a->dout, dt, a->dout_stride, b, h, a->rows, a->dim);
  const int64_t w = att_words(q.width, pairs), qp = att_round(a->rows, ATT_QUERIES);
  for (int64_t i = 0; i < qp; i += ATT_QUERIES) {
    att_pack_across(s->q + i * w, &q, dt, i, ATT_QUERIES, pairs);
    att_pack_across(s->dout + i * w, &dout, dt, i, ATT_QUERIES, pairs);
    att_pack_down(s->q_down + i * w, &q, dt, i, ATT_QUERIES, pairs);
    att_pack_down(s->dout_down + i * w, &dout, dt, i, ATT_QUERIES, pairs);
  }
  att_deltas(a, s, dt, b, h);
  memset(s->dq, 0, (size_t)(qp * q.width) * sizeof *s->dq);
  for (int64_t j = 0; j < a->keys; j += ATT_KEYS)
    for (int64_t i = 0; i < a->rows; i += ATT_QUERIES)
      if (!(a->causal && j > i + ATT_QUERIES - 1 + a->diagonal)) att_block(a, s, i, j, q.width, pairs);
  att_give_queries(a, s, dt, b, h, q.width);
}

DC_INLINE void att_backward(const dc_attention_grad_args *a, int dt, int64_t b, int64_t kv, float *scratch) {
  const int pairs = ATT_PAIRS(dt);
  const int64_t group = a->heads / a->kv_heads, kp = att_round(a->keys, ATT_KEYS);
  const att_rows k = att_head(a->k, dt, a->k_stride, b, kv, a->keys, a->dim);
  const att_rows v = att_head(a->v, dt, a->v_stride, b, kv, a->keys, a->dim);
  const att_back s = att_lay_out_back(scratch, a->rows, a->keys, k.width);
  att_pack_rows(s.k, &k, dt, 0, kp, pairs);
  att_pack_rows(s.v, &v, dt, 0, kp, pairs);
  for (int64_t j = 0; j < kp; j += ATT_KEYS)
    att_pack_columns(s.kt + j * att_words(k.width, pairs), &k, dt, j, ATT_KEYS, pairs);
  memset(s.dk, 0, (size_t)(kp * k.width) * sizeof *s.dk);
  memset(s.dv, 0, (size_t)(kp * k.width) * sizeof *s.dv);
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) att_back_head(a, &s, dt, b, h, pairs);
  att_give_keys(a->dk, a->dk_stride, a, dt, b, kv, s.dk, k.width);
  att_give_keys(a->dv, a->dv_stride, a, dt, b, kv, s.dv, k.width);
}

void DC_BODY(attention_grad)(const dc_attention_grad_args *a, int64_t b, int64_t kv, float *scratch) {
  DC_FOR_LOW(a->dtype, DT, att_backward(a, DT, b, kv, scratch));
}
