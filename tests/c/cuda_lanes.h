// cuda_lanes.h: a group of lanes of one warp on the CPU, for the tests of the CUDA bodies: what launch.cuh's group_tree
// does with __shfl_down_sync.
#ifndef DEEPC_TESTS_CUDA_LANES_H
#define DEEPC_TESTS_CUDA_LANES_H

#include <vector>

#include "cuda/bodies.cuh"

namespace dc_gpu {

// The sum of the accumulators that fill(lane, x[V]) gives each lane. Every lane makes the same shuffles, so the k-th of
// a lane gives what the lane further on passed to its own k-th; lanes run from the last to the first, which is all that
// lane 0's sum needs. Past the last lane a thread gets its own value.
template <int V, int L, class A, class F> A sum_of_lanes(F fill) {
  std::vector<std::vector<A>> passed(L);
  A sum = 0;
  for (int lane = L - 1; lane >= 0; lane--) {
    A x[V];
    fill(lane, x);
    sum = lane_tree<V, L>(x, [&](A v, int further) {
      const size_t k = passed[(size_t)lane].size();
      passed[(size_t)lane].push_back(v);
      return lane + further < L ? passed[(size_t)(lane + further)][k] : v;
    });
  }
  return sum;
}

// Both sums of a block from those of its lanes, as store_lamb_sums has them.
template <class Sums, int L> void store_sums_of_lanes(const Sums (&of)[L], double *param, double *update) {
  const auto tree = [&](double Sums::*which) {
    return canonical(sum_of_lanes<1, L, double>([&](int lane, double *x) { *x = of[lane].*which; }));
  };
  *param = tree(&Sums::param), *update = tree(&Sums::update);
}

} // namespace dc_gpu
#endif
