// test_zero.cpp: zero/*.c against brute force. The oracle below places every element of every parameter one by one and
// knows nothing of the formulas that are tested.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "zero/zero.h"

namespace {

using Ints = std::vector<int64_t>;
struct Free {
  void operator()(dc_zero_layout *l) const { dc_zero_layout_free(l); }
};
using Layout = std::unique_ptr<dc_zero_layout, Free>;

Layout make(const Ints &numel, int64_t world, int64_t bucket) {
  dc_zero_layout *l = nullptr;
  EXPECT_EQ(DC_OK, dc_zero_layout_make(numel.data(), (int64_t)numel.size(), world, bucket, &l)) << dc_last_error();
  return Layout(l);
}

int make_status(const Ints &numel, int64_t world, int64_t bucket) {
  dc_zero_layout *l = nullptr;
  int rc = dc_zero_layout_make(numel.data(), (int64_t)numel.size(), world, bucket, &l);
  if (rc == DC_OK) dc_zero_layout_free(l);
  else EXPECT_EQ(nullptr, l);
  return rc;
}

// What lies at one element of the flat space.
struct Cell {
  int64_t param = -1, index = -1;              // -1: padding
  int64_t bucket = -1, rank = -1, shard = -1;
};

struct Oracle {
  std::vector<Cell> cell;
  Ints offset;

  Oracle(const Ints &numel, int64_t world, int64_t wish) {
    for (size_t p = 0; p < numel.size(); p++) {
      while (cell.size() % 64) cell.push_back({});
      offset.push_back((int64_t)cell.size());
      for (int64_t i = 0; i < numel[p]; i++) {
        Cell c;
        c.param = (int64_t)p;
        c.index = i;
        cell.push_back(c);
      }
    }
    const size_t unit = (size_t)world * 4096;
    while (cell.size() % unit) cell.push_back({});
    size_t bucket = unit;
    while (bucket < (uint64_t)wish && bucket < cell.size()) bucket += unit;
    deal(bucket, (size_t)world);
  }

