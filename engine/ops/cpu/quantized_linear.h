// y[t, n] = sum_k x[t, k] * value(weight[n, k]) + bias[n] for weights of 8 and 4 bits
#pragma once
#include "catalogue.h"
#include "linear.h"
#include "parallel.h"
#include "quantized_registers.h"
#include "quantized_tile.h"
#include "swiglu.h"

namespace LLM_ISA {

constexpr int64_t kRowsOfPiece = 512;  // whose results stay in the L2 cache until they are complete

// Rows t .. t_end in tiles of nearly equal size.
template <class F, int C>
inline void multiply_tiles(const QuantizedArgs<F>& q, Tile p, int64_t t_end, TileRegisters& registers) {
  if (multiply_by_registers(q, p, t_end, registers)) return;
  constexpr int kRows = kSums / C;
  p.turns = (t_end - p.t + kRows - 1) / kRows;
  for (; p.turn < p.turns; p.turn++) {
    const int64_t left = p.turns - p.turn;
    const int64_t rows = (t_end - p.t + left - 1) / left;
    switch (rows) {
      case 1: multiply_tile<F, 1, C>(q, p); break;
      case 2: if constexpr (kRows >= 2) multiply_tile<F, 2, C>(q, p); break;
      case 3: if constexpr (kRows >= 3) multiply_tile<F, 3, C>(q, p); break;
      case 4: if constexpr (kRows >= 4) multiply_tile<F, 4, C>(q, p); break;
      case 5: if constexpr (kRows >= 5) multiply_tile<F, 5, C>(q, p); break;
      case 6: if constexpr (kRows >= 6) multiply_tile<F, 6, C>(q, p); break;
      case 7: if constexpr (kRows >= 7) multiply_tile<F, 7, C>(q, p); break;
      case 8: if constexpr (kRows >= 8) multiply_tile<F, 8, C>(q, p); break;
      case 9: if constexpr (kRows >= 9) multiply_tile<F, 9, C>(q, p); break;
      case 10: if constexpr (kRows >= 10) multiply_tile<F, 10, C>(q, p); break;
      case 11: if constexpr (kRows >= 11) multiply_tile<F, 11, C>(q, p); break;
      case 12: if constexpr (kRows >= 12) multiply_tile<F, 12, C>(q, p); break;
    }
    p.t += rows;
    p.y += rows * p.y_stride;
  }
}

// A panel, and the one that comes next. Its outputs of row t are written to y.
template <class F>
inline void multiply_panel(const QuantizedArgs<F>& q, int64_t panel, int64_t then, int64_t t, int64_t t_end, float* y,
                           int64_t y_stride, TileRegisters& registers) {
  const int64_t row_bytes = q.num_words * 4, n = panel * kPanel;
  const QuantizedLinear& a = q.a;
  const uint32_t* words = panel_of<uint32_t>(a, a.weight, F::codes == 8 ? row_bytes : a.width, panel, 1);
  const uint16_t *scales = nullptr, *zeros = nullptr;
  if (F::has_group_scales) scales = panel_of<uint16_t>(a, a.scale, row_bytes * 4 / F::group, panel, 2);
  if (F::has_zeros) zeros = panel_of<uint16_t>(a, a.zero, row_bytes * 4 / F::group, panel, 3);
  const uint32_t* after = a.is_packed ? words + (then - panel) * kPanel * q.num_words : words;
  for (int64_t first = 0; first < q.num_words; first += kWords) {
    const int64_t end = min(first + kWords, q.num_words);
    const uint32_t* next = end < q.num_words ? words + end * kPanel : after;
    const Tile all = {t, n, first, end, words, next, scales, zeros, y, y_stride};
    if (t_end - t <= kSums / kAllCols) {
      multiply_tiles<F, kAllCols>(q, all, t_end, registers);
      continue;
    }
    for (int64_t c = 0; c < kPanel && n + c < a.num_out; c += kCols * W)
      multiply_tiles<F, kCols>(q, all.from_output(c), t_end, registers);
  }
}

// A panel of gates, and the panel of the values that they gate.
template <class F>
inline void multiply_gated(const QuantizedArgs<F>& q, int64_t panel, int64_t then, int64_t t, int64_t t_end,
                           TileRegisters& registers) {
  const QuantizedLinear& a = q.a;
  const int64_t half = a.num_out / 2;
  auto* gates = static_cast<float*>(llm_scratch(4, sizeof(float) * static_cast<size_t>(2 * kPanel * (t_end - t))));
  float* ups = gates + kPanel * (t_end - t);
  multiply_panel(q, panel, panel + half / kPanel, t, t_end, gates, kPanel, registers);
  multiply_panel(q, panel + half / kPanel, then, t, t_end, ups, kPanel, registers);
  for (; t < t_end; t++)
    for (int64_t n = panel * kPanel, end = n + kPanel; n < end; n += W, gates += W, ups += W)
      store(a.y + t * half + n, swiglu(load(gates), load(ups)));
}

template <class F>
void quantized_linear(const QuantizedLinear& a) {
  const CodesOfX<F> x(a.rows, a.width);
  parallel_rows(a.rows, 2 * a.width, [&](int64_t t) { put_row(a.x + t * a.width, a.width, x, t); });

  const QuantizedArgs<F> q = {a, x, (F::codes == 8 ? round_up(a.width, 128) : a.width + 3) / F::codes};
  const int64_t num_panels = a.is_gated ? a.num_out / kGatedOutputs : (a.num_out + kPanel - 1) / kPanel;
  const int64_t wanted = 4 * llm_num_threads();
  const int64_t least = (a.rows + kRowsOfPiece - 1) / kRowsOfPiece;
  const int64_t more = num_panels >= wanted ? 1 : min(wanted / num_panels + 1, a.rows / 64 + 1);
  const int64_t cuts = least > more ? least : more, count = num_panels * (a.rows > 0 ? cuts : 0);
  const int threads = count <= 1 || a.rows * a.num_out * a.width / 8 < kSerialWork ? 1 : llm_num_threads();
  int64_t taken = 0;
  run_on_threads(threads, [&] {
    TileRegisters registers;
    take_pieces(&taken, count, threads, true, [&](int64_t i, int64_t next) {
      const int64_t cut = i / num_panels, t = cut * a.rows / cuts, t_end = (cut + 1) * a.rows / cuts;
      const int64_t panel = i % num_panels, then = min(next, count - 1) % num_panels;
      if (a.is_gated)
        multiply_gated(q, panel, then, t, t_end, registers);
      else
        multiply_panel(q, panel, then, t, t_end, a.y + t * a.num_out + panel * kPanel, a.num_out, registers);
    });
  });
}

template <class Args>
const void* zero_of(const Args&) { return nullptr; }
inline const void* zero_of(const LlmLinearInt4& a) { return a.zero; }
inline const void* zero_of(const LlmGatedLinearInt4& a) { return a.zero; }
template <class Args>
int64_t group_of(const Args&) {
  return 0;
}
inline int64_t group_of(const LlmLinearInt4& a) { return round_up(a.K, 128) / a.G; }
inline int64_t group_of(const LlmGatedLinearInt4& a) { return round_up(a.K, 128) / a.G; }

// Write the product of a layer, or of a layer with its swiglu, to y.
template <class Args>
QuantizedLinear product_at(const Args& a, float* y, bool is_gated = false) {
  const bool is_packed = a.weight_is_packed != 0;
  return {a.x, a.weight, a.scale, zero_of(a), a.bias, y, a.T, a.K, a.N, group_of(a), is_packed, is_gated};
}

inline void int4_linear(const QuantizedLinear& a) {
  if (a.group == 32)
    a.zero ? quantized_linear<Int4<true, 32>>(a) : quantized_linear<Int4<false, 32>>(a);
  else
    a.zero ? quantized_linear<Int4<true, 64>>(a) : quantized_linear<Int4<false, 64>>(a);
}

inline void linear_int8(const LlmLinearInt8& a) { quantized_linear<Int8>(product_at(a, a.y)); }
inline void linear_a8w8(const LlmLinearA8w8& a) { quantized_linear<A8w8>(product_at(a, a.y)); }
inline void linear_int4(const LlmLinearInt4& a) { int4_linear(product_at(a, a.y)); }

}  // namespace LLM_ISA
