// y[t, :] = table[token_ids[t] - first_id, :], zeros where the table has no such row
#pragma once
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

template <class CopyRow>
void embedding(const LlmEmbedding& a, CopyRow copy_row) {
  parallel_rows(a.rows, a.cols, [=](int64_t t) {
    const int64_t row = a.token_ids[t] - a.first_id;
    float* y = a.y + t * a.cols;
    if (row >= 0 && row < a.table_rows) return copy_row(row, y);
    for_lanes(a.cols, [=](int64_t c, int n) { store_n(y + c, set1(0.0f), n); });
  });
}

template <class T>
void embedding(const LlmEmbedding& a, const T* table) {
  embedding(a, [=](int64_t row, float* y) {
    for_lanes(a.cols, [=](int64_t c, int n) { store_n(y + c, load_n(table + row * a.cols + c, n), n); });
  });
}

}  // namespace LLM_ISA
