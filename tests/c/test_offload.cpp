// test_offload.cpp: files of tensors (offload/): bytes at offsets on both rings, extents with generations and
// checksums, what a killed process leaves, forks, messages.
#include <gtest/gtest.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "offload/offload.h"
#include "offload_files.h"

namespace {

using offload_files::Config;
using offload_files::Folder;
using offload_files::Memory;
using offload_files::pattern;

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true; // stops a forked child whose new thread gets the address of one of the parent's
#else
constexpr bool kThreadSanitizer = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true; // up to GCC 13 a fork leaves its allocator's locks to threads the child lacks
#else
constexpr bool kAddressSanitizer = false;
#endif

// Waits until all other threads of the process sleep: none runs, so none holds a lock of the sanitizer's, which a
// thread takes as it starts. False after a minute.
bool OthersSleep() {
  const std::string self = std::to_string(gettid());
  for (int tries = 0; tries < 60000; tries++, usleep(1000)) {
    bool asleep = true;
    for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
      if (task.path().filename() == self) continue;
      std::ifstream stat(task.path() / "stat");
      std::string line;
      std::getline(stat, line); // "tid (name) state ..."; nothing of a thread that has ended since
      const size_t name_ends = line.rfind(") ");
      if (name_ends != std::string::npos && line[name_ends + 2] != 'S') asleep = false;
    }
    if (asleep) return true;
  }
  return false;
}

bool full() {
  const char *text = getenv("DEEPC_TEST_FULL");
  return text && !strcmp(text, "1");
}

std::string last() { return dc_last_error(); }
#define EXPECT_SAYS(word) EXPECT_NE(last().find(word), std::string::npos) << last()

dc_file_info info_of(dc_file *f) {
  dc_file_info info = {};
  info.struct_size = sizeof info;
  EXPECT_EQ(dc_file_get_info(f, &info), DC_OK) << last();
  return info;
}

// ---- bytes at offsets, on every ring, past the page cache and through it --------------------------------------------
struct Way {
  int ring, flags;
};
class File : public ::testing::TestWithParam<Way> {
protected:
  void SetUp() override {
    if (GetParam().ring != DC_RING_URING) return;
    dc_disk_info info = {};
    info.struct_size = sizeof info;
    ASSERT_EQ(dc_disk_check(folder_.path.c_str(), 0, 0, &info), DC_OK) << last();
    if (!info.uring) GTEST_SKIP() << info.why_not_uring;
  }
  dc_file *Open(int flags, int depth = 4, int64_t block = 8192) {
    Config k(folder_.path + "/x", flags | GetParam().flags);
    k.ring = GetParam().ring, k.depth = depth, k.block_bytes = block, k.threads = 3;
    dc_file *f = nullptr;
    EXPECT_EQ(dc_file_open(&k, &f), DC_OK) << last();
    return f;
  }
  Folder folder_;
};

TEST_P(File, KeepsEveryByteOfEverySizeAndAlignment) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE);
  ASSERT_TRUE(f);
  const int64_t size = 300000;
  std::vector<char> shadow(size, 0);
  Memory memory(size + 8192);
  std::mt19937 random(3);
  dc_piece all = {memory.at, size, 0};
  memset(memory.at, 0, size);
  ASSERT_EQ(dc_file_write(f, &all, 1), DC_OK) << last();
  for (int round = 0; round < 60; round++) {
    const bool aligned = round % 3 == 0;
    int64_t offset = random() % size, bytes = random() % 50000, skew = random() % 4096;
    if (aligned) offset = offset / 4096 * 4096, bytes = bytes / 4096 * 4096, skew = 0;
    bytes = std::min(bytes, size - offset);
    pattern(memory.at + skew, bytes, round);
    memcpy(shadow.data() + offset, memory.at + skew, bytes);
    dc_piece piece = {memory.at + skew, bytes, offset};
    ASSERT_EQ(dc_file_write(f, &piece, 1), DC_OK) << last();
    memset(memory.at, 7, size + 8192);
    ASSERT_EQ(dc_file_read(f, &piece, 1), DC_OK) << last();
    ASSERT_EQ(0, memcmp(memory.at + skew, shadow.data() + offset, bytes)) << round;
    for (int i = 1; i <= 16; i++) ASSERT_EQ(memory.at[skew + bytes + i - 1], 7) << "written past the end of the memory";
  }
  dc_piece whole = {memory.at + 1, size, 0};
  ASSERT_EQ(dc_file_read(f, &whole, 1), DC_OK) << last();
  EXPECT_EQ(0, memcmp(memory.at + 1, shadow.data(), size));
  EXPECT_EQ(dc_file_sync(f), DC_OK) << last();
  EXPECT_EQ(info_of(f).size_bytes, size);
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

