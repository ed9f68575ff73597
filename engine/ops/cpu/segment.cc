#include "segment.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>

namespace {

// A rank that is a little late is waited for awake: sleeping and being woken costs 50 us on an idle machine. It
// looks, lets others have the core, and looks again, for there may be more ranks than cores.
constexpr int kLooks = 50, kYields = 40;
constexpr timespec kNap = {0, 50'000'000};  // how soon a sleeper sees that the group is aborted

static_assert(std::atomic<uint32_t>::is_always_lock_free, "flags are shared by processes");

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, &word, op, value, timeout, nullptr, 0);
}

int64_t block_bytes(int64_t ranks) { return static_cast<int64_t>(sizeof(Header) + sizeof(float) * kValues) * ranks; }

}  // namespace

int64_t Segment::bytes(int64_t hosts, int64_t ranks) {
  const int64_t blocks = hosts > 1 ? hosts * block_bytes(ranks) : 0;
  return static_cast<int64_t>(sizeof(Flag)) * (ranks + 2) + static_cast<int64_t>(sizeof(Share)) * 2 * ranks + blocks;
}

Segment::Segment(int fd, int64_t hosts, int64_t ranks) : hosts_(hosts), ranks_(ranks) {
  struct stat found = {};
  if (fstat(fd, &found)) throw std::runtime_error(std::string("the shared memory: ") + std::strerror(errno));
  if (found.st_size != bytes(hosts, ranks))
    throw std::runtime_error("the shared memory has " + std::to_string(found.st_size) + " bytes, " +
                             std::to_string(ranks) + " ranks on each of " + std::to_string(hosts) + " hosts need " +
                             std::to_string(bytes(hosts, ranks)));
  memory_ = mmap(nullptr, static_cast<size_t>(found.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory_ == MAP_FAILED) throw std::runtime_error(std::string("the shared memory: ") + std::strerror(errno));
}

Segment::~Segment() { munmap(memory_, static_cast<size_t>(bytes(hosts_, ranks_))); }

Header& Segment::block(int64_t host) const {
  char* blocks = reinterpret_cast<char*>(shares() + 2 * ranks_);
  return *reinterpret_cast<Header*>(blocks + host * block_bytes(ranks_));
}

void Segment::raise(Flag& flag, uint32_t turn) const {
  flag.turn.store(turn);  // sequentially consistent, as is counting oneself asleep: one of the two sees the other
  if (flag.sleepers.load()) futex(flag.turn, FUTEX_WAKE, INT32_MAX, nullptr);
}

void Segment::check() const {
  if (aborted()) throw std::runtime_error("the group of ranks has been ended");
}

void Segment::wait_for(Flag& flag, uint32_t turn) const {
  const auto is_before = [turn](uint32_t reached) { return static_cast<int32_t>(reached - turn) < 0; };
  for (int yields = 0; yields < kYields; yields++) {
    for (int looks = 0; looks < kLooks; looks++) {
      if (!is_before(flag.turn.load(std::memory_order_acquire))) return;
      pause_briefly();
    }
    sched_yield();
  }
  struct Asleep {
    Flag& flag;
    explicit Asleep(Flag& flag) : flag(flag) { flag.sleepers++; }
    ~Asleep() { flag.sleepers--; }
  } asleep(flag);
  for (uint32_t reached; is_before(reached = flag.turn.load());) {
    check();
    futex(flag.turn, FUTEX_WAIT, reached, &kNap);
  }
}
