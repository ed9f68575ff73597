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

inline void head_linear(const LlmHeadLinear& a) {
  if (a.weight_type == kBf16)
    multiply_heads<bf16_x, uint16_t>(a, [](const float* from, bf16_x* to, int64_t n) { round_row(from, to, n); });
  else
    multiply_heads<float, float>(a, [](const float* from, float* to, int64_t n) { store_row(to, from, n); });
}

}  // namespace LLM_ISA
