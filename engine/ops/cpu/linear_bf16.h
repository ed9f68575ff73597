// y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n] for a weight of bf16
#pragma once
#include "bf16_tile.h"
#include "linear.h"
#include "swiglu.h"

namespace LLM_ISA {

struct Bf16Weight {
  const uint16_t* data;
  bool is_packed;
};

#ifdef LLM_BF16_PANELS
// For products of pairs the weight is stored in panels of W rows, within a panel one pair of columns after the other:
// then lanes are along N, no sum has to be added up across them, and a panel is read from end to end.

constexpr int64_t kRowsBytes = sizeof(bf16_x) == 2 ? 400 << 10 : 256 << 10;  // of x that stay in the L2 cache while the panels pass
constexpr int64_t kAheadBytes = 4096;      // how far ahead of its use a weight is asked for, where it is used once

inline int64_t packed_width(int64_t width) { return round_up(width, kDepth); }

// square[i] = columns k + 2 i and k + 2 i + 1 of rows n .. n + W; those beyond num_out are zeros.
[[gnu::always_inline]] inline void read_square(const uint16_t* weight, int64_t n, int64_t k, int64_t width, int64_t num_out,
                                               vec* square) {
#pragma GCC unroll 16
  for (int j = 0; j < W; j++) {
    const uint16_t* from = weight + (n + j) * width + k;
    const int count = n + j < num_out ? static_cast<int>(min(2 * W, width - k)) : 0;
    if (k % 32 == 0) prefetch_once(from + W * width);  // a cache line of the next panel
    square[j] = (vec)(count == 2 * W ? load_bf16(from) : load_bf16_first(from, count));
  }
  transpose(square);
}

// Rows n .. n + W as a panel.
inline void pack_panel(const uint16_t* weight, uint16_t* panel, int64_t n, int64_t width, int64_t num_out) {
  for (int64_t k = 0; k < width; k += 2 * W) {
    vec square[W];
    read_square(weight, n, k, width, num_out, square);
    const int64_t pairs = min(W, (packed_width(width) - k) / 2);
    for (int64_t i = 0; i < pairs; i++) store(reinterpret_cast<float*>(panel + (k / 2 + i) * 2 * W), square[i]);
  }
}

inline int64_t pack_weight(const uint16_t* weight, uint16_t* packed, int64_t num_out, int64_t width) {
  if (packed)
    parallel_rows((num_out + W - 1) / W, W * width, [=](int64_t i) {
      pack_panel(weight, packed + i * W * packed_width(width), i * W, width, num_out);
    });
  return round_up(num_out, W) * packed_width(width);
}

inline void unpack_row(const uint16_t* packed, int64_t n, float* y, int64_t width) {
  const uint16_t* from = packed + n / W * W * packed_width(width) + n % W * 2;
  for (int64_t k = 0; k < width; k++) y[k] = widen(from[k / 2 * 2 * W + k % 2]);
}

struct PackedArgs {
  const bf16_x* x;  // rows of packed_width(width)
  const uint16_t* weight;
  int64_t rows, width, num_out;
  const float* bias;
  float* y;
  int64_t y_stride;
  bool is_packed, is_gated;

