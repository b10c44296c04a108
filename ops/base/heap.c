/* heap.c: memory that a training step frees and the next one needs again.
 *
 * A step allocates and frees the same activations every time. glibc maps each large one by itself and unmaps it when it
 * is freed, so every step pays the kernel for zeroed pages again: 4 KiB pages cost 1 s a GiB, huge ones 0.1 to 0.4 s
 * (on a virtual machine the host takes freed pages back as well). Here large blocks come from one reserved range of
 * addresses on huge pages that stays resident: no fault after the second step.
 *
 * Owns the range, and the description of its blocks beside it (out of band: a stray write into a tensor can't break the
 * heap, and what is resident is the tensors alone). Blocks are cut in granules of 16 KiB; a free neighbour is joined at
 * once (boundary tags: Knuth, TAOCP 1, 2.5); the smallest free block that is large enough is taken, the lowest of
 * equals. Any thread; a fork copies it.
 *
 * What was tried, on a step of GPT-2 25 M fp32, 2 ranks (tests/bench/train.py --contenders deepc-3 deepc-3-returned;
 * tokens/s, MiB over ranks, faults a step):
 * - huge pages for each mapping, returned every step (torch's THP_MEM_ALLOC_ENABLE alone): 996, 1,906, 54,000
 * - glibc keeps everything (M_MMAP_MAX = 0, no trimming): 1,218, 2,976, 0: posix_memalign asks for a page more than it
 * needs and small objects move into the rest, so a hole of 98 MiB does not hold the next 98 MiB; without torch's page
 * alignment 2,690, with glibc's own huge pages 2,843
 * - glibc keeps up to 32 MiB (the most that M_MMAP_THRESHOLD takes), maps larger ones: 783 where the former had 1,075,
 * 2,142, 3,200
 * - this heap: 2,000 MiB, 0 faults; bf16 2,411 tokens/s where returned memory gave 1,669 (2,000 against 1,938 MiB); 125
 * M fp32: 4,283 MiB, where returned memory took 5,175 and glibc's kept heap 5,620 */
#include "base.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum { GRANULE_SHIFT = 14, BINS = 32 };
static const size_t granule = (size_t)1 << GRANULE_SHIFT;
static const size_t most_bytes = (size_t)1 << 46; /* granules are counted in 32 bits */

/* One row per granule. Only the first granule of a block has `granules`; of a free block the last one has `before` too.
 * 0 elsewhere. */
struct row {
  uint32_t granules, before; /* length of the block that begins here; of the free block that ends here */
  uint32_t next, prev; /* of the free list, as row + 1; 0: none */
};

static struct {
  pthread_mutex_t lock;
  char *base;
  struct row *rows;
  uint8_t *used; /* 1 at the first granule of a block in use */
  uint32_t size, top; /* granules of the range; where it was never touched */
  uint32_t bins[BINS]; /* head of the list of free blocks of [2^k, 2^(k+1)) granules, as row + 1 */
  int64_t in_use, peak;
} heap = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t once = PTHREAD_ONCE_INIT;
DC__AT_FORK(heap_at_fork, DC__FORK_HEAP, &heap.lock, NULL)

static void lock(void) { pthread_mutex_lock(&heap.lock); }
static void unlock(void) { pthread_mutex_unlock(&heap.lock); }

static void *reserve(size_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}

/* Addresses for twice the machine's memory: nothing is resident until it is written. Without them (a limit on
 * addresses, no overcommit) the heap stays empty and every request is refused. */
static void open_once(void) {
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  size_t bytes = pages > 0 && page > 0 ? 2 * (size_t)pages * (size_t)page : 0;
  if (bytes > most_bytes) bytes = most_bytes;
  bytes &= ~(DC_HUGE_PAGE - 1);
  if (!bytes) return;
  char *at = reserve(bytes + DC_HUGE_PAGE);
  struct row *rows = reserve((bytes >> GRANULE_SHIFT) * sizeof *rows);
  uint8_t *used = reserve(bytes >> GRANULE_SHIFT);
  if (!at || !rows || !used) {
    if (at) munmap(at, bytes + DC_HUGE_PAGE);
    if (rows) munmap(rows, (bytes >> GRANULE_SHIFT) * sizeof *rows);
    if (used) munmap(used, bytes >> GRANULE_SHIFT);
    return;
  }
  const char *huge = getenv("DEEPC_HUGEPAGES");
  heap.base = (char *)(((uintptr_t)at + DC_HUGE_PAGE - 1) & ~(uintptr_t)(DC_HUGE_PAGE - 1));
  if (!huge || strcmp(huge, "0")) madvise(heap.base, bytes, MADV_HUGEPAGE);
  heap.rows = rows, heap.used = used, heap.size = (uint32_t)(bytes >> GRANULE_SHIFT);
}

