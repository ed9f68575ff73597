// angle[t, i] = positions[t] * inv_freq[i]; y[t, :] = [cos(angle[t, :]), sin(angle[t, :])] * scaling
#pragma once
#include <cmath>

#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void rotary_angles(const int32_t* positions, const float* inv_freq, float* y, int64_t rows,
                          int64_t half, float scaling) {
  constexpr int64_t kCost = 32;  // a cosine or sine, in elements copied
  parallel_rows(rows, half * kCost, [=](int64_t t) {
    float* row = y + t * 2 * half;
    for (int64_t i = 0; i < half; i++) {
      const float angle = static_cast<float>(positions[t]) * inv_freq[i];
      row[i] = cosf(angle) * scaling;
      row[half + i] = sinf(angle) * scaling;
    }
  });
}

}  // namespace LLM_ISA
