/* numa.c: see numa.h. Owns what is read below /sys and the memory policies of shared mappings. Nothing here fails: a
 * kernel that does not say where processors lie, or has no NUMA, is one that has a single domain. No libnuma: two
 * system calls do. */
#include "numa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NUMA_CACHES = 10, NUMA_NODES = 64 }; /* caches of a processor; nodes that a mask holds */
enum { NUMA_PREFERRED = 1, NUMA_INTERLEAVE = 3 };

void dc__numa_list(const char *text, cpu_set_t *set) {
  CPU_ZERO(set);
  while (*text >= '0' && *text <= '9') {
    char *end;
    const unsigned long first = strtoul(text, &end, 10);
    const unsigned long last = *end == '-' ? strtoul(end + 1, &end, 10) : first;
    for (unsigned long i = first; i <= last && i < CPU_SETSIZE; i++) CPU_SET(i, set);
    text = *end == ',' ? end + 1 : end;
  }
}

/* A small file of the kernel's; "" where there is none. */
static void numa_read(char *text, size_t room, const char *root, const char *path) {
  char whole[512];
  text[0] = 0;
  if ((size_t)snprintf(whole, sizeof whole, "%s/%s", root, path) >= sizeof whole) return;
  FILE *f = fopen(whole, "re");
  if (!f) return;
  text[fread(text, 1, room - 1, f)] = 0;
  fclose(f);
}

static bool numa_holds(const cpu_set_t *all, const cpu_set_t *part) {
  cpu_set_t both;
  CPU_AND(&both, all, part);
  return CPU_EQUAL(&both, part);
}

static int numa_first(const cpu_set_t *set) {
  for (int i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, set)) return i;
  return -1;
}

/* The processors that share the third-level cache of `cpu`; false if the kernel shows none. */
static bool numa_l3(const char *root, int cpu, cpu_set_t *set) {
  char path[128], text[4096];
  for (int i = 0; i < NUMA_CACHES; i++) {
    snprintf(path, sizeof path, "devices/system/cpu/cpu%d/cache/index%d/level", cpu, i);
    numa_read(text, sizeof text, root, path);
    if (atoi(text) != 3) continue;
    snprintf(path, sizeof path, "devices/system/cpu/cpu%d/cache/index%d/shared_cpu_list", cpu, i);
    numa_read(text, sizeof text, root, path);
    dc__numa_list(text, set);
    return CPU_ISSET(cpu, set);
  }
  return false;
}

/* The node that has all of `bound`, or -1. */
static int numa_node(const char *root, const cpu_set_t *bound) {
  char path[128], text[4096];
  cpu_set_t online, cpus;
  numa_read(text, sizeof text, root, "devices/system/node/online");
  dc__numa_list(text, &online);
  for (int i = 0; i < NUMA_NODES; i++) {
    if (!CPU_ISSET(i, &online)) continue;
    snprintf(path, sizeof path, "devices/system/node/node%d/cpulist", i);
    numa_read(text, sizeof text, root, path);
    dc__numa_list(text, &cpus);
    if (numa_holds(&cpus, bound)) return i;
  }
  return -1;
}

dc__spot dc__numa_spot(const char *root, const cpu_set_t *bound) {
  dc__spot spot = {-1, -1};
  const int cpu = numa_first(bound);
  cpu_set_t shared;
  if (cpu < 0) return spot;
  if (numa_l3(root, cpu, &shared) && numa_holds(&shared, bound)) spot.l3 = numa_first(&shared);
  spot.node = numa_node(root, bound);
  return spot;
}

dc__spot dc__numa_here(void) {
  cpu_set_t bound;
  if (sched_getaffinity(0, sizeof bound, &bound)) CPU_ZERO(&bound); /* more processors than a cpu_set_t has */
  return dc__numa_spot("/sys", &bound);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */
/* The policy is the file's, so one rank sets it for all. Fails without NUMA, in sandboxes and for nodes that are not
 * there, which is as good. */
static void numa_bind(void *base, int64_t bytes, int mode, uint64_t nodes) {
#ifdef SYS_mbind
  unsigned long mask[NUMA_NODES / (8 * sizeof(unsigned long))];
  memcpy(mask, &nodes, sizeof mask);
  (void)syscall(SYS_mbind, base, (unsigned long)bytes, mode, mask, (unsigned long)NUMA_NODES + 1, 0);
#endif
}

void dc__numa_prefer(void *base, int64_t bytes, int node) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  if (node < 0 || node >= NUMA_NODES || bytes < page) return;
  numa_bind(base, bytes / page * page, NUMA_PREFERRED, (uint64_t)1 << node);
}

void dc__numa_interleave(void *base, int64_t bytes, uint64_t nodes) {
  if (nodes & (nodes - 1)) numa_bind(base, bytes, NUMA_INTERLEAVE, nodes);
}
