// y[t, f] = max(x[t, f], 0)^2
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void relu_squared(const LlmReluSquared& a) {
  parallel_rows(a.T, 4 * a.F, [=](int64_t t) {
    for_lanes(a.F, [=](int64_t f, int n) {
      const vec x = load_n(a.x + t * a.F + f, n);
      store_n(a.y + t * a.F + f, x < 0 ? vec() : x * x, n);  // a NaN stays
    });
  });
}

}  // namespace LLM_ISA
