// y[t, :] = table[token_ids[t], :]
#pragma once
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

template <class T>
void embedding(const int32_t* token_ids, const T* table, float* y, int64_t rows, int64_t cols) {
  parallel_rows(rows, cols, [=](int64_t t) {
    const T* from = table + token_ids[t] * cols;
    for_lanes(cols, [=](int64_t c, int n) { store_n(y + t * cols + c, load_n(from + c, n), n); });
  });
}

}  // namespace LLM_ISA
