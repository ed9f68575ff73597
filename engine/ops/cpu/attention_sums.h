// c[i, :] = c[i, :] * keep[i] + sum_k a[i, k] * b[k, :], the two products of attention
#pragma once
#include <cstring>
#include <type_traits>

#include "codes.h"
#include "product.h"

namespace LLM_ISA {

// The types depend on the cache. float32: all is float32. bf16: queries and weights are rounded to bf16, and where
// pairs can be multiplied, keys and values are in pairs, too, each in the place of a float32. Bytes: integers; those of
// queries and weights have 16 bits and a unit for each row, all in pairs.
template <class Cache>
struct Factor {
  static constexpr bool is_rounded = sizeof(Cache) == 2;
  using type = float;
};
template <>
struct Factor<int8_t> {
  static constexpr bool is_rounded = false;
  using type = int16_t;
};
inline int32_t pair_at(const void* pairs, int64_t k) {
  int32_t pair;
  memcpy(&pair, static_cast<const char*>(pairs) + 4 * k, sizeof pair);
  return pair;
}
inline vec add_product(const float* a, int64_t k, vec b, vec sums) { return fma(set1(a[k]), b, sums); }
inline int_vec add_product(const int16_t* a, int64_t k, vec b, int_vec sums) {
  return add_halves((int_vec)b, pair_at(a, k), sums);
}
#ifdef __AVX512BF16__
template <>
struct Factor<uint16_t> {
  static constexpr bool is_rounded = true;
  using type = uint16_t;
};
inline vec add_product(const uint16_t* a, int64_t k, vec b, vec sums) {
  return dot_bf16((bf16_vec)_mm512_set1_epi32(pair_at(a, k)), (bf16_vec)b, sums);
}
#endif

template <class F>
struct SumArgs {
  const F* a;  // [rows, a_stride]
  int64_t a_stride;
  const float* b;  // [depth, width], in pairs [depth / 2, width]
  float* c;        // [rows, width]
  int64_t width, depth;  // the width is a multiple of 2 W
  const float* keep;     // [rows]; null: there is nothing yet
  const float* units;    // [rows], of whole numbers
  const float* scales = nullptr;  // [width], of columns of whole numbers, which are added to c; null: none
  int64_t columns = 0;            // of the columns those that are wanted, a multiple of 2 W; 0: all
  int64_t b_width = 0;            // of b, where that of c differs
  const float* keep_columns = nullptr;  // [width], like `keep`, but of each column

  [[gnu::always_inline]] SumArgs from_row(int64_t i) const {
    const float* later = keep ? keep + i : nullptr;
    return {a + i * a_stride, a_stride, b, c + i * width, width, depth, later, units + i, scales, columns, b_width, keep_columns};
  }
};

template <class F>
struct Sums {
  using lanes = vec;
};
template <>
struct Sums<int16_t> {
  using lanes = int_vec;
};
inline vec in_units(vec sums, float) { return sums; }
inline vec in_units(int_vec sums, float unit) { return as_floats(sums) * unit; }

template <class F>
inline void put_sums(const SumArgs<F>& s, int64_t i, int64_t column, typename Sums<F>::lanes sums) {
  float* c = s.c + i * s.width + column;
  const vec found = in_units(sums, s.units[i]);
  if (s.keep_columns) return store(c, fma(load(c), load(s.keep_columns + column), found));
  store(c, s.keep ? fma(load(c), set1(s.keep[i]), found) : found);
}

inline void add_scaled(const SumArgs<int16_t>& s, int64_t i, int64_t column, int_vec sums) {
  float* c = s.c + i * s.width + column;
  store(c, fma(as_floats(sums) * load(s.scales + column), set1(s.units[i]), load(c)));
}

constexpr int32_t kFirstHalf = 0xffff;  // of a pair without its other half, which may be anything

#ifdef __AVX512F__
constexpr int kSumVecs = 4, kSumRows = 6;  // of a tile, in registers
// Columns of b that all rows of a are multiplied with before the next ones; 0: all. The lines of b must then be in
// different places of the L1 cache.
constexpr int64_t kSumColumns = 0;
#else
constexpr int kSumVecs = 2, kSumRows = 6;
constexpr int64_t kSumColumns = kSumVecs * W;
#endif
inline int64_t stride_of(int64_t width) { return kSumColumns ? ((width + 15) / 16 | 1) * 16 : width; }

// M rows and V vectors from column j on. A sum runs over k in order, whatever M and V are.
template <int M, int V, class F>
inline void sum_tile(const SumArgs<F>& s, int64_t j) {
  typename Sums<F>::lanes sums[M][V] = {};
  const int64_t b_width = s.b_width ? s.b_width : s.width;
  auto add = [&](int64_t k, int32_t wanted) {
    vec columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) columns[v] = (vec)((int_vec)load(s.b + k * b_width + j + v * W) & wanted);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[i][v] = add_product(s.a + i * s.a_stride, k, columns[v], sums[i][v]);
  };
  const int64_t count = s.depth * static_cast<int64_t>(sizeof(F)) / 4;
  for (int64_t k = 0; k < count; k++) add(k, -1);
  if (sizeof(F) == 2 && s.depth % 2) add(count, kFirstHalf);
  if constexpr (std::is_same<F, int16_t>::value)
    if (s.scales) {
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) add_scaled(s, i, j + v * W, sums[i][v]);
      return;
    }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) put_sums(s, i, j + v * W, sums[i][v]);
}

template <int M, class F>
inline void sum_strip(const SumArgs<F>& s, int64_t rows, int64_t j, int64_t columns) {
  if constexpr (M > 1)
    if (rows < M) return sum_strip<M - 1>(s, rows, j, columns);
  for (; j + kSumVecs * W <= columns; j += kSumVecs * W) sum_tile<M, kSumVecs>(s, j);
  for (; j < columns; j += 2 * W) sum_tile<M, 2>(s, j);
}

// Tiles are as even as can be.
template <class F>
inline void sum_rows(const SumArgs<F>& s, int64_t rows) {
  const int64_t count = (rows + kSumRows - 1) / kSumRows;
  const int64_t columns = s.columns ? s.columns : s.width, at_once = kSumColumns ? kSumColumns : columns;
  for (int64_t j = 0; j < columns; j += at_once)
    for (int64_t i = 0; i < count; i++) {
      const int64_t first = i * rows / count;
      sum_strip<kSumRows>(s.from_row(first), (i + 1) * rows / count - first, j, min(columns, j + at_once));
    }
}

}  // namespace LLM_ISA
