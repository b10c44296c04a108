/* immintrin.h of the builds in which instructions of AVX-512 (F, BW, DQ, VL), AVX512-BF16 and AMX-BF16 are functions
 * over those of AVX2: so a processor without them tests the bodies that others run (`make test-levels`). It is in the
 * way of the compiler's own file, which it includes first. Only what ops/cpu/vec.h uses is here; each function does
 * what the Intel SDM, vol. 2, says of the instruction, in the rounding mode of the moment.
 *
 * With DEEPC_EMULATED_BF16 the file that includes it has AVX512-BF16 too, with DC_TILES tiles. */
#ifndef DEEPC_TESTS_EMULATED_IMMINTRIN_H
#define DEEPC_TESTS_EMULATED_IMMINTRIN_H

#include_next <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(DEEPC_EMULATED_BF16)
#define __AVX512BF16__ 1
#endif

#define EMU static inline __attribute__((always_inline, unused))

typedef union emu_zmm {
  __m512 ps;
  __m512d pd;
  __m512i si;
  __m256 ps2[2];
  __m256d pd2[2];
  __m256i si2[2];
  __m128i si4[4];
  float f[16];
  double d[8];
  int32_t i[16];
  uint32_t u[16];
  int64_t l[8];
  uint64_t q[8];
  int16_t s[32];
  uint16_t h[32];
  int8_t b[64];
} emu_zmm;

EMU emu_zmm emu_ps(__m512 a) { return (emu_zmm){.ps = a}; }
EMU emu_zmm emu_pd(__m512d a) { return (emu_zmm){.pd = a}; }
EMU emu_zmm emu_si(__m512i a) { return (emu_zmm){.si = a}; }

/* Instructions whose two halves are AVX2's. T: the kind of vector (ps, pd, si). */
#define EMU_HALVES1(name, T, half)                                                \
  EMU __typeof__(((emu_zmm *)0)->T) emu_##name(__typeof__(((emu_zmm *)0)->T) a) { \
    const emu_zmm x = {.T = a};                                                   \
    return (emu_zmm){.T##2 = {half(x.T##2 [0]), half(x.T##2 [1])}}.T;             \
  }
#define EMU_HALVES2(name, T, half)                                                                                 \
  EMU __typeof__(((emu_zmm *)0)->T) emu_##name(__typeof__(((emu_zmm *)0)->T) a, __typeof__(((emu_zmm *)0)->T) b) { \
    const emu_zmm x = {.T = a}, y = {.T = b};                                                                      \
    return (emu_zmm){.T##2 = {half(x.T##2 [0], y.T##2 [0]), half(x.T##2 [1], y.T##2 [1])}}.T;                      \
  }
#define EMU_HALVES3(name, T, half)                                                                                    \
  EMU __typeof__(((emu_zmm *)0)->T) emu_##name(__typeof__(((emu_zmm *)0)->T) a, __typeof__(((emu_zmm *)0)->T) b,      \
                                               __typeof__(((emu_zmm *)0)->T) c) {                                     \
    const emu_zmm x = {.T = a}, y = {.T = b}, z = {.T = c};                                                           \
    return (emu_zmm){.T##2 = {half(x.T##2 [0], y.T##2 [0], z.T##2 [0]), half(x.T##2 [1], y.T##2 [1], z.T##2 [1])}}.T; \
  }
/* By one number for all elements: an immediate, or the lower part of a vector. */
#define EMU_SHIFTS(name, type, half)                                    \
  EMU __m512i emu_##name(__m512i a, type n) {                           \
    const emu_zmm x = {.si = a};                                        \
    return (emu_zmm){.si2 = {half(x.si2[0], n), half(x.si2[1], n)}}.si; \
  }

