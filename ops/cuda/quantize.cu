// quantize.cu: dc_cuda_quantize, dc_cuda_dequantize, dc_cuda_dequantize_add, dc_cuda_average_signs. Bodies and who does
// what: quantize.cuh. Checked against the CPU thread by thread, and bit by bit on a GPU.
#include "cuda/launch.cuh"
#include "cuda/quantize.cuh"

#include "check_compress.h"

using dc_gpu::EIGHT;
using dc_gpu::Payload;
using dc_gpu::QUANT_LANES;

// Calls f(Width<1>) for arrays that may be read and written 16 bytes at a time, else f(Width<0>).
template <class F> static int quantize_with_wide(bool wide, F f) {
  return wide ? f(dc_gpu::Width<1>()) : f(dc_gpu::Width<0>());
}

// ---- numbers to codes: a group of threads a block ------------------------------------------------------------------
template <class Source, bool WIDE>
__global__ void __launch_bounds__(THREADS) signs_kernel(Source from, Payload p, float *error, int64_t blocks) {
  for (int64_t block = group_index<QUANT_LANES>(); block < blocks; block += group_count<QUANT_LANES>()) {
    const int lane = (int)(threadIdx.x % QUANT_LANES);
    double sum = dc_gpu::sign_sum(from, p, block, lane);
    sum = group_tree<1, QUANT_LANES>(&sum);
    sum = __shfl_sync(group_mask<QUANT_LANES>(), sum, 0, QUANT_LANES);
    dc_gpu::sign_codes<Source, WIDE>(from, p, error, block, dc_gpu::sign_scale(p, block, sum), lane);
  }
}

template <int BITS, class Source, bool WIDE>
__global__ void __launch_bounds__(THREADS) levels_kernel(Source from, Payload p, float *error, int64_t blocks) {
  const unsigned mask = group_mask<QUANT_LANES>();
  for (int64_t block = group_index<QUANT_LANES>(); block < blocks; block += group_count<QUANT_LANES>()) {
    const int lane = (int)(threadIdx.x % QUANT_LANES);
    uint32_t top = dc_gpu::level_top(from, p, block, lane);
    for (int other = QUANT_LANES / 2; other > 0; other /= 2) {
      const uint32_t theirs = __shfl_xor_sync(mask, top, other, QUANT_LANES);
      top = theirs > top ? theirs : top;
    }
    dc_gpu::level_codes<BITS, Source, WIDE>(from, p, error, block, top, lane);
  }
}

template <int BITS, class Source, bool WIDE>
static int quantize_launch(const Source &from, const Payload &p, float *error, cudaStream_t stream) {
  const int64_t blocks = compress_blocks(p.block, p.n);
  const unsigned grid = grid_for(blocks * QUANT_LANES);
  if constexpr (BITS == 1) signs_kernel<Source, WIDE><<<grid, THREADS, 0, stream>>>(from, p, error, blocks);
  else levels_kernel<BITS, Source, WIDE><<<grid, THREADS, 0, stream>>>(from, p, error, blocks);
  return launched();
}

int dc_cuda_quantize(uint8_t *payload, int bits, int64_t block, const void *x, int dt, float *error, int64_t n,
                     void *stream) {
  DC_TRY(check_quantize(payload, bits, block, x, dt, error, n));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(x, "x"));
  const Payload p = dc_gpu::payload_at(payload, bits, block, n);
  return dc_gpu::with_bits(bits, [=](auto width) {
    return with_low(dt, [=](auto t) {
      return quantize_with_wide(aligned_to(x, 16) && aligned_to(error, 16), [=](auto wide) {
        using T = decltype(t);
        constexpr bool WIDE = decltype(wide)::value;
        const dc_gpu::Fed<T, WIDE> from = {static_cast<const typename T::stored *>(x), error};
        return quantize_launch<decltype(width)::value, dc_gpu::Fed<T, WIDE>, WIDE>(from, p, error,
                                                                                   static_cast<cudaStream_t>(stream));
      });
    });
  });
}

int dc_cuda_average_signs(uint8_t *payload, int64_t block, const uint8_t *rows, int64_t count, int64_t stride,
                          float factor, float *error, int64_t n, void *stream) {
  DC_TRY(check_average_signs(payload, block, rows, count, stride, error, n));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(error, "error"));
  const Payload p = dc_gpu::payload_at(payload, 1, block, n);
  return quantize_with_wide(aligned_to(error, 16), [=](auto wide) {
    constexpr bool WIDE = decltype(wide)::value;
    const dc_gpu::SignRows<WIDE> from = {rows, count, stride, 4 * compress_blocks(block, n), factor, error};
    return quantize_launch<1, dc_gpu::SignRows<WIDE>, WIDE>(from, p, error, static_cast<cudaStream_t>(stream));
  });
}

// ---- codes to numbers ----------------------------------------------------------------------------------------------
template <int BITS, class T, bool WIDE>
__global__ void __launch_bounds__(THREADS) dequantize_kernel(typename T::stored *out, Payload p) {
  dc_gpu::dequantize<BITS, T, WIDE>(out, p.scales, p.codes, p.block, p.n, grid_thread(), grid_threads());
}

int dc_cuda_dequantize(void *out, int dt, const uint8_t *payload, int bits, int64_t block, int64_t n, void *stream) {
  DC_TRY(check_dequantize(out, dt, payload, bits, block, n, "out"));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(out, "out"));
  const Payload p = dc_gpu::payload_at(payload, bits, block, n);
  return dc_gpu::with_bits(bits, [=](auto width) {
    return with_low(dt, [=](auto t) {
      return quantize_with_wide(aligned_to(out, 16), [=](auto wide) {
        using T = decltype(t);
        dequantize_kernel<decltype(width)::value, T, decltype(wide)::value>
            <<<grid_for(n / EIGHT + 1), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
                static_cast<typename T::stored *>(out), p);
        return launched();
      });
    });
  });
}

template <int BITS, bool WIDE>
__global__ void __launch_bounds__(THREADS) dequantize_add_kernel(float *acc, Payload p, float factor) {
  dc_gpu::dequantize_add<BITS, WIDE>(acc, p.scales, p.codes, p.block, factor, p.n, grid_thread(), grid_threads());
}

int dc_cuda_dequantize_add(float *acc, const uint8_t *payload, int bits, int64_t block, float factor, int64_t n,
                           void *stream) {
  DC_TRY(check_dequantize(acc, DC_F32, payload, bits, block, n, "acc"));
  if (n == 0) return DC_OK;
  DeviceScope device;
  DC_TRY(device.enter(acc, "acc"));
  const Payload p = dc_gpu::payload_at(payload, bits, block, n);
  return dc_gpu::with_bits(bits, [=](auto width) {
    return quantize_with_wide(aligned_to(acc, 16), [=](auto wide) {
      dequantize_add_kernel<decltype(width)::value, decltype(wide)::value>
          <<<grid_for(n / EIGHT + 1), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(acc, p, factor);
      return launched();
    });
  });
}
