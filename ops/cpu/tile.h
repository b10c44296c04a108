/* tile.h: products of small matrices, for attention.c.
 *
 * `tile_product` holds MR x NR sums in registers (or twice the rows of half the columns) and walks the inner
 * dimension. Its left operand lies by rows or by columns, its right one in panels of NR (or 16) columns. Elements are
 * 4-byte words: a float, or, where the processor has VDPBF16PS, a pair of bf16 that are neighbours in the inner
 * dimension, so one text serves both. Each build has one of them (TILE_PAIRS). Pairs by rows and panels of NR are also
 * what AMX's tiles take. */
#ifndef DEEPC_OPS_CPU_TILE_H
#define DEEPC_OPS_CPU_TILE_H

#include "cpu/vec.h"
#include "ref/tile.h"

#if defined(__AVX512F__)
enum { MR = 8, NV = 2 };
#else
enum { MR = 4, NV = 1 };
#endif
enum { NR = NV * LANES };
#define TILE_UNROLL _Pragma("GCC unroll 16")

/* What the words of this build are: floats or pairs. */
#if defined(__AVX512BF16__)
#define TILE_PAIRS 1
#else
#define TILE_PAIRS 0
#endif

DC_INLINE int64_t tile_words(int64_t n) { return TILE_PAIRS ? n / 2 : n; }

/* ---- product ----------------------------------------------------------------------------------------------------- */
DC_INLINE vf tile_madd(vf sum, const float *a, vf b) {
#if TILE_PAIRS
  return v_dot_pairs(sum, v_bits(v_set1(*a)), v_bits(b));
#else
  return v_fma(v_set1(*a), b, sum);
#endif
}

/* A left operand: element (r, i) of the rows of block n lies at n * block + r * row + i * step. */
typedef struct tile_left {
  const float *at;
  int64_t row, step, block;
} tile_left;

/* Rows one after the other: [rows][lda]. */
DC_INLINE tile_left tile_by_rows(const float *at, int64_t lda, int mr) { return (tile_left){at, lda, 1, mr * lda}; }
/* Its columns one after the other: [k][ld]. */
DC_INLINE tile_left tile_by_columns(const float *at, int64_t ld, int mr) { return (tile_left){at, 1, ld, mr}; }

/* Which parts of the inner dimension the left operand gives, `words` each, from these words on. */
typedef struct tile_runs {
  const int64_t *first;
  int count;
  int64_t words;
} tile_runs;

/* c[mr][nv * LANES] (+)= a[mr][k] b[k][nv * LANES]; mr * nv = MR * NV. */
DC_INLINE void tile_product(float *c, tile_left a, const float *b, tile_runs k, int mr, int nv, int add) {
  enum { MOST = 16 };
  const int nr = nv * LANES;
  vf sum[MOST][NV];
  TILE_UNROLL for (int r = 0; r < mr; r++) TILE_UNROLL for (int j = 0; j < nv; j++)
      sum[r][j] = add ? v_load32(c + r * nr + j * LANES, LANES) : v_set1(0.0f);
  for (int t = 0; t < k.count; t++) {
    const float *at = a.at + k.first[t] * a.step;
    for (int64_t i = 0; i < k.words; i++, b += nr) {
      vf right[NV];
      TILE_UNROLL for (int j = 0; j < nv; j++) right[j] = v_load32(b + j * LANES, LANES);
      TILE_UNROLL for (int r = 0; r < mr; r++) TILE_UNROLL for (int j = 0; j < nv; j++)
          sum[r][j] = tile_madd(sum[r][j], at + r * a.row + i * a.step, right[j]);
    }
  }
  TILE_UNROLL for (int r = 0; r < mr; r++) TILE_UNROLL for (int j = 0; j < nv; j++)
      v_store32(c + r * nr + j * LANES, LANES, sum[r][j]);
}

/* One text for each kind, called: inlined everywhere, they are most of a body's code and of its time to compile. */
#define TILE_PRODUCT(name, mr, nv, add)                                                                          \
  static __attribute__((noinline)) void name(float *c, const tile_left *a, const float *b, const tile_runs *k) { \
    tile_product(c, *a, b, *k, mr, nv, add);                                                                     \
  }
