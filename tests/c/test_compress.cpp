// The compression ops on every instruction set, bit for bit against the scalar reference; the reference against the
// definitions of ops.h in double precision; non-finite values, error feedback, payload bytes, arguments, threads.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "codec_cases.h"

namespace {

class Compress : public Ops {};

Array zeros(int dt, int64_t n) { return Array{dt, std::vector<uint8_t>((size_t)n * dc_dtype_size(dt))}; }

int64_t topk_bytes(int64_t block, int64_t k, int64_t n) {
  int64_t bytes = -1;
  EXPECT_EQ(dc_topk_bytes(block, k, n, &bytes), DC_OK) << dc_last_error();
  return bytes;
}

std::vector<float> floats_of(const Array &a) {
  const int64_t n = (int64_t)(a.bytes.size() / a.element());
  std::vector<float> out((size_t)n);
  EXPECT_EQ(dc_cast(out.data(), DC_F32, a.bytes.data(), a.dt, 1.0f, n), DC_OK) << dc_last_error();
  return out;
}

// ---- every instruction set -----------------------------------------------------------------------------------------
TEST_F(Compress, QuantizeEqualsReference) {
  for (int64_t n : kSizes)
    for (int bits : kBits)
      for (int dt : kLow)
        for (int k = 0; k < 3; k++) {
          const int64_t block = kBlockSizes[k];
          for (bool fed : {false, true})
            same_everywhere(
                {payload_of(quant_bytes(bits, block, n)), make(dt, n, fill_of(n, k), 60),
                 make(DC_F32, fed ? n : 0, kOrdinary, 61)},
                [=](auto &p) { return dc_quantize(p[0], bits, block, p[1], dt, fed ? (float *)p[2] : nullptr, n); },
                name_of("quantize", dt, n) + " bits=" + std::to_string(bits) + " block=" + std::to_string(block));
        }
}

TEST_F(Compress, AverageOfSignsEqualsReferenceAndItsParts) {
  for (int64_t n : kSizes)
    for (int64_t count : {1, 2, 5}) {
      const int64_t block = kBlockSizes[n % 3], bytes = quant_bytes(1, block, n), stride = bytes + 4 * (count - 1);
      const float factor = 1.0f / (float)count;
      const Array rows = sign_rows(count, stride, block, n);
      const Array error = make(DC_F32, n, kOrdinary, 91);
      same_everywhere(
          {payload_of(bytes), error, rows},
          [=](auto &p) {
            return dc_average_signs((uint8_t *)p[0], block, (const uint8_t *)p[2], count, stride, factor, (float *)p[1],
                                    n);
          },
          name_of("average_signs", DC_F32, n) + " of " + std::to_string(count));
      std::vector<uint8_t> got((size_t)bytes), want((size_t)bytes);
      auto left = as<float>(error.bytes), left_too = left;
      std::vector<float> sum((size_t)n);
      ASSERT_EQ(dc_average_signs(got.data(), block, rows.bytes.data(), count, stride, factor, left.data(), n), DC_OK);
      ASSERT_EQ(dc_dequantize(sum.data(), DC_F32, rows.bytes.data(), 1, block, n), DC_OK);
      for (int64_t k = 1; k < count; k++)
        ASSERT_EQ(dc_dequantize_add(sum.data(), rows.bytes.data() + k * stride, 1, block, 1.0f, n), DC_OK);
      for (auto &s : sum) s *= factor;
      ASSERT_EQ(dc_quantize(want.data(), 1, block, sum.data(), DC_F32, left_too.data(), n), DC_OK);
      EXPECT_EQ(got, want) << n << " " << count;
      for (size_t i = 0; i < (size_t)n; i++) ASSERT_EQ(::bits(left[i]), ::bits(left_too[i])) << i;
    }
  std::vector<uint8_t> p(64), rows(128);
  std::vector<float> e(64);
  EXPECT_EQ(dc_average_signs(p.data(), 64, rows.data(), 0, 64, 1.0f, e.data(), 64), DC_E_INVALID);
  EXPECT_EQ(dc_average_signs(p.data(), 64, rows.data(), 2, 8, 1.0f, e.data(), 64), DC_E_INVALID);
  EXPECT_EQ(dc_average_signs(p.data(), 64, rows.data(), 2, 18, 1.0f, e.data(), 64), DC_E_INVALID);
  EXPECT_EQ(dc_average_signs(p.data(), 64, p.data(), 1, 12, 1.0f, e.data(), 64), DC_E_INVALID);
  EXPECT_EQ(dc_average_signs(p.data(), 64, rows.data(), 1, 12, 1.0f, nullptr, 64), DC_E_INVALID);
  EXPECT_EQ(dc_average_signs(nullptr, 64, nullptr, 1, 0, 1.0f, nullptr, 0), DC_OK);
}

TEST_F(Compress, DequantizeEqualsReference) { // payloads of any bytes: also scales and codes that no quantizer makes
  for (int64_t n : kSizes)
    for (int bits : kBits)
      for (int dt : kLow) {
        const int64_t block = kBlockSizes[n % 3];
        Array payload{DC_I32, raw(quant_bytes(bits, block, n), 62).bytes};
        same_everywhere(
            {make(dt, n, kAnyBits, 63), payload},
            [=](auto &p) { return dc_dequantize(p[0], dt, p[1], bits, block, n); },
            name_of("dequantize", dt, n) + " bits=" + std::to_string(bits));
        if (dt != DC_F32) continue;
        same_everywhere(
            {make(dt, n, fill_of(n, bits), 64), payload},
            [=](auto &p) { return dc_dequantize_add((float *)p[0], p[1], bits, block, -0.75f, n); },
            name_of("dequantize_add", dt, n) + " bits=" + std::to_string(bits));
      }
}

TEST_F(Compress, TopkEqualsReference) {
  const int64_t blocks[] = {64, 1024, 4096};
  for (int64_t n : kSizes)
    for (int dt : kLow)
      for (int k = 0; k < 3; k++)
        for (bool fed : {false, true}) {
          const int64_t block = blocks[(k + fed) % 3], few = k == 0 ? 1 : k == 1 ? block / 50 + 2 : block - 7;
          same_everywhere(
              {payload_of(topk_bytes(block, few, n)), make(dt, n, fill_of(n, k), 65),
               make(DC_F32, fed ? n : 0, kOrdinary, 66)},
              [=](auto &p) { return dc_topk(p[0], block, few, p[1], dt, fed ? (float *)p[2] : nullptr, n); },
              name_of("topk", dt, n) + " block=" + std::to_string(block) + " k=" + std::to_string(few));
        }
}

TEST_F(Compress, RotationEqualsReference) {
  std::vector<int64_t> sizes(std::begin(kSizes), std::end(kSizes));
  for (int64_t n : {3, 33, 129, 511, 1023, 2047, 2048, 2049, 2048 + 1024 + 64 + 3, 5 * 2048 + 2047}) sizes.push_back(n);
  for (int64_t n : sizes)
    for (Fill fill : {kOrdinary, kAnyBits, kSpecial})
      same_everywhere(
          {make(DC_F32, n, fill, 67)}, [=](auto &p) { return dc_rotate((float *)p[0], n); },
          name_of("rotate", DC_F32, n) + " fill=" + std::to_string(fill));
}

TEST_F(Compress, TopkTakesEqualNumbersInOrder) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (float value : {0.0f, -0.0f, 2.5f, FLT_MAX, 1e-45f, (float)INFINITY}) {
      std::vector<float> x(300, value);
      x[70] = -value;
      std::vector<uint8_t> payload((size_t)topk_bytes(128, 5, 300));
      ASSERT_EQ(dc_topk(payload.data(), 128, 5, x.data(), DC_F32, nullptr, 300), DC_OK);
      const auto index = as<uint16_t>(std::vector<uint8_t>(payload.begin() + 15 * 4, payload.begin() + 15 * 6));
      for (size_t i = 0; i < 15; i++) EXPECT_EQ(index[i], i % 5) << dc_isa_name(isa) << " " << value;
    }
  }
}

