// quantize.cuh: what one CUDA thread does in the blockwise codecs (ops.h, compression), compiled for the CPU by
// tests/c/test_cuda_quantize.cpp. quantize.cu numbers the threads.
//
// A block of codes has a group of LANES threads: as many as there are accumulators in the sum of a block of signs, so
// that each has one, and adds its elements in the order of ops/ref/quantize.c. A block is read twice, the second time
// from a cache: for its scale, then for codes and error. In the second a thread has EIGHT elements side by side at a
// time, whose codes are whole bytes of its own. What it writes to `error` others have read before: the scale that it
// waits for came from them.
#ifndef DEEPC_CUDA_QUANTIZE_CUH
#define DEEPC_CUDA_QUANTIZE_CUH

#include "cuda/bodies.cuh"
#include "payload.h"

namespace dc_gpu {

enum { QUANT_LANES = 16, EIGHT = 8 };

// A payload's parts. n: elements; used: bytes of codes, room: the same with what fills the last four.
struct Payload {
  float *scales;
  uint8_t *codes;
  int64_t block, n, used, room;
};

// Of a payload as the ops take it. Readers only read what it points to.
inline Payload payload_at(const uint8_t *payload, int bits, int64_t block, int64_t n) {
  uint8_t *start = const_cast<uint8_t *>(payload);
  const int64_t used = compress_code_bytes(bits, n);
  return Payload{
      reinterpret_cast<float *>(start), start + 4 * compress_blocks(block, n), block, n, used, compress_round4(used)};
}

// f(Width<BITS>) with the number of bits, which was checked.
template <class F> auto with_bits(int bits, F f) {
  switch (bits) {
  case 8: return f(Width<8>());
  case 4: return f(Width<4>());
  default: return f(Width<1>());
  }
}

DC_GPU int64_t quant_end(const Payload &p, int64_t block) {
  const int64_t end = (block + 1) * p.block;
  return end < p.n ? end : p.n;
}

// ---- codes: EIGHT of BITS side by side are BITS bytes --------------------------------------------------------------
// Elements [i, i + r), i a multiple of EIGHT, r at most that. Bytes past the last of them are 0 in `raw`.
template <int BITS> DC_GPU void load_codes(uint8_t *raw, const uint8_t *codes, int64_t i, int64_t r) {
  const uint8_t *from = codes + i / EIGHT * BITS;
  if (BITS > 1 && r == EIGHT) {
    DC_UNROLL
    for (int k = 0; k + 4 <= BITS; k += 4) load_bytes4(raw + k, from + k);
  } else {
    DC_UNROLL
    for (int k = 0; k < BITS; k++) raw[k] = k < (r * BITS + 7) / 8 ? from[k] : (uint8_t)0;
  }
}
template <int BITS> DC_GPU void store_codes(uint8_t *codes, int64_t i, int64_t r, const uint8_t *raw) {
  uint8_t *to = codes + i / EIGHT * BITS;
  if (BITS > 1 && r == EIGHT) {
    DC_UNROLL
    for (int k = 0; k + 4 <= BITS; k += 4) store_bytes4(to + k, raw + k);
  } else {
    DC_UNROLL
    for (int k = 0; k < BITS; k++)
      if (k < (r * BITS + 7) / 8) to[k] = raw[k];
  }
}

// Code j of `raw` as a number.
template <int BITS> DC_GPU float level_of(const uint8_t *raw, int j) {
  if constexpr (BITS == 8) return (float)(int8_t)raw[j];
  else if constexpr (BITS == 4) {
    const int half = raw[j / 2] >> (j % 2 * 4) & 15;
    return (float)(half < 8 ? half : half - 16);
  } else return raw[0] >> j & 1 ? -1.0f : 1.0f;
}

// Zeros behind the last code, by one lane of the last block.
DC_GPU void quant_fill(const Payload &p, int64_t block, int lane) {
  if (lane == 0 && (block + 1) * p.block >= p.n)
    for (int64_t i = p.used; i < p.room; i++) p.codes[i] = 0;
}

// ---- what is compressed: value(i), eight(v, i, r) ------------------------------------------------------------------
// x + error, or x.
template <class T, bool WIDE> struct Fed {
  const typename T::stored *x;
  const float *error; // or NULL
  DC_GPU float value(int64_t, int64_t i) const {
    const float v = T::up(x[i]);
    return error ? __fadd_rn(v, error[i]) : v;
  }
  DC_GPU void eight(float *v, int64_t, int64_t i, int64_t n) const {
    get<T, EIGHT, WIDE>(v, x, i, n);
    if (!error) return;
    float e[EIGHT];
    get<F32, EIGHT, WIDE>(e, error, i, n);
    DC_UNROLL
    for (int j = 0; j < EIGHT; j++) v[j] = __fadd_rn(v[j], e[j]);
  }
};

// factor * (the sum of what the rows hold) + error. offset: of a row's codes.
template <bool WIDE> struct SignRows {
  const uint8_t *rows;
  int64_t count, stride, offset;
  float factor;
  const float *error;
  // What row k holds where the sign bit is `bit`.
  DC_GPU float held(int64_t k, int64_t block, uint32_t bit) const {
    const float scale = reinterpret_cast<const float *>(rows + k * stride)[block];
    return __uint_as_float(__float_as_uint(scale) ^ bit << 31);
  }
  DC_GPU float value(int64_t block, int64_t i) const {
    float sum = 0.0f;
    for (int64_t k = 0; k < count; k++) {
      const uint32_t bit = rows[k * stride + offset + i / 8] >> (i % 8) & 1;
      const float h = held(k, block, bit);
      sum = k ? __fadd_rn(sum, h) : h;
    }
    return __fadd_rn(__fmul_rn(sum, factor), error[i]);
  }
  DC_GPU void eight(float *v, int64_t block, int64_t i, int64_t n) const {
    float e[EIGHT];
    get<F32, EIGHT, WIDE>(e, error, i, n);
    for (int64_t k = 0; k < count; k++) {
      const uint32_t bits = rows[k * stride + offset + i / 8];
      DC_UNROLL
      for (int j = 0; j < EIGHT; j++) {
        const float h = held(k, block, bits >> j & 1);
        v[j] = k ? __fadd_rn(v[j], h) : h;
      }
    }
    DC_UNROLL
    for (int j = 0; j < EIGHT; j++) v[j] = __fadd_rn(__fmul_rn(v[j], factor), e[j]);
  }
};

// ---- 1 bit ---------------------------------------------------------------------------------------------------------
// The lane's accumulator of `block`.
template <class Source> DC_GPU double sign_sum(const Source &from, const Payload &p, int64_t block, int lane) {
  const int64_t end = quant_end(p, block);
  double sum = 0.0;
  DC_UNROLL_8
  for (int64_t i = block * p.block + lane; i < end; i += QUANT_LANES)
    sum = __dadd_rn(sum, fabs((double)from.value(block, i)));
  return sum;
}

DC_GPU float sign_scale(const Payload &p, int64_t block, double sum) {
  const int64_t n = quant_end(p, block) - block * p.block;
  return sum < (double)INFINITY ? (float)__ddiv_rn(sum, (double)n) : canonical(NAN);
}

// The lane's codes and errors of `block`; error may be NULL.
template <class Source, bool WIDE>
DC_GPU void sign_codes(const Source &from, const Payload &p, float *error, int64_t block, float scale, int lane) {
  const int64_t end = quant_end(p, block);
  if (lane == 0) p.scales[block] = scale;
  quant_fill(p, block, lane);
  for (int64_t i = block * p.block + lane * EIGHT; i < end; i += QUANT_LANES * EIGHT) {
    const int64_t r = end - i < EIGHT ? end - i : (int64_t)EIGHT;
    uint8_t bits = 0;
    if (scale == scale) {
      float v[EIGHT];
      from.eight(v, block, i, end);
      DC_UNROLL
      for (int j = 0; j < EIGHT; j++) {
        const uint32_t sign = __float_as_uint(v[j]) >> 31;
        if (j < r) bits = (uint8_t)(bits | sign << j);
        v[j] = __fsub_rn(v[j], __uint_as_float(__float_as_uint(scale) | sign << 31));
      }
      if (error) put<F32, EIGHT, WIDE>(error, i, end, v);
    }
    store_codes<1>(p.codes, i, r, &bits);
  }
}

// ---- 8 and 4 bits --------------------------------------------------------------------------------------------------
// The bits of the lane's largest |v| of `block`.
template <class Source> DC_GPU uint32_t level_top(const Source &from, const Payload &p, int64_t block, int lane) {
  const int64_t end = quant_end(p, block);
  uint32_t top = 0;
  for (int64_t i = block * p.block + lane * EIGHT; i < end; i += QUANT_LANES * EIGHT) {
    float v[EIGHT]; // zero past the end
    from.eight(v, block, i, end);
    DC_UNROLL
    for (int j = 0; j < EIGHT; j++) {
      const uint32_t u = __float_as_uint(v[j]) & 0x7fffffffu;
      top = u > top ? u : top;
    }
  }
  return top;
}

// dc__levels_of of ref/scalar.h.
struct Levels {
  float scale, inverse;
};
template <int BITS> DC_GPU Levels levels_of(uint32_t top) {
  const float most = BITS == 8 ? 127.0f : 7.0f, largest = __uint_as_float(top);
  if (top >= 0x7f800000u) return Levels{canonical(NAN), 0.0f};
  if (largest < 0x1p-100f) return Levels{0.0f, 0.0f};
  const float scale = __fdiv_rn(largest, most);
  const bool fits = __fmul_rn(most, scale) < INFINITY;
  return Levels{fits ? scale : __uint_as_float(__float_as_uint(scale) - 1), __fdiv_rn(most, largest)};
}

template <int BITS, class Source, bool WIDE>
DC_GPU void level_codes(const Source &from, const Payload &p, float *error, int64_t block, uint32_t top, int lane) {
  const int64_t end = quant_end(p, block);
  const Levels l = levels_of<BITS>(top);
  if (lane == 0) p.scales[block] = l.scale;
  quant_fill(p, block, lane);
  for (int64_t i = block * p.block + lane * EIGHT; i < end; i += QUANT_LANES * EIGHT) {
    const int64_t r = end - i < EIGHT ? end - i : (int64_t)EIGHT;
    uint8_t raw[BITS] = {};
    if (l.scale == l.scale) {
      float v[EIGHT];
      from.eight(v, block, i, end);
      DC_UNROLL
      for (int j = 0; j < EIGHT; j++) {
        const int q = j < r ? (int)rintf(__fmul_rn(v[j], l.inverse)) : 0;
        if constexpr (BITS == 8) raw[j] = (uint8_t)q;
        else raw[j / 2] = (uint8_t)(raw[j / 2] | (q & 15) << (j % 2 * 4));
        v[j] = __fmaf_rn((float)q, -l.scale, v[j]);
      }
      if (error) put<F32, EIGHT, WIDE>(error, i, end, v);
    }
    store_codes<BITS>(p.codes, i, r, raw);
  }
}

// ---- back: EIGHT elements at a time --------------------------------------------------------------------------------
template <int BITS, class T, bool WIDE>
DC_GPU void dequantize(typename T::stored *out, const float *scales, const uint8_t *codes, int64_t block, int64_t n,
                       int64_t thread, int64_t threads) {
  for (int64_t i = thread * EIGHT; i < n; i += threads * EIGHT) {
    uint8_t raw[BITS];
    float v[EIGHT];
    load_codes<BITS>(raw, codes, i, n - i < EIGHT ? n - i : (int64_t)EIGHT);
    const float scale = scales[i / block];
    DC_UNROLL
    for (int j = 0; j < EIGHT; j++) v[j] = __fmul_rn(scale, level_of<BITS>(raw, j));
    put<T, EIGHT, WIDE>(out, i, n, v);
  }
}

template <int BITS, bool WIDE>
DC_GPU void dequantize_add(float *acc, const float *scales, const uint8_t *codes, int64_t block, float factor,
                           int64_t n, int64_t thread, int64_t threads) {
  for (int64_t i = thread * EIGHT; i < n; i += threads * EIGHT) {
    uint8_t raw[BITS];
    float v[EIGHT];
    load_codes<BITS>(raw, codes, i, n - i < EIGHT ? n - i : (int64_t)EIGHT);
    get<F32, EIGHT, WIDE>(v, acc, i, n);
    const float scale = __fmul_rn(factor, scales[i / block]);
    DC_UNROLL
    for (int j = 0; j < EIGHT; j++) v[j] = __fmaf_rn(level_of<BITS>(raw, j), scale, v[j]);
    put<F32, EIGHT, WIDE>(acc, i, n, v);
  }
}

} // namespace dc_gpu
#endif
