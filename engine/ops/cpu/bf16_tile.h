// A tile of a bf16 linear layer: some rows of x times two panels of a weight, by tile registers or by vectors.
#pragma once
#include "product.h"
#include "tiles.h"

#ifdef LLM_BF16_PANELS
namespace LLM_ISA {

// A tile holds the sums of up to kPackedRows rows of x with two panels in registers. Its results after a chunk of K
// (see linear.h) are added to sums in memory. An output is the same operations in the same order in every tile.
// kDepth: columns at a time; rows and panels are padded with zeros.
#ifdef LLM_TILES
constexpr int kPackedRows = 2 * kTileHeight, kDepth = 32;
#elif defined(__AVX512BF16__)
constexpr int kPackedRows = 12, kDepth = 2;
#else
constexpr int kPackedRows = 6, kDepth = 4;
#endif

// Operands of a tile: rows of x from `x` on, and as many pairs of columns of two panels.
struct PackedTile {
  const bf16_x* x;
  const uint16_t* panels[2];
  int64_t x_stride, pairs;
  const char* ahead[2];  // what is wanted next, as much as there is of the panels
  float* sums;           // [rows, 2 W]
  bool is_first;         // sums begin here
};

// kAhead: after this many panels the next is prefetched.
template <int kAhead>
[[gnu::always_inline]] inline void fetch(const char* wanted) {
  kAhead == 2 ? prefetch_once(wanted) : prefetch(wanted);
}

#ifdef LLM_TILES
template <int kAhead, bool kTwo>  // more rows than one register has
[[gnu::noinline]] inline void multiply_registers(const PackedTile& a) {
  constexpr int64_t stride = 2 * W * sizeof(float);
  float* more = a.sums + kTileHeight * 2 * W;
  if (a.is_first) {
    clear_tile<0>(), clear_tile<1>();
    if (kTwo) clear_tile<2>(), clear_tile<3>();
  } else {
    load_tile<0>(a.sums, stride), load_tile<1>(a.sums + W, stride);
    if (kTwo) load_tile<2>(more, stride), load_tile<3>(more + W, stride);
  }
  for (int64_t k = 0; k < a.pairs; k += W) {
    for (int64_t pair = k; pair < k + W; pair++)
#pragma GCC unroll 2
      for (int v = 0; v < kAhead; v++) fetch<kAhead>(a.ahead[v] + pair * kTileBytes);
    load_tile<6>(a.panels[0] + k * 2 * W, kTileBytes), load_tile<7>(a.panels[1] + k * 2 * W, kTileBytes);
    load_tile<4>(a.x + 2 * k, 2 * a.x_stride);
    add_bf16_products<0, 4, 6>(), add_bf16_products<1, 4, 7>();
    if (kTwo) {
      load_tile<5>(a.x + kTileHeight * a.x_stride + 2 * k, 2 * a.x_stride);
      add_bf16_products<2, 5, 6>(), add_bf16_products<3, 5, 7>();
    }
  }
  store_tile<0>(a.sums, stride), store_tile<1>(a.sums + W, stride);
  if (kTwo) store_tile<2>(more, stride), store_tile<3>(more + W, stride);
}

template <int kAhead>
inline void multiply_tile(int64_t rows, const PackedTile& a, TileRegisters& registers) {
  registers.set_rows(min(rows, kTileHeight), rows > kTileHeight ? rows - kTileHeight : 1);
  rows > kTileHeight ? multiply_registers<kAhead, true>(a) : multiply_registers<kAhead, false>(a);
}
#else
#ifdef __AVX512BF16__
template <int M, int kAhead>
[[gnu::noinline]] inline void multiply_tile(const PackedTile& a) {
  vec sums[2 * M] = {};
  for (int64_t k = 0; k < a.pairs; k++) {
    bf16_vec columns[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) columns[v] = load_bf16(a.panels[v] + k * 2 * W);
#pragma GCC unroll 2
    for (int v = 0; v < kAhead; v++) fetch<kAhead>(a.ahead[v] + k * 4 * W);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      int32_t pair;
      __builtin_memcpy(&pair, a.x + i * a.x_stride + 2 * k, sizeof pair);
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++)
        sums[2 * i + v] = dot_bf16((bf16_vec)_mm512_set1_epi32(pair), columns[v], sums[2 * i + v]);
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < 2 * M; i++) {
    float* to = a.sums + i * W;
    store(to, a.is_first ? sums[i] : load(to) + sums[i]);
  }
}
#else
template <int M, int kAhead>
[[gnu::noinline]] inline void multiply_tile(const PackedTile& a) {
  vec sums[2 * M] = {};
  for (int64_t k = 0; k < a.pairs; k += 2) {
#pragma GCC unroll 2
    for (int v = 0; v < kAhead; v++) fetch<kAhead>(a.ahead[v] + k * 4 * W);
#pragma GCC unroll 4
    for (int column = 0; column < 4; column++) {
      vec columns[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const auto pairs = (int_vec)load_bf16(a.panels[v] + (k + column / 2) * 2 * W);
        columns[v] = (vec)(column % 2 ? pairs & static_cast<int32_t>(0xffff0000) : pairs << 16);
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; i++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
          sums[2 * i + v] = fma(set1(a.x[i * a.x_stride + 2 * k + column]), columns[v], sums[2 * i + v]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < 2 * M; i++) {
    float* to = a.sums + i * W;
    store(to, a.is_first ? sums[i] : load(to) + sums[i]);
  }
}
#endif

template <int kAhead>
inline void multiply_tile(int64_t rows, const PackedTile& a, TileRegisters&) {
  switch (rows) {
    case 1: return multiply_tile<1, kAhead>(a);
    case 2: return multiply_tile<2, kAhead>(a);
    case 3: return multiply_tile<3, kAhead>(a);
    case 4: return multiply_tile<4, kAhead>(a);
    case 5: return multiply_tile<5, kAhead>(a);
    case 6: return multiply_tile<6, kAhead>(a);
#ifdef __AVX512BF16__
    case 7: return multiply_tile<7, kAhead>(a);
    case 8: return multiply_tile<8, kAhead>(a);
    case 9: return multiply_tile<9, kAhead>(a);
    case 10: return multiply_tile<10, kAhead>(a);
    case 11: return multiply_tile<11, kAhead>(a);
    case 12: return multiply_tile<12, kAhead>(a);
#endif
  }
}
#endif

}  // namespace LLM_ISA
#endif
