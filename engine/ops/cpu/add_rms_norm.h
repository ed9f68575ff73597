// residual += x; y = rms_norm(residual)
#pragma once
#include "rms_norm.h"

namespace LLM_ISA {

inline void add_rms_norm(const float* x, float* residual, const float* weight, float* y, int64_t rows,
                         int64_t cols, float epsilon) {
  parallel_rows(rows, cols, [=](int64_t t) {
    const float* from = x + t * cols;
    float* into = residual + t * cols;
    for_lanes(cols,
              [=](int64_t c, int n) { store_n(into + c, load_n(into + c, n) + load_n(from + c, n), n); });
    norm_row(into, weight, y + t * cols, cols, epsilon);
  });
}

}  // namespace LLM_ISA
