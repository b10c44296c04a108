/* torch_ops.c: torch.ops.deepc.*: one boxed kernel per operator, for the CPU and CUDA keys. A kernel turns handles into
 * pointers and counts, checks what only torch knows (device, contiguity, dtype), and calls the C core or its CUDA
 * launchers. Fake kernels and autograd are Python's (python/deepc/core/ops.py): under fake tensors sizes are symbolic and
 * can't be read in C.
 *
 * Rules of the ABI that this file follows: a boxed kernel owns its inputs (each tensor and list handle is deleted on
 * every path); raising is a C++ exception through our frame (-fexceptions), done last, after everything is freed. */
#include "torch_call.h"

/* ---- operators --------------------------------------------------------------------------------------------------- */
static void cast_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "cast_tensor");
  view src, dst;
  if (look(&c, as_tensor(stack[0]), "src", &src) && look(&c, as_tensor(stack[1]), "dst", &dst) &&
      same_numel(&c, &src, "src", &dst, "dst")) {
    float scale = (float)as_double(stack[2]);
    status(&c, c.cuda ? c.cuda->cast(dst.ptr, dst.dtype, src.ptr, src.dtype, scale, src.n, c.stream)
                      : dc_cast(dst.ptr, dst.dtype, src.ptr, src.dtype, scale, src.n));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  api.aoti_torch_delete_tensor_object(as_tensor(stack[1]));
  finish(&c, __LINE__);
}

static void scale_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "scale_tensor");
  view x;
  if (look(&c, as_tensor(stack[0]), "x", &x)) {
    float a = (float)as_double(stack[1]);
    status(&c, c.cuda ? c.cuda->scale(x.ptr, x.dtype, a, x.n, c.stream) : dc_scale(x.ptr, x.dtype, a, x.n));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  finish(&c, __LINE__);
}

static void add_scaled(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "add_scaled");
  view y, x;
  if (look(&c, as_tensor(stack[0]), "y", &y) && look(&c, as_tensor(stack[1]), "x", &x) &&
      same_numel(&c, &y, "y", &x, "x")) {
    float a = (float)as_double(stack[2]);
    if (y.dtype != DC_F32) fail(&c, "'y' must be float32, got %s", dc_dtype_name(y.dtype));
    else
      status(&c,
             c.cuda ? c.cuda->axpy(y.ptr, a, x.ptr, x.dtype, x.n, c.stream) : dc_axpy(y.ptr, a, x.ptr, x.dtype, x.n));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  api.aoti_torch_delete_tensor_object(as_tensor(stack[1]));
  finish(&c, __LINE__);
}

static void copy_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "copy_tensor");
  view src, dst;
  if (look(&c, as_tensor(stack[0]), "src", &src) && look(&c, as_tensor(stack[1]), "dst", &dst) &&
      same_numel(&c, &src, "src", &dst, "dst")) {
    int64_t bytes = src.n * (int64_t)dc_dtype_size(src.dtype);
    if (src.dtype != dst.dtype)
      fail(&c, "'src' is %s and 'dst' is %s; use cast_tensor", dc_dtype_name(src.dtype), dc_dtype_name(dst.dtype));
    else status(&c, c.cuda ? c.cuda->copy(dst.ptr, src.ptr, bytes, c.stream) : dc_copy(dst.ptr, src.ptr, bytes));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  api.aoti_torch_delete_tensor_object(as_tensor(stack[1]));
  finish(&c, __LINE__);
}

