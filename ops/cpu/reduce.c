/* reduce.c: bodies of dc_reduce and dc_reduce_acc. fp32, bf16 and fp16 go through vectors: UNROLL of them are held in
 * registers while the sources are added in order, so a source pointer is fetched once per UNROLL * 16 elements, and the
 * norm is taken from those registers. fp64 and the integers are plain C over a part in the first-level cache, which the
 * compiler turns into vectors of this file's instruction set.
 *
 * Large accumulators that are written only are stored past the caches: 1.2 to 1.3 of a plain loop
 * (docs/lab/kernels.md). bench_ops --only reduce. */
#include "cpu/vec.h"

enum { UNROLL = 4, PART = 512 };

/* ---- fp32, bf16, fp16 -------------------------------------------------------------------------------------------- */
DC_INLINE vf reduce_combine(int op, vf a, vf b) {
  switch (op) {
  case DC_RED_MIN: return v_min(a, b);
  case DC_RED_MAX: return v_max(a, b);
  case DC_RED_PROD: return v_mul(a, b);
  default: return v_add(a, b);
  }
}

/* s[u] = reduction of element i + 16 u .. of all sources; r as in vec.h. */
DC_INLINE void reduce_gather(vf *s, int unroll, const void *const *src, int nsrc, int dt, int op, int64_t i, int r) {
  for (int u = 0; u < unroll; u++) s[u] = v_get(src[0], dt, i + u * LANES, r);
  for (int k = 1; k < nsrc; k++)
    for (int u = 0; u < unroll; u++) s[u] = reduce_combine(op, s[u], v_get(src[k], dt, i + u * LANES, r));
}

DC_INLINE void reduce_ahead(const void *p, int dt, int64_t i) {
  for (int u = 0; u < UNROLL; u += dt == DC_F32 ? 1 : 2) v_ahead(p, dt, i + u * LANES, AHEAD); /* once per cache line */
}

DC_INLINE void reduce_ahead_all(const void *const *src, int nsrc, int dt, int64_t i) {
  for (int k = 0; k < nsrc; k++) reduce_ahead(src[k], dt, i);
}

DC_INLINE void reduce_put_or_stream(void *p, int dt, int64_t i, int r, vf a, int stream) {
  if (stream && r == LANES) v_put_stream(p, dt, i, a);
  else v_put(p, dt, i, r, a);
}

DC_INLINE void reduce_step(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t i, int unroll, int r,
                           int stream) {
  vf s[UNROLL];
  reduce_gather(s, unroll, src, nsrc, dt, op, i, r);
  for (int u = 0; u < unroll; u++) {
    if (op == DC_RED_AVG) s[u] = v_mul(s[u], v_set1((float)(1.0 / nsrc)));
    reduce_put_or_stream(dst, dt, i + u * LANES, r, s[u], stream);
  }
}

DC_INLINE void reduce_loop(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, int stream) {
  int64_t i = 0;
  for (; i + UNROLL * LANES <= n; i += UNROLL * LANES) {
    reduce_ahead_all(src, nsrc, dt, i);
    reduce_step(dst, src, nsrc, dt, op, i, UNROLL, LANES, stream);
  }
  for (; i + LANES <= n; i += LANES) reduce_step(dst, src, nsrc, dt, op, i, 1, LANES, 0);
  if (i < n) reduce_step(dst, src, nsrc, dt, op, i, 1, (int)(n - i), 0);
  if (stream) v_fence();
}

/* Sums and averages are what training does; only they have a streaming loop. */
DC_INLINE void reduce_low(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, int stream) {
  stream = stream && v_can_stream(dst, dt);
  switch (op) {
  case DC_RED_MIN: reduce_loop(dst, src, nsrc, dt, DC_RED_MIN, n, 0); return;
  case DC_RED_MAX: reduce_loop(dst, src, nsrc, dt, DC_RED_MAX, n, 0); return;
  case DC_RED_PROD: reduce_loop(dst, src, nsrc, dt, DC_RED_PROD, n, 0); return;
  case DC_RED_AVG:
    if (stream) reduce_loop(dst, src, nsrc, dt, DC_RED_AVG, n, 1);
    else reduce_loop(dst, src, nsrc, dt, DC_RED_AVG, n, 0);
    return;
  default:
    if (stream) reduce_loop(dst, src, nsrc, dt, DC_RED_SUM, n, 1);
    else reduce_loop(dst, src, nsrc, dt, DC_RED_SUM, n, 0);
    return;
  }
}

/* ---- fp64 and integers ------------------------------------------------------------------------------------------- */
/* s[] holds a part; dst is written after all sources were read, so it may be one of them. `expr` combines a and b. */
#define EACH(expr)                                \
  for (int k = 1; k < nsrc; k++) {                \
    const elem *x = (const elem *)src[k] + begin; \
    for (int64_t i = 0; i < len; i++) {           \
      const elem a = s[i], b = x[i];              \
      s[i] = (elem)(expr);                        \
    }                                             \
  }                                               \
  break

