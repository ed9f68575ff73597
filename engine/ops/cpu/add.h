// z[t, c] = x[t, c] + y[t, c]
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void add(const LlmAdd& a) {
  parallel_rows(a.T, a.H, [=](int64_t t) {
    const int64_t at = t * a.H;
    for_lanes(a.H, [=](int64_t c, int n) { store_n(a.z + at + c, load_n(a.x + at + c, n) + load_n(a.y + at + c, n), n); });
  });
}

}  // namespace LLM_ISA
