/* check.c: what a folder gives, before a run begins: space, permission, O_DIRECT, io_uring, locked memory. */
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

static void check_name_file_system(unsigned long type, char name[16]) {
  static const struct {
    unsigned long type;
    const char *name;
  } known[] = {{0xEF53, "ext4"},    {0x58465342, "xfs"},     {0x9123683E, "btrfs"}, {0x01021994, "tmpfs"},
               {0x6969, "nfs"},     {0x794C7630, "overlay"}, {0x65735546, "fuse"},  {0xF2F52010, "f2fs"},
               {0x2FC12FC1, "zfs"}, {0x0BD00BD0, "lustre"},  {0x00C36400, "ceph"},  {0x47504653, "gpfs"},
               {0x01021997, "9p"},  {0xFF534D42, "cifs"},    {0x858458F6, "ramfs"}};
  snprintf(name, 16, "0x%lX", type);
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
    if (known[i].type == type) snprintf(name, 16, "%s", known[i].name);
}

/* A file without a name: O_TMPFILE, or one that is removed at once where the file system has no such thing. */
int dc__disk_nameless(const char *folder, int *fd) {
  *fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (*fd >= 0) return 0;
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT && errno != EINVAL) return errno;
  char *path = malloc(strlen(folder) + 32);
  if (!path) return ENOMEM;
  sprintf(path, "%s/.deepc-nameless-XXXXXX", folder);
  *fd = mkostemp(path, O_CLOEXEC);
  const int error = *fd < 0 ? errno : 0;
  if (!error) unlink(path);
  free(path);
  return error;
}

/* Not by O_DIRECT's word alone: some file systems take the flag and refuse the transfer. */
static void check_direct(int fd, dc_disk_info *info) {
  void *block = NULL;
  if (posix_memalign(&block, DC_DISK_ALIGN, DC_DISK_ALIGN)) return;
  memset(block, 0, DC_DISK_ALIGN);
  const int flags = fcntl(fd, F_GETFL);
  if (fcntl(fd, F_SETFL, flags | O_DIRECT) || pwrite(fd, block, DC_DISK_ALIGN, 0) != DC_DISK_ALIGN)
    snprintf(info->why_not_direct, sizeof info->why_not_direct, "no O_DIRECT: the file system refuses it (errno %d)",
             errno);
  else info->direct = 1;
  free(block);
}

static void check_uring(dc_disk_info *info) {
  dc__disk_ring *ring;
  const int error = -dc__disk_ring_uring.open(&dc__disk_ring_uring, 1, 1, &ring);
  if (!error) dc__disk_ring_uring.close(ring, false);
  info->uring = !error;
  if (error) snprintf(info->why_not_uring, sizeof info->why_not_uring, "%s", dc__disk_ring_no_uring(error));
}

static int64_t check_limit(int resource) {
  struct rlimit limit;
  if (getrlimit(resource, &limit) || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > INT64_MAX) return INT64_MAX;
  return (int64_t)limit.rlim_cur;
}

static int check_room(const char *folder, int64_t need, int64_t lock, const dc_disk_info *info) {
  const int64_t largest = check_limit(RLIMIT_FSIZE);
  if (need > info->free_bytes)
    return DC_FAIL(DC_E_NOSPC,
                   "%s (%s) has %.3f GB free, %.3f GB are needed: free %.3f GB there, or choose another folder", folder,
                   info->file_system, (double)info->free_bytes / 1e9, (double)need / 1e9,
                   (double)(need - info->free_bytes) / 1e9);
  if (need > largest)
    return DC_FAIL(DC_E_NOSPC, "a file may have %.3f GB here, %.3f GB are needed: raise ulimit -f",
                   (double)largest / 1e9, (double)need / 1e9);
  if (lock > info->lock_bytes)
    return DC_FAIL(DC_E_NOMEM, "%.3f GB of memory may be locked here, %.3f GB are to be: raise ulimit -l",
                   (double)info->lock_bytes / 1e9, (double)lock / 1e9);
  return DC_OK;
}

int dc_disk_check(const char *folder, int64_t need_bytes, int64_t lock_bytes, dc_disk_info *info) {
  dc_disk_info found;
  DC_TRY(DC__SIZED(dc_disk_info, why_not_uring, info, &found));
  const size_t size = info->struct_size;
  if (!folder || !*folder || need_bytes < 0 || lock_bytes < 0)
    return DC_FAIL(DC_E_INVALID, "folder '%s', need_bytes %lld, lock_bytes %lld", folder ? folder : "",
                   (long long)need_bytes, (long long)lock_bytes);
  memset(&found, 0, sizeof found);
  found.struct_size = size;
  struct statx st; /* stat is a symbol of glibc 2.33 */
  struct statfs fs;
  if (statx(AT_FDCWD, folder, 0, STATX_TYPE, &st))
    return DC_FAIL(DC_E_IO, "%s: %s (errno %d); make the folder first", folder, strerror(errno), errno);
  if (!S_ISDIR(st.stx_mode))
    return DC_FAIL(DC_E_IO, "%s is no folder; name the folder that the files are to lie in", folder);
  if (statfs(folder, &fs)) return DC_FAIL(DC_E_IO, "statfs of %s: %s (errno %d)", folder, strerror(errno), errno);
  check_name_file_system((unsigned long)fs.f_type & 0xFFFFFFFFul, found.file_system);
  if (__builtin_mul_overflow((int64_t)fs.f_bavail, (int64_t)fs.f_bsize, &found.free_bytes))
    found.free_bytes = INT64_MAX;
  found.lock_bytes = check_limit(RLIMIT_MEMLOCK);
  int fd;
  const int error = dc__disk_nameless(folder, &fd);
  if (error)
    return DC_FAIL(error == ENOSPC || error == EDQUOT ? DC_E_NOSPC : DC_E_IO,
                   "no file can be made in %s: %s (errno %d); choose a folder that this user may write to, with room",
                   folder, strerror(error), error);
  check_direct(fd, &found);
  close(fd);
  check_uring(&found);
  DC_TRY(check_room(folder, need_bytes, lock_bytes, &found));
  memcpy(info, &found, size < sizeof found ? size : sizeof found);
  return DC_OK;
}
