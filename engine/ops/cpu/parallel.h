// for i in 0 .. count: body(i), on all threads where the work is worth waking them
#pragma once
#include <omp.h>

#include <cstdint>

#include "runtime.h"

namespace LLM_ISA {

constexpr int64_t kSerialWork = 32768;  // elements touched; below this one thread is done sooner

// Pieces of `grain` go to whoever is free: the cores are shared with other processes.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, int64_t work, Body body) {
  const int threads = work < kSerialWork || count <= grain ? 1 : llm_num_threads();
  if (threads == 1) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, grain)
  for (int64_t i = 0; i < count; i++) body(i);
}

// Rows of `width` elements each.
template <class Body>
inline void parallel_rows(int64_t rows, int64_t width, Body body) {
  const int64_t share = (rows + 4 * llm_num_threads() - 1) / (4 * llm_num_threads());
  parallel_for(rows, share > 0 ? share : 1, rows * width, body);
}

// Ends the threads that have helped the calling one, which will not need them soon. As long as there are more threads than
// cores libgomp has each sleep as soon as it waits, and every operation of any thread begins with waking some.
inline void dismiss_threads() { omp_pause_resource(omp_pause_soft, omp_get_initial_device()); }

}  // namespace LLM_ISA