EMU_HALVES2(add_ps, ps, _mm256_add_ps)
EMU_HALVES2(sub_ps, ps, _mm256_sub_ps)
EMU_HALVES2(mul_ps, ps, _mm256_mul_ps)
EMU_HALVES2(div_ps, ps, _mm256_div_ps)
EMU_HALVES2(max_ps, ps, _mm256_max_ps)
EMU_HALVES2(min_ps, ps, _mm256_min_ps)
EMU_HALVES2(or_ps, ps, _mm256_or_ps)
EMU_HALVES2(xor_ps, ps, _mm256_xor_ps)
EMU_HALVES2(andnot_ps, ps, _mm256_andnot_ps)
EMU_HALVES2(unpacklo_ps, ps, _mm256_unpacklo_ps)
EMU_HALVES2(unpackhi_ps, ps, _mm256_unpackhi_ps)
EMU_HALVES1(sqrt_ps, ps, _mm256_sqrt_ps)
EMU_HALVES3(fmadd_ps, ps, _mm256_fmadd_ps)
EMU_HALVES2(add_pd, pd, _mm256_add_pd)
EMU_HALVES2(sub_pd, pd, _mm256_sub_pd)
EMU_HALVES3(fmadd_pd, pd, _mm256_fmadd_pd)
EMU_HALVES1(abs_epi32, si, _mm256_abs_epi32)
EMU_HALVES2(add_epi32, si, _mm256_add_epi32)
EMU_HALVES2(sub_epi32, si, _mm256_sub_epi32)
EMU_HALVES2(mullo_epi32, si, _mm256_mullo_epi32)
EMU_HALVES2(mul_epu32, si, _mm256_mul_epu32)
EMU_HALVES2(max_epi32, si, _mm256_max_epi32)
EMU_HALVES2(and_si512, si, _mm256_and_si256)
EMU_HALVES2(or_si512, si, _mm256_or_si256)
EMU_HALVES2(packs_epi16, si, _mm256_packs_epi16)
EMU_HALVES2(packs_epi32, si, _mm256_packs_epi32)
EMU_HALVES2(maddubs_epi16, si, _mm256_maddubs_epi16)
EMU_HALVES2(shuffle_epi8, si, _mm256_shuffle_epi8)
EMU_HALVES2(srlv_epi32, si, _mm256_srlv_epi32)
EMU_SHIFTS(sll_epi32, __m128i, _mm256_sll_epi32)
EMU_SHIFTS(srl_epi32, __m128i, _mm256_srl_epi32)
EMU_SHIFTS(sra_epi32, __m128i, _mm256_sra_epi32)
EMU_SHIFTS(slli_epi32, int, _mm256_slli_epi32)
EMU_SHIFTS(srli_epi32, int, _mm256_srli_epi32)
EMU_SHIFTS(slli_epi64, int, _mm256_slli_epi64)
EMU_SHIFTS(srli_epi64, int, _mm256_srli_epi64)

/* ---- constants, casts, memory --------------------------------------------------------------------------------------
 */
EMU __m512 emu_set1_ps(float f) { return (emu_zmm){.ps2 = {_mm256_set1_ps(f), _mm256_set1_ps(f)}}.ps; }
EMU __m512d emu_set1_pd(double d) { return (emu_zmm){.pd2 = {_mm256_set1_pd(d), _mm256_set1_pd(d)}}.pd; }
EMU __m512i emu_set1_epi8(int8_t v) { return (emu_zmm){.si2 = {_mm256_set1_epi8(v), _mm256_set1_epi8(v)}}.si; }
EMU __m512i emu_set1_epi16(int16_t v) { return (emu_zmm){.si2 = {_mm256_set1_epi16(v), _mm256_set1_epi16(v)}}.si; }
EMU __m512i emu_set1_epi32(int32_t v) { return (emu_zmm){.si2 = {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}}.si; }
EMU __m512i emu_set1_epi64(int64_t v) { return (emu_zmm){.si2 = {_mm256_set1_epi64x(v), _mm256_set1_epi64x(v)}}.si; }
#define emu_setr_epi32(...) ((emu_zmm){.i = {__VA_ARGS__}}.si)
#define emu_setzero_pd() emu_set1_pd(0.0)
#define emu_setzero_si512() emu_set1_epi32(0)
#define emu_castps_si512(a) (emu_ps(a).si)
#define emu_castsi512_ps(a) (emu_si(a).ps)
#define emu_castps512_ps256(a) (emu_ps(a).ps2[0])
#define emu_castpd512_pd256(a) (emu_pd(a).pd2[0])
#define emu_extractf32x8_ps(a, k) (emu_ps(a).ps2[k])
#define emu_extractf64x4_pd(a, k) (emu_pd(a).pd2[k])