  int64_t stride() const { return packed_width(width); }
  int64_t panel_size() const { return W * stride(); }
  int64_t num_tiles() const { return (rows + kPackedRows - 1) / kPackedRows; }
#ifdef LLM_TILES
  int64_t first_row(int64_t tile) const { return min(tile * kPackedRows, rows); }  // a register takes as long for few rows
#else
  int64_t first_row(int64_t tile) const { return tile * rows / num_tiles(); }  // tiles are as even as can be
#endif
  // Panels come in pairs, one from each half: gates and gated values. The next pair follows both.
  int64_t num_pairs() const { return (num_out + 2 * W - 1) / (2 * W); }
  int64_t first_of(int64_t pair, int v) const { return (pair + v * num_pairs()) * W; }
};

// Outputs of rows t .. t_end of a pair of panels.
inline void write_outputs(const PackedArgs& a, int64_t pair, int64_t t, int64_t t_end, const float* sums) {
  vec bias[2];
  int count[2];
  for (int v = 0; v < 2; v++) {
    const int64_t n = a.first_of(pair, v);
    count[v] = static_cast<int>(n < a.num_out ? min(W, a.num_out - n) : 0);
    bias[v] = a.bias ? load_n(a.bias + n, count[v]) : set1(0.0f);
  }
  for (; t < t_end; t++, sums += 2 * W) {
    const vec first = load(sums) + bias[0], second = load(sums + W) + bias[1];
    if (a.is_gated) {
      store(a.y + t * a.y_stride + pair * W, swiglu(first, second));
    } else {
      float* y = a.y + t * a.y_stride;
      store_n(y + a.first_of(pair, 0), first, count[0]);
      store_n(y + a.first_of(pair, 1), second, count[1]);
    }
  }
}

// Return the address of a panel of a pair, packing it first if needed. An odd number of panels ends in a pair of twice
// the same panel.
inline const uint16_t* panel_of(const PackedArgs& a, int64_t pair, int v) {
  const int64_t n = a.first_of(pair, v) < a.num_out ? a.first_of(pair, v) : a.first_of(pair, 0);
  if (a.is_packed) return a.weight + n * a.stride();
  auto* panels = static_cast<uint16_t*>(llm_scratch(3, sizeof(uint16_t) * 2 * static_cast<size_t>(a.panel_size())));
  pack_panel(a.weight, panels + v * a.panel_size(), n, a.width, a.num_out);
  return panels + v * a.panel_size();
}

// A pair of panels, and the pair that is read next.
struct PanelPair {
  const uint16_t *panels[2], *next[2];
};

// sums = tiles first .. end of the rows times a pair of panels. The next data is prefetched as it is needed: by the first
// tiles, a chunk ahead, and finally the beginning of `next`; if there is one tile only, a little ahead of the reading.
inline void multiply_pair(const PackedArgs& a, const PanelPair& p, int64_t first, int64_t end, float* sums,
                          TileRegisters& registers) {
  const int64_t t = a.first_row(first), size = chunk_size(a.width), num_chunks = num_chunks_of(a.width);
  for (int64_t c = 0; c < num_chunks; c++) {
    const bool is_last = c + 1 == num_chunks;
    const int64_t start = c * size, pairs = (is_last ? a.stride() - start : size) / 2;
    for (int64_t tile = first; tile < end; tile++) {
      const int64_t from = a.first_row(tile), rows = a.first_row(tile + 1) - from;
      PackedTile args = {a.x + from * a.stride() + start, {}, a.stride(), pairs, {}, sums + (from - t) * 2 * W, c == 0};
      for (int v = 0; v < 2; v++) args.panels[v] = p.panels[v] + start * W;
      if (end - first == 1) {
        for (int v = 0; v < 2; v++) args.ahead[v] = reinterpret_cast<const char*>(args.panels[v]) + kAheadBytes;
        multiply_tile<2>(rows, args, registers);
      } else if (tile - first < 2) {
        const int64_t v = tile - first;
        args.ahead[0] = reinterpret_cast<const char*>(is_last ? p.next[v] : args.panels[v] + size * W);
        multiply_tile<1>(rows, args, registers);
      } else {
        multiply_tile<0>(rows, args, registers);
      }
    }
  }
}

inline void multiply_pair(const PackedArgs& a, int64_t pair, int64_t next, int64_t first, int64_t end,
                          TileRegisters& registers) {
  const int64_t t = a.first_row(first);
  auto* sums = static_cast<float*>(llm_scratch(1, sizeof(vec) * 2 * static_cast<size_t>(a.first_row(end) - t)));
  PanelPair p = {{panel_of(a, pair, 0), panel_of(a, pair, 1)}, {}};
  for (int v = 0; v < 2; v++) p.next[v] = p.panels[v] + (a.first_of(next, v) - a.first_of(pair, v)) * a.stride();
  multiply_pair(a, p, first, end, sums, registers);
  write_outputs(a, pair, t, a.first_row(end), sums);
}

inline void multiply_packed(const PackedArgs& a) {
  const int64_t tiles_at_once = kRowsBytes / (kPackedRows * static_cast<int64_t>(sizeof(bf16_x)) * a.stride()) + 1, num_tiles = a.num_tiles();
  const int64_t num_blocks = (num_tiles + tiles_at_once - 1) / tiles_at_once, num_pairs = a.num_pairs();
  const int64_t count = num_blocks * num_pairs;
  const int threads = count <= 1 || a.rows * a.num_out * a.width / 8 < kSerialWork ? 1 : llm_num_threads();
  const bool looks_ahead = num_tiles > 1 || count >= 8 * threads;
  int64_t taken = 0;
  run_on_threads(threads, [&] {
    TileRegisters registers;
    take_pieces(&taken, count, threads, looks_ahead, [&](int64_t i, int64_t next) {
      const int64_t block = i / num_pairs;
      multiply_pair(a, i % num_pairs, min(next, count - 1) % num_pairs, block * num_tiles / num_blocks,
                    (block + 1) * num_tiles / num_blocks, registers);
    });
  });
}

inline void linear_bf16(const float* x, const Bf16Weight& weight, const float* bias, float* y, int64_t rows,
                        int64_t width, int64_t num_out) {
  const bf16_x* rounded = rounded_rows(x, rows, width, kDepth);
  multiply_packed({rounded, weight.data, rows, width, num_out, bias, y, num_out, weight.is_packed, false});
}

inline bool linear_swiglu(const float* x, const void* weight, const float* bias, float* y, int64_t rows, int64_t width,
                          int64_t num_out) {
  if (num_out % (2 * W)) return false;
  const auto* packed = static_cast<const uint16_t*>(weight);
  const bf16_x* rounded = rounded_rows(x, rows, width, kDepth);
  multiply_packed({rounded, packed, rows, width, num_out, bias, y, num_out / 2, true, true});
  return true;
}

#else
inline int64_t pack_weight(const uint16_t*, uint16_t*, int64_t, int64_t) { return 0; }
inline void unpack_row(const uint16_t*, int64_t, float*, int64_t) {}
inline bool linear_swiglu(const float*, const void*, const float*, float*, int64_t, int64_t, int64_t) { return false; }

inline void linear_bf16(const float* x, const Bf16Weight& weight, const float* bias, float* y, int64_t rows,
                        int64_t width, int64_t num_out) {
  multiply(LinearArgs<bf16_x>{rounded_rows(x, rows, width), rows, width, num_out, bias, y},
           Stored<bf16_x, uint16_t>{weight.data, width});
}
#endif

}  // namespace LLM_ISA
