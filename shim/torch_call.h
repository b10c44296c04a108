/* torch_call.h: what the kernels of torch.ops.deepc.* share (torch_call.c): the CUDA launchers, one call with its
 * error, views of tensors and lists. Included by the files that define kernels (torch_ops.c, torch_fused.c). */
#ifndef DEEPC_TORCH_CALL_H
#define DEEPC_TORCH_CALL_H

#include "cuda/cuda_ops.h"
#include "torch_abi.h"

#include <inttypes.h>
#include <string.h>

/* A row of the table of operators. */
typedef struct dct_operator {
  const char *name, *schema;
  dct_kernel kernel;
} dct_operator;
/* The operators of torch_fused.c. */
const dct_operator *dct__fused(size_t *count);

/* torch's functions; filled before any kernel is registered. */
extern dct_api dct__api;

/* The launchers of libdeepc_cuda.so that kernels call: DCT_CUDA_OP(name) is dc_cuda_<name>. */
/* clang-format moves this list to and fro. */
/* clang-format off */
#define DCT_CUDA_OPS(DCT_CUDA_OP)                                                                              \
  DCT_CUDA_OP(cast)                                                                                            \
  DCT_CUDA_OP(scale)                                                                                           \
  DCT_CUDA_OP(axpy) DCT_CUDA_OP(sqnorm) DCT_CUDA_OP(copy) DCT_CUDA_OP(reduce) DCT_CUDA_OP(reduce_acc)          \
      DCT_CUDA_OP(adamw) DCT_CUDA_OP(norm) DCT_CUDA_OP(norm_grad) DCT_CUDA_OP(swiglu) DCT_CUDA_OP(swiglu_grad) \
          DCT_CUDA_OP(gelu) DCT_CUDA_OP(gelu_grad) DCT_CUDA_OP(cross_entropy_rows) DCT_CUDA_OP(rotary)         \
              DCT_CUDA_OP(step) DCT_CUDA_OP(quantize) DCT_CUDA_OP(dequantize) DCT_CUDA_OP(dequantize_add)          \
                  DCT_CUDA_OP(average_signs) DCT_CUDA_OP(rotate) DCT_CUDA_OP(attention)                                \
                      DCT_CUDA_OP(attention_grad)                                                                      \
                      DCT_CUDA_OP(zero) DCT_CUDA_OP(last_error)
/* clang-format on */
typedef struct dct_cuda_ops {
#define DCT_CUDA_FIELD(name) __typeof__(&dc_cuda_##name) name;
  DCT_CUDA_OPS(DCT_CUDA_FIELD)
#undef DCT_CUDA_FIELD
} dct_cuda_ops;

/* ---- one call ---------------------------------------------------------------------------------------------------- */
enum { DCT_MAX_NAME = 32 };
typedef struct dct_call {
  char op[DCT_MAX_NAME];
  char error[640]; /* "" while all is well */
  int device;      /* device type of the first tensor; all must agree */
  int index;
  bool have_device;
  void *stream;
  const dct_cuda_ops *cuda; /* NULL on CPU */
} dct_call;

void dct__begin(dct_call *c, const char *op);
/* Records the first failure of the call; false, so that a check can return it. */
bool dct__fail(dct_call *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The same with the core's or the launchers' text where rc is no DC_OK. */
bool dct__status(dct_call *c, int rc);
/* Call last. Raises RuntimeError in the caller if the call failed. */
void dct__finish(const dct_call *c, const char *file, int line);

typedef struct dct_view {
  void *ptr;
  int64_t n;
  int dtype;
} dct_view;

/* A contiguous tensor; its device becomes the call's, or must be it. */
bool dct__look(dct_call *c, dct_tensor t, const char *name, dct_view *v);
/* Any dense tensor, with strides if it has some. */
bool dct__look_strided(dct_call *c, dct_tensor t, const char *name, dct_view *v);
bool dct__same_numel(dct_call *c, const dct_view *a, const char *an, const dct_view *b, const char *bn);
bool dct__must_be_f32(dct_call *c, const dct_view *v, const char *name);
void dct__delete_tensors(const dct_value *stack, int n);
/* A number of torch's 64 bits that the core takes as an int: what does not fit is an error, and no other number. */
bool dct__int(dct_call *c, dct_value value, const char *name, int *n);

/* A tensor list: handles are held (and owned) until dct__list_free. */
typedef struct dct_tensors {
  dct_list handle;
  dct_tensor *item;
  size_t n;
} dct_tensors;
bool dct__list_open(dct_call *c, dct_value value, const char *name, dct_tensors *l);
void dct__list_free(dct_tensors *l);

/* ---- arguments on the stack -------------------------------------------------------------------------------------- */
static inline double value_double(dct_value v) {
  double d;
  memcpy(&d, &v, sizeof d);
  return d;
}
static inline bool value_bool(dct_value v) {
  bool b;
  memcpy(&b, &v, sizeof b);
  return b;
}
static inline dct_tensor value_tensor(dct_value v) { return (dct_tensor)(uintptr_t)v; }

#endif
