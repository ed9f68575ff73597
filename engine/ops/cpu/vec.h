// Basis of the kernels: W float32 lanes, with the same source for every instruction set.
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

// The weights of linear layers are stored in panels if they are bf16 (linear_bf16.h).
#if defined(__AVX512BF16__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define LLM_BF16_PANELS
#endif

namespace LLM_ISA {

typedef int32_t int_vec __attribute__((vector_size(4 * W)));
typedef uint32_t uint_vec __attribute__((vector_size(4 * W)));  // may wrap around

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

inline float as_float(int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
inline float widen(uint16_t bf16) { return as_float(static_cast<int32_t>(static_cast<uint32_t>(bf16) << 16)); }

inline vec as_floats(int_vec v) {
  typedef float float_vec __attribute__((vector_size(4 * W)));
  return (vec)__builtin_convertvector(v, float_vec);
}
inline int32_t largest(int_vec v) {
  int_vec lane;
  for (int i = 0; i < W; i++) lane[i] = i;
#pragma GCC unroll 4
  for (int step = W / 2; step > 0; step /= 2) {  // halves first, then quarters
    const int_vec other = __builtin_shuffle(v, lane ^ step);
    v = v > other ? v : other;
  }
  return v[0];
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

// Prefetch into the L2 cache. It is always inline, because g++ removes calls of functions without visible effect.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
// Prefetch of data that is read once. Bypassing the larger caches, where the rest stays, is faster on a Zen 5 (AVX-512
// BF16 and no AMX); an Intel Xeon reads at half its rate then.
[[gnu::always_inline]] inline void prefetch_once(const void* p) {
#if defined(__AVX512BF16__) && !defined(LLM_TILES)
  __builtin_prefetch(p, 0, 0);
#else
  __builtin_prefetch(p, 0, 3);
#endif
}

// Round to bf16, to nearest, ties to even; NaN stays NaN. The lower halves are left as they are.
inline vec round_upper_halves(vec v) {
  const int_vec bits = (int_vec)v;
  const int_vec odd = (bits >> 16) & 1;
  return (vec)(v == v ? bits + 0x7fff + odd : bits | 0x400000);
}
inline vec round_to_bf16(vec v) { return (vec)((int_vec)round_upper_halves(v) & static_cast<int32_t>(0xffff0000)); }
inline void store_bf16(uint16_t* p, vec v, int n) { store_upper_halves(p, round_upper_halves(v), n); }

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which is the lower bits
inline int_vec rounded(vec v) { return (int_vec)(v + kMagic) - 0x4b400000; }

// The largest magnitude; NaN where x has an element that is not finite. Floats are in the order of their bits.
inline float magnitude(const float* x, int64_t count) {
  int_vec most = {};
  for_lanes(count, [&](int64_t k, int n) {
    const int_vec bits = (int_vec)load_n(x + k, n) & 0x7fffffff;
    most = bits > most ? bits : most;
  });
  const int32_t found = largest(most), infinite = 0x7f800000;
  return found < infinite ? as_float(found) : NAN;
}

// exp(x), relative error < 2e-7; 0 below -87.3, infinite above 88.3. Every lane is computed alike.
inline vec exp(vec x) {
  vec clamped = x > 88.3f ? set1(88.3f) : x;
  clamped = clamped < -87.3f ? set1(-87.3f) : clamped;
  const vec shifted = fma(clamped, set1(1.44269504f), set1(kMagic));
  const vec n = shifted - kMagic;
  vec r = fma(n, set1(-0.693145752f), clamped);  // ln 2 in two parts
  r = fma(n, set1(-1.42860677e-6f), r);
  vec y = set1(1.98756962e-4f);
  y = fma(y, r, set1(1.39819994e-3f));
  y = fma(y, r, set1(8.33345205e-3f));
  y = fma(y, r, set1(4.16657962e-2f));
  y = fma(y, r, set1(1.66666657e-1f));
  y = fma(y, r, set1(5.00000000e-1f));
  y = fma(y, r * r, r) + 1.0f;
  const vec scaled = (vec)((uint_vec)y + ((uint_vec)shifted << 23));  // x may be anything in unused lanes
  const vec not_large = x > 88.3f ? set1(INFINITY) : scaled;
  return x < -87.3f ? set1(0.0f) : not_large;
}

// exp(x) for x <= 0, relative error < 2e-7 + 1e-7 |x|; 1e-30 below -69.3. Half the work of exp.
inline vec exp_of_negative(vec x) {
  const vec clamped = max(set1(-100.0f), x * 1.44269504f);
  const vec shifted = clamped + kMagic, f = clamped - (shifted - kMagic);
  vec y = set1(1.32647272e-3f);  // 2^f, |f| <= 0.5
  y = fma(y, f, set1(9.67151281e-3f));
  y = fma(y, f, set1(5.55073374e-2f));
  y = fma(y, f, set1(2.40222421e-1f));
  y = fma(y, f, set1(6.93146978e-1f));
  y = fma(y, f, set1(1.0f));
  return (vec)((uint_vec)y + ((uint_vec)shifted << 23));
}

typedef int16_t halves __attribute__((vector_size(4 * W)));

// 2 n signed bytes as n pairs of halves.
inline vec load_pairs(const int8_t* p, int n) {
  typedef int8_t bytes __attribute__((vector_size(2 * W)));
  bytes some = {};
  if (n == W)
    __builtin_memcpy(&some, p, sizeof some);
  else
    __builtin_memcpy(&some, p, 2 * static_cast<size_t>(n));
  return (vec)__builtin_convertvector(some, halves);
}
inline vec load_pairs(const uint16_t* p, int n) { return load_n(reinterpret_cast<const float*>(p), n); }

// The halves of a and b alternating, those of the first lanes in a and the others in b.
inline void interleave(vec& a, vec& b) {
  halves lower, upper;
  for (int i = 0; i < 2 * W; i++) lower[i] = static_cast<int16_t>(i / 2 + i % 2 * 2 * W);
  upper = lower + W;
  const auto first = (halves)a, second = (halves)b;
  a = (vec)__builtin_shuffle(first, second, lower);
  b = (vec)__builtin_shuffle(first, second, upper);
}

}  // namespace LLM_ISA
