/* torch_call.h: what the kernels of torch.ops.deepc.* share: the CUDA launchers, one call with its error, views of
 * tensors and lists. Included by the files that define kernels (torch_ops.c, torch_fused.c); each has its own copy of
 * the table `api`. */
#ifndef DEEPC_TORCH_CALL_H
#define DEEPC_TORCH_CALL_H

#include "base/base.h"
#include "ops.h"
#include "torch_abi.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A row of the table of operators. */
typedef struct dct_operator {
  const char *name, *schema;
  dct_kernel kernel;
} dct_operator;
/* The operators of torch_fused.c. NULL, or what torch lacks. */
const char *dct__fused(const dct_operator **operators, size_t *count);

static dct_api api;

/* ---- CUDA launchers: libdeepc_cuda.so beside this library, opened at the first CUDA call ------------------------- */
typedef struct cuda_ops {
  int (*cast)(void *, int, const void *, int, float, int64_t, void *stream);
  int (*scale)(void *, int, float, int64_t, void *stream);
  int (*axpy)(float *, float, const void *, int, int64_t, void *stream);
  int (*sqnorm)(const void *, int, int64_t, double *, void *stream);
  int (*copy)(void *, const void *, int64_t, void *stream);
  int (*reduce)(void *, const void *const *, int, int, int, int64_t, void *stream);
  int (*reduce_acc)(float *, const void *const *, int, int, int64_t, int, double *, void *stream);
  int (*adamw)(const dc_adamw_args *, int64_t, void *stream);
  int (*norm)(const dc_norm_args *, void *stream);
  int (*norm_grad)(const dc_norm_grad_args *, void *stream);
  int (*swiglu)(const dc_swiglu_args *, void *stream);
  int (*swiglu_grad)(const dc_swiglu_grad_args *, void *stream);
  int (*gelu)(const dc_gelu_args *, void *stream);
  int (*gelu_grad)(const dc_gelu_grad_args *, void *stream);
  int (*xent)(const dc_xent_args *, void *stream);
  int (*rotary)(const dc_rotary_args *, void *stream);
  const char *(*last_error)(void);
} cuda_ops;

static inline const cuda_ops *cuda_get(char *why, size_t size) {
  static cuda_ops table;
  static int state; /* 0: not tried, 1: loaded; torch serialises nothing here, but loading twice is harmless */
  if (state == 1) return &table;
  Dl_info info;
  char path[4096];
  if (!dladdr((void *)(uintptr_t)cuda_get, &info) || !info.dli_fname) return snprintf(why, size, "dladdr failed"), NULL;
  snprintf(path, sizeof path, "%s", info.dli_fname);
  char *slash = strrchr(path, '/');
  snprintf(slash ? slash + 1 : path, sizeof path - (size_t)(slash ? slash + 1 - path : 0), "libdeepc_cuda.so");
  void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib)
    return snprintf(why, size,
                    "this build of deepc has no CUDA kernels (%s); install the wheel, or build with DEEPC_CUDA=ON "
                    "where nvcc is",
                    dlerror()),
           NULL;
  cuda_ops t;
  struct {
    const char *name;
    void **slot;
  } rows[] = {{"dc_cuda_cast", (void **)&t.cast},
              {"dc_cuda_scale", (void **)&t.scale},
              {"dc_cuda_axpy", (void **)&t.axpy},
              {"dc_cuda_sqnorm", (void **)&t.sqnorm},
              {"dc_cuda_copy", (void **)&t.copy},
              {"dc_cuda_reduce", (void **)&t.reduce},
              {"dc_cuda_reduce_acc", (void **)&t.reduce_acc},
              {"dc_cuda_adamw", (void **)&t.adamw},
              {"dc_cuda_norm", (void **)&t.norm},
              {"dc_cuda_norm_grad", (void **)&t.norm_grad},
              {"dc_cuda_swiglu", (void **)&t.swiglu},
              {"dc_cuda_swiglu_grad", (void **)&t.swiglu_grad},
              {"dc_cuda_gelu", (void **)&t.gelu},
              {"dc_cuda_gelu_grad", (void **)&t.gelu_grad},
              {"dc_cuda_cross_entropy_rows", (void **)&t.xent},
              {"dc_cuda_rotary", (void **)&t.rotary},
              {"dc_cuda_last_error", (void **)&t.last_error}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    *rows[i].slot = dlsym(lib, rows[i].name);
    if (!*rows[i].slot)
      return snprintf(why, size, "%.300s lacks %s: it is not of this version", path, rows[i].name), NULL;
  }
  table = t;
  state = 1;
  return &table;
}

/* ---- one call ---------------------------------------------------------------------------------------------------- */
#define MAX_NAME 32
typedef struct call {
  char op[MAX_NAME];
  char error[640]; /* "" while all is well */
  int device;      /* device type of the first tensor; all must agree */
  int index;
  bool have_device;
  void *stream;
  const cuda_ops *cuda; /* NULL on CPU */
} call;

static inline bool fail(call *c, const char *fmt, ...) {
  if (c->error[0]) return false;
  va_list ap;
  va_start(ap, fmt);
  int n = snprintf(c->error, sizeof c->error, "deepc::%s: ", c->op);
  vsnprintf(c->error + n, sizeof c->error - (size_t)n, fmt, ap);
  va_end(ap);
  return false;
}

static inline void begin(call *c, const char *op) {
  memset(c, 0, sizeof *c);
  snprintf(c->op, sizeof c->op, "%s", op);
}

/* Call last. Raises RuntimeError in the caller if the call failed. */
static inline void finish(const call *c, int line) {
  if (c->error[0]) {
    char text[sizeof c->error];
    memcpy(text, c->error, sizeof text);
    api.aoti_torch_check(false, c->op, "torch_ops.c", (uint32_t)line, text);
  }
}