#define REDUCE_INT(suffix, type, utype)                                                         \
  static void reduce_##suffix(type *dst, const void *const *src, int nsrc, int op, int64_t n) { \
    typedef type elem;                                                                          \
    elem s[PART];                                                                               \
    for (int64_t begin = 0; begin < n; begin += PART) {                                         \
      const int64_t len = n - begin < PART ? n - begin : PART;                                  \
      memcpy(s, (const elem *)src[0] + begin, (size_t)len * sizeof *s);                         \
      switch (op) {                                                                             \
      case DC_RED_MIN: EACH(a < b ? a : b);                                                     \
      case DC_RED_MAX: EACH(a > b ? a : b);                                                     \
      case DC_RED_PROD: EACH((utype)a * (utype)b);                                              \
      case DC_RED_BAND: EACH(a & b);                                                            \
      case DC_RED_BOR: EACH(a | b);                                                             \
      case DC_RED_BXOR: EACH(a ^ b);                                                            \
      default: EACH((utype)a + (utype)b);                                                       \
      }                                                                                         \
      memcpy(dst + begin, s, (size_t)len * sizeof *s);                                          \
    }                                                                                           \
  }
/* utype: unsigned and at least int, so that wrapping is defined. */
REDUCE_INT(i8, int8_t, unsigned)
REDUCE_INT(u8, uint8_t, unsigned)
REDUCE_INT(i16, int16_t, unsigned)
REDUCE_INT(i32, int32_t, uint32_t)
REDUCE_INT(i64, int64_t, uint64_t)

static void reduce_f64(double *dst, const void *const *src, int nsrc, int op, int64_t n) {
  typedef double elem;
  elem s[PART];
  const double share = op == DC_RED_AVG ? 1.0 / nsrc : 1.0; /* times one is exact */
  for (int64_t begin = 0; begin < n; begin += PART) {
    const int64_t len = n - begin < PART ? n - begin : PART;
    memcpy(s, (const double *)src[0] + begin, (size_t)len * sizeof *s);
    switch (op) {
    case DC_RED_MIN: EACH(dc__min_f64(a, b));
    case DC_RED_MAX: EACH(dc__max_f64(a, b));
    case DC_RED_PROD: EACH(a * b);
    default: EACH(a + b);
    }
    for (int64_t i = 0; i < len; i++) dst[begin + i] = dc__canonical_f64(s[i] * share);
  }
}

void DC_BODY(reduce)(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, int stream) {
  switch (dt) {
  case DC_F64: reduce_f64(dst, src, nsrc, op, n); return;
  case DC_I8: reduce_i8(dst, src, nsrc, op, n); return;
  case DC_U8: reduce_u8(dst, src, nsrc, op, n); return;
  case DC_I16: reduce_i16(dst, src, nsrc, op, n); return;
  case DC_I32: reduce_i32(dst, src, nsrc, op, n); return;
  case DC_I64: reduce_i64(dst, src, nsrc, op, n); return;
  default: DC_FOR_LOW(dt, DT, reduce_low(dst, src, nsrc, DT, op, n, stream));
  }
}

/* ---- into the fp32 accumulator, with the norm -------------------------------------------------------------------- */
/* Vector i / 16 of a block is squared into chain i / 16 % 2; that of i is c. */
DC_INLINE void reduce_acc_step(vd *sq, int c, float *acc, const void *const *src, int nsrc, int dt, int assign,
                               int norm, int64_t i, int unroll, int r, int stream) {
  vf s[UNROLL];
  reduce_gather(s, unroll, src, nsrc, dt, DC_RED_SUM, i, r);
  for (int u = 0; u < unroll; u++) {
    if (!assign) s[u] = v_add(v_get(acc, DC_F32, i + u * LANES, r), s[u]);
    reduce_put_or_stream(acc, DC_F32, i + u * LANES, r, s[u], stream);
    if (norm) sq[(c + u) % 2] = vd_add_sq(sq[(c + u) % 2], s[u]); /* lanes past r are zero in every source and in acc */
  }
}

DC_INLINE void reduce_acc_loop(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign,
                               double *partial, int norm, int stream) {
  for (int64_t begin = 0; begin < n; begin += DC_BLOCK) {
    const int64_t end = n - begin < DC_BLOCK ? n : begin + DC_BLOCK;
    vd sq[2] = {vd_zero(), vd_zero()};
    int64_t i = begin;
    for (; i + UNROLL * LANES <= end; i += UNROLL * LANES) {
      reduce_ahead_all(src, nsrc, dt, i);
      if (!assign) reduce_ahead(acc, DC_F32, i);
      reduce_acc_step(sq, 0, acc, src, nsrc, dt, assign, norm, i, UNROLL, LANES, stream);
    }
    for (int c = 0; i < end; c = !c, i += LANES) /* fewer than UNROLL vectors */
      reduce_acc_step(sq, c, acc, src, nsrc, dt, assign, norm, i, 1, (int)(end - i < LANES ? end - i : LANES), 0);
    if (norm) partial[begin / DC_BLOCK] = vd_tree2(sq);
  }
  if (stream) v_fence();
}

DC_INLINE void reduce_acc_low(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign,
                              double *partial, int stream) {
  stream = stream && v_can_stream(acc, DC_F32);
  if (assign && partial && stream) reduce_acc_loop(acc, src, nsrc, dt, n, 1, partial, 1, 1);
  else if (assign && partial) reduce_acc_loop(acc, src, nsrc, dt, n, 1, partial, 1, 0);
  else if (assign && stream) reduce_acc_loop(acc, src, nsrc, dt, n, 1, partial, 0, 1);
  else if (assign) reduce_acc_loop(acc, src, nsrc, dt, n, 1, partial, 0, 0);
  else if (partial) reduce_acc_loop(acc, src, nsrc, dt, n, 0, partial, 1, 0);
  else reduce_acc_loop(acc, src, nsrc, dt, n, 0, partial, 0, 0);
}

void DC_BODY(reduce_acc)(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial,
                         int stream) {
  DC_FOR_LOW(dt, DT, reduce_acc_low(acc, src, nsrc, DT, n, assign, partial, stream));
}
