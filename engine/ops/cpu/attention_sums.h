// c[i, :] = c[i, :] * keep[i] + sum_k a[i, k] * b[k, :], the two products of attention
#pragma once
#include <cstring>

#include "product.h"

namespace LLM_ISA {

// What queries and weights are multiplied as: with a bf16 cache they are rounded to bf16, and where there are products of
// pairs of these, keys and values lie in pairs, too, each pair in the place of a float32.
template <class Cache>
struct Factor {
  static constexpr bool is_rounded = sizeof(Cache) == 2;
  using type = float;
};
inline vec add_product(const float* a, int64_t k, vec b, vec sums) { return fma(set1(a[k]), b, sums); }
inline int64_t num_products(const float*, int64_t depth) { return depth; }

#ifdef __AVX512BF16__
template <>
struct Factor<uint16_t> {
  static constexpr bool is_rounded = true;
  using type = uint16_t;
};
inline vec add_product(const uint16_t* a, int64_t k, vec b, vec sums) {
  int32_t pair;
  memcpy(&pair, a + 2 * k, sizeof pair);
  return dot_bf16((bf16_vec)_mm512_set1_epi32(pair), (bf16_vec)b, sums);
}
inline int64_t num_products(const uint16_t*, int64_t depth) { return depth / 2; }
#endif

#ifdef __AVX512F__
constexpr int kSumVecs = 4;
#else
constexpr int kSumVecs = 2;
#endif
constexpr int kSumRows = 4;

// Memory that will be read soon: a little of it is asked for at every step of the work at hand.
struct Ahead {
  const char *next, *end;
  void step() {
    if (next >= end) return;
    prefetch(next);
    prefetch(next + 64);
    next += 128;
  }
};

// c[i, :] = c[i, :] * keep[i] + sum_k a[i, k] * b[k, :] for M rows and V vectors; keep null: c starts at 0.
// The sum runs over k in order, whatever M and V are.
template <int M, int V, class A>
inline void sum_tile(const A* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth, const float* keep, Ahead& ahead) {
  vec sums[M][V] = {};
  if (keep)
    for (int i = 0; i < M; i++)
      for (int v = 0; v < V; v++) sums[i][v] = load(c + i * c_stride + v * W) * keep[i];
  const int64_t count = num_products(a, depth);
  auto add = [&](int64_t k, int_vec wanted) {
    vec columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) columns[v] = (vec)((int_vec)load(b + k * b_stride + v * W) & wanted);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[i][v] = add_product(a + i * a_stride, k, columns[v], sums[i][v]);
  };
  for (int64_t k = 0; k < count; k++) {
    ahead.step();
    add(k, ~int_vec());
  }
  if (sizeof(A) == 2 && depth % 2) add(count, int_vec() + 0xffff);  // one without the other: it may be anything
  for (int i = 0; i < M; i++)
    for (int v = 0; v < V; v++) store(c + i * c_stride + v * W, sums[i][v]);
}

template <int M, class A>
inline void sum_strip(const A* a, int64_t a_stride, const float* b, float* c, int64_t width,
                      int64_t depth, const float* keep, Ahead& ahead) {
  int64_t j = 0;
  for (; j + kSumVecs * W <= width; j += kSumVecs * W)
    sum_tile<M, kSumVecs>(a, a_stride, b + j, width, c + j, width, depth, keep, ahead);
  for (; j < width; j += W) sum_tile<M, 1>(a, a_stride, b + j, width, c + j, width, depth, keep, ahead);
}

// As sum_tile for any number of rows; b and c have `width` columns, a multiple of W.
template <class A>
inline void sum_rows(const A* a, int64_t a_stride, const float* b, float* c, int64_t width, int64_t depth,
                     const float* keep, int64_t rows, Ahead& ahead) {
  int64_t i = 0;
  auto strip = [&](auto rows_at_once) {
    constexpr int M = decltype(rows_at_once)::value;
    for (; i + M <= rows; i += M)
      sum_strip<M>(a + i * a_stride, a_stride, b, c + i * width, width, depth, keep ? keep + i : nullptr, ahead);
  };
  strip(Count<kSumRows>());
  strip(Count<3>());
  strip(Count<2>());
  strip(Count<1>());
}

}  // namespace LLM_ISA
