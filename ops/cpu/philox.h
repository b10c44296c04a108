/* philox.h: ref/philox.h for 16 counters at a time. */
#ifndef DEEPC_OPS_CPU_PHILOX_H
#define DEEPC_OPS_CPU_PHILOX_H

#include "cpu/vec.h"
#include "ref/philox.h"

/* The counters c[0 .. 4), word by word, become their numbers. */
DC_INLINE void v_philox(vi *c, uint32_t key0, uint32_t key1) {
  for (int r = 0; r < DC__PHILOX_ROUNDS; r++, key0 += DC__PHILOX_W0, key1 += DC__PHILOX_W1) {
    vi high0, low0, high1, low1;
    vi_wide_mul(c[0], DC__PHILOX_M0, &high0, &low0);
    vi_wide_mul(c[2], DC__PHILOX_M1, &high1, &low1);
    c[0] = vi_xor3(high1, c[1], vi_set1((int)key0)), c[1] = low1;
    c[2] = vi_xor3(high0, c[3], vi_set1((int)key1)), c[3] = low0;
  }
}

#endif
