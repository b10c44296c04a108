// zero/planner.h: the closed formulas against the simulation, the search against all layouts, errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "zero/planner.h"

namespace {

dc_planner_nodes node(int64_t nodes, int64_t ranks, double flops, double device_bytes) {
  dc_planner_nodes n{};
  n.nodes = nodes, n.ranks = ranks, n.flops = flops, n.start = 1e-6, n.memory_rate = 1e12;
  n.device_bytes = device_bytes, n.host_bytes = 256e9, n.host_rate = 20e9, n.host_update = 5e9;
  n.disk_bytes = 1e12, n.disk_rate = 5e9, n.link_rate = 100e9, n.link_latency = 5e-6;
  n.net_rate = 10e9, n.net_latency = 2e-5;
  return n;
}

struct Subject {
  std::vector<dc_planner_layer> layers;
  dc_planner_model model{};

  Subject(int64_t blocks, double hidden, int64_t batch) {
    const double seq = 512;
    dc_planner_layer block{};
    block.params = 12 * hidden * hidden, block.flops = 24 * seq * hidden * hidden;
    block.traffic = 16 * seq * hidden, block.traffic_whole = 10 * seq * hidden;
    block.saved = 12 * seq * hidden, block.saved_whole = 4 * seq * hidden, block.output = seq * hidden;
    block.tp_elems = 2 * seq * hidden, block.tp_calls = 2, block.sp_elems = 4 * seq * hidden;
    block.calls = 20, block.block = 1;
    dc_planner_layer ends{};
    ends.params = 30000 * hidden, ends.flops = 60000 * seq * hidden, ends.saved = 60000 * seq,
    ends.output = seq * hidden;
    layers.assign((size_t)blocks + 2, block);
    layers.front() = layers.back() = ends;
    layers.front().flops = layers.front().saved = 0;
    model.nlayers = blocks + 2, model.heads = 8, model.kv_heads = 8, model.seq = 512, model.batch = batch;
    model.layers = layers.data();
    model.item = 2, model.grad = 4, model.wire = 2, model.master = 1, model.state_size = 4, model.nstates = 2;
    model.overlap = 0.5, model.update_traffic = 30, model.batch_traffic = 10;
  }
};

dc_planner_space everything() {
  dc_planner_space s{};
  s.stages = 15, s.offloads = 15, s.recomputes = 3, s.schedules = 31, s.uneven = 1;
  return s;
}

TEST(planner, pipelines_take_what_their_simulation_takes) {
  const double f = 1, half = 1; /* I = W = F, as the published formulas assume */
  for (int kind = 0; kind < DC_SCHEDULE_COUNT; kind++)
    for (int64_t p = 2; p <= 8; p++)
      for (int64_t m = 2 * p; m <= 4 * p; m += p) {
        const int64_t v = kind == DC_SCHEDULE_INTERLEAVED || kind == DC_SCHEDULE_ZB_V ? 2 : 1;
        std::vector<double> cost((size_t)(p * v * 4)), fw((size_t)p, f), bw((size_t)p, 2 * half), hop((size_t)p, 0);
        for (int64_t s = 0; s < p * v; s++) {
          double *c = &cost[(size_t)(s * 4)];
          c[0] = f / (double)v, c[2] = c[3] = half / (double)v, c[1] = c[2] + c[3];
        }
        double makespan = 0;
        ASSERT_EQ(dc_schedule_predict(kind, p, v, m, cost.data(), nullptr, nullptr, &makespan), DC_OK);
        EXPECT_NEAR(dc_planner_pipeline_s(kind, v, p, (double)m, fw.data(), bw.data(), hop.data()), makespan,
                    1e-9 * makespan)
            << dc_schedule_name(kind) << " " << p << " ranks, " << m << " micro-batches";
      }
}

TEST(planner, uneven_stages_and_hops_are_near_their_simulation) {
  std::mt19937 draw(7);
  std::uniform_real_distribution<double> some(0.8, 1.2), little(0.0, 0.1);
  for (int64_t p = 2; p <= 8; p *= 2)
    for (int trial = 0; trial < 20; trial++) {
      std::vector<double> cost((size_t)(p * 4)), fw((size_t)p), bw((size_t)p), hop((size_t)p);
      for (int64_t s = 0; s < p; s++) {
        double *c = &cost[(size_t)(s * 4)];
        fw[(size_t)s] = c[0] = some(draw);
        c[2] = c[3] = some(draw), bw[(size_t)s] = c[1] = c[2] + c[3];
        hop[(size_t)s] = little(draw);
      }
      double makespan = 0;
      ASSERT_EQ(dc_schedule_predict(DC_SCHEDULE_1F1B, p, 1, 32, cost.data(), hop.data(), nullptr, &makespan), DC_OK);
      EXPECT_NEAR(dc_planner_pipeline_s(DC_SCHEDULE_1F1B, 1, p, 32, fw.data(), bw.data(), hop.data()), makespan,
                  0.04 * makespan);
    }
}

TEST(planner, collectives) {
  const dc_planner_nodes n = node(4, 8, 1e14, 80e9);
  EXPECT_EQ(dc_planner_collective_s(DC_ALL_REDUCE, &n, 1, 1, 1, 1e9), 0);
  /* In a node: a ring's bytes and a tree's latency, there and back. */
  EXPECT_NEAR(dc_planner_collective_s(DC_ALL_REDUCE, &n, 8, 8, 1, 1e9), 2 * (7.0 / 8 * 1e9 / 100e9 + 3 * 5e-6), 1e-12);
  EXPECT_NEAR(dc_planner_collective_s(DC_ALL_GATHER, &n, 8, 8, 1, 1e9), 7.0 / 8 * 1e9 / 100e9 + 3 * 5e-6, 1e-12);
  /* One of each of 4 nodes, 8 groups on one wire. */
  EXPECT_NEAR(dc_planner_collective_s(DC_ALL_GATHER, &n, 4, 1, 8, 1e9), 3.0 / 4 * 8e9 / 10e9 + 2 * 2e-5, 1e-12);
  EXPECT_NEAR(dc_planner_collective_s(DC_ALL_TO_ALL, &n, 8, 8, 1, 1e9), 7.0 / 8 * 1e9 / 100e9 + 3 * 5e-6, 1e-12);
}

TEST(planner, the_search_finds_the_best_of_all) {
  std::mt19937 draw(3);
  for (int trial = 0; trial < 6; trial++) {
    const dc_planner_nodes nodes[] = {node(1 + (int64_t)(draw() % 2), 4, 5e13, 8e9 + (double)(draw() % 20) * 1e9),
                                      node(1, 4, 1e14, 16e9)};
    const int64_t kinds = 1 + (int64_t)(draw() % 2);
    const Subject s(8, 2048, 48);
    dc_planner_space space = everything();
    dc_planner_found quick[3], all[3];
    dc_planner_told told, told_all;
    ASSERT_EQ(dc_planner_search(nodes, kinds, &s.model, &space, quick, 3, &told), DC_OK) << dc_last_error();
    space.exhaustive = 1;
    ASSERT_EQ(dc_planner_search(nodes, kinds, &s.model, &space, all, 3, &told_all), DC_OK) << dc_last_error();
    EXPECT_LT(told.visited, told_all.visited);
    EXPECT_EQ(told.found > 0, told_all.found > 0);
    if (told.found && told_all.found) {
      EXPECT_DOUBLE_EQ(quick[0].cost.step, all[0].cost.step);
      dc_planner_cost again;
      ASSERT_EQ(dc_planner_cost_of(nodes, kinds, &s.model, &quick[0].layout, 1, &again, nullptr, nullptr), DC_OK);
      EXPECT_DOUBLE_EQ(again.step, quick[0].cost.step);
      EXPECT_LE(again.overflow, 1);
      EXPECT_NEAR(again.compute + again.recompute + again.tensor + again.sequence + again.expert + again.gather +
                      again.bubble + again.data + again.update + again.offload,
                  again.step, 1e-9 * again.step);
    }
  }
}

TEST(planner, replicas_on_slow_nodes_take_fewer_micro_batches) {
  dc_planner_nodes nodes[] = {node(1, 1, 3e13, 1e12), node(1, 1, 1e13, 1e12)};
  for (auto &n : nodes) n.net_rate = 1e12; /* else more reductions would cost more than the shares save */
  Subject s(4, 1024, 16);
  s.layers.front() = s.layers.back() = {};
  dc_planner_layout l{};
  l.dp = 2, l.tp = l.pp = l.sp = l.ep = l.chunks = l.micro = 1, l.accumulation = 8, l.schedule = DC_SCHEDULE_1F1B;
  dc_planner_cost even, cost;
  int64_t micro[2];
  ASSERT_EQ(dc_planner_cost_of(nodes, 2, &s.model, &l, 0, &even, nullptr, micro), DC_OK) << dc_last_error();
  EXPECT_EQ(micro[0], 8);
  EXPECT_EQ(micro[1], 8);
  s.model.update_traffic = s.model.batch_traffic = 0;
  ASSERT_EQ(dc_planner_cost_of(nodes, 2, &s.model, &l, 1, &cost, nullptr, micro), DC_OK) << dc_last_error();
  EXPECT_EQ(micro[0] + micro[1], 16);
  EXPECT_GT(micro[0], micro[1]);
  EXPECT_LT(cost.step, even.step);
  /* In a pipeline the layers are in proportion. */
  l.dp = 1, l.pp = 2, l.accumulation = 16;
  dc_planner_stage stages[2];
  ASSERT_EQ(dc_planner_cost_of(nodes, 2, &s.model, &l, 1, &cost, stages, nullptr), DC_OK) << dc_last_error();
  EXPECT_EQ(stages[0].end, 4); /* the empty first layer and 3 of 4 blocks */
  EXPECT_EQ(stages[1].begin, 4);
}

TEST(planner, what_a_node_shares_is_counted_by_the_rank) {
  /* Ranks of the first kind have 8 GB of host, 25 of disk and an eighth of its rates; of the second a quarter. */
  dc_planner_nodes kinds[] = {node(1, 8, 1e13, 0), node(1, 4, 1e13, 0)}, turned[2];
  for (auto &n : kinds) n.host_bytes = 64e9, n.disk_bytes = 200e9, n.reserve = 1e9;
  turned[0] = kinds[1], turned[1] = kinds[0];
  dc_planner_nodes alike = kinds[1]; /* of ranks that all have what a rank of the first kind has */
  alike.nodes = 3, alike.host_bytes /= 2, alike.host_update /= 2, alike.disk_bytes /= 2, alike.disk_rate /= 2;
  alike.net_rate /= 2;
  Subject s(4, 1024, 48);
  dc_planner_layout l{};
  l.dp = 12, l.tp = l.pp = l.sp = l.ep = l.chunks = l.micro = 1, l.accumulation = 4, l.schedule = DC_SCHEDULE_1F1B;
  l.stage = 1;
  for (const auto offload : {DC_OFFLOAD_NONE, DC_OFFLOAD_DISK}) {
    l.offload = offload;
    dc_planner_cost a, b, c;
    ASSERT_EQ(dc_planner_cost_of(kinds, 2, &s.model, &l, 1, &a, nullptr, nullptr), DC_OK) << dc_last_error();
    ASSERT_EQ(dc_planner_cost_of(turned, 2, &s.model, &l, 1, &b, nullptr, nullptr), DC_OK) << dc_last_error();
    ASSERT_EQ(dc_planner_cost_of(&alike, 1, &s.model, &l, 1, &c, nullptr, nullptr), DC_OK) << dc_last_error();
    EXPECT_DOUBLE_EQ(a.host_room, 32e9); /* of 4 ranks */
    for (const auto &other : {b, c}) {
      EXPECT_DOUBLE_EQ(a.step, other.step);
      EXPECT_DOUBLE_EQ(a.overflow, other.overflow);
      EXPECT_DOUBLE_EQ(a.host_room, other.host_room);
      EXPECT_DOUBLE_EQ(a.disk_room, other.disk_room);
    }
  }
}

TEST(planner, a_rank_is_charged_for_the_micro_batches_it_takes) {
  const dc_planner_nodes fast = node(1, 1, 3e13, 1e12), slow = node(1, 1, 1e13, 1e12);
  const dc_planner_nodes nodes[] = {fast, slow, fast, slow};
  Subject s(4, 1024, 16);
  s.layers.front() = s.layers.back() = {};
  s.model.overlap = s.model.update_traffic = 0;
  double params = 0;
  for (const auto &layer : s.layers) params += layer.params;
  dc_planner_layout l{};
  l.dp = 2, l.tp = l.pp = l.sp = l.ep = l.chunks = l.micro = 1, l.accumulation = 8, l.schedule = DC_SCHEDULE_1F1B;
  dc_planner_cost even, cost;
  int64_t micro[2];
  ASSERT_EQ(dc_planner_cost_of(nodes, 2, &s.model, &l, 1, &cost, nullptr, micro), DC_OK) << dc_last_error();
  ASSERT_GT(micro[0], 8);
  const double reduce = dc_planner_collective_s(DC_ALL_REDUCE, &fast, 2, 1, 1, 2 * params);
  EXPECT_NEAR(cost.data, (double)micro[0] * (reduce + 10 * params / fast.memory_rate), 1e-9 * cost.data);
  /* GPipe holds the activations of all of them. */
  l.pp = 2, l.schedule = DC_SCHEDULE_GPIPE;
  dc_planner_stage alike[2], shared[2];
  ASSERT_EQ(dc_planner_cost_of(nodes, 4, &s.model, &l, 0, &even, alike, nullptr), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_planner_cost_of(nodes, 4, &s.model, &l, 1, &cost, shared, micro), DC_OK) << dc_last_error();
  ASSERT_GT(micro[0], 8);
  for (int i = 0; i < 2; i++)
    EXPECT_NEAR(shared[i].activation_bytes, alike[i].activation_bytes * (double)micro[0] / 8, 1);
  EXPECT_GT(cost.device_bytes, even.device_bytes);
}

TEST(planner, shares_let_the_last_replica_be_done_soonest) {
  std::mt19937 draw(5);
  Subject s(2, 1024, 0);
  s.layers.front() = s.layers.back() = {};
  s.model.update_traffic = s.model.batch_traffic = 0;
  for (int trial = 0; trial < 50; trial++) {
    const int64_t n = 2 + (int64_t)(draw() % 3);
    std::vector<dc_planner_nodes> kinds;
    for (int64_t k = 0; k < n; k++)
      kinds.push_back(node(1 + (int64_t)(draw() % 2), 1, 1e13 * (1 + (double)(draw() % 5)), 1e12));
    for (auto &k : kinds) k.start = k.net_latency = 0, k.memory_rate = k.net_rate = 1e30; /* products alone take time */
    dc_planner_layout l{};
    for (const auto &k : kinds) l.dp += k.nodes;
    l.tp = l.pp = l.sp = l.ep = l.chunks = l.micro = 1, l.schedule = DC_SCHEDULE_1F1B;
    l.accumulation = 1 + (int64_t)(draw() % 7), s.model.batch = l.dp * l.accumulation;
    std::vector<int64_t> micro((size_t)l.dp), rate;
    for (const auto &k : kinds)
      for (int64_t i = 0; i < k.nodes; i++) rate.push_back((int64_t)(k.flops / 1e13));
    dc_planner_cost cost, turned;
    ASSERT_EQ(dc_planner_cost_of(kinds.data(), n, &s.model, &l, 1, &cost, nullptr, micro.data()), DC_OK);
    int64_t all = 0;
    double end = 0;
    for (size_t d = 0; d < rate.size(); d++) {
      all += micro[d];
      end = std::max(end, (double)micro[d] / (double)rate[d]);
    }
    EXPECT_EQ(all, s.model.batch);
    double sooner = 0; /* micro-batches that are through before that, all of them together */
    for (const int64_t r : rate) sooner += std::floor(end * (1 - 1e-9) * (double)r);
    EXPECT_LT(sooner, (double)s.model.batch) << trial;
    std::reverse(kinds.begin(), kinds.end());
    ASSERT_EQ(dc_planner_cost_of(kinds.data(), n, &s.model, &l, 1, &turned, nullptr, nullptr), DC_OK);
    EXPECT_NEAR(cost.compute, turned.compute, 1e-9 * cost.compute) << trial;
  }
}

TEST(planner, a_step_of_very_many_samples_ends) {
  const dc_planner_nodes n = node(1, 8, 1e14, 80e9);
  dc_planner_space space = everything();
  dc_planner_found found[3];
  dc_planner_told told;
  Subject s(8, 1024, (int64_t)1 << 28);
  ASSERT_EQ(dc_planner_search(&n, 1, &s.model, &space, found, 3, &told), DC_OK) << dc_last_error();
  EXPECT_GT(told.found, 0);
  EXPECT_EQ(found[0].layout.dp * found[0].layout.micro * found[0].layout.accumulation, s.model.batch);
  space.micro = 1 << 17; /* the largest there is */
  ASSERT_EQ(dc_planner_search(&n, 1, &s.model, &space, found, 3, &told), DC_OK) << dc_last_error();
  EXPECT_GT(told.visited, 0);
  space.micro = 0;
  for (const int64_t batch : {INT64_MAX, INT64_MAX - 1, (int64_t)1 << 62}) { /* no micro-batch is as large */
    s.model.batch = batch;
    ASSERT_EQ(dc_planner_search(&n, 1, &s.model, &space, found, 3, &told), DC_OK) << dc_last_error();
    EXPECT_EQ(told.visited, 0);
    EXPECT_EQ(told.found, 0);
  }
}

TEST(planner, memory) {
  const dc_planner_nodes n = node(1, 8, 1e14, 80e9);
  const Subject s(8, 2048, 64);
  dc_planner_layout l{};
  l.dp = 8, l.tp = l.pp = l.sp = l.ep = l.chunks = l.micro = 1, l.accumulation = 8, l.schedule = DC_SCHEDULE_1F1B;
  double before = INFINITY, params = 0;
  for (const auto &layer : s.layers) params += layer.params;
  for (l.stage = 0; l.stage <= 3; l.stage += l.stage == 1 ? 2 : 1) {
    dc_planner_cost c;
    dc_planner_stage stage;
    ASSERT_EQ(dc_planner_cost_of(&n, 1, &s.model, &l, 0, &c, &stage, nullptr), DC_OK);
    EXPECT_LT(c.device_bytes, before);
    before = c.device_bytes;
    if (l.stage == 0) EXPECT_NEAR(stage.states_bytes, 18 * params, 4e6 * 3); /* 2 + 4 + 12, and buckets */
    dc_planner_layout again = l;
    again.recompute = 1;
    ASSERT_EQ(dc_planner_cost_of(&n, 1, &s.model, &again, 0, &c, &stage, nullptr), DC_OK);
    EXPECT_LT(c.device_bytes, before);
    EXPECT_GT(c.recompute, 0);
  }
}

TEST(planner, the_fullest_rank_is_that_which_has_least_left) {
  dc_planner_nodes nodes[] = {node(1, 1, 3e13, 80e9), node(1, 1, 1e13, 1e9)}; /* 3 of 4 blocks on the first */
  const Subject s(4, 1024, 16);
  dc_planner_layout l{};
  l.pp = 2, l.dp = l.tp = l.sp = l.ep = l.chunks = l.micro = 1, l.accumulation = 16, l.schedule = DC_SCHEDULE_1F1B;
  dc_planner_cost c;
  ASSERT_EQ(dc_planner_cost_of(nodes, 2, &s.model, &l, 0, &c, nullptr, nullptr), DC_OK) << dc_last_error();
  EXPECT_EQ(c.device_room, 1e9);
  EXPECT_DOUBLE_EQ(c.overflow, c.device_bytes / c.device_room);
}

TEST(planner, errors) {
  dc_planner_nodes n = node(1, 4, 1e14, 80e9);
  const Subject s(4, 1024, 16);
  dc_planner_cost c;
  dc_planner_layout good{};
  good.dp = 4, good.tp = good.pp = good.sp = good.ep = good.chunks = good.micro = 1, good.accumulation = 4;
  good.schedule = DC_SCHEDULE_1F1B;
  ASSERT_EQ(dc_planner_cost_of(&n, 1, &s.model, &good, 0, &c, nullptr, nullptr), DC_OK);
  const auto refused = [&](auto change) {
    dc_planner_layout l = good;
    change(l);
    return dc_planner_cost_of(&n, 1, &s.model, &l, 0, &c, nullptr, nullptr) == DC_E_INVALID;
  };
  EXPECT_TRUE(refused([](auto &l) { l.dp = 8; }));
  EXPECT_TRUE(refused([](auto &l) { l.dp = 0; }));
  EXPECT_TRUE(refused([](auto &l) { l.dp = INT64_MAX; }));
  EXPECT_TRUE(refused([](auto &l) { l.accumulation = 3; }));
  EXPECT_TRUE(refused([](auto &l) { l.stage = 4; }));
  EXPECT_TRUE(refused([](auto &l) { l.schedule = 9; }));
  EXPECT_TRUE(refused([](auto &l) { l.ep = 2; }));
  Subject mixture(4, 1024, 16);
  mixture.model.experts = 4;
  dc_planner_layout spread = good; /* experts over data x sequence ranks */
  spread.dp = spread.sp = 2, spread.ep = 4, spread.accumulation = 8;
  EXPECT_EQ(dc_planner_cost_of(&n, 1, &mixture.model, &spread, 0, &c, nullptr, nullptr), DC_OK) << dc_last_error();
  spread.sp = 1, spread.tp = 2;
  EXPECT_EQ(dc_planner_cost_of(&n, 1, &mixture.model, &spread, 0, &c, nullptr, nullptr), DC_E_INVALID);
  EXPECT_TRUE(refused([](auto &l) { l.offload = DC_OFFLOAD_HOST; })); /* of stage 0 */
  EXPECT_TRUE(refused([](auto &l) { l.dp = 1, l.pp = 4, l.chunks = 2, l.accumulation = 16, l.schedule = 2; }));
  n.flops = NAN;
  EXPECT_EQ(dc_planner_cost_of(&n, 1, &s.model, &good, 0, &c, nullptr, nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_planner_cost_of(nullptr, 1, &s.model, &good, 0, &c, nullptr, nullptr), DC_E_INVALID);
}

} // namespace
