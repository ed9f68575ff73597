// Sums and concatenations over the ranks of a model.
//
// Within a host each rank writes its share to shared memory and raises its flag, waits for the flags of the others and
// adds up the shares itself. Shares alternate between two places: a rank that writes to a place again has seen all
// others arrive at the exchange in between, so none of them still reads it. Data longer than a share is sent in chunks.
// Between hosts the first rank of each sends the block of its host to the first ranks of the others, and writes the
// blocks that it receives to memory that its host can read.
//
// Sums are in rank order; with several hosts, first within each host and then in host order. The sum of a value is
// never split differently, so its bits depend on nothing else in the step.
#include "group.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "peers.h"
#include "shared_memory.h"

namespace {

using Shares = std::vector<const float*>;

constexpr int64_t kPiece = 4096;  // values that one thread adds up at a time
constexpr int64_t kSplit = 8192;  // from here on it pays that each of several ranks adds up a part for all

void add_piece(const Shares& shares, float* y, int64_t begin, int64_t end) {
  const float *first = shares[0], *second = shares.size() > 1 ? shares[1] : nullptr;
  if (!second) std::copy(first + begin, first + end, y + begin);
  if (second)
    for (int64_t i = begin; i < end; i++) y[i] = first[i] + second[i];
  for (size_t rank = 2; rank < shares.size(); rank++) {
    const float* share = shares[rank];
    for (int64_t i = begin; i < end; i++) y[i] += share[i];
  }
}

void add_up(const Shares& shares, float* y, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kPiece) add_piece(shares, y, i, std::min(i + kPiece, end));
}

class Group {
 public:
  explicit Group(const LlmMembership& m)
      : memory_(m.shared_memory_fd, m.num_hosts, m.ranks_per_host),
        peers_(memory_, m),
        hosts_(m.num_hosts), host_(m.host), ranks_(m.ranks_per_host), rank_(m.local_rank) {
    if (memory_.flag(rank_).is_taken.exchange(1))
      throw std::runtime_error("rank " + std::to_string(rank_) + " has joined with this shared memory before");
  }

  int64_t num_ranks() const { return hosts_ * ranks_; }

