/* torch_ops.c: torch.ops.deepc.*: one boxed kernel per operator, for the CPU and CUDA keys. A kernel turns handles into
 * pointers and counts, checks what only torch knows (device, contiguity, dtype), and calls the C core or its CUDA
 * launchers. Fake kernels and autograd are Python's (python/deepc/core/ops.py): under fake tensors sizes are symbolic
 * and can't be read in C.
 *
 * Rules of the ABI that this file follows: a boxed kernel owns its inputs (each tensor and list handle is deleted on
 * every path); raising is a C++ exception through our frame (-fexceptions), done last, after everything is freed. */
#include "torch_call.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- operators --------------------------------------------------------------------------------------------------- */
static void op_cast_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "cast_tensor");
  dct_view src, dst;
  if (dct__look(&c, value_tensor(stack[0]), "src", &src) && dct__look(&c, value_tensor(stack[1]), "dst", &dst) &&
      dct__same_numel(&c, &src, "src", &dst, "dst")) {
    float scale = (float)value_double(stack[2]);
    dct__status(&c, c.cuda ? c.cuda->cast(dst.ptr, dst.dtype, src.ptr, src.dtype, scale, src.n, c.stream)
                           : dc_cast(dst.ptr, dst.dtype, src.ptr, src.dtype, scale, src.n));
  }
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[0]));
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[1]));
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_scale_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "scale_tensor");
  dct_view x;
  if (dct__look(&c, value_tensor(stack[0]), "x", &x)) {
    float a = (float)value_double(stack[1]);
    dct__status(&c, c.cuda ? c.cuda->scale(x.ptr, x.dtype, a, x.n, c.stream) : dc_scale(x.ptr, x.dtype, a, x.n));
  }
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[0]));
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_add_scaled(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "add_scaled");
  dct_view y, x;
  if (dct__look(&c, value_tensor(stack[0]), "y", &y) && dct__look(&c, value_tensor(stack[1]), "x", &x) &&
      dct__same_numel(&c, &y, "y", &x, "x")) {
    float a = (float)value_double(stack[2]);
    if (y.dtype != DC_F32) dct__fail(&c, "'y' must be float32, got %s", dc_dtype_name(y.dtype));
    else
      dct__status(&c, c.cuda ? c.cuda->axpy(y.ptr, a, x.ptr, x.dtype, x.n, c.stream)
                             : dc_axpy(y.ptr, a, x.ptr, x.dtype, x.n));
  }
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[0]));
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[1]));
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_copy_tensor(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "copy_tensor");
  dct_view src, dst;
  if (dct__look(&c, value_tensor(stack[0]), "src", &src) && dct__look(&c, value_tensor(stack[1]), "dst", &dst) &&
      dct__same_numel(&c, &src, "src", &dst, "dst")) {
    int64_t bytes = src.n * (int64_t)dc_dtype_size(src.dtype);
    if (src.dtype != dst.dtype)
      dct__fail(&c, "'src' is %s and 'dst' is %s; use cast_tensor", dc_dtype_name(src.dtype), dc_dtype_name(dst.dtype));
    else dct__status(&c, c.cuda ? c.cuda->copy(dst.ptr, src.ptr, bytes, c.stream) : dc_copy(dst.ptr, src.ptr, bytes));
  }
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[0]));
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[1]));
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_norm_squared(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "norm_squared");
  dct_view x;
  dct_tensor out = NULL;
  if (dct__look(&c, value_tensor(stack[0]), "x", &x)) {
    int64_t size = dc_sqnorm_blocks(x.n), stride = 1;
    void *partial = NULL;
    if (dct__api.aoti_torch_empty_strided(1, &size, &stride, dct__api.aoti_torch_dtype_float64(), c.device, c.index,
                                          &out))
      dct__fail(&c, "torch could not allocate %" PRId64 " partial sums", size);
    else if (size && dct__api.aoti_torch_get_data_ptr(out, &partial)) dct__fail(&c, "the result has no storage");
    else
      dct__status(&c, c.cuda ? c.cuda->sqnorm(x.ptr, x.dtype, x.n, partial, c.stream)
                             : dc_sqnorm(x.ptr, x.dtype, x.n, partial));
  }
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[0]));
  if (c.error[0] && out) dct__api.aoti_torch_delete_tensor_object(out);
  else stack[0] = (dct_value)(uintptr_t)out;
  dct__finish(&c, __FILE__, __LINE__);
}

