// linear, linear_fp8 and linear_a8w8_fp8 of the catalogue
#pragma once
#include <cmath>
#include <cstring>

#include "catalogue.h"
#include "linear_bf16.h"

namespace LLM_ISA {

template <class Args>  // of linear, or of gated_linear: y is given apart
void product(const Args& a, float* y) {
  if (a.weight_type == kBf16)
    linear_bf16(a.x, {static_cast<const uint16_t*>(a.weight), a.weight_is_packed != 0}, a.bias, y, a.T, a.K, a.N);
  else
    linear(a.x, static_cast<const float*>(a.weight), a.bias, y, a.T, a.K, a.N);
}

inline void linear(const LlmLinear& a) { product(a, a.y); }

inline float value_of_fp8(uint8_t number) {
  const int exponent = number >> 3 & 15, mantissa = number & 7;
  const float size = exponent ? ldexpf(8.0f + static_cast<float>(mantissa), exponent - 10)
                              : ldexpf(static_cast<float>(mantissa), -9);
  return (number & 127) == 127 ? NAN : number & 128 ? -size : size;
}

// The number of the lower four bits.
inline float value_of_fp4(int code) {
  const float size = code & 6 ? ldexpf(static_cast<float>(2 + (code & 1)), (code >> 1 & 3) - 2)
                              : static_cast<float>(code & 1) / 2;
  return code & 8 ? -size : size;
}

inline float value_of_e8m0(uint8_t exponent) { return exponent == 255 ? NAN : ldexpf(1.0f, exponent - 127); }

inline uint16_t bf16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t bf16_of_fp8(uint8_t number, float scale) { return bf16_of(value_of_fp8(number) * scale); }

// The engine widens the weight when it loads a graph; this function is for Paddle and the tests.
inline void linear_fp8(const LlmLinearFp8& a) {
  auto* wide = static_cast<uint16_t*>(llm_scratch(6, sizeof(uint16_t) * static_cast<size_t>(a.N * a.K)));
  for (int64_t n = 0; n < a.N; n++)
    for (int64_t k = 0; k < a.K; k++)
      wide[n * a.K + k] = bf16_of_fp8(a.weight[n * a.K + k], a.scale[n * a.G + (a.G > 1 ? k / 128 : 0)]);
  linear_bf16(a.x, {wide, false}, a.bias, a.y, a.T, a.K, a.N);
}

// Of numbers up to 448: to the nearest 8-bit float, ties to even.
inline float rounded_to_fp8(float x) {
  int exponent;
  frexpf(x, &exponent);
  const float unit = ldexpf(1.0f, (exponent < -5 ? -5 : exponent) - 4);
  return std::isfinite(x) ? nearbyintf(x / unit) * unit : NAN;
}

// As linear_fp8, for Paddle and the tests.
inline void linear_a8w8_fp8(const LlmLinearA8w8Fp8& a) {
  const int64_t width = a.G > 1 ? 128 : a.K;
  auto* wide = static_cast<float*>(llm_scratch(6, sizeof(float) * static_cast<size_t>((a.T + a.N) * a.K)));
  float* rows = wide + a.N * a.K;
  for (int64_t n = 0; n < a.N; n++)
    for (int64_t k = 0; k < a.K; k++)
      wide[n * a.K + k] = value_of_fp8(a.weight[n * a.K + k]) * a.scale[n * a.G + (a.G > 1 ? k / 128 : 0)];
  for (int64_t t = 0; t < a.T; t++)
    for (int64_t start = 0; start < a.K; start += width) {
      const int64_t end = start + width < a.K ? start + width : a.K;
      float largest = 0;
      for (int64_t k = start; k < end; k++) largest = std::fmax(largest, std::fabs(a.x[t * a.K + k]));
      const float step = largest / 448.0f;
      for (int64_t k = start; k < end; k++)
        rows[t * a.K + k] = rounded_to_fp8(a.x[t * a.K + k] / (step == 0 ? 1.0f : step)) * step;
    }
  linear(rows, wide, a.bias, a.y, a.T, a.K, a.N);
}

}  // namespace LLM_ISA
