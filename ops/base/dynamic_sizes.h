/* dynamic_sizes.h: what ranges of the CPU's and of a GPU's memory have in common (dynamic.c). Below libdeepc.so's
 * surface. */
#ifndef DEEPC_BASE_DYNAMIC_SIZES_H
#define DEEPC_BASE_DYNAMIC_SIZES_H

#include "dynamic.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of a larger slack growing takes that much only: the rest is for what was committed before. */
#define DC__DYNAMIC_AHEAD (1.0 / 32)

/* As dc_dynamic_stats has them. */
typedef struct {
  size_t reserved, used, committed, most_committed;
  int64_t granted, released, grows, shrinks, commits, releases;
} dc__dynamic_sizes;

/* What dc_dynamic_open refuses before it asks the system. who: the function's name. */
int dc__dynamic_check_open(const char *who, size_t bytes, double slack, const void *out, const void *at);
/* sizes: NULL: there is no range. DC_E_INVALID. */
int dc__dynamic_tell(const char *who, const dc__dynamic_sizes *sizes, struct dc_dynamic_stats *out);
/* `bytes` are used from now on. */
static inline void dc__dynamic_use(dc__dynamic_sizes *sizes, size_t bytes) {
  sizes->grows += bytes > sizes->used, sizes->shrinks += bytes < sizes->used;
  sizes->used = bytes;
}
static inline size_t dc__dynamic_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

#ifdef __cplusplus
}
#endif
#endif
