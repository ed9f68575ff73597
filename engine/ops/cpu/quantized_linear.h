// y[t, n] = sum_k x[t, k] * value(weight[n, k]) + bias[n] for weights of 8 and 4 bits
#pragma once
#include "codes.h"
#include "kernels.h"
#include "linear.h"
#include "packed_rows.h"
#include "parallel.h"
#include "swiglu.h"

namespace LLM_ISA {

// A tile: kCols vectors of outputs for some rows of x, their sums in registers.
#ifdef __AVX512F__
constexpr int kCols = 2, kSums = 24;
#else
constexpr int kCols = 2, kSums = 8;
#endif
constexpr int64_t kTileOutputs = kCols * W;
constexpr int64_t kWords = 256;        // of each output at a time: those of a panel stay in the L1 cache
constexpr int64_t kBlock = 8;          // words, in which what comes next is asked for from one place
constexpr int64_t kAhead = 32;         // words between asking and reading, where a panel is read once
constexpr int64_t kRowsOfPiece = 512;  // whose results stay in the L2 cache until they are complete

template <class F>
struct QuantizedArgs {
  const LlmQuantizedLinear& a;
  const CodesOfX<F>& x;
  int64_t num_words;  // of a row of the weight
};

// Outputs n .. n + kTileOutputs of the rows from t on, words first .. end of them, then those at `next`. The pointers are to
// what belongs to output n, y to that of row t.
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

  template <class Body>
  void each_vec(const LlmQuantizedLinear& a, Body body) const {  // with the number of its outputs that there are
#pragma GCC unroll 4
    for (int c = 0; c < kCols; c++)
      body(c, static_cast<int>(a.num_out - n > c * W ? min(W, a.num_out - n - c * W) : 0));
  }
};

// sums += the products of `count` words from `first` on.
template <class F, int M>
[[gnu::always_inline]] inline void multiply_words(const Tile& p, const CodesOfX<F>& x, int64_t first, int64_t count,
                                                  int_vec (&sums)[M][kCols]) {
  const code_x* row = x.row(p.t) + first * F::codes;
  const uint32_t *words = p.words + first * kPanel, *ahead = p.ahead(first);
#pragma GCC unroll 1
  for (int64_t w = 0; w < count; w++) {
#pragma GCC unroll 4
    for (int c = 0; c < kCols; c++) {
      const uint32_t* wanted = ahead + w * kPanel + c * W;
      p.turns == 1 ? prefetch_once(wanted) : prefetch(wanted);
    }
#pragma GCC unroll 4
    for (int s = 0; s < F::steps; s++) {
      int_vec columns[kCols];
#pragma GCC unroll 4
      for (int c = 0; c < kCols; c++) {
        __builtin_memcpy(&columns[c], words + w * kPanel + c * W, sizeof(int_vec));
        columns[c] = F::take(columns[c], s);
      }
#pragma GCC unroll 12
      for (int i = 0; i < M; i++) {
        int32_t some;
        __builtin_memcpy(&some, row + i * x.width + w * F::codes + s * kAtOnce, sizeof some);
#pragma GCC unroll 4
        for (int c = 0; c < kCols; c++) sums[i][c] = add_products(columns[c], some, sums[i][c]);
      }
    }
  }
}

// totals += the numbers that the sums of group g stand for.
template <class F, int M>
[[gnu::always_inline]] inline void add_group(const Tile& p, const CodesOfX<F>& x, int64_t g, vec (&totals)[M][kCols],
                                             const int_vec (&sums)[M][kCols]) {
  const int32_t* excess = x.excess + g * x.rows + p.t;
  const float* scales = x.scales + g * x.rows + p.t;
  vec scales_of_weight[kCols], zeros[kCols];
#pragma GCC unroll 4
  for (int c = 0; c < kCols; c++) {
    if (F::has_group_scales) scales_of_weight[c] = load(p.scales + g * kPanel + c * W);
    if (F::has_zeros) zeros[c] = load(p.zeros + g * kPanel + c * W);
  }
#pragma GCC unroll 12
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int c = 0; c < kCols; c++) {
      vec total = as_floats(sums[i][c]), scale = set1(scales[i]);
      if (F::has_zeros) total = fma(zeros[c], set1(-static_cast<float>(excess[i])), total);
      if (F::has_group_scales) scale *= scales_of_weight[c];
      totals[i][c] = fma(total, scale, totals[i][c]);
    }
}

