/* heap.c: memory that a training step frees and the next one needs again.
 *
 * A step allocates and frees the same activations every time. glibc maps each large one by itself and unmaps it when it
 * is freed, so every step pays the kernel for zeroed pages again (0.1 to 1 s a GiB). Here large blocks come from one
 * reserved range of addresses on huge pages that stays resident: no fault after the second step. docs/lab/heap.md has
 * what else was tried.
 *
 * Memory follows the blocks: one that lies where there is no memory gets that of huge pages which no block covers, from
 * wherever they are (mremap: no byte is copied). So a heap in which blocks lie otherwise than before, as on a rank that
 * is ahead of the others, needs more addresses and no more memory: it has as much as blocks ever covered at once.
 *
 * What stays has a limit: memory that no block has covered for 32 steps (the largest batch of a while ago, an
 * evaluation) goes back to the system, after 2 steps where the machine or the cgroup is short of memory; so does all
 * that is free before somebody is refused memory (dc__mem_room), and what a forked child inherits free.
 *
 * Owns the range, and the description of its blocks beside it (out of band: a stray write into a tensor can't break the
 * heap, and what is resident is the tensors alone). Blocks are cut in granules of 16 KiB or one page, whichever is
 * larger, so that giving back a block's pages never touches its neighbour; a free neighbour is joined at once (boundary
 * tags: Knuth, TAOCP 1, 2.5); the smallest free block that is large enough is taken, the lowest of equals. When memory
 * was last used is noted per huge page, since blocks are joined and cut all the time. Any thread. */
#include "heap.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <malloc.h>
#endif

enum { HEAP_BINS = 32, HEAP_PATIENCE = 32, HEAP_SHORT_PATIENCE = 2, HEAP_LOOK_STEPS = 8 };
/* Places that have the memory of others: two mappings more each, of the kernel's 65,530 for a process. */
enum { HEAP_MOST_GUESTS = 8192 };
static const size_t heap_least_granule = (size_t)16 << 10;

/* One row per granule. Only the first granule of a block has `granules`; of a free block the last one has `before` too.
 * 0 elsewhere. */
struct heap_row {
  uint32_t granules, before; /* length of the block that begins here; of the free block that ends here */
  uint32_t next, prev; /* of the free list, as row + 1; 0: none */
};

/* One per huge page. */
struct heap_page {
  uint32_t since; /* the step in which a block over it was last given back; 0: it has no memory but what blocks on it
                     have brought since they were taken */
  uint16_t blocks; /* that lie on it */
  bool guest; /* its memory was another place's at least once */
};

struct dc__heap {
  pthread_mutex_t lock;   /* guards what follows `drop` */
  char *_Atomic base;     /* on a huge page; NULL: not open */
  char *reserved;         /* the mapping that `base` lies in */
  size_t limit, granule;  /* bytes */
  uint32_t size, page;    /* granules of the range, of a huge page */
  int (*drop)(void *at, size_t bytes);
  bool (*move)(void *from, void *to, size_t bytes);
  struct heap_row *rows;
  uint8_t *used;   /* 1 at the first granule of a block in use */
  struct heap_page *pages;
  uint32_t covered, spare; /* pages that blocks lie on; that have memory and no block */
  uint32_t guests;
  uint32_t top;    /* granules up to where the range was never touched */
  uint32_t bins[HEAP_BINS]; /* head of the list of free blocks of [2^k, 2^(k+1)) granules, as row + 1 */
  uint32_t step;   /* counted from 1 */
  int64_t in_use, peak; /* granules */
  int64_t decayed, refusals, foreign, moved; /* bytes, counts, bytes */
};

static dc__heap heap_own = {.lock = PTHREAD_MUTEX_INITIALIZER}; /* the process's */
static pthread_once_t heap_once = PTHREAD_ONCE_INIT;

static void heap_lock(dc__heap *h) { pthread_mutex_lock(&h->lock); }
static void heap_unlock(dc__heap *h) { pthread_mutex_unlock(&h->lock); }
static char *heap_base(dc__heap *h) { return atomic_load_explicit(&h->base, memory_order_acquire); }
static size_t heap_bytes(const dc__heap *h, int64_t granules) { return (size_t)granules * h->granule; }

/* ---- the range --------------------------------------------------------------------------------------------------- */
static int heap_dontneed(void *at, size_t bytes) { return madvise(at, bytes, MADV_DONTNEED); }

