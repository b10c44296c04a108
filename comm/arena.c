/* arena.c: the memory that ranks share: memfds, their mappings and first touch, and the layout of a communicator's
 * arena.
 *
 * Owns how shared memory is made and placed; knows nothing of sockets. An arena is, in this order: the header with
 * seats, cells, caller texts and teams, the staging slots, the small slots, and the area of the messages (p2p.c).
 * Everything in it is sealed in size, so that no rank can make another one's access fault.
 *
 * Where memory lies: what a rank writes and others read on the rank's own node, segments on all nodes in turns. The
 * arena of a small group is there when it opens, on huge pages. In a large one, where most of it is never used (n^2
 * message rings), each rank brings its own cells and slots, and the rest comes with its first use.
 *
 * Uses MADV_COLLAPSE (Linux 6.1) where it exists. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "comm_impl.h"
#include "open.h"
#include "p2p.h"
#include "team.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* ---- mappings ---------------------------------------------------------------------------------------------------- */
bool dc__arena_huge(int64_t bytes) {
  bool on = true;
  return bytes >= (int64_t)DC_HUGE_PAGE && dc__hugepages(&on) == DC_OK && on;
}

/* Refuses before the kernel would kill: beyond a memory cgroup's limit, faulting in is a SIGKILL and not an ENOMEM. */
int dc__arena_fits(int64_t bytes) {
  int64_t free_bytes;
  DC_TRY(dc__mem_room("/proc", bytes + bytes / 64, &free_bytes));
  if (bytes + bytes / 64 > free_bytes)
    return DC_FAIL(
        DC_E_NOMEM,
        "a shared segment of %lld MiB does not fit: %lld MiB are available here (memory cgroup and MemAvailable)",
        (long long)(bytes >> 20), (long long)(free_bytes >> 20));
  struct rlimit lim;
  if (getrlimit(RLIMIT_FSIZE, &lim) == 0 && lim.rlim_cur != RLIM_INFINITY && (uint64_t)bytes > lim.rlim_cur)
    return DC_FAIL(DC_E_NOMEM, "a shared segment of %lld bytes exceeds the file size limit (ulimit -f) of %llu bytes",
                   (long long)bytes, (unsigned long long)lim.rlim_cur);
  return DC_OK;
}