EMU __m512 emu_loadu_ps(const void *p) {
  return (emu_zmm){.ps2 = {_mm256_loadu_ps(p), _mm256_loadu_ps((const float *)p + 8)}}.ps;
}
EMU __m512d emu_loadu_pd(const void *p) {
  return (emu_zmm){.pd2 = {_mm256_loadu_pd(p), _mm256_loadu_pd((const double *)p + 4)}}.pd;
}
EMU __m512i emu_loadu_si512(const void *p) { return emu_ps(emu_loadu_ps(p)).si; }
EMU void emu_storeu_ps(void *p, __m512 a) {
  _mm256_storeu_ps(p, emu_ps(a).ps2[0]);
  _mm256_storeu_ps((float *)p + 8, emu_ps(a).ps2[1]);
}
EMU void emu_storeu_pd(void *p, __m512d a) { emu_storeu_ps(p, emu_pd(a).ps); }
EMU void emu_storeu_si512(void *p, __m512i a) { emu_storeu_ps(p, emu_si(a).ps); }
/* The processor faults where the address is not aligned. */
EMU void emu_stream_ps(void *p, __m512 a) {
  if ((uintptr_t)p % 64) __builtin_trap();
  emu_storeu_ps(p, a);
}
EMU void emu_stream_si512(void *p, __m512i a) { emu_stream_ps(p, emu_si(a).ps); }

/* Elements whose bit is not set are not touched. */
EMU __m512 emu_maskz_loadu_ps(__mmask16 k, const void *p) {
  emu_zmm to = {.i = {0}};
  for (int j = 0; j < 16; j++)
    if (k >> j & 1) memcpy(&to.f[j], (const float *)p + j, 4);
  return to.ps;
}
EMU __m512i emu_maskz_loadu_epi16(__mmask32 k, const void *p) {
  emu_zmm to = {.i = {0}};
  for (int j = 0; j < 32; j++)
    if (k >> j & 1) memcpy(&to.h[j], (const uint16_t *)p + j, 2);
  return to.si;
}
EMU void emu_mask_storeu_ps(void *p, __mmask16 k, __m512 a) {
  const emu_zmm from = {.ps = a};
  for (int j = 0; j < 16; j++)
    if (k >> j & 1) memcpy((float *)p + j, &from.f[j], 4);
}
EMU __m256i emu256_maskz_loadu_epi16(__mmask16 k, const void *p) { return emu_si(emu_maskz_loadu_epi16(k, p)).si2[0]; }
EMU void emu256_mask_storeu_epi16(void *p, __mmask16 k, __m256i a) {
  const emu_zmm from = {.si2 = {a}};
  for (int j = 0; j < 16; j++)
    if (k >> j & 1) memcpy((uint16_t *)p + j, &from.h[j], 2);
}

/* ---- masks ---------------------------------------------------------------------------------------------------------
 */
#define emu_cmp_ps_mask(a, b, how)                                                          \
  ((__mmask16)(_mm256_movemask_ps(_mm256_cmp_ps(emu_ps(a).ps2[0], emu_ps(b).ps2[0], how)) | \
               _mm256_movemask_ps(_mm256_cmp_ps(emu_ps(a).ps2[1], emu_ps(b).ps2[1], how)) << 8))
/* Bits: what `each` says of j. */
#define EMU_MASK(each)                                           \
  ({                                                             \
    unsigned mask_ = 0;                                          \
    for (int j = 0; j < 16; j++) mask_ |= (unsigned)(each) << j; \
    (__mmask16) mask_;                                           \
  })
