/* ring_uring.c: the ring over Linux's io_uring (io_uring(7)), by raw system calls: three of them and two shared rings,
 * which is less than it takes to have liburing at hand where deepc is built and run. Needs Linux 5.11 (waits with a
 * time limit, no lost completions). The kernel's ABI is written down here, since the headers of the systems that wheels
 * are built on are older than it.
 *
 * Owns the ring's descriptor and its mapping. The submission queue is touched by one thread at a time (start, flush)
 * and the completion queue by one (reap); the indices that the kernel also moves are read with acquire and written with
 * release. */
#include "ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SYS_SETUP = 425, SYS_ENTER = 426, SYS_REGISTER = 427 }; /* the same on all machines but Alpha */
enum { OP_FSYNC = 3, OP_READ_FIXED = 4, OP_WRITE_FIXED = 5, OP_READ = 22, OP_WRITE = 23 };
enum { FSYNC_DATASYNC = 1, ENTER_GETEVENTS = 1, ENTER_EXT_ARG = 8, REGISTER_BUFFERS = 0, UNREGISTER_BUFFERS = 1 };
enum { FEAT_SINGLE_MMAP = 1, FEAT_NODROP = 2, FEAT_EXT_ARG = 256 };
#define OFFSET_RINGS 0ll
#define OFFSET_SQES 0x10000000ll

struct sqe {
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, op_flags;
  uint64_t user_data;
  uint16_t buf_index, personality;
  int32_t file_index;
  uint64_t rest[2];
};
struct cqe {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};
struct params {
  uint32_t sq_entries, cq_entries, flags, thread_cpu, thread_idle, features, wq_fd, reserved[3];
  struct {
    uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
    uint64_t address;
  } sq;
  struct {
    uint32_t head, tail, mask, entries, overflow, cqes, flags, reserved;
    uint64_t address;
  } cq;
};
struct enter_arg {
  uint64_t sigmask;
  uint32_t sigmask_bytes, pad;
  uint64_t time;
};
_Static_assert(sizeof(struct sqe) == 64 && sizeof(struct cqe) == 16 && sizeof(struct params) == 120,
               "the kernel's ABI");

struct uring_ring {
  dc__disk_ring ring;
  int fd;
  char *rings;
  struct sqe *sqes;
  size_t ring_bytes, sqe_bytes;
  uint32_t *sq_head, *sq_tail, sq_mask, *sq_array;
  uint32_t *cq_head, *cq_tail, cq_mask;
  struct cqe *cqes;
  uint32_t made; /* the tail as far as sqes are filled */
  bool fixed;
};

static int uring_enter(int fd, uint32_t submit, uint32_t least, uint32_t flags, struct enter_arg *arg) {
  const long n = syscall(SYS_ENTER, fd, submit, least, flags, arg, arg ? sizeof *arg : 0);
  return n < 0 ? -errno : (int)n;
}

static void uring_unmap(struct uring_ring *r) {
  if (r->rings) munmap(r->rings, r->ring_bytes);
  if (r->sqes) munmap(r->sqes, r->sqe_bytes);
  close(r->fd);
  free(r);
}

static void *uring_map(int fd, size_t bytes, int64_t offset) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  if (p == MAP_FAILED) return NULL;
  (void)madvise(p, bytes, MADV_DONTFORK); /* a child must not move the parent's indices */
  return p;
}

static int uring_open(const dc__disk_ring_body *body, int depth, int threads, dc__disk_ring **out) {
  struct params k = {0};
  struct uring_ring *r = calloc(1, sizeof *r);
  if (!r) return -ENOMEM;
  r->ring.body = body;
  r->fd = (int)syscall(SYS_SETUP, (unsigned)depth, &k);
  if (r->fd < 0) {
    const int error = errno;
    free(r);
    return -error;
  }
  const uint32_t needed = FEAT_SINGLE_MMAP | FEAT_NODROP | FEAT_EXT_ARG;
  if ((k.features & needed) != needed) {
    uring_unmap(r);
    return -EOPNOTSUPP;
  }
  const size_t sq = k.sq.array + k.sq_entries * sizeof(uint32_t), cq = k.cq.cqes + k.cq_entries * sizeof(struct cqe);
  r->ring_bytes = sq > cq ? sq : cq;
  r->sqe_bytes = k.sq_entries * sizeof(struct sqe);
  r->rings = uring_map(r->fd, r->ring_bytes, OFFSET_RINGS);
  r->sqes = uring_map(r->fd, r->sqe_bytes, OFFSET_SQES);
  if (!r->rings || !r->sqes) {
    const int error = errno;
    uring_unmap(r);
    return -error;
  }
  r->sq_head = (uint32_t *)(r->rings + k.sq.head);
  r->sq_tail = (uint32_t *)(r->rings + k.sq.tail);
  r->sq_mask = *(uint32_t *)(r->rings + k.sq.mask);
  r->sq_array = (uint32_t *)(r->rings + k.sq.array);
  r->cq_head = (uint32_t *)(r->rings + k.cq.head);
  r->cq_tail = (uint32_t *)(r->rings + k.cq.tail);
  r->cq_mask = *(uint32_t *)(r->rings + k.cq.mask);
  r->cqes = (struct cqe *)(r->rings + k.cq.cqes);
  r->made = *r->sq_tail;
  *out = &r->ring;
  return 0;
}

