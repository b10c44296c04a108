// test_comm.cpp: comm/ with real processes. Every rank is a fork of the test body (the parent has no threads yet); it
// reports through a pipe: nothing means success. Slots are small, so that chunks, wrap-around and full windows happen.
#include <gtest/gtest.h>

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm.h"
#include "comm/p2p.h"
#include "ranks.h"

using namespace ranks;

namespace {

// ---- scalar expectation
// ------------------------------------------------------------------------------------------------

float f32_of_bf16(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

uint16_t bf16_of_f32(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t low = u & 0xffff, odd = (u >> 16) & 1;
  return (uint16_t)((u >> 16) + (low > 0x8000 || (low == 0x8000 && odd)));
}

float f32_of_f16(uint16_t h) {
  int e = (h >> 10) & 31, m = h & 1023;
  float v = e ? std::ldexp(1024.0f + (float)m, e - 25) : std::ldexp((float)m, -24); // no infinities in these tests
  return h & 0x8000 ? -v : v;
}

uint16_t f16_of_f32(float f) {
  uint16_t sign = std::signbit(f) ? 0x8000 : 0;
  double a = std::fabs((double)f);
  if (a == 0) return sign;
  int e;
  std::frexp(a, &e);                                // a in [2^(e-1), 2^e)
  int q = e - 11 < -24 ? -24 : e - 11;              // the spacing of fp16 here is 2^q
  double units = std::nearbyint(std::ldexp(a, -q)); // ties to even
  if (units >= 2048) {
    units /= 2;
    q++;
  }
  if (units < 1024) return (uint16_t)(sign | (uint16_t)units); // denormal (q is -24)
  return (uint16_t)(sign | (uint16_t)((q + 25) << 10) | ((uint16_t)units & 1023));
}

template <class T> T element(int rank, int64_t i) {
  return (T)(((int64_t)(i * 7 + rank * 13 + (i >> 5) * 3) % 23 - 11) * (int64_t)(sizeof(T) == 1 ? 9 : 1001));
}

void put_element(char *p, int dtype, int rank, int64_t i) {
  float f = (float)((i * 7 + rank * 13 + (i >> 5) * 3) % 23 - 11) * 0.37f + (float)rank * 0.001f;
  if (f == 0) f = 0.25f;
  switch (dtype) {
  case DC_F32: memcpy(p, &f, 4); break;
  case DC_BF16: {
    uint16_t h = bf16_of_f32(f);
    memcpy(p, &h, 2);
    break;
  }
  case DC_F16: {
    uint16_t h = f16_of_f32(f);
    memcpy(p, &h, 2);
    break;
  }
  case DC_F64: {
    double d = (double)f * 1.0000001;
    memcpy(p, &d, 8);
    break;
  }
  case DC_I8: {
    int8_t v = element<int8_t>(rank, i);
    memcpy(p, &v, 1);
    break;
  }
  case DC_U8: {
    uint8_t v = element<uint8_t>(rank, i);
    memcpy(p, &v, 1);
    break;
  }
  case DC_I16: {
    int16_t v = element<int16_t>(rank, i);
    memcpy(p, &v, 2);
    break;
  }
  case DC_I32: {
    int32_t v = element<int32_t>(rank, i) * 7919;
    memcpy(p, &v, 4);
    break;
  }
  default: {
    int64_t v = element<int64_t>(rank, i) * 1000003;
    memcpy(p, &v, 8);
    break;
  }
  }
}

template <class T> T combine(int op, T a, T b) {
  switch (op) {
  case DC_RED_MIN: return b < a ? b : a;
  case DC_RED_MAX: return a < b ? b : a;
  case DC_RED_PROD: return a * b;
  default: return a + b;
  }
}

template <class T> T combine_int(int op, T a, T b) {
  using U = typename std::make_unsigned<T>::type;
  switch (op) {
  case DC_RED_MIN: return b < a ? b : a;
  case DC_RED_MAX: return a < b ? b : a;
  case DC_RED_PROD: return (T)(U)((uint64_t)(U)a * (uint64_t)(U)b);
  case DC_RED_BAND: return (T)(a & b);
  case DC_RED_BOR: return (T)(a | b);
  case DC_RED_BXOR: return (T)(a ^ b);
  default: return (T)(U)((U)a + (U)b);
  }
}

template <class T> void reduce_int(char *out, int size, int op, int64_t i, int dtype) {
  T s = 0, v;
  for (int r = 0; r < size; r++) {
    char p[8];
    put_element(p, dtype, r, i);
    memcpy(&v, p, sizeof v);
    s = r ? combine_int<T>(op, s, v) : v;
  }
  memcpy(out, &s, sizeof s);
}

// What dc_all_reduce must give for element i: in fp32 (fp64), in rank order, one rounding.
void expected_reduction(char *out, int dtype, int op, int size, int64_t i) {
  char p[8];
  if (dtype == DC_F32 || dtype == DC_BF16 || dtype == DC_F16) {
    float s = 0;
    for (int r = 0; r < size; r++) {
      float v;
      uint16_t h;
      put_element(p, dtype, r, i);
      memcpy(&h, p, 2);
      if (dtype == DC_F32) memcpy(&v, p, 4);
      else v = dtype == DC_BF16 ? f32_of_bf16(h) : f32_of_f16(h);
      s = r ? combine<float>(op, s, v) : v;
    }
    if (op == DC_RED_AVG) s *= (float)(1.0 / size);
    uint16_t h = dtype == DC_BF16 ? bf16_of_f32(s) : f16_of_f32(dtype == DC_F16 ? s : 0);
    if (dtype == DC_F32) memcpy(out, &s, 4);
    else memcpy(out, &h, 2);
  } else if (dtype == DC_F64) {
    double s = 0, v;
    for (int r = 0; r < size; r++) {
      put_element(p, dtype, r, i);
      memcpy(&v, p, 8);
      s = r ? combine<double>(op, s, v) : v;
    }
    if (op == DC_RED_AVG) s *= 1.0 / size;
    memcpy(out, &s, 8);
  } else if (dtype == DC_I8) reduce_int<int8_t>(out, size, op, i, dtype);
  else if (dtype == DC_U8) reduce_int<uint8_t>(out, size, op, i, dtype);
  else if (dtype == DC_I16) reduce_int<int16_t>(out, size, op, i, dtype);
  else if (dtype == DC_I32) reduce_int<int32_t>(out, size, op, i, dtype);
  else reduce_int<int64_t>(out, size, op, i, dtype);
}

bool is_float(int dtype) { return dtype == DC_F32 || dtype == DC_BF16 || dtype == DC_F16 || dtype == DC_F64; }
bool allowed(int dtype, int op) { return is_float(dtype) ? op < DC_RED_BAND : op != DC_RED_AVG; }

// Elements [begin, begin + n) of `rank`, exactly as many bytes as there are (so that the sanitizer sees an overrun).
std::vector<char> data_of(int dtype, int rank, int64_t begin, int64_t n) {
  size_t e = dc_dtype_size(dtype);
  std::vector<char> v((size_t)n * e);
  for (int64_t i = 0; i < n; i++) put_element(v.data() + (size_t)i * e, dtype, rank, begin + i);
  return v;
}

std::string first_difference(const std::vector<char> &got, const std::vector<char> &want, size_t esz,
                             const char *what) {
  if (got.size() != want.size()) return fmt("%s: sizes differ", what);
  for (size_t i = 0; i < got.size(); i++)
    if (got[i] != want[i])
      return fmt("%s: element %zu of %zu differs (byte %02x, expected %02x)", what, i / esz, got.size() / esz,
                 (unsigned char)got[i], (unsigned char)want[i]);
  return "";
}

const int64_t sizes[] = {0, 1, 2, 63, 257, 1025, 5001};

std::string check_all_reduce(dc_comm *c, int rank, int size, int dtype, int op, int64_t n, bool in_place) {
  size_t e = dc_dtype_size(dtype);
  std::vector<char> in = data_of(dtype, rank, 0, n), out((size_t)n * e, 0x55), want((size_t)n * e), before = in;
  for (int64_t i = 0; i < n; i++) expected_reduction(want.data() + (size_t)i * e, dtype, op, size, i);
  FINE(dc_all_reduce(c, in.data(), in_place ? in.data() : out.data(), n, dtype, op, 0));
  std::string d = first_difference(in_place ? in : out, want, e,
                                   fmt("all_reduce %s op %d n %ld", dc_dtype_name(dtype), op, (long)n).c_str());
  return d.empty() && !in_place ? first_difference(in, before, e, "all_reduce input") : d;
}

std::string check_reduce_scatter(dc_comm *c, int rank, int size, int dtype, int op, int64_t n) {
  size_t e = dc_dtype_size(dtype);
  std::vector<char> in = data_of(dtype, rank, 0, n * size), out((size_t)n * e, 0x55), want((size_t)n * e);
  for (int64_t i = 0; i < n; i++) expected_reduction(want.data() + (size_t)i * e, dtype, op, size, rank * n + i);
  FINE(dc_reduce_scatter(c, in.data(), out.data(), n, dtype, op, 0));
  return first_difference(out, want, e,
                          fmt("reduce_scatter %s op %d n %ld", dc_dtype_name(dtype), op, (long)n).c_str());
}

std::string check_all_gather(dc_comm *c, int rank, int size, int dtype, int64_t n, bool in_place) {
  size_t e = dc_dtype_size(dtype);
  std::vector<char> in = data_of(dtype, rank, 0, n), out((size_t)(n * size) * e, 0x55), want;
  for (int r = 0; r < size; r++) {
    std::vector<char> d = data_of(dtype, r, 0, n);
    want.insert(want.end(), d.begin(), d.end());
  }
  char *own = out.data() + (size_t)(rank * n) * e;
  if (in_place && n) memcpy(own, in.data(), in.size());
  FINE(dc_all_gather(c, in_place ? own : in.data(), out.data(), n, dtype, 0));
  return first_difference(out, want, e, fmt("all_gather %s n %ld", dc_dtype_name(dtype), (long)n).c_str());
}

std::string check_broadcast(dc_comm *c, int rank, int size, int dtype, int64_t n) {
  for (int root = 0; root < size; root++) {
    std::vector<char> buf = data_of(dtype, rank, 0, n), want = data_of(dtype, root, 0, n);
    FINE(dc_broadcast(c, buf.data(), n, dtype, root, 0));
    std::string d = first_difference(buf, want, dc_dtype_size(dtype),
                                     fmt("broadcast %s n %ld root %d", dc_dtype_name(dtype), (long)n, root).c_str());
    if (!d.empty()) return d;
  }
  return "";
}

std::string check_all_to_all(dc_comm *c, int rank, int size, int dtype, int64_t n) {
  size_t e = dc_dtype_size(dtype);
  std::vector<char> in = data_of(dtype, rank, 0, n * size), out((size_t)(n * size) * e, 0x55), want;
  for (int r = 0; r < size; r++) {
    std::vector<char> d = data_of(dtype, r, rank * n, n);
    want.insert(want.end(), d.begin(), d.end());
  }
  FINE(dc_all_to_all(c, in.data(), out.data(), n, dtype, 0));
  return first_difference(out, want, e, fmt("all_to_all %s n %ld", dc_dtype_name(dtype), (long)n).c_str());
}

std::string check_everything(dc_comm *c, int rank, int size, int dtype) {
  std::string d;
  for (int64_t n : sizes) {
    for (int op = 0; op <= DC_RED_BXOR && d.empty(); op++) {
      if (!allowed(dtype, op)) continue;
      d = check_all_reduce(c, rank, size, dtype, op, n, op % 2 == 0);
      if (d.empty()) d = check_reduce_scatter(c, rank, size, dtype, op, n);
    }
    if (d.empty()) d = check_all_gather(c, rank, size, dtype, n, false);
    if (d.empty()) d = check_all_gather(c, rank, size, dtype, n, true);
    if (d.empty()) d = check_broadcast(c, rank, size, dtype, n);
    if (d.empty()) d = check_all_to_all(c, rank, size, dtype, n);
    if (!d.empty()) return d;
    FINE(dc_barrier(c, n));
  }
  return d;
}

struct Shape {
  int size, slots;
  int64_t slot_bytes;
};
class Collectives : public testing::TestWithParam<Shape> {};

TEST_P(Collectives, EveryOneOfEveryTypeOpAndSize) {
  Shape s = GetParam();
  std::string address = fresh_address();
  expect_all_fine(run_ranks(s.size, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, s.size, s.slots, s.slot_bytes);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    WANT(dc_comm_rank(c) == rank && dc_comm_size(c) == s.size, "rank or size");
    for (int dtype = 0; dtype < DC_DTYPE_COUNT; dtype++) {
      std::string d = check_everything(c, rank, s.size, dtype);
      if (!d.empty()) return d;
    }
    WANT(dc_comm_error(c)[0] == 0, "%s", dc_comm_error(c));
    FINE(dc_comm_close(c));
    return "";
  }));
}
INSTANTIATE_TEST_SUITE_P(Shapes, Collectives,
                         testing::Values(Shape{1, 2, 4096}, Shape{2, 2, 4096}, Shape{2, 5, 8192}, Shape{3, 2, 4096},
                                         Shape{4, 3, 4096}));

