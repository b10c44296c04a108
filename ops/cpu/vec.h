/* vec.h: the vector vocabulary of the bodies in cpu/, and the only file with intrinsic names. Included by files that
 * are compiled once per instruction set; which one is told by DC_ISA (avx2, avx512, avx512_bf16, amx_bf16) and by the
 * compiler's macros.
 *
 * A vector has LANES = 16 elements on every instruction set: one zmm register, or a pair of ymm. So the bodies are one
 * text, and element i % 16 of a reduction block meets the same accumulator everywhere. `r` of an access is the number
 * of valid elements: LANES (a constant in main loops) or 1..15 in a tail, which then runs the same operations under a
 * mask and touches no byte outside. AVX2 has no 16-bit masks; its tails go through a zeroed buffer on the stack.
 *
 * Stores make NaN canonical, as ref/scalar.h does. Narrowing to bf16 is integer arithmetic on AVX2 and AVX-512.
 * VCVTNEPS2BF16 (AVX-512-BF16) treats denormal inputs as zero whatever MXCSR says, so it runs only on vectors without
 * any. */
#ifndef DEEPC_OPS_CPU_VEC_H
#define DEEPC_OPS_CPU_VEC_H

#include <immintrin.h>
#include <string.h>

#include "ref/scalar.h"

#define DC__CAT2(a, b, c) a##b##_##c
#define DC__CAT(a, b, c) DC__CAT2(a, b, c)
/* DC_BODY(cast) is dc__cast_avx2 in the AVX2 build, and so on. */
#define DC_BODY(name) DC__CAT(dc__, name, DC_ISA)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(DEEPC_EMULATED)
/* The same operations in a function each: every layout's own copy of a loop takes most of the time to compile
 * (packed.c: 37 s and 3 s). */
#define DC_INLINE static inline
#else
#define DC_INLINE static inline __attribute__((always_inline))
#endif
#define DC_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define DC_LIKELY(x) __builtin_expect(!!(x), 1)
/* Runs `call` with DT as a constant: fp32, bf16 or fp16 as the variable dt says. So each loop is compiled per dtype. */
#define DC_FOR_LOW(dt, DT, call) \
  switch (dt) {                  \
  case DC_F32: {                 \
    enum { DT = DC_F32 };        \
    call;                        \
    break;                       \
  }                              \
  case DC_BF16: {                \
    enum { DT = DC_BF16 };       \
    call;                        \
    break;                       \
  }                              \
  default: {                     \
    enum { DT = DC_F16 };        \
    call;                        \
    break;                       \
  }                              \
  }

enum { LANES = 16, CACHE_LINE = 64 };
/* How far ahead arrays are fetched, in bytes, as the processor likes it (dispatch.c sets it before any body runs). The
 * processor's own prefetchers stop at every 4 KiB page; what it gives is in the head of adamw.c. */
extern int64_t dc__prefetch_ahead __attribute__((visibility("hidden")));
#define AHEAD dc__prefetch_ahead

#define DC_OP(name, params) void DC_BODY(name) params;
#include "ops.def"
#undef DC_OP

/* Into the cache, `bytes` ahead of p. Reads past the array's end are dropped by the processor, never a fault. */
DC_INLINE void v_prefetch(const void *p, int64_t bytes) {
  _mm_prefetch((const char *)((uintptr_t)p + (uintptr_t)bytes), _MM_HINT_T0);
}
/* Into L2, for what is read much later. */
DC_INLINE void v_prefetch_far(const void *p, int64_t bytes) {
  _mm_prefetch((const char *)((uintptr_t)p + (uintptr_t)bytes), _MM_HINT_T1);
}
/* v_prefetch ahead of element i of an array of dtype dt. */
DC_INLINE void v_ahead(const void *p, int dt, int64_t i, int64_t bytes) {
  v_prefetch(p, i * (dt == DC_F32 ? 4 : 2) + bytes);
}
/* Orders streaming stores before what follows. */
DC_INLINE void v_fence(void) { _mm_sfence(); }

#if defined(__AVX512F__)
/* ==== AVX-512 F, BW, DQ, VL: one register ======================================================================= */
typedef __m512 vf;
typedef struct vd {
  __m512d lo, hi;
} vd; /* 16 fp64 accumulators */

DC_INLINE __mmask16 v_mask(int r) { return (__mmask16)((1u << r) - 1u); }

DC_INLINE vf v_set1(float f) { return _mm512_set1_ps(f); }
DC_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
DC_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
DC_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
DC_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
DC_INLINE vf v_sqrt(vf a) { return _mm512_sqrt_ps(a); }
DC_INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
DC_INLINE __mmask16 v_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
DC_INLINE int v_any_nan(vf a) { return v_nan(a) != 0; }
/* VMAXPS and VMINPS give b if either is NaN or both are zero; dc__max_f32 and dc__min_f32 also keep a NaN of a. */
DC_INLINE vf v_max(vf a, vf b) { return _mm512_mask_mov_ps(_mm512_max_ps(a, b), v_nan(a), a); }
DC_INLINE vf v_min(vf a, vf b) { return _mm512_mask_mov_ps(_mm512_min_ps(a, b), v_nan(a), a); }
DC_INLINE vf v_canonical(vf a) {
  return _mm512_mask_mov_ps(a, v_nan(a), _mm512_castsi512_ps(_mm512_set1_epi32(DC__NAN_F32)));
}
/* NaN in the lanes where x is one, else a. */
DC_INLINE vf v_nan_of(vf a, vf x) {
  return _mm512_mask_mov_ps(a, v_nan(x), _mm512_castsi512_ps(_mm512_set1_epi32(DC__NAN_F32)));
}

