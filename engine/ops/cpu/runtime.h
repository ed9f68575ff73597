// State that all kernels share: the number of threads and scratch memory. One copy, built for the baseline.
#pragma once
#include <cstddef>

#pragma GCC visibility push(default)
extern "C" {
int llm_num_threads();
void llm_set_num_threads(int count);
// Return at least `bytes` of the calling thread's memory, aligned to 64; valid until it asks for the same slot again.
void* llm_scratch(int slot, size_t bytes);
}
#pragma GCC visibility pop
