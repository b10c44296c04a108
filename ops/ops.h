/* ops.h: the contract of every kernel. One row of ops.def per kernel; a scalar reference in ops/ref, bodies per
 * instruction set in ops/cpu (one source, compiled per set), launchers for CUDA in ops/cuda.
 *
 * All pointers are to contiguous arrays, aligned to their element; n is in elements. Every function here validates its
 * arguments (DC_E_INVALID, DC_E_DTYPE), counts its call (counters.def), splits the range over dc_parallel_for, and runs
 * the body of the current instruction set. n == 0 is valid and does nothing.
 *
 * Numerics. All arithmetic is IEEE 754 with round to nearest even, denormals kept. Bodies of different instruction
 * sets give equal bits: the same operations in the same order with the same fused multiply-adds (the reference uses
 * fmaf where the bodies use FMA), and reductions over fixed blocks of DC_BLOCK elements with a fixed lane structure,
 * combined in index order. Results never depend on the number of threads or on where a vector tail falls. Narrowing to
 * bf16/fp16 rounds to nearest even. A NaN result is stored as the canonical one (0x7fc00000, bf16 0x7fc0, fp16 0x7e00,
 * fp64 0x7ff8000000000000), because hardware picks payload and sign by operand order. Ranges run with round to nearest
 * and denormals on, whatever the thread's MXCSR says (x86-64); it is put back after. */
#ifndef DEEPC_OPS_H
#define DEEPC_OPS_H

#include "base/base.h"
#include "fused.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements of one reduction block. Shard edges are multiples of it, so norms do not depend on the partition. */
#define DC_BLOCK 4096

/* Floating dtypes below are DC_F32, DC_BF16, DC_F16 unless said otherwise. */

/* dst[i] = round_to(ddt, scale * float(src[i])); with scale == 1 exactly a cast. src and dst may be equal if the dtypes
 * have the same size, and must not overlap otherwise. */
DC_API int dc_cast(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n);

/* x[i] = round_to(dt, a * float(x[i])). */
DC_API int dc_scale(void *x, int dt, float a, int64_t n);

/* y[i] = fmaf(a, float(x[i]), y[i]); y fp32, x any floating dtype. */
DC_API int dc_axpy(float *y, float a, const void *x, int xdt, int64_t n);

/* Squares in fp64: partial[k] = sum of (double)x[i]^2 over block k = [k*DC_BLOCK, min(n, (k+1)*DC_BLOCK)); partial has
 * dc_sqnorm_blocks(n) elements. The square of an fp32 is exact in fp64. Within a block: 32 accumulators, element i goes
 * to accumulator i % 32; the 16 sums of accumulators j and 16 + j are combined as a fixed binary tree ((0+8),(1+9)..
 * then +4, +2, +1). So a thread of a GPU owns neighbouring accumulators
 * and loads 16 bytes at a time. A non-finite input makes its partial non-finite, and only that can: so the finite check
 * is isfinite(partial). */
DC_API int dc_sqnorm(const void *x, int dt, int64_t n, double *partial);
static inline int64_t dc_sqnorm_blocks(int64_t n) { return (n + DC_BLOCK - 1) / DC_BLOCK; }
/* Sum of partials in index order (fp64, one accumulator). */
DC_API double dc_sum_partials(const double *partial, int64_t blocks);
/* Index of the first non-finite element, or -1. dt: fp32, bf16, fp16. *index written on DC_OK. */
DC_API int dc_find_nonfinite(const void *x, int dt, int64_t n, int64_t *index);

/* memcpy for large arrays (streaming stores above a few MiB). No overlap. Any alignment. */
DC_API int dc_copy(void *dst, const void *src, int64_t bytes);

/* Elementwise reduction of nsrc >= 1 arrays in the order of src[]: for floating dtypes in fp32 (fp64 for DC_F64), one
 * rounding to dt at the end; for integers in their own type with wrap-around. dst may equal one of src[] exactly. `op`:
 * below; DC_RED_AVG multiplies the sum by 1/nsrc (floating dtypes only; integers: DC_E_DTYPE). MIN and MAX give NaN if
 * an input is one. nsrc <= 1024. Any dtype of base.h. */
