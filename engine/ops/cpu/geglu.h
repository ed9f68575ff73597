// y[t, f] = gelu(gate) * up, gate = x[t, f], up = x[t, F + f]
#pragma once
#include "gelu.h"

namespace LLM_ISA {

inline void geglu(const LlmGeglu& a) {
  parallel_rows(a.T, 4 * a.F, [=](int64_t t) {
    const float *gates = a.gate_up + t * 2 * a.F, *ups = gates + a.F;
    for_lanes(a.F, [=](int64_t f, int n) {
      store_n(a.y + t * a.F + f, gelu(load_n(gates + f, n)) * load_n(ups + f, n), n);
    });
  });
}

}  // namespace LLM_ISA
