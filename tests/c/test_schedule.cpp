// test_schedule.cpp: zero/schedule*.c against the papers' figures and against an oracle that steps a clock, for all
// p <= 8 ranks and m <= 32 micro-batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "zero/schedule.h"

namespace {

using Action = dc_schedule_action;
using Rank = std::vector<Action>;
constexpr int P = 8, M = 32;

struct Case {
  int kind;
  int64_t v, p, m;
  bool split() const { return kind == DC_SCHEDULE_ZB_H1 || kind == DC_SCHEDULE_ZB_V; }
  std::string text() const {
    return std::string(dc_schedule_name(kind)) + ", p " + std::to_string(p) + ", v " + std::to_string(v) + ", m " +
           std::to_string(m);
  }
};

std::vector<Case> all_cases(int64_t max_p = P, int64_t max_m = M) {
  std::vector<Case> out;
  for (int kind = 0; kind < DC_SCHEDULE_COUNT; kind++)
    for (int64_t v = kind == DC_SCHEDULE_INTERLEAVED || kind == DC_SCHEDULE_ZB_V ? 2 : 1;
         v <= (kind == DC_SCHEDULE_INTERLEAVED ? 4
               : kind == DC_SCHEDULE_ZB_V      ? 2
                                               : 1);
         v++)
      for (int64_t p = 1; p <= max_p; p++)
        for (int64_t m = 1; m <= max_m; m++) out.push_back({kind, v, p, m});
  return out;
}

// All ranks' actions as C takes them.
struct Program {
  std::vector<Rank> ranks;
  int64_t stages, micro;
  Rank flat;
  std::vector<int64_t> begin;

  dc_schedule view() {
    flat.clear();
    begin = {0};
    for (const Rank &r : ranks) {
      flat.insert(flat.end(), r.begin(), r.end());
      begin.push_back((int64_t)flat.size());
    }
    return {flat.data(), begin.data(), (int64_t)ranks.size(), stages, micro};
  }
  int check(std::vector<int64_t> *peak = nullptr) {
    dc_schedule s = view();
    if (peak) peak->assign(ranks.size(), -1);
    return dc_schedule_check(&s, peak ? peak->data() : nullptr);
  }
};

Program make(const Case &c) {
  Program out{{}, c.p * c.v, c.m, {}, {}};
  for (int64_t r = 0; r < c.p; r++) {
    int64_t count = -1;
    EXPECT_EQ(DC_OK, dc_schedule_actions(c.kind, c.p, c.v, c.m, r, nullptr, 0, &count)) << dc_last_error();
    Rank actions((size_t)count);
    EXPECT_EQ(DC_OK, dc_schedule_actions(c.kind, c.p, c.v, c.m, r, actions.data(), count, &count));
    out.ranks.push_back(actions);
  }
  return out;
}

struct Times {
  std::vector<dc_schedule_span> spans;
  std::vector<dc_schedule_load> loads;
  double makespan = -1;
};

// f, i, w of every stage.
std::vector<double> equal_costs(int64_t stages, double f, double i, double w) {
  std::vector<double> out;
  for (int64_t s = 0; s < stages; s++) out.insert(out.end(), {f, i + w, i, w});
  return out;
}

Times simulate(Program &p, const std::vector<double> &cost, const std::vector<double> &hop = {}) {
  Times t;
  dc_schedule s = p.view();
  t.spans.resize(p.flat.size());
  t.loads.resize(p.ranks.size());
  EXPECT_EQ(DC_OK, dc_schedule_simulate(&s, cost.data(), hop.empty() ? nullptr : hop.data(), t.spans.data(),
                                        t.loads.data(), &t.makespan))
      << dc_last_error();
  return t;
}

double longest_rank(const Times &t) {
  double out = 0;
  for (const auto &l : t.loads) out = std::max(out, l.last - l.first);
  return out;
}

// ---- the oracle
// ------------------------------------------------------------------------------------------------------ What happened
// by when: (what, stage, micro-batch) -> time. What: F, the gradient of the inputs (G) or of the weights.
using Done = std::map<std::tuple<char, int, int>, int>;

struct Oracle {
  const Program &p;
  std::vector<double> cost, hop;
  std::map<int, int> holder;  // of a stage
  Done done;
  std::vector<std::vector<std::pair<int, int>>> spans;
  bool twice = false;

