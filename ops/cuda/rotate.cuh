// rotate.cuh: what the threads of one warp do in dc_cuda_rotate (ops.h, dc_rotate), compiled for the CPU by
// tests/c/test_cuda_rotate.cpp. rotate.cu numbers the warps.
//
// A warp has a block: lane l holds elements ROUND * k + FOUR * l + j in v[k][j], so that k's loads of all lanes are
// neighbours. Butterflies of elements 1 and 2 apart are within the four, those of 4 to 64 between lanes, those of 128
// on between k: registers all along, and one reading and writing of memory. One more warp has the shorter blocks at the
// end, one after the other.
#ifndef DEEPC_CUDA_ROTATE_CUH
#define DEEPC_CUDA_ROTATE_CUH

#include "cuda/warp.cuh"
#include "ref/rotate.h"

namespace dc_gpu {

enum { ROTATE_FOUR = 4, ROTATE_ROUND = WARP * ROTATE_FOUR, ROTATE_LOG = 11 };
static_assert(1 << ROTATE_LOG == DC_ROTATE_BLOCK && DC_ROTATE_BLOCK % ROTATE_ROUND == 0, "a warp has a whole block");

// dc__rotate_sign of ref/rotate.h.
DC_GPU uint32_t rotate_sign(uint32_t i) {
  i = (i ^ i >> DC__ROTATE_R0) * DC__ROTATE_M0;
  return ((i ^ i >> DC__ROTATE_R1) * DC__ROTATE_M1) & 0x80000000u;
}

// v, of which the compiler knows nothing from here on, so that it makes what follows from v again and does not keep it
// in registers.
#if defined(__CUDACC__)
DC_GPU uint32_t rotate_anew(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
#else
inline uint32_t rotate_anew(uint32_t v) { return v; }
#endif

// The signs of a lane's elements, a bit each: that of v[k][j] is bit FOUR * k + j. Made once for all blocks of a warp.
struct RotateSigns {
  enum { WORDS = DC_ROTATE_BLOCK / WARP / 32 };
  uint32_t bits[WORDS];
  DC_GPU RotateSigns anew(void) const {
    RotateSigns signs;
    DC_UNROLL
    for (int w = 0; w < WORDS; w++) signs.bits[w] = rotate_anew(bits[w]);
    return signs;
  }
  DC_GPU float flip(float f, int k, int j) const {
    const int at = ROTATE_FOUR * k + j;
    return bits[at / 32] >> (at % 32) & 1 ? -f : f;
  }
};
DC_GPU RotateSigns rotate_signs(void) {
  RotateSigns signs = {};
  DC_UNROLL
  for (int at = 0; at < 32 * RotateSigns::WORDS; at++) {
    const int i = ROTATE_ROUND * (at / ROTATE_FOUR) + ROTATE_FOUR * (block_thread() % WARP) + at % ROTATE_FOUR;
    signs.bits[at / 32] |= rotate_sign((uint32_t)i) >> (31 - at % 32);
  }
  return signs;
}

// dc__rotate_factor of 2^log, of root, which is that of 2: powers of two scale it exactly.
DC_GPU float rotate_factor(int log, float root) {
  const float half = __uint_as_float((uint32_t)(127 - log / 2) << 23);
  return log % 2 ? __fmul_rn(half, root) : half;
}

DC_GPU void rotate_pair(float &a, float &b) {
  const float low = a;
  a = __fadd_rn(low, b), b = __fsub_rn(low, b);
}

// A block of 2^log elements, ROTATE_ROUND * K at most. Butterflies are of distances below its length, so none of its
// elements meets what is past its end.
template <int K, bool WIDE> DC_GPU void rotate_block(float *x, int log, float root, const RotateSigns &given) {
  const int lane = block_thread() % WARP, length = 1 << log;
  const float factor = rotate_factor(log, root);
  RotateSigns signs = given.anew();
  float v[K][ROTATE_FOUR];
  DC_UNROLL
  for (int k = 0; k < K; k++) get<F32, ROTATE_FOUR, WIDE>(v[k], x, ROTATE_ROUND * k + ROTATE_FOUR * lane, length);
  DC_UNROLL
  for (int k = 0; k < K; k++) {
    float *q = v[k];
    DC_UNROLL
    for (int j = 0; j < ROTATE_FOUR; j++) q[j] = signs.flip(q[j], k, j);
    if (length > 1) rotate_pair(q[0], q[1]), rotate_pair(q[2], q[3]);
    if (length > 2) rotate_pair(q[0], q[2]), rotate_pair(q[1], q[3]);
  }
  DC_UNROLL
  for (int distance = 1; distance < WARP; distance *= 2) {
    if (length <= ROTATE_FOUR * distance) break; // all lanes alike
    const float sign = lane & distance ? -1.0f : 1.0f; // v + other, or other - v, rounded once
    DC_UNROLL
    for (int k = 0; k < K; k++) {
      DC_UNROLL
      for (int j = 0; j < ROTATE_FOUR; j++) v[k][j] = __fmaf_rn(v[k][j], sign, from_lane_beside(v[k][j], distance));
    }
  }
  DC_UNROLL
  for (int rounds = 1; rounds < K; rounds *= 2) {
    if (length <= ROTATE_ROUND * rounds) break;
    DC_UNROLL
    for (int k = 0; k < K; k++) {
      DC_UNROLL
      for (int j = 0; j < ROTATE_FOUR; j++)
        if (!(k & rounds)) rotate_pair(v[k][j], v[k + rounds][j]);
    }
  }
  signs = given.anew();
  DC_UNROLL
  for (int k = 0; k < K; k++) {
    DC_UNROLL
    for (int j = 0; j < ROTATE_FOUR; j++) v[k][j] = signs.flip(__fmul_rn(v[k][j], factor), k, j);
    put<F32, ROTATE_FOUR, WIDE>(x, ROTATE_ROUND * k + ROTATE_FOUR * lane, length, v[k]);
  }
}

// Warps that n elements keep busy; on the host.
inline int64_t rotate_units(int64_t n) { return n / DC_ROTATE_BLOCK + (n % DC_ROTATE_BLOCK != 0); }

// WIDE: x is aligned to 16 bytes; so is every block of four elements or more then, since longer ones come first.
template <bool WIDE> DC_GPU void rotate(float *x, int64_t n, float root, int64_t warp, int64_t warps) {
  const int64_t whole = n / DC_ROTATE_BLOCK;
  const RotateSigns signs = rotate_signs();
  for (int64_t block = warp; block < whole; block += warps)
    rotate_block<DC_ROTATE_BLOCK / ROTATE_ROUND, WIDE>(x + block * DC_ROTATE_BLOCK, ROTATE_LOG, root, signs);
  if (whole % warps != warp) return;
  const int rest = (int)(n % DC_ROTATE_BLOCK);
  x += whole * DC_ROTATE_BLOCK;
  for (int log = ROTATE_LOG - 1; log >= 0; log--) {
    if (!(rest >> log & 1)) continue;
    rotate_block<DC_ROTATE_BLOCK / ROTATE_ROUND / 2, WIDE>(x, log, root, signs);
    x += 1 << log;
  }
}

} // namespace dc_gpu
#endif