// ---- the definitions -----------------------------------------------------------------------------------------------
TEST_F(Compress, LevelsAreNearestAndErrorsAreWhatIsLeft) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int bits : {8, 4})
      for (int64_t block : {64, 256})
        for (float size : {1.0f, 1e-25f, 1e30f}) {
          const int64_t n = 5 * block + 17;
          const double most = bits == 8 ? 127 : 7;
          auto x = as<float>(make(DC_F32, n, kOrdinary, 70).bytes),
               error = as<float>(make(DC_F32, n, kOrdinary, 71).bytes);
          for (size_t i = 0; i < x.size(); i++) x[i] *= size, error[i] *= size;
          const auto before = error;
          std::vector<uint8_t> payload((size_t)quant_bytes(bits, block, n));
          std::vector<float> out(x.size()), acc(x.size(), size);
          ASSERT_EQ(dc_quantize(payload.data(), bits, block, x.data(), DC_F32, error.data(), n), DC_OK);
          ASSERT_EQ(dc_dequantize(out.data(), DC_F32, payload.data(), bits, block, n), DC_OK);
          ASSERT_EQ(dc_dequantize_add(acc.data(), payload.data(), bits, block, 0.5f, n), DC_OK);
          for (int64_t b = 0; b * block < n; b++) {
            const int64_t end = std::min(n, (b + 1) * block);
            float top = 0;
            for (int64_t i = b * block; i < end; i++) top = std::max(top, std::fabs(x[(size_t)i] + before[(size_t)i]));
            float scale;
            memcpy(&scale, &payload[(size_t)b * 4], 4);
            EXPECT_EQ(scale, top / (float)most);
            for (size_t i = (size_t)(b * block); i < (size_t)end; i++) {
              const double v = (double)(x[i] + before[i]), code = (double)out[i] / scale;
              ASSERT_NEAR(code, std::nearbyint(code), 1e-5) << i;
              ASSERT_LE(std::fabs(std::nearbyint(code)), most) << i;
              ASSERT_LE(std::fabs(v - out[i]), scale * 0.5 * (1 + 0x1p-16)) << i;
              ASSERT_NEAR(error[i], v - std::nearbyint(code) * (double)scale, 0x1p-23 * std::fabs(scale)) << i;
              ASSERT_NEAR(acc[i], size + 0.5 * std::nearbyint(code) * (double)scale, 0x1p-22 * (size + std::fabs(v)))
                  << i;
            }
          }
        }
  }
}

