/* check.h: what every op demands of its arguments, for the CPU's wrappers and for the CUDA launchers: one text, two
 * libraries. libdeepc_cuda.so shares no code with libdeepc.so at run time and keeps an error text of its own, so the
 * includer says how a failure is recorded: CHECK_FAIL(status, format, ...), whose value is the status. call.h is the
 * includer of ops/ and cuda/launch.cuh of ops/cuda.
 *
 * Every check_<op> returns DC_OK or a status with its text recorded, writes nothing but its outputs, and looks only at
 * what the host can read: never at elements. Whoever calls a body or a kernel has called its check. */
#ifndef DEEPC_OPS_CHECK_H
#define DEEPC_OPS_CHECK_H

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "ops.h"

#ifndef CHECK_FAIL
#error "define CHECK_FAIL(status, format, ...) before check.h"
#endif
#include "base/take.h"
static inline int check_take(void *taken, size_t known, size_t least, const void *given, const char *name) {
  char why[TAKE_WHY];
  const int rc = take_struct(taken, known, least, given, name, why);
  return rc ? CHECK_FAIL(rc, "%s", why) : DC_OK;
}
/* *taken: the arguments as this version knows them; `last`: the last field of the struct's first version. */
#define CHECK_TAKE(type, last, given, taken) \
  check_take((taken), sizeof(type), offsetof(type, last) + sizeof(((type *)0)->last), (given), #type)

/* ---- data types -------------------------------------------------------------------------------------------------- */
/* dc_dtype_size and dc_dtype_name, without the library that has them. */
static inline size_t check_size(int dt) {
  switch (dt) {
#define DC_DTYPE(name, bytes, text) \
  case DC_##name: return bytes;
#include "base/dtypes.def"
#undef DC_DTYPE
  default: return 0;
  }
}
static inline const char *check_name(int dt) {
  switch (dt) {
#define DC_DTYPE(name, bytes, text) \
  case DC_##name: return text;
#include "base/dtypes.def"
#undef DC_DTYPE
  default: return "?";
  }
}
static inline int64_t check_bytes(int dt, int64_t n) { return (int64_t)check_size(dt) * n; }

static inline int check_is_low(int dt) { return dt == DC_F32 || dt == DC_BF16 || dt == DC_F16; }

static inline int check_low(int dt, const char *what) {
  if (check_is_low(dt)) return DC_OK;
  return CHECK_FAIL(DC_E_DTYPE, "%s is dtype %d (%s); this op takes fp32, bf16 and fp16", what, dt, check_name(dt));
}

/* ---- arrays ------------------------------------------------------------------------------------------------------ */
/* n bytes or elements; 16 bytes an element is more than any op touches per array, so byte counts can't overflow. */
static inline int check_count(int64_t n) {
  if (n < 0) return CHECK_FAIL(DC_E_INVALID, "n = %lld is negative", (long long)n);
  if (n > INT64_MAX / 16) return CHECK_FAIL(DC_E_INVALID, "n = %lld is more than memory can hold", (long long)n);
  return DC_OK;
}

static inline int check_array(const void *p, size_t element, int64_t n, const char *what) {
  if (n > 0 && !p) return CHECK_FAIL(DC_E_INVALID, "%s is NULL with n = %lld", what, (long long)n);
  if ((uintptr_t)p % element)
    return CHECK_FAIL(DC_E_INVALID, "%s = %p is not aligned to its element of %zu bytes", what, p, element);
  return DC_OK;
}

/* n elements of one of the floating dtypes that most ops take. */
static inline int check_floats(const void *p, int dt, int64_t n, const char *what) {
  DC_TRY(check_low(dt, what));
  return check_array(p, check_size(dt), n, what);
}

/* An array that may be NULL; dt was checked. */
static inline int check_maybe(const void *p, int dt, const char *what) {
  return p ? check_array(p, check_size(dt), 0, what) : (int)DC_OK;
}

static inline int check_overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
  const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
  return x < y + (uintptr_t)b_bytes && y < x + (uintptr_t)a_bytes;
}

/* ---- elementwise ops and sums of squares ------------------------------------------------------------------------- */
static inline int check_cast(const void *dst, int ddt, const void *src, int sdt, int64_t n) {
  DC_TRY(check_count(n));
  DC_TRY(check_floats(dst, ddt, n, "dst"));
  DC_TRY(check_floats(src, sdt, n, "src"));
  if (dst == src && check_size(ddt) == check_size(sdt)) return DC_OK;
  if (check_overlap(dst, check_bytes(ddt, n), src, check_bytes(sdt, n)))
    return CHECK_FAIL(DC_E_INVALID, "dst and src overlap; they may only be the same array of one element size");
  return DC_OK;
}

static inline int check_scale(const void *x, int dt, int64_t n) {
  DC_TRY(check_count(n));
  return check_floats(x, dt, n, "x");
}

static inline int check_axpy(const float *y, const void *x, int xdt, int64_t n) {
  DC_TRY(check_count(n));
  DC_TRY(check_array(y, sizeof *y, n, "y"));
  DC_TRY(check_floats(x, xdt, n, "x"));
  if ((const void *)y != x && check_overlap(y, check_bytes(DC_F32, n), x, check_bytes(xdt, n)))
    return CHECK_FAIL(DC_E_INVALID, "x and y overlap");
  if ((const void *)y == x && xdt != DC_F32 && n > 0)
    return CHECK_FAIL(DC_E_INVALID, "x and y are one array of two dtypes");
  return DC_OK;
}

static inline int check_sqnorm(const void *x, int dt, int64_t n, const double *partial) {
  DC_TRY(check_count(n));
  DC_TRY(check_floats(x, dt, n, "x"));
  return check_array(partial, sizeof *partial, n, "partial");
}

static inline int check_copy(const void *dst, const void *src, int64_t bytes) {
  DC_TRY(check_count(bytes));
  DC_TRY(check_array(dst, 1, bytes, "dst"));
  DC_TRY(check_array(src, 1, bytes, "src"));
  return check_overlap(dst, bytes, src, bytes) ? CHECK_FAIL(DC_E_INVALID, "dst and src overlap") : (int)DC_OK;
}