/* Views of a list of equally long tensors of one dtype; *ptr is owned (free). */
static bool op_look_all(dct_call *c, const dct_tensors *l, const char *name, const dct_view *like,
                        const char *like_name, int dtype, const void ***ptr) {
  *ptr = calloc(l->n ? l->n : 1, sizeof **ptr);
  if (!*ptr) return dct__fail(c, "out of memory for %zu pointers", l->n);
  for (size_t i = 0; i < l->n; i++) {
    dct_view v;
    if (!dct__look(c, l->item[i], name, &v) || !dct__same_numel(c, &v, name, like, like_name)) return false;
    if (dtype >= 0 && v.dtype != dtype)
      return dct__fail(c, "item %zu of '%s' is %s, expected %s", i, name, dc_dtype_name(v.dtype), dc_dtype_name(dtype));
    (*ptr)[i] = v.ptr;
  }
  return true;
}

static void op_reduce_tensors(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "reduce_tensors");
  dct_view dst;
  dct_tensors srcs;
  const void **ptr = NULL;
  bool ok = dct__list_open(&c, stack[1], "srcs", &srcs) && dct__look(&c, value_tensor(stack[0]), "dst", &dst);
  int op;
  if (ok && dct__int(&c, stack[2], "op", &op) && op_look_all(&c, &srcs, "srcs", &dst, "dst", dst.dtype, &ptr))
    dct__status(&c, c.cuda ? c.cuda->reduce(dst.ptr, ptr, (int)srcs.n, dst.dtype, op, dst.n, c.stream)
                           : dc_reduce(dst.ptr, ptr, (int)srcs.n, dst.dtype, op, dst.n));
  free(ptr);
  dct__list_free(&srcs);
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[0]));
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_accumulate_tensors(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "accumulate_tensors");
  dct_view acc, partial, first;
  dct_tensors srcs;
  const void **ptr = NULL;
  bool ok = dct__list_open(&c, stack[1], "srcs", &srcs) && dct__look(&c, value_tensor(stack[0]), "acc", &acc) &&
            dct__look(&c, value_tensor(stack[3]), "partial", &partial);
  if (ok && srcs.n == 0) ok = dct__fail(&c, "'srcs' is empty");
  if (ok && (acc.dtype != DC_F32 || partial.dtype != DC_F64))
    ok = dct__fail(&c, "'acc' must be float32 and 'partial' float64");
  if (ok && partial.n != 0 && partial.n != dc_sqnorm_blocks(acc.n))
    ok = dct__fail(&c, "'partial' has %" PRId64 " elements; expected 0 (no norm) or %" PRId64, partial.n,
                   dc_sqnorm_blocks(acc.n));
  if (ok && dct__look(&c, srcs.item[0], "srcs", &first) &&
      op_look_all(&c, &srcs, "srcs", &acc, "acc", first.dtype, &ptr)) {
    double *p = partial.n ? partial.ptr : NULL;
    int assign = value_bool(stack[2]);
    dct__status(&c, c.cuda ? c.cuda->reduce_acc(acc.ptr, ptr, (int)srcs.n, first.dtype, acc.n, assign, p, c.stream)
                           : dc_reduce_acc(acc.ptr, ptr, (int)srcs.n, first.dtype, acc.n, assign, p));
  }
  free(ptr);
  dct__list_free(&srcs);
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[0]));
  dct__api.aoti_torch_delete_tensor_object(value_tensor(stack[3]));
  dct__finish(&c, __FILE__, __LINE__);
}