EMU __mmask16 emu_cmpge_epi32_mask(__m512i a, __m512i b) {
  const emu_zmm x = {.si = a}, y = {.si = b};
  return EMU_MASK(x.i[j] >= y.i[j]);
}
EMU __mmask16 emu_test_epi32_mask(__m512i a, __m512i b) {
  const emu_zmm x = {.si = a}, y = {.si = b};
  return EMU_MASK((x.i[j] & y.i[j]) != 0);
}
EMU __mmask16 emu_movepi32_mask(__m512i a) {
  const emu_zmm x = {.si = a};
  return EMU_MASK(x.i[j] < 0);
}
EMU int emu_is_denormal(float f) { return f != 0.0f && fabsf(f) < 0x1p-126f; }
EMU __mmask16 emu_fpclass_ps_mask(__m512 a, int classes) {
  const emu_zmm x = {.ps = a};
  if (classes != 0x20) __builtin_trap(); /* denormal numbers: no other is asked for */
  return EMU_MASK(emu_is_denormal(x.f[j]));
}

EMU __m512i emu_mask_mov_epi32(__m512i other, __mmask16 k, __m512i a) {
  emu_zmm to = {.si = other};
  const emu_zmm x = {.si = a};
  for (int j = 0; j < 16; j++) to.i[j] = k >> j & 1 ? x.i[j] : to.i[j];
  return to.si;
}
EMU __m512i emu_mask_mov_epi16(__m512i other, __mmask32 k, __m512i a) {
  emu_zmm to = {.si = other};
  const emu_zmm x = {.si = a};
  for (int j = 0; j < 32; j++) to.h[j] = k >> j & 1 ? x.h[j] : to.h[j];
  return to.si;
}
EMU __m512 emu_mask_mov_ps(__m512 other, __mmask16 k, __m512 a) {
  return emu_si(emu_mask_mov_epi32(emu_ps(other).si, k, emu_ps(a).si)).ps;
}
#define emu_maskz_mov_epi32(k, a) emu_mask_mov_epi32(emu_setzero_si512(), k, a)
#define emu_maskz_mov_ps(k, a) emu_mask_mov_ps(emu_set1_ps(0.0f), k, a)
#define emu_mask_xor_ps(other, k, a, b) emu_mask_mov_ps(other, k, emu_xor_ps(a, b))
#define emu_mask_sub_epi32(other, k, a, b) emu_mask_mov_epi32(other, k, emu_sub_epi32(a, b))
#define emu_mask_cvttps_epi32(other, k, a) emu_mask_mov_epi32(other, k, emu_cvttps_epi32(a))

/* ---- elements change places ----------------------------------------------------------------------------------------
 */
EMU __m512 emu_permute_ps(__m512 a, int order) {
  const emu_zmm x = {.ps = a};
  emu_zmm to;
  for (int j = 0; j < 16; j++) to.f[j] = x.f[j / 4 * 4 + (order >> j % 4 * 2 & 3)];
  return to.ps;
}
EMU __m512 emu_shuffle_ps(__m512 a, __m512 b, int order) {
  const emu_zmm x[2] = {{.ps = a}, {.ps = b}};
  emu_zmm to;
  for (int j = 0; j < 16; j++) to.f[j] = x[j % 4 / 2].f[j / 4 * 4 + (order >> j % 4 * 2 & 3)];
  return to.ps;
}
EMU __m512 emu_shuffle_f32x4(__m512 a, __m512 b, int order) {
  const emu_zmm x[2] = {{.ps = a}, {.ps = b}};
  emu_zmm to;
  for (int j = 0; j < 4; j++) to.si4[j] = x[j / 2].si4[order >> j * 2 & 3];
  return to.ps;
}
EMU __m512i emu_permutexvar_epi32(__m512i from, __m512i a) {
  const emu_zmm x = {.si = a}, at = {.si = from};
  emu_zmm to;
  for (int j = 0; j < 16; j++) to.i[j] = x.i[at.i[j] & 15];
  return to.si;
}
EMU __m512 emu_permutexvar_ps(__m512i from, __m512 a) { return emu_si(emu_permutexvar_epi32(from, emu_ps(a).si)).ps; }

/* ---- bits and integers ---------------------------------------------------------------------------------------------
 */