static int bin_of(uint32_t granules) { return 31 - __builtin_clz(granules); }

static void link_free(uint32_t at, uint32_t granules) {
  struct row *rows = heap.rows;
  uint32_t *head = &heap.bins[bin_of(granules)];
  rows[at].granules = granules, rows[at + granules - 1].before = granules;
  rows[at].prev = 0, rows[at].next = *head;
  if (*head) rows[*head - 1].prev = at + 1;
  *head = at + 1;
}

static void unlink_free(uint32_t at) {
  struct row *r = &heap.rows[at];
  if (r->prev) heap.rows[r->prev - 1].next = r->next;
  else heap.bins[bin_of(r->granules)] = r->next;
  if (r->next) heap.rows[r->next - 1].prev = r->prev;
  heap.rows[at + r->granules - 1].before = 0;
  r->granules = 0;
}

/* The smallest free block of at least `need`, the lowest of equals, as row + 1. Lists are short: a step has a few
 * hundred large tensors. */
static uint32_t best_fit(uint32_t need) {
  for (int k = bin_of(need); k < BINS; k++) {
    uint32_t best = 0;
    for (uint32_t i = heap.bins[k]; i; i = heap.rows[i - 1].next) {
      uint32_t n = heap.rows[i - 1].granules, m = best ? heap.rows[best - 1].granules : UINT32_MAX;
      if (n >= need && (n < m || (n == m && i < best))) best = i;
    }
    if (best) return best;
  }
  return 0;
}

/* The block at the end of what was used so far, made longer. */
static bool grow(uint32_t need, uint32_t *at) {
  uint32_t free_end = heap.top ? heap.rows[heap.top - 1].before : 0, more = need - (free_end < need ? free_end : need);
  if (more > heap.size - heap.top) return false;
  *at = heap.top - free_end;
  if (free_end) unlink_free(*at);
  heap.top += more;
  return true;
}

/* Hands the granules [at, at + need) of the free block at `block` out. */
static void cut(uint32_t block, uint32_t at, uint32_t need) {
  uint32_t end = block + heap.rows[block].granules;
  unlink_free(block);
  if (at > block) link_free(block, at - block);
  if (end > at + need) link_free(at + need, end - at - need);
}

static void hand_out(uint32_t at, uint32_t need) {
  heap.rows[at].granules = need, heap.used[at] = 1;
  heap.in_use += need;
  if (heap.in_use > heap.peak) heap.peak = heap.in_use;
}

void *dc_heap_take(size_t bytes) {
  pthread_once(&once, open_once);
  if (!heap.base || !bytes || bytes > ((size_t)heap.size << GRANULE_SHIFT)) return NULL;
  /* a granule more where equal tensors side by side would soon lie congruent modulo 2 MiB, where they evict each other
   */
  uint32_t need = (uint32_t)((bytes + granule - 1) >> GRANULE_SHIFT), at = 0;
  if (!(need % 32)) need++;
  lock();
  uint32_t found = best_fit(need);
  if (found) {
    at = found - 1;
    cut(at, at, need);
  } else if (!grow(need, &at)) {
    unlock();
    return NULL;
  }
  hand_out(at, need);
  unlock();
  return heap.base + ((size_t)at << GRANULE_SHIFT);
}

/* The highest place on a huge page's boundary for `need` granules in the free blocks, as granule + 1, and the block it
 * lies in. */
static uint32_t highest(uint32_t need, uint32_t *block) {
  const uint32_t page = (uint32_t)(DC_HUGE_PAGE >> GRANULE_SHIFT);
  uint32_t best = 0;
  for (int k = bin_of(need); k < BINS; k++)
    for (uint32_t i = heap.bins[k]; i; i = heap.rows[i - 1].next) {
      uint32_t begin = i - 1, n = heap.rows[begin].granules;
      uint32_t at = n < need ? 0 : (begin + n - need) / page * page;
      if (n >= need && at >= begin && at + 1 > best) best = at + 1, *block = begin;
    }
  return best;
}

