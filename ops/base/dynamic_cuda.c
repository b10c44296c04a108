/* dynamic_cuda.c: memory of a GPU that grows and shrinks in place (CUDA's virtual memory management, driver 11.2 and
 * up).
 *
 * Addresses are reserved once. Behind them come pieces of physical memory, mapped one after the other: each at most
 * `slack` of what lies before it (or one page of the driver), so that taking and giving whole pieces keeps what has
 * memory within `slack` of what is used, and a range of 80 GiB has 283 of them. A piece can only be unmapped
 * whole; the driver's handle is released as soon as it is mapped, and its memory goes with the mapping.
 *
 * Owns the addresses, the mappings and one reference to the device's primary context, which it makes current around
 * each call: torch's tensors live in the same. The driver is looked up where it is used: nothing here links to CUDA or
 * needs its headers (tests/c/test_dynamic_cuda.cpp compares the declarations with them).
 *
 * Mapping is no work of a stream. Memory that was never mapped has no users yet, so growing waits for nothing; before
 * memory goes the whole device is waited for. */
#include "cuda_driver.h"
#include "dynamic_sizes.h"

#include <dlfcn.h>
#include <stdlib.h>

struct dc_dynamic_cuda {
  struct dc__cuda_driver driver;
  dc__cuda_allocation what; /* of a piece */
  void *context;
  uint64_t base;
  int device;
  size_t page, length; /* the driver's; of the addresses: whole pages */
  dc__dynamic_sizes sizes;
  double slack;
  size_t *ends; /* [room]: where each piece that is mapped ends */
  size_t pieces, room;
};

static int cuda_error(const struct dc__cuda_driver *driver, int error, const char *what) {
  const char *text = NULL;
  if (driver->cuGetErrorString(error, &text) || !text) text = "an error that the driver does not know";
  return DC_FAIL(DC_E_CUDA,
                 "%s failed: %s (%d); an earlier kernel on this device may be the cause: "
                 "CUDA_LAUNCH_BLOCKING=1 shows which",
                 what, text, error);
}

/* driver->name(...), or the error. */
#define CUDA_TRY(driver, name, ...)                                 \
  do {                                                              \
    int cuda_error_ = (driver)->name(__VA_ARGS__);                  \
    if (cuda_error_) return cuda_error(driver, cuda_error_, #name); \
  } while (0)

static int cuda_load(struct dc__cuda_driver *driver) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* never closed: the driver has threads */
  if (!library) {
    const char *why = dlerror();
    return DC_FAIL(DC_E_UNSUPPORTED, "dc_dynamic_cuda_open: there is no NVIDIA driver here (%s); use the CPU",
                   why ? why : "libcuda.so.1");
  }
#define DC__CUDA_LOOK_UP(name, symbol, ...)                                                                           \
  if (!(*(void **)&driver->name = dlsym(library, symbol)))                                                            \
    return DC_FAIL(DC_E_UNSUPPORTED, "dc_dynamic_cuda_open: the NVIDIA driver has no " symbol "; it must be of CUDA " \
                                     "11.2 or later");
  DC__CUDA_FUNCTIONS(DC__CUDA_LOOK_UP)
#undef DC__CUDA_LOOK_UP
  return DC_OK;
}

/* ---- a call in the device's context ------------------------------------------------------------------------------ */
static int cuda_enter(const dc_dynamic_cuda *d) {
  CUDA_TRY(&d->driver, cuCtxPushCurrent, d->context);
  return DC_OK;
}

