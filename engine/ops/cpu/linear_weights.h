// Readers of the rows of a weight.
#pragma once
#include "product.h"

namespace LLM_ISA {

// A tile holds kTileSums vectors in registers: up to kTileRows rows of x by as many of the weight as fit.
#ifdef __AVX512F__
constexpr int kTileRows = 8, kTileSums = 24;
#else
constexpr int kTileRows = 4, kTileSums = 12;
#endif

// Elements of type T one after another. X is the type of the other operand.
template <class X, class T>
struct Stored {
  const T* data;
  int64_t width;

  static constexpr int bits = 8 * sizeof(T);
  static constexpr int columns(int64_t rows) { return kTileSums / (rows < 4 ? 4 : static_cast<int>(rows)); }  // of a tile
  const T* row(int64_t n, int64_t k) const { return data + n * width + k; }
  const char* address(int64_t n) const { return reinterpret_cast<const char*>(row(n, 0)); }
};

}  // namespace LLM_ISA
