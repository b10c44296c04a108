/* attention.c: scalar reference of dc_attention and its gradient, in the order of sums of the vector bodies. */
#include "ref/attention.h"
#include "ref/exp.h"

static const char *att_row(const void *p, int dt, const int64_t *stride, int64_t b, int64_t h, int64_t i) {
  return (const char *)p + (int64_t)dc_dtype_size(dt) * (b * stride[0] + h * stride[1] + i * stride[2]);
}

static float att_dot(const void *a, const void *b, int dt, int64_t dim) {
  float sum = 0.0f;
  for (int64_t c = 0; c < dim; c++) sum = fmaf(dc__get(a, dt, c), dc__get(b, dt, c), sum);
  return sum;
}

static int att_visible(const att_sight *s, int64_t i, int64_t j) {
  if (j >= s->keys || (s->causal && j > i + s->diagonal)) return 0;
  if (s->window && j <= i + s->diagonal - s->window) return 0;
  if (s->layout && !s->layout[i / s->block * s->across + j / s->block]) return 0;
  return !s->q_group || s->q_group[i] == s->k_group[j];
}

static float att_biased(const att_sight *s, float x, int64_t i, int64_t j) {
  if (s->bias && i < s->rows && j < s->keys) x = att_bias_at(s, x, i, j);
  return s->biased ? fmaf(s->slope, (float)j - (float)(i + s->diagonal), x) : x;
}

typedef struct att_state {
  float max, sum, *out; /* out: [dim] */
} att_state;

/* n keys, `run` of each tile; their scores become probabilities in s. */
static void att_add_chunk(const dc_attention_args *a, const att_sight *sight, int64_t b, int64_t kv, int64_t h,
                          int64_t i, const att_tile *tiles, int64_t run, int64_t n, float *s, att_state *o) {
  const char *q = att_row(a->q, a->dtype, a->q_stride, b, h, i);
  float max = -HUGE_VALF, sum = 0.0f;
  for (int64_t t = 0; t < n; t++) {
    const int64_t j = tiles[t / run].first + t % run;
    s[t] = -HUGE_VALF;
    if (att_visible(sight, i, j))
      s[t] = att_biased(sight, att_dot(att_row(a->k, a->dtype, a->k_stride, b, kv, j), q, a->dtype, a->dim), i, j);
    max = dc__max_f32(max, s[t]);
  }
  max = dc__max_f32(dc__max_f32(o->max, max * a->scale), ATT_LOWEST);
  if (max >= ATT_HIGHEST) max = dc__f32_of_bits(DC__NAN_F32);
  for (int64_t t = 0; t < n; t++) {
    s[t] = dc__exp_nonpos(fmaf(s[t], a->scale, -max));
    sum += s[t];
    if (sight->threshold && !att_keeps(sight, i, tiles[t / run].first + t % run)) s[t] = 0.0f;
  }
  const float keep = dc__exp_nonpos(o->max - max);
  o->sum = fmaf(o->sum, keep, sum), o->max = max;
  for (int64_t d = 0; d < a->dim; d++) o->out[d] *= keep;
  for (int64_t t = 0; t < n; t++) {
    const int64_t j = tiles[t / run].first + t % run;
    const char *v = j < a->keys ? att_row(a->v, a->dtype, a->v_stride, b, kv, j) : NULL; /* zeros behind the last */
    for (int64_t d = 0; d < a->dim; d++) o->out[d] = fmaf(v ? dc__get(v, a->dtype, d) : 0.0f, s[t], o->out[d]);
  }
}

static void att_one_query(const dc_attention_args *a, int64_t b, int64_t kv, int64_t h, int64_t i, float *scratch) {
  const att_sight sight = ATT_SIGHT(a, b, h);
  att_state o = {-HUGE_VALF, 0.0f, scratch};
  for (int64_t d = 0; d < a->dim; d++) o.out[d] = 0.0f;
  if (att_masked(&a->mask)) {
    const int64_t tile = att_tile_keys(&a->mask), queries = att_tile_queries(&a->mask);
    att_tile tiles[ATT_CHUNK / ATT_STEP];
    int64_t at = 0;
    for (int n; (n = att_next_tiles(&sight, i / queries * queries, queries, tile, &at, tiles)) > 0;)
      att_add_chunk(a, &sight, b, kv, h, i, tiles, tile, n * tile, scratch + TILE_DIM, &o);
  } else {
    const int64_t end = att_least(i / ATT_QUERIES * ATT_QUERIES + ATT_QUERIES, tile_round(a->rows, ATT_QUERIES));
    const int64_t limit = att_limit(a->keys, a->causal, a->diagonal, end);
    for (int64_t c = 0; c < limit; c += ATT_CHUNK) {
      const att_tile all = {.first = c};
      att_add_chunk(a, &sight, b, kv, h, i, &all, ATT_CHUNK, att_chunk(limit, c), scratch + TILE_DIM, &o);
    }
  }
  char *out = (char *)(uintptr_t)att_row(a->out, a->dtype, a->out_stride, b, h, i);
  const float by = 1.0f / (o.sum * sight.keep);
  for (int64_t d = 0; d < a->dim; d++) dc__put(out, a->dtype, d, o.sum == 0.0f ? 0.0f : o.out[d] * by);
  a->lse[(b * a->heads + h) * a->rows + i] = o.sum == 0.0f ? HUGE_VALF : dc__canonical_f32(o.max + logf(o.sum));
}

void dc__attention_scalar(const dc_attention_args *a, int64_t b, int64_t kv, float *scratch) {
  const int64_t group = a->heads / a->kv_heads;
  for (int64_t h = kv * group; h < (kv + 1) * group; h++)
    for (int64_t i = 0; i < a->rows; i++) att_one_query(a, b, kv, h, i, scratch);
}