// More than one chunk of the built-in size, and slices of the two-phase all_reduce that are cut unevenly.
TEST(CollectivesLarge, ManyChunksOfTheBuiltInSize) {
  for (int size : {2, 3}) {
    std::string address = fresh_address();
    expect_all_fine(run_ranks(size, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, size, 2, 2 << 20);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      int64_t n = 700001;
      std::string d = check_all_reduce(c, rank, size, DC_F32, DC_RED_SUM, n, true);
      if (d.empty()) d = check_all_reduce(c, rank, size, DC_BF16, DC_RED_AVG, n, false);
      if (d.empty()) d = check_all_gather(c, rank, size, DC_F32, n, false);
      if (d.empty()) d = check_reduce_scatter(c, rank, size, DC_F32, DC_RED_SUM, n / 2);
      FINE(dc_comm_close(c));
      return d;
    }));
  }
}

// What is NaN or infinite on one rank reaches all, and bits are equal on all ranks.
TEST(Collectives1, SpecialValues) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    float x[4] = {rank ? NAN : 1.0f, rank ? INFINITY : 1.0f, rank ? 3.4e38f : 3.4e38f, 1e-45f};
    FINE(dc_all_reduce(c, x, x, 4, DC_F32, DC_RED_SUM, 0));
    WANT(std::isnan(x[0]) && std::isinf(x[1]) && std::isinf(x[2]) && x[3] == 2.8e-45f, "%g %g %g %g", x[0], x[1], x[2],
         x[3]);
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Collectives1, CountersCount) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    float x[8] = {0}, y[16];
    dc_counter_reset();
    FINE(dc_all_reduce(c, x, x, 8, DC_F32, DC_RED_SUM, 0));
    FINE(dc_all_gather(c, x, y, 8, DC_F32, 0));
    FINE(dc_barrier(c, 0));
    WANT(dc_counter_get(DC_COUNTER_coll_all_reduce) == 1 && dc_counter_get(DC_COUNTER_coll_all_gather) == 1 &&
             dc_counter_get(DC_COUNTER_coll_barrier) == 1 && dc_counter_get(DC_COUNTER_coll_broadcast) == 0,
         "calls");
    WANT(dc_counter_get(DC_COUNTER_coll_bytes_in) == 64, "%ld", (long)dc_counter_get(DC_COUNTER_coll_bytes_in));
    WANT(dc_counter_get(DC_COUNTER_coll_bytes_out) == 2 * 32 + 32, "%ld",
         (long)dc_counter_get(DC_COUNTER_coll_bytes_out));
    FINE(dc_comm_close(c));
    return "";
  }));
}

// ---- groups, segments
// -----------------------------------------------------------------------------------------------------

