/* dynamic.h: a range of addresses whose first bytes have memory: it grows and shrinks where it lies (dynamic.c). */
#ifndef DEEPC_BASE_DYNAMIC_H
#define DEEPC_BASE_DYNAMIC_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One user at a time per range. */
typedef struct dc_dynamic dc_dynamic;

/* Bytes: addresses "reserved"; "used", what the last dc_dynamic_resize asked for; "committed", what has memory;
 * "most_committed" at any time; "granted" and "released", what came and went since the start. Calls: "grows" and
 * "shrinks" of `used`, and "commits" and "releases", where the kernel was asked. Nothing is ever moved. */
struct dc_dynamic_stats {
  size_t struct_size; /* set by the caller: sizeof(struct dc_dynamic_stats) */
  int64_t reserved, used, committed, most_committed, granted, released;
  int64_t grows, shrinks, commits, releases;
};

/* *at: the start of `bytes` of addresses without memory, on a huge page's boundary, valid until dc_dynamic_close.
 * slack: what may have memory without being used, as a part of what is used (INFINITY: what once had it keeps it). *out
 * is owned by the caller. DC_E_INVALID: bytes is 0, slack is negative or NaN. DC_E_NOMEM: no addresses are left.
 * DC_E_ENV: DEEPC_HUGEPAGES. */
DC_API int dc_dynamic_open(size_t bytes, double slack, dc_dynamic **out, void **at);
/* The first `bytes` have memory, which holds what it held below the smaller of both sizes and zeros above: it is never
 * copied. What has memory is more than what is used by `slack` of it at most, or by less than a page. On failure
 * nothing has changed: DC_E_INVALID: more than is reserved; DC_E_NOMEM: the machine or the cgroup has not as much left.
 */
DC_API int dc_dynamic_resize(dc_dynamic *dynamic, size_t bytes);
/* DC_E_INVALID: NULL, or a struct_size of another version. */
DC_API int dc_dynamic_read(const dc_dynamic *dynamic, struct dc_dynamic_stats *out);
/* NULL is allowed. */
DC_API int dc_dynamic_close(dc_dynamic *dynamic);

/* ---- the same on a GPU: dynamic_cuda.c --------------------------------------------------------------------------- */
typedef struct dc_dynamic_cuda dc_dynamic_cuda;

/* *at: the start of `bytes` of addresses of GPU `device` (its number among those that are visible), on a boundary of
 * the driver's pages (2 MiB mostly). slack, *out: as above. DC_E_INVALID: as above, or there is no such device.
 * DC_E_UNSUPPORTED: there is no driver, or the device has no virtual memory management. DC_E_NOMEM: no addresses are
 * left. DC_E_CUDA: the driver's own error. */
DC_API int dc_dynamic_cuda_open(int device, size_t bytes, double slack, dc_dynamic_cuda **out, void **at);
/* As dc_dynamic_resize, with pages of the driver. The zeros above what it held are written in the order of `stream` (a
 * CUstream or cudaStream_t of the device; NULL: the default one). Before memory is given back all work of the device is
 * waited for. DC_E_CUDA too: also the error of a kernel that ran before. */
DC_API int dc_dynamic_cuda_resize(dc_dynamic_cuda *dynamic, size_t bytes, void *stream);
/* As dc_dynamic_read. */
DC_API int dc_dynamic_cuda_read(const dc_dynamic_cuda *dynamic, struct dc_dynamic_stats *out);
/* Waits for all work of the device. NULL is allowed. The range is gone whatever is returned; DC_OK where the driver has
 * been shut down before (at the end of a process). */
DC_API int dc_dynamic_cuda_close(dc_dynamic_cuda *dynamic);

#ifdef __cplusplus
}
#endif
#endif
