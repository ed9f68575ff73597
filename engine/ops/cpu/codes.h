// Products of integers: 32 bits of each of W rows of a weight, a row in each lane, by the same 32 bits of x.
#pragma once
#include "runtime.h"
#include "vec.h"

namespace LLM_ISA {

// sums += the products of a lane's two halves and those of `x`
inline int_vec add_halves(int_vec weight, int32_t x, int_vec sums) {
#if defined(__AVX512VNNI__)
  return (int_vec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(x));
#elif defined(__AVX512F__)
  return sums + (int_vec)_mm512_madd_epi16((__m512i)weight, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  return sums + (int_vec)_mm256_madd_epi16((__m256i)weight, _mm256_set1_epi32(x));
#else
  return sums + (weight << 16 >> 16) * static_cast<int16_t>(x) + (weight >> 16) * (x >> 16);
#endif
}

// sums += the products of a lane's numbers and those in `x`, which are the same for all lanes. Where these are bytes
// the weight's have no sign.
#if defined(__AVX512VNNI__)
using code_x = int8_t;
inline int_vec add_products(int_vec weight, int32_t x, int_vec sums) {
  return (int_vec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(x));
}
#else
using code_x = int16_t;
inline int_vec add_products(int_vec weight, int32_t x, int_vec sums) { return add_halves(weight, x, sums); }
#endif
constexpr int kAtOnce = 4 / sizeof(code_x);  // numbers of a lane

// A word, 32 bits of a row of codes, is taken in `steps`: element i of step s is its code steps * i + s.
struct Bytes {
  static constexpr int codes = 4, steps = 4 / kAtOnce;
  static int_vec take(int_vec word, int s) {
    if (steps == 1) return word ^ static_cast<int32_t>(0x80808080);  // with 128 added they have no sign
    typedef int16_t halves __attribute__((vector_size(4 * W)));
    return (int_vec)((halves)(s ? word : word << 8) >> 8);
  }
};
struct Nibbles {
  static constexpr int codes = 8, steps = 8 / kAtOnce;
  static int_vec take(int_vec word, int s) { return word >> (4 * s) & (kAtOnce == 4 ? 0x0f0f0f0f : 0x000f000f); }
};

// The formats. Numbers of x are multiples, up to kLargest, of a step that `group` of them share (or all of a row).
// Codes are too large by `origin`.
constexpr int kLargest = 127;
struct Int8 : Bytes {
  static constexpr int64_t group = 64;
  static constexpr int origin = steps == 1 ? 128 : 0;
  static constexpr bool has_scale_of_row = false, has_group_scales = false, has_zeros = false;
};
struct A8w8 : Bytes {
  static constexpr int64_t group = 512;
  static constexpr int origin = steps == 1 ? 128 : 0;
  static constexpr bool has_scale_of_row = true, has_group_scales = false, has_zeros = false;
};
template <bool kHasZeros, int64_t kGroup>  // zeros are numbers of their own: here they count how often they are taken off
struct Int4 : Nibbles {
  static constexpr int64_t group = kGroup;
  static constexpr int origin = kHasZeros ? 1 : 8;
  static constexpr bool has_scale_of_row = false, has_group_scales = true, has_zeros = kHasZeros;
};

// x as codes, in the order in which the codes of a weight are read.
template <class F>
struct CodesOfX {
  code_x* codes;    // [rows, width]
  float* scales;    // [groups, rows]
  int32_t* excess;  // [groups, rows]: what a sum of products is too large by
  int64_t rows, width, groups;

  CodesOfX(int64_t rows, int64_t given)
      : rows(rows), width(round_up(given, 128)), groups((width + F::group - 1) / F::group) {
    const int64_t num_codes = rows * width;  // a multiple of 64 bytes
    codes = static_cast<code_x*>(
        llm_scratch(0, sizeof(code_x) * static_cast<size_t>(num_codes) + 8 * static_cast<size_t>(rows * groups)));
    scales = reinterpret_cast<float*>(codes + num_codes);
    excess = reinterpret_cast<int32_t*>(scales + rows * groups);
  }
  code_x* row(int64_t t) const { return codes + t * width; }
};

// `count` numbers of x as codes, and zeros up to `padded`. Returns the sum of the codes.
template <class F>
inline int32_t put_codes(const float* x, int64_t count, int64_t padded, float inverse, code_x* to) {
  constexpr int kSome = 16;
  typedef int32_t wide __attribute__((vector_size(4 * kSome)));
  typedef int16_t halves __attribute__((vector_size(2 * kSome)));
  typedef code_x narrow __attribute__((vector_size(sizeof(code_x) * kSome)));
  wide order;
  for (int i = 0; i < kSome; i++) order[i] = i / F::codes * F::codes + i % kAtOnce * F::steps + i % F::codes / kAtOnce;
  vec sums = set1(0.0f);
  for (int64_t k = 0; k < padded; k += kSome) {
    wide codes;
    for (int i = 0; i < kSome; i += W) {
      const int64_t left = count - k - i;
      const int_vec some = rounded(load_n(x + k + i, static_cast<int>(left < 0 ? 0 : min(W, left))) * inverse);
      sums += as_floats(some);
      __builtin_memcpy(reinterpret_cast<char*>(&codes) + 4 * i, &some, sizeof some);
    }
    if (F::steps > 1) codes = __builtin_shuffle(codes, order);
    // In two steps, for where a quarter is left g++ 12 takes a vector apart.
    const narrow bytes = __builtin_convertvector(__builtin_convertvector(codes, halves), narrow);
    __builtin_memcpy(to + k, &bytes, sizeof bytes);
  }
  return static_cast<int32_t>(sum(sums));
}

template <class F>
inline void put_row(const float* x, int64_t count, const CodesOfX<F>& all, int64_t t) {
  float most = F::has_scale_of_row ? magnitude(x, count) : 0.0f;
  for (int64_t g = 0; g < all.groups; g++) {
    const int64_t start = g * F::group, own = min(F::group, count - start);
    const int64_t end = g + 1 < all.groups ? start + F::group : all.width;
    if (!F::has_scale_of_row) most = magnitude(x + start, own);
    const float inverse = most > 1e-30f ? kLargest / most : 0.0f;  // which is finite
    all.scales[g * all.rows + t] = most / kLargest;
    all.excess[g * all.rows + t] =
        F::origin * put_codes<F>(x + start, most == most ? own : 0, end - start, inverse, all.row(t) + start);
  }
}

}  // namespace LLM_ISA
