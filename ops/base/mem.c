/* mem.c: large arrays on huge pages, and how much memory is left.
 *
 * Owns every block that dc_mem_alloc returned, in one table (so that dc_mem_free can refuse a pointer that is not ours,
 * and so that no header disturbs the alignment). Asks what is available (available.c) before it maps: past the limit
 * the kernel kills the process instead of failing the call. */
#include "commit.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { CACHE_LINE = 64 };
static const size_t mem_small_limit = (size_t)1 << 20;
/* DC__COLOR_STEP: all differences of two colors lie between 4.25 and 64 KiB (measured good: 4 to 70 KiB, against 3x
 * slower when congruent modulo 2 MiB). The 256 bytes keep two colors from being congruent modulo 4 KiB, where loads
 * wait for unrelated stores. */
static const size_t mem_fault_step = (size_t)64 << 20;

/* ---- the table of blocks: open addressing, keyed by the user's pointer ------------------------------------------- */
struct block {
  void *ptr;     /* what the user has; NULL: empty */
  void *base;    /* what was mapped or allocated */
  size_t mapped; /* bytes to unmap; 0: from the heap */
};
static struct {
  pthread_mutex_t lock;
  struct block *slot;
  size_t capacity, used; /* capacity is a power of two, at most half used */
} mem_blocks = {.lock = PTHREAD_MUTEX_INITIALIZER};

DC__AT_FORK(mem_at_fork, DC__FORK_BLOCKS, &mem_blocks.lock, NULL)

static size_t mem_home_of(const void *ptr, size_t capacity) {
  uint64_t hash = ((uint64_t)(uintptr_t)ptr >> 6) * 0x9E3779B97F4A7C15u;
  return (size_t)(hash >> 32) & (capacity - 1);
}

static struct block *mem_find_slot(struct block *slot, size_t capacity, const void *ptr) {
  size_t i = mem_home_of(ptr, capacity);
  while (slot[i].ptr && slot[i].ptr != ptr) i = (i + 1) & (capacity - 1);
  return &slot[i];
}

static bool mem_grow_table(void) {
  size_t capacity = mem_blocks.capacity ? 2 * mem_blocks.capacity : 64;
  struct block *slot = calloc(capacity, sizeof *slot);
  if (!slot) return false;
  for (size_t i = 0; i < mem_blocks.capacity; i++)
    if (mem_blocks.slot[i].ptr) *mem_find_slot(slot, capacity, mem_blocks.slot[i].ptr) = mem_blocks.slot[i];
  free(mem_blocks.slot);
  mem_blocks.slot = slot;
  mem_blocks.capacity = capacity;
  return true;
}

static bool mem_remember(struct block block) {
  pthread_mutex_lock(&mem_blocks.lock);
  bool ok = 2 * (mem_blocks.used + 1) <= mem_blocks.capacity || mem_grow_table();
  if (ok) {
    *mem_find_slot(mem_blocks.slot, mem_blocks.capacity, block.ptr) = block;
    mem_blocks.used++;
  }
  pthread_mutex_unlock(&mem_blocks.lock);
  return ok;
}

/* Closes the gap at i, so that no chain of probes is cut (Knuth, TAOCP 3, algorithm 6.4R). */
static void mem_close_gap(size_t i) {
  size_t mask = mem_blocks.capacity - 1;
  for (size_t j = (i + 1) & mask; mem_blocks.slot[j].ptr; j = (j + 1) & mask) {
    size_t home = mem_home_of(mem_blocks.slot[j].ptr, mem_blocks.capacity);
    if (((j - home) & mask) < ((j - i) & mask)) continue; /* its home lies after the gap: it may stay */
    mem_blocks.slot[i] = mem_blocks.slot[j];
    i = j;
  }
  mem_blocks.slot[i].ptr = NULL;
}

