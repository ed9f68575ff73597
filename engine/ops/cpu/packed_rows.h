// [num_rows, row_bytes] as panels [num_rows / kPanel, row_bytes / unit, kPanel]: with a row in each lane no sum has to
// be added up across lanes, and memory is read from end to end.
#pragma once
#include "kernels.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

constexpr int64_t kPanel = 32;
constexpr int64_t kGatedOutputs = 2 * kPanel;  // a gated product takes an N that is a multiple of this

// A linear layer whose weight is stored with 8 or 4 bits per element. K: the width of x; K' is K, rounded up to 128.
// The packed arrays are in the order of pack_rows, which is read fastest: the weight, and for two codes a byte also the
// scale and the zero.
struct QuantizedLinear {
  const float* x;      // [T, K]
  const void* weight;  // int8 [N, K], or uint8 [N, K' / 2]: two codes a byte
  const void* scale;   // float32 [N], or bf16 [N, K' / group]
  const void* zero;    // with two codes a byte: as scale, or null
  const float* bias;   // [N], or null
  float* y;            // [T, N]; gated: swiglu of that, [T, N / 2]
  int64_t rows, width, num_out;
  int64_t group;  // codes that share a scale, where there are two a byte: 64 or 32
  bool is_packed, is_gated;
};

template <class Unit>
constexpr int64_t units_of(int64_t bytes) {
  return (bytes + static_cast<int64_t>(sizeof(Unit)) - 1) / static_cast<int64_t>(sizeof(Unit));
}

// The panel that begins with row n. It is padded with rows of zeros.
template <class Unit>
inline void pack_panel(const char* rows, int64_t num_rows, int64_t row_bytes, int64_t n, Unit* panel) {
  const int64_t units = units_of<Unit>(row_bytes);
  for (int64_t i = 0; i < kPanel; i++)
    for (int64_t k = 0; k < units; k++) {
      const int64_t start = k * static_cast<int64_t>(sizeof(Unit));
      Unit unit = 0;
      if (n + i < num_rows)
        __builtin_memcpy(&unit, rows + (n + i) * row_bytes + start, static_cast<size_t>(min(sizeof(Unit), row_bytes - start)));
      panel[k * kPanel + i] = unit;
    }
}

template <class Unit>
inline void pack_rows(const void* rows, int64_t num_rows, int64_t row_bytes, void* panels) {
  const int64_t of_panel = kPanel * units_of<Unit>(row_bytes);
  parallel_rows((num_rows + kPanel - 1) / kPanel, of_panel, [=](int64_t i) {
    pack_panel(static_cast<const char*>(rows), num_rows, row_bytes, i * kPanel, static_cast<Unit*>(panels) + i * of_panel);
  });
}

// Panel `index` of the weight, or of its scale or zero; one that is not packed is packed into scratch memory.
template <class Unit>
inline const Unit* panel_of(const QuantizedLinear& a, const void* rows, int64_t row_bytes, int64_t index, int slot) {
  const int64_t size = kPanel * units_of<Unit>(row_bytes);
  if (a.is_packed) return static_cast<const Unit*>(rows) + index * size;
  auto* panel = static_cast<Unit*>(llm_scratch(slot, sizeof(Unit) * static_cast<size_t>(size)));
  pack_panel(static_cast<const char*>(rows), a.num_out, row_bytes, index * kPanel, panel);
  return panel;
}

}  // namespace LLM_ISA
