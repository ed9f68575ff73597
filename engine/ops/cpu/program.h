// A graph as a list of calls of the kernels, which a step makes from the first to the last. Plain C, as kernels.h.
#pragma once
#include <cstdint>

#include "kernels.h"

#pragma GCC visibility push(default)
extern "C" {

// The ops of docs/ops.md by their names there.
enum LlmOp : int32_t {
  kEmbedding, kGatherRows, kRmsNorm, kAddRmsNorm, kHeadNorm, kLinear, kLinearInt8, kLinearA8w8, kLinearInt4,
  kRotaryAngles, kPagedAttention, kSwiglu, kAllReduce, kAllGather,
};

struct LlmCall {
  int32_t op;         // an LlmOp
  int32_t of_logits;  // its rows are those of which logits are wanted, otherwise the tokens of the step
  void* at[7];        // its inputs, then its output, in the catalogue's order; null: not given
  int64_t size[6];    // what the kernel needs to know of them, see program.py; then of a linear call whether all
                      // that reads its output is the swiglu that follows
  float number;       // its attribute that is no whole number
};

// What an adapter adds to a linear call: y[t, first + n] += sum_r (sum_k x[t, k] * a[r, k]) * b[r, n].
struct LlmPair {
  int64_t call;           // which of the calls, by its place
  int64_t rank, first, num_out;
  const float *a, *b;     // [rank, width of x], [rank, num_out]
};

// The rows of a step that have one adapter: among the tokens, and among those of which logits are wanted.
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

// Returns null, or what went wrong between the ranks.
const char* llm_run(const LlmKernels* kernels, const LlmCall* calls, int64_t num_calls, const LlmCounts* counts);
}
#pragma GCC visibility pop
