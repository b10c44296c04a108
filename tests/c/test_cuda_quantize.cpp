// test_cuda_quantize.cpp: what each CUDA thread of the blockwise codecs does (ops/cuda/quantize.cuh, compiled for the
// CPU), lane by lane over all blocks, against the scalar reference, bit for bit, with forbidden pages around the
// arrays. What runs only on a GPU (launches, shuffles) is in tests/python/test_gpu_ops.py.
#include <algorithm>

#include "codec_cases.h"
#include "cuda/quantize.cuh"
#include "cuda_fixture.h"
#include "cuda_lanes.h"

namespace {

using namespace dc_gpu;

int wide_runs; // with loads of 16 bytes

class CudaQuantize : public CudaOps {
protected:
  void SetUp() override {
    CudaOps::SetUp();
    ASSERT_EQ(dc_isa_force(DC_ISA_SCALAR), DC_OK);
    wide_runs = 0;
  }
  void TearDown() override {
    EXPECT_GT(wide_runs, 10);
    CudaOps::TearDown();
  }
};

bool aligned16(const void *p) { return (uintptr_t)p % 16 == 0; }

template <class F> void with_wide(bool wide, F f) {
  wide_runs += wide;
  if (wide) f(Width<1>());
  else f(Width<0>());
}

// What signs_kernel and levels_kernel do for all blocks. A block's lanes finish in any order: here from the last.
template <int BITS, class Source, bool WIDE> void run_blocks(const Source &from, const Payload &p, float *error) {
  for (int64_t block = 0; block * p.block < p.n; block++) {
    if constexpr (BITS == 1) {
      const double sum = sum_of_lanes<1, QUANT_LANES, double>(
          [&](int lane, double *x) { *x = sign_sum(from, p, block, lane); });
      for (int lane = QUANT_LANES - 1; lane >= 0; lane--)
        sign_codes<Source, WIDE>(from, p, error, block, sign_scale(p, block, sum), lane);
    } else {
      uint32_t top = 0;
      for (int lane = 0; lane < QUANT_LANES; lane++) top = std::max(top, level_top(from, p, block, lane));
      for (int lane = QUANT_LANES - 1; lane >= 0; lane--)
        level_codes<BITS, Source, WIDE>(from, p, error, block, top, lane);
    }
  }
}

TEST_F(CudaQuantize, QuantizeEqualsReference) {
  for (int64_t n : kSizes)
    for (int bits : kBits)
      for (int dt : kLow)
        for (int k = 0; k < 3; k++)
          for (bool fed : {false, true}) {
            const int64_t block = kBlockSizes[k];
            const auto reference = [=](auto &p) {
              return dc_quantize(p[0], bits, block, p[1], dt, fed ? (float *)p[2] : nullptr, n);
            };
            const auto gpu = [=](auto &at) {
              float *error = fed ? (float *)at[2] : nullptr;
              const Payload p = payload_at(at[0], bits, block, n);
              with_bits(bits, [&](auto width) {
                with_low(dt, [&](auto t) {
                  with_wide(aligned16(at[1]) && aligned16(error), [&](auto wide) {
                    using T = decltype(t);
                    constexpr bool WIDE = decltype(wide)::value;
                    const Fed<T, WIDE> from = {(const typename T::stored *)at[1], error};
                    run_blocks<decltype(width)::value, Fed<T, WIDE>, WIDE>(from, p, error);
                  });
                });
              });
              return (int)DC_OK;
            };
            same_on_gpu({payload_of(quant_bytes(bits, block, n)), make(dt, n, fill_of(n, k), 60),
                         make(DC_F32, fed ? n : 0, kOrdinary, 61)},
                        reference, gpu,
                        name_of("quantize", dt, n) + " bits=" + std::to_string(bits) +
                            " block=" + std::to_string(block) + (fed ? " fed" : ""));
          }
}

// Scales at the ends of fp32: blocks that overflow it, that are below the least scale, that are all zeros of one sign.
TEST_F(CudaQuantize, QuantizeOfExtremeBlocks) {
  for (float value : {3.4028235e38f, -3.4028235e38f, 1e-31f, 1e-45f, -0.0f, 7.9e-31f, 3.0e38f})
    for (int bits : kBits) {
      const int64_t n = 200, block = 64;
      Array x = make(DC_F32, n, kOrdinary, 71);
      for (int64_t i = 0; i < n; i += 3) memcpy(&x.bytes[(size_t)i * 4], &value, 4);
      if (value == -0.0f)
        for (int64_t i = 0; i < n; i++) memcpy(&x.bytes[(size_t)i * 4], &value, 4);
      same_on_gpu(
          {payload_of(quant_bytes(bits, block, n)), x, make(DC_F32, n, kSpecial, 72)},
          [=](auto &p) { return dc_quantize(p[0], bits, block, p[1], DC_F32, (float *)p[2], n); },
          [=](auto &at) {
            with_bits(bits, [&](auto width) {
              with_wide(aligned16(at[1]) && aligned16(at[2]), [&](auto wide) {
                constexpr bool WIDE = decltype(wide)::value;
                const Fed<F32, WIDE> from = {(const float *)at[1], (const float *)at[2]};
                run_blocks<decltype(width)::value, Fed<F32, WIDE>, WIDE>(from, payload_at(at[0], bits, block, n),
                                                                         (float *)at[2]);
              });
            });
            return (int)DC_OK;
          },
          "value " + std::to_string(value) + " bits=" + std::to_string(bits));
    }
}

TEST_F(CudaQuantize, AverageOfSignsEqualsReference) {
  for (int64_t n : kSizes)
    for (int64_t count : {1, 2, 5}) {
      const int64_t block = kBlockSizes[n % 3], bytes = quant_bytes(1, block, n), stride = bytes + 4 * (count - 1);
      const int64_t blocks = (n + block - 1) / block;
      const float factor = 1.0f / (float)count;
      const Array rows = sign_rows(count, stride, block, n);
      same_on_gpu(
          {payload_of(bytes), make(DC_F32, n, kOrdinary, 91), rows},
          [=](auto &p) { return dc_average_signs(p[0], block, p[2], count, stride, factor, (float *)p[1], n); },
          [=](auto &at) {
            float *error = (float *)at[1];
            with_wide(aligned16(error), [&](auto wide) {
              constexpr bool WIDE = decltype(wide)::value;
              const SignRows<WIDE> from = {at[2], count, stride, 4 * blocks, factor, error};
              run_blocks<1, SignRows<WIDE>, WIDE>(from, payload_at(at[0], 1, block, n), error);
            });
            return (int)DC_OK;
          },
          name_of("average_signs", DC_F32, n) + " of " + std::to_string(count));
    }
}

TEST_F(CudaQuantize,
       DequantizeEqualsReference) { // payloads of any bytes: also scales and codes that no quantizer makes
  for (int64_t n : kSizes)
    for (int bits : kBits)
      for (int dt : kLow) {
        const int64_t block = kBlockSizes[n % 3], threads = 1 + n % 37;
        Array payload{DC_I32, raw(quant_bytes(bits, block, n), 62).bytes};
        same_on_gpu(
            {make(dt, n, kAnyBits, 63), payload},
            [=](auto &p) { return dc_dequantize(p[0], dt, p[1], bits, block, n); },
            [=](auto &at) {
              const Payload p = payload_at(at[1], bits, block, n);
              with_bits(bits, [&](auto width) {
                with_low(dt, [&](auto t) {
                  with_wide(aligned16(at[0]), [&](auto wide) {
                    using T = decltype(t);
                    for (int64_t thread = 0; thread < threads; thread++)
                      dc_gpu::dequantize<decltype(width)::value, T, decltype(wide)::value>(
                          (typename T::stored *)at[0], p.scales, p.codes, block, n, thread, threads);
                  });
                });
              });
              return (int)DC_OK;
            },
            name_of("dequantize", dt, n) + " bits=" + std::to_string(bits));
        if (dt != DC_F32) continue;
        same_on_gpu(
            {make(dt, n, fill_of(n, bits), 64), payload},
            [=](auto &p) { return dc_dequantize_add((float *)p[0], p[1], bits, block, -0.75f, n); },
            [=](auto &at) {
              const Payload p = payload_at(at[1], bits, block, n);
              with_bits(bits, [&](auto width) {
                with_wide(aligned16(at[0]), [&](auto wide) {
                  for (int64_t thread = 0; thread < threads; thread++)
                    dc_gpu::dequantize_add<decltype(width)::value, decltype(wide)::value>(
                        (float *)at[0], p.scales, p.codes, block, -0.75f, n, thread, threads);
                });
              });
              return (int)DC_OK;
            },
            name_of("dequantize_add", dt, n) + " bits=" + std::to_string(bits));
      }
}

} // namespace