TEST_F(Compress, CodesRoundToEven) { // top = 127 makes the scale 1: the codes are the rounded numbers
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<float> x = {127.0f, 0.5f,   1.5f,    2.5f,        -0.5f,   -1.5f,
                            -2.5f,  126.5f, -126.5f, 0.49999997f, -127.0f, 125.5f};
    const int8_t want[] = {127, 0, 2, 2, 0, -2, -2, 126, -126, 0, -127, 126};
    std::vector<uint8_t> payload((size_t)quant_bytes(8, 64, 12));
    ASSERT_EQ(dc_quantize(payload.data(), 8, 64, x.data(), DC_F32, nullptr, 12), DC_OK);
    for (size_t i = 0; i < 12; i++) EXPECT_EQ((int8_t)payload[4 + i], want[i]) << i;
    x = {7.0f, 0.5f, 1.5f, -7.0f, -6.5f, 5.5f, 3.0f};
    payload.assign((size_t)quant_bytes(4, 64, 7), 0xff);
    ASSERT_EQ(dc_quantize(payload.data(), 4, 64, x.data(), DC_F32, nullptr, 7), DC_OK);
    EXPECT_EQ((std::vector<uint8_t>(payload.begin() + 4, payload.end())),
              (std::vector<uint8_t>{0x07, 0x92, 0x6a, 0x03}));
  }
}

TEST_F(Compress, SignsTravelWithTheMeanMagnitude) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    const int64_t n = 2048 + 333;
    auto x = as<float>(make(DC_F32, n, kOrdinary, 72).bytes), error = as<float>(make(DC_F32, n, kOrdinary, 73).bytes);
    x[0] = 0.0f, error[0] = 0.0f;
    const auto before = error;
    std::vector<uint8_t> payload((size_t)quant_bytes(1, 2048, n));
    std::vector<float> out((size_t)n);
    ASSERT_EQ(dc_quantize(payload.data(), 1, 2048, x.data(), DC_F32, error.data(), n), DC_OK);
    ASSERT_EQ(dc_dequantize(out.data(), DC_F32, payload.data(), 1, 2048, n), DC_OK);
    for (int64_t b = 0; b < 2; b++) {
      const int64_t begin = b * 2048, end = std::min<int64_t>(n, begin + 2048);
      long double sum = 0;
      for (int64_t i = begin; i < end; i++) sum += std::fabs((long double)(x[(size_t)i] + before[(size_t)i]));
      const float mean = (float)(sum / (long double)(end - begin));
      for (size_t i = (size_t)begin; i < (size_t)end; i++) {
        const float v = x[i] + before[i], want = std::signbit(v) ? -mean : mean;
        ASSERT_NEAR(out[i], want, 0x1p-23 * mean) << i; // fp64 sums of another order round to fp32 alike, or next to it
        ASSERT_EQ(error[i], v - out[i]) << i;
      }
    }
  }
}

