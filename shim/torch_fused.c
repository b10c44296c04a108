/* torch_fused.c: kernels of the fused operators of torch.ops.deepc.*: norms, activations, rotary embedding. The rules
 * of torch_ops.c's head hold. Tensors of rows may have strides between rows; an empty tensor stands for an absent
 * weight, bias or gradient. */
#include "torch_call.h"

enum { MAX_DIM = 16, MAX_OUT = 4 };

/* ---- tensors of rows --------------------------------------------------------------------------------------------- */
typedef struct rows {
  dct_view v;
  int64_t rows, cols, stride, dim, size[MAX_DIM], step[MAX_DIM];
} rows;

static bool fused_look_shape(dct_call *c, dct_tensor t, const char *name, rows *r) {
  int64_t *size, *step;
  memset(r, 0, sizeof *r);
  if (!dct__look_strided(c, t, name, &r->v)) return false;
  if (dct__api.aoti_torch_get_dim(t, &r->dim) || r->dim > MAX_DIM)
    return dct__fail(c, "argument '%s' has more than %d dimensions", name, MAX_DIM);
  if (dct__api.aoti_torch_get_sizes(t, &size) || dct__api.aoti_torch_get_strides(t, &step))
    return dct__fail(c, "argument '%s' has no strides", name);
  for (int64_t k = 0; k < r->dim; k++) r->size[k] = size[k], r->step[k] = step[k];
  r->cols = r->dim ? r->size[r->dim - 1] : 1;
  r->rows = r->cols ? r->v.n / r->cols : 0;
  return true;
}

/* Rows are all dimensions but the last, evenly spaced; the last has stride 1. */
static bool fused_look_rows(dct_call *c, dct_tensor t, const char *name, rows *r) {
  int64_t next = -1; /* the stride that the next dimension outwards must have; an expanded one's would be 0 */
  if (!fused_look_shape(c, t, name, r)) return false;
  r->stride = r->cols;
  bool even = r->dim == 0 || r->cols <= 1 || r->step[r->dim - 1] == 1;
  for (int64_t k = r->dim - 2; k >= 0; k--) {
    if (r->size[k] == 1) continue;
    if (next < 0) r->stride = r->step[k];
    else even &= r->step[k] == next;
    next = r->step[k] * r->size[k];
  }
  if (r->v.n == 0 || (even && (r->rows <= 1 || r->stride >= r->cols))) return true;
  return dct__fail(
      c, "the rows of argument '%s' don't lie evenly spaced with their elements side by side; pass %s.contiguous()",
      name, name);
}

static bool fused_same_shape(dct_call *c, const rows *a, const char *an, const rows *b, const char *bn) {
  bool same = a->dim == b->dim && a->v.dtype == b->v.dtype;
  for (int64_t k = 0; same && k < a->dim; k++) same = a->size[k] == b->size[k];
  return same ? true : dct__fail(c, "'%s' and '%s' differ in shape or dtype; they must agree", an, bn);
}

static bool fused_low(dct_call *c, const dct_view *v, const char *name) {
  if (v->dtype == DC_F32 || v->dtype == DC_BF16 || v->dtype == DC_F16) return true;
  return dct__fail(c, "argument '%s' is %s; it takes float32, bfloat16 and float16", name, dc_dtype_name(v->dtype));
}

/* A vector over the columns, or an empty tensor: then *ptr is NULL. */
static bool fused_look_columns(dct_call *c, dct_tensor t, const char *name, const rows *x, dct_view *v,
                               const void **ptr) {
  *ptr = NULL;
  if (!dct__look(c, t, name, v) || !fused_low(c, v, name)) return false;
  if (v->n == 0) return true;
  if (v->n != x->cols)
    return dct__fail(c, "'%s' has %" PRId64 " elements; the last dimension has %" PRId64, name, v->n, x->cols);
  *ptr = v->ptr;
  return true;
}

/* ---- results ----------------------------------------------------------------------------------------------------- */
typedef struct outputs {
  dct_tensor tensor[MAX_OUT];
  int n;
} outputs;

static int32_t fused_torch_dtype(int dtype) {
  return dtype == DC_F32    ? dct__api.aoti_torch_dtype_float32()
         : dtype == DC_BF16 ? dct__api.aoti_torch_dtype_bfloat16()
                            : dct__api.aoti_torch_dtype_float16();
}

/* A new tensor, the next result; *ptr: its storage. */
static bool fused_result(dct_call *c, outputs *o, int64_t dim, const int64_t *size, const int64_t *step, int dtype,
                         void **ptr) {
  int64_t n = 1;
  dct_tensor t = NULL;
  *ptr = NULL;
  for (int64_t k = 0; k < dim; k++) n *= size[k];
  if (dct__api.aoti_torch_empty_strided(dim, size, step, fused_torch_dtype(dtype), c->device, c->index, &t))
    return dct__fail(c, "torch could not allocate %" PRId64 " elements for a result", n);
  o->tensor[o->n++] = t;
  return n && dct__api.aoti_torch_get_data_ptr(t, ptr) ? dct__fail(c, "a result has no storage") : true;
}

static bool fused_result_like(dct_call *c, outputs *o, const rows *x, int dtype, int64_t dim, void **ptr) {
  int64_t step[MAX_DIM], next = 1;
  for (int64_t k = dim - 1; k >= 0; k--) step[k] = next, next *= x->size[k] > 1 ? x->size[k] : 1;
  return fused_result(c, o, dim, x->size, step, dtype, ptr);
}

