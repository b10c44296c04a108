/* scale.c: scalar reference of dc_scale. */
#include "ref/scalar.h"

void dc__scale_scalar(void *x, int dt, float a, int64_t n) {
  for (int64_t i = 0; i < n; i++) dc__put(x, dt, i, a * dc__get(x, dt, i));
}
