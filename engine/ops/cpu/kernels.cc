// Built once for every instruction set: LLM_ISA names it.
#include "kernels.h"

#include <type_traits>

#include "add_product.h"
#include "catalogue_kernels.h"
#include "sampling_passes.h"

namespace LLM_ISA {
namespace {

// Run an op on its structure, for the table.
template <class Args, class Op>
const char* call(const void* args, Op op) {
  if constexpr (std::is_void_v<decltype(op(*static_cast<const Args*>(args)))>) {
    op(*static_cast<const Args*>(args));
    return nullptr;
  } else {
    return op(*static_cast<const Args*>(args));
  }
}

void any_add_product(const LlmAddProduct* args) { add_product(*args); }
void any_pack_rows(const void* rows, int64_t num_rows, int64_t row_bytes, int64_t unit, void* packed) {
  (unit == 2 ? pack_rows<uint16_t> : pack_rows<uint32_t>)(rows, num_rows, row_bytes, packed);
  llm_dismiss_threads();
}

int64_t any_pack_weight(const uint16_t* weight, uint16_t* packed, int64_t num_out, int64_t width) {
  const int64_t elements = pack_weight(weight, packed, num_out, width);
  llm_dismiss_threads();
  return elements;
}

}  // namespace
}  // namespace LLM_ISA

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)
#define ENTRY(number, Args, name) \
  [](const void* args) { return LLM_ISA::call<Args>(args, [](const Args& a) { return LLM_ISA::name(a); }); },

extern "C" const LlmKernels JOIN(llm_kernels_, LLM_ISA);
const LlmKernels JOIN(llm_kernels_, LLM_ISA) = {
    TEXT(LLM_ISA),
    {LLM_EACH_OP(ENTRY)},
    LLM_ISA::any_pack_weight,
    LLM_ISA::any_pack_rows,
    LLM_ISA::any_add_product,
    LLM_ISA::largest_of,
    LLM_ISA::find,
    LLM_ISA::weigh,
    LLM_ISA::add_up,
    LLM_ISA::at_least,
    LLM_ISA::weight_at_least,
};