TEST_F(Compress, TopkIsExactAndKeepsTheRest) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int dt : kLow)
      for (int64_t k : {1, 37, 500, 1024}) {
        const int64_t n = 3 * 1024 + 100, block = 1024;
        const Array a = make(dt, n, kOrdinary, 74);
        const auto x = floats_of(a);
        auto error = as<float>(make(DC_F32, n, kOrdinary, 75).bytes);
        std::vector<float> v(x.size()), out(x.size()), acc(x.size(), 3.0f);
        for (size_t i = 0; i < v.size(); i++) v[i] = x[i] + error[i];
        std::vector<uint8_t> payload((size_t)topk_bytes(block, k, n));
        ASSERT_EQ(dc_topk(payload.data(), block, k, a.bytes.data(), dt, error.data(), n), DC_OK);
        ASSERT_EQ(dc_topk_spread(out.data(), DC_F32, payload.data(), block, k, n), DC_OK);
        ASSERT_EQ(dc_topk_add(acc.data(), payload.data(), block, k, 2.0f, n), DC_OK);
        for (int64_t begin = 0; begin < n; begin += block) {
          const int64_t end = std::min(n, begin + block), take = std::min(k, end - begin);
          std::vector<int64_t> order;
          for (int64_t i = begin; i < end; i++) order.push_back(i);
          std::stable_sort(order.begin(), order.end(),
                           [&](int64_t l, int64_t r) { return std::fabs(v[(size_t)l]) > std::fabs(v[(size_t)r]); });
          for (int64_t j = 0; j < end - begin; j++) {
            const size_t i = (size_t)order[(size_t)j];
            ASSERT_EQ(out[i], j < take ? v[i] : 0.0f) << i;
            ASSERT_EQ(error[i], j < take ? 0.0f : v[i]) << i;
            ASSERT_EQ(acc[i], j < take ? std::fmaf(v[i], 2.0f, 3.0f) : 3.0f) << i;
          }
        }
      }
  }
}

// Error feedback: what was decoded over T steps differs from what was put in by the last error, which stays bounded.
TEST_F(Compress, DecodedSumsFollowTheInputs) {
  ASSERT_EQ(dc_isa_force(isas().back()), DC_OK);
  const int64_t n = 1000;
  for (int bits : {8, 4, 1, 0}) { // 0: top-k of 1 in 16
    std::vector<float> error((size_t)n), out((size_t)n);
    std::vector<double> given((size_t)n), got((size_t)n);
    double largest = 0;
    const int64_t bytes = bits ? quant_bytes(bits, 256, n) : topk_bytes(256, 16, n);
    std::vector<uint8_t> payload((size_t)bytes);
    for (uint64_t step = 0; step < 300; step++) {
      const auto x = as<float>(make(DC_F32, n, kOrdinary, 1000 + step).bytes);
      if (bits) {
        ASSERT_EQ(dc_quantize(payload.data(), bits, 256, x.data(), DC_F32, error.data(), n), DC_OK);
        ASSERT_EQ(dc_dequantize(out.data(), DC_F32, payload.data(), bits, 256, n), DC_OK);
      } else {
        ASSERT_EQ(dc_topk(payload.data(), 256, 16, x.data(), DC_F32, error.data(), n), DC_OK);
        ASSERT_EQ(dc_topk_spread(out.data(), DC_F32, payload.data(), 256, 16, n), DC_OK);
      }
      for (size_t i = 0; i < (size_t)n; i++)
        given[i] += x[i], got[i] += out[i], largest = std::max(largest, std::fabs((double)error[i]));
    }
    // Every step rounds v and error once: 300 * 2 half ulps of values below 64. The error itself: a fraction of one
    // step for levels, a few steps' worth for signs and top-k of inputs below 2.
    EXPECT_LT(largest, bits == 8 ? 0.01 : bits == 4 ? 0.2 : 40.0) << bits;
    for (size_t i = 0; i < (size_t)n; i++)
      ASSERT_NEAR(got[i] + error[i], given[i], 300 * 2 * 0x1p-20) << bits << " " << i;
  }
}

