// y = qkv with its query and key heads rotated by halves
#pragma once
#include <cstring>

#include "attention_cache.h"
#include "parallel.h"

namespace LLM_ISA {

inline void rotate_heads(const LlmRotateHeads& a) {
  const int64_t rotated = a.num_heads + a.num_kv_heads, width = (rotated + a.num_kv_heads) * a.head_dim;
  parallel_rows(a.T, width, [=](int64_t t) {
    const float* x = a.qkv + t * width;
    float* y = a.y + t * width;
    for (int64_t h = 0; h < rotated; h++)
      rotate(x + h * a.head_dim, a.cos_sin + t * a.rotary_dim, y + h * a.head_dim, a.head_dim, a.rotary_dim, 1.0f);
    const int64_t values = rotated * a.head_dim;
    memcpy(y + values, x + values, sizeof(float) * static_cast<size_t>(a.num_kv_heads * a.head_dim));
  });
}

}  // namespace LLM_ISA
