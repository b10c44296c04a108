/* find.c: dc_find_nonfinite: which element was it. Runs after a partial norm said that there is one, so it may be plain
 * C; integer tests of the exponent, which compilers turn into baseline vector code. */
#include "call.h"

static int find_any_u32(const uint32_t *x, int64_t n) {
  uint32_t hit = 0;
  for (int64_t i = 0; i < n; i++) hit |= (x[i] & 0x7f800000u) == 0x7f800000u;
  return hit != 0;
}

static int find_any_u16(const uint16_t *x, int64_t n, uint16_t exponent) {
  uint16_t hit = 0;
  for (int64_t i = 0; i < n; i++) hit |= (uint16_t)((x[i] & exponent) == exponent);
  return hit != 0;
}

/* Whether [begin, begin + n) holds an infinity or a NaN. */
static int find_any(const void *x, int dt, int64_t begin, int64_t n) {
  if (dt == DC_F32) return find_any_u32((const uint32_t *)x + begin, n);
  return find_any_u16((const uint16_t *)x + begin, n, dt == DC_BF16 ? 0x7f80u : 0x7c00u);
}

int dc_find_nonfinite(const void *x, int dt, int64_t n, int64_t *index) {
  if (!index) return DC_FAIL(DC_E_INVALID, "index is NULL");
  DC_TRY(check_count(n));
  DC_TRY(check_floats(x, dt, n, "x"));
  for (int64_t begin = 0; begin < n; begin += DC_BLOCK) {
    const int64_t len = n - begin < DC_BLOCK ? n - begin : DC_BLOCK;
    if (!find_any(x, dt, begin, len)) continue;
    for (int64_t i = begin; i < begin + len; i++) {
      if (!find_any(x, dt, i, 1)) continue;
      *index = i;
      return DC_OK;
    }
  }
  *index = -1;
  return DC_OK;
}