int dc__arena_memfd(int64_t bytes, int *out) {
  int fd = (int)syscall(SYS_memfd_create, "deepc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return DC_FAIL(DC_E_SYSTEM, "memfd_create: %s", strerror(errno));
  /* sealed in both directions: no rank can make another one's access fault, and nobody can undo that */
  if (ftruncate(fd, bytes) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
    int e = errno;
    close(fd);
    return DC_FAIL(DC_E_SYSTEM, "a shared segment of %lld bytes: %s", (long long)bytes, strerror(e));
  }
  *out = fd;
  return DC_OK;
}

/* What a peer sent must be of the agreed size and must not be able to shrink under us. */
int dc__arena_memfd_check(int fd, int64_t bytes) {
  int seals = fcntl(fd, F_GET_SEALS);
  /* not fstat: as a symbol of its own it is younger than the glibc that the wheel is for */
  if (lseek(fd, 0, SEEK_END) != (off_t)bytes || seals < 0 || !(seals & F_SEAL_SHRINK))
    return DC_FAIL(DC_E_PEER, "rank 0 sent a segment of the wrong size or without seals");
  return DC_OK;
}

/* Faults everything in. The first rank touches one byte per 2 MiB and collapses, which gives huge pages to all who map
 * the file, whatever shmem_enabled says; failing that, small pages do, and dc_segment_info tells. */
static int arena_fault_in(int fd, char *base, int64_t bytes, bool first) {
  if (dc__arena_huge(bytes)) {
    madvise(base, (size_t)bytes, MADV_HUGEPAGE);
    if (first) {
      int64_t whole = bytes / (int64_t)DC_HUGE_PAGE * (int64_t)DC_HUGE_PAGE;
      for (int64_t i = 0; i < whole; i += (int64_t)DC_HUGE_PAGE) *(volatile char *)(base + i) = 0;
      madvise(base, (size_t)whole, MADV_COLLAPSE);
    }
  }
  int e = dc__fault_in(base, (size_t)bytes, fd, 0);
  if (e) return DC_FAIL(DC_E_NOMEM, "faulting in a shared segment of %lld bytes: %s", (long long)bytes, strerror(e));
  return DC_OK;
}

void dc__arena_unmap(dc__map *m) {
  if (m->base) munmap(m->base, (size_t)m->bytes);
  *m = (dc__map){NULL, 0};
}

static int arena_map(int fd, int64_t bytes, dc__map *out) {
  bool huge;
  DC_TRY(dc__hugepages(&huge)); /* an error, where dc__arena_huge says no */
  void *base = dc__map_aligned((size_t)bytes, 0, fd);
  if (!base)
    return DC_FAIL(DC_E_NOMEM, "mmap of a shared segment of %lld bytes: %s; look at ulimit -v and vm.max_map_count",
                   (long long)bytes, strerror(errno));
  (void)madvise(base, (size_t)bytes, MADV_DONTDUMP); /* a core of every rank would hold the shared parameters */
  *out = (dc__map){base, bytes};
  return DC_OK;
}

int dc__arena_map(int fd, int64_t bytes, uint64_t nodes, bool first, dc__map *out) {
  DC_TRY(arena_map(fd, bytes, out));
  if (first) dc__numa_interleave(out->base, bytes, nodes);
  int rc = arena_fault_in(fd, out->base, bytes, first);
  if (rc) dc__arena_unmap(out);
  return rc;
}

/* ---- the arena of a communicator --------------------------------------------------------------------------------- */
int dc__slots_check(int32_t slots, int64_t slot_bytes) {
  if (slot_bytes <= 0 || slot_bytes % 4096 || slot_bytes > ((int64_t)1 << 40))
    return DC_FAIL(DC_E_INVALID, "slot_bytes %lld: expected a positive multiple of 4096", (long long)slot_bytes);
  if (slots < 2 || slots > 1024) return DC_FAIL(DC_E_INVALID, "slots %d: expected 2 to 1024", slots);
  return DC_OK;
}

void dc__slots_set(dc_comm *c, int32_t size, int32_t slots, int64_t slot_bytes) {
  c->size = size;
  c->slots = slots;
  c->slot_bytes = slot_bytes;
  c->slot_stride = slot_bytes + DC__SLOT_COLOR;
  c->cells = slots > DC__CELLS ? slots : DC__CELLS;
}

/* On a page, so that 64 cells of a rank are one. */
static int64_t arena_cells_begin(const dc_comm *c) {
  return dc__round_up((int64_t)sizeof(dc__header) + (int64_t)sizeof(dc__seat) * c->size, 4096);
}

static int64_t arena_teams_begin(const dc_comm *c) {
  return arena_cells_begin(c) + (int64_t)(sizeof(dc__cell) + sizeof(dc__where)) * c->size * c->cells;
}

static int64_t arena_stage_begin(const dc_comm *c) {
  return dc__round_up(arena_teams_begin(c) + dc__team_bytes(c->size, c->cells), 4096);
}

static int64_t arena_small_begin(const dc_comm *c) {
  return dc__round_up(arena_stage_begin(c) + c->slot_stride * c->slots * c->size, 4096);
}

/* Where the messages' area begins. */
int64_t dc__stage_end(const dc_comm *c) {
  return dc__round_up(arena_small_begin(c) + DC__SMALL_STRIDE * DC__SMALLS * c->size, 4096);
}

int64_t dc__stage_bytes(const dc_comm *c) {
  int64_t n = dc__stage_end(c) + dc__p2p_bytes(c->size);
  return dc__round_up(n, dc__arena_huge(n) ? (int64_t)DC_HUGE_PAGE : 4096);
}

int dc_comm_bytes(int32_t size, int32_t slots, int64_t slot_bytes, int64_t *bytes) {
  if (!bytes) return DC_FAIL(DC_E_INVALID, "bytes is NULL; pass the address of an int64_t");
  if (size < 1 || size > DC_COMM_MAX_RANKS)
    return DC_FAIL(DC_E_INVALID, "size %d: expected 1 to %d ranks", size, DC_COMM_MAX_RANKS);
  DC_TRY(dc__slots_check(slots, slot_bytes));
  dc_comm *c = calloc(1, sizeof *c); /* too large for a stack */
  if (!c) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *c);
  dc__slots_set(c, size, slots, slot_bytes);
  *bytes = dc__stage_bytes(c);
  free(c);
  return DC_OK;
}

