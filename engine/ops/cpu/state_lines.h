// The state that a layer keeps of a request: lines of `width` float32 in some rows of a cache, one after another
#pragma once
#include "catalogue.h"
#include "vec.h"

namespace LLM_ISA {

constexpr int64_t kMaxRejected = 12;  // last positions of a step that the next one may compute again

struct StateLines {
  char* cache;
  const int32_t* rows;  // of the cache, in the order of the lines
  int64_t row_bytes, width, lines_per_row;

  float* at(int64_t line) const {
    char* row = cache + rows[line / lines_per_row] * row_bytes;
    return reinterpret_cast<float*>(row) + line % lines_per_row * width;
  }
  // body(lines, index of the first, how many) for each part of `count` lines that lies in one piece
  template <class Body>
  void each_piece(int64_t first, int64_t count, Body body) const {
    for (int64_t i = 0; i < count;) {
      const int64_t n = min(count - i, lines_per_row - (first + i) % lines_per_row);
      body(at(first + i), i, n);
      i += n;
    }
  }
};

template <class Args>
inline StateLines state_of(const Args& a, int64_t request) {
  const int64_t size = a.state_type == kF32 ? 4 : a.state_type == kI8 ? 1 : 2;
  const int64_t row_bytes = a.planes * a.slices * a.rows * a.row_width * size;
  return {static_cast<char*>(a.state), a.state_tables + request * a.num_parts, row_bytes, a.head_dim,
          row_bytes / (4 * a.head_dim)};
}

}  // namespace LLM_ISA