TEST(Groups, SubGroupsWorkSideBySide) {
  std::string all = fresh_address(), pair[2] = {fresh_address(), fresh_address()};
  expect_all_fine(run_ranks(4, [&](int rank) -> std::string {
    dc_comm_config k = config_of(all.c_str(), rank, 4);
    dc_comm *c, *sub;
    FINE(dc_comm_open(&k, &c));
    int32_t names[2] = {rank % 2, rank % 2 + 2};
    dc_comm_config ks = config_of(pair[rank % 2].c_str(), rank / 2, 2);
    ks.global_rank = names;
    FINE(dc_comm_open(&ks, &sub));
    for (int i = 0; i < 50; i++) {
      int64_t x = rank + i, y = rank + i;
      FINE(dc_all_reduce(sub, &x, &x, 1, DC_I64, DC_RED_SUM, 0));
      WANT(x == 2 * i + 2 * (rank % 2) + 2, "%ld", (long)x);
      FINE(dc_all_reduce(c, &y, &y, 1, DC_I64, DC_RED_SUM, 0));
      WANT(y == 4 * i + 6, "%ld", (long)y);
    }
    FINE(dc_comm_close(sub));
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Segments, SeenByAllZeroedSealedAndOutliveTheGroup) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 3);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    dc_segment *s, *s2;
    void *base, *base2;
    const int64_t want = 5 << 20;
    FINE(dc_segment_create(c, want, &s, &base));
    FINE(dc_segment_create(c, 1, &s2, &base2));
    WANT((uintptr_t)base % DC_HUGE_PAGE == 0, "alignment");
    int64_t bytes, huge;
    FINE(dc_segment_info(s, &bytes, &huge));
    WANT(bytes == 6 << 20 && huge >= 0 && huge <= bytes, "%ld %ld", (long)bytes, (long)huge);
    char *p = (char *)base;
    for (int64_t i = 0; i < bytes; i += 97) WANT(p[i] == 0, "not zeroed at %ld", (long)i);
    FINE(dc_barrier(c, 0));
    for (int64_t i = rank; i < bytes; i += 3) p[i] = (char)(i * 31 + rank);
    ((char *)base2)[rank] = (char)(rank + 1);
    FINE(dc_barrier(c, 0));
    for (int64_t i = 0; i < bytes; i++) WANT(p[i] == (char)(i * 31 + i % 3), "byte %ld", (long)i);
    for (int r = 0; r < 3; r++) WANT(((char *)base2)[r] == r + 1, "second segment");
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    p[rank] = 7; // the segment outlives the group
    FINE(dc_segment_free(s));
    FINE(dc_segment_free(s2));
    return "";
  }));
}

TEST(Segments, TooLargeIsRefusedOnAllRanksAndTheGroupStaysSound) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    dc_segment *s = nullptr;
    void *base = nullptr;
    WANT_STATUS(DC_E_NOMEM, dc_segment_create(c, (int64_t)1 << 45, &s, &base));
    WANT_TEXT("available");
    WANT(!s && !base, "outputs were written");
    FINE(dc_barrier(c, 0));
    FINE(dc_segment_create(c, 4096, &s, &base));
    FINE(dc_segment_free(s));
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Segments, DifferentSizesAreAMismatch) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    dc_segment *s;
    void *base;
    WANT_STATUS(DC_E_MISMATCH, dc_segment_create(c, (int64_t)(rank + 1) << 21, &s, &base));
    WANT_TEXT("segment_create(bytes 2097152)");
    WANT_TEXT("segment_create(bytes 4194304)");
    FINE(dc_comm_close(c));
    return "";
  }));
}

// ---- the exchange
// -----------------------------------------------------------------------------------------------------------

TEST(Exchange, StepsOfAllSlotsOpenAtOnceManyTimesAround) {
  std::string address = fresh_address();
  const int slots = 3, rounds = 200;
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2, slots);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    dc_call call = {DC_CALL_USER, DC_U8, 0, 0, 4096, 5};
    int64_t posted = 0, done = 0;
    while (done < rounds) {
      int ready = 1;
      while (posted < rounds && posted - done < slots) {
        if (posted > done) FINE(dc_exchange_can_begin(c, &ready));
        if (!ready) break;
        int64_t step;
        void *slot;
        FINE(dc_exchange_begin(c, &step, &slot));
        WANT(step == posted, "step %ld, expected %ld", (long)step, (long)posted);
        memset(slot, (int)(step * 2 + rank), 4096);
        FINE(dc_exchange_post(c, &call));
        posted++;
      }
      FINE(dc_exchange_test(c, done, &ready));
      FINE(dc_exchange_wait(c, done));
      FINE(dc_exchange_test(c, done, &ready));
      WANT(ready == 1, "not ready after wait");
      for (int r = 0; r < 2; r++) {
        const unsigned char *p = (const unsigned char *)dc_exchange_peer(c, r, done);
        for (int i = 0; i < 4096; i += 511)
          WANT(p[i] == (unsigned char)(done * 2 + r), "step %ld of rank %d", (long)done, r);
      }
      FINE(dc_exchange_done(c, done));
      done++;
    }
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Exchange, MisuseIsAStateErrorAndBreaksNothing) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    dc_call call = {DC_CALL_USER, DC_U8, 0, 0, 1, 0};
    int64_t step, extra;
    void *slot;
    int ready;
    WANT_STATUS(DC_E_STATE, dc_exchange_post(c, &call));
    WANT_STATUS(DC_E_STATE, dc_exchange_wait(c, 0));
    WANT_STATUS(DC_E_STATE, dc_exchange_test(c, 0, &ready));
    WANT_STATUS(DC_E_STATE, dc_exchange_done(c, 0));
    FINE(dc_exchange_begin(c, &step, &slot));
    FINE(dc_exchange_begin(c, &extra, &slot));
    WANT_STATUS(DC_E_STATE, dc_exchange_begin(c, &extra, &slot));
    WANT_STATUS(DC_E_STATE, dc_barrier(c, 0));
    FINE(dc_exchange_post(c, &call));
    FINE(dc_exchange_post(c, &call));
    FINE(dc_exchange_wait(c, 0));
    WANT_STATUS(DC_E_STATE, dc_exchange_done(c, 1));
    FINE(dc_exchange_done(c, 0));
    FINE(dc_exchange_wait(c, 1));
    FINE(dc_exchange_done(c, 1));
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    return "";
  }));
}

// ---- arguments
// ----------------------------------------------------------------------------------------------------------------

TEST(Arguments, WrongOnesAreRefusedLocallyAndTheGroupStaysSound) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    float x[4] = {0}, y[8];
    int32_t i[4];
    WANT_STATUS(DC_E_DTYPE, dc_all_reduce(c, x, x, 4, 99, DC_RED_SUM, 0));
    WANT_STATUS(DC_E_INVALID, dc_all_reduce(c, x, x, 4, DC_F32, 42, 0));
    WANT_STATUS(DC_E_DTYPE, dc_all_reduce(c, i, i, 4, DC_I32, DC_RED_AVG, 0));
    WANT_STATUS(DC_E_DTYPE, dc_all_reduce(c, x, x, 4, DC_F32, DC_RED_BOR, 0));
    WANT_STATUS(DC_E_SHAPE, dc_all_reduce(c, x, x, -1, DC_F32, DC_RED_SUM, 0));
    WANT_STATUS(DC_E_INVALID, dc_all_reduce(c, nullptr, x, 4, DC_F32, DC_RED_SUM, 0));
    WANT_STATUS(DC_E_OVERFLOW, dc_all_gather(c, x, y, INT64_MAX / 4, DC_F32, 0));
    WANT_STATUS(DC_E_INVALID, dc_broadcast(c, x, 4, DC_F32, 2, 0));
    WANT_STATUS(DC_E_INVALID, dc_all_to_all(c, x, x, 2, DC_F32, 0));
    WANT_STATUS(DC_E_INVALID, dc_all_reduce(nullptr, x, x, 4, DC_F32, DC_RED_SUM, 0));
    WANT_STATUS(DC_E_INVALID, dc_segment_create(c, 0, nullptr, nullptr));
    FINE(dc_all_reduce(c, nullptr, nullptr, 0, DC_F32, DC_RED_SUM, 0));
    FINE(dc_all_gather(c, x, y, 4, DC_F32, 0));
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Arguments, BadConfigs) {
  dc_comm *c = nullptr;
  dc_comm_config good = config_of("x", 0, 1), k;
  std::string long_address(91, 'a');
  EXPECT_EQ(dc_comm_open(nullptr, &c), DC_E_INVALID);
  EXPECT_EQ(dc_comm_open(&good, nullptr), DC_E_INVALID);
#define BAD(field, value)                                               \
  do {                                                                  \
    k = good;                                                           \
    k.field = value;                                                    \
    EXPECT_EQ(dc_comm_open(&k, &c), DC_E_INVALID) << #field " " #value; \
  } while (0)
  BAD(rank, 1);
  BAD(rank, -1);
  BAD(size, 0);
  BAD(size, DC_COMM_MAX_RANKS + 1);
  BAD(address, nullptr);
  BAD(address, "");
  BAD(address, long_address.c_str());
  BAD(label, nullptr);
  BAD(timeout_ms, 0);
  BAD(slot_bytes, 100);
  BAD(slot_bytes, 0);
  BAD(slots, 1);
  BAD(flags, 1);
#undef BAD
  EXPECT_EQ(dc_comm_close(nullptr), DC_OK);
  EXPECT_EQ(dc_segment_free(nullptr), DC_OK);
  EXPECT_EQ(c, nullptr);
}