static bool op_adamw_args(dct_call *c, const dct_tensors *l, const dct_value *stack, dc_adamw_args *args) {
  static const char *const names[6] = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "lowps"};
  for (int k = 1; k < 6; k++)
    if (l[k].n != l[0].n && !(k >= 4 && l[k].n == 0))
      return dct__fail(c, "'%s' has %zu tensors and 'params' has %zu", names[k], l[k].n, l[0].n);
  for (size_t i = 0; i < l[0].n; i++) {
    dct_view v[6];
    memset(v, 0, sizeof v);
    for (int k = 0; k < 6; k++) {
      if (l[k].n == 0) continue;
      if (!dct__look(c, l[k].item[i], names[k], &v[k]) || !dct__same_numel(c, &v[k], names[k], &v[0], "params"))
        return false;
    }
    if (v[2].dtype != v[3].dtype || (l[4].n && v[4].dtype != v[2].dtype))
      return dct__fail(c, "the moments of tensor %zu differ in dtype", i);
    args[i] = (dc_adamw_args){.struct_size = sizeof *args,
                              .param = v[0].ptr,
                              .grad = v[1].ptr,
                              .exp_avg = v[2].ptr,
                              .exp_avg_sq = v[3].ptr,
                              .max_exp_avg_sq = v[4].ptr,
                              .lowp = v[5].ptr,
                              .n = v[0].n,
                              .lr = value_double(stack[6]),
                              .beta1 = value_double(stack[7]),
                              .beta2 = value_double(stack[8]),
                              .eps = value_double(stack[9]),
                              .weight_decay = value_double(stack[10]),
                              .grad_scale = value_double(stack[11]),
                              .step = (int64_t)stack[12],
                              .param_dtype = v[0].dtype,
                              .grad_dtype = v[1].dtype,
                              .state_dtype = v[2].dtype,
                              .lowp_dtype = l[5].n ? v[5].dtype : DC_F32,
                              .flags = value_bool(stack[13]) ? DC_ADAMW_DECOUPLED : 0};
  }
  return true;
}

static void op_step_adamw(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "step_adamw");
  dct_tensors l[6];
  memset(l, 0, sizeof l);
  static const char *const names[6] = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "lowps"};
  bool ok = true;
  for (int k = 0; k < 6; k++) ok &= dct__list_open(&c, stack[k], names[k], &l[k]);
  dc_adamw_args *args = ok && l[0].n ? calloc(l[0].n, sizeof *args) : NULL;
  if (ok && l[0].n && !args) ok = dct__fail(&c, "out of memory for %zu tensors", l[0].n);
  if (ok && l[0].n && op_adamw_args(&c, l, stack, args))
    dct__status(&c, c.cuda ? c.cuda->adamw(args, (int64_t)l[0].n, c.stream) : dc_adamw(args, (int64_t)l[0].n));
  free(args);
  for (int k = 0; k < 6; k++) dct__list_free(&l[k]);
  dct__finish(&c, __FILE__, __LINE__);
}

/* ---- dc_step: the rules other than Adam's, which step_adamw has */
static bool op_step_args(dct_call *c, const dct_tensors *l, const dct_value *stack, dc_step_args *args) {
  static const char *const names[4] = {"params", "grads", "states", "lowps"};
  int rule;
  if (!dct__int(c, stack[4], "rule", &rule)) return false;
  for (int k = 1; k < 4; k++)
    if (l[k].n != l[0].n && !(k >= 2 && l[k].n == 0))
      return dct__fail(c, "'%s' has %zu tensors and 'params' has %zu", names[k], l[k].n, l[0].n);
  for (size_t i = 0; i < l[0].n; i++) {
    dct_view v[4];
    memset(v, 0, sizeof v);
    for (int k = 0; k < 4; k++) {
      if (l[k].n == 0) continue;
      if (!dct__look(c, l[k].item[i], names[k], &v[k]) || !dct__same_numel(c, &v[k], names[k], &v[0], "params"))
        return false;
    }
    args[i] = (dc_step_args){.struct_size = sizeof *args,
                             .param = v[0].ptr,
                             .grad = v[1].ptr,
                             .state = {v[2].ptr},
                             .lowp = v[3].ptr,
                             .n = v[0].n,
                             .rule = rule,
                             .lr = value_double(stack[5]),
                             .beta1 = value_double(stack[6]),
                             .beta2 = value_double(stack[7]),
                             .eps = value_double(stack[8]),
                             .weight_decay = value_double(stack[9]),
                             .grad_scale = value_double(stack[10]),
                             .step = (int64_t)stack[11],
                             .param_dtype = v[0].dtype,
                             .grad_dtype = v[1].dtype,
                             .state_dtype = l[2].n ? v[2].dtype : DC_F32,
                             .lowp_dtype = l[3].n ? v[3].dtype : DC_F32,
                             .flags = value_bool(stack[12]) ? DC_STEP_NESTEROV : 0};
  }
  return true;
}

