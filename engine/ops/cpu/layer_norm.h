// y[t, c] = (x[t, c] - mean(x[t, :])) / sqrt(mean((x[t, :] - mean(x[t, :]))^2) + epsilon) * weight[c] + bias[c]
#pragma once
#include <cmath>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void layer_norm(const LlmLayerNorm& a) {
  parallel_rows(a.T, 2 * a.H, [=](int64_t t) {
    const float *x = a.x + t * a.H, size = static_cast<float>(a.H);
    float* y = a.y + t * a.H;
    vec total = set1(0.0f), squares = set1(0.0f);
    for_lanes(a.H, [&](int64_t c, int n) { total = total + load_n(x + c, n); });
    const vec mean = set1(sum(total) / size);
    for_lanes(a.H, [=](int64_t c, int n) { store_n(y + c, load_n(x + c, n) - mean, n); });
    for_lanes(a.H, [&](int64_t c, int n) { squares = fma(load_n(y + c, n), load_n(y + c, n), squares); });
    const vec factor = set1(1.0f / sqrtf(sum(squares) / size + a.epsilon));
    for_lanes(a.H, [=](int64_t c, int n) {
      const vec bias = a.bias ? load_n(a.bias + c, n) : set1(0.0f);
      store_n(y + c, load_n(y + c, n) * factor * load_n(a.weight + c, n) + bias, n);
    });
  });
}

}  // namespace LLM_ISA
