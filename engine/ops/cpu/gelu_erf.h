// y[t, f] = x * (1 + erf(x / sqrt(2))) / 2
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

// erf with an error below 2e-7, formula 7.1.26 of Abramowitz and Stegun: 1 - (a1 t + .. + a5 t^5) exp(-z^2)
inline vec gelu_erf(vec x) {
  const vec z = max(x, -x) * 0.707106781f, t = 1.0f / (1.0f + 0.3275911f * z);
  vec y = set1(1.061405429f);
  y = fma(y, t, set1(-1.453152027f));
  y = fma(y, t, set1(1.421413741f));
  y = fma(y, t, set1(-0.284496736f));
  y = fma(y, t, set1(0.254829592f));
  const vec beyond = 0.5f * (y * t) * exp_of_negative(-z * z);  // of the normal distribution, outside of |x| on one side
  return x * (x < 0 ? beyond : 1.0f - beyond);
}

inline void gelu_erf(const LlmGeluErf& a) {
  parallel_rows(a.T, 4 * a.F, [=](int64_t t) {
    for_lanes(a.F, [=](int64_t f, int n) { store_n(a.y + t * a.F + f, gelu_erf(load_n(a.x + t * a.F + f, n)), n); });
  });
}

}  // namespace LLM_ISA