static bool fused_result_vector(dct_call *c, outputs *o, int64_t n, int dtype, void **ptr) {
  const int64_t step = 1;
  return fused_result(c, o, 1, &n, &step, dtype, ptr);
}

/* Inputs go; results, if all is well, take their places. Raises. */
static void fused_leave(dct_call *c, dct_value *stack, int inputs, outputs *o, int line) {
  dct__delete_tensors(stack, inputs);
  for (int k = 0; k < o->n; k++) {
    if (c->error[0]) dct__api.aoti_torch_delete_tensor_object(o->tensor[k]);
    else stack[k] = (dct_value)(uintptr_t)o->tensor[k];
  }
  dct__finish(c, __FILE__, line);
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */
/* The four forward operators: stack is x, [residual], weight, [bias], eps, [offset]. Results: y, [sum], [mean], rstd.
 */
static void fused_norm(dct_value *stack, const char *op, bool add, bool center) {
  dct_call c;
  dct__begin(&c, op);
  outputs o = {.n = 0};
  rows x, residual;
  dct_view weight, bias = {0};
  const int at = 1 + add, scalars = at + 1 + center;
  dc_norm_args a = {.struct_size = sizeof a,
                    .eps = (float)value_double(stack[scalars]),
                    .offset = center ? 0.0f : (float)value_double(stack[scalars + 1])};
  bool ok = fused_look_rows(&c, value_tensor(stack[0]), "x", &x) && fused_low(&c, &x.v, "x") &&
            fused_look_columns(&c, value_tensor(stack[at]), "weight", &x, &weight, &a.weight);
  if (ok && add)
    ok = fused_look_rows(&c, value_tensor(stack[1]), "residual", &residual) &&
         fused_same_shape(&c, &residual, "residual", &x, "x");
  if (ok && center) ok = fused_look_columns(&c, value_tensor(stack[at + 1]), "bias", &x, &bias, &a.bias);
  if (ok && a.weight && a.bias && weight.dtype != bias.dtype)
    ok = dct__fail(&c, "'weight' and 'bias' differ in dtype; they must agree");
  void *mean = NULL, *rstd = NULL;
  ok = ok && fused_result_like(&c, &o, &x, x.v.dtype, x.dim, &a.y) &&
       (!add || fused_result_like(&c, &o, &x, x.v.dtype, x.dim, &a.sum)) &&
       (!center || fused_result_like(&c, &o, &x, DC_F32, x.dim ? x.dim - 1 : 0, &mean)) &&
       fused_result_like(&c, &o, &x, DC_F32, x.dim ? x.dim - 1 : 0, &rstd);
  if (ok && x.v.n) {
    a.x = x.v.ptr, a.mean = mean, a.rstd = rstd, a.rows = x.rows, a.cols = x.cols, a.x_stride = x.stride,
    a.dtype = x.v.dtype;
    if (add) a.residual = residual.v.ptr, a.residual_stride = residual.stride;
    a.weight_dtype = a.weight ? weight.dtype : a.bias ? bias.dtype : DC_F32;
    dct__status(&c, c.cuda ? c.cuda->norm(&a, c.stream) : dc_norm(&a));
  }
  fused_leave(&c, stack, scalars, &o, __LINE__);
}

static void fused_rms_norm(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  fused_norm(stack, "rms_norm", false, false);
}
static void fused_add_rms_norm(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  fused_norm(stack, "add_rms_norm", true, false);
}
static void fused_layer_norm(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  fused_norm(stack, "layer_norm", false, true);
}
static void fused_add_layer_norm(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  fused_norm(stack, "add_layer_norm", true, true);
}

static bool fused_look_stats(dct_call *c, dct_tensor t, const char *name, const rows *x, dct_view *v) {
  if (!dct__look(c, t, name, v) || !dct__must_be_f32(c, v, name)) return false;
  return v->n == x->rows ? true
                         : dct__fail(c, "'%s' has %" PRId64 " elements for %" PRId64 " rows", name, v->n, x->rows);
}

/* Memory for n fp32 sums: a tensor that is no result. */
static bool fused_workspace(dct_call *c, int64_t n, dct_tensor *t, float **ptr) {
  const int64_t step = 1;
  void *p = NULL;
  *ptr = NULL;
  if (n == 0) return true;
  if (dct__api.aoti_torch_empty_strided(1, &n, &step, fused_torch_dtype(DC_F32), c->device, c->index, t) ||
      dct__api.aoti_torch_get_data_ptr(*t, &p))
    return dct__fail(c, "torch could not allocate %" PRId64 " partial sums", n);
  *ptr = p;
  return true;
}

/* dy, dsum, x, weight, mean, rstd, offset, dweight wanted, dbias wanted */
static void fused_norm_grad(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "norm_grad");
  outputs o = {.n = 0};
  rows dy, dsum, x;
  dct_view weight, mean = {0}, rstd;
  dct_tensor partial = NULL;
  const bool has_weight = value_bool(stack[7]), has_bias = value_bool(stack[8]);
  dc_norm_grad_args a = {.struct_size = sizeof a, .offset = (float)value_double(stack[6])};
  bool ok = fused_look_rows(&c, value_tensor(stack[2]), "x", &x) && fused_low(&c, &x.v, "x") &&
            fused_look_rows(&c, value_tensor(stack[0]), "dy", &dy) && fused_same_shape(&c, &dy, "dy", &x, "x") &&
            fused_look_rows(&c, value_tensor(stack[1]), "dsum", &dsum) &&
            (dsum.v.n == 0 || fused_same_shape(&c, &dsum, "dsum", &x, "x")) &&
            fused_look_columns(&c, value_tensor(stack[3]), "weight", &x, &weight, &a.weight) &&
            fused_look_stats(&c, value_tensor(stack[5]), "rstd", &x, &rstd) &&
            dct__look(&c, value_tensor(stack[4]), "mean", &mean) &&
            (mean.n == 0 || fused_look_stats(&c, value_tensor(stack[4]), "mean", &x, &mean));
  if (ok && x.v.n && (dy.stride != x.cols || (dsum.v.n && dsum.stride != x.cols)))
    ok = x.rows == 1 || dct__fail(&c, "'dy' and 'dsum' must be contiguous");
  ok = ok && fused_result_like(&c, &o, &x, x.v.dtype, x.dim, &a.dx) &&
       fused_result_vector(&c, &o, has_weight ? x.cols : 0, weight.dtype, &a.dweight) &&
       fused_result_vector(&c, &o, has_bias ? x.cols : 0, weight.dtype, &a.dbias) &&
       fused_workspace(&c, (has_weight + has_bias) * dc_row_blocks(x.rows) * x.cols, &partial, &a.partial);
  if (ok && x.cols) {
    a.dy = dy.v.ptr, a.dsum = dsum.v.n ? dsum.v.ptr : NULL, a.x = x.v.ptr, a.mean = mean.n ? mean.ptr : NULL,
    a.rstd = rstd.ptr;
    a.rows = x.rows, a.cols = x.cols, a.x_stride = x.stride, a.dtype = x.v.dtype, a.weight_dtype = weight.dtype;
    dct__status(&c, c.cuda ? c.cuda->norm_grad(&a, c.stream) : dc_norm_grad(&a));
  }
  if (partial) dct__api.aoti_torch_delete_tensor_object(partial);
  fused_leave(&c, stack, 6, &o, __LINE__);
}

