/* cast.c: bodies of dc_cast. A pair of dtypes is a constant of its loop. */
#include "cpu/vec.h"

DC_INLINE void cast_loop(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, int stream) {
  const vf a = v_set1(scale);
  int64_t i = 0;
  if (stream) { /* up to where dst is aligned to its 16 elements; a streaming store demands it */
    const int64_t size = ddt == DC_F32 ? 4 : 2, align = LANES * size;
    const int64_t head = (align - (int64_t)((uintptr_t)dst % (uintptr_t)align)) % align / size;
    if (head > 0 && head < n) {
      v_put(dst, ddt, 0, (int)head, v_mul(a, v_get(src, sdt, 0, (int)head)));
      i = head;
    }
    for (; head < n && i + LANES <= n; i += LANES) v_put_stream(dst, ddt, i, v_mul(a, v_get(src, sdt, i, LANES)));
    v_fence();
  }
  for (; i + LANES <= n; i += LANES) v_put(dst, ddt, i, LANES, v_mul(a, v_get(src, sdt, i, LANES)));
  if (i < n) v_put(dst, ddt, i, (int)(n - i), v_mul(a, v_get(src, sdt, i, (int)(n - i))));
}

DC_INLINE void cast_to(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, int stream) {
  switch (sdt) {
    case DC_F32: cast_loop(dst, ddt, src, DC_F32, scale, n, stream); return;
    case DC_BF16: cast_loop(dst, ddt, src, DC_BF16, scale, n, stream); return;
    default: cast_loop(dst, ddt, src, DC_F16, scale, n, stream); return;
  }
}

void DC_BODY(cast)(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, int stream) {
  switch (ddt) {
    case DC_F32: cast_to(dst, DC_F32, src, sdt, scale, n, stream); return;
    case DC_BF16: cast_to(dst, DC_BF16, src, sdt, scale, n, stream); return;
    default: cast_to(dst, DC_F16, src, sdt, scale, n, stream); return;
  }
}
