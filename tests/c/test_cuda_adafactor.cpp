// test_cuda_adafactor.cpp: what the CUDA threads of dc_cuda_adafactor_* do (ops/cuda/adafactor.cuh, compiled for the
// CPU), whole blocks of them, against the scalar reference, bit for bit, with forbidden pages around the arrays. What
// runs only on a GPU (launches, the shuffles of the norms) is in tests/python/test_gpu_ops.py.
#include "adafactor_cases.h"
#include "cuda/adafactor.cuh"
#include "cuda/adamw_table.h"
#include "cuda_fixture.h"
#include "cuda_lanes.h"

namespace {

using namespace dc_gpu;

class CudaAdafactor : public CudaBlocks {
protected:
  void SetUp() override {
    CudaBlocks::SetUp();
    if (!IsSkipped()) ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
  }
  Block block_;

  // The kernels' blocks of threads, the last one first.
  template <class F> void blocks(int64_t count, Block::Order order, F one) {
    for (int64_t k = count - 1; k >= 0; k--) block_.run(FACTOR_THREADS, order, [&] { one(k); });
  }
  void tops(const dc_adafactor_args &t, Block::Order order) {
    FactorRoom<uint32_t> room;
    blocks(factor_tiles(t), order, [&](int64_t k) { factor_tops(t, k, &room); });
  }
  void sums(const dc_adafactor_args &t, Block::Order order) {
    FactorRoom<double> room;
    blocks(factor_tiles(t), order, [&](int64_t k) { factor_sums(t, k, &room); });
  }
  void factors(const dc_adafactor_args &t, Block::Order order) {
    FactorRows room;
    for (int64_t i = 0; i < t.matrices * t.rows; i++)
      t.row_sum[i] = canonical(t.row_sum[i]); // as the CPU has left them
    for (int64_t i = 0; i < t.matrices * t.cols; i++) t.col_sum[i] = canonical(t.col_sum[i]);
    blocks(factor_matrices(t), order, [&](int64_t k) { factor_rows(t, k, &room); });
    blocks(factor_column_blocks(t), order,
           [&](int64_t k) { factor_column_vars(t, k, block_thread(), FACTOR_THREADS); });
  }
  // What adafactor_norms_kernel does.
  void norms(const dc_adafactor_args &t) {
    const dc__adafactor_coef c = dc__adafactor_coef_of(&t);
    ASSERT_EQ(t.n > 0 ? factor_block_count(t) : 0, dc_lamb_blocks(t.first, t.n));
    for (int64_t k = dc_lamb_blocks(t.first, t.n) - 1; k >= 0; k--) {
      const FactorRange range = factor_range(t, k);
      double param = 0.0, update = 0.0;
      for (int64_t i = range.begin; i < range.end;) {
        const FactorPart part = factor_part(t, i, range.end);
        LambSums lanes[LAMB_LANES];
        for (int lane = LAMB_LANES - 1; lane >= 0; lane--) lanes[lane] = factor_norms(t, c, part, lane);
        double p, u;
        store_sums_of_lanes(lanes, &p, &u);
        param = canonical(param + p), update = canonical(update + u);
        i = part.end;
      }
      t.param_sums[k] = param, t.update_sums[k] = update;
    }
  }
  void apply(const dc_adafactor_args &t, Block::Order order) {
    blocks(factor_chunks(t), order, [&](int64_t k) { factor_apply(t, k, block_thread(), FACTOR_THREADS); });
  }
  int all(const std::vector<dc_adafactor_args> &list, Block::Order order) {
    for (const auto &t : list) tops(t, order);
    for (const auto &t : list) sums(t, order);
    factors(list[0], order);
    for (const auto &t : list) norms(t);
    for (const auto &t : list) apply(t, order);
    return DC_OK;
  }
  void check(const Case &c, Fill fill, const std::vector<int64_t> &cuts = {}) {
    const auto run = [&](Block::Order order, const std::vector<Place> &places) {
      same_on_gpu(
          arrays_of(c, fill), [=](auto &p) { return all_passes({args_of(c, p)}); },
          [=, this](auto &p) { return all(cut_at(args_of(c, p), cuts), order); },
          "adafactor " + std::to_string(c.matrices) + " x " + std::to_string(c.rows) + " x " + std::to_string(c.cols) +
              " fill=" + std::to_string(fill),
          places);
    };
    static int turn = 0; // by turn, in the full class both
    const bool backwards = turn++ % 2;
    if (full_class() || !backwards) run(Block::kForwards, {kOffStart});
    if (full_class() || backwards) run(Block::kBackwards, {kAtEnd});
  }
};

TEST_F(CudaAdafactor, EqualsReference) {
  for (const Case &c : kAdafactorShapes)
    for (Fill fill : {kOrdinary, kAnyBits, kSpecial})
      if (fill == kOrdinary || c.n() < 5000) check(c, fill);
}

TEST_F(CudaAdafactor, RowsAndColumnsOfManyBlocks) {
  for (const Case &c : {Case{1, 4200, 1}, Case{9, 3, 7}, Case{2, 65, 129}}) check(c, kOrdinary);
}

TEST_F(CudaAdafactor, EveryDtype) {
  for (int param : kLow)
    for (int grad : kLow)
      for (int lowp : {-1, (int)DC_BF16, (int)DC_F16})
        for (int64_t rows : {0, 3}) {
          const Case c = {1, rows, 45, param, grad, lowp};
          same_on_gpu(
              arrays_of(c, kSpecial), [=](auto &p) { return all_passes({args_of(c, p)}); },
              [=, this](auto &p) { return all({args_of(c, p)}, Block::kForwards); }, "adafactor dtypes", {kAtEnd});
        }
}

TEST_F(CudaAdafactor, StretchesGiveTheBitsOfTheWhole) {
  for (const Case &c : {Case{1, 200, 100}, Case{3, 20, 271}, Case{1, 3, 7000}, Case{1, 0, 20000}})
    check(c, kOrdinary, {4096 - kFirst, 2 * 4096 - kFirst, 3 * 4096 - kFirst});
}

// Below the normal numbers all have one exponent.
TEST_F(CudaAdafactor, SumsOfTheSmallestNumbers) {
  const Case c = {1, 5, 45};
  auto arrays = arrays_of(c, kOrdinary);
  auto *g = (uint32_t *)arrays[1].bytes.data();
  for (int i = 0; i < 5 * 45; i++) g[i] = (uint32_t)(i * 2654435761u) & 0x807fffffu;
  same_on_gpu(
      arrays, [=](auto &p) { return all_passes({args_of(c, p)}); },
      [=, this](auto &p) { return all({args_of(c, p)}, Block::kForwards); }, "denormals", {kAtEnd});
}

// Tensors with nothing to do in a pass take no room in its tables; all others are in one of them, once.
TEST_F(CudaAdafactor, TablesHoldAllTensors) {
  std::vector<dc_adafactor_args> list(50);
  for (size_t k = 0; k < list.size(); k++) {
    list[k].matrices = 1, list[k].rows = 100, list[k].cols = 200 + (int64_t)k, list[k].n = 100 * list[k].cols;
    if (k % 5 == 3) list[k].n = 0;
    if (k % 7 == 2) list[k].variance = (float *)8;
  }
  for (auto blocks : {factor_tiles, factor_matrices, factor_column_blocks, factor_norm_blocks, factor_chunks}) {
    int64_t want = 0, got = 0, launches = 0;
    for (const auto &t : list) want += blocks(t);
    for (int64_t next = 0; next < (int64_t)list.size(); launches++) {
      FactorTable table;
      next = fill_factors(&table, list.data(), next, (int64_t)list.size(), blocks);
      for (int i = 0; i < table.count; i++) {
        EXPECT_EQ(table.first[i + 1] - table.first[i], blocks(table.tensor[i]));
        EXPECT_EQ(adamw_find(table, table.first[i]), i);
        EXPECT_EQ(adamw_find(table, table.first[i + 1] - 1), i);
      }
      got += table.first[table.count];
    }
    EXPECT_EQ(got, want);
    EXPECT_LE(launches, 3);
  }
}

} // namespace