/* ---- activations ------------------------------------------------------------------------------------------------- */
static void fused_swiglu(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "swiglu");
  outputs o = {.n = 0};
  rows gate, up;
  dc_swiglu_args a = {.struct_size = sizeof a};
  if (fused_look_rows(&c, value_tensor(stack[0]), "gate", &gate) && fused_low(&c, &gate.v, "gate") &&
      fused_look_rows(&c, value_tensor(stack[1]), "up", &up) && fused_same_shape(&c, &up, "up", &gate, "gate") &&
      fused_result_like(&c, &o, &gate, gate.v.dtype, gate.dim, &a.out) && gate.v.n) {
    a.gate = gate.v.ptr, a.up = up.v.ptr, a.rows = gate.rows, a.cols = gate.cols, a.dtype = gate.v.dtype;
    a.gate_stride = gate.stride, a.up_stride = up.stride, a.out_stride = gate.cols;
    dct__status(&c, c.cuda ? c.cuda->swiglu(&a, c.stream) : dc_swiglu(&a));
  }
  fused_leave(&c, stack, 2, &o, __LINE__);
}

static void fused_swiglu_grad(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "swiglu_grad");
  outputs o = {.n = 0};
  rows dout, gate, up;
  dc_swiglu_grad_args a = {.struct_size = sizeof a};
  if (fused_look_rows(&c, value_tensor(stack[1]), "gate", &gate) && fused_low(&c, &gate.v, "gate") &&
      fused_look_rows(&c, value_tensor(stack[0]), "dout", &dout) &&
      fused_same_shape(&c, &dout, "dout", &gate, "gate") && fused_look_rows(&c, value_tensor(stack[2]), "up", &up) &&
      fused_same_shape(&c, &up, "up", &gate, "gate") &&
      fused_result_like(&c, &o, &gate, gate.v.dtype, gate.dim, &a.dgate) &&
      fused_result_like(&c, &o, &gate, gate.v.dtype, gate.dim, &a.dup) && gate.v.n) {
    a.dout = dout.v.ptr, a.gate = gate.v.ptr, a.up = up.v.ptr, a.rows = gate.rows, a.cols = gate.cols,
    a.dtype = gate.v.dtype;
    a.dout_stride = dout.stride, a.gate_stride = gate.stride, a.up_stride = up.stride,
    a.dgate_stride = a.dup_stride = gate.cols;
    dct__status(&c, c.cuda ? c.cuda->swiglu_grad(&a, c.stream) : dc_swiglu_grad(&a));
  }
  fused_leave(&c, stack, 3, &o, __LINE__);
}

static void fused_gelu(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "gelu");
  outputs o = {.n = 0};
  rows x;
  dct_view bias;
  dc_gelu_args a = {.struct_size = sizeof a, .form = value_bool(stack[2]) ? DC_GELU_TANH : DC_GELU_ERF};
  if (fused_look_rows(&c, value_tensor(stack[0]), "x", &x) && fused_low(&c, &x.v, "x") &&
      fused_look_columns(&c, value_tensor(stack[1]), "bias", &x, &bias, &a.bias) &&
      fused_result_like(&c, &o, &x, x.v.dtype, x.dim, &a.out) && x.v.n) {
    a.x = x.v.ptr, a.rows = x.rows, a.cols = x.cols, a.x_stride = x.stride, a.dtype = x.v.dtype,
    a.bias_dtype = bias.dtype;
    dct__status(&c, c.cuda ? c.cuda->gelu(&a, c.stream) : dc_gelu(&a));
  }
  fused_leave(&c, stack, 2, &o, __LINE__);
}