  // Whether every rank comes to its end, on a clock that goes tick by tick.
  bool run() {
    std::vector<size_t> next(p.ranks.size(), 0);
    std::vector<int> free_at(p.ranks.size(), 0);
    spans.assign(p.ranks.size(), {});
    size_t left = 0;
    int horizon = 1;
    for (size_t r = 0; r < p.ranks.size(); r++)
      for (const Action &a : p.ranks[r]) {
        holder[a.stage] = (int)r;
        horizon += (int)cost[(size_t)a.stage * 4 + (size_t)a.work] + (hop.empty() ? 0 : 20);
        left++;
      }
    for (int now = 0; left && now <= horizon; now++)
      for (bool again = true; again;) {
        again = false;
        for (size_t r = 0; r < p.ranks.size(); r++) {
          if (next[r] == p.ranks[r].size() || free_at[r] > now || !can_start(p.ranks[r][next[r]], (int)r, now))
            continue;
          const Action &a = p.ranks[r][next[r]++];
          const int end = now + (int)cost[(size_t)a.stage * 4 + (size_t)a.work];
          finish(a, end);
          spans[r].push_back({now, end});
          free_at[r] = end;
          again = true;
          left--;
        }
      }
    return left == 0 && (int64_t)done.size() == 3 * p.stages * p.micro && !twice;
  }

