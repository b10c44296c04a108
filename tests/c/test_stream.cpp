// test_stream.cpp: arrays on disk that are worked on cell by cell: the values are those of the same work in memory,
// what is read is what was written last or an error that says so, and the file has no name.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "offload/offload.h"
#include "offload_files.h"

namespace {

using offload_files::Config;
using offload_files::Folder;
using offload_files::Memory;

const dc_stream_array kArrays[3] = {{"master", 4}, {"exp_avg", 8}, {"low", 2}};
const int64_t kSize[3] = {4, 8, 2};

struct Shape : dc_stream_config {
  explicit Shape(int64_t n, int64_t cell, int nslots = 4) : dc_stream_config{} {
    struct_size = sizeof(dc_stream_config);
    arrays = kArrays;
    narrays = 3;
    elems = n;
    cell_elems = cell;
    slots = nslots;
  }
};

struct Stream {
  Stream(const std::string &where, const Shape &shape, int flags = DC_FILE_WRITE | DC_FILE_NAMELESS) {
    Config k(where, flags);
    if (dc_stream_open(&k, &shape, &s)) ADD_FAILURE() << dc_last_error();
  }
  ~Stream() { EXPECT_EQ(dc_stream_close(s), DC_OK) << dc_last_error(); }
  dc_stream *s = nullptr;
};

dc_stream_cell cell_of() {
  dc_stream_cell c = {};
  c.struct_size = sizeof c;
  return c;
}

// What the tests do to an element: every byte depends on the one before, the array and the round.
void work(char *at, int64_t bytes, int array, int round) {
  for (int64_t i = 0; i < bytes; i++) at[i] = static_cast<char>(at[i] * 3 + array + round + i % 7);
}

// A round over all cells, there and in `model`.
int walk(dc_stream *s, int round, uint32_t reads = 7, uint32_t writes = 7, int64_t first = 0, int64_t last = -1) {
  dc_stream_info info = {};
  info.struct_size = sizeof info;
  if (const int rc = dc_stream_get_info(s, &info)) return rc;
  if (const int rc = dc_stream_begin(s, first, last < 0 ? info.cells : last, reads)) return rc;
  int rc = 0;
  for (int64_t i = first; i < (last < 0 ? info.cells : last) && !rc; i++) {
    dc_stream_cell c = cell_of();
    rc = dc_stream_next(s, &c);
    if (rc) break;
    EXPECT_EQ(c.cell, i);
    EXPECT_EQ(c.begin, i * info.cell_elems);
    for (int k = 0; k < 3; k++) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(c.data[k]) % DC_DISK_ALIGN, 0u);
      if (writes >> k & 1) work(static_cast<char *>(c.data[k]), c.elems * kSize[k], k, round);
    }
    rc = dc_stream_done(s, writes);
  }
  const int ended = dc_stream_end(s);
  return rc ? rc : ended;
}

struct Model {
  Model(int64_t n, int64_t cell) : n(n), cell(cell) {
    for (int k = 0; k < 3; k++) value[k].assign(static_cast<size_t>(n * kSize[k]), 0);
  }
  void Walk(int round, uint32_t writes = 7) {
    for (int64_t at = 0; at < n; at += cell)
      for (int k = 0; k < 3; k++)
        if (writes >> k & 1) work(value[k].data() + at * kSize[k], std::min(cell, n - at) * kSize[k], k, round);
  }
  void Expect(dc_stream *s) const {
    for (int k = 0; k < 3; k++) {
      std::vector<char> found(value[k].size(), 1);
      ASSERT_EQ(dc_stream_read(s, k, 0, n, found.data()), DC_OK) << dc_last_error();
      EXPECT_EQ(found, value[k]) << "array " << k;
    }
  }
  int64_t n, cell;
  std::vector<char> value[3];
};

class Sizes : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int>> {};

TEST_P(Sizes, AWalkIsTheSameWorkInMemory) {
  const auto [n, cell, slots] = GetParam();
  Folder folder;
  Stream t(folder.path, Shape(n, cell, slots));
  ASSERT_TRUE(t.s);
  Model model(n, std::min(n, cell));
  model.Expect(t.s); // zeros, before anything was written
  for (int round = 0; round < 3; round++) {
    ASSERT_EQ(walk(t.s, round), DC_OK) << dc_last_error();
    model.Walk(round);
    model.Expect(t.s);
  }
  ASSERT_EQ(walk(t.s, 9, 1 << 1, 1 << 1), DC_OK) << dc_last_error(); // one array alone
  model.Walk(9, 1 << 1);
  model.Expect(t.s);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path)) << "the file has a name";
}
INSTANTIATE_TEST_SUITE_P(Stream, Sizes,
                         ::testing::Values(std::make_tuple(1, 1, 2), std::make_tuple(1, 100, 4),
                                           std::make_tuple(5000, 1024, 2), std::make_tuple(5000, 1024, 3),
                                           std::make_tuple(10000, 1000, 4), std::make_tuple(10240, 1024, 16),
                                           std::make_tuple(200, 1, 8), std::make_tuple(100001, 4096, 4)));

