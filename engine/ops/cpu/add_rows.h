// c[i, :] += sum_k a[i, k] * b[k, :], added in the order of k, whatever the number of rows
#pragma once
#include "vec.h"

namespace LLM_ISA {

struct RowSums {
  const float* a;  // [rows, a_stride]
  int64_t a_stride;
  const float* b;  // [depth, width]
  int64_t depth, width;  // the width is a multiple of W
  float* c;  // [rows, width]
};

// M rows and V vectors from column j on.
template <int M, int V>
inline void add_tile(const RowSums& s, int64_t i, int64_t j) {
  const float* a = s.a + i * s.a_stride;
  float* c = s.c + i * s.width + j;
  vec sums[M][V];
#pragma GCC unroll 8
  for (int r = 0; r < M; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[r][v] = load(c + r * s.width + v * W);
  for (int64_t k = 0; k < s.depth; k++) {
    vec columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) columns[v] = load(s.b + k * s.width + j + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < M; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r][v] = fma(set1(a[r * s.a_stride + k]), columns[v], sums[r][v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(c + r * s.width + v * W, sums[r][v]);
}

template <int M>
inline void add_strip(const RowSums& s, int64_t i) {
#ifdef __AVX512F__
  constexpr int kAddVecs = 4;
#else
  constexpr int kAddVecs = M < 4 ? 4 : 2;  // as many as registers can hold
#endif
  int64_t j = 0;
  for (; j + kAddVecs * W <= s.width; j += kAddVecs * W) add_tile<M, kAddVecs>(s, i, j);
  for (; j < s.width; j += W) add_tile<M, 1>(s, i, j);
}

inline void add_rows(const RowSums& s, int64_t rows) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) add_strip<4>(s, i);
  for (; i + 2 <= rows; i += 2) add_strip<2>(s, i);
  if (i < rows) add_strip<1>(s, i);
}

}  // namespace LLM_ISA
