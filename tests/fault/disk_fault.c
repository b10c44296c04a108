/* disk_fault.c: preloaded into a program (LD_PRELOAD), it fails calls that the program makes of files in one folder:
 * those numbered [at, at + n), counted from the arming on. Reads, writes, syncs, reservations and renames count,
 * whether they are functions of libc or entries of an io_uring (whose result comes from the kernel:
 * IORING_NOP_INJECT_RESULT, Linux 6.10). Nothing of deepc is in here: what the library sees is what a kernel would say.
 *
 *   disk_fault_arm(folder, at, n, fault)    fault: an errno, or one of enum fault
 *   disk_fault_calls(), disk_fault_hits()   since then
 *   disk_fault_disarm() */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum fault {
  SHORT = -1,   /* half of the bytes, in whole pages where there are some */
  ODD = -2,     /* half of them and one */
  NOTHING = -3, /* 0 bytes: the end of a file, to a read */
  TORN = -4,    /* a write reports all and has made half, to a page; a read as FLIPPED */
  LOST = -5,    /* a write reports all and has made nothing; a read as FLIPPED */
  FLIPPED = -6, /* a bit in the middle is another one */
  KILLED = -7,  /* the process dies, by SIGKILL; of a write half is made */
};
enum what { READ, WRITE, OTHER };
enum { PAGE = 4096, RINGS = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static char folder[PATH_MAX];
static int64_t first, count, calls, hits;
static int fault;
static bool armed;

struct ring {
  int fd;
  char *rings;
  struct sqe *sqes;
  uint32_t *head, *array, mask;
} ring[RINGS];

struct sqe { /* as in offload/ring_uring.c: the kernel's */
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, op_flags;
  uint64_t rest[4];
};
struct params {
  uint32_t sq_entries, cq_entries, rest[8];
  struct {
    uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
    uint64_t address;
  } sq;
  struct {
    uint32_t head, tail, mask, entries, overflow, cqes, flags, reserved;
    uint64_t address;
  } cq;
};
_Static_assert(sizeof(struct sqe) == 64 && sizeof(struct params) == 120, "the kernel's ABI");

static void *real(const char *name) {
  void *f = dlsym(RTLD_NEXT, name);
  if (!f) {
    fprintf(stderr, "disk_fault: no %s\n", name);
    _exit(99);
  }
  return f;
}
#define REAL(name) ((__typeof__(&name))real(#name))

void disk_fault_arm(const char *where, int64_t at, int64_t n, int what) {
  pthread_mutex_lock(&lock);
  snprintf(folder, sizeof folder, "%s/", where);
  first = at, count = n, fault = what;
  calls = hits = 0;
  armed = true;
  pthread_mutex_unlock(&lock);
}

void disk_fault_disarm(void) {
  pthread_mutex_lock(&lock);
  armed = false;
  pthread_mutex_unlock(&lock);
}

static int64_t seen(const int64_t *number) {
  pthread_mutex_lock(&lock);
  const int64_t n = *number;
  pthread_mutex_unlock(&lock);
  return n;
}

int64_t disk_fault_calls(void) { return seen(&calls); }
int64_t disk_fault_hits(void) { return seen(&hits); }

/* Counts a call of a file. 0: it is to go well. */
static int take_path(const char *path) {
  int found = 0;
  pthread_mutex_lock(&lock);
  if (armed && !strncmp(path, folder, strlen(folder))) {
    const int64_t call = calls++;
    if (call >= first && call - first < count) found = fault, hits++;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static bool is_armed(void) { return __atomic_load_n(&armed, __ATOMIC_RELAXED); }

static int take(int fd) {
  char link[64], path[PATH_MAX];
  if (!is_armed()) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return take_path(path);
}

/* The same of a call that moves no bytes; whether it fails, with errno. */
static bool fails(int how) {
  if (how == KILLED) kill(getpid(), SIGKILL);
  if (how > 0) errno = how;
  return how > 0;
}

static int64_t moved(int64_t r) { return r < 0 ? -errno : r; }

static int64_t move(enum what what, int fd, void *data, int64_t bytes, int64_t offset) {
  return moved(what == READ ? REAL(pread)(fd, data, (size_t)bytes, offset)
                            : REAL(pwrite)(fd, data, (size_t)bytes, offset));
}

/* What becomes of a call that meets the fault: bytes or -errno. */
static int64_t fail(int how, enum what what, int fd, void *data, int64_t bytes, int64_t offset) {
  if (how > 0 || what == OTHER) return how > 0 ? -how : 0;
  if (how == NOTHING) return 0;
  if (how == KILLED) {
    if (what == WRITE) (void)move(what, fd, data, bytes / 2 / PAGE * PAGE, offset);
    kill(getpid(), SIGKILL);
  }
  const int64_t pages = bytes / 2 / PAGE * PAGE, part = how == ODD ? bytes / 2 + 1 : pages ? pages : bytes / 2;
  if (how == SHORT || how == ODD) { /* all of it is moved, since past the page cache no other length may be */
    const int64_t r = move(what, fd, data, bytes, offset);
    return r > part && part ? part : r;
  }
  if (how == LOST && what == WRITE) return bytes;
  if (how == TORN && what == WRITE) {
    const int64_t r = pages ? move(what, fd, data, pages, offset) : 0;
    return r < 0 ? r : bytes;
  }
  if (what == READ) {
    const int64_t r = move(what, fd, data, bytes, offset);
    if (r > 0) ((char *)data)[r / 2] ^= 4;
    return r;
  }
  void *other = NULL;
  if (posix_memalign(&other, PAGE, (size_t)bytes + 1)) return -ENOMEM;
  memcpy(other, data, (size_t)bytes);
  ((char *)other)[bytes / 2] ^= 4;
  const int64_t r = move(what, fd, other, bytes, offset);
  free(other);
  return r;
}

static ssize_t answer(int64_t r) {
  if (r >= 0) return (ssize_t)r;
  errno = (int)-r;
  return -1;
}

/* ---- libc -------------------------------------------------------------------------------------------------------- */
ssize_t pread(int fd, void *data, size_t n, off_t offset) {
  const int how = take(fd);
  return how ? answer(fail(how, READ, fd, data, (int64_t)n, offset)) : REAL(pread)(fd, data, n, offset);
}
ssize_t pread64(int fd, void *data, size_t n, off64_t offset) { return pread(fd, data, n, offset); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) {
  const int how = take(fd);
  return how ? answer(fail(how, WRITE, fd, (void *)data, (int64_t)n, offset)) : REAL(pwrite)(fd, data, n, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) { return pwrite(fd, data, n, offset); }

/* At the file's own position. */
static ssize_t at_position(int how, enum what what, int fd, void *data, size_t n) {
  const off_t at = lseek(fd, 0, SEEK_CUR);
  const int64_t r = fail(how, what, fd, data, (int64_t)n, at);
  if (r > 0) lseek(fd, at + r, SEEK_SET);
  return answer(r);
}
ssize_t read(int fd, void *data, size_t n) {
  const int how = take(fd);
  return how ? at_position(how, READ, fd, data, n) : REAL(read)(fd, data, n);
}
ssize_t write(int fd, const void *data, size_t n) {
  const int how = take(fd);
  return how ? at_position(how, WRITE, fd, (void *)data, n) : REAL(write)(fd, data, n);
}
int fsync(int fd) { return fails(take(fd)) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fails(take(fd)) ? -1 : REAL(fdatasync)(fd); }
int fallocate(int fd, int mode, off_t offset, off_t n) {
  return fails(take(fd)) ? -1 : REAL(fallocate)(fd, mode, offset, n);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t n) { return fallocate(fd, mode, offset, n); }

int rename(const char *from, const char *to) {
  return is_armed() && fails(take_path(to)) ? -1 : REAL(rename)(from, to);
}
int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
  return is_armed() && fails(take_path(to)) ? -1 : REAL(renameat2)(from_fd, from, to_fd, to, flags);
}

/* ---- io_uring ---------------------------------------------------------------------------------------------------- */
enum { SETUP = 425, ENTER = 426, OP_NOP = 0, OP_FSYNC = 3, OP_READ_FIXED, OP_WRITE_FIXED, OP_READ = 22, OP_WRITE };
enum { INJECT_RESULT = 1 };

static void *map(int fd, size_t bytes, int64_t offset) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  return p == MAP_FAILED ? NULL : p;
}

/* Maps of a ring that is gone are left: a process of a test has few. */
static void ring_made(int fd, const struct params *k) {
  char *rings = map(fd, k->sq.array + k->sq_entries * sizeof(uint32_t), 0);
  struct sqe *sqes = map(fd, k->sq_entries * sizeof(struct sqe), 0x10000000);
  if (!rings || !sqes) return;
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < RINGS - 1 && ring[i].fd != fd && ring[i].rings) i++;
  if (ring[i].rings) {
    munmap(ring[i].rings, PAGE);
    munmap(ring[i].sqes, PAGE);
  }
  ring[i] = (struct ring){fd,
                          rings,
                          sqes,
                          (uint32_t *)(rings + k->sq.head),
                          (uint32_t *)(rings + k->sq.array),
                          *(uint32_t *)(rings + k->sq.mask)};
  pthread_mutex_unlock(&lock);
}

static void ring_entered(int fd, uint32_t n) {
  struct ring r = {0};
  pthread_mutex_lock(&lock);
  for (int i = 0; i < RINGS; i++)
    if (ring[i].rings && ring[i].fd == fd) r = ring[i];
  pthread_mutex_unlock(&lock);
  for (uint32_t i = 0; r.rings && i < n; i++) {
    struct sqe *e = &r.sqes[r.array[(*r.head + i) & r.mask]];
    const bool reads = e->opcode == OP_READ || e->opcode == OP_READ_FIXED;
    const bool writes = e->opcode == OP_WRITE || e->opcode == OP_WRITE_FIXED;
    if (!reads && !writes && e->opcode != OP_FSYNC) continue;
    const int how = take(e->fd);
    if (!how || (how < 0 && how != KILLED && e->opcode == OP_FSYNC)) continue;
    const int64_t result = fail(how,
                                reads    ? READ
                                : writes ? WRITE
                                         : OTHER,
                                e->fd, (void *)(uintptr_t)e->address, e->length, (int64_t)e->offset);
    e->opcode = OP_NOP;
    e->fd = -1;
    e->offset = e->address = 0;
    e->length = (uint32_t)(int32_t)result;
    e->op_flags = INJECT_RESULT;
  }
}

long syscall(long number, ...) {
  long a[6];
  va_list args;
  va_start(args, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(args, long);
  va_end(args);
  if (number == ENTER && a[1] > 0 && is_armed()) ring_entered((int)a[0], (uint32_t)a[1]);
  const long r = REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SETUP && r >= 0) ring_made((int)r, (const struct params *)a[1]);
  return r;
}
