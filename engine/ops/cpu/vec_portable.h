// The vector type of any architecture the compiler knows: 4 float32 lanes, product and sum rounded apart.
#pragma once
#include <cstdint>
#include <cstring>

namespace LLM_ISA {

constexpr int W = 4;
typedef float vec __attribute__((vector_size(16)));

inline vec set1(float x) { return vec{x, x, x, x}; }
inline vec load(const float* p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }
inline vec fma(vec a, vec b, vec c) { return a * b + c; }
inline vec max(vec a, vec b) { return a > b ? a : b; }  // b where a is a NaN

// The first n lanes, 0 <= n <= W; the others are zero and their memory is not touched.
inline vec load_first(const float* p, int n) {
  vec v = {};
  memcpy(&v, p, sizeof(float) * static_cast<size_t>(n));
  return v;
}
inline void store_first(float* p, vec v, int n) { memcpy(p, &v, sizeof(float) * static_cast<size_t>(n)); }

inline vec load(const uint16_t* p) {
  typedef uint16_t halves __attribute__((vector_size(8)));
  typedef uint32_t words __attribute__((vector_size(16)));
  halves bits;
  memcpy(&bits, p, sizeof bits);
  return (vec)(__builtin_convertvector(bits, words) << 16);
}
inline vec load_first(const uint16_t* p, int n) {
  uint16_t bits[W] = {};
  memcpy(bits, p, sizeof(uint16_t) * static_cast<size_t>(n));
  return load(bits);
}

inline vec load(const int8_t* p) {
  typedef int8_t bytes __attribute__((vector_size(4)));
  bytes b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, vec);
}
inline vec load_first(const int8_t* p, int n) {
  int8_t bytes[W] = {};
  memcpy(bytes, p, static_cast<size_t>(n));
  return load(bytes);
}

// Adds the lanes: halves first, then quarters.
inline float sum(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline float largest(vec v) {
  float m = v[0];
  for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
  return m;
}

inline void store_upper_halves(uint16_t* p, vec v, int n) {
  uint32_t bits[W];
  memcpy(bits, &v, sizeof bits);
  for (int i = 0; i < n; i++) p[i] = static_cast<uint16_t>(bits[i] >> 16);
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
  for (int i = 0; i < W; i++)
    for (int j = 0; j < i; j++) {
      const float x = square[i][j];
      square[i][j] = square[j][i];
      square[j][i] = x;
    }
}

}  // namespace LLM_ISA
