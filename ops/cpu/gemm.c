/* gemm.c: bodies of dc_gemm, after Goto & van de Geijn (Anatomy of High-Performance Matrix Multiplication, TOMS 34,
 * 2008) and BLIS (Van Zee & van de Geijn, TOMS 41, 2015): a panel of b of GEMM_COLS columns and one stretch of k is
 * packed for the outer caches, a block of a of dc__gemm_rows() rows for L2, both in the order in which the innermost
 * loop reads them, and that loop keeps TALL x WIDE sums in registers. Operands may be transposed: packing turns squares
 * of 16 x 16.
 *
 * What is packed are words of 32 bits: an fp32 number, or, with AVX512-BF16, a pair of bf16 that lie one behind the
 * other in k, of which VDPBF16PS adds the second first. Without it a word is a bf16 that was widened, and those of a
 * pair have changed places.
 *
 * 14 x 32 sums on AVX-512 (28 of 32 registers; two loads of b and 14 of a for 28 FMAs), 6 x 16 on AVX2 (12 of 16).
 * On one core of an EPYC of Zen 5, GFLOP/s of 256: 206 to 241, oneDNN 163 to 255, MKL 93 to 110, which runs its AVX2
 * loop on AMD's processors; of Zen 4, of 117: 92 to 109, 74 to 111, 73 to 100 (docs/lab/kernels.md). */
#include "cpu/vec.h"

#if defined(__AVX512F__)
enum { TALL = 14, LOW = 8, VECTORS = 2 };
#else
enum { TALL = 6, LOW = 3, VECTORS = 1 };
#endif
enum { WIDE = VECTORS * LANES, GEMM_COLS = DC__GEMM_COLS, GEMM_SUMS = DC__GEMM_SUMS };
_Static_assert((int)TALL <= (int)DC__GEMM_SLACK && (int)WIDE <= (int)DC__GEMM_SLACK && GEMM_COLS % WIDE == 0,
               "what a body takes of scratch");

DC_INLINE int64_t gemm_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- words ------------------------------------------------------------------------------------------------------- */
#if defined(__AVX512BF16__)
enum { GEMM_PAIRS = 1 };
#else
enum { GEMM_PAIRS = 0 };
#endif

DC_INLINE int64_t gemm_size(int dt) { return dt == DC_F32 ? sizeof(float) : sizeof(uint16_t); }

DC_INLINE const void *gemm_at(const void *p, int dt, int64_t i) { return (const char *)p + i * gemm_size(dt); }

/* Words of `depth` elements of k. */
DC_INLINE int64_t gemm_words(int dt, int64_t depth) {
  return dt == DC_F32 ? depth : GEMM_PAIRS ? (depth + 1) / 2 : depth + depth % 2;
}

/* Words p and on of numbers that lie one behind the other, 16, of which `depth` elements are there; zeros behind. */
DC_INLINE vf gemm_words_along(const void *src, int dt, int64_t p, int64_t depth) {
  if (dt == DC_F32) return v_load32((const float *)src + p, (int)gemm_min(LANES, depth - p));
#if defined(__AVX512BF16__)
  return v_load_pairs((const uint16_t *)src + 2 * p, (int)gemm_min(2 * LANES, depth - 2 * p));
#else
  return v_swap1(v_get(src, dt, p, (int)gemm_min(LANES, depth - p)));
#endif
}

/* Word p of each of `have` numbers side by side; `along`: elements from one of k to the next. */
DC_INLINE vf gemm_words_across(const void *src, int dt, int64_t p, int64_t along, int64_t depth, int have) {
  const uint16_t *at = src;
  if (dt == DC_F32) return v_load32((const float *)src + p * along, have);
#if defined(__AVX512BF16__)
  at += 2 * p * along;
  return v_pairs(v_load16(at, have), 2 * p + 1 < depth ? v_load16(at + along, have) : _mm256_setzero_si256());
#else
  return (p ^ 1) < depth ? v_get(at, dt, (p ^ 1) * along, have) : v_set1(0.0f);
#endif
}