  // Deals each bucket out in `world` equal runs; a rank's shard grows as it gets elements.
  void deal(size_t bucket, size_t world) {
    Ints got(world, 0);
    for (size_t begin = 0, b = 0; begin < cell.size(); begin += bucket, b++) {
      size_t end = std::min(begin + bucket, cell.size()), share = (end - begin) / world;
      for (size_t i = begin; i < end; i++) {
        size_t rank = 0;
        while (i >= begin + (rank + 1) * share) rank++;
        cell[i].bucket = (int64_t)b;
        cell[i].rank = (int64_t)rank;
        cell[i].shard = got[rank]++;
      }
    }
  }
};

struct Case {
  Ints numel;
  int64_t world, bucket;
};

std::vector<Case> all_cases() {
  const std::vector<Ints> lists = {{},
                                   {0},
                                   {1},
                                   {0, 0, 5, 0},
                                   {64},
                                   {63, 65, 1, 64},
                                   {4096},
                                   {4095, 4097, 0},
                                   {0, 8192, 0, 0, 8192, 3},
                                   {10000, 3, 0, 20000, 192},
                                   {50001},
                                   {1, 12288, 1, 12288, 1},
                                   Ints(100, 1),
                                   Ints(300, 130)};
  std::vector<Case> cases;
  for (const Ints &numel : lists)
    for (int64_t world = 1; world <= 5; world++)
      for (int64_t bucket : {(int64_t)1, (int64_t)4097, (int64_t)16384, (int64_t)30000, (int64_t)1 << 20, INT64_MAX})
        cases.push_back({numel, world, bucket});
  return cases;
}

template <class F> void each_case(F check) {
  for (const Case &c : all_cases()) {
    SCOPED_TRACE("world " + std::to_string(c.world) + ", bucket " + std::to_string(c.bucket) + ", parameters " +
                 std::to_string(c.numel.size()) + ", first " + std::to_string(c.numel.empty() ? -1 : c.numel[0]));
    Layout l = make(c.numel, c.world, c.bucket);
    ASSERT_TRUE(l);
    check(c, *l, Oracle(c.numel, c.world, c.bucket));
    if (::testing::Test::HasFailure()) return;  // one case is enough to look at
  }
}

TEST(ZeroLayout, SizesAreThoseOfTheOracle) {
  each_case([](const Case &c, const dc_zero_layout &l, const Oracle &o) {
    EXPECT_EQ((int64_t)o.cell.size(), l.total);
    EXPECT_EQ((int64_t)c.numel.size(), l.nparams);
    EXPECT_EQ(c.world, l.world);
    EXPECT_EQ(o.cell.empty() ? 0 : o.cell.back().bucket + 1, l.nbuckets);
    EXPECT_EQ(l.total, l.shard_elems * c.world);
    EXPECT_EQ(0, l.bucket_elems % (c.world * DC_BLOCK));
    EXPECT_GT(l.bucket_elems, 0);
    for (size_t p = 0; p < c.numel.size(); p++) {
      EXPECT_EQ(o.offset[p], l.offset[p]);
      EXPECT_EQ(c.numel[p], l.numel[p]);
    }
  });
}

TEST(ZeroLayout, OffsetsDoNotDependOnWorldOrBuckets) {
  const Ints numel = {10000, 3, 0, 20000, 192, 77};
  Layout one = make(numel, 1, 1);
  for (int64_t world = 1; world <= 9; world++)
    for (int64_t bucket : {1, 5000, 1000000}) {
      Layout l = make(numel, world, bucket);
      EXPECT_EQ(Ints(one->offset, one->offset + numel.size()), Ints(l->offset, l->offset + numel.size()));
    }
}

TEST(ZeroLayout, BucketsAndSlicesCutTheSpace) {
  each_case([](const Case &c, const dc_zero_layout &l, const Oracle &o) {
    std::vector<int> owners(o.cell.size(), 0);
    int64_t wrong = 0;
    for (int64_t b = 0; b < l.nbuckets; b++) {
      int64_t begin = -1, end = -1;
      ASSERT_EQ(DC_OK, dc_zero_bucket(&l, b, &begin, &end));
      ASSERT_TRUE(0 <= begin && begin < end && end <= l.total);
      for (int64_t i = begin; i < end; i++) wrong += o.cell[i].bucket != b;
      for (int64_t r = 0; r < c.world; r++) {
        int64_t from = -1, to = -1, shard = -1;
        ASSERT_EQ(DC_OK, dc_zero_slice(&l, b, r, &from, &to, &shard));
        ASSERT_TRUE(begin <= from && from < to && to <= end);
        EXPECT_EQ(0, from % DC_BLOCK);
        EXPECT_EQ(0, shard % DC_BLOCK);
        for (int64_t i = from; i < to; i++) {
          owners[i]++;
          wrong += o.cell[i].rank != r || o.cell[i].shard != shard + (i - from);
        }
      }
    }
    EXPECT_EQ(0, wrong);
    EXPECT_EQ((int64_t)owners.size(), std::count(owners.begin(), owners.end(), 1));
  });
}

TEST(ZeroLayout, LocateInvertsSlices) {
  each_case([](const Case &, const dc_zero_layout &l, const Oracle &o) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < l.total; i++) {
      int64_t rank = -1, shard = -1;
      wrong += dc_zero_locate(&l, i, &rank, &shard) != DC_OK || rank != o.cell[i].rank || shard != o.cell[i].shard;
    }
    EXPECT_EQ(0, wrong);
    int64_t rank = -7, shard = -7;
    EXPECT_EQ(DC_E_INVALID, dc_zero_locate(&l, l.total, &rank, &shard));
    EXPECT_EQ(DC_E_INVALID, dc_zero_locate(&l, -1, &rank, &shard));
    EXPECT_EQ(-7, rank);
    EXPECT_EQ(-7, shard);
  });
}

std::vector<dc_zero_segment> segments_of(const dc_zero_layout &l, int64_t r) {
  int64_t n = -1, again = -1;
  EXPECT_EQ(DC_OK, dc_zero_segments(&l, r, nullptr, 0, &n)) << dc_last_error();
  std::vector<dc_zero_segment> s((size_t)n + 1);
  s[(size_t)n].param = -99;  // a guard
  EXPECT_EQ(DC_OK, dc_zero_segments(&l, r, s.data(), n, &again)) << dc_last_error();
  EXPECT_EQ(n, again);
  EXPECT_EQ(-99, s[(size_t)n].param);
  s.pop_back();
  return s;
}

// The segments that the oracle's cells make: a run ends where the parameter ends or either space jumps.
std::vector<dc_zero_segment> expected_segments(const Oracle &o, int64_t r) {
  std::vector<dc_zero_segment> out;
  for (int64_t i = 0; i < (int64_t)o.cell.size(); i++) {
    const Cell &c = o.cell[i];
    if (c.rank != r || c.param < 0) continue;
    dc_zero_segment *s = out.empty() ? nullptr : &out.back();
    if (s && s->param == c.param && s->flat_begin + s->len == i && s->shard_begin + s->len == c.shard) s->len++;
    else out.push_back({c.param, c.index, i, c.shard, 1});
  }
  return out;
}

