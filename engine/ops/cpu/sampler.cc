// Samples a token for each row of logits, as "Sampling" in docs/ops.md defines it, without sorting the row.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "candidates.h"
#include "kernels.h"
#include "philox.h"
#include "runtime.h"
#include "thread_pool.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();  // what is banned is lower

// Work memory of a thread, kept from call to call.
struct Workspace {
  std::vector<float> adjusted;
  std::vector<std::pair<double, double>> tokens;
  Candidates candidates;
};

class RowSampler {
 public:
  RowSampler(const LlmKernels& kernels, const LlmSampling& sampling, int64_t vocab, int64_t row, Workspace& space)
      : k_(kernels), s_(sampling), values_(sampling.values[row]), vocab_(vocab), row_(row), space_(space) {}

  void sample(const float* logits) {
    const int32_t token = s_.token_ids[row_] = s_.given ? s_.given[row_] : pick(adjusted(logits));
    if (values_.num_logprobs >= 0) report(logits, token);
  }

 private:
  // Mask, bias, penalties; the row itself where nothing changes it.
  const float* adjusted(const float* logits) {
    const int32_t seen = values_.seen_starts, seen_end = values_.seen_ends;
    const int32_t bias = s_.bias_starts ? s_.bias_starts[row_] : 0;
    const int32_t bias_end = s_.bias_starts ? s_.bias_starts[row_ + 1] : 0;
    if (!s_.mask && seen == seen_end && bias == bias_end) return logits;
    space_.adjusted.resize(static_cast<size_t>(vocab_));
    float* x = space_.adjusted.data();
    if (s_.mask)
      copy_allowed(logits, x);
    else
      std::memcpy(x, logits, sizeof(float) * static_cast<size_t>(vocab_));
    for (int32_t i = bias; i < bias_end; i++) x[s_.bias_ids[i]] += s_.bias[i];
    for (int32_t i = seen; i < seen_end; i++)
      if (static_cast<uint32_t>(s_.seen_ids[i]) < vocab_) penalize(x[s_.seen_ids[i]], s_.seen_counts[i]);
    return x;
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

  void penalize(float& logit, int32_t count) const {
    const float repetition = values_.repetition_penalty;
    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (count > 0)
      logit = logit - values_.frequency_penalty * static_cast<float>(count) - values_.presence_penalty;
  }

  // The logit top_n_sigma standard deviations below the largest; banned tokens have no part in them.
  float sigma_floor(const float* x, float largest) const {
    int64_t count = 0;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < vocab_; i++)
      if (x[i] > -kInfinity) count++, sum += static_cast<double>(x[i]);
    const double mean = sum / static_cast<double>(count);
    for (int64_t i = 0; i < vocab_; i++)
      if (x[i] > -kInfinity) squares += (static_cast<double>(x[i]) - mean) * (static_cast<double>(x[i]) - mean);
    const double sigma = std::sqrt(squares / static_cast<double>(count));
    return static_cast<float>(static_cast<double>(largest) - static_cast<double>(values_.top_n_sigma) * sigma);
  }

  // typical_p: of the tokens that are at least `floor`, those nearest to the mean logit, weighted by probability, stay:
  // as few as have this share of the probability, and all that are as near as the last of them.
  const float* typical(const float* x, float largest, float floor) {
    std::vector<std::pair<double, double>>& tokens = space_.tokens;  // distance and weight
    tokens.clear();
    double total = 0, sum = 0;
    for (int64_t i = 0; i < vocab_; i++) {
      if (!(x[i] >= floor)) continue;
      const double shifted = static_cast<double>(x[i]) - static_cast<double>(largest), weight = std::exp(shifted);
      tokens.emplace_back(static_cast<double>(x[i]), weight);
      total += weight, sum += weight * shifted;
    }
    const double mean = static_cast<double>(largest) + sum / total;
    const auto distance = [&](double logit) { return static_cast<float>(std::abs(logit - mean)); };
    for (auto& token : tokens) token.first = static_cast<double>(distance(token.first));
    // Halve the range that has the last token that stays. `nearer` is the weight of those before it.
    auto low = tokens.begin(), high = tokens.end();
    double nearer = 0;
    while (high - low > 1) {
      const auto middle = low + (high - low) / 2;
      std::nth_element(low, middle, high);
      double within = nearer;
      for (auto token = low; token < middle; token++) within += token->second;
      if (within > 0 && within >= static_cast<double>(values_.typical_p) * total)
        high = middle;
      else
        low = middle, nearer = within;
    }
    const float bound = static_cast<float>(low->first);
    space_.adjusted.resize(static_cast<size_t>(vocab_));
    float* left = space_.adjusted.data();
    for (int64_t i = 0; i < vocab_; i++) left[i] = x[i] >= floor && distance(static_cast<double>(x[i])) <= bound ? x[i] : -kInfinity;
    return left;
  }

