// y[t, c] = cap * tanh(x[t, c] / cap)
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

// cap * tanh(x / cap) = a number with the sign of x, by exp of a number that is at most 0.
inline vec capped(vec x, float cap) {
  const vec magnitude = max(x, -x), e = exp_of_negative(magnitude * (-2.0f / cap)), y = cap * (1.0f - e) / (1.0f + e);
  return x < 0 ? -y : y;
}

inline void softcap(const LlmSoftcap& a) {
  parallel_rows(a.T, 4 * a.H, [=](int64_t t) {
    const int64_t at = t * a.H;
    for_lanes(a.H, [=](int64_t c, int n) { store_n(a.y + at + c, capped(load_n(a.x + at + c, n), a.cap), n); });
  });
}

}  // namespace LLM_ISA
