// expert_gate_up and expert_down of the catalogue, for each format of weights
#pragma once
#include "expert_matrices.h"
#include "gelu.h"
#include "linear_ops.h"

namespace LLM_ISA {

enum Activation : int64_t { kSiluGate, kGeluGate };

template <class Args>
inline vec activated(const Args& a, vec gate, vec up) {
  if (a.limit > 0) {
    gate = gate > a.limit ? set1(a.limit) : gate;
    up = up > a.limit ? set1(a.limit) : up;
    up = up < -a.limit ? set1(-a.limit) : up;
  }
  if (a.activation == kGeluGate) return gelu(gate) * up;
  return gate / (1.0f + exp(-a.alpha * gate)) * (up + a.offset);
}

template <class Args>
void write_activated(const Args& a, float* h, const float* gates, const float* ups, int64_t width) {
  for_lanes(width, [&](int64_t n, int count) {
    store_n(h + n, activated(a, load_n(gates + n, count), load_n(ups + n, count)), count);
  });
}

// From this many rows of an expert on, gates are used where they are computed. With few rows the time goes into reading
// the weights, which is faster from end to end, also where the gates wait in memory.
constexpr int64_t kGatedExpertRows = 64;

// A token is rounded once, however many experts it has.
template <class Matrices, class Args>
void gate_up(const Args& a, const ExpertWeights& w) {
  const ExpertRows rows(a.topk_ids, a.T * a.top_k, a.num_experts, Matrices::kMostRows);
  const bool is_end_to_end = !Matrices::kIsReadInPairs && rows.count < kGatedExpertRows * rows.num_blocks;
  const Matrices matrices(w, rows.count, 2, a.N, a.K, is_end_to_end);
  parallel_rows(a.T, 2 * a.K, [&](int64_t t) {
    int64_t first = -1;
    for (const int32_t *row = rows.rows + t * a.top_k, *end = row + a.top_k; row < end; row++) {
      if (*row < 0) continue;
      if (first < 0)
        matrices.put(a.x + t * a.K, first = *row);
      else
        matrices.copy(first, *row);
    }
  });
  const int64_t width = a.N / 2, outputs = Matrices::kOutputs;
  if (!is_end_to_end)
    return multiply_experts(rows, matrices, [&](const ExpertPiece& p, const float* products) {
      const int64_t first = matrices.first_of(p.pair, 0), count = matrices.count_of(p.pair, 0);
      for (int64_t row = p.block.first; row < p.block.end; row++, products += 2 * outputs)
        write_activated(a, a.h + rows.pairs[row] * width + first, products, products + outputs, count);
    });
  auto* both = static_cast<float*>(llm_scratch(6, sizeof(float) * static_cast<size_t>(rows.count * a.N)));
  multiply_experts(rows, matrices, [&](const ExpertPiece& p, const float* products) {
    for (int64_t row = p.block.first; row < p.block.end; row++)
      for (int v = 0; v < 2; v++, products += outputs) {
        float* y = both + row * a.N + matrices.half(p.pair, v) * width + matrices.first_of(p.pair, v);
        for_lanes(matrices.count_of(p.pair, v), [&](int64_t n, int count) { store_n(y + n, load_n(products + n, count), count); });
      }
  });
  parallel_rows(rows.count, a.N, [&](int64_t row) {
    const float* gates = both + row * a.N;
    write_activated(a, a.h + rows.pairs[row] * width, gates, gates + width, width);
  });
}

template <class Matrices, class Args>
void down(const Args& a, const ExpertWeights& w) {
  const ExpertRows rows(a.topk_ids, a.T * a.top_k, a.num_experts, Matrices::kMostRows);
  const Matrices matrices(w, rows.count, 1, a.N, a.K, !Matrices::kIsReadInPairs);
  parallel_rows(rows.count, 2 * a.K, [&](int64_t row) { matrices.put(a.h + rows.pairs[row] * a.K, row); });
  auto* shares = static_cast<float*>(llm_scratch(6, sizeof(float) * static_cast<size_t>(rows.count * a.N)));
  multiply_experts(rows, matrices, [&](const ExpertPiece& p, const float* products) {
    for (int64_t row = p.block.first; row < p.block.end; row++)
      for (int v = 0; v < 2; v++, products += Matrices::kOutputs) {
        const vec factor = set1(a.topk_weights[rows.pairs[row]]);
        float* share = shares + row * a.N + matrices.first_of(p.pair, v);
        for_lanes(matrices.count_of(p.pair, v), [&](int64_t n, int count) {
          store_n(share + n, factor * load_n(products + n, count), count);
        });
      }
  });
  const int32_t* of_pairs = rows.rows;
  parallel_rows(a.T, a.top_k * a.N, [=](int64_t t) {
    for_lanes(a.N, [=](int64_t n, int count) {
      vec total = set1(0.0f);
      for (const int32_t *row = of_pairs + t * a.top_k, *end = row + a.top_k; row < end; row++)
        if (*row >= 0) total += load_n(shares + *row * a.N + n, count);
      store_n(a.y + t * a.N + n, total, count);
    });
  });
}

template <class Args>
ExpertWeights weights_of(const Args& a, const void* scale, const void* zero = nullptr, int64_t group = 0) {
  return {a.weight, scale, zero, a.bias, a.weight_is_packed != 0, group};
}

// op(weights, the class of matrices of their format)
template <class Class>
struct Kind {
  using type = Class;
};

template <class Args, class Op>
void with_float_matrices(const Args& a, Op op) {
  const ExpertWeights w = weights_of(a, nullptr);
  a.weight_type == kBf16 ? op(w, Kind<Bf16Matrices>()) : op(w, Kind<PlainMatrices<float, float>>());
}

template <class Args, class Op>
void with_int4_matrices(const Args& a, Op op) {
  const ExpertWeights w = weights_of(a, a.scale, a.zero, round_up(a.K, 128) / a.G);
  if (w.group == 32)
    a.zero ? op(w, Kind<QuantizedMatrices<Int4<true, 32>>>()) : op(w, Kind<QuantizedMatrices<Int4<false, 32>>>());
  else
    a.zero ? op(w, Kind<QuantizedMatrices<Int4<true, 64>>>()) : op(w, Kind<QuantizedMatrices<Int4<false, 64>>>());
}

// The engine widens these weights when it loads a graph; what follows is for Paddle and the tests.
template <class Args, class Op>
void with_fp8_matrices(const Args& a, Op op) {
  const int64_t rows = a.num_experts * a.N;
  auto* wide = static_cast<uint16_t*>(llm_scratch(8, sizeof(uint16_t) * static_cast<size_t>(rows * a.K)));
  for (int64_t n = 0; n < rows; n++)
    for (int64_t k = 0; k < a.K; k++)
      wide[n * a.K + k] = bf16_of_fp8(a.weight[n * a.K + k], a.scale[n * a.G + (a.G > 1 ? k / 128 : 0)]);
  op(ExpertWeights{wide, nullptr, nullptr, a.bias, false, 0}, Kind<Bf16Matrices>());
}

template <class Args, class Op>
void with_mxfp4_matrices(const Args& a, Op op) {
  const int64_t rows = a.num_experts * a.N;
  auto* wide = static_cast<uint16_t*>(llm_scratch(8, sizeof(uint16_t) * static_cast<size_t>(rows * a.K)));
  for (int64_t i = 0; i < rows * a.K; i++)
    wide[i] = bf16_of(value_of_fp4(a.weight[i / 2] >> i % 2 * 4) * value_of_e8m0(a.scale[i / 32]));
  op(ExpertWeights{wide, nullptr, nullptr, a.bias, false, 0}, Kind<Bf16Matrices>());
}

#define LLM_OF_FORMAT(op) [&](const ExpertWeights& w, auto kind) { op<typename decltype(kind)::type>(a, w); }
inline void expert_gate_up(const LlmExpertGateUp& a) { with_float_matrices(a, LLM_OF_FORMAT(gate_up)); }
inline void expert_down(const LlmExpertDown& a) { with_float_matrices(a, LLM_OF_FORMAT(down)); }
inline void expert_gate_up_int4(const LlmExpertGateUpInt4& a) { with_int4_matrices(a, LLM_OF_FORMAT(gate_up)); }
inline void expert_down_int4(const LlmExpertDownInt4& a) { with_int4_matrices(a, LLM_OF_FORMAT(down)); }
inline void expert_gate_up_fp8(const LlmExpertGateUpFp8& a) { with_fp8_matrices(a, LLM_OF_FORMAT(gate_up)); }
inline void expert_down_fp8(const LlmExpertDownFp8& a) { with_fp8_matrices(a, LLM_OF_FORMAT(down)); }
inline void expert_gate_up_mxfp4(const LlmExpertGateUpMxfp4& a) { with_mxfp4_matrices(a, LLM_OF_FORMAT(gate_up)); }
inline void expert_down_mxfp4(const LlmExpertDownMxfp4& a) { with_mxfp4_matrices(a, LLM_OF_FORMAT(down)); }
#undef LLM_OF_FORMAT
inline void expert_gate_up_int8(const LlmExpertGateUpInt8& a) { gate_up<QuantizedMatrices<Int8>>(a, weights_of(a, a.scale)); }
inline void expert_down_int8(const LlmExpertDownInt8& a) { down<QuantizedMatrices<Int8>>(a, weights_of(a, a.scale)); }
inline void expert_gate_up_a8w8(const LlmExpertGateUpA8w8& a) { gate_up<QuantizedMatrices<A8w8>>(a, weights_of(a, a.scale)); }
inline void expert_down_a8w8(const LlmExpertDownA8w8& a) { down<QuantizedMatrices<A8w8>>(a, weights_of(a, a.scale)); }

}  // namespace LLM_ISA