TEST(ZeroLayout, SegmentsAreThoseOfTheOracle) {
  each_case([](const Case &c, const dc_zero_layout &l, const Oracle &o) {
    for (int64_t r = 0; r < c.world; r++) {
      const auto got = segments_of(l, r), want = expected_segments(o, r);
      ASSERT_EQ(want.size(), got.size());
      for (size_t k = 0; k < want.size(); k++) {
        EXPECT_EQ(want[k].param, got[k].param);
        EXPECT_EQ(want[k].param_begin, got[k].param_begin);
        EXPECT_EQ(want[k].flat_begin, got[k].flat_begin);
        EXPECT_EQ(want[k].shard_begin, got[k].shard_begin);
        EXPECT_EQ(want[k].len, got[k].len);
      }
    }
  });
}

TEST(ZeroLayout, PiecesAreThoseOfTheOracle) {
  each_case([](const Case &, const dc_zero_layout &l, const Oracle &o) {
    for (int64_t b = 0; b < l.nbuckets; b++) {
      int64_t begin, end, n = -1, again = -1;
      ASSERT_EQ(DC_OK, dc_zero_bucket(&l, b, &begin, &end));
      ASSERT_EQ(DC_OK, dc_zero_pieces(&l, b, nullptr, 0, &n));
      std::vector<dc_zero_piece> piece((size_t)n);
      ASSERT_EQ(DC_OK, dc_zero_pieces(&l, b, piece.data(), n, &again));
      ASSERT_EQ(n, again);
      std::vector<Cell> seen((size_t)(end - begin));
      int64_t wrong = 0, last = begin;
      for (const dc_zero_piece &p : piece) {
        wrong += p.flat_begin < last || p.len <= 0;
        last = p.flat_begin + p.len;
        ASSERT_LE(last, end);
        for (int64_t i = 0; i < p.len; i++) {
          Cell &c = seen[(size_t)(p.flat_begin - begin + i)];
          c.param = p.param;
          c.index = p.param_begin + i;
        }
      }
      for (int64_t i = begin; i < end; i++)
        wrong += seen[(size_t)(i - begin)].param != o.cell[i].param ||
                 seen[(size_t)(i - begin)].index != o.cell[i].index;
      EXPECT_EQ(0, wrong);
    }
  });
}

TEST(ZeroLayout, WrongArgumentsAreNamedAndWriteNothing) {
  EXPECT_EQ(DC_E_INVALID, make_status({-1}, 1, 1));
  EXPECT_NE(nullptr, strstr(dc_last_error(), "parameter 0 has -1"));
  EXPECT_EQ(DC_E_INVALID, make_status({1}, 0, 1));
  EXPECT_EQ(DC_E_INVALID, make_status({1}, -3, 1));
  EXPECT_EQ(DC_E_INVALID, make_status({1}, 1, 0));
  EXPECT_EQ(DC_E_INVALID, make_status({1}, 1, INT64_MIN));
  dc_zero_layout *none = nullptr;
  const int64_t one = 1;
  EXPECT_EQ(DC_E_INVALID, dc_zero_layout_make(nullptr, 1, 1, 1, &none));
  EXPECT_EQ(DC_E_INVALID, dc_zero_layout_make(&one, -1, 1, 1, &none));
  EXPECT_EQ(DC_E_INVALID, dc_zero_layout_make(&one, 1, 1, 1, nullptr));
  EXPECT_EQ(nullptr, none);

  Layout l = make({5000, 5000}, 2, 1);
  int64_t a = -7, b = -7, c = -7;
  EXPECT_EQ(DC_E_INVALID, dc_zero_bucket(l.get(), l->nbuckets, &a, &b));
  EXPECT_EQ(DC_E_INVALID, dc_zero_bucket(l.get(), -1, &a, &b));
  EXPECT_EQ(DC_E_INVALID, dc_zero_bucket(nullptr, 0, &a, &b));
  EXPECT_EQ(DC_E_INVALID, dc_zero_slice(l.get(), 0, 2, &a, &b, &c));
  EXPECT_EQ(DC_E_INVALID, dc_zero_slice(l.get(), 0, -1, &a, &b, &c));
  EXPECT_EQ(DC_E_INVALID, dc_zero_slice(l.get(), l->nbuckets, 0, &a, &b, &c));
  EXPECT_EQ(DC_E_INVALID, dc_zero_segments(l.get(), 2, nullptr, 0, &a));
  EXPECT_EQ(DC_E_INVALID, dc_zero_segments(nullptr, 0, nullptr, 0, &a));
  EXPECT_EQ(DC_E_INVALID, dc_zero_pieces(l.get(), l->nbuckets, nullptr, 0, &a));
  EXPECT_EQ(-7, a);
  EXPECT_EQ(-7, b);
  EXPECT_EQ(-7, c);

  dc_zero_segment s = {-5, -5, -5, -5, -5};
  dc_zero_piece p = {-5, -5, -5, -5};
  EXPECT_EQ(DC_E_INVALID, dc_zero_segments(l.get(), 0, &s, 1, &a));
  EXPECT_EQ(DC_E_INVALID, dc_zero_pieces(l.get(), 0, &p, 0, &a));
  EXPECT_EQ(-5, s.param);
  EXPECT_EQ(-5, p.param);
  EXPECT_EQ(-7, a);
}

