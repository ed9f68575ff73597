// What the kernels build on: W float32 lanes, with the same source for every instruction set.
// Nothing here or in a kernel may come from a template of the standard library: the linker keeps one
// copy of such code, and it could be the one compiled for instructions that this machine lacks.
#pragma once
#include <cmath>

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_portable.h"
#endif

namespace LLM_ISA {

typedef int32_t int_vec __attribute__((vector_size(4 * W)));
typedef uint32_t uint_vec __attribute__((vector_size(4 * W)));  // may wrap around

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

inline vec as_floats(int_vec v) {
  typedef float float_vec __attribute__((vector_size(4 * W)));
  return (vec)__builtin_convertvector(v, float_vec);
}
inline int32_t sum(int_vec v) {
  int32_t total = 0;
  for (int i = 0; i < W; i++) total += v[i];
  return total;
}

template <int N>
struct Count {  // a number the compiler knows
  static constexpr int value = N;
};

// Calls body(first, n) for each vector of n elements; n == W in all but the last.
template <class Body>
inline void for_lanes(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + W <= size; i += W) body(i, W);
  if (i < size) body(i, static_cast<int>(size - i));
}

template <class T>
inline vec load_n(const T* p, int n) {
  return n == W ? load(p) : load_first(p, n);
}
inline void store_n(float* p, vec v, int n) { n == W ? store(p, v) : store_first(p, v, n); }

inline vec keep_first(vec v, int n, vec other) {
  int_vec lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return lane < n ? v : other;
}

// Into the L2 cache. Always inline: g++ leaves out calls of what has no effect that it knows.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// To bf16, to nearest, ties to even; a NaN stays a NaN. The lower halves are left as they come.
inline vec round_upper_halves(vec v) {
  const int_vec bits = (int_vec)v;
  const int_vec odd = (bits >> 16) & 1;
  return (vec)(v == v ? bits + 0x7fff + odd : bits | 0x400000);
}
inline vec round_to_bf16(vec v) { return (vec)((int_vec)round_upper_halves(v) & static_cast<int32_t>(0xffff0000)); }
inline void store_bf16(uint16_t* p, vec v, int n) { store_upper_halves(p, round_upper_halves(v), n); }

inline float widen(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// exp(x), relative error < 2e-7; 0 below -87.3, infinite above 88.3. Every lane is computed alike.
template <bool kIsPositive = true>  // false: it is known that x <= 0
inline vec exp(vec x) {
  vec clamped = x;
  if (kIsPositive) clamped = x > 88.3f ? set1(88.3f) : x;
  clamped = clamped < -87.3f ? set1(-87.3f) : clamped;
  const vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vec shifted = fma(clamped, set1(1.44269504f), magic);
  const vec n = shifted - magic;
  vec r = fma(n, set1(-0.693145752f), clamped);  // ln 2 in two parts
  r = fma(n, set1(-1.42860677e-6f), r);
  vec y = set1(1.98756962e-4f);
  y = fma(y, r, set1(1.39819994e-3f));
  y = fma(y, r, set1(8.33345205e-3f));
  y = fma(y, r, set1(4.16657962e-2f));
  y = fma(y, r, set1(1.66666657e-1f));
  y = fma(y, r, set1(5.00000000e-1f));
  y = fma(y, r * r, r) + 1.0f;
  const vec scaled = (vec)((uint_vec)y + ((uint_vec)shifted << 23));  // in lanes that nobody needs x may be anything
  vec not_large = scaled;
  if (kIsPositive) not_large = x > 88.3f ? set1(INFINITY) : scaled;
  return x < -87.3f ? set1(0.0f) : not_large;
}

}  // namespace LLM_ISA