/* dout, x, bias, tanh, dbias wanted */
static void fused_gelu_grad(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "gelu_grad");
  outputs o = {.n = 0};
  rows dout, x;
  dct_view bias;
  dct_tensor partial = NULL;
  const bool has_bias = value_bool(stack[4]);
  dc_gelu_grad_args a = {.struct_size = sizeof a, .form = value_bool(stack[3]) ? DC_GELU_TANH : DC_GELU_ERF};
  bool ok = fused_look_rows(&c, value_tensor(stack[1]), "x", &x) && fused_low(&c, &x.v, "x") &&
            fused_look_rows(&c, value_tensor(stack[0]), "dout", &dout) &&
            fused_same_shape(&c, &dout, "dout", &x, "x") &&
            fused_look_columns(&c, value_tensor(stack[2]), "bias", &x, &bias, &a.bias);
  if (ok && x.rows > 1 && x.cols && dout.stride != x.cols) ok = dct__fail(&c, "'dout' must be contiguous");
  ok = ok && fused_result_like(&c, &o, &x, x.v.dtype, x.dim, &a.dx) &&
       fused_result_vector(&c, &o, has_bias ? x.cols : 0, bias.dtype, &a.dbias) &&
       fused_workspace(&c, has_bias * dc_row_blocks(x.rows) * x.cols, &partial, &a.partial);
  if (ok && x.cols) {
    a.dout = dout.v.ptr, a.x = x.v.ptr, a.rows = x.rows, a.cols = x.cols, a.x_stride = x.stride, a.dtype = x.v.dtype,
    a.bias_dtype = bias.dtype;
    dct__status(&c, c.cuda ? c.cuda->gelu_grad(&a, c.stream) : dc_gelu_grad(&a));
  }
  if (partial) dct__api.aoti_torch_delete_tensor_object(partial);
  fused_leave(&c, stack, 3, &o, __LINE__);
}

/* ---- rotary embedding -------------------------------------------------------------------------------------------- */
/* The result lies in memory in the order of x's dimensions, without gaps, as torch.empty_like makes it, but always with
 * the last one innermost. An expanded dimension, whose stride of 0 says nothing, keeps its place among the others. */
static void fused_packed_like(const rows *x, int64_t *step) {
  int order[MAX_DIM], n = 0; /* from the inside out */
  for (int k = (int)x->dim - 1; k >= 0; k--) {
    int at = n++;
    order[at] = k;
    for (int inner = at - 1; inner > 0 && x->step[k]; inner--) {
      const int other = order[inner];
      if (!x->step[other]) continue;
      if (x->step[other] < x->step[k]) break;
      if (x->step[other] == x->step[k] && x->size[other] <= x->size[k]) continue;
      order[inner] = k, order[at] = other, at = inner;
    }
  }
  int64_t next = 1;
  for (int k = 0; k < n; k++) step[order[k]] = next, next *= x->size[order[k]] > 1 ? x->size[order[k]] : 1;
}

/* Strides of a table over x's leading dimensions, 0 where it is broadcast. */
static bool fused_look_table(dct_call *c, dct_tensor t, const char *name, const rows *x, rows *r, int64_t *step) {
  if (!fused_look_shape(c, t, name, r) || !fused_low(c, &r->v, name)) return false;
  if (r->dim < 1 || r->dim > x->dim)
    return dct__fail(c, "'%s' has %" PRId64 " dimensions and 'x' %" PRId64, name, r->dim, x->dim);
  if (r->cols > 1 && r->step[r->dim - 1] != 1)
    return dct__fail(c, "the last dimension of '%s' has gaps; pass %s.contiguous()", name, name);
  for (int64_t k = 0; k < x->dim - 1; k++) {
    const int64_t own = k - (x->dim - r->dim); /* dimensions are matched from the right */
    if (own >= 0 && r->size[own] != 1 && r->size[own] != x->size[k])
      return dct__fail(c,
                       "'%s' can't be broadcast: dimension %" PRId64 " has %" PRId64 " elements and 'x' has %" PRId64,
                       name, own, r->size[own], x->size[k]);
    step[k + 4 - x->dim] = own >= 0 && r->size[own] != 1 ? r->step[own] : 0;
  }
  return true;
}

