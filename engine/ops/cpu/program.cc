#include "program.h"

#include "group.h"
#include "runtime.h"

namespace {

// From so many rows on the gates of a quantized weight are used where they are made. With few rows reading the weight is
// what takes the time, which is faster from end to end.
constexpr int64_t kGatedRows = 64;

template <class T>
T* array(void* p) {
  return static_cast<T*>(p);
}

// gated: where the swiglu of the result is put instead; null: the result is wanted.
void quantized(void (*kernel)(const LlmQuantizedLinear*), const LlmCall& call, int64_t rows, bool has_zero,
               float* gated) {
  void* const* rest = call.at + 3 + has_zero;
  LlmQuantizedLinear args = {};
  args.x = array<float>(call.at[0]);
  args.weight = call.at[1];
  args.scale = call.at[2];
  args.zero = has_zero ? call.at[3] : nullptr;
  args.bias = array<float>(rest[0]);
  args.y = gated ? gated : array<float>(rest[1]);
  args.rows = rows;
  args.width = call.size[0];
  args.num_out = call.size[1];
  args.is_packed = true;
  args.is_gated = gated != nullptr;
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
  args.table_kind = static_cast<int32_t>(call.size[3]);
  kernels.embedding(&args);
}

float* room_for(int slot, int64_t count) {
  return static_cast<float*>(llm_scratch(slot, sizeof(float) * static_cast<size_t>(count)));
}

// What the adapters add to a linear call that was made, with its result at `y`. A row's sums are float32 and have the
// same order whichever rows are beside it.
void adapt(const LlmKernels& k, const LlmCall& call, int64_t index, float* y, const LlmCounts& counts) {
  const int64_t width = call.size[0], num_out = call.size[1];
  for (LlmGroup* g = counts.groups; g < counts.groups + counts.num_groups; g++) {
    const int32_t* rows = g->rows[call.of_logits];
    const int64_t num_rows = g->num_rows[call.of_logits];
    const float* x = nullptr;
    for (; g->pair < g->end && g->pair->call == index; g->pair++) {
      const LlmPair& p = *g->pair;
      if (num_rows == 0) continue;
      if (!x) {
        float* gathered = room_for(0, num_rows * width);
        k.gather_rows(array<float>(call.at[0]), rows, gathered, num_rows, width);
        x = gathered;
      }
      float* inner = room_for(1, num_rows * p.rank);
      k.linear(x, p.a, kFloat32, nullptr, inner, num_rows, width, p.rank);
      const LlmAddProduct product = {inner, p.b, rows, y + p.first, num_rows, p.rank, p.num_out, num_out};
      k.add_product(&product);
    }
  }
}

}  // namespace

extern "C" const char* llm_run(const LlmKernels* kernels, const LlmCall* calls, int64_t num_calls,
                               const LlmCounts* counts) {
  const LlmKernels& k = *kernels;
  for (const LlmCall* call = calls; call < calls + num_calls; call++) {
    const LlmCall& c = *call;
    const int64_t rows = c.of_logits ? counts->logits : counts->tokens, *n = c.size;
    const char* trouble = nullptr;
    const auto adapted = [&](int y) {
      if (counts->num_groups) adapt(k, c, call - calls, array<float>(c.at[y]), *counts);
    };
    const auto quantized_linear = [&](auto kernel, bool has_zero) {
      const bool is_gated = n[3] && rows >= kGatedRows && n[1] % kGatedOutputs == 0 && !counts->num_groups;
      quantized(kernel, c, rows, has_zero, is_gated ? array<float>(call[1].at[1]) : nullptr);
      is_gated ? void(call++) : adapted(4 + has_zero);
    };
    auto f32 = [&](int i) { return array<float>(c.at[i]); };
    auto i32 = [&](int i) { return array<int32_t>(c.at[i]); };
    switch (static_cast<LlmOp>(c.op)) {
      case kEmbedding: embedding(k, c, rows); break;
      case kGatherRows: k.gather_rows(f32(0), i32(1), f32(2), rows, n[0]); break;
      case kRmsNorm: k.rms_norm(f32(0), f32(1), f32(2), rows, n[0], c.number); break;
      case kAddRmsNorm: k.add_rms_norm(f32(0), f32(1), f32(2), f32(3), rows, n[0], c.number); break;
      case kHeadNorm: k.head_norm(f32(0), f32(1), f32(2), f32(3), rows, n[0], n[1], n[2], c.number); break;
      case kLinear:
        if (n[3] && n[2] == kPackedBf16 && !counts->num_groups &&
            k.linear_swiglu(f32(0), c.at[1], f32(2), array<float>(call[1].at[1]), rows, n[0], n[1])) {
          call++;
          break;
        }
        k.linear(f32(0), c.at[1], static_cast<int>(n[2]), f32(2), f32(3), rows, n[0], n[1]), adapted(3);
        break;
      case kLinearInt8: quantized_linear(k.linear_int8, false); break;
      case kLinearA8w8: quantized_linear(k.linear_a8w8, false); break;
      case kLinearInt4: quantized_linear(k.linear_int4, true); break;
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