TILE_PRODUCT(tile_wide_set, MR, NV, 0)
TILE_PRODUCT(tile_wide_add, MR, NV, 1)
TILE_PRODUCT(tile_slim_set, MR *NV, 1, 0)
TILE_PRODUCT(tile_slim_add, MR *NV, 1, 1)
#if defined(DC_TILES)
/* c[32][NR] (+)= a[32][k] b[k][NR] in tiles; k.words is a multiple of 16, a lies by rows. */
static __attribute__((noinline)) void tile_square(float *c, const tile_left *a, const float *b, const tile_runs *k,
                                                  int add) {
  const int64_t four = sizeof *c, down = V_TILE_ROWS * a->row, across = NR * four;
  float *const below = c + V_TILE_ROWS * NR;
  if (add) {
    V_TILE_LOAD(0, c, across);
    V_TILE_LOAD(1, c + LANES, across);
    V_TILE_LOAD(2, below, across);
    V_TILE_LOAD(3, below + LANES, across);
  } else {
    V_TILE_ZERO(0);
    V_TILE_ZERO(1);
    V_TILE_ZERO(2);
    V_TILE_ZERO(3);
  }
  for (int t = 0; t < k->count; t++) {
    const float *at = a->at + k->first[t] * a->step;
    for (int64_t i = 0; i < k->words; i += V_TILE_WORDS, b += V_TILE_WORDS * NR) {
      V_TILE_LOAD(4, at + i, a->row * four);
      V_TILE_LOAD(6, b, across);
      V_TILE_LOAD(7, b + LANES, across);
      V_TILE_DOT(0, 4, 6);
      V_TILE_LOAD(5, at + down + i, a->row * four);
      V_TILE_DOT(1, 4, 7);
      V_TILE_DOT(2, 5, 6);
      V_TILE_DOT(3, 5, 7);
    }
  }
  V_TILE_STORE(0, c, across);
  V_TILE_STORE(1, c + LANES, across);
  V_TILE_STORE(2, below, across);
  V_TILE_STORE(3, below + LANES, across);
}
#endif
DC_INLINE void tile_one(float *c, const tile_left *a, const float *b, const tile_runs *k, int nr, int add) {
  if (nr == NR) (add ? tile_wide_add : tile_wide_set)(c, a, b, k);
  else (add ? tile_slim_add : tile_slim_set)(c, a, b, k);
}

typedef struct tile_panels { /* [panels][rows][columns of a panel], and the words from one panel to the next */
  float *at;
  int64_t step;
} tile_panels;

/* Rows of a product with panels of nr columns: what the registers hold. */
DC_INLINE int tile_mr(int nr) { return MR * NR / nr; }

/* c[panels][rows][nr] (+)= a[rows][k] b[panels][k][nr]; nr is NR or LANES, rows a multiple of tile_mr(nr). */
DC_INLINE void tile_multiply_runs(tile_panels c, tile_left a, tile_panels b, int64_t rows, int64_t panels, tile_runs k,
                                  int nr, int add) {
  const int mr = tile_mr(nr);
#if defined(DC_TILES)
  if (nr == NR && rows % (2 * V_TILE_ROWS) == 0 && k.words % V_TILE_WORDS == 0) { /* not 16 queries or keys */
    for (int64_t p = 0; p < panels; p++) {
      tile_left left = a;
      for (int64_t r = 0; r < rows; r += 2 * V_TILE_ROWS, left.at += 2 * V_TILE_ROWS * a.row)
        tile_square(c.at + p * c.step + r * nr, &left, b.at + p * b.step, &k, add);
    }
    return;
  }
#endif
  for (int64_t p = 0; p < panels; p++) {
    tile_left left = a;
    for (int64_t r = 0; r < rows; r += mr, left.at += a.block)
      tile_one(c.at + p * c.step + r * nr, &left, b.at + p * b.step, &k, nr, add);
  }
}

DC_INLINE void tile_multiply(tile_panels c, tile_left a, tile_panels b, int64_t rows, int64_t panels, int64_t k, int nr,
                             int add) {
  const int64_t all = 0;
  tile_multiply_runs(c, a, b, rows, panels, (tile_runs){&all, 1, k}, nr, add);
}

/* to[c * ldt + r] = from[r * ldf + c]: words, 16 by 16. */
DC_INLINE void tile_turn(float *to, int64_t ldt, const float *from, int64_t ldf, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r += LANES)
    for (int64_t c = 0; c < columns; c += LANES) {
      vf x[LANES];
      for (int i = 0; i < LANES; i++) x[i] = v_load32(from + (r + i) * ldf + c, LANES);
      v_turn(x);
      for (int i = 0; i < LANES; i++) v_store32(to + (c + i) * ldt + r, LANES, x[i]);
    }
}

/* ---- operands from rows ------------------------------------------------------------------------------------------ */
typedef struct tile_rows { /* rows of `dim` elements of a head; those from `count` on are zeros */
  const char *at;
  int64_t stride, count, dim, width; /* width: dim rounded up to whole panels */
} tile_rows;