TEST(Arguments, SpinVariableIsChecked) {
  expect_all_fine(run_ranks(1, [&](int) -> std::string {
    dc_comm_config k = config_of("spin-test", 0, 1);
    dc_comm *c;
    setenv("DEEPC_SPIN_US", "fast", 1);
    WANT_STATUS(DC_E_ENV, dc_comm_open(&k, &c));
    WANT_TEXT("DEEPC_SPIN_US=fast");
    return "";
  }));
}

// ---- errors that all ranks see
// ----------------------------------------------------------------------------------------------

TEST(Mismatch, NamesBothCallsOnAllRanks) {
  std::string address = fresh_address();
  int32_t names[3] = {4, 9, 11};
  auto out = run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 3);
    k.global_rank = names;
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    float x[16] = {0}, y[48];
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_set_caller(c, rank == 1 ? "train.py:40" : "train.py:31"));
    int rc = rank == 1 ? dc_all_gather(c, x, y, 16, DC_BF16, 0) : dc_all_reduce(c, x, x, 16, DC_F32, DC_RED_SUM, 77);
    WANT(rc == DC_E_MISMATCH, "%s", dc_status_name(rc));
    WANT_TEXT("group test_pg");
    WANT_TEXT("all_reduce(fp32, count 16, sum, tag 77) [call 2 at train.py:31]");
    WANT_TEXT("all_gather(bf16, count 16) [call 2 at train.py:40]");
    // on a busy machine the mismatch is told before the last of them arrives
    bool both = strstr(dc_last_error(), "rank 4 (0 in the group), rank 11 (2 in the group) called all_reduce");
    bool one = strstr(dc_last_error(), ": rank 4 (0 in the group) called all_reduce") ||
               strstr(dc_last_error(), "; rank 11 (2 in the group) called all_reduce");
    WANT(both || (one && strstr(dc_last_error(), "not arrived")), "%s", dc_last_error());
    WANT_TEXT("rank 9 (1 in the group) called all_gather");
    std::string first = dc_comm_error(c);
    WANT_STATUS(DC_E_MISMATCH, dc_barrier(c, 0)); // broken for good
    WANT(first == dc_comm_error(c) && !first.empty(), "the text changed");
    FINE(dc_comm_close(c));
    return "";
  });
  expect_all_fine(out);
}

TEST(Mismatch, EveryPartOfTheFingerprintCounts) {
  using Call = std::function<int(dc_comm *, void *)>;
  struct Pair {
    const char *what;
    Call a, b;
  };
  const Pair pairs[] = {
      {"count", [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 10, DC_F32, DC_RED_SUM, 0); },
       [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 11, DC_F32, DC_RED_SUM, 0); }},
      {"dtype", [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 10, DC_F32, DC_RED_SUM, 0); },
       [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 10, DC_I32, DC_RED_SUM, 0); }},
      {"reduction", [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 10, DC_F32, DC_RED_SUM, 0); },
       [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 10, DC_F32, DC_RED_MAX, 0); }},
      {"tag", [](dc_comm *c, void *) { return dc_barrier(c, 1); }, [](dc_comm *c, void *) { return dc_barrier(c, 2); }},
      {"root", [](dc_comm *c, void *x) { return dc_broadcast(c, x, 10, DC_F32, 0, 0); },
       [](dc_comm *c, void *x) { return dc_broadcast(c, x, 10, DC_F32, 1, 0); }},
      {"chunks", [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 5000, DC_F32, DC_RED_SUM, 0); },
       [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 1, DC_F32, DC_RED_SUM, 0); }},
      {"zero", [](dc_comm *c, void *x) { return dc_all_reduce(c, x, x, 0, DC_F32, DC_RED_SUM, 0); },
       [](dc_comm *c, void *) { return dc_barrier(c, 0); }},
  };
  for (const Pair &p : pairs) {
    SCOPED_TRACE(p.what);
    std::string address = fresh_address();
    expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, 2);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      std::vector<float> x(5000);
      int rc = (rank ? p.b : p.a)(c, x.data());
      if (rc == DC_OK && strcmp(p.what, "root") == 0) rc = dc_barrier(c, 0);  // roots don't wait: the next call tells
      WANT(rc == DC_E_MISMATCH, "gave %s: %s", dc_status_name(rc), dc_last_error());
      if (strcmp(p.what, "root") == 0)
        WANT(strstr(dc_last_error(), "root 0") && strstr(dc_last_error(), "root 1"), "%s", dc_last_error());
      FINE(dc_comm_close(c));
      return "";
    }));
  }
}

// This process' cell that holds a call with `tag`, in the memory that all ranks map: the first is rank 0's.
struct Cell {
  uint32_t posted, filling;
  uint64_t call[3], rest[4];
};
static_assert(sizeof(Cell) == 64, "as dc__cell");
Cell *cell_with(uint64_t tag) {
  FILE *maps = fopen("/proc/self/maps", "r");
  Cell *found = nullptr;
  char line[512];
  while (maps && !found && fgets(line, sizeof line, maps)) {
    unsigned long from, to;
    if (!strstr(line, "memfd:") || sscanf(line, "%lx-%lx rw-s", &from, &to) != 2) continue;
    for (Cell *x = (Cell *)from; x < (Cell *)to && !found; x++)
      if (x->call[2] == tag) found = x;
  }
  if (maps) fclose(maps);
  return found;
}

// A rank that waits for nobody fills cells again that others compare meanwhile: what is half written is of no step.
// Here rank 0 stops in the middle of it, as the writer may be when its core is taken away.
TEST(Mismatch, ACellThatIsBeingFilledIsNotCompared) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    for (int i = 0; i < 4; i++) FINE(dc_barrier(c, 0x5eed0000 + i));
    if (rank == 0) {
      Cell *old = cell_with(0x5eed0001);
      WANT(old, "no cell has the tag");
      WANT(old->filling == old->posted, "%u is not %u", old->filling, old->posted);
      __atomic_store_n(&old->filling, old->posted + 64, __ATOMIC_SEQ_CST);
      __atomic_store_n(&old->call[2], 0x5eed0041, __ATOMIC_SEQ_CST);
    }
    WANT_STATUS(DC_E_MISMATCH, dc_barrier(c, rank ? 20 : 10));
    WANT_TEXT("rank 0 called barrier(tag 10) [call 5]");
    WANT_TEXT("rank 1 called barrier(tag 20) [call 5]");
    FINE(dc_comm_close(c));
    return "";
  }));
}

// Rank 2 never calls: ranks 0 and 1 learn of their mismatch without it.
TEST(Mismatch, IsToldBeforeTheLastRankArrives) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 3);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    if (rank == 2) {
      while (dc_comm_error(c)[0] == 0) nap_ms(1);
      WANT_STATUS(DC_E_MISMATCH, dc_barrier(c, 0));
    } else {
      WANT_STATUS(DC_E_MISMATCH, dc_barrier(c, rank));
    }
    FINE(dc_comm_close(c));
    return "";
  }));
}

// Three ranks with two groups each; what `body` is given is joined by `join`, if that is there.
static std::vector<Outcome> run_families(int (*join)(dc_comm *c, dc_comm *to),
                                         const std::function<std::string(int rank, dc_comm *a, dc_comm *b)> &body) {
  std::string address[2] = {fresh_address(), fresh_address()};
  return run_ranks(3, [&](int rank) -> std::string {
    dc_comm *c[2];
    for (int i = 0; i < 2; i++) {
      dc_comm_config k = config_of(address[i].c_str(), rank, 3, 2, 4096, join ? 60000 : 3000);
      k.label = i ? "engine1/buckets" : "engine1/control";
      FINE(dc_comm_open(&k, &c[i]));
      FINE(dc_comm_set_caller(c[i], rank ? "train.py:31" : "train.py:50"));
      if (join && i) FINE(join(c[1], c[0]));
      FINE(dc_barrier(c[i], 0));
    }
    std::string said = body(rank, c[0], c[1]);
    FINE(dc_comm_close(c[0]));
    FINE(dc_comm_close(c[1]));
    return said;
  });
}