/* What lies behind that. */
DC_INLINE void gemm_fetch_across(const void *src, int dt, int64_t p, int64_t along) {
  const int64_t rows = dt != DC_F32 && GEMM_PAIRS ? 2 : 1;
  for (int64_t i = 0; i < rows; i++) v_ahead(src, dt, (rows * p + i) * along, CACHE_LINE);
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */
/* `have` of `some` numbers of each word, zeros behind them. The next ones of the same rows are fetched meanwhile: rows
 * are too far from each other, and runs of one stretch too short, for the processor's own prefetchers. */
DC_INLINE void gemm_pack_rows(float *dst, int width, const void *src, int dt, int64_t along, int64_t depth, int have,
                              int some) {
  for (int64_t p = 0; p < gemm_words(dt, depth); p++) {
    gemm_fetch_across(src, dt, p, along);
    v_store32(dst + p * width, some, gemm_words_across(src, dt, p, along, depth, have));
  }
}

/* The same of columns that lie `across` elements apart. */
DC_INLINE void gemm_pack_columns(float *dst, int width, const void *src, int dt, int64_t across, int64_t depth,
                                 int have, int some) {
  const int64_t words = gemm_words(dt, depth);
  for (int64_t p = 0; p < words; p += LANES) {
    const int deep = (int)gemm_min(LANES, words - p);
    vf t[LANES];
    for (int j = 0; j < some; j++) v_ahead(src, dt, (width + j) * across, p * (int64_t)sizeof(float));
    for (int j = 0; j < LANES; j++)
      t[j] = j < have ? gemm_words_along(gemm_at(src, dt, j * across), dt, p, depth) : v_set1(0.0f);
    v_turn(t);
    for (int q = 0; q < deep; q++) v_store32(dst + (p + q) * width, some, t[q]);
  }
}

DC_INLINE void gemm_pack_some(float *dst, int width, const void *src, int dt, int64_t along, int64_t across,
                              int64_t depth, int have, int some) {
  if (have <= 0)
    for (int64_t p = 0; p < gemm_words(dt, depth); p++) v_store32(dst + p * width, some, v_set1(0.0f));
  else if (across == 1) gemm_pack_rows(dst, width, src, dt, along, depth, have, some);
  else gemm_pack_columns(dst, width, src, dt, across, depth, have, some);
}

/* Word p of number j < n at dst[p * width + j], else 0. */
DC_INLINE void gemm_pack(float *dst, int width, const void *src, int dt, int64_t along, int64_t across, int64_t depth,
                         int n) {
  int j = 0;
  for (; j + LANES <= width && j + LANES <= n; j += LANES)
    gemm_pack_some(dst + j, width, gemm_at(src, dt, j * across), dt, along, across, depth, LANES, LANES);
  if (j < width && width % LANES && n == width) /* constants */
    gemm_pack_some(dst + j, width, gemm_at(src, dt, j * across), dt, along, across, depth, width % LANES,
                   width % LANES),
        j = width;
  for (; j < width; j += LANES) {
    const int some = (int)gemm_min(LANES, width - j);
    gemm_pack_some(dst + j, width, gemm_at(src, dt, j * across), dt, along, across, depth, (int)gemm_min(some, n - j),
                   some);
  }
}

/* ---- fetching ---------------------------------------------------------------------------------------------------- */
/* What is packed next, which the innermost loop brings into L2 while it sums: `runs` of `run` bytes, `stride` apart. */
typedef struct gemm_fetch {
  const char *at;
  int64_t runs, run, stride, done, lines; /* of the first run; at a time */
} gemm_fetch;

/* n numbers of each of `depth` elements of k, within `tiles` tiles. */
DC_INLINE gemm_fetch gemm_fetch_of(const void *src, int dt, int64_t along, int64_t across, int64_t depth, int64_t n,
                                   int64_t tiles) {
  const int64_t size = gemm_size(dt), times = tiles * TALL;
  gemm_fetch f = {.at = src, .done = 0};
  f.runs = along == 1 ? n : depth, f.run = size * (along == 1 ? depth : n),
  f.stride = size * (along == 1 ? across : along);
  f.lines = (f.runs * (f.run / CACHE_LINE + 1) + times - 1) / times;
  return f;
}

DC_INLINE void gemm_fetch_some(gemm_fetch *f) {
  for (int64_t i = 0; i < f->lines && f->runs > 0; i++) {
    v_prefetch_far(f->at, f->done);
    f->done += CACHE_LINE;
    if (f->done >= f->run) f->at += f->stride, f->done = 0, f->runs--;
  }
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */
DC_INLINE vf gemm_multiply_add(int dt, vf a, vf b, vf sum) {
#if defined(__AVX512BF16__)
  if (dt == DC_BF16) return v_dot_pairs(sum, (vi)a, (vi)b);
#endif
  return v_fma(a, b, sum);
}

/* `tall` of the rows. Those of the result, of `size` bytes and `stride` apart, are fetched one after the other
 * meanwhile, with what is packed next: all at once they would hold up what the loop reads. */
DC_INLINE void gemm_sum(vf sum[TALL][VECTORS], int tall, const float *a, const float *b, int dt, int64_t words,
                        const char *out, int64_t stride, int64_t size, int rows, gemm_fetch next[2]) {
  const int64_t part = words / (2 * TALL);
#pragma GCC unroll 16
  for (int i = 0; i < tall; i++)
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++) sum[i][v] = v_set1(0.0f);
  for (int64_t p = 0, turn = 0; p < words; turn++) {
    const int64_t end = turn < rows ? p + part : words;
    if (turn < rows) {
      v_prefetch(out + turn * stride, 0), v_prefetch(out + turn * stride, size - 1);
      gemm_fetch_some(&next[0]), gemm_fetch_some(&next[1]);
    }
    for (; p < end; p++, a += TALL, b += WIDE) {
      vf row[VECTORS];
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) row[v] = v_load32(b + v * LANES, LANES);
#pragma GCC unroll 16
      for (int i = 0; i < tall; i++) {
        const vf x = v_set1(a[i]);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[i][v] = gemm_multiply_add(dt, x, row[v], sum[i][v]);
      }
    }
  }
}

