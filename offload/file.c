/* file.c: files that are read and written past the page cache, many blocks at a time.
 *
 * A request (dc_io) is a vector of pieces that is cut into parts: whole blocks go through the descriptor with O_DIRECT,
 * from and to the caller's memory if that is aligned, else over a bounce buffer; the bytes before the first and behind
 * the last boundary of pages go through a descriptor of the page cache. (The kernel keeps the two consistent: a part
 * never shares a page with a part of the other kind.) At most `depth` parts are on their way; the rest of a request
 * waits in the queue and is cut as parts come back. What the kernel moved short is asked for again, EINTR and EAGAIN as
 * well, TRIES times at most.
 *
 * Owns the descriptors, the ring, parts and bounce buffers, all under `lock`. The ring is reaped without it, by one
 * thread at a time (`reaping`); the others sleep on `changed`. A child of fork() sees another epoch and touches
 * nothing. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
  DEPTH = 64,
  DEPTH_MOST = 4096,
  THREADS = 8,
  THREADS_MOST = 256,
  BLOCK = 1 << 20,
  BLOCK_MOST = 1 << 30,
  BOUNCES = 16,
  BOUNCE_MOST = 4 << 20,
  FIXED_MOST = 16,
  TRIES = 128,
  LOCK_TRIES = 400, /* of 5 ms */
  TRIES_AT_ONCE = 8, /* then with a pause of 2 ms: a quarter of a second in all */
};

struct part {
  dc__disk_ring_op op; /* first: the ring gives back its address */
  dc_io *io;
  struct part *next_free;
  char *user; /* where the data belongs, while op.data is a bounce buffer */
  int bounce; /* its number, or -1 */
  int tries;
};

struct dc_io {
  dc_file *file;
  dc_io *next, *prev, *next_queued; /* of the unfinished; of those that are not cut to the end */
  const dc__io_hooks *hooks;
  void *owner;
  uint64_t number;
  int64_t n, at, into; /* pieces; cut up to byte `into` of piece `at` */
  int what, parts, status;
  bool queued, done, checked;
  char text[512];
  dc_piece pieces[];
};

struct dc_file {
  char *path;
  int fd, direct_fd; /* through the page cache; past it or -1 */
  bool direct, writes;
  uint64_t epoch;
  int64_t block, page; /* page: of the page cache, 4, 16 or 64 KiB, and at least DC_DISK_ALIGN */
  int depth;
  dc__disk_ring *ring;
  char why_direct[128], why_fixed[160], why[512];
  const char *why_ring;

  pthread_mutex_t lock; /* guards all that follows */
  pthread_cond_t changed;
  bool reaping, started, pause; /* started: blocks that want a flush; pause: after a moment */
  int inside, live;      /* parts in the ring; dc_io that were not freed */
  uint64_t numbers;
  dc_io *unfinished, *queue, **queue_last;
  struct part *parts, *free_parts;
  char *bounce; /* `bounces` of bounce_bytes */
  int bounces, free_bounces, free_bounce[BOUNCES];
  int64_t bounce_bytes;
  dc__fixed_range fixed[FIXED_MOST];
  int nfixed;
};

/* ---- forks ------------------------------------------------------------------------------------------------------- */
static pthread_mutex_t file_forks = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t file_epoch; /* how many forks lie between the first process and this one */
static void file_in_child(void) { atomic_fetch_add(&file_epoch, 1); }
DC__AT_FORK(file_at_fork, DC__FORK_FILES, &file_forks, file_in_child)

static bool file_is_mine(const dc_file *f) { return f->epoch == atomic_load(&file_epoch); }

int dc__file_mine(const dc_file *f) {
  if (!f) return DC_FAIL(DC_E_INVALID, "the file is NULL");
  return file_is_mine(f)
             ? DC_OK
             : DC_FAIL(DC_E_STATE, "%s was opened before a fork, by the parent process: open it again here", f->path);
}

/* ---- words ------------------------------------------------------------------------------------------------------- */
static int file_status(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG ? DC_E_NOSPC : error == ENOMEM ? DC_E_NOMEM : DC_E_IO;
}

static const char *file_advice(int error) {
  switch (error) {
  case ENOSPC: return "; free space there, or choose another folder";
  case EDQUOT: return "; the quota of this user is used up";
  case EFBIG: return "; a file may not be so large here (ulimit -f, or the file system's limit)";
  case EIO: return "; the device failed: see dmesg";
  case EACCES:
  case EPERM:
  case EROFS: return "; choose a folder that this user may write to";
  case ENOENT: return "; no such file or folder";
  case EMFILE: return "; raise ulimit -n";
  default: return "";
  }
}

