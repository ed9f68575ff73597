// Waiting for a word of memory to change.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

// A waiting thread polls and yields its core in turn for about 50 us, then sleeps, because waking it up costs that
// much.
constexpr int kLooks = 50, kYields = 40;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Return whether is_done() became true within that time.
template <class IsDone>
inline bool seen_awake(IsDone is_done) {
  for (int yields = 0; yields < kYields; yields++) {
    for (int looks = 0; looks < kLooks; looks++) {
      if (is_done()) return true;
      pause_briefly();
    }
    sched_yield();
  }
  return false;
}

inline long futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout = nullptr) {
  return syscall(SYS_futex, &word, op, value, timeout, nullptr, 0);
}