/* Where a tile goes: into out, or to sums. Sums of earlier stretches are added first. */
typedef struct gemm_place {
  void *out; /* NULL: into after */
  const void *c; /* what beta is the factor of */
  const float *before; /* or NULL */
  float *after;
  int64_t out_stride, c_stride, stride; /* the last: of before and after; elements */
  float alpha, beta;
} gemm_place;

DC_INLINE void gemm_put(const gemm_place *to, int dt, int64_t i, int64_t j, int r, vf sum, vf alpha, vf beta) {
  if (dt != DC_F32 && to->before) sum = v_add(v_load32(to->before + i * to->stride + j, r), sum);
  if (dt != DC_F32 && !to->out) {
    v_store32(to->after + i * to->stride + j, r, sum);
    return;
  }
  v_put(to->out, dt, i * to->out_stride + j, r,
        to->beta != 0.0f ? v_fma(alpha, sum, v_mul(beta, v_get(to->c, dt, i * to->c_stride + j, r)))
                         : v_mul(alpha, sum));
}

/* One tile of rows x cols, whose first element is (i, j) of `to`. */
DC_INLINE void gemm_tile(const float *a, const float *b, int dt, int64_t words, const gemm_place *to, int64_t i0,
                         int64_t j0, int rows, int cols, gemm_fetch next[2]) {
  const vf alpha = v_set1(to->alpha), beta = v_set1(to->beta);
  const char *out = to->out ? gemm_at(to->out, dt, i0 * to->out_stride + j0)
                            : (void *)(to->after + i0 * to->stride + j0);
  const int64_t size = to->out ? gemm_size(dt) : (int64_t)sizeof(float);
  const int64_t stride = size * (to->out ? to->out_stride : to->stride);
  vf sum[TALL][VECTORS];
  if (rows <= LOW) gemm_sum(sum, LOW, a, b, dt, words, out, stride, WIDE * size, rows, next);
  else gemm_sum(sum, TALL, a, b, dt, words, out, stride, WIDE * size, rows, next);
  if (rows == TALL && cols == WIDE) {
#pragma GCC unroll 16
    for (int i = 0; i < TALL; i++)
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; v++) gemm_put(to, dt, i0 + i, j0 + v * LANES, LANES, sum[i][v], alpha, beta);
    return;
  }
  for (int i = 0; i < rows; i++)
    for (int v = 0; v * LANES < cols; v++)
      gemm_put(to, dt, i0 + i, j0 + v * LANES, (int)gemm_min(LANES, cols - v * LANES), sum[i][v], alpha, beta);
}