#define FILE_FAIL(f_path, error, ...) file_fail(__LINE__, __func__, f_path, error, __VA_ARGS__)
__attribute__((format(printf, 5, 6))) static int file_fail(int line, const char *func, const char *path, int error,
                                                           const char *fmt, ...) {
  char what[256];
  va_list args;
  va_start(args, fmt);
  vsnprintf(what, sizeof what, fmt, args);
  va_end(args);
  return dc_fail(file_status(error), __FILE__, line, func, "%s %s: %s (errno %d)%s", what, path, strerror(error), error,
                 file_advice(error));
}

__attribute__((format(printf, 3, 4))) static void file_io_fails(dc_io *io, int status, const char *fmt, ...) {
  if (io->status) return; /* the first failure is the one to tell */
  io->status = status;
  va_list args;
  va_start(args, fmt);
  vsnprintf(io->text, sizeof io->text, fmt, args);
  va_end(args);
}

static void file_part_fails(struct part *p, int error) {
  static const char *const verbs[] = {"read", "write", "sync"};
  const dc_file *f = p->io->file;
  if (p->op.what == DC__DISK_SYNC)
    file_io_fails(p->io, file_status(error), "sync of %s: %s (errno %d)%s", f->path, strerror(error), error,
                  file_advice(error));
  else
    file_io_fails(p->io, file_status(error), "%s of %lld bytes at offset %lld of %s: %s (errno %d)%s",
                  verbs[p->op.what], (long long)p->op.bytes, (long long)p->op.offset, f->path, strerror(error), error,
                  file_advice(error));
}

/* ---- parts ------------------------------------------------------------------------------------------------------- */
static bool file_aligned(int64_t n) { return n % DC_DISK_ALIGN == 0; }

static void file_queue(dc_file *f, dc_io *io) {
  io->queued = true;
  io->next_queued = NULL;
  *f->queue_last = io;
  f->queue_last = &io->next_queued;
}

static void file_unqueue_first(dc_file *f) {
  dc_io *io = f->queue;
  io->queued = false;
  if (!(f->queue = io->next_queued)) f->queue_last = &f->queue;
}

static void file_finish_if_done(dc_io *io) {
  dc_file *f = io->file;
  if (io->done || io->queued || io->parts) return;
  io->done = true;
  if (io->prev) io->prev->next = io->next;
  else f->unfinished = io->next;
  if (io->next) io->next->prev = io->prev;
  if (io->hooks && io->hooks->complete) io->hooks->complete(io->owner, io->status);
  pthread_cond_broadcast(&f->changed);
}

static void file_give_part(dc_file *f, struct part *p) {
  dc_io *io = p->io;
  if (p->bounce >= 0) f->free_bounce[f->free_bounces++] = p->bounce;
  p->next_free = f->free_parts;
  f->free_parts = p;
  f->inside--;
  io->parts--;
  file_finish_if_done(io);
}

static void file_start_part(dc_file *f, struct part *p) {
  p->op.fixed = -1;
  const char *data = p->op.data;
  for (int i = 0; i < f->nfixed && p->op.fixed < 0; i++) {
    const char *begin = f->fixed[i].data;
    if (data >= begin && data + p->op.bytes <= begin + f->fixed[i].bytes) p->op.fixed = i;
  }
  f->ring->body->start(f->ring, &p->op);
  f->started = true;
}

static void file_again(dc_file *f, struct part *p, int error) {
  const bool io_failed = p->io->status != DC_OK; /* the rest is not wanted */
  if (++p->tries > TRIES || io_failed) {
    file_part_fails(p, error);
    file_give_part(f, p);
    return;
  }
  dc__count(DC_COUNTER_disk_retries, 1);
  f->pause |= p->tries > TRIES_AT_ONCE;
  file_start_part(f, p);
}

