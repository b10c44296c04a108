/* torch_ops.c: torch.ops.deepc.*: one boxed kernel per operator, for the CPU and CUDA keys. A kernel turns handles into
 * pointers and counts, checks what only torch knows (device, contiguity, dtype), and calls the C core or its CUDA launchers.
 * Fake kernels and autograd are Python's (python/deepc/ops.py): under fake tensors sizes are symbolic and can't be read in C.
 *
 * Rules of the ABI that this file follows: a boxed kernel owns its inputs (each tensor and list handle is deleted on every path);
 * raising is a C++ exception through our frame (-fexceptions), done last, after everything is freed. */
#include "base/base.h"
#include "ops.h"
#include "torch_abi.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dct_api api;

/* ---- CUDA launchers: libdeepc_cuda.so beside this library, opened at the first CUDA call ---------------------------------- */
typedef struct cuda_ops {
  int (*cast)(void *, int, const void *, int, float, int64_t, void *stream);
  int (*scale)(void *, int, float, int64_t, void *stream);
  int (*axpy)(float *, float, const void *, int, int64_t, void *stream);
  int (*sqnorm)(const void *, int, int64_t, double *, void *stream);
  int (*copy)(void *, const void *, int64_t, void *stream);
  int (*reduce)(void *, const void *const *, int, int, int, int64_t, void *stream);
  int (*reduce_acc)(float *, const void *const *, int, int, int64_t, int, double *, void *stream);
  int (*adamw)(const dc_adamw_args *, int64_t, void *stream);
  const char *(*last_error)(void);
} cuda_ops;

static const cuda_ops *cuda_get(char *why, size_t size) {
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
  if (!lib) return snprintf(why, size, "this build of deepc has no CUDA kernels (%s); build it where nvcc is installed", dlerror()), NULL;
  cuda_ops t;
  struct { const char *name; void **slot; } rows[] = {
      {"dc_cuda_cast", (void **)&t.cast},     {"dc_cuda_scale", (void **)&t.scale},
      {"dc_cuda_axpy", (void **)&t.axpy},     {"dc_cuda_sqnorm", (void **)&t.sqnorm},
      {"dc_cuda_copy", (void **)&t.copy},     {"dc_cuda_reduce", (void **)&t.reduce},
      {"dc_cuda_reduce_acc", (void **)&t.reduce_acc}, {"dc_cuda_adamw", (void **)&t.adamw},
      {"dc_cuda_last_error", (void **)&t.last_error}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    *rows[i].slot = dlsym(lib, rows[i].name);
    if (!*rows[i].slot) return snprintf(why, size, "%s lacks %s: it is not of this version", path, rows[i].name), NULL;
  }
  table = t;
  state = 1;
  return &table;
}

/* ---- one call ------------------------------------------------------------------------------------------------------------ */
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

static bool fail(call *c, const char *fmt, ...) {
  if (c->error[0]) return false;
  va_list ap;
  va_start(ap, fmt);
  int n = snprintf(c->error, sizeof c->error, "deepc::%s: ", c->op);
  vsnprintf(c->error + n, sizeof c->error - (size_t)n, fmt, ap);
  va_end(ap);
  return false;
}

static void begin(call *c, const char *op) {
  memset(c, 0, sizeof *c);
  snprintf(c->op, sizeof c->op, "%s", op);
}

/* Call last. Raises RuntimeError in the caller if the call failed. */
static void finish(const call *c, int line) {
  if (c->error[0]) {
    char text[sizeof c->error];
    memcpy(text, c->error, sizeof text);
    api.aoti_torch_check(false, c->op, "torch_ops.c", (uint32_t)line, text);
  }
}

