// rms_norm of every query head with q_weight and of every key head with k_weight; values are copied.
#pragma once
#include <cstring>

#include "rms_norm.h"

namespace LLM_ISA {

inline void head_norm(const LlmHeadNorm& a) {
  const int64_t normed = a.num_heads + a.num_kv_heads, width = (normed + a.num_kv_heads) * a.head_dim;
  parallel_rows(a.T, width, [=](int64_t t) {
    for (int64_t h = 0; h < normed; h++) {
      const int64_t at = t * width + h * a.head_dim;
      norm_row(a.qkv + at, h < a.num_heads ? a.q_weight : a.k_weight, a.y + at, a.head_dim, a.epsilon);
    }
    const int64_t values = t * width + normed * a.head_dim;
    memcpy(a.y + values, a.qkv + values, sizeof(float) * static_cast<size_t>(a.num_kv_heads * a.head_dim));
  });
}

}  // namespace LLM_ISA