TEST_P(File, GathersAndScatters) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE);
  ASSERT_TRUE(f);
  Memory a(40960), b(40960);
  std::vector<dc_piece> write, read;
  std::mt19937 random(5);
  pattern(a.at, 40960, 1);
  for (int64_t at = 0, i = 0; at < 40960; i++) { // pieces in memory order lie in the file in another one
    const int64_t bytes = std::min<int64_t>(1 + random() % 9000, 40960 - at);
    write.push_back({a.at + at, bytes, 40960 - at - bytes});
    read.push_back({b.at + at, bytes, 40960 - at - bytes});
    at += bytes;
  }
  write.push_back({nullptr, 0, 0});
  ASSERT_EQ(dc_file_write(f, write.data(), static_cast<int64_t>(write.size())), DC_OK) << last();
  ASSERT_EQ(dc_file_read(f, read.data(), static_cast<int64_t>(read.size())), DC_OK) << last();
  EXPECT_EQ(0, memcmp(a.at, b.at, 40960));
  EXPECT_EQ(dc_file_read(f, nullptr, 0), DC_OK) << last();
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

// More requests than the ring has room for, from several threads, waited for in another order.
TEST_P(File, ManyRequestsOfManyThreads) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE, 3, 4096);
  ASSERT_TRUE(f);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([f, t] {
      const int64_t bytes = 20480;
      Memory out(6 * bytes), in(6 * bytes);
      pattern(out.at, 6 * bytes, t);
      for (const bool writes : {true, false}) {
        dc_io *io[6] = {};
        for (int i = 0; i < 6; i++) {
          dc_piece p = {(writes ? out.at : in.at) + i * bytes, bytes, (t * 6 + i) * bytes};
          ASSERT_EQ((writes ? dc_file_write_start : dc_file_read_start)(f, &p, 1, &io[i]), DC_OK) << dc_last_error();
        }
        for (int i = 6; i-- > 0;) {
          int done = 0;
          while (i % 2 && !done) ASSERT_EQ(dc_io_test(io[i], &done), DC_OK);
          EXPECT_EQ(dc_io_wait(io[i], 60000), DC_OK) << dc_last_error();
          EXPECT_EQ(dc_io_wait(io[i], 0), DC_OK);
          EXPECT_EQ(dc_io_free(io[i]), DC_OK);
        }
      }
      EXPECT_EQ(0, memcmp(in.at, out.at, 6 * bytes)) << t;
    });
  for (auto &t : threads) t.join();
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

// The kernel cancels what a thread has started when it ends: those blocks are sent again.
TEST_P(File, AThreadThatEndsTakesNoRequestWithIt) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE, 8, 65536);
  ASSERT_TRUE(f);
  const int64_t bytes = 8 << 20;
  Memory out(bytes), in(bytes);
  pattern(out.at, bytes, 6);
  for (const bool writes : {true, false}) {
    dc_io *io = nullptr;
    dc_piece p = {writes ? out.at : in.at, bytes, 0};
    std::thread([&] {
      ASSERT_EQ((writes ? dc_file_write_start : dc_file_read_start)(f, &p, 1, &io), DC_OK) << dc_last_error();
    }).join();
    EXPECT_EQ(dc_io_wait(io, 60000), DC_OK) << last();
    EXPECT_EQ(dc_io_free(io), DC_OK);
  }
  EXPECT_EQ(0, memcmp(in.at, out.at, bytes));
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