static void fused_rotary(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "rotary");
  outputs o = {.n = 0};
  rows x, cos, sin;
  int64_t step[MAX_DIM];
  dc_rotary_args a = {.struct_size = sizeof a, .size = {1, 1, 1}, .inverse = value_bool(stack[3])};
  bool ok = fused_look_shape(&c, value_tensor(stack[0]), "x", &x) && fused_low(&c, &x.v, "x");
  if (ok && (x.dim < 1 || x.dim > 4)) ok = dct__fail(&c, "'x' has %" PRId64 " dimensions; it must have 1 to 4", x.dim);
  if (ok && x.cols > 1 && x.v.n && x.step[x.dim - 1] != 1)
    ok = dct__fail(&c, "the last dimension of 'x' has gaps; pass x.contiguous()");
  ok = ok && fused_look_table(&c, value_tensor(stack[1]), "cos", &x, &cos, a.cos_stride) &&
       fused_look_table(&c, value_tensor(stack[2]), "sin", &x, &sin, a.sin_stride);
  if (ok && (cos.cols != sin.cols || cos.v.dtype != sin.v.dtype))
    ok = dct__fail(&c, "'cos' and 'sin' differ in their last dimension or dtype");
  if (ok) fused_packed_like(&x, step);
  if (ok && fused_result(&c, &o, x.dim, x.size, step, x.v.dtype, &a.out) && x.v.n) {
    for (int64_t k = 0; k < x.dim - 1; k++)
      a.size[k + 4 - x.dim] = x.size[k], a.x_stride[k + 4 - x.dim] = x.step[k], a.out_stride[k + 4 - x.dim] = step[k];
    a.x = x.v.ptr, a.cos = cos.v.ptr, a.sin = sin.v.ptr, a.cols = x.cols, a.rotated = cos.cols, a.dtype = x.v.dtype,
    a.table_dtype = cos.v.dtype;
    dct__status(&c, c.cuda ? c.cuda->rotary(&a, c.stream) : dc_rotary(&a));
  }
  fused_leave(&c, stack, 3, &o, __LINE__);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */
/* [batch, heads, rows, dim] with the last dimension side by side. */
static bool fused_look_heads(dct_call *c, dct_tensor t, const char *name, const rows *like, rows *r, int64_t *stride) {
  if (!fused_look_shape(c, t, name, r) || !fused_low(c, &r->v, name)) return false;
  if (r->dim != 4)
    return dct__fail(c, "'%s' has %" PRId64 " dimensions; it must have 4: [batch, heads, rows, dim]", name, r->dim);
  if (like && (r->size[0] != like->size[0] || r->size[3] != like->size[3] || r->v.dtype != like->v.dtype))
    return dct__fail(c, "'%s' and 'q' differ in their first or last dimension, or in dtype; they must agree", name);
  if (r->cols > 1 && r->v.n && r->step[3] != 1)
    return dct__fail(c, "the last dimension of '%s' has gaps; pass %s.contiguous()", name, name);
  for (int k = 0; k < 3; k++) stride[k] = r->step[k];
  return true;
}

static bool fused_result_heads(dct_call *c, outputs *o, const rows *like, int64_t *stride, void **ptr) {
  int64_t step[MAX_DIM];
  fused_packed_like(like, step);
  for (int k = 0; k < 3; k++) stride[k] = step[k];
  return fused_result(c, o, 4, like->size, step, like->v.dtype, ptr);
}

/* A mask's tensor of one dtype and size; an empty one stands for none, then *ptr is NULL. */
static bool fused_look_mask(dct_call *c, dct_value value, const char *name, int dtype, int64_t n, const void **ptr) {
  dct_view v;
  *ptr = NULL;
  if (!dct__look(c, value_tensor(value), name, &v)) return false;
  if (v.n == 0) return true;
  if (v.dtype != dtype)
    return dct__fail(c, "'%s' is %s; it must be %s", name, dc_dtype_name(v.dtype), dc_dtype_name(dtype));
  if (n >= 0 && v.n != n) return dct__fail(c, "'%s' has %" PRId64 " elements; it must have %" PRId64, name, v.n, n);
  *ptr = v.ptr;
  return true;
}

/* [1 or heads, blocks of rows, blocks of keys] */
static bool fused_look_layout(dct_call *c, dct_value value, int64_t block, const rows *q, const rows *k,
                              dc_attention_mask *m) {
  rows l;
  const void *ptr;
  if (!fused_look_shape(c, value_tensor(value), "layout", &l)) return false;
  if (l.v.n == 0) return true;
  if (block < 1) return dct__fail(c, "block = %" PRId64 "; it must be a multiple of 16 from 16 to 128", block);
  const int64_t down = (q->size[2] + block - 1) / block, across = (k->size[2] + block - 1) / block;
  if (l.dim != 3 || l.size[1] != down || l.size[2] != across)
    return dct__fail(c,
                     "'layout' must be [1 or heads, %" PRId64 ", %" PRId64 "]: %" PRId64 " rows and %" PRId64
                     " keys in blocks of %" PRId64,
                     down, across, q->size[2], k->size[2], block);
  if (!fused_look_mask(c, value, "layout", DC_U8, -1, &ptr)) return false;
  m->layout = ptr, m->block = block, m->layout_heads = l.size[0];
  return true;
}

/* [1 or batch, 1 or heads, 1 or rows, keys], the last dimension side by side; bool or a float type; or empty. */
static bool fused_look_bias(dct_call *c, dct_value value, const rows *q, const rows *k, rows *r, dc_attention_mask *m) {
  if (!fused_look_shape(c, value_tensor(value), "bias", r)) return false;
  if (r->v.n == 0) return true;
  bool fits = r->dim == 4 && r->size[3] == k->size[2];
  for (int d = 0; fits && d < 3; d++) fits = r->size[d] == 1 || r->size[d] == q->size[d];
  if (!fits)
    return dct__fail(c,
                     "'bias' must be [1 or %" PRId64 ", 1 or %" PRId64 ", 1 or %" PRId64 ", %" PRId64
                     "]: batch, heads, rows, keys",
                     q->size[0], q->size[1], q->size[2], k->size[2]);
  if (r->size[3] > 1 && r->step[3] != 1)
    return dct__fail(c, "the last dimension of 'bias' has gaps; pass bias.contiguous()");
  if (r->v.dtype != DC_U8 && !fused_low(c, &r->v, "bias")) return false;
  m->bias = r->v.ptr, m->bias_dtype = r->v.dtype;
  for (int d = 0; d < 3; d++) m->bias_stride[d] = r->size[d] == 1 ? 0 : r->step[d];
  return true;
}

