// test_cuda_fused.cpp: what each CUDA thread of the fused ops does (ops/cuda/fused.cuh, compiled for the CPU), thread
// by thread over whole grids, against the C core, bit for bit. What runs only on a GPU (launches, shuffles) is in
// tests/python/test_fused_ops.py.
#include <algorithm>
#include <vector>

#include "cuda/fused.cuh"
#include "cuda_fixture.h"
#include "cuda_lanes.h"

namespace {

using namespace dc_gpu;

class CudaFused : public CudaOps {};

template <class F> void each_low(F f) {
  f(F32(), DC_F32);
  f(BF16(), DC_BF16);
  f(F16(), DC_F16);
}

// Bytes of an array that starts at a multiple of 64.
struct Bytes {
  std::vector<uint8_t> memory;
  size_t start, size;
  explicit Bytes(const Array &a) : memory(a.bytes.size() + 64), size(a.bytes.size()) {
    start = (64 - (uintptr_t)memory.data() % 64) % 64;
    if (size) memcpy(data(), a.bytes.data(), size);
  }
  Bytes(int dt, int64_t n) : Bytes(Array{dt, std::vector<uint8_t>((size_t)n * dc_dtype_size(dt), 0x5a)}) {}
  uint8_t *data() { return memory.data() + start; }
  bool operator==(Bytes &o) { return size == o.size && memcmp(data(), o.data(), size) == 0; }
};

int wide_runs, held_runs; // of norms, with loads of 16 bytes; and with the row in registers

// What norm_kernel and norm_grad_kernel do for all rows, and fold_kernel for all columns.
template <class Row> void run_norm(const dc_norm_args &a) {
  constexpr int V = Row::V, L = Row::LANES;
  for (int64_t row = 0; row < a.rows; row++) {
    Row of[L];
    float m = 0.0f;
    for (int lane = 0; lane < L; lane++) of[lane].load(a, row, lane);
    if (a.mean)
      m = sum_of_lanes<V, L, float>([&](int lane, float *x) { norm_total(x, of[lane], a.cols, lane); }) / (float)a.cols;
    const float squares = sum_of_lanes<V, L, float>(
        [&](int lane, float *x) { norm_squares(x, of[lane], a.cols, lane, m); });
    for (int lane = 0; lane < L; lane++) norm_out(a, of[lane], row, lane, m, norm_rstd(squares, a.cols, a.eps));
  }
}

template <class T, bool WIDE> void run_norm_grad(const dc_norm_grad_args &g, float *dweight, float *dbias) {
  constexpr int V = Lane<T, ROW_SUMS>::width, L = Lane<T, ROW_SUMS>::count;
  const int64_t block = dc_row_block(g.rows);
  for (int64_t row = 0; row < g.rows; row++) {
    const GradRow<T> r = grad_row<T>(g, row);
    float unused[V];
    const float along = sum_of_lanes<V, L, float>(
        [&](int lane, float *x) { grad_sums<T, WIDE>(x, unused, g, r, lane); });
    const float level = g.mean ? sum_of_lanes<V, L, float>(
                                     [&](int lane, float *x) { grad_sums<T, WIDE>(unused, x, g, r, lane); })
                               : 0.0f;
    for (int lane = 0; lane < L; lane++) grad_out<T, WIDE>(g, r, row, lane, along, level);
  }
  for (int64_t k = 0; k < dc_row_blocks(g.rows); k++)
    for (int64_t i = 0; i < g.cols; i += V)
      grad_columns<T, WIDE>(g, k * block, std::min(g.rows, (k + 1) * block), i,
                            dweight ? dweight + k * g.cols : nullptr, dbias ? dbias + k * g.cols : nullptr);
}

void fold_column(void *out, int dt, const float *partial, int64_t blocks, int64_t cols, int64_t i) {
  float part[FOLD];
  for (int j = 0; j < FOLD; j++) part[j] = fold_part(partial, blocks, cols, i, j);
  write(out, dt, i, fold_tree(part, 1));
}

const int64_t kCols[] = {1, 31, 32, 33, 64, 65, 96, 100, 200};

TEST_F(CudaFused, NormAndItsGradient) {
  int k = 0;
  each_low([&k](auto tag, int dt) {
    using T = decltype(tag);
    for (int wdt : kLow)
      for (int64_t cols : kCols)
        for (int64_t rows : {1, 45, 700}) {
          const bool center = ++k % 2, add = k % 3 == 0, weighted = k % 5 != 0, biased = k % 4 != 0;
          const Fill fill = (Fill)(k % 3);
          const int64_t n = rows * cols, blocks = dc_row_blocks(rows), stride = cols + k % 2;
          const std::string what = name_of("norm", dt, cols) + " rows=" + std::to_string(rows);
          Bytes x(make(dt, rows * stride, fill, 1)), residual(make(dt, n, fill, 2)), w(make(wdt, cols, fill, 3)),
              b(make(wdt, cols, fill, 4));
          Bytes y(dt, n), y2(dt, n), sum(dt, n), sum2(dt, n), mean(DC_F32, rows), mean2(DC_F32, rows),
              rstd(DC_F32, rows), rstd2(DC_F32, rows);
          dc_norm_args a = {};
          a.struct_size = sizeof a;
          a.x = x.data(), a.residual = add ? residual.data() : nullptr, a.weight = weighted ? w.data() : nullptr;
          a.bias = biased ? b.data() : nullptr, a.y = y.data(), a.sum = add ? sum.data() : nullptr;
          a.mean = center ? (float *)mean.data() : nullptr, a.rstd = (float *)rstd.data();
          a.rows = rows, a.cols = cols, a.x_stride = stride, a.residual_stride = cols, a.eps = 1e-5f,
          a.offset = k % 7 ? 0.0f : 1.0f;
          a.dtype = dt, a.weight_dtype = wdt;
          ASSERT_EQ(dc_norm(&a), DC_OK) << dc_last_error();
          a.y = y2.data(), a.sum = add ? sum2.data() : nullptr, a.rstd = (float *)rstd2.data();
          if (center) a.mean = (float *)mean2.data();
          const bool wide = cols % Lane<T, ROW_SUMS>::width == 0 &&
                            stride % Lane<T, ROW_SUMS>::width == 0; // all start at multiples of 64
          wide_runs += wide;
          if (wide) run_norm<ReadRow<T, true>>(a);
          else run_norm<ReadRow<T, false>>(a);
          ASSERT_TRUE(y == y2 && sum == sum2 && mean == mean2 && rstd == rstd2) << what;
          if (wide && cols <= 8 * ROW_SUMS) {
            for (Bytes *one : {&y2, &sum2, &mean2, &rstd2}) memset(one->data(), 0x5a, one->size);
            with_low(wdt, [&](auto weights) {
              using W = decltype(weights);
              if (k % 2) run_norm<HeldRow<T, W, 8>>(a);
              else run_norm<HeldRow<T, W, 16>>(a);
            });
            ASSERT_TRUE(y == y2 && sum == sum2 && mean == mean2 && rstd == rstd2) << what << ", held";
            held_runs++;
          }

          Bytes dy(make(dt, n, fill, 5)), dsum(make(dt, n, fill, 6)), dx(dt, n), dx2(dt, n), dw(wdt, cols),
              dw2(wdt, cols), db(wdt, cols), db2(wdt, cols);
          Bytes partial(DC_F32, 2 * blocks * cols), partial2(DC_F32, 2 * blocks * cols);
          dc_norm_grad_args g = {};
          g.struct_size = sizeof g;
          g.dy = dy.data(), g.dsum = add ? dsum.data() : nullptr, g.x = x.data(), g.weight = a.weight;
          g.mean = a.mean, g.rstd = a.rstd, g.dx = dx.data(), g.dweight = weighted ? dw.data() : nullptr,
          g.dbias = biased ? db.data() : nullptr;
          g.partial = (float *)partial.data(), g.rows = rows, g.cols = cols, g.x_stride = stride, g.offset = a.offset;
          g.dtype = dt, g.weight_dtype = wdt;
          ASSERT_EQ(dc_norm_grad(&g), DC_OK) << dc_last_error();
          g.dx = dx2.data();
          float *pw = (float *)partial2.data(), *pb = pw + (weighted ? blocks * cols : 0);
          if (wide) run_norm_grad<T, true>(g, weighted ? pw : nullptr, biased ? pb : nullptr);
          else run_norm_grad<T, false>(g, weighted ? pw : nullptr, biased ? pb : nullptr);
          for (int64_t i = 0; i < cols; i++) {
            if (weighted) fold_column(dw2.data(), wdt, pw, blocks, cols, i);
            if (biased) fold_column(db2.data(), wdt, pb, blocks, cols, i);
          }
          ASSERT_TRUE(dx == dx2 && dw == dw2 && db == db2) << what << " gradient";
        }
  });
  EXPECT_GT(wide_runs, 20);
  EXPECT_GT(held_runs, 20);
}

// Every thread of `threads` over all rows, in vectors or not.
template <class F> void each_thread(int64_t rows, int64_t threads, F f) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t t = 0; t < threads; t++) f(row, t, threads);
}