TEST(Stream, WindowsOfAnyPlaceAndSize) {
  Folder folder;
  const int64_t n = 5000, cell = 600;
  Stream t(folder.path, Shape(n, cell, 2));
  Model model(n, cell);
  ASSERT_EQ(walk(t.s, 1), DC_OK) << dc_last_error();
  model.Walk(1);
  uint32_t state = 7;
  for (int i = 0; i < 300; i++) {
    state = state * 1664525u + 1013904223u;
    const int k = static_cast<int>(state >> 28) % 3;
    const int64_t begin = (state >> 4) % n, m = std::min<int64_t>(n - begin, 1 + (state >> 16) % 1500);
    std::vector<char> data(static_cast<size_t>(m * kSize[k]));
    char *wanted = model.value[k].data() + begin * kSize[k];
    if (state & 8) {
      offload_files::pattern(data.data(), m * kSize[k], i);
      ASSERT_EQ(dc_stream_write(t.s, k, begin, m, data.data()), DC_OK) << dc_last_error();
      memcpy(wanted, data.data(), data.size());
    } else {
      ASSERT_EQ(dc_stream_read(t.s, k, begin, m, data.data()), DC_OK) << dc_last_error();
      ASSERT_EQ(memcmp(data.data(), wanted, data.size()), 0) << i;
    }
    if (i % 60 == 59) {
      ASSERT_EQ(walk(t.s, i), DC_OK) << dc_last_error();
      model.Walk(i);
    }
  }
  ASSERT_EQ(dc_stream_flush(t.s), DC_OK) << dc_last_error();
  dc_stream_info info = {};
  info.struct_size = sizeof info;
  ASSERT_EQ(dc_stream_get_info(t.s, &info), DC_OK);
  EXPECT_EQ(info.unsaved, 0);
  model.Expect(t.s);
}

// A cell of which the walk's caller did nothing, or that was given and not done, keeps its value.
TEST(Stream, WhatIsNotDoneKeepsItsValue) {
  Folder folder;
  const int64_t n = 4000, cell = 1000;
  Stream t(folder.path, Shape(n, cell));
  Model model(n, cell);
  ASSERT_EQ(walk(t.s, 1), DC_OK);
  model.Walk(1);
  dc_stream_cell c = cell_of();
  ASSERT_EQ(dc_stream_begin(t.s, 1, 3, 7), DC_OK);
  ASSERT_EQ(dc_stream_next(t.s, &c), DC_OK);
  EXPECT_EQ(c.cell, 1);
  memset(c.data[0], 5, 100);
  ASSERT_EQ(dc_stream_done(t.s, 0), DC_OK);
  ASSERT_EQ(dc_stream_next(t.s, &c), DC_OK);
  memset(c.data[1], 5, 100);
  ASSERT_EQ(dc_stream_end(t.s), DC_OK) << dc_last_error();
  model.Expect(t.s);
}