enum dc_reduce_op {
  DC_RED_SUM = 0,
  DC_RED_AVG = 1,
  DC_RED_MIN = 2,
  DC_RED_MAX = 3,
  DC_RED_PROD = 4,
  DC_RED_BAND = 5,
  DC_RED_BOR = 6,
  DC_RED_BXOR = 7
};
DC_API int dc_reduce(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n);

/* Bodies for layers that have checked their arguments and cut their work themselves: on the calling thread, not
 * counted. */
int dc__copy_here(void *dst, const void *src, int64_t bytes, int stream);
int dc__reduce_here(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, int stream);
int dc__reduce_acc_here(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial);

/* Gradient reduction, one pass: s = sum over src[] in order (fp32); acc[i] = assign ? s : acc[i] + s. If partial !=
 * NULL it gets the squared-norm partials of the final acc (as dc_sqnorm), while the block is still in cache. src dtype:
 * fp32, bf16, fp16. acc may equal none of src. */
DC_API int dc_reduce_acc(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial);

/* ---- compression ---------------------------------------------------------------------------------------------------
 * Payloads that travel in place of [n] numbers. A payload is one array of bytes, aligned to 4, that starts with fp32
 * numbers; its size is given by the *_bytes function and is a multiple of 4 (bytes after the last code are zero).
 * Payloads are little-endian, and equal bit for bit on every instruction set. x: any floating dtype. error: fp32 [n] or
 * NULL: error feedback, v = x + error is what is compressed, and error gets what the payload did not carry, in the same
 * pass (Seide et al., Interspeech 2014; Karimireddy et al., arXiv:1901.09847). */

/* Blockwise quantisation. One fp32 scale for each `block` elements (the last block may be shorter), then n codes of
 * `bits`: 8, 4  symmetric signed integers in [-L, L], L = 127 or 7, of round_to_nearest_even(v * (L / top)), top the
 * block's largest |v|; scale = top / L (the next smaller fp32 if L * scale would overflow). Two codes of 4 bits a byte,
 * the even element in the lower half. A block with top < 2^-100: scale 0. 1     the sign bit of v, element i at bit i %
 * 8 of byte i / 8; scale = mean of |v| (summed in fp64 by 16 accumulators, element i to i % 16, and dc_sqnorm's tree),
 * and the number is scale, or -scale where the bit is set. A block that holds a NaN or an infinity gets the scale NaN,
 * so that all its numbers arrive as NaN, and keeps its error as it was. block: a multiple of 64 from 64 to 2^20. error'
 * = fmaf(-code, scale, v); |error'| <= scale/2 * (1 + 2^-15) for 8 bits, * (1 + 2^-18) for
 * 4. */
DC_API int dc_quantize_bytes(int bits, int64_t block, int64_t n, int64_t *bytes);
DC_API int dc_quantize(uint8_t *payload, int bits, int64_t block, const void *x, int dt, float *error, int64_t n);
/* out[i] = round_to(dt, scale * code). */
DC_API int dc_dequantize(void *out, int dt, const uint8_t *payload, int bits, int64_t block, int64_t n);
/* acc[i] = fmaf(code, factor * scale, acc[i]). */
DC_API int dc_dequantize_add(float *acc, const uint8_t *payload, int bits, int64_t block, float factor, int64_t n);

/* The server's part of a compressed all-reduce (Tang et al., arXiv:2102.02888), one pass over error: v = factor * (sum
 * of what `count` payloads of 1 bit hold, added in fp32 in their order) + error[i] is compressed as by dc_quantize with
 * bits = 1, and error gets what the payload did not carry. rows: payload k at k * stride bytes, stride a multiple of 4,
 * at least their size. The same bits as dc_dequantize, dc_dequantize_add with factor 1, a multiplication and
 * dc_quantize. */