static int dtype_of(int32_t torch_dtype) {
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

typedef struct view { void *ptr; int64_t n; int dtype; } view;

static bool look(call *c, dct_tensor t, const char *name, view *v) {
  int32_t dtype = -1, device = -1, index = 0;
  bool contiguous = false;
  memset(v, 0, sizeof *v);
  if (api.aoti_torch_get_numel(t, &v->n) || api.aoti_torch_get_dtype(t, &dtype) || api.aoti_torch_get_device_type(t, &device) ||
      api.aoti_torch_get_device_index(t, &index) || api.aoti_torch_is_contiguous(t, &contiguous))
    return fail(c, "argument '%s' can't be read: it is no plain dense tensor", name);
  if (!contiguous) return fail(c, "argument '%s' is not contiguous; pass %s.contiguous()", name, name);
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

static bool status(call *c, int rc) {
  if (rc == DC_OK) return true;
  return fail(c, "%s", c->cuda ? c->cuda->last_error() : dc_last_error());
}

static bool same_numel(call *c, const view *a, const char *an, const view *b, const char *bn) {
  if (a->n == b->n) return true;
  return fail(c, "'%s' has %" PRId64 " elements and '%s' has %" PRId64 "; they must agree", an, a->n, bn, b->n);
}

/* A tensor list: handles are held (and owned) until list_free. */
typedef struct list { dct_list handle; dct_tensor *item; size_t n; } list;

static bool list_open(call *c, dct_value value, const char *name, list *l) {
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

static void list_free(list *l) {
  for (size_t i = 0; i < l->n; i++) api.aoti_torch_delete_tensor_object(l->item[i]);
  free(l->item);
  if (l->handle) api.torch_delete_list(l->handle);
}

static double as_double(dct_value v) { double d; memcpy(&d, &v, sizeof d); return d; }
static bool as_bool(dct_value v) { bool b; memcpy(&b, &v, sizeof b); return b; }
static dct_tensor as_tensor(dct_value v) { return (dct_tensor)(uintptr_t)v; }

/* ---- operators ------------------------------------------------------------------------------------------------------------- */
static void cast_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "cast_tensor");
  view src, dst;
  if (look(&c, as_tensor(stack[0]), "src", &src) && look(&c, as_tensor(stack[1]), "dst", &dst) && same_numel(&c, &src, "src", &dst, "dst")) {
    float scale = (float)as_double(stack[2]);
    status(&c, c.cuda ? c.cuda->cast(dst.ptr, dst.dtype, src.ptr, src.dtype, scale, src.n, c.stream)
                      : dc_cast(dst.ptr, dst.dtype, src.ptr, src.dtype, scale, src.n));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  api.aoti_torch_delete_tensor_object(as_tensor(stack[1]));
  finish(&c, __LINE__);
}

static void scale_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "scale_tensor");
  view x;
  if (look(&c, as_tensor(stack[0]), "x", &x)) {
    float a = (float)as_double(stack[1]);
    status(&c, c.cuda ? c.cuda->scale(x.ptr, x.dtype, a, x.n, c.stream) : dc_scale(x.ptr, x.dtype, a, x.n));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  finish(&c, __LINE__);
}

static void add_scaled(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "add_scaled");
  view y, x;
  if (look(&c, as_tensor(stack[0]), "y", &y) && look(&c, as_tensor(stack[1]), "x", &x) && same_numel(&c, &y, "y", &x, "x")) {
    float a = (float)as_double(stack[2]);
    if (y.dtype != DC_F32) fail(&c, "'y' must be float32, got %s", dc_dtype_name(y.dtype));
    else status(&c, c.cuda ? c.cuda->axpy(y.ptr, a, x.ptr, x.dtype, x.n, c.stream) : dc_axpy(y.ptr, a, x.ptr, x.dtype, x.n));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  api.aoti_torch_delete_tensor_object(as_tensor(stack[1]));
  finish(&c, __LINE__);
}

static void copy_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "copy_tensor");
  view src, dst;
  if (look(&c, as_tensor(stack[0]), "src", &src) && look(&c, as_tensor(stack[1]), "dst", &dst) && same_numel(&c, &src, "src", &dst, "dst")) {
    int64_t bytes = src.n * (int64_t)dc_dtype_size(src.dtype);
    if (src.dtype != dst.dtype)
      fail(&c, "'src' is %s and 'dst' is %s; use cast_tensor", dc_dtype_name(src.dtype), dc_dtype_name(dst.dtype));
    else
      status(&c, c.cuda ? c.cuda->copy(dst.ptr, src.ptr, bytes, c.stream) : dc_copy(dst.ptr, src.ptr, bytes));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  api.aoti_torch_delete_tensor_object(as_tensor(stack[1]));
  finish(&c, __LINE__);
}