// ---- what is not finite, what is tiny, what is huge ----------------------------------------------------------------
TEST_F(Compress, NonFiniteBlocksArriveAsNan) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int bits : kBits)
      for (float bad : {(float)INFINITY, -(float)INFINITY, (float)NAN})
        for (int64_t at : {0, 63, 127, 190}) {
          auto x = as<float>(make(DC_F32, 200, kOrdinary, 80).bytes),
               error = as<float>(make(DC_F32, 200, kOrdinary, 81).bytes);
          const auto before = error;
          x[(size_t)at] = bad;
          std::vector<uint8_t> payload((size_t)quant_bytes(bits, 64, 200));
          std::vector<float> out(200), acc(200);
          ASSERT_EQ(dc_quantize(payload.data(), bits, 64, x.data(), DC_F32, error.data(), 200), DC_OK);
          ASSERT_EQ(dc_dequantize(out.data(), DC_F32, payload.data(), bits, 64, 200), DC_OK);
          ASSERT_EQ(dc_dequantize_add(acc.data(), payload.data(), bits, 64, 0.0f, 200), DC_OK);
          for (size_t i = 0; i < 200; i++) {
            const bool hit = (int64_t)i / 64 == at / 64;
            ASSERT_EQ(std::isnan(out[i]), hit) << i;
            ASSERT_EQ(std::isnan(acc[i]), hit) << i;
            ASSERT_TRUE(std::isfinite(error[i])) << i;
            if (hit) ASSERT_EQ(::bits(error[i]), ::bits(before[i])) << i;
          }
        }
  }
}

TEST_F(Compress, TopkCarriesWhatIsNotFinite) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<float> x(128, 1.0f), error(128, 0.25f), out(128);
    x[3] = NAN, x[90] = -INFINITY, x[91] = INFINITY, x[92] = INFINITY;
    std::vector<uint8_t> payload((size_t)topk_bytes(128, 2, 128));
    ASSERT_EQ(dc_topk(payload.data(), 128, 2, x.data(), DC_F32, error.data(), 128), DC_OK);
    ASSERT_EQ(dc_topk_spread(out.data(), DC_F32, payload.data(), 128, 2, 128), DC_OK);
    EXPECT_TRUE(std::isnan(out[3]));
    EXPECT_EQ(out[90], -INFINITY);
    for (size_t i = 0; i < 128; i++) EXPECT_EQ(error[i], i == 3 || (i >= 90 && i <= 92) ? 0.0f : 1.25f) << i;
  }
}

TEST_F(Compress, TinyAndHugeBlocks) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    for (int bits : {8, 4})
      for (float size : {0x1p-149f, 0x1p-101f, 0x1p-100f, 0x1p-60f, FLT_MAX / 2, FLT_MAX}) {
        std::vector<float> x(64, size), error(64), out(64);
        x[5] = -size;
        std::vector<uint8_t> payload((size_t)quant_bytes(bits, 64, 64));
        ASSERT_EQ(dc_quantize(payload.data(), bits, 64, x.data(), DC_F32, error.data(), 64), DC_OK);
        ASSERT_EQ(dc_dequantize(out.data(), DC_F32, payload.data(), bits, 64, 64), DC_OK);
        for (size_t i = 0; i < 64; i++) {
          ASSERT_NEAR(out[i], size < 0x1p-100f ? 0.0f : x[i], std::ldexp(size, -22)) << size;
          ASSERT_NEAR((double)out[i] + error[i], x[i], std::ldexp(size, -24)) << size; // scale * code, rounded
        }
      }
    std::vector<float> x(4096, FLT_MAX), out(4096); // the sum of magnitudes is beyond fp32, their mean is not
    std::vector<uint8_t> payload((size_t)quant_bytes(1, 4096, 4096));
    ASSERT_EQ(dc_quantize(payload.data(), 1, 4096, x.data(), DC_F32, nullptr, 4096), DC_OK);
    ASSERT_EQ(dc_dequantize(out.data(), DC_F32, payload.data(), 1, 4096, 4096), DC_OK);
    EXPECT_EQ(out[77], FLT_MAX);
  }
}

