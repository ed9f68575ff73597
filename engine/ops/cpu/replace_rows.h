// y[t, :] = values[rows[t], 0 .. H - 1], x[t, :] where rows[t] is -1
#pragma once
#include <cstring>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void replace_rows(const LlmReplaceRows& a) {
  parallel_rows(a.T, a.H, [=](int64_t t) {
    const float* row = a.rows[t] < 0 ? a.x + t * a.H : a.values + a.rows[t] * a.W;
    memcpy(a.y + t * a.H, row, sizeof(float) * static_cast<size_t>(a.H));
  });
}

}  // namespace LLM_ISA
