// y[t, c] = factor * x[t, c]
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void scale(const LlmScale& a) {
  parallel_rows(a.T, a.H, [=](int64_t t) {
    const int64_t at = t * a.H;
    for_lanes(a.H, [=](int64_t c, int n) { store_n(a.y + at + c, load_n(a.x + at + c, n) * a.factor, n); });
  });
}

}  // namespace LLM_ISA
