// The kernels of one instruction set as a table of functions, and the sampler. Plain C: no Paddle, no Python.
// All arrays are dense and row-major.
#pragma once
#include <cstdint>

#include "catalogue.h"

// The rest of the library is hidden.
#pragma GCC visibility push(default)
extern "C" {

// y[rows[s], n] += sum_r x[s, r] * b[r, n]
struct LlmAddProduct {
  const float *x, *b;   // [num_rows, rank], [rank, num_out]
  const int32_t* rows;  // [num_rows], none twice
  float* y;             // rows of `width`, of which it is num_out
  int64_t num_rows, rank, num_out, width;
};

struct LlmKernels {
  const char* isa;
  // The ops of the catalogue by their numbers, on their structures. They return null or an error of the group.
  const char* (*ops[kNumOps])(const void* args);
  // Write bf16 [num_out, width] in the order that `linear` reads fastest. Return the number of elements, or 0 if there
  // is no such order. With a null `packed`, only return the number.
  int64_t (*pack_weight)(const uint16_t* weight, uint16_t* packed, int64_t num_out, int64_t width);
  // [num_rows, row_bytes] in units of 4 bytes, or 2, of 32 rows side by side: [num_rows / 32, row_bytes / unit, 32].
  void (*pack_rows)(const void* rows, int64_t num_rows, int64_t row_bytes, int64_t unit, void* packed);
  void (*add_product)(const LlmAddProduct* args);
  // Passes over a row of logits, for the sampler.
  float (*largest)(const float* x, int64_t size);  // -inf for none; a NaN is never the largest
  int64_t (*find)(const float* x, int64_t size, float value);  // first index, -1 for none
  // weights[i] = exp((x[i] - largest) * factor)
  void (*weigh)(const float* x, float* weights, int64_t size, float largest, float factor);
  double (*add_up)(const float* x, int64_t size);
  // Count x[i] >= threshold: with their ids, ascending; with the sum of their weights.
  int64_t (*at_least)(const float* x, int64_t size, float threshold, int32_t* ids);
  int64_t (*weight_at_least)(const float* x, const float* weights, int64_t size, float threshold,
                             double* weight);
};

// The structures of engine/ops/sampling_rows.py; that of a row is generated.
// bias_starts, mask, given, top_ids and top_logprobs may be null.
struct LlmSampling {
  const LlmSamplingRow* values;
  const int32_t *seen_ids, *seen_counts, *bias_starts, *bias_ids;
  const float* bias;
  const uint32_t* mask;
  const int32_t* given;
  int32_t *token_ids;
  float *logprobs;
  int32_t *top_ids;
  float *top_logprobs;
  int64_t max_logprobs;
};

// Return the table of a name, or the best one for null; null if this machine or this build has no such table.
const LlmKernels* llm_kernels(const char* isa);
// Names of all tables in this build, best first, as "avx2,portable"; either those that the machine can run, or all.
const char* llm_isas(int only_supported, int only_built);
// For each row of logits [rows, vocab].
void llm_sample(const LlmKernels* kernels, const float* logits, int64_t rows, int64_t vocab,
                const LlmSampling* sampling);
}
#pragma GCC visibility pop
