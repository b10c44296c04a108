/* cuda_ops.h: the ops of ops.h on CUDA devices, from libdeepc_cuda.so. Loads without a GPU and without libdeepc.so.
 *
 * Each function takes the arguments of its CPU namesake (see ops.h for meaning and numerics) plus a cudaStream_t as
 * void * (NULL: the default stream), and enqueues its work: DC_OK means "launched"; what fails later shows at the next
 * synchronisation. Arrays are in device memory of one device, or pinned or managed memory that it can reach; tables of
 * pointers and of arguments are in host memory and may be freed when the call returns. The calling thread's current
 * device does not matter and is put back. Results equal the CPU's bit for bit, unless said otherwise below.
 *
 * Statuses: those of the CPU (DC_E_INVALID, DC_E_DTYPE, DC_E_OVERFLOW), and DC_E_CUDA: no driver, no device, no kernel
 * image for it, or an error of CUDA; the text is dc_cuda_last_error(). */
#ifndef DEEPC_CUDA_OPS_H
#define DEEPC_CUDA_OPS_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* "0.1.0"; static storage. Must equal dc_version() of the libdeepc.so that it is used with. */
DC_API const char *dc_cuda_version(void);
/* The version of the CUDA runtime inside this library, as CUDART_VERSION has it: 12090 for 12.9. Runtimes of 12 run on
 * drivers of 525 and later, those of 13 on 580 and later. Needs no GPU. */
DC_API int dc_cuda_runtime_version(void);
/* Text of this thread's last failure in this library. Never NULL; valid until the thread's next failure. */
DC_API const char *dc_cuda_last_error(void);

DC_API int dc_cuda_cast(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n, void *stream);
DC_API int dc_cuda_scale(void *x, int dt, float a, int64_t n, void *stream);
DC_API int dc_cuda_axpy(float *y, float a, const void *x, int xdt, int64_t n, void *stream);
/* partial: device memory, dc_sqnorm_blocks(n) elements. */
DC_API int dc_cuda_sqnorm(const void *x, int dt, int64_t n, double *partial, void *stream);
DC_API int dc_cuda_copy(void *dst, const void *src, int64_t bytes, void *stream);
DC_API int dc_cuda_reduce(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, void *stream);
DC_API int dc_cuda_reduce_acc(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign,
                              double *partial, void *stream);
DC_API int dc_cuda_adamw(const dc_adamw_args *tensors, int64_t count, void *stream);
/* Tensors of one call may differ in rule and format; each kind of them is launched by itself. */
DC_API int dc_cuda_step(const dc_step_args *tensors, int64_t count, void *stream);
/* param_sums and update_sums are device memory as the other arrays. */
DC_API int dc_cuda_lamb_moments(const dc_lamb_args *tensors, int64_t count, void *stream);
DC_API int dc_cuda_lamb_apply(const dc_lamb_args *tensors, int64_t count, void *stream);
/* All arrays are device memory. Where a gradient is not finite the tops and sums of its row and column are NaN with
 * other bits than the CPU's. */
DC_API int dc_cuda_adafactor_tops(const dc_adafactor_args *stretches, int64_t count, void *stream);
DC_API int dc_cuda_adafactor_sums(const dc_adafactor_args *stretches, int64_t count, void *stream);
DC_API int dc_cuda_adafactor_factors(const dc_adafactor_args *parameters, int64_t count, void *stream);
DC_API int dc_cuda_adafactor_norms(const dc_adafactor_args *stretches, int64_t count, void *stream);
DC_API int dc_cuda_adafactor_apply(const dc_adafactor_args *stretches, int64_t count, void *stream);
/* Loss and gradient equal the CPU's up to rounding (the sums are in another order). A label outside [0, classes) that
 * is not ignore_index gives its row loss NaN and gradient 0: the host can't see it. */
DC_API int dc_cuda_cross_entropy_rows(const dc_xent_args *args, void *stream);
DC_API int dc_cuda_quantize(uint8_t *payload, int bits, int64_t block, const void *x, int dt, float *error, int64_t n,
                            void *stream);
DC_API int dc_cuda_dequantize(void *out, int dt, const uint8_t *payload, int bits, int64_t block, int64_t n,
                              void *stream);
DC_API int dc_cuda_dequantize_add(float *acc, const uint8_t *payload, int bits, int64_t block, float factor, int64_t n,
                                  void *stream);
DC_API int dc_cuda_average_signs(uint8_t *payload, int64_t block, const uint8_t *rows, int64_t count, int64_t stride,
                                 float factor, float *error, int64_t n, void *stream);
DC_API int dc_cuda_rotate(float *x, int64_t n, void *stream);
/* The ops of fused.h; workspaces are device memory. */
DC_API int dc_cuda_norm(const dc_norm_args *args, void *stream);
DC_API int dc_cuda_norm_grad(const dc_norm_grad_args *args, void *stream);
DC_API int dc_cuda_swiglu(const dc_swiglu_args *args, void *stream);
DC_API int dc_cuda_swiglu_grad(const dc_swiglu_grad_args *args, void *stream);
DC_API int dc_cuda_gelu(const dc_gelu_args *args, void *stream);
DC_API int dc_cuda_gelu_grad(const dc_gelu_grad_args *args, void *stream);
DC_API int dc_cuda_rotary(const dc_rotary_args *args, void *stream);
/* Results equal the CPU's up to rounding (sums in another order; of 16 bits, products of rounded probabilities), and do
 * not change from run to run. Dropout drops the same pairs. What a layout, groups, slopes and a bias point to is device
 * memory: values of groups and slopes are not checked. deltas: workspace, device memory, [batch, heads, rows]. */
DC_API int dc_cuda_attention(const dc_attention_args *args, void *stream);
DC_API int dc_cuda_attention_grad(const dc_attention_grad_args *args, float *deltas, void *stream);
DC_API int dc_cuda_zero(void *array, int64_t bytes, void *stream);

#ifdef __cplusplus
}
#endif
#endif
