// Products of integers: 32 bits of each of W rows of a weight, a row in each lane, by the same 32 bits of x.
#pragma once
#include "runtime.h"
#include "vec.h"

namespace LLM_ISA {

#if defined(__AVX2__) && !defined(__AVX512F__)
// Sums that are in a register. Otherwise g++ adds up several products first, for which there are not enough registers.
template <class Lanes>
[[gnu::always_inline]] inline Lanes in_register(Lanes sums) {
  asm("" : "+x"(sums));
  return sums;
}
#endif

// sums += the products of a lane's two halves and those of `x`
inline int_vec add_halves(int_vec weight, int32_t x, int_vec sums) {
#if defined(__AVX512VNNI__)
  return (int_vec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(x));
#elif defined(__AVX512F__)
  return sums + (int_vec)_mm512_madd_epi16((__m512i)weight, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  return in_register(sums + (int_vec)_mm256_madd_epi16((__m256i)weight, _mm256_set1_epi32(x)));
#else
  return sums + (weight << 16 >> 16) * static_cast<int16_t>(x) + (weight >> 16) * (x >> 16);
#endif
}

// A word, 32 bits of a row of codes, is taken in `steps`: element i of step s is its code steps * i + s. A lane of a step
// has `at_once` of them, which are multiplied with as many codes of x, the same for all lanes: bytes, where the weight's
// have no sign, or halves.
#if defined(__AVX512VNNI__)
using byte_x = int8_t;
using nibble_x = int8_t;
#elif defined(__AVX2__) && !defined(__AVX512F__)
using byte_x = int16_t;
using nibble_x = int8_t;
#else
using byte_x = int16_t;
using nibble_x = int16_t;
#endif

struct Bytes {
  using code_x = byte_x;
  static constexpr int codes = 4, at_once = 4 / sizeof(code_x), steps = codes / at_once;
  static int_vec take(int_vec word, int s) {
    if (steps == 1) return word ^ static_cast<int32_t>(0x80808080);  // with 128 added they have no sign
    return (int_vec)((halves)(s ? word : word << 8) >> 8);
  }
};
struct Nibbles {
  using code_x = nibble_x;
  static constexpr int codes = 8, at_once = 4 / sizeof(code_x), steps = codes / at_once;
  static int_vec take(int_vec word, int s) { return word >> (4 * s) & (at_once == 4 ? 0x0f0f0f0f : 0x000f000f); }
};

// How the products of a lane's numbers and those in `x` are added up.
template <class X>
struct Products {
  using sums = int_vec;
  static constexpr int64_t words = 0;  // of a row that are added up in `sums` before these are added up; 0: all
#if defined(__AVX512VNNI__)
  static int_vec add(int_vec weight, int32_t x, int_vec sums) {
    return (int_vec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weight, _mm512_set1_epi32(x));
  }
#else
  static int_vec add(int_vec weight, int32_t x, int_vec sums) { return add_halves(weight, x, sums); }
#endif
};
#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
struct Products<int8_t> {  // with codes of 4 bits
  using sums = halves;
  static constexpr int64_t words = 4;  // each half is the sum of 16 products, at most 16 * 15 * 127 < 2^15
  static halves add(int_vec weight, int32_t x, halves sums) {
    return in_register(sums + (halves)_mm256_maddubs_epi16((__m256i)weight, _mm256_set1_epi32(x)));
  }
};
#endif

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
  using code_x = typename F::code_x;
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

constexpr int kSome = 16;  // codes that are put at a time

// Put the next of them in the order of the format: code i comes from number i / codes * codes + i % at_once * steps +
// i % codes / at_once.
template <class F>
inline void put_some(const int_vec (&numbers)[kSome / W], typename F::code_x* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i all = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)numbers[0], (__m256i)numbers[1]), 0xd8);
  if constexpr (sizeof(*to) == 2) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(all, order));
  } else {
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(bytes, order));
  }
#else
  typedef int32_t wide __attribute__((vector_size(4 * kSome)));
  typedef int16_t halves __attribute__((vector_size(2 * kSome)));
  typedef typename F::code_x narrow __attribute__((vector_size(sizeof(*to) * kSome)));
  wide order, codes;
  for (int i = 0; i < kSome; i++)
    order[i] = i / F::codes * F::codes + i % F::at_once * F::steps + i % F::codes / F::at_once;
  __builtin_memcpy(&codes, numbers, sizeof codes);
  if (F::steps > 1) codes = __builtin_shuffle(codes, order);
  // In two steps, for where a quarter is left g++ 12 takes a vector apart.
  const narrow bytes = __builtin_convertvector(__builtin_convertvector(codes, halves), narrow);
  __builtin_memcpy(to, &bytes, sizeof bytes);
#endif
}

// `count` numbers of x as codes, and zeros up to `padded`. Returns the sum of the codes.
template <class F>
inline int32_t put_codes(const float* x, int64_t count, int64_t padded, float inverse, typename F::code_x* to) {
  vec sums = set1(0.0f);
  for (int64_t k = 0; k < padded; k += kSome) {
    int_vec some[kSome / W];
#pragma GCC unroll 4
    for (int i = 0; i < kSome / W; i++) {
      const int64_t left = count - k - i * W;
      some[i] = rounded(load_n(x + k + i * W, static_cast<int>(left < 0 ? 0 : min(W, left))) * inverse);
      sums += as_floats(some[i]);
    }
    put_some<F>(some, to + k);
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