DC_API int dc_average_signs(uint8_t *payload, int64_t block, const uint8_t *rows, int64_t count, int64_t stride,
                            float factor, float *error, int64_t n);

/* The k numbers of largest magnitude of each `block` elements (Lin et al., arXiv:1712.01887, with a threshold per
 * block), exactly, the lower index where magnitudes are equal; NaN is larger than all, one like another. Payload: fp32
 * values, k of each block (the last block has min(k, its length)), block after block in the order of their index; then
 * their uint16 indices within the block. error gets the numbers that were not chosen, and 0 for those that are not
 * finite. 1 <= k <= block <= DC_TOPK_BLOCK_MAX, block a multiple of 64. */
#define DC_TOPK_BLOCK_MAX 4096
DC_API int dc_topk_bytes(int64_t block, int64_t k, int64_t n, int64_t *bytes);
DC_API int dc_topk(uint8_t *payload, int64_t block, int64_t k, const void *x, int dt, float *error, int64_t n);
/* out[i] = round_to(dt, value), zero where none was chosen. DC_E_INVALID if an index points past its block: nothing is
 * written then. */
DC_API int dc_topk_spread(void *out, int dt, const uint8_t *payload, int64_t block, int64_t k, int64_t n);
/* acc[i] = fmaf(value, factor, acc[i]) where chosen. DC_E_INVALID as above. */
DC_API int dc_topk_add(float *acc, const uint8_t *payload, int64_t block, int64_t k, float factor, int64_t n);

/* x [n] becomes D H D x / sqrt(block), in place: a randomised Hadamard transform of each block (Suresh et al.,
 * arXiv:1611.00429; Vargaftik et al., DRIVE, arXiv:2105.08339), after which the block's numbers are near to normal
 * ones, of which a sign and one magnitude keep 2/pi of the squares, whatever they were. Blocks of DC_ROTATE_BLOCK
 * elements from x on; what is left is cut into powers of two, the largest first (1,024, 512, ... 1), so that n numbers
 * stay n. H: Walsh-Hadamard, butterflies (a, b) to (a + b, a - b) of elements h = 1, 2, 4, ... apart, in this order. D:
 * signs, the same in every block: element i of a block is negated where the top bit of MurmurHash3's 32-bit finalizer
 * of i is set. Then one multiplication by round_to_fp32(1 / sqrt(block)), and D. The transform is symmetric and
 * orthonormal: a second call gives x back, but for rounding. Numbers whose sums overflow, infinities and NaN spread
 * over their block.
 */
#define DC_ROTATE_BLOCK 2048
DC_API int dc_rotate(float *x, int64_t n);

/* Adam and AdamW, one pass over memory (Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101), with the
 * order of operations of torch.optim.AdamW: g = grad_scale * float(grad);  if L2 (not decoupled): g = fma(wd, p, g) if
 * decoupled: p = p * (1 - lr*wd) m = fma(1-b1, g - m, m);  v = fma(1-b2, g*g, b2*v);  if amsgrad: vmax = max(vmax, v),
 * used below in place of v p = p - step_size * (m / (sqrt(v) * inv_sqrt_bc2 + eps)),  step_size = lr / (1 - b1^step),
 * inv_sqrt_bc2 = 1/sqrt(1 - b2^step) the last as fma(-step_size, m/denom, p), denom as fma(sqrt(v), inv_sqrt_bc2, eps).
 * Scalars are computed in fp64, then rounded to fp32 once. lowp, if not NULL, gets round_to(lowp_dtype, p). Between
 * load and store every value is fp32, so bf16/fp16 states are rounded once, at their store. The arrays of a call must
 * not overlap (not checked). */