static void norm_squared(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "norm_squared");
  view x;
  dct_tensor out = NULL;
  if (look(&c, as_tensor(stack[0]), "x", &x)) {
    int64_t size = dc_sqnorm_blocks(x.n), stride = 1;
    void *partial = NULL;
    if (api.aoti_torch_empty_strided(1, &size, &stride, api.aoti_torch_dtype_float64(), c.device, c.index, &out))
      fail(&c, "torch could not allocate %" PRId64 " partial sums", size);
    else if (size && api.aoti_torch_get_data_ptr(out, &partial))
      fail(&c, "the result has no storage");
    else
      status(&c, c.cuda ? c.cuda->sqnorm(x.ptr, x.dtype, x.n, partial, c.stream) : dc_sqnorm(x.ptr, x.dtype, x.n, partial));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  if (c.error[0] && out) api.aoti_torch_delete_tensor_object(out);
  else stack[0] = (dct_value)(uintptr_t)out;
  finish(&c, __LINE__);
}

/* Views of a list of equally long tensors of one dtype; *ptr is owned (free). */
static bool look_all(call *c, const list *l, const char *name, const view *like, const char *like_name, int dtype, const void ***ptr) {
  *ptr = calloc(l->n ? l->n : 1, sizeof **ptr);
  if (!*ptr) return fail(c, "out of memory for %zu pointers", l->n);
  for (size_t i = 0; i < l->n; i++) {
    view v;
    if (!look(c, l->item[i], name, &v) || !same_numel(c, &v, name, like, like_name)) return false;
    if (dtype >= 0 && v.dtype != dtype)
      return fail(c, "item %zu of '%s' is %s, expected %s", i, name, dc_dtype_name(v.dtype), dc_dtype_name(dtype));
    (*ptr)[i] = v.ptr;
  }
  return true;
}

static void reduce_tensors(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "reduce_tensors");
  view dst;
  list srcs;
  const void **ptr = NULL;
  bool ok = list_open(&c, stack[1], "srcs", &srcs) && look(&c, as_tensor(stack[0]), "dst", &dst);
  int op = (int)(int64_t)stack[2];
  if (ok && look_all(&c, &srcs, "srcs", &dst, "dst", dst.dtype, &ptr))
    status(&c, c.cuda ? c.cuda->reduce(dst.ptr, ptr, (int)srcs.n, dst.dtype, op, dst.n, c.stream)
                      : dc_reduce(dst.ptr, ptr, (int)srcs.n, dst.dtype, op, dst.n));
  free(ptr);
  list_free(&srcs);
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  finish(&c, __LINE__);
}

static void accumulate_tensors(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "accumulate_tensors");
  view acc, partial, first;
  list srcs;
  const void **ptr = NULL;
  bool ok = list_open(&c, stack[1], "srcs", &srcs) && look(&c, as_tensor(stack[0]), "acc", &acc) && look(&c, as_tensor(stack[3]), "partial", &partial);
  if (ok && srcs.n == 0) ok = fail(&c, "'srcs' is empty");
  if (ok && (acc.dtype != DC_F32 || partial.dtype != DC_F64)) ok = fail(&c, "'acc' must be float32 and 'partial' float64");
  if (ok && partial.n != 0 && partial.n != dc_sqnorm_blocks(acc.n))
    ok = fail(&c, "'partial' has %" PRId64 " elements; expected 0 (no norm) or %" PRId64, partial.n, dc_sqnorm_blocks(acc.n));
  if (ok && look(&c, srcs.item[0], "srcs", &first) && look_all(&c, &srcs, "srcs", &acc, "acc", first.dtype, &ptr)) {
    double *p = partial.n ? partial.ptr : NULL;
    int assign = as_bool(stack[2]);
    status(&c, c.cuda ? c.cuda->reduce_acc(acc.ptr, ptr, (int)srcs.n, first.dtype, acc.n, assign, p, c.stream)
                      : dc_reduce_acc(acc.ptr, ptr, (int)srcs.n, first.dtype, acc.n, assign, p));
  }
  free(ptr);
  list_free(&srcs);
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  api.aoti_torch_delete_tensor_object(as_tensor(stack[3]));
  finish(&c, __LINE__);
}

