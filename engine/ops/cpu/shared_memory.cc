#include "shared_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "futex.h"

namespace {

constexpr timespec kNap = {0, 50'000'000};  // how soon a sleeper sees that the group is aborted

static_assert(std::atomic<uint32_t>::is_always_lock_free, "flags are shared by processes");

int64_t block_bytes(int64_t ranks) { return static_cast<int64_t>(sizeof(Header) + sizeof(float) * kValues) * ranks; }

}  // namespace

int64_t SharedMemory::bytes(int64_t hosts, int64_t ranks) {
  const int64_t blocks = hosts > 1 ? hosts * block_bytes(ranks) : 0;
  return static_cast<int64_t>(sizeof(Flag)) * (ranks + 2) + static_cast<int64_t>(sizeof(Share)) * 2 * ranks + blocks;
}

SharedMemory::SharedMemory(int fd, int64_t hosts, int64_t ranks) : hosts_(hosts), ranks_(ranks) {
  struct stat found = {};
  if (fstat(fd, &found)) throw std::runtime_error(std::string("the shared memory: ") + std::strerror(errno));
  if (found.st_size != bytes(hosts, ranks))
    throw std::runtime_error("the shared memory has " + std::to_string(found.st_size) + " bytes, " +
                             std::to_string(ranks) + " ranks on each of " + std::to_string(hosts) + " hosts need " +
                             std::to_string(bytes(hosts, ranks)));
  memory_ = mmap(nullptr, static_cast<size_t>(found.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory_ == MAP_FAILED) throw std::runtime_error(std::string("the shared memory: ") + std::strerror(errno));
}

SharedMemory::~SharedMemory() { munmap(memory_, static_cast<size_t>(bytes(hosts_, ranks_))); }

Header& SharedMemory::block(int64_t host) const {
  char* blocks = reinterpret_cast<char*>(shares() + 2 * ranks_);
  return *reinterpret_cast<Header*>(blocks + host * block_bytes(ranks_));
}

void SharedMemory::raise(Flag& flag, uint32_t turn) const {
  flag.turn.store(turn);  // sequentially consistent, as is counting oneself asleep: one of the two sees the other
  if (flag.sleepers.load()) futex(flag.turn, FUTEX_WAKE, INT32_MAX);
}

void SharedMemory::check() const {
  if (aborted()) throw std::runtime_error("the group of ranks has been ended");
}

void SharedMemory::wait_for(Flag& flag, uint32_t turn) const {
  const auto is_before = [turn](uint32_t reached) { return static_cast<int32_t>(reached - turn) < 0; };
  if (seen_awake([&] { return !is_before(flag.turn.load(std::memory_order_acquire)); })) return;
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