enum { DC_ADAMW_DECOUPLED = 1 };
typedef struct dc_adamw_args {
  size_t struct_size; /* sizeof(dc_adamw_args): see base.h */
  void *param;        /* [n] param_dtype; fp32 master weights, or the parameter itself */
  const void *grad;   /* [n] grad_dtype */
  void *exp_avg;      /* [n] state_dtype */
  void *exp_avg_sq;   /* [n] state_dtype */
  void *max_exp_avg_sq; /* [n] state_dtype, or NULL (no amsgrad) */
  void *lowp;         /* [n] lowp_dtype, or NULL */
  int64_t n;
  int64_t step;       /* the number of this step, from 1 */
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale;  /* factor on the gradient: unscaling, averaging and clipping in one; negative maximises */
  int32_t param_dtype, grad_dtype, state_dtype, lowp_dtype; /* fp32, bf16, fp16 each */
  int32_t flags;      /* DC_ADAMW_DECOUPLED: AdamW; 0: Adam with L2 */
} dc_adamw_args;
/* Steps `count` tensors as one job (threads share the total number of elements). All tensors are validated before the
 * first write. DC_E_INVALID: step < 1, lr not finite, betas outside [0, 1), eps < 0, weight_decay or grad_scale not
 * finite, unknown flags, NULL or misaligned pointer with n > 0. */
DC_API int dc_adamw(const dc_adamw_args *tensors, int64_t count);

/* One optimizer step of any rule, one pass over memory; what a walk over shards or tiers calls, whatever the optimizer.
 * g = grad_scale * float(grad) in all of them, lowp and the roundings as above; the scalars are fp64, rounded once.
 * DC_RULE_ADAMW  dc_adamw: state exp_avg, exp_avg_sq and (or NULL) max_exp_avg_sq; flag DC_STEP_DECOUPLED.
 * DC_RULE_LION   Chen et al., arXiv:2302.06675: state exp_avg. u = fma(b1, m, (1-b1)*g); p = p*(1 - lr*wd) -
 * lr*sign(u), sign(0) = 0; m = fma(b2, m, (1-b2)*g). DC_RULE_ADAGRAD  torch.optim.Adagrad's formula (Duchi et al., JMLR
 * 2011): state sum. g = fma(wd, p, g); s = s + g*g; p = p + (-lr*g) / (sqrt(s) + eps). lr is the rate of this step: any
 * decay of it is the caller's. DC_RULE_SGD    torch.optim.SGD's formula: state momentum_buffer, or NULL for beta1 = 0.
 * beta1: momentum; beta2: dampening (none at step 1, whose buffer is the gradient). g = fma(wd, p, g); b = fma(1-beta2,
 * g, beta1*b); g = nesterov ? fma(beta1, b, g) : b; p = fma(-lr, g, p). Flag DC_STEP_NESTEROV. */
