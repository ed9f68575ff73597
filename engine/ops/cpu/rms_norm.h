// y[t, c] = x[t, c] / sqrt(mean(x[t, :]^2) + epsilon) * weight[c]
#pragma once
#include <cmath>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

// y may be x.
inline void norm_row(const float* x, const float* weight, float* y, int64_t cols, float epsilon) {
  vec squares = set1(0.0f);
  for_lanes(cols, [&](int64_t c, int n) {
    const vec v = load_n(x + c, n);
    squares = fma(v, v, squares);
  });
  const float mean = sum(squares) / static_cast<float>(cols);
  const vec factor = set1(1.0f / sqrtf(mean + epsilon));
  for_lanes(cols, [=](int64_t c, int n) {
    store_n(y + c, load_n(x + c, n) * factor * load_n(weight + c, n), n);
  });
}

inline void rms_norm(const LlmRmsNorm& a) {
  parallel_rows(a.T, a.H, [=](int64_t t) { norm_row(a.x + t * a.H, a.weight, a.y + t * a.H, a.H, a.epsilon); });
}

}  // namespace LLM_ISA