TEST(ZeroLayout, OverflowIsAnError) {
  EXPECT_EQ(DC_E_OVERFLOW, make_status({INT64_MAX}, 1, 1));
  EXPECT_EQ(DC_E_OVERFLOW, make_status({INT64_MAX - 4000}, 1, 1));
  EXPECT_EQ(DC_E_OVERFLOW, make_status({INT64_MAX - 100, 200}, 1, 1));
  EXPECT_EQ(DC_E_OVERFLOW, make_status({INT64_MAX / 2, INT64_MAX / 2, 100}, 1, 1));
  EXPECT_EQ(DC_E_OVERFLOW, make_status({1}, INT64_MAX, 1));
  EXPECT_EQ(DC_E_OVERFLOW, make_status({1}, INT64_MAX / DC_BLOCK + 1, 1));
  EXPECT_EQ(DC_E_OVERFLOW, make_status({INT64_MAX / 2 + 5}, INT64_MAX / DC_BLOCK / 2 + 1, 1));
  dc_zero_layout *none = nullptr;
  const int64_t one = 1;
  EXPECT_EQ(DC_E_OVERFLOW, dc_zero_layout_make(&one, INT64_MAX, 1, 1, &none));
  EXPECT_EQ(nullptr, none);
  // At the edge it still works, exactly.
  const int64_t most = INT64_MAX / DC_BLOCK * DC_BLOCK;
  Layout l = make({most - 1}, 1, INT64_MAX);
  EXPECT_EQ(most, l->total);
  EXPECT_EQ(1, l->nbuckets);
  int64_t rank, shard, begin, end;
  ASSERT_EQ(DC_OK, dc_zero_locate(l.get(), most - 1, &rank, &shard));
  EXPECT_EQ(most - 1, shard);
  Layout wide = make({1}, INT64_MAX / DC_BLOCK, INT64_MAX);
  ASSERT_EQ(DC_OK, dc_zero_locate(wide.get(), most - 1, &rank, &shard));
  EXPECT_EQ(INT64_MAX / DC_BLOCK - 1, rank);
  EXPECT_EQ(DC_BLOCK - 1, shard);
  Layout many = make({most - 1}, 1, 1);  // more buckets than anyone can list, but the last one has its place
  ASSERT_EQ(DC_OK, dc_zero_bucket(many.get(), many->nbuckets - 1, &begin, &end));
  EXPECT_EQ(most, end);
  EXPECT_EQ(DC_BLOCK, end - begin);
}

TEST(ZeroLayout, AMillionParameters) {
  std::mt19937 rng(1);
  Ints numel(1000000);
  int64_t sum = 0;
  for (int64_t &n : numel) sum += n = rng() % 500;
  Layout l = make(numel, 4, 1 << 20);
  int64_t in_segments = 0, in_pieces = 0;
  for (int64_t r = 0; r < 4; r++)
    for (const dc_zero_segment &s : segments_of(*l, r)) in_segments += s.len;
  for (int64_t b = 0; b < l->nbuckets; b++) {
    int64_t n;
    ASSERT_EQ(DC_OK, dc_zero_pieces(l.get(), b, nullptr, 0, &n));
    std::vector<dc_zero_piece> piece((size_t)n);
    ASSERT_EQ(DC_OK, dc_zero_pieces(l.get(), b, piece.data(), n, &n));
    for (const dc_zero_piece &p : piece) in_pieces += p.len;
  }
  EXPECT_EQ(sum, in_segments);
  EXPECT_EQ(sum, in_pieces);
}

// ---- prefetch ------------------------------------------------------------------------------------------------------
struct Limits {
  int64_t prefetch, live, reuse;
};

