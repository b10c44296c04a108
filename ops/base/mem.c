/* mem.c: large arrays on huge pages, and how much memory is left.
 *
 * Owns every block that dc_mem_alloc returned, in one table (so that dc_mem_free can refuse a pointer that is not ours,
 * and so that no header disturbs the alignment). Reads the memory limits of the whole cgroup path before it maps: past
 * the limit the kernel kills the process instead of failing the call. */
#include "base.h"

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

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

enum { CACHE_LINE = 64 };
static const size_t small_limit = (size_t)1 << 20;
/* DC__COLOR_STEP: all differences of two colors lie between 4.25 and 64 KiB (measured good: 4 to 70 KiB, against 3x
 * slower when congruent modulo 2 MiB). The 256 bytes keep two colors from being congruent modulo 4 KiB, where loads
 * wait for unrelated stores. */
static const size_t fault_step = (size_t)64 << 20;

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
} blocks = {.lock = PTHREAD_MUTEX_INITIALIZER};

DC__AT_FORK(mem_at_fork, DC__FORK_BLOCKS, &blocks.lock, NULL)

static size_t home_of(const void *ptr, size_t capacity) {
  uint64_t hash = ((uint64_t)(uintptr_t)ptr >> 6) * 0x9E3779B97F4A7C15u;
  return (size_t)(hash >> 32) & (capacity - 1);
}

static struct block *find_slot(struct block *slot, size_t capacity, const void *ptr) {
  size_t i = home_of(ptr, capacity);
  while (slot[i].ptr && slot[i].ptr != ptr) i = (i + 1) & (capacity - 1);
  return &slot[i];
}

static bool grow_table(void) {
  size_t capacity = blocks.capacity ? 2 * blocks.capacity : 64;
  struct block *slot = calloc(capacity, sizeof *slot);
  if (!slot) return false;
  for (size_t i = 0; i < blocks.capacity; i++)
    if (blocks.slot[i].ptr) *find_slot(slot, capacity, blocks.slot[i].ptr) = blocks.slot[i];
  free(blocks.slot);
  blocks.slot = slot;
  blocks.capacity = capacity;
  return true;
}

static bool remember(struct block block) {
  pthread_mutex_lock(&blocks.lock);
  bool ok = 2 * (blocks.used + 1) <= blocks.capacity || grow_table();
  if (ok) {
    *find_slot(blocks.slot, blocks.capacity, block.ptr) = block;
    blocks.used++;
  }
  pthread_mutex_unlock(&blocks.lock);
  return ok;
}

/* Closes the gap at i, so that no chain of probes is cut (Knuth, TAOCP 3, algorithm 6.4R). */
static void close_gap(size_t i) {
  size_t mask = blocks.capacity - 1;
  for (size_t j = (i + 1) & mask; blocks.slot[j].ptr; j = (j + 1) & mask) {
    size_t home = home_of(blocks.slot[j].ptr, blocks.capacity);
    if (((j - home) & mask) < ((j - i) & mask)) continue; /* its home lies after the gap: it may stay */
    blocks.slot[i] = blocks.slot[j];
    i = j;
  }
  blocks.slot[i].ptr = NULL;
}

static bool forget(const void *ptr, struct block *block) {
  pthread_mutex_lock(&blocks.lock);
  struct block *slot = blocks.capacity ? find_slot(blocks.slot, blocks.capacity, ptr) : NULL;
  bool found = slot && slot->ptr;
  if (found) {
    *block = *slot;
    close_gap((size_t)(slot - blocks.slot));
    blocks.used--;
  }
  pthread_mutex_unlock(&blocks.lock);
  return found;
}

/* ---- allocation -------------------------------------------------------------------------------------------------- */
/* Maps one huge page more and trims. */
void *dc__map_aligned(size_t length, int flags) {
  size_t whole = length + DC_HUGE_PAGE;
  char *start = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (start == MAP_FAILED) return NULL;
  size_t before = -(uintptr_t)start & (DC_HUGE_PAGE - 1), after = whole - before - length;
  if (before) munmap(start, before);
  if (after) munmap(start + before + length, after);
  return start + before;
}

struct fault {
  char *base;
  atomic_int error;
};

static void fault_range(int64_t begin, int64_t end, void *ctx) {
  struct fault *fault = ctx;
  char *start = fault->base + begin;
  if (!madvise(start, (size_t)(end - begin), MADV_POPULATE_WRITE)) return;
  if (errno != EINVAL) { /* EINVAL: a kernel before 5.14 */
    atomic_store(&fault->error, errno);
    return;
  }
  long page = sysconf(_SC_PAGESIZE);
  for (int64_t i = 0; i < end - begin; i += page) ((volatile char *)start)[i] = 0;
}

static int fault_in(void *base, size_t length) {
  struct fault fault = {.base = base};
  dc_parallel_for((int64_t)length, (int64_t)fault_step, fault_range, &fault);
  int error = atomic_load(&fault.error);
  if (error) return DC_FAIL(DC_E_NOMEM, "the kernel could not back %zu bytes with memory: %s", length, strerror(error));
  return DC_OK;
}