EMU __m512i emu_ternarylogic_epi64(__m512i a, __m512i b, __m512i c, int table) {
  const emu_zmm x = {.si = a}, y = {.si = b}, z = {.si = c};
  emu_zmm to;
  for (int j = 0; j < 8; j++) {
    uint64_t bits = 0;
    for (int row = 0; row < 8; row++)
      if (table >> row & 1)
        bits |= (row & 4 ? x.q[j] : ~x.q[j]) & (row & 2 ? y.q[j] : ~y.q[j]) & (row & 1 ? z.q[j] : ~z.q[j]);
    to.q[j] = bits;
  }
  return to.si;
}
#define emu_ternarylogic_epi32 emu_ternarylogic_epi64
#define emu_maskz_ternarylogic_epi32(k, a, b, c, table) emu_maskz_mov_epi32(k, emu_ternarylogic_epi64(a, b, c, table))
EMU int emu_reduce_max_epi32(__m512i a) {
  const emu_zmm x = {.si = a};
  int most = x.i[0];
  for (int j = 1; j < 16; j++) most = x.i[j] > most ? x.i[j] : most;
  return most;
}
EMU __m512 emu_abs_ps(__m512 a) { return emu_andnot_ps(emu_set1_ps(-0.0f), a); }

/* ---- conversions ---------------------------------------------------------------------------------------------------
 */
#define EMU_EACH(count, to_, value)                           \
  ({                                                          \
    emu_zmm into_ = {.i = {0}};                               \
    for (int j = 0; j < (count); j++) into_.to_[j] = (value); \
    into_;                                                    \
  })
EMU __m128i emu_cvtepi32_epi8(__m512i a) {
  const emu_zmm x = {.si = a};
  return EMU_EACH(16, b, (int8_t)x.i[j]).si4[0];
}
EMU __m128i emu_cvtsepi32_epi8(__m512i a) {
  const emu_zmm x = {.si = a};
  return EMU_EACH(16, b, (int8_t)(x.i[j] > 127 ? 127 : x.i[j] < -128 ? -128 : x.i[j])).si4[0];
}
EMU __m128i emu_cvtepi64_epi8(__m512i a) {
  const emu_zmm x = {.si = a};
  return EMU_EACH(8, b, (int8_t)x.l[j]).si4[0];
}
EMU __m256i emu_cvtepi32_epi16(__m512i a) {
  const emu_zmm x = {.si = a};
  return EMU_EACH(16, s, (int16_t)x.i[j]).si2[0];
}
EMU __m256i emu_cvtepi16_epi8(__m512i a) {
  const emu_zmm x = {.si = a};
  return EMU_EACH(32, b, (int8_t)x.s[j]).si2[0];
}
EMU __m512i emu_cvtepi8_epi32(__m128i a) {
  const emu_zmm x = {.si4 = {a}};
  return EMU_EACH(16, i, x.b[j]).si;
}
EMU __m512i emu_cvtepu16_epi32(__m256i a) {
  const emu_zmm x = {.si2 = {a}};
  return EMU_EACH(16, i, x.h[j]).si;
}
EMU __m512 emu_cvtepi32_ps(__m512i a) {
  const emu_zmm x = {.si = a};
  return (emu_zmm){.ps2 = {_mm256_cvtepi32_ps(x.si2[0]), _mm256_cvtepi32_ps(x.si2[1])}}.ps;
}
EMU __m512i emu_cvtps_epi32(__m512 a) {
  const emu_zmm x = {.ps = a};
  return (emu_zmm){.si2 = {_mm256_cvtps_epi32(x.ps2[0]), _mm256_cvtps_epi32(x.ps2[1])}}.si;
}
EMU __m512i emu_cvttps_epi32(__m512 a) {
  const emu_zmm x = {.ps = a};
  return (emu_zmm){.si2 = {_mm256_cvttps_epi32(x.ps2[0]), _mm256_cvttps_epi32(x.ps2[1])}}.si;
}
EMU __m512d emu_cvtps_pd(__m256 a) {
  return (emu_zmm){.pd2 = {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))}}
      .pd;
}
EMU __m512 emu_cvtph_ps(__m256i a) {
  return (emu_zmm){.ps2 = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}}
      .ps;
}
#define emu_cvtps_ph(a, how)                                                                         \
  _mm256_set_m128i(_mm256_cvtps_ph(emu_ps(a).ps2[1], (how) & 7), /* VEX has no bit for exceptions */ \
                   _mm256_cvtps_ph(emu_ps(a).ps2[0], (how) & 7))
