/* fused.h: the contract of the fused operators of a transformer block: norms of rows with their gradients, gated and
 * plain activations, rotary embeddings. Part of ops.h, whose general rules hold, with these additions.
 *
 * Arrays of rows are [rows, cols] of one dtype (fp32, bf16, fp16); row k of an array with a stride starts at k * stride
 * elements, stride >= cols (any if rows <= 1); without one, stride == cols. The arrays of a call must not overlap (not
 * checked). All arithmetic is fp32; a value is rounded once, when it is stored. Sums over a row have 64 accumulators,
 * element i goes to accumulator i % 64; A[k][j] = accumulator 16k + j; the 16 sums (A[0][j] + A[1][j]) + (A[2][j] +
 * A[3][j]) are combined as the tree of dc_sqnorm. Gradients that are sums over rows (of weights and biases) are summed
 * row by row in blocks of dc_row_block(rows) rows; the blocks' sums go to 8 accumulators in turn, block k to k % 8, and
 * those are combined as (0+4),(1+5).. then +2, +1: they do not depend on the number of threads.
 *
 * exp, the logistic function and the normal distribution are this library's own (ref/activation.h has them, their
 * errors, and the reasons), with equal bits on every instruction set. */
#ifndef DEEPC_OPS_FUSED_H
#define DEEPC_OPS_FUSED_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of one partial sum of a gradient over rows, and how many partial sums there are. */
static inline int64_t dc_row_block(int64_t rows) {
  const int64_t each = (rows / 64 + 7) / 8 * 8;
  return each < 32 ? 32 : each > 256 ? 256 : each;
}
static inline int64_t dc_row_blocks(int64_t rows) { return (rows + dc_row_block(rows) - 1) / dc_row_block(rows); }

/* Root mean square norm (Zhang & Sennrich, arXiv:1910.07467), or layer norm (Ba et al., arXiv:1607.06450) if mean is
 * not NULL: s = round_to(dtype, x + residual) where there is a residual, else x m = sum(s) / cols (layer norm; else 0);
 * v = sum((s - m)^2) / cols, fused;  r = 1 / sqrt(v + eps) y = fma((s - m) * r, weight + offset, bias); a weight that
 * is NULL counts as 1 (offset unused), a bias as absent */
typedef struct dc_norm_args {
  size_t struct_size; /* sizeof(dc_norm_args): see base.h */
  const void *x, *residual;  /* [rows, cols]; residual may be NULL */
  const void *weight, *bias; /* [cols] weight_dtype each, or NULL */
  void *y, *sum;             /* [rows, cols] without stride; sum gets s; NULL exactly if residual is */
  float *mean, *rstd;        /* [rows] m and r; mean NULL: root mean square norm */
  int64_t rows, cols, x_stride, residual_stride;
  float eps, offset;         /* eps >= 0, finite; offset finite */
  int32_t dtype, weight_dtype;
} dc_norm_args;
DC_API int dc_norm(const dc_norm_args *args);

/* Its gradient. With h = (x - mean) * rstd and g = dy * (weight + offset):
 *   dx = fma(g - sum(g) / cols - h * (sum(g * h) / cols), rstd, dsum)   (sum(g) for layer norm only)
 *   dweight = sum over rows of dy * h, fused;  dbias = sum over rows of dy */
typedef struct dc_norm_grad_args {
  size_t struct_size; /* sizeof(dc_norm_grad_args): see base.h */
  const void *dy, *dsum;    /* [rows, cols] without stride; dsum: the gradient of dc_norm's sum, or NULL */
  const void *x;            /* [rows, cols] what was normalised: x, or sum where there was a residual */
  const void *weight;       /* [cols] weight_dtype, or NULL */
  const float *mean, *rstd; /* [rows] of dc_norm; mean NULL: root mean square norm */
  void *dx;                 /* [rows, cols] without stride: the gradient of x, and of residual */
  void *dweight, *dbias;    /* [cols] weight_dtype each, or NULL: not wanted */
  float *partial; /* workspace: dc_row_blocks(rows) * cols numbers for each of dweight and dbias that is not NULL */
  int64_t rows, cols, x_stride;
  float offset;
  int32_t dtype, weight_dtype;
} dc_norm_grad_args;
DC_API int dc_norm_grad(const dc_norm_grad_args *args);

/* out = silu(gate) * up (Shazeer, arXiv:2002.05202): (gate * logistic(gate)) * up. */
typedef struct dc_swiglu_args {
  size_t struct_size; /* sizeof(dc_swiglu_args): see base.h */
  const void *gate, *up; /* [rows, cols] */
  void *out; /* [rows, cols] */
  int64_t rows, cols, gate_stride, up_stride, out_stride;
  int32_t dtype;
} dc_swiglu_args;
DC_API int dc_swiglu(const dc_swiglu_args *args);