static void norm_squared(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "norm_squared");
  view x;
  dct_tensor out = NULL;
  if (look(&c, as_tensor(stack[0]), "x", &x)) {
    int64_t size = dc_sqnorm_blocks(x.n), stride = 1;
    void *partial = NULL;
    if (api.aoti_torch_empty_strided(1, &size, &stride, api.aoti_torch_dtype_float64(), c.device, c.index, &out))
      fail(&c, "torch could not allocate %" PRId64 " partial sums", size);
    else if (size && api.aoti_torch_get_data_ptr(out, &partial)) fail(&c, "the result has no storage");
    else
      status(&c,
             c.cuda ? c.cuda->sqnorm(x.ptr, x.dtype, x.n, partial, c.stream) : dc_sqnorm(x.ptr, x.dtype, x.n, partial));
  }
  api.aoti_torch_delete_tensor_object(as_tensor(stack[0]));
  if (c.error[0] && out) api.aoti_torch_delete_tensor_object(out);
  else stack[0] = (dct_value)(uintptr_t)out;
  finish(&c, __LINE__);
}

/* Views of a list of equally long tensors of one dtype; *ptr is owned (free). */
static bool look_all(call *c, const list *l, const char *name, const view *like, const char *like_name, int dtype,
                     const void ***ptr) {
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
  call c;
  begin(&c, "reduce_tensors");
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
  call c;
  begin(&c, "accumulate_tensors");
  view acc, partial, first;
  list srcs;
  const void **ptr = NULL;
  bool ok = list_open(&c, stack[1], "srcs", &srcs) && look(&c, as_tensor(stack[0]), "acc", &acc) &&
            look(&c, as_tensor(stack[3]), "partial", &partial);
  if (ok && srcs.n == 0) ok = fail(&c, "'srcs' is empty");
  if (ok && (acc.dtype != DC_F32 || partial.dtype != DC_F64))
    ok = fail(&c, "'acc' must be float32 and 'partial' float64");
  if (ok && partial.n != 0 && partial.n != dc_sqnorm_blocks(acc.n))
    ok = fail(&c, "'partial' has %" PRId64 " elements; expected 0 (no norm) or %" PRId64, partial.n,
              dc_sqnorm_blocks(acc.n));
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
    if (v[2].dtype != v[3].dtype || (l[4].n && v[4].dtype != v[2].dtype))
      return fail(c, "the moments of tensor %zu differ in dtype", i);
    args[i] = (dc_adamw_args){.param = v[0].ptr,
                              .grad = v[1].ptr,
                              .exp_avg = v[2].ptr,
                              .exp_avg_sq = v[3].ptr,
                              .max_exp_avg_sq = v[4].ptr,
                              .lowp = v[5].ptr,
                              .n = v[0].n,
                              .lr = as_double(stack[6]),
                              .beta1 = as_double(stack[7]),
                              .beta2 = as_double(stack[8]),
                              .eps = as_double(stack[9]),
                              .weight_decay = as_double(stack[10]),
                              .grad_scale = as_double(stack[11]),
                              .step = (int64_t)stack[12],
                              .param_dtype = v[0].dtype,
                              .grad_dtype = v[1].dtype,
                              .state_dtype = v[2].dtype,
                              .lowp_dtype = l[5].n ? v[5].dtype : DC_F32,
                              .flags = as_bool(stack[13]) ? DC_ADAMW_DECOUPLED : 0};
  }
  return true;
}

static void step_adamw(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "step_adamw");
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

/* ---- compression: payloads are uint8 tensors of exactly the size that the core says; no error tensor: empty */
typedef struct packed {
  view payload, x, error;
  float *errors;
} packed;

/* x: the numbers, read or written; error: 0 for operators without one. */
static bool look_packed(call *c, dct_tensor payload, dct_tensor x, const char *name, dct_tensor error, packed *p) {
  memset(p, 0, sizeof *p);
  if (!look(c, payload, "payload", &p->payload) || !look(c, x, name, &p->x)) return false;
  if (error && !look(c, error, "error", &p->error)) return false;
  if (c->cuda)
    return fail(c,
                "'%s' is on a CUDA device; compression has CPU kernels only: pass CPU tensors, or use the uncompressed "
                "collective",
                name);
  if (p->payload.dtype != DC_U8) return fail(c, "'payload' must be uint8, got %s", dc_dtype_name(p->payload.dtype));
  if (error && p->error.n && p->error.dtype != DC_F32)
    return fail(c, "'error' must be float32, got %s", dc_dtype_name(p->error.dtype));
  if (error && p->error.n && !same_numel(c, &p->error, "error", &p->x, name)) return false;
  p->errors = p->error.n ? p->error.ptr : NULL;
  return true;
}

