// y[t, :] = x[t, :] + values[rows[t], column .. column + H - 1], x[t, :] where rows[t] is -1
#pragma once
#include <cstring>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void add_gathered_rows(const LlmAddGatheredRows& a) {
  parallel_rows(a.T, a.H, [=](int64_t t) {
    const int64_t at = t * a.H;
    if (a.rows[t] < 0) {
      memcpy(a.y + at, a.x + at, sizeof(float) * static_cast<size_t>(a.H));
      return;
    }
    const float* values = a.values + a.rows[t] * a.W + a.column;
    for_lanes(a.H, [=](int64_t c, int n) { store_n(a.y + at + c, load_n(a.x + at + c, n) + load_n(values + c, n), n); });
  });
}

}  // namespace LLM_ISA
