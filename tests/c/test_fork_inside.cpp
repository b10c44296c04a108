// test_fork_inside.cpp: each row of the registry of locks (ops/base/fork.c) by itself: it is there, a fork waits for
// the thread that holds its lock, and the child finds the lock free. Linked with the objects, not the library.
// That each lock has a row is in tests/python/test_c_layers.py; that all together suffice in test_fork.cpp.
#include <gtest/gtest.h>

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>

#include "base/base.h"
#include "comm/comm.h"
#include "comm/flight.h"
#include "offload/offload.h"
#include "ranks.h"

namespace {

// What the linker must bring in, so that the files' constructors run.
const void *const kFiles[] = {(const void *)dc_comm_open, (const void *)dc_segment_create, (const void *)dc_flight_log,
                              (const void *)dc_file_open, (const void *)dc_parallel_for,   (const void *)dc_heap_take,
                              (const void *)dc_mem_alloc, (const void *)dc_counter_get};

TEST(ForkRows, AllAreThereWithLocksOfTheirOwn) {
  std::set<pthread_mutex_t *> locks;
  for (const void *f : kFiles) ASSERT_TRUE(f);
  for (int i = 0; i < DC__FORK_COUNT; i++) {
    const dc__fork_entry *row = dc__fork_row(i);
    ASSERT_TRUE(row && row->lock) << "row " << i << " of enum dc__fork_order is not registered";
    EXPECT_EQ(row->order, i);
    EXPECT_TRUE(locks.insert(row->lock).second) << "row " << i << " guards another row's lock";
  }
  EXPECT_EQ(dc__fork_row(-1), nullptr);
  EXPECT_EQ(dc__fork_row(DC__FORK_COUNT), nullptr);
}

class ForkRow : public ::testing::TestWithParam<int> {};

TEST_P(ForkRow, IsWaitedForAndFreeInTheChild) {
  const dc__fork_entry *row = dc__fork_row(GetParam());
  ASSERT_TRUE(row);
  std::atomic<bool> held{false}, forking{false}, half_done{false};
  std::thread holder([&] {
    pthread_mutex_lock(row->lock);
    half_done = true;
    held = true;
    while (!forking) std::this_thread::yield();
    ranks::nap_ms(10); // a fork that does not wait for the lock happens now
    half_done = false;
    pthread_mutex_unlock(row->lock);
  });
  while (!held) std::this_thread::yield();
  forking = true;
  pid_t child = fork();
  if (!child) _exit(half_done ? 2 : pthread_mutex_trylock(row->lock) ? 3 : 0);
  holder.join();
  ASSERT_GT(child, 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_NE(WEXITSTATUS(status), 2) << "the child has what the lock guards, half done";
  EXPECT_NE(WEXITSTATUS(status), 3) << "the child finds the lock taken";
  EXPECT_EQ(WEXITSTATUS(status), 0);
  ASSERT_EQ(pthread_mutex_trylock(row->lock), 0) << "the parent's lock was not given back";
  pthread_mutex_unlock(row->lock);
}

INSTANTIATE_TEST_SUITE_P(Each, ForkRow, ::testing::Range(0, static_cast<int>(DC__FORK_COUNT)));

} // namespace