  bool is_done(char what, int stage, int micro, int rank, int now) const {
    const auto it = done.find({what, stage, micro});
    if (it == done.end()) return false;
    const int boundary = what == 'F' ? stage : stage - 1;
    const bool crosses = holder.at(stage) != rank && !hop.empty();
    return it->second + (crosses ? (int)hop[(size_t)boundary] : 0) <= now;
  }
  bool can_start(const Action &a, int rank, int now) const {
    if (a.work == DC_SCHEDULE_F) return a.stage == 0 || is_done('F', a.stage - 1, a.micro, rank, now);
    if (a.work == DC_SCHEDULE_W) return is_done('G', a.stage, a.micro, rank, now);
    return is_done('F', a.stage, a.micro, rank, now) &&
           (a.stage == p.stages - 1 || is_done('G', a.stage + 1, a.micro, rank, now));
  }
  void enter(char what, const Action &a, int end) {
    if (!done.insert({{what, a.stage, a.micro}, end}).second) twice = true;
  }
  void finish(const Action &a, int end) {
    if (a.work == DC_SCHEDULE_F) enter('F', a, end);
    if (a.work == DC_SCHEDULE_I || a.work == DC_SCHEDULE_B) enter('G', a, end);
    if (a.work == DC_SCHEDULE_W || a.work == DC_SCHEDULE_B) enter('W', a, end);
  }
};

bool oracle_accepts(const Program &p) {
  Oracle o{p, std::vector<double>((size_t)p.stages * 4, 1), {}, {}, {}, {}, false};
  return o.run();
}

// ---- what is made
// ----------------------------------------------------------------------------------------------------
TEST(Schedule, NamesAreThoseOfTheField) {
  const std::vector<std::string> names = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"};
  for (int kind = 0; kind < DC_SCHEDULE_COUNT; kind++) EXPECT_EQ(names[(size_t)kind], dc_schedule_name(kind));
  EXPECT_EQ(nullptr, dc_schedule_name(-1));
  EXPECT_EQ(nullptr, dc_schedule_name(DC_SCHEDULE_COUNT));
}

TEST(Schedule, EveryOneIsValidAndOnTheRanksThatStageRankNames) {
  for (const Case &c : all_cases()) {
    SCOPED_TRACE(c.text());
    Program p = make(c);
    ASSERT_EQ(DC_OK, p.check()) << dc_last_error();
    for (int64_t r = 0; r < c.p; r++) {
      ASSERT_EQ((size_t)((c.split() ? 3 : 2) * c.v * c.m), p.ranks[(size_t)r].size());
      for (const Action &a : p.ranks[(size_t)r]) {
        int64_t rank = -1;
        ASSERT_EQ(DC_OK, dc_schedule_stage_rank(c.kind, c.p, c.v, a.stage, &rank));
        ASSERT_EQ(r, rank);
      }
    }
  }
}

TEST(Schedule, SmallOnesAreAsDrawnInThePapers) {
  const std::vector<std::pair<Case, std::vector<std::string>>> drawn = {
      {{DC_SCHEDULE_GPIPE, 1, 2, 2}, {"0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"}},
      {{DC_SCHEDULE_1F1B, 1, 2, 3}, {"0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"}},
      {{DC_SCHEDULE_INTERLEAVED, 2, 2, 2}, {"0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"}},
      {{DC_SCHEDULE_ZB_H1, 1, 2, 3}, {"0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"}},
      {{DC_SCHEDULE_ZB_V, 2, 2, 3},
       {"0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"}}};
  for (const auto &[c, lines] : drawn) {
    Program p = make(c);
    for (size_t r = 0; r < lines.size(); r++) {
      char text[256];
      int64_t length = -1;
      ASSERT_EQ(DC_OK, dc_schedule_print(p.ranks[r].data(), (int64_t)p.ranks[r].size(), text, sizeof text, &length));
      EXPECT_EQ(lines[r], text) << c.text();
    }
  }
}

TEST(Schedule, HoldsTheActivationsThatThePapersSay) {
  for (const Case &c : all_cases()) {
    SCOPED_TRACE(c.text());
    std::vector<int64_t> peak;
    ASSERT_EQ(DC_OK, make(c).check(&peak));
    for (int64_t r = 0; r < c.p; r++) {
      const int64_t got = peak[(size_t)r], ahead = (c.v - 1) * c.p + 2 * (c.p - 1 - r) + 1;
      switch (c.kind) {
      case DC_SCHEDULE_GPIPE: ASSERT_EQ(c.m, got); break;
      case DC_SCHEDULE_1F1B: ASSERT_EQ(std::min(c.m, c.p - r), got); break;
      case DC_SCHEDULE_INTERLEAVED:
        if (c.m % c.p == 0) ASSERT_EQ(std::min(c.v * c.m, ahead), got);
        else ASSERT_LE(got, std::min(c.v * c.m, ahead));
        break;
      case DC_SCHEDULE_ZB_H1: ASSERT_EQ(std::min(c.m, c.p), got); break;
      default: // of half a rank's layers each: as much as 1F1B's rank 0
        if (c.m >= 2 * c.p) ASSERT_EQ(2 * c.p, got);
        else ASSERT_LE(got, 2 * std::min(c.m, c.p));
      }
    }
  }
}

TEST(Schedule, BubblesAreThePublishedOnes) {
  for (const Case &c : all_cases())
    for (const auto &[f, i, w] : {std::tuple{1., 1., 1.}, {2., 3., 1.}, {4., 5., 3.}}) {
      SCOPED_TRACE(c.text());
      Program p = make(c);
      const Times t = simulate(p, equal_costs(p.stages, f, i, w));
      const double m = (double)c.m, ranks = (double)c.p, work = m * (double)c.v * (f + i + w);
      for (const auto &l : t.loads) ASSERT_EQ(work, l.busy);
      switch (c.kind) {
      case DC_SCHEDULE_GPIPE:
      case DC_SCHEDULE_1F1B: // (p - 1) / (m + p - 1) of the makespan
        ASSERT_EQ((m + ranks - 1) * (f + i + w), t.makespan);
        break;
      case DC_SCHEDULE_INTERLEAVED:
        if (c.m % c.p == 0) ASSERT_EQ(work + (ranks - 1) * (f + i + w), t.makespan); // (p - 1) / (m v) of the work
        break;
      case DC_SCHEDULE_ZB_H1:
        if (c.m >= c.p) ASSERT_EQ((ranks - 1) * (f + i - w), t.makespan - work);
        break;
      default: // none within a rank; the last rank starts p - 1 forwards after the first
        if (c.m >= 2 * c.p && f == i && i == w) {
          ASSERT_EQ(work, longest_rank(t));
          ASSERT_EQ(work + (ranks - 1) * f, t.makespan);
        }
      }
    }
}

TEST(Schedule, MoreIdleTimeIsFilledByEachLaterKind) {
  for (int64_t p = 2; p <= P; p++)
    for (int64_t m = 2 * p; m <= M; m += p) {
      Program one = make({DC_SCHEDULE_1F1B, 1, p, m}), h1 = make({DC_SCHEDULE_ZB_H1, 1, p, m}),
              v = make({DC_SCHEDULE_ZB_V, 2, p, m});
      const double a = longest_rank(simulate(one, equal_costs(p, 2, 2, 2))),
                   b = longest_rank(simulate(h1, equal_costs(p, 2, 2, 2))),
                   c = longest_rank(simulate(v, equal_costs(2 * p, 1, 1, 1)));
      EXPECT_LT(b, a);
      EXPECT_LT(c, b);
    }
}

TEST(Schedule, RefusesWhatAKindHasNot) {
  int64_t n = 7;
  Action a[4];
  const auto fails = [&](int status, const std::string &text, int kind, int64_t p, int64_t v, int64_t m, int64_t r) {
    EXPECT_EQ(status, dc_schedule_actions(kind, p, v, m, r, nullptr, 0, &n));
    EXPECT_NE(std::string::npos, std::string(dc_last_error()).find(text)) << dc_last_error();
    EXPECT_EQ(7, n);
  };
  fails(DC_E_INVALID, "kind 5", 5, 2, 1, 2, 0);
  fails(DC_E_INVALID, "kind -1", -1, 2, 1, 2, 0);
  fails(DC_E_INVALID, "1f1b: ranks is 0", DC_SCHEDULE_1F1B, 0, 1, 2, 0);
  fails(DC_E_INVALID, "1f1b: chunks is 2", DC_SCHEDULE_1F1B, 2, 2, 2, 0);
  fails(DC_E_INVALID, "interleaved: chunks is 1; this schedule has at least 2", DC_SCHEDULE_INTERLEAVED, 2, 1, 2, 0);
  fails(DC_E_INVALID, "zb-v: chunks is 3", DC_SCHEDULE_ZB_V, 2, 3, 2, 0);
  fails(DC_E_INVALID, "gpipe: micro_batches is 0", DC_SCHEDULE_GPIPE, 2, 1, 0, 0);
  fails(DC_E_INVALID, "rank 2 is outside", DC_SCHEDULE_GPIPE, 2, 1, 1, 2);
  fails(DC_E_INVALID, "rank -1 is outside", DC_SCHEDULE_GPIPE, 2, 1, 1, -1);
  fails(DC_E_INVALID, "more than 1048576 stages", DC_SCHEDULE_INTERLEAVED, INT64_MAX, 2, 1, 0);
  fails(DC_E_INVALID, "chunks is 9223372036854775807", DC_SCHEDULE_INTERLEAVED, 1, INT64_MAX, 1, 0);
  fails(DC_E_OVERFLOW, "micro-batches", DC_SCHEDULE_GPIPE, 2, 1, INT64_MAX, 0);
  EXPECT_EQ(DC_E_INVALID, dc_schedule_actions(DC_SCHEDULE_GPIPE, 2, 1, 3, 0, a, 4, &n));
  EXPECT_NE(std::string::npos, std::string(dc_last_error()).find("capacity is 4, but rank 0 has 6"));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_actions(DC_SCHEDULE_GPIPE, 2, 1, 1, 0, a, 4, nullptr));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_stage_rank(DC_SCHEDULE_ZB_V, 2, 2, 4, &n));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_stage_rank(DC_SCHEDULE_ZB_V, 2, 2, -1, &n));
}