static bool payload_is(call *c, const packed *p, int rc, const int64_t *bytes) {
  if (!status(c, rc)) return false;
  if (p->payload.n == *bytes) return true;
  return fail(c, "'payload' has %" PRId64 " bytes; %" PRId64 " elements take %" PRId64, p->payload.n, p->x.n, *bytes);
}

static void quantize_blocks(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "quantize_blocks");
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
  call c;
  begin(&c, "dequantize_blocks");
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
  call c;
  begin(&c, "add_dequantized");
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
  call c;
  begin(&c, "select_topk");
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
  call c;
  begin(&c, "spread_topk");
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
  call c;
  begin(&c, "add_topk");
  packed p;
  const int64_t block = (int64_t)stack[2], k = (int64_t)stack[3];
  int64_t bytes = 0;
  if (look_packed(&c, as_tensor(stack[0]), as_tensor(stack[1]), "acc", NULL, &p) && must_be_f32(&c, &p.x, "acc") &&
      payload_is(&c, &p, dc_topk_bytes(block, k, p.x.n, &bytes), &bytes))
    status(&c, dc_topk_add(p.x.ptr, p.payload.ptr, block, k, (float)as_double(stack[4]), p.x.n));
  delete_tensors(stack, 2);
  finish(&c, __LINE__);
}

/* ---- cross-entropy: logits [rows, stride] with the first `classes` of each row in use; empty row_scale and loss mean
 * none ---- */
static bool xent_shapes(call *c, const view *logits, const view *labels, const view *row_scale, const view *loss,
                        int64_t classes) {
  if (labels->dtype != DC_I64) return fail(c, "'labels' must be int64, got %s", dc_dtype_name(labels->dtype));
  if (row_scale->n &&
      (!must_be_f32(c, row_scale, "row_scale") || !same_numel(c, row_scale, "row_scale", labels, "labels")))
    return false;
  if (loss->n && (!must_be_f32(c, loss, "loss") || !same_numel(c, loss, "loss", labels, "labels"))) return false;
  if (labels->n ? logits->n % labels->n == 0 && logits->n / labels->n >= classes : logits->n == 0) return true;
  return fail(c, "'logits' has %" PRId64 " elements, which are not %" PRId64 " rows of at least %" PRId64 " classes",
              logits->n, labels->n, classes);
}

static void cross_entropy_rows(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  call c;
  begin(&c, "cross_entropy_rows");
  view logits, labels, row_scale, loss;
  const int64_t classes = (int64_t)stack[4];
  if (look(&c, as_tensor(stack[0]), "logits", &logits) && look(&c, as_tensor(stack[1]), "labels", &labels) &&
      look(&c, as_tensor(stack[2]), "row_scale", &row_scale) && look(&c, as_tensor(stack[3]), "loss", &loss) &&
      xent_shapes(&c, &logits, &labels, &row_scale, &loss, classes)) {
    const dc_xent_args args = {.logits = logits.ptr,
                               .labels = labels.ptr,
                               .row_scale = row_scale.n ? row_scale.ptr : NULL,
                               .loss = loss.n ? loss.ptr : NULL,
                               .rows = labels.n,
                               .classes = classes,
                               .stride = labels.n ? logits.n / labels.n : classes,
                               .ignore_index = (int64_t)stack[7],
                               .scale = (float)as_double(stack[5]),
                               .label_smoothing = (float)as_double(stack[6]),
                               .dtype = logits.dtype,
                               .gradient = as_bool(stack[8])};
    status(&c, c.cuda ? c.cuda->xent(&args, c.stream) : dc_cross_entropy_rows(&args));
  }
  delete_tensors(stack, 4);
  finish(&c, __LINE__);
}