TEST_P(File, WhatIsAlignedIsNotCopied) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE);
  ASSERT_TRUE(f);
  Memory m(65536);
  pattern(m.at, 65536, 2);
  dc_piece aligned = {m.at, 61440, 4096}, skewed = {m.at + 64, 8192, 4096};
  const int64_t before = dc_counter_get(DC_COUNTER_disk_bytes_bounced);
  int registered = -1;
  EXPECT_EQ(dc_file_register(f, m.at, 65536, &registered), DC_OK) << last();
  if (GetParam().ring == DC_RING_THREADS) {
    EXPECT_EQ(registered, 0);
    EXPECT_NE(std::string(info_of(f).why).find("only io_uring"), std::string::npos) << info_of(f).why;
  } else if (registered) {
    EXPECT_EQ(info_of(f).registered_bytes, 65536);
  } else {
    EXPECT_NE(std::string(info_of(f).why).find("not registered"), std::string::npos) << info_of(f).why;
  }
  ASSERT_EQ(dc_file_write(f, &aligned, 1), DC_OK) << last();
  ASSERT_EQ(dc_file_read(f, &aligned, 1), DC_OK) << last();
  EXPECT_EQ(dc_counter_get(DC_COUNTER_disk_bytes_bounced), before);
  ASSERT_EQ(dc_file_read(f, &skewed, 1), DC_OK) << last();
  EXPECT_EQ(dc_counter_get(DC_COUNTER_disk_bytes_bounced) - before, info_of(f).direct ? 8192 : 0);
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

TEST_P(File, TheEndOfTheFileIsAnError) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE);
  ASSERT_TRUE(f);
  Memory m(65536);
  pattern(m.at, 65536, 1);
  dc_piece some = {m.at, 20000, 0}, more = {m.at, 65536, 0}, beyond = {m.at, 10, 1 << 20};
  ASSERT_EQ(dc_file_write(f, &some, 1), DC_OK) << last();
  EXPECT_EQ(dc_file_read(f, &more, 1), DC_E_IO);
  EXPECT_SAYS("the file ends");
  EXPECT_SAYS(folder_.path);
  EXPECT_EQ(dc_file_read(f, &beyond, 1), DC_E_IO);
  EXPECT_SAYS("offset 1048576");
  EXPECT_EQ(dc_file_read(f, &some, 1), DC_OK) << last() << ": a failed call left the file unusable";
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

TEST_P(File, TellsWhatIsWrong) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE), *other = nullptr;
  ASSERT_TRUE(f);
  char byte = 1;
  dc_piece p = {&byte, 1, 0};
  EXPECT_EQ(dc_file_write(f, &p, -1), DC_E_INVALID);
  for (dc_piece bad : {dc_piece{&byte, -1, 0}, dc_piece{&byte, 1, -1}, dc_piece{nullptr, 1, 0}})
    EXPECT_EQ(dc_file_write(f, &bad, 1), DC_E_INVALID) << last();
  dc_piece huge = {&byte, 10, INT64_MAX - 5};
  EXPECT_EQ(dc_file_read(f, &huge, 1), DC_E_OVERFLOW);
  EXPECT_EQ(dc_file_read(nullptr, &p, 1), DC_E_INVALID);
  dc_io *io = nullptr;
  ASSERT_EQ(dc_file_write_start(f, &p, 1, &io), DC_OK);
  EXPECT_EQ(dc_file_close(f), DC_E_STATE);
  EXPECT_SAYS("not freed");
  EXPECT_EQ(dc_io_free(io), DC_OK);
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
  EXPECT_EQ(dc_file_close(nullptr), DC_OK);

  f = Open(0);
  ASSERT_TRUE(f);
  EXPECT_EQ(dc_file_write(f, &p, 1), DC_E_INVALID);
  EXPECT_SAYS("DC_FILE_WRITE");
  EXPECT_EQ(dc_file_close(f), DC_OK);

  auto refuse = [&](void (*change)(dc_file_config &), int status, const char *word) {
    Config k(folder_.path + "/x", GetParam().flags);
    k.ring = GetParam().ring;
    change(k);
    EXPECT_EQ(dc_file_open(&k, &other), status) << word;
    EXPECT_SAYS(word);
  };
  refuse([](dc_file_config &k) { k.path = ""; }, DC_E_INVALID, "path is empty");
  refuse([](dc_file_config &k) { k.path = "/nonexistent/x"; }, DC_E_IO, "errno 2");
  refuse([](dc_file_config &k) { k.path = "/"; }, DC_E_INVALID, "neither a file nor a device");
  refuse([](dc_file_config &k) { k.depth = 5000; }, DC_E_INVALID, "depth is 5000; it must be from 1 to 4096");
  refuse([](dc_file_config &k) { k.threads = -1; }, DC_E_INVALID, "threads is -1");
  refuse([](dc_file_config &k) { k.block_bytes = 5000; }, DC_E_INVALID, "multiple of 4096");
  refuse([](dc_file_config &k) { k.ring = 9; }, DC_E_INVALID, "ring is 9");
  refuse([](dc_file_config &k) { k.flags |= 64; }, DC_E_INVALID, "flags");
  refuse([](dc_file_config &k) { k.flags |= DC_FILE_CREATE; }, DC_E_INVALID, "DC_FILE_WRITE");
  refuse([](dc_file_config &k) { k.struct_size = 8; }, DC_E_INVALID, "dc_file_config");
  refuse([](dc_file_config &k) { k.flags |= DC_FILE_WRITE, k.reserve_bytes = INT64_MAX; }, DC_E_NOSPC, "room for");
}