// M rows of x. What they have come to is in y from one chunk of words to the next. An output is the same operations in the
// same order in every tile, so a token's result does not depend on its neighbours.
template <class F, int M>
[[gnu::noinline]] inline void multiply_tile(const QuantizedArgs<F>& q, const Tile& p) {
  constexpr int64_t kGroupWords = F::group / F::codes;
  const LlmQuantizedLinear& a = q.a;
  const bool is_last = p.end == q.num_words;
  vec totals[M][kCols] = {};
  if (p.first > 0)
    p.each_vec(a, [&](int c, int count) {
#pragma GCC unroll 12
      for (int i = 0; i < M; i++) totals[i][c] = load_first(p.y + i * p.y_stride + c * W, count);
    });
  for (int64_t first = p.first; first < p.end; first += kGroupWords) {
    const int64_t g = first / kGroupWords;
    const int32_t* excess = q.x.excess + g * q.x.rows + p.t;
    int_vec sums[M][kCols] = {};
    if (!F::has_zeros)
#pragma GCC unroll 12
      for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int c = 0; c < kCols; c++) sums[i][c] -= excess[i];
    for (int64_t w = first; w < min(first + kGroupWords, p.end); w += kBlock)
      multiply_words<F, M>(p, q.x, w, min(kBlock, p.end - w), sums);
    add_group<F, M>(p, q.x, g, totals, sums);
  }
  p.each_vec(a, [&](int c, int count) {
    vec scale = set1(1.0f), bias = set1(0.0f);
    if (is_last && !F::has_group_scales) scale = load_first(static_cast<const float*>(a.scale) + p.n + c * W, count);
    if (is_last && a.bias) bias = load_first(a.bias + p.n + c * W, count);
#pragma GCC unroll 12
    for (int i = 0; i < M; i++) store_first(p.y + i * p.y_stride + c * W, totals[i][c] * scale + bias, count);
  });
}

// Rows t .. t_end in tiles that are as even as can be.
template <class F>
inline void multiply_tiles(const QuantizedArgs<F>& q, Tile p, int64_t t_end) {
  constexpr int kRows = kSums / kCols;
  p.turns = (t_end - p.t + kRows - 1) / kRows;
  for (; p.turn < p.turns; p.turn++) {
    const int64_t left = p.turns - p.turn;
    const int64_t rows = (t_end - p.t + left - 1) / left;
    switch (rows) {
      case 1: multiply_tile<F, 1>(q, p); break;
      case 2: multiply_tile<F, 2>(q, p); break;
      case 3: multiply_tile<F, 3>(q, p); break;
      case 4: multiply_tile<F, 4>(q, p); break;
      case 5: if constexpr (kRows >= 5) multiply_tile<F, 5>(q, p); break;
      case 6: if constexpr (kRows >= 6) multiply_tile<F, 6>(q, p); break;
      case 7: if constexpr (kRows >= 7) multiply_tile<F, 7>(q, p); break;
      case 8: if constexpr (kRows >= 8) multiply_tile<F, 8>(q, p); break;
      case 9: if constexpr (kRows >= 9) multiply_tile<F, 9>(q, p); break;
      case 10: if constexpr (kRows >= 10) multiply_tile<F, 10>(q, p); break;
      case 11: if constexpr (kRows >= 11) multiply_tile<F, 11>(q, p); break;
      case 12: if constexpr (kRows >= 12) multiply_tile<F, 12>(q, p); break;
    }
    p.t += rows;
    p.y += rows * p.y_stride;
  }
}