TEST_F(Compress, EveryNibbleAndByteDecodes) {
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    std::vector<uint8_t> payload(16 + 256);
    const float scale[4] = {0.5f, 0.5f, 0.5f, 0.5f};
    memcpy(payload.data(), scale, 16);
    for (size_t i = 0; i < 256; i++) payload[16 + i] = (uint8_t)i;
    std::vector<float> out(256);
    ASSERT_EQ(dc_dequantize(out.data(), DC_F32, payload.data(), 8, 64, 256), DC_OK);
    for (int i = 0; i < 256; i++) EXPECT_EQ(out[(size_t)i], 0.5f * (float)(int8_t)i);
    std::vector<uint8_t> packed(8 * 4 + 256);
    for (size_t b = 0; b < 8; b++) memcpy(&packed[b * 4], scale, 4);
    for (size_t i = 0; i < 256; i++) packed[32 + i] = (uint8_t)i;
    out.resize(512);
    ASSERT_EQ(dc_dequantize(out.data(), DC_F32, packed.data(), 4, 64, 512), DC_OK);
    for (int i = 0; i < 512; i++) {
      const int half = i % 2 ? (i / 2) >> 4 : (i / 2) & 15;
      EXPECT_EQ(out[(size_t)i], 0.5f * (float)(half < 8 ? half : half - 16)) << i;
    }
  }
}

// D H D x / sqrt(length), from the definitions.
std::vector<double> rotated(const float *x, size_t length) {
  std::vector<double> d(length), out(length);
  for (uint32_t i = 0; i < length; i++) {
    uint32_t h = i; // MurmurHash3's finalizer
    h ^= h >> 16, h *= 0x85ebca6b, h ^= h >> 13, h *= 0xc2b2ae35, h ^= h >> 16;
    d[i] = h >> 31 ? -1 : 1;
  }
  for (size_t i = 0; i < length; i++) {
    for (size_t j = 0; j < length; j++) out[i] += (__builtin_popcountll(i & j) % 2 ? -1 : 1) * d[j] * (double)x[j];
    out[i] *= d[i] / std::sqrt((double)length);
  }
  return out;
}

double norm(const float *x, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return std::sqrt(sum);
}

TEST_F(Compress, RotationIsTheDefinitionsAndItsOwnInverse) {
  const size_t whole = DC_ROTATE_BLOCK, n = 2 * whole + 1024 + 64 + 8 + 1;
  const auto x = as<float>(make(DC_F32, (int64_t)n, kOrdinary, 68).bytes);
  for (int isa : isas()) {
    ASSERT_EQ(dc_isa_force(isa), DC_OK);
    auto y = x;
    ASSERT_EQ(dc_rotate(y.data(), (int64_t)n), DC_OK);
    auto back = y;
    ASSERT_EQ(dc_rotate(back.data(), (int64_t)n), DC_OK);
    size_t at = 0;
    for (size_t length : {whole, whole, (size_t)1024, (size_t)64, (size_t)8, (size_t)1}) {
      const auto want = rotated(&x[at], length);
      const double size = norm(&x[at], length), ulps = 12 * 0x1p-24 * size; // a rounding of each of 11 levels
      EXPECT_NEAR(norm(&y[at], length), size, ulps);
      for (size_t i = 0; i < length; i++) {
        ASSERT_NEAR(y[at + i], want[i], ulps) << dc_isa_name(isa) << " element " << i << " of " << length;
        ASSERT_NEAR(back[at + i], x[at + i], 2 * ulps) << dc_isa_name(isa) << " element " << i << " of " << length;
      }
      at += length;
    }
    ASSERT_EQ(at, n);
  }
}

TEST_F(Compress, RotationMakesHeavyTailsNormal) { // what sign and mean magnitude keep of the squares
  const size_t n = 4 * DC_ROTATE_BLOCK;
  auto x = as<float>(make(DC_F32, (int64_t)n, kOrdinary, 69).bytes);
  for (size_t i = 0; i < n; i++) x[i] = i % 61 ? 1e-3f * x[i] : x[i];
  auto kept = [&] {
    double sum = 0;
    for (float f : x) sum += std::fabs((double)f);
    return sum / (double)n * sum / std::pow(norm(x.data(), n), 2);
  };
  EXPECT_LT(kept(), 0.05);
  ASSERT_EQ(dc_rotate(x.data(), (int64_t)n), DC_OK);
  EXPECT_NEAR(kept(), 2 / M_PI, 0.02);
}

