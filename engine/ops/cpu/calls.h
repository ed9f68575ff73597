// Calls of the catalogue's ops by number: their shape rules, checks and records. Plain C, as kernels.h.
#pragma once
#include <cstdint>

#include "kernels.h"

#pragma GCC visibility push(default)
extern "C" {

struct LlmArray {
  void* data;
  int32_t type;  // an LlmType; -1: not known yet
  int32_t rank;  // -1: an optional input that is not given
  int32_t is_packed;
  int64_t shape[5];  // -1: not known yet
};

// A call in a list of calls; the structure of its op follows. Records have different lengths.
struct LlmCall {
  int32_t op;         // an LlmOp
  int32_t of_logits;  // its rows are those of which logits are wanted, otherwise the tokens of the step
  int64_t num_bytes;  // of the record, this included
};

// `arrays`: inputs, then outputs, in the catalogue's order; `attributes` in its order, too. All return null, or an
// error text that is valid until the thread's next call.

// Check types and shapes of the inputs, and set those of the outputs.
const char* llm_shapes(int32_t op, LlmArray* arrays, const double* attributes);
// Also check the conditions on sizes, and the values of ids.
const char* llm_check(int32_t op, LlmArray* arrays, const double* attributes);
// Run the op. Call llm_check before.
const char* llm_call(const LlmKernels* kernels, int32_t op, LlmArray* arrays, const double* attributes);
// Write the record of a call; with a null `call`, set only num_bytes of `head`.
const char* llm_record(LlmCall* head, LlmArray* arrays, const double* attributes, void* call);
}
#pragma GCC visibility pop
