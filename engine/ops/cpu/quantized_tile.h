// A tile of a linear layer of 8 or 4 bits: some rows of x times some outputs, by vectors.
#pragma once
#include "codes.h"
#include "kernels.h"
#include "packed_rows.h"
#include "vec.h"

namespace LLM_ISA {

// A tile: kCols vectors of outputs for some rows of x, their sums in registers. If there are few rows it has all outputs
// of a panel, which is then read from end to end.
#ifdef __AVX512F__
constexpr int kCols = 2, kSums = 24;
#else
constexpr int kCols = 2, kSums = 12;
#endif
constexpr int kAllCols = kPanel / W;
constexpr int64_t kWords = 256;        // of each output at a time: those of a panel stay in the L1 cache
constexpr int64_t kBlock = 8;          // words, in which what comes next is asked for from one place
constexpr int64_t kAhead = 32;         // words between asking and reading, where a panel is read once

template <class F>
struct QuantizedArgs {
  const QuantizedLinear& a;
  const CodesOfX<F>& x;
  int64_t num_words;  // of a row of the weight
};

// Outputs from n on of the rows from t on, for words first .. end of them; then those at `next`. The pointers are to the
// data of output n, and y to that of row t.
struct Tile {
  int64_t t, n, first, end;
  const uint32_t *words, *next;
  const uint16_t *scales, *zeros;
  float* y;
  int64_t y_stride;
  int64_t turn = 0, turns = 1;  // `turns` tiles read the same words, each asks for some of what comes next

  const uint32_t* ahead(int64_t w) const {
    const int64_t wanted = w + (turns > 1 ? end - first : kAhead);
    if (w / kBlock % turns != turn) return words + w * kPanel;
    return wanted < end ? words + wanted * kPanel : next + (wanted - end) * kPanel;
  }

  Tile from_output(int64_t c) const {
    Tile rest = *this;
    rest.n += c, rest.words += c, rest.next += c, rest.scales += c, rest.zeros += c, rest.y += c;
    return rest;
  }

  template <int C, class Body>
  void each_vec(const QuantizedLinear& a, Body body) const {  // of C vectors, with the number of outputs that there are
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      body(c, static_cast<int>(a.num_out - n > c * W ? min(W, a.num_out - n - c * W) : 0));
  }
};

// sums += the products of `count` words from `first` on.
template <class F, int M, int C>
[[gnu::always_inline]] inline void multiply_words(const Tile& p, const CodesOfX<F>& x, int64_t first, int64_t count,
                                                  int_vec (&sums)[M][C]) {
  using Products = Products<typename F::code_x>;
  const auto* row = x.row(p.t) + first * F::codes;
  const uint32_t *words = p.words + first * kPanel, *ahead = p.ahead(first);
  auto multiply_word = [&](int64_t w, auto& into) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c += 16 / W) {  // cache lines
      const uint32_t* wanted = ahead + w * kPanel + c * W;
      p.turns == 1 ? prefetch_once(wanted) : prefetch(wanted);
    }
#pragma GCC unroll 4
    for (int s = 0; s < F::steps; s++) {
      int_vec columns[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        __builtin_memcpy(&columns[c], words + w * kPanel + c * W, sizeof(int_vec));
        columns[c] = F::take(columns[c], s);
      }
#pragma GCC unroll 12
      for (int i = 0; i < M; i++) {
        int32_t some;
        __builtin_memcpy(&some, row + i * x.width + w * F::codes + s * F::at_once, sizeof some);
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) into[i][c] = Products::add(columns[c], some, into[i][c]);
      }
    }
  };
  if constexpr (Products::words == 0) {
#pragma GCC unroll 1
    for (int64_t w = 0; w < count; w++) multiply_word(w, sums);
  } else {
#pragma GCC unroll 1
    for (int64_t w = 0; w < count; w += Products::words) {
      typename Products::sums some[M][C] = {};
#pragma GCC unroll 1
      for (int64_t i = 0; i < Products::words; i++) multiply_word(w + i, some);
#pragma GCC unroll 12
      for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[i][c] = add_halves((int_vec)some[i][c], 0x00010001, sums[i][c]);
    }
  }
}

// total += the numbers that the sums of a group stand for.
template <class F>
[[gnu::always_inline]] inline vec add_numbers(int_vec sum, float scale_of_x, int32_t excess, vec scale, vec zero, vec total) {
  vec numbers = as_floats(sum), factor = set1(scale_of_x);
  if (F::has_zeros) numbers = fma(zero, set1(-static_cast<float>(excess)), numbers);
  if (F::has_group_scales) factor *= scale;
  return fma(numbers, factor, total);
}

// The same for all sums of group g.
template <class F, int M, int C>
[[gnu::always_inline]] inline void add_group(const Tile& p, const CodesOfX<F>& x, int64_t g, vec (&totals)[M][C],
                                             const int_vec (&sums)[M][C]) {
  const int32_t* excess = x.excess + g * x.rows + p.t;
  const float* scales = x.scales + g * x.rows + p.t;
  vec scales_of_weight[C] = {}, zeros[C] = {};
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) {
    if (F::has_group_scales) scales_of_weight[c] = load(p.scales + g * kPanel + c * W);
    if (F::has_zeros) zeros[c] = load(p.zeros + g * kPanel + c * W);
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++)
      totals[i][c] = add_numbers<F>(sums[i][c], scales[i], excess[i], scales_of_weight[c], zeros[c], totals[i][c]);
}

// The use of totals after the last words of a row.
struct Last {
  vec scale = set1(1.0f), bias = set1(0.0f);

  template <class F>
  Last(const QuantizedArgs<F>& q, const Tile& p, int c, int count) {
    if (p.end < q.num_words) return;
    if (!F::has_group_scales) scale = load_first(static_cast<const float*>(q.a.scale) + p.n + c * W, count);
    if (q.a.bias) bias = load_first(q.a.bias + p.n + c * W, count);
  }
};

// M rows of x. Their results so far are in y between one chunk of words and the next. An output is the same operations
// in the same order in every tile, so the result of a token does not depend on its neighbours.
template <class F, int M, int C>
[[gnu::noinline]] inline void multiply_tile(const QuantizedArgs<F>& q, const Tile& p) {
  constexpr int64_t kGroupWords = F::group / F::codes;
  const QuantizedLinear& a = q.a;
  vec totals[M][C] = {};
  if (p.first > 0)
    p.each_vec<C>(a, [&](int c, int count) {
#pragma GCC unroll 12
      for (int i = 0; i < M; i++) totals[i][c] = load_first(p.y + i * p.y_stride + c * W, count);
    });
  for (int64_t first = p.first; first < p.end; first += kGroupWords) {
    const int64_t g = first / kGroupWords;
    const int32_t* excess = q.x.excess + g * q.x.rows + p.t;
    int_vec sums[M][C] = {};
    if (!F::has_zeros)
#pragma GCC unroll 12
      for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[i][c] -= excess[i];
    const int64_t end = min(first + kGroupWords, p.end);
    for (int64_t w = first; w < end; w += kBlock) multiply_words<F>(p, q.x, w, min(kBlock, end - w), sums);
    add_group<F>(p, q.x, g, totals, sums);
  }
  p.each_vec<C>(a, [&](int c, int count) {
    const Last last(q, p, c, count);
#pragma GCC unroll 12
    for (int i = 0; i < M; i++) store_first(p.y + i * p.y_stride + c * W, totals[i][c] * last.scale + last.bias, count);
  });
}

}  // namespace LLM_ISA
