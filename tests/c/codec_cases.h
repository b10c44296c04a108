// What the tests of the blockwise codecs compress: sizes, payloads.
#ifndef DEEPC_TESTS_CODEC_CASES_H
#define DEEPC_TESTS_CODEC_CASES_H

#include "op_cases.h"

namespace {

const int kBits[] = {8, 4, 1};
const int64_t kBlockSizes[] = {64, 256, 2048};

int64_t quant_bytes(int bits, int64_t block, int64_t n) {
  int64_t bytes = -1;
  EXPECT_EQ(dc_quantize_bytes(bits, block, n, &bytes), DC_OK) << dc_last_error();
  return bytes;
}

// Payloads are 4-aligned, so arrays of bytes are described as arrays of 32-bit numbers for the placements.
Array payload_of(int64_t bytes) { return Array{DC_I32, std::vector<uint8_t>((size_t)bytes, 0xa5)}; }

// `count` payloads of n signs each, `stride` bytes apart.
Array sign_rows(int64_t count, int64_t stride, int64_t block, int64_t n) {
  Array rows{DC_I32, raw(stride * count, 90).bytes};
  for (int64_t k = 0; k < count; k++) // scales as a quantizer makes them, but for one
    for (int64_t b = 0; b < (n + block - 1) / block; b++) {
      const float scale = b == 3 && k == 1 ? NAN : 0.25f * (float)(1 + b + 2 * k);
      memcpy(&rows.bytes[(size_t)(k * stride + 4 * b)], &scale, 4);
    }
  return rows;
}

} // namespace

#endif
