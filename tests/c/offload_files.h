// offload_files.h: what the tests of offload/ share: folders that go away, aligned memory, bytes that follow from a
// number.
#ifndef DEEPC_TESTS_OFFLOAD_FILES_H
#define DEEPC_TESTS_OFFLOAD_FILES_H

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "offload/offload.h"

namespace offload_files {

struct Folder {
  explicit Folder(bool in_memory = false) {
    const char *base = getenv("TMPDIR");
    path = std::string(in_memory && !access("/dev/shm", W_OK) ? "/dev/shm"
                       : base && *base                        ? base
                                                              : "/tmp") +
           "/offload-tests-XXXXXX"; // no name of deepc: tests beside count those in /dev/shm
    if (!mkdtemp(path.data())) abort();
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string path;
};

struct Memory {
  explicit Memory(int64_t bytes) {
    void *p = nullptr;
    if (posix_memalign(&p, DC_DISK_ALIGN, static_cast<size_t>(bytes))) abort();
    at = static_cast<char *>(p);
    memset(at, 0, static_cast<size_t>(bytes));
  }
  ~Memory() { free(at); }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  char *at;
};

struct Config : dc_file_config {
  Config(const std::string &name, int how) : dc_file_config{}, text(name) {
    struct_size = sizeof(dc_file_config);
    path = text.c_str();
    flags = how;
    depth = 8;
    threads = 2;
    block_bytes = 8192;
  }
  std::string text;
};

inline void pattern(char *at, int64_t bytes, int seed) {
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761u + 12345u;
  for (int64_t i = 0; i < bytes; i++) {
    state = state * 1664525u + 1013904223u;
    at[i] = static_cast<char>(state >> 24);
  }
}

} // namespace offload_files

#endif