/* a * 2^floor(b) */
EMU __m512 emu_scalef_ps(__m512 a, __m512 b) {
  const emu_zmm x = {.ps = a}, y = {.ps = b};
  return EMU_EACH(16, f,
                  isnan(y.f[j])       ? y.f[j]
                  : y.f[j] >= 1000.0f ? x.f[j] * (x.f[j] == 0.0f ? 1.0f : HUGE_VALF)
                                      : ldexpf(x.f[j], y.f[j] <= -1000.0f ? -1000 : (int)floorf(y.f[j])))
      .ps;
}

/* ---- AVX512-BF16 and AMX-BF16 --------------------------------------------------------------------------------------
 */
EMU float emu_flushed(float f) { return emu_is_denormal(f) ? copysignf(0.0f, f) : f; }
EMU float emu_of_bf16(uint16_t h) {
  const uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return emu_flushed(f);
}
/* Nearest, halves to even, whatever the rounding mode; denormal numbers are zeros. */
EMU uint16_t emu_to_bf16(float f) {
  uint32_t u;
  f = emu_flushed(f);
  memcpy(&u, &f, 4);
  if (isnan(f)) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
/* A sum of a product and c, denormal ones to zero. */
EMU float emu_madd(float a, float b, float c) { return emu_flushed(fmaf(a, b, emu_flushed(c))); }

typedef short emu_bf16x16 __attribute__((vector_size(32)));
typedef short emu_bf16x32 __attribute__((vector_size(64)));
EMU emu_bf16x16 emu_cvtneps_pbh(__m512 a) {
  const emu_zmm x = {.ps = a};
  return (emu_bf16x16)EMU_EACH(16, h, emu_to_bf16(x.f[j])).si2[0];
}
EMU emu_bf16x32 emu_cvtne2ps_pbh(__m512 high, __m512 low) {
  const emu_zmm x[2] = {{.ps = low}, {.ps = high}};
  return (emu_bf16x32)EMU_EACH(32, h, emu_to_bf16(x[j / 16].f[j % 16])).si;
}
/* The odd element of a pair first, each product fused with the sum (measured: docs/lab/kernels.md). */
EMU __m512 emu_dpbf16_ps(__m512 sum, __m512i a, __m512i b) {
  const emu_zmm x = {.si = a}, y = {.si = b};
  emu_zmm to = {.ps = sum};
  for (int j = 0; j < 16; j++) {
    to.f[j] = emu_madd(emu_of_bf16(x.h[2 * j + 1]), emu_of_bf16(y.h[2 * j + 1]), to.f[j]);
    to.f[j] = emu_madd(emu_of_bf16(x.h[2 * j]), emu_of_bf16(y.h[2 * j]), to.f[j]);
  }
  return to.ps;
}

#if defined(DC_TILES)
typedef union emu_tile {
  uint16_t h[16][32];
  float f[16][16];
} emu_tile;
static _Thread_local emu_tile emu_tiles[8];
static _Thread_local int emu_has_tiles; /* between v_tiles_begin and v_tiles_end: outside the processor faults */
EMU emu_tile *emu_tile_of(int t) {
  if (!emu_has_tiles) __builtin_trap();
  return &emu_tiles[t];
}
EMU void emu_tile_load(int t, const void *from, int64_t bytes) {
  for (int row = 0; row < 16; row++) memcpy(emu_tile_of(t)->h[row], (const char *)from + row * bytes, 64);
}
EMU void emu_tile_store(int t, void *to, int64_t bytes) {
  for (int row = 0; row < 16; row++) memcpy((char *)to + row * bytes, emu_tile_of(t)->h[row], 64);
}
/* TDPBF16PS: the even elements of all pairs, and the odd ones, are added up apart, and then to the tile's. */
static __attribute__((noinline, unused)) void emu_tile_dot(int c, int a, int b) {
  const emu_tile *x = emu_tile_of(a), *y = emu_tile_of(b);
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float even = 0.0f, odd = 0.0f;
      for (int k = 0; k < 16; k++) {
        even = emu_madd(emu_of_bf16(x->h[m][2 * k]), emu_of_bf16(y->h[k][2 * n]), even);
        odd = emu_madd(emu_of_bf16(x->h[m][2 * k + 1]), emu_of_bf16(y->h[k][2 * n + 1]), odd);
      }
      float *sum = &emu_tile_of(c)->f[m][n];
      *sum = emu_flushed(emu_flushed(*sum) + emu_flushed(even + odd));
    }
}
EMU void v_tiles_begin(void) { emu_has_tiles = 1; }
EMU void v_tiles_end(void) { emu_has_tiles = 0; }
#define V_TILE_ZERO(t) memset(emu_tile_of(t), 0, sizeof(emu_tile))
#define V_TILE_LOAD(t, from, bytes) emu_tile_load(t, from, bytes)
#define V_TILE_STORE(t, to, bytes) emu_tile_store(t, to, bytes)
#define V_TILE_DOT(c, a, b) emu_tile_dot(c, a, b)
#endif

