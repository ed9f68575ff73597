// Threads that share the pieces of an op. One copy, built for the baseline.
#pragma once

#pragma GCC visibility push(default)
extern "C" {
using LlmWork = void (*)(void* context);
// work(context) in this thread, and in up to threads - 1 others that have the time to come before this one is done with
// it: two threads or more. All have left it on return. Work takes its pieces one after the other until none is left.
void llm_run_on_threads(int threads, LlmWork work, void* context);
// Ends the threads that have helped the calling one, which will not need them soon.
void llm_dismiss_threads();
}
#pragma GCC visibility pop

// body() in so many threads. Static: of code that is compiled for several instruction sets no copy may be shared.
template <class Body>
static void run_on_threads(int threads, Body body) {
  if (threads == 1) return body();
  llm_run_on_threads(threads, [](void* context) { (*static_cast<Body*>(context))(); }, &body);
}
