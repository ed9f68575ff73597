// Threads that share the pieces of an op. One copy, built for the baseline.
#pragma once

#pragma GCC visibility push(default)
extern "C" {
using LlmWork = void (*)(void* context);
// Run work(context) in this thread, and in up to threads - 1 others that arrive before this one has finished. `threads`
// is at least two. All threads have left the work on return. Work takes its pieces one by one until none is left.
void llm_run_on_threads(int threads, LlmWork work, void* context);
// End the helper threads of the calling thread, which will not need them soon.
void llm_dismiss_threads();
}
#pragma GCC visibility pop

// Run body() in `threads` threads. It is static, because code that is compiled for several instruction sets must not
// share a copy.
template <class Body>
static void run_on_threads(int threads, Body body) {
  if (threads == 1) return body();
  llm_run_on_threads(threads, [](void* context) { (*static_cast<Body*>(context))(); }, &body);
}