DC_INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
/* Elements i and i ^ 1 change places; i ^ 2, 4, 8. */
DC_INLINE vf v_swap1(vf a) { return _mm512_permute_ps(a, 0xb1); }
DC_INLINE vf v_swap2(vf a) { return _mm512_permute_ps(a, 0x4e); }
DC_INLINE vf v_swap4(vf a) { return _mm512_shuffle_f32x4(a, a, 0xb1); }
DC_INLINE vf v_swap8(vf a) { return _mm512_shuffle_f32x4(a, a, 0x4e); }
/* The lanes of minus where the sign of x is set, else of plus. */
DC_INLINE vf v_by_sign(vf x, vf minus, vf plus) {
  return _mm512_mask_mov_ps(plus, _mm512_movepi32_mask(_mm512_castps_si512(x)), minus);
}
/* Zero in the lanes from r on. */
DC_INLINE vf v_keep(vf a, int r) { return r == LANES ? a : _mm512_maskz_mov_ps(v_mask(r), a); }
DC_INLINE __m256 v_halves(vf a) { /* the sums of i and i + 8 */
  return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
/* a * 2^n of integers n in fp32, where the result is a normal number. */
DC_INLINE vf v_ldexp(vf a, vf n) { return _mm512_scalef_ps(a, n); }
/* 0 where x < limit, else a. */
DC_INLINE vf v_zero_below(vf a, vf x, vf limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}

/* The lanes of below where x < limit, else of other. */
DC_INLINE vf v_if_below(vf x, vf limit, vf below, vf other) {
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), below);
}

DC_INLINE vf v_widen_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