TEST(Deadlock, RanksThatWaitInDifferentGroupsAreToldOnAllOfThem) {
  for (int alone = 0; alone < 4; alone++) {
    expect_all_fine(
        run_families(alone % 2 ? dc_comm_meet : dc_comm_relate, [&](int rank, dc_comm *a, dc_comm *b) -> std::string {
          float x = 0;
          if (rank == alone / 2 * 2) WANT_STATUS(DC_E_MISMATCH, dc_barrier(a, 0));
          else WANT_STATUS(DC_E_MISMATCH, dc_all_reduce(b, &x, &x, 1, DC_F32, DC_RED_SUM, 0));
          WANT_TEXT("ranks wait for each other in different groups");
          WANT_TEXT("is in barrier() [call 2 at train.py:");
          WANT_TEXT("of group engine1/control and waits for rank");
          WANT_TEXT("is in all_reduce(fp32, count 1, sum) [call 2 at train.py:");
          WANT_TEXT("of group engine1/buckets and waits for rank");
          return "";
        }));
  }
}

TEST(Deadlock, RanksThatAreOnlyLateAreWaitedFor) {
  expect_all_fine(run_families(dc_comm_relate, [&](int rank, dc_comm *a, dc_comm *b) -> std::string {
    for (int i = 0; i < 2; i++) {
      if (rank == i) nap_ms(2500); // longer than a circle may stand
      FINE(dc_barrier(i % 2 ? a : b, 0));
    }
    return "";
  }));
}

// What one thread of a rank waits for may come from its other one, where families only meet.
TEST(Deadlock, OtherThreadsWaitInGroupsThatMeet) {
  expect_all_fine(run_families(dc_comm_meet, [&](int rank, dc_comm *a, dc_comm *b) -> std::string {
    int at_a = -1, at_b = -1;
    std::thread other([&] {
      if (rank != 1) nap_ms(5000); // longer than a circle may stand
      at_a = dc_barrier(a, 0);
    });
    if (rank == 1) nap_ms(5000);
    at_b = dc_barrier(b, 0);
    other.join();
    FINE(at_b);
    FINE(at_a);
    return "";
  }));
}

// Who tests whether a step is whole does something else meanwhile: it waits for nobody, itself included.
TEST(Deadlock, WhoOnlyTestsDoesNotWait) {
  expect_all_fine(run_families(dc_comm_relate, [&](int rank, dc_comm *, dc_comm *b) -> std::string {
    for (int late = 0; late < 3; late += 2) {
      dc_call call;
      memset(&call, 0, sizeof call);
      call.op = DC_CALL_USER;
      int64_t step;
      void *slot;
      if (rank == late) nap_ms(2500); // longer than a circle may stand
      FINE(dc_exchange_begin(b, &step, &slot));
      FINE(dc_exchange_post(b, &call));
      for (int ready = 0; !ready; nap_ms(1)) FINE(dc_exchange_test(b, step, &ready));
      FINE(dc_exchange_done(b, step));
    }
    return "";
  }));
}

// A stopped rank (by a debugger, a freezer) shows the wait that it was in, which may be over by now: its peers wait for
// what it does when it goes on.
TEST(Deadlock, AStoppedRankWaitsForNobody) {
  expect_all_fine(run_families(dc_comm_relate, [&](int rank, dc_comm *a, dc_comm *b) -> std::string {
    int32_t pid[3], own = getpid();
    FINE(dc_all_gather(b, &own, pid, 1, DC_I32, 0));
    if (rank == 0) {
      FINE(dc_comm_waits(a, 1, "to open a group")); // and rank 1 comes, after this look
      raise(SIGSTOP);
    } else if (rank == 1) {
      const std::string path = fmt("/proc/%d/stat", pid[0]);
      for (char state = 0; state != 'T'; nap_ms(1)) {
        FILE *f = fopen(path.c_str(), "r");
        WANT(f && fscanf(f, "%*d (%*[^)]) %c", &state) == 1, "%s", path.c_str());
        fclose(f);
      }
      std::string failed; // returned when rank 0 runs again
      for (double end = now() + 3; failed.empty() && now() < end; nap_ms(20)) // longer than a circle may stand
        if (dc_comm_waits(a, 0, "to open another group")) failed = dc_last_error();
      kill(pid[0], SIGCONT);
      WANT(failed.empty(), "%s", failed.c_str());
    }
    int rc = DC_OK; // that all of them run and still wait is what makes a deadlock
    while (rank < 2 && !(rc = dc_comm_waits(a, 1 - rank, "to open a group"))) nap_ms(20);
    if (rank == 2) rc = dc_barrier(a, 0);
    WANT(rc == DC_E_MISMATCH, "%s: %s", dc_status_name(rc), dc_last_error());
    WANT_TEXT("ranks wait for each other in different groups");
    return "";
  }));
}

// The end of a wait outside of a group is told also while another thread is in a call there.
TEST(Deadlock, AWaitOutsideEndsBesideACall) {
  expect_all_fine(run_families(dc_comm_relate, [&](int rank, dc_comm *a, dc_comm *b) -> std::string {
    if (rank == 0) {
      int rc = DC_OK;
      FINE(dc_comm_waits(a, 1, "to open a group"));
      std::thread t([&] { rc = dc_barrier(a, 1); });
      while (dc_comm_waits(a, 1, "to open a group") != DC_E_STATE) nap_ms(1); // until the call is in progress
      const int told = dc_comm_waits(a, -1, ""), met = dc_barrier(b, 0);
      t.join();
      WANT(!told && !met && !rc, "%s, %s, %s", dc_status_name(told), dc_status_name(met), dc_status_name(rc));
    } else {
      FINE(dc_barrier(b, 0));
      FINE(dc_barrier(a, 1));
    }
    return "";
  }));
}

TEST(Deadlock, OfGroupsThatAreNotRelatedIsATimeout) {
  expect_all_fine(run_families(nullptr, [&](int rank, dc_comm *a, dc_comm *b) -> std::string {
    WANT_STATUS(DC_E_TIMEOUT, dc_barrier(rank ? a : b, 0));
    while (!dc_comm_error(a)[0] || !dc_comm_error(b)[0]) nap_ms(1); // who still waits must not see others leave
    return "";
  }));
}

// Ranks 0 and 1 have a group of their own beside that of all three, and what waits in it depends on the other.
static std::vector<Outcome> run_depending(
    const std::function<std::string(int rank, dc_comm *all, dc_comm *pair)> &body) { // pair: NULL on rank 2
  std::string address[2] = {fresh_address(), fresh_address()};
  return run_ranks(3, [&](int rank) -> std::string {
    dc_comm *all, *pair = nullptr;
    dc_comm_config k = config_of(address[0].c_str(), rank, 3, 2, 4096, 600000);
    k.label = "engine1";
    FINE(dc_comm_open(&k, &all));
    if (rank < 2) {
      k = config_of(address[1].c_str(), rank, 2, 2, 4096, 600000);
      k.label = "tp";
      FINE(dc_comm_open(&k, &pair));
      FINE(dc_comm_depend(pair, all));
      FINE(dc_comm_depend(pair, all));
      FINE(dc_comm_depend(pair, pair));
    }
    FINE(dc_barrier(all, 0));
    std::string said = body(rank, all, pair);
    FINE(dc_comm_close(pair));
    FINE(dc_comm_close(all));
    return said;
  });
}

// Rank 1 waits for nobody, and lives until rank 0 has been told.
TEST(Depend, AWaitForALivingRankEndsWithADeathElsewhere) {
  for (int message = 0; message < 2; message++) {
    auto out = run_depending([&](int rank, dc_comm *, dc_comm *pair) -> std::string {
      float x = 0;
      if (rank == 2) raise(SIGKILL);
      if (rank == 1) {
        while (!dc_comm_error(pair)[0]) nap_ms(1);
        return "";
      }
      if (message) WANT_STATUS(DC_E_PEER_DIED, dc_recv(pair, &x, 1, DC_F32, 1, 0, nullptr));
      else WANT_STATUS(DC_E_PEER_DIED, dc_barrier(pair, 0));
      WANT_TEXT("group engine1: rank 2 (pid ");
      WANT_TEXT("died: ");
      WANT_TEXT("rank 0 waits in group tp of the same model");
      return "";
    });
    EXPECT_TRUE(out[2].killed());
    out.pop_back();
    expect_all_fine(out);
  }
}

