// y[t, :] = sum_j weights[t, j] * table[rows[t, j], :]
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void interpolate_rows(const LlmInterpolateRows& a) {
  parallel_rows(a.T, a.num_rows * a.H, [=](int64_t t) {
    const int32_t* rows = a.rows + t * a.num_rows;
    const float* weights = a.weights + t * a.num_rows;
    for_lanes(a.H, [=](int64_t c, int n) {
      vec total = set1(0.0f);
      for (int64_t j = 0; j < a.num_rows; j++)
        total = fma(load_n(a.table + rows[j] * a.H + c, n), set1(weights[j]), total);
      store_n(a.y + t * a.H + c, total, n);
    });
  });
}

}  // namespace LLM_ISA
