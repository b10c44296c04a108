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

#ifdef __cplusplus
}
#endif
#endif
