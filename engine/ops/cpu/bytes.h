// q[t, k] = round(x[t, k] / scale[t]), scale[t] = max_k |x[t, k]| / 127, and sums += q * weight for int8 weights
#pragma once
#include "product.h"

namespace LLM_ISA {

typedef int8_t byte_vec __attribute__((vector_size(W)));

// Where products of bytes want one factor unsigned it is the weight, with 128 added: a sum is then too large by
// kOffset times the sum of x.
#if defined(__AVX512VNNI__)
using byte_x = int8_t;
constexpr int32_t kOffset = 128;
template <>
struct Dot<int8_t> {
  static constexpr int step = 64;
  static constexpr bool is_whole = true;
  using lanes = __m512i;
  using sum_lanes = int_vec;
  static int_vec add(lanes x, lanes weight, int_vec sums) {
    return (int_vec)_mm512_dpbusd_epi32((__m512i)sums, _mm512_xor_si512(weight, _mm512_set1_epi8(-128)), x);
  }
  static lanes read(const int8_t* p) { return _mm512_loadu_si512(p); }
  static lanes read_first(const int8_t* p, int n) { return _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, p); }
};
#else
using byte_x = int16_t;
constexpr int32_t kOffset = 0;
template <>
struct Dot<int16_t> {
  static constexpr int step = 2 * W;
  static constexpr bool is_whole = true;
  typedef int16_t lanes __attribute__((vector_size(4 * W)));
  typedef int8_t bytes __attribute__((vector_size(2 * W)));
  using sum_lanes = int_vec;
  static int_vec add(lanes x, lanes weight, int_vec sums) {
#if defined(__AVX512F__)
    return sums + (int_vec)_mm512_madd_epi16((__m512i)x, (__m512i)weight);
#elif defined(__AVX2__)
    return sums + (int_vec)_mm256_madd_epi16((__m256i)x, (__m256i)weight);
#else
    for (int i = 0; i < W; i++) sums[i] += x[2 * i] * weight[2 * i] + x[2 * i + 1] * weight[2 * i + 1];
    return sums;
#endif
  }
  static lanes read(const int16_t* p) {
    lanes v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static lanes read(const int8_t* p) {
    bytes v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, lanes);
  }
  template <class T>
  static lanes read_first(const T* p, int n) {
    T first[step] = {};
    __builtin_memcpy(first, p, sizeof(T) * static_cast<size_t>(n));
    return read(first);
  }
};
#endif

// Returns the row's scale; NaN where x has an element that is not finite.
inline float quantize_row(const float* x, byte_x* q, int64_t cols) {
  vec most = set1(0.0f), poison = set1(0.0f);
  for_lanes(cols, [&](int64_t k, int n) {
    const vec v = load_n(x + k, n);
    most = max(v, max(-v, most));
    poison += v * 0.0f;
  });
  const float largest_x = largest(most), inverse = largest_x > 0 ? 127.0f / largest_x : 0.0f;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which is the lower bits
  for_lanes(cols, [=](int64_t k, int n) {
    const int_vec whole = (int_vec)(load_n(x + k, n) * inverse + magic) - 0x4b400000;
    for (int i = 0; i < n; i++) q[k + i] = static_cast<byte_x>(whole[i]);
  });
  return largest_x / 127.0f + sum(poison);
}

}  // namespace LLM_ISA