/* ---- reductions over arrays -------------------------------------------------------------------------------------- */
enum { CHECK_MAX_SOURCES = 1024 };

static inline int check_sources(const void *const *src, int nsrc, int dt, int64_t n) {
  char what[32];
  if (nsrc < 1 || nsrc > CHECK_MAX_SOURCES)
    return CHECK_FAIL(DC_E_INVALID, "nsrc = %d; one call reduces 1 to %d arrays", nsrc, (int)CHECK_MAX_SOURCES);
  if (n == 0) return DC_OK;
  if (!src) return CHECK_FAIL(DC_E_INVALID, "src is NULL");
  for (int k = 0; k < nsrc; k++) {
    if (src[k] && (uintptr_t)src[k] % check_size(dt) == 0) continue; /* the text is made for the bad one only */
    snprintf(what, sizeof what, "src[%d]", k);
    return check_array(src[k], check_size(dt), n, what);
  }
  return DC_OK;
}

static inline int check_reduce_op(int op, int dt) {
  const int floating = check_is_low(dt) || dt == DC_F64;
  if (check_size(dt) == 0) return CHECK_FAIL(DC_E_DTYPE, "%d is not a dtype", dt);
  if (op < DC_RED_SUM || op > DC_RED_BXOR) return CHECK_FAIL(DC_E_INVALID, "%d is not a reduce op", op);
  if (floating && op >= DC_RED_BAND)
    return CHECK_FAIL(DC_E_DTYPE, "bitwise reduce op %d on %s; it takes integers", op, check_name(dt));
  if (!floating && op == DC_RED_AVG)
    return CHECK_FAIL(DC_E_DTYPE, "average of %s; it takes floating dtypes (use a sum)", check_name(dt));
  return DC_OK;
}

static inline int check_reduce(const void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n) {
  DC_TRY(check_reduce_op(op, dt));
  DC_TRY(check_count(n));
  DC_TRY(check_array(dst, check_size(dt), n, "dst"));
  DC_TRY(check_sources(src, nsrc, dt, n));
  for (int k = 0; n > 0 && k < nsrc; k++)
    if (dst != src[k] && check_overlap(dst, check_bytes(dt, n), src[k], check_bytes(dt, n)))
      return CHECK_FAIL(DC_E_INVALID, "dst and src[%d] overlap without being equal", k);
  return DC_OK;
}