DC_INLINE __m256i v_narrow_bf16_int(vf a) {
  const __m512i u = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
/* a is canonical: the payload of a NaN would be rounded as a number. */
DC_INLINE __m256i v_narrow_bf16(vf a) {
#if defined(__AVX512BF16__)
  const int denormal = 0x20;
  if (!DC_UNLIKELY(_mm512_fpclass_ps_mask(a, denormal))) return (__m256i)_mm512_cvtneps_pbh(a);
#endif
  return v_narrow_bf16_int(a);
}
DC_INLINE __m256i v_narrow_f16(vf a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

DC_INLINE __m256i v_load16(const void *p, int r) {
  return r == LANES ? _mm256_loadu_si256(p) : _mm256_maskz_loadu_epi16(v_mask(r), p);
}
DC_INLINE void v_store16(void *p, int r, __m256i h) {
  if (r == LANES) _mm256_storeu_si256(p, h);
  else _mm256_mask_storeu_epi16(p, v_mask(r), h);
}
DC_INLINE vf v_load32(const void *p, int r) {
  return r == LANES ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(v_mask(r), p);
}
DC_INLINE void v_store32(void *p, int r, vf a) {
  if (r == LANES) _mm512_storeu_ps(p, a);
  else _mm512_mask_storeu_ps(p, v_mask(r), a);
}
DC_INLINE vf v_widen_f16(__m256i h) { return _mm512_cvtph_ps(h); }
DC_INLINE void v_stream32(void *p, vf a) { _mm512_stream_ps(p, a); }
DC_INLINE void v_stream16(void *p, __m256i h) { _mm256_stream_si256(p, h); }
/* One cache line; dst aligned to it. */
DC_INLINE void v_stream_line(void *dst, const void *src) { _mm512_stream_si512(dst, _mm512_loadu_si512(src)); }

/* Integers: codes of quantised numbers and magnitudes, which order as the bits of |a| do. */
/* 16 vectors as rows of a matrix become its columns. */
DC_INLINE void v_turn(vf *x) {
  __m512 t[LANES];
  for (int i = 0; i < LANES; i += 4) { /* 4 x 4 within each quarter */
    const __m512 a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
    const __m512 c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; i++) { /* the quarters among themselves */
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88),
                 d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    x[i] = _mm512_shuffle_f32x4(a, c, 0x88), x[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), x[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

typedef __m512i vi;
DC_INLINE vi vi_set1(int i) { return _mm512_set1_epi32(i); }
DC_INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
DC_INLINE void vi_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
DC_INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
DC_INLINE uint32_t vi_top(vi a) { return (uint32_t)_mm512_reduce_max_epi32(a); }
DC_INLINE unsigned vi_ge(vi a, vi b) { return _mm512_cmpge_epi32_mask(a, b); }
/* t[i % 16] */
DC_INLINE vf v_lookup(const float *t, vi i) { return _mm512_permutexvar_ps(i, _mm512_loadu_ps(t)); }
DC_INLINE vf vi_float(vi a) { return _mm512_cvtepi32_ps(a); }
DC_INLINE vi v_round(vf a) { return _mm512_cvtps_epi32(a); }
DC_INLINE vi v_magnitude(vf a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
DC_INLINE __m128i vi_narrow8(vi a) { return _mm512_cvtsepi32_epi8(a); }
DC_INLINE vi vi_widen8(__m128i b) { return _mm512_cvtepi8_epi32(b); }
/* Bit j: the sign of element j. */
DC_INLINE unsigned v_signs(vf a) { return _mm512_movepi32_mask(_mm512_castps_si512(a)); }
/* a with the signs of the elements turned where the bit is set. */
DC_INLINE vf v_flip(vf a, unsigned bits) { return _mm512_mask_xor_ps(a, (__mmask16)bits, a, _mm512_set1_ps(-0.0f)); }

DC_INLINE vi vi_lanes(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
DC_INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
DC_INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
DC_INLINE vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); } /* the lower 32 bits */
DC_INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
/* (a & mask) | bits */
DC_INLINE vi vi_and_or(vi a, int mask, int bits) {
  return _mm512_ternarylogic_epi32(a, _mm512_set1_epi32(mask), _mm512_set1_epi32(bits), 0xea);
}
DC_INLINE vi vi_left(vi a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
DC_INLINE vi vi_right(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); } /* of unsigned numbers */
DC_INLINE vi vi_right_signed(vi a, int n) { return _mm512_sra_epi32(a, _mm_cvtsi32_si128(n)); }
DC_INLINE vi v_bits(vf a) { return _mm512_castps_si512(a); }
DC_INLINE vf v_of_bits(vi a) { return _mm512_castsi512_ps(a); }
DC_INLINE vf v_xor(vf a, vi i) { return _mm512_xor_ps(a, _mm512_castsi512_ps(i)); }
DC_INLINE vi v_truncate(vf a) { return _mm512_cvttps_epi32(a); }
DC_INLINE vi vi_abs(vi a) { return _mm512_abs_epi32(a); }
/* a, which is not negative, with the sign of i. */
DC_INLINE vf v_with_sign(vf a, vi i) {
  return _mm512_or_ps(a, _mm512_castsi512_ps(_mm512_and_si512(i, _mm512_set1_epi32(INT32_MIN))));
}
/* The same, but zero where i is. */
DC_INLINE vf v_with_sign_or_zero(vf a, vi i) {
  const __mmask16 some = _mm512_test_epi32_mask(i, i);
  return _mm512_castsi512_ps(_mm512_maskz_ternarylogic_epi32(some, _mm512_castps_si512(a), i,
                                                             _mm512_set1_epi32(INT32_MIN), 0xf8)); /* a | (i & sign) */
}
/* a, or -a where x has its sign set. */
DC_INLINE vi vi_signed_as(vi a, vf x) {
  return _mm512_mask_sub_epi32(a, _mm512_movepi32_mask(_mm512_castps_si512(x)), _mm512_setzero_si512(), a);
}
/* below, towards zero, where x < limit, else other. */
DC_INLINE vi vi_truncate_if_below(vf x, vf limit, vf below, vi other) {
  return _mm512_mask_cvttps_epi32(other, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), below);
}
/* The lower 8 bits of each. */
DC_INLINE __m128i vi_low8(vi a) { return _mm512_cvtepi32_epi8(a); }
/* r numbers of 4 bits from (r + 1) / 2 bytes, the even one in the lower half; above them may be others. */
DC_INLINE vi vi_load_nibbles(const void *p, int r) {
  const __m512i shift = _mm512_set1_epi64((int64_t)4 << 32);
  const __m512i byte = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  int64_t packed = 0;
  memcpy(&packed, p, r == LANES ? sizeof packed : (size_t)(r + 1) / 2);
  return _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_set1_epi64(packed), byte), shift);
}
/* The lower 4 bits of r numbers, in the same places. */
DC_INLINE void vi_store_nibbles(void *p, int r, vi a) {
  const __m512i low = _mm512_set1_epi64(15), high = _mm512_srli_epi64(a, 28);
  const __m128i bytes = _mm512_cvtepi64_epi8(_mm512_ternarylogic_epi64(low, a, high, 0xca)); /* low ? a : high */
  const int64_t packed = _mm_cvtsi128_si64(bytes);
  memcpy(p, &packed, r == LANES ? sizeof packed : (size_t)(r + 1) / 2);
}
/* 4 * LANES bytes, of numbers in [-128, 127]. */
DC_INLINE __m512i vi_bytes4(const vi *a) {
  const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(a[0], a[1]), _mm512_packs_epi32(a[2], a[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); /* quarters of them */
  return _mm512_permutexvar_epi32(order, packed);
}
/* Their lower 4 bits, the even one in the lower half of a byte. */
DC_INLINE void vi_store_nibbles4(void *p, const vi *a) {
  const __m512i low = _mm512_and_si512(vi_bytes4(a), _mm512_set1_epi8(15));
  _mm256_storeu_si256(p, _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(low, _mm512_set1_epi16(0x1001))));
}
DC_INLINE __m256i vi_narrow16(vi a) { return _mm512_cvtepi32_epi16(a); } /* of numbers below 2^16 */
DC_INLINE vi vi_xor3(vi a, vi b, vi c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
/* The 64 bits of the products of unsigned numbers. */
DC_INLINE void vi_wide_mul(vi a, uint32_t by, vi *high, vi *low) {
  const __m512i b = _mm512_set1_epi32((int)by);
  const __m512i even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  *high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
  *low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
}
/* Zero in the lanes whose bit is not set. */
DC_INLINE vi vi_only(vi a, unsigned bits) { return _mm512_maskz_mov_epi32((__mmask16)bits, a); }
DC_INLINE vf v_only(vf a, unsigned bits) { return _mm512_maskz_mov_ps((__mmask16)bits, a); }
/* The larger of a and top; top where a is NaN. */
DC_INLINE vf v_raise(vf top, vf a) { return _mm512_max_ps(a, top); }

#if defined(__AVX512BF16__)
/* acc[j] += the two products of the bf16 pairs in a[j] and b[j], the upper one first; denormals count as zero. */
DC_INLINE vf v_dot_pairs(vf acc, vi a, vi b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
/* The bits of r numbers of 16 bits as pairs, at most 2 * LANES; zeros behind. */
DC_INLINE vf v_load_pairs(const void *p, int r) {
  if (r == 2 * LANES) return _mm512_loadu_ps(p);
  return (vf)_mm512_maskz_loadu_epi16((__mmask32)((1u << r) - 1), p);
}
/* Pairs of an element of `low` and the same of `high`. */
DC_INLINE vf v_pairs(__m256i low, __m256i high) {
  return (vf)_mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
/* 2^t within 3e-6 of itself for t <= 1, where the result is to be a bf16: 2^n p(r), n the next integer and p of degree
 * 4, fitted as that of ref/exp.h. 0 far below; NaN stays NaN. */
DC_INLINE vf v_exp2_low(vf t) {
  const vf round = _mm512_set1_ps(0x1.8p+23f);
  t = _mm512_max_ps(_mm512_set1_ps(-160.0f), t); /* the second operand's NaN is kept */
  const vf n = _mm512_sub_ps(_mm512_add_ps(t, round), round), r = _mm512_sub_ps(t, n);
  vf p = _mm512_fmadd_ps(_mm512_set1_ps(0x1.3997d4p-7f), r, _mm512_set1_ps(0x1.ca1440p-5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ec06dap-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.62e0dcp-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.ffffe8p-1f));
  return _mm512_scalef_ps(p, n);
}
/* Bits of which the upper halves are a rounded to bf16, halves away from zero. Cheaper than VCVTNE2PS2BF16 and a
 * permutation where pairs are needed; NaNs of bf16 operands stay ones. */
DC_INLINE vi v_half_up(vf a) { return _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x8000)); }
/* Pairs of the upper halves: those of `low` in the lower halves. */
DC_INLINE vi vi_upper_pairs(vi low, vi high) {
  return _mm512_mask_mov_epi16(_mm512_srli_epi32(low, 16), 0xaaaaaaaa, high);
}
/* 32 bf16 side by side. */
DC_INLINE vi v_join_bf16(vf first, vf second) { return (vi)_mm512_cvtne2ps_pbh(second, first); }
#endif

#if defined(DC_TILES)
/* Tiles: 8 registers of 16 rows of 64 bytes (Intel SDM vol. 1, 18). Written as assembly: numbers of registers are
 * constants of the text, and compilers of Debian 12 don't say that a tile load reads memory. */
enum { V_TILE_ROWS = 16, V_TILE_WORDS = 16 };
#if !defined(DEEPC_EMULATED) /* tests/c/emulated has the same as functions */
DC_INLINE void v_tiles_begin(void) { /* all 8 of them whole */
  uint8_t config[64] = {1};
  for (int k = 0; k < 8; k++) config[16 + 2 * k] = 64, config[48 + k] = V_TILE_ROWS;
  __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
DC_INLINE void v_tiles_end(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#define V_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t::)
/* 16 rows, `bytes` apart. */
#define V_TILE_LOAD(t, from, bytes) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"((const void *)(from)), "r"((int64_t)(bytes)) : "memory")
#define V_TILE_STORE(t, to, bytes) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void *)(to)), "r"((int64_t)(bytes)) : "memory")
/* c[16][16] += a[16][32] b[32][16]: rows of a are 32 bf16; row k of b has the rows 2k and 2k + 1 as pairs. Denormals
 * count as zero. */
#define V_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)
#endif
#endif

DC_INLINE vd vd_zero(void) { return (vd){_mm512_setzero_pd(), _mm512_setzero_pd()}; }
DC_INLINE vd vd_set1(double d) { return (vd){_mm512_set1_pd(d), _mm512_set1_pd(d)}; }
DC_INLINE vd vd_load(const double *p) { return (vd){_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)}; }
DC_INLINE void vd_store(double *p, vd a) {
  _mm512_storeu_pd(p, a.lo);
  _mm512_storeu_pd(p + 8, a.hi);
}
DC_INLINE vd vd_of(vf a) {
  return (vd){_mm512_cvtps_pd(_mm512_castps512_ps256(a)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1))};
}
DC_INLINE vd vd_sub(vd a, vd b) { return (vd){_mm512_sub_pd(a.lo, b.lo), _mm512_sub_pd(a.hi, b.hi)}; }
DC_INLINE vd vd_fma(vd a, vd b, vd c) {
  return (vd){_mm512_fmadd_pd(a.lo, b.lo, c.lo), _mm512_fmadd_pd(a.hi, b.hi, c.hi)};
}
DC_INLINE __m512d vd_sq8(__m512d acc, __m256 x) {
  const __m512d d = _mm512_cvtps_pd(x);
  return _mm512_fmadd_pd(d, d, acc);
}
/* acc[j] += (double)a[j]^2 */
DC_INLINE vd vd_add_sq(vd acc, vf a) {
  return (vd){vd_sq8(acc.lo, _mm512_castps512_ps256(a)), vd_sq8(acc.hi, _mm512_extractf32x8_ps(a, 1))};
}
/* The same of 16 fp32 in memory: halves are loaded apart, which saves the shuffle. */
DC_INLINE vd vd_add_sq_f32(vd acc, const float *p) {
  return (vd){vd_sq8(acc.lo, _mm256_loadu_ps(p)), vd_sq8(acc.hi, _mm256_loadu_ps(p + 8))};
}
/* acc[j] += |(double)a[j]| */
DC_INLINE vd vd_add_abs(vd acc, vf a) {
  const vf m = _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a);
  return (vd){_mm512_add_pd(acc.lo, _mm512_cvtps_pd(_mm512_castps512_ps256(m))),
              _mm512_add_pd(acc.hi, _mm512_cvtps_pd(_mm512_extractf32x8_ps(m, 1)))};
}
DC_INLINE vd vd_add(vd a, vd b) { return (vd){_mm512_add_pd(a.lo, b.lo), _mm512_add_pd(a.hi, b.hi)}; }
DC_INLINE __m256d vd_half(vd acc) { /* the sums of i and i + 8, then of i and i + 4 */
  const __m512d s = _mm512_add_pd(acc.lo, acc.hi);
  return _mm256_add_pd(_mm512_castpd512_pd256(s), _mm512_extractf64x4_pd(s, 1));
}

#else
/* ==== AVX2, FMA, F16C: a pair of registers ====================================================================== */
typedef struct vf {
  __m256 a, b;
} vf;
typedef struct vd {
  __m256d q[4];
} vd;

#define DC__PAIR(op, x, y) \
  (vf) { op((x).a, (y).a), op((x).b, (y).b) }
DC_INLINE vf v_set1(float f) { return (vf){_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
DC_INLINE vf v_add(vf x, vf y) { return DC__PAIR(_mm256_add_ps, x, y); }
DC_INLINE vf v_sub(vf x, vf y) { return DC__PAIR(_mm256_sub_ps, x, y); }
DC_INLINE vf v_mul(vf x, vf y) { return DC__PAIR(_mm256_mul_ps, x, y); }
DC_INLINE vf v_div(vf x, vf y) { return DC__PAIR(_mm256_div_ps, x, y); }
DC_INLINE vf v_sqrt(vf x) { return (vf){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
DC_INLINE vf v_fma(vf x, vf y, vf z) { return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
DC_INLINE __m256 v_nan8(__m256 x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
DC_INLINE int v_any_nan(vf x) { return _mm256_movemask_ps(_mm256_or_ps(v_nan8(x.a), v_nan8(x.b))) != 0; }
DC_INLINE __m256 v_max8(__m256 x, __m256 y) { return _mm256_blendv_ps(_mm256_max_ps(x, y), x, v_nan8(x)); }
DC_INLINE __m256 v_min8(__m256 x, __m256 y) { return _mm256_blendv_ps(_mm256_min_ps(x, y), x, v_nan8(x)); }
DC_INLINE vf v_max(vf x, vf y) { return DC__PAIR(v_max8, x, y); }
DC_INLINE vf v_min(vf x, vf y) { return DC__PAIR(v_min8, x, y); }
DC_INLINE __m256 v_canonical8(__m256 x) {
  return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(DC__NAN_F32)), v_nan8(x));
}
DC_INLINE vf v_canonical(vf x) { return (vf){v_canonical8(x.a), v_canonical8(x.b)}; }
DC_INLINE __m256 v_nan_of8(__m256 a, __m256 x) {
  return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(DC__NAN_F32)), v_nan8(x));
}
/* NaN in the lanes where x is one, else a. */
DC_INLINE vf v_nan_of(vf a, vf x) { return DC__PAIR(v_nan_of8, a, x); }

DC_INLINE vf v_abs(vf x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return (vf){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
/* Elements i and i ^ 1 change places; i ^ 2, 4, 8. */
DC_INLINE vf v_swap1(vf x) { return (vf){_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)}; }
DC_INLINE vf v_swap2(vf x) { return (vf){_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)}; }
DC_INLINE vf v_swap4(vf x) { return (vf){_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)}; }
DC_INLINE vf v_swap8(vf x) { return (vf){x.b, x.a}; }
/* The lanes of minus where the sign of x is set, else of plus. */
DC_INLINE vf v_by_sign(vf x, vf minus, vf plus) {
  return (vf){_mm256_blendv_ps(plus.a, minus.a, x.a), _mm256_blendv_ps(plus.b, minus.b, x.b)};
}
/* Zero in the lanes from r on. */
DC_INLINE vf v_keep(vf x, int r) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  if (r == LANES) return x;
  return (vf){_mm256_and_ps(x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(r), lane))),
              _mm256_and_ps(x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(r - 8), lane)))};
}
DC_INLINE __m256 v_halves(vf x) { return _mm256_add_ps(x.a, x.b); } /* the sums of i and i + 8 */
DC_INLINE __m256 v_ldexp8(__m256 x, __m256 n) { /* n moves into the exponent of 1.0 */
  const __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_cvtps_epi32(n), 23), _mm256_set1_epi32(0x3f800000));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
