// y[t, :] = table[token_ids[t] - first_id, :], zeros where the table has no such row
#pragma once
#include "catalogue.h"
#include "linear_bf16.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

template <class CopyRow>
void embedding(const LlmEmbedding& a, CopyRow copy_row) {
  parallel_rows(a.T, a.H, [=](int64_t t) {
    const int64_t row = a.token_ids[t] - a.first_id;
    float* y = a.y + t * a.H;
    if (row >= 0 && row < a.V) return copy_row(row, y);
    for_lanes(a.H, [=](int64_t c, int n) { store_n(y + c, set1(0.0f), n); });
  });
}

template <class T>
void embedding(const LlmEmbedding& a, const T* table) {
  embedding(a, [=](int64_t row, float* y) {
    for_lanes(a.H, [=](int64_t c, int n) { store_n(y + c, load_n(table + row * a.H + c, n), n); });
  });
}

inline void embedding(const LlmEmbedding& a) {
  const auto* bf16 = static_cast<const uint16_t*>(a.table);
  if (a.table_is_packed)
    embedding(a, [=](int64_t row, float* y) { unpack_row(bf16, row, y, a.H); });
  else if (a.table_type == kBf16)
    embedding(a, bf16);
  else
    embedding(a, static_cast<const float*>(a.table));
}

}  // namespace LLM_ISA
