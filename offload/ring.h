/* ring.h: how blocks reach the disk. One table of functions (dc__disk_ring_body), two bodies: ring_uring.c and
 * ring_threads.c; tests put a third before them that fails calls. What a result means is file.c's matter: a body hands
 * over what the kernel said, short or not. */
#ifndef DEEPC_OFFLOAD_RING_H
#define DEEPC_OFFLOAD_RING_H

#include "offload.h"

#ifdef __cplusplus
extern "C" {
#endif

enum dc__disk_ring_do { DC__DISK_READ, DC__DISK_WRITE, DC__DISK_SYNC };

/* One block. The caller's memory; the ring has it from start() until reap() or flush() gives it back. */
typedef struct dc__disk_ring_op {
  struct dc__disk_ring_op *next; /* the ring's; of a list that reap() or flush() returns */
  int32_t what;             /* of dc__disk_ring_do */
  int32_t fd;
  int32_t fixed; /* registered range that data lies in, or -1 */
  void *data;
  int64_t bytes, offset;
  int64_t result; /* bytes that were moved, or -errno */
} dc__disk_ring_op;

typedef struct dc__disk_ring dc__disk_ring;
typedef struct dc__fixed_range {
  void *data;
  int64_t bytes;
} dc__fixed_range;

typedef struct dc__disk_ring_body {
  const char *name;
  /* 0 or -errno. At most `depth` blocks are ever inside. */
  int (*open)(const struct dc__disk_ring_body *body, int depth, int threads, dc__disk_ring **out);
  /* Takes a block; it may start only with flush(). One thread at a time is in start() and flush(). */
  void (*start)(dc__disk_ring *r, dc__disk_ring_op *op);
  /* *back: blocks that could not be started, with their -errno, or NULL. */
  void (*flush)(dc__disk_ring *r, dc__disk_ring_op **back);
  /* *done: blocks that are complete. If there are none, waits for one up to timeout_ns (0: not at all), or less. One
   * thread at a time, beside start() and flush(). */
  void (*reap)(dc__disk_ring *r, int64_t timeout_ns, dc__disk_ring_op **done);
  /* Registers these ranges in the place of those before. No block is inside. 0 or -errno. */
  int (*fix)(dc__disk_ring *r, const dc__fixed_range *ranges, int n);
  /* Gives the file this size, and room on the disk where the file system can promise it. 0 or -errno. */
  int (*reserve)(int fd, int64_t bytes);
  /* No block is inside. forked: in a child of the process that opened it, whose threads and blocks are not here. */
  void (*close)(dc__disk_ring *r, bool forked);
} dc__disk_ring_body;
struct dc__disk_ring {
  const dc__disk_ring_body *body;
};

extern const dc__disk_ring_body dc__disk_ring_threads, dc__disk_ring_uring;
int dc__disk_ring_reserve(int fd, int64_t bytes);
/* Of a file or a device; *device: a block device, whose size nothing changes. 0 or errno. */
int dc__disk_size(int fd, int64_t *bytes, bool *device);
/* *fd: a file in this folder that nobody else can find and that goes with its last descriptor. 0 or errno. */
int dc__disk_nameless(const char *folder, int *fd);
/* NULL if io_uring may be used here, else why not; static storage. */
const char *dc__disk_ring_no_uring(int error);
/* kind: of dc_ring_kind. *why: "" or, for DC_RING_AUTO, why it is not io_uring. */
int dc__disk_ring_open(int kind, int depth, int threads, dc__disk_ring **out, const char **why);
/* For tests: all rings opened from now on have this body; NULL: as chosen again. */
void dc__disk_ring_use(const dc__disk_ring_body *body);

#ifdef __cplusplus
}
#endif
#endif
