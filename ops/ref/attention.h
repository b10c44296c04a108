/* attention.h: the blocks of dc_attention, which decide the order of its sums; the scalar reference and the vector
 * bodies share them. */
#ifndef DEEPC_OPS_ATTENTION_H
#define DEEPC_OPS_ATTENTION_H

#include <stddef.h>
#include <string.h>

#include "ops.h"
#include "ref/philox.h"
#include "ref/scalar.h"
#include "ref/tile.h"

/* Queries of a block; keys whose scores exist at a time (forward), and keys of a block (gradient). Measured on Zen 4:
 * docs/lab/attention.md. */
/* A query's maximum is at least ATT_LOWEST: scores far below it hide their pair, as -infinity does (a mask that is
 * added: -1e9, or its dtype's lowest number), so that a query that sees no key has a finite one. Above ATT_HIGHEST it
 * is NaN. Beyond these the rounding of score * scale alone is as large as what e^x may be given. */
#define ATT_LOWEST (-0x1p28f)
#define ATT_HIGHEST 0x1p30f
enum { ATT_QUERIES = 64, ATT_CHUNK = 256, ATT_KEYS = 64, ATT_STEP = 16 };
/* Blocks of keys that the gradient's blocks of queries meet at a time: so much less often these come from afar. */
enum { ATT_ABREAST = 4 };

static inline int64_t att_least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Keys below it are all that the queries before `end` see. */
static inline int64_t att_limit(int64_t keys, int causal, int64_t diagonal, int64_t end) {
  return causal ? att_least(keys, end + diagonal) : keys;
}
/* Of a chunk of at most ATT_CHUNK keys from c on: how many are reckoned with; whole steps. */
static inline int64_t att_chunk(int64_t limit, int64_t c) {
  return tile_round(att_least(limit - c, ATT_CHUNK), ATT_STEP);
}

/* 4-byte numbers that a body needs for a head of k and v and the `group` heads of q that share it: what it packs and
 * what it sums. */
static inline int64_t dc__attention_words(int64_t rows, int64_t keys, int64_t dim, int64_t group, int gradient) {
  const int64_t w = tile_round(dim, TILE_WIDTH), kp = tile_round(keys, ATT_CHUNK), qp = tile_round(rows, ATT_QUERIES);
  if (!gradient) return (2 * kp + ATT_CHUNK) * w + ATT_QUERIES * (2 * w + 2 * ATT_CHUNK + 4);
  const int64_t sums = group > 1 ? 2 * kp * w : 2 * ATT_ABREAST * ATT_KEYS * w, scalar = (rows + 2 * keys) * dim;
  const int64_t words = 3 * ATT_ABREAST * ATT_KEYS * w + sums + 5 * qp * w + 2 * qp + 5 * ATT_QUERIES * ATT_KEYS;
  return words > scalar ? words : scalar;
}

/* ---- masks: what one head's queries see ----------------------------------------------------------------------------
 */
typedef struct att_sight {
  const uint8_t *layout; /* of the head; NULL: all blocks */
  const int32_t *q_group, *k_group; /* of the batch's entry; NULL: one group */
  int64_t block, across; /* across: blocks of keys in a row of the layout */
  int64_t rows, keys, diagonal;
  int64_t window; /* 0: none */
  int causal, biased; /* biased: by the slope */
  float slope; /* in units of scores before they are scaled, as `unit` is: 1 / scale */
  const char *bias; /* of the head, or NULL; rows `bias_row` bytes apart */
  int64_t bias_row;
  int bias_dtype;
  float unit;
  int threshold; /* dropout: of numbers from 0 to 2^16, those below drop a pair; 0: none */
  uint32_t key[2], who[2]; /* of the random numbers: the seed; head and entry of the batch */
  float keep, factor; /* the share that is kept, and 1 over it */
} att_sight;
enum att_part { ATT_HIDDEN, ATT_SOME, ATT_WHOLE };