/* A part came back. r: bytes or -errno. */
static void file_part_done(dc_file *f, struct part *p) {
  dc__disk_ring_op *op = &p->op;
  dc_io *io = p->io;
  const int64_t r = op->result;
  const bool direct = op->fd == f->direct_fd;
  if (r == -EINTR || r == -EAGAIN || r == -EBUSY || r == -ECANCELED) { /* canceled: the thread that started it ended */
    file_again(f, p, (int)-r);
    return;
  }
  if ((r == -EINVAL || r == -EOPNOTSUPP) && direct) { /* the device wants coarser alignment, or lies about O_DIRECT */
    f->direct = false;
    snprintf(f->why_direct, sizeof f->why_direct, "no O_DIRECT: a transfer failed with errno %d", (int)-r);
    op->fd = f->fd;
    file_start_part(f, p);
    return;
  }
  if (r < 0 || op->what == DC__DISK_SYNC) {
    if (r < 0) file_part_fails(p, (int)-r);
    file_give_part(f, p);
    return;
  }
  /* Past the page cache a part goes on at a boundary, and what lies before it is moved once more. */
  int64_t moved = r < op->bytes && direct ? r / DC_DISK_ALIGN * DC_DISK_ALIGN : r;
  if (moved > op->bytes) moved = op->bytes;
  if (moved > 0) {
    const bool reads = op->what == DC__DISK_READ;
    if (reads && p->bounce >= 0) memcpy(p->user, op->data, (size_t)moved);
    if (p->bounce >= 0) dc__count(DC_COUNTER_disk_bytes_bounced, moved), p->user += moved;
    dc__count(reads ? DC_COUNTER_disk_bytes_read : DC_COUNTER_disk_bytes_written, moved);
    op->data = (char *)op->data + moved;
    op->offset += moved;
    op->bytes -= moved;
    p->tries = 0;
  }
  if (!op->bytes) {
    file_give_part(f, p);
  } else if (op->what == DC__DISK_READ && r == 0) {
    file_io_fails(io, DC_E_IO, "read of %lld bytes at offset %lld of %s: the file ends before", (long long)op->bytes,
                  (long long)op->offset, f->path);
    file_give_part(f, p);
  } else if (io->status) { /* another part has failed: the rest is not wanted */
    file_give_part(f, p);
  } else if (moved > 0) {
    dc__count(DC_COUNTER_disk_retries, 1);
    file_start_part(f, p);
  } else if (op->what == DC__DISK_READ && p->tries == TRIES_AT_ONCE) { /* less than a block, again and again: its end */
    file_io_fails(io, DC_E_IO, "read of %lld bytes at offset %lld of %s: the file ends after %lld of them",
                  (long long)op->bytes, (long long)op->offset, f->path, (long long)r);
    file_give_part(f, p);
  } else {
    file_again(f, p, EIO);
  }
}

/* Bounce buffers come with the first request that needs one. */
static bool file_have_bounces(dc_file *f, dc_io *io) {
  if (f->bounce) return true;
  void *memory = NULL;
  const int n = f->depth < BOUNCES ? f->depth : BOUNCES;
  const int rc = dc_mem_alloc((size_t)(n * f->bounce_bytes), 0, &memory);
  if (!rc && (uintptr_t)memory % DC_DISK_ALIGN) {
    dc_mem_free(memory);
    memory = NULL;
    if (posix_memalign(&memory, DC_DISK_ALIGN, (size_t)(n * f->bounce_bytes))) memory = NULL;
  }
  if (!memory) {
    file_io_fails(io, DC_E_NOMEM, "%s: no memory for %d buffers of %lld bytes; align the data to %d bytes, or: %s",
                  f->path, n, (long long)f->bounce_bytes, DC_DISK_ALIGN, dc_last_error());
    return false;
  }
  f->bounce = memory;
  f->bounces = n;
  for (int i = 0; i < n; i++) f->free_bounce[f->free_bounces++] = i;
  return true;
}

enum cut { CUT_PART, CUT_WAIT, CUT_END };

/* Fills p with the request's next part. CUT_WAIT: when a bounce buffer is free again. */
static enum cut file_cut(dc_file *f, dc_io *io, struct part *p) {
  while (io->at < io->n && io->into == io->pieces[io->at].bytes) io->at++, io->into = 0;
  if (io->status || io->at == io->n) return CUT_END;
  const dc_piece *piece = &io->pieces[io->at];
  char *data = (char *)piece->data + (piece->data ? io->into : 0);
  const int64_t offset = piece->offset + io->into, left = piece->bytes - io->into;
  int64_t bytes = left < f->block ? left : f->block;
  p->bounce = -1;
  p->op.fd = f->fd;
  if (io->what == DC__DISK_SYNC) {
    bytes = left; /* the one "byte" of a sync */
  } else if (f->direct && offset % f->page) {
    const int64_t edge = f->page - offset % f->page;
    if (edge < bytes) bytes = edge;
  } else if (f->direct && bytes >= f->page) {
    p->op.fd = f->direct_fd;
    if ((uintptr_t)data % DC_DISK_ALIGN) {
      if (!file_have_bounces(f, io)) return CUT_END;
      if (!f->free_bounces) return CUT_WAIT;
      if (bytes > f->bounce_bytes) bytes = f->bounce_bytes;
      p->bounce = f->free_bounce[--f->free_bounces];
    }
    bytes = bytes / f->page * f->page;
  }
  p->io = io;
  p->tries = 0;
  p->user = data;
  p->op.what = io->what;
  p->op.data = p->bounce < 0 ? data : f->bounce + p->bounce * f->bounce_bytes;
  p->op.bytes = bytes;
  p->op.offset = offset;
  if (p->bounce >= 0 && io->what == DC__DISK_WRITE) memcpy(p->op.data, data, (size_t)bytes);
  io->into += bytes;
  return CUT_PART;
}