static void op_step_rule(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "step_rule");
  dct_tensors l[4];
  memset(l, 0, sizeof l);
  static const char *const names[4] = {"params", "grads", "states", "lowps"};
  bool ok = true;
  for (int k = 0; k < 4; k++) ok &= dct__list_open(&c, stack[k], names[k], &l[k]);
  dc_step_args *args = ok && l[0].n ? calloc(l[0].n, sizeof *args) : NULL;
  if (ok && l[0].n && !args) ok = dct__fail(&c, "out of memory for %zu tensors", l[0].n);
  if (ok && l[0].n && op_step_args(&c, l, stack, args))
    dct__status(&c, c.cuda ? c.cuda->step(args, (int64_t)l[0].n, c.stream) : dc_step(args, (int64_t)l[0].n));
  free(args);
  for (int k = 0; k < 4; k++) dct__list_free(&l[k]);
  dct__finish(&c, __FILE__, __LINE__);
}

/* ---- compression: payloads are uint8 tensors of exactly the size that the core says; no error tensor: empty */
typedef struct packed {
  dct_view payload, x, error;
  float *errors;
} packed;

/* x: the numbers, read or written; error: 0 for operators without one. */
static bool op_look_packed(dct_call *c, dct_tensor payload, dct_tensor x, const char *name, dct_tensor error,
                           packed *p) {
  memset(p, 0, sizeof *p);
  if (!dct__look(c, payload, "payload", &p->payload) || !dct__look(c, x, name, &p->x)) return false;
  if (error && !dct__look(c, error, "error", &p->error)) return false;
  if (p->payload.dtype != DC_U8)
    return dct__fail(c, "'payload' must be uint8, got %s", dc_dtype_name(p->payload.dtype));
  if (error && p->error.n && p->error.dtype != DC_F32)
    return dct__fail(c, "'error' must be float32, got %s", dc_dtype_name(p->error.dtype));
  if (error && p->error.n && !dct__same_numel(c, &p->error, "error", &p->x, name)) return false;
  p->errors = p->error.n ? p->error.ptr : NULL;
  return true;
}

/* Of top-k. */
static bool op_not_cuda(dct_call *c, const char *name) {
  if (!c->cuda) return true;
  return dct__fail(c, "'%s' is on a CUDA device; top-k has CPU kernels only: pass CPU tensors, or use another codec",
                   name);
}

static bool op_payload_is(dct_call *c, const packed *p, int rc, const int64_t *bytes) {
  if (rc != DC_OK) return dct__fail(c, "%s", dc_last_error()); /* the core counts, on whichever device */
  if (p->payload.n == *bytes) return true;
  return dct__fail(c, "'payload' has %" PRId64 " bytes; %" PRId64 " elements take %" PRId64, p->payload.n, p->x.n,
                   *bytes);
}

