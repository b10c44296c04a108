// adafactor.cuh: what one CUDA thread does in dc_cuda_adafactor_*, compiled for the CPU by
// tests/c/test_cuda_adafactor.cpp. adafactor.cu has the kernels.
//
// The largest of rows and columns, and their sums of squares: a block of threads has a tile of FACTOR_ROWS x
// FACTOR_COLS, each warp rows of it, each lane columns. A tile's results go to the parameter's by atomic operations,
// whose order does not show: sums are exact (ops.h). The norms: a block of the flat space has a group of LAMB_LANES
// threads, one for each accumulator. The step: each element alone.
#ifndef DEEPC_CUDA_ADAFACTOR_CUH
#define DEEPC_CUDA_ADAFACTOR_CUH

#include "adafactor_coef.h"
#include "cuda/adamw_table.h"
#include "cuda/lamb.cuh"
#include "cuda/warp.cuh"

namespace dc_gpu {

enum {
  FACTOR_THREADS = 256,
  FACTOR_WARPS = FACTOR_THREADS / WARP,
  LANE_COLS = 4,
  FACTOR_COLS = LANE_COLS * WARP,
  FACTOR_ROWS = 8 * FACTOR_WARPS,
  FACTOR_CHUNK =
      4096, // elements of a step that a block of threads has, and second moments of rows that it adds up at once
  FACTOR_BATCH = 2,
  FACTOR_TENSORS = 18
};

typedef TensorTable<dc_adafactor_args, FACTOR_TENSORS> FactorTable;
static_assert(sizeof(FactorTable) <= PARAMETER_BYTES, "fewer tensors a launch");

// ---- the host's part: how many blocks of threads a tensor has -------------------------------------------------------
// Tiles are of one matrix: a band of rows that the stretch has a part of, and a strip of columns.
inline int64_t factor_strips(const dc_adafactor_args &t) { return (t.cols + FACTOR_COLS - 1) / FACTOR_COLS; }
inline int64_t factor_bands_before(const dc_adafactor_args &t, int64_t row) {
  return row / t.rows * ((t.rows + FACTOR_ROWS - 1) / FACTOR_ROWS) + row % t.rows / FACTOR_ROWS;
}
inline int64_t factor_tiles(const dc_adafactor_args &t) {
  if (t.n == 0 || t.variance) return 0;
  const int64_t last = factor_bands_before(t, (t.begin + t.n - 1) / t.cols);
  return (last - factor_bands_before(t, t.begin / t.cols) + 1) * factor_strips(t);
}
inline int64_t factor_matrices(const dc_adafactor_args &t) { return t.variance ? 0 : t.matrices; }
inline int64_t factor_column_blocks(const dc_adafactor_args &t) {
  return t.variance ? 0 : (t.matrices * t.cols + FACTOR_CHUNK - 1) / FACTOR_CHUNK;
}
inline int64_t factor_norm_blocks(const dc_adafactor_args &t) {
  return (dc_lamb_blocks(t.first, t.n) * LAMB_LANES + FACTOR_THREADS - 1) / FACTOR_THREADS;
}
inline int64_t factor_chunks(const dc_adafactor_args &t) { return (t.n + FACTOR_CHUNK - 1) / FACTOR_CHUNK; }

// The next table of a list of tensors, of those that have blocks(t) of the grid; returns the index of the first tensor
// that it has no room for.
template <class Blocks>
int64_t fill_factors(FactorTable *table, const dc_adafactor_args *tensors, int64_t from, int64_t count, Blocks blocks) {
  return fill_rows(table, tensors, from, count, blocks, [](const dc_adafactor_args &t) { return t; });
}

// ---- rows and columns ----------------------------------------------------------------------------------------------
struct FactorTile {
  int64_t row, end, from, to,
      matrix_cols; // rows [row, end) of all matrices, columns [from, to); where the matrix's begin
};

DC_GPU FactorTile factor_tile(const dc_adafactor_args &t, int64_t tile) {
  const int64_t strips = (t.cols + FACTOR_COLS - 1) / FACTOR_COLS, each = (t.rows + FACTOR_ROWS - 1) / FACTOR_ROWS;
  const int64_t first = t.begin / t.cols, band = first / t.rows * each + first % t.rows / FACTOR_ROWS + tile / strips;
  const int64_t matrix = band / each, row = matrix * t.rows + band % each * FACTOR_ROWS, last = (matrix + 1) * t.rows;
  const int64_t from = tile % strips * FACTOR_COLS;
  return {row, row + FACTOR_ROWS < last ? row + FACTOR_ROWS : last, from,
          from + FACTOR_COLS < t.cols ? from + FACTOR_COLS : t.cols, matrix * t.cols};
}

DC_GPU float factor_grad(const dc_adafactor_args &t, float scale, int64_t i) {
  float g;
  unpack<1>(&g, load_raw<1>(t.grad, t.grad_dtype, i), t.grad_dtype);
  return __fmul_rn(scale, g);
}

// Calls each(k, g) for the elements of a row of a tile that are this lane's and the stretch's; its column is
// tile.from + lane + k * WARP.
template <class F>
DC_GPU void factor_row(const dc_adafactor_args &t, float scale, const FactorTile &tile, int64_t row, int lane, F each) {
  const int64_t edge = row * t.cols - t.begin; // of the row, in the stretch
  DC_UNROLL
  for (int k = 0; k < LANE_COLS; k++) {
    const int64_t col = tile.from + lane + k * WARP, i = edge + col;
    if (col < tile.to && i >= 0 && i < t.n) each(k, factor_grad(t, scale, i));
  }
}

// A tile's columns: every warp's in shared memory.
template <class N> struct FactorRoom {
  N of[FACTOR_WARPS][FACTOR_COLS];
};

// Calls each(column of all matrices, all warps' parts of it) for the columns of a tile, in this thread's place.
template <class N, class F>
DC_GPU void factor_columns(const FactorTile &tile, FactorRoom<N> *room, const N (&mine)[LANE_COLS], F each) {
  const int thread = block_thread(), lane = thread % WARP, warp = thread / WARP;
  DC_UNROLL
  for (int k = 0; k < LANE_COLS; k++) room->of[warp][lane + k * WARP] = mine[k];
  block_sync();
  if (thread < FACTOR_COLS && tile.from + thread < tile.to) each(tile.matrix_cols + tile.from + thread, thread);
}

DC_GPU void factor_tops(const dc_adafactor_args &t, int64_t tile_number, FactorRoom<uint32_t> *room) {
  const FactorTile tile = factor_tile(t, tile_number);
  const float scale = (float)t.grad_scale;
  const int lane = block_thread() % WARP;
  uint32_t col[LANE_COLS] = {};
  for (int64_t row = tile.row + block_thread() / WARP; row < tile.end; row += FACTOR_WARPS) {
    uint32_t most = 0;
    factor_row(t, scale, tile, row, lane, [&](int k, float g) {
      const uint32_t size = __float_as_uint(g) & 0x7fffffffu;
      col[k] = size > col[k] ? size : col[k], most = size > most ? size : most;
    });
    most = most_of_warp(most);
    if (lane == 0 && most > 0) raise_to(&t.row_top[row], most);
  }
  factor_columns(tile, room, col, [&](int64_t at, int c) {
    uint32_t most = 0;
    for (int w = 0; w < FACTOR_WARPS; w++) most = room->of[w][c] > most ? room->of[w][c] : most;
    if (most > 0) raise_to(&t.col_top[at], most);
  });
}

// What a square is added to and taken from again (ops/adafactor.c); log2: of how many there are.
DC_GPU double factor_grid(uint32_t top, int log2) {
  const int exponent = (int)(top >> 23);
  if (exponent == 255) return __longlong_as_double(0x7ff8000000000000ll);
  return __longlong_as_double((long long)(2 * ((exponent > 0 ? exponent : 1) - 126) + log2 + 1023) << 52);
}
DC_GPU int factor_log2(int64_t count) {
  int log2 = 1;
  while (log2 < 62 && (int64_t)1 << log2 < count) log2++;
  return log2;
}
DC_GPU double factor_square(float g, double grid) { return __dadd_rn(__fma_rn((double)g, (double)g, grid), -grid); }

DC_GPU void factor_sums(const dc_adafactor_args &t, int64_t tile_number, FactorRoom<double> *room) {
  const FactorTile tile = factor_tile(t, tile_number);
  const float scale = (float)t.grad_scale;
  const int lane = block_thread() % WARP, row_log2 = factor_log2(t.cols), col_log2 = factor_log2(t.rows);
  double col[LANE_COLS] = {}, grid[LANE_COLS] = {};
  DC_UNROLL
  for (int k = 0; k < LANE_COLS; k++) {
    const int64_t c = tile.from + lane + k * WARP;
    if (c < tile.to) grid[k] = factor_grid(t.col_top[tile.matrix_cols + c], col_log2);
  }
  for (int64_t row = tile.row + block_thread() / WARP; row < tile.end; row += FACTOR_WARPS) {
    const double row_grid = factor_grid(t.row_top[row], row_log2);
    double sum = 0.0;
    factor_row(t, scale, tile, row, lane, [&](int k, float g) {
      col[k] = __dadd_rn(col[k], factor_square(g, grid[k]));
      sum = __dadd_rn(sum, factor_square(g, row_grid));
    });
    for (int width = WARP / 2; width > 0; width /= 2) sum = __dadd_rn(sum, from_lane_beside(sum, width));
    if (lane == 0 && sum != 0.0) add_to(&t.row_sum[row], sum);
  }
  factor_columns(tile, room, col, [&](int64_t at, int c) {
    double sum = 0.0;
    for (int w = 0; w < FACTOR_WARPS; w++) sum = __dadd_rn(sum, room->of[w][c]);
    if (sum != 0.0) add_to(&t.col_sum[at], sum);
  });
}

// ---- second moments
// -------------------------------------------------------------------------------------------------- var[i] after the
// step; sum: of `each` squares.
DC_GPU float factor_average(float var, double sum, double each, float weight) {
  return canonical(__fmaf_rn(weight, __fsub_rn((float)__ddiv_rn(sum, each), var), var));
}

// The tree of ops.h over 2 * W accumulators; the sum is x[0].
template <int W> DC_GPU void factor_fold(double *x) {
  DC_UNROLL
  for (int i = 0; i < W; i++) x[i] = __dadd_rn(x[i], x[i + W]);
  if constexpr (W > 1) factor_fold<W / 2>(x);
}

struct FactorRows {
  float var[FACTOR_CHUNK];
  double sum[LAMB_LANES];
};

// Rows of one matrix and their factors, by a block of threads. Accumulator i % 16 has row i.
DC_GPU void factor_rows(const dc_adafactor_args &t, int64_t matrix, FactorRows *room) {
  const int thread = block_thread();
  const int64_t base = matrix * t.rows;
  const float weight = (float)t.weight, eps = (float)t.eps;
  double total = 0.0;
  for (int64_t begin = 0; begin < t.rows; begin += FACTOR_CHUNK) {
    const int n = (int)(t.rows - begin < FACTOR_CHUNK ? t.rows - begin : (int64_t)FACTOR_CHUNK);
    for (int i = thread; i < n; i += FACTOR_THREADS) {
      const int64_t at = base + begin + i;
      room->var[i] = t.row_var[at] = factor_average(t.row_var[at], t.row_sum[at], (double)t.cols, weight);
    }
    block_sync();
    if (thread < LAMB_LANES) {
      DC_UNROLL_8
      for (int i = thread; i < n; i += LAMB_LANES) total = __dadd_rn(total, (double)room->var[i]);
    }
    block_sync(); // before the next ones are written
  }
  if (thread < LAMB_LANES) room->sum[thread] = total;
  block_sync();
  double tree[LAMB_LANES];
  DC_UNROLL
  for (int i = 0; i < LAMB_LANES; i++) tree[i] = room->sum[i];
  factor_fold<LAMB_LANES / 2>(tree);
  const float mean = Float32Steps::step(DC_RED_MAX, (float)__ddiv_rn(tree[0], (double)t.rows), eps);
  for (int64_t i = thread; i < t.rows; i += FACTOR_THREADS)
    t.row_factor[base + i] = canonical(__fdiv_rn(t.row_var[base + i], mean));
}

// Columns [block * FACTOR_CHUNK ..) of all matrices.
DC_GPU void factor_column_vars(const dc_adafactor_args &t, int64_t block, int thread, int threads) {
  const int64_t begin = block * FACTOR_CHUNK, n = t.matrices * t.cols;
  const int64_t end = begin + FACTOR_CHUNK < n ? begin + FACTOR_CHUNK : n;
  for (int64_t i = begin + thread; i < end; i += threads)
    t.col_var[i] = factor_average(t.col_var[i], t.col_sum[i], (double)t.rows, (float)t.weight);
}

// ---- the step
// --------------------------------------------------------------------------------------------------------
DC_GPU float factor_update(const dc__adafactor_coef &c, float g, float v) {
  return __fdiv_rn(g, __fsqrt_rn(Float32Steps::step(DC_RED_MAX, v, c.least)));
}

// Blocks of the flat space that a stretch has a part of; n > 0. dc_lamb_blocks, on the device.
DC_GPU int64_t factor_block_count(const dc_adafactor_args &t) {
  return (t.first + t.n - 1) / DC_BLOCK - t.first / DC_BLOCK + 1;
}

DC_GPU float factor_param(const dc_adafactor_args &t, int64_t i) {
  float p;
  unpack<1>(&p, load_raw<1>(t.param, t.param_dtype, i), t.param_dtype);
  return p;
}

// Elements of a stretch in one row; second: of element i is second[i - begin]. NULL: it is no matrix.
struct FactorPart {
  int64_t begin, end;
  const float *second;
  float factor;
};

// The elements of block k of those, as far as they are the stretch's.
struct FactorRange {
  int64_t begin, end;
};
DC_GPU FactorRange factor_range(const dc_adafactor_args &t, int64_t k) {
  const int64_t edge = (t.first / DC_BLOCK + k) * DC_BLOCK - t.first;
  return {edge > 0 ? edge : 0, edge + DC_BLOCK < t.n ? edge + DC_BLOCK : t.n};
}

// From element i on, of those before hi.
DC_GPU FactorPart factor_part(const dc_adafactor_args &t, int64_t i, int64_t hi) {
  if (t.variance) return {i, hi, nullptr, 1.0f};
  const int64_t row = (t.begin + i) / t.cols, edge = row * t.cols - t.begin, end = edge + t.cols;
  return {i, end < hi ? end : hi, t.col_var + row / t.rows * t.cols + (i - edge), t.row_factor[row]};
}

// The lane's accumulators of a part.
DC_GPU LambSums factor_norms(const dc_adafactor_args &t, const dc__adafactor_coef &c, const FactorPart &part,
                             int lane) {
  LambSums sums = {0.0, 0.0};
  for (int64_t i = part.begin + lane; i < part.end; i += LAMB_LANES) {
    const float g = factor_grad(t, c.grad_scale, i);
    float v;
    if (part.second) v = part.second[i - part.begin];
    else {
      v = t.variance[i];
      v = t.variance[i] = canonical(__fmaf_rn(c.weight, __fsub_rn(__fmul_rn(g, g), v), v));
    }
    sums.param = add_square(sums.param, factor_param(t, i));
    sums.update = add_square(sums.update, factor_update(c, g, __fmul_rn(part.factor, v)));
  }
  return sums;
}

// x / n of an x below n + FACTOR_CHUNK.
DC_GPU int64_t factor_quotient(int64_t x, int64_t n) {
  return n > FACTOR_CHUNK ? (int64_t)(x >= n) : (int64_t)((uint32_t)x / (uint32_t)n);
}

// Where the second moments of the elements of a chunk lie, without a division of 64 bits for each.
struct FactorPlace {
  int64_t begin, row, in_row, matrix,
      in_matrix; // the chunk's first element: its row, what is before it there; the row's matrix
};

DC_GPU FactorPlace factor_place(const dc_adafactor_args &t, int64_t begin) {
  if (t.variance) return {begin, 0, 0, 0, 0};
  const int64_t row = (t.begin + begin) / t.cols, matrix = row / t.rows;
  return {begin, row, t.begin + begin - row * t.cols, matrix, row - matrix * t.rows};
}

// factor * second moment of element i.
DC_GPU float factor_second(const dc_adafactor_args &t, const FactorPlace &at, int64_t i) {
  if (t.variance) return t.variance[i];
  const int64_t x = at.in_row + (i - at.begin), rows = factor_quotient(x, t.cols);
  const int64_t matrix = at.matrix + factor_quotient(at.in_matrix + rows, t.rows);
  return __fmul_rn(t.row_factor[at.row + rows], t.col_var[matrix * t.cols + (x - rows * t.cols)]);
}

// Chunk `block` of a stretch, by thread `thread` of `threads`. FACTOR_BATCH elements at a time: the compiler can't move
// loads above the stores of parameters, so we do.
DC_GPU void factor_apply(const dc_adafactor_args &t, int64_t block, int thread, int threads) {
  const dc__adafactor_coef c = dc__adafactor_coef_of(&t);
  const int64_t begin = block * FACTOR_CHUNK, end = begin + FACTOR_CHUNK < t.n ? begin + FACTOR_CHUNK : t.n;
  const FactorPlace at = factor_place(t, begin);
  for (int64_t first = begin + thread; first < end; first += FACTOR_BATCH * threads) {
    float p[FACTOR_BATCH], g[FACTOR_BATCH], v[FACTOR_BATCH];
    DC_UNROLL
    for (int b = 0; b < FACTOR_BATCH; b++) {
      const int64_t i = first + b * threads;
      if (i >= end) break;
      p[b] = factor_param(t, i), g[b] = factor_grad(t, c.grad_scale, i), v[b] = factor_second(t, at, i);
    }
    DC_UNROLL
    for (int b = 0; b < FACTOR_BATCH; b++) {
      const int64_t i = first + b * threads;
      if (i >= end) break;
      const float q = __fmaf_rn(c.rate, factor_update(c, g[b], v[b]), __fmul_rn(p[b], c.keep));
      store_as<1>(t.param, t.param_dtype, i, &q);
      if (t.lowp) store_as<1>(t.lowp, t.lowp_dtype, i, &q);
    }
  }
}

} // namespace dc_gpu
#endif
