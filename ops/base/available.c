/* available.c: how much memory can still be had: MemAvailable, and the limits on the whole path of the memory cgroup.
 */
#include "base.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct path {
  char text[PATH_MAX];
};

/* False if it does not fit, so that a cut path is never opened. */
__attribute__((format(printf, 2, 3))) static bool avail_make_path(struct path *path, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  int n = vsnprintf(path->text, sizeof path->text, fmt, args);
  va_end(args);
  return n >= 0 && n < (int)sizeof path->text;
}

/* The number alone in dir/name. False if the file is missing or says something else ("max": no limit). */
static bool avail_read_number(const char *dir, const char *name, int64_t *value) {
  struct path path;
  if (!avail_make_path(&path, "%s/%s", dir, name)) return false;
  FILE *file = fopen(path.text, "re");
  if (!file) return false;
  unsigned long long number;
  bool ok = fscanf(file, "%llu", &number) == 1;
  fclose(file);
  if (ok) *value = number > INT64_MAX ? INT64_MAX : (int64_t)number;
  return ok;
}

/* The number after `key` in dir/name, a file of "key value" lines. */
static bool avail_read_keyed(const char *dir, const char *name, const char *key, int64_t *value) {
  struct path path;
  if (!avail_make_path(&path, "%s/%s", dir, name)) return false;
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
static const struct cgroup_version avail_versions[2] = {
    {"cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
    {"cgroup2", "memory.max", "memory.current", "inactive_file"},
};

static void avail_lower(int64_t *least, int64_t value) {
  if (value < 0) value = 0;
  if (value < *least) *least = value;
}

/* What one cgroup's limit leaves. Clean page cache counts as usage but goes before anything fails. */
static void avail_apply_limit(const struct cgroup_version *version, const char *dir, int64_t *least) {
  int64_t limit, usage, reclaimable = 0;
  if (!avail_read_number(dir, version->limit, &limit) || !avail_read_number(dir, version->usage, &usage)) return;
  (void)avail_read_keyed(dir, "memory.stat", version->reclaimable, &reclaimable);
  if (reclaimable > usage) reclaimable = usage;
  avail_lower(least, limit - (usage - reclaimable));
}

/* Has the comma-separated list the word? */
static bool avail_has_word(const char *list, const char *word) {
  size_t length = strlen(word);
  for (const char *at = list; (at = strstr(at, word)); at += length)
    if ((at == list || at[-1] == ',') && (!at[length] || at[length] == ',')) return true;
  return false;
}

/* Path of this process in the hierarchy, from a line "id:controllers:path" of /proc/self/cgroup. */
static bool avail_cgroup_path(const char *proc, int version, struct path *result) {
  struct path path;
  if (!avail_make_path(&path, "%s/self/cgroup", proc)) return false;
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
    found = (version ? !*controllers : avail_has_word(controllers, "memory")) && avail_make_path(result, "%s", where);
  }
  free(line);
  fclose(file);
  return found;
}

/* Where that hierarchy is mounted and which of its directories is the mount's root, from /proc/self/mountinfo:
 * "36 35 98:0 /root /mount/point options... - fstype source superoptions" (proc(5)). */
static bool avail_cgroup_mount(const char *proc, int version, struct path *root, struct path *point) {
  struct path path;
  if (!avail_make_path(&path, "%s/self/mountinfo", proc)) return false;
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
    found = !strcmp(fstype, avail_versions[version].fstype) && (version || avail_has_word(super, "memory"));
  }
  free(line);
  fclose(file);
  return found;
}

/* Limits hold on every level from the process's own cgroup up to the mount. */
static void avail_apply_hierarchy(const char *proc, int version, int64_t *least) {
  struct path own, root, point, dir;
  if (!avail_cgroup_path(proc, version, &own) || !avail_cgroup_mount(proc, version, &root, &point)) return;
  /* In a container the mount shows only a part of the tree; a path outside of it is seen as the mount's own root. */
  size_t skip = strcmp(root.text, "/") ? strlen(root.text) : 0;
  bool inside = !strncmp(own.text, root.text, skip) && (!own.text[skip] || own.text[skip] == '/');
  if (strstr(own.text, "/..")) inside = false;
  if (!avail_make_path(&dir, "%s%s", point.text, inside ? own.text + skip : "")) return;
  size_t shortest = strlen(point.text);
  for (;;) {
    avail_apply_limit(&avail_versions[version], dir.text, least);
    char *slash = strrchr(dir.text, '/');
    if (!slash || (size_t)(slash - dir.text) < shortest) return;
    *slash = 0;
  }
}

int dc_mem_available_in(const char *proc, int64_t *bytes) {
  if (!proc || !bytes) return DC_FAIL(DC_E_INVALID, "proc and bytes must not be NULL");
  int64_t least, kib;
  if (avail_read_keyed(proc, "meminfo", "MemAvailable:", &kib)) {
    least = kib > INT64_MAX / 1024 ? INT64_MAX : kib * 1024;
  } else {
    long pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    if (pages < 0 || page < 0) return DC_FAIL(DC_E_SYSTEM, "no MemAvailable in %s/meminfo; mount procfs", proc);
    least = (int64_t)pages * page;
  }
  for (int version = 0; version < 2; version++) avail_apply_hierarchy(proc, version, &least);
  *bytes = least;
  return DC_OK;
}

int dc_mem_available(int64_t *bytes) { return dc_mem_available_in("/proc", bytes); }
