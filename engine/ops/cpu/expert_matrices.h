// How the rows of experts are put, and multiplied with their matrices, in each format. The products are those of `linear`.
#pragma once
#include "expert_rows.h"
#include "linear_bf16.h"
#include "quantized_linear.h"

namespace LLM_ISA {

// What the ops of experts have in common. `bias`: [num_experts, rows], or null.
struct ExpertWeights {
  const void *weight, *scale, *zero;
  const float* bias;
  bool is_packed;
  int64_t group;  // codes that share a scale, where there are two a byte
};

// Rows of float32, or of bf16 where there is no product of pairs.
template <class X, class T>
struct PlainMatrices : ExpertStack {
  static constexpr int64_t kOutputs = 32, kMostRows = 256;
  static constexpr bool kIsReadInPairs = true;
  const ExpertWeights& w;
  X* x;

  PlainMatrices(const ExpertWeights& w, int64_t num_rows, int64_t num_matrices, int64_t rows_of_expert, int64_t width, bool)
      : ExpertStack(num_matrices, rows_of_expert, width, kOutputs, false), w(w),
        x(static_cast<X*>(llm_scratch(0, sizeof(X) * static_cast<size_t>(num_rows * width)))) {}

  void put(const float* from, int64_t row) const {
    if constexpr (sizeof(T) == 2)
      round_row(from, x + row * width, width);
    else
      for_lanes(width, [&](int64_t k, int n) { store_n(x + row * width + k, load_n(from + k, n), n); });
  }
  void copy(int64_t from, int64_t to) const {
    __builtin_memcpy(x + to * width, x + from * width, sizeof(X) * static_cast<size_t>(width));
  }
  void multiply_piece(const ExpertPiece& p, float* products, TileRegisters&) const {
    const int64_t rows = p.block.end - p.block.first;
    for (int v = 0; v < 2 && has(p.pair, v); v++) {
      const int64_t n = matrix(p.block.expert, p.pair, v) * num_out + first_of(p.pair, v);
      const float* bias = w.bias ? w.bias + n : nullptr;
      const Stored<X, T> weight = {static_cast<const T*>(w.weight) + n * width, width};
      const LinearArgs<X> args = {x + p.block.first * width, rows, width, 2 * kOutputs, bias, products + v * kOutputs};
      multiply(args, weight, Panel{0, rows, 0, count_of(p.pair, v), nullptr, 0});
    }
  }
};

#ifdef LLM_BF16_PANELS
struct Bf16Matrices : ExpertStack {
  static constexpr int64_t kOutputs = W, kMostRows = 256;
  static constexpr bool kIsReadInPairs = true;  // the kernel reads both panels of a pair at once
  const ExpertWeights& w;
  int64_t stride;
  bf16_x* x;

  Bf16Matrices(const ExpertWeights& w, int64_t num_rows, int64_t num_matrices, int64_t rows_of_expert, int64_t width, bool)
      : ExpertStack(num_matrices, rows_of_expert, width, kOutputs, false), w(w), stride(packed_width(width)),
        x(static_cast<bf16_x*>(llm_scratch(0, sizeof(bf16_x) * static_cast<size_t>(num_rows * stride)))) {}