static inline int check_reduce_acc(const float *acc, const void *const *src, int nsrc, int dt, int64_t n,
                                   const double *partial) {
  DC_TRY(check_low(dt, "src"));
  DC_TRY(check_count(n));
  DC_TRY(check_array(acc, sizeof *acc, n, "acc"));
  DC_TRY(check_sources(src, nsrc, dt, n));
  DC_TRY(check_array(partial, sizeof *partial, 0, "partial"));
  for (int k = 0; n > 0 && k < nsrc; k++)
    if (check_overlap(acc, check_bytes(DC_F32, n), src[k], check_bytes(dt, n)))
      return CHECK_FAIL(DC_E_INVALID, "acc and src[%d] overlap", k);
  return DC_OK;
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */
static inline int check_adamw_scalars(const dc_adamw_args *t, int64_t k) {
  const long long i = k;
  if (t->step < 1)
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: step = %lld; the first step is 1", i, (long long)t->step);
  if (!isfinite(t->lr)) return CHECK_FAIL(DC_E_INVALID, "tensor %lld: lr = %g is not finite", i, t->lr);
  if (!(t->beta1 >= 0 && t->beta1 < 1))
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: beta1 = %g, not in [0, 1)", i, t->beta1);
  if (!(t->beta2 >= 0 && t->beta2 < 1))
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: beta2 = %g, not in [0, 1)", i, t->beta2);
  if (!(t->eps >= 0)) return CHECK_FAIL(DC_E_INVALID, "tensor %lld: eps = %g is not >= 0", i, t->eps);
  if (!isfinite(t->weight_decay))
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: weight_decay = %g is not finite", i, t->weight_decay);
  if (!isfinite(t->grad_scale))
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: grad_scale = %g is not finite", i, t->grad_scale);
  if (t->flags & ~DC_ADAMW_DECOUPLED)
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: unknown flags 0x%x", i, (unsigned)t->flags);
  return DC_OK;
}

/* Tensor k of a call. */
static inline int check_adamw(const dc_adamw_args *t, int64_t k) {
  DC_TRY(check_adamw_scalars(t, k));
  DC_TRY(check_count(t->n));
  DC_TRY(check_floats(t->param, t->param_dtype, t->n, "param"));
  DC_TRY(check_floats(t->grad, t->grad_dtype, t->n, "grad"));
  DC_TRY(check_floats(t->exp_avg, t->state_dtype, t->n, "exp_avg"));
  DC_TRY(check_floats(t->exp_avg_sq, t->state_dtype, t->n, "exp_avg_sq"));
  DC_TRY(check_floats(t->max_exp_avg_sq, t->state_dtype, 0, "max_exp_avg_sq"));
  return t->lowp ? check_floats(t->lowp, t->lowp_dtype, 0, "lowp") : (int)DC_OK;
}

/* *list: the tensors as this version knows them: those of the caller, or a copy if its structs are older ones. All have
 * the size that the first one says. known, least: as take_struct. *owned: to be freed in any case. DC_E_NOMEM. */
static inline int check_list(const void *given, int64_t count, size_t known, size_t least, const char *name,
                             const void **list, void **owned) {
  char first[256], *copy;
  size_t size;
  *list = given, *owned = NULL;
  if (count < 0) return CHECK_FAIL(DC_E_INVALID, "count = %lld is negative", (long long)count);
  if (count == 0) return DC_OK;
  if (!given) return CHECK_FAIL(DC_E_INVALID, "tensors is NULL with count = %lld", (long long)count);
  if (known > sizeof first) return CHECK_FAIL(DC_E_INVALID, "%s has %zu bytes", name, known);
  DC_TRY(check_take(first, known, least, given, name));
  memcpy(&size, first, sizeof size);
  copy = size == known ? NULL : (char *)calloc((size_t)count, known);
  if (!copy && size != known)
    return CHECK_FAIL(DC_E_NOMEM, "no memory for the arguments of %lld tensors", (long long)count);
  *owned = copy;
  if (copy) *list = copy;
  for (int64_t k = 0; k < count; k++) {
    const char *at = (const char *)given + (size_t)k * size;
    if (memcmp(at, given, sizeof size) != 0)
      return CHECK_FAIL(DC_E_INVALID, "tensor %lld: its struct_size is not that of tensor 0, %zu", (long long)k, size);
    if (copy) memcpy(copy + (size_t)k * known, at, size);
  }
  return DC_OK;
}
#define CHECK_LIST(type, last, given, count, list, owned) \
  check_list((given), (count), sizeof(type), offsetof(type, last) + sizeof(((type *)0)->last), #type, (list), (owned))

/* ---- dc_step ----------------------------------------------------------------------------------------------------- */
/* How many states a rule must have, and may have; the flags it knows. */
typedef struct check_rule {
  int least, most, flags;
} check_rule;
static inline check_rule check_rule_of(int rule) {
  const check_rule adamw = {2, 3, DC_STEP_DECOUPLED}, sgd = {0, 1, DC_STEP_NESTEROV}, one = {1, 1, 0};
  return rule == DC_RULE_ADAMW ? adamw : rule == DC_RULE_SGD ? sgd : one;
}

typedef struct check_scalar {
  const char *name;
  double value;
} check_scalar;
/* The scalars of tensor k: `finite` are, step is from 1 on, eps not negative. */
static inline int check_finite(const check_scalar *finite, size_t n, int64_t step, double eps, int64_t k) {
  const long long i = k;
  if (step < 1) return CHECK_FAIL(DC_E_INVALID, "tensor %lld: step = %lld; the first step is 1", i, (long long)step);
  for (size_t f = 0; f < n; f++)
    if (!isfinite(finite[f].value))
      return CHECK_FAIL(DC_E_INVALID, "tensor %lld: %s = %g is not finite", i, finite[f].name, finite[f].value);
  return eps < 0 ? CHECK_FAIL(DC_E_INVALID, "tensor %lld: eps = %g is not >= 0", i, eps) : (int)DC_OK;
}
static inline int check_betas(double beta1, double beta2, int64_t k) {
  const check_scalar betas[] = {{"beta1", beta1}, {"beta2", beta2}};
  for (size_t f = 0; f < 2; f++)
    if (!(betas[f].value >= 0 && betas[f].value < 1))
      return CHECK_FAIL(DC_E_INVALID, "tensor %lld: %s = %g, not in [0, 1)", (long long)k, betas[f].name,
                        betas[f].value);
  return DC_OK;
}

static inline int check_step_scalars(const dc_step_args *t, int64_t k) {
  const check_scalar finite[] = {{"lr", t->lr},
                                 {"beta1", t->beta1},
                                 {"beta2", t->beta2},
                                 {"eps", t->eps},
                                 {"weight_decay", t->weight_decay},
                                 {"grad_scale", t->grad_scale}};
  DC_TRY(check_finite(finite, sizeof finite / sizeof *finite, t->step, t->eps, k));
  return t->rule == DC_RULE_ADAMW || t->rule == DC_RULE_LION ? check_betas(t->beta1, t->beta2, k) : (int)DC_OK;
}

static inline int check_format(int format, int64_t first) {
  if (format < 0 || format >= DC_STATE_FORMATS)
    return CHECK_FAIL(DC_E_INVALID, "format = %d; there are 0 to %d", format, DC_STATE_FORMATS - 1);
  if (format != DC_STATE_NEAREST && (first < 0 || first % 64 || first > INT64_MAX / 16))
    return CHECK_FAIL(DC_E_INVALID, "first = %lld; it must be a multiple of 64, and not negative", (long long)first);
  return DC_OK;
}

/* State s of a tensor, as it is stored: [n] of dtype or codes, with scales. */
static inline int check_state(int format, int dtype, const void *state, const float *scale, int64_t n, int s) {
  static const char *const names[] = {"state[0]", "state[1]", "state[2]"};
  static const char *const scales[] = {"scale[0]", "scale[1]", "scale[2]"};
  if (format != DC_STATE_8BIT && format != DC_STATE_4BIT) return check_floats(state, dtype, n, names[s]);
  DC_TRY(check_array(state, 1, n, names[s]));
  return check_array(scale, sizeof *scale, n, scales[s]);
}

/* The states of tensor k, which has `most` of them at most and `least` at least. */
static inline int check_step_states(const dc_step_args *t, int64_t k, int least, int most) {
  const int must = least == 0 && t->format != DC_STATE_NEAREST ? 1 : least;
  DC_TRY(check_format(t->format, t->first));
  if (t->format != DC_STATE_NEAREST && t->state[2])
    return CHECK_FAIL(DC_E_UNSUPPORTED, "tensor %lld: format %d with amsgrad: a maximum of rounded squares would grow",
                      (long long)k, t->format);
  if (t->format == DC_STATE_STOCHASTIC && t->state_dtype != DC_BF16)
    return CHECK_FAIL(DC_E_DTYPE, "tensor %lld: stochastic rounding is to bf16, not to dtype %d", (long long)k,
                      t->state_dtype);
  for (int s = 0; s < 3; s++) {
    if (s >= most && t->state[s])
      return CHECK_FAIL(DC_E_INVALID, "tensor %lld: state[%d] is given, and rule %d has %d", (long long)k, s, t->rule,
                        most);
    DC_TRY(check_state(t->format, t->state_dtype, t->state[s], s < 2 ? t->scale[s] : NULL, s < must ? t->n : 0, s));
  }
  return DC_OK;
}

/* Tensor k of a call. */
static inline int check_step(const dc_step_args *t, int64_t k) {
  const long long i = k;
  if (t->rule < 0 || t->rule >= DC_RULE_COUNT)
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: rule = %d; there are 0 to %d", i, t->rule, DC_RULE_COUNT - 1);
  const check_rule rule = check_rule_of(t->rule);
  DC_TRY(check_step_scalars(t, k));
  if (t->flags & ~rule.flags) return CHECK_FAIL(DC_E_INVALID, "tensor %lld: unknown flags 0x%x", i, (unsigned)t->flags);
  DC_TRY(check_count(t->n));
  DC_TRY(check_floats(t->param, t->param_dtype, t->n, "param"));
  DC_TRY(check_floats(t->grad, t->grad_dtype, t->n, "grad"));
  DC_TRY(check_step_states(t, k, rule.least, rule.most));
  if (t->rule == DC_RULE_SGD && !t->state[0] && t->beta1 != 0 && t->n > 0)
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: momentum %g without a buffer", i, t->beta1);
  return t->lowp ? check_floats(t->lowp, t->lowp_dtype, 0, "lowp") : (int)DC_OK;
}

/* ---- LAMB -------------------------------------------------------------------------------------------------------- */
static inline int check_lamb_scalars(const dc_lamb_args *t, int64_t k, int apply) {
  const int scaled = !apply || t->format != DC_STATE_NEAREST; /* the gradient is read */
  const check_scalar finite[] = {{"lr", t->lr},
                                 {"weight_decay", t->weight_decay},
                                 {"eps", t->eps},
                                 {"trust", apply ? t->trust : 0},
                                 {"grad_scale", scaled ? t->grad_scale : 0}};
  DC_TRY(check_finite(finite, sizeof finite / sizeof *finite, t->step, t->eps, k));
  return check_betas(t->beta1, t->beta2, k);
}

/* Tensor k of a call. */
static inline int check_lamb(const dc_lamb_args *t, int64_t k, int apply) {
  DC_TRY(check_lamb_scalars(t, k, apply));
  DC_TRY(check_count(t->n));
  DC_TRY(check_format(t->format, t->first));
  DC_TRY(check_format(DC_STATE_STOCHASTIC, t->first)); /* the same rule without a format */
  DC_TRY(check_floats(t->param, t->param_dtype, t->n, "param"));
  if (!apply || t->format != DC_STATE_NEAREST) DC_TRY(check_floats(t->grad, t->grad_dtype, t->n, "grad"));
  if (t->format != DC_STATE_NEAREST) {
    for (int s = 0; s < 2; s++) DC_TRY(check_state(t->format, DC_BF16, t->state[s], t->scale[s], t->n, s));
  } else {
    DC_TRY(check_array(t->exp_avg, sizeof(float), t->n, "exp_avg"));
    DC_TRY(check_array(t->exp_avg_sq, sizeof(float), t->n, "exp_avg_sq"));
  }
  if (!apply) DC_TRY(check_array(t->param_sums, sizeof(double), t->n, "param_sums"));
  if (!apply) DC_TRY(check_array(t->update_sums, sizeof(double), t->n, "update_sums"));
  return apply && t->lowp ? check_floats(t->lowp, t->lowp_dtype, 0, "lowp") : (int)DC_OK;
}

/* ---- Adafactor --------------------------------------------------------------------------------------------------- */
/* The rows and columns of parameter k, which is made of matrices. */
static inline int check_factored(const dc_adafactor_args *t, int64_t k) {
  const long long i = k;
  int64_t rows, cols, whole;
  if (t->matrices < 0 || t->rows < 0 || t->cols < 0)
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: %lld matrices of %lld x %lld", i, (long long)t->matrices,
                      (long long)t->rows, (long long)t->cols);
  if (__builtin_mul_overflow(t->matrices, t->rows, &rows) || __builtin_mul_overflow(t->matrices, t->cols, &cols) ||
      __builtin_mul_overflow(rows, t->cols, &whole))
    return CHECK_FAIL(DC_E_OVERFLOW, "tensor %lld: its elements overflow 64 bits", i);
  if (t->begin < 0 || t->begin > whole || t->n > whole - t->begin)
    return CHECK_FAIL(DC_E_INVALID, "tensor %lld: elements [%lld, %lld + %lld) of a parameter of %lld", i,
                      (long long)t->begin, (long long)t->begin, (long long)t->n, (long long)whole);
  DC_TRY(check_array(t->row_var, sizeof(float), rows, "row_var"));
  DC_TRY(check_array(t->col_var, sizeof(float), cols, "col_var"));
  DC_TRY(check_array(t->row_top, sizeof(uint32_t), rows, "row_top"));
  DC_TRY(check_array(t->col_top, sizeof(uint32_t), cols, "col_top"));
  DC_TRY(check_array(t->row_sum, sizeof(double), rows, "row_sum"));
  DC_TRY(check_array(t->col_sum, sizeof(double), cols, "col_sum"));
  return check_array(t->row_factor, sizeof(float), rows, "row_factor");
}

/* Tensor k of a call. */
static inline int check_adafactor(const dc_adafactor_args *t, int64_t k) {
  const check_scalar finite[] = {
      {"grad_scale", t->grad_scale}, {"weight", t->weight}, {"eps", t->eps}, {"keep", t->keep}, {"rate", t->rate}};
  DC_TRY(check_finite(finite, sizeof finite / sizeof *finite, 1, t->eps, k));
  DC_TRY(check_count(t->n));
  DC_TRY(check_format(DC_STATE_STOCHASTIC, t->first)); /* the same rule */
  DC_TRY(check_floats(t->param, t->param_dtype, t->n, "param"));
  DC_TRY(check_floats(t->grad, t->grad_dtype, t->n, "grad"));
  DC_TRY(check_array(t->param_sums, sizeof(double), t->n, "param_sums"));
  DC_TRY(check_array(t->update_sums, sizeof(double), t->n, "update_sums"));
  if (t->lowp) DC_TRY(check_floats(t->lowp, t->lowp_dtype, 0, "lowp"));
  return t->variance ? check_array(t->variance, sizeof(float), t->n, "variance") : check_factored(t, k);
}

/* ---- cross-entropy: all but the labels, which may lie where the host can't read them ----------------------------- */
static inline int check_xent(const dc_xent_args *given, dc_xent_args *a) {
  DC_TRY(CHECK_TAKE(dc_xent_args, gradient, given, a));
  DC_TRY(check_low(a->dtype, "logits"));
  DC_TRY(check_count(a->rows));
  if (a->classes < 1) return CHECK_FAIL(DC_E_INVALID, "classes = %lld; it must be at least 1", (long long)a->classes);
  if (a->stride < a->classes || (a->rows > 0 && a->stride > INT64_MAX / 16 / a->rows))
    return CHECK_FAIL(DC_E_INVALID, "stride = %lld with classes = %lld and rows = %lld", (long long)a->stride,
                      (long long)a->classes, (long long)a->rows);
  if (!(a->label_smoothing >= 0.0f && a->label_smoothing <= 1.0f))
    return CHECK_FAIL(DC_E_INVALID, "label_smoothing = %g; it must be from 0 to 1", (double)a->label_smoothing);
  DC_TRY(check_array(a->logits, check_size(a->dtype), a->rows, "logits"));
  DC_TRY(check_array(a->labels, sizeof *a->labels, a->rows, "labels"));
  DC_TRY(check_array(a->row_scale, sizeof *a->row_scale, 0, "row_scale"));
  return check_array(a->loss, sizeof *a->loss, 0, "loss");
}

/* Whether rows that start `stride` elements apart lie one behind the other, and fit memory. */
static inline int check_apart(int64_t rows, int64_t cols, int64_t stride) {
  int64_t n;
  return rows <= 1 || (stride >= cols && !__builtin_mul_overflow(rows, stride, &n) && n <= INT64_MAX / 16);
}

/* ---- products of matrices ---------------------------------------------------------------------------------------- */
/* [rows, cols], stored by rows or by columns. */
static inline int check_operand(const void *p, int dt, int64_t rows, int64_t cols, const int64_t *stride,
                                const char *what) {
  int64_t top, side;
  DC_TRY(check_array(p, check_size(dt), rows && cols, what));
  if (rows <= 0 || cols <= 0) return DC_OK;
  if (stride[0] < 0 || stride[1] < 0 || (stride[0] != 1 && stride[1] != 1) ||
      __builtin_mul_overflow(rows - 1, stride[0], &top) || __builtin_mul_overflow(cols - 1, stride[1], &side) ||
      top > INT64_MAX / 16 - side)
    return CHECK_FAIL(DC_E_INVALID, "%s has strides %lld and %lld; one must be 1, the other 0 or more", what,
                      (long long)stride[0], (long long)stride[1]);
  return DC_OK;
}

/* A result, whose rows lie one behind the other. */
static inline int check_matrix(const void *p, int dt, int64_t m, int64_t n, int64_t stride, const char *what) {
  DC_TRY(check_array(p, check_size(dt), m && n, what));
  if (!check_apart(m, n, stride))
    return CHECK_FAIL(DC_E_INVALID, "%s_stride = %lld with m = %lld and n = %lld", what, (long long)stride,
                      (long long)m, (long long)n);
  return DC_OK;
}

static inline int check_gemm(const dc_gemm_args *given, dc_gemm_args *a) {
  DC_TRY(CHECK_TAKE(dc_gemm_args, dtype, given, a));
  if (a->dtype != DC_F32 && a->dtype != DC_BF16)
    return CHECK_FAIL(DC_E_INVALID, "dtype = %d; a product is of fp32 (%d) or bf16 (%d)", a->dtype, DC_F32, DC_BF16);
  if (a->m < 0 || a->n < 0 || a->k < 0)
    return CHECK_FAIL(DC_E_INVALID, "m = %lld, n = %lld, k = %lld; none may be negative", (long long)a->m,
                      (long long)a->n, (long long)a->k);
  DC_TRY(check_matrix(a->out, a->dtype, a->m, a->n, a->out_stride, "out"));
  if (a->beta != 0.0f) DC_TRY(check_matrix(a->c, a->dtype, a->c_stride ? a->m : a->m > 0, a->n, a->c_stride, "c"));
  DC_TRY(check_operand(a->a, a->dtype, a->m, a->k, a->a_stride, "a"));
  return check_operand(a->b, a->dtype, a->k, a->n, a->b_stride, "b");
}

/* ---- arrays of rows ---------------------------------------------------------------------------------------------- */
static inline int check_shape(int64_t rows, int64_t cols) {
  int64_t n;
  if (rows < 0 || cols < 0)
    return CHECK_FAIL(DC_E_INVALID, "rows = %lld, cols = %lld; neither may be negative", (long long)rows,
                      (long long)cols);
  if (__builtin_mul_overflow(rows, cols, &n)) n = INT64_MAX;
  return check_count(n);
}

static inline int check_rows(const void *p, int dt, int64_t rows, int64_t cols, int64_t stride, const char *what) {
  DC_TRY(check_array(p, check_size(dt), rows * cols, what));
  if (!check_apart(rows, cols, stride))
    return CHECK_FAIL(DC_E_INVALID,
                      "%s: rows start %lld elements apart; it must be at least cols = %lld, and fit memory", what,
                      (long long)stride, (long long)cols);
  return DC_OK;
}

static inline int check_offset(float offset) {
  return isfinite(offset) ? (int)DC_OK : CHECK_FAIL(DC_E_INVALID, "offset = %g is not finite", (double)offset);
}

static inline int check_norm(const dc_norm_args *given, dc_norm_args *a) {
  DC_TRY(CHECK_TAKE(dc_norm_args, weight_dtype, given, a));
  DC_TRY(check_low(a->dtype, "x"));
  if (a->weight || a->bias) DC_TRY(check_low(a->weight_dtype, "weight"));
  DC_TRY(check_shape(a->rows, a->cols));
  if (!(a->eps >= 0 && isfinite(a->eps)))
    return CHECK_FAIL(DC_E_INVALID, "eps = %g; it must be >= 0 and finite", (double)a->eps);
  DC_TRY(check_offset(a->offset));
  if (!a->residual != !a->sum) return CHECK_FAIL(DC_E_INVALID, "residual and sum come together: pass both, or neither");
  DC_TRY(check_rows(a->x, a->dtype, a->rows, a->cols, a->x_stride, "x"));
  if (a->residual) DC_TRY(check_rows(a->residual, a->dtype, a->rows, a->cols, a->residual_stride, "residual"));
  DC_TRY(check_maybe(a->sum, a->dtype, "sum"));
  DC_TRY(check_maybe(a->weight, a->weight_dtype, "weight"));
  DC_TRY(check_maybe(a->bias, a->weight_dtype, "bias"));
  DC_TRY(check_maybe(a->mean, DC_F32, "mean"));
  DC_TRY(check_array(a->y, check_size(a->dtype), a->rows * a->cols, "y"));
  return check_array(a->rstd, sizeof *a->rstd, a->rows, "rstd");
}

static inline int check_norm_grad(const dc_norm_grad_args *given, dc_norm_grad_args *a) {
  DC_TRY(CHECK_TAKE(dc_norm_grad_args, weight_dtype, given, a));
  const int sums = (a->dweight != NULL) + (a->dbias != NULL);
  DC_TRY(check_low(a->dtype, "x"));
  if (a->weight || sums) DC_TRY(check_low(a->weight_dtype, "weight"));
  DC_TRY(check_shape(a->rows, a->cols));
  DC_TRY(check_offset(a->offset));
  DC_TRY(check_rows(a->x, a->dtype, a->rows, a->cols, a->x_stride, "x"));
  DC_TRY(check_array(a->dy, check_size(a->dtype), a->rows * a->cols, "dy"));
  DC_TRY(check_array(a->dx, check_size(a->dtype), a->rows * a->cols, "dx"));
  DC_TRY(check_array(a->rstd, sizeof *a->rstd, a->rows, "rstd"));
  DC_TRY(check_maybe(a->dsum, a->dtype, "dsum"));
  DC_TRY(check_maybe(a->mean, DC_F32, "mean"));
  DC_TRY(check_maybe(a->weight, a->weight_dtype, "weight"));
  DC_TRY(check_maybe(a->dweight, a->weight_dtype, "dweight"));
  DC_TRY(check_maybe(a->dbias, a->weight_dtype, "dbias"));
  return check_array(a->partial, sizeof *a->partial, sums ? a->rows * a->cols : 0, "partial");
}

static inline int check_swiglu(const dc_swiglu_args *given, dc_swiglu_args *a) {
  DC_TRY(CHECK_TAKE(dc_swiglu_args, dtype, given, a));
  DC_TRY(check_low(a->dtype, "gate"));
  DC_TRY(check_shape(a->rows, a->cols));
  DC_TRY(check_rows(a->gate, a->dtype, a->rows, a->cols, a->gate_stride, "gate"));
  DC_TRY(check_rows(a->up, a->dtype, a->rows, a->cols, a->up_stride, "up"));
  return check_rows(a->out, a->dtype, a->rows, a->cols, a->out_stride, "out");
}

static inline int check_swiglu_grad(const dc_swiglu_grad_args *given, dc_swiglu_grad_args *a) {
  DC_TRY(CHECK_TAKE(dc_swiglu_grad_args, dtype, given, a));
  DC_TRY(check_low(a->dtype, "gate"));
  DC_TRY(check_shape(a->rows, a->cols));
  DC_TRY(check_rows(a->dout, a->dtype, a->rows, a->cols, a->dout_stride, "dout"));
  DC_TRY(check_rows(a->gate, a->dtype, a->rows, a->cols, a->gate_stride, "gate"));
  DC_TRY(check_rows(a->up, a->dtype, a->rows, a->cols, a->up_stride, "up"));
  DC_TRY(check_rows(a->dgate, a->dtype, a->rows, a->cols, a->dgate_stride, "dgate"));
  return check_rows(a->dup, a->dtype, a->rows, a->cols, a->dup_stride, "dup");
}

static inline int check_form(int form) {
  if (form == DC_GELU_ERF || form == DC_GELU_TANH) return DC_OK;
  return CHECK_FAIL(DC_E_INVALID, "form = %d; it is DC_GELU_ERF (0) or DC_GELU_TANH (1)", form);
}

static inline int check_gelu(const dc_gelu_args *given, dc_gelu_args *a) {
  DC_TRY(CHECK_TAKE(dc_gelu_args, form, given, a));
  DC_TRY(check_low(a->dtype, "x"));
  if (a->bias) DC_TRY(check_low(a->bias_dtype, "bias"));
  DC_TRY(check_form(a->form));
  DC_TRY(check_shape(a->rows, a->cols));
  DC_TRY(check_rows(a->x, a->dtype, a->rows, a->cols, a->x_stride, "x"));
  DC_TRY(check_maybe(a->bias, a->bias_dtype, "bias"));
  return check_array(a->out, check_size(a->dtype), a->rows * a->cols, "out");
}

static inline int check_gelu_grad(const dc_gelu_grad_args *given, dc_gelu_grad_args *a) {
  DC_TRY(CHECK_TAKE(dc_gelu_grad_args, form, given, a));
  DC_TRY(check_low(a->dtype, "x"));
  if (a->bias || a->dbias) DC_TRY(check_low(a->bias_dtype, "bias"));
  DC_TRY(check_form(a->form));
  DC_TRY(check_shape(a->rows, a->cols));
  DC_TRY(check_rows(a->x, a->dtype, a->rows, a->cols, a->x_stride, "x"));
  DC_TRY(check_maybe(a->bias, a->bias_dtype, "bias"));
  DC_TRY(check_maybe(a->dbias, a->bias_dtype, "dbias"));
  DC_TRY(check_array(a->dout, check_size(a->dtype), a->rows * a->cols, "dout"));
  DC_TRY(check_array(a->dx, check_size(a->dtype), a->rows * a->cols, "dx"));
  return check_array(a->partial, sizeof *a->partial, a->dbias ? a->rows * a->cols : 0, "partial");
}

/* ---- attention --------------------------------------------------------------------------------------------------- */
enum { DC__ATTENTION_DIM = 256 }; /* more than models have; ref/tile.h says the same */

/* The numbers that both calls have. */
static inline int check_attention_sizes(int64_t batch, int64_t heads, int64_t kv_heads, int64_t rows, int64_t keys,
                                        int64_t dim, float scale, int64_t diagonal) {
  const struct {
    const char *name;
    int64_t value, most;
  } sizes[] = {{"batch", batch, INT32_MAX}, {"heads", heads, INT32_MAX}, {"kv_heads", kv_heads, INT32_MAX},
               {"rows", rows, 1 << 24},     {"keys", keys, 1 << 24},     {"dim", dim, DC__ATTENTION_DIM}};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
    if (sizes[k].value < 0 || sizes[k].value > sizes[k].most)
      return CHECK_FAIL(DC_E_INVALID, "%s = %lld; it must be from 0 to %lld", sizes[k].name, (long long)sizes[k].value,
                        (long long)sizes[k].most);
  if (heads > 0 ? kv_heads < 1 || heads % kv_heads : kv_heads > 0) /* without a head nothing would write dk and dv */
    return CHECK_FAIL(DC_E_INVALID, "heads = %lld is no multiple of kv_heads = %lld from 1 on", (long long)heads,
                      (long long)kv_heads);
  if (!(scale > 0 && isfinite(scale)))
    return CHECK_FAIL(DC_E_INVALID, "scale = %g; it must be finite and above 0", (double)scale);
  if (diagonal < -((int64_t)1 << 24) || diagonal > (int64_t)1 << 24)
    return CHECK_FAIL(DC_E_INVALID, "diagonal = %lld is outside -2^24 to 2^24", (long long)diagonal);
  int64_t n;
  if (__builtin_mul_overflow(batch, heads, &n) || __builtin_mul_overflow(n, rows > keys ? rows : keys, &n) ||
      __builtin_mul_overflow(n, dim, &n))
    n = INT64_MAX;
  return check_count(n);
}

#ifndef CHECK_ROW_STRIDE
#define CHECK_ROW_STRIDE INT64_MAX /* the largest stride of rows, for kernels that count it in fewer bits */
#endif
/* size: [batch, heads, rows, dim]; stride: of the first three. Where there is one batch, head or row, its stride is
 * never taken: it may be anything from 0 on, as torch's may, and becomes 0. */
static inline int check_attention_array(const void *p, int dt, const int64_t *size, int64_t *stride, const char *what) {
  for (int k = 0; k < 3; k++) {
    if (size[k] <= 1 && stride[k] > 0) stride[k] = 0;
    const int64_t addresses = INT64_MAX / 16 / (size[k] > 1 ? size[k] : 1);
    const int64_t most = k == 2 && CHECK_ROW_STRIDE < addresses ? CHECK_ROW_STRIDE : addresses;
    if (stride[k] < 0 || stride[k] > most)
      return CHECK_FAIL(DC_E_INVALID, "%s: stride[%d] = %lld; it must be from 0 to %lld", what, k, (long long)stride[k],
                        (long long)most);
  }
  return check_array(p, check_size(dt), size[0] * size[1] * size[2] * size[3], what);
}

#ifndef CHECK_VALUES
#define CHECK_VALUES 1 /* 0: the arrays of a mask are where the host can't read them */
#endif
static inline int check_attention_groups(const int32_t *group, int64_t n, const char *what) {
  DC_TRY(check_array(group, sizeof *group, n, what));
  for (int64_t i = 0; CHECK_VALUES && i < n; i++)
    if (group[i] < -(1 << 24) || group[i] > 1 << 24)
      return CHECK_FAIL(DC_E_INVALID, "%s[%lld] = %d is outside -2^24 to 2^24", what, (long long)i, group[i]);
  return DC_OK;
}

static inline int check_attention_bias(const dc_attention_mask *m) {
  if (!m->bias) return DC_OK;
  if (m->bias_dtype != DC_U8) DC_TRY(check_low(m->bias_dtype, "bias"));
  for (int k = 0; k < 3; k++)
    if (m->bias_stride[k] < 0)
      return CHECK_FAIL(DC_E_INVALID, "bias_stride[%d] = %lld; it must not be negative", k,
                        (long long)m->bias_stride[k]);
  return check_array(m->bias, m->bias_dtype == DC_U8 ? 1 : check_size(m->bias_dtype), 1, "bias");
}

static inline int check_attention_mask(const dc_attention_mask *m, int64_t batch, int64_t heads, int64_t rows,
                                       int64_t keys) {
  if (m->layout && (m->block < 16 || m->block > 128 || m->block % 16))
    return CHECK_FAIL(DC_E_INVALID, "block = %lld; it must be a multiple of 16 from 16 to 128", (long long)m->block);
  if (m->layout && m->layout_heads != 1 && m->layout_heads != heads)
    return CHECK_FAIL(DC_E_INVALID, "layout_heads = %lld; it must be 1 or heads = %lld", (long long)m->layout_heads,
                      (long long)heads);
  if (!m->q_group != !m->k_group)
    return CHECK_FAIL(DC_E_INVALID, "q_group and k_group: one of them is NULL; give both or neither");
  if (m->q_group) DC_TRY(check_attention_groups(m->q_group, batch * rows, "q_group"));
  if (m->q_group) DC_TRY(check_attention_groups(m->k_group, batch * keys, "k_group"));
  for (int64_t h = 0; CHECK_VALUES && m->slope && h < heads; h++)
    if (!isfinite(m->slope[h]))
      return CHECK_FAIL(DC_E_INVALID, "slope[%lld] = %g; it must be finite", (long long)h, (double)m->slope[h]);
  DC_TRY(check_attention_bias(m));
  if (m->window < 0 || m->window > 1 << 25)
    return CHECK_FAIL(DC_E_INVALID, "window = %lld; it must be from 0 (none) to 2^25", (long long)m->window);
  if (!(m->dropout.rate >= 0 && m->dropout.rate < 1))
    return CHECK_FAIL(DC_E_INVALID, "dropout.rate = %g; it must be from 0 to below 1", (double)m->dropout.rate);
  if (m->dropout.batch < 0 || m->dropout.batch > INT32_MAX || m->dropout.head < 0 || m->dropout.head > INT32_MAX)
    return CHECK_FAIL(DC_E_INVALID, "dropout.batch = %lld, dropout.head = %lld; they must be from 0 to 2^31 - 1",
                      (long long)m->dropout.batch, (long long)m->dropout.head);
  return DC_OK;
}

static inline int check_attention(const dc_attention_args *given, dc_attention_args *a) {
  DC_TRY(CHECK_TAKE(dc_attention_args, causal, given, a));
  DC_TRY(check_low(a->dtype, "q"));
  const int placed = a->causal || a->mask.window || a->mask.slope; /* the diagonal is looked at */
  DC_TRY(check_attention_sizes(a->batch, a->heads, a->kv_heads, a->rows, a->keys, a->dim, a->scale,
                               placed ? a->diagonal : 0));
  const int64_t queries[4] = {a->batch, a->heads, a->rows, a->dim};
  const int64_t pairs[4] = {a->batch, a->kv_heads, a->keys, a->dim};
  DC_TRY(check_attention_array(a->q, a->dtype, queries, a->q_stride, "q"));
  DC_TRY(check_attention_array(a->k, a->dtype, pairs, a->k_stride, "k"));
  DC_TRY(check_attention_array(a->v, a->dtype, pairs, a->v_stride, "v"));
  DC_TRY(check_attention_array(a->out, a->dtype, queries, a->out_stride, "out"));
  DC_TRY(check_attention_mask(&a->mask, a->batch, a->heads, a->rows, a->keys));
  return check_array(a->lse, sizeof *a->lse, a->batch * a->heads * a->rows, "lse");
}

static inline int check_attention_grad(const dc_attention_grad_args *given, dc_attention_grad_args *a) {
  DC_TRY(CHECK_TAKE(dc_attention_grad_args, causal, given, a));
  DC_TRY(check_low(a->dtype, "q"));
  const int placed = a->causal || a->mask.window || a->mask.slope; /* the diagonal is looked at */
  DC_TRY(check_attention_sizes(a->batch, a->heads, a->kv_heads, a->rows, a->keys, a->dim, a->scale,
                               placed ? a->diagonal : 0));
  const int64_t queries[4] = {a->batch, a->heads, a->rows, a->dim};
  const int64_t pairs[4] = {a->batch, a->kv_heads, a->keys, a->dim};
  DC_TRY(check_attention_array(a->dout, a->dtype, queries, a->dout_stride, "dout"));
  DC_TRY(check_attention_array(a->q, a->dtype, queries, a->q_stride, "q"));
  DC_TRY(check_attention_array(a->k, a->dtype, pairs, a->k_stride, "k"));
  DC_TRY(check_attention_array(a->v, a->dtype, pairs, a->v_stride, "v"));
  DC_TRY(check_attention_array(a->out, a->dtype, queries, a->out_stride, "out"));
  DC_TRY(check_attention_array(a->dq, a->dtype, queries, a->dq_stride, "dq"));
  DC_TRY(check_attention_array(a->dk, a->dtype, pairs, a->dk_stride, "dk"));
  DC_TRY(check_attention_array(a->dv, a->dtype, pairs, a->dv_stride, "dv"));
  DC_TRY(check_attention_mask(&a->mask, a->batch, a->heads, a->rows, a->keys));
  if (a->dbias && (!a->mask.bias || a->mask.bias_dtype == DC_U8))
    return CHECK_FAIL(DC_E_INVALID, "dbias without a bias that has a gradient (fp32, bf16 or fp16)");
  for (int k = 0; k < 3; k++)
    if (a->dbias && a->dbias_stride[k] < 0)
      return CHECK_FAIL(DC_E_INVALID, "dbias_stride[%d] = %lld; it must not be negative", k,
                        (long long)a->dbias_stride[k]);
  return check_array(a->lse, sizeof *a->lse, a->batch * a->heads * a->rows, "lse");
}

/* *rows: the product of the three sizes. */
static inline int check_rotary(const dc_rotary_args *given, dc_rotary_args *a, int64_t *rows) {
  DC_TRY(CHECK_TAKE(dc_rotary_args, inverse, given, a));
  DC_TRY(check_low(a->dtype, "x"));
  DC_TRY(check_low(a->table_dtype, "cos and sin"));
  *rows = 1;
  for (int k = 0; k < 3; k++)
    if (a->size[k] < 0 || __builtin_mul_overflow(*rows, a->size[k], rows))
      return CHECK_FAIL(DC_E_INVALID, "size[%d] = %lld is no number of rows", k, (long long)a->size[k]);
  DC_TRY(check_shape(*rows, a->cols));
  if (a->rotated < 0 || a->rotated % 2 || a->rotated > a->cols)
    return CHECK_FAIL(DC_E_INVALID, "rotated = %lld; it must be even, and at most cols = %lld", (long long)a->rotated,
                      (long long)a->cols);
  DC_TRY(check_array(a->x, check_size(a->dtype), *rows * a->cols, "x"));
  DC_TRY(check_array(a->out, check_size(a->dtype), *rows * a->cols, "out"));
  DC_TRY(check_array(a->cos, check_size(a->table_dtype), *rows * a->rotated, "cos"));
  return check_array(a->sin, check_size(a->table_dtype), *rows * a->rotated, "sin");
}

#endif