std::vector<dc_zero_action> plan(const Ints &use, const Ints &elems, Limits k) {
  int64_t n = -1, again = -1;
  auto call = [&](dc_zero_action *out, int64_t capacity, int64_t *count) {
    return dc_zero_prefetch(use.data(), (int64_t)use.size(), elems.data(), (int64_t)elems.size(), k.prefetch, k.live,
                            k.reuse, out, capacity, count);
  };
  EXPECT_EQ(DC_OK, call(nullptr, 0, &n)) << dc_last_error();
  EXPECT_LE(n, 3 * (int64_t)use.size());
  std::vector<dc_zero_action> a((size_t)n);
  EXPECT_EQ(DC_OK, call(a.data(), n, &again)) << dc_last_error();
  EXPECT_EQ(n, again);
  if (n > 0) {
    dc_zero_action untouched = {77, 77, 77};
    EXPECT_EQ(DC_E_INVALID, call(&untouched, n - 1, &again));
    EXPECT_EQ(77, untouched.kind);
  }
  return a;
}

// "G0 G1 U0 R0 ..."
std::string text(const std::vector<dc_zero_action> &actions) {
  std::string s;
  for (const dc_zero_action &a : actions)
    s += std::string(s.empty() ? "" : " ") + "?GUR"[a.kind] + std::to_string(a.unit);
  return s;
}

int64_t next_use(const Ints &use, size_t i) {
  for (size_t j = i + 1; j < use.size(); j++)
    if (use[j] == use[i]) return (int64_t)j;
  return -1;
}

size_t next_from(const Ints &use, size_t from, int64_t unit) {
  while (from < use.size() && use[from] != unit) from++;
  return from;
}

bool kept_after(const Ints &use, const Ints &elems, Limits k, size_t i) {
  int64_t next = next_use(use, i), between = 0;
  if (next < 0 || elems[(size_t)use[i]] > k.live) return false;
  for (size_t j = i + 1; j < (size_t)next; j++) between += elems[(size_t)use[j]];
  return between <= k.reuse;
}

// Plays the list and returns "" or what is wrong with it.
std::string play(const Ints &use, const Ints &elems, Limits k, const std::vector<dc_zero_action> &actions) {
  std::vector<int> live(elems.size(), 0), flying(elems.size(), 0);
  size_t at = 0;  // the use that comes next
  int64_t live_elems = 0, flying_elems = 0;
  for (size_t n = 0; n < actions.size(); n++) {
    const size_t u = (size_t)actions[n].unit;
    const std::string where = " at action " + std::to_string(n);
    if (u >= elems.size() || actions[n].reserved != 0) return "no such unit" + where;
    if (actions[n].kind == DC_ZERO_GATHER) {
      if (live[u]) return "gathered twice" + where;
      if (at >= use.size()) return "gathered after the last use" + where;
      live[u] = 1;
      live_elems += elems[u];
      const bool needed = use[at] == (int64_t)u;
      if (live_elems > (needed ? std::max(k.live, elems[u]) : k.live)) return "too much gathered" + where;
      if (needed) continue;
      flying[u] = 1;
      flying_elems += elems[u];
      // While use `at` computes: its own unit has arrived by then.
      const size_t now = (size_t)use[at];
      if (flying_elems - (flying[now] ? elems[now] : 0) > k.prefetch) return "too much in flight" + where;
    } else if (actions[n].kind == DC_ZERO_USE) {
      if (at >= use.size() || use[at] != (int64_t)u) return "wrong use" + where;
      if (!live[u]) return "used but not gathered" + where;
      if (flying[u]) flying_elems -= elems[u];
      flying[u] = 0;
      const bool more = n + 1 < actions.size();
      const bool released_next = more && actions[n + 1].kind == DC_ZERO_RELEASE && actions[n + 1].unit == (int64_t)u;
      const bool keep = kept_after(use, elems, k, at);
      if (!keep && !released_next) return "kept without reason" + where;
      if (keep && released_next) {  // only allowed to make room for the next use
        const size_t after = n + 2;
        size_t g = after;
        while (g < actions.size() && actions[g].kind == DC_ZERO_RELEASE) g++;
        if (g >= actions.size() || actions[g].kind != DC_ZERO_GATHER || at + 1 >= use.size() ||
            actions[g].unit != use[at + 1])
          return "released without need" + where;
      }
      at++;
    } else if (actions[n].kind == DC_ZERO_RELEASE) {
      if (!live[u] || flying[u]) return "released without use" + where;
      const bool just_used = n > 0 && actions[n - 1].kind == DC_ZERO_USE && actions[n - 1].unit == (int64_t)u;
      const bool over = just_used && !kept_after(use, elems, k, at - 1);  // else it makes room
      for (size_t v = 0; !over && v < elems.size(); v++)
        if (live[v] && next_from(use, at, (int64_t)v) > next_from(use, at, (int64_t)u))
          return "a later one should go" + where;
      live[u] = 0;
      live_elems -= elems[u];
    } else {
      return "unknown action" + where;
    }
  }
  if (at != use.size()) return "uses are missing";
  if (live_elems != 0 || std::count(live.begin(), live.end(), 1)) return "something is left";
  return "";
}

