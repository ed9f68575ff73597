// Built once for every instruction set: LLM_ISA names it.
#include "kernels.h"

#include "add_rms_norm.h"
#include "add_product.h"
#include "embedding.h"
#include "gather_rows.h"
#include "head_norm.h"
#include "linear_bf16.h"
#include "paged_attention.h"
#include "quantized_linear.h"
#include "rms_norm.h"
#include "rotary_angles.h"
#include "sampling_passes.h"
#include "swiglu.h"

namespace LLM_ISA {
namespace {

void any_embedding(const LlmEmbedding* args) {
  if (args->table_kind == kPackedBf16)
    embedding(*args, [=](int64_t row, float* y) {
      unpack_row(static_cast<const uint16_t*>(args->table), row, y, args->cols);
    });
  else if (args->table_kind == kBf16)
    embedding(*args, static_cast<const uint16_t*>(args->table));
  else
    embedding(*args, static_cast<const float*>(args->table));
}

void any_linear(const float* x, const void* weight, int weight_kind, const float* bias, float* y,
                int64_t rows, int64_t width, int64_t num_out) {
  if (weight_kind != kFloat32)
    linear_bf16(x, {static_cast<const uint16_t*>(weight), weight_kind == kPackedBf16}, bias, y, rows, width, num_out);
  else
    linear(x, static_cast<const float*>(weight), bias, y, rows, width, num_out);
}

void any_add_product(const LlmAddProduct* args) { add_product(*args); }
void any_linear_int8(const LlmQuantizedLinear* args) { linear_int8(*args); }
void any_linear_int4(const LlmQuantizedLinear* args) { linear_int4(*args); }
void any_linear_a8w8(const LlmQuantizedLinear* args) { linear_a8w8(*args); }
void any_pack_rows(const void* rows, int64_t num_rows, int64_t row_bytes, int64_t unit, void* packed) {
  (unit == 2 ? pack_rows<uint16_t> : pack_rows<uint32_t>)(rows, num_rows, row_bytes, packed);
  llm_dismiss_threads();
}

int64_t any_pack_weight(const uint16_t* weight, uint16_t* packed, int64_t num_out, int64_t width) {
  const int64_t elements = pack_weight(weight, packed, num_out, width);
  llm_dismiss_threads();
  return elements;
}

void any_paged_attention(const LlmAttention* args) {
  if (args->cache_bits == 8)
    paged_attention(AttentionArgs<int8_t>{*args});
  else if (args->cache_bits == 16)
    paged_attention(AttentionArgs<uint16_t>{*args});
  else
    paged_attention(AttentionArgs<float>{*args});
}

}  // namespace
}  // namespace LLM_ISA

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)

extern "C" const LlmKernels JOIN(llm_kernels_, LLM_ISA);
const LlmKernels JOIN(llm_kernels_, LLM_ISA) = {
    TEXT(LLM_ISA),
    LLM_ISA::any_embedding,
    LLM_ISA::gather_rows,
    LLM_ISA::rms_norm,
    LLM_ISA::add_rms_norm,
    LLM_ISA::head_norm,
    LLM_ISA::any_linear,
    LLM_ISA::linear_swiglu,
    LLM_ISA::any_pack_weight,
    LLM_ISA::any_linear_int8,
    LLM_ISA::any_linear_int4,
    LLM_ISA::any_linear_a8w8,
    LLM_ISA::any_pack_rows,
    LLM_ISA::rotary_angles,
    LLM_ISA::any_paged_attention,
    LLM_ISA::swiglu,
    LLM_ISA::any_add_product,
    LLM_ISA::largest_of,
    LLM_ISA::find,
    LLM_ISA::weigh,
    LLM_ISA::add_up,
    LLM_ISA::at_least,
    LLM_ISA::weight_at_least,
};