/* Functions of their own: within a larger one the compiler moves sums from register to register. */
static __attribute__((noinline)) void gemm_tile_fp32(const float *a, const float *b, int64_t words,
                                                     const gemm_place *to, int64_t i0, int64_t j0, int rows, int cols,
                                                     gemm_fetch next[2]) {
  gemm_tile(a, b, DC_F32, words, to, i0, j0, rows, cols, next);
}
static __attribute__((noinline)) void gemm_tile_bf16(const float *a, const float *b, int64_t words,
                                                     const gemm_place *to, int64_t i0, int64_t j0, int rows, int cols,
                                                     gemm_fetch next[2]) {
  gemm_tile(a, b, DC_BF16, words, to, i0, j0, rows, cols, next);
}

/* ---- a piece of the result --------------------------------------------------------------------------------------- */
typedef struct gemm_room {
  float *a, *b, *sums;
  int64_t most; /* rows of a at a time */
  int64_t row, p; /* which are packed: those from `row` on, of the stretch that begins at p */
} gemm_room;

DC_INLINE const void *gemm_a(const dc_gemm_args *t, int dt, int64_t i, int64_t p) {
  return gemm_at(t->a, dt, i * t->a_stride[0] + p * t->a_stride[1]);
}
DC_INLINE const void *gemm_b(const dc_gemm_args *t, int dt, int64_t p, int64_t j) {
  return gemm_at(t->b, dt, p * t->b_stride[0] + j * t->b_stride[1]);
}
DC_INLINE int64_t gemm_depth(const dc_gemm_args *t, int dt, int64_t p) {
  return gemm_min(DC__GEMM_DEPTH(dt), t->k - p);
}

/* Adds the stretch of k that begins at p to rows x cols of the result, which is `to`. What comes after it begins at the
 * stretch `then_p`, if that is not negative, and the column then_col. */
DC_INLINE void gemm_stretch(const dc_gemm_args *t, int dt, gemm_room *room, const gemm_place *to, int64_t p,
                            int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t then_p, int64_t then_col) {
  const int64_t depth = gemm_depth(t, dt, p), words = gemm_words(dt, depth);
  for (int64_t i0 = 0; i0 < rows; i0 += room->most) {
    const int64_t tall = gemm_min(room->most, rows - i0), tiles = (tall + TALL - 1) / TALL;
    const int there = room->row == row + i0 && room->p == p, last = i0 + tall == rows;
    const int64_t next_p = last ? then_p : p, next_row = last ? row : row + i0 + tall;
    gemm_fetch next[2] = {{.runs = 0}, {.runs = 0}};
    room->row = row + i0, room->p = p;
    for (int64_t i = 0; i < tall && !there; i += TALL)
      gemm_pack(room->a + i * words, TALL, gemm_a(t, dt, row + i0 + i, p), dt, t->a_stride[1], t->a_stride[0], depth,
                (int)gemm_min(TALL, tall - i));
    if (next_p >= 0 && (next_p != p || next_row != row + i0))
      next[0] = gemm_fetch_of(gemm_a(t, dt, next_row, next_p), dt, t->a_stride[1], t->a_stride[0],
                              gemm_depth(t, dt, next_p), gemm_min(room->most, row + rows - next_row),
                              tiles * ((cols + WIDE - 1) / WIDE));
    for (int64_t j = 0; j < cols; j += WIDE) {
      if (i0 == 0) {
        const int64_t next_b = j + WIDE < cols ? col + j + WIDE : then_col, b_p = j + WIDE < cols ? p : then_p;
        gemm_pack(room->b + j * words, WIDE, gemm_b(t, dt, p, col + j), dt, t->b_stride[0], t->b_stride[1], depth,
                  (int)gemm_min(WIDE, cols - j));
        if (b_p >= 0)
          next[1] = gemm_fetch_of(gemm_b(t, dt, b_p, next_b), dt, t->b_stride[0], t->b_stride[1],
                                  gemm_depth(t, dt, b_p), gemm_min(WIDE, t->n - next_b), tiles);
      }
      for (int64_t i = 0; i < tall; i += TALL)
        (dt == DC_F32 ? gemm_tile_fp32 : gemm_tile_bf16)(room->a + i * words, room->b + j * words, words, to, i0 + i, j,
                                                         (int)gemm_min(TALL, tall - i), (int)gemm_min(WIDE, cols - j),
                                                         next);
    }
  }
}

