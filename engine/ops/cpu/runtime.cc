// Picks the instruction set; owns the number of threads and the scratch memory.
#include "runtime.h"

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "kernels.h"

#ifdef LLM_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct Choice {
  const char* isa;
  const LlmKernels* kernels;  // null when this build has none for it
  bool (*is_supported)();
};

bool always() { return true; }

}  // namespace

// Weak: a build may have the kernels of one instruction set only.
#define KERNELS(isa) extern "C" __attribute__((weak)) const LlmKernels llm_kernels_##isa
KERNELS(portable);
#ifdef LLM_X86
KERNELS(avx2);
KERNELS(avx512);
KERNELS(avx512_bf16);
KERNELS(amx);
#endif

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
// Products of bf16 and of bytes in tile registers, which the operating system has to be asked for: it must save them.
bool has_amx() {
#ifdef LLM_SOFT_TILES
  return has_avx512_bf16();
#else
  constexpr unsigned kBf16 = 1 << 22, kTiles = 1 << 24, kBytes = 1 << 25, kAll = kBf16 | kTiles | kBytes;
  constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, since Linux 5.16
  unsigned a, b, c, d = 0;
  const bool is_there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll && has_avx512_bf16();
  return is_there && syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
#endif
}
#endif

const Choice kChoices[] = {
#ifdef LLM_X86
    {"amx", &llm_kernels_amx, has_amx},
    {"avx512_bf16", &llm_kernels_avx512_bf16, has_avx512_bf16},
    {"avx512", &llm_kernels_avx512, has_avx512},
    {"avx2", &llm_kernels_avx2, has_avx2},
#endif
    {"portable", &llm_kernels_portable, always},
};

std::atomic<int> num_threads{0};

constexpr size_t kLargePage = 2 << 20;

struct Scratch {
  void* memory = nullptr;
  size_t bytes = 0;
  ~Scratch() { std::free(memory); }
};
thread_local Scratch scratch[9];

}  // namespace

extern "C" {

const LlmKernels* llm_kernels(const char* isa) {
  for (const Choice& choice : kChoices)
    if (choice.kernels && (!isa || !std::strcmp(isa, choice.isa)) && choice.is_supported()) return choice.kernels;
  return nullptr;
}

const char* llm_isas(int only_supported, int only_built) {
  thread_local std::string names;
  names.clear();
  for (const Choice& choice : kChoices)
    if ((!only_supported || choice.is_supported()) && (!only_built || choice.kernels))
      names += (names.empty() ? "" : ",") + std::string(choice.isa);
  return names.c_str();
}

int llm_num_threads() {
  const int count = num_threads.load(std::memory_order_relaxed);
  if (count > 0) return count;
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : CPU_COUNT(&allowed);
}

void llm_set_num_threads(int count) { num_threads = count; }

void* llm_scratch(int slot, size_t bytes) {
  Scratch& s = scratch[slot];
  if (s.bytes < bytes) {
    std::free(s.memory);
    const size_t page = bytes < kLargePage ? 4096 : kLargePage;
    s.bytes = (bytes + bytes / 4 + page - 1) / page * page;
    s.memory = std::aligned_alloc(page, s.bytes);
    if (!s.memory) throw std::bad_alloc();
    if (page == kLargePage) madvise(s.memory, s.bytes, MADV_HUGEPAGE);
  }
  return s.memory;
}
}
