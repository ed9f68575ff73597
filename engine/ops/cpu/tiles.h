// The tile registers of AMX, and the products of two of them. There are eight with up to 16 rows of 64 bytes: 0 to 3
// hold sums, 4 and 5 rows of x, 6 and 7 the other operand.
#pragma once
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace LLM_ISA {

#ifdef LLM_TILES
constexpr int kTileHeight = 16;
constexpr int64_t kTileBytes = 64;  // of a row

// The layout that the processor reads.
struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

#ifndef LLM_SOFT_TILES
typedef char Memory[];  // of any length, for the compiler to know what is read and written

inline void set_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile), "m"(*static_cast<const Memory*>(from)));
}
template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*static_cast<Memory*>(to)) : "r"(to), "r"(stride), "i"(kTile));
}
template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// sums[i, n] += sum_k x[i, k] * weight[n, k]: over 32 numbers in bf16, in pairs, or 64 signed bytes, in fours.
template <int kSums, int kX, int kWeight>
inline void add_bf16_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kWeight));
}
template <int kSums, int kX, int kWeight>
inline void add_byte_products() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kX), "i"(kWeight));
}
#else
// The same without these instructions, for tests on other machines.
struct SoftTiles {
  TileShapes shapes;
  char data[8][kTileHeight][kTileBytes];
};
inline thread_local SoftTiles soft_tiles;

inline void set_shapes(const TileShapes& shapes) { soft_tiles.shapes = shapes; }
inline void release_tiles() { soft_tiles.shapes = {}; }
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  for (int i = 0; i < soft_tiles.shapes.rows[kTile]; i++)
    memcpy(soft_tiles.data[kTile][i], static_cast<const char*>(from) + i * stride, kTileBytes);
}
template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  for (int i = 0; i < soft_tiles.shapes.rows[kTile]; i++)
    memcpy(static_cast<char*>(to) + i * stride, soft_tiles.data[kTile][i], kTileBytes);
}
template <int kTile>
inline void clear_tile() {
  memset(soft_tiles.data[kTile], 0, sizeof soft_tiles.data[kTile]);
}
template <int kTile, class T>
inline T in_tile(int row, int at) {
  T number;
  memcpy(&number, soft_tiles.data[kTile][row] + at * static_cast<int>(sizeof number), sizeof number);
  return number;
}
template <int kSums, int kX, int kWeight, class T, class Sum, class Product>
inline void add_products_of_tiles(Product product) {
  constexpr int kParts = sizeof(Sum) / sizeof(T);
  for (int i = 0; i < soft_tiles.shapes.rows[kX]; i++)
    for (int n = 0; n < 16; n++) {
      Sum sums[kParts] = {}, total = 0;
      for (int k = 0; k < soft_tiles.shapes.rows[kWeight]; k++)
        for (int part = 0; part < kParts; part++)
          sums[part] += product(in_tile<kX, T>(i, kParts * k + part), in_tile<kWeight, T>(k, kParts * n + part));
      for (Sum sum : sums) total += sum;
      total += in_tile<kSums, Sum>(i, n);
      memcpy(soft_tiles.data[kSums][i] + n * static_cast<int>(sizeof total), &total, sizeof total);
    }
}
template <int kSums, int kX, int kWeight>
inline void add_bf16_products() {
  add_products_of_tiles<kSums, kX, kWeight, uint16_t, float>([](uint16_t a, uint16_t b) { return widen(a) * widen(b); });
}
template <int kSums, int kX, int kWeight>
inline void add_byte_products() {
  add_products_of_tiles<kSums, kX, kWeight, int8_t, int32_t>([](int32_t a, int32_t b) { return a * b; });
}
#endif

// Configuration of the tile registers for the lifetime of this object. Registers 0, 1 and 4 have one number of rows of
// x, 2, 3 and 5 another, 6 and 7 have 16 rows of columns.
class TileRegisters {
 public:
  ~TileRegisters() {
    if (first_) release_tiles();
  }
  void set_rows(int64_t first, int64_t second) {
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
      const bool is_second = tile == 2 || tile == 3 || tile == 5;
      shapes.bytes[tile] = kTileBytes;
      shapes.rows[tile] = static_cast<uint8_t>(tile >= 6 ? kTileHeight : is_second ? second : first);
    }
    set_shapes(shapes);
  }

 private:
  int64_t first_ = 0, second_ = 0;
};
#else
struct TileRegisters {};
#endif

}  // namespace LLM_ISA