/* At most `depth` blocks are inside, so there is always room. */
static void uring_start(dc__disk_ring *ring, dc__disk_ring_op *op) {
  struct uring_ring *r = (struct uring_ring *)ring;
  const uint32_t at = r->made++ & r->sq_mask;
  struct sqe *e = &r->sqes[at];
  memset(e, 0, sizeof *e);
  e->fd = op->fd;
  e->user_data = (uint64_t)(uintptr_t)op;
  if (op->what == DC__DISK_SYNC) {
    e->opcode = OP_FSYNC;
    e->op_flags = FSYNC_DATASYNC;
  } else {
    const bool fixed = op->fixed >= 0 && r->fixed, reads = op->what == DC__DISK_READ;
    e->opcode = fixed ? (reads ? OP_READ_FIXED : OP_WRITE_FIXED) : (reads ? OP_READ : OP_WRITE);
    e->buf_index = fixed ? (uint16_t)op->fixed : 0;
    e->address = (uint64_t)(uintptr_t)op->data;
    e->length = (uint32_t)op->bytes;
    e->offset = (uint64_t)op->offset;
  }
  r->sq_array[at] = at;
}

/* What the kernel does not take comes back with its reason: without a polling thread it looks at the queue only inside
 * of the call, so the tail may move back. */
static void uring_flush(dc__disk_ring *ring, dc__disk_ring_op **back) {
  struct uring_ring *r = (struct uring_ring *)ring;
  int n = 0;
  *back = NULL;
  __atomic_store_n(r->sq_tail, r->made, __ATOMIC_RELEASE);
  for (;;) {
    const uint32_t waiting = r->made - __atomic_load_n(r->sq_head, __ATOMIC_ACQUIRE);
    if (!waiting) return;
    n = uring_enter(r->fd, waiting, 0, 0, NULL);
    if (n == -EINTR) continue;
    if (n <= 0) break;
  }
  const uint32_t head = __atomic_load_n(r->sq_head, __ATOMIC_ACQUIRE);
  while (r->made != head) {
    dc__disk_ring_op *op = (dc__disk_ring_op *)(uintptr_t)r->sqes[r->sq_array[--r->made & r->sq_mask]].user_data;
    op->result = n ? n : -EAGAIN;
    op->next = *back;
    *back = op;
  }
  __atomic_store_n(r->sq_tail, r->made, __ATOMIC_RELEASE);
}

static void uring_reap(dc__disk_ring *ring, int64_t timeout_ns, dc__disk_ring_op **done) {
  struct uring_ring *r = (struct uring_ring *)ring;
  uint32_t head = *r->cq_head;
  if (head == __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE)) {
    /* Also without waiting: completions may lie with the kernel until this thread enters it. EINTR and ETIME: none yet.
     */
    int64_t time[2] = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    struct enter_arg arg = {.time = (uint64_t)(uintptr_t)time};
    (void)uring_enter(r->fd, 0, timeout_ns > 0, ENTER_GETEVENTS | ENTER_EXT_ARG, &arg);
  }
  *done = NULL;
  dc__disk_ring_op **last = done;
  const uint32_t tail = __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE);
  for (; head != tail; head++) {
    const struct cqe *e = &r->cqes[head & r->cq_mask];
    dc__disk_ring_op *op = (dc__disk_ring_op *)(uintptr_t)e->user_data;
    op->result = e->result;
    op->next = NULL;
    *last = op;
    last = &op->next;
  }
  __atomic_store_n(r->cq_head, head, __ATOMIC_RELEASE);
}

static int uring_fix(dc__disk_ring *ring, const dc__fixed_range *ranges, int n) {
  struct uring_ring *r = (struct uring_ring *)ring;
  if (r->fixed) (void)syscall(SYS_REGISTER, r->fd, UNREGISTER_BUFFERS, NULL, 0);
  r->fixed = false;
  struct iovec *v = calloc((size_t)n + 1, sizeof *v);
  if (!v) return -ENOMEM;
  for (int i = 0; i < n; i++) v[i] = (struct iovec){ranges[i].data, (size_t)ranges[i].bytes};
  const long rc = syscall(SYS_REGISTER, r->fd, REGISTER_BUFFERS, v, (unsigned)n);
  const int error = rc < 0 ? -errno : 0;
  free(v);
  r->fixed = !error;
  return error;
}

static void uring_close(dc__disk_ring *ring, bool forked) {
  struct uring_ring *r = (struct uring_ring *)ring;
  if (forked) r->rings = NULL, r->sqes = NULL; /* not mapped here; the addresses may be someone else's by now */
  uring_unmap(r);
}

const dc__disk_ring_body dc__disk_ring_uring = {.name = "io_uring",
                                                .open = uring_open,
                                                .start = uring_start,
                                                .flush = uring_flush,
                                                .reap = uring_reap,
                                                .fix = uring_fix,
                                                .reserve = dc__disk_ring_reserve,
                                                .close = uring_close};
