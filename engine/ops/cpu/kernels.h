// The kernels of one instruction set as a table of functions, and the sampler. Plain C: no Paddle, no Python.
// All arrays are dense and row-major. T rows are the tokens of a step. `*_bf16`: the array is bf16, not float32.
#pragma once
#include <cstdint>

// The rest of the library is hidden.
#pragma GCC visibility push(default)
extern "C" {

// How a weight lies in memory: as it is written down, or as pack_weight has put it.
enum LlmWeight : int32_t { kFloat32, kBf16, kPackedBf16 };

struct LlmEmbedding {
  const int32_t* token_ids;  // [rows]
  const void* table;         // [table_rows, cols]
  float* y;                  // [rows, cols]
  int64_t rows, cols, table_rows, first_id;
  int32_t table_kind;  // an LlmWeight
};

struct LlmAttention {
  const float* qkv;             // [T, (Hq + 2 Hkv) D]
  const float* cos_sin;         // [T, R]
  void* kv_cache;               // [num_blocks, 2, Hkv, block_size, D], float32 or bf16; D + 2 bytes
  const int32_t* query_starts;  // [B + 1]
  const int32_t* context_lens;  // [B]
  const int32_t* block_tables;  // [B, max_blocks]
  float* out;                   // [T, Hq D]
  int64_t num_requests, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, max_blocks;
  float scale;
  int32_t cache_bits;  // 32, 16, or 8: a row ends in its scale, a bf16
};

// A linear layer whose weight is stored with 8 or 4 bits an element. K: x's width; K' is K, rounded up to 128. What is
// packed has been put by pack_rows where it is read fastest: the weight, and the scale and zero that go with two codes a byte.
struct LlmQuantizedLinear {
  const float* x;      // [T, K]
  const void* weight;  // int8 [N, K], or uint8 [N, K' / 2]: two codes a byte
  const void* scale;   // float32 [N], or bf16 [N, K' / 64]
  const void* zero;    // with two codes a byte: as scale, or null
  const float* bias;   // [N], or null
  float* y;            // [T, N]; gated: swiglu of that, [T, N / 2]
  int64_t rows, width, num_out;
  int32_t is_packed;
  int32_t is_gated;    // which takes an N that is a multiple of kGatedOutputs
};
enum { kGatedOutputs = 64 };

// y[rows[s], n] += sum_r x[s, r] * b[r, n]
struct LlmAddProduct {
  const float *x, *b;   // [num_rows, rank], [rank, num_out]
  const int32_t* rows;  // [num_rows], none twice
  float* y;             // rows of `width`, of which it is num_out
  int64_t num_rows, rank, num_out, width;
};

struct LlmKernels {
  const char* isa;
  void (*embedding)(const LlmEmbedding* args);
  void (*gather_rows)(const float* x, const int32_t* rows, float* y, int64_t num_rows, int64_t cols);
  void (*rms_norm)(const float* x, const float* weight, float* y, int64_t rows, int64_t cols, float epsilon);
  void (*add_rms_norm)(const float* x, float* residual, const float* weight, float* y, int64_t rows,
                       int64_t cols, float epsilon);
  void (*head_norm)(const float* qkv, const float* q_weight, const float* k_weight, float* y, int64_t rows,
                    int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float epsilon);
  // weight_kind: an LlmWeight; bias may be null.
  void (*linear)(const float* x, const void* weight, int weight_kind, const float* bias, float* y,
                 int64_t rows, int64_t width, int64_t num_out);
  // swiglu of linear with a packed weight; y: [rows, num_out / 2]. False: nothing is done, the width is no whole vectors.
  bool (*linear_swiglu)(const float* x, const void* weight, const float* bias, float* y, int64_t rows, int64_t width,
                        int64_t num_out);
  // Puts bf16 [num_out, width] where `linear` reads it fastest. Returns how many elements that are, 0 where there is no
  // such order; packed null: does no more.
  int64_t (*pack_weight)(const uint16_t* weight, uint16_t* packed, int64_t num_out, int64_t width);
  void (*linear_int8)(const LlmQuantizedLinear* args);
  void (*linear_int4)(const LlmQuantizedLinear* args);
  void (*linear_a8w8)(const LlmQuantizedLinear* args);
  // Of [num_rows, row_bytes], units of 4 bytes, or 2, of 32 rows side by side: [num_rows / 32, row_bytes / unit, 32].
  void (*pack_rows)(const void* rows, int64_t num_rows, int64_t row_bytes, int64_t unit, void* packed);
  void (*rotary_angles)(const int32_t* positions, const float* inv_freq, float* y, int64_t rows, int64_t half,
                        float scaling);
  void (*paged_attention)(const LlmAttention* args);
  void (*swiglu)(const float* gate_up, float* y, int64_t rows, int64_t cols);
  void (*add_product)(const LlmAddProduct* args);
  // Passes over a row of logits, for the sampler.
  float (*largest)(const float* x, int64_t size);  // -inf for none; a NaN is never the largest
  int64_t (*find)(const float* x, int64_t size, float value);  // first index, -1 for none
  // weights[i] = exp((x[i] - largest) * factor)
  void (*weigh)(const float* x, float* weights, int64_t size, float largest, float factor);
  double (*add_up)(const float* x, int64_t size);
  // How many x[i] are >= threshold: with their ids, ascending; with the sum of their weights.
  int64_t (*at_least)(const float* x, int64_t size, float threshold, int32_t* ids);
  int64_t (*weight_at_least)(const float* x, const float* weights, int64_t size, float threshold,
                             double* weight);
};

// What engine/ops/sampling_rows.py describes.
struct LlmSamplingRow {
  float temperature, top_p;
  int32_t top_k;
  float min_p, repetition_penalty, frequency_penalty, presence_penalty;
  int32_t num_logprobs;
  uint64_t seed;
  int64_t counter;
  int32_t seen_start, seen_end;
};

// And this. bias_starts, mask, given, top_ids and top_logprobs may be null.
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

// By name, or null for the best one; null where this machine or this build has no such table.
const LlmKernels* llm_kernels(const char* isa);
// Names of all tables in this build, best first, as "avx2,portable"; those the machine can run, or all.
const char* llm_isas(int only_supported);
// For each row of logits [rows, vocab].
void llm_sample(const LlmKernels* kernels, const float* logits, int64_t rows, int64_t vocab,
                const LlmSampling* sampling);
}
#pragma GCC visibility pop
