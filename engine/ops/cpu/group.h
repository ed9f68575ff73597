// The ranks of one model: the ops in which processes speak with one another. Plain C, as kernels.h.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {
// Both return null, or what went wrong; the text is valid until the thread's next call.
// y[i] = the sum of x[i] over all ranks. A process that has joined no group is alone.
const char* llm_all_reduce(const float* x, float* y, int64_t count);
// y [rows, width] = x [rows, cols] of each rank side by side, cut off at `width`.
const char* llm_all_gather(const float* x, float* y, int64_t rows, int64_t cols, int64_t width);
int llm_num_ranks();
}
#pragma GCC visibility pop