static inline int dtype_of(int32_t torch_dtype) {
  if (torch_dtype == api.aoti_torch_dtype_float32()) return DC_F32;
  if (torch_dtype == api.aoti_torch_dtype_bfloat16()) return DC_BF16;
  if (torch_dtype == api.aoti_torch_dtype_float16()) return DC_F16;
  if (torch_dtype == api.aoti_torch_dtype_float64()) return DC_F64;
  if (torch_dtype == api.aoti_torch_dtype_int8()) return DC_I8;
  if (torch_dtype == api.aoti_torch_dtype_uint8() || torch_dtype == api.aoti_torch_dtype_bool()) return DC_U8;
  if (torch_dtype == api.aoti_torch_dtype_int16()) return DC_I16;
  if (torch_dtype == api.aoti_torch_dtype_int32()) return DC_I32;
  if (torch_dtype == api.aoti_torch_dtype_int64()) return DC_I64;
  return -1;
}

typedef struct view {
  void *ptr;
  int64_t n;
  int dtype;
} view;

/* Any dense tensor, with strides if it has some. */
static inline bool look_strided(call *c, dct_tensor t, const char *name, view *v) {
  int32_t dtype = -1, device = -1, index = 0;
  memset(v, 0, sizeof *v);
  if (api.aoti_torch_get_numel(t, &v->n) || api.aoti_torch_get_dtype(t, &dtype) ||
      api.aoti_torch_get_device_type(t, &device) || api.aoti_torch_get_device_index(t, &index))
    return fail(c, "argument '%s' can't be read: it is no plain dense tensor", name);
  v->dtype = dtype_of(dtype);
  if (v->dtype < 0) return fail(c, "argument '%s' has a dtype that deepc's operators don't take", name);
  if (v->n && api.aoti_torch_get_data_ptr(t, &v->ptr)) return fail(c, "argument '%s' has no storage", name);
  if (!c->have_device) {
    c->have_device = true, c->device = device, c->index = index;
    if (device == api.aoti_torch_device_type_cuda()) {
      char why[512] = "";
      c->cuda = cuda_get(why, sizeof why);
      if (!c->cuda) return fail(c, "%s", why);
      if (!api.aoti_torch_get_current_cuda_stream || api.aoti_torch_get_current_cuda_stream(index, &c->stream))
        return fail(c, "torch has no current CUDA stream for device %d", index);
    } else if (device != api.aoti_torch_device_type_cpu()) {
      return fail(c, "argument '%s' is on a device that is neither cpu nor cuda", name);
    }
  } else if (device != c->device || index != c->index) {
    return fail(c, "argument '%s' is on another device than the arguments before it", name);
  }
  return true;
}

static inline bool look(call *c, dct_tensor t, const char *name, view *v) {
  bool contiguous = false;
  if (!look_strided(c, t, name, v)) return false;
  if (api.aoti_torch_is_contiguous(t, &contiguous))
    return fail(c, "argument '%s' can't be read: it is no plain dense tensor", name);
  return contiguous ? true : fail(c, "argument '%s' is not contiguous; pass %s.contiguous()", name, name);
}

static inline bool status(call *c, int rc) {
  if (rc == DC_OK) return true;
  return fail(c, "%s", c->cuda ? c->cuda->last_error() : dc_last_error());
}

static inline bool same_numel(call *c, const view *a, const char *an, const view *b, const char *bn) {
  if (a->n == b->n) return true;
  return fail(c, "'%s' has %" PRId64 " elements and '%s' has %" PRId64 "; they must agree", an, a->n, bn, b->n);
}

/* A tensor list: handles are held (and owned) until list_free. */
typedef struct list {
  dct_list handle;
  dct_tensor *item;
  size_t n;
} list;

static inline bool list_open(call *c, dct_value value, const char *name, list *l) {
  l->handle = (dct_list)(uintptr_t)value, l->item = NULL, l->n = 0;
  size_t n = 0;
  if (api.torch_list_size(l->handle, &n)) return fail(c, "argument '%s' can't be read as a list", name);
  l->item = calloc(n ? n : 1, sizeof *l->item);
  if (!l->item) return fail(c, "out of memory for a list of %zu tensors", n);
  for (size_t i = 0; i < n; i++) {
    dct_value element = 0;
    if (api.torch_list_get_item(l->handle, i, &element)) return fail(c, "item %zu of '%s' can't be read", i, name);
    l->item[i] = (dct_tensor)(uintptr_t)element;
    l->n = i + 1;
  }
  return true;
}

static inline void list_free(list *l) {
  for (size_t i = 0; i < l->n; i++) api.aoti_torch_delete_tensor_object(l->item[i]);
  free(l->item);
  if (l->handle) api.torch_delete_list(l->handle);
}

static inline double as_double(dct_value v) {
  double d;
  memcpy(&d, &v, sizeof d);
  return d;
}
static inline bool as_bool(dct_value v) {
  bool b;
  memcpy(&b, &v, sizeof b);
  return b;
}
static inline dct_tensor as_tensor(dct_value v) { return (dct_tensor)(uintptr_t)v; }

static inline bool must_be_f32(call *c, const view *v, const char *name) {
  return v->dtype == DC_F32 ? true : fail(c, "'%s' must be float32, got %s", name, dc_dtype_name(v->dtype));
}

static inline void delete_tensors(const dct_value *stack, int n) {
  for (int i = 0; i < n; i++) api.aoti_torch_delete_tensor_object(as_tensor(stack[i]));
}

#endif
