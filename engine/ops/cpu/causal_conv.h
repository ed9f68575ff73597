// y[p, c] = silu(sum_k weight[c, k] * x[p - K + 1 + k, c]) over the positions p of each request
#pragma once
#include "parallel.h"
#include "state_lines.h"
#include "swiglu.h"

namespace LLM_ISA {

constexpr int64_t kHistory = 16;  // inputs that are kept of each channel: line p % kHistory is that of position p

// `head_dim` channels of one request.
inline void convolve(const LlmCausalConv& a, int64_t request, int64_t part) {
  const StateLines lines = state_of(a, request);
  const int64_t width = a.head_dim, begin = a.context_lens[request], start = a.query_starts[request];
  const int64_t end = begin + a.query_starts[request + 1] - start;
  const float* x = a.x + start * a.C + part * width;
  auto input = [&](int64_t position) {
    return position < begin ? lines.at(part * kHistory + position % kHistory) : x + (position - begin) * a.C;
  };
  auto* taps = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(a.K * width)));
  for (int64_t c = 0; c < width; c++)
    for (int64_t k = 0; k < a.K; k++) taps[k * width + c] = a.weight[(part * width + c) * a.K + k];
  for (int64_t p = begin; p < end; p++) {
    float* y = a.y + (start + p - begin) * a.C + part * width;
    const int64_t first = p < a.K - 1 ? a.K - 1 - p : 0;
    for_lanes(width, [&](int64_t c, int n) {
      vec total = set1(0.0f);
      for (int64_t k = first; k < a.K; k++)
        total = fma(load_n(input(p - a.K + 1 + k) + c, n), load_n(taps + k * width + c, n), total);
      store_n(y + c, swiglu(total, set1(1.0f)), n);
    });
  }
  for (int64_t p = end - min(end - begin, kHistory); p < end; p++)
    memcpy(lines.at(part * kHistory + p % kHistory), input(p), sizeof(float) * static_cast<size_t>(width));
}

inline void causal_conv(const LlmCausalConv& a) {
  const int64_t parts = a.C / a.head_dim;
  parallel_for(a.B * parts, 1, a.T * a.C * a.K, [=](int64_t i) { convolve(a, i / parts, i % parts); });
}

}  // namespace LLM_ISA