TEST(Depend, AWaitEndsWithWhatBrokeAnotherGroup) {
  expect_all_fine(run_depending([&](int rank, dc_comm *all, dc_comm *pair) -> std::string {
    if (rank) {
      WANT_STATUS(DC_E_MISMATCH, dc_barrier(all, rank));
      while (pair && !dc_comm_error(pair)[0]) nap_ms(1);
      return "";
    }
    WANT_STATUS(DC_E_MISMATCH, dc_barrier(pair, 0));
    WANT_TEXT("rank 1 called barrier(tag 1)");
    WANT_TEXT("rank 2 called barrier(tag 2)");
    return "";
  }));
}

// Who polls learns of it as well.
TEST(Depend, ATestEndsWithADeathElsewhere) {
  auto out = run_depending([&](int rank, dc_comm *, dc_comm *pair) -> std::string {
    if (rank == 2) raise(SIGKILL);
    if (rank == 1) {
      while (!dc_comm_error(pair)[0]) nap_ms(1);
      return "";
    }
    float x = 0;
    dc_request *r;
    int done = 0, rc;
    FINE(dc_irecv(pair, &x, 1, DC_F32, 1, 0, nullptr, &r));
    while (!(rc = dc_request_test(r, &done)) && !done) nap_ms(1);
    WANT(rc == DC_E_PEER_DIED, "status %d", rc);
    FINE(dc_request_free(r));
    return "";
  });
  out.pop_back();
  expect_all_fine(out);
}

// A rank that has left, and one of a group that this rank has closed, is nobody's business.
TEST(Depend, NothingEndsWithRanksThatHaveLeft) {
  for (int closes = 0; closes < 2; closes++) {
    auto out = run_depending([&](int rank, dc_comm *all, dc_comm *pair) -> std::string {
      if (rank == 2) {
        if (closes) raise(SIGKILL);
        return "";
      }
      if (closes) { // dc_comm_close of run_depending gets what it can close
        FINE(dc_comm_close(all));
        if (rank == 1) nap_ms(2500); // longer than a death's grace
        FINE(dc_barrier(pair, 0));
        FINE(dc_comm_close(pair));
        _exit(0);
      }
      if (rank == 1) nap_ms(2500);
      FINE(dc_barrier(pair, 0));
      return "";
    });
    out.pop_back();
    expect_all_fine(out);
  }
}

TEST(Depend, AnErrorOfAnotherGroupIsPassedOnAsItIs) {
  expect_all_fine(run_depending([&](int rank, dc_comm *, dc_comm *pair) -> std::string {
    if (rank == 2) return "";
    WANT_STATUS(DC_E_INVALID, dc_comm_fail(pair, DC_OK, "fine"));
    WANT_STATUS(DC_E_INVALID, dc_comm_fail(pair, 12345, "no status"));
    WANT_STATUS(DC_E_INVALID, dc_comm_fail(pair, DC_E_PEER_DIED, nullptr));
    WANT_STATUS(DC_E_INVALID, dc_comm_depend(pair, nullptr));
    FINE(dc_barrier(pair, 0)); /* what is refused breaks nothing */
    if (rank) FINE(dc_comm_fail(pair, DC_E_PEER_DIED, "group pp: rank 7 died"));
    WANT_STATUS(DC_E_PEER_DIED, dc_barrier(pair, 0));
    WANT_TEXT("group pp: rank 7 died");
    return "";
  }));
}

TEST(Deadlock, RelatingWhatCanNotBeRelatedIsRefused) {
  std::string address[2] = {fresh_address(), fresh_address()};
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm *c, *turned;
    dc_comm_config k = config_of(address[0].c_str(), rank, 2), t = config_of(address[1].c_str(), 1 - rank, 2);
    FINE(dc_comm_open(&k, &c));
    FINE(dc_comm_open(&t, &turned));
    WANT_STATUS(DC_E_INVALID, dc_comm_relate(c, turned));
    WANT_STATUS(DC_E_INVALID, dc_comm_relate(c, nullptr));
    WANT_STATUS(DC_E_INVALID, dc_comm_meet(c, turned));
    WANT_STATUS(DC_E_INVALID, dc_comm_meet(nullptr, c));
    FINE(dc_comm_relate(c, c));
    FINE(dc_comm_close(turned));
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Death, AKilledRankIsDiagnosedOnAllSurvivors) {
  std::string address = fresh_address();
  auto out = run_ranks(4, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 4);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    std::vector<float> x(100000);
    FINE(dc_comm_set_caller(c, "loop.py:7"));
    for (int i = 0;; i++) {
      if (rank == 2 && i == 20) kill(getpid(), SIGKILL);
      int rc = dc_all_reduce(c, x.data(), x.data(), (int64_t)x.size(), DC_F32, DC_RED_SUM, 0);
      if (rc == DC_OK && i < 1000) continue;
      WANT(rc == DC_E_PEER_DIED, "%s after %d calls: %s", dc_status_name(rc), i, dc_last_error());
      break;
    }
    WANT_TEXT("rank 2 (pid ");
    WANT_TEXT("died");
    WANT_TEXT("all_reduce(fp32, count 100000, sum) [call 21 at loop.py:7]");
    WANT_STATUS(DC_E_PEER_DIED, dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    return "";
  });
  EXPECT_TRUE(out[2].killed());
  for (int r : {0, 1, 3}) EXPECT_EQ(out[r].text, "") << "rank " << r;
}

// The victim is a zombie while the survivors look: its parent (this test) reaps late.
TEST(Death, AZombieCountsAsDeadAndItsSignalIsNamed) {
  std::string address = fresh_address();
  auto out = run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    if (rank == 1) raise(SIGKILL);
    WANT_STATUS(DC_E_PEER_DIED, dc_barrier(c, 0));
    WANT_TEXT("killed by signal 9"); // ranks are waited for in order: while rank 0 runs, rank 1 is not reaped
    WANT_TEXT("has finished barrier() [call 1]");
    FINE(dc_comm_close(c));
    return "";
  });
  EXPECT_EQ(out[0].text, "");
}

// A timer ends rank 1 at any instruction of any collective; the others must always learn of it, with sound data until
// then.
TEST(Death, AtAnyMoment) {
  for (int round = 0; round < 24; round++) {
    SCOPED_TRACE(round);
    std::string address = fresh_address();
    auto out = run_ranks(3, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, 3, 2 + round % 2);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      FINE(dc_barrier(c, 0));
      itimerval t = {{0, 0}, {0, 200 + 617 * round}};
      if (rank == 1) setitimer(ITIMER_REAL, &t, nullptr); // SIGALRM ends a process that does not catch it
      int rc = DC_OK;
      std::vector<int32_t> x(5000), y(15000);
      for (int i = 0; rc == DC_OK; i++) {
        for (size_t e = 0; e < x.size(); e++) x[e] = rank + i;
        rc = dc_all_reduce(c, x.data(), x.data(), 5000, DC_I32, DC_RED_SUM, 0);
        for (size_t e = 0; rc == DC_OK && e < x.size(); e++)
          WANT(x[e] == 3 * i + 3, "call %d element %zu: %d", i, e, x[e]);
        if (rc == DC_OK) rc = dc_all_gather(c, x.data(), y.data(), 5000, DC_I32, 0);
        if (rc == DC_OK) rc = dc_broadcast(c, x.data(), 1500, DC_I32, i % 3, 0);
        if (rc == DC_OK) rc = dc_reduce_scatter(c, y.data(), x.data(), 1700, DC_I32, DC_RED_MAX, 0);
        if (rc == DC_OK) rc = dc_barrier(c, i);
      }
      WANT(rc == DC_E_PEER_DIED, "%s: %s", dc_status_name(rc), dc_last_error());
      WANT_TEXT("rank 1 (pid ");
      FINE(dc_comm_close(c));
      return "";
    });
    EXPECT_EQ(out[0].text, "");
    EXPECT_EQ(out[2].text, "");
    EXPECT_TRUE(WIFSIGNALED(out[1].status)) << out[1].text;
  }
}

