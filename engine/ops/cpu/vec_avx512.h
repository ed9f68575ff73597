// The vector type of AVX-512 (F, BW, VL, DQ): 16 float32 lanes.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace LLM_ISA {

constexpr int W = 16;
using vec = __m512;

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline vec set1(float x) { return _mm512_set1_ps(x); }
inline vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vec v) { _mm512_storeu_ps(p, v); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec max(vec a, vec b) { return _mm512_max_ps(a, b); }  // b where a is a NaN

// The first n lanes, 0 <= n <= W; the others are zero and their memory is not touched.
inline vec load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_first(float* p, vec v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

inline vec widen(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline vec load(const uint16_t* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vec load_first(const uint16_t* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline vec widen(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
inline vec load(const int8_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vec load_first(const int8_t* p, int n) { return widen(_mm_maskz_loadu_epi8(first_lanes(n), p)); }

// Adds the lanes: halves first, then quarters, eighths, sixteenths.
inline float sum(vec v) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

// sum(v[i]) for each of 16: the same additions, done for many at once.
template <class Add>
inline __m512 sum_each(const __m512* v, Add add) {
  __m512 halves[8], quarters[4], eighths[2];
  auto at = [=](int i) { return v[i % 4 * 4 + i / 4]; };  // comes out as the transpose of how it went in
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    halves[i] = add(_mm512_shuffle_f32x4(at(2 * i), at(2 * i + 1), 0x44),
                    _mm512_shuffle_f32x4(at(2 * i), at(2 * i + 1), 0xee));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    quarters[i] = add(_mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0x88),
                      _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0xdd));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    eighths[i] = add(_mm512_shuffle_ps(quarters[2 * i], quarters[2 * i + 1], 0x44),
                     _mm512_shuffle_ps(quarters[2 * i], quarters[2 * i + 1], 0xee));
  return add(_mm512_shuffle_ps(eighths[0], eighths[1], 0x88), _mm512_shuffle_ps(eighths[0], eighths[1], 0xdd));
}

inline float largest(vec v) { return _mm512_reduce_max_ps(v); }

inline void store_upper_halves(uint16_t* p, vec v, int n) {
  const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(v), 16);
  _mm512_mask_cvtepi32_storeu_epi16(p, first_lanes(n), upper);
}

// Writes first + lane for each lane >= threshold; up to W numbers are overwritten. Returns how many.
inline int store_ids_at_least(vec v, float threshold, int32_t first, int32_t* ids) {
  const __mmask16 found = _mm512_cmp_ps_mask(v, _mm512_set1_ps(threshold), _CMP_GE_OQ);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(found, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  return __builtin_popcount(found);
}

// Turns the W rows of a square into its W columns.
inline void transpose(vec* square) {
  __m512 a[W], b[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm512_unpacklo_ps(square[i], square[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(square[i], square[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {
    const auto lo0 = _mm512_castps_pd(a[i]), lo1 = _mm512_castps_pd(a[i + 2]);
    const auto hi0 = _mm512_castps_pd(a[i + 1]), hi1 = _mm512_castps_pd(a[i + 3]);
    b[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo0, lo1));
    b[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo0, lo1));
    b[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(hi0, hi1));
    b[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(hi0, hi1));
  }
  // b[4 g + c], 128-bit part p = column 4 p + c of rows 4 g .. 4 g + 3
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 even01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const __m512 odd01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 even23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 odd23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    square[c] = _mm512_shuffle_f32x4(even01, even23, 0x88);
    square[4 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
    square[8 + c] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
    square[12 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
}

#ifdef __AVX512BF16__
using bf16_vec = __m512bh;  // 32 lanes
inline bf16_vec load_bf16(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline bf16_vec load_bf16_first(const uint16_t* p, int n) {
  return (__m512bh)_mm512_maskz_loadu_epi16((1u << n) - 1, p);  // 0 <= n < 32
}
inline bf16_vec load_bf16(const int8_t* p) { return _mm512_cvtne2ps_pbh(load(p + 16), load(p)); }
inline bf16_vec load_bf16_first(const int8_t* p, int n) {
  const vec upper = n > 16 ? load_first(p + 16, n - 16) : _mm512_setzero_ps();
  return _mm512_cvtne2ps_pbh(upper, n < 16 ? load_first(p, n) : load(p));
}
inline vec dot_bf16(bf16_vec a, bf16_vec b, vec c) { return _mm512_dpbf16_ps(c, a, b); }
#endif

}  // namespace LLM_ISA
