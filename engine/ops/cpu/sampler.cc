// Picks a token for each row of logits, as "Sampling" in docs/ops.md defines it, without sorting the row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "philox.h"
#include "runtime.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kRun = 1024;  // weights added up at a time when drawing

class RowSampler {
 public:
  RowSampler(const LlmKernels& kernels, const LlmSampling& sampling, int64_t vocab)
      : k_(kernels), s_(sampling), vocab_(vocab) {}

  void sample(const float* logits, int64_t row) {
    row_ = row;
    adjust(logits);
    const int32_t token = s_.token_ids[row] = pick();
    if (s_.num_logprobs[row] >= 0) report(logits, token);
  }

 private:
  // Mask, bias, penalties. x_ is the row itself where nothing changes it.
  void adjust(const float* logits) {
    const int32_t seen = s_.seen_starts[row_], seen_end = s_.seen_starts[row_ + 1];
    const int32_t bias = s_.bias_starts[row_], bias_end = s_.bias_starts[row_ + 1];
    x_ = logits;
    if (!s_.mask && seen == seen_end && bias == bias_end) return;
    adjusted_.resize(static_cast<size_t>(vocab_));
    float* x = adjusted_.data();
    x_ = x;
    if (s_.mask)
      copy_allowed(logits, x);
    else
      std::memcpy(x, logits, sizeof(float) * static_cast<size_t>(vocab_));
    for (int32_t i = bias; i < bias_end; i++) x[s_.bias_ids[i]] += s_.bias[i];
    const float repetition = s_.repetition_penalty[row_];
    for (int32_t i = seen; i < seen_end; i++) {
      float& value = x[s_.seen_ids[i]];
      value = value > 0 ? value / repetition : value * repetition;
      if (s_.seen_counts[i] > 0)
        value = value - s_.frequency_penalty[row_] * static_cast<float>(s_.seen_counts[i]) -
                s_.presence_penalty[row_];
    }
  }

  void copy_allowed(const float* logits, float* x) const {
    const int64_t words = (vocab_ + 31) / 32;
    const uint32_t* mask = s_.mask + row_ * words;
    for (int64_t w = 0; w < words; w++) {
      const int64_t start = 32 * w, end = std::min(vocab_, start + 32);
      if (mask[w] == 0)
        std::fill(x + start, x + end, -kInfinity);
      else if (mask[w] == 0xffffffff)
        std::memcpy(x + start, logits + start, sizeof(float) * static_cast<size_t>(end - start));
      else
        for (int64_t i = start; i < end; i++) x[i] = mask[w] >> (i - start) & 1 ? logits[i] : -kInfinity;
    }
  }

  int32_t pick() {
    largest_ = k_.largest(x_, vocab_);
    if (largest_ == -kInfinity) return -1;
    const float temperature = s_.temperature[row_];
    if (temperature == 0) return static_cast<int32_t>(k_.find(x_, vocab_, largest_));
    factor_ = 1 / temperature;
    gather_candidates();
    keep_top_k();
    keep_top_p();
    return draw(philox_uniform(s_.seed[row_], static_cast<uint64_t>(s_.counter[row_])));
  }

  bool has_top_k() const { return s_.top_k[row_] > 0 && s_.top_k[row_] < vocab_; }
  bool has_top_p() const { return s_.top_p[row_] < 1; }

  // The tokens that min_p keeps, or so many of the likeliest that top_k and top_p need no others:
  // those within a window below the largest logit, which widens until it holds enough.
  void gather_candidates() {
    const float min_p = s_.min_p[row_];
    const float floor = min_p > 0 ? largest_ + std::log(min_p) / factor_ : -kInfinity;
    total_ = -1;  // of the weights that top_p is a share of; -1: of the candidates
    if (has_top_p() && !has_top_k() && min_p <= 0) {
      weights_.resize(static_cast<size_t>(vocab_));
      k_.weigh(x_, weights_.data(), vocab_, largest_, factor_);
      total_ = k_.add_up(weights_.data(), vocab_);
    }
    const bool narrow = has_top_k() || total_ >= 0;
    for (float window = 8; narrow && window < 100; window *= 2) {
      const float threshold = largest_ - window / factor_;
      if (threshold <= floor) break;
      take_at_least(threshold);
      if (has_top_k() ? num_candidates() >= s_.top_k[row_]
                      : k_.add_up(weights_.data(), num_candidates()) >= s_.top_p[row_] * total_)
        return;
    }
    take_at_least(floor);
  }

  int64_t num_candidates() const { return static_cast<int64_t>(ids_.size()); }

  void take_at_least(float threshold) {
    ids_.resize(static_cast<size_t>(vocab_));
    ids_.resize(static_cast<size_t>(k_.at_least(x_, vocab_, threshold, ids_.data())));
    values_.resize(ids_.size());
    weights_.resize(ids_.size());
    for (size_t i = 0; i < ids_.size(); i++) values_[i] = x_[ids_[i]];
    k_.weigh(values_.data(), weights_.data(), num_candidates(), largest_, factor_);
  }