TEST(ZeroPrefetch, ByHand) {
  const Ints elems = {10, 20, 30};
  // Nothing may fly: gather, use, release.
  EXPECT_EQ("G0 U0 R0 G1 U1 R1 G2 U2 R2", text(plan({0, 1, 2}, elems, {0, 100, 0})));
  // One ahead fits (20, then 30), two don't.
  EXPECT_EQ("G0 G1 U0 R0 G2 U1 R1 U2 R2", text(plan({0, 1, 2}, elems, {30, 100, 0})));
  // Everything fits.
  EXPECT_EQ("G0 G1 G2 U0 R0 U1 R1 U2 R2", text(plan({0, 1, 2}, elems, {50, 60, 0})));
  // max_live stops the same at 50 = 20 + 30, once 10 is gone.
  EXPECT_EQ("G0 G1 U0 R0 G2 U1 R1 U2 R2", text(plan({0, 1, 2}, elems, {50, 50, 0})));
  // Forward and backward: unit 2 is kept at once, unit 1 over the 30 + 30 elements of both uses of 2, unit 0 is not.
  EXPECT_EQ("G0 U0 R0 G1 U1 G2 U2 U2 R2 U1 R1 G0 U0 R0", text(plan({0, 1, 2, 2, 1, 0}, elems, {0, 100, 60})));
  EXPECT_EQ("G0 U0 R0 G1 U1 R1 G2 U2 U2 R2 G1 U1 R1 G0 U0 R0", text(plan({0, 1, 2, 2, 1, 0}, elems, {0, 100, 59})));
  // A kept unit does not stop those behind it: 2 comes while 1 computes, past the second use of 0.
  EXPECT_EQ("G0 G1 U0 G2 U1 R1 U0 R0 U2 R2", text(plan({0, 1, 0, 2}, elems, {30, 100, 1000})));
  // A unit above max_live is gathered all the same, alone, and never kept.
  EXPECT_EQ("G0 U0 R0 G2 U2 R2 G2 U2 R2 G0 U0 R0", text(plan({0, 2, 2, 0}, elems, {0, 25, 1000})));
  // Of two kept units the one with the farther next use makes room: 0 (used next at 4), not 1 (at 3).
  EXPECT_EQ("G0 U0 G1 U1 R0 G2 U2 U1 R1 G0 U0 R0 U2 R2", text(plan({0, 1, 2, 1, 0, 2}, elems, {0, 50, 1000})));
  EXPECT_EQ("", text(plan({}, elems, {0, 0, 0})));
  EXPECT_EQ("", text(plan({}, {}, {0, 0, 0})));
}

TEST(ZeroPrefetch, RandomSequencesKeepEveryRule) {
  std::mt19937 rng(7);
  const int64_t sizes[] = {0, 1, 2, 3, 5, 8}, limits[] = {0, 1, 2, 4, 7, 12, 1000};
  size_t flew = 0, kept = 0;
  for (int round = 0; round < 20000; round++) {
    Ints elems(1 + rng() % 5), use(rng() % 14);
    for (int64_t &e : elems) e = sizes[rng() % 6];
    for (int64_t &u : use) u = (int64_t)(rng() % elems.size());
    const Limits k = {limits[rng() % 7], limits[rng() % 7], limits[rng() % 7]};
    const auto actions = plan(use, elems, k);
    ASSERT_EQ("", play(use, elems, k, actions)) << "round " << round << ": " << text(actions);
    for (size_t n = 1; n < actions.size(); n++)
      flew += actions[n].kind == DC_ZERO_GATHER && actions[n - 1].kind == DC_ZERO_GATHER;
    kept += actions.size() < 3 * use.size();
  }
  EXPECT_GT(flew, 1000u);  // the rules were put to use
  EXPECT_GT(kept, 1000u);
}

TEST(ZeroPrefetch, FliesAsFarAsTheLimitsAllow) {
  std::mt19937 rng(3);
  for (int round = 0; round < 2000; round++) {
    Ints elems(2 + rng() % 12), use;
    for (size_t u = 0; u < elems.size(); u++) {
      elems[u] = 1 + rng() % 9;
      use.push_back((int64_t)u);
    }
    const Limits k = {(int64_t)(rng() % 25), (int64_t)(rng() % 40), 0};
    const auto actions = plan(use, elems, k);
    ASSERT_EQ("", play(use, elems, k, actions));
    int64_t gathered = 0, live = 0, used = 0;
    for (const dc_zero_action &a : actions) {
      if (a.kind == DC_ZERO_GATHER) {
        live += elems[(size_t)a.unit];
        gathered++;
      } else if (a.kind == DC_ZERO_RELEASE) {
        live -= elems[(size_t)a.unit];
      } else {
        // While this one computes, the next that is missing would not have fitted.
        int64_t in_flight = 0;
        for (int64_t u = used + 1; u < gathered; u++) in_flight += elems[(size_t)u];
        if (gathered < (int64_t)elems.size())
          ASSERT_TRUE(in_flight + elems[(size_t)gathered] > k.prefetch || live + elems[(size_t)gathered] > k.live);
        used++;
      }
    }
  }
}