/* ---- registration ------------------------------------------------------------------------------------------------ */
static const dct_operator operators[] = {
    {"cast_tensor", "cast_tensor(Tensor src, Tensor(a!) dst, float scale) -> ()", cast_tensor},
    {"scale_tensor", "scale_tensor(Tensor(a!) x, float a) -> ()", scale_tensor},
    {"add_scaled", "add_scaled(Tensor(a!) y, Tensor x, float a) -> ()", add_scaled},
    {"copy_tensor", "copy_tensor(Tensor src, Tensor(a!) dst) -> ()", copy_tensor},
    {"norm_squared", "norm_squared(Tensor x) -> Tensor", norm_squared},
    {"reduce_tensors", "reduce_tensors(Tensor(a!) dst, Tensor[] srcs, int op) -> ()", reduce_tensors},
    {"accumulate_tensors", "accumulate_tensors(Tensor(a!) acc, Tensor[] srcs, bool assign, Tensor(b!) partial) -> ()",
     accumulate_tensors},
    {"step_adamw",
     "step_adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
     "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] lowps, float lr, float beta1, float beta2, float eps, "
     "float weight_decay, float grad_scale, int step, bool decoupled) -> ()",
     step_adamw},
    {"quantize_blocks", "quantize_blocks(Tensor x, Tensor(a!) payload, Tensor(b!) error, int bits, int block) -> ()",
     quantize_blocks},
    {"dequantize_blocks", "dequantize_blocks(Tensor payload, Tensor(a!) out, int bits, int block) -> ()",
     dequantize_blocks},
    {"add_dequantized", "add_dequantized(Tensor payload, Tensor(a!) acc, int bits, int block, float factor) -> ()",
     add_dequantized},
    {"select_topk", "select_topk(Tensor x, Tensor(a!) payload, Tensor(b!) error, int block, int k) -> ()", select_topk},
    {"spread_topk", "spread_topk(Tensor payload, Tensor(a!) out, int block, int k) -> ()", spread_topk},
    {"add_topk", "add_topk(Tensor payload, Tensor(a!) acc, int block, int k, float factor) -> ()", add_topk},
    {"cross_entropy_rows",
     "cross_entropy_rows(Tensor(a!) logits, Tensor labels, Tensor row_scale, Tensor(b!) loss, int classes, float "
     "scale, "
     "float label_smoothing, int ignore_index, bool gradient) -> ()",
     cross_entropy_rows},
};

/* torch's pool cuts ranges where it likes; ours promises multiples of the grain, so it is handed whole grains. */
typedef struct grains {
  int64_t n, grain;
  dc_range_fn fn;
  void *ctx;
} grains;
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

/* NULL, or what failed. */
static const char *register_all(dct_library def, dct_library cpu, dct_library cuda, const dct_operator *op,
                                size_t count) {
  static char why[128];
  for (size_t i = 0; i < count; i++)
    if (api.aoti_torch_library_def(def, op[i].schema) ||
        api.torch_library_impl(cpu, op[i].name, op[i].kernel, DCT_BUILD_VERSION) ||
        api.torch_library_impl(cuda, op[i].name, op[i].kernel, DCT_BUILD_VERSION))
      return snprintf(why, sizeof why, "torch refused the operator deepc::%s", op[i].name), why;
  return NULL;
}

/* Registers everything, once per process. "" on success, else what failed. Called by python/deepc/core/ops.py after torch is
 * imported. */
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
  const dct_operator *fused;
  size_t fused_count;
  const char *why = dct__fused(&fused, &fused_count);
  if (!why) why = register_all(def, cpu, cuda, operators, sizeof operators / sizeof *operators);
  if (!why) why = register_all(def, cpu, cuda, fused, fused_count);
  if (why) return snprintf(error, sizeof error, "%s", why), error;
  dc_set_parallel_hook(torch_pool, torch_threads);
  return error;
}
