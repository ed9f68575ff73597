// rms_norm of every query head with q_weight, of every key head with k_weight; values are copied
#pragma once
#include <cstring>

#include "rms_norm.h"

namespace LLM_ISA {

inline void head_norm(const float* qkv, const float* q_weight, const float* k_weight, float* y, int64_t rows,
                      int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float epsilon) {
  const int64_t normed = num_heads + num_kv_heads, width = (normed + num_kv_heads) * head_dim;
  parallel_rows(rows, width, [=](int64_t t) {
    for (int64_t h = 0; h < normed; h++) {
      const int64_t at = t * width + h * head_dim;
      norm_row(qkv + at, h < num_heads ? q_weight : k_weight, y + at, head_dim, epsilon);
    }
    const int64_t values = t * width + normed * head_dim;
    memcpy(y + values, qkv + values, sizeof(float) * static_cast<size_t>(num_kv_heads * head_dim));
  });
}

}  // namespace LLM_ISA
