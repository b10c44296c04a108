/* limit.c: the memory traffic of AdamW without its arithmetic, on the threads of libdeepc.so: per element 4 reads and 3
 * writes in place (and, with `low`, one 2-byte write). What a machine needs for that is the limit of any AdamW step on
 * the same memory. */
#include <stddef.h>
#include <stdint.h>

#include "base/base.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BEST_ISA __attribute__((target_clones("default", "avx2", "arch=icelake-server"), optimize("O3")))
#else
#define BEST_ISA
#endif

typedef struct arrays {
  float *p, *g, *m, *v;
  uint16_t *low;
  float zero; /* a factor that the compiler does not know: values stay, traffic stays */
  int64_t ahead;
} arrays;

BEST_ISA static void walk(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, float z,
                          int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += z * g[i], m[i] += z * g[i], v[i] += z * g[i];
}
BEST_ISA static void walk_low(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                              uint16_t *restrict low, float z, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += z * g[i], m[i] += z * g[i], v[i] += z * g[i], low[i] = 1;
}

/* The same with all arrays fetched `ahead` bytes before they are used, a cache line each time: as kernels do it that
 * wait for no page's first lines. What is behind the end is fetched for nothing. */
enum { LINE = 16 };
BEST_ISA static void walk_ahead(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                                uint16_t *restrict low, float z, int64_t n, int64_t ahead) {
  int64_t i = 0;
  for (; i + LINE <= n; i += LINE) {
    uintptr_t at = (uintptr_t)(4 * i + ahead);
    __builtin_prefetch((const void *)((uintptr_t)p + at));
    __builtin_prefetch((const void *)((uintptr_t)g + at));
    __builtin_prefetch((const void *)((uintptr_t)m + at));
    __builtin_prefetch((const void *)((uintptr_t)v + at));
    for (int64_t j = i; j < i + LINE; j++) p[j] += z * g[j], m[j] += z * g[j], v[j] += z * g[j];
    if (low)
      for (int64_t j = i; j < i + LINE; j++) low[j] = 1;
  }
  for (; i < n; i++) {
    p[i] += z * g[i], m[i] += z * g[i], v[i] += z * g[i];
    if (low) low[i] = 1;
  }
}

static void range(int64_t begin, int64_t end, void *ctx) {
  const arrays *a = ctx;
  if (a->ahead)
    walk_ahead(a->p + begin, a->g + begin, a->m + begin, a->v + begin, a->low ? a->low + begin : NULL, a->zero,
               end - begin, a->ahead);
  else if (a->low)
    walk_low(a->p + begin, a->g + begin, a->m + begin, a->v + begin, a->low + begin, a->zero, end - begin);
  else walk(a->p + begin, a->g + begin, a->m + begin, a->v + begin, a->zero, end - begin);
}

__attribute__((visibility("default"))) void bench_limit(void (*parallel_for)(int64_t, int64_t, dc_range_fn, void *),
                                                        float *p, float *g, float *m, float *v, uint16_t *low,
                                                        int64_t n, int64_t grain, int64_t ahead) {
  arrays a = {p, g, m, v, low, 0.0f, ahead};
  parallel_for(n, grain, range, &a);
}

/* The traffic of packing with error feedback: two reads, one of them written in place, on the calling thread. */
BEST_ISA static void walk_pack(const float *restrict x, float *restrict error, int64_t n) {
  for (int64_t i = 0; i < n; i++) error[i] = x[i] - error[i];
}
__attribute__((visibility("default"))) void bench_limit_pack(const float *x, float *error, int64_t n) {
  walk_pack(x, error, n);
}