  // XTC: of the tokens whose probability, without the temperature and among those that are at least `floor`, reaches
  // the threshold, only the last stays: the least likely, on a tie the one with the highest id.
  const float* without_top_choices(const float* x, float largest, float floor) {
    space_.candidates.begin(k_, x, vocab_, largest, 1.0f);
    space_.candidates.take_at_least(floor);
    const double wanted = static_cast<double>(values_.xtc_threshold) * space_.candidates.total();
    const float bound = std::max(floor, static_cast<float>(static_cast<double>(largest) + std::log(wanted)));
    int64_t last = -1;
    for (int64_t i = 0; i < vocab_; i++)
      if (x[i] >= bound && (last < 0 || x[i] <= x[last])) last = i;
    if (last < 0) return x;
    space_.adjusted.resize(static_cast<size_t>(vocab_));
    float* left = space_.adjusted.data();
    for (int64_t i = 0; i < vocab_; i++) left[i] = x[i] >= bound && i != last ? -kInfinity : x[i];
    return left;
  }

  int32_t pick(const float* x) {
    const float temperature = values_.temperature;
    float largest = k_.largest(x, vocab_);
    if (largest == -kInfinity) return -1;
    if (temperature == 0) return static_cast<int32_t>(k_.find(x, vocab_, largest));
    Candidates& candidates = space_.candidates;
    const Uniforms uniforms = philox_uniforms(values_.seed, static_cast<uint64_t>(values_.counter));
    const int64_t top_k = values_.top_k;
    const float min_p = values_.min_p, top_p = values_.top_p;
    float floor = values_.top_n_sigma > 0 ? sigma_floor(x, largest) : kLowest;
    if (values_.typical_p < 1) {
      x = typical(x, largest, floor);
      largest = k_.largest(x, vocab_);
    }
    if (min_p > 0) floor = std::max(floor, largest + std::log(min_p) * temperature);
    const bool has_floor = floor > kLowest;
    if (uniforms.xtc < static_cast<double>(values_.xtc_probability)) {
      x = without_top_choices(x, largest, floor);
      largest = k_.largest(x, vocab_);
    }
    candidates.begin(k_, x, vocab_, largest, temperature);
    if (top_k > 0 && top_k < vocab_)
      candidates.take_top(top_k, floor);
    else if (top_p < 1 && !has_floor)
      candidates.take_share(top_p);
    else if (has_floor)
      candidates.take_at_least(floor);
    else
      candidates.take_all();
    if (top_p < 1) candidates.keep_share(top_p);
    return candidates.draw(uniforms.draw);
  }

  // Log-probabilities of the model's own logits: of the sampled token and of the likeliest ones.
  void report(const float* logits, int32_t token) {
    const float largest = k_.largest(logits, vocab_);
    Candidates& candidates = space_.candidates;
    candidates.begin(k_, logits, vocab_, largest, 1.0f);
    const double log_total = std::log(candidates.total_of_all()) + static_cast<double>(largest);
    const auto logprob = [&](int32_t id) {
      return static_cast<float>(static_cast<double>(logits[id]) - log_total);
    };
    s_.logprobs[row_] = token >= 0 ? logprob(token) : -kInfinity;
    const int64_t wanted = std::min<int64_t>(values_.num_logprobs, vocab_);
    if (wanted == 0) return;
    candidates.take_top(wanted, kLowest);
    const std::vector<int32_t> ids = candidates.ranked_ids();
    const int64_t first = row_ * s_.max_logprobs;
    for (size_t i = 0; i < ids.size(); i++) {
      s_.top_ids[first + static_cast<int64_t>(i)] = ids[i];
      s_.top_logprobs[first + static_cast<int64_t>(i)] = logprob(ids[i]);
    }
  }

  const LlmKernels& k_;
  const LlmSampling& s_;
  const LlmSamplingRow& values_;
  const int64_t vocab_, row_;
  Workspace& space_;
};

}  // namespace

extern "C" void llm_sample(const LlmKernels* kernels, const float* logits, int64_t rows, int64_t vocab,
                           const LlmSampling* sampling) {
  std::atomic<int64_t> taken{0};
  run_on_threads(rows > 1 ? llm_num_threads() : 1, [&] {
    thread_local Workspace workspace;
    for (int64_t row; (row = taken++) < rows;)
      RowSampler(*kernels, *sampling, vocab, row, workspace).sample(logits + row * vocab);
  });
}