// A panel, and which comes next. Its outputs of row t are put at y.
template <class F>
inline void multiply_panel(const QuantizedArgs<F>& q, int64_t panel, int64_t then, int64_t t, int64_t t_end, float* y,
                           int64_t y_stride) {
  const int64_t row_bytes = q.num_words * 4, n = panel * kPanel;
  const LlmQuantizedLinear& a = q.a;
  const uint32_t* words = panel_of<uint32_t>(a, a.weight, F::codes == 8 ? row_bytes : a.width, panel, 1);
  const uint16_t *scales = nullptr, *zeros = nullptr;
  if (F::has_group_scales) scales = panel_of<uint16_t>(a, a.scale, row_bytes / 16, panel, 2);
  if (F::has_zeros) zeros = panel_of<uint16_t>(a, a.zero, row_bytes / 16, panel, 3);
  const uint32_t* after = a.is_packed ? words + (then - panel) * kPanel * q.num_words : words;
  for (int64_t first = 0; first < q.num_words; first += kWords) {
    const int64_t end = min(first + kWords, q.num_words);
    const uint32_t* next = end < q.num_words ? words + end * kPanel : after;
    for (int64_t c = 0; c < kPanel && n + c < a.num_out; c += kTileOutputs)
      multiply_tiles(q, {t, n + c, first, end, words + c, next + c, scales + c, zeros + c, y + c, y_stride}, t_end);
  }
}

// A panel of gates, and the one of what they are multiplied with.
template <class F>
inline void multiply_gated(const QuantizedArgs<F>& q, int64_t panel, int64_t then, int64_t t, int64_t t_end) {
  const LlmQuantizedLinear& a = q.a;
  const int64_t half = a.num_out / 2;
  auto* gates = static_cast<float*>(llm_scratch(4, sizeof(float) * static_cast<size_t>(2 * kPanel * (t_end - t))));
  float* ups = gates + kPanel * (t_end - t);
  multiply_panel(q, panel, panel + half / kPanel, t, t_end, gates, kPanel);
  multiply_panel(q, panel + half / kPanel, then, t, t_end, ups, kPanel);
  for (; t < t_end; t++)
    for (int64_t n = panel * kPanel, end = n + kPanel; n < end; n += W, gates += W, ups += W)
      store(a.y + t * half + n, swiglu(load(gates), load(ups)));
}

template <class F>
void quantized_linear(const LlmQuantizedLinear& a) {
  const CodesOfX<F> x(a.rows, a.width);
  parallel_rows(a.rows, 2 * a.width, [&](int64_t t) { put_row(a.x + t * a.width, a.width, x, t); });

  const QuantizedArgs<F> q = {a, x, (F::codes == 8 ? round_up(a.width, 128) : a.width + 3) / F::codes};
  static_assert(kGatedOutputs == 2 * kPanel);
  const int64_t num_panels = a.is_gated ? a.num_out / kGatedOutputs : (a.num_out + kPanel - 1) / kPanel;
  const int64_t wanted = 4 * llm_num_threads();
  const int64_t least = (a.rows + kRowsOfPiece - 1) / kRowsOfPiece;
  const int64_t more = num_panels >= wanted ? 1 : min(wanted / num_panels + 1, a.rows / 64 + 1);
  const int64_t cuts = least > more ? least : more, count = num_panels * (a.rows > 0 ? cuts : 0);
  const int threads = count <= 1 || a.rows * a.num_out * a.width / 8 < kSerialWork ? 1 : llm_num_threads();
  int64_t taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (Pieces mine = take_pieces(&taken, count, threads), then; mine.first < count; mine = then) {
    then = take_pieces(&taken, count, threads);  // so that it is known what comes after each
    for (int64_t i = mine.first; i < mine.end; i++) {
      const int64_t cut = i / num_panels, t = cut * a.rows / cuts, t_end = (cut + 1) * a.rows / cuts;
      const int64_t panel = i % num_panels, next = min(i + 1 < mine.end ? i + 1 : then.first, count - 1) % num_panels;
      if (a.is_gated)
        multiply_gated(q, panel, next, t, t_end);
      else
        multiply_panel(q, panel, next, t, t_end, a.y + t * a.num_out + panel * kPanel, a.num_out);
    }
  }
}

inline void linear_int8(const LlmQuantizedLinear& a) { quantized_linear<Int8>(a); }
inline void linear_a8w8(const LlmQuantizedLinear& a) { quantized_linear<A8w8>(a); }
inline void linear_int4(const LlmQuantizedLinear& a) {
  a.zero ? quantized_linear<Int4<true>>(a) : quantized_linear<Int4<false>>(a);
}

}  // namespace LLM_ISA
