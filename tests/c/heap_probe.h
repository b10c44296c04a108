// What tests of the heap and of leases look at.
#ifndef DEEPC_TESTS_HEAP_PROBE_H
#define DEEPC_TESTS_HEAP_PROBE_H

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

extern "C" {
#include "base/base.h"
}

constexpr size_t kMiB = size_t{1} << 20;

inline struct dc_heap_stats stats() {
  struct dc_heap_stats s{};
  s.struct_size = sizeof s;
  EXPECT_EQ(dc_heap_stats(&s), DC_OK) << dc_last_error();
  return s;
}

// The flags of the mapping that p lies in (proc(5), smaps: VmFlags), between spaces; "" where the kernel tells none.
inline std::string mapping_flags(const void *p) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool here = false;
  while (std::getline(smaps, line)) {
    unsigned long long begin = 0, end = 0;
    if (sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2 && end > begin)
      here = reinterpret_cast<uintptr_t>(p) >= begin && reinterpret_cast<uintptr_t>(p) < end;
    if (here && line.rfind("VmFlags:", 0) == 0) return line.substr(8) + " ";
  }
  return "";
}

// How many of the pages hold memory of this process.
inline size_t resident_pages(void *at, size_t bytes) {
  std::vector<unsigned char> pages(bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  EXPECT_EQ(mincore(at, bytes, pages.data()), 0);
  size_t n = 0;
  for (unsigned char c : pages) n += c & 1;
  return n;
}

// Minor page faults of this process.
inline long faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

#endif
