// Operands of attention: queries and weights, and the keys and values of a block, in float32 or in pairs of 16 bits.
#pragma once
#include "attention_cache.h"
#include "attention_sums.h"

namespace LLM_ISA {

// Keys or values of a block, and the start of those that are needed next.
template <class Cache>
struct CachedRows {
  const Cache* data;
  const char* next;
  int64_t stride, count;
  bool is_read_again = false;  // what is wanted next must then stay in the L2 cache

  // Return row i, of which some bytes will be read, and prefetch as many bytes of the next rows.
  const Cache* row(int64_t i, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) is_read_again ? prefetch(next + b) : prefetch_once(next + b);
    next += bytes;
    return data + i * stride;
  }
};

// Keys are transposed in units of 32 bits with kParts parts. For bytes these are pairs of the even and of the odd ones.
template <class F, class Cache>
constexpr int64_t kParts = sizeof(F) / sizeof(Cache);
template <class F, class Cache>
inline vec part_of(vec units, int64_t part) {
  const auto bits = (int_vec)units;
  if (kParts<F, Cache> == 1) return units;
  if (sizeof(Cache) == 1) return (vec)((halves)(part ? bits : bits << 8) >> 8);
  return (vec)(part ? bits & static_cast<int32_t>(0xffff0000) : bits << 16);
}
// Bytes are extended to whole units with whatever follows in the cache; a query has zeros there.
template <class Cache>
inline int64_t padded_dim(int64_t head_dim) { return round_up(head_dim, 4 / sizeof(Cache)); }

// square[j] = unit first_unit + j of W positions from i on, zeros where there are none. Return the number of units.
template <class Cache>
[[gnu::always_inline]] inline int read_square(CachedRows<Cache>& rows, int64_t i, int64_t first_unit, int64_t num_units,
                                              vec* square) {
  const int n = static_cast<int>(min(W, num_units - first_unit));
  if (n == W && i + W <= rows.count) {
#pragma GCC unroll 16
    for (int64_t j = 0; j < W; j++)
      square[j] = load(reinterpret_cast<const float*>(rows.row(i + j, 4 * W)) + first_unit);
    transpose(square);
    return W;
  }
#pragma GCC unroll 16
  for (int64_t j = 0; j < W; j++)
    square[j] = i + j < rows.count ? load_n(reinterpret_cast<const float*>(rows.row(i + j, 4 * W)) + first_unit, n)
                                   : set1(0.0f);
  transpose(square);
  return n;
}

// keys[d, i] = K[i, d], or the pairs of a position below each other; zeros up to the width
template <class F, class Cache>
inline void turn_keys(CachedRows<Cache>& rows, int64_t num_units, float* keys, int64_t key_width, int64_t stride) {
  for (int64_t i = 0; i < key_width; i += W)
    for (int64_t unit = 0; unit < num_units; unit += W) {
      vec square[W];
      const int n = read_square(rows, i, unit, num_units, square);
      for (int64_t j = 0; j < n * kParts<F, Cache>; j++)
        store(keys + (unit * kParts<F, Cache> + j) * stride + i,
              part_of<F, Cache>(square[j / kParts<F, Cache>], j % kParts<F, Cache>));
    }
}

// columns[d] = V[i, d], or the pair V[i, d], V[i + 1, d], for 2 W columns from d on, n of which there are
template <class Cache>
[[gnu::always_inline]] inline void read_columns(CachedRows<Cache>& rows, int64_t i, int64_t d, int n, float, vec* columns) {
  const Cache* row = rows.row(i, 2 * W * sizeof(Cache)) + d;
  columns[0] = load_n(row, n < W ? n : W);
  columns[1] = n > W ? load_n(row + W, n - W) : set1(0.0f);
}
template <class Cache, class Half>
[[gnu::always_inline]] inline void read_columns(CachedRows<Cache>& rows, int64_t i, int64_t d, int n, Half, vec* columns) {
  columns[0] = load_pairs(rows.row(i, 2 * W * sizeof(Cache)) + d, n / 2);
  columns[1] = i + 1 < rows.count ? load_pairs(rows.row(i + 1, 2 * W * sizeof(Cache)) + d, n / 2) : set1(0.0f);
  interleave(columns[0], columns[1]);
}

template <class F, class Cache>
inline void lay_values(CachedRows<Cache>& rows, int64_t dim, float* values, int64_t stride) {
  constexpr int64_t at_once = 4 / sizeof(F);
  for (int64_t i = 0; i < rows.count; i += at_once) {
    auto lay = [&](int64_t d, int n) {
      vec columns[2];
      read_columns(rows, i, d, n, F(), columns);
      for (int v = 0; v < 2; v++) store(values + i / at_once * stride + d + v * W, columns[v]);
    };
    int64_t d = 0;
    for (; d + 2 * W <= dim; d += 2 * W) lay(d, 2 * W);
    if (d < dim) lay(d, static_cast<int>(dim - d));
  }
}

