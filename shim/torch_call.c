/* torch_call.c: one call of a kernel: its error, its tensors, and where the CUDA launchers are. Owns the table of
 * torch's functions (dct__api), which dct_register fills before the first kernel can run and nobody writes after. */
#include "torch_call.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

dct_api dct__api;

/* ---- CUDA launchers: libdeepc_cuda.so beside this library, opened at the first CUDA call ------------------------- */
static pthread_once_t call_cuda_once = PTHREAD_ONCE_INIT;
static dct_cuda_ops call_cuda_table;
static char call_cuda_why[512]; /* "" if the table is filled; written once, under call_cuda_once */

static void call_cuda_load(void) {
  Dl_info info;
  char path[4096];
  if (!dladdr((void *)(uintptr_t)call_cuda_load, &info) || !info.dli_fname) {
    snprintf(call_cuda_why, sizeof call_cuda_why, "dladdr failed");
    return;
  }
  snprintf(path, sizeof path, "%s", info.dli_fname);
  char *slash = strrchr(path, '/');
  snprintf(slash ? slash + 1 : path, sizeof path - (size_t)(slash ? slash + 1 - path : 0), "libdeepc_cuda.so");
  void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    snprintf(
        call_cuda_why, sizeof call_cuda_why,
        "this build of deepc has no CUDA kernels (%s); install the wheel, or build with DEEPC_CUDA=ON where nvcc is",
        dlerror());
    return;
  }
