#include "program.h"

#include "group.h"
#include "runtime.h"

namespace {

struct StepSizes {
  int64_t T, S, B, max_blocks;
};

// The output that adapters add to.
struct Product {
  const float* x;
  float* y;
  int64_t width, num_out;
};
template <class Args>
Product product_of(const Args&) {
  return {};
}

#include "catalogue_steps.h"

float* room_for(int slot, int64_t count) {
  return static_cast<float*>(llm_scratch(slot, sizeof(float) * static_cast<size_t>(count)));
}

// Contribution of the adapters to a linear call. The sums of a row are float32 and have the same order whichever rows
// are next to it.
void adapt(const LlmKernels& k, const Product& p, int64_t index, int of_logits, const LlmCounts& counts) {
  for (LlmGroup* g = counts.groups; g < counts.groups + counts.num_groups; g++) {
    const int32_t* rows = g->rows[of_logits];
    const int64_t num_rows = g->num_rows[of_logits];
    const float* x = nullptr;
    for (; g->pair < g->end && g->pair->call == index; g->pair++) {
      const LlmPair& pair = *g->pair;
      if (num_rows == 0) continue;
      if (!x) {
        LlmGatherRows gather = {};
        gather.x = p.x, gather.rows = rows, gather.y = room_for(0, num_rows * p.width);
        gather.S = num_rows, gather.H = p.width;
        k.ops[kGatherRows](&gather);
        x = gather.y;
      }
      LlmLinear inner = {};
      inner.x = x, inner.weight = pair.a, inner.y = room_for(1, num_rows * pair.rank);
      inner.T = num_rows, inner.K = p.width, inner.N = pair.rank;
      k.ops[kLinear](&inner);
      const LlmAddProduct product = {inner.y, pair.b, rows, p.y + pair.first, num_rows, pair.rank, pair.num_out, p.num_out};
      k.add_product(&product);
    }
  }
}

template <class Args>
const char* run(const LlmKernels& kernels, LlmCall* call, int64_t index, const LlmCounts& counts) {
  auto& args = *reinterpret_cast<Args*>(call + 1);
  set_sizes(args, {call->of_logits ? counts.logits : counts.tokens, counts.logits, counts.requests, counts.max_blocks});
  const char* trouble = kernels.ops[call->op](&args);
  const Product product = product_of(args);
  if (product.y && counts.num_groups) adapt(kernels, product, index, call->of_logits, counts);
  return trouble;
}

}  // namespace

extern "C" const char* llm_run(const LlmKernels* kernels, void* calls, int64_t num_bytes, const LlmCounts* counts) {
  int64_t index = 0;
  for (char* at = static_cast<char*>(calls), *end = at + num_bytes; at < end; index++) {
    auto* call = reinterpret_cast<LlmCall*>(at);
    const char* trouble = nullptr;
#define CASE(number, Args, name) \
  case number: trouble = run<Args>(*kernels, call, index, *counts); break;
    switch (static_cast<LlmOp>(call->op)) {
      LLM_EACH_OP(CASE)
      case kNumOps: break;
    }
#undef CASE
    if (trouble) return trouble;
    at += call->num_bytes;
  }
  return nullptr;
}