/* seed: int64 [1] on the CPU, wherever the others are, or empty where the rate is 0; rate, batch, head. */
static bool fused_look_dropout(dct_call *c, const dct_value *at, dc_attention_dropout *d) {
  dct_call own;
  dct_view seed;
  d->rate = (float)value_double(at[1]), d->batch = (int64_t)at[2], d->head = (int64_t)at[3];
  if (d->rate == 0) return true;
  dct__begin(&own, c->op);
  if (!dct__look(&own, value_tensor(at[0]), "seed", &seed)) {
    if (!c->error[0]) memcpy(c->error, own.error, sizeof c->error);
    return false;
  }
  if (own.cuda) return dct__fail(c, "'seed' is on a GPU; pass seed.cpu()");
  if (seed.n != 1 || seed.dtype != DC_I64) return dct__fail(c, "'seed' must be one int64, for a dropout above 0");
  memcpy(&d->seed, seed.ptr, sizeof d->seed);
  return true;
}

/* layout, block, q_group, k_group, slope, bias, seed, dropout, batch, head: ten values from `at` on. */
enum { MASK_VALUES = 10 };
static bool fused_look_masks(dct_call *c, const dct_value *at, const rows *q, const rows *k, rows *bias,
                             dc_attention_mask *m) {
  const void *q_group, *k_group, *slope;
  if (!fused_look_layout(c, at[0], (int64_t)at[1], q, k, m) ||
      !fused_look_mask(c, at[2], "q_group", DC_I32, q->size[0] * q->size[2], &q_group) ||
      !fused_look_mask(c, at[3], "k_group", DC_I32, k->size[0] * k->size[2], &k_group) ||
      !fused_look_mask(c, at[4], "slope", DC_F32, q->size[1], &slope) || !fused_look_bias(c, at[5], q, k, bias, m) ||
      !fused_look_dropout(c, at + 6, &m->dropout))
    return false;
  m->q_group = q_group, m->k_group = k_group, m->slope = slope;
  return true;
}

/* The mask's six tensors stand behind `inputs` others, with the number `block` among them. */
static void fused_leave_masked(dct_call *c, dct_value *stack, int inputs, bool masked, outputs *o, int line) {
  if (masked) {
    dct__delete_tensors(stack + inputs, 1);
    dct__delete_tensors(stack + inputs + 2, 5);
  }
  fused_leave(c, stack, inputs, o, line);
}

/* q, k, v, causal, scale; masked: q, k, v, the masks' values, causal, diagonal, window, scale */
static void fused_attend(dct_value *stack, bool masked) {
  dct_call c;
  dct__begin(&c, masked ? "block_sparse_attention" : "attention");
  outputs o = {.n = 0};
  rows q, k, v, bias;
  void *lse = NULL;
  const int at = masked ? 3 + MASK_VALUES : 3;
  dc_attention_args a = {.struct_size = sizeof a,
                         .causal = value_bool(stack[at]),
                         .diagonal = masked ? (int64_t)stack[at + 1] : 0,
                         .scale = (float)value_double(stack[at + (masked ? 3 : 1)])};
  a.mask.window = masked ? (int64_t)stack[at + 2] : 0;
  bool ok = fused_look_heads(&c, value_tensor(stack[0]), "q", NULL, &q, a.q_stride) &&
            fused_look_heads(&c, value_tensor(stack[1]), "k", &q, &k, a.k_stride) &&
            fused_look_heads(&c, value_tensor(stack[2]), "v", &q, &v, a.v_stride) &&
            fused_same_shape(&c, &v, "v", &k, "k") &&
            (!masked || fused_look_masks(&c, stack + 3, &q, &k, &bias, &a.mask)) &&
            fused_result_heads(&c, &o, &q, a.out_stride, &a.out) && fused_result_like(&c, &o, &q, DC_F32, 3, &lse);
  if (ok) {
    a.q = q.v.ptr, a.k = k.v.ptr, a.v = v.v.ptr, a.lse = lse, a.dtype = q.v.dtype;
    a.batch = q.size[0], a.heads = q.size[1], a.kv_heads = k.size[1], a.rows = q.size[2], a.keys = k.size[2],
    a.dim = q.size[3];
    dct__status(&c, c.cuda ? c.cuda->attention(&a, c.stream) : dc_attention(&a));
  }
  fused_leave_masked(&c, stack, 3, masked, &o, __LINE__);
}

static void fused_attention(dct_value *stack, uint64_t num_args, uint64_t num_outputs) { fused_attend(stack, false); }
static void fused_sparse_attention(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  fused_attend(stack, true);
}

