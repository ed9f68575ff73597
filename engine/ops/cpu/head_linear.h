// y[t, h, n] = sum_k x[t, h, k] * weight[h, n, k], a small product for each head
#pragma once
#include "attention_cache.h"
#include "linear_bf16.h"

namespace LLM_ISA {

// X: the type in which x is multiplied; put(from, to, count) converts K elements of a head.
template <class X, class T, class Put>
void multiply_heads(const LlmHeadLinear& a, Put put) {
  constexpr int64_t kRows = 64, kOutputs = 128;  // of a task
  const auto size = static_cast<size_t>(a.num_heads * a.T * a.K);
  auto* x = static_cast<X*>(llm_scratch(0, sizeof(X) * size));  // [num_heads, T, K]
  parallel_rows(a.num_heads * a.T, a.K, [=](int64_t i) {
    put(a.x + (i % a.T * a.num_heads + i / a.T) * a.stride, x + i * a.K, a.K);
  });
  const int64_t row_tasks = (a.T + kRows - 1) / kRows, tasks = (a.N + kOutputs - 1) / kOutputs;
  const auto* weight = static_cast<const T*>(a.weight);
  parallel_for(a.num_heads * tasks * row_tasks, 1, a.T * a.num_heads * a.N * a.K / 8, [=](int64_t i) {
    const int64_t head = i / row_tasks / tasks, n = i / row_tasks % tasks * kOutputs, t = i % row_tasks * kRows;
    const LinearArgs<X> args{x + head * a.T * a.K, a.T, a.K, a.num_heads * a.N, nullptr, a.y + head * a.N};
    const Stored<X, T> of_head{weight + head * a.N * a.K, a.K};
    multiply(args, of_head, Panel{t, min(a.T, t + kRows), n, min(a.N, n + kOutputs), nullptr, 0});
  });
}

#if defined(LLM_BF16_PANELS) && !defined(__AVX512BF16__)
// One row times a pair of panels: the operations of multiply_tile, on panels that are not written down.
inline void multiply_row(const PackedArgs& a, int64_t pair) {
  const int64_t size = chunk_size(a.width), num_chunks = num_chunks_of(a.width);
  float sums[2 * W] = {};
  for (int64_t c = 0; c < num_chunks; c++) {
    vec parts[2] = {};
    const int64_t end = c + 1 < num_chunks ? (c + 1) * size : a.stride();
    for (int64_t k = c * size; k < end; k += 2 * W)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        vec square[W];
        read_square(a.weight, a.first_of(pair, v), k, a.width, a.num_out, square);
        const auto pairs = static_cast<int>(min(W, (end - k) / 2));
#pragma GCC unroll 8
        for (int i = 0; i < W; i++) {
          if (i >= pairs) break;
          const auto columns = (int_vec)square[i];
          parts[v] = fma(set1(a.x[k + 2 * i]), (vec)(columns << 16), parts[v]);
          parts[v] = fma(set1(a.x[k + 2 * i + 1]), (vec)(columns & static_cast<int32_t>(0xffff0000)), parts[v]);
        }
      }
    for (int v = 0; v < 2; v++) store(sums + v * W, c ? load(sums + v * W) + parts[v] : parts[v]);
  }
  write_outputs(a, pair, 0, 1, sums);
}

// Without a product of pairs, panels are worth packing here: then no sums have to be added up across lanes.
inline void multiply_bf16_heads(const LlmHeadLinear& a) {
  constexpr int64_t kRows = 64, kPairs = 8;  // of a task: rows, pairs of panels
  const int64_t stride = packed_width(a.K);
  auto* x = static_cast<bf16_x*>(llm_scratch(0, sizeof(bf16_x) * static_cast<size_t>(a.num_heads * a.T * stride)));
  parallel_rows(a.num_heads * a.T, a.K, [=](int64_t i) {
    round_row(a.x + (i % a.T * a.num_heads + i / a.T) * a.stride, x + i * stride, a.K);
    for (int64_t k = a.K; k < stride; k++) x[i * stride + k] = 0;
  });
  const auto* weight = static_cast<const uint16_t*>(a.weight);
  const int64_t row_tasks = (a.T + kRows - 1) / kRows, tasks = (a.N + 2 * W * kPairs - 1) / (2 * W * kPairs);
  parallel_for(a.num_heads * tasks * row_tasks, 1, a.T * a.num_heads * a.N * a.K / 8, [=](int64_t i) {
    const int64_t head = i / row_tasks / tasks, task = i / row_tasks % tasks, rows = i % row_tasks;
    const PackedArgs args{x + head * a.T * stride, weight + head * a.N * a.K, a.T, a.K, a.N, nullptr,
                          a.y + head * a.N, a.num_heads * a.N, false, false};
    const int64_t first = rows * args.num_tiles() / row_tasks, end = (rows + 1) * args.num_tiles() / row_tasks;
    TileRegisters registers;
    for (int64_t pair = task * kPairs; pair < min(args.num_pairs(), (task + 1) * kPairs); pair++)
      a.T == 1 ? multiply_row(args, pair) : multiply_pair(args, pair, pair, first, end, registers);
  });
}
#else
inline void multiply_bf16_heads(const LlmHeadLinear& a) {
  multiply_heads<bf16_x, uint16_t>(a, [](const float* from, bf16_x* to, int64_t n) { round_row(from, to, n); });
}
#endif

inline void head_linear(const LlmHeadLinear& a) {
  if (a.weight_type == kBf16)
    multiply_bf16_heads(a);
  else
    multiply_heads<float, float>(a, [](const float* from, float* to, int64_t n) { store_row(to, from, n); });
}

}  // namespace LLM_ISA
