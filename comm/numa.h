/* numa.h: which processors this process runs on, as the kernel groups them, and on which node shared memory is put. */
#ifndef DEEPC_NUMA_H
#define DEEPC_NUMA_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

/* Where a process is bound to; -1: to processors of several, or the kernel does not say. */
typedef struct dc__spot {
  int32_t l3;   /* the first processor that shares its last-level cache */
  int32_t node; /* of memory */
} dc__spot;

/* The processors of a list as the kernel writes them: "0-3,8,10-11\n". What is not such a list is empty. */
void dc__numa_list(const char *text, cpu_set_t *set);
/* Where processes that are bound to `bound` run; root: "/sys". */
dc__spot dc__numa_spot(const char *root, const cpu_set_t *bound);
/* The same of the calling thread. */
dc__spot dc__numa_here(void);

/* Memory of [base, base + bytes), as far as it is not there yet, comes from this node while that has some. Whole pages
 * only; base is on a page. A wish: without it memory lies where it is touched first. */
void dc__numa_prefer(void *base, int64_t bytes, int node);
/* From these nodes in turns (bit i: node i). */
void dc__numa_interleave(void *base, int64_t bytes, uint64_t nodes);

#endif