// ---- payloads, threads, arguments ----------------------------------------------------------------------------------
TEST_F(Compress, PayloadSizesAreExact) {
  EXPECT_EQ(quant_bytes(8, 2048, 0), 0);
  EXPECT_EQ(quant_bytes(8, 2048, 1), 8);
  EXPECT_EQ(quant_bytes(8, 2048, 2048), 2052);
  EXPECT_EQ(quant_bytes(8, 2048, 2049), 2056 + 4);
  EXPECT_EQ(quant_bytes(4, 256, 256), 132);
  EXPECT_EQ(quant_bytes(4, 256, 257), 8 + 132);
  EXPECT_EQ(quant_bytes(1, 2048, 2048), 260);
  EXPECT_EQ(quant_bytes(1, 64, 65), 8 + 12);
  EXPECT_EQ(topk_bytes(4096, 41, 4096), 41 * 6 + 2);
  EXPECT_EQ(topk_bytes(4096, 41, 4096 + 40), 81 * 6 + 2);
  EXPECT_EQ(topk_bytes(64, 64, 0), 0);
}

TEST_F(Compress, ThreadsDoNotChangeABit) {
  const int64_t n = 3'000'001;
  const Array x = make(DC_BF16, n, kOrdinary, 90), e = make(DC_F32, n, kOrdinary, 91);
  for (int what : {8, 4, 1, 0}) {
    const Array payload = payload_of(what ? quant_bytes(what, 2048, n) : topk_bytes(4096, 41, n));
    auto run = [&](int threads) {
      EXPECT_EQ(dc_set_num_threads(threads), DC_OK);
      auto out = run_once({payload, x, e, make(DC_F32, n, kOrdinary, 92)}, kAtStart, [&](auto &p) {
        if (what) {
          const int rc = dc_quantize(p[0], what, 2048, p[1], DC_BF16, (float *)p[2], n);
          return rc ? rc : dc_dequantize_add((float *)p[3], p[0], what, 2048, 0.5f, n);
        }
        const int rc = dc_topk(p[0], 4096, 41, p[1], DC_BF16, (float *)p[2], n);
        return rc ? rc : dc_topk_spread(p[3], DC_F32, p[0], 4096, 41, n);
      });
      dc_set_num_threads(1);
      return out;
    };
    const auto one = run(1), four = run(4);
    for (size_t k = 0; k < one.size(); k++) ASSERT_TRUE(one[k] == four[k]) << "array " << k << " of " << what;
  }
}

TEST_F(Compress, ThreadsDoNotChangeARotation) {
  const int64_t n = 3'000'001;
  auto run = [&](int threads) {
    auto x = as<float>(make(DC_F32, n, kOrdinary, 93).bytes);
    EXPECT_EQ(dc_set_num_threads(threads), DC_OK);
    EXPECT_EQ(dc_rotate(x.data(), n), DC_OK);
    EXPECT_EQ(dc_set_num_threads(1), DC_OK);
    return x;
  };
  ASSERT_TRUE(run(1) == run(4));
}

TEST_F(Compress, CountersCount) {
  dc_counter_reset();
  float x[64] = {1}, out[64];
  std::vector<uint8_t> payload(1024);
  ASSERT_EQ(dc_quantize(payload.data(), 8, 64, x, DC_F32, nullptr, 64), DC_OK);
  ASSERT_EQ(dc_dequantize(out, DC_F32, payload.data(), 8, 64, 64), DC_OK);
  ASSERT_EQ(dc_topk(payload.data(), 64, 3, x, DC_F32, nullptr, 64), DC_OK);
  ASSERT_EQ(dc_topk_add(out, payload.data(), 64, 3, 1.0f, 64), DC_OK);
  ASSERT_EQ(dc_rotate(out, 64), DC_OK);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_quantize_calls), 1);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_topk_calls), 1);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_rotate_calls), 1);
  EXPECT_EQ(dc_counter_get(DC_COUNTER_dequantize_calls), 2);
}

TEST_F(Compress, ForeignIndicesAreRefusedBeforeAWrite) {
  std::vector<float> x(200, 1.0f), out(200, 7.0f);
  std::vector<uint8_t> payload((size_t)topk_bytes(64, 4, 200));
  ASSERT_EQ(dc_topk(payload.data(), 64, 4, x.data(), DC_F32, nullptr, 200), DC_OK);
  const uint16_t past = 8; // the last block has 8 elements
  memcpy(&payload[16 * 4 + 15 * 2], &past, 2);
  EXPECT_EQ(dc_topk_spread(out.data(), DC_F32, payload.data(), 64, 4, 200), DC_E_INVALID);
  EXPECT_NE(std::string(dc_last_error()).find("index 8"), std::string::npos) << dc_last_error();
  EXPECT_EQ(dc_topk_add(out.data(), payload.data(), 64, 4, 1.0f, 200), DC_E_INVALID);
  for (float f : out) ASSERT_EQ(f, 7.0f);
}

