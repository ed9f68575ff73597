// A graph as a list of kernel calls, which a step runs from the first to the last. Plain C, as kernels.h.
#pragma once
#include <cstdint>

#include "calls.h"

#pragma GCC visibility push(default)
extern "C" {

// Contribution of an adapter to a linear call: y[t, first + n] += sum_r (sum_k x[t, k] * a[r, k]) * b[r, n].
struct LlmPair {
  int64_t call;           // which of the calls, by its place
  int64_t rank, first, num_out;
  const float *a, *b;     // [rank, width of x], [rank, num_out]
};

// The rows of a step with one adapter: among the tokens, and among those whose logits are needed.
struct LlmGroup {
  const LlmPair *pair, *end;  // in the order of their calls; `pair` moves on with these
  const int32_t* rows[2];     // ascending
  int64_t num_rows[2];
};

struct LlmCounts {
  int64_t tokens, logits, requests, max_blocks;  // T, S, B, and the width of block_tables
  LlmGroup* groups;
  int64_t num_groups;
};

// `calls`: records one after another. Return null or an error of the group.
const char* llm_run(const LlmKernels* kernels, void* calls, int64_t num_bytes, const LlmCounts* counts);
}
#pragma GCC visibility pop
