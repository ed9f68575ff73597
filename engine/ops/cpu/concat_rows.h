// y[s, :] = x[rows[s, 0], :], x[rows[s, 1], :], .. side by side
#pragma once
#include <cstring>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void concat_rows(const LlmConcatRows& a) {
  parallel_rows(a.S, a.num_rows * a.H, [=](int64_t s) {
    for (int64_t i = s * a.num_rows; i < (s + 1) * a.num_rows; i++)
      memcpy(a.y + i * a.H, a.x + a.rows[i] * a.H, sizeof(float) * static_cast<size_t>(a.H));
  });
}

}  // namespace LLM_ISA
