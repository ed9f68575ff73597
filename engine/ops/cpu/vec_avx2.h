// The vector type of AVX2 with FMA: 8 float32 lanes.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace LLM_ISA {

constexpr int W = 8;
using vec = __m256;

inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline vec set1(float x) { return _mm256_set1_ps(x); }
inline vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vec v) { _mm256_storeu_ps(p, v); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec max(vec a, vec b) { return _mm256_max_ps(a, b); }  // b where a is a NaN

// The first n lanes, 0 <= n <= W; the others are zero and their memory is not touched.
inline vec load_first(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store_first(float* p, vec v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }

inline vec load(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline vec load_first(const uint16_t* p, int n) {
  uint16_t bits[W] = {};
  memcpy(bits, p, sizeof(uint16_t) * static_cast<size_t>(n));
  return load(bits);
}

// 16 numbers of bf16 as they are in memory. In load_bf16_first those from n on are zero, 0 <= n < 16.
inline __m256i load_bf16(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i load_bf16_first(const uint16_t* p, int n) {
  uint16_t bits[2 * W] = {};
  memcpy(bits, p, sizeof(uint16_t) * static_cast<size_t>(n));
  return load_bf16(bits);
}

inline vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline vec load_first(const int8_t* p, int n) {
  int8_t bytes[W] = {};
  memcpy(bytes, p, static_cast<size_t>(n));
  return load(bytes);
}

// Adds the lanes: halves first, then quarters, eighths.
inline float sum(vec v) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

inline float largest(vec v) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

inline void store_upper_halves(uint16_t* p, vec v, int n) {
  const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(v), 16);
  uint16_t halves[W];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves),
                   _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
  memcpy(p, halves, sizeof(uint16_t) * static_cast<size_t>(n));
}

// Writes first + lane for each lane >= threshold; up to W numbers are overwritten. Returns how many.
inline int store_ids_at_least(vec v, float threshold, int32_t first, int32_t* ids) {
  int count = 0;
  for (int i = 0; i < W; i++) {
    ids[count] = first + i;
    count += v[i] >= threshold;
  }
  return count;
}

// Turns the W rows of a square into its W columns.
inline void transpose(vec* square) {
  __m256 a[W], b[W];
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 2) {
    a[i] = _mm256_unpacklo_ps(square[i], square[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(square[i], square[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < W; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    square[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    square[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}

}  // namespace LLM_ISA
