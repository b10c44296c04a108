/* find.c: dc_find_nonfinite: which element was it. Runs after a partial norm said that there is one, so it may be plain
 * C; integer tests of the exponent, which compilers turn into baseline vector code. */
#include "ops.h"

static int any_u32(const uint32_t *x, int64_t n) {
  uint32_t hit = 0;
  for (int64_t i = 0; i < n; i++) hit |= (x[i] & 0x7f800000u) == 0x7f800000u;
  return hit != 0;
}

static int any_u16(const uint16_t *x, int64_t n, uint16_t exponent) {
  uint16_t hit = 0;
  for (int64_t i = 0; i < n; i++) hit |= (uint16_t)((x[i] & exponent) == exponent);
  return hit != 0;
}

/* Whether [begin, begin + n) holds an infinity or a NaN. */
static int any_nonfinite(const void *x, int dt, int64_t begin, int64_t n) {
  if (dt == DC_F32) return any_u32((const uint32_t *)x + begin, n);
  return any_u16((const uint16_t *)x + begin, n, dt == DC_BF16 ? 0x7f80u : 0x7c00u);
}

int dc_find_nonfinite(const void *x, int dt, int64_t n, int64_t *index) {
  if (dt != DC_F32 && dt != DC_BF16 && dt != DC_F16)
    return DC_FAIL(DC_E_DTYPE, "x is dtype %d (%s); this op takes fp32, bf16 and fp16", dt, dc_dtype_name(dt));
  if (n < 0) return DC_FAIL(DC_E_INVALID, "n = %lld is negative", (long long)n);
  if ((n > 0 && !x) || !index) return DC_FAIL(DC_E_INVALID, "%s is NULL", index ? "x" : "index");
  if ((uintptr_t)x % dc_dtype_size(dt))
    return DC_FAIL(DC_E_INVALID, "x = %p is not aligned to its element of %zu bytes", x, dc_dtype_size(dt));
  for (int64_t begin = 0; begin < n; begin += DC_BLOCK) {
    const int64_t len = n - begin < DC_BLOCK ? n - begin : DC_BLOCK;
    if (!any_nonfinite(x, dt, begin, len)) continue;
    for (int64_t i = begin; i < begin + len; i++) {
      if (!any_nonfinite(x, dt, i, 1)) continue;
      *index = i;
      return DC_OK;
    }
  }
  *index = -1;
  return DC_OK;
}
