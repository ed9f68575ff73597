#include "group.h"

#include <algorithm>
#include <cstring>

extern "C" {

int llm_num_ranks() { return 1; }

const char* llm_all_reduce(const float* x, float* y, int64_t count) {
  std::copy_n(x, count, y);
  return nullptr;
}

const char* llm_all_gather(const float* x, float* y, int64_t rows, int64_t cols, int64_t width) {
  for (int64_t row = 0; row < rows; row++) std::copy_n(x + row * cols, width, y + row * width);
  return nullptr;
}
}