TEST_P(File, ADiskThatIsFullIsATypedError) {
  Config k("/dev/full", DC_FILE_WRITE | GetParam().flags);
  k.ring = GetParam().ring;
  dc_file *f = nullptr;
  if (dc_file_open(&k, &f)) GTEST_SKIP() << "no /dev/full: " << last();
  Memory m(8192);
  pattern(m.at, 8192, 1);
  dc_piece p = {m.at, 8192, 0};
  EXPECT_EQ(dc_file_write(f, &p, 1), DC_E_NOSPC);
  EXPECT_SAYS("write of 8192 bytes at offset 0 of /dev/full: No space left on device (errno 28); free space there");
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

// A child can't use what its parent opened, and does not disturb it.
TEST_P(File, AForkedChildOpensItsOwn) {
  dc_file *f = Open(DC_FILE_WRITE | DC_FILE_CREATE);
  ASSERT_TRUE(f);
  Memory m(1 << 18);
  pattern(m.at, 1 << 18, 4);
  dc_piece p = {m.at, 1 << 18, 0};
  dc_io *io = nullptr;
  ASSERT_EQ(dc_file_write_start(f, &p, 1, &io), DC_OK) << last();
  if (kAddressSanitizer && GetParam().ring == DC_RING_THREADS) ASSERT_TRUE(OthersSleep());
  const pid_t child = fork();
  if (child == 0) {
    int done = 0, bad = 0;
    bad |= dc_io_test(io, &done) != DC_E_STATE || !strstr(dc_last_error(), "before a fork");
    bad |= (dc_file_read(f, &p, 1) != DC_E_STATE) << 1;
    bad |= (dc_io_wait(io, 0) != DC_E_STATE) << 2;
    bad |= (dc_io_free(io) != DC_OK) << 3;
    bad |= (dc_file_close(f) != DC_OK) << 4;
    if (kThreadSanitizer && GetParam().ring == DC_RING_THREADS) _exit(bad);
    dc_file *own = Open(DC_FILE_WRITE | DC_FILE_CREATE);
    char byte = 1;
    dc_piece one = {&byte, 1, 1 << 20};
    bad |= (!own || dc_file_write(own, &one, 1) || dc_file_close(own)) << 5;
    _exit(bad);
  }
  EXPECT_EQ(dc_io_wait(io, 0), DC_OK) << last();
  EXPECT_EQ(dc_io_free(io), DC_OK);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "bits of what went wrong in the child";
  Memory in(1 << 18);
  dc_piece q = {in.at, 1 << 18, 0};
  EXPECT_EQ(dc_file_read(f, &q, 1), DC_OK) << last();
  EXPECT_EQ(0, memcmp(in.at, m.at, 1 << 18));
  EXPECT_EQ(dc_file_close(f), DC_OK) << last();
}

INSTANTIATE_TEST_SUITE_P(Ways, File,
                         ::testing::Values(Way{DC_RING_URING, 0}, Way{DC_RING_URING, DC_FILE_BUFFERED},
                                           Way{DC_RING_THREADS, 0}, Way{DC_RING_THREADS, DC_FILE_BUFFERED}));

// ---- extents
// ---------------------------------------------------------------------------------------------------------
class Extents : public ::testing::Test {
protected:
  dc_extents *Open(int copies = 2, int flags = DC_FILE_WRITE | DC_FILE_CREATE, std::vector<int64_t> capacity = {}) {
    if (capacity.empty()) capacity = capacity_;
    Config k(path_, flags);
    dc_extents *x = nullptr;
    status_ = dc_extents_open(&k, capacity.data(), static_cast<int64_t>(capacity.size()), copies, &x);
    return x;
  }
  // Extent i of generation g.
  void Write(dc_extents *x, int64_t i, int g, int64_t bytes) {
    std::vector<char> data(bytes);
    pattern(data.data(), bytes, g * 100 + static_cast<int>(i));
    ASSERT_EQ(dc_extent_write(x, i, data.data(), bytes), DC_OK) << last();
  }
  void ExpectHolds(dc_extents *x, int64_t i, int g, int64_t bytes) {
    std::vector<char> data(bytes), wanted(bytes);
    pattern(wanted.data(), bytes, g * 100 + static_cast<int>(i));
    ASSERT_EQ(dc_extent_read(x, i, data.data(), bytes), DC_OK) << last();
    EXPECT_EQ(data, wanted) << "extent " << i;
  }
  int64_t Generation(dc_extents *x) {
    dc_extents_info info = {};
    info.struct_size = sizeof info;
    EXPECT_EQ(dc_extents_get_info(x, &info), DC_OK) << last();
    return info.generation;
  }
  // Flips a bit of the `nth` place where `text` stands in the file.
  void Flip(int64_t offset) {
    const int fd = open(path_.c_str(), O_RDWR);
    char c = 0;
    ASSERT_EQ(pread(fd, &c, 1, offset), 1);
    c ^= 4;
    ASSERT_EQ(pwrite(fd, &c, 1, offset), 1);
    close(fd);
  }
  Folder folder_;
  std::string path_ = folder_.path + "/states";
  std::vector<int64_t> capacity_ = {10000, 0, 4096, 50001};
  int status_ = DC_OK;
};

TEST_F(Extents, WhatIsCommittedStays) {
  dc_extents *x = Open();
  ASSERT_TRUE(x) << last();
  char none;
  EXPECT_EQ(dc_extent_read(x, 0, &none, 1), DC_E_STATE);
  EXPECT_SAYS("never written");
  Write(x, 0, 1, 9000);
  Write(x, 1, 1, 0);
  Write(x, 3, 1, 50001);
  ASSERT_EQ(dc_extents_commit(x, 1), DC_OK) << last();
  Write(x, 0, 2, 10000); // never committed
  Write(x, 2, 2, 4096);
  ExpectHolds(x, 0, 2, 10000);
  ASSERT_EQ(dc_extents_close(x), DC_OK) << last();

  x = Open(0, DC_FILE_WRITE);
  ASSERT_TRUE(x) << last();
  EXPECT_EQ(Generation(x), 1);
  ExpectHolds(x, 0, 1, 9000);
  ExpectHolds(x, 1, 1, 0);
  ExpectHolds(x, 3, 1, 50001);
  EXPECT_EQ(dc_extent_read(x, 2, &none, 0), DC_E_STATE);
  // what the lost generation left in extent 2 is not taken for a part of the next one
  Write(x, 0, 3, 10);
  ASSERT_EQ(dc_extents_commit(x, 0), DC_OK) << last();
  ASSERT_EQ(dc_extents_close(x), DC_OK);
  Config k(path_, 0);
  ASSERT_EQ(dc_extents_open(&k, nullptr, 0, 0, &x), DC_OK) << last();
  EXPECT_EQ(Generation(x), 2);
  ExpectHolds(x, 0, 3, 10);
  ExpectHolds(x, 3, 1, 50001);
  EXPECT_EQ(dc_extent_read(x, 2, &none, 0), DC_E_STATE);
  EXPECT_EQ(dc_extent_write(x, 0, &none, 1), DC_E_INVALID);
  EXPECT_EQ(dc_extents_commit(x, 0), DC_E_INVALID);
  EXPECT_EQ(dc_extents_close(x), DC_OK);
}

TEST_F(Extents, RollsBack) {
  dc_extents *x = Open();
  ASSERT_TRUE(x) << last();
  Write(x, 0, 1, 100);
  ASSERT_EQ(dc_extents_commit(x, 0), DC_OK) << last();
  for (int g = 2; g < 5; g++) {
    Write(x, 0, g, 200 * g);
    Write(x, 3, g, 70);
    ASSERT_EQ(dc_extents_rollback(x), DC_OK) << last();
    ExpectHolds(x, 0, 1, 100);
    dc_extent_info info = {};
    info.struct_size = sizeof info;
    ASSERT_EQ(dc_extent_get_info(x, 3, &info), DC_OK);
    EXPECT_EQ(info.generation, 0);
    EXPECT_EQ(info.capacity, 50001);
  }
  EXPECT_EQ(dc_extents_close(x), DC_OK);
}

TEST_F(Extents, DamageIsNamed) {
  dc_extents *x = Open();
  ASSERT_TRUE(x) << last();
  for (int64_t i = 0; i < 4; i++) Write(x, i, 1, capacity_[i]);
  ASSERT_EQ(dc_extents_commit(x, 0), DC_OK) << last();
  ASSERT_EQ(dc_extents_close(x), DC_OK);
  const int64_t first = 5 * 4096; // two super blocks, the directory, two tables
  std::vector<char> data(10000);
  struct {
    int64_t at;
    const char *word;
  } cases[] = {{first + 4096 + 17, "extent 0"},
               {first + 4096 + 9999, "checksum"},
               {first + 9, "header"},
               {first + 20, "header"}};
  for (auto &c : cases) {
    Flip(c.at);
    ASSERT_TRUE((x = Open())) << last();
    EXPECT_EQ(dc_extent_read(x, 0, data.data(), 10000), DC_E_CORRUPT);
    EXPECT_SAYS(c.word);
    EXPECT_SAYS(path_);
    ExpectHolds(x, 3, 1, 50001);
    ASSERT_EQ(dc_extents_close(x), DC_OK);
    Flip(c.at);
  }
  for (int64_t at : {int64_t{2 * 4096 + 3}, int64_t{4 * 4096 + 8}}) { // the directory, the table of generation 1
    Flip(at);
    EXPECT_FALSE(Open());
    EXPECT_EQ(status_, DC_E_CORRUPT) << last();
    Flip(at);
  }
  ASSERT_TRUE((x = Open())) << last();
  for (int64_t i = 0; i < 4; i++) ExpectHolds(x, i, 1, capacity_[i]);
  ASSERT_EQ(dc_extents_close(x), DC_OK);
}

// A write that the device lost: the value of an older generation is there, whole.
TEST_F(Extents, AStaleExtentIsNamed) {
  dc_extents *x = Open(1);
  ASSERT_TRUE(x) << last();
  Write(x, 2, 1, 4096);
  ASSERT_EQ(dc_extents_commit(x, 0), DC_OK);
  ASSERT_EQ(dc_extents_close(x), DC_OK);
  std::vector<char> older(2 * 4096);
  const int64_t at = 5 * 4096 + (4096 + 3 * 4096) + 4096; // behind extents 0 and 1, one copy each
  int fd = open(path_.c_str(), O_RDWR);
  ASSERT_EQ(pread(fd, older.data(), older.size(), at), static_cast<ssize_t>(older.size()));
  ASSERT_TRUE((x = Open(1))) << last();
  Write(x, 2, 2, 4096);
  ASSERT_EQ(dc_extents_commit(x, 0), DC_OK);
  ASSERT_EQ(pwrite(fd, older.data(), older.size(), at), static_cast<ssize_t>(older.size()));
  close(fd);
  EXPECT_EQ(dc_extent_read(x, 2, older.data(), 4096), DC_E_CORRUPT);
  EXPECT_SAYS("extent 2");
  EXPECT_SAYS("stale: generation 1 is there, 2 was written last");
  Write(x, 2, 3, 4096);
  ExpectHolds(x, 2, 3, 4096);
  ASSERT_EQ(dc_extents_close(x), DC_OK);
}

TEST_F(Extents, TellsWhatIsWrong) {
  dc_extents *x = Open();
  ASSERT_TRUE(x) << last();
  EXPECT_FALSE(Open());
  EXPECT_EQ(status_, DC_E_STATE);
  EXPECT_SAYS("open for writing already");
  std::vector<char> data(60000);
  EXPECT_EQ(dc_extent_write(x, 0, data.data(), 10001), DC_E_SHAPE);
  EXPECT_SAYS("room for 10000 bytes, 10001");
  EXPECT_EQ(dc_extent_write(x, 4, data.data(), 1), DC_E_INVALID);
  EXPECT_EQ(dc_extent_write(x, -1, data.data(), 1), DC_E_INVALID);
  EXPECT_EQ(dc_extent_write(x, 0, nullptr, 1), DC_E_INVALID);
  Write(x, 0, 1, 5);
  EXPECT_EQ(dc_extent_read(x, 0, data.data(), 6), DC_E_SHAPE);
  EXPECT_SAYS("holds 5 bytes, 6 are asked for");
  dc_io *io = nullptr;
  ASSERT_EQ(dc_extent_write_start(x, 3, data.data(), 50001, &io), DC_OK) << last();
  int done = 0;
  while (!done) ASSERT_EQ(dc_io_test(io, &done), DC_OK);
  EXPECT_EQ(dc_extents_close(x), DC_E_STATE);
  EXPECT_EQ(dc_io_free(io), DC_OK);
  ASSERT_EQ(dc_extents_close(x), DC_OK);
  EXPECT_FALSE(Open(1));
  EXPECT_EQ(status_, DC_E_SHAPE);
  EXPECT_FALSE(Open(2, DC_FILE_WRITE, {10000, 0, 4096, 50002}));
  EXPECT_EQ(status_, DC_E_SHAPE);
  EXPECT_SAYS("extent 3");
  EXPECT_FALSE(Open(2, DC_FILE_WRITE, {10000}));
  EXPECT_EQ(status_, DC_E_SHAPE);
  EXPECT_FALSE(Open(3));
  EXPECT_EQ(status_, DC_E_INVALID);
  EXPECT_FALSE(Open(2, DC_FILE_WRITE, {-1}));
  EXPECT_EQ(status_, DC_E_INVALID);
  EXPECT_FALSE(Open(2, DC_FILE_WRITE, {INT64_MAX, INT64_MAX}));
  EXPECT_EQ(status_, DC_E_OVERFLOW);
  path_ = folder_.path + "/text";
  FILE *text = fopen(path_.c_str(), "w");
  fputs("not extents", text);
  fclose(text);
  EXPECT_FALSE(Open());
  EXPECT_EQ(status_, DC_E_CORRUPT);
  EXPECT_SAYS("DC_FILE_TRUNCATE");
  EXPECT_TRUE((x = Open(2, DC_FILE_WRITE | DC_FILE_TRUNCATE))) << last();
  EXPECT_EQ(dc_extents_close(x), DC_OK);
  int64_t bytes = 0;
  EXPECT_EQ(dc_extents_bytes(capacity_.data(), 4, 2, &bytes), DC_OK);
  struct stat st;
  ASSERT_EQ(stat(path_.c_str(), &st), 0);
  EXPECT_EQ(st.st_size, bytes);
}

// A process that is killed at any moment of writing generations leaves one of them whole, never a mixture: each extent
// of generation g holds g's bytes, and the generation is the last that the process reported, or the next.
TEST_F(Extents, KilledAtAnyMomentAWholeGenerationStays) {
  const int kills = full() ? 1000 : 20, extents = 6;
  const int64_t bytes = 30000;
  capacity_.assign(extents, bytes);
  std::mt19937 random(11);
  int64_t least = 0;
  int moved = 0;
  for (int kill_ = 0; kill_ < kills; kill_++) {
    int pipe_[2];
    ASSERT_EQ(pipe(pipe_), 0);
    const pid_t child = fork();
    if (child == 0) {
      dc_extents *x = Open();
      if (!x) {
        fprintf(stderr, "%s\n", dc_last_error());
        _exit(3);
      }
      std::vector<char> data(extents * bytes);
      for (int64_t g = Generation(x) + 1;; g++) {
        dc_io *io[extents];
        for (int i = 0; i < extents; i++) {
          char *at = data.data() + i * bytes;
          pattern(at, bytes, static_cast<int>(g) * 100 + i);
          if (dc_extent_write_start(x, i, at, bytes, &io[i])) _exit(4);
        }
        for (dc_io *one : io)
          if (dc_io_wait(one, 0) || dc_io_free(one)) _exit(5);
        if (dc_extents_commit(x, 0)) _exit(6);
        if (write(pipe_[1], &g, sizeof g) != sizeof g) _exit(7);
      }
    }
    close(pipe_[1]);
    // not before it writes, then anywhere within a few generations
    int64_t said = least, g = 0;
    if (random() % 4 && read(pipe_[0], &g, sizeof g) == sizeof g) said = g;
    usleep(random() % 4000);
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << status;
    while (read(pipe_[0], &g, sizeof g) == sizeof g) said = g;
    close(pipe_[0]);
    dc_extents *x = Open();
    for (int tries = 0; !x && status_ == DC_E_STATE && tries < 30; tries++) x = Open(); // a busy machine takes longer
    ASSERT_TRUE(x) << last();
    const int64_t now = Generation(x);
    EXPECT_TRUE(now == said || now == said + 1) << now << " after " << said;
    for (int i = 0; i < extents && now; i++) ExpectHolds(x, i, static_cast<int>(now), bytes);
    moved += now > least;
    least = now;
    ASSERT_EQ(dc_extents_close(x), DC_OK) << last();
    ASSERT_FALSE(HasFailure()) << "kill " << kill_;
  }
  EXPECT_GT(moved, 0) << "no generation was ever committed";
}

// ---- before a run
// ----------------------------------------------------------------------------------------------------
TEST(DiskCheck, SaysWhatThereIsAndWhatIsMissing) {
  Folder folder;
  dc_disk_info info = {};
  info.struct_size = sizeof info;
  ASSERT_EQ(dc_disk_check(folder.path.c_str(), 4096, 0, &info), DC_OK) << last();
  EXPECT_GT(info.free_bytes, 0);
  EXPECT_GT(strlen(info.file_system), 0u);
  EXPECT_EQ(info.direct == 1, info.why_not_direct[0] == 0) << info.why_not_direct;
  EXPECT_EQ(info.uring == 1, info.why_not_uring[0] == 0) << info.why_not_uring;
  DIR *left = opendir(folder.path.c_str());
  int entries = 0;
  while (readdir(left)) entries++;
  closedir(left);
  EXPECT_EQ(entries, 2) << "the check left a file behind";
  EXPECT_EQ(dc_disk_check(folder.path.c_str(), INT64_MAX, 0, &info), DC_E_NOSPC);
  EXPECT_SAYS("GB are needed");
  EXPECT_EQ(dc_disk_check((folder.path + "/none").c_str(), 0, 0, &info), DC_E_IO);
  EXPECT_SAYS("make the folder first");
  EXPECT_EQ(dc_disk_check("/proc/self/status", 0, 0, &info), DC_E_IO);
  EXPECT_EQ(dc_disk_check("/proc/self", 0, 0, &info), DC_E_IO);
  EXPECT_SAYS("no file can be made");
  EXPECT_EQ(dc_disk_check("", 0, 0, &info), DC_E_INVALID);
  rlimit was, low;
  getrlimit(RLIMIT_MEMLOCK, &was);
  low = {65536, was.rlim_max};
  if (was.rlim_cur > low.rlim_cur && setrlimit(RLIMIT_MEMLOCK, &low) == 0) {
    EXPECT_EQ(dc_disk_check(folder.path.c_str(), 0, 1 << 20, &info), DC_E_NOMEM);
    EXPECT_SAYS("ulimit -l");
    setrlimit(RLIMIT_MEMLOCK, &was);
  }
}

TEST(Ring, TheVariableChoosesIt) {
  Folder folder;
  Config k(folder.path + "/x", DC_FILE_WRITE | DC_FILE_CREATE);
  dc_file *f = nullptr;
  setenv("DEEPC_RING", "threads", 1);
  ASSERT_EQ(dc_file_open(&k, &f), DC_OK) << last();
  EXPECT_STREQ(info_of(f).ring, "threads");
  EXPECT_EQ(dc_file_close(f), DC_OK);
  setenv("DEEPC_RING", "both", 1);
  EXPECT_EQ(dc_file_open(&k, &f), DC_E_ENV);
  EXPECT_SAYS("auto, uring or threads");
  unsetenv("DEEPC_RING");
}

TEST(Blocks, SumsTellWhichBlockHasChanged) {
  std::vector<unsigned char> data(2 * 4096 + 100);
  pattern((char *)data.data(), (int64_t)data.size(), 7);
  uint32_t sums[3];
  int64_t bad = 5;
  ASSERT_EQ(dc_blocks_sum(data.data(), (int64_t)data.size(), 4096, sums), DC_OK) << last();
  EXPECT_EQ(sums[2], dc_crc32c(0, data.data() + 8192, 100));
  ASSERT_EQ(dc_blocks_check(data.data(), (int64_t)data.size(), 4096, sums, &bad), DC_OK) << last();
  EXPECT_EQ(bad, -1);
  for (int64_t block = 2; block >= 0; block--) {
    data[(size_t)(block * 4096 + 99)] ^= 1;
    ASSERT_EQ(dc_blocks_check(data.data(), (int64_t)data.size(), 4096, sums, &bad), DC_OK) << last();
    EXPECT_EQ(bad, block) << "the first of those that changed";
  }
  EXPECT_EQ(dc_blocks_sum(nullptr, 0, 4096, nullptr), DC_OK) << last();
  EXPECT_EQ(dc_blocks_sum(data.data(), 1, 0, sums), DC_E_INVALID);
  EXPECT_EQ(dc_blocks_sum(nullptr, 1, 1, sums), DC_E_INVALID);
  EXPECT_EQ(dc_blocks_check(data.data(), 1, 1, sums, nullptr), DC_E_INVALID);
}

} // namespace
