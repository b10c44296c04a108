/* map.c: mappings of large memory: where they begin, how they are faulted in and moved, whether on huge pages.
 *
 * Owns the one reader of DEEPC_HUGEPAGES, the one way to fault memory in and the one to move it, for private memory
 * (mem.c, heap.c, lease.c) and for what ranks share (comm/arena.c). Uses MADV_POPULATE_WRITE (Linux 5.14) and
 * MREMAP_DONTUNMAP (5.7) where they are and allowed. */
#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17 */
#endif
#ifndef EHWPOISON
#define EHWPOISON 133
#endif

int dc__hugepages(bool *on) { return dc__env_switch("DEEPC_HUGEPAGES", true, on); }

/* Maps one huge page more and unmaps what is before and after. */
void *dc__map_aligned(size_t length, int flags, int fd) {
  size_t whole = length + DC_HUGE_PAGE;
  char *start = mmap(NULL, whole, fd < 0 ? PROT_READ | PROT_WRITE : PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | (fd < 0 ? flags : MAP_NORESERVE), -1, 0);
  if (start == MAP_FAILED) return NULL;
  size_t before = -(uintptr_t)start & (DC_HUGE_PAGE - 1), after = whole - before - length;
  char *at = start + before;
  if (fd >= 0 && mmap(at, length, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_SHARED | flags, fd, 0) == MAP_FAILED) {
    int e = errno;
    munmap(start, whole);
    errno = e;
    return NULL;
  }
  if (before) munmap(start, before);
  if (after) munmap(at + length, after);
  return at;
}

void dc__map_advise(void *at, size_t bytes) {
  bool huge = true;
  (void)dc__hugepages(&huge); /* whoever opened the range has looked at it */
  /* Advice, both: without huge pages small ones serve, and a core dump may hold activations. */
  (void)madvise(at, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  (void)madvise(at, bytes, MADV_DONTDUMP);
}

/* What is mapped at `to` gives way. Where the kernel finds late that it can't move pages (it has no memory for their
 * tables) that is gone by then: an empty mapping takes its place, so that nobody meets a hole. */
bool dc__map_move(void *from, void *to, size_t bytes) {
  if (mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) != MAP_FAILED) return true;
  void *fresh = mmap(to, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (fresh == to) dc__map_advise(to, bytes);
  else if (fresh != MAP_FAILED) munmap(fresh, bytes); /* an older kernel, where the address is but a wish */
  return false; /* and most often nothing was fresh: what was there still is */
}

/* Blocks for bytes [at, at + length) of a file. A signal undoes what a call has done so far, so each is for a little: a
 * program with a timer would else never come to the end. */
static int map_reserve(int fd, int64_t at, size_t length) {
  for (size_t done = 0, n; done < length; done += n) {
    int e;
    n = length - done < DC_HUGE_PAGE ? length - done : DC_HUGE_PAGE;
    do e = posix_fallocate(fd, (off_t)at + (off_t)done, (off_t)n);
    while (e == EINTR);
    if (e) return e;
  }
  return 0;
}

/* By hand: a byte of each page is written with what it holds, atomically, since peers may write it at this moment. A
 * file's blocks are reserved first: where there are none that is an error, and a touch would be a SIGBUS. */
static int map_touch(char *base, size_t length, int fd, int64_t at) {
  int e = fd >= 0 ? map_reserve(fd, at, length) : 0;
  if (e) return e;
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  for (size_t i = 0; i < length; i += page)
    atomic_fetch_add_explicit((_Atomic uint8_t *)(base + i), 0, memory_order_relaxed);
  return 0;
}

/* Only these say that there is no memory. Else the call is not to be had: before Linux 5.14 (EINVAL), or forbidden
 * (EPERM, ENOSYS: seccomp, a sandbox's kernel). */
static bool map_is_refusal(int e) { return e == ENOMEM || e == EFAULT || e == EHWPOISON; }

int dc__fault_in(void *base, size_t length, int fd, int64_t at) {
  while (madvise(base, length, MADV_POPULATE_WRITE)) {
    int e = errno;
    if (e == EINTR || e == EAGAIN) continue;
    return map_is_refusal(e) ? e : map_touch(base, length, fd, at);
  }
  return 0;
}