TEST(ZeroPrefetch, LongSequences) {
  const int64_t n = 200000;
  Ints use, elems(1000);
  for (size_t u = 0; u < elems.size(); u++) elems[u] = (int64_t)(u % 17);
  std::mt19937 rng(5);
  for (int64_t i = 0; i < n; i++) use.push_back((int64_t)(rng() % elems.size()));
  const Limits k = {500, 4000, 3000};
  int64_t count = 0;
  std::vector<dc_zero_action> a(3 * (size_t)n);
  ASSERT_EQ(DC_OK, dc_zero_prefetch(use.data(), n, elems.data(), (int64_t)elems.size(), k.prefetch, k.live, k.reuse,
                                    a.data(), (int64_t)a.size(), &count));
  EXPECT_GT(count, n);
  EXPECT_LT(count, 3 * n);
}

TEST(ZeroPrefetch, WrongArguments) {
  const int64_t use[2] = {0, 1}, elems[2] = {1, 1}, bad_use[1] = {2}, bad_elems[2] = {1, -1};
  const int64_t huge[2] = {INT64_MAX, INT64_MAX};
  int64_t n = -7;
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(bad_use, 1, elems, 2, 1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, 2, bad_elems, 2, 1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, -1, elems, 2, 1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, 2, elems, -2, 1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(nullptr, 2, elems, 2, 1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, 2, nullptr, 2, 1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, 2, elems, 2, -1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, 2, elems, 2, 1, -1, 1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, 2, elems, 2, 1, 1, -1, nullptr, 0, &n));
  EXPECT_EQ(DC_E_INVALID, dc_zero_prefetch(use, 2, elems, 2, 1, 1, 1, nullptr, 0, nullptr));
  EXPECT_EQ(DC_E_OVERFLOW, dc_zero_prefetch(use, 2, huge, 2, 1, 1, 1, nullptr, 0, &n));
  EXPECT_EQ(-7, n);
}

// ---- estimate ------------------------------------------------------------------------------------------------------
dc_zero_bytes_in sizes(int stage) {
  dc_zero_bytes_in in = {};
  in.total = 1000 * 4096 * 4;
  in.shard = 1000 * 4096;
  in.frozen = 4096 * 10 + 1;
  in.world = 4;
  in.ranks_per_node = 4;
  in.slots = 3;
  in.bucket_elems = 65536;
  in.stage = stage;
  in.param_size = 2;
  in.grad_wire_size = 2;
  in.master = 1;
  in.state_size = 4;
  in.nstates = 2;
  in.resident = 1;
  return in;
}

void expect_bytes(const dc_zero_bytes_in &in, const dc_zero_bytes &want) {
  dc_zero_bytes got = {};
  ASSERT_EQ(DC_OK, dc_zero_estimate(&in, &got)) << dc_last_error();
  EXPECT_EQ(want.params_private, got.params_private);
  EXPECT_EQ(want.params_shared, got.params_shared);
  EXPECT_EQ(want.grads_private, got.grads_private);
  EXPECT_EQ(want.master_private, got.master_private);
  EXPECT_EQ(want.states_private, got.states_private);
  EXPECT_EQ(want.staging_shared, got.staging_shared);
  EXPECT_EQ(want.rank_total, got.rank_total);
  EXPECT_EQ(want.node_total, got.node_total);
  EXPECT_EQ(in.exchange, got.exchange_private);
}

TEST(ZeroEstimate, StatesThatAreNoWholeBytesAnElement) {
  dc_zero_bytes_in in = sizes(2);
  dc_zero_bytes out;
  in.state_block = 2 * (128 + 8); // two states of 4 bits with a scale for each 128 elements
  ASSERT_EQ(dc_zero_estimate(&in, &out), DC_OK) << dc_last_error();
  EXPECT_EQ(out.states_private, in.shard / 256 * 272);
  in.shard += 1;
  ASSERT_EQ(dc_zero_estimate(&in, &out), DC_OK) << dc_last_error();
  EXPECT_EQ(out.states_private, ((in.shard - 1) / 256 + 1) * 272);
}