/* ---- gradient ---------------------------------------------------------------------------------------------------- */
typedef struct att_sums {
  float *dq, *dk, *dv; /* [rows, dim], [keys, dim] both */
} att_sums;

/* sum(dout * out) of query i in 16 sums, element c to c % 16, as a vector has them. */
static float att_delta(const dc_attention_grad_args *a, int64_t b, int64_t h, int64_t i) {
  const char *dout = att_row(a->dout, a->dtype, a->dout_stride, b, h, i);
  const char *out = att_row(a->out, a->dtype, a->out_stride, b, h, i);
  float sum[16] = {0};
  for (int64_t c = 0; c < a->dim; c++)
    sum[c % 16] = fmaf(dc__get(dout, a->dtype, c), dc__get(out, a->dtype, c), sum[c % 16]);
  for (int width = 8; width > 0; width /= 2)
    for (int k = 0; k < width; k++) sum[k] += sum[k + width];
  return sum[0];
}

/* One pair; p and ds come back, and ds before it is scaled. delta: the query's. */
static void att_pair(const dc_attention_grad_args *a, const att_sight *sight, int64_t b, int64_t kv, int64_t h,
                     int64_t i, int64_t j, float delta, float *p, float *ds, float *raw) {
  const char *q = att_row(a->q, a->dtype, a->q_stride, b, h, i), *k = att_row(a->k, a->dtype, a->k_stride, b, kv, j);
  const char *dout = att_row(a->dout, a->dtype, a->dout_stride, b, h, i);
  const float s = att_biased(sight, att_dot(k, q, a->dtype, a->dim), i, j);
  float dp = att_dot(att_row(a->v, a->dtype, a->v_stride, b, kv, j), dout, a->dtype, a->dim);
  const float lse = a->lse[(b * a->heads + h) * a->rows + i];
  *p = att_visible(sight, i, j) ? dc__exp_nonpos(dc__min_f32(fmaf(s, a->scale, -lse), 0.0f)) : 0.0f;
  const float whole = *p;
  if (sight->threshold) {
    const float factor = att_keeps(sight, i, j) ? sight->factor : 0.0f;
    *p *= factor, dp *= factor;
  }
  *raw = whole * (dp - delta);
  *ds = *raw * a->scale;
}

/* Queries from i0 on and keys from j0 on: at most as many as a block has. */
static void att_block(const dc_attention_grad_args *a, const att_sight *sight, int64_t b, int64_t kv, int64_t h,
                      int64_t i0, int64_t queries, int64_t j0, int64_t most, const att_sums *o) {
  const int64_t rows = att_least(a->rows - i0, queries), keys = att_least(a->keys - j0, most), dim = a->dim;
  float delta[ATT_QUERIES];
  for (int64_t i = 0; i < rows; i++) delta[i] = att_delta(a, b, h, i0 + i);
  for (int64_t j = j0; j < j0 + keys; j++)
    for (int64_t i = i0; i < i0 + rows; i++) {
      float p, ds, raw;
      att_pair(a, sight, b, kv, h, i, j, delta[i - i0], &p, &ds, &raw);
      if (a->dbias && att_visible(sight, i, j)) {
        float *sum = a->dbias + b * a->dbias_stride[0] + h * a->dbias_stride[1] + i * a->dbias_stride[2] + j;
        *sum = dc__canonical_f32(*sum + raw);
      }
      const char *q = att_row(a->q, a->dtype, a->q_stride, b, h, i),
                 *k = att_row(a->k, a->dtype, a->k_stride, b, kv, j);
      const char *dout = att_row(a->dout, a->dtype, a->dout_stride, b, h, i);
      for (int64_t c = 0; c < dim; c++) {
        o->dv[j * dim + c] = fmaf(p, dc__get(dout, a->dtype, c), o->dv[j * dim + c]);
        o->dk[j * dim + c] = fmaf(ds, dc__get(q, a->dtype, c), o->dk[j * dim + c]);
        o->dq[i * dim + c] = fmaf(dc__get(k, a->dtype, c), ds, o->dq[i * dim + c]);
      }
    }
}

static void att_give(void *to, int dt, const int64_t *stride, int64_t b, int64_t h, int64_t rows, int64_t dim,
                     const float *from) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t c = 0; c < dim; c++)
      dc__put((char *)(uintptr_t)att_row(to, dt, stride, b, h, i), dt, c, from[i * dim + c]);
}

void dc__attention_grad_scalar(const dc_attention_grad_args *a, int64_t b, int64_t kv, float *scratch) {
  const int64_t group = a->heads / a->kv_heads, dim = a->dim;
  const att_sums o = {scratch, scratch + a->rows * dim, scratch + (a->rows + a->keys) * dim};
  memset(o.dk, 0, (size_t)(2 * a->keys * dim) * sizeof(float));
  for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
    memset(o.dq, 0, (size_t)(a->rows * dim) * sizeof(float));
    const att_sight sight = ATT_SIGHT(a, b, h);
    const int64_t tile = att_tile_keys(&a->mask), queries = att_tile_queries(&a->mask);
    for (int64_t j = 0; j < a->keys; j += tile)
      for (int64_t i = 0; i < a->rows; i += queries) {
        att_tile t;
        if (att_look(&sight, i, queries, j, tile, &t)) att_block(a, &sight, b, kv, h, i, queries, j, tile, &o);
      }
    att_give(a->dq, a->dtype, a->dq_stride, b, h, a->rows, dim, o.dq);
  }
  att_give(a->dk, a->dtype, a->dk_stride, b, kv, a->keys, dim, o.dk);
  att_give(a->dv, a->dtype, a->dv_stride, b, kv, a->keys, dim, o.dv);
}