/* 16 columns of row i from c on as floats, zeros behind it. */
DC_INLINE vf tile_some_floats(const tile_rows *x, int dt, int64_t i, int64_t c) {
  const int64_t left = i < x->count ? x->dim - c : 0;
  return left <= 0 ? v_set1(0.0f) : v_get(x->at + i * x->stride, dt, c, left < LANES ? (int)left : LANES);
}

/* All of it. */
DC_INLINE void tile_floats(float *to, const tile_rows *x, int dt, int64_t i) {
  for (int64_t c = 0; c < x->width; c += LANES) v_store32(to + c, LANES, tile_some_floats(x, dt, i, c));
}

/* Whether rows from i on, n of them, are words as they lie: floats or pairs, without zeros behind them. */
DC_INLINE int tile_plain(const tile_rows *x, int dt, int64_t i, int64_t n) {
  return dt == (TILE_PAIRS ? DC_BF16 : DC_F32) && x->dim == x->width && i + n <= x->count && x->stride % 4 == 0;
}

/* Row i as words: floats, or bf16 as they lie. */
DC_INLINE void tile_row(float *to, const tile_rows *x, int dt, int64_t i) {
  if (tile_plain(x, dt, i, 1)) {
    const char *row = x->at + i * x->stride;
    for (int64_t w = 0; w < tile_words(x->width); w += LANES) v_store32(to + w, LANES, v_load32(row + 4 * w, LANES));
    return;
  }
  if (!TILE_PAIRS) {
    tile_floats(to, x, dt, i);
    return;
  }
  const int64_t bytes = i < x->count ? 2 * x->dim : 0;
  if (bytes) memcpy(to, x->at + i * x->stride, (size_t)bytes);
  memset((char *)to + bytes, 0, (size_t)(2 * x->width - bytes));
}

#if TILE_PAIRS
/* 16 words from column c on of rows i and k, which become neighbours down: row i's are the lower halves. plain: the
 * rows are there, and so wide. */
DC_INLINE vf tile_pair_words(const tile_rows *x, int64_t i, int64_t k, int64_t c, int plain) {
  vf low = v_set1(0.0f), high = low;
  if (plain) {
    low = v_get(x->at + i * x->stride, DC_BF16, c, LANES), high = v_get(x->at + k * x->stride, DC_BF16, c, LANES);
  } else {
    const int64_t left = x->dim - c;
    const int r = left < 0 ? 0 : left < LANES ? (int)left : LANES;
    if (i < x->count && r) low = v_get(x->at + i * x->stride, DC_BF16, c, r);
    if (k < x->count && r) high = v_get(x->at + k * x->stride, DC_BF16, c, r);
  }
  return v_of_bits(vi_or(vi_right(v_bits(low), 16), v_bits(high)));
}
#endif

/* Builds of pairs have bodies for bf16; those of floats serve fp32 and fp16 there too. */
#if TILE_PAIRS
#define DC_OP(name, params)
#define DC_OP_TILES(name, params) void dc__##name##_avx512 params;
#include "ops.def"
#undef DC_OP
#define TILE_OTHERS(name, args) \
  if (a->dtype != DC_BF16) {    \
    dc__##name##_avx512 args;   \
    return;                     \
  }
/* As DC_FOR_LOW, of the dtypes that this build has bodies for. */
#define TILE_FOR(dt, DT, call) \
  {                            \
    enum { DT = DC_BF16 };     \
    (void)(dt);                \
    call;                      \
  }
#else
#define TILE_OTHERS(name, args)
#define TILE_FOR DC_FOR_LOW
#endif

/* Left operand, inner dimension across the rows: [n][words of width]. */
DC_INLINE void tile_pack_rows_of(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n) {
  const int64_t w = tile_words(x->width);
  for (int64_t i = 0; i < n; i++) tile_row(to + i * w, x, dt, begin + i);
}
static __attribute__((noinline)) void tile_pack_rows(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n) {
  TILE_FOR(dt, DT, tile_pack_rows_of(to, x, DT, begin, n));
}

/* Right operand, inner dimension across the rows: [panels of n][words of width][nr]; n a multiple of 16. */
static __attribute__((noinline)) void tile_pack_across(float *to, const tile_rows *x, int dt, int64_t begin, int64_t n,
                                                       int nr) {
  float words[LANES * TILE_DIM];
  const int64_t w = tile_words(x->width);
  for (int64_t i = 0; i < n; i += LANES) {
    const float *row = words;
    int64_t ld = w;
    if (tile_plain(x, dt, begin + i, LANES))
      row = (const float *)(const void *)(x->at + (begin + i) * x->stride), ld = x->stride / 4;
    else tile_pack_rows(words, x, dt, begin + i, LANES);
    tile_turn(to + i / nr * w * nr + i % nr, nr, row, ld, LANES, w);
  }
}

#endif