/* The bias's gradient, fp32 and zeros, or an empty result. */
static bool fused_result_bias(dct_call *c, outputs *o, const rows *bias, bool wanted, dc_attention_grad_args *a) {
  void *ptr;
  int64_t step = 1;
  if (!wanted) return fused_result_vector(c, o, 0, DC_F32, &ptr);
  if (!a->mask.bias) return dct__fail(c, "the gradient of a bias that is not there was asked for");
  if (!fused_result_like(c, o, bias, DC_F32, 4, &ptr)) return false;
  const int64_t bytes = bias->v.n * (int64_t)sizeof(float);
  if (!c->cuda) memset(ptr, 0, (size_t)bytes);
  else if (!dct__status(c, c->cuda->zero(ptr, bytes, c->stream))) return false;
  for (int d = 3; d >= 0; step *= bias->size[d], d--)
    if (d < 3) a->dbias_stride[d] = bias->size[d] == 1 ? 0 : step;
  a->dbias = ptr;
  return true;
}

/* On a GPU, with one number of each query beside: a tensor that is no result. */
static void fused_attend_grad_cuda(dct_call *c, const dc_attention_grad_args *a) {
  dct_tensor deltas = NULL;
  float *ptr;
  if (fused_workspace(c, a->batch * a->heads * a->rows, &deltas, &ptr))
    dct__status(c, c->cuda->attention_grad(a, ptr, c->stream));
  if (deltas) dct__api.aoti_torch_delete_tensor_object(deltas);
}

/* dout, q, k, v, out, lse, causal, scale; masked: six, then as above from `layout` on, and whether dbias is wanted */
static void fused_attend_grad(dct_value *stack, bool masked) {
  dct_call c;
  dct__begin(&c, masked ? "block_sparse_attention_grad" : "attention_grad");
  outputs o = {.n = 0};
  rows dout, q, k, v, out, bias;
  dct_view lse;
  const int at = masked ? 6 + MASK_VALUES : 6;
  dc_attention_grad_args a = {.struct_size = sizeof a,
                              .causal = value_bool(stack[at]),
                              .diagonal = masked ? (int64_t)stack[at + 1] : 0,
                              .scale = (float)value_double(stack[at + (masked ? 3 : 1)])};
  a.mask.window = masked ? (int64_t)stack[at + 2] : 0;
  bool ok = fused_look_heads(&c, value_tensor(stack[1]), "q", NULL, &q, a.q_stride) &&
            fused_look_heads(&c, value_tensor(stack[0]), "dout", &q, &dout, a.dout_stride) &&
            fused_same_shape(&c, &dout, "dout", &q, "q") &&
            fused_look_heads(&c, value_tensor(stack[2]), "k", &q, &k, a.k_stride) &&
            fused_look_heads(&c, value_tensor(stack[3]), "v", &q, &v, a.v_stride) &&
            fused_same_shape(&c, &v, "v", &k, "k") &&
            fused_look_heads(&c, value_tensor(stack[4]), "out", &q, &out, a.out_stride) &&
            fused_same_shape(&c, &out, "out", &q, "q") &&
            (!masked || fused_look_masks(&c, stack + 6, &q, &k, &bias, &a.mask)) &&
            dct__look(&c, value_tensor(stack[5]), "lse", &lse) && dct__must_be_f32(&c, &lse, "lse");
  if (ok && lse.n != q.size[0] * q.size[1] * q.size[2])
    ok = dct__fail(&c, "'lse' has %" PRId64 " elements; it must have one of each row of 'q'", lse.n);
  ok = ok && fused_result_heads(&c, &o, &q, a.dq_stride, &a.dq) && fused_result_heads(&c, &o, &k, a.dk_stride, &a.dk) &&
       fused_result_heads(&c, &o, &v, a.dv_stride, &a.dv) &&
       (!masked || fused_result_bias(&c, &o, &bias, value_bool(stack[at + 4]), &a));
  if (ok) {
    a.dout = dout.v.ptr, a.q = q.v.ptr, a.k = k.v.ptr, a.v = v.v.ptr, a.out = out.v.ptr, a.lse = lse.ptr;
    a.dtype = q.v.dtype, a.batch = q.size[0], a.heads = q.size[1], a.kv_heads = k.size[1], a.rows = q.size[2],
    a.keys = k.size[2], a.dim = q.size[3];
    if (c.cuda) fused_attend_grad_cuda(&c, &a);
    else dct__status(&c, dc_attention_grad(&a));
  }
  fused_leave_masked(&c, stack, 6, masked, &o, __LINE__);
}

static void fused_attention_grad(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  fused_attend_grad(stack, false);
}
static void fused_sparse_attention_grad(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  fused_attend_grad(stack, true);
}

/* ---- products of matrices ---------------------------------------------------------------------------------------- */
static bool fused_look_matrix(dct_call *c, dct_tensor t, const char *name, rows *r) {
  if (!fused_look_shape(c, t, name, r)) return false;
  if (r->v.dtype != DC_F32 && r->v.dtype != DC_BF16)
    return dct__fail(c, "'%s' must be float32 or bfloat16, got %s", name, dc_dtype_name(r->v.dtype));
  return r->dim == 2 ? true : dct__fail(c, "'%s' has %" PRId64 " dimensions; a matrix has 2", name, r->dim);
}

/* A size of 1 has whatever stride. */
static void fused_operand(const rows *r, int64_t *stride) {
  stride[0] = r->size[0] > 1 ? r->step[0] : 1, stride[1] = r->size[1] > 1 ? r->step[1] : 1;
}

