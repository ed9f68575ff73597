// How the rows of a weight are read: a class for each way in which they are stored
#pragma once
#include "bytes.h"
#include "nibbles.h"
#include "product.h"

namespace LLM_ISA {

// A tile holds kTileSums vectors in registers: up to kTileRows rows of x by as many of the weight as fit.
#ifdef __AVX512F__
constexpr int kTileRows = 8, kTileSums = 24;
#else
constexpr int kTileRows = 4, kTileSums = 12;
#endif
constexpr int64_t kAnyRows = int64_t{1} << 62;

// Elements of type T one after another. X: what they are multiplied with.
template <class X, class T, int64_t kDirectRows = kAnyRows>
struct Stored {
  const T* data;
  int64_t width;
  int64_t first_row = 0, first_column = 0;  // of what lies at `data`

  static constexpr int steps = 1;  // products of a block, which is read in one piece
  static constexpr int bits = 8 * sizeof(T);
  static constexpr bool is_aligned = false;             // a row may end within a block
  static constexpr int64_t direct_rows = kDirectRows;   // of x, up to which it is read as it is stored
  static constexpr int columns(int64_t rows) { return kTileSums / (rows < 4 ? 4 : static_cast<int>(rows)); }  // of a tile

  struct Row {
    const T* p;
    void open(int64_t) {}
    auto take(int64_t k, int) const { return Dot<X>::read(p + k); }
    auto take_first(int64_t k, int n) const { return Dot<X>::read_first(p + k, n); }
  };
  Row row(int64_t n, int64_t k) const { return {data + (n - first_row) * width + k - first_column}; }
  const char* address(int64_t n) const { return reinterpret_cast<const char*>(row(n, 0).p); }
};

// Made of another weight, of which what comes next is fetched.
template <class X, class Weight>
struct Unpacked : Stored<X, X> {
  static constexpr int bits = Weight::bits;
};

// 4-bit codes with a scale a group, and its zero or null. `width` counts codes.
struct Packed {
  const uint8_t* codes;
  const uint16_t *scales, *zeros;
  int64_t width;

  static constexpr int steps = Nibbles::steps;
  static constexpr int bits = 4;
  static constexpr bool is_aligned = true;
  static constexpr int64_t direct_rows = kTileRows / 2;
  static constexpr int columns(int64_t rows) { return kTileSums / (rows < 3 ? 4 : 6); }  // registers hold codes as well

  struct Row {
    const uint8_t* codes;
    const uint16_t *scales, *zeros;
    Nibbles block;
    void open(int64_t k) {
      const int64_t group = k / kCodesPerScale;
      block.open(codes + k / 2, scales + group, zeros ? zeros + group : nullptr);
    }
    auto take(int64_t, int s) const { return block.take(s); }
  };
  Row row(int64_t n, int64_t k) const {
    const int64_t code = n * width + k, group = code / kCodesPerScale;
    return {codes + code / 2, scales + group, zeros ? zeros + group : nullptr, Nibbles()};
  }
  const char* address(int64_t n) const { return reinterpret_cast<const char*>(codes + n * width / 2); }
};

// The first `count` elements of a row as x is multiplied with them, up to the end of the last product.
template <class X, class Weight>
inline void unpack(const Weight&, typename Weight::Row row, int64_t count, X* to) {
  constexpr int64_t kBlock = Weight::steps * Dot<X>::step;
  int64_t k = 0;
  for (; k + kBlock <= count; k += kBlock) {
    row.open(k);
#pragma GCC unroll 8
    for (int s = 0; s < Weight::steps; s++) Dot<X>::write(to + k + s * Dot<X>::step, row.take(k, s));
  }
  if constexpr (!Weight::is_aligned)
    if (k < count) Dot<X>::write(to + k, row.take_first(k, static_cast<int>(count - k)));
}

}  // namespace LLM_ISA
