// The ranks of one model: the ops by which processes communicate. Plain C, as kernels.h.
// A process has at most one group, and calls the ops from one thread at a time.
#pragma once
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct LlmMembership {
  int64_t num_hosts, host, ranks_per_host, local_rank;  // rank = host * ranks_per_host + local_rank
  int32_t shared_memory_fd;       // memory of llm_shared_memory_bytes, zeros at first, that the ranks of a host share
  const int32_t* peer_fds;  // [num_hosts] connections of the first rank of a host to those of the others, its own -1
};

// Functions that return text return null or an error, which is valid until the thread's next call.
int64_t llm_shared_memory_bytes(int64_t num_hosts, int64_t ranks_per_host);
const char* llm_join(const LlmMembership* membership);
void llm_leave();
int64_t llm_num_ranks();

// y[i] = the sum of x[i] over all ranks. A process that has joined no group is alone.
const char* llm_all_reduce(const float* x, float* y, int64_t count);
// y [rows, width] = x [rows, cols] of each rank side by side, cut off at `width`.
const char* llm_all_gather(const float* x, float* y, int64_t rows, int64_t cols, int64_t width);
}
#pragma GCC visibility pop
