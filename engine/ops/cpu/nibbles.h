// (code - zero) * scale as bf16, for 4-bit codes that lie two in a byte, the first in the lower half
#pragma once
#include "product.h"

namespace LLM_ISA {

constexpr int64_t kCodesPerScale = 64;
constexpr int64_t kCodesAligned = 128;  // what a row's number of codes is a multiple of

// The 16 values of a group's codes.
struct Levels {
  vec values[16 / W];
  Levels(const uint16_t* scale, const uint16_t* zero) {
    const float step = widen(*scale), origin = zero ? widen(*zero) : 8.0f;
    float codes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int i = 0; i < 16 / W; i++) values[i] = (load(codes + i * W) - origin) * step;
  }
};

// A row is read a block at a time. A block is cut into words of as many lanes as a product has, and step s takes
// number s of the codes in each word: they come out in another order than they lie in, and x is put into the same.
#if defined(__AVX512BF16__)
struct Nibbles {
  static constexpr int steps = 4, lanes = 32;
  typedef uint16_t words_vec __attribute__((vector_size(64)));
  words_vec words;
  __m512i table;  // of two groups
  void open(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero) {
    words = (words_vec)_mm512_loadu_si512(codes);
    const Levels first(scale, zero), second(scale + 1, zero ? zero + 1 : nullptr);
    table = (__m512i)_mm512_cvtne2ps_pbh(second.values[0], first.values[0]);
  }
  bf16_vec take(int s) const {
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i index =  // (word & 15) | second
        _mm512_ternarylogic_epi32((__m512i)(words >> (4 * s)), _mm512_set1_epi16(15), second, 0xea);
    return (bf16_vec)_mm512_permutexvar_epi16(index, table);
  }
};
#elif defined(__AVX512F__)
struct Nibbles {
  static constexpr int steps = 8, lanes = 16;
  int_vec words;
  vec first, second;
  void open(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero) {
    words = (int_vec)_mm512_loadu_si512(codes);
    first = round_to_bf16(Levels(scale, zero).values[0]);
    second = round_to_bf16(Levels(scale + 1, zero ? zero + 1 : nullptr).values[0]);
  }
  vec take(int s) const {
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(16), 1);
    const __m512i index = _mm512_ternarylogic_epi32((__m512i)(words >> (4 * s)), _mm512_set1_epi32(15), upper, 0xea);
    return _mm512_permutex2var_ps(first, index, second);
  }
};
#elif defined(__AVX2__)
struct Nibbles {
  static constexpr int steps = 8, lanes = 8;
  int_vec words;
  vec lower, upper;
  void open(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero) {
    words = (int_vec)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const Levels levels(scale, zero);
    lower = round_to_bf16(levels.values[0]);
    upper = round_to_bf16(levels.values[1]);
  }
  vec take(int s) const {
    const int_vec index = words >> (4 * s);  // the lowest 3 bits choose a lane, the next one the half
    const vec of_lower = _mm256_permutevar8x32_ps(lower, (__m256i)index);
    const vec of_upper = _mm256_permutevar8x32_ps(upper, (__m256i)index);
    return _mm256_blendv_ps(of_lower, of_upper, (vec)(index << 28));
  }
};
#else
struct Nibbles {
  static constexpr int steps = 8, lanes = W;
  int_vec words;
  float table[16];
  void open(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero) {
    __builtin_memcpy(&words, codes, sizeof words);
    const Levels levels(scale, zero);
    for (int i = 0; i < 16 / W; i++) store(table + i * W, round_to_bf16(levels.values[i]));
  }
  vec take(int s) const {
    vec v;
    for (int i = 0; i < W; i++) v[i] = table[words[i] >> (4 * s) & 15];
    return v;
  }
};
#endif

// x in the order in which codes are taken, zeros after its end.
template <class X>
inline void put_in_order_of_codes(const X* x, X* ordered, int64_t cols, int64_t aligned_cols) {
  constexpr int64_t kBlock = Nibbles::steps * Nibbles::lanes;
  for (int64_t k = 0; k < aligned_cols; k += kBlock) {
    X block[kBlock] = {};
    __builtin_memcpy(block, x + k, sizeof(X) * static_cast<size_t>(cols - k < kBlock ? (cols > k ? cols - k : 0) : kBlock));
    for (int s = 0; s < Nibbles::steps; s++)
      for (int i = 0; i < Nibbles::lanes; i++) ordered[k + s * Nibbles::lanes + i] = block[Nibbles::steps * i + s];
  }
}

}  // namespace LLM_ISA