  // Likeliest first, lowest id on a tie. Candidates are in order of id.
  bool before(int32_t a, int32_t b) const {
    const float x = values_[static_cast<size_t>(a)], y = values_[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  }
  auto by_rank() const {
    return [this](int32_t a, int32_t b) { return before(a, b); };
  }

  void keep_top_k() {
    if (!has_top_k() || num_candidates() <= s_.top_k[row_]) return;
    start_ranking();
    const auto last = ranked_.begin() + s_.top_k[row_] - 1;
    std::nth_element(ranked_.begin(), last, ranked_.end(), by_rank());
    drop_after(*last);
  }

  // Finds the token that makes the run long enough by halving the part of the ranking it must be in:
  // linear time, where sorting a flat distribution would take longer than all the rest.
  void keep_top_p() {
    if (!has_top_p()) return;
    const double total = total_ >= 0 ? total_ : k_.add_up(weights_.data(), num_candidates());
    double missing = s_.top_p[row_] * total;
    start_ranking();
    auto first = ranked_.begin(), end = ranked_.end();
    while (end - first > 1) {
      const auto middle = first + (end - first) / 2;
      std::nth_element(first, middle, end, by_rank());
      double mass = 0;
      for (auto i = first; i != middle; ++i) mass += static_cast<double>(weights_[static_cast<size_t>(*i)]);
      if (mass >= missing) {
        end = middle;
      } else {
        missing -= mass;
        first = middle;
      }
    }
    drop_after(*first);
  }

  void start_ranking() {
    ranked_.resize(ids_.size());
    for (size_t i = 0; i < ranked_.size(); i++) ranked_[i] = static_cast<int32_t>(i);
  }

  void drop_after(int32_t last) {
    const float last_value = values_[static_cast<size_t>(last)];
    size_t kept = 0;
    for (size_t i = 0; i < ids_.size(); i++) {
      const bool keep = values_[i] > last_value || (values_[i] == last_value && static_cast<int32_t>(i) <= last);
      ids_[kept] = ids_[i];
      values_[kept] = values_[i];
      weights_[kept] = weights_[i];
      kept += keep;
    }
    ids_.resize(kept);
    values_.resize(kept);
    weights_.resize(kept);
  }

  // The first candidate whose running sum exceeds u * total.
  int32_t draw(double u) const {
    const int64_t count = num_candidates();
    double rest = u * k_.add_up(weights_.data(), count);
    int64_t start = 0;
    for (double run; start + kRun < count; start += kRun, rest -= run)
      if ((run = k_.add_up(&weights_[static_cast<size_t>(start)], kRun)) > rest) break;
    int32_t token = -1;
    for (int64_t i = start; i < count; i++) {
      const float weight = weights_[static_cast<size_t>(i)];
      if (weight == 0) continue;
      token = ids_[static_cast<size_t>(i)];
      if ((rest -= static_cast<double>(weight)) < 0) return token;
    }
    return token >= 0 ? token : static_cast<int32_t>(k_.find(x_, vocab_, largest_));
  }

  // Log-probabilities of the model's own logits: of the chosen token and of the likeliest.
  void report(const float* logits, int32_t token) {
    x_ = logits;
    largest_ = k_.largest(logits, vocab_);
    weights_.resize(static_cast<size_t>(vocab_));
    k_.weigh(logits, weights_.data(), vocab_, largest_, 1);
    const double log_total = std::log(k_.add_up(weights_.data(), vocab_)) + static_cast<double>(largest_);
    const auto logprob = [&](int32_t id) {
      return static_cast<float>(static_cast<double>(logits[id]) - log_total);
    };
    s_.logprobs[row_] = token >= 0 ? logprob(token) : -kInfinity;
    const int64_t count = std::min<int64_t>(s_.num_logprobs[row_], vocab_);
    if (count == 0) return;
    factor_ = 1;
    for (float window = 8; window < 100; window *= 2) {
      take_at_least(largest_ - window);
      if (num_candidates() >= count) break;
    }
    if (num_candidates() < count) take_at_least(-kInfinity);
    start_ranking();
    const int64_t listed = std::min(count, num_candidates());
    std::partial_sort(ranked_.begin(), ranked_.begin() + listed, ranked_.end(), by_rank());
    for (int64_t i = 0; i < listed; i++) {
      const int32_t id = ids_[static_cast<size_t>(ranked_[static_cast<size_t>(i)])];
      s_.top_ids[row_ * s_.max_logprobs + i] = id;
      s_.top_logprobs[row_ * s_.max_logprobs + i] = logprob(id);
    }
  }

  const LlmKernels& k_;
  const LlmSampling& s_;
  const int64_t vocab_;
  int64_t row_ = 0;
  const float* x_ = nullptr;         // the row's adjusted logits
  float largest_ = 0, factor_ = 1;   // of x_; 1 / temperature
  double total_ = -1;
  std::vector<float> adjusted_;
  std::vector<int32_t> ids_;         // candidates, ascending
  std::vector<float> values_, weights_;  // their logits; exp((logit - largest) / temperature)
  std::vector<int32_t> ranked_;      // indices of candidates
};

}  // namespace

extern "C" void llm_sample(const LlmKernels* kernels, const float* logits, int64_t rows, int64_t vocab,
                           const LlmSampling* sampling) {
#pragma omp parallel num_threads(llm_num_threads()) if (rows > 1)
  {
    RowSampler sampler(*kernels, *sampling, vocab);
#pragma omp for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row++) sampler.sample(logits + row * vocab, row);
  }
}
