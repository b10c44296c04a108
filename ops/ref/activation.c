/* activation.c: scalar reference of dc_swiglu and dc_gelu and their gradients: elements [begin, end) of the rows laid
 * end to end. */
#include "ref/activation.h"

void dc__swiglu_scalar(const dc_swiglu_args *a, int64_t begin, int64_t end) {
  for (int64_t e = begin; e < end; e++) {
    const int64_t k = e / a->cols, i = e % a->cols;
    const float gate = dc__get(a->gate, a->dtype, k * a->gate_stride + i);
    const float up = dc__get(a->up, a->dtype, k * a->up_stride + i);
    dc__put(a->out, a->dtype, k * a->out_stride + i, gate * dc__logistic(gate) * up);
  }
}

void dc__swiglu_grad_scalar(const dc_swiglu_grad_args *a, int64_t begin, int64_t end) {
  for (int64_t e = begin; e < end; e++) {
    const int64_t k = e / a->cols, i = e % a->cols;
    const float d = dc__get(a->dout, a->dtype, k * a->dout_stride + i);
    const float gate = dc__get(a->gate, a->dtype, k * a->gate_stride + i);
    const float up = dc__get(a->up, a->dtype, k * a->up_stride + i);
    const dc__logistics s = dc__logistic2(gate);
    dc__put(a->dup, a->dtype, k * a->dup_stride + i, d * (gate * s.at));
    dc__put(a->dgate, a->dtype, k * a->dgate_stride + i, d * up * dc__silu_slope(gate, s));
  }
}

void dc__gelu_scalar(const dc_gelu_args *a, int64_t begin, int64_t end) {
  for (int64_t e = begin; e < end; e++) {
    const int64_t k = e / a->cols, i = e % a->cols;
    float x = dc__get(a->x, a->dtype, k * a->x_stride + i);
    if (a->bias) x += dc__get(a->bias, a->bias_dtype, i);
    dc__put(a->out, a->dtype, e, dc__gelu_f32(x, a->form));
  }
}

void dc__gelu_grad_scalar(const dc_gelu_grad_args *a, int64_t begin, int64_t end, float *dbias) {
  for (int64_t e = begin; e < end; e++) {
    const int64_t k = e / a->cols, i = e % a->cols;
    float x = dc__get(a->x, a->dtype, k * a->x_stride + i);
    if (a->bias) x += dc__get(a->bias, a->bias_dtype, i);
    const float d = dc__get(a->dout, a->dtype, e) * dc__gelu_slope(x, a->form);
    dc__put(a->dx, a->dtype, e, d);
    if (dbias) dbias[i] += d;
  }
}