static void *heap_reserve(size_t bytes, int access) {
  void *at = mmap(NULL, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}

/* After mlockall(MCL_FUTURE) a new mapping is locked, and a readable one populated: twice the machine's memory. The
 * kernel does not drop locked pages, which tells. */
static bool heap_is_locked(void *at, size_t page) { return madvise(at, page, MADV_DONTNEED) && errno == EINVAL; }

static size_t heap_table_bytes(const dc__heap *h, size_t entry, uint32_t per) { return h->size / per * entry; }

static void heap_unreserve(dc__heap *h) {
  if (h->reserved) munmap(h->reserved, h->limit + DC_HUGE_PAGE);
  if (h->rows) munmap(h->rows, heap_table_bytes(h, sizeof *h->rows, 1));
  if (h->used) munmap(h->used, heap_table_bytes(h, sizeof *h->used, 1));
  if (h->pages) munmap(h->pages, heap_table_bytes(h, sizeof *h->pages, h->page));
  h->reserved = NULL, h->rows = NULL, h->used = NULL, h->pages = NULL;
}

static int heap_map(dc__heap *h, size_t page) {
  h->reserved = heap_reserve(h->limit + DC_HUGE_PAGE, PROT_NONE);
  if (h->reserved && heap_is_locked(h->reserved, page))
    return DC_FAIL(DC_E_UNSUPPORTED, "the heap keeps addresses without memory, and this process locks all that it maps "
                                     "in memory (mlockall with MCL_FUTURE): large tensors are the C library's");
  h->rows = heap_reserve(heap_table_bytes(h, sizeof *h->rows, 1), PROT_READ | PROT_WRITE);
  h->used = heap_reserve(heap_table_bytes(h, sizeof *h->used, 1), PROT_READ | PROT_WRITE);
  h->pages = heap_reserve(heap_table_bytes(h, sizeof *h->pages, h->page), PROT_READ | PROT_WRITE);
  if (!h->reserved || !h->rows || !h->used || !h->pages ||
      mprotect(h->reserved, h->limit + DC_HUGE_PAGE, PROT_READ | PROT_WRITE))
    return DC_FAIL(DC_E_NOMEM, "no addresses for a heap of %zu bytes: %s; look at ulimit -v and vm.overcommit_memory",
                   h->limit, strerror(errno));
  return DC_OK;
}

static int heap_open(dc__heap *h, const dc__heap_system *system) {
  bool huge = true;
  DC_TRY(dc__hugepages(&huge));
  h->granule = system->page > heap_least_granule ? system->page : heap_least_granule;
  h->limit = system->bytes;
  if (h->limit > h->granule * UINT32_MAX) h->limit = h->granule * UINT32_MAX; /* rows are counted in 32 bits */
  h->limit &= ~(DC_HUGE_PAGE - 1);
  if (!h->limit) return DC_FAIL(DC_E_INVALID, "a heap of %zu bytes: expected %zu or more", system->bytes, DC_HUGE_PAGE);
  h->size = (uint32_t)(h->limit / h->granule), h->page = (uint32_t)(DC_HUGE_PAGE / h->granule);
  h->drop = system->drop ? system->drop : heap_dontneed;
  h->move = system->move ? system->move : dc__map_move;
  h->step = 1;
  int rc = heap_map(h, system->page);
  if (rc) {
    heap_unreserve(h);
    return rc;
  }
  char *base = (char *)dc__round_up((uintptr_t)h->reserved, DC_HUGE_PAGE);
  dc__map_advise(base, h->limit);
  atomic_store_explicit(&h->base, base, memory_order_release);
  return DC_OK;
}

int dc__heap_open(const dc__heap_system *system, dc__heap **out) {
  dc__heap *h = calloc(1, sizeof *h);
  if (!h) return DC_FAIL(DC_E_NOMEM, "no memory for the heap's description");
  pthread_mutex_init(&h->lock, NULL);
  int rc = heap_open(h, system);
  if (rc) {
    pthread_mutex_destroy(&h->lock);
    free(h);
    return rc;
  }
  *out = h;
  return DC_OK;
}

void dc__heap_close(dc__heap *h) {
  if (!h) return;
  heap_unreserve(h);
  pthread_mutex_destroy(&h->lock);
  free(h);
}

/* ---- free blocks ------------------------------------------------------------------------------------------------- */
static int heap_bin(uint32_t granules) { return 31 - __builtin_clz(granules); }

static void heap_link(dc__heap *h, uint32_t at, uint32_t granules) {
  struct heap_row *rows = h->rows;
  uint32_t *head = &h->bins[heap_bin(granules)];
  rows[at].granules = granules, rows[at + granules - 1].before = granules;
  rows[at].prev = 0, rows[at].next = *head;
  if (*head) rows[*head - 1].prev = at + 1;
  *head = at + 1;
}

static void heap_unlink(dc__heap *h, uint32_t at) {
  struct heap_row *r = &h->rows[at];
  if (r->prev) h->rows[r->prev - 1].next = r->next;
  else h->bins[heap_bin(r->granules)] = r->next;
  if (r->next) h->rows[r->next - 1].prev = r->prev;
  h->rows[at + r->granules - 1].before = 0;
  r->granules = 0;
}

/* The smallest free block of at least `need`, the lowest of equals, as row + 1. Lists are short: a step has a few
 * hundred large tensors. */
static uint32_t heap_best_fit(const dc__heap *h, uint32_t need) {
  for (int k = heap_bin(need); k < HEAP_BINS; k++) {
    uint32_t best = 0;
    for (uint32_t i = h->bins[k]; i; i = h->rows[i - 1].next) {
      uint32_t n = h->rows[i - 1].granules, m = best ? h->rows[best - 1].granules : UINT32_MAX;
      if (n >= need && (n < m || (n == m && i < best))) best = i;
    }
    if (best) return best;
  }
  return 0;
}

/* The highest place on a huge page's boundary for `need` granules in the free blocks, as granule + 1, and the block it
 * lies in. */
static uint32_t heap_highest(const dc__heap *h, uint32_t need, uint32_t *block) {
  uint32_t best = 0;
  for (int k = heap_bin(need); k < HEAP_BINS; k++)
    for (uint32_t i = h->bins[k]; i; i = h->rows[i - 1].next) {
      uint32_t begin = i - 1, n = h->rows[begin].granules;
      uint32_t at = n < need ? 0 : (begin + n - need) / h->page * h->page;
      if (n >= need && at >= begin && at + 1 > best) best = at + 1, *block = begin;
    }
  return best;
}

/* The block at the end of what was used so far, made longer. */
static bool heap_grow(dc__heap *h, uint32_t need, uint32_t *at) {
  uint32_t free_end = h->top ? h->rows[h->top - 1].before : 0, more = need - (free_end < need ? free_end : need);
  if (more > h->size - h->top) return false;
  *at = h->top - free_end;
  if (free_end) heap_unlink(h, *at);
  h->top += more;
  return true;
}

/* Takes the granules [at, at + need) out of the free block at `block`. */
static void heap_cut(dc__heap *h, uint32_t block, uint32_t at, uint32_t need) {
  uint32_t end = block + h->rows[block].granules;
  heap_unlink(h, block);
  if (at > block) heap_link(h, block, at - block);
  if (end > at + need) heap_link(h, at + need, end - at - need);
}

static bool heap_place(dc__heap *h, uint32_t need, uint32_t *at) {
  uint32_t found = heap_best_fit(h, need);
  if (!found) return heap_grow(h, need, at);
  *at = found - 1;
  heap_cut(h, *at, *at, need);
  return true;
}

static bool heap_place_high(dc__heap *h, uint32_t need, uint32_t *at) {
  uint32_t block = 0, found = heap_highest(h, need, &block);
  if (found) {
    *at = found - 1;
    heap_cut(h, block, *at, need);
    return true;
  }
  uint32_t begin = h->top - (h->top ? h->rows[h->top - 1].before : 0), skip = (h->page - begin % h->page) % h->page;
  if (!heap_grow(h, skip + need, &begin)) return false;
  *at = begin + skip;
  if (skip) heap_link(h, begin, skip);
  return true;
}

/* ---- whose memory ------------------------------------------------------------------------------------------------ */
static char *heap_page_at(dc__heap *h, uint32_t p) { return heap_base(h) + (size_t)p * DC_HUGE_PAGE; }
static uint32_t heap_pages_end(const dc__heap *h, uint32_t granule) { return (granule + h->page - 1) / h->page; }

/* Page p gets the memory of the highest spare page below *from, which is in the way of the fewest blocks. Where it
 * can't be moved it is given back, and p gets new memory when it is written. */
static void heap_furnish(dc__heap *h, uint32_t p, uint32_t *from) {
  struct heap_page *to = &h->pages[p], *of;
  do of = &h->pages[--*from];
  while (of->blocks || !of->since);
  of->since = 0, h->spare--;
  if ((to->guest || h->guests < HEAP_MOST_GUESTS) &&
      h->move(heap_page_at(h, *from), heap_page_at(h, p), DC_HUGE_PAGE)) {
    h->guests += !to->guest;
    to->guest = true, to->since = h->step, h->moved += (int64_t)DC_HUGE_PAGE;
    dc__count(DC_COUNTER_heap_moved_bytes, (int64_t)DC_HUGE_PAGE);
  } else {
    h->drop(heap_page_at(h, *from), DC_HUGE_PAGE);
  }
}

/* A block lies on its pages from now on. */
static void heap_cover(dc__heap *h, uint32_t at, uint32_t granules) {
  const uint32_t first = at / h->page, end = heap_pages_end(h, at + granules);
  for (uint32_t p = first; p < end; p++)
    if (!h->pages[p].blocks++) h->covered++, h->spare -= h->pages[p].since != 0;
  uint32_t from = heap_pages_end(h, h->top);
  for (uint32_t p = first; p < end && h->spare; p++)
    if (h->pages[p].blocks == 1 && !h->pages[p].since) heap_furnish(h, p, &from);
}

static void heap_uncover(dc__heap *h, uint32_t at, uint32_t granules) {
  for (uint32_t p = at / h->page, end = heap_pages_end(h, at + granules); p < end; p++) {
    h->pages[p].since = h->step;
    if (!--h->pages[p].blocks) h->covered--, h->spare++;
  }
}

/* Page p, on which no block lies, has no memory any more; whether it had. */
static bool heap_bare(dc__heap *h, uint32_t p) {
  bool had = h->pages[p].since != 0;
  h->pages[p].since = 0, h->spare -= had;
  return had;
}

/* ---- take, give -------------------------------------------------------------------------------------------------- */
/* A granule more where equal tensors side by side would soon lie congruent modulo 2 MiB, where they evict each other.
 */
static uint32_t heap_granules(const dc__heap *h, size_t bytes, bool high) {
  if (high) return (uint32_t)(dc__round_up(bytes, DC_HUGE_PAGE) / h->granule);
  uint32_t need = (uint32_t)(dc__round_up(bytes, h->granule) / h->granule);
  return need % (h->page / 4) ? need : need + 1;
}

void *dc__heap_take(dc__heap *h, size_t bytes, bool high) {
  char *base = heap_base(h);
  if (!base || !bytes) return NULL;
  uint32_t at = 0;
  heap_lock(h);
  uint32_t need = bytes <= h->limit ? heap_granules(h, bytes, high) : 0;
  if (!need || !(high ? heap_place_high(h, need, &at) : heap_place(h, need, &at))) {
    h->refusals++;
    heap_unlock(h);
    dc__count(DC_COUNTER_heap_refusals, 1);
    return NULL;
  }
  h->rows[at].granules = need, h->used[at] = 1;
  h->in_use += need;
  if (h->in_use > h->peak) h->peak = h->in_use;
  heap_cover(h, at, need);
  heap_unlock(h);
  return base + heap_bytes(h, at);
}

/* Joins the block with free neighbours. */
static void heap_free(dc__heap *h, uint32_t at) {
  uint32_t n = h->rows[at].granules;
  h->used[at] = 0, h->rows[at].granules = 0, h->in_use -= n;
  heap_uncover(h, at, n);
  uint32_t before = at ? h->rows[at - 1].before : 0, after = at + n;
  if (before) heap_unlink(h, at - before), at -= before, n += before;
  if (after < h->top && !h->used[after] && h->rows[after].granules) {
    uint32_t more = h->rows[after].granules;
    heap_unlink(h, after), n += more;
  }
  heap_link(h, at, n);
}

int dc__heap_give(dc__heap *h, void *p) {
  char *base = heap_base(h);
  if (!base || (char *)p < base || (char *)p >= base + h->limit) return 0;
  size_t offset = (size_t)((char *)p - base);
  uint32_t at = (uint32_t)(offset / h->granule);
  heap_lock(h);
  const bool block = offset % h->granule == 0 && h->used[at];
  if (block) heap_free(h, at);
  else h->foreign++; /* not a block's start, or freed before: nothing is touched */
  heap_unlock(h);
  if (!block) dc__count(DC_COUNTER_heap_foreign_frees, 1);
  return block ? 1 : -1;
}

/* ---- giving back to the system ----------------------------------------------------------------------------------- */
/* Huge pages [first, end) that lie whole in the free block at `at`. */
static void heap_whole_pages(const dc__heap *h, uint32_t at, uint32_t *first, uint32_t *end) {
  *first = heap_pages_end(h, at), *end = (at + h->rows[at].granules) / h->page;
}

/* Huge pages of one free block that were in no block for `patience` steps, neighbours in one call. */
static int64_t heap_drop_idle(dc__heap *h, uint32_t at, uint32_t patience) {
  uint32_t p, end, run = 0;
  int64_t dropped = 0;
  heap_whole_pages(h, at, &p, &end);
  for (; p <= end; p++) {
    if (p < end && h->pages[p].since && h->step - h->pages[p].since >= patience) {
      run += heap_bare(h, p);
      continue;
    }
    if (run) h->drop(heap_page_at(h, p - run), (size_t)run * DC_HUGE_PAGE);
    dropped += run, run = 0;
  }
  return dropped;
}

static int64_t heap_drop_block(dc__heap *h, uint32_t at) {
  uint32_t p, end, had = 0;
  h->drop(heap_base(h) + heap_bytes(h, at), heap_bytes(h, h->rows[at].granules));
  for (heap_whole_pages(h, at, &p, &end); p < end; p++) had += heap_bare(h, p);
  return had;
}

/* Under the lock. patience 0: all that is free, to the last page. */
static int64_t heap_drop(dc__heap *h, uint32_t patience) {
  int64_t pages = 0;
  for (int k = 0; k < HEAP_BINS; k++)
    for (uint32_t i = h->bins[k]; i; i = h->rows[i - 1].next)
      pages += patience ? heap_drop_idle(h, i - 1, patience) : heap_drop_block(h, i - 1);
  return pages * (int64_t)DC_HUGE_PAGE;
}

int64_t dc__heap_trim(dc__heap *h) {
  heap_lock(h);
  int64_t dropped = heap_drop(h, 0);
  heap_unlock(h);
  return dropped;
}

int64_t dc__heap_step(dc__heap *h, uint32_t patience) {
  int64_t dropped = 0;
  heap_lock(h);
  if (++h->step % HEAP_LOOK_STEPS == 0) dropped = heap_drop(h, patience);
  h->decayed += dropped;
  heap_unlock(h);
  if (dropped) dc__count(DC_COUNTER_heap_decayed_bytes, dropped);
  return dropped;
}

uint32_t dc__heap_patience(int64_t available, int64_t bytes) {
  return available < bytes / 4 ? HEAP_SHORT_PATIENCE : HEAP_PATIENCE;
}

void dc__heap_read(dc__heap *h, struct dc_heap_stats *out) {
  heap_lock(h);
  *out = (struct dc_heap_stats){.base = heap_base(h),
                                .limit = (int64_t)h->limit,
                                .extent = (int64_t)heap_bytes(h, h->top),
                                .in_use = (int64_t)heap_bytes(h, h->in_use),
                                .peak = (int64_t)heap_bytes(h, h->peak),
                                .decayed = h->decayed,
                                .refusals = h->refusals,
                                .foreign_frees = h->foreign,
                                .steps = h->step ? (int64_t)h->step - 1 : 0,
                                .covered = (int64_t)h->covered * (int64_t)DC_HUGE_PAGE,
                                .moved = h->moved};
  for (int k = 0; k < HEAP_BINS; k++)
    for (uint32_t i = h->bins[k]; i; i = h->rows[i - 1].next) {
      int64_t bytes = (int64_t)heap_bytes(h, h->rows[i - 1].granules);
      uint32_t p, end;
      out->free += bytes, out->free_blocks++, out->free_resident += bytes;
      for (heap_whole_pages(h, i - 1, &p, &end); p < end; p++)
        if (!h->pages[p].since) out->free_resident -= (int64_t)DC_HUGE_PAGE;
      if (bytes > out->largest_free) out->largest_free = bytes;
    }
  heap_unlock(h);
}

/* ---- the process's heap ------------------------------------------------------------------------------------------ */
/* A user who set a threshold by hand wants it as it is. */
static bool heap_user_chose(void) {
  static const char *const variables[] = {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"};
  static const char *const tunables[] = {"glibc.malloc.mmap_max", "glibc.malloc.mmap_threshold",
                                         "glibc.malloc.trim_threshold"};
  const char *set = getenv("GLIBC_TUNABLES");
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
    if (getenv(variables[i]) || (set && strstr(set, tunables[i]))) return true;
  return false;
}

static size_t heap_smallest; /* dc_heap_smallest */

/* Addresses for twice the machine's memory: nothing is resident until it is written. Without them (a limit on
 * addresses, no overcommit) the heap stays empty and every request is refused. */
static void heap_open_own(void) {
  heap_smallest = heap_user_chose() ? 1 << 20 : 128 << 10;
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page <= 0 || (size_t)page > DC_HUGE_PAGE) return;
  (void)heap_open(&heap_own, &(dc__heap_system){.page = (size_t)page, .bytes = 2 * (size_t)pages * (size_t)page});
}

/* What is free here is worthless to the child, and as long as it had it the parent's next step would copy every page.
 */
static void heap_in_child(void) { (void)heap_drop(&heap_own, 0); }
DC__AT_FORK(heap_at_fork, DC__FORK_HEAP, &heap_own.lock, heap_in_child)

int dc_heap_usable(void) {
  pthread_once(&heap_once, heap_open_own);
  return heap_base(&heap_own) != NULL;
}

size_t dc_heap_smallest(void) {
  (void)dc_heap_usable();
  return heap_smallest;
}

void *dc_heap_take(size_t bytes) { return dc_heap_usable() ? dc__heap_take(&heap_own, bytes, false) : NULL; }
void *dc_heap_take_high(size_t bytes) { return dc_heap_usable() ? dc__heap_take(&heap_own, bytes, true) : NULL; }
int dc_heap_give(void *p) { return dc__heap_give(&heap_own, p); }

int dc_heap_stats(struct dc_heap_stats *out) {
  struct dc_heap_stats all;
  DC_TRY(DC__SIZED(struct dc_heap_stats, steps, out, &all));
  size_t bytes = all.struct_size;
  (void)dc_heap_usable();
  dc__heap_read(&heap_own, &all);
  all.struct_size = bytes;
  memcpy(out, &all, bytes);
  return DC_OK;
}

int dc_heap_trim(void) {
  (void)dc__heap_trim(&heap_own);
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  return DC_OK;
}

/* What is available is read from a dozen files (50 to 100 us), so once a second. */
static uint32_t heap_patience_now(void) {
  static _Atomic int64_t next_s;
  static _Atomic uint32_t patience = HEAP_PATIENCE;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int64_t due = atomic_load_explicit(&next_s, memory_order_relaxed), available;
  if (now.tv_sec >= due && atomic_compare_exchange_strong(&next_s, &due, now.tv_sec + 1) &&
      dc_mem_available(&available) == DC_OK) {
    heap_lock(&heap_own);
    int64_t bytes = (int64_t)(heap_own.covered + heap_own.spare) * (int64_t)DC_HUGE_PAGE;
    heap_unlock(&heap_own);
    atomic_store_explicit(&patience, dc__heap_patience(available, bytes), memory_order_relaxed);
  }
  return atomic_load_explicit(&patience, memory_order_relaxed);
}

int dc_heap_step(void) {
  if (heap_base(&heap_own)) (void)dc__heap_step(&heap_own, heap_patience_now());
  return DC_OK;
}

/* ---- malloc ------------------------------------------------------------------------------------------------------ */
#ifdef __GLIBC__
/* jemalloc, tcmalloc and sanitizers put their own malloc before glibc's; mallopt then does nothing. */
static bool heap_malloc_is_glibc(void) {
  Dl_info ours, libc;
  void *found = dlsym(RTLD_DEFAULT, "malloc");
  return found && dladdr(found, &ours) && dladdr((void *)(uintptr_t)gnu_get_libc_version, &libc) &&
         ours.dli_fbase == libc.dli_fbase;
}
#endif

int dc_heap_keep_small(int keep, int *kept) {
  if (!kept) return DC_FAIL(DC_E_INVALID, "dc_heap_keep_small: kept is NULL; pass the address of an int");
  *kept = 0;
#ifdef __GLIBC__
  enum { MOST = 32 << 20 }; /* the most that glibc takes as a threshold, and where its own adapts up to */
  if (heap_user_chose() || !heap_malloc_is_glibc()) return DC_OK;
  bool done = mallopt(M_MMAP_THRESHOLD, MOST) && mallopt(M_TRIM_THRESHOLD, keep ? -1 : 2 * MOST);
  *kept = keep && done;
#else
  (void)keep;
#endif
  return DC_OK;
}
