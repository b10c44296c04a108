/* cast.c: bodies of dc_cast. A pair of dtypes is a constant of its loop. Large casts store past the caches, with
 * prefetch: 1.3 to 2.0 of plain stores (docs/lab/kernels.md); plain loops gain nothing by prefetch and have none. */
#include "cpu/vec.h"

/* Elements before dst is aligned to its 16 elements, as streaming stores demand. */
DC_INLINE int64_t cast_stream_head(const void *dst, int ddt) {
  const int64_t size = ddt == DC_F32 ? 4 : 2, align = LANES * size;
  return (align - (int64_t)((uintptr_t)dst % (uintptr_t)align)) % align / size;
}

DC_INLINE void cast_step(void *dst, int ddt, const void *src, int sdt, vf scale, int64_t i, int r) {
  v_put(dst, ddt, i, r, v_mul(scale, v_get(src, sdt, i, r)));
}

DC_INLINE void cast_loop(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, int stream) {
  const vf a = v_set1(scale);
  const int64_t head = cast_stream_head(dst, ddt);
  int64_t i = 0;
  if (stream && head + LANES <= n) {
    if (head) cast_step(dst, ddt, src, sdt, a, 0, (int)head);
    for (i = head; i + LANES <= n; i += LANES) {
      v_ahead(src, sdt, i, AHEAD);
      v_put_stream(dst, ddt, i, v_mul(a, v_get(src, sdt, i, LANES)));
    }
    v_fence();
  }
  for (; i + LANES <= n; i += LANES) cast_step(dst, ddt, src, sdt, a, i, LANES);
  if (i < n) cast_step(dst, ddt, src, sdt, a, i, (int)(n - i));
}

DC_INLINE void cast_to(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, int stream) {
  DC_FOR_LOW(sdt, DT, cast_loop(dst, ddt, src, DT, scale, n, stream));
}

void DC_BODY(cast)(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, int stream) {
  DC_FOR_LOW(ddt, DT, cast_to(dst, DT, src, sdt, scale, n, stream));
}