static int check_available(size_t bytes, size_t length) {
  int64_t available;
  DC_TRY(dc_mem_available(&available));
  if (length > (uint64_t)available)
    return DC_FAIL(DC_E_NOMEM,
                   "asked for %zu bytes (%.2f GiB), but %lld bytes (%.2f GiB) are available under the cgroup's limit "
                   "and the machine's MemAvailable; use a smaller model or batch, more ranks, or raise the limit",
                   bytes, (double)bytes / (1 << 30), (long long)available, (double)available / (1 << 30));
  return DC_OK;
}

static size_t large_length(size_t bytes, size_t offset) {
  return (offset + bytes + DC_HUGE_PAGE - 1) & ~(DC_HUGE_PAGE - 1);
}

static size_t small_length(size_t bytes) {
  return bytes ? (bytes + CACHE_LINE - 1) & ~(size_t)(CACHE_LINE - 1) : CACHE_LINE;
}

static int alloc_large(size_t bytes, size_t offset, void **ptr) {
  bool huge = true;
  DC_TRY(dc__env_switch("DEEPC_HUGEPAGES", true, &huge));
  if (bytes > (size_t)PTRDIFF_MAX - 4 * DC_HUGE_PAGE)
    return DC_FAIL(DC_E_NOMEM, "asked for %zu bytes, more than an address space holds; check the size for an overflow",
                   bytes);
  size_t length = large_length(bytes, offset);
  DC_TRY(check_available(bytes, length));
  char *base = dc__map_aligned(length, 0);
  if (!base)
    return DC_FAIL(DC_E_NOMEM, "mmap of %zu bytes: %s; look at ulimit -v and vm.max_map_count", length,
                   strerror(errno));
  /* Advice: a kernel without transparent huge pages refuses it, and small pages then serve. */
  (void)madvise(base, length, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  int rc = fault_in(base, length);
  if (rc == DC_OK && !remember((struct block){base + offset, base, length}))
    rc = DC_FAIL(DC_E_NOMEM, "no memory to note a block of %zu bytes", bytes);
  if (rc != DC_OK) {
    munmap(base, length);
    return rc;
  }
  *ptr = base + offset;
  return DC_OK;
}

static int alloc_small(size_t bytes, void **ptr) {
  size_t length = small_length(bytes);
  void *base = aligned_alloc(CACHE_LINE, length);
  if (!base) return DC_FAIL(DC_E_NOMEM, "the heap has no %zu bytes", bytes);
  memset(base, 0, length);
  if (!remember((struct block){base, base, 0})) {
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
  return bytes < small_limit ? alloc_small(bytes, ptr) : alloc_large(bytes, (size_t)color * DC__COLOR_STEP, ptr);
}

int dc_mem_alloc_bytes(size_t bytes, int color, size_t *taken) {
  if (!taken) return DC_FAIL(DC_E_INVALID, "taken is NULL; pass the address of a size_t");
  if (color < 0 || color >= DC__COLORS)
    return DC_FAIL(DC_E_INVALID, "color is %d; it must be from 0 to %d", color, DC__COLORS - 1);
  *taken = bytes < small_limit ? small_length(bytes) : large_length(bytes, (size_t)color * DC__COLOR_STEP);
  return DC_OK;
}

int dc_mem_free(void *ptr) {
  struct block block;
  if (!ptr) return DC_OK;
  if (!forget(ptr, &block)) return DC_FAIL(DC_E_INVALID, "%p is not from dc_mem_alloc, or was freed before", ptr);
  if (!block.mapped) {
    free(block.base);
    return DC_OK;
  }
  if (munmap(block.base, block.mapped))
    return DC_FAIL(DC_E_SYSTEM, "munmap of %zu bytes at %p: %s", block.mapped, block.base, strerror(errno));
  return DC_OK;
}

/* ---- what is available ------------------------------------------------------------------------------------------- */
struct path {
  char text[PATH_MAX];
};

/* False if it does not fit, so that a cut path is never opened. */
__attribute__((format(printf, 2, 3))) static bool make_path(struct path *path, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  int n = vsnprintf(path->text, sizeof path->text, fmt, args);
  va_end(args);
  return n >= 0 && n < (int)sizeof path->text;
}

/* The number alone in dir/name. False if the file is missing or says something else ("max": no limit). */
static bool read_number(const char *dir, const char *name, int64_t *value) {
  struct path path;
  if (!make_path(&path, "%s/%s", dir, name)) return false;
  FILE *file = fopen(path.text, "re");
  if (!file) return false;
  unsigned long long number;
  bool ok = fscanf(file, "%llu", &number) == 1;
  fclose(file);
  if (ok) *value = number > INT64_MAX ? INT64_MAX : (int64_t)number;
  return ok;
}

/* The number after `key` in dir/name, a file of "key value" lines. */
static bool read_keyed(const char *dir, const char *name, const char *key, int64_t *value) {
  struct path path;
  if (!make_path(&path, "%s/%s", dir, name)) return false;
  FILE *file = fopen(path.text, "re");
  if (!file) return false;
  char line[256], word[128];
  long long number;
  bool found = false;
  while (!found && fgets(line, sizeof line, file))
    found = sscanf(line, "%127s %lld", word, &number) == 2 && !strcmp(word, key);
  fclose(file);
  if (found) *value = number;
  return found;
}

struct cgroup_version {
  const char *fstype, *limit, *usage, *reclaimable;
};
static const struct cgroup_version versions[2] = {
    {"cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
    {"cgroup2", "memory.max", "memory.current", "inactive_file"},
};

static void lower(int64_t *least, int64_t value) {
  if (value < 0) value = 0;
  if (value < *least) *least = value;
}

/* What one cgroup's limit leaves. Clean page cache counts as usage but goes before anything fails. */
static void apply_limit(const struct cgroup_version *version, const char *dir, int64_t *least) {
  int64_t limit, usage, reclaimable = 0;
  if (!read_number(dir, version->limit, &limit) || !read_number(dir, version->usage, &usage)) return;
  (void)read_keyed(dir, "memory.stat", version->reclaimable, &reclaimable);
  if (reclaimable > usage) reclaimable = usage;
  lower(least, limit - (usage - reclaimable));
}

/* Has the comma-separated list the word? */
static bool has_word(const char *list, const char *word) {
  size_t length = strlen(word);
  for (const char *at = list; (at = strstr(at, word)); at += length)
    if ((at == list || at[-1] == ',') && (!at[length] || at[length] == ',')) return true;
  return false;
}

/* Path of this process in the hierarchy, from a line "id:controllers:path" of /proc/self/cgroup. */
static bool cgroup_path(const char *proc, int version, struct path *result) {
  struct path path;
  if (!make_path(&path, "%s/self/cgroup", proc)) return false;
  FILE *file = fopen(path.text, "re");
  if (!file) return false;
  char *line = NULL;
  size_t room = 0;
  bool found = false;
  while (!found && getline(&line, &room, file) > 0) {
    line[strcspn(line, "\n")] = 0;
    char *controllers = strchr(line, ':');
    char *where = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!where) continue;
    *where++ = 0;
    controllers++;
    found = (version ? !*controllers : has_word(controllers, "memory")) && make_path(result, "%s", where);
  }
  free(line);
  fclose(file);
  return found;
}

/* Where that hierarchy is mounted and which of its directories is the mount's root, from /proc/self/mountinfo:
 * "36 35 98:0 /root /mount/point options... - fstype source superoptions" (proc(5)). */
static bool cgroup_mount(const char *proc, int version, struct path *root, struct path *point) {
  struct path path;
  if (!make_path(&path, "%s/self/mountinfo", proc)) return false;
  FILE *file = fopen(path.text, "re");
  if (!file) return false;
  char *line = NULL;
  size_t room = 0;
  bool found = false;
  while (!found && getline(&line, &room, file) > 0) {
    if (strlen(line) >= PATH_MAX) continue; /* so that no field below can overflow */
    char fstype[64], super[PATH_MAX];
    const char *tail = strstr(line, " - ");
    if (!tail || sscanf(line, "%*s %*s %*s %s %s", root->text, point->text) != 2) continue;
    if (sscanf(tail, " - %63s %*s %s", fstype, super) != 2) continue;
    found = !strcmp(fstype, versions[version].fstype) && (version || has_word(super, "memory"));
  }
  free(line);
  fclose(file);
  return found;
}

/* Limits hold on every level from the process's own cgroup up to the mount. */
static void apply_hierarchy(const char *proc, int version, int64_t *least) {
  struct path own, root, point, dir;
  if (!cgroup_path(proc, version, &own) || !cgroup_mount(proc, version, &root, &point)) return;
  /* In a container the mount shows only a part of the tree; a path outside of it is seen as the mount's own root. */
  size_t skip = strcmp(root.text, "/") ? strlen(root.text) : 0;
  bool inside = !strncmp(own.text, root.text, skip) && (!own.text[skip] || own.text[skip] == '/');
  if (strstr(own.text, "/..")) inside = false;
  if (!make_path(&dir, "%s%s", point.text, inside ? own.text + skip : "")) return;
  size_t shortest = strlen(point.text);
  for (;;) {
    apply_limit(&versions[version], dir.text, least);
    char *slash = strrchr(dir.text, '/');
    if (!slash || (size_t)(slash - dir.text) < shortest) return;
    *slash = 0;
  }
}

int dc_mem_available_in(const char *proc, int64_t *bytes) {
  if (!proc || !bytes) return DC_FAIL(DC_E_INVALID, "proc and bytes must not be NULL");
  int64_t least, kib;
  if (read_keyed(proc, "meminfo", "MemAvailable:", &kib)) {
    least = kib > INT64_MAX / 1024 ? INT64_MAX : kib * 1024;
  } else {
    long pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages < 0 || page < 0) return DC_FAIL(DC_E_SYSTEM, "no MemAvailable in %s/meminfo; mount procfs", proc);
    least = (int64_t)pages * page;
  }
  for (int version = 0; version < 2; version++) apply_hierarchy(proc, version, &least);
  *bytes = least;
  return DC_OK;
}

int dc_mem_available(int64_t *bytes) { return dc_mem_available_in("/proc", bytes); }

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