TEST(Death, LeavingIsTold) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 3);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    if (rank != 1) {
      WANT_STATUS(DC_E_PEER_DIED, dc_barrier(c, 0));
      WANT_TEXT("left the group");
    }
    FINE(dc_comm_close(c));
    return "";
  }));
}

// Who has given all that others need may go at once.
TEST(Death, LeavingAfterTheLastCallHarmsNobody) {
  for (int round = 0; round < 5; round++) {
    std::string address = fresh_address();
    expect_all_fine(run_ranks(4, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, 4);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      std::vector<float> x(3000, 1.0f);
      FINE(dc_all_reduce(c, x.data(), x.data(), 3000, DC_F32, DC_RED_SUM, 0));
      if (rank == 3) nap_ms(30);
      FINE(dc_broadcast(c, x.data(), 1000, DC_F32, 0, 0));
      if (rank % 2 == 0) _exit(0); // without closing
      FINE(dc_comm_close(c));
      return "";
    }));
  }
}

TEST(Timeout, TellsWhereEveryRankIs) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 3, 2, 4096, 1500);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_comm_set_caller(c, "warmup.py:3"));
    FINE(dc_barrier(c, 0));
    if (rank == 1) {
      while (dc_comm_error(c)[0] == 0) nap_ms(5);
      WANT_STATUS(DC_E_TIMEOUT, dc_barrier(c, 0));
    } else {
      FINE(dc_comm_set_caller(c, "train.py:50"));
      double x = 0;
      WANT_STATUS(DC_E_TIMEOUT, dc_all_reduce(c, &x, &x, 1, DC_F64, DC_RED_SUM, 0));
    }
    WANT_TEXT("time-out after 1500 ms: rank 1 did not arrive");
    WANT_TEXT("in all_reduce(fp64, count 1, sum) [call 2 at train.py:50]");
    WANT_TEXT("rank 1 (pid ");
    WANT_TEXT("has finished barrier() [call 1 at warmup.py:3]");
    WANT_TEXT("is in all_reduce(fp64");
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Abort, FromAnotherThreadWakesEveryRank) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 3);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    std::thread t;
    if (rank == 1)
      t = std::thread([c] {
        nap_ms(50);
        dc_comm_abort(c, "loss is NaN");
      });
    int rc = rank == 2 ? DC_OK : dc_barrier(c, 0); // ranks 0 and 1 wait for rank 2 for ever
    if (t.joinable()) t.join();
    while (rank == 2 && dc_comm_error(c)[0] == 0) nap_ms(1);
    if (rank == 2) rc = dc_barrier(c, 0);
    WANT(rc == DC_E_ABORTED, "%s", dc_status_name(rc));
    WANT_TEXT("rank 1 (pid ");
    WANT_TEXT("aborted: loss is NaN");
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Threads, ASecondThreadInTheSameGroupIsRefused) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    if (rank == 0) {
      std::atomic<int> rc{1};
      std::thread t([&] { rc = dc_barrier(c, 0); });
      int second, tries = 0;
      do { // until the thread is inside
        nap_ms(1);
        int ready;
        second = dc_exchange_can_begin(c, &ready);
      } while (second == DC_OK && ++tries < 10000);
      std::string text = dc_last_error();
      int closing = dc_comm_close(c);
      dc_comm_abort(c, "test over");
      t.join();
      WANT(second == DC_E_STATE && strstr(text.c_str(), "another thread"), "%d %s", second, text.c_str());
      WANT(closing == DC_E_STATE, "%d", closing);
      WANT(rc == DC_E_ABORTED, "%d", rc.load());
    } else {
      while (dc_comm_error(c)[0] == 0) nap_ms(1);
    }
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Threads, RanksMayBeThreadsOfOneProcess) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(1, [&](int) -> std::string {
    return run_threads(2, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, 2);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      std::string d = check_everything(c, rank, 2, DC_F32);
      FINE(dc_comm_close(c));
      return d;
    });
  }));
}

TEST(Fork, AChildCanNotUseTheParentsGroupAndCanOpenItsOwn) {
  std::string address = fresh_address(), own = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    auto out = run_ranks(1, [&](int) -> std::string {
      WANT_STATUS(DC_E_STATE, dc_barrier(c, 0));
      WANT_TEXT("forked");
      WANT_STATUS(DC_E_STATE, dc_comm_abort(c, "x"));
      WANT(dc_comm_error(c)[0] == 0, "error text in a child");
      dc_comm *mine;
      std::string name = own + (rank ? "b" : "a");
      dc_comm_config k1 = config_of(name.c_str(), 0, 1);
      FINE(dc_comm_open(&k1, &mine));
      FINE(dc_barrier(mine, 0));
      WANT_STATUS(DC_E_STATE, dc_barrier(c, 0)); // still not the child's, after its own open
      FINE(dc_comm_close(mine));
      FINE(dc_comm_close(c)); // frees what is local, tells nobody
      return "";
    });
    WANT(out[0].text.empty() && out[0].status == 0, "child: %s", out[0].text.c_str());
    FINE(dc_barrier(c, 0)); // the parent's group is untouched
    FINE(dc_comm_close(c));
    return "";
  }));
}

// ---- joining
// -------------------------------------------------------------------------------------------------------------------

int connect_to(const std::string &address) {
  sockaddr_un a;
  memset(&a, 0, sizeof a);
  a.sun_family = AF_UNIX;
  memcpy(a.sun_path + 1, address.data(), address.size());
  int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  for (int i = 0; i < 5000; i++) {
    if (connect(s, (sockaddr *)&a, (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + address.size())) == 0) return s;
    nap_ms(1);
  }
  close(s);
  return -1;
}

// True when the other side has closed without giving anything.
bool refused(int s) {
  char buf[2048];
  pollfd p = {s, POLLIN, 0};
  return poll(&p, 1, 20000) == 1 && read(s, buf, sizeof buf) <= 0;
}

TEST(Joining, StrangersAreRefusedAndTheGroupOpensAllTheSame) {
  std::string address = fresh_address();
  bool root = geteuid() == 0;
  expect_all_fine(run_ranks(root ? 4 : 3, [&](int rank) -> std::string {
    if (rank == 2) { // garbage, a hello of the right size without magic, and silence
      int quiet = connect_to(address), g = connect_to(address);
      WANT(quiet >= 0 && g >= 0, "connect: %s", strerror(errno));
      std::vector<char> junk(1088, 'x');
      WANT(send(g, junk.data(), junk.size(), MSG_NOSIGNAL) > 0, "send");
      WANT(refused(g), "garbage was not refused");
      WANT(refused(quiet), "a silent stranger was served");
      close(g);
      close(quiet);
      return "";
    }
    if (rank == 3) { // another user
      WANT(setuid(65534) == 0, "setuid");
      int s = connect_to(address);
      WANT(s >= 0 && refused(s), "another user was not refused");
      close(s);
      return "";
    }
    if (rank == 1) nap_ms(300); // leave the strangers time to try
    dc_comm_config k = config_of(address.c_str(), rank, 2);
    dc_comm *c;
    FINE(dc_comm_open(&k, &c));
    FINE(dc_barrier(c, 0));
    FINE(dc_comm_close(c));
    return "";
  }));
}

TEST(Joining, DifferentSettingsAreAShapeErrorOnBothSides) {
  const std::function<void(dc_comm_config *)> changes[] = {[](dc_comm_config *k) { k->size = 3; },
                                                           [](dc_comm_config *k) { k->slots = 4; },
                                                           [](dc_comm_config *k) { k->slot_bytes = 8192; }};
  for (const auto &change : changes) {
    std::string address = fresh_address();
    expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
      dc_comm_config k = config_of(address.c_str(), rank, 2);
      if (rank) change(&k);
      dc_comm *c = nullptr;
      WANT_STATUS(DC_E_SHAPE, dc_comm_open(&k, &c));
      WANT_TEXT("rank 0 has 2 ranks and 2 slots of 4096 bytes");
      return "";
    }));
  }
}

