// y[s, :] = x[rows[s], :]
#pragma once
#include <cstring>

#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void gather_rows(const float* x, const int32_t* rows, float* y, int64_t num_rows, int64_t cols) {
  parallel_rows(num_rows, cols, [=](int64_t s) {
    memcpy(y + s * cols, x + rows[s] * cols, sizeof(float) * static_cast<size_t>(cols));
  });
}

}  // namespace LLM_ISA