/* dup = dout * silu(gate); dgate = (dout * up) * silu'(gate), silu'(a) = s * fma(a, 1 - s, 1), s = logistic(a). */
typedef struct dc_swiglu_grad_args {
  size_t struct_size; /* sizeof(dc_swiglu_grad_args): see base.h */
  const void *dout, *gate, *up; /* [rows, cols] */
  void *dgate, *dup; /* [rows, cols] */
  int64_t rows, cols, dout_stride, gate_stride, up_stride, dgate_stride, dup_stride;
  int32_t dtype;
} dc_swiglu_grad_args;
DC_API int dc_swiglu_grad(const dc_swiglu_grad_args *args);

/* GELU (Hendrycks & Gimpel, arXiv:1606.08415) of v = x + bias (v = x without bias).
 *   DC_GELU_ERF:  v * P(v), P the normal distribution's
 *   DC_GELU_TANH: v * logistic(2u), u = sqrt(2/pi) * (v + 0.044715 v^3), which is 0.5 v (1 + tanh u) */
enum { DC_GELU_ERF = 0, DC_GELU_TANH = 1 };
typedef struct dc_gelu_args {
  size_t struct_size; /* sizeof(dc_gelu_args): see base.h */
  const void *x, *bias; /* [rows, cols]; [cols] bias_dtype, or NULL */
  void *out; /* [rows, cols] without stride */
  int64_t rows, cols, x_stride;
  int32_t dtype, bias_dtype, form;
} dc_gelu_args;
DC_API int dc_gelu(const dc_gelu_args *args);

/* dx = dout * gelu'(v); dbias = sum over rows of dx before it is rounded. */
typedef struct dc_gelu_grad_args {
  size_t struct_size; /* sizeof(dc_gelu_grad_args): see base.h */
  const void *dout, *x, *bias; /* dout [rows, cols] without stride; x and bias as in dc_gelu */
  void *dx, *dbias; /* [rows, cols] without stride; [cols] bias_dtype, or NULL: not wanted */
  float *partial; /* workspace if dbias: dc_row_blocks(rows) * cols numbers */
  int64_t rows, cols, x_stride;
  int32_t dtype, bias_dtype, form;
} dc_gelu_grad_args;
DC_API int dc_gelu_grad(const dc_gelu_grad_args *args);

/* Rotary position embedding (Su et al., arXiv:2104.09864), the pairs being (j, j + rotated/2), as in transformers. For
 * every row of x, with h = rotated/2 and j < h: out[j] = fma(-x[j + h], sin[j], x[j] * cos[j]);  out[j + h] = fma(x[j],
 * sin[j + h], x[j + h] * cos[j + h]) inverse (its transpose, which is its gradient; the inverse rotation where cos and
 * sin have equal halves): out[j] = fma(x[j + h], sin[j + h], x[j] * cos[j]);  out[j + h] = fma(-x[j], sin[j], x[j + h]
 * * cos[j + h]) Elements from `rotated` on are copied. The rows are indexed by three numbers i < size: row i of an
 * array starts at the sum of i[k] * stride[k] elements; strides of cos and sin may be 0 (broadcast). */
typedef struct dc_rotary_args {
  size_t struct_size; /* sizeof(dc_rotary_args): see base.h */
  const void *x, *cos, *sin; /* rows of cols; rows of rotated, table_dtype both */
  void *out; /* rows of cols */
  int64_t size[3], x_stride[3], out_stride[3], cos_stride[3], sin_stride[3];
  int64_t cols, rotated; /* rotated even, <= cols */
  int32_t dtype, table_dtype, inverse;
} dc_rotary_args;
DC_API int dc_rotary(const dc_rotary_args *args);

/* Scaled dot-product attention (Vaswani et al., arXiv:1706.03762) by blocks, so that the scores of all pairs never
 * exist (Dao et al., arXiv:2205.14135). For batch b, head h and query i, with kv = h * kv_heads / heads:
 *   s[j] = scale * sum(q[b,h,i] * k[b,kv,j]);  j is visible unless causal and j > i + diagonal
 *   lse = log(sum over visible j of e^s[j]);  out = sum over visible j of e^(s[j] - lse) * v[b,kv,j]
 * A query that sees no key gets out = 0 and lse = +inf, and so does one whose scores are all far below -2^28: where a
 * mask is added, -1e9 hides. One that has a score above 2^30 (2^28 where bf16 is multiplied in pairs) gets NaN.
 * Element [b,h,i,c] of an array lies at b * stride[0] + h * stride[1] + i * stride[2] + c; the stride of a size of 1 is
 * not looked at. On a GPU stride[2] is below 2^31. Sums are fp32. Where the processor multiplies pairs of bf16
 * (AVX512-BF16), bf16 is not widened: probabilities are rounded to bf16 before they meet v; there, and only there, bits
 * differ between instruction sets (AVX512-BF16 and AMX-BF16 add in different orders). They never depend on the number
 * of threads. */