  void put(const float* from, int64_t row) const {
    round_row(from, x + row * stride, width);
    for (int64_t k = width; k < stride; k++) x[row * stride + k] = 0;
  }
  void copy(int64_t from, int64_t to) const {
    __builtin_memcpy(x + to * stride, x + from * stride, sizeof(bf16_x) * static_cast<size_t>(stride));
  }
  const uint16_t* panel_at(int64_t expert, int64_t pair, int v) const {
    const auto* weight = static_cast<const uint16_t*>(w.weight);
    const int of = has(pair, v) ? v : 0;  // twice the same: the second is not read
    if (w.is_packed) return weight + (expert * panels_of_expert() + place(pair, of)) * kOutputs * stride;
    auto* panels = static_cast<uint16_t*>(llm_scratch(3, sizeof(uint16_t) * 2 * static_cast<size_t>(kOutputs * stride)));
    pack_panel(weight + matrix(expert, pair, of) * num_out * width, panels + v * kOutputs * stride, first_of(pair, of), width,
               num_out);
    return panels + v * kOutputs * stride;
  }
  void multiply_piece(const ExpertPiece& p, float* products, TileRegisters& registers) const {
    const int64_t rows = p.block.end - p.block.first;
    PanelPair panels = {};
    for (int v = 0; v < 2; v++) {
      panels.panels[v] = panel_at(p.block.expert, p.pair, v);
      panels.next[v] = w.is_packed ? panel_at(p.next_expert, p.next_pair, v) : panels.panels[v];
    }
    const PackedArgs args = {x + p.block.first * stride, nullptr, rows, width, num_out, nullptr, nullptr, 0, true, false};
    multiply_pair(args, panels, 0, args.num_tiles(), products, registers);
    if (!w.bias) return;
    for (int v = 0; v < 2; v++) {
      const int count = static_cast<int>(count_of(p.pair, v));
      if (!count) continue;
      const vec bias = load_n(w.bias + matrix(p.block.expert, p.pair, v) * num_out + first_of(p.pair, v), count);
      for (float *y = products + v * W, *end = y + rows * 2 * W; y < end; y += 2 * W) store(y, load(y) + bias);
    }
  }
};
#else
using Bf16Matrices = PlainMatrices<bf16_x, uint16_t>;
#endif

template <class F>
struct QuantizedMatrices : ExpertStack {
  static constexpr int64_t kOutputs = kPanel, kMostRows = kRowsOfPiece;
  static constexpr bool kIsReadInPairs = false;
  const ExpertWeights& w;
  CodesOfX<F> x;
  int64_t num_words;

  QuantizedMatrices(const ExpertWeights& w, int64_t num_rows, int64_t num_matrices, int64_t rows_of_expert, int64_t width,
                    bool is_end_to_end)
      : ExpertStack(num_matrices, rows_of_expert, width, kOutputs, is_end_to_end), w(w), x(num_rows, width),
        num_words((F::codes == 8 ? round_up(width, 128) : width + 3) / F::codes) {}

  void put(const float* from, int64_t row) const { put_row(from, width, x, row); }
  void copy(int64_t from, int64_t to) const {
    __builtin_memcpy(x.row(to), x.row(from), sizeof(*x.codes) * static_cast<size_t>(x.width));
    for (int64_t g = 0; g < x.groups; g++) {
      x.scales[g * x.rows + to] = x.scales[g * x.rows + from];
      x.excess[g * x.rows + to] = x.excess[g * x.rows + from];
    }
  }
  // One matrix, as `linear` has it.
  QuantizedLinear linear_of(int64_t index) const {
    const int64_t rows = w.is_packed ? num_panels() * kPanel : num_out, row_bytes = num_words * 4;
    const int64_t bytes = rows * (w.is_packed || F::codes == 8 ? row_bytes : width);
    const int64_t scale_bytes = F::has_group_scales ? rows * row_bytes * 4 / F::group : num_out * 4;
    auto at = [&](const void* all, int64_t size) { return all ? static_cast<const char*>(all) + index * size : nullptr; };
    const float* bias = w.bias ? w.bias + index * num_out : nullptr;
    return {nullptr, at(w.weight, bytes), at(w.scale, scale_bytes), at(w.zero, scale_bytes), bias, nullptr,
            x.rows, width, num_out, w.group, w.is_packed, false};
  }
  void multiply_piece(const ExpertPiece& p, float* products, TileRegisters& registers) const {
    for (int v = 0; v < 2 && has(p.pair, v); v++) {
      const int64_t index = matrix(p.block.expert, p.pair, v);
      const QuantizedLinear one = linear_of(index);
      const bool is_last = v == 1 || !has(p.pair, 1);
      const int64_t then = is_last ? p.next_expert * panels_of_expert() + place(p.next_pair, 0)
                                   : p.block.expert * panels_of_expert() + place(p.pair, 1);
      multiply_panel(QuantizedArgs<F>{one, x, num_words}, panel(p.pair, v), then - index * num_panels(), p.block.first,
                     p.block.end, products + v * kPanel, 2 * kPanel, registers);
    }
  }
};

}  // namespace LLM_ISA
