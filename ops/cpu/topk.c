/* topk.c: bodies of dc_topk. The threshold of a block (its k-th largest magnitude) is found bit by bit from above; bits
 * at which nothing can qualify (the candidate is beyond the largest) cost no pass, and once few elements are left
 * above the threshold found so far, only those are looked at. Any way to the threshold gives the same result. About a
 * cycle an element (docs/lab/kernels.md). */
#include "cpu/vec.h"

typedef struct chosen {
  uint32_t threshold;
  int64_t above; /* elements beyond the threshold: fewer than k */
} chosen;

DC_INLINE int64_t topk_reach(const uint32_t *keys, int64_t padded, uint32_t threshold) {
  const vi t = vi_set1((int)threshold);
  int64_t count = 0;
  for (int64_t i = 0; i < padded; i += LANES) count += __builtin_popcount(vi_ge(vi_load(keys + i), t));
  return count;
}

/* The keys that reach the threshold, padded with zeros; returns how many there are. */
DC_INLINE int64_t topk_narrow_to(uint32_t *few, const uint32_t *keys, int64_t padded, uint32_t threshold) {
  const vi t = vi_set1((int)threshold);
  int64_t count = 0;
  for (int64_t i = 0; i < padded; i += LANES)
    for (unsigned m = vi_ge(vi_load(keys + i), t); m; m &= m - 1) few[count++] = keys[i + __builtin_ctz(m)];
  memset(few + count, 0, LANES * sizeof *few);
  return count;
}

/* keys: [padded], zeros after the block's end. Only thresholds above zero are counted, so that the padding never is. */
DC_INLINE chosen topk_choose(const uint32_t *keys, int64_t padded, uint32_t top, int64_t k) {
  uint32_t few[DC_TOPK_BLOCK_MAX / 4 + LANES];
  const uint32_t *look = keys;
  uint32_t t = 0;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
    if ((t | bit) > top) continue;
    const int64_t count = topk_reach(look, padded, t | bit);
    if (count < k) continue;
    t |= bit;
    if (look == keys && count <= DC_TOPK_BLOCK_MAX / 4 && count <= padded / 2) {
      padded = (topk_narrow_to(few, keys, padded, t) + LANES - 1) / LANES * LANES;
      look = few;
    }
  }
  return (chosen){t, t < top ? topk_reach(look, padded, t + 1) : 0};
}

DC_INLINE int64_t topk_emit(float *values, uint16_t *index, const float *v, const uint32_t *keys, int64_t len, chosen c,
                            int64_t k) {
  const vi t = vi_set1((int)c.threshold);
  int64_t out = 0, ties = k - c.above;
  for (int64_t i = 0; i < len && out < k; i += LANES) {
    unsigned m = vi_ge(vi_load(keys + i), t);
    if (len - i < LANES) m &= (1u << (len - i)) - 1u; /* a threshold of zero takes padding too */
    for (; m; m &= m - 1) {
      const int64_t at = i + __builtin_ctz(m);
      if (keys[at] == c.threshold && ties-- <= 0) continue;
      values[out] = v[at];
      index[out++] = (uint16_t)at;
    }
  }
  return out;
}

DC_INLINE void topk_error_left(float *error, const float *v, const uint16_t *index, int64_t take, int64_t len,
                               uint32_t top) {
  memcpy(error, v, (size_t)len * sizeof *v);
  for (int64_t i = 0; DC_UNLIKELY(top >= DC__INF_F32) && i < len; i++)
    if ((dc__bits_of_f32(v[i]) & 0x7fffffffu) >= DC__INF_F32) error[i] = 0.0f;
  for (int64_t j = 0; j < take; j++) error[index[j]] = 0.0f;
}

DC_INLINE void topk_keys_step(float *v, uint32_t *keys, const void *x, int dt, const float *error, int fed,
                              int64_t from, int64_t to, int r, vi *top) {
  vf f = v_get(x, dt, from, r);
  if (fed) f = v_add(f, v_get(error, DC_F32, from, r));
  f = v_canonical(f); /* one magnitude for all NaN */
  const vi u = v_magnitude(f);
  v_store32(v + to, LANES, f);
  vi_store(keys + to, u);
  *top = vi_max(*top, u);
}

DC_INLINE void topk_blocks(float *values, uint16_t *index, const void *x, int dt, float *error, int fed, int64_t block,
                           int64_t k, int64_t n) {
  float v[DC_TOPK_BLOCK_MAX];
  uint32_t keys[DC_TOPK_BLOCK_MAX];
  for (int64_t begin = 0; begin < n; begin += block, values += k, index += k) {
    const int64_t len = n - begin < block ? n - begin : block, take = len < k ? len : k;
    vi tops = vi_set1(0);
    int64_t i = 0;
    for (; i + LANES <= len; i += LANES) {
      v_ahead(x, dt, begin + i, AHEAD);
      if (fed) v_ahead(error, DC_F32, begin + i, AHEAD);
      topk_keys_step(v, keys, x, dt, error, fed, begin + i, i, LANES, &tops);
    }
    if (i < len) topk_keys_step(v, keys, x, dt, error, fed, begin + i, i, (int)(len - i), &tops);
    const uint32_t top = vi_top(tops);
    const chosen c = topk_choose(keys, (len + LANES - 1) / LANES * LANES, top, take);
    topk_emit(values, index, v, keys, len, c, take);
    if (fed) topk_error_left(error + begin, v, index, take, len, top);
  }
}

DC_INLINE void topk_fed(float *values, uint16_t *index, const void *x, int dt, float *error, int64_t block, int64_t k,
                        int64_t n) {
  if (error) topk_blocks(values, index, x, dt, error, 1, block, k, n);
  else topk_blocks(values, index, x, dt, error, 0, block, k, n);
}

void DC_BODY(topk)(float *values, uint16_t *index, const void *x, int dt, float *error, int64_t block, int64_t k,
                   int64_t n) {
  DC_FOR_LOW(dt, DT, topk_fed(values, index, x, DT, error, block, k, n));
}