/* Under the lock: as many parts as there is room for, and what could not be started again. */
static void file_pump(dc_file *f) {
  do {
    while (f->queue && f->free_parts) {
      dc_io *io = f->queue;
      struct part *p = f->free_parts;
      const enum cut cut = file_cut(f, io, p);
      if (cut == CUT_WAIT) break;
      if (cut == CUT_END) {
        file_unqueue_first(f);
        file_finish_if_done(io);
        continue;
      }
      f->free_parts = p->next_free;
      f->inside++;
      io->parts++;
      file_start_part(f, p);
    }
    dc__disk_ring_op *back;
    if (f->pause) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    f->started = f->pause = false;
    f->ring->body->flush(f->ring, &back);
    while (back) {
      struct part *p = (struct part *)back;
      back = back->next;
      file_part_done(f, p);
    }
  } while (f->started || (f->queue && !f->inside)); /* parts that failed at once have made room */
}

/* ---- waiting ----------------------------------------------------------------------------------------------------- */
static int64_t file_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Under the lock, which is let go of meanwhile: what has come back, after waiting up to `ns` for it. */
static void file_progress(dc_file *f, int64_t ns) {
  if (ns > 1000000000) ns = 1000000000; /* nobody sleeps longer without a look */
  if (f->reaping) {
    if (!ns) return;
    const int64_t until = file_now_ns() + ns;
    struct timespec t = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_cond_timedwait(&f->changed, &f->lock, &t);
    return;
  }
  dc__disk_ring_op *done;
  f->reaping = true;
  pthread_mutex_unlock(&f->lock);
  f->ring->body->reap(f->ring, ns, &done);
  pthread_mutex_lock(&f->lock);
  while (done) {
    struct part *p = (struct part *)done;
    done = done->next;
    file_part_done(f, p);
  }
  f->reaping = false;
  file_pump(f);
  pthread_cond_broadcast(&f->changed); /* someone else may reap now */
}

int dc_io_test(dc_io *io, int *done) {
  if (!io || !done) return DC_FAIL(DC_E_INVALID, "io and done must not be NULL");
  DC_TRY(dc__file_mine(io->file));
  pthread_mutex_lock(&io->file->lock);
  if (!io->done) file_progress(io->file, 0);
  *done = io->done;
  pthread_mutex_unlock(&io->file->lock);
  return DC_OK;
}

int dc_io_wait(dc_io *io, int64_t timeout_ms) {
  if (!io) return DC_FAIL(DC_E_INVALID, "io must not be NULL");
  dc_file *f = io->file;
  DC_TRY(dc__file_mine(f));
  const int64_t limit = timeout_ms < INT64_MAX / 2000000 ? timeout_ms * 1000000 : 0; /* centuries: none */
  const int64_t end = limit > 0 ? file_now_ns() + limit : INT64_MAX;
  pthread_mutex_lock(&f->lock);
  while (!io->done) {
    const int64_t left = end == INT64_MAX ? INT64_MAX : end - file_now_ns();
    if (left <= 0) break;
    file_progress(f, left);
  }
  const bool done = io->done;
  pthread_mutex_unlock(&f->lock);
  if (!done)
    return DC_FAIL(DC_E_TIMEOUT, "%s: the request is not complete after %lld ms; it goes on: wait again", f->path,
                   (long long)timeout_ms);
  if (!io->checked) {
    io->checked = true;
    if (!io->status && io->hooks && io->hooks->check && (io->status = io->hooks->check(io->owner)))
      snprintf(io->text, sizeof io->text, "%s", dc_last_error());
  }
  return io->status ? DC_FAIL(io->status, "%s", io->text) : DC_OK;
}

int dc_io_free(dc_io *io) {
  if (!io) return DC_OK;
  dc_file *f = io->file;
  if (file_is_mine(f)) {
    pthread_mutex_lock(&f->lock);
    while (!io->done) file_progress(f, INT64_MAX);
    f->live--;
    pthread_mutex_unlock(&f->lock);
  } else {
    f->live--;
  }
  if (io->hooks && io->hooks->drop) io->hooks->drop(io->owner);
  free(io);
  return DC_OK;
}