TEST(Schedule, EndsSoonWhereRanksAreMany) {
  Action a[4];
  int64_t n = -1;
  ASSERT_EQ(DC_OK, dc_schedule_actions(DC_SCHEDULE_1F1B, DC_SCHEDULE_MAX_STAGES, 1, 1, 0, a, 4, &n));
  ASSERT_EQ(2, n);
  EXPECT_EQ(DC_SCHEDULE_F, a[0].work);
  EXPECT_EQ(DC_SCHEDULE_B, a[1].work);
}

// ---- text
// ------------------------------------------------------------------------------------------------------------
TEST(ScheduleText, ComesBack) {
  for (const Case &c : all_cases(5, 9))
    for (const Rank &rank : make(c).ranks) {
      int64_t length = -1, count = -1;
      ASSERT_EQ(DC_OK, dc_schedule_print(rank.data(), (int64_t)rank.size(), nullptr, 0, &length));
      std::string text((size_t)length + 1, '#');
      ASSERT_EQ(DC_OK, dc_schedule_print(rank.data(), (int64_t)rank.size(), text.data(), length + 1, &length));
      ASSERT_EQ('\0', text[(size_t)length]);
      ASSERT_EQ(DC_E_INVALID, dc_schedule_print(rank.data(), (int64_t)rank.size(), text.data(), length, &length));
      Rank back(rank.size());
      ASSERT_EQ(DC_OK, dc_schedule_parse(text.c_str(), back.data(), (int64_t)back.size(), &count)) << dc_last_error();
      ASSERT_EQ((int64_t)rank.size(), count);
      for (size_t i = 0; i < rank.size(); i++)
        ASSERT_EQ(std::tie(rank[i].work, rank[i].stage, rank[i].micro),
                  std::tie(back[i].work, back[i].stage, back[i].micro));
    }
}

