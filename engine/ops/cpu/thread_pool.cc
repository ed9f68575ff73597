#include "thread_pool.h"

#include <pthread.h>

#include <climits>
#include <memory>
#include <thread>
#include <vector>

#include "futex.h"

namespace {

// The state word of the current work: its number, whether helpers may still enter, and how many have entered. The
// caller does not wait for a helper that has not entered, so a helper whose core another process uses delays nothing.
constexpr uint32_t kInside = 0x7fff, kOpen = 0x8000, kNumber = 0x10000;

bool is_open(uint32_t door) { return door & kOpen; }
uint32_t number_of(uint32_t door) { return door / kNumber; }

class ThreadPool {
 public:
  explicit ThreadPool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
  }

  ~ThreadPool() {
    open(nullptr, nullptr);
    for (std::thread& helper : helpers_) helper.join();
  }

  int threads() const { return threads_; }

  void run(LlmWork work, void* context) {
    open(work, context);
    work(context);
    if (door_.fetch_sub(kOpen) & kInside)
      while (!seen_awake([this] { return !(door_ & kInside); })) {
      }
  }

 private:
  // All changes of `door_` and `asleep_` are sequentially consistent, so either the thread that opens the door sees the
  // sleeper, or the sleeper sees the open door.
  void open(LlmWork work, void* context) {
    work_ = work;
    context_ = context;
    door_ += kNumber | kOpen;
    if (asleep_) futex(door_, FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void help() {
    for (uint32_t last = 0;;) {  // the number of the work that this helper has done
      wait_for_more_than(last);
      const uint32_t door = door_++;
      if (has_more_than(last, door)) {
        last = number_of(door);
        if (!work_) return;
        work_.load()(context_);
      }
      door_--;
    }
  }

  void wait_for_more_than(uint32_t last) {
    uint32_t door = 0;
    const auto is_there = [&] { return has_more_than(last, door = door_); };
    if (seen_awake(is_there)) return;
    asleep_++;
    while (!is_there()) futex(door_, FUTEX_WAIT_PRIVATE, door);
    asleep_--;
  }

  // The end counts as more whatever its number is, because numbers wrap around.
  bool has_more_than(uint32_t last, uint32_t door) const { return is_open(door) && (number_of(door) != last || !work_); }

  alignas(64) std::atomic<uint32_t> door_{0};
  std::atomic<uint32_t> asleep_{0};
  std::atomic<LlmWork> work_{nullptr};  // null: the end
  void* context_ = nullptr;
  const int threads_;
  std::vector<std::thread> helpers_;
};

thread_local std::unique_ptr<ThreadPool> pool;  // of the calling thread

}  // namespace

extern "C" {

void llm_run_on_threads(int threads, LlmWork work, void* context) {
  // A child of fork has none of the threads and must not join them.
  [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] { pool.release(); });
  if (!pool || pool->threads() != threads) {
    pool.reset();
    pool = std::make_unique<ThreadPool>(threads);
  }
  pool->run(work, context);
}

void llm_dismiss_threads() { pool.reset(); }
}