/* x * 2^n of integers n in fp32, where the result is a normal number. */
DC_INLINE vf v_ldexp(vf x, vf n) { return DC__PAIR(v_ldexp8, x, n); }
/* 0 where x < limit, else a. */
DC_INLINE vf v_zero_below(vf a, vf x, vf limit) {
  return (vf){_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), a.a),
              _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), a.b)};
}

/* The lanes of below where x < limit, else of other. */
DC_INLINE vf v_if_below(vf x, vf limit, vf below, vf other) {
  return (vf){_mm256_blendv_ps(other.a, below.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)),
              _mm256_blendv_ps(other.b, below.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ))};
}

DC_INLINE __m256 v_widen_bf16_8(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
DC_INLINE vf v_widen_bf16(__m256i h) {
  return (vf){v_widen_bf16_8(_mm256_castsi256_si128(h)), v_widen_bf16_8(_mm256_extracti128_si256(h, 1))};
}
DC_INLINE vf v_widen_f16(__m256i h) {
  return (vf){_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
DC_INLINE __m256i v_round_bf16_8(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
}
/* x is canonical: the payload of a NaN would be rounded as a number. */
DC_INLINE __m256i v_narrow_bf16(vf x) { /* the pack works within 128-bit halves, so quarters 1 and 2 change places */
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(v_round_bf16_8(x.a), v_round_bf16_8(x.b)), 0xd8);
}
DC_INLINE __m256i v_narrow_f16(vf x) {
  const __m128i lo = _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m128i hi = _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_set_m128i(hi, lo);
}

DC_INLINE __m256i v_load16(const void *p, int r) {
  uint16_t part[LANES] = {0};
  if (r == LANES) return _mm256_loadu_si256(p);
  memcpy(part, p, (size_t)r * sizeof *part);
  return _mm256_loadu_si256((const __m256i *)part);
}
DC_INLINE void v_store16(void *p, int r, __m256i h) {
  uint16_t part[LANES];
  if (r == LANES) {
    _mm256_storeu_si256(p, h);
    return;
  }
  _mm256_storeu_si256((__m256i *)part, h);
  memcpy(p, part, (size_t)r * sizeof *part);
}
DC_INLINE vf v_load32(const void *p, int r) {
  float part[LANES] = {0};
  if (r == LANES) return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps((const float *)p + 8)};
  memcpy(part, p, (size_t)r * sizeof *part);
  return (vf){_mm256_loadu_ps(part), _mm256_loadu_ps(part + 8)};
}
DC_INLINE void v_store32(void *p, int r, vf x) {
  float part[LANES];
  float *to = r == LANES ? p : part;
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
  if (r != LANES) memcpy(p, part, (size_t)r * sizeof *part);
}
DC_INLINE void v_stream32(void *p, vf x) {
  _mm256_stream_ps(p, x.a);
  _mm256_stream_ps((float *)p + 8, x.b);
}
DC_INLINE void v_stream16(void *p, __m256i h) { _mm256_stream_si256(p, h); }
DC_INLINE void v_stream_line(void *dst, const void *src) {
  const __m256i lo = _mm256_loadu_si256(src), hi = _mm256_loadu_si256((const __m256i *)src + 1);
  _mm256_stream_si256(dst, lo);
  _mm256_stream_si256((__m256i *)dst + 1, hi);
}

DC_INLINE void v_turn8(__m256 *to, const __m256 *x) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) { /* 4 x 4 within each half */
    const __m256 a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpackhi_ps(x[i], x[i + 1]);
    const __m256 c = _mm256_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; i++) {
    to[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    to[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}
/* 16 vectors as rows of a matrix become its columns. */
DC_INLINE void v_turn(vf *x) {
  __m256 from[4][8], to[4][8]; /* quarters: above and below, left and right of it */
  for (int i = 0; i < 8; i++)
    from[0][i] = x[i].a, from[1][i] = x[i].b, from[2][i] = x[i + 8].a, from[3][i] = x[i + 8].b;
  for (int k = 0; k < 4; k++) v_turn8(to[k], from[k]);
  for (int i = 0; i < 8; i++) x[i] = (vf){to[0][i], to[2][i]}, x[i + 8] = (vf){to[1][i], to[3][i]};
}

/* Integers: codes of quantised numbers and magnitudes, which order as the bits of |a| do. */
typedef struct vi {
  __m256i a, b;
} vi;
DC_INLINE vi vi_set1(int i) { return (vi){_mm256_set1_epi32(i), _mm256_set1_epi32(i)}; }
DC_INLINE vi vi_load(const void *p) { return (vi){_mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)}; }
DC_INLINE void vi_store(void *p, vi x) {
  _mm256_storeu_si256(p, x.a);
  _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
DC_INLINE vi vi_max(vi x, vi y) { return (vi){_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
DC_INLINE uint32_t vi_top(vi x) {
  const __m256i eight = _mm256_max_epi32(x.a, x.b);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return (uint32_t)_mm_cvtsi128_si32(m);
}
DC_INLINE unsigned vi_lt8(__m256i x, __m256i y) {
  return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(y, x)));
}
DC_INLINE unsigned vi_ge(vi x, vi y) { return ~(vi_lt8(x.a, y.a) | vi_lt8(x.b, y.b) << 8) & 0xffffu; }
DC_INLINE __m256 v_lookup8(const float *t, __m256i i) { /* bit 3 chooses the half */
  const __m256 lo = _mm256_permutevar8x32_ps(_mm256_loadu_ps(t), i);
  const __m256 hi = _mm256_permutevar8x32_ps(_mm256_loadu_ps(t + 8), i);
  return _mm256_blendv_ps(lo, hi, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}
/* t[i % 16] */
DC_INLINE vf v_lookup(const float *t, vi i) { return (vf){v_lookup8(t, i.a), v_lookup8(t, i.b)}; }
DC_INLINE vf vi_float(vi x) { return (vf){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
DC_INLINE vi v_round(vf x) { return (vi){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
DC_INLINE vi v_magnitude(vf x) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return (vi){_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
DC_INLINE __m128i vi_narrow8(vi x) {
  const __m256i h = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}
DC_INLINE vi vi_widen8(__m128i b) { return (vi){_mm256_cvtepi8_epi32(b), _mm256_cvtepi8_epi32(_mm_srli_si128(b, 8))}; }
/* Bit j: the sign of element j. */
DC_INLINE unsigned v_signs(vf x) { return (unsigned)_mm256_movemask_ps(x.a) | (unsigned)_mm256_movemask_ps(x.b) << 8; }
DC_INLINE __m256 v_flip8(__m256 x, unsigned bits) {
  const __m256i one_each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), one_each), one_each);
  return _mm256_xor_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(set, 31)));
}
/* x with the signs of the elements turned where the bit is set. */
DC_INLINE vf v_flip(vf x, unsigned bits) { return (vf){v_flip8(x.a, bits), v_flip8(x.b, bits >> 8)}; }

DC_INLINE vi vi_lanes(void) {
  return (vi){_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
DC_INLINE vi vi_add(vi x, vi y) { return (vi){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
DC_INLINE vi vi_sub(vi x, vi y) { return (vi){_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
/* The lower 32 bits. */
DC_INLINE vi vi_mul(vi x, vi y) { return (vi){_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
DC_INLINE vi vi_or(vi x, vi y) { return (vi){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
DC_INLINE vi vi_and_or(vi x, int mask, int bits) { /* (x & mask) | bits */
  const __m256i m = _mm256_set1_epi32(mask), b = _mm256_set1_epi32(bits);
  return (vi){_mm256_or_si256(_mm256_and_si256(x.a, m), b), _mm256_or_si256(_mm256_and_si256(x.b, m), b)};
}
DC_INLINE vi vi_left(vi x, int n) {
  const __m128i by = _mm_cvtsi32_si128(n);
  return (vi){_mm256_sll_epi32(x.a, by), _mm256_sll_epi32(x.b, by)};
}
DC_INLINE vi vi_right(vi x, int n) { /* of unsigned numbers */
  const __m128i by = _mm_cvtsi32_si128(n);
  return (vi){_mm256_srl_epi32(x.a, by), _mm256_srl_epi32(x.b, by)};
}
DC_INLINE vi vi_right_signed(vi x, int n) {
  const __m128i by = _mm_cvtsi32_si128(n);
  return (vi){_mm256_sra_epi32(x.a, by), _mm256_sra_epi32(x.b, by)};
}
DC_INLINE vi v_bits(vf x) { return (vi){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
DC_INLINE vf v_of_bits(vi x) { return (vf){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
DC_INLINE vf v_xor(vf x, vi i) {
  return (vf){_mm256_xor_ps(x.a, _mm256_castsi256_ps(i.a)), _mm256_xor_ps(x.b, _mm256_castsi256_ps(i.b))};
}
DC_INLINE vi vi_abs(vi x) { return (vi){_mm256_abs_epi32(x.a), _mm256_abs_epi32(x.b)}; }
DC_INLINE __m256 v_with_sign8(__m256 x, __m256i i) {
  return _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_and_si256(i, _mm256_set1_epi32(INT32_MIN))));
}
/* x, which is not negative, with the sign of i. */
DC_INLINE vf v_with_sign(vf x, vi i) { return (vf){v_with_sign8(x.a, i.a), v_with_sign8(x.b, i.b)}; }
DC_INLINE __m256i vi_signed_as8(__m256i i, __m256 x) {
  const __m256i sign = _mm256_srai_epi32(_mm256_castps_si256(x), 31);
  return _mm256_sub_epi32(_mm256_xor_si256(i, sign), sign);
}
/* i, or -i where x has its sign set. */
DC_INLINE vi vi_signed_as(vi i, vf x) { return (vi){vi_signed_as8(i.a, x.a), vi_signed_as8(i.b, x.b)}; }
DC_INLINE vi v_truncate(vf x) { return (vi){_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
DC_INLINE __m256i vi_truncate_if_below8(__m256 x, __m256 limit, __m256 below, __m256i other) {
  return _mm256_blendv_epi8(other, _mm256_cvttps_epi32(below),
                            _mm256_castps_si256(_mm256_cmp_ps(x, limit, _CMP_LT_OQ)));
}
/* below, towards zero, where x < limit, else other. */
DC_INLINE vi vi_truncate_if_below(vf x, vf limit, vf below, vi other) {
  return (vi){vi_truncate_if_below8(x.a, limit.a, below.a, other.a),
              vi_truncate_if_below8(x.b, limit.b, below.b, other.b)};
}
DC_INLINE vf v_with_sign_or_zero(vf x, vi i) { /* x, which is not negative, with the sign of i; zero where i is */
  const __m256i zero = _mm256_setzero_si256();
  const vf f = v_with_sign(x, i);
  return (vf){_mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(i.a, zero)), f.a),
              _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(i.b, zero)), f.b)};
}
/* The lower 8 bits of each. */
DC_INLINE __m128i vi_low8(vi x) {
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i h = _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)), 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}
DC_INLINE vi vi_xor3(vi x, vi y, vi z) {
  return (vi){_mm256_xor_si256(x.a, _mm256_xor_si256(y.a, z.a)), _mm256_xor_si256(x.b, _mm256_xor_si256(y.b, z.b))};
}
DC_INLINE void vi_wide_mul8(__m256i x, __m256i by, __m256i *high, __m256i *low) {
  const __m256i even = _mm256_mul_epu32(x, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), by);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
/* The 64 bits of the products of unsigned numbers. */
DC_INLINE void vi_wide_mul(vi x, uint32_t by, vi *high, vi *low) {
  const __m256i b = _mm256_set1_epi32((int)by);
  vi_wide_mul8(x.a, b, &high->a, &low->a);
  vi_wide_mul8(x.b, b, &high->b, &low->b);
}
DC_INLINE __m256i vi_only8(__m256i x, unsigned bits) {
  const __m256i one_each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_and_si256(x, _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), one_each), one_each));
}
/* Zero in the lanes whose bit is not set. */
DC_INLINE vi vi_only(vi x, unsigned bits) { return (vi){vi_only8(x.a, bits), vi_only8(x.b, bits >> 8)}; }
DC_INLINE vf v_only(vf x, unsigned bits) {
  return (vf){_mm256_castsi256_ps(vi_only8(_mm256_castps_si256(x.a), bits)),
              _mm256_castsi256_ps(vi_only8(_mm256_castps_si256(x.b), bits >> 8))};
}
/* The larger of x and top; top where x is NaN. */
DC_INLINE vf v_raise(vf top, vf x) { return DC__PAIR(_mm256_max_ps, x, top); }
DC_INLINE __m256i vi_bytes2(const vi *x) { /* 2 * LANES bytes, of numbers in [-128, 127] */
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(x[0].a, x[0].b), _mm256_packs_epi32(x[1].a, x[1].b));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
/* The lower 4 bits of 4 * LANES of them, the even one in the lower half of a byte. */
DC_INLINE void vi_store_nibbles4(void *p, const vi *x) {
  const __m256i low = _mm256_set1_epi8(15), pair = _mm256_set1_epi16(0x1001);
  const __m256i first = _mm256_maddubs_epi16(_mm256_and_si256(vi_bytes2(x), low), pair);
  const __m256i second = _mm256_maddubs_epi16(_mm256_and_si256(vi_bytes2(x + 2), low), pair);
  _mm256_storeu_si256(p, _mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8));
}
DC_INLINE __m256i vi_narrow16(vi x) { /* of numbers below 2^16; quarters as in v_narrow_bf16 */
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
}

DC_INLINE vd vd_zero(void) {
  return (vd){{_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}};
}
DC_INLINE vd vd_set1(double d) {
  const __m256d x = _mm256_set1_pd(d);
  return (vd){{x, x, x, x}};
}
DC_INLINE vd vd_load(const double *p) {
  return (vd){{_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4), _mm256_loadu_pd(p + 8), _mm256_loadu_pd(p + 12)}};
}
DC_INLINE void vd_store(double *p, vd x) {
  for (int k = 0; k < 4; k++) _mm256_storeu_pd(p + 4 * k, x.q[k]);
}
DC_INLINE vd vd_of(vf x) {
  return (vd){{_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)),
               _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))}};
}
DC_INLINE vd vd_sub(vd a, vd b) {
  for (int k = 0; k < 4; k++) a.q[k] = _mm256_sub_pd(a.q[k], b.q[k]);
  return a;
}
DC_INLINE vd vd_fma(vd a, vd b, vd c) {
  for (int k = 0; k < 4; k++) c.q[k] = _mm256_fmadd_pd(a.q[k], b.q[k], c.q[k]);
  return c;
}
DC_INLINE __m256d vd_sq4(__m256d acc, __m128 x) {
  const __m256d d = _mm256_cvtps_pd(x);
  return _mm256_fmadd_pd(d, d, acc);
}
DC_INLINE vd vd_add_sq(vd acc, vf x) {
  acc.q[0] = vd_sq4(acc.q[0], _mm256_castps256_ps128(x.a));
  acc.q[1] = vd_sq4(acc.q[1], _mm256_extractf128_ps(x.a, 1));
  acc.q[2] = vd_sq4(acc.q[2], _mm256_castps256_ps128(x.b));
  acc.q[3] = vd_sq4(acc.q[3], _mm256_extractf128_ps(x.b, 1));
  return acc;
}
DC_INLINE vd vd_add_sq_f32(vd acc, const float *p) {
  for (int k = 0; k < 4; k++) acc.q[k] = vd_sq4(acc.q[k], _mm_loadu_ps(p + 4 * k));
  return acc;
}
/* acc[j] += |(double)x[j]| */
DC_INLINE vd vd_add_abs(vd acc, vf x) {
  const __m256 sign = _mm256_set1_ps(-0.0f), a = _mm256_andnot_ps(sign, x.a), b = _mm256_andnot_ps(sign, x.b);
  acc.q[0] = _mm256_add_pd(acc.q[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
  acc.q[1] = _mm256_add_pd(acc.q[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
  acc.q[2] = _mm256_add_pd(acc.q[2], _mm256_cvtps_pd(_mm256_castps256_ps128(b)));
  acc.q[3] = _mm256_add_pd(acc.q[3], _mm256_cvtps_pd(_mm256_extractf128_ps(b, 1)));
  return acc;
}
DC_INLINE vd vd_add(vd a, vd b) {
  for (int k = 0; k < 4; k++) a.q[k] = _mm256_add_pd(a.q[k], b.q[k]);
  return a;
}
DC_INLINE __m256d vd_half(vd acc) {
  return _mm256_add_pd(_mm256_add_pd(acc.q[0], acc.q[2]), _mm256_add_pd(acc.q[1], acc.q[3]));
}
#endif

/* ==== common to both ============================================================================================ */
/* float(p[i]) of r elements, the rest zero. dt is a constant where speed matters, and the switch is gone. */
DC_INLINE vf v_get(const void *p, int dt, int64_t i, int r) {
  switch (dt) {
  case DC_F32: return v_load32((const float *)p + i, r);
  case DC_BF16: return v_widen_bf16(v_load16((const uint16_t *)p + i, r));
  default: return v_widen_f16(v_load16((const uint16_t *)p + i, r));
  }
}

/* p[i] = round_to(dt, a) of r elements; a holds no NaN but the canonical one. */
DC_INLINE void v_put_canonical(void *p, int dt, int64_t i, int r, vf a) {
  switch (dt) {
  case DC_F32: v_store32((float *)p + i, r, a); return;
  case DC_BF16: v_store16((uint16_t *)p + i, r, v_narrow_bf16(a)); return;
  default: v_store16((uint16_t *)p + i, r, v_narrow_f16(a)); return;
  }
}

/* p[i] = round_to(dt, a) of r elements. */
DC_INLINE void v_put(void *p, int dt, int64_t i, int r, vf a) { v_put_canonical(p, dt, i, r, v_canonical(a)); }

/* Whether p may be stored past the caches: v_put_stream wants the 16 elements aligned to their size. */
DC_INLINE int v_can_stream(const void *p, int dt) { return (uintptr_t)p % (dt == DC_F32 ? 64 : 32) == 0; }

/* The same past the caches, 16 elements; v_fence() after the last. */
DC_INLINE void v_put_stream(void *p, int dt, int64_t i, vf a) {
  a = v_canonical(a);
  switch (dt) {
  case DC_F32: v_stream32((float *)p + i, a); return;
  case DC_BF16: v_stream16((uint16_t *)p + i, v_narrow_bf16(a)); return;
  default: v_stream16((uint16_t *)p + i, v_narrow_f16(a)); return;
  }
}

/* r bytes, the rest zero. */
DC_INLINE __m128i v_load8(const void *p, int r) {
  uint8_t part[LANES] = {0};
  if (r == LANES) return _mm_loadu_si128(p);
  memcpy(part, p, (size_t)r);
  return _mm_loadu_si128((const __m128i *)part);
}
DC_INLINE void v_store8(void *p, int r, __m128i b) {
  uint8_t part[LANES];
  if (r == LANES) {
    _mm_storeu_si128(p, b);
    return;
  }
  _mm_storeu_si128((__m128i *)part, b);
  memcpy(p, part, (size_t)r);
}
/* r signed numbers of 4 bits from (r + 1) / 2 bytes, the even one in the lower half, as bytes. */
DC_INLINE __m128i v_load4(const void *p, int r) {
  const __m128i low = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
  uint64_t packed = 0;
  memcpy(&packed, p, r == LANES ? sizeof packed : (size_t)(r + 1) / 2);
  const __m128i x = _mm_cvtsi64_si128((int64_t)packed);
  const __m128i half = _mm_unpacklo_epi8(_mm_and_si128(x, low), _mm_and_si128(_mm_srli_epi16(x, 4), low));
  return _mm_sub_epi8(_mm_xor_si128(half, eight), eight); /* extends the sign of 4 bits */
}
DC_INLINE void v_store4(void *p, int r, __m128i b) {
  const __m128i even = _mm_and_si128(b, _mm_set1_epi16(0x000f));
  const __m128i odd = _mm_and_si128(_mm_srli_epi16(b, 4), _mm_set1_epi16(0x00f0));
  const uint64_t packed = (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi16(_mm_or_si128(even, odd), even));
  memcpy(p, &packed, r == LANES ? sizeof packed : (size_t)(r + 1) / 2);
}

#if !defined(__AVX512F__)
/* r numbers of 4 bits from (r + 1) / 2 bytes, the even one in the lower half; above them may be others. */
DC_INLINE vi vi_load_nibbles(const void *p, int r) { return vi_widen8(v_load4(p, r)); }
/* The lower 4 bits of r numbers, in the same places. */
DC_INLINE void vi_store_nibbles(void *p, int r, vi a) { v_store4(p, r, vi_low8(a)); }
#endif

/* The fixed tree of ops.h over 16 fp32 sums. */
DC_INLINE float v_tree(vf a) {
  const __m256 eight = v_halves(a);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
}

/* The same over 16 fp64 accumulators. */
DC_INLINE double vd_tree(vd acc) {
  const __m256d four = vd_half(acc);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return dc__canonical_f64(_mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two)));
}

/* The same over the 32 of two. */
DC_INLINE double vd_tree2(const vd *acc) { return vd_tree(vd_add(acc[0], acc[1])); }

#endif
