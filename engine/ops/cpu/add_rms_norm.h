// residual += x; y = rms_norm(residual)
#pragma once
#include "rms_norm.h"

namespace LLM_ISA {

inline void add_rms_norm(const LlmAddRmsNorm& a) {
  parallel_rows(a.T, a.H, [=](int64_t t) {
    const float* from = a.x + t * a.H;
    float* into = a.residual + t * a.H;
    for_lanes(a.H, [=](int64_t c, int n) { store_n(into + c, load_n(into + c, n) + load_n(from + c, n), n); });
    norm_row(into, a.weight, a.y + t * a.H, a.H, a.epsilon);
  });
}

}  // namespace LLM_ISA