/* ---- requests ---------------------------------------------------------------------------------------------------- */
static int file_look_at(const dc_file *f, int what, const dc_piece *pieces, int64_t n) {
  if (n < 0 || (n && !pieces))
    return DC_FAIL(DC_E_INVALID, "%s: %lld pieces at %p", f->path, (long long)n, (void *)pieces);
  if (n > INT32_MAX)
    return DC_FAIL(DC_E_INVALID, "%s: %lld pieces; at most %d in one call", f->path, (long long)n, INT32_MAX);
  if (what != DC__DISK_READ && !f->writes)
    return DC_FAIL(DC_E_INVALID, "%s was opened for reading; open it with DC_FILE_WRITE", f->path);
  for (int64_t i = 0; i < n; i++) {
    const dc_piece *p = &pieces[i];
    if (p->bytes < 0 || p->offset < 0 || (p->bytes && !p->data))
      return DC_FAIL(DC_E_INVALID,
                     "%s: piece %lld is %lld bytes from %p at offset %lld; neither may be negative or NULL", f->path,
                     (long long)i, (long long)p->bytes, p->data, (long long)p->offset);
    if (p->offset > INT64_MAX - p->bytes)
      return DC_FAIL(DC_E_OVERFLOW, "%s: piece %lld ends at %lld + %lld", f->path, (long long)i, (long long)p->offset,
                     (long long)p->bytes);
  }
  return DC_OK;
}

int dc__file_start(dc_file *f, int what, const dc_piece *pieces, int64_t n, const dc__io_hooks *hooks, void *owner,
                   dc_io **out) {
  DC_TRY(dc__file_mine(f));
  if (!out) return DC_FAIL(DC_E_INVALID, "%s: out is NULL", f->path);
  if (what != DC__DISK_SYNC) DC_TRY(file_look_at(f, what, pieces, n));
  dc_io *io = calloc(1, sizeof *io + (size_t)n * sizeof *pieces);
  if (!io) return DC_FAIL(DC_E_NOMEM, "%s: a request of %lld pieces", f->path, (long long)n);
  io->file = f;
  io->what = what;
  io->hooks = hooks;
  io->owner = owner;
  io->n = n;
  if (n) memcpy(io->pieces, pieces, (size_t)n * sizeof *pieces);
  pthread_mutex_lock(&f->lock);
  io->number = f->numbers++;
  if ((io->next = f->unfinished)) io->next->prev = io;
  f->unfinished = io;
  f->live++;
  *out = io;
  file_queue(f, io);
  file_pump(f);
  pthread_mutex_unlock(&f->lock);
  return DC_OK;
}

int dc_file_read_start(dc_file *f, const dc_piece *pieces, int64_t n, dc_io **out) {
  return dc__file_start(f, DC__DISK_READ, pieces, n, NULL, NULL, out);
}

int dc_file_write_start(dc_file *f, const dc_piece *pieces, int64_t n, dc_io **out) {
  return dc__file_start(f, DC__DISK_WRITE, pieces, n, NULL, NULL, out);
}

static int file_whole(dc_file *f, int what, const dc_piece *pieces, int64_t n) {
  dc_io *io = NULL;
  DC_TRY(dc__file_start(f, what, pieces, n, NULL, NULL, &io));
  const int rc = dc_io_wait(io, 0);
  dc_io_free(io);
  return rc;
}

int dc_file_read(dc_file *f, const dc_piece *pieces, int64_t n) { return file_whole(f, DC__DISK_READ, pieces, n); }

int dc_file_write(dc_file *f, const dc_piece *pieces, int64_t n) { return file_whole(f, DC__DISK_WRITE, pieces, n); }

static bool file_has_before(const dc_file *f, uint64_t number) {
  for (const dc_io *io = f->unfinished; io; io = io->next)
    if (io->number < number) return true;
  return false;
}

int dc__file_drain(dc_file *f) {
  DC_TRY(dc__file_mine(f));
  pthread_mutex_lock(&f->lock);
  const uint64_t now = f->numbers;
  while (file_has_before(f, now)) file_progress(f, INT64_MAX);
  pthread_mutex_unlock(&f->lock);
  return DC_OK;
}

int dc_file_sync(dc_file *f) {
  const dc_piece one = {.bytes = 1};
  DC_TRY(dc__file_drain(f));
  return f->writes ? file_whole(f, DC__DISK_SYNC, &one, 1) : DC_OK;
}

