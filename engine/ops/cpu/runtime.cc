// Picks the instruction set; owns the number of threads and the scratch memory.
#include "runtime.h"

#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "kernels.h"

namespace {

struct Choice {
  const LlmKernels* kernels;
  bool (*is_supported)();
};

bool always() { return true; }

}  // namespace

extern "C" {
extern const LlmKernels llm_kernels_portable;
#ifdef LLM_X86
extern const LlmKernels llm_kernels_avx2, llm_kernels_avx512, llm_kernels_avx512_bf16;
#endif
}

namespace {

#ifdef LLM_X86
// The compiler's run-time checks these of the operating system as well (it must save the wide registers).
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2();
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

const Choice kChoices[] = {
#ifdef LLM_X86
    {&llm_kernels_avx512_bf16, has_avx512_bf16},
    {&llm_kernels_avx512, has_avx512},
    {&llm_kernels_avx2, has_avx2},
#endif
    {&llm_kernels_portable, always},
};

std::atomic<int> num_threads{0};

struct Scratch {
  void* memory = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(memory); }
};
thread_local Scratch scratch[5];

}  // namespace

extern "C" {

const LlmKernels* llm_kernels(const char* isa) {
  for (const Choice& choice : kChoices)
    if ((!isa || !std::strcmp(isa, choice.kernels->isa)) && choice.is_supported()) return choice.kernels;
  return nullptr;
}

const char* llm_isas(int only_supported) {
  thread_local std::string names;
  names.clear();
  for (const Choice& choice : kChoices)
    if (!only_supported || choice.is_supported()) names += (names.empty() ? "" : ",") + std::string(choice.kernels->isa);
  return names.c_str();
}

int llm_num_threads() {
  const int count = num_threads.load(std::memory_order_relaxed);
  return count > 0 ? count : omp_get_max_threads();
}

void llm_set_num_threads(int count) { num_threads = count; }

void* llm_scratch(int slot, size_t bytes) {
  Scratch& s = scratch[slot];
  if (s.bytes < bytes) {
    std::free(s.memory);
    s.bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    s.memory = std::aligned_alloc(4096, s.bytes);
    if (!s.memory) throw std::bad_alloc();
  }
  return s.memory;
}
}
