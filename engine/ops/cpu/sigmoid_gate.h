// y[t, n] = x[t, n] / (1 + exp(-gate[t, n]))
#pragma once
#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void sigmoid_gate(const LlmSigmoidGate& a) {
  parallel_rows(a.T, 4 * a.N, [=](int64_t t) {
    for_lanes(a.N, [=](int64_t i, int n) {
      const int64_t at = t * a.N + i;
      store_n(a.y + at, load_n(a.x + at, n) / (1.0f + exp(-load_n(a.gate + at, n))), n);
    });
  });
}

}  // namespace LLM_ISA
