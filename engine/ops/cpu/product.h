// sums += x * weight, one vector of both at a time, for each type in which x is multiplied.
#pragma once
#include "vec.h"

namespace LLM_ISA {

template <class X>
struct Dot;

template <>
struct Dot<float> {
  static constexpr int step = W;  // elements of one product
  using lanes = vec;
  using sum_lanes = vec;
  static vec add(vec x, vec weight, vec sums) { return fma(x, weight, sums); }
  template <class T>
  static vec read(const T* p) { return load(p); }
  template <class T>
  static vec read_first(const T* p, int n) { return load_first(p, n); }
};

#ifdef __AVX512BF16__
using bf16_x = uint16_t;
template <>
struct Dot<uint16_t> {
  static constexpr int step = 2 * W;
  using lanes = bf16_vec;
  using sum_lanes = vec;
  static vec add(bf16_vec x, bf16_vec weight, vec sums) { return dot_bf16(x, weight, sums); }
  template <class T>
  static bf16_vec read(const T* p) { return load_bf16(p); }
  template <class T>
  static bf16_vec read_first(const T* p, int n) { return load_bf16_first(p, n); }
};
inline void round_row(const float* x, uint16_t* rounded, int64_t cols) {
  for_lanes(cols, [=](int64_t k, int n) { store_bf16(rounded + k, load_n(x + k, n), n); });
}
#else
using bf16_x = float;  // rounded to bf16, kept as float32
inline void round_row(const float* x, float* rounded, int64_t cols) {
  for_lanes(cols, [=](int64_t k, int n) { store_n(rounded + k, round_to_bf16(load_n(x + k, n)), n); });
}
#endif

// The first N lanes as in memory, in the narrowest vectors that hold them: a wide one would cross two cache lines.
template <int N>
inline vec load_few(const float* p) {
#ifdef __AVX512F__
  if (N <= 4) return _mm512_castps128_ps512(_mm_maskz_loadu_ps((1 << N) - 1, p));
  return _mm512_castps256_ps512(_mm256_maskz_loadu_ps((1 << N) - 1, p));
#else
  return load_first(p, N);
#endif
}
// The sums of M rows of N vectors, in the order of sum().
template <int M, int N, class X>
struct Totals {
  using SumVec = typename Dot<X>::sum_lanes;
#ifdef __AVX512F__
  // Each vector holds as many rows as fit, because data that is stored in one piece can be loaded in parts, not across.
  static constexpr int kRows = 16 / N, kVecs = (M + kRows - 1) / kRows;
  SumVec totals[kVecs];
  [[gnu::always_inline]] inline explicit Totals(const SumVec* sums) {  // or the sums would not stay in registers
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) {
      SumVec some[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
        some[i] = i < kRows * N && v * kRows * N + i < M * N ? sums[v * kRows * N + i] : SumVec();
      totals[v] = (SumVec)sum_each((const vec*)some, [](vec a, vec b) { return (vec)((SumVec)a + (SumVec)b); });
    }
  }
  SumVec row(int i) const {
    const auto* p = reinterpret_cast<const float*>(totals + i / kRows) + i % kRows * N;
    return (SumVec)(N <= 4 ? _mm512_castps128_ps512(_mm_loadu_ps(p)) : _mm512_castps256_ps512(_mm256_loadu_ps(p)));
  }
#else
  const SumVec* sums;
  explicit Totals(const SumVec* sums) : sums(sums) {}
  SumVec row(int i) const {
    SumVec totals = {};
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) totals[j] = sum(sums[i * N + j]);
    return totals;
  }
#endif
};

}  // namespace LLM_ISA