static bool mem_forget(const void *ptr, struct block *block) {
  pthread_mutex_lock(&mem_blocks.lock);
  struct block *slot = mem_blocks.capacity ? mem_find_slot(mem_blocks.slot, mem_blocks.capacity, ptr) : NULL;
  bool found = slot && slot->ptr;
  if (found) {
    *block = *slot;
    mem_close_gap((size_t)(slot - mem_blocks.slot));
    mem_blocks.used--;
  }
  pthread_mutex_unlock(&mem_blocks.lock);
  return found;
}

/* ---- allocation -------------------------------------------------------------------------------------------------- */
struct fault {
  char *base;
  atomic_int error;
};

static void mem_fault_range(int64_t begin, int64_t end, void *ctx) {
  struct fault *fault = ctx;
  int e = dc__fault_in(fault->base + begin, (size_t)(end - begin), -1, 0);
  if (e) atomic_store(&fault->error, e);
}

int dc__mem_fault_in(void *base, size_t length) {
  struct fault fault = {.base = base};
  dc_parallel_for((int64_t)length, (int64_t)mem_fault_step, mem_fault_range, &fault);
  int error = atomic_load(&fault.error);
  if (error) return DC_FAIL(DC_E_NOMEM, "the kernel could not back %zu bytes with memory: %s", length, strerror(error));
  return DC_OK;
}

int dc__mem_check_available(size_t bytes, size_t length) {
  int64_t available;
  DC_TRY(dc__mem_room("/proc", (int64_t)length, &available));
  if (length > (uint64_t)available)
    return DC_FAIL(DC_E_NOMEM,
                   "asked for %zu bytes (%.2f GiB), but %lld bytes (%.2f GiB) are available under the cgroup's limit "
                   "and the machine's MemAvailable; use a smaller model or batch, more ranks, or raise the limit",
                   bytes, (double)bytes / (1 << 30), (long long)available, (double)available / (1 << 30));
  return DC_OK;
}

static size_t mem_large_length(size_t bytes, size_t offset) {
  return (offset + bytes + DC_HUGE_PAGE - 1) & ~(DC_HUGE_PAGE - 1);
}

static size_t mem_small_length(size_t bytes) {
  return bytes ? (bytes + CACHE_LINE - 1) & ~(size_t)(CACHE_LINE - 1) : CACHE_LINE;
}

