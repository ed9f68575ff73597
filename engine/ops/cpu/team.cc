#include "team.h"

#include <pthread.h>

#include <climits>
#include <memory>
#include <thread>
#include <vector>

#include "futex.h"

namespace {

// The door to the work at hand: its number, whether it is open, and how many helpers are inside. Nobody waits for a helper
// that has not entered, so one whose core another process has delays nothing.
constexpr uint32_t kInside = 0x7fff, kOpen = 0x8000, kNumber = 0x10000;

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
  }

  ~Team() {
    open(nullptr, nullptr);
    for (std::thread& helper : helpers_) helper.join();
  }

  int threads() const { return threads_; }

  void run(LlmWork work, void* context) {
    open(work, context);
    work(context);
    if (door_.fetch_and(~kOpen) & kInside)
      while (!seen_awake([this] { return !(door_.load(std::memory_order_acquire) & kInside); })) {
      }
  }

 private:
  void open(LlmWork work, void* context) {
    work_ = work;
    context_ = context;
    number_ += kNumber;
    door_.store(number_ | kOpen);  // sequentially consistent, as is counting oneself asleep: one of the two sees the other
    if (asleep_.load()) futex(door_, FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void help() {
    for (uint32_t last = 0;;) {
      const uint32_t door = next_open(last);
      last = number_of(door);
      if (!enter(door)) continue;
      if (!work_) return;
      work_(context_);
      door_.fetch_sub(1, std::memory_order_release);
    }
  }

  static uint32_t number_of(uint32_t door) { return door & ~(kOpen | kInside); }

  // The door when it is open to work that is not `last`, which this helper has done.
  uint32_t next_open(uint32_t last) {
    uint32_t door = 0;
    const auto is_next = [&] {
      door = door_.load();
      return (door & kOpen) && number_of(door) != last;
    };
    if (seen_awake(is_next)) return door;
    asleep_++;
    while (!is_next()) futex(door_, FUTEX_WAIT_PRIVATE, door);
    asleep_--;
    return door;
  }

  // Whether the work that was seen there can still be entered.
  bool enter(uint32_t door) {
    const uint32_t number = number_of(door);
    while ((door & kOpen) && number_of(door) == number)
      if (door_.compare_exchange_weak(door, door + 1)) return true;
    return false;
  }

  alignas(64) std::atomic<uint32_t> door_{0};
  std::atomic<uint32_t> asleep_{0};
  LlmWork work_ = nullptr;
  void* context_ = nullptr;
  alignas(64) uint32_t number_ = 0;
  const int threads_;
  std::vector<std::thread> helpers_;
};

thread_local std::unique_ptr<Team> team;  // of the calling thread

}  // namespace

extern "C" {

void llm_together(int threads, LlmWork work, void* context) {
  if (threads <= 1) return work(context);
  // A child of fork has none of the threads, and their handles are not to be waited for.
  [[maybe_unused]] static const int once = pthread_atfork(nullptr, nullptr, [] { team.release(); });
  if (!team || team->threads() != threads) {
    team.reset();
    team = std::make_unique<Team>(threads);
  }
  team->run(work, context);
}

void llm_dismiss_threads() { team.reset(); }
}
