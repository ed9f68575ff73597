// y = qkv, with its query part and its key part normalized by the sums of squares over all ranks.
#pragma once
#include <cmath>
#include <cstring>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void wide_norm(const LlmWideNorm& a) {
  const int64_t sizes[2] = {a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim};
  const int64_t counts[2] = {a.q_size, a.k_size}, width = sizes[0] + 2 * sizes[1];
  const float* weights[2] = {a.q_weight, a.k_weight};
  parallel_rows(a.T, width, [=](int64_t t) {
    int64_t at = t * width;
    for (int p = 0; p < 2; p++) {
      const float *x = a.qkv + at, *weight = weights[p];
      float* y = a.y + at;
      const vec factor = set1(1.0f / sqrtf(a.sums[t * 2 + p] / static_cast<float>(counts[p]) + a.epsilon));
      for_lanes(sizes[p], [=](int64_t c, int n) {
        store_n(y + c, load_n(x + c, n) * factor * load_n(weight + c, n), n);
      });
      at += sizes[p];
    }
    memcpy(a.y + at, a.qkv + at, sizeof(float) * static_cast<size_t>(sizes[1]));
  });
}

}  // namespace LLM_ISA