/* Dropout of probabilities (Srivastava et al., JMLR 15, 2014): out = sum over j of keep * e^(s[j] - lse) / (1 - p) *
 * v[b,kv,j], by random numbers that are counted, not kept: those of head h, query i and key j are bits 16 * (j % 2) and
 * up of word j % 8 / 2 of Philox4x32-10 (Salmon et al., SC 2011) of the counter (j / 8, i, h + head, b + batch) and the
 * key seed (its lower half first). A number below p = round(rate * 2^16) / 2^16 drops the pair. So the mask does not
 * depend on layouts, threads, instruction sets, or, by batch and head, on which rank has what; the gradient finds it
 * again. */
typedef struct dc_attention_dropout {
  uint64_t seed;
  int64_t batch, head; /* 0 to 2^31 - 1: what this call's first ones count as */
  float rate; /* from 0 (none) to below 1 */
} dc_attention_dropout;

/* Which keys a query sees, beyond causality; of what is NULL, all. All that hides counts. Tiles (pairs of runs of 16 to
 * 64 queries and keys) of which nothing is visible are neither computed nor read. */
typedef struct dc_attention_mask {
  const uint8_t *layout; /* [layout_heads, ceil(rows / block), ceil(keys / block)]: 0 hides the block (block-sparse
                            attention: Child et al., arXiv:1904.10509) */
  int64_t block, layout_heads; /* with a layout: a multiple of 16 from 16 to 128; 1 (for all heads) or heads */
  const int32_t *q_group, *k_group; /* [batch, rows] and [batch, keys], both or neither, -2^24 to 2^24: a query sees
                                       the keys of its own number (sequences packed in a row, padding) */
  const float *slope; /* [heads]: adds slope[h] * (j - i - diagonal) to s[j] (ALiBi, Press et al., arXiv:2108.12409) */
  const void *bias; /* added to s[j]: element [b,h,i,j] lies at b * bias_stride[0] + h * bias_stride[1] + i *
                       bias_stride[2] + j; strides of 0 share it. Read where something is visible */
  int64_t bias_stride[3];
  int64_t window; /* above 0: j is visible from i + diagonal - window + 1 on only (Beltagy et al., arXiv:2004.05150) */
  int32_t bias_dtype; /* fp32, bf16, fp16, or DC_U8: 0 hides the pair, all else adds nothing */
  dc_attention_dropout dropout;
} dc_attention_mask;

typedef struct dc_attention_args {
  size_t struct_size; /* sizeof(dc_attention_args): see base.h */
  const void *q, *k, *v; /* [batch, heads, rows, dim]; [batch, kv_heads, keys, dim] both */
  void *out; /* [batch, heads, rows, dim]; of dtype, as q, k and v are */
  float *lse; /* [batch, heads, rows] without stride */
  int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3];
  int64_t batch, heads, kv_heads, rows, keys, dim; /* heads a multiple of kv_heads, 0 of 0 alone; dim <= 256 */
  int64_t diagonal; /* used if causal, by slopes and by a window: -2^24 to 2^24 then */
  float scale; /* finite, > 0 */
  int32_t dtype, causal;
  dc_attention_mask mask;
} dc_attention_args;
DC_API int dc_attention(const dc_attention_args *args);

/* Its gradient, by the same blocks: p[j] = e^(s[j] - lse) is computed again; with delta = sum(dout * out),
 *   dv[j] = sum over queries of p[j] * dout;  ds[j] = p[j] * (dout . v[j] - delta) * scale
 *   dq = sum over j of ds[j] * k[j];  dk[j] = sum over queries of ds[j] * q
 * dk and dv sum over the query heads that share a head of k and v. A float of +inf in lse takes its query out. With
 * dropout, p[j] of dv and dout . v[j] are those that it kept, over 1 - p. The bias's gradient is ds[j] / scale, summed
 * over what shares an element, batch by batch and head by head. */
typedef struct dc_attention_grad_args {
  size_t struct_size; /* sizeof(dc_attention_grad_args): see base.h */
  const void *dout, *q, *k, *v, *out; /* as in dc_attention */
  const float *lse; /* of dc_attention */
  void *dq, *dk, *dv; /* shapes of q, k, v */
  int64_t dout_stride[3], q_stride[3], k_stride[3], v_stride[3], out_stride[3], dq_stride[3], dk_stride[3],
      dv_stride[3];
  int64_t batch, heads, kv_heads, rows, keys, dim, diagonal;
  float scale;
  int32_t dtype, causal;
  dc_attention_mask mask; /* of dc_attention */
  float *dbias; /* as mask.bias, with strides of its own; NULL: not wanted. Added to: what is hidden is left as it is */
  int64_t dbias_stride[3];
} dc_attention_grad_args;
DC_API int dc_attention_grad(const dc_attention_grad_args *args);

#ifdef __cplusplus
}
#endif
#endif
