#include "program.h"

#include "group.h"

namespace {

template <class T>
T* array(void* p) {
  return static_cast<T*>(p);
}

void quantized(void (*kernel)(const LlmQuantizedLinear*), const LlmCall& call, int64_t rows, bool has_zero) {
  void* const* rest = call.at + 3 + has_zero;
  LlmQuantizedLinear args = {};
  args.x = array<float>(call.at[0]);
  args.weight = call.at[1];
  args.scale = call.at[2];
  args.zero = has_zero ? call.at[3] : nullptr;
  args.bias = array<float>(rest[0]);
  args.y = array<float>(rest[1]);
  args.rows = rows;
  args.width = call.size[0];
  args.num_out = call.size[1];
  kernel(&args);
}

void attention(const LlmKernels& kernels, const LlmCall& call, const LlmCounts& counts) {
  LlmAttention args = {};
  args.qkv = array<float>(call.at[0]);
  args.cos_sin = array<float>(call.at[1]);
  args.kv_cache = call.at[2];
  args.query_starts = array<int32_t>(call.at[3]);
  args.context_lens = array<int32_t>(call.at[4]);
  args.block_tables = array<int32_t>(call.at[5]);
  args.out = array<float>(call.at[6]);
  args.num_requests = counts.requests;
  args.num_heads = call.size[0];
  args.num_kv_heads = call.size[1];
  args.head_dim = call.size[2];
  args.rotary_dim = call.size[3];
  args.block_size = call.size[4];
  args.max_blocks = counts.max_blocks;
  args.scale = call.number;
  args.cache_bits = static_cast<int32_t>(call.size[5]);
  kernels.paged_attention(&args);
}

void embedding(const LlmKernels& kernels, const LlmCall& call, int64_t rows) {
  LlmEmbedding args = {};
  args.token_ids = array<int32_t>(call.at[0]);
  args.table = call.at[1];
  args.y = array<float>(call.at[2]);
  args.rows = rows;
  args.cols = call.size[0];
  args.table_rows = call.size[1];
  args.first_id = call.size[2];
  args.table_bf16 = call.size[3] != 0;
  kernels.embedding(&args);
}

}  // namespace

extern "C" const char* llm_run(const LlmKernels* kernels, const LlmCall* calls, int64_t num_calls,
                               const LlmCounts* counts) {
  const LlmKernels& k = *kernels;
  for (const LlmCall* call = calls; call < calls + num_calls; call++) {
    const LlmCall& c = *call;
    const int64_t rows = c.of_logits ? counts->logits : counts->tokens, *n = c.size;
    const char* trouble = nullptr;
    auto f32 = [&](int i) { return array<float>(c.at[i]); };
    auto i32 = [&](int i) { return array<int32_t>(c.at[i]); };
    switch (static_cast<LlmOp>(c.op)) {
      case kEmbedding: embedding(k, c, rows); break;
      case kGatherRows: k.gather_rows(f32(0), i32(1), f32(2), rows, n[0]); break;
      case kRmsNorm: k.rms_norm(f32(0), f32(1), f32(2), rows, n[0], c.number); break;
      case kAddRmsNorm: k.add_rms_norm(f32(0), f32(1), f32(2), f32(3), rows, n[0], c.number); break;
      case kHeadNorm: k.head_norm(f32(0), f32(1), f32(2), f32(3), rows, n[0], n[1], n[2], c.number); break;
      case kLinear: k.linear(f32(0), c.at[1], n[2] != 0, f32(2), f32(3), rows, n[0], n[1]); break;
      case kLinearInt8: quantized(k.linear_int8, c, rows, false); break;
      case kLinearA8w8: quantized(k.linear_a8w8, c, rows, false); break;
      case kLinearInt4: quantized(k.linear_int4, c, rows, true); break;
      case kRotaryAngles: k.rotary_angles(i32(0), f32(1), f32(2), rows, n[0], c.number); break;
      case kPagedAttention: attention(k, c, *counts); break;
      case kSwiglu: k.swiglu(f32(0), f32(1), rows, n[0]); break;
      case kAllReduce: trouble = llm_all_reduce(f32(0), f32(1), rows * n[0]); break;
      case kAllGather: trouble = llm_all_gather(f32(0), f32(1), rows, n[0], n[1]); break;
    }
    if (trouble) return trouble;
  }
  return nullptr;
}
