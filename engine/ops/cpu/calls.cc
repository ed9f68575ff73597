#include "calls.h"

#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>

#include "catalogue_rules.h"

namespace {

// f(structure of the op, without values)
template <class F>
auto with_op(int32_t op, F f) {
#define CASE(number, Args, name) \
  case number: return f(Args{});
  switch (static_cast<LlmOp>(op)) {
    LLM_EACH_OP(CASE)
    case kNumOps: break;
  }
#undef CASE
  return f(LlmSwiglu{});
}

const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.empty() ? nullptr : last.c_str();
}

}  // namespace

extern "C" {

const char* llm_shapes(int32_t op, LlmArray* arrays, const double* attributes) {
  return with_op(op, [=](auto args) { return kept(bind(args, arrays, attributes)); });
}

const char* llm_check(int32_t op, LlmArray* arrays, const double* attributes) {
  return with_op(op, [=](auto args) {
    std::string error = bind(args, arrays, attributes);
    return kept(error.empty() ? check(args) : error);
  });
}

const char* llm_call(const LlmKernels* kernels, int32_t op, LlmArray* arrays, const double* attributes) {
  return with_op(op, [=](auto args) {
    std::string error = bind(args, arrays, attributes);
    return error.empty() ? kernels->ops[op](&args) : kept(error);
  });
}

const char* llm_record(LlmCall* head, LlmArray* arrays, const double* attributes, void* call) {
  return with_op(head->op, [=](auto args) {
    head->num_bytes = static_cast<int64_t>(sizeof *head + sizeof args);
    if (!call) return kept({});
    std::string error = bind(args, arrays, attributes);
    std::memcpy(call, head, sizeof *head);
    std::memcpy(static_cast<char*>(call) + sizeof *head, &args, sizeof args);
    return kept(error);
  });
}
}