static void fused_gemm(dct_value *stack, uint64_t num_args, uint64_t num_outputs) {
  dct_call c;
  dct__begin(&c, "gemm");
  rows a, b, added, out;
  bool ok = fused_look_matrix(&c, value_tensor(stack[0]), "a", &a) &&
            fused_look_matrix(&c, value_tensor(stack[1]), "b", &b) &&
            fused_look_matrix(&c, value_tensor(stack[2]), "c", &added) &&
            fused_look_matrix(&c, value_tensor(stack[3]), "out", &out);
  if (ok && c.cuda) ok = dct__fail(&c, "'a' is on a CUDA device, where torch.mm is faster; pass CPU tensors");
  if (ok && (added.size[0] != out.size[0] || added.size[1] != out.size[1]))
    ok = dct__fail(&c, "'c' is [%" PRId64 ", %" PRId64 "] and 'out' [%" PRId64 ", %" PRId64 "]", added.size[0],
                   added.size[1], out.size[0], out.size[1]);
  if (ok && (a.size[1] != b.size[0] || out.size[0] != a.size[0] || out.size[1] != b.size[1]))
    ok = dct__fail(&c,
                   "[%" PRId64 ", %" PRId64 "] = [%" PRId64 ", %" PRId64 "] x [%" PRId64 ", %" PRId64 "] does not fit",
                   out.size[0], out.size[1], a.size[0], a.size[1], b.size[0], b.size[1]);
  if (ok && (a.v.dtype != out.v.dtype || b.v.dtype != out.v.dtype || added.v.dtype != out.v.dtype))
    ok = dct__fail(&c, "'a' is %s, 'b' %s, 'c' %s, 'out' %s; a product has one dtype", dc_dtype_name(a.v.dtype),
                   dc_dtype_name(b.v.dtype), dc_dtype_name(added.v.dtype), dc_dtype_name(out.v.dtype));
  if (ok && out.size[1] > 1 && (out.step[1] != 1 || added.step[1] != 1))
    ok = dct__fail(&c, "the elements of a row of '%s' don't lie side by side", out.step[1] != 1 ? "out" : "c");
  if (ok) {
    dc_gemm_args t = {.struct_size = sizeof t,
                      .a = a.v.ptr,
                      .b = b.v.ptr,
                      .c = added.v.ptr,
                      .out = out.v.ptr,
                      .m = out.size[0],
                      .n = out.size[1],
                      .k = a.size[1],
                      .c_stride = added.step[0],
                      .out_stride = out.step[0],
                      .alpha = (float)value_double(stack[5]),
                      .beta = (float)value_double(stack[4]),
                      .dtype = out.v.dtype};
    fused_operand(&a, t.a_stride), fused_operand(&b, t.b_stride);
    dct__status(&c, dc_gemm(&t));
  }
  dct__delete_tensors(stack, 4);
  dct__finish(&c, __FILE__, __LINE__);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */
static const dct_operator fused_operators[] = {
    {"gemm", "gemm(Tensor a, Tensor b, Tensor c, Tensor(a!) out, float beta, float alpha) -> ()", fused_gemm},
    {"rms_norm", "rms_norm(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)", fused_rms_norm},
    {"add_rms_norm",
     "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor, Tensor)",
     fused_add_rms_norm},
    {"layer_norm", "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
     fused_layer_norm},
    {"add_layer_norm",
     "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor, "
     "Tensor)",
     fused_add_layer_norm},
    {"norm_grad",
     "norm_grad(Tensor dy, Tensor dsum, Tensor x, Tensor weight, Tensor mean, Tensor rstd, float offset, bool dweight, "
     "bool dbias) "
     "-> (Tensor, Tensor, Tensor)",
     fused_norm_grad},
    {"swiglu", "swiglu(Tensor gate, Tensor up) -> Tensor", fused_swiglu},
    {"swiglu_grad", "swiglu_grad(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)", fused_swiglu_grad},
    {"gelu", "gelu(Tensor x, Tensor bias, bool tanh) -> Tensor", fused_gelu},
    {"gelu_grad", "gelu_grad(Tensor dout, Tensor x, Tensor bias, bool tanh, bool dbias) -> (Tensor, Tensor)",
     fused_gelu_grad},
    {"rotary", "rotary(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor", fused_rotary},
    {"attention", "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)",
     fused_attention},
    {"attention_grad",
     "attention_grad(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, float scale) -> "
     "(Tensor, Tensor, Tensor)",
     fused_attention_grad},
    {"block_sparse_attention",
     "block_sparse_attention(Tensor q, Tensor k, Tensor v, Tensor layout, int block, Tensor q_group, Tensor k_group, "
     "Tensor slope, Tensor bias, Tensor seed, float dropout, int batch, int head, bool causal, int diagonal, int "
     "window, float scale) -> (Tensor, Tensor)",
     fused_sparse_attention},
    {"block_sparse_attention_grad",
     "block_sparse_attention_grad(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor layout, "
     "int block, Tensor q_group, Tensor k_group, Tensor slope, Tensor bias, Tensor seed, float dropout, int batch, int "
     "head, bool causal, int diagonal, int window, float scale, bool dbias) -> (Tensor, Tensor, Tensor, Tensor)",
     fused_sparse_attention_grad},
};

const dct_operator *dct__fused(size_t *count) {
  *count = sizeof fused_operators / sizeof *fused_operators;
  return fused_operators;
}