enum dc_step_rule { DC_RULE_ADAMW = 0, DC_RULE_LION = 1, DC_RULE_ADAGRAD = 2, DC_RULE_SGD = 3, DC_RULE_COUNT };
enum { DC_STEP_DECOUPLED = 1, DC_STEP_NESTEROV = 2 };
typedef struct dc_step_args {
  size_t struct_size; /* sizeof(dc_step_args): see base.h */
  void *param;        /* [n] param_dtype; fp32 master weights, or the parameter itself */
  const void *grad;   /* [n] grad_dtype */
  void *state[3];     /* [n] state_dtype each, in the order above; NULL where the rule has none */
  void *lowp;         /* [n] lowp_dtype, or NULL */
  int64_t n;
  int64_t step;       /* the number of this step, from 1 */
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale;  /* factor on the gradient: unscaling, averaging and clipping in one; negative maximises */
  int32_t rule, param_dtype, grad_dtype, state_dtype, lowp_dtype; /* dtypes: fp32, bf16, fp16 each */
  int32_t flags;      /* DC_STEP_* of the rule */
  int32_t format;     /* dc_state_format */
  int64_t first;      /* of formats but DC_STATE_NEAREST: the number of element 0, a multiple of 64: see there */
  float *scale[2];    /* of DC_STATE_8BIT and 4BIT: fp32 [dc_state_sizes], one array a state */
} dc_step_args;
/* How states are stored between steps; of all rules, but amsgrad, and SGD only with momentum.
 * NEAREST     in state_dtype, rounded to nearest even.
 * STOCHASTIC  in bf16 (state_dtype), rounded up or down with the probability that makes the mean exact.
 * 8BIT, 4BIT  uint8 codes, for each block of 256 (8BIT) or 128 (4BIT) elements one fp32 scale, the block's largest
 *   magnitude (blocks: Dettmers et al., arXiv:2110.02861; 4 bits without a zero for squares: Li et al.,
 *   arXiv:2309.01507). A code is a small floating-point number relative to the scale: 8BIT has 3 bits of mantissa, 4BIT
 *   one; signed states have codes -127..127 (-7..7) down to 1.25 * 2^-16 (2^-3) and zero, squares 0..255 (0..15) down
 *   to 2^-32 * 1.125 (1.5 * 2^-8) and no zero, so that no denominator vanishes. Rounded stochastically as well: with
 *   beta2 = 0.999 a step changes a square by less than half a code, which rounding to nearest would never do. A block
 *   that holds a NaN or an infinity gets the scale NaN, one of less than 2^-100 the scale 0. Two codes of 4 bits a
 *   byte, the even element in the lower half.
 * Adam's states are multiplied with their decay as they are unpacked, of codes the scale is: m = fma(1-b1, g, b1*m),
 *   v = fma(1-b2, g*g, b2*v).
 * Random bits follow from the step and the element's number first + i alone, and blocks begin at multiples of their
 * length of that number, so that equal bits come of any partition at such multiples, and of every instruction set. */
enum dc_state_format {
  DC_STATE_NEAREST = 0,
  DC_STATE_STOCHASTIC = 1,
  DC_STATE_8BIT = 2,
  DC_STATE_4BIT = 3,
  DC_STATE_FORMATS
};
/* What codes are spread over: numbers of both signs and many sizes; squares (exp_avg_sq, sum); with 8 bits evenly, 127
 * codes up to the scale (momentum_buffer of DC_RULE_SGD: of a matrix whose directions Muon makes equally long the noise
 * of its largest elements would hide the small directions); with 4 bits LINEAR is SIGNED. */
enum dc_state_kind { DC_STATE_SIGNED = 0, DC_STATE_SQUARES = 1, DC_STATE_LINEAR = 2 };
/* Bytes of a state of n elements from number `first` on, and fp32 scales beside it. */
DC_API int dc_state_sizes(int format, int64_t first, int64_t n, int64_t *bytes, int64_t *scales);
/* Codes to numbers, exactly; kind: dc_state_kind. Formats 8BIT and 4BIT. */
DC_API int dc_state_unpack(float *out, const void *codes, const float *scale, int format, int kind, int64_t first,
                           int64_t n);
/* Numbers to codes, to nearest: what dc_state_unpack has given comes back as it was. */
DC_API int dc_state_pack(void *codes, float *scale, const float *in, int format, int kind, int64_t first, int64_t n);

/* Steps `count` tensors as one job, of one rule or of several. All are validated before the first write. DC_E_INVALID:
 * as dc_adamw, and a rule that does not exist, a flag or a state that the rule has not, momentum or dampening not
 * finite. */
DC_API int dc_step(const dc_step_args *tensors, int64_t count);
/* The states of a rule, in their order: "exp_avg", ... NULL past the last. */
DC_API const char *dc_step_state_name(int rule, int index);

/* LAMB (You et al., arXiv:1904.00962) in two passes, because a parameter's step length needs the norms of the whole:
 *   dc_lamb_moments: g = grad_scale * float(grad); m = fma(1-b1, g - m, m); v = fma(1-b2, g*g, b2*v);
 *     u = fma(wd, p, (m * inv_bc1) / fma(sqrt(v), inv_sqrt_bc2, eps)), inv_bc1 = 1/(1 - b1^step); and the sums of p^2
 *     and u^2, in fp64, of each block: DC_BLOCK elements of the number first + i, as far as they are the tensor's.
 *     16 accumulators, the block's element j goes to j % 16; combined by dc_sqnorm's tree.
 *   dc_lamb_apply: u again, of the same arguments; p = fma(-(lr * trust), u, p), which the caller makes of the norms.
 * Sums of a tensor's blocks in index order do not depend on how it is cut at edges of blocks.
 * With a format m and v are rounded only when they are kept, so that dc_lamb_moments reads the states and leaves them,
 * and dc_lamb_apply makes m and v again of the same gradient, the step of them, and writes them rounded: m = fma(1-b1,
 * g, b1*m) there. It exists on CPUs. */