// The two products of M rows, which are too few to be worth writing keys and values in the layout of products. Sums of
// float32 are the same as those of sum_tile, bit for bit.
template <int M, class F, class Cache>
inline void score_few(const SumArgs<F>& s, CachedRows<Cache>& rows) {
  constexpr int parts = kParts<F, Cache>;
  const int64_t num_units = s.depth * static_cast<int64_t>(sizeof(Cache)) / 4;
  for (int64_t i = 0; i < rows.count; i += W) {
    typename Sums<F>::lanes sums[M] = {};
    for (int64_t unit = 0; unit < num_units; unit += W) {
      vec square[W];
      const int n = read_square(rows, i, unit, num_units, square);
#pragma GCC unroll 16
      for (int j = 0; j < W; j++) {
        if (j >= n) break;
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
          const vec column = part_of<F, Cache>(square[j], part);
#pragma GCC unroll 8
          for (int m = 0; m < M; m++)
            sums[m] = add_product(s.a + m * s.a_stride, (unit + j) * parts + part, column, sums[m]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      if constexpr (std::is_same<F, int16_t>::value)
        if (s.scales) {
          add_scaled(s, m, i, sums[m]);
          continue;
        }
      put_sums(s, m, i, sums[m]);
    }
  }
}

template <int M, class F, class Cache>
inline void add_few(const SumArgs<F>& s, CachedRows<Cache>& rows, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 2 * W) {
    typename Sums<F>::lanes sums[M][2] = {};
    auto add_all = [&](auto n) {
      for (int64_t i = 0; i < rows.count; i += 4 / sizeof(F)) {
        vec columns[2];
        read_columns(rows, i, d, n, F(), columns);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++)
            sums[m][v] = add_product(s.a + m * s.a_stride, i * static_cast<int64_t>(sizeof(F)) / 4, columns[v], sums[m][v]);
      }
    };
    if (d + 2 * W <= dim)
      add_all(2 * W);
    else
      add_all(static_cast<int>(dim - d));
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) put_sums(s, m, d + v * W, sums[m][v]);
  }
}

// Round 2 W numbers, to which kMagic was added, to whole ones of 16 bits.
[[gnu::always_inline]] inline halves as_halves(vec first, vec second) {
  halves lower;
  for (int i = 0; i < 2 * W; i++) lower[i] = static_cast<int16_t>(2 * i);
  return __builtin_shuffle((halves)first, (halves)second, lower);
}

// The largest whole number of which `depth` products with bytes are within 32 bits, 127 * 256 at most.
inline float largest_whole(int64_t depth) { return static_cast<float>(min(127 * 256, INT32_MAX / (127 * depth))); }

// x, with largest magnitude `most`, as integers of a unit that is returned. If x is not finite, neither is the unit.
// Processes whole groups of 2 W.
inline float put_whole(const float* x, int64_t count, float most, int64_t depth, int16_t* to) {
  const float limit = largest_whole(depth), inverse = most > 1e-30f && most < INFINITY ? limit / most : 0.0f;
  for (int64_t i = 0; i < count; i += 2 * W) {
    halves codes = as_halves(load(x + i) * inverse + kMagic, load(x + i + W) * inverse + kMagic);
    if (!(inverse > 0)) codes = halves();
    memcpy(to + i, &codes, sizeof codes);
  }
  return most / limit;
}

// Return the unit of the row.
inline float put_query(const float* x, int64_t dim, bool, int16_t* to) {
  const float unit = put_whole(x, dim, magnitude(x, dim), dim, to);
  for (int64_t d = dim; d % 4; d++) to[d] = 0;
  for (int64_t d = 0; d < dim; d += 4) {  // the even ones first, then the odd ones
    uint64_t four;
    memcpy(&four, to + d, sizeof four);
    four = (four & 0xffff00000000ffff) | (four << 16 & 0xffff00000000) | (four >> 16 & 0xffff0000);
    memcpy(to + d, &four, sizeof four);
  }
  return unit;
}
inline float put_query(const float* x, int64_t dim, bool, uint16_t* to) {
  for_lanes(dim, [=](int64_t d, int n) { store_bf16(to + d, load_n(x + d, n), n); });
  return 1.0f;
}
inline float put_query(const float* x, int64_t dim, bool is_rounded, float* to) {
  for_lanes(dim, [=](int64_t d, int n) {
    const vec exact = load_n(x + d, n);
    store_n(to + d, is_rounded ? round_to_bf16(exact) : exact, n);
  });
  return 1.0f;
}

// The sum of the weights of a row, and the bits of the largest that is multiplied with bytes.
struct Weighed {
  vec total = set1(0.0f);
  int_vec most = {};
};

// 2 W weights in the layout of the product.
template <class Cache>
inline void put_weights(float* to, vec first, vec second, Weighed& all) {
  if (Factor<Cache>::is_rounded) first = round_to_bf16(first), second = round_to_bf16(second);
  store(to, first);
  store(to + W, second);
  all.total += first + second;
}
#ifdef __AVX512BF16__
template <class Cache>
inline void put_weights(uint16_t* to, vec first, vec second, Weighed& all) {  // which are no denormal numbers
  const bf16_vec pairs = _mm512_cvtne2ps_pbh(second, first);
  _mm512_storeu_si512(to, (__m512i)pairs);
  all.total = dot_bf16(pairs, (bf16_vec)_mm512_set1_epi16(0x3f80), all.total);
}
#endif

}  // namespace LLM_ISA
