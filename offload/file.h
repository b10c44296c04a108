/* file.h: what extent.c needs of file.c beyond offload.h. */
#ifndef DEEPC_OFFLOAD_FILE_H
#define DEEPC_OFFLOAD_FILE_H

#include "ring.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the owner of a request is told. Any may be NULL. */
typedef struct dc__io_hooks {
  /* Once, when no block is on its way any more, under the file's lock: may call nothing of file.c. */
  void (*complete)(void *owner, int status);
  /* In the first dc_io_wait after a complete request that went well; what it returns (with dc_last_error) stands for
   * the request from then on. */
  int (*check)(void *owner);
  /* When the dc_io is freed. */
  void (*drop)(void *owner);
} dc__io_hooks;
/* As dc_file_read_start and dc_file_write_start. The hooks are called only if this returns DC_OK, perhaps before it
 * does. */
int dc__file_start(dc_file *f, int what, const dc_piece *pieces, int64_t n, const dc__io_hooks *hooks, void *owner,
                   dc_io **out);
const char *dc__file_path(const dc_file *f);
bool dc__file_writes(const dc_file *f);
/* DC_E_STATE if someone else holds this lock, after 2 s; DC_OK where the file system has none. */
int dc__file_lock(dc_file *f);
int dc__file_size(dc_file *f, int64_t *bytes);
int dc__file_reserve(dc_file *f, int64_t bytes);
/* What it holds goes; a block device can't be cut: it begins with `head` bytes of zeros instead. No request is on its
 * way. */
int dc__file_empty(dc_file *f, int64_t head);
/* Waits for all requests that were started before. */
int dc__file_drain(dc_file *f);
/* DC_E_STATE in a child of the process that opened it. */
int dc__file_mine(const dc_file *f);

#ifdef __cplusplus
}
#endif
#endif
