/* cast.c: scalar reference of dc_cast. */
#include "ref/scalar.h"

void dc__cast_scalar(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, int stream) {
  (void)stream;
  for (int64_t i = 0; i < n; i++) dc__put(dst, ddt, i, scale * dc__get(src, sdt, i));
}
