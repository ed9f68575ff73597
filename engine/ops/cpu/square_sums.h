// y[t, 0] = sum of the squares of the query part of row t, y[t, 1] of its key part
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void square_sums(const LlmSquareSums& a) {
  const int64_t sizes[2] = {a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim};
  const int64_t width = sizes[0] + 2 * sizes[1];
  parallel_rows(a.T, width, [=](int64_t t) {
    const float* part = a.qkv + t * width;
    for (int p = 0; p < 2; p++) {
      vec squares = set1(0.0f);
      for_lanes(sizes[p], [&](int64_t c, int n) {
        const vec v = load_n(part + c, n);
        squares = fma(v, v, squares);
      });
      a.y[t * 2 + p] = sum(squares);
      part += sizes[p];
    }
  });
}

}  // namespace LLM_ISA
