// y[t, n] = sum_k x[t, k] * value(weight[n, k]) + bias[n] for weights of 8 and 4 bits
#pragma once
#include "linear.h"

namespace LLM_ISA {

inline void linear_int8(const LlmQuantizedLinear& a) {
  // A byte takes five instructions to become bf16: for more than one tile's rows that is done once.
  constexpr int64_t kDirectRows = sizeof(bf16_x) == 2 ? kTileRows : kAnyRows;
  multiply(LinearArgs<bf16_x>{rounded_rows(a.x, a.rows, a.width), a.rows, a.width, a.num_out,
                              static_cast<const float*>(a.scale), a.bias, a.y},
           Stored<bf16_x, int8_t, kDirectRows>{static_cast<const int8_t*>(a.weight), a.width});
}

inline void linear_int4(const LlmQuantizedLinear& a) {
  const int64_t aligned = round_up(a.width, kCodesAligned);
  auto* ordered = static_cast<bf16_x*>(llm_scratch(0, sizeof(bf16_x) * static_cast<size_t>(a.rows * aligned)));
  parallel_rows(a.rows, 2 * aligned, [=](int64_t t) {
    auto* rounded = static_cast<bf16_x*>(llm_scratch(1, sizeof(bf16_x) * static_cast<size_t>(a.width)));
    round_row(a.x + t * a.width, rounded, a.width);
    put_in_order_of_codes(rounded, ordered + t * aligned, a.width, aligned);
  });
  multiply(LinearArgs<bf16_x>{ordered, a.rows, aligned, a.num_out, nullptr, a.bias, a.y},
           Packed{static_cast<const uint8_t*>(a.weight), static_cast<const uint16_t*>(a.scale),
                  static_cast<const uint16_t*>(a.zero), aligned});
}

// x is quantized too, a row at a time, and whole numbers are multiplied.
inline void linear_a8w8(const LlmQuantizedLinear& a) {
  const int64_t size = chunk_size(a.width), num_chunks = num_chunks_of(a.width);
  const int64_t elements = round_up(a.rows * a.width, 64);
  auto* rows = static_cast<byte_x*>(llm_scratch(
      0, sizeof(byte_x) * static_cast<size_t>(elements) + 4 * static_cast<size_t>(a.rows * (1 + num_chunks))));
  auto* x_scale = reinterpret_cast<float*>(rows + elements);
  auto* excess = reinterpret_cast<int32_t*>(x_scale + a.rows);
  parallel_rows(a.rows, 2 * a.width, [=](int64_t t) {
    byte_x* row = rows + t * a.width;
    x_scale[t] = quantize_row(a.x + t * a.width, row, a.width);
    for (int64_t c = 0; c < num_chunks; c++) {
      int32_t total = 0;
      for (int64_t k = c * size; k < min(a.width, (c + 1) * size); k++) total += row[k];
      excess[t * num_chunks + c] = total * kOffset;
    }
  });
  multiply(LinearArgs<byte_x>{rows, a.rows, a.width, a.num_out, static_cast<const float*>(a.scale), a.bias, a.y,
                              x_scale, excess},
           Stored<byte_x, int8_t>{static_cast<const int8_t*>(a.weight), a.width});
}

}  // namespace LLM_ISA