TEST(ScheduleText, TakesCellsOfATable) {
  Action a[3];
  int64_t n = -1;
  ASSERT_EQ(DC_OK, dc_schedule_parse(",0F0,,\t12I2147483647,,3W4,", a, 3, &n)) << dc_last_error();
  ASSERT_EQ(3, n);
  EXPECT_EQ(12, a[1].stage);
  EXPECT_EQ(DC_SCHEDULE_I, a[1].work);
  EXPECT_EQ(INT32_MAX, a[1].micro);
  EXPECT_EQ(DC_E_INVALID, dc_schedule_parse("0F0 0F1", a, 1, &n));
  ASSERT_EQ(DC_OK, dc_schedule_parse("", nullptr, 0, &n));
  EXPECT_EQ(0, n);
}

TEST(ScheduleText, AnErrorNamesColumnAndText) {
  const std::vector<std::pair<std::string, std::string>> wrong = {{"0F0 F1", "column 5: 'F1'"},
                                                                  {"0F", "column 1: '0F'"},
                                                                  {"0F0,0X1", "column 5: '0X1'"},
                                                                  {"0F0 1SEND_F0", "column 5: '1SEND_F0'"},
                                                                  {"-1F0", "column 1: '-1F0'"},
                                                                  {"0F0x", "column 1: '0F0x'"},
                                                                  {"0F2147483648", "column 1: '0F2147483648'"},
                                                                  {"0F99999999999999999999999", "column 1: "},
                                                                  {"0F0\n0B0", "column 1: '0F0"},
                                                                  {"0", "column 1: '0'"}};
  for (const auto &[text, error] : wrong) {
    int64_t n = 7;
    EXPECT_EQ(DC_E_INVALID, dc_schedule_parse(text.c_str(), nullptr, 0, &n)) << text;
    EXPECT_NE(std::string::npos, std::string(dc_last_error()).find(error)) << dc_last_error();
    EXPECT_EQ(7, n);
  }
}

TEST(ScheduleText, AnyBytesAreReadOrRefused) {
  std::mt19937 random(7);
  const std::string letters = "0129FBIWX, ;\n-";
  for (int round = 0; round < 20000; round++) {
    std::string text;
    for (uint32_t i = random() % 12; i > 0; i--) text += letters[random() % letters.size()];
    Action a[6];
    int64_t n = -1, length = -1;
    if (dc_schedule_parse(text.c_str(), a, 6, &n) != DC_OK) continue;
    char back[64];
    ASSERT_EQ(DC_OK, dc_schedule_print(a, n, back, sizeof back, &length));
    Action b[6];
    int64_t again = -1;
    ASSERT_EQ(DC_OK, dc_schedule_parse(back, b, 6, &again));
    ASSERT_EQ(n, again) << text;
  }
}

TEST(ScheduleText, PrintsActionsOnly) {
  int64_t length = 7;
  for (const Action bad : {Action{4, 0, 0}, Action{-1, 0, 0}, Action{0, -1, 0}, Action{0, 0, -1}})
    EXPECT_EQ(DC_E_INVALID, dc_schedule_print(&bad, 1, nullptr, 0, &length));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_print(nullptr, 1, nullptr, 0, &length));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_print(nullptr, -1, nullptr, 0, &length));
  EXPECT_EQ(7, length);
}

