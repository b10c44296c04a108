/* rotate.h: what all bodies of dc_rotate share: how n elements are cut, the signs of D and the factor of a block. */
#ifndef DEEPC_OPS_REF_ROTATE_H
#define DEEPC_OPS_REF_ROTATE_H

#include "ref/scalar.h"

#define DC__ROTATE_M0 0x85ebca6bu
#define DC__ROTATE_M1 0xc2b2ae35u
enum { DC__ROTATE_R0 = 16, DC__ROTATE_R1 = 13 };

/* Of the block that begins where n elements are left: DC_ROTATE_BLOCK, or the largest power of two that is left. */
static inline int64_t dc__rotate_length(int64_t n) {
  int64_t length = DC_ROTATE_BLOCK;
  while (length > n) length /= 2;
  return length;
}

/* The sign bit of element i of D: the top bit of MurmurHash3's 32-bit finalizer, whose last step does not change it. */
static inline uint32_t dc__rotate_sign(uint32_t i) {
  i = (i ^ i >> DC__ROTATE_R0) * DC__ROTATE_M0;
  return ((i ^ i >> DC__ROTATE_R1) * DC__ROTATE_M1) & 0x80000000u;
}

static inline float dc__rotate_factor(int64_t length) { return (float)(1.0 / sqrt((double)length)); }

#endif