static inline int att_masked(const dc_attention_mask *m) {
  return m->layout || m->q_group || m->slope || m->bias || m->window || dc__philox_threshold(m->dropout.rate);
}
/* Tiles: runs of keys and of queries that are skipped, or computed, together. */
static inline int64_t att_tile_keys(const dc_attention_mask *m) {
  return !m->layout || m->block % 64 == 0 ? 64 : m->block % 32 == 0 ? 32 : 16;
}
/* As many queries: a tile lies within one block of the layout. */
static inline int64_t att_tile_queries(const dc_attention_mask *m) { return att_tile_keys(m); }

#define ATT_SIGHT(a, b, h) att_sight_of(&(a)->mask, (a)->rows, (a)->keys, (a)->diagonal, (a)->causal, (a)->scale, b, h)
static inline att_sight att_sight_of(const dc_attention_mask *m, int64_t rows, int64_t keys, int64_t diagonal,
                                     int causal, float scale, int64_t b, int64_t h) {
  att_sight s = {.rows = rows, .keys = keys, .diagonal = diagonal, .causal = causal, .biased = m->slope != NULL};
  s.window = m->window, s.unit = 1.0f / scale;
  if (m->layout) {
    s.block = m->block, s.across = (keys + m->block - 1) / m->block;
    s.layout = m->layout + (m->layout_heads == 1 ? 0 : h) * ((rows + m->block - 1) / m->block) * s.across;
  }
  if (m->q_group) s.q_group = m->q_group + b * rows, s.k_group = m->k_group + b * keys;
  if (m->slope) s.slope = m->slope[h] / scale;
  if (m->bias) {
    const int64_t size = m->bias_dtype == DC_U8 ? 1 : m->bias_dtype == DC_F32 ? 4 : 2;
    s.bias = (const char *)m->bias + size * (b * m->bias_stride[0] + h * m->bias_stride[1]);
    s.bias_row = size * m->bias_stride[2], s.bias_dtype = m->bias_dtype;
  }
  s.threshold = dc__philox_threshold(m->dropout.rate), s.keep = (float)(65536 - s.threshold) / 65536.0f;
  s.factor = 1.0f / s.keep;
  s.key[0] = (uint32_t)m->dropout.seed, s.key[1] = (uint32_t)(m->dropout.seed >> 32);
  s.who[0] = (uint32_t)(m->dropout.head + h), s.who[1] = (uint32_t)(m->dropout.batch + b);
  return s;
}

/* What the bias adds to query i's score of key j, before it is scaled. */
static inline float att_bias_at(const att_sight *s, float x, int64_t i, int64_t j) {
  const char *row = s->bias + i * s->bias_row;
  if (s->bias_dtype == DC_U8) return ((const uint8_t *)row)[j] ? fmaf(0.0f, s->unit, x) : -HUGE_VALF;
  return fmaf(dc__get(row, s->bias_dtype, j), s->unit, x);
}

/* Whether dropout keeps query i's probability of key j. */
static inline int att_keeps(const att_sight *s, int64_t i, int64_t j) {
  uint32_t c[4] = {(uint32_t)(j / 8), (uint32_t)i, s->who[0], s->who[1]};
  dc__philox(c, s->key[0], s->key[1]);
  return (int)(c[j % 8 / 2] >> (16 * (j % 2)) & 0xffffu) >= s->threshold;
}

typedef struct att_span {
  int32_t low, high;
} att_span;
static inline att_span att_groups(const int32_t *group, int64_t begin, int64_t end) {
  att_span r = {group[begin], group[begin]};
  for (int64_t i = begin + 1; i < end; i++) {
    if (group[i] < r.low) r.low = group[i];
    if (group[i] > r.high) r.high = group[i];
  }
  return r;
}