// ---- check
// -----------------------------------------------------------------------------------------------------------
void refuses(Program p, const std::string &text) {
  EXPECT_EQ(DC_E_INVALID, p.check());
  EXPECT_NE(std::string::npos, std::string(dc_last_error()).find(text)) << dc_last_error() << "\nwithout " << text;
}

TEST(ScheduleCheck, RefusesADroppedAndADoubledAction) {
  for (const Case &c :
       {Case{DC_SCHEDULE_GPIPE, 1, 3, 4}, Case{DC_SCHEDULE_1F1B, 1, 4, 5}, Case{DC_SCHEDULE_INTERLEAVED, 2, 2, 4},
        Case{DC_SCHEDULE_ZB_H1, 1, 3, 5}, Case{DC_SCHEDULE_ZB_V, 2, 3, 4}}) {
    const Program good = make(c);
    for (size_t r = 0; r < good.ranks.size(); r++)
      for (size_t i = 0; i < good.ranks[r].size(); i++) {
        const Action a = good.ranks[r][i];
        const std::string micro = "micro-batch " + std::to_string(a.micro);
        Program dropped = good, doubled = good;
        dropped.ranks[r].erase(dropped.ranks[r].begin() + (long)i);
        refuses(dropped, "rank " + std::to_string(r) + " has no ");
        refuses(dropped, micro + " in stage " + std::to_string(a.stage));
        doubled.ranks[r].insert(doubled.ranks[r].begin() + (long)i, a);
        refuses(doubled, "rank " + std::to_string(r) + ", action " + std::to_string(i + 1) + " (");
        refuses(doubled, micro + " had that in stage " + std::to_string(a.stage));
      }
  }
}

// Any two actions of a rank change places, or one goes elsewhere: what the oracle can execute, check takes, and no
// other.
TEST(ScheduleCheck, AgreesWithTheOracleOnMovedActions) {
  std::mt19937 random(11);
  int taken = 0, refused = 0;
  for (const Case &c :
       {Case{DC_SCHEDULE_GPIPE, 1, 3, 4}, Case{DC_SCHEDULE_1F1B, 1, 4, 5}, Case{DC_SCHEDULE_INTERLEAVED, 2, 2, 4},
        Case{DC_SCHEDULE_INTERLEAVED, 3, 3, 4}, Case{DC_SCHEDULE_ZB_H1, 1, 3, 5}, Case{DC_SCHEDULE_ZB_V, 2, 3, 4}}) {
    const Program good = make(c);
    ASSERT_TRUE(oracle_accepts(good));
    for (int round = 0; round < 150; round++) {
      Program p = good;
      for (uint32_t moves = 1 + random() % 2; moves > 0; moves--) {
        Rank &rank = p.ranks[random() % p.ranks.size()];
        const size_t i = random() % rank.size(), j = random() % rank.size();
        if (random() % 2) std::swap(rank[i], rank[j]);
        else
          std::rotate(rank.begin() + (long)std::min(i, j), rank.begin() + (long)std::min(i, j) + 1,
                      rank.begin() + (long)std::max(i, j) + 1);
      }
      const bool expected = oracle_accepts(p);
      ASSERT_EQ(expected, p.check() == DC_OK) << c.text() << ": " << dc_last_error();
      (expected ? taken : refused)++;
    }
  }
  EXPECT_GT(taken, 50);
  EXPECT_GT(refused, 50);
}

