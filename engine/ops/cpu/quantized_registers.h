// The same tiles for many rows, by tile registers if the processor has them.
#pragma once
#include "quantized_tile.h"
#include "tiles.h"

namespace LLM_ISA {

#ifdef LLM_TILES
constexpr int64_t kBestByVectors = 12;  // rows: one pass over the weight is enough for them
constexpr int kTurns = 4;  // registers that have sums by turns: a product takes as long as three that do not wait for it

// Codes in steps of 64, those of W outputs as the rows of a register.
struct Steps {
  const char* codes;
  int64_t stride, step_bytes;
};

// Words p.first .. p.end of outputs c W .. c W + W. Those of 4 bits are unpacked once for all tiles.
template <class F>
inline Steps steps_of(const Tile& p, int c) {
  constexpr int64_t kWordBytes = kPanel * sizeof(uint32_t);
  if constexpr (F::steps == 1) {
    return {reinterpret_cast<const char*>(p.words + p.first * kPanel + c * W), kWordBytes, kTileHeight * kWordBytes};
  } else {
    const int64_t size = kWords * F::steps * W * 4;
    auto* codes = static_cast<int_vec*>(llm_scratch(5, static_cast<size_t>(kCols * size))) + c * kWords * F::steps;
    if (p.turn == 0)
      for (int64_t w = p.first; w < p.end; w++) {
        int_vec word;
        __builtin_memcpy(&word, p.words + w * kPanel + c * W, sizeof word);
        for (int s = 0; s < F::steps; s++) codes[(w - p.first) * F::steps + s] = F::take(word, s);
      }
    return {reinterpret_cast<const char*>(codes), kTileBytes, kTileHeight * kTileBytes};
  }
}

// Prefetch of the next words while words first .. end are multiplied.
inline void ask_ahead(const Tile& p, int c, int64_t first, int64_t end) {
  for (; first < end; first += kBlock) {
    const uint32_t* ahead = p.ahead(first) + c * W;
    for (int64_t i = 0; i < kBlock; i++, ahead += kPanel) p.turns == 1 ? prefetch_once(ahead) : prefetch(ahead);
  }
}

template <int kTurn>
inline void add_step(const Steps& steps, int64_t step, const int8_t* x, int64_t width) {
  load_tile<6 + kTurn % 2>(steps.codes + step * steps.step_bytes, steps.stride);
  load_tile<4 + kTurn % 2>(x + step * kTileBytes, width);
  add_byte_products<kTurn, 4 + kTurn % 2, 6 + kTurn % 2>();
}

// totals += the numbers that the sums of group g stand for: those of one register, or of all where it has more steps.
template <class F, bool kIsFull>
[[gnu::always_inline]] inline void add_group(const QuantizedArgs<F>& q, const Tile& p, int c, int64_t g,
                                             const int_vec (&sums)[kTurns][kTileHeight], int64_t own, int64_t rows,
                                             vec (&totals)[kTileHeight]) {
  constexpr bool has_more = F::group > kTileBytes;
  const int32_t* excess = q.x.excess + g * q.x.rows + p.t;
  const float* scales = q.x.scales + g * q.x.rows + p.t;
  const vec scale = F::has_group_scales ? load(p.scales + g * kPanel + c * W) : vec();
  const vec zero = F::has_zeros ? load(p.zeros + g * kPanel + c * W) : vec();
#pragma GCC unroll 16
  for (int i = 0; i < kTileHeight; i++) {
    if (!kIsFull && i >= rows) break;
    int_vec sum = sums[has_more ? 0 : own][i];
    if (has_more) sum += sums[1][i] + sums[2][i] + sums[3][i];
    if (F::codes == 8 && !F::has_zeros) sum -= excess[i];  // bytes have a sign here
    totals[i] = add_numbers<F>(sum, scales[i], excess[i], scale, zero, totals[i]);
  }
}

// Up to kTileHeight rows of x, with the same bits as vectors give. kIsFull: exactly kTileHeight.
template <class F, bool kIsFull>
[[gnu::noinline]] inline void multiply_tile(const QuantizedArgs<F>& q, const Tile& p, int64_t rows) {
  constexpr int64_t kStepWords = kTileHeight / F::steps, kGroupSteps = F::group / kTileBytes;
  static_assert(kGroupSteps > 0, "a register holds more codes than a group");
  constexpr int64_t kSpan = kGroupSteps > kTurns ? kGroupSteps : kTurns;
  const int64_t num_steps = (p.end - p.first) / kStepWords;
  const int8_t* x = q.x.row(p.t) + p.first * F::codes;
  p.each_vec<kCols>(q.a, [&](int c, int count) {
    const Steps steps = steps_of<F>(p, c);
    vec totals[kTileHeight] = {};
    float* y = p.y + c * W;
    if (p.first > 0)
#pragma GCC unroll 16
      for (int i = 0; i < kTileHeight; i++)
        if (kIsFull || i < rows) totals[i] = load_first(y + i * p.y_stride, count);
    for (int64_t first = 0; first < num_steps; first += kSpan) {
      const int64_t end = min(first + kSpan, num_steps);
      clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
      for (int64_t step = first; step < end; step += kTurns) {
        ask_ahead(p, c, p.first + step * kStepWords, p.first + min(step + kTurns, end) * kStepWords);
        add_step<0>(steps, step, x, q.x.width);
        if (step + 1 < end) add_step<1>(steps, step + 1, x, q.x.width);
        if (step + 2 < end) add_step<2>(steps, step + 2, x, q.x.width);
        if (step + 3 < end) add_step<3>(steps, step + 3, x, q.x.width);
      }
      int_vec sums[kTurns][kTileHeight];
      store_tile<0>(sums[0], kTileBytes), store_tile<1>(sums[1], kTileBytes);
      store_tile<2>(sums[2], kTileBytes), store_tile<3>(sums[3], kTileBytes);
      for (int64_t step = first; step < end; step += kGroupSteps)
        add_group<F, kIsFull>(q, p, c, (p.first / kStepWords + step) / kGroupSteps, sums, step - first, rows, totals);
    }
    const Last last(q, p, c, count);
#pragma GCC unroll 16
    for (int i = 0; i < kTileHeight; i++)
      if (kIsFull || i < rows) store_first(y + i * p.y_stride, totals[i] * last.scale + last.bias, count);
  });
}

// Compute rows p.t .. t_end, if that is faster; otherwise do nothing, also if a register holds more codes than a group.
template <class F>
inline bool multiply_by_registers(const QuantizedArgs<F>& q, Tile p, int64_t t_end, TileRegisters& registers) {
  if constexpr (F::group < kTileBytes) {
    return false;
  } else {
    if (t_end - p.t <= kBestByVectors || q.num_words % (kTileHeight / F::steps)) return false;
    p.turns = (t_end - p.t + kTileHeight - 1) / kTileHeight;
    for (; p.turn < p.turns; p.turn++, p.t += kTileHeight, p.y += kTileHeight * p.y_stride) {
      const int64_t rows = min(kTileHeight, t_end - p.t);
      registers.set_rows(rows, rows);
      rows == kTileHeight ? multiply_tile<F, true>(q, p, rows) : multiply_tile<F, false>(q, p, rows);
    }
    return true;
  }
}
#else
template <class F>
inline bool multiply_by_registers(const QuantizedArgs<F>&, const Tile&, int64_t, TileRegisters&) {
  return false;
}
#endif

}  // namespace LLM_ISA