/* The parts of an arena that rank r alone writes, but for its messages. */
enum { ARENA_PARTS = 4 };
static void arena_parts(const dc_comm *c, int r, dc__map part[ARENA_PARTS]) {
  part[0] = (dc__map){dc__cell_of(c, r, 0), (int64_t)sizeof(dc__cell) * c->cells};
  part[1] = (dc__map){&c->wheres[(int64_t)r * c->cells], (int64_t)sizeof(dc__where) * c->cells};
  part[2] = (dc__map){dc__slot(c, r, 0), c->slot_stride * c->slots};
  part[3] = (dc__map){dc__small(c, r, 0), DC__SMALL_STRIDE * DC__SMALLS};
}

/* The pages of a part, without those that it begins or ends within, which another rank may own. */
static dc__map arena_inner(const dc__map *part, int64_t page) {
  const int64_t begin = dc__round_up((int64_t)(uintptr_t)part->base, page);
  const int64_t end = ((int64_t)(uintptr_t)part->base + part->bytes) / page * page;
  return (dc__map){(void *)(uintptr_t)begin, end > begin ? end - begin : 0};
}

void dc__stage_place(dc_comm *c, const dc__spot *spot) {
  bool several = false;
  for (int r = 0; r < c->size; r++) {
    if (spot[r].node < 0) return;
    several = several || spot[r].node != spot[0].node;
  }
  for (int r = 0; r < c->size && several; r++) {
    dc__map part[ARENA_PARTS];
    arena_parts(c, r, part);
    for (int i = 0; i < ARENA_PARTS; i++) {
      const dc__map m = arena_inner(&part[i], sysconf(_SC_PAGESIZE));
      dc__numa_prefer(m.base, m.bytes, spot[r].node);
    }
  }
}

/* Huge pages for the staging slots. A rank's own may be less than a page, so each asks for those that begin in its. */
static void arena_bring_huge(const dc_comm *c, const dc__map *slots) {
  const dc__map stage = {c->stage, c->slot_stride * c->slots * c->size};
  const dc__map huge = arena_inner(&stage, (int64_t)DC_HUGE_PAGE);
  madvise(c->map.base, (size_t)c->map.bytes, MADV_NOHUGEPAGE); /* the rest is not made larger than what is used of it */
  if (!huge.bytes || !dc__arena_huge(c->map.bytes)) return;
  madvise(huge.base, (size_t)huge.bytes, MADV_HUGEPAGE);
  char *const end = (char *)huge.base + huge.bytes;
  char *p = (char *)(uintptr_t)dc__round_up((int64_t)(uintptr_t)slots->base, (int64_t)DC_HUGE_PAGE);
  for (; p < (char *)slots->base + slots->bytes && p < end; p += DC_HUGE_PAGE) madvise(p, DC_HUGE_PAGE, MADV_COLLAPSE);
}

/* Brings what this rank alone writes, but for small slots. */
static int arena_bring_own(dc_comm *c, int fd) {
  dc__map part[ARENA_PARTS];
  arena_parts(c, c->rank, part);
  arena_bring_huge(c, &part[2]);
  for (int i = 0; i < 3; i++) {
    const dc__map whole = part[i];
    char *begin = (char *)c->map.base + ((char *)whole.base - (char *)c->map.base) / 4096 * 4096;
    const int e = dc__fault_in(begin, (size_t)((char *)whole.base + whole.bytes - begin), fd,
                               begin - (char *)c->map.base);
    if (e)
      return DC_FAIL(DC_E_NOMEM, "faulting in %lld bytes of a shared segment: %s", (long long)whole.bytes, strerror(e));
  }
  return DC_OK;
}

int dc__stage_bring(dc_comm *c, int fd) {
  if (c->size > DC__TEAM_RANKS) return arena_bring_own(c, fd);
  return arena_fault_in(fd, c->map.base, c->map.bytes, c->rank == 0);
}

int dc__stage_map(dc_comm *c, int fd, int64_t bytes) {
  DC_TRY(arena_map(fd, bytes, &c->map));
  /* a forked child (a data loader) keeps neither the memory alive nor can it write into it */
  if (madvise(c->map.base, (size_t)bytes, MADV_DONTFORK))
    return DC_FAIL(DC_E_SYSTEM, "madvise(MADV_DONTFORK): %s", strerror(errno));
  c->h = c->map.base;
  c->cell = (dc__cell *)((char *)c->map.base + arena_cells_begin(c));
  c->wheres = (dc__where *)(c->cell + (int64_t)c->size * c->cells);
  c->teams = (char *)c->map.base + arena_teams_begin(c);
  c->stage = (char *)c->map.base + arena_stage_begin(c);
  c->small = (char *)c->map.base + arena_small_begin(c);
  return DC_OK;
}