#define DCT_CUDA_LOAD(name)                                                                                           \
  *(void **)&call_cuda_table.name = dlsym(lib, "dc_cuda_" #name);                                                     \
  if (!call_cuda_table.name) {                                                                                        \
    snprintf(call_cuda_why, sizeof call_cuda_why, "%.300s lacks dc_cuda_%s: it is not of this version", path, #name); \
    return;                                                                                                           \
  }
  DCT_CUDA_OPS(DCT_CUDA_LOAD)
#undef DCT_CUDA_LOAD
}

/* NULL with the reason in *why. */
static const dct_cuda_ops *call_cuda_get(const char **why) {
  pthread_once(&call_cuda_once, call_cuda_load);
  *why = call_cuda_why;
  return call_cuda_why[0] ? NULL : &call_cuda_table;
}

/* ---- one call ---------------------------------------------------------------------------------------------------- */
bool dct__fail(dct_call *c, const char *fmt, ...) {
  if (c->error[0]) return false;
  va_list ap;
  va_start(ap, fmt);
  int n = snprintf(c->error, sizeof c->error, "deepc::%s: ", c->op);
  vsnprintf(c->error + n, sizeof c->error - (size_t)n, fmt, ap);
  va_end(ap);
  return false;
}

void dct__begin(dct_call *c, const char *op) {
  memset(c, 0, sizeof *c);
  snprintf(c->op, sizeof c->op, "%s", op);
}

void dct__finish(const dct_call *c, const char *file, int line) {
  const char *slash = strrchr(file, '/');
  if (!c->error[0]) return;
  char text[sizeof c->error];
  memcpy(text, c->error, sizeof text);
  dct__api.aoti_torch_check(false, c->op, slash ? slash + 1 : file, (uint32_t)line, text);
}

static int call_dtype_of(int32_t torch_dtype) {
  if (torch_dtype == dct__api.aoti_torch_dtype_float32()) return DC_F32;
  if (torch_dtype == dct__api.aoti_torch_dtype_bfloat16()) return DC_BF16;
  if (torch_dtype == dct__api.aoti_torch_dtype_float16()) return DC_F16;
  if (torch_dtype == dct__api.aoti_torch_dtype_float64()) return DC_F64;
  if (torch_dtype == dct__api.aoti_torch_dtype_int8()) return DC_I8;
  if (torch_dtype == dct__api.aoti_torch_dtype_uint8() || torch_dtype == dct__api.aoti_torch_dtype_bool()) return DC_U8;
  if (torch_dtype == dct__api.aoti_torch_dtype_int16()) return DC_I16;
  if (torch_dtype == dct__api.aoti_torch_dtype_int32()) return DC_I32;
  if (torch_dtype == dct__api.aoti_torch_dtype_int64()) return DC_I64;
  return -1;
}

bool dct__look_strided(dct_call *c, dct_tensor t, const char *name, dct_view *v) {
  int32_t dtype = -1, device = -1, index = 0;
  memset(v, 0, sizeof *v);
  if (dct__api.aoti_torch_get_numel(t, &v->n) || dct__api.aoti_torch_get_dtype(t, &dtype) ||
      dct__api.aoti_torch_get_device_type(t, &device) || dct__api.aoti_torch_get_device_index(t, &index))
    return dct__fail(c, "argument '%s' can't be read: it is no plain dense tensor", name);
  v->dtype = call_dtype_of(dtype);
  if (v->dtype < 0) return dct__fail(c, "argument '%s' has a dtype that deepc's operators don't take", name);
  if (v->n && dct__api.aoti_torch_get_data_ptr(t, &v->ptr)) return dct__fail(c, "argument '%s' has no storage", name);
  if (!c->have_device) {
    c->have_device = true, c->device = device, c->index = index;
    if (device == dct__api.aoti_torch_device_type_cuda()) {
      const char *why;
      c->cuda = call_cuda_get(&why);
      if (!c->cuda) return dct__fail(c, "%s", why);
      if (!dct__api.aoti_torch_get_current_cuda_stream ||
          dct__api.aoti_torch_get_current_cuda_stream(index, &c->stream))
        return dct__fail(c, "torch has no current CUDA stream for device %d", index);
    } else if (device != dct__api.aoti_torch_device_type_cpu()) {
      return dct__fail(c, "argument '%s' is on a device that is neither cpu nor cuda", name);
    }
  } else if (device != c->device || index != c->index) {
    return dct__fail(c, "argument '%s' is on another device than the arguments before it", name);
  }
  return true;
}

bool dct__look(dct_call *c, dct_tensor t, const char *name, dct_view *v) {
  bool contiguous = false;
  if (!dct__look_strided(c, t, name, v)) return false;
  if (dct__api.aoti_torch_is_contiguous(t, &contiguous))
    return dct__fail(c, "argument '%s' can't be read: it is no plain dense tensor", name);
  return contiguous ? true : dct__fail(c, "argument '%s' is not contiguous; pass %s.contiguous()", name, name);
}

bool dct__status(dct_call *c, int rc) {
  if (rc == DC_OK) return true;
  return dct__fail(c, "%s", c->cuda ? c->cuda->last_error() : dc_last_error());
}

bool dct__same_numel(dct_call *c, const dct_view *a, const char *an, const dct_view *b, const char *bn) {
  if (a->n == b->n) return true;
  return dct__fail(c, "'%s' has %" PRId64 " elements and '%s' has %" PRId64 "; they must agree", an, a->n, bn, b->n);
}

bool dct__list_open(dct_call *c, dct_value value, const char *name, dct_tensors *l) {
  l->handle = (dct_list)(uintptr_t)value, l->item = NULL, l->n = 0;
  size_t n = 0;
  if (dct__api.torch_list_size(l->handle, &n)) return dct__fail(c, "argument '%s' can't be read as a list", name);
  l->item = calloc(n ? n : 1, sizeof *l->item);
  if (!l->item) return dct__fail(c, "out of memory for a list of %zu tensors", n);
  for (size_t i = 0; i < n; i++) {
    dct_value element = 0;
    if (dct__api.torch_list_get_item(l->handle, i, &element))
      return dct__fail(c, "item %zu of '%s' can't be read", i, name);
    l->item[i] = (dct_tensor)(uintptr_t)element;
    l->n = i + 1;
  }
  return true;
}

void dct__list_free(dct_tensors *l) {
  for (size_t i = 0; i < l->n; i++) dct__api.aoti_torch_delete_tensor_object(l->item[i]);
  free(l->item);
  if (l->handle) dct__api.torch_delete_list(l->handle);
}

bool dct__must_be_f32(dct_call *c, const dct_view *v, const char *name) {
  return v->dtype == DC_F32 ? true : dct__fail(c, "'%s' must be float32, got %s", name, dc_dtype_name(v->dtype));
}

void dct__delete_tensors(const dct_value *stack, int n) {
  for (int i = 0; i < n; i++) dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[i]));
}

bool dct__int(dct_call *c, dct_value value, const char *name, int *n) {
  const int64_t wide = (int64_t)value;
  *n = (int)wide;
  return *n == wide ? true : dct__fail(c, "'%s' = %" PRId64 " is outside of 32 bits", name, wide);
}
