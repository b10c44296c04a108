// op_cases.h: what the tests of the ops share: arrays with forbidden pages on both sides, values of every kind, and the
// comparison of all instruction sets with the scalar reference. Included by one test file per group of ops.
#ifndef DEEPC_TESTS_OP_CASES_H
#define DEEPC_TESTS_OP_CASES_H

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/ops.h"
#include "ref/scalar.h"

// The full class (scripts/test full, DEEPC_TEST_FULL=1) has all cases, the quick one some, as each test says.
inline bool full_class() { return getenv("DEEPC_TEST_FULL") != nullptr; }
// Of three fills of a case the quick class has one, another one for the next case. turn counts all.
inline bool left_out_fill(size_t turn) { return !full_class() && (turn + turn / 3) % 3 != 0; }

namespace {

const int kLow[] = {DC_F32, DC_BF16, DC_F16};
const int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 5, 1 << 17};

// ---- memory with a forbidden page on both sides --------------------------------------------------------------------
enum Place {
  kAtEnd,
  kAtStart,
  kOffStart
}; // the array ends at the page behind; starts at the page before; one element later

class Guarded {
public:
  Guarded(const std::vector<uint8_t> &init, size_t element, Place place) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    room_ = (init.size() + element + page - 1) / page * page;
    whole_ = room_ + 2 * page;
    map_ = (uint8_t *)mmap(nullptr, whole_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED || mprotect(map_ + page, room_, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    size_t at = place == kAtEnd ? room_ - init.size() : place == kAtStart ? 0 : element;
    data = map_ + page + at;
    if (!init.empty()) memcpy(data, init.data(), init.size());
  }
  ~Guarded() { munmap(map_, whole_); }
  Guarded(const Guarded &) = delete;
  Guarded &operator=(const Guarded &) = delete;
  uint8_t *data;

private:
  uint8_t *map_;
  size_t room_, whole_;
};

// ---- values --------------------------------------------------------------------------------------------------------
enum Fill { kOrdinary, kAnyBits, kSpecial };

const uint32_t kSpecialF32[] = {0x00000000, 0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000, 0x7fc00000,
                                0xffc00000, 0x7f800001, 0xffbfffff, 0x7fffffff, 0x00000001, 0x80000001, 0x007fffff,
                                0x807fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x477fe000, 0x477fefff, 0x477ff000,
                                0x477ff001, 0x33000000, 0x33000001, 0x33800000, 0x387fc000, 0x387fe000, 0x38800000,
                                0x3f808000, 0x3f818000, 0x3f808001, 0x7f7f8000, 0x00008000, 0x00018000, 0x00007fff,
                                0x00017fff, 0x2edbe6ff, 0x60ad78ec};
const uint16_t kSpecialBf16[] = {0,      0x8000, 0x3f80, 0xbf80, 0x7f80, 0xff80, 0x7fc0, 0x7f81,
                                 0xffff, 1,      0x8001, 0x7f,   0x80,   0x7f7f, 0xff7f};
const uint16_t kSpecialF16[] = {0,      0x8000, 0x3c00, 0xbc00, 0x7c00, 0xfc00, 0x7e00, 0x7c01,
                                0xffff, 1,      0x8001, 0x3ff,  0x400,  0x7bff, 0xfbff};

struct Array {
  int dt;
  std::vector<uint8_t> bytes;
  size_t element() const { return dc_dtype_size(dt); }
};

uint16_t bf16_of(float f) { // truncation is good enough to make inputs
  uint32_t u;
  memcpy(&u, &f, 4);
  return (uint16_t)(u >> 16);
}

uint16_t f16_of(float f) { // |f| in [2^-14, 65504], truncated
  uint32_t u;
  memcpy(&u, &f, 4);
  const uint32_t e = (u >> 23) & 0xff;
  if (e < 113) return (uint16_t)((u >> 16) & 0x8000);
  return (uint16_t)(((u >> 16) & 0x8000) | ((e - 112) << 10) | ((u >> 13) & 0x3ff));
}

Array make(int dt, int64_t n, Fill fill, uint64_t seed) {
  Array a{dt, std::vector<uint8_t>((size_t)n * dc_dtype_size(dt))};
  std::mt19937_64 rng(seed * 977 + (uint64_t)dt);
  std::uniform_real_distribution<float> unit(-2.0f, 2.0f);
  for (int64_t i = 0; i < n; i++) {
    uint8_t *to = a.bytes.data() + (size_t)i * a.element();
    const bool floating = dt == DC_F32 || dt == DC_BF16 || dt == DC_F16 || dt == DC_F64;
    if (fill == kAnyBits || !floating) {
      const uint64_t bits = rng();
      memcpy(to, &bits, a.element());
    } else if (dt == DC_F64) {
      const double d = fill == kSpecial && rng() % 4 == 0 ? (double)std::numeric_limits<float>::quiet_NaN()
                                                          : (double)unit(rng);
      memcpy(to, &d, 8);
    } else if (fill == kSpecial) {
      if (dt == DC_F32) memcpy(to, &kSpecialF32[rng() % (sizeof kSpecialF32 / 4)], 4);
      if (dt == DC_BF16) memcpy(to, &kSpecialBf16[rng() % (sizeof kSpecialBf16 / 2)], 2);
      if (dt == DC_F16) memcpy(to, &kSpecialF16[rng() % (sizeof kSpecialF16 / 2)], 2);
    } else {
      const float f = unit(rng);
      const uint16_t h = dt == DC_BF16 ? bf16_of(f) : f16_of(f);
      if (dt == DC_F32) memcpy(to, &f, 4);
      else memcpy(to, &h, 2);
    }
  }
  return a;
}

std::vector<double> doubles_of(const Array &a) {
  std::vector<double> out(a.bytes.size() / a.element());
  for (size_t i = 0; i < out.size(); i++) out[i] = dc__get(a.bytes.data(), a.dt, (int64_t)i);
  return out;
}

Array raw(int64_t bytes, uint64_t seed) { return make(DC_U8, bytes, kAnyBits, seed); }
Array doubles(int64_t n) { return Array{DC_F64, std::vector<uint8_t>((size_t)n * 8, 0x5a)}; }

std::vector<int> isas() {
  std::vector<int> out;
  for (int isa = 0; isa < DC_ISA_COUNT; isa++)
    if (dc_isa_available(isa)) out.push_back(isa);
  return out;
}

// The last instruction set stays forced: back to the one that the environment chooses.
class Ops : public ::testing::Test {
protected:
  void SetUp() override {
    ASSERT_EQ(dc_isa_current(&isa_), DC_OK) << dc_last_error();
    dc_set_num_threads(1);
  }
  void TearDown() override {
    dc_isa_force(isa_);
    dc_set_num_threads(1);
  }

private:
  int isa_ = 0;
};

using Run = std::function<int(const std::vector<uint8_t *> &)>;

std::vector<std::vector<uint8_t>> run_once(const std::vector<Array> &arrays, Place place, const Run &run) {
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<uint8_t *> at;
  for (const Array &a : arrays) {
    memory.push_back(std::make_unique<Guarded>(a.bytes, a.element(), place));
    at.push_back(memory.back()->data);
  }
  EXPECT_EQ(run(at), DC_OK) << dc_last_error();
  std::vector<std::vector<uint8_t>> out;
  for (size_t k = 0; k < arrays.size(); k++) out.emplace_back(at[k], at[k] + arrays[k].bytes.size());
  return out;
}

::testing::AssertionResult same(const std::vector<Array> &arrays, const std::vector<std::vector<uint8_t>> &got,
                                const std::vector<std::vector<uint8_t>> &want) {
  for (size_t k = 0; k < arrays.size(); k++) {
    if (got[k] == want[k]) continue;
    size_t i = 0;
    while (got[k][i] == want[k][i]) i++;
    const size_t size = arrays[k].element(), e = i / size;
    uint64_t g = 0, w = 0, in = 0;
    memcpy(&g, &got[k][e * size], size);
    memcpy(&w, &want[k][e * size], size);
    memcpy(&in, &arrays[k].bytes[e * size], size);
    char text[160];
    snprintf(text, sizeof text, "array %zu (%s), element %zu: 0x%llx, reference 0x%llx, was 0x%llx", k,
             dc_dtype_name(arrays[k].dt), e, (unsigned long long)g, (unsigned long long)w, (unsigned long long)in);
    return ::testing::AssertionFailure() << text;
  }
  return ::testing::AssertionSuccess();
}

// Runs on all instruction sets and placements; all arrays (inputs too) end as the scalar reference leaves them.
void same_everywhere(const std::vector<Array> &arrays, const Run &run, const std::string &what,
                     const std::vector<Place> &places = {kAtEnd, kAtStart, kOffStart}) {
  ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
  const auto want = run_once(arrays, kAtStart, run);
  for (int isa : isas()) {
    if (isa == DC_ISA_SCALAR && places.size() == 1) continue;
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (Place place : places) {
      if (isa == DC_ISA_SCALAR && place == kAtStart) continue; // the run above
      ASSERT_TRUE(same(arrays, run_once(arrays, place, run), want))
          << what << " on " << dc_isa_name(isa) << ", placement " << place;
    }
  }
}

Fill fill_of(int64_t n, int k) { return n >= (1 << 17) ? kAnyBits : (Fill)(k % 3); }

std::string name_of(const char *op, int dt, int64_t n) {
  return std::string(op) + " " + dc_dtype_name(dt) + " n=" + std::to_string(n);
}

template <class T> std::vector<T> as(const std::vector<uint8_t> &bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!out.empty()) memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

float f32(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

uint32_t bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

} // namespace

#endif
