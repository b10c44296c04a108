/* copy.c: bodies of dc_copy. Small copies are libc's, which is at its best there; large ones store past the caches,
 * which saves reading each line of dst before it is overwritten: 1.2 to 1.8 of libc's (docs/lab/kernels.md). */
#include "cpu/vec.h"

void DC_BODY(copy)(void *dst, const void *src, int64_t bytes, int stream) {
  char *to = dst;
  const char *from = src;
  const int64_t head = (int64_t)(-(uintptr_t)dst % CACHE_LINE);
  if (!stream || bytes < head + 4 * CACHE_LINE) {
    memcpy(dst, src, (size_t)bytes);
    return;
  }
  memcpy(to, from, (size_t)head);
  int64_t i = head;
  for (; i + 4 * CACHE_LINE <= bytes; i += 4 * CACHE_LINE)
    for (int k = 0; k < 4; k++) v_stream_line(to + i + k * CACHE_LINE, from + i + k * CACHE_LINE);
  v_fence();
  memcpy(to + i, from + i, (size_t)(bytes - i));
}