static void op_quantize_blocks(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "quantize_blocks");
  packed p;
  int bits;
  const int64_t block = (int64_t)stack[4];
  int64_t bytes = 0;
  if (dct__int(&c, stack[3], "bits", &bits) &&
      op_look_packed(&c, value_tensor(stack[1]), value_tensor(stack[0]), "x", value_tensor(stack[2]), &p) &&
      op_payload_is(&c, &p, dc_quantize_bytes(bits, block, p.x.n, &bytes), &bytes))
    dct__status(&c, c.cuda ? c.cuda->quantize(p.payload.ptr, bits, block, p.x.ptr, p.x.dtype, p.errors, p.x.n, c.stream)
                           : dc_quantize(p.payload.ptr, bits, block, p.x.ptr, p.x.dtype, p.errors, p.x.n));
  dct__delete_tensors(stack, 3);
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_dequantize_blocks(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "dequantize_blocks");
  packed p;
  int bits;
  const int64_t block = (int64_t)stack[3];
  int64_t bytes = 0;
  if (dct__int(&c, stack[2], "bits", &bits) &&
      op_look_packed(&c, value_tensor(stack[0]), value_tensor(stack[1]), "out", NULL, &p) &&
      op_payload_is(&c, &p, dc_quantize_bytes(bits, block, p.x.n, &bytes), &bytes))
    dct__status(&c, c.cuda ? c.cuda->dequantize(p.x.ptr, p.x.dtype, p.payload.ptr, bits, block, p.x.n, c.stream)
                           : dc_dequantize(p.x.ptr, p.x.dtype, p.payload.ptr, bits, block, p.x.n));
  dct__delete_tensors(stack, 2);
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_add_dequantized(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "add_dequantized");
  packed p;
  int bits;
  const int64_t block = (int64_t)stack[3];
  int64_t bytes = 0;
  if (dct__int(&c, stack[2], "bits", &bits) &&
      op_look_packed(&c, value_tensor(stack[0]), value_tensor(stack[1]), "acc", NULL, &p) &&
      dct__must_be_f32(&c, &p.x, "acc") &&
      op_payload_is(&c, &p, dc_quantize_bytes(bits, block, p.x.n, &bytes), &bytes)) {
    const float factor = (float)value_double(stack[4]);
    dct__status(&c, c.cuda ? c.cuda->dequantize_add(p.x.ptr, p.payload.ptr, bits, block, factor, p.x.n, c.stream)
                           : dc_dequantize_add(p.x.ptr, p.payload.ptr, bits, block, factor, p.x.n));
  }
  dct__delete_tensors(stack, 2);
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_average_signs(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "average_signs");
  packed p;
  dct_view rows;
  const int64_t count = (int64_t)stack[3], block = (int64_t)stack[4];
  int64_t bytes = 0;
  if (op_look_packed(&c, value_tensor(stack[1]), value_tensor(stack[2]), "error", NULL, &p) &&
      dct__look(&c, value_tensor(stack[0]), "rows", &rows) && dct__must_be_f32(&c, &p.x, "error") &&
      op_payload_is(&c, &p, dc_quantize_bytes(1, block, p.x.n, &bytes), &bytes)) {
    const float factor = (float)value_double(stack[5]);
    if (rows.dtype != DC_U8 || count < 1 || rows.n % count)
      dct__fail(&c, "'rows' must be uint8, %" PRId64 " payloads; got %" PRId64 " elements of %s", count, rows.n,
                dc_dtype_name(rows.dtype));
    else
      dct__status(
          &c, c.cuda ? c.cuda->average_signs(p.payload.ptr, block, rows.ptr, count, rows.n / count, factor, p.x.ptr,
                                             p.x.n, c.stream)
                     : dc_average_signs(p.payload.ptr, block, rows.ptr, count, rows.n / count, factor, p.x.ptr, p.x.n));
  }
  dct__delete_tensors(stack, 3);
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_select_topk(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "select_topk");
  packed p;
  const int64_t block = (int64_t)stack[3], k = (int64_t)stack[4];
  int64_t bytes = 0;
  if (op_look_packed(&c, value_tensor(stack[1]), value_tensor(stack[0]), "x", value_tensor(stack[2]), &p) &&
      op_not_cuda(&c, "x") && op_payload_is(&c, &p, dc_topk_bytes(block, k, p.x.n, &bytes), &bytes))
    dct__status(&c, dc_topk(p.payload.ptr, block, k, p.x.ptr, p.x.dtype, p.errors, p.x.n));
  dct__delete_tensors(stack, 3);
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_spread_topk(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "spread_topk");
  packed p;
  const int64_t block = (int64_t)stack[2], k = (int64_t)stack[3];
  int64_t bytes = 0;
  if (op_look_packed(&c, value_tensor(stack[0]), value_tensor(stack[1]), "out", NULL, &p) && op_not_cuda(&c, "out") &&
      op_payload_is(&c, &p, dc_topk_bytes(block, k, p.x.n, &bytes), &bytes))
    dct__status(&c, dc_topk_spread(p.x.ptr, p.x.dtype, p.payload.ptr, block, k, p.x.n));
  dct__delete_tensors(stack, 2);
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_add_topk(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "add_topk");
  packed p;
  const int64_t block = (int64_t)stack[2], k = (int64_t)stack[3];
  int64_t bytes = 0;
  if (op_look_packed(&c, value_tensor(stack[0]), value_tensor(stack[1]), "acc", NULL, &p) && op_not_cuda(&c, "acc") &&
      dct__must_be_f32(&c, &p.x, "acc") && op_payload_is(&c, &p, dc_topk_bytes(block, k, p.x.n, &bytes), &bytes))
    dct__status(&c, dc_topk_add(p.x.ptr, p.payload.ptr, block, k, (float)value_double(stack[4]), p.x.n));
  dct__delete_tensors(stack, 2);
  dct__finish(&c, __FILE__, __LINE__);
}

