// The memory that the ranks of one host share: a flag and two shares of each rank, and a block of each host. See
// group.cc. All ranks take the same steps ("turns"). The flag of a rank holds the turn that it has reached.
#pragma once
#include <atomic>
#include <cstdint>

constexpr int64_t kValues = 32768;  // float32 of a share: 128 KiB, so that those of a few ranks stay in the L2 cache

struct alignas(64) Flag {
  std::atomic<uint32_t> turn, sleepers, is_taken;
};

// The call that a share belongs to. It must be the same on all ranks.
struct Call {
  int64_t is_gather, count;
};

struct alignas(64) Header {
  Call call;
};

struct Share {
  Header header;
  float values[kValues];
};

// A view of the memory; the file's first word is `aborted`, which any process may set to end all waiting.
class SharedMemory {
 public:
  static int64_t bytes(int64_t num_hosts, int64_t ranks_per_host);

  SharedMemory(int fd, int64_t num_hosts, int64_t ranks_per_host);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  Flag& flag(int64_t rank) const { return flags()[rank]; }
  Flag& blocks_flag() const { return flags()[ranks_]; }
  Share& share(int64_t rank, uint32_t exchange) const { return shares()[2 * rank + exchange % 2]; }
  // The data of a host: the sum of its shares, or all of them, contiguous so that it can be sent as it is.
  Header& block(int64_t host) const;

  void raise(Flag& flag, uint32_t turn) const;     // and wake the ranks that wait for it
  void wait_for(Flag& flag, uint32_t turn) const;  // throws once the group is aborted
  void check() const;                              // likewise
  void abort() const { aborted() = 1; }

 private:
  std::atomic<uint32_t>& aborted() const { return *static_cast<std::atomic<uint32_t>*>(memory_); }
  Flag* flags() const { return static_cast<Flag*>(memory_) + 1; }
  Share* shares() const { return reinterpret_cast<Share*>(flags() + ranks_ + 1); }

  void* memory_;
  int64_t hosts_, ranks_;
};