typedef struct dc_lamb_args {
  size_t struct_size; /* sizeof(dc_lamb_args): see base.h */
  void *param;        /* [n] param_dtype; fp32 master weights, or the parameter itself */
  const void *grad;   /* [n] grad_dtype; dc_lamb_apply reads it where states have a format */
  float *exp_avg, *exp_avg_sq; /* [n] */
  void *lowp;         /* [n] lowp_dtype, or NULL; written by dc_lamb_apply */
  double *param_sums, *update_sums; /* [dc_lamb_blocks(first, n)]; written by dc_lamb_moments */
  int64_t n, step, first; /* first: the number of element 0, a multiple of 64 */
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  double trust;       /* factor on lr; dc_lamb_moments does not look at it */
  int32_t param_dtype, grad_dtype, lowp_dtype; /* fp32, bf16, fp16 each */
  int32_t format;     /* dc_state_format; NEAREST: fp32 in exp_avg and exp_avg_sq */
  void *state[2];     /* of the others, instead of those: bf16 or codes */
  float *scale[2];    /* of DC_STATE_8BIT and 4BIT: fp32 [dc_state_sizes], one array a state */
} dc_lamb_args;
static inline int64_t dc_lamb_blocks(int64_t first, int64_t n) {
  return n > 0 ? (first + n - 1) / DC_BLOCK - first / DC_BLOCK + 1 : 0;
}
DC_API int dc_lamb_moments(const dc_lamb_args *tensors, int64_t count);
DC_API int dc_lamb_apply(const dc_lamb_args *tensors, int64_t count);

/* Adafactor (Shazeer & Stern, arXiv:1804.04235, as torch.optim.Adafactor has it) in four passes, because an element's
 * step depends on its row, its column and the whole. A parameter is `matrices` matrices of rows x cols (its last two
 * dimensions), or it has variance: then it is no matrix, and the first two passes leave it alone. A call's tensors are
 * stretches: elements [begin, begin + n) of a parameter, whose arrays of rows and columns all its stretches share.
 * g = grad_scale * float(grad).
 *   dc_adafactor_tops     row_top, col_top = max(what is there, the bits of |g|) of each row and column.
 *   dc_adafactor_sums     row_sum, col_sum += g^2 of each row and column, a square rounded to a multiple of a power of
 *     two that follows from the row's (column's) top and length alone, so small (2^-52 of what bounds their sum) that
 *     the sums are exact in fp64. So they do not depend on their order, on threads, or on who has which stretch.
 *   dc_adafactor_factors  of whole parameters: row_var = fma(weight, mean - row_var, row_var), mean = row_sum / cols,
 * and col_var likewise; row_factor = row_var / max(mean of the matrix's row_var, eps), of a sum of 16 accumulators in
 * fp64. dc_adafactor_norms    variance = fma(weight, g*g - variance, variance); the sums of p^2 and u^2 of each block,
 *     u = g / sqrt(max(v, eps^2)), v = variance, or row_factor * col_var. Blocks as of dc_lamb_moments; in a matrix
 * each row's part of a block is summed as such a block is, and the parts in their order. dc_adafactor_apply    p =
 * fma(-rate, u, p * keep). Of several ranks: the largest of all tops before dc_adafactor_sums, the sums of all sums
 * (exact in any order) before dc_adafactor_factors, of all blocks' sums before dc_adafactor_apply, which the caller
 * makes `rate` of. */
