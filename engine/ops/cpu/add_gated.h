// z[t, n] = x[t, n] + y[t, n] / (1 + exp(-sum_k hidden[t, k] * weight[k]))
#pragma once
#include <cmath>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void add_gated(const LlmAddGated& a) {
  parallel_rows(a.T, a.N + a.K, [=](int64_t t) {
    vec products = set1(0.0f);
    for_lanes(a.K, [&](int64_t k, int n) {
      products = fma(load_n(a.hidden + t * a.K + k, n), load_n(a.weight + k, n), products);
    });
    const vec gate = set1(1.0f / (1.0f + expf(-sum(products))));
    for_lanes(a.N, [=](int64_t c, int n) {
      const int64_t at = t * a.N + c;
      store_n(a.z + at, fma(gate, load_n(a.y + at, n), load_n(a.x + at, n)), n);
    });
  });
}

}  // namespace LLM_ISA