static bool adamw_args(call *c, const list *l, const dct_value *stack, dc_adamw_args *args) {
  static const char *const names[6] = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "lowps"};
  for (int k = 1; k < 6; k++)
    if (l[k].n != l[0].n && !(k >= 4 && l[k].n == 0))
      return fail(c, "'%s' has %zu tensors and 'params' has %zu", names[k], l[k].n, l[0].n);
  for (size_t i = 0; i < l[0].n; i++) {
    view v[6];
    memset(v, 0, sizeof v);
    for (int k = 0; k < 6; k++) {
      if (l[k].n == 0) continue;
      if (!look(c, l[k].item[i], names[k], &v[k]) || !same_numel(c, &v[k], names[k], &v[0], "params")) return false;
    }
    if (v[2].dtype != v[3].dtype || (l[4].n && v[4].dtype != v[2].dtype)) return fail(c, "the moments of tensor %zu differ in dtype", i);
    args[i] = (dc_adamw_args){
        .param = v[0].ptr, .grad = v[1].ptr, .exp_avg = v[2].ptr, .exp_avg_sq = v[3].ptr, .max_exp_avg_sq = v[4].ptr, .lowp = v[5].ptr,
        .n = v[0].n, .lr = as_double(stack[6]), .beta1 = as_double(stack[7]), .beta2 = as_double(stack[8]), .eps = as_double(stack[9]),
        .weight_decay = as_double(stack[10]), .grad_scale = as_double(stack[11]), .step = (int64_t)stack[12],
        .param_dtype = v[0].dtype, .grad_dtype = v[1].dtype, .state_dtype = v[2].dtype, .lowp_dtype = l[5].n ? v[5].dtype : DC_F32,
        .flags = as_bool(stack[13]) ? DC_ADAMW_DECOUPLED : 0};
  }
  return true;
}

static void step_adamw(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "step_adamw");
  list l[6];
  memset(l, 0, sizeof l);
  static const char *const names[6] = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "lowps"};
  bool ok = true;
  for (int k = 0; k < 6; k++) ok &= list_open(&c, stack[k], names[k], &l[k]);
  dc_adamw_args *args = ok && l[0].n ? calloc(l[0].n, sizeof *args) : NULL;
  if (ok && l[0].n && !args) ok = fail(&c, "out of memory for %zu tensors", l[0].n);
  if (ok && l[0].n && adamw_args(&c, l, stack, args))
    status(&c, c.cuda ? c.cuda->adamw(args, (int64_t)l[0].n, c.stream) : dc_adamw(args, (int64_t)l[0].n));
  free(args);
  for (int k = 0; k < 6; k++) list_free(&l[k]);
  finish(&c, __LINE__);
}

/* ---- compression: payloads are uint8 tensors of exactly the size that the core says; an empty error tensor means none ------------ */
typedef struct packed { view payload, x, error; float *errors; } packed;

/* x: the numbers, read or written; error: 0 for operators without one. */
static bool look_packed(call *c, dct_tensor payload, dct_tensor x, const char *name, dct_tensor error, packed *p) {
  memset(p, 0, sizeof *p);
  if (!look(c, payload, "payload", &p->payload) || !look(c, x, name, &p->x)) return false;
  if (error && !look(c, error, "error", &p->error)) return false;
  if (c->cuda) return fail(c, "'%s' is on a CUDA device; compression has CPU kernels only: pass CPU tensors, or use the uncompressed collective", name);
  if (p->payload.dtype != DC_U8) return fail(c, "'payload' must be uint8, got %s", dc_dtype_name(p->payload.dtype));
  if (error && p->error.n && p->error.dtype != DC_F32) return fail(c, "'error' must be float32, got %s", dc_dtype_name(p->error.dtype));
  if (error && p->error.n && !same_numel(c, &p->error, "error", &p->x, name)) return false;
  p->errors = p->error.n ? p->error.ptr : NULL;
  return true;
}

static bool payload_is(call *c, const packed *p, int rc, const int64_t *bytes) {
  if (!status(c, rc)) return false;
  if (p->payload.n == *bytes) return true;
  return fail(c, "'payload' has %" PRId64 " bytes; %" PRId64 " elements take %" PRId64, p->payload.n, p->x.n, *bytes);
}

static bool must_be_f32(call *c, const view *v, const char *name) {
  return v->dtype == DC_F32 ? true : fail(c, "'%s' must be float32, got %s", name, dc_dtype_name(v->dtype));
}