typedef struct dc_adafactor_args {
  size_t struct_size; /* sizeof(dc_adafactor_args): see base.h */
  void *param;        /* [n] param_dtype; fp32 master weights, or the parameter itself */
  const void *grad;   /* [n] grad_dtype */
  void *lowp;         /* [n] lowp_dtype, or NULL; written by dc_adafactor_apply */
  float *variance;    /* [n], or NULL: a matrix, which has the next seven */
  float *row_var, *col_var;    /* [matrices * rows], [matrices * cols] */
  uint32_t *row_top, *col_top; /* of the same lengths, as the following; zero before the first pass */
  double *row_sum, *col_sum;   /* zero before the second */
  float *row_factor;
  double *param_sums, *update_sums; /* [dc_lamb_blocks(first, n)]; written by dc_adafactor_norms */
  int64_t n, begin, first;     /* first: the number of element 0, a multiple of 64 */
  int64_t matrices, rows, cols;
  double grad_scale, weight, eps, keep, rate; /* weight: of the newest squares; keep: 1 - lr * weight_decay */
  int32_t param_dtype, grad_dtype, lowp_dtype, reserved; /* fp32, bf16, fp16 each */
} dc_adafactor_args;
DC_API int dc_adafactor_tops(const dc_adafactor_args *stretches, int64_t count);
DC_API int dc_adafactor_sums(const dc_adafactor_args *stretches, int64_t count);
DC_API int dc_adafactor_factors(const dc_adafactor_args *parameters, int64_t count);
DC_API int dc_adafactor_norms(const dc_adafactor_args *stretches, int64_t count);
DC_API int dc_adafactor_apply(const dc_adafactor_args *stretches, int64_t count);

/* Softmax cross-entropy of rows and its gradient, written over the logits, so that rows x classes exist once. Of row r,
 * x = logits + r * stride, y = labels[r], e = label_smoothing: lse = log(sum_j e^x_j);  loss[r] = lse - (1 - e) x_y - e
 * / classes * sum_j x_j if gradient: x_j = round_to(dtype, g * (e^(x_j - lse) - (j == y ? 1 - e : 0) - e / classes)), g
 * = scale * (row_scale ? row_scale[r] : 1) A row whose label is ignore_index has loss 0 and gradient 0. Arithmetic per
 * element is fp32 with the e^x of ref/exp.h; sums run over blocks of DC_BLOCK with 16 accumulators in fp32, combined
 * over blocks in fp64. A NaN or +inf among a row's logits makes its loss NaN. DC_E_INVALID: a label outside [0,
 * classes) that is not ignore_index (nothing is written then), classes < 1, stride < classes, label_smoothing outside
 * [0, 1]. */
typedef struct dc_xent_args {
  size_t struct_size; /* sizeof(dc_xent_args): see base.h */
  void *logits;          /* [rows, stride], the first `classes` of each row; fp32, bf16 or fp16; in and out */
  const int64_t *labels; /* [rows] */
  const float *row_scale; /* [rows], or NULL */
  float *loss;           /* [rows], or NULL */
  int64_t rows, classes, stride, ignore_index;
  float scale, label_smoothing;
  int32_t dtype, gradient;
} dc_xent_args;
DC_API int dc_cross_entropy_rows(const dc_xent_args *args);

/* Product of matrices (GEMM), all of fp32 or all of bf16: out = beta c + alpha a b; c is not read if beta is 0. Sums
 * are fp32 and their order is fixed, so bits depend neither on the instruction set nor on threads, sizes or layouts:
 *
 * - fp32: of each element, a b is summed in stretches of 384 of k: each is a chain of fused multiply-adds from 0 on, in
 *   the order of k; the first gives alpha * stretch, or fma(alpha, stretch, beta * c), each other one fma(alpha,
 *   stretch, c).
 * - bf16: stretches of 768 of k, in which of each pair (2i, 2i + 1) the second comes first; they are added one after
 *   the other, and alpha * sum, or fma(alpha, sum, beta * c), is rounded once. Denormals of operands, sums and results
 *   count as zero (on x86-64). This is the arithmetic of VDPBF16PS (Intel 64 and IA-32 Architectures Software
 *   Developer's Manual, volume 2), which AMD's Zen 4 has bit for bit.
 *
 * a and b may be stored by rows or by columns; out may be c, and overlaps a and b nowhere. DC_E_INVALID: dtype,
 * strides; DC_E_NOMEM: no room to pack (out is undefined then).
 */