/* ---- open and close ---------------------------------------------------------------------------------------------- */
/* What a default value and limits make of a number that the caller gave. */
static int file_number(const char *path, const char *name, int64_t given, int64_t fallback, int64_t most, int64_t *n) {
  *n = given ? given : fallback;
  return *n < 1 || *n > most ? DC_FAIL(DC_E_INVALID, "%s: %s is %lld; it must be from 1 to %lld, or 0 for %lld", path,
                                       name, (long long)given, (long long)most, (long long)fallback)
                             : DC_OK;
}

static int file_open_fds(dc_file *f, const char *path, int flags) {
  const int access = (f->writes ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  const int make = (flags & DC_FILE_CREATE ? O_CREAT : 0) | (flags & DC_FILE_TRUNCATE ? O_TRUNC : 0);
  const bool nameless = flags & DC_FILE_NAMELESS;
  char link[32];
  if (nameless) {
    const int error = dc__disk_nameless(path, &f->fd);
    if (error) return FILE_FAIL(path, error, "no file can be made in");
    snprintf(link, sizeof link, "/proc/self/fd/%d", f->fd);
    path = link;
  } else {
    do f->fd = open(path, access | make | O_NONBLOCK, 0600); /* opening a pipe would wait for its other end */
    while (f->fd < 0 && errno == EINTR);
    if (f->fd < 0) return FILE_FAIL(path, errno, "open");
  }
  struct statx st; /* fstat is a symbol of glibc 2.33 */
  if (statx(f->fd, "", AT_EMPTY_PATH, STATX_TYPE, &st)) return FILE_FAIL(f->path, errno, "statx");
  if (!S_ISREG(st.stx_mode) && !S_ISBLK(st.stx_mode) && !S_ISCHR(st.stx_mode))
    return DC_FAIL(DC_E_INVALID, "%s is neither a file nor a device", f->path);
  if (fcntl(f->fd, F_SETFL, access & ~O_CLOEXEC)) return FILE_FAIL(f->path, errno, "fcntl");
  if (flags & DC_FILE_BUFFERED) {
    snprintf(f->why_direct, sizeof f->why_direct, "no O_DIRECT: DC_FILE_BUFFERED asks for the page cache");
  } else if (S_ISCHR(st.stx_mode)) {
    snprintf(f->why_direct, sizeof f->why_direct, "no O_DIRECT: a character device");
  } else {
    f->direct_fd = open(path, access | O_DIRECT);
    if (f->direct_fd < 0)
      snprintf(f->why_direct, sizeof f->why_direct, "no O_DIRECT: the file system refuses it (errno %d)", errno);
  }
  f->direct = f->direct_fd >= 0;
  return DC_OK;
}

static void file_free(dc_file *f, bool forked) {
  if (f->ring) f->ring->body->close(f->ring, forked);
  if (f->direct_fd >= 0) close(f->direct_fd);
  if (f->fd >= 0 && !forked) flock(f->fd, LOCK_UN); /* children have the descriptor as well */
  if (f->fd >= 0) close(f->fd);
  if (f->bounce && dc_mem_free(f->bounce)) free(f->bounce);
  free(f->parts);
  free(f->path);
  free(f);
}

static int file_make(const dc_file_config *k, dc_file *f) {
  int64_t depth, threads;
  f->fd = f->direct_fd = -1;
  f->epoch = atomic_load(&file_epoch);
  f->writes = k->flags & DC_FILE_WRITE;
  f->queue_last = &f->queue;
  f->why_ring = "";
  if (!k->path || !*k->path) return DC_FAIL(DC_E_INVALID, "dc_file_config.path is empty");
  const bool nameless = k->flags & DC_FILE_NAMELESS;
  const size_t room = strlen(k->path) + 32;
  if (!(f->path = malloc(room))) return DC_FAIL(DC_E_NOMEM, "a copy of the path");
  snprintf(f->path, room, nameless ? "the scratch file in %s" : "%s", k->path);
  if (k->flags & ~(DC_FILE_WRITE | DC_FILE_CREATE | DC_FILE_TRUNCATE | DC_FILE_BUFFERED | DC_FILE_NAMELESS))
    return DC_FAIL(DC_E_INVALID, "%s: flags are 0x%x, which dc_file_flag does not have", f->path, (unsigned)k->flags);
  if (nameless && (k->flags & (DC_FILE_CREATE | DC_FILE_TRUNCATE) || !f->writes))
    return DC_FAIL(DC_E_INVALID, "%s: DC_FILE_NAMELESS goes with DC_FILE_WRITE, and with no other way to make a file",
                   f->path);
  if ((k->flags & (DC_FILE_CREATE | DC_FILE_TRUNCATE) || k->reserve_bytes) && !f->writes)
    return DC_FAIL(DC_E_INVALID, "%s: to make, empty or reserve a file it must be opened with DC_FILE_WRITE", f->path);
  if (k->ring < DC_RING_AUTO || k->ring > DC_RING_THREADS)
    return DC_FAIL(DC_E_INVALID, "%s: ring is %d, which is no dc_ring_kind", f->path, k->ring);
  DC_TRY(file_number(f->path, "depth", k->depth, DEPTH, DEPTH_MOST, &depth));
  DC_TRY(file_number(f->path, "threads", k->threads, THREADS, THREADS_MOST, &threads));
  DC_TRY(file_number(f->path, "block_bytes", k->block_bytes, BLOCK, BLOCK_MOST, &f->block));
  if (!file_aligned(f->block))
    return DC_FAIL(DC_E_INVALID, "%s: block_bytes is %lld; it must be a multiple of %d", f->path, (long long)f->block,
                   DC_DISK_ALIGN);
  if (k->reserve_bytes < 0)
    return DC_FAIL(DC_E_INVALID, "%s: reserve_bytes is %lld", f->path, (long long)k->reserve_bytes);
  f->page = sysconf(_SC_PAGESIZE) > DC_DISK_ALIGN ? sysconf(_SC_PAGESIZE) : DC_DISK_ALIGN;
  f->depth = (int)depth;
  f->bounce_bytes = f->block < BOUNCE_MOST ? f->block : BOUNCE_MOST;
  DC_TRY(file_open_fds(f, k->path, k->flags));
  DC_TRY(dc__disk_ring_open(k->ring, f->depth, (int)threads, &f->ring, &f->why_ring));
  if (k->reserve_bytes) DC_TRY(dc__file_reserve(f, k->reserve_bytes));
  if (!(f->parts = calloc((size_t)depth, sizeof *f->parts)))
    return DC_FAIL(DC_E_NOMEM, "%s: %d parts", f->path, f->depth);
  for (int i = f->depth; i-- > 0;) {
    f->parts[i].next_free = f->free_parts;
    f->free_parts = &f->parts[i];
  }
  return DC_OK;
}

int dc_file_open(const dc_file_config *config, dc_file **out) {
  dc_file_config k;
  DC_TRY(DC__SIZED(dc_file_config, reserve_bytes, config, &k));
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  dc_file *f = calloc(1, sizeof *f);
  if (!f) return DC_FAIL(DC_E_NOMEM, "a file");
  const int rc = file_make(&k, f);
  if (rc) {
    file_free(f, false);
    return rc;
  }
  pthread_condattr_t monotonic;
  pthread_mutex_init(&f->lock, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&f->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  *out = f;
  return DC_OK;
}

int dc_file_close(dc_file *f) {
  if (!f) return DC_OK;
  const bool mine = file_is_mine(f);
  if (mine) pthread_mutex_lock(&f->lock);
  const int live = f->live;
  if (mine) pthread_mutex_unlock(&f->lock);
  if (live) /* a request is waited for when it is freed, so none is on its way then */
    return DC_FAIL(DC_E_STATE, "%s can't be closed: %d of its requests are not freed; dc_io_free them first", f->path,
                   live);
  if (mine) {
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->changed);
  }
  file_free(f, !mine);
  return DC_OK;
}

/* ---- the rest ---------------------------------------------------------------------------------------------------- */
const char *dc__file_path(const dc_file *f) { return f->path; }

bool dc__file_writes(const dc_file *f) { return f->writes; }

/* A process that was killed may have blocks on their way for a moment, and io_uring holds its lock until they have
 * landed: so the lock also says when nothing of it will be written any more. */
int dc__file_lock(dc_file *f) {
  for (int left = LOCK_TRIES; flock(f->fd, LOCK_EX | LOCK_NB) && (errno == EWOULDBLOCK || errno == EINTR); left--) {
    if (!left)
      return DC_FAIL(DC_E_STATE,
                     "%s is open for writing already, here or in another process (or in a child that was forked "
                     "from one that was killed); close it there, or take another file",
                     f->path);
    nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  }
  return DC_OK;
}

static int file_size(dc_file *f, int64_t *bytes, bool *device) {
  const int error = dc__disk_size(f->fd, bytes, device);
  return error ? FILE_FAIL(f->path, error, "the size of") : DC_OK;
}

int dc__file_size(dc_file *f, int64_t *bytes) {
  bool device;
  return file_size(f, bytes, &device);
}

static int file_begin_with_zeros(dc_file *f, int64_t n) {
  void *zeros = calloc(1, (size_t)n);
  if (!zeros) return DC_FAIL(DC_E_NOMEM, "%lld bytes", (long long)n);
  const dc_piece piece = {zeros, n, 0};
  const int rc = dc_file_write(f, &piece, 1);
  free(zeros);
  return rc;
}

int dc__file_empty(dc_file *f, int64_t head) {
  int64_t bytes;
  bool device;
  int rc;
  DC_TRY(file_size(f, &bytes, &device));
  if (device) return file_begin_with_zeros(f, bytes < head ? bytes : head);
  if (!bytes) return DC_OK;
  do rc = ftruncate(f->fd, 0);
  while (rc && errno == EINTR);
  return rc ? FILE_FAIL(f->path, errno, "emptying") : DC_OK;
}

int dc__file_reserve(dc_file *f, int64_t bytes) {
  for (int tries = 0;; tries++) {
    const int error = -f->ring->body->reserve(f->fd, bytes);
    if (!error) return DC_OK;
    const bool again = error == EINTR || error == EAGAIN || error == EBUSY || error == ECANCELED;
    if (!again || tries == TRIES) return FILE_FAIL(f->path, error, "room for %lld bytes in", (long long)bytes);
    if (tries >= TRIES_AT_ONCE) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
  }
}

int dc_file_get_info(dc_file *f, dc_file_info *info) {
  dc_file_info found;
  DC_TRY(dc__file_mine(f));
  DC_TRY(DC__SIZED(dc_file_info, why, info, &found));
  DC_TRY(dc__file_size(f, &found.size_bytes));
  pthread_mutex_lock(&f->lock);
  const char *const whys[] = {f->why_ring, f->why_direct, f->why_fixed};
  f->why[0] = 0;
  for (int i = 0, at = 0; i < 3; i++)
    if (*whys[i]) at += snprintf(f->why + at, sizeof f->why - (size_t)at, "%s%s", at ? "; " : "", whys[i]);
  found.block_bytes = f->block;
  found.registered_bytes = 0;
  for (int i = 0; i < f->nfixed; i++) found.registered_bytes += f->fixed[i].bytes;
  found.depth = f->depth;
  found.direct = f->direct;
  found.ring = f->ring->body->name;
  found.why = f->why;
  pthread_mutex_unlock(&f->lock);
  const size_t size = info->struct_size;
  memcpy(info, &found, size < sizeof found ? size : sizeof found);
  return DC_OK;
}

/* Under the lock. NULL or why not. */
static const char *file_fix(dc_file *f, void *data, int64_t bytes) {
  int n = f->nfixed;
  for (int64_t at = 0; at < bytes; at += BLOCK_MOST) { /* the kernel takes up to 1 GiB in one */
    if (n == FIXED_MOST) return "no memory registered beyond 16 ranges of up to 1 GiB";
    f->fixed[n++] = (dc__fixed_range){(char *)data + at, bytes - at < BLOCK_MOST ? bytes - at : BLOCK_MOST};
  }
  const int error = -f->ring->body->fix(f->ring, f->fixed, n);
  if (!error) {
    f->nfixed = n;
    return NULL;
  }
  if (f->nfixed && f->ring->body->fix(f->ring, f->fixed, f->nfixed)) f->nfixed = 0;
  return error == ENOMEM       ? "memory is not registered: RLIMIT_MEMLOCK is too small; raise ulimit -l"
         : error == EOPNOTSUPP ? "memory is not registered: only io_uring can"
                               : "memory is not registered: io_uring_register failed";
}

int dc_file_register(dc_file *f, void *data, int64_t bytes, int *registered) {
  DC_TRY(dc__file_mine(f));
  if (!data || bytes <= 0 || !registered || (uintptr_t)data % DC_DISK_ALIGN || !file_aligned(bytes))
    return DC_FAIL(DC_E_INVALID, "%s: %lld bytes at %p; both must be multiples of %d and not 0", f->path,
                   (long long)bytes, data, DC_DISK_ALIGN);
  int rc = DC_OK;
  pthread_mutex_lock(&f->lock);
  if (f->unfinished) {
    rc = DC_FAIL(DC_E_STATE, "%s: memory can't be registered while requests are on their way", f->path);
  } else {
    const char *why = file_fix(f, data, bytes);
    *registered = !why;
    snprintf(f->why_fixed, sizeof f->why_fixed, "%s", why ? why : "");
  }
  pthread_mutex_unlock(&f->lock);
  return rc;
}