static void delete_tensors(const dct_value *stack, int n) {
  for (int i = 0; i < n; i++) api.aoti_torch_delete_tensor_object(as_tensor(stack[i]));
}

static void quantize_blocks(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "quantize_blocks");
  packed p;
  const int bits = (int)(int64_t)stack[3];
  const int64_t block = (int64_t)stack[4];
  int64_t bytes = 0;
  if (look_packed(&c, as_tensor(stack[1]), as_tensor(stack[0]), "x", as_tensor(stack[2]), &p) &&
      payload_is(&c, &p, dc_quantize_bytes(bits, block, p.x.n, &bytes), &bytes))
    status(&c, dc_quantize(p.payload.ptr, bits, block, p.x.ptr, p.x.dtype, p.errors, p.x.n));
  delete_tensors(stack, 3);
  finish(&c, __LINE__);
}

static void dequantize_blocks(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "dequantize_blocks");
  packed p;
  const int bits = (int)(int64_t)stack[2];
  const int64_t block = (int64_t)stack[3];
  int64_t bytes = 0;
  if (look_packed(&c, as_tensor(stack[0]), as_tensor(stack[1]), "out", NULL, &p) &&
      payload_is(&c, &p, dc_quantize_bytes(bits, block, p.x.n, &bytes), &bytes))
    status(&c, dc_dequantize(p.x.ptr, p.x.dtype, p.payload.ptr, bits, block, p.x.n));
  delete_tensors(stack, 2);
  finish(&c, __LINE__);
}

static void add_dequantized(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "add_dequantized");
  packed p;
  const int bits = (int)(int64_t)stack[2];
  const int64_t block = (int64_t)stack[3];
  int64_t bytes = 0;
  if (look_packed(&c, as_tensor(stack[0]), as_tensor(stack[1]), "acc", NULL, &p) && must_be_f32(&c, &p.x, "acc") &&
      payload_is(&c, &p, dc_quantize_bytes(bits, block, p.x.n, &bytes), &bytes))
    status(&c, dc_dequantize_add(p.x.ptr, p.payload.ptr, bits, block, (float)as_double(stack[4]), p.x.n));
  delete_tensors(stack, 2);
  finish(&c, __LINE__);
}

static void select_topk(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "select_topk");
  packed p;
  const int64_t block = (int64_t)stack[3], k = (int64_t)stack[4];
  int64_t bytes = 0;
  if (look_packed(&c, as_tensor(stack[1]), as_tensor(stack[0]), "x", as_tensor(stack[2]), &p) &&
      payload_is(&c, &p, dc_topk_bytes(block, k, p.x.n, &bytes), &bytes))
    status(&c, dc_topk(p.payload.ptr, block, k, p.x.ptr, p.x.dtype, p.errors, p.x.n));
  delete_tensors(stack, 3);
  finish(&c, __LINE__);
}

static void spread_topk(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "spread_topk");
  packed p;
  const int64_t block = (int64_t)stack[2], k = (int64_t)stack[3];
  int64_t bytes = 0;
  if (look_packed(&c, as_tensor(stack[0]), as_tensor(stack[1]), "out", NULL, &p) &&
      payload_is(&c, &p, dc_topk_bytes(block, k, p.x.n, &bytes), &bytes))
    status(&c, dc_topk_spread(p.x.ptr, p.x.dtype, p.payload.ptr, block, k, p.x.n));
  delete_tensors(stack, 2);
  finish(&c, __LINE__);
}

static void add_topk(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c; begin(&c, "add_topk");
  packed p;
  const int64_t block = (int64_t)stack[2], k = (int64_t)stack[3];
  int64_t bytes = 0;
  if (look_packed(&c, as_tensor(stack[0]), as_tensor(stack[1]), "acc", NULL, &p) && must_be_f32(&c, &p.x, "acc") &&
      payload_is(&c, &p, dc_topk_bytes(block, k, p.x.n, &bytes), &bytes))
    status(&c, dc_topk_add(p.x.ptr, p.payload.ptr, block, k, (float)as_double(stack[4]), p.x.n));
  delete_tensors(stack, 2);
  finish(&c, __LINE__);
}