TEST_F(Compress, ArgumentsAreChecked) {
  alignas(8) uint8_t p[4096] = {};
  alignas(8) float x[256] = {}, e[256] = {};
  int64_t bytes;
  EXPECT_EQ(dc_quantize_bytes(2, 64, 10, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_quantize_bytes(8, 0, 10, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_quantize_bytes(8, 96, 10, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_quantize_bytes(8, 1 << 21, 10, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_quantize_bytes(8, 64, -1, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_quantize_bytes(8, 64, INT64_MAX, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_quantize_bytes(8, 64, 10, nullptr), DC_E_INVALID);
  EXPECT_EQ(dc_topk_bytes(64, 0, 10, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_topk_bytes(64, 65, 10, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_topk_bytes(8192, 1, 10, &bytes), DC_E_INVALID);
  EXPECT_EQ(dc_quantize(p, 8, 64, x, DC_F64, nullptr, 10), DC_E_DTYPE);
  EXPECT_EQ(dc_quantize(nullptr, 8, 64, x, DC_F32, nullptr, 10), DC_E_INVALID);
  EXPECT_EQ(dc_quantize(p + 1, 8, 64, x, DC_F32, nullptr, 10), DC_E_INVALID);
  EXPECT_EQ(dc_quantize(p, 8, 64, nullptr, DC_F32, nullptr, 10), DC_E_INVALID);
  EXPECT_EQ(dc_quantize(p, 8, 64, x, DC_F32, x, 10), DC_E_INVALID);
  EXPECT_EQ(dc_quantize(p, 8, 64, x, DC_F32, (float *)(uintptr_t)((char *)e + 2), 10), DC_E_INVALID);
  EXPECT_EQ(dc_quantize((uint8_t *)e, 8, 64, x, DC_F32, e, 10), DC_E_INVALID);
  EXPECT_EQ(dc_quantize((uint8_t *)x, 8, 64, x, DC_F32, nullptr, 10), DC_E_INVALID);
  EXPECT_EQ(dc_dequantize(x, DC_I8, p, 8, 64, 10), DC_E_DTYPE);
  EXPECT_EQ(dc_dequantize(nullptr, DC_F32, p, 8, 64, 10), DC_E_INVALID);
  EXPECT_EQ(dc_dequantize_add(x, p, 3, 64, 1.0f, 10), DC_E_INVALID);
  EXPECT_EQ(dc_topk(p, 64, 3, x, DC_I32, nullptr, 10), DC_E_DTYPE);
  EXPECT_EQ(dc_topk_spread(x, DC_F32, p, 64, 100, 10), DC_E_INVALID);
  EXPECT_EQ(dc_rotate(nullptr, 10), DC_E_INVALID);
  EXPECT_EQ(dc_rotate((float *)(uintptr_t)((char *)x + 2), 10), DC_E_INVALID);
  EXPECT_EQ(dc_rotate(x, -1), DC_E_INVALID);
  EXPECT_EQ(dc_rotate(x, INT64_MAX), DC_E_INVALID);
  EXPECT_EQ(dc_rotate(nullptr, 0), DC_OK);
  EXPECT_EQ(dc_quantize(nullptr, 8, 64, nullptr, DC_F32, nullptr, 0), DC_OK);
  EXPECT_EQ(dc_dequantize(nullptr, DC_F32, nullptr, 1, 64, 0), DC_OK);
  EXPECT_EQ(dc_dequantize_add(nullptr, nullptr, 4, 64, 1.0f, 0), DC_OK);
  EXPECT_EQ(dc_topk(nullptr, 64, 3, nullptr, DC_F32, nullptr, 0), DC_OK);
  EXPECT_EQ(dc_topk_spread(nullptr, DC_F32, nullptr, 64, 3, 0), DC_OK);
  EXPECT_EQ(dc_topk_add(nullptr, nullptr, 64, 3, 1.0f, 0), DC_OK);
}

} // namespace