static int mem_alloc_large(size_t bytes, size_t offset, void **ptr) {
  bool huge = true;
  DC_TRY(dc__hugepages(&huge));
  if (bytes > (size_t)PTRDIFF_MAX - 4 * DC_HUGE_PAGE)
    return DC_FAIL(DC_E_NOMEM, "asked for %zu bytes, more than an address space holds; check the size for an overflow",
                   bytes);
  size_t length = mem_large_length(bytes, offset);
  DC_TRY(dc__mem_check_available(bytes, length));
  char *base = dc__map_aligned(length, 0, -1);
  if (!base)
    return DC_FAIL(DC_E_NOMEM, "mmap of %zu bytes: %s; look at ulimit -v and vm.max_map_count", length,
                   strerror(errno));
  /* Advice: a kernel without transparent huge pages refuses it, and small pages then serve. */
  (void)madvise(base, length, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  int rc = dc__mem_fault_in(base, length);
  if (rc == DC_OK && !mem_remember((struct block){base + offset, base, length}))
    rc = DC_FAIL(DC_E_NOMEM, "no memory to note a block of %zu bytes", bytes);
  if (rc != DC_OK) {
    munmap(base, length);
    return rc;
  }
  *ptr = base + offset;
  return DC_OK;
}

static int mem_alloc_small(size_t bytes, void **ptr) {
  size_t length = mem_small_length(bytes);
  void *base = aligned_alloc(CACHE_LINE, length);
  if (!base) return DC_FAIL(DC_E_NOMEM, "the heap has no %zu bytes", bytes);
  memset(base, 0, length);
  if (!mem_remember((struct block){base, base, 0})) {
    free(base);
    return DC_FAIL(DC_E_NOMEM, "no memory to note a block of %zu bytes", bytes);
  }
  *ptr = base;
  return DC_OK;
}

int dc_mem_alloc(size_t bytes, int color, void **ptr) {
  if (!ptr) return DC_FAIL(DC_E_INVALID, "ptr is NULL; pass the address of a pointer");
  if (color < 0 || color >= DC__COLORS)
    return DC_FAIL(DC_E_INVALID, "color is %d; it must be from 0 to %d", color, DC__COLORS - 1);
  return bytes < mem_small_limit ? mem_alloc_small(bytes, ptr)
                                 : mem_alloc_large(bytes, (size_t)color * DC__COLOR_STEP, ptr);
}

int dc_mem_alloc_bytes(size_t bytes, int color, size_t *taken) {
  if (!taken) return DC_FAIL(DC_E_INVALID, "taken is NULL; pass the address of a size_t");
  if (color < 0 || color >= DC__COLORS)
    return DC_FAIL(DC_E_INVALID, "color is %d; it must be from 0 to %d", color, DC__COLORS - 1);
  *taken = bytes < mem_small_limit ? mem_small_length(bytes) : mem_large_length(bytes, (size_t)color * DC__COLOR_STEP);
  return DC_OK;
}

int dc_mem_free(void *ptr) {
  struct block block;
  if (!ptr) return DC_OK;
  if (!mem_forget(ptr, &block)) return DC_FAIL(DC_E_INVALID, "%p is not from dc_mem_alloc, or was freed before", ptr);
  if (!block.mapped) {
    free(block.base);
    return DC_OK;
  }
  if (munmap(block.base, block.mapped))
    return DC_FAIL(DC_E_SYSTEM, "munmap of %zu bytes at %p: %s", block.mapped, block.base, strerror(errno));
  return DC_OK;
}

/* ---- who is refused -----------------------------------------------------------------------------------------------
 */
int dc__mem_room(const char *proc, int64_t bytes, int64_t *available) {
  DC_TRY(dc_mem_available_in(proc, available));
  if (bytes <= *available) return DC_OK;
  DC_TRY(dc_heap_trim());
  return dc_mem_available_in(proc, available);
}

/* ---- huge pages in use ------------------------------------------------------------------------------------------- */
/* The kernel tells how much of each mapping is huge, not which part; of a mapping that is only in part ours we take the
 * same share, which is exact when the mapping is all huge or all small. */
int dc_mem_huge_bytes(const void *ptr, size_t bytes, int64_t *huge) {
  if (!huge || (!ptr && bytes)) return DC_FAIL(DC_E_INVALID, "ptr and huge must not be NULL");
  FILE *file = fopen("/proc/self/smaps", "re");
  if (!file) return DC_FAIL(DC_E_SYSTEM, "/proc/self/smaps: %s; mount procfs", strerror(errno));
  unsigned long long begin = (uintptr_t)ptr, end = begin + bytes, from, to, kib;
  double share = 0, total = 0;
  char *line = NULL, key[32];
  size_t room = 0;
  while (getline(&line, &room, file) > 0) {
    if (sscanf(line, "%llx-%llx %*s", &from, &to) == 2 && from < to) {
      unsigned long long a = from > begin ? from : begin, b = to < end ? to : end;
      share = a < b ? (double)(b - a) / (double)(to - from) : 0;
    } else if (share > 0 && sscanf(line, "%31[^:]: %llu kB", key, &kib) == 2 &&
               (!strcmp(key, "AnonHugePages") || !strcmp(key, "ShmemPmdMapped") || !strcmp(key, "FilePmdMapped"))) {
      total += share * (double)kib * 1024;
    }
  }
  free(line);
  fclose(file);
  *huge = (int64_t)(total + 0.5);
  return DC_OK;
}
