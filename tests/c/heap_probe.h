// What tests of the heap and of leases look at.
#ifndef DEEPC_TESTS_HEAP_PROBE_H
#define DEEPC_TESTS_HEAP_PROBE_H

#include <gtest/gtest.h>
#include <sys/resource.h>

extern "C" {
#include "base/base.h"
}

constexpr size_t kMiB = size_t{1} << 20;

inline struct dc_heap_stats stats() {
  struct dc_heap_stats s{};
  EXPECT_EQ(dc_heap_stats(&s), DC_OK) << dc_last_error();
  return s;
}

// Minor page faults of this process.
inline long faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

#endif
