// Candidates of one row for sampling. Most rows are peaked: a narrow window below the largest logit holds all that
// top-k and top-p keep. The window is widened until it does, so no row is ever sorted.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

class Candidates {
 public:
  // Weights are exp((logit - largest) / temperature).
  void begin(const LlmKernels& kernels, const float* logits, int64_t vocab, float largest, float temperature);

  // Each `take` starts from the whole row.
  void take_all();
  void take_at_least(float threshold);
  void take_top(int64_t count, float floor);  // the likeliest, those below `floor` excepted
  void take_share(float share);               // at least those that hold this share of the row's weight

  // The shortest run of the likeliest that reaches this share of their weight, or of the row's after take_share.
  void keep_share(float share);

  double total() const { return k_->add_up(weights_.get(), count_); }
  double total_of_all();
  int32_t draw(double u) const;              // the first, in order of ids, whose running sum exceeds u * total
  std::vector<int32_t> ranked_ids() const;   // likeliest first

 private:
  int32_t id(int64_t i) const { return all_ ? static_cast<int32_t>(i) : ids_[i]; }
  bool is_before(int32_t a, int32_t b) const {  // lowest id on a tie; candidates are in order of ids
    return values_[a] > values_[b] || (values_[a] == values_[b] && a < b);
  }
  enum Measure { kCount, kWeight };
  int32_t last_of_run(double wanted, Measure measure);
  void drop_after(int32_t last);

  const LlmKernels* k_ = nullptr;
  const float* x_ = nullptr;
  int64_t vocab_ = 0, count_ = 0, reserved_ = 0;
  float largest_ = 0, floor_ = 0, temperature_ = 1;  // no candidate is below the floor
  double total_ = -1;  // that shares are shares of; -1: of the candidates
  bool all_ = false;   // ids and values are those of the row
  std::unique_ptr<int32_t[]> ids_;
  std::unique_ptr<float[]> values_, weights_;
};
