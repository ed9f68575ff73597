// y[t, :] = table[token_ids[t] - first_id, :], zeros where the table has no such row
#pragma once
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

template <class T>
void embedding(const LlmEmbedding& a, const T* table) {
  parallel_rows(a.rows, a.cols, [=](int64_t t) {
    const int64_t row = a.token_ids[t] - a.first_id;
    const bool is_here = row >= 0 && row < a.table_rows;
    const T* from = table + (is_here ? row : 0) * a.cols;
    for_lanes(a.cols, [=](int64_t c, int n) {
      store_n(a.y + t * a.cols + c, is_here ? load_n(from + c, n) : set1(0.0f), n);
    });
  });
}

}  // namespace LLM_ISA
