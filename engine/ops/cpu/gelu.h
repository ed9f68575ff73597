// y[t, f] = x / (1 + exp(-2 u)), u = 0.79788456 * (x + 0.044715 * x^3)
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline vec gelu(vec x) {
  const vec u = 0.79788456f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exp(-2.0f * u));
}

inline void gelu(const LlmGelu& a) {
  parallel_rows(a.T, 4 * a.F, [=](int64_t t) {
    for_lanes(a.F, [=](int64_t f, int n) { store_n(a.y + t * a.F + f, gelu(load_n(a.x + t * a.F + f, n)), n); });
  });
}

}  // namespace LLM_ISA
