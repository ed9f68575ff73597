// for i in 0 .. count: body(i), on all threads if the work is worth waking them.
#pragma once
#include <cstdint>

#include "runtime.h"
#include "thread_pool.h"

namespace LLM_ISA {

constexpr int64_t kSerialWork = 32768;  // elements touched; below this one thread is done sooner

// Pieces of `grain` go to the threads that are free, because the cores are shared with other processes.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, int64_t work, Body body) {
  const int threads = work < kSerialWork || count <= grain ? 1 : llm_num_threads();
  int64_t taken = 0;
  run_on_threads(threads, [&] {
    for (int64_t i; (i = __atomic_fetch_add(&taken, grain, __ATOMIC_RELAXED)) < count;)
      for (const int64_t end = i + grain < count ? i + grain : count; i < end; i++) body(i);
  });
}

// Rows of `width` elements each.
template <class Body>
inline void parallel_rows(int64_t rows, int64_t width, Body body) {
  const int64_t share = (rows + 4 * llm_num_threads() - 1) / (4 * llm_num_threads());
  parallel_for(rows, share > 0 ? share : 1, rows * width, body);
}

}  // namespace LLM_ISA
