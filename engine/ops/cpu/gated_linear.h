// swiglu(linear(..)) for the weight formats of the catalogue
#pragma once
#include "linear_ops.h"
#include "quantized_linear.h"

namespace LLM_ISA {

// From this many rows on, the gates of a quantized weight are used where they are computed. With few rows the time goes
// into reading the weight, which is faster from end to end.
constexpr int64_t kGatedRows = 64;

// The swiglu of the output of `multiply`, [T, N].
template <class Args, class Multiply>
void swiglu_of(const Args& a, Multiply multiply) {
  auto* both = static_cast<float*>(llm_scratch(6, sizeof(float) * static_cast<size_t>(a.T * a.N)));
  multiply(both);
  swiglu(LlmSwiglu{both, a.y, a.T, a.N / 2});
}

inline void gated_linear(const LlmGatedLinear& a) {
  if (!a.weight_is_packed || !linear_swiglu(a.x, a.weight, a.bias, a.y, a.T, a.K, a.N))
    swiglu_of(a, [&](float* both) { product(a, both); });
}

template <class Args>
void gated_linear(const Args& a, void (*multiply)(const QuantizedLinear&)) {
  if (a.T >= kGatedRows && a.N % kGatedOutputs == 0) return multiply(product_at(a, a.y, true));
  swiglu_of(a, [&](float* both) { multiply(product_at(a, both)); });
}

inline void gated_linear_int8(const LlmGatedLinearInt8& a) { gated_linear(a, quantized_linear<Int8>); }
inline void gated_linear_a8w8(const LlmGatedLinearA8w8& a) { gated_linear(a, quantized_linear<A8w8>); }
inline void gated_linear_int4(const LlmGatedLinearInt4& a) { gated_linear(a, int4_linear); }

}  // namespace LLM_ISA