TEST(Stream, WrongOrderAndWrongValuesAreErrors) {
  Folder folder;
  Stream t(folder.path, Shape(100, 10));
  dc_stream_cell c = cell_of();
  char data[800];
  EXPECT_EQ(dc_stream_next(t.s, &c), DC_E_STATE);
  EXPECT_EQ(dc_stream_done(t.s, 0), DC_E_STATE);
  EXPECT_EQ(dc_stream_end(t.s), DC_OK);
  EXPECT_EQ(dc_stream_begin(t.s, 0, 11, 7), DC_E_INVALID);
  EXPECT_EQ(dc_stream_begin(t.s, 2, 1, 7), DC_E_INVALID);
  EXPECT_EQ(dc_stream_begin(t.s, 0, 1, 8), DC_E_INVALID);
  ASSERT_EQ(dc_stream_begin(t.s, 9, 10, 7), DC_OK);
  EXPECT_EQ(dc_stream_begin(t.s, 0, 1, 7), DC_E_STATE);
  EXPECT_EQ(dc_stream_read(t.s, 0, 0, 1, data), DC_E_STATE);
  EXPECT_EQ(dc_stream_flush(t.s), DC_E_STATE);
  ASSERT_EQ(dc_stream_next(t.s, &c), DC_OK);
  EXPECT_EQ(dc_stream_next(t.s, &c), DC_E_STATE);
  EXPECT_EQ(dc_stream_done(t.s, 8), DC_E_INVALID);
  ASSERT_EQ(dc_stream_done(t.s, 7), DC_OK);
  EXPECT_EQ(dc_stream_next(t.s, &c), DC_E_STATE);
  EXPECT_NE(std::string(dc_last_error()).find("no more cells"), std::string::npos);
  ASSERT_EQ(dc_stream_end(t.s), DC_OK);
  EXPECT_EQ(dc_stream_read(t.s, 3, 0, 1, data), DC_E_INVALID);
  EXPECT_EQ(dc_stream_read(t.s, 0, 99, 2, data), DC_E_INVALID);
  EXPECT_EQ(dc_stream_read(t.s, 0, -1, 1, data), DC_E_INVALID);
  EXPECT_EQ(dc_stream_write(t.s, 0, 0, 1, nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_stream_read(t.s, 0, 100, 0, data), DC_OK);

  dc_stream *none = nullptr;
  Config k(folder.path, DC_FILE_WRITE | DC_FILE_NAMELESS);
  Shape bad(100, 10);
  const auto refuse = [&](int status) {
    EXPECT_EQ(dc_stream_open(&k, &bad, &none), status) << dc_last_error();
    bad = Shape(100, 10);
  };
  bad.narrays = 0, refuse(DC_E_INVALID);
  bad.narrays = 17, refuse(DC_E_INVALID);
  bad.elems = 0, refuse(DC_E_INVALID);
  bad.cell_elems = 0, refuse(DC_E_INVALID);
  bad.slots = 1, refuse(DC_E_INVALID);
  bad.elems = INT64_MAX, bad.cell_elems = INT64_MAX, refuse(DC_E_OVERFLOW);
  bad.elems = INT64_MAX, bad.cell_elems = 1 << 20, refuse(DC_E_OVERFLOW);
  bad.struct_size = 8, refuse(DC_E_INVALID);
  k.flags = DC_FILE_NAMELESS, refuse(DC_E_INVALID);
  k.flags = DC_FILE_WRITE | DC_FILE_NAMELESS | DC_FILE_CREATE, refuse(DC_E_INVALID);
  Config nowhere(folder.path + "/no", DC_FILE_WRITE | DC_FILE_NAMELESS);
  EXPECT_EQ(dc_stream_open(&nowhere, &bad, &none), DC_E_IO);
  EXPECT_NE(std::string(dc_last_error()).find(folder.path + "/no"), std::string::npos) << dc_last_error();
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(dc_stream_close(nullptr), DC_OK);
  EXPECT_EQ(dc_stream_begin(nullptr, 0, 0, 0), DC_E_INVALID);
}

TEST(Stream, ItsBytesAreKnownBefore) {
  Folder folder;
  const Shape shape(5000, 1024);
  int64_t disk = 0, memory = 0;
  ASSERT_EQ(dc_stream_bytes(&shape, &disk, &memory), DC_OK);
  EXPECT_EQ(disk, 5 * (4096 + 8192 + 4096));
  EXPECT_EQ(memory, 4 * (4096 + 8192 + 4096 + 3 * 4096));
  Stream t(folder.path, shape);
  dc_stream_info info = {};
  info.struct_size = sizeof info;
  ASSERT_EQ(dc_stream_get_info(t.s, &info), DC_OK);
  EXPECT_EQ(info.disk_bytes, disk);
  EXPECT_EQ(info.memory_bytes, memory);
  EXPECT_EQ(info.cells, 5);
  dc_file_info file = {};
  file.struct_size = sizeof file;
  ASSERT_EQ(dc_file_get_info(dc_stream_file(t.s), &file), DC_OK);
  EXPECT_GE(file.size_bytes, disk); // reserved
}

// Someone else changes the file (here: a file with a name).
class Damage : public ::testing::Test {
protected:
  void SetUp() override {
    path = folder.path + "/named";
    t = std::make_unique<Stream>(path, Shape(4000, 1000, 2), DC_FILE_WRITE | DC_FILE_CREATE | DC_FILE_BUFFERED);
    fd = open(path.c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
  }
  void TearDown() override { close(fd); }
  // The two cells that are in memory are 0 and 1.
  void Forget() {
    std::vector<char> data(4000);
    for (int64_t cell = 0; cell < 2; cell++)
      ASSERT_EQ(dc_stream_read(t->s, 0, cell * 1000, 1000, data.data()), DC_OK) << dc_last_error();
  }
  std::string Refused(int64_t begin) {
    std::vector<char> data(8000);
    Forget();
    EXPECT_EQ(dc_stream_read(t->s, 1, begin, 1000, data.data()), DC_E_CORRUPT) << dc_last_error();
    return dc_last_error();
  }
  static constexpr int64_t kCell = 4096 + 8192 + 4096, kSecond = 2 * kCell + 4096; // cell 2, array 1
  Folder folder;
  std::string path;
  std::unique_ptr<Stream> t;
  int fd = -1;
};

TEST_F(Damage, AFlippedBitIsSaid) {
  ASSERT_EQ(walk(t->s, 1), DC_OK);
  char byte;
  ASSERT_EQ(pread(fd, &byte, 1, kSecond + 777), 1);
  byte ^= 4;
  ASSERT_EQ(pwrite(fd, &byte, 1, kSecond + 777), 1);
  const std::string text = Refused(2000);
  EXPECT_NE(text.find("elements [2000, 3000) of 'exp_avg', generation 1, are torn or damaged"), std::string::npos)
      << text;
  EXPECT_NE(text.find(path), std::string::npos) << text;
  std::vector<char> data(8000);
  EXPECT_EQ(dc_stream_read(t->s, 0, 2000, 1000, data.data()), DC_OK) << "other arrays are whole: " << dc_last_error();
  EXPECT_EQ(dc_stream_read(t->s, 1, 1000, 1000, data.data()), DC_OK) << "other cells are whole: " << dc_last_error();
  EXPECT_EQ(walk(t->s, 2), DC_E_CORRUPT);
  EXPECT_EQ(dc_stream_write(t->s, 1, 2500, 10, data.data()), DC_E_CORRUPT) << "the rest of the cell would stay damaged";
  ASSERT_EQ(dc_stream_drop(t->s, 1, 2), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_stream_write(t->s, 1, 2500, 10, data.data()), DC_OK) << dc_last_error();
  std::vector<char> found(8000, 1);
  ASSERT_EQ(dc_stream_read(t->s, 1, 2000, 1000, found.data()), DC_OK) << dc_last_error();
  EXPECT_EQ(memcmp(found.data() + 4000, data.data(), 80), 0);
  EXPECT_EQ(std::count(found.begin(), found.begin() + 4000, 0), 4000);
  EXPECT_EQ(dc_stream_drop(t->s, 1, 4), DC_E_INVALID);
  ASSERT_EQ(dc_stream_write(t->s, 1, 2000, 1000, data.data()), DC_OK) << "written whole it is good again";
  EXPECT_EQ(walk(t->s, 2, 7, 7, 2), DC_OK) << dc_last_error();
}

TEST_F(Damage, AWriteThatWasLostIsStale) {
  ASSERT_EQ(walk(t->s, 1), DC_OK);
  std::vector<char> before(8192);
  ASSERT_EQ(pread(fd, before.data(), 8192, kSecond), 8192);
  ASSERT_EQ(walk(t->s, 2), DC_OK);
  ASSERT_EQ(pwrite(fd, before.data(), 8192, kSecond), 8192);
  const std::string text = Refused(2000);
  EXPECT_NE(text.find("of 'exp_avg' are stale: generation 1 is there, 2 was written last"), std::string::npos) << text;
}

TEST_F(Damage, AnotherCellInItsPlaceIsSaid) {
  ASSERT_EQ(walk(t->s, 1), DC_OK);
  std::vector<char> own(8000);
  offload_files::pattern(own.data(), 8000, 1);
  ASSERT_EQ(dc_stream_write(t->s, 1, 2000, 1000, own.data()), DC_OK);
  ASSERT_EQ(dc_stream_flush(t->s), DC_OK);
  std::vector<char> block(8192);
  ASSERT_EQ(pread(fd, block.data(), 8192, kSecond - kCell), 8192);
  ASSERT_EQ(pwrite(fd, block.data(), 8192, kSecond), 8192);
  Refused(2000);
}

TEST_F(Damage, AFileThatWasCutIsAnError) {
  ASSERT_EQ(walk(t->s, 1), DC_OK);
  ASSERT_EQ(ftruncate(fd, kSecond + 4096), 0);
  Forget();
  EXPECT_EQ(walk(t->s, 2), DC_E_IO);
  EXPECT_NE(std::string(dc_last_error()).find("the file ends"), std::string::npos) << dc_last_error();
}

TEST(Stream, AChildOfForkIsToldToOpenItsOwn) {
  Folder folder;
  Stream t(folder.path, Shape(4000, 1000));
  ASSERT_EQ(walk(t.s, 1), DC_OK);
  const pid_t child = fork();
  if (!child) {
    const bool refused = dc_stream_begin(t.s, 0, 1, 7) == DC_E_STATE && dc_stream_flush(t.s) == DC_E_STATE &&
                         dc_stream_close(t.s) == DC_OK;
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  Model model(4000, 1000);
  model.Walk(1);
  model.Expect(t.s);
}

} // namespace
