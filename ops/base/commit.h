/* commit.h: memory for addresses that were mapped without (mem.c). Below libdeepc.so's surface. */
#ifndef DEEPC_BASE_COMMIT_H
#define DEEPC_BASE_COMMIT_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* DC_E_NOMEM, which names `bytes` (what the user asked for), where the machine or the cgroup has not `length` left:
 * past that the kernel kills the process instead of failing a call. */
int dc__mem_check_available(size_t bytes, size_t length);
/* Faults [base, base + length) of private memory in, on all threads of the pool. DC_E_NOMEM. */
int dc__mem_fault_in(void *base, size_t length);

#ifdef __cplusplus
}
#endif
#endif
