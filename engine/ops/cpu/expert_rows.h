// The rows of a step sorted by their experts, so that each matrix that is needed is read once
#pragma once
#include "kernels.h"
#include "linear.h"
#include "parallel.h"
#include "tiles.h"

namespace LLM_ISA {

// Rows first .. end of one expert.
struct ExpertBlock {
  int64_t expert, first, end;
};

// A pair is a slot of a token, t * top_k + j. A row is a pair's place among those that are sorted by experts. The experts
// with most rows come first, so that threads end at the same time. Pairs whose expert belongs to another rank, with an id
// that is not below `num_experts`, have no row.
struct ExpertRows {
  int64_t count = 0, num_blocks = 0;
  int32_t *pairs, *rows;  // [count]: the pair of each row. [num_pairs]: the row of each pair, or -1
  ExpertBlock* blocks;

  // A block has up to `most` rows.
  ExpertRows(const int32_t* ids, int64_t num_pairs, int64_t num_experts, int64_t most) {
    const auto bytes = sizeof(int32_t) * static_cast<size_t>(2 * num_pairs + 2 * num_experts);
    const auto most_blocks = static_cast<size_t>(num_pairs / most + num_experts);
    auto* memory = static_cast<char*>(llm_scratch(7, bytes + sizeof(ExpertBlock) * (most_blocks + 1)));
    blocks = reinterpret_cast<ExpertBlock*>(memory);
    pairs = reinterpret_cast<int32_t*>(memory + sizeof(ExpertBlock) * (most_blocks + 1));
    rows = pairs + num_pairs;
    int32_t *counts = rows + num_pairs, *hit = counts + num_experts;
    const auto is_here = [=](int64_t p) { return ids[p] >= 0 && ids[p] < num_experts; };
    for (int64_t e = 0; e < num_experts; e++) counts[e] = 0;
    for (int64_t p = 0; p < num_pairs; p++)
      if (is_here(p)) counts[ids[p]]++, count++;
    const int64_t num_hit = sort_hit(counts, num_experts, hit);
    int32_t row = 0;
    for (int64_t i = 0; i < num_hit; i++) {
      add_blocks(hit[i], row, counts[hit[i]], most);
      const int32_t own = counts[hit[i]];
      counts[hit[i]] = row;  // where its next row goes
      row += own;
    }
    for (int64_t p = 0; p < num_pairs; p++) {
      rows[p] = is_here(p) ? counts[ids[p]]++ : -1;
      if (rows[p] >= 0) pairs[rows[p]] = static_cast<int32_t>(p);
    }
  }

 private:
  // The experts that have rows, those with most first.
  static int64_t sort_hit(const int32_t* counts, int64_t num_experts, int32_t* hit) {
    int64_t num_hit = 0;
    for (int64_t e = 0; e < num_experts; e++) {
      if (counts[e] == 0) continue;
      int64_t at = num_hit++;
      for (; at > 0 && counts[hit[at - 1]] < counts[e]; at--) hit[at] = hit[at - 1];
      hit[at] = static_cast<int32_t>(e);
    }
    return num_hit;
  }

  void add_blocks(int64_t expert, int64_t first, int64_t own, int64_t most) {
    const int64_t cuts = (own + most - 1) / most;
    for (int64_t c = 0; c < cuts; c++)
      blocks[num_blocks++] = {expert, first + c * own / cuts, first + (c + 1) * own / cuts};
  }
};

// The matrices of all experts: of each expert one, or two, gates and what they are multiplied with. A piece of the work
// is a pair of panels of `outputs` rows each: two that follow each other in memory, or one from each half of an expert,
// which are a gate and what it is multiplied with.
struct ExpertStack {
  int64_t num_matrices, num_out, width;  // matrices of an expert; rows and columns of one
  int64_t outputs;
  bool is_end_to_end;

  ExpertStack(int64_t num_matrices, int64_t rows_of_expert, int64_t width, int64_t outputs, bool is_end_to_end)
      : num_matrices(num_matrices), num_out(rows_of_expert / num_matrices), width(width), outputs(outputs),
        is_end_to_end(is_end_to_end) {}
  int64_t num_panels() const { return (num_out + outputs - 1) / outputs; }  // of a matrix
  int64_t panels_of_expert() const { return num_matrices * num_panels(); }
  int64_t num_pairs() const { return (panels_of_expert() + 1) / 2; }
  int64_t place(int64_t pair, int v) const { return is_end_to_end ? 2 * pair + v : pair + v * num_pairs(); }  // of a panel
  bool has(int64_t pair, int v) const { return place(pair, v) < panels_of_expert(); }
  int64_t half(int64_t pair, int v) const { return place(pair, v) / num_panels(); }  // which matrix of the expert
  int64_t matrix(int64_t expert, int64_t pair, int v) const { return expert * num_matrices + half(pair, v); }
  int64_t panel(int64_t pair, int v) const { return place(pair, v) % num_panels(); }  // of that matrix
  int64_t first_of(int64_t pair, int v) const { return panel(pair, v) * outputs; }  // output
  int64_t count_of(int64_t pair, int v) const { return has(pair, v) ? min(outputs, num_out - first_of(pair, v)) : 0; }
};

// A piece, and the one that comes next.
struct ExpertPiece {
  ExpertBlock block;
  int64_t pair, next_expert, next_pair;
};

// write(piece, products) for all pieces. `matrices` is an ExpertStack that puts the products of a block with a pair of
// panels into rows of 2 * outputs.
template <class Matrices, class Write>
inline void multiply_experts(const ExpertRows& rows, const Matrices& matrices, Write write) {
  const int64_t num_pairs = matrices.num_pairs(), count = rows.num_blocks * num_pairs;
  const int64_t work = rows.count * matrices.num_out * matrices.width / 8;
  const int threads = count <= 1 || work < kSerialWork ? 1 : llm_num_threads();
  int64_t taken = 0;
  run_on_threads(threads, [&] {
    TileRegisters registers;
    take_pieces(&taken, count, threads, count >= 8 * threads, [&](int64_t i, int64_t next) {
      const int64_t then = min(next, count - 1);
      const ExpertPiece piece = {rows.blocks[i / num_pairs], i % num_pairs, rows.blocks[then / num_pairs].expert,
                                 then % num_pairs};
      const int64_t size = (piece.block.end - piece.block.first) * 2 * matrices.outputs;
      auto* products = static_cast<float*>(llm_scratch(4, sizeof(float) * static_cast<size_t>(size)));
      matrices.multiply_piece(piece, products, registers);
      write(piece, products);
    });
  });
}

}  // namespace LLM_ISA