static int cuda_leave(const dc_dynamic_cuda *d, int rc) {
  void *was;
  int error = d->driver.cuCtxPopCurrent(&was);
  return rc == DC_OK && error ? cuda_error(&d->driver, error, "cuCtxPopCurrent") : rc;
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */
/* Bytes of the piece that begins at `begin`. */
static size_t cuda_piece(const dc_dynamic_cuda *d, size_t begin) {
  double part = d->slack < DC__DYNAMIC_AHEAD ? d->slack : DC__DYNAMIC_AHEAD;
  size_t bytes = (size_t)((double)begin * part) / d->page * d->page;
  if (bytes < d->page) bytes = d->page;
  return bytes < d->length - begin ? bytes : d->length - begin;
}

static size_t cuda_begin(const dc_dynamic_cuda *d, size_t piece) { return piece ? d->ends[piece - 1] : 0; }

static int cuda_no_memory(const dc_dynamic_cuda *d, size_t bytes) {
  size_t there = 0, all = 0;
  (void)d->driver.cuMemGetInfo(&there, &all);
  return DC_FAIL(DC_E_NOMEM,
                 "dc_dynamic_cuda_resize: GPU %d has no memory for %zu bytes: %zu of its %zu are free (what torch's "
                 "allocator keeps is not: torch.cuda.empty_cache())",
                 d->device, bytes, there, all);
}

static int cuda_map(dc_dynamic_cuda *d, size_t begin, size_t length, size_t asked) {
  const struct dc__cuda_driver *driver = &d->driver;
  uint64_t piece = 0;
  int error = driver->cuMemCreate(&piece, length, &d->what, 0);
  if (error == DC__CUDA_OUT_OF_MEMORY) return cuda_no_memory(d, asked);
  if (error) return cuda_error(driver, error, "cuMemCreate");
  error = driver->cuMemMap(d->base + begin, length, 0, piece, 0);
  int released = driver->cuMemRelease(piece); /* the mapping has it, or nobody */
  if (error) return cuda_error(driver, error, "cuMemMap");
  const dc__cuda_access access = {d->what.location, DC__CUDA_READ_AND_WRITE};
  const char *what = "cuMemRelease";
  if (!(error = released)) error = driver->cuMemSetAccess(d->base + begin, length, &access, 1), what = "cuMemSetAccess";
  if (!error) return DC_OK;
  (void)driver->cuMemUnmap(d->base + begin, length);
  return error == DC__CUDA_OUT_OF_MEMORY ? cuda_no_memory(d, asked) : cuda_error(driver, error, what);
}

/* Unmaps all pieces from the `kept`-th on. Nobody may use them any more. */
static int cuda_unmap(dc_dynamic_cuda *d, size_t kept) {
  while (d->pieces > kept) {
    size_t begin = cuda_begin(d, d->pieces - 1);
    CUDA_TRY(&d->driver, cuMemUnmap, d->base + begin, d->sizes.committed - begin);
    d->sizes.released += (int64_t)(d->sizes.committed - begin);
    d->sizes.committed = begin, d->pieces--;
  }
  return DC_OK;
}

/* Maps one more piece. asked: what the whole call is for. */
static int cuda_add(dc_dynamic_cuda *d, size_t asked) {
  if (d->pieces == d->room) {
    size_t room = d->room ? 2 * d->room : 64, *ends = realloc(d->ends, room * sizeof *ends);
    if (!ends) return DC_FAIL(DC_E_NOMEM, "dc_dynamic_cuda_resize: no memory to note %zu pieces", room);
    d->ends = ends, d->room = room;
  }
  const size_t length = cuda_piece(d, d->sizes.committed);
  DC_TRY(cuda_map(d, d->sizes.committed, length, asked));
  d->ends[d->pieces++] = d->sizes.committed += length;
  d->sizes.granted += (int64_t)length;
  if (d->sizes.committed > d->sizes.most_committed) d->sizes.most_committed = d->sizes.committed;
  return DC_OK;
}

static int cuda_commit(dc_dynamic_cuda *d, size_t bytes) {
  const dc__dynamic_sizes was = d->sizes;
  const size_t before = d->pieces;
  while (d->sizes.committed < bytes) {
    int rc = cuda_add(d, bytes);
    if (rc == DC_OK) continue;
    if (cuda_unmap(d, before) == DC_OK) d->sizes = was;
    return rc;
  }
  d->sizes.commits++;
  return DC_OK;
}

/* How many pieces stay when `bytes` are used. */
static size_t cuda_kept(const dc_dynamic_cuda *d, size_t bytes) {
  size_t kept = d->pieces;
  double most = (double)bytes * (1 + d->slack);
  while (kept && cuda_begin(d, kept - 1) >= bytes && (double)d->ends[kept - 1] > most) kept--;
  return kept;
}

static int cuda_resize(dc_dynamic_cuda *d, size_t bytes, void *stream) {
  size_t kept = cuda_kept(d, bytes);
  if (bytes > d->sizes.committed) {
    DC_TRY(cuda_commit(d, bytes));
  } else if (kept < d->pieces) {
    CUDA_TRY(&d->driver, cuCtxSynchronize);
    DC_TRY(cuda_unmap(d, kept));
    d->sizes.releases++;
  }
  if (bytes > d->sizes.used)
    CUDA_TRY(&d->driver, cuMemsetD8Async, d->base + d->sizes.used, 0, bytes - d->sizes.used, stream);
  dc__dynamic_use(&d->sizes, bytes);
  return DC_OK;
}

/* ---- the surface ------------------------------------------------------------------------------------------------- */
static int cuda_start(dc_dynamic_cuda *d, size_t bytes) {
  const struct dc__cuda_driver *driver = &d->driver;
  int handle = 0, count = 0, able = 0;
  CUDA_TRY(driver, cuInit, 0);
  CUDA_TRY(driver, cuDeviceGetCount, &count);
  if (d->device < 0 || d->device >= count)
    return DC_FAIL(DC_E_INVALID, "dc_dynamic_cuda_open: there is no GPU %d: %d are visible", d->device, count);
  CUDA_TRY(driver, cuDeviceGet, &handle, d->device);
  CUDA_TRY(driver, cuDeviceGetAttribute, &able, DC__CUDA_HAS_VIRTUAL_MEMORY, handle);
  if (!able)
    return DC_FAIL(DC_E_UNSUPPORTED, "dc_dynamic_cuda_open: GPU %d has no virtual memory management; use the CPU",
                   d->device);
  d->what = (dc__cuda_allocation){.type = DC__CUDA_PINNED, .location = {DC__CUDA_OF_DEVICE, handle}};
  CUDA_TRY(driver, cuMemGetAllocationGranularity, &d->page, &d->what, DC__CUDA_LEAST);
  d->length = dc__dynamic_up(bytes, d->page);
  CUDA_TRY(driver, cuDevicePrimaryCtxRetain, &d->context, handle);
  int error = driver->cuMemAddressReserve(&d->base, d->length, 0, 0, 0);
  if (!error) return DC_OK;
  d->base = 0;
  if (error != DC__CUDA_OUT_OF_MEMORY && error != DC__CUDA_INVALID)
    return cuda_error(driver, error, "cuMemAddressReserve");
  return DC_FAIL(DC_E_NOMEM, "dc_dynamic_cuda_open: no addresses for %zu bytes on GPU %d; reserve less", bytes,
                 d->device);
}

int dc_dynamic_cuda_open(int device, size_t bytes, double slack, dc_dynamic_cuda **out, void **at) {
  DC_TRY(dc__dynamic_check_open("dc_dynamic_cuda_open", bytes, slack, out, at));
  dc_dynamic_cuda *d = calloc(1, sizeof *d);
  if (!d) return DC_FAIL(DC_E_NOMEM, "dc_dynamic_cuda_open: no memory to note a range of %zu bytes", bytes);
  d->device = device, d->sizes.reserved = bytes, d->slack = slack;
  int rc = cuda_load(&d->driver);
  if (rc == DC_OK && (rc = cuda_start(d, bytes)) != DC_OK && d->context)
    (void)d->driver.cuDevicePrimaryCtxRelease(d->what.location.id);
  if (rc != DC_OK) {
    free(d);
    return rc;
  }
  *at = (void *)(uintptr_t)d->base; /* NOLINT: an address of the GPU, never read here */
  *out = d;
  return DC_OK;
}

int dc_dynamic_cuda_resize(dc_dynamic_cuda *d, size_t bytes, void *stream) {
  if (!d) return DC_FAIL(DC_E_INVALID, "dc_dynamic_cuda_resize: the range is NULL");
  if (bytes > d->sizes.reserved)
    return DC_FAIL(DC_E_INVALID,
                   "dc_dynamic_cuda_resize: %zu bytes are more than the %zu that were reserved; reserve more", bytes,
                   d->sizes.reserved);
  DC_TRY(cuda_enter(d));
  return cuda_leave(d, cuda_resize(d, bytes, stream));
}

int dc_dynamic_cuda_read(const dc_dynamic_cuda *d, struct dc_dynamic_stats *out) {
  return dc__dynamic_tell("dc_dynamic_cuda_read", d ? &d->sizes : NULL, out);
}

int dc_dynamic_cuda_close(dc_dynamic_cuda *d) {
  if (!d) return DC_OK;
  const struct dc__cuda_driver *driver = &d->driver;
  void *was;
  const char *what = "cuCtxPushCurrent";
  int error = driver->cuCtxPushCurrent(d->context), rc = DC_OK;
  if (!error) {
    what = "cuCtxSynchronize";
    error = driver->cuCtxSynchronize();
    /* a kernel that failed has ended too: its memory can go all the same */
    rc = cuda_unmap(d, 0);
    int freed = driver->cuMemAddressFree(d->base, d->length);
    if (!error) error = freed, what = "cuMemAddressFree";
    (void)driver->cuCtxPopCurrent(&was);
    (void)driver->cuDevicePrimaryCtxRelease(d->what.location.id);
  }
  if (error == DC__CUDA_SHUT_DOWN) rc = DC_OK;
  else if (rc == DC_OK && error) rc = cuda_error(driver, error, what);
  free(d->ends);
  free(d);
  return rc;
}
