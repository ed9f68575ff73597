// y[s, :] = x[rows[s], :]
#pragma once
#include <cstring>

#include "catalogue.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

inline void gather_rows(const LlmGatherRows& a) {
  parallel_rows(a.S, a.H, [=](int64_t s) {
    memcpy(a.y + s * a.H, a.x + a.rows[s] * a.H, sizeof(float) * static_cast<size_t>(a.H));
  });
}

}  // namespace LLM_ISA