/* fp32 is summed in the result itself, and bf16 beside it until the last stretch. then_col: of the next block;
 * negative: there is none. */
DC_INLINE void gemm_block(const dc_gemm_args *t, int dt, gemm_room *room, int64_t row, int64_t rows, int64_t col,
                          int64_t cols, int64_t then_col) {
  const gemm_place to = {.out = (void *)gemm_at(t->out, dt, row * t->out_stride + col),
                         .c = t->c ? gemm_at(t->c, dt, row * t->c_stride + col) : NULL,
                         .after = room->sums,
                         .out_stride = t->out_stride,
                         .c_stride = t->c_stride,
                         .stride = cols,
                         .alpha = t->alpha,
                         .beta = t->beta};
  int64_t p = 0;
  do {
    const int last = p + DC__GEMM_DEPTH(dt) >= t->k;
    const int64_t then_p = !last ? p + DC__GEMM_DEPTH(dt) : then_col < 0 ? -1 : 0, then = last ? then_col : col;
    gemm_place part = to;
    if (dt != DC_F32) part.out = last ? to.out : NULL, part.before = p ? room->sums : NULL;
    else if (p) part.c = to.out, part.c_stride = to.out_stride, part.beta = 1.0f;
    gemm_stretch(t, dt, room, &part, p, row, rows, col, cols, then_p, then);
    p += DC__GEMM_DEPTH(dt);
  } while (p < t->k);
}

DC_INLINE void gemm_piece(const dc_gemm_args *t, int dt, int64_t row, int64_t rows, int64_t col, int64_t cols,
                          float *scratch) {
  const int64_t words = gemm_words(dt, gemm_min(t->k, DC__GEMM_DEPTH(dt)));
  const int64_t most = dt != DC_F32 && t->k > DC__GEMM_DEPTH(dt) ? GEMM_SUMS : rows;
  const int64_t cap = dc__gemm_rows(words), blocks = (gemm_min(rows, most) + cap - 1) / cap;
  gemm_room room = {.a = scratch, .row = -1};
  room.most = ((gemm_min(rows, most) + blocks - 1) / blocks + TALL - 1) / TALL * TALL; /* as equal as they get */
  room.b = room.a + (gemm_min(rows, cap) + DC__GEMM_SLACK) * words;
  room.sums = room.b + (gemm_min(cols, GEMM_COLS) + DC__GEMM_SLACK) * words;
  for (int64_t i = 0; i < rows; i += most)
    for (int64_t j = 0; j < cols; j += GEMM_COLS)
      gemm_block(t, dt, &room, row + i, gemm_min(most, rows - i), col + j, gemm_min(GEMM_COLS, cols - j),
                 j + GEMM_COLS < cols ? col + j + GEMM_COLS : -1);
}

void DC_BODY(gemm)(const dc_gemm_args *t, int64_t row, int64_t rows, int64_t col, int64_t cols, float *scratch) {
  if (t->dtype == DC_F32) gemm_piece(t, DC_F32, row, rows, col, cols, scratch);
  else gemm_piece(t, DC_BF16, row, rows, col, cols, scratch);
}
