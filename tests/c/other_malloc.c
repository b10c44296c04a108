/* A malloc before glibc's, for LD_PRELOAD: as jemalloc stands there, but glibc's underneath. */
#include <stddef.h>

extern void *__libc_malloc(size_t bytes);

void *malloc(size_t bytes) { return __libc_malloc(bytes); }
