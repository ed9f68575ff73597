// angle[t, i] = positions[axes[i], t] * inv_freq[i]; y[t, :] = [cos(angle[t, :]), sin(angle[t, :])] * scaling
#pragma once
#include <cmath>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void mrope_angles(const LlmMropeAngles& a) {
  constexpr int64_t kCost = 32;  // a cosine or sine, in elements copied
  parallel_rows(a.T, a.half * kCost, [=](int64_t t) {
    float* row = a.y + t * 2 * a.half;
    for (int64_t i = 0; i < a.half; i++) {
      const float angle = static_cast<float>(a.positions[a.axes[i] * a.T + t]) * a.inv_freq[i];
      row[i] = cosf(angle) * a.attention_scaling;
      row[a.half + i] = sinf(angle) * a.attention_scaling;
    }
  });
}

}  // namespace LLM_ISA
