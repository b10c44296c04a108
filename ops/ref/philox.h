/* philox.h: Philox4x32-10, random numbers of a counter and a key (Salmon et al., "Parallel random numbers: as easy as
 * 1, 2, 3", SC 2011): no state, so that any thread makes any of them, and again. cpu/philox.h has it in vectors. */
#ifndef DEEPC_OPS_PHILOX_H
#define DEEPC_OPS_PHILOX_H

#include <stdint.h>

#define DC__PHILOX_M0 0xd2511f53u
#define DC__PHILOX_M1 0xcd9e8d57u
#define DC__PHILOX_W0 0x9e3779b9u
#define DC__PHILOX_W1 0xbb67ae85u
enum { DC__PHILOX_ROUNDS = 10 };

/* Of numbers of 16 bits, those below it drop at `rate`; 0: none. */
static inline int dc__philox_threshold(float rate) {
  const int t = (int)(rate * 65536.0f + 0.5f);
  return t < 65536 ? t : 65535;
}

/* The counter c becomes its four numbers. */
static inline void dc__philox(uint32_t *c, uint32_t key0, uint32_t key1) {
  for (int r = 0; r < DC__PHILOX_ROUNDS; r++, key0 += DC__PHILOX_W0, key1 += DC__PHILOX_W1) {
    const uint64_t a = (uint64_t)DC__PHILOX_M0 * c[0], b = (uint64_t)DC__PHILOX_M1 * c[2];
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ key0, c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ key1, c[3] = (uint32_t)a;
  }
}

#endif