void *dc_heap_take_high(size_t bytes) {
  const uint32_t page = (uint32_t)(DC_HUGE_PAGE >> GRANULE_SHIFT);
  pthread_once(&once, open_once);
  if (!heap.base || !bytes || bytes > ((size_t)heap.size << GRANULE_SHIFT)) return NULL;
  uint32_t need = (uint32_t)((bytes + DC_HUGE_PAGE - 1) / DC_HUGE_PAGE) * page, block = 0, at = 0;
  lock();
  uint32_t found = highest(need, &block);
  if (found) {
    at = found - 1;
    cut(block, at, need);
  } else {
    uint32_t begin = heap.top - (heap.top ? heap.rows[heap.top - 1].before : 0), skip = (page - begin % page) % page;
    if (!grow(skip + need, &begin)) {
      unlock();
      return NULL;
    }
    at = begin + skip;
    if (skip) link_free(begin, skip);
  }
  hand_out(at, need);
  unlock();
  return heap.base + ((size_t)at << GRANULE_SHIFT);
}

static bool owns(const void *p) {
  return heap.base && (const char *)p >= heap.base &&
         (const char *)p < heap.base + ((size_t)heap.size << GRANULE_SHIFT);
}

int dc_heap_give(void *p) {
  if (!owns(p)) return 0;
  size_t offset = (size_t)((char *)p - heap.base);
  uint32_t at = (uint32_t)(offset >> GRANULE_SHIFT);
  lock();
  if ((offset & (granule - 1)) || !heap.used[at]) { /* not a block's start, or freed before: nothing is touched */
    unlock();
    return -1;
  }
  uint32_t n = heap.rows[at].granules;
  heap.used[at] = 0, heap.rows[at].granules = 0, heap.in_use -= n;
  uint32_t before = at ? heap.rows[at - 1].before : 0, after = at + n;
  if (before) unlink_free(at - before), at -= before, n += before;
  if (after < heap.top && !heap.used[after] && heap.rows[after].granules) {
    uint32_t more = heap.rows[after].granules;
    unlink_free(after), n += more;
  }
  link_free(at, n);
  unlock();
  return 1;
}

int dc_heap_usable(void) {
  pthread_once(&once, open_once);
  return heap.base != NULL;
}

int dc_heap_stats(struct dc_heap_stats *out) {
  if (!out) return DC_FAIL(DC_E_INVALID, "dc_heap_stats: out is NULL; pass the address of a struct dc_heap_stats");
  pthread_once(&once, open_once);
  lock();
  *out = (struct dc_heap_stats){.base = heap.base,
                                .limit = (int64_t)heap.size << GRANULE_SHIFT,
                                .extent = (int64_t)heap.top << GRANULE_SHIFT,
                                .in_use = heap.in_use << GRANULE_SHIFT,
                                .peak = heap.peak << GRANULE_SHIFT};
  for (int k = 0; k < BINS; k++)
    for (uint32_t i = heap.bins[k]; i; i = heap.rows[i - 1].next) {
      int64_t bytes = (int64_t)heap.rows[i - 1].granules << GRANULE_SHIFT;
      out->free += bytes, out->free_blocks++;
      if (bytes > out->largest_free) out->largest_free = bytes;
    }
  unlock();
  return DC_OK;
}

int dc_heap_trim(void) {
  lock();
  for (int k = 0; k < BINS; k++)
    for (uint32_t i = heap.bins[k]; i; i = heap.rows[i - 1].next)
      madvise(heap.base + ((size_t)(i - 1) << GRANULE_SHIFT), (size_t)heap.rows[i - 1].granules << GRANULE_SHIFT,
              MADV_DONTNEED);
  unlock();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  return DC_OK;
}

#ifdef __GLIBC__
/* A user who set a threshold by hand wants it as it is. */
static bool user_chose(void) {
  static const char *const variables[] = {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"};
  static const char *const tunables[] = {"glibc.malloc.mmap_max", "glibc.malloc.mmap_threshold",
                                         "glibc.malloc.trim_threshold"};
  const char *set = getenv("GLIBC_TUNABLES");
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
    if (getenv(variables[i]) || (set && strstr(set, tunables[i]))) return true;
  return false;
}
#endif

int dc_heap_keep_small(int keep, int *kept) {
  if (!kept) return DC_FAIL(DC_E_INVALID, "dc_heap_keep_small: kept is NULL; pass the address of an int");
  *kept = 0;
#ifdef __GLIBC__
  enum { DEFAULT_THRESHOLD = 128 * 1024, MOST = 32 << 20 };
  if (user_chose()) return DC_OK;
  bool done = mallopt(M_MMAP_THRESHOLD, keep ? MOST : DEFAULT_THRESHOLD) &&
              mallopt(M_TRIM_THRESHOLD, keep ? -1 : DEFAULT_THRESHOLD);
  *kept = keep && done;
#else
  (void)keep;
#endif
  return DC_OK;
}