static void op_rotate_blocks(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "rotate_blocks");
  dct_view x;
  if (dct__look(&c, value_tensor(stack[0]), "x", &x) && dct__must_be_f32(&c, &x, "x")) {
    dct__status(&c, c.cuda ? c.cuda->rotate(x.ptr, x.n, c.stream) : dc_rotate(x.ptr, x.n));
  }
  dct__delete_tensors(stack, 1);
  dct__finish(&c, __FILE__, __LINE__);
}

/* ---- cross-entropy: logits [rows, stride] with the first `classes` of each row in use; empty row_scale and loss mean
 * none ---- */
static bool op_xent_shapes(dct_call *c, const dct_view *logits, const dct_view *labels, const dct_view *row_scale,
                           const dct_view *loss, int64_t classes) {
  if (labels->dtype != DC_I64) return dct__fail(c, "'labels' must be int64, got %s", dc_dtype_name(labels->dtype));
  if (row_scale->n &&
      (!dct__must_be_f32(c, row_scale, "row_scale") || !dct__same_numel(c, row_scale, "row_scale", labels, "labels")))
    return false;
  if (loss->n && (!dct__must_be_f32(c, loss, "loss") || !dct__same_numel(c, loss, "loss", labels, "labels")))
    return false;
  if (labels->n ? logits->n % labels->n == 0 && logits->n / labels->n >= classes : logits->n == 0) return true;
  return dct__fail(c,
                   "'logits' has %" PRId64 " elements, which are not %" PRId64 " rows of at least %" PRId64 " classes",
                   logits->n, labels->n, classes);
}

static void op_cross_entropy_rows(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "cross_entropy_rows");
  dct_view logits, labels, row_scale, loss;
  const int64_t classes = (int64_t)stack[4];
  if (dct__look(&c, value_tensor(stack[0]), "logits", &logits) &&
      dct__look(&c, value_tensor(stack[1]), "labels", &labels) &&
      dct__look(&c, value_tensor(stack[2]), "row_scale", &row_scale) &&
      dct__look(&c, value_tensor(stack[3]), "loss", &loss) &&
      op_xent_shapes(&c, &logits, &labels, &row_scale, &loss, classes)) {
    const dc_xent_args args = {.struct_size = sizeof args,
                               .logits = logits.ptr,
                               .labels = labels.ptr,
                               .row_scale = row_scale.n ? row_scale.ptr : NULL,
                               .loss = loss.n ? loss.ptr : NULL,
                               .rows = labels.n,
                               .classes = classes,
                               .stride = labels.n ? logits.n / labels.n : classes,
                               .ignore_index = (int64_t)stack[7],
                               .scale = (float)value_double(stack[5]),
                               .label_smoothing = (float)value_double(stack[6]),
                               .dtype = logits.dtype,
                               .gradient = value_bool(stack[8])};
    dct__status(&c, c.cuda ? c.cuda->cross_entropy_rows(&args, c.stream) : dc_cross_entropy_rows(&args));
  }
  dct__delete_tensors(stack, 4);
  dct__finish(&c, __FILE__, __LINE__);
}

