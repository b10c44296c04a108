/* attention.h: the blocks of dc_attention, which decide the order of its sums; the scalar reference and the vector
 * bodies share them. */
#ifndef DEEPC_OPS_ATTENTION_H
#define DEEPC_OPS_ATTENTION_H

#include "ops.h"
#include "ref/tile.h"

/* Queries of a block; keys whose scores exist at a time (forward), and keys of a block (gradient). Measured on Zen 4:
 * docs/lab/attention.md. */
enum { ATT_QUERIES = 64, ATT_CHUNK = 256, ATT_KEYS = 64, ATT_STEP = 16 };

static inline int64_t att_least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Keys below it are all that the queries before `end` see. */
static inline int64_t att_limit(int64_t keys, int causal, int64_t diagonal, int64_t end) {
  return causal ? att_least(keys, end + diagonal) : keys;
}
/* Of a chunk of at most ATT_CHUNK keys from c on: how many are reckoned with; whole steps. */
static inline int64_t att_chunk(int64_t limit, int64_t c) {
  return tile_round(att_least(limit - c, ATT_CHUNK), ATT_STEP);
}

/* 4-byte numbers that a body needs for a head: what it packs and what it sums. */
static inline int64_t dc__attention_words(int64_t rows, int64_t keys, int64_t dim, int gradient) {
  const int64_t w = tile_round(dim, TILE_WIDTH), kp = tile_round(keys, ATT_CHUNK), qp = tile_round(rows, ATT_QUERIES);
  if (!gradient) return 2 * kp * w + ATT_QUERIES * (2 * w + 2 * ATT_CHUNK + 4);
  return 5 * kp * w + 5 * qp * w + 2 * qp + 5 * ATT_QUERIES * ATT_KEYS;
}

#endif
