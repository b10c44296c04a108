// test_offload_inside.cpp: every call of the disk fails once in turn, through the table of functions (offload/ring.h):
// the failure is a typed error that names file, place and errno, what was asked for can be asked for again, and no byte
// is ever wrong.
#include <gtest/gtest.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "offload/offload.h"
#include "offload/ring.h"
#include "offload_files.h"

namespace {

int no_fallocate = 0; // an errno: the file system has no such call
int folders_synced = 0, interrupted = 0; // interrupted: calls of fsync that a signal ends
long page_bytes = 0; // of the page cache; 0: the machine's

} // namespace

// In place of the C library's, for the core that is linked into this program.
extern "C" int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (!no_fallocate) return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, bytes));
  errno = no_fallocate;
  return -1;
}
// ThreadSanitizer asks it while it begins, so it isn't watched, and has no variable that waits for its first value.
extern "C" __attribute__((no_sanitize("thread"))) long sysconf(int name) {
  static long (*real)(int);
  if (name == _SC_PAGESIZE) return page_bytes ? page_bytes : static_cast<long>(getauxval(AT_PAGESZ));
  if (!real) real = reinterpret_cast<long (*)(int)>(dlsym(RTLD_NEXT, "sysconf"));
  return real(name);
}
extern "C" int fsync(int fd) {
  struct stat st;
  if (interrupted > 0) {
    interrupted--, errno = EINTR;
    return -1;
  }
  if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) folders_synced++;
  return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace {

using offload_files::Config;
using offload_files::Folder;
using offload_files::Memory;
using offload_files::pattern;

enum { kShort = -1, kShortOdd = -2 }; // beside errnos

// The ring that fails: call `at` (from 0), or all from there on.
struct Plan {
  const dc__disk_ring_body *real = &dc__disk_ring_threads;
  int at = -1, fault = 0;
  bool always = false, late = false; // late: the failure comes from reap(), else from flush()
  bool sync_fails = false; // the next one, with EIO
  std::vector<dc__disk_ring_op> started;
  int calls = 0, hits = 0;
} plan;

struct FaultRing {
  dc__disk_ring ring;
  dc__disk_ring *real;
  dc__disk_ring_op *failed;
  std::map<dc__disk_ring_op *, int64_t> *cut; // what these blocks asked for
};

int take_fault() {
  const int call = plan.calls++;
  if (plan.at < 0 || (plan.always ? call < plan.at : call != plan.at)) return 0;
  plan.hits++;
  return plan.fault;
}

int fault_open(const dc__disk_ring_body *body, int depth, int threads, dc__disk_ring **out) {
  auto *r = new FaultRing{{body}, nullptr, nullptr, new std::map<dc__disk_ring_op *, int64_t>};
  const int rc = plan.real->open(plan.real, depth, threads, &r->real);
  if (rc) {
    delete r->cut;
    delete r;
    return rc;
  }
  *out = &r->ring;
  return 0;
}

FaultRing *of(dc__disk_ring *ring) { return reinterpret_cast<FaultRing *>(ring); }

void fault_start(dc__disk_ring *ring, dc__disk_ring_op *op) {
  FaultRing *r = of(ring);
  plan.started.push_back(*op);
  const int fault = plan.sync_fails && op->what == DC__DISK_SYNC ? EIO : take_fault();
  plan.sync_fails &= op->what != DC__DISK_SYNC;
  if (fault > 0 || op->what == DC__DISK_SYNC) { // nothing here loses its power: syncs take most of the time
    op->result = -std::max(fault, 0);
    op->next = r->failed;
    r->failed = op;
    return;
  }
  if (fault < 0 && op->what != DC__DISK_SYNC && op->bytes > 1) {
    (*r->cut)[op] = op->bytes;
    op->bytes = fault == kShort ? std::max<int64_t>(op->bytes / 8192 * 4096, op->bytes >= 8192 ? 4096 : 1)
                                : op->bytes / 2 + 1;
    if (op->bytes % 4096 && (*r->cut)[op] % 4096 == 0) { // past the page cache the kernel takes no such length: pretend
      const int64_t moved = op->bytes;
      op->bytes = (*r->cut)[op];
      r->cut->erase(op);
      op->result = moved;
      if (op->what == DC__DISK_READ) {
        op->result = pread(op->fd, op->data, static_cast<size_t>(op->bytes), op->offset) < 0 ? -errno : moved;
      } else {
        op->result = pwrite(op->fd, op->data, static_cast<size_t>(op->bytes), op->offset) < 0 ? -errno : moved;
      }
      op->next = r->failed;
      r->failed = op;
      return;
    }
  }
  r->real->body->start(r->real, op);
}

void fault_flush(dc__disk_ring *ring, dc__disk_ring_op **back) {
  FaultRing *r = of(ring);
  r->real->body->flush(r->real, back);
  if (plan.late) return;
  dc__disk_ring_op **last = back;
  while (*last) last = &(*last)->next;
  *last = r->failed;
  r->failed = nullptr;
}

void fault_reap(dc__disk_ring *ring, int64_t timeout_ns, dc__disk_ring_op **done) {
  FaultRing *r = of(ring);
  if (r->failed) {
    *done = r->failed;
    r->failed = nullptr;
    return;
  }
  r->real->body->reap(r->real, timeout_ns, done);
  for (dc__disk_ring_op *op = *done; op; op = op->next) {
    auto cut = r->cut->find(op);
    if (cut == r->cut->end()) continue;
    op->bytes = cut->second;
    r->cut->erase(cut);
  }
}

int fault_fix(dc__disk_ring *, const dc__fixed_range *, int) { return -ENOMEM; }

int fault_reserve(int fd, int64_t bytes) {
  const int fault = take_fault();
  return fault > 0 ? -fault : dc__disk_ring_reserve(fd, bytes);
}

void fault_close(dc__disk_ring *ring, bool forked) {
  FaultRing *r = of(ring);
  r->real->body->close(r->real, forked);
  delete r->cut;
  delete r;
}

const dc__disk_ring_body kFaulty = {"faulty",   fault_open, fault_start,   fault_flush,
                                    fault_reap, fault_fix,  fault_reserve, fault_close};

struct Case {
  const dc__disk_ring_body *real;
  bool late;
  int flags;
};

class Faults : public ::testing::TestWithParam<Case> {
protected:
  void SetUp() override {
    plan = Plan{};
    plan.real = GetParam().real;
    plan.late = GetParam().late;
    dc__disk_ring *probe = nullptr;
    const int error = -plan.real->open(plan.real, 1, 1, &probe);
    if (error) GTEST_SKIP() << dc__disk_ring_no_uring(error);
    plan.real->close(probe, false);
    dc__disk_ring_use(&kFaulty);
  }
  void TearDown() override { dc__disk_ring_use(nullptr); }

  // A step that must go well, at the second time if the fault met it.
  void Step(const std::function<int()> &step, const char *what) {
    const int rc = step();
    if (!rc) return;
    failures_++;
    const std::string text = dc_last_error();
    EXPECT_EQ(rc, plan.fault == ENOSPC ? DC_E_NOSPC : DC_E_IO) << what << ": " << text;
    EXPECT_NE(text.find(path_), std::string::npos) << what << " does not name the file: " << text;
    EXPECT_NE(text.find("(errno " + std::to_string(plan.fault) + ")"), std::string::npos) << what << ": " << text;
    ASSERT_EQ(step(), DC_OK) << what << " again: " << dc_last_error();
  }

  // Opens, writes two generations of three extents, reads them.
  void Scenario() {
    const int64_t capacity[3] = {20000, 4096, 100};
    Folder folder(true); // thousands of files
    path_ = folder.path + "/states";
    dc_extents *x = nullptr;
    Memory memory(3 * 24576);
    Step(
        [&] {
          Config k(path_, DC_FILE_WRITE | DC_FILE_CREATE | GetParam().flags);
          k.depth = 3;
          return dc_extents_open(&k, capacity, 3, 2, &x);
        },
        "open");
    ASSERT_TRUE(x);
    for (int g = 1; g <= 2; g++) {
      dc_io *io[3] = {};
      for (int i = 0; i < 3; i++) {
        char *at = memory.at + i * 24576 + (i == 0 ? 0 : 64 * i);
        pattern(at, capacity[i], g * 10 + i);
        ASSERT_EQ(dc_extent_write_start(x, i, at, capacity[i], &io[i]), DC_OK) << dc_last_error();
      }
      for (int i = 0; i < 3; i++) {
        char *at = memory.at + i * 24576 + (i == 0 ? 0 : 64 * i);
        bool first = true;
        Step(
            [&] {
              if (!first) return dc_extent_write(x, i, at, capacity[i]);
              first = false;
              const int rc = dc_io_wait(io[i], 60000);
              dc_io_free(io[i]);
              if (rc) {
                // nothing is committed over a write that failed
                const std::string text = dc_last_error();
                for (int k = i + 1; k < 3; k++) EXPECT_EQ(dc_io_wait(io[k], 60000), DC_OK) << dc_last_error();
                EXPECT_EQ(dc_extents_commit(x, 0), DC_E_STATE) << dc_last_error();
                return DC_FAIL(rc, "%s", text.c_str());
              }
              return rc;
            },
            "write");
      }
      Step(
          [&] {
            const int rc = dc_extents_commit(x, 1);
            if (rc != DC_E_STATE) return rc;
            for (int i = 0; i < 3; i++) { // a sync has failed
              char *at = memory.at + i * 24576 + (i == 0 ? 0 : 64 * i);
              EXPECT_EQ(dc_extent_write(x, i, at, capacity[i]), DC_OK) << dc_last_error();
            }
            return dc_extents_commit(x, 1);
          },
          "commit");
      if (HasFatalFailure()) return;
    }
    Expect(x, 2);
    ASSERT_EQ(dc_extents_close(x), DC_OK) << dc_last_error();
    x = nullptr;
    Step(
        [&] {
          Config k(path_, GetParam().flags);
          return dc_extents_open(&k, capacity, 3, 0, &x);
        },
        "open again");
    ASSERT_TRUE(x);
    Expect(x, 2);
    ASSERT_EQ(dc_extents_close(x), DC_OK) << dc_last_error();
  }
  void Expect(dc_extents *x, int g) {
    const int64_t capacity[3] = {20000, 4096, 100};
    for (int i = 0; i < 3; i++) {
      std::vector<char> wanted(capacity[i]), found(capacity[i]);
      pattern(wanted.data(), capacity[i], g * 10 + i);
      Step([&] { return dc_extent_read(x, i, found.data(), capacity[i]); }, "read");
      EXPECT_EQ(found, wanted) << "extent " << i;
    }
  }
  std::string path_;
  int failures_ = 0;
};

TEST_P(Faults, EveryCallFailsOnceInTurn) {
  Scenario(); // without a fault
  ASSERT_EQ(failures_, 0);
  const int calls = plan.calls;
  ASSERT_GT(calls, 20);
  for (const int fault :
       {EIO, ENOSPC, EAGAIN, EINTR, ECANCELED, static_cast<int>(kShort), static_cast<int>(kShortOdd)}) {
    int failed = 0;
    for (int at = 0; at < calls; at++) {
      plan.at = at, plan.fault = fault, plan.calls = plan.hits = 0;
      failures_ = 0;
      Scenario();
      ASSERT_EQ(plan.hits, 1) << "call " << at;
      const bool hard = fault == EIO || fault == ENOSPC;
      EXPECT_LE(failures_, hard) << "fault " << fault << " at call " << at;
      failed += failures_;
      ASSERT_FALSE(HasFailure()) << "fault " << fault << " at call " << at;
    }
    if (fault == EIO || fault == ENOSPC) { EXPECT_EQ(failed, calls) << "a failure was swallowed"; }
  }
}

// A commit fails at each of its calls in turn. Whoever opens the file then, after writes that are still let through,
// finds one generation or the other, whole; and it goes on by a second commit or a rollback.
TEST_P(Faults, AFailedCommitLeavesAWholeGeneration) {
  const int64_t capacity[3] = {20000, 4096, 100};
  bool refused = false, dropped = false, met = true;
  for (int at = 0; met; at++) {
    for (const bool back : {false, true}) {
      Folder folder(true);
      path_ = folder.path + "/states";
      plan.at = -1, plan.fault = EIO;
      dc_extents *x = nullptr;
      Config k(path_, DC_FILE_WRITE | DC_FILE_CREATE | GetParam().flags);
      ASSERT_EQ(dc_extents_open(&k, capacity, 3, 2, &x), DC_OK) << dc_last_error();
      const auto write = [&](int i, int seed) {
        std::vector<char> value(capacity[i]);
        pattern(value.data(), capacity[i], seed);
        return dc_extent_write(x, i, value.data(), capacity[i]);
      };
      for (int i = 0; i < 3; i++) ASSERT_EQ(write(i, 10 + i), DC_OK) << dc_last_error();
      ASSERT_EQ(dc_extents_commit(x, 1), DC_OK) << dc_last_error();
      for (int i = 0; i < 3; i++) ASSERT_EQ(write(i, 20 + i), DC_OK) << dc_last_error();
      plan.calls = plan.hits = 0, plan.at = at;
      const int rc = dc_extents_commit(x, 1);
      met = plan.hits;
      EXPECT_EQ(rc, met ? DC_E_IO : DC_OK) << dc_last_error();
      plan.at = -1;
      const auto found = [&] { // the generation that another one finds
        dc_extents *other = nullptr;
        Config reads(path_, GetParam().flags);
        EXPECT_EQ(dc_extents_open(&reads, capacity, 3, 2, &other), DC_OK) << dc_last_error();
        dc_extents_info info = {};
        info.struct_size = sizeof info;
        EXPECT_EQ(dc_extents_get_info(other, &info), DC_OK);
        for (int i = 0; i < 3; i++) {
          std::vector<char> wanted(capacity[i]), value(capacity[i]);
          pattern(wanted.data(), capacity[i], static_cast<int>(info.generation) * 10 + i);
          EXPECT_EQ(dc_extent_read(other, i, value.data(), capacity[i]), DC_OK) << dc_last_error();
          EXPECT_EQ(value, wanted) << "extent " << i << ", call " << at;
        }
        dc_extents_close(other);
        return info.generation;
      };
      if (met) {
        const int again = write(0, 99);
        EXPECT_TRUE(again == DC_OK || again == DC_E_STATE) << dc_last_error();
        refused |= again == DC_E_STATE;
        found();
        if (again == DC_OK) ASSERT_EQ(write(0, 20), DC_OK) << dc_last_error();
        if (back) {
          ASSERT_EQ(dc_extents_rollback(x), DC_OK) << dc_last_error();
          for (int i = 0; i < 3; i++) ASSERT_EQ(write(i, 30 + i), DC_OK) << dc_last_error();
          EXPECT_EQ(found(), 1);
        } else {
          int more = dc_extents_commit(x, 1);
          for (int i = 1; i < 3 && more == DC_E_STATE; i++) { // 0 was written again above
            dropped = true;
            ASSERT_NE(std::string(dc_last_error()).find("extent " + std::to_string(i)), std::string::npos)
                << dc_last_error();
            ASSERT_EQ(write(i, 20 + i), DC_OK) << dc_last_error();
            more = dc_extents_commit(x, 1);
          }
          ASSERT_EQ(more, DC_OK) << dc_last_error();
          ASSERT_EQ(write(0, 99), DC_OK) << dc_last_error();
          EXPECT_EQ(found(), 2);
        }
      }
      ASSERT_EQ(dc_extents_close(x), DC_OK) << dc_last_error();
      ASSERT_FALSE(HasFailure()) << "call " << at << (back ? ", then a rollback" : "");
    }
  }
  EXPECT_TRUE(refused);
  EXPECT_TRUE(dropped);
}

// An fdatasync that fails once: the kernel has forgotten what it could not write, and the next one succeeds. Nothing
// that it was to bring to disk is committed before it is written again; what an earlier one brought there is untouched.
TEST_P(Faults, WhatASyncHasDroppedIsNotCommitted) {
  const int64_t capacity[3] = {4096, 4096, 4096};
  std::vector<char> value(4096);
  Folder folder(true);
  path_ = folder.path + "/states";
  const auto make = [&](dc_extents **x) {
    Config k(path_, DC_FILE_WRITE | DC_FILE_CREATE | GetParam().flags);
    ASSERT_EQ(dc_extents_open(&k, capacity, 3, 2, x), DC_OK) << dc_last_error();
  };
  dc_extents *x = nullptr;
  const auto write = [&](int i, int seed) {
    pattern(value.data(), 4096, seed);
    ASSERT_EQ(dc_extent_write(x, i, value.data(), 4096), DC_OK) << dc_last_error();
  };
  const auto fail = [&] {
    plan.sync_fails = true;
    EXPECT_EQ(dc_extents_commit(x, 1), DC_E_IO) << dc_last_error();
    EXPECT_FALSE(plan.sync_fails);
  };
  make(&x);
  for (int i = 0; i < 3; i++) write(i, i);
  fail(); // of a new file
  for (int i = 0; i < 3; i++) {
    for (const int durable : {0, 1}) ASSERT_EQ(dc_extents_commit(x, durable), DC_E_STATE) << i;
    write(i, i);
  }
  ASSERT_EQ(dc_extents_commit(x, 1), DC_OK) << dc_last_error();
  write(0, 10);
  fail(); // 1 and 2 are there
  ASSERT_EQ(dc_extents_commit(x, 1), DC_E_STATE);
  ASSERT_EQ(dc_extents_rollback(x), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_extents_commit(x, 1), DC_OK) << dc_last_error();
  write(1, 11);
  ASSERT_EQ(dc_extents_commit(x, 0), DC_OK) << dc_last_error();
  write(2, 12);
  fail();
  ASSERT_EQ(dc_extents_rollback(x), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_extents_commit(x, 1), DC_E_STATE); // 1 was committed, but not durably
  write(1, 11);
  ASSERT_EQ(dc_extents_commit(x, 1), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_extents_close(x), DC_OK);
  make(&x);
  for (const int i : {0, 1, 2}) {
    std::vector<char> wanted(4096);
    pattern(wanted.data(), 4096, i == 1 ? 11 : i);
    ASSERT_EQ(dc_extent_read(x, i, value.data(), 4096), DC_OK) << dc_last_error();
    EXPECT_EQ(value, wanted) << i;
  }
  ASSERT_EQ(dc_extents_close(x), DC_OK);
}

// Whatever was committed before, and whoever made the file: its name is on disk when a durable commit is. Without a
// name there is nothing to bring there.
TEST(Extents, ADurableCommitHasItsNameOnDisk) {
  const int64_t capacity = 100;
  const char value[100] = {1};
  Folder folder;
  const auto commit = [&](dc_extents *x, int durable) {
    EXPECT_EQ(dc_extent_write(x, 0, value, capacity), DC_OK) << dc_last_error();
    EXPECT_EQ(dc_extents_commit(x, durable), DC_OK) << dc_last_error();
  };
  folders_synced = 0;
  for (int opens = 0; opens < 2; opens++) {
    dc_extents *x = nullptr;
    Config k(folder.path + "/states", DC_FILE_WRITE | DC_FILE_CREATE);
    ASSERT_EQ(dc_extents_open(&k, &capacity, 1, 2, &x), DC_OK) << dc_last_error();
    commit(x, 0);
    EXPECT_EQ(folders_synced, opens);
    interrupted = 2;
    for (int i = 0; i < 2; i++) commit(x, 1);
    EXPECT_EQ(interrupted, 0);
    EXPECT_EQ(folders_synced, opens + 1) << "once is enough";
    ASSERT_EQ(dc_extents_close(x), DC_OK) << dc_last_error();
  }
  dc_extents *x = nullptr;
  Config k(folder.path, DC_FILE_WRITE | DC_FILE_NAMELESS);
  ASSERT_EQ(dc_extents_open(&k, &capacity, 1, 2, &x), DC_OK) << dc_last_error();
  commit(x, 1);
  EXPECT_EQ(folders_synced, 2);
  ASSERT_EQ(dc_extents_close(x), DC_OK) << dc_last_error();
}

// Walks over a stream of two arrays. One that fails goes on where it failed; what it gives is what the same work in
// memory gives.
class StreamFaults : public Faults {
protected:
  static constexpr int64_t kElems = 9000, kCell = 2048;
  static constexpr int kRounds = 3;

  // From cell *at on; it says how far it came.
  static int Walk(dc_stream *s, int round, int64_t *at) {
    const int64_t cells = (kElems - 1) / kCell + 1;
    if (const int rc = dc_stream_begin(s, *at, cells, 3)) return rc;
    int rc = 0;
    while (*at < cells && !rc) {
      dc_stream_cell c = {};
      c.struct_size = sizeof c;
      if ((rc = dc_stream_next(s, &c))) break;
      auto *a = static_cast<uint32_t *>(c.data[0]), *b = static_cast<uint32_t *>(c.data[1]);
      for (int64_t i = 0; i < c.elems; i++) {
        a[i] = a[i] * 3 + static_cast<uint32_t>(c.begin + i) + static_cast<uint32_t>(round);
        b[i] += a[i];
      }
      ++*at;
      rc = dc_stream_done(s, 3);
    }
    const std::string text = rc ? dc_last_error() : "";
    const int ended = dc_stream_end(s);
    return rc ? DC_FAIL(rc, "%s", text.c_str()) : ended;
  }

  void Scenario() {
    Folder folder(true);
    path_ = folder.path;
    dc_stream *s = nullptr;
    Step(
        [&] {
          Config k(folder.path, DC_FILE_WRITE | DC_FILE_NAMELESS | GetParam().flags);
          const dc_stream_array arrays[2] = {{"first", 4}, {"second", 4}};
          dc_stream_config shape = {};
          shape.struct_size = sizeof shape;
          shape.arrays = arrays, shape.narrays = 2, shape.elems = kElems, shape.cell_elems = kCell, shape.slots = 3;
          return dc_stream_open(&k, &shape, &s);
        },
        "open");
    ASSERT_TRUE(s);
    for (int round = 1; round <= kRounds; round++) {
      int64_t at = 0;
      Step([&] { return Walk(s, round, &at); }, "walk");
      if (HasFatalFailure()) break;
    }
    std::vector<uint32_t> found(kElems);
    for (int k = 0; k < 2; k++) {
      Step([&] { return dc_stream_read(s, k, 0, kElems, found.data()); }, "read");
      for (int64_t i = 0; i < kElems && !HasFailure(); i++) {
        uint32_t a = 0, b = 0;
        for (int round = 1; round <= kRounds; round++) {
          a = a * 3 + static_cast<uint32_t>(i) + static_cast<uint32_t>(round);
          b += a;
        }
        ASSERT_EQ(found[i], k ? b : a) << "element " << i << " of array " << k;
      }
    }
    ASSERT_EQ(dc_stream_close(s), DC_OK) << dc_last_error();
  }
};

TEST_P(StreamFaults, AWalkGoesOnWhereItFailed) {
  Scenario();
  ASSERT_EQ(failures_, 0);
  ASSERT_GT(plan.calls, 20);
  for (const int fault :
       {EIO, ENOSPC, EAGAIN, EINTR, ECANCELED, static_cast<int>(kShort), static_cast<int>(kShortOdd)}) {
    int failed = 0, met = 0;
    // How many calls there are depends a little on which cells are still in memory when they are wanted again.
    for (int at = 0;; at++) {
      plan.at = at, plan.fault = fault, plan.calls = plan.hits = 0;
      failures_ = 0;
      Scenario();
      ASSERT_FALSE(HasFailure()) << "fault " << fault << " at call " << at;
      if (!plan.hits) break;
      met++;
      EXPECT_LE(failures_, fault == EIO || fault == ENOSPC) << "fault " << fault << " at call " << at;
      failed += failures_;
    }
    EXPECT_GT(met, 20);
    if (fault == EIO || fault == ENOSPC) { EXPECT_GT(failed, met / 2) << "failures were swallowed"; }
  }
}

// A disk that stays full: the cells that it did not take are in memory, whatever is asked for meanwhile.
TEST_P(StreamFaults, NothingIsLostWhileTheDiskRefuses) {
  Folder folder(true);
  dc_stream *s = nullptr;
  Config k(folder.path, DC_FILE_WRITE | DC_FILE_NAMELESS | GetParam().flags);
  const dc_stream_array arrays[2] = {{"first", 4}, {"second", 4}};
  dc_stream_config shape = {};
  shape.struct_size = sizeof shape;
  shape.arrays = arrays, shape.narrays = 2, shape.elems = kElems, shape.cell_elems = kCell, shape.slots = 3;
  ASSERT_EQ(dc_stream_open(&k, &shape, &s), DC_OK) << dc_last_error();
  int64_t at = 0;
  plan.at = plan.calls, plan.fault = ENOSPC, plan.always = true;
  for (int i = 0; i < 3; i++) EXPECT_EQ(Walk(s, 1, &at), DC_E_NOSPC) << dc_last_error();
  EXPECT_GT(at, 0);
  const int64_t done = at;
  EXPECT_LE(done, 3);
  dc_stream_info info = {};
  info.struct_size = sizeof info;
  ASSERT_EQ(dc_stream_get_info(s, &info), DC_OK);
  EXPECT_EQ(info.unsaved, done);
  std::vector<uint32_t> found(kElems);
  for (int64_t i = 0; i < done * kCell; i += kCell) { // from memory: the disk takes and gives nothing
    ASSERT_EQ(dc_stream_read(s, 0, i, 10, found.data()), DC_OK) << dc_last_error();
    EXPECT_EQ(found[3], static_cast<uint32_t>(i + 3 + 1));
  }
  EXPECT_EQ(dc_stream_flush(s), DC_E_NOSPC);
  plan.at = -1;
  ASSERT_EQ(Walk(s, 1, &at), DC_OK) << dc_last_error();
  ASSERT_EQ(dc_stream_get_info(s, &info), DC_OK);
  EXPECT_EQ(info.unsaved, 0);
  ASSERT_EQ(dc_stream_read(s, 1, 0, kElems, found.data()), DC_OK) << dc_last_error();
  for (int64_t i = 0; i < kElems; i++) ASSERT_EQ(found[i], static_cast<uint32_t>(i + 1)) << i;
  EXPECT_EQ(dc_stream_close(s), DC_OK) << dc_last_error();
}

// A kernel that never gives in: an error after a while, not a hang.
TEST_P(Faults, WhatNeverGoesWellEnds) {
  Folder folder;
  path_ = folder.path + "/x";
  Config k(path_, DC_FILE_WRITE | DC_FILE_CREATE | GetParam().flags);
  dc_file *f = nullptr;
  ASSERT_EQ(dc_file_open(&k, &f), DC_OK) << dc_last_error();
  Memory m(65536);
  dc_piece p = {m.at, 65536, 0};
  for (const int fault : {EAGAIN, EINTR, EIO, ENOSPC}) {
    plan.at = plan.calls, plan.fault = fault, plan.always = true;
    EXPECT_EQ(dc_file_write(f, &p, 1), fault == ENOSPC ? DC_E_NOSPC : DC_E_IO) << dc_last_error();
    EXPECT_NE(std::string(dc_last_error()).find("(errno " + std::to_string(fault) + ")"), std::string::npos);
    plan.at = -1;
    EXPECT_EQ(dc_file_write(f, &p, 1), DC_OK) << dc_last_error();
  }
  EXPECT_EQ(dc_file_close(f), DC_OK);
}

// A device that takes O_DIRECT at open and refuses it later is read and written through the page cache, and says so.
TEST_P(Faults, DirectTransfersThatAreRefusedGoThroughThePageCache) {
  Folder folder;
  path_ = folder.path + "/x";
  Config k(path_, DC_FILE_WRITE | DC_FILE_CREATE | GetParam().flags);
  dc_file *f = nullptr;
  ASSERT_EQ(dc_file_open(&k, &f), DC_OK) << dc_last_error();
  dc_file_info info = {};
  info.struct_size = sizeof info;
  ASSERT_EQ(dc_file_get_info(f, &info), DC_OK);
  const bool direct = info.direct;
  Memory m(65536);
  pattern(m.at, 65536, 3);
  dc_piece p = {m.at, 65536, 0};
  plan.at = plan.calls + 2, plan.fault = EINVAL;
  EXPECT_EQ(dc_file_write(f, &p, 1), direct ? DC_OK : DC_E_IO) << dc_last_error();
  ASSERT_EQ(dc_file_get_info(f, &info), DC_OK);
  EXPECT_EQ(info.direct, 0);
  if (direct) {
    EXPECT_NE(std::string(info.why).find("no O_DIRECT: a transfer failed with errno 22"), std::string::npos)
        << info.why;
    memset(m.at, 0, 65536);
    Memory wanted(65536);
    pattern(wanted.at, 65536, 3);
    EXPECT_EQ(dc_file_read(f, &p, 1), DC_OK) << dc_last_error();
    EXPECT_EQ(0, memcmp(m.at, wanted.at, 65536));
  }
  EXPECT_EQ(dc_file_close(f), DC_OK);
}

// A file system without fallocate (NFS before 4.2): reserve_bytes makes a file longer, and never shorter.
// A page that the cache writes back later would have the older bytes of what went past it.
TEST_P(Faults, NoPageIsReachedInBothWays) {
  for (const int64_t page : {4096, 65536}) {
    page_bytes = page;
    Folder folder;
    Config k(folder.path + "/file", DC_FILE_WRITE | DC_FILE_CREATE | GetParam().flags);
    k.block_bytes = 131072;
    dc_file *f = nullptr;
    ASSERT_EQ(dc_file_open(&k, &f), DC_OK) << dc_last_error();
    page_bytes = 0;
    dc_file_info info = {};
    info.struct_size = sizeof info;
    ASSERT_EQ(dc_file_get_info(f, &info), DC_OK) << dc_last_error();
    const int64_t bytes = 300000;
    Memory in(bytes), out(bytes + 64);
    pattern(in.at, bytes, 3);
    dc_piece from = {in.at, bytes, 12288}, to = {out.at + 64, bytes, 12288};
    plan.started.clear();
    ASSERT_EQ(dc_file_write(f, &from, 1), DC_OK) << dc_last_error();
    ASSERT_EQ(dc_file_read(f, &to, 1), DC_OK) << dc_last_error();
    EXPECT_EQ(0, memcmp(in.at, to.data, bytes));
    std::map<int64_t, bool> direct; // page -> whether it is reached past the cache
    int64_t past = 0;
    for (const dc__disk_ring_op &op : plan.started) {
      const bool is_direct = fcntl(op.fd, F_GETFL) & O_DIRECT;
      past += is_direct ? op.bytes : 0;
      for (int64_t at = op.offset / page; at * page < op.offset + op.bytes; at++)
        EXPECT_EQ(direct.emplace(at, is_direct).first->second, is_direct) << "page " << at << " of " << page;
    }
    EXPECT_EQ(past > 0, info.direct != 0);
    ASSERT_EQ(dc_file_close(f), DC_OK) << dc_last_error();
  }
}

TEST_P(Faults, ReservingCutsNoFileWhereThereIsNoFallocate) {
  Folder folder;
  Memory m(16384), found(16384);
  pattern(m.at, 16384, 4);
  for (const int error : {EOPNOTSUPP, ENOSYS}) {
    for (const int create : {0, static_cast<int>(DC_FILE_CREATE)}) {
      Config k(folder.path + "/x", DC_FILE_WRITE | DC_FILE_CREATE | DC_FILE_TRUNCATE | GetParam().flags);
      dc_file *f = nullptr;
      dc_piece p = {m.at, 16384, 0};
      ASSERT_EQ(dc_file_open(&k, &f), DC_OK) << dc_last_error();
      ASSERT_EQ(dc_file_write(f, &p, 1), DC_OK) << dc_last_error();
      ASSERT_EQ(dc_file_close(f), DC_OK);
      for (const int64_t bytes : {4096, 16384, 40960}) {
        Config more(folder.path + "/x", DC_FILE_WRITE | create | GetParam().flags);
        more.reserve_bytes = bytes;
        no_fallocate = error;
        const int rc = dc_file_open(&more, &f);
        no_fallocate = 0;
        ASSERT_EQ(rc, DC_OK) << dc_last_error();
        dc_file_info info = {};
        info.struct_size = sizeof info;
        ASSERT_EQ(dc_file_get_info(f, &info), DC_OK);
        EXPECT_EQ(info.size_bytes, std::max<int64_t>(bytes, 16384)) << bytes << " bytes reserved";
        p.data = found.at;
        ASSERT_EQ(dc_file_read(f, &p, 1), DC_OK) << dc_last_error();
        EXPECT_EQ(0, memcmp(m.at, found.at, 16384)) << bytes << " bytes reserved";
        ASSERT_EQ(dc_file_close(f), DC_OK);
      }
    }
  }
}

const auto kRings = ::testing::Values(
    Case{&dc__disk_ring_uring, false, 0}, Case{&dc__disk_ring_uring, true, DC_FILE_BUFFERED},
    Case{&dc__disk_ring_threads, true, 0}, Case{&dc__disk_ring_threads, false, DC_FILE_BUFFERED});
INSTANTIATE_TEST_SUITE_P(Rings, Faults, kRings);
INSTANTIATE_TEST_SUITE_P(Rings, StreamFaults, kRings);

} // namespace
