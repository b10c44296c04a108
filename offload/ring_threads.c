/* ring_threads.c: the ring for kernels without io_uring (or that forbid it): threads that pread and pwrite.
 *
 * Owns its threads, which start with the first block and end with the ring. Threads sleep on a condition variable; a
 * forked child has none of them and only frees the memory. */
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct list {
  dc__disk_ring_op *first, **last;
};

struct threads_ring {
  dc__disk_ring ring;
  pthread_mutex_t lock; /* guards all that follows */
  pthread_cond_t work, done;
  struct list todo, finished;
  bool stop;
  int wanted, running;
  pthread_t *thread;
};

int dc__disk_size(int fd, int64_t *bytes, bool *device) {
  struct statx st; /* fstat is a symbol of glibc 2.33 */
  if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE | STATX_TYPE, &st)) return errno;
  *device = S_ISBLK(st.stx_mode);
  *bytes = *device ? lseek(fd, 0, SEEK_END) : (int64_t)st.stx_size;
  return *bytes < 0 ? errno : 0;
}

int dc__disk_ring_reserve(int fd, int64_t bytes) {
  int rc;
  int64_t have;
  bool device;
  if ((rc = dc__disk_size(fd, &have, &device))) return -rc;
  if (device) return have < bytes ? -ENOSPC : 0;
  do rc = fallocate(fd, 0, 0, bytes);
  while (rc && errno == EINTR);
  if (rc && (errno == EOPNOTSUPP || errno == ENOSYS)) { /* no such promise there: at least the size */
    rc = 0;
    if (have < bytes) /* of a larger file ftruncate would cut the rest off */
      do rc = ftruncate(fd, bytes);
      while (rc && errno == EINTR);
  }
  return rc ? -errno : 0;
}

static void threads_put(struct list *l, dc__disk_ring_op *op) {
  op->next = NULL;
  *l->last = op;
  l->last = &op->next;
}

static dc__disk_ring_op *threads_take(struct list *l) {
  dc__disk_ring_op *op = l->first;
  if (op && !(l->first = op->next)) l->last = &l->first;
  return op;
}

static int64_t threads_do(const dc__disk_ring_op *op) {
  ssize_t n;
  switch (op->what) {
  case DC__DISK_READ: n = pread(op->fd, op->data, (size_t)op->bytes, op->offset); break;
  case DC__DISK_WRITE: n = pwrite(op->fd, op->data, (size_t)op->bytes, op->offset); break;
  default: n = fdatasync(op->fd); break;
  }
  return n < 0 ? -errno : n;
}

static void *threads_main(void *arg) {
  struct threads_ring *r = arg;
  pthread_mutex_lock(&r->lock);
  for (;;) {
    dc__disk_ring_op *op;
    while (!(op = threads_take(&r->todo)) && !r->stop) pthread_cond_wait(&r->work, &r->lock);
    if (!op) break;
    pthread_mutex_unlock(&r->lock);
    op->result = threads_do(op);
    pthread_mutex_lock(&r->lock);
    threads_put(&r->finished, op);
    pthread_cond_signal(&r->done);
  }
  pthread_mutex_unlock(&r->lock);
  return NULL;
}

static int threads_open(const dc__disk_ring_body *body, int depth, int threads, dc__disk_ring **out) {
  struct threads_ring *r = calloc(1, sizeof *r);
  if (!r) return -ENOMEM;
  r->ring.body = body;
  r->wanted = threads < depth ? threads : depth;
  r->todo.last = &r->todo.first;
  r->finished.last = &r->finished.first;
  r->thread = calloc((size_t)r->wanted, sizeof *r->thread);
  if (!r->thread) {
    free(r);
    return -ENOMEM;
  }
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->work, NULL);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&r->done, &monotonic);
  pthread_condattr_destroy(&monotonic);
  *out = &r->ring;
  return 0;
}

/* Under the lock. Signals of the program are for its own threads. */
static int threads_grow(struct threads_ring *r) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&r->thread[r->running], NULL, threads_main, r);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!error) r->running++;
  return error;
}

/* Without any thread the block fails; with fewer than wanted it waits for one. */
static void threads_start(dc__disk_ring *ring, dc__disk_ring_op *op) {
  struct threads_ring *r = (struct threads_ring *)ring;
  pthread_mutex_lock(&r->lock);
  const int error = r->running < r->wanted ? threads_grow(r) : 0;
  if (r->running) {
    threads_put(&r->todo, op);
    pthread_cond_signal(&r->work);
  } else {
    op->result = -error;
    threads_put(&r->finished, op);
    pthread_cond_signal(&r->done);
  }
  pthread_mutex_unlock(&r->lock);
}

static void threads_flush(dc__disk_ring *ring, dc__disk_ring_op **back) { *back = NULL; }

static void threads_reap(dc__disk_ring *ring, int64_t timeout_ns, dc__disk_ring_op **done) {
  struct threads_ring *r = (struct threads_ring *)ring;
  pthread_mutex_lock(&r->lock);
  if (!r->finished.first && timeout_ns > 0) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const int64_t ns = until.tv_nsec + timeout_ns;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
    pthread_cond_timedwait(&r->done, &r->lock, &until);
  }
  *done = r->finished.first;
  r->finished.first = NULL;
  r->finished.last = &r->finished.first;
  pthread_mutex_unlock(&r->lock);
}

static int threads_fix(dc__disk_ring *ring, const dc__fixed_range *ranges, int n) { return -EOPNOTSUPP; }

static void threads_close(dc__disk_ring *ring, bool forked) {
  struct threads_ring *r = (struct threads_ring *)ring;
  if (!forked) {
    pthread_mutex_lock(&r->lock);
    r->stop = true;
    pthread_cond_broadcast(&r->work);
    pthread_mutex_unlock(&r->lock);
    for (int i = 0; i < r->running; i++) pthread_join(r->thread[i], NULL);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->work);
    pthread_cond_destroy(&r->done);
  }
  free(r->thread);
  free(r);
}

const dc__disk_ring_body dc__disk_ring_threads = {.name = "threads",
                                                  .open = threads_open,
                                                  .start = threads_start,
                                                  .flush = threads_flush,
                                                  .reap = threads_reap,
                                                  .fix = threads_fix,
                                                  .reserve = dc__disk_ring_reserve,
                                                  .close = threads_close};