TEST_F(CudaFused, Activations) {
  int k = 0;
  each_low([&k](auto tag, int dt) {
    using T = decltype(tag);
    constexpr int V = vector_width<T, T>();
    for (int64_t cols : {1, 8, 24, 100, 1000})
      for (int64_t rows : {1, 37}) {
        const Fill fill = (Fill)(++k % 3);
        const int64_t stride = k % 2 ? cols : cols + 8, n = rows * cols, span = rows * stride;
        const bool flat = stride == cols, bias = k % 4 == 0;
        const int form = k % 2 ? DC_GELU_ERF : DC_GELU_TANH, bdt = kLow[k % 3];
        const std::string what = name_of("activation", dt, cols) + " rows=" + std::to_string(rows);
        Bytes gate(make(dt, span, fill, 1)), up(make(dt, n, fill, 2)), d(make(dt, n, fill, 3)),
            b(make(bdt, cols, fill, 4));
        Bytes out(dt, n), out2(dt, n), dg(dt, n), dg2(dt, n), du(dt, n), du2(dt, n);
        dc_swiglu_args s = {};
        s.struct_size = sizeof s;
        s.gate = gate.data(), s.up = up.data(), s.out = out.data(), s.rows = rows, s.cols = cols;
        s.gate_stride = stride, s.up_stride = s.out_stride = cols, s.dtype = dt;
        ASSERT_EQ(dc_swiglu(&s), DC_OK);
        dc_swiglu_grad_args sg = {};
        sg.struct_size = sizeof sg;
        sg.gate = gate.data(), sg.up = up.data(), sg.dout = d.data(), sg.dgate = dg.data(), sg.dup = du.data(),
        sg.rows = rows, sg.cols = cols;
        sg.gate_stride = stride, sg.up_stride = sg.dout_stride = sg.dgate_stride = sg.dup_stride = cols, sg.dtype = dt;
        ASSERT_EQ(dc_swiglu_grad(&sg), DC_OK);
        s.out = out2.data(), sg.dgate = dg2.data(), sg.dup = du2.data();
        if (flat) { // as the launcher cuts it, in shorter rows
          s.rows = sg.rows = (n + 63) / 64, s.cols = sg.cols = 64;
          s.gate_stride = s.up_stride = s.out_stride = 64;
          sg.gate_stride = sg.up_stride = sg.dout_stride = sg.dgate_stride = sg.dup_stride = 64;
        }
        const bool wide = s.gate_stride % V == 0 && s.up_stride % V == 0;
        each_thread(s.rows, 5, [&](int64_t row, int64_t t, int64_t all) {
          if (wide) swiglu<T, V>(s, n, row, t, all), swiglu_grad<T, V>(sg, n, row, t, all);
          else swiglu<T, 1>(s, n, row, t, all), swiglu_grad<T, 1>(sg, n, row, t, all);
        });
        ASSERT_TRUE(out == out2 && dg == dg2 && du == du2) << what;

        const int64_t blocks = dc_row_blocks(rows);
        Bytes partial(DC_F32, blocks * cols), partial2(DC_F32, blocks * cols), db(bdt, cols), db2(bdt, cols);
        dc_gelu_args g = {};
        g.struct_size = sizeof g;
        g.x = gate.data(), g.bias = bias ? b.data() : nullptr, g.out = out.data(), g.rows = rows, g.cols = cols,
        g.x_stride = stride;
        g.dtype = dt, g.bias_dtype = bdt, g.form = form;
        ASSERT_EQ(dc_gelu(&g), DC_OK);
        dc_gelu_grad_args gg = {};
        gg.struct_size = sizeof gg;
        gg.x = gate.data(), gg.bias = g.bias, gg.dout = d.data(), gg.dx = dg.data(),
        gg.dbias = bias ? db.data() : nullptr, gg.partial = (float *)partial.data();
        gg.rows = rows, gg.cols = cols, gg.x_stride = stride, gg.dtype = dt, gg.bias_dtype = bdt, gg.form = form;
        ASSERT_EQ(dc_gelu_grad(&gg), DC_OK);
        const dc_gelu_grad_args whole = gg;
        g.out = out2.data(), gg.dx = dg2.data();
        if (flat && !bias) { g.rows = gg.rows = (n + 63) / 64, g.cols = gg.cols = g.x_stride = gg.x_stride = 64; }
        const bool gelu_wide = g.x_stride % V == 0 && g.cols % V == 0;
        each_thread(g.rows, 7, [&](int64_t row, int64_t t, int64_t all) {
          if (gelu_wide) gelu<T, V>(g, n, row, t, all), gelu_grad<T, V>(gg, n, row, t, all);
          else gelu<T, 1>(g, n, row, t, all), gelu_grad<T, 1>(gg, n, row, t, all);
        });
        for (int64_t block = 0; bias && block < blocks; block++)
          for (int64_t i = 0; i < cols; i++)
            gelu_column<T>(whole, block * dc_row_block(rows), std::min(rows, (block + 1) * dc_row_block(rows)), i,
                           (float *)partial2.data() + block * cols);
        for (int64_t i = 0; bias && i < cols; i++)
          fold_column(db2.data(), bdt, (float *)partial2.data(), blocks, cols, i);
        ASSERT_TRUE(out == out2 && dg == dg2 && db == db2) << what << " gelu";
      }
  });
}