TEST(ZeroEstimate, ByHand) {
  // 16,384,000 elements, a quarter each 4,096,000; 40,961 frozen; bf16 parameters, fp32 masters and two fp32 states.
  // staging: 4 ranks * 3 slots * 65,536 * 2 bytes = 1,572,864
  expect_bytes(sizes(0), {32849922, 0, 65536000, 65536000, 131072000, 1572864, 294993922, 1181548552});
  for (int stage : {1, 2})
    expect_bytes(sizes(stage), {32849922, 0, 16384000, 16384000, 32768000, 1572864, 98385922, 395116552});
  expect_bytes(sizes(3), {0, 32849922, 16384000, 16384000, 32768000, 1572864, 65536000, 296566786});
  // streamed: (4,096,000 + ceil(40,961 / 4) = 10,241) * 2
  dc_zero_bytes_in in = sizes(3);
  in.resident = 0;
  expect_bytes(in, {8212482, 0, 16384000, 16384000, 32768000, 1572864, 73748482, 296566792});
  // fp32 without masters, two nodes of two ranks
  in = sizes(2);
  in.master = 0;
  in.param_size = in.grad_wire_size = 4;
  in.ranks_per_node = 2;
  expect_bytes(in, {65699844, 0, 16384000, 0, 32768000, 1572864, 114851844, 231276552});
  // 1,000 bytes a rank on their way to the other node
  in.exchange = 1000;
  expect_bytes(in, {65699844, 0, 16384000, 0, 32768000, 1572864, 114852844, 231278552});
  // three gradient buffers, of the tree of micro-batches: 32,768,000 bytes more
  in.grad_buffers = 3;
  expect_bytes(in, {65699844, 0, 49152000, 0, 32768000, 1572864, 147620844, 296814552});
  // one buffer of 16 bits
  in.grad_buffers = 0;
  in.acc_size = 2;
  expect_bytes(in, {65699844, 0, 8192000, 0, 32768000, 1572864, 106660844, 214894552});
  // alone: no staging, whatever the slots
  in = sizes(0);
  in.world = in.ranks_per_node = 1;
  in.shard = in.total;
  in.frozen = 0;
  expect_bytes(in, {32768000, 0, 65536000, 65536000, 131072000, 0, 294912000, 294912000});
}

TEST(ZeroEstimate, WrongArgumentsAndOverflow) {
  dc_zero_bytes out = {};
  out.node_total = -7;
  auto status = [&](auto change) {
    dc_zero_bytes_in in = sizes(3);
    change(in);
    return dc_zero_estimate(&in, &out);
  };
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.stage = 4; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.stage = -1; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.total = -1; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.shard = in.total + 1; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.world = 0; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.ranks_per_node = 5; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.param_size = 0; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.state_block = -1; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.nstates = -1; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.exchange = -1; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.acc_size = -1; }));
  EXPECT_EQ(DC_E_INVALID, status([](auto &in) { in.grad_buffers = -1; }));
  EXPECT_EQ(DC_E_OVERFLOW, status([](auto &in) { in.exchange = INT64_MAX; }));
  EXPECT_EQ(DC_E_INVALID, dc_zero_estimate(nullptr, &out));
  EXPECT_EQ(DC_E_OVERFLOW, status([](auto &in) { in.total = INT64_MAX; }));
  EXPECT_EQ(DC_E_OVERFLOW, status([](auto &in) { in.total = in.shard = INT64_MAX / 4; }));
  EXPECT_EQ(DC_E_OVERFLOW, status([](auto &in) { in.slots = INT64_MAX; }));
  EXPECT_EQ(DC_E_OVERFLOW, status([](auto &in) { in.bucket_elems = INT64_MAX / 2; }));
  EXPECT_EQ(DC_E_OVERFLOW, status([](auto &in) { in.nstates = in.state_size = INT32_MAX; }));
  EXPECT_EQ(-7, out.node_total);
}

TEST(Gather, CopiesAnyRangeAndCountsItsBytes) {
  std::vector<char> src(100), dst(100, 0);
  for (size_t i = 0; i < src.size(); i++) src[i] = (char)(i + 1);
  int64_t before = dc_counter_get(DC_COUNTER_gather_bytes);
  ASSERT_EQ(DC_OK, dc_zero_gather(dst.data() + 3, src.data() + 1, 41)) << dc_last_error();
  EXPECT_EQ(41, dc_counter_get(DC_COUNTER_gather_bytes) - before);
  for (size_t i = 0; i < dst.size(); i++) EXPECT_EQ(i < 3 || i >= 44 ? 0 : src[i - 2], dst[i]) << i;
  EXPECT_EQ(DC_E_INVALID, dc_zero_gather(nullptr, src.data(), 8));
  EXPECT_EQ(41, dc_counter_get(DC_COUNTER_gather_bytes) - before);
}

}  // namespace