TEST(Joining, TheSameRankTwiceIsAShapeError) {
  std::string address = fresh_address();
  auto out = run_ranks(3, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank == 0 ? 0 : 1, 3);
    dc_comm *c = nullptr;
    WANT_STATUS(DC_E_SHAPE, dc_comm_open(&k, &c));
    WANT_TEXT("rank 1 joined twice");
    return "";
  });
  expect_all_fine(out);
}

TEST(Joining, AMissingRankIsNamed) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 3, 2, 4096, 400);
    dc_comm *c = nullptr;
    WANT_STATUS(DC_E_TIMEOUT, dc_comm_open(&k, &c));
    WANT_TEXT("2 of 3 ranks joined");
    WANT_TEXT("missing: rank 2");
    return "";
  }));
}

TEST(Joining, NobodyListens) {
  expect_all_fine(run_ranks(1, [&](int) -> std::string {
    dc_comm_config k = config_of("deepc-test-nobody", 1, 2, 2, 4096, 100);
    dc_comm *c = nullptr;
    WANT_STATUS(DC_E_TIMEOUT, dc_comm_open(&k, &c));
    WANT_TEXT("rank 0 did not listen within 100 ms");
    return "";
  }));
}

TEST(Joining, ARankThatDiesWhileJoiningEndsItForAll) {
  std::string address = fresh_address();
  auto *gave_up = (std::atomic<int> *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gave_up, MAP_FAILED);
  auto out = run_ranks(3, [&](int rank) -> std::string {
    if (rank == 2) { // joins with a thread and is killed before rank 1 joins
      std::thread([&] {
        dc_comm_config k = config_of(address.c_str(), 2, 3);
        dc_comm *c;
        dc_comm_open(&k, &c);
      }).detach();
      nap_ms(1000);
      kill(getpid(), SIGKILL);
    }
    while (rank == 1 && !*gave_up) nap_ms(1);
    dc_comm_config k = config_of(address.c_str(), rank, 3, 2, 4096, rank ? 1000 : 60000);
    dc_comm *c = nullptr;
    int rc = dc_comm_open(&k, &c);
    if (rank == 0) {
      *gave_up = 1;
      WANT(rc == DC_E_PEER_DIED, "%s", dc_status_name(rc));
      WANT_TEXT("rank 2 (pid ");
    } else {
      WANT(rc == DC_E_TIMEOUT, "%s", dc_status_name(rc)); // rank 0 has given up and is gone
    }
    return "";
  });
  munmap(gave_up, 4096);
  EXPECT_EQ(out[0].text, "");
  EXPECT_EQ(out[1].text, "");
}

// What three ranks know of each other.
struct Known {
  std::atomic<int> pid[3], gave_up, done;
};

Known *known() {
  auto *k = (Known *)mmap(nullptr, sizeof(Known), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return k == MAP_FAILED ? nullptr : k;
}

std::vector<int32_t> all_pids(Known *k, int rank) {
  k->pid[rank] = getpid();
  for (auto &pid : k->pid)
    while (!pid) nap_ms(1);
  return {k->pid[0], k->pid[1], k->pid[2]};
}

// Rank 0 has given up and closed its address, and lives: who comes then waits for nobody.
TEST(Joining, WhoComesBehindThemIsToldWhoDied) {
  std::string address = fresh_address();
  Known *at = known();
  ASSERT_NE(at, nullptr);
  auto out = run_ranks(3, [&](int rank) -> std::string {
    std::vector<int32_t> pid = all_pids(at, rank);
    if (rank == 1) kill(getpid(), SIGKILL);
    while (rank == 2 && !at->gave_up) nap_ms(1);
    dc_comm_config k = config_of(address.c_str(), rank, 3);
    k.pid = pid.data();
    dc_comm *c = nullptr;
    WANT_STATUS(DC_E_PEER_DIED, dc_comm_open(&k, &c));
    WANT_TEXT("rank 1 (pid ");
    WANT_TEXT("died before it joined");
    if (rank == 2) at->done = 1;
    else at->gave_up = 1;
    while (!at->done) nap_ms(1);
    return "";
  });
  munmap(at, sizeof *at);
  EXPECT_EQ(out[0].text, "");
  EXPECT_EQ(out[2].text, "");
}

// Rank 0 hears of a death before it has accepted one that waits in its queue.
TEST(Joining, WhoIsNotAcceptedYetIsToldWhoDied) {
  std::string address = fresh_address();
  Known *at = known();
  ASSERT_NE(at, nullptr);
  auto out = run_ranks(3, [&](int rank) -> std::string {
    std::vector<int32_t> pid = all_pids(at, rank);
    while (rank == 1) nap_ms(1000);
    dc_comm_config k = config_of(address.c_str(), rank, 3);
    if (rank == 0) k.pid = pid.data(); // rank 2 knows nothing but what it is told
    dc_comm *c = nullptr;
    if (rank == 2) {
      int s = connect_to(address);
      WANT(s >= 0, "connect: %s", strerror(errno));
      close(s);
      nap_ms(400); // rank 0 has looked for rank 1
      kill(pid[0], SIGSTOP);
      std::thread t([&] {
        nap_ms(300);
        pollfd gone = {(int)syscall(SYS_pidfd_open, pid[1], 0), POLLIN, 0};
        kill(pid[1], SIGKILL);
        poll(&gone, 1, 20000);
        close(gone.fd);
        kill(pid[0], SIGCONT);
      });
      int rc = dc_comm_open(&k, &c);
      t.join();
      WANT(rc == DC_E_PEER_DIED, "%s", dc_status_name(rc));
    } else WANT_STATUS(DC_E_PEER_DIED, dc_comm_open(&k, &c));
    WANT_TEXT("rank 1 (pid ");
    return "";
  });
  munmap(at, sizeof *at);
  EXPECT_EQ(out[0].text, "");
  EXPECT_EQ(out[2].text, "");
}

TEST(Joining, TooMuchStagingIsRefusedOnAllRanks) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm_config k = config_of(address.c_str(), rank, 2, 2, (int64_t)1 << 40);
    dc_comm *c = nullptr;
    WANT_STATUS(DC_E_NOMEM, dc_comm_open(&k, &c));
    WANT_TEXT("available");
    return "";
  }));
}

// ---- nothing left behind
// ------------------------------------------------------------------------------------------------------

int entries_of(const char *path, const char *part = "") {
  int n = 0;
  if (DIR *d = opendir(path)) {
    while (const dirent *e = readdir(d)) n += strstr(e->d_name, part) != nullptr;
    closedir(d);
  }
  return n;
}

TEST(NothingLeft, DescriptorsMappingsAndNames) {
  std::string address = fresh_address();
  int shm_before = entries_of("/dev/shm", "deepc"); // others use it too
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    int fds = 0;
    for (int i = 0; i < 3; i++) { // the first round sets up what a process keeps
      std::string name = address + (char)('a' + i);
      dc_comm_config k = config_of(name.c_str(), rank, 2);
      dc_comm *c;
      FINE(dc_comm_open(&k, &c));
      dc_segment *s;
      void *base;
      FINE(dc_segment_create(c, 1 << 20, &s, &base));
      FINE(dc_segment_free(s));
      FINE(dc_barrier(c, 0));
      FINE(dc_comm_close(c));
      if (i == 0) fds = entries_of("/proc/self/fd");
    }
    WANT(entries_of("/proc/self/fd") == fds, "descriptors leak");
    FILE *f = fopen("/proc/self/maps", "r");
    WANT(f, "maps");
    char line[1024];
    bool found = false;
    while (fgets(line, sizeof line, f)) found |= strstr(line, "memfd:deepc ") != nullptr;
    fclose(f);
    WANT(!found, "a shared mapping is left");
    return "";
  }));
  EXPECT_LE(entries_of("/dev/shm", "deepc"), shm_before);
}

TEST(NothingLeft, TheAddressIsFreeAsSoonAsTheGroupIsOpen) {
  std::string address = fresh_address();
  expect_all_fine(run_ranks(2, [&](int rank) -> std::string {
    dc_comm *c[2];
    for (auto &x : c) {
      dc_comm_config k = config_of(address.c_str(), rank, 2);
      FINE(dc_comm_open(&k, &x));
      FINE(dc_barrier(x, 0));
    }
    FINE(dc_barrier(c[0], 0));
    FINE(dc_comm_close(c[0]));
    FINE(dc_comm_close(c[1]));
    return "";
  }));
}

} // namespace