TEST_F(CudaFused, Rotary) {
  int k = 0;
  each_low([&k](auto tag, int dt) {
    using T = decltype(tag);
    for (int tdt : kLow)
      for (int64_t rotated : {2, 64, 80})
        for (int64_t more : {0, 33}) {
          const Fill fill = (Fill)(++k % 3);
          const int64_t cols = rotated + more, size[3] = {2, 3, 5}, n = 30 * cols;
          Bytes x(make(dt, n, fill, 1)), cos(make(tdt, 5 * rotated, fill, 2)), sin(make(tdt, 5 * rotated, fill, 3)),
              out(dt, n), out2(dt, n);
          dc_rotary_args a = {};
          a.struct_size = sizeof a;
          a.x = x.data(), a.cos = cos.data(), a.sin = sin.data(), a.out = out.data(), a.cols = cols,
          a.rotated = rotated;
          a.dtype = dt, a.table_dtype = tdt, a.inverse = k % 2;
          const int64_t turned[3] = {15 * cols, cols, 3 * cols};
          for (int i = 0; i < 3; i++) a.size[i] = size[i], a.x_stride[i] = a.out_stride[i] = turned[i];
          a.cos_stride[2] = a.sin_stride[2] = rotated;
          ASSERT_EQ(dc_rotary(&a), DC_OK) << dc_last_error();
          a.out = out2.data();
          for (int64_t row = 0; row < 30; row++)
            for (int lane = 0; lane < WARP; lane++) dc_gpu::rotary<T>(a, row, lane);
          ASSERT_TRUE(out == out2) << name_of("rotary", dt, cols);
        }
  });
}

} // namespace