  void all_reduce(const float* x, float* y, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += kValues) {
      const int64_t size = std::min(kValues, count - begin);
      const Shares shares = exchange({false, count}, x + begin, size);
      if (hosts_ == 1 && ranks_ > 2 && size >= kSplit)
        add_up_together(shares, y + begin, size);
      else
        add_up(shares, y + begin, 0, size);
    }
  }

  void all_gather(const float* x, float* y, int64_t rows, int64_t cols, int64_t width) {
    for (int64_t begin = 0; begin < rows * cols; begin += kValues) {
      const int64_t size = std::min(kValues, rows * cols - begin);
      const Shares shares = exchange({true, rows * cols}, x + begin, size);
      for (int64_t rank = 0; rank < num_ranks(); rank++)
        for (int64_t i = begin, run; i < begin + size; i += run) {  // from column to column, or to the row's end
          const int64_t row = i / cols, at = rank * cols + i % cols;
          run = std::min(cols - i % cols, begin + size - i);
          std::copy_n(shares[rank] + i - begin, std::max(int64_t{0}, std::min(run, width - at)), y + row * width + at);
        }
    }
  }

  // The other hosts notice it by their connections.
  void abort() {
    memory_.abort();
    peers_.shut_down();
  }

 private:
  // The shares in the order in which they are added: of each rank, or of each host if there are several hosts and the
  // call is a sum. Valid until the next exchange.
  Shares exchange(const Call& call, const float* x, int64_t size) {
    memory_.check();
    exchange_++;
    Share& mine = memory_.share(rank_, exchange_);
    mine.header.call = call;
    std::copy_n(x, size, mine.values);
    meet();
    Shares shares;
    for (int64_t rank = 0; rank < ranks_; rank++) {
      const Share& share = memory_.share(rank, exchange_);
      must_be_alike(call, share.header.call, "rank", host_ * ranks_ + rank);
      shares.push_back(share.values);
    }
    return hosts_ == 1 ? shares : exchange_between_hosts(call, shares, size);
  }

  Shares exchange_between_hosts(const Call& call, const Shares& shares, int64_t size) {
    const int64_t num_parts = call.is_gather ? ranks_ : 1;
    if (rank_ == 0) {
      Header& mine = memory_.block(host_);
      float* values = reinterpret_cast<float*>(&mine + 1);
      mine.call = call;
      if (!call.is_gather) add_up(shares, values, 0, size);
      for (int64_t part = 0; call.is_gather && part < ranks_; part++)
        std::copy_n(shares[part], size, values + part * size);
      peers_.swap_blocks(sizeof(Header) + sizeof(float) * static_cast<size_t>(num_parts * size));
      memory_.raise(memory_.blocks_flag(), turn_);
    }
    memory_.wait_for(memory_.blocks_flag(), turn_);
    Shares all;
    for (int64_t host = 0; host < hosts_; host++)
      for (int64_t part = 0; part < num_parts; part++)
        all.push_back(reinterpret_cast<const float*>(&memory_.block(host) + 1) + part * size);
    return all;
  }

  // Each rank adds up one part, writes it to its own share, where no other rank reads that part, and copies the parts
  // of the others. With many ranks this moves a fraction of the memory: four ranks on two cores are a quarter faster.
  void add_up_together(const Shares& shares, float* y, int64_t size) {
    const auto start_of = [&](int64_t rank) { return rank * size / ranks_; };
    add_up(shares, y, start_of(rank_), start_of(rank_ + 1));
    std::copy(y + start_of(rank_), y + start_of(rank_ + 1), memory_.share(rank_, exchange_).values + start_of(rank_));
    meet();
    for (int64_t rank = 0; rank < ranks_; rank++)
      std::copy(shares[rank] + start_of(rank), shares[rank] + start_of(rank + 1), y + start_of(rank));
  }

  // Returns when all ranks of this host have arrived.
  void meet() {
    turn_++;
    memory_.raise(memory_.flag(rank_), turn_);
    for (int64_t rank = 0; rank < ranks_; rank++) memory_.wait_for(memory_.flag(rank), turn_);
  }

  const SharedMemory memory_;
  const Peers peers_;
  const int64_t hosts_, host_, ranks_, rank_;
  uint32_t turn_ = 0, exchange_ = 0;
};

std::unique_ptr<Group> group;

// Return values of the C functions.
template <class Body>
const char* trouble_of(Body body) {
  thread_local std::string text;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

// An op that fails ends the group: its ranks are no longer at the same turn.
const char* ended(const char* trouble) {
  if (trouble && group) group->abort();
  return trouble;
}

}  // namespace

extern "C" {

int64_t llm_shared_memory_bytes(int64_t num_hosts, int64_t ranks_per_host) { return SharedMemory::bytes(num_hosts, ranks_per_host); }

const char* llm_join(const LlmMembership* membership) {
  return trouble_of([&] {
    if (group) throw std::runtime_error("this process has joined a group already");
    group = std::make_unique<Group>(*membership);
  });
}

void llm_leave() { group.reset(); }

int64_t llm_num_ranks() { return group ? group->num_ranks() : 1; }

const char* llm_all_reduce(const float* x, float* y, int64_t count) {
  return ended(trouble_of([&] {
    if (group)
      group->all_reduce(x, y, count);
    else
      std::copy_n(x, count, y);
  }));
}

const char* llm_all_gather(const float* x, float* y, int64_t rows, int64_t cols, int64_t width) {
  return ended(trouble_of([&] {
    if (group)
      group->all_gather(x, y, rows, cols, width);
    else
      for (int64_t row = 0; row < rows; row++) std::copy_n(x + row * cols, width, y + row * width);
  }));
}
}