#define _mm512_abs_epi32 emu_abs_epi32
#define _mm512_abs_ps emu_abs_ps
#define _mm512_add_epi32 emu_add_epi32
#define _mm512_add_pd emu_add_pd
#define _mm512_add_ps emu_add_ps
#define _mm512_and_si512 emu_and_si512
#define _mm512_andnot_ps emu_andnot_ps
#define _mm512_castpd512_pd256 emu_castpd512_pd256
#define _mm512_castps512_ps256 emu_castps512_ps256
#define _mm512_castps_si512 emu_castps_si512
#define _mm512_castsi512_ps emu_castsi512_ps
#define _mm512_cmp_ps_mask emu_cmp_ps_mask
#define _mm512_cmpge_epi32_mask emu_cmpge_epi32_mask
#define _mm512_cvtepi16_epi8 emu_cvtepi16_epi8
#define _mm512_cvtepi32_epi16 emu_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emu_cvtepi32_epi8
#define _mm512_cvtepi32_ps emu_cvtepi32_ps
#define _mm512_cvtepi64_epi8 emu_cvtepi64_epi8
#define _mm512_cvtepi8_epi32 emu_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emu_cvtepu16_epi32
#define _mm512_cvtne2ps_pbh emu_cvtne2ps_pbh
#define _mm512_cvtneps_pbh emu_cvtneps_pbh
#define _mm512_cvtph_ps emu_cvtph_ps
#define _mm512_cvtps_epi32 emu_cvtps_epi32
#define _mm512_cvtps_pd emu_cvtps_pd
#define _mm512_cvtps_ph emu_cvtps_ph
#define _mm512_cvtsepi32_epi8 emu_cvtsepi32_epi8
#define _mm512_cvttps_epi32 emu_cvttps_epi32
#define _mm512_div_ps emu_div_ps
#define _mm512_dpbf16_ps(sum, a, b) emu_dpbf16_ps(sum, (__m512i)(a), (__m512i)(b))
#define _mm512_extractf32x8_ps emu_extractf32x8_ps
#define _mm512_extractf64x4_pd emu_extractf64x4_pd
#define _mm512_fmadd_pd emu_fmadd_pd
#define _mm512_fmadd_ps emu_fmadd_ps
#define _mm512_fpclass_ps_mask emu_fpclass_ps_mask
#define _mm512_loadu_pd emu_loadu_pd
#define _mm512_loadu_ps emu_loadu_ps
#define _mm512_loadu_si512 emu_loadu_si512
#define _mm512_maddubs_epi16 emu_maddubs_epi16
#define _mm512_mask_cvttps_epi32 emu_mask_cvttps_epi32
#define _mm512_mask_mov_epi16 emu_mask_mov_epi16
#define _mm512_mask_mov_epi32 emu_mask_mov_epi32
#define _mm512_mask_mov_ps emu_mask_mov_ps
#define _mm512_mask_storeu_ps emu_mask_storeu_ps
#define _mm512_mask_sub_epi32 emu_mask_sub_epi32
#define _mm512_mask_xor_ps emu_mask_xor_ps
#define _mm512_maskz_loadu_epi16 emu_maskz_loadu_epi16
#define _mm512_maskz_loadu_ps emu_maskz_loadu_ps
#define _mm512_maskz_mov_epi32 emu_maskz_mov_epi32
#define _mm512_maskz_mov_ps emu_maskz_mov_ps
#define _mm512_maskz_ternarylogic_epi32 emu_maskz_ternarylogic_epi32
#define _mm512_max_epi32 emu_max_epi32
#define _mm512_max_ps emu_max_ps
#define _mm512_min_ps emu_min_ps
#define _mm512_movepi32_mask emu_movepi32_mask
#define _mm512_mul_epu32 emu_mul_epu32
#define _mm512_mul_ps emu_mul_ps
#define _mm512_mullo_epi32 emu_mullo_epi32
#define _mm512_or_ps emu_or_ps
#define _mm512_or_si512 emu_or_si512
#define _mm512_packs_epi16 emu_packs_epi16
#define _mm512_packs_epi32 emu_packs_epi32
#define _mm512_permute_ps emu_permute_ps
#define _mm512_permutexvar_epi32 emu_permutexvar_epi32
#define _mm512_permutexvar_ps emu_permutexvar_ps
#define _mm512_reduce_max_epi32 emu_reduce_max_epi32
#define _mm512_scalef_ps emu_scalef_ps
#define _mm512_set1_epi16 emu_set1_epi16
#define _mm512_set1_epi32 emu_set1_epi32
#define _mm512_set1_epi64 emu_set1_epi64
#define _mm512_set1_epi8 emu_set1_epi8
#define _mm512_set1_pd emu_set1_pd
#define _mm512_set1_ps emu_set1_ps
#undef _mm512_setr_epi32 /* a macro there */
#define _mm512_setr_epi32 emu_setr_epi32
#define _mm512_setzero_pd emu_setzero_pd
#define _mm512_setzero_si512 emu_setzero_si512
#define _mm512_shuffle_epi8 emu_shuffle_epi8
#define _mm512_shuffle_f32x4 emu_shuffle_f32x4
#define _mm512_shuffle_ps emu_shuffle_ps
#define _mm512_sll_epi32 emu_sll_epi32
#define _mm512_slli_epi32 emu_slli_epi32
#define _mm512_slli_epi64 emu_slli_epi64
#define _mm512_sqrt_ps emu_sqrt_ps
#define _mm512_sra_epi32 emu_sra_epi32
#define _mm512_srl_epi32 emu_srl_epi32
#define _mm512_srli_epi32 emu_srli_epi32
#define _mm512_srli_epi64 emu_srli_epi64
#define _mm512_srlv_epi32 emu_srlv_epi32
#define _mm512_storeu_pd emu_storeu_pd
#define _mm512_storeu_ps emu_storeu_ps
#define _mm512_storeu_si512 emu_storeu_si512
#define _mm512_stream_ps emu_stream_ps
#define _mm512_stream_si512 emu_stream_si512
#define _mm512_sub_epi32 emu_sub_epi32
#define _mm512_sub_pd emu_sub_pd
#define _mm512_sub_ps emu_sub_ps
#define _mm512_ternarylogic_epi32 emu_ternarylogic_epi32
#define _mm512_ternarylogic_epi64 emu_ternarylogic_epi64
#define _mm512_test_epi32_mask emu_test_epi32_mask
#define _mm512_unpackhi_ps emu_unpackhi_ps
#define _mm512_unpacklo_ps emu_unpacklo_ps
#define _mm512_xor_ps emu_xor_ps
#define _mm256_maskz_loadu_epi16 emu256_maskz_loadu_epi16
#define _mm256_mask_storeu_epi16 emu256_mask_storeu_epi16

#endif
