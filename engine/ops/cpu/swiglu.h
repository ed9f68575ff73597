// y[t, f] = gate / (1 + exp(-gate)) * up, gate = x[t, f], up = x[t, F + f]
#pragma once
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline vec swiglu(vec gate, vec up) { return gate / (1.0f + exp(-gate)) * up; }

inline void swiglu(const float* gate_up, float* y, int64_t rows, int64_t cols) {
  parallel_rows(rows, 4 * cols, [=](int64_t t) {
    const float *gates = gate_up + t * 2 * cols, *ups = gates + cols;
    for_lanes(cols, [=](int64_t f, int n) {
      store_n(y + t * cols + f, swiglu(load_n(gates + f, n), load_n(ups + f, n)), n);
    });
  });
}

}  // namespace LLM_ISA