typedef struct dc_gemm_args {
  size_t struct_size; /* sizeof(dc_gemm_args): see base.h */
  const void *a; /* [m, k]: element (i, p) at i * a_stride[0] + p * a_stride[1], one of which is 1 */
  const void *b; /* [k, n]: element (p, j) at p * b_stride[0] + j * b_stride[1], one of which is 1 */
  const void *c; /* [m, n]: row i at i * c_stride, or the same for all (0); NULL where beta is 0 */
  void *out; /* [m, n]: row i at i * out_stride */
  int64_t m, n, k, a_stride[2], b_stride[2], c_stride, out_stride;
  float alpha, beta;
  int32_t dtype; /* DC_F32 or DC_BF16, of all four */
} dc_gemm_args;
DC_API int dc_gemm(const dc_gemm_args *args);
/* What each thread of such a product packs and sums at most, in bytes: scratch, of dc_heap_take where that has it. */
DC_API int64_t dc_gemm_bytes(int dtype, int64_t m, int64_t n, int64_t k);

/* ---- for files of the core: the table ---------------------------------------------------------------------------- */
/* Of dc_gemm: what a body packs of a and of b at a time, at most, and by how much it may round up either; a stretch of
 * k; of bf16 the rows of which it keeps sums at a time, where k has more than one stretch. */
enum { DC__GEMM_ROWS = 336, DC__GEMM_COLS = 1024, DC__GEMM_SLACK = 32, DC__GEMM_SUMS = 1024 };
#define DC__GEMM_DEPTH(dtype) ((dtype) == DC_F32 ? 384 : 768)
/* Rows of a at a time where each has so many words of 32 bits: what fits into L2. */
static inline int64_t dc__gemm_rows(int64_t words) { return words ? DC__GEMM_ROWS * 384 / words : DC__GEMM_ROWS; }
/* fp32 scalars of one tensor's step (adamw_coef.h). */
typedef struct dc__adamw_coef {
  float grad_scale, one_minus_b1, b2, one_minus_b2, decay, step_size_neg, inv_sqrt_bc2, eps, l2;
} dc__adamw_coef;

/* The same of dc_step for all other rules (step_coef.h). rate: -lr, but lr for Lion. b1, b2: of SGD, momentum and
 * dampening. */
typedef struct dc__step_coef {
  float grad_scale, decay, l2, rate, b1, one_minus_b1, b2, one_minus_b2, eps;
} dc__step_coef;

typedef struct dc__lamb_coef {
  float grad_scale, one_minus_b1, b2, one_minus_b2, inv_bc1, inv_sqrt_bc2, eps, weight_decay,
      rate; /* rate: -lr*trust */
} dc__lamb_coef;

typedef struct dc__adafactor_coef {
  float grad_scale, weight, least, keep, rate; /* least: eps^2; rate: negative */
} dc__adafactor_coef;

/* All of them, for the rules whose states have a format. DC__RULE_LAMB: dc_lamb_apply's, as step_packed takes it. */
#define DC__RULE_LAMB DC_RULE_COUNT
typedef struct dc__packed_coef {
  dc__adamw_coef adamw;
  dc__step_coef other;
  dc__lamb_coef lamb;
} dc__packed_coef;

typedef struct dc__ops {
#define DC_OP(name, params) void(*name) params;
#include "ops.def"
#undef DC_OP
} dc__ops;
/* The table in use. DC_E_ENV if DEEPC_ISA could not be understood. */
int dc__ops_table(const dc__ops **ops);

#ifdef __cplusplus
}
#endif
#endif