TEST(ScheduleCheck, NamesWhoWaitsForWhom) {
  const auto rank = [](const std::string &text) {
    Rank out(16);
    int64_t n = 0;
    EXPECT_EQ(DC_OK, dc_schedule_parse(text.c_str(), out.data(), 16, &n)) << dc_last_error();
    out.resize((size_t)n);
    return out;
  };
  const auto program = [&](const std::string &a, const std::string &b) {
    return Program{{rank(a), rank(b)}, 2, 2, {}, {}};
  };
  EXPECT_EQ(DC_OK, program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1").check()) << dc_last_error();
  refuses(program("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
          "deadlock: rank 0 waits at action 1 (0B0) of micro-batch 0 for 1B0, action 3 of rank 1, which waits at"
          " action 0 (1F1)");
  refuses(program("0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"),
          "rank 1, action 2 (1B1) of micro-batch 1 needs 1F1, which is behind it, action 3");
  refuses(program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1W1 1I1"), "action 3 (1W1) of micro-batch 1 needs 1I1");
  refuses(program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1W1"),
          "rank 1, action 4 (1W1): micro-batch 1 had that in stage 1, at action 3 (1B1)");
  refuses(program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1"), "rank 1 has no B or W of micro-batch 1 in stage 1");
  refuses(program("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"), "rank 1, action 0 (1B0): stage 1 is on rank 0");
  refuses(program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B2"), "action 3: stage 1 and micro-batch 2 are not of 2 and 2");
  refuses(program("0F0 0F1 0B0 0B1", "2F0 1B0 1F1 1B1"), "rank 1, action 0: stage 2 and micro-batch 0 are not of");
  refuses(program("0F0 0F1 0B0 0B1", ""), "no rank has stage 1: micro-batch 0 has no F in it");
  Program p = program("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1");
  p.ranks[1][2].work = 4;
  refuses(p, "rank 1, action 2: work 4 is none");
}

TEST(ScheduleCheck, RefusesShapesThatAreNone) {
  const Action a[2] = {{DC_SCHEDULE_F, 0, 0}, {DC_SCHEDULE_B, 0, 0}};
  const int64_t begin[2] = {0, 2}, late[2] = {1, 2}, falling[3] = {0, 2, 1};
  const auto status = [](const dc_schedule &s) { return dc_schedule_check(&s, nullptr); };
  EXPECT_EQ(DC_OK, status({a, begin, 1, 1, 1}));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_check(nullptr, nullptr));
  EXPECT_EQ(DC_E_INVALID, status({a, nullptr, 1, 1, 1}));
  EXPECT_EQ(DC_E_INVALID, status({nullptr, begin, 1, 1, 1}));
  EXPECT_EQ(DC_E_INVALID, status({a, late, 1, 1, 1}));
  EXPECT_EQ(DC_E_INVALID, status({a, falling, 2, 1, 1}));
  EXPECT_EQ(DC_E_INVALID, status({a, begin, 0, 1, 1}));
  EXPECT_EQ(DC_E_INVALID, status({a, begin, 1, 0, 1}));
  EXPECT_EQ(DC_E_INVALID, status({a, begin, 1, 1, 0}));
  EXPECT_EQ(DC_E_OVERFLOW, status({a, begin, 1, INT64_MAX / 2, INT64_MAX / 2}));
}

// ---- simulation
// ------------------------------------------------------------------------------------------------------
TEST(ScheduleSimulate, EqualsAClock) {
  std::mt19937 random(5);
  for (const Case &c : all_cases(4, 6)) {
    SCOPED_TRACE(c.text());
    Program p = make(c);
    std::vector<double> cost, hop;
    for (int64_t i = 0; i < 4 * p.stages; i++) cost.push_back(1 + (double)(random() % 5));
    for (int64_t i = 0; i + 1 < p.stages; i++) hop.push_back((double)(random() % 4));
    const Times t = simulate(p, cost, hop);
    Oracle o{p, cost, hop, {}, {}, {}, false};
    ASSERT_TRUE(o.run());
    size_t at = 0;
    double makespan = 0;
    for (size_t r = 0; r < p.ranks.size(); r++) {
      double busy = 0;
      for (const auto &[start, end] : o.spans[r]) {
        ASSERT_EQ(start, t.spans[at].start) << "rank " << r << ", action " << at;
        ASSERT_EQ(end, t.spans[at++].end);
        busy += end - start;
        makespan = std::max(makespan, (double)end);
      }
      ASSERT_EQ(busy, t.loads[r].busy);
      ASSERT_EQ(o.spans[r].front().first, t.loads[r].first);
      ASSERT_EQ(o.spans[r].back().second, t.loads[r].last);
    }
    ASSERT_EQ(makespan, t.makespan);
  }
}

TEST(ScheduleSimulate, PredictionIsTheSimulationOfWhatIsMade) {
  for (const Case &c : all_cases(5, 9)) {
    SCOPED_TRACE(c.text());
    Program p = make(c);
    std::vector<int64_t> peak;
    ASSERT_EQ(DC_OK, p.check(&peak));
    const std::vector<double> cost = equal_costs(p.stages, 2, 3, 1), hop((size_t)p.stages, 0.5);
    const Times t = simulate(p, cost, hop);
    std::vector<dc_schedule_load> loads((size_t)c.p);
    double makespan = -1;
    ASSERT_EQ(DC_OK, dc_schedule_predict(c.kind, c.p, c.v, c.m, cost.data(), hop.data(), loads.data(), &makespan));
    ASSERT_EQ(t.makespan, makespan);
    for (size_t r = 0; r < loads.size(); r++) {
      ASSERT_EQ(peak[r], loads[r].peak);
      ASSERT_EQ(peak[r], t.loads[r].peak);
      ASSERT_EQ(std::tie(t.loads[r].busy, t.loads[r].first, t.loads[r].last),
                std::tie(loads[r].busy, loads[r].first, loads[r].last));
    }
  }
  double makespan = 7;
  const std::vector<double> cost(8, -1);
  EXPECT_EQ(DC_E_INVALID, dc_schedule_predict(DC_SCHEDULE_1F1B, 2, 1, 2, cost.data(), nullptr, nullptr, &makespan));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_predict(DC_SCHEDULE_1F1B, 2, 1, 0, cost.data(), nullptr, nullptr, &makespan));
  EXPECT_EQ(DC_E_INVALID, dc_schedule_predict(DC_SCHEDULE_1F1B, 2, 1, 2, nullptr, nullptr, nullptr, &makespan));
  EXPECT_EQ(7, makespan);
}

TEST(ScheduleSimulate, AHopWithinARankTakesNoTime) {
  Program p = make({DC_SCHEDULE_ZB_V, 2, 1, 4}); // both chunks are on one rank
  EXPECT_EQ(24, simulate(p, equal_costs(2, 1, 1, 1), {1000}).makespan);
}

TEST(ScheduleSimulate, RefusesTimesThatAreNone) {
  Program p = make({DC_SCHEDULE_1F1B, 1, 2, 2});
  const dc_schedule s = p.view();
  double makespan = 7;
  for (const double bad : {-1., (double)NAN, (double)INFINITY}) {
    std::vector<double> cost(8, 1), hop(1, 1);
    cost[5] = bad;
    EXPECT_EQ(DC_E_INVALID, dc_schedule_simulate(&s, cost.data(), hop.data(), nullptr, nullptr, &makespan));
    EXPECT_NE(std::string::npos, std::string(dc_last_error()).find("cost[5]")) << dc_last_error();
    cost[5] = 1;
    hop[0] = bad;
    EXPECT_EQ(DC_E_INVALID, dc_schedule_simulate(&s, cost.data(), hop.data(), nullptr, nullptr, &makespan));
    EXPECT_NE(std::string::npos, std::string(dc_last_error()).find("hop[0]")) << dc_last_error();
    hop[0] = 1;
    EXPECT_EQ(DC_OK, dc_schedule_simulate(&s, cost.data(), hop.data(), nullptr, nullptr, &makespan));
    makespan = 7;
  }
  EXPECT_EQ(DC_E_INVALID, dc_schedule_simulate(&s, nullptr, nullptr, nullptr, nullptr, &makespan));
  EXPECT_EQ(7, makespan);
}

TEST(ScheduleSimulate, WritesNothingOfADeadlock) {
  Program p = make({DC_SCHEDULE_1F1B, 1, 2, 2});
  std::swap(p.ranks[1][0], p.ranks[1][1]);
  const dc_schedule s = p.view();
  const std::vector<double> cost(8, 1);
  std::vector<dc_schedule_span> spans(p.flat.size(), {-3, -3});
  double makespan = 7;
  EXPECT_EQ(DC_E_INVALID, dc_schedule_simulate(&s, cost.data(), nullptr, spans.data(), nullptr, &makespan));
  EXPECT_EQ(7, makespan);
  for (const auto &x : spans) EXPECT_EQ(-3, x.start);
}

}  // namespace
