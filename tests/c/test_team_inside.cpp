// test_team_inside.cpp: how ranks are put into teams, what is read below /sys, and where memory is put.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

extern "C" {
#define _Atomic // what this test uses of the headers has no atomics
#include "comm/numa.h"
int dc__team_plan(int size, const dc__spot *spot, int wanted, int32_t *team);
int dc__team_wanted(bool crowded, int *wanted);
}
#undef _Atomic
#include "comm/comm.h"
#include "comm/p2p.h"
#include "ranks.h"

using namespace ranks;

namespace {

// ---- lists ---------------------------------------------------------------------------------------------------------
std::vector<int> listed(const char *text) {
  cpu_set_t set;
  dc__numa_list(text, &set);
  std::vector<int> all;
  for (int i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, &set)) all.push_back(i);
  return all;
}

TEST(Lists, AsTheKernelWritesThem) {
  using V = std::vector<int>;
  EXPECT_EQ(listed("0\n"), (V{0}));
  EXPECT_EQ(listed("0-3,8,10-11\n"), (V{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(listed("5"), (V{5}));
  EXPECT_EQ(listed("1022-1030\n"), (V{1022, 1023})); // no more than a cpu_set_t holds
  for (const char *none : {"", "\n", "x", "-3", ",1"}) EXPECT_EQ(listed(none), V{}) << none;
  EXPECT_EQ(listed("3-1\n"), V{});
  EXPECT_EQ(listed("1-\n"), V{});
}

// ---- /sys ----------------------------------------------------------------------------------------------------------
class Sys : public testing::Test {
protected:
  std::string root;
  void SetUp() override {
    char name[] = "/tmp/deepc-sys-XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root = name;
  }
  void TearDown() override { EXPECT_EQ(system(("rm -r " + root).c_str()), 0); }
  void file(const std::string &path, const std::string &text) {
    for (size_t at = 0; (at = path.find('/', at + 1)) != std::string::npos;)
      mkdir((root + "/" + path.substr(0, at)).c_str(), 0700);
    FILE *f = fopen((root + "/" + path).c_str(), "w");
    ASSERT_NE(f, nullptr) << path;
    fputs(text.c_str(), f);
    fclose(f);
  }
  void cache(int cpu, int index, int level, const char *shared) {
    const std::string folder = fmt("devices/system/cpu/cpu%d/cache/index%d/", cpu, index);
    file(folder + "level", fmt("%d\n", level));
    file(folder + "shared_cpu_list", shared);
  }
  dc__spot spot(const std::vector<int> &cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i : cpus) CPU_SET(i, &set);
    return dc__numa_spot(root.c_str(), &set);
  }
};

TEST_F(Sys, TwoSocketsOfTwoCaches) {
  for (int cpu = 0; cpu < 8; cpu++) {
    cache(cpu, 0, 1, fmt("%d\n", cpu).c_str());
    cache(cpu, 3, 3, cpu < 2 ? "0-1\n" : cpu < 4 ? "2-3\n" : cpu < 6 ? "4-5\n" : "6-7\n");
  }
  file("devices/system/node/online", "0-1\n");
  file("devices/system/node/node0/cpulist", "0-3\n");
  file("devices/system/node/node1/cpulist", "4-7\n");
  const struct {
    std::vector<int> cpus;
    int l3, node;
  } cases[] = {{{0}, 0, 0}, {{3}, 2, 0},    {{2, 3}, 2, 0},   {{1, 2}, -1, 0}, {{0, 1, 2, 3}, -1, 0},
               {{7}, 6, 1}, {{4, 5}, 4, 1}, {{3, 4}, -1, -1}, {{}, -1, -1},    {{9}, -1, -1}};
  for (const auto &k : cases) {
    const dc__spot s = spot(k.cpus);
    EXPECT_EQ(s.l3, k.l3) << (k.cpus.empty() ? -1 : k.cpus[0]);
    EXPECT_EQ(s.node, k.node) << (k.cpus.empty() ? -1 : k.cpus[0]);
  }
}

TEST_F(Sys, AKernelThatSaysLittle) {
  EXPECT_EQ(spot({0}).l3, -1); // nothing at all
  EXPECT_EQ(spot({0}).node, -1);
  cache(0, 0, 1, "0\n");
  cache(0, 1, 2, "0-1\n"); // no third level
  file("devices/system/node/online", "nonsense");
  EXPECT_EQ(spot({0}).l3, -1);
  EXPECT_EQ(spot({0}).node, -1);
  cache(0, 2, 3, "4-5\n"); // a list without the processor itself
  EXPECT_EQ(spot({0}).l3, -1);
}

TEST(Here, IsNoMoreThanOneDomain) {
  const dc__spot s = dc__numa_here();
  EXPECT_GE(s.l3, -1);
  EXPECT_GE(s.node, -1);
  EXPECT_LT(s.node, 64);
}

// ---- teams ---------------------------------------------------------------------------------------------------------
std::string plan(const std::vector<dc__spot> &spot, int wanted, int *teams) {
  std::vector<int32_t> team(spot.size());
  *teams = dc__team_plan((int)spot.size(), spot.data(), wanted, team.data());
  std::string all;
  for (int32_t t : team) all += (char)(t < 10 ? '0' + t : 'a' + t - 10);
  return all;
}

std::vector<dc__spot> spots(int n, int per_l3, int per_node) {
  std::vector<dc__spot> all;
  for (int i = 0; i < n; i++) all.push_back({per_l3 ? i / per_l3 * per_l3 : -1, per_node ? i / per_node : -1});
  return all;
}

TEST(Plan, SmallGroupsHaveNone) {
  int teams;
  for (int n = 1; n <= 8; n++) {
    EXPECT_EQ(plan(spots(n, 2, 4), -1, &teams), std::string((size_t)n, '0'));
    EXPECT_EQ(teams, 1);
  }
  plan(spots(64, 8, 32), 0, &teams); // turned off
  EXPECT_EQ(teams, 1);
  plan(spots(6, 0, 0), 6, &teams); // all in one
  EXPECT_EQ(teams, 1);
}

TEST(Plan, ByCachesNodesAndOrder) {
  int teams;
  EXPECT_EQ(plan(spots(12, 6, 12), -1, &teams), "000000111111");
  EXPECT_EQ(teams, 2);
  EXPECT_EQ(plan(spots(12, 4, 12), -1, &teams), "000011112222");
  EXPECT_EQ(plan(spots(24, 12, 24), -1, &teams), "000000111111222222333333"); // a cache of 12 is two teams of 6
  EXPECT_EQ(plan(spots(12, 1, 6), -1, &teams), "000000111111");               // a cache each: by the nodes
  EXPECT_EQ(plan(spots(12, 1, 1), -1, &teams), "000000111111");               // a node each: in order
  EXPECT_EQ(plan(spots(17, 0, 0), -1, &teams), "00000011111122222");          // not bound
  EXPECT_EQ(plan(spots(9, 0, 0), -1, &teams), "000001111");
  std::vector<dc__spot> turns;
  for (int i = 0; i < 16; i++) turns.push_back({i % 2 * 8, i % 2});
  EXPECT_EQ(plan(turns, -1, &teams), "0101010101010101"); // ranks alternate between sockets
  turns[5].l3 = turns[5].node = -1;                       // one is not bound: nobody's place counts
  EXPECT_EQ(plan(turns, -1, &teams), "0000000011111111");
}

TEST(Plan, WithMoreRanksThanCoresOnlyWhereAsked) {
  int wanted = 1;
  unsetenv("DEEPC_TEAM");
  EXPECT_EQ(dc__team_wanted(false, &wanted), DC_OK);
  EXPECT_EQ(wanted, -1); // by what the ranks are bound to
  EXPECT_EQ(dc__team_wanted(true, &wanted), DC_OK);
  EXPECT_EQ(wanted, 0);
  setenv("DEEPC_TEAM", "4", 1);
  EXPECT_EQ(dc__team_wanted(true, &wanted), DC_OK);
  EXPECT_EQ(wanted, 4);
  unsetenv("DEEPC_TEAM");
}

TEST(Plan, Forced) {
  int teams;
  EXPECT_EQ(plan(spots(7, 2, 4), 3, &teams), "0001122");
  EXPECT_EQ(teams, 3);
  EXPECT_EQ(plan(spots(3, 0, 0), 2, &teams), "001");
  EXPECT_EQ(teams, 2);
}

TEST(Plan, NeverMoreTeamsThanTheArenaHasRoomFor) {
  for (int n = 1; n <= 256; n++) {
    for (int wanted : {-1, 0, 2, 3, 8, 100}) {
      for (int l3 : {0, 1, 2, 3, 7, 16}) {
        for (int node : {0, 1, 5, 64}) {
          int teams;
          std::vector<int32_t> team((size_t)n);
          const std::vector<dc__spot> s = spots(n, l3, node);
          teams = dc__team_plan(n, s.data(), wanted, team.data());
          ASSERT_GE(teams, 1);
          ASSERT_LE(teams, (n + 1) / 2) << n << " " << wanted << " " << l3 << " " << node;
          std::vector<int> members((size_t)teams);
          int next = 0;
          for (int r = 0; r < n; r++) {
            ASSERT_LE(team[(size_t)r], next); // numbered by their lowest ranks
            if (team[(size_t)r] == next) next++;
            members[(size_t)team[(size_t)r]]++;
          }
          ASSERT_EQ(next, teams);
          for (int m : members) ASSERT_TRUE(teams == 1 || wanted > 0 || m <= 8) << n;
        }
      }
    }
  }
}

// ---- memory --------------------------------------------------------------------------------------------------------
// A node that is there, one that may not be, and all of them: memory comes from somewhere.
TEST(Placement, HarmsNothing) {
  const int64_t bytes = 4 << 20;
  const int fd = memfd_create("test", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, bytes), 0);
  char *base = (char *)mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(base, MAP_FAILED);
  const int64_t quarter = bytes / 4;
  for (int node : {0, 1, 63, 64, -1}) dc__numa_prefer(base, quarter, node);
  dc__numa_prefer(base + quarter, quarter + 100, 0);
  dc__numa_interleave(base + 2 * quarter, quarter, 1);
  dc__numa_interleave(base + 3 * quarter, quarter, ~(uint64_t)0);
  memset(base, 1, (size_t)bytes);
  for (int64_t i = 0; i < bytes; i += 4096) ASSERT_EQ(base[i], 1);
  munmap(base, (size_t)bytes);
  close(fd);
}

} // namespace
