/* topk.c: scalar reference of dc_topk. The threshold is found bit by bit: the largest key that at least k elements
 * reach. */
#include "ref/scalar.h"

static uint32_t topk_key(float v) { return dc__bits_of_f32(v) & 0x7fffffffu; }

static int64_t topk_reach(const float *v, int64_t n, uint32_t threshold) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) count += topk_key(v[i]) >= threshold;
  return count;
}

static void topk_block_topk(float *values, uint16_t *index, const float *v, int64_t k, int64_t n) {
  uint32_t t = 0;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1)
    if (topk_reach(v, n, t | bit) >= k) t |= bit;
  int64_t ties = k - topk_reach(v, n, t + 1), out = 0;
  for (int64_t i = 0; i < n; i++) {
    if (topk_key(v[i]) < t || (topk_key(v[i]) == t && ties-- <= 0)) continue;
    values[out] = v[i];
    index[out++] = (uint16_t)i;
  }
}

void dc__topk_scalar(float *values, uint16_t *index, const void *x, int dt, float *error, int64_t block, int64_t k,
                     int64_t n) {
  float v[DC_TOPK_BLOCK_MAX];
  for (int64_t begin = 0; begin < n; begin += block, values += k, index += k) {
    const int64_t len = n - begin < block ? n - begin : block, take = len < k ? len : k;
    for (int64_t i = 0; i < len; i++) v[i] = dc__get(x, dt, begin + i);
    for (int64_t i = 0; error && i < len; i++) v[i] += error[begin + i];
    for (int64_t i = 0; i < len; i++) v[i] = dc__canonical_f32(v[i]);
    topk_block_topk(values, index, v, take, len);
    if (!error) continue;
    for (int64_t i = 0; i < len; i++) error[begin + i] = topk_key(v[i]) < DC__INF_F32 ? v[i] : 0.0f;
    for (int64_t j = 0; j < take; j++) error[begin + index[j]] = 0.0f;
  }
}
