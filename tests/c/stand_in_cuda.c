/* stand_in_cuda.c: libcuda.so.1 for machines without a GPU: what ops/base/cuda_driver.h names, over memory of this
 * process. Pages that are not mapped can't be touched. Counts what a driver would not tell, and fails where it is asked
 * to. It has the driver's soname: once it is loaded, dlopen("libcuda.so.1") finds it. One thread. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stand_in_cuda.h"

#define API __attribute__((visibility("default")))
enum { OK, INVALID = 1, NO_MEMORY = 2, SHUT_DOWN = 4, BAD_CONTEXT = 201, LAUNCH_FAILED = 719 };
enum { PAGE = 2 << 20, DEVICES = 2, PIECES = 1 << 16 };

API struct stand_in_cuda stand_in_cuda = {.room = (int64_t)1 << 40, .able = 1};

static struct {
  int fd, handle, mappings;
  size_t size;
} cuda_piece[PIECES];
static uint64_t cuda_low = UINT64_MAX,
                cuda_high; /* addresses between which something was written since the last wait */

static int cuda_fails(int64_t which) {
  if (stand_in_cuda.fails != which || stand_in_cuda.after-- > 0) return 0;
  stand_in_cuda.fails = 0;
  return (int)stand_in_cuda.error;
}

static void cuda_drop(int i) {
  if (cuda_piece[i].handle || cuda_piece[i].mappings) return;
  close(cuda_piece[i].fd);
  cuda_piece[i].fd = 0;
  stand_in_cuda.room += (int64_t)cuda_piece[i].size;
  stand_in_cuda.pieces--;
}

/* Whose mapping lies where: the address of a mapping is noted at its piece. */
static uint64_t cuda_at[PIECES];

API int cuInit(unsigned flags) { return flags ? INVALID : OK; }
API int cuGetErrorString(int error, const char **text) {
  *text = error == LAUNCH_FAILED ? "unspecified launch failure" : "an error of the stand-in";
  return OK;
}
API int cuDeviceGetCount(int *count) { return *count = DEVICES, OK; }
API int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < DEVICES ? OK : INVALID; }
API int cuDeviceGetAttribute(int *value, int what, int device) {
  return *value = what == 102 ? (int)stand_in_cuda.able : 0, device < DEVICES ? OK : INVALID;
}
API int cuDevicePrimaryCtxRetain(void **context, int device) {
  stand_in_cuda.contexts++;
  return *context = &cuda_piece[device], OK;
}
API int cuDevicePrimaryCtxRelease_v2(int device) { return stand_in_cuda.contexts--, device < DEVICES ? OK : INVALID; }
API int cuCtxPushCurrent_v2(void *context) {
  if (stand_in_cuda.shut_down) return SHUT_DOWN;
  return stand_in_cuda.current++, context ? OK : INVALID;
}
API int cuCtxPopCurrent_v2(void **context) { return stand_in_cuda.current--, *context = NULL, OK; }
API int cuCtxSynchronize(void) {
  if (!stand_in_cuda.current) return BAD_CONTEXT;
  stand_in_cuda.syncs++;
  cuda_low = UINT64_MAX, cuda_high = 0;
  return cuda_fails(STAND_IN_SYNC);
}
API int cuMemGetInfo_v2(size_t *there, size_t *all) {
  return *there = (size_t)stand_in_cuda.room, *all = (size_t)1 << 40, OK;
}
API int cuMemGetAllocationGranularity(size_t *bytes, const void *what, int which) {
  return *bytes = PAGE, what && !which ? OK : INVALID;
}
API int cuMemAddressReserve(uint64_t *at, size_t size, size_t alignment, uint64_t wanted, unsigned long long flags) {
  if (!size || size % PAGE || alignment || wanted || flags) return INVALID;
  char *base = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return NO_MEMORY;
  char *start = (char *)(((uintptr_t)base + PAGE - 1) / PAGE * PAGE);
  if (start > base) munmap(base, (size_t)(start - base));
  if (base + PAGE > start) munmap(start + size, (size_t)(base + PAGE - start));
  stand_in_cuda.reserved += (int64_t)size;
  return *at = (uint64_t)(uintptr_t)start, OK;
}
API int cuMemAddressFree(uint64_t at, size_t size) {
  stand_in_cuda.reserved -= (int64_t)size;
  return munmap((void *)(uintptr_t)at, size) ? INVALID : OK;
}
API int cuMemCreate(uint64_t *handle, size_t size, const void *what, unsigned long long flags) {
  int i = 0, error = cuda_fails(STAND_IN_CREATE);
  if (error) return error;
  if (!size || size % PAGE || flags || ((const int *)what)[0] != 1 || ((const int *)what)[2] != 1) return INVALID;
  if ((int64_t)size > stand_in_cuda.room) return NO_MEMORY;
  while (i < PIECES && cuda_piece[i].fd) i++;
  if (i == PIECES) return NO_MEMORY;
  cuda_piece[i].fd = memfd_create("stand_in_cuda", MFD_CLOEXEC);
  if (cuda_piece[i].fd <= 0 || ftruncate(cuda_piece[i].fd, (off_t)size)) return NO_MEMORY;
  cuda_piece[i].handle = 1, cuda_piece[i].size = size;
  stand_in_cuda.room -= (int64_t)size, stand_in_cuda.pieces++, stand_in_cuda.creates++;
  return *handle = (uint64_t)i + 1, OK;
}
API int cuMemRelease(uint64_t handle) {
  if (!handle || !cuda_piece[handle - 1].handle) return INVALID;
  cuda_piece[handle - 1].handle = 0;
  return cuda_drop((int)handle - 1), OK;
}
API int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
  int error = cuda_fails(STAND_IN_MAP);
  if (error) return error;
  if (!handle || offset || flags || cuda_piece[handle - 1].size != size) return INVALID;
  void *there = mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, cuda_piece[handle - 1].fd, 0);
  if (there == MAP_FAILED) return NO_MEMORY;
  cuda_piece[handle - 1].mappings = 1, cuda_at[handle - 1] = at;
  return stand_in_cuda.mapped += (int64_t)size, OK;
}
API int cuMemSetAccess(uint64_t at, size_t size, const void *access, size_t count) {
  int error = cuda_fails(STAND_IN_ACCESS);
  if (error) return error;
  if (count != 1 || ((const int *)access)[2] != 3 || !stand_in_cuda.current) return INVALID;
  return mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE) ? INVALID : OK;
}
API int cuMemUnmap(uint64_t at, size_t size) {
  int i = 0;
  while (i < PIECES && !(cuda_piece[i].fd && cuda_piece[i].mappings && cuda_at[i] == at)) i++;
  if (i == PIECES || cuda_piece[i].size != size) return INVALID; /* a piece goes whole */
  if (at < cuda_high && at + size > cuda_low) stand_in_cuda.unsynced++;
  mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  cuda_piece[i].mappings = 0;
  stand_in_cuda.mapped -= (int64_t)size;
  return cuda_drop(i), OK;
}
API int cuMemsetD8Async(uint64_t at, unsigned char value, size_t count, void *stream) {
  int error = cuda_fails(STAND_IN_SET);
  if (error) return error;
  if (!stand_in_cuda.current) return BAD_CONTEXT;
  (void)stream;
  memset((void *)(uintptr_t)at, value, count);
  if (at < cuda_low) cuda_low = at;
  if (at + count > cuda_high) cuda_high = at + count;
  stand_in_cuda.sets++;
  return OK;
}