/* ---- registration ------------------------------------------------------------------------------------------------------------ */
static const struct { const char *name, *schema; dct_kernel kernel; } operators[] = {
    {"cast_tensor", "cast_tensor(Tensor src, Tensor(a!) dst, float scale) -> ()", cast_tensor},
    {"scale_tensor", "scale_tensor(Tensor(a!) x, float a) -> ()", scale_tensor},
    {"add_scaled", "add_scaled(Tensor(a!) y, Tensor x, float a) -> ()", add_scaled},
    {"copy_tensor", "copy_tensor(Tensor src, Tensor(a!) dst) -> ()", copy_tensor},
    {"norm_squared", "norm_squared(Tensor x) -> Tensor", norm_squared},
    {"reduce_tensors", "reduce_tensors(Tensor(a!) dst, Tensor[] srcs, int op) -> ()", reduce_tensors},
    {"accumulate_tensors", "accumulate_tensors(Tensor(a!) acc, Tensor[] srcs, bool assign, Tensor(b!) partial) -> ()", accumulate_tensors},
    {"step_adamw",
     "step_adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
     "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] lowps, float lr, float beta1, float beta2, float eps, "
     "float weight_decay, float grad_scale, int step, bool decoupled) -> ()",
     step_adamw},
    {"quantize_blocks", "quantize_blocks(Tensor x, Tensor(a!) payload, Tensor(b!) error, int bits, int block) -> ()", quantize_blocks},
    {"dequantize_blocks", "dequantize_blocks(Tensor payload, Tensor(a!) out, int bits, int block) -> ()", dequantize_blocks},
    {"add_dequantized", "add_dequantized(Tensor payload, Tensor(a!) acc, int bits, int block, float factor) -> ()", add_dequantized},
    {"select_topk", "select_topk(Tensor x, Tensor(a!) payload, Tensor(b!) error, int block, int k) -> ()", select_topk},
    {"spread_topk", "spread_topk(Tensor payload, Tensor(a!) out, int block, int k) -> ()", spread_topk},
    {"add_topk", "add_topk(Tensor payload, Tensor(a!) acc, int block, int k, float factor) -> ()", add_topk},
};

/* torch's pool cuts ranges where it likes; ours promises multiples of the grain, so it is handed whole grains. */
typedef struct grains { int64_t n, grain; dc_range_fn fn; void *ctx; } grains;
static void run_grains(int64_t begin, int64_t end, void *ctx) {
  const grains *g = ctx;
  int64_t last = end * g->grain;
  g->fn(begin * g->grain, last < g->n ? last : g->n, g->ctx);
}
static void torch_pool(int64_t begin, int64_t end, int64_t grain, dc_range_fn fn, void *ctx) {
  /* begin is 0 by the contract of dc_parallel_for */
  grains g = {end, grain, fn, ctx};
  if (api.torch_parallel_for(0, (end + grain - 1) / grain, 1, run_grains, &g)) fn(begin, end, ctx);
}
static int torch_threads(void) {
  uint32_t n = 1;
  return api.torch_get_num_threads(&n) ? 1 : (int)n;
}

/* Registers everything, once per process. "" on success, else what failed. Called by python/deepc/ops.py after torch is imported. */
DC_API const char *dct_register(void) {
  static int done;
  static char error[320];
  if (done) return error;
  done = 1;
  const char *missing = dct_resolve(&api);
  if (missing) return snprintf(error, sizeof error, "%s", missing), error;
  /* Library handles live as long as the process: deleting one would unregister its operators. */
  dct_library def = NULL, cpu = NULL, cuda = NULL;
  if (api.aoti_torch_library_init_fragment("deepc", __FILE__, __LINE__, &def) ||
      api.aoti_torch_library_init_impl("deepc", "CPU", __FILE__, __LINE__, &cpu) ||
      api.aoti_torch_library_init_impl("deepc", "CUDA", __FILE__, __LINE__, &cuda))
    return snprintf(error, sizeof error, "torch refused the operator library 'deepc'"), error;
  for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
    if (api.aoti_torch_library_def(def, operators[i].schema) ||
        api.torch_library_impl(cpu, operators[i].name, operators[i].kernel, DCT_BUILD_VERSION) ||
        api.torch_library_impl(cuda, operators[i].name, operators[i].kernel, DCT_BUILD_VERSION))
      return snprintf(error, sizeof error, "torch refused the operator deepc::%s", operators[i].name), error;
  }
  dc_set_parallel_hook(torch_pool, torch_threads);
  return error;
}
