// The connections of a host's first rank to those of the other hosts.
#pragma once
#include <cstddef>
#include <vector>

#include "group.h"
#include "shared_memory.h"

class Peers {
 public:
  Peers(const SharedMemory& memory, const LlmMembership& membership);

  // Send this host's block of the memory to the others and store theirs next to it. All blocks have `bytes` bytes.
  void swap_blocks(size_t bytes) const;
  void shut_down() const;

 private:
  void send_part(size_t host, size_t bytes, size_t* sent) const;
  void receive_part(size_t host, size_t bytes, size_t* received) const;

  const SharedMemory& memory_;
  const size_t host_;
  std::vector<int> fds_;  // -1 for this host; none on a rank that is not the first
};

// Throws if two connected hosts are not at the same op, because their turns would be confused.
void must_be_alike(const Call& mine, const Call& other, const char* who, int64_t number);