/* Of queries [i, i + 16) and keys [j, j + n), neither of which leaves its block of the layout. */
static inline enum att_part att_part_of(const att_sight *s, int64_t i, int64_t j, int64_t n) {
  enum att_part part = ATT_WHOLE;
  if (i >= s->rows || j >= s->keys) return ATT_HIDDEN;
  if (s->layout && !s->layout[i / s->block * s->across + j / s->block]) return ATT_HIDDEN;
  if (s->causal && j > i + ATT_STEP - 1 + s->diagonal) return ATT_HIDDEN;
  if (j + n > s->keys || (s->causal && j + n - 1 > i + s->diagonal)) part = ATT_SOME;
  if (s->window && j + n - 1 <= i + s->diagonal - s->window) return ATT_HIDDEN;
  if (s->window && j <= i + ATT_STEP - 1 + s->diagonal - s->window) part = ATT_SOME;
  if (!s->q_group) return part;
  const att_span q = att_groups(s->q_group, i, att_least(i + ATT_STEP, s->rows));
  const att_span k = att_groups(s->k_group, j, att_least(j + n, s->keys));
  if (q.low > k.high || k.low > q.high) return ATT_HIDDEN;
  return q.low == q.high && k.low == k.high ? part : ATT_SOME;
}

/* Keys from `first` on, and what each 16 of the queries see of them. */
typedef struct att_tile {
  int64_t first;
  enum att_part part[ATT_QUERIES / ATT_STEP];
} att_tile;

/* Of queries [i, i + queries) and keys [j, j + n). Returns whether something is visible. */
static inline int att_look(const att_sight *s, int64_t i, int64_t queries, int64_t j, int64_t n, att_tile *t) {
  int seen = 0;
  t->first = j;
  for (int64_t g = 0; g < queries; g += ATT_STEP) {
    t->part[g / ATT_STEP] = att_part_of(s, i + g, j, n);
    seen |= t->part[g / ATT_STEP] != ATT_HIDDEN;
  }
  return seen;
}

/* The first key from j on, a tile's first, whose block the layout shows to query i; keys or more: none. */
static inline int64_t att_next_key(const att_sight *s, int64_t i, int64_t j) {
  if (!s->layout || j >= s->keys) return j;
  const uint8_t *row = s->layout + i / s->block * s->across;
  int64_t b = j / s->block;
  if (row[b]) return j;
  for (uint64_t eight; b + 8 <= s->across; b += 8) {
    memcpy(&eight, row + b, sizeof eight);
    if (eight) break;
  }
  while (b < s->across && !row[b]) b++;
  return b * s->block;
}

/* The first query from i on, a tile's first, to whom key j may be visible by the layout, causality and the window;
 * rows or more: none. */
static inline int64_t att_next_query(const att_sight *s, int64_t i, int64_t j, int64_t n) {
  if (s->causal && i < j - s->diagonal - n + 1) i = tile_round(j - s->diagonal - n + 1, n);
  if (s->window && i >= j + n - 1 - s->diagonal + s->window) return s->rows;
  if (!s->layout || i >= s->rows) return i;
  const int64_t down = (s->rows + s->block - 1) / s->block;
  const uint8_t *column = s->layout + j / s->block;
  int64_t b = i / s->block;
  if (column[b * s->across]) return i;
  while (b < down && !column[b * s->across]) b++;
  return b * s->block;
}

/* The next tiles of `keys` keys, at most ATT_CHUNK keys, of which queries [i, i + n) see some, and how many; *at: where
 * the search goes on. */
static inline int att_next_tiles(const att_sight *s, int64_t i, int64_t n, int64_t keys, int64_t *at, att_tile *tiles) {
  const int64_t limit = att_limit(s->keys, s->causal, s->diagonal, i + n);
  const int64_t lowest = s->window ? i + s->diagonal - s->window + 1 : 0; /* that the first query sees */
  int count = 0;
  if (*at < lowest) *at = lowest / keys * keys;
  for (*at = att_next_key(s, i, *at); *at < limit && count < ATT_CHUNK / keys; *at = att_next_key(s, i, *at + keys))
    count += att_look(s, i, n, *at, keys, &tiles[count]);
  return count;
}

#endif
