/* heap.h: a heap as heap.c makes the process's own (base.h: dc_heap_*) and as its tests open others, with pages of
 * another size. Below libdeepc.so's surface. */
#ifndef DEEPC_BASE_HEAP_H
#define DEEPC_BASE_HEAP_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a heap is told of the system. */
typedef struct dc__heap_system {
  size_t page;  /* bytes of the kernel's pages: a power of two, at most DC_HUGE_PAGE */
  size_t bytes; /* of addresses to reserve; what is no whole huge page, or more than 32 bits count, is left off */
  int (*drop)(void *at, size_t bytes); /* takes the memory of whole pages away; NULL: madvise(MADV_DONTNEED) */
  bool (*move)(void *from, void *to, size_t bytes); /* NULL: dc__map_move */
} dc__heap_system;

typedef struct dc__heap dc__heap;
/* *out is owned by the caller: dc__heap_close. DC_E_NOMEM: the addresses can't be had. DC_E_UNSUPPORTED: what is mapped
 * is locked in memory (mlockall(MCL_FUTURE)). DC_E_ENV: DEEPC_HUGEPAGES. */
int dc__heap_open(const dc__heap_system *system, dc__heap **out);
void dc__heap_close(dc__heap *h);
/* dc_heap_take and dc_heap_take_high, dc_heap_give, dc_heap_stats of one heap. */
void *dc__heap_take(dc__heap *h, size_t bytes, bool high);
int dc__heap_give(dc__heap *h, void *p);
void dc__heap_read(dc__heap *h, struct dc_heap_stats *out);
/* Bytes that went back to the system: of all free blocks; at the end of a step, of what was in no block for `patience`
 * steps (every eighth step; else 0). */
int64_t dc__heap_trim(dc__heap *h);
int64_t dc__heap_step(dc__heap *h, uint32_t patience);
/* For how many steps free memory is kept while `available` bytes are left for a heap that has `bytes` of memory. */
uint32_t dc__heap_patience(int64_t available, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
