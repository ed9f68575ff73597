// y[t, h, :] = rms_norm(x[t, h, :]) * weight * silu(gate[t, h, :]) for each head h
#pragma once
#include "rms_norm.h"
#include "swiglu.h"

namespace LLM_ISA {

inline void gated_rms_norm(const LlmGatedRmsNorm& a) {
  parallel_rows(a.T, 4 * a.N, [=](int64_t t) {
    for (int64_t at = t * a.N; at < (t + 1) * a.N; at += a.head_dim) {
      norm_row(a.x + at, a.weight, a.y + at, a.head_dim, a.epsilon);
      for_lanes(a.head_dim, [=](int64_t d, int n) {
        store_n(a.y + at + d, swiglu(load_n(a.gate + at + d, n), load_n(a.y + at + d, n)), n);
      });
    }
  });
}

}  // namespace LLM_ISA