/* ---- registration ------------------------------------------------------------------------------------------------ */
static const dct_operator op_rows[] = {
    {"cast_tensor", "cast_tensor(Tensor src, Tensor(a!) dst, float scale) -> ()", op_cast_tensor},
    {"scale_tensor", "scale_tensor(Tensor(a!) x, float a) -> ()", op_scale_tensor},
    {"add_scaled", "add_scaled(Tensor(a!) y, Tensor x, float a) -> ()", op_add_scaled},
    {"copy_tensor", "copy_tensor(Tensor src, Tensor(a!) dst) -> ()", op_copy_tensor},
    {"norm_squared", "norm_squared(Tensor x) -> Tensor", op_norm_squared},
    {"reduce_tensors", "reduce_tensors(Tensor(a!) dst, Tensor[] srcs, int op) -> ()", op_reduce_tensors},
    {"accumulate_tensors", "accumulate_tensors(Tensor(a!) acc, Tensor[] srcs, bool assign, Tensor(b!) partial) -> ()",
     op_accumulate_tensors},
    {"step_adamw",
     "step_adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
     "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] lowps, float lr, float beta1, float beta2, float eps, "
     "float weight_decay, float grad_scale, int step, bool decoupled) -> ()",
     op_step_adamw},
    {"step_rule",
     "step_rule(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, Tensor(c!)[] lowps, int rule, float lr, "
     "float beta1, float beta2, float eps, float weight_decay, float grad_scale, int step, bool nesterov) -> ()",
     op_step_rule},
    {"quantize_blocks", "quantize_blocks(Tensor x, Tensor(a!) payload, Tensor(b!) error, int bits, int block) -> ()",
     op_quantize_blocks},
    {"dequantize_blocks", "dequantize_blocks(Tensor payload, Tensor(a!) out, int bits, int block) -> ()",
     op_dequantize_blocks},
    {"add_dequantized", "add_dequantized(Tensor payload, Tensor(a!) acc, int bits, int block, float factor) -> ()",
     op_add_dequantized},
    {"average_signs",
     "average_signs(Tensor rows, Tensor(a!) payload, Tensor(b!) error, int count, int block, float factor) -> ()",
     op_average_signs},
    {"select_topk", "select_topk(Tensor x, Tensor(a!) payload, Tensor(b!) error, int block, int k) -> ()",
     op_select_topk},
    {"spread_topk", "spread_topk(Tensor payload, Tensor(a!) out, int block, int k) -> ()", op_spread_topk},
    {"add_topk", "add_topk(Tensor payload, Tensor(a!) acc, int block, int k, float factor) -> ()", op_add_topk},
    {"rotate_blocks", "rotate_blocks(Tensor(a!) x) -> ()", op_rotate_blocks},
    {"cross_entropy_rows",
     "cross_entropy_rows(Tensor(a!) logits, Tensor labels, Tensor row_scale, Tensor(b!) loss, int classes, float "
     "scale, "
     "float label_smoothing, int ignore_index, bool gradient) -> ()",
     op_cross_entropy_rows},
};

/* pool.c hands a framework whole grains to cut between, so torch may cut where it likes. */
static void op_pool(int64_t begin, int64_t end, int64_t grain, dc_range_fn fn, void *ctx) {
  if (dct__api.torch_parallel_for(begin, end, grain, fn, ctx)) fn(begin, end, ctx);
}
static int op_threads(void) {
  uint32_t n = 1;
  return dct__api.torch_get_num_threads(&n) ? 1 : (int)n;
}

/* NULL, or what failed. */
static const char *op_register_all(dct_library def, dct_library cpu, dct_library cuda, const dct_operator *op,
                                   size_t count) {
  static char why[128];
  for (size_t i = 0; i < count; i++)
    if (dct__api.aoti_torch_library_def(def, op[i].schema) ||
        dct__api.torch_library_impl(cpu, op[i].name, op[i].kernel, DCT_BUILD_VERSION) ||
        dct__api.torch_library_impl(cuda, op[i].name, op[i].kernel, DCT_BUILD_VERSION))
      return snprintf(why, sizeof why, "torch refused the operator deepc::%s", op[i].name), why;
  return NULL;
}

/* Registers everything, once per process. "" on success, else what failed. Called by python/deepc/core/ops.py after
 * torch is imported. */
DC_API const char *dct_register(void) {
  static int done;
  static char error[320];
  if (done) return error;
  done = 1;
  const char *missing = dct_resolve(&dct__api);
  if (missing) return snprintf(error, sizeof error, "%s", missing), error;
  /* Library handles live as long as the process: deleting one would unregister its operators. */
  dct_library def = NULL, cpu = NULL, cuda = NULL;
  if (dct__api.aoti_torch_library_init_fragment("deepc", __FILE__, __LINE__, &def) ||
      dct__api.aoti_torch_library_init_impl("deepc", "CPU", __FILE__, __LINE__, &cpu) ||
      dct__api.aoti_torch_library_init_impl("deepc", "CUDA", __FILE__, __LINE__, &cuda))
    return snprintf(error, sizeof error, "torch refused the operator library 'deepc'"), error;
  size_t fused_count;
  const dct_operator *fused = dct__fused(&fused_count);
  const char *why = op_register_all(def, cpu, cuda, op_rows, sizeof op_rows / sizeof *op_rows);
  if (!why) why = op_register_all(def, cpu, cuda, fused, fused_count);
  if (why) return snprintf(error, sizeof error, "%s", why), error;
  dc_set_parallel_hook(op_pool, op_threads);
  return error;
}
