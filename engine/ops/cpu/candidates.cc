#include "candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int64_t kRun = 1024;  // weights added up at a time when drawing
constexpr int64_t kFew = 256;   // worth sorting

}  // namespace

void Candidates::begin(const LlmKernels& kernels, const float* logits, int64_t vocab, float largest,
                       float temperature) {
  k_ = &kernels;
  x_ = logits;
  vocab_ = vocab;
  largest_ = largest;
  temperature_ = temperature;
  total_ = -1;
  if (reserved_ >= vocab) return;
  reserved_ = vocab;
  const auto size = static_cast<size_t>(vocab) + 16;  // at_least writes whole vectors
  ids_.reset(new int32_t[size]);
  values_.reset(new float[size]);
  weights_.reset(new float[size]);
}

void Candidates::take_all() {
  all_ = true;
  count_ = vocab_;
  k_->weigh(x_, weights_.get(), vocab_, largest_, 1 / temperature_);
}

void Candidates::take_at_least(float threshold) {
  all_ = false;
  floor_ = threshold;
  count_ = k_->at_least(x_, vocab_, threshold, ids_.get());
  for (int64_t i = 0; i < count_; i++) values_[i] = x_[ids_[i]];
  k_->weigh(values_.get(), weights_.get(), count_, largest_, 1 / temperature_);
}

void Candidates::take_top(int64_t count, float floor) {
  for (float window = 1;; window *= 2) {
    const float threshold = window < 1e6f ? std::max(floor, largest_ - window) : floor;
    take_at_least(threshold);
    if (count_ >= count || threshold == floor) break;
  }
  if (count_ > count) drop_after(last_of_run(static_cast<double>(count), kCount));
}

void Candidates::take_share(float share) {
  total_ = total_of_all();
  for (float window = 8; window < 100; window *= 2) {  // beyond exp(-87) nothing has weight
    take_at_least(largest_ - window * temperature_);
    if (k_->add_up(weights_.get(), count_) >= share * total_) return;
  }
  take_at_least(kLowest);
}

void Candidates::keep_share(float share) {
  const double total = total_ >= 0 ? total_ : k_->add_up(weights_.get(), count_);
  drop_after(last_of_run(share * total, kWeight));
}

double Candidates::total_of_all() {
  take_all();
  return k_->add_up(weights_.get(), vocab_);
}

// The last of the shortest run of the likeliest that measures `wanted`. Halves the range of logits in which
// the run must end until only few are left in it: passes over an array are far cheaper than sorting it.
int32_t Candidates::last_of_run(double wanted, Measure measure) {
  float low = floor_ > kLowest ? floor_ : *std::min_element(&values_[0], &values_[count_]);
  float high = std::nextafter(largest_, INFINITY);
  int64_t at_low = count_, at_high = 0;  // how many are at least so large
  double before = 0;                     // what those measure that are at least `high`
  while (at_low - at_high > kFew) {
    const float middle = low / 2 + high / 2;
    if (middle <= low || middle >= high) break;  // all alike
    double weight;
    const int64_t count = k_->weight_at_least(values_.get(), weights_.get(), count_, middle, &weight);
    const double run = measure == kCount ? static_cast<double>(count) : weight;
    if (run >= wanted) {
      low = middle;
      at_low = count;
    } else {
      high = middle;
      at_high = count;
      before = run;
    }
  }
  std::vector<int32_t> ranked(static_cast<size_t>(at_low - at_high) + 1);
  size_t num_ranked = 0;
  for (int32_t i = 0; i < count_; i++) {  // no branches: the processor could not foresee them
    ranked[num_ranked] = i;
    num_ranked += (values_[i] >= low) & (values_[i] < high);
  }
  ranked.resize(num_ranked);
  std::sort(ranked.begin(), ranked.end(), [this](int32_t a, int32_t b) { return is_before(a, b); });
  for (const int32_t i : ranked)
    if ((before += measure == kCount ? 1 : static_cast<double>(weights_[i])) >= wanted) return i;
  return ranked.back();
}

void Candidates::drop_after(int32_t last) {
  const float last_value = values_[last];
  int64_t kept = 0;
  for (int32_t i = 0; i < count_; i++) {
    const bool keep = (values_[i] > last_value) | ((values_[i] == last_value) & (i <= last));
    ids_[kept] = ids_[i];
    values_[kept] = values_[i];
    weights_[kept] = weights_[i];
    kept += keep;
  }
  count_ = kept;
}

int32_t Candidates::draw(double u) const {
  double rest = u * k_->add_up(weights_.get(), count_);
  int64_t start = 0;
  for (double run; start + kRun < count_; start += kRun, rest -= run)
    if ((run = k_->add_up(&weights_[start], kRun)) > rest) break;
  int64_t found = -1;
  for (int64_t i = start; i < count_; i++) {
    if (weights_[i] == 0) continue;
    found = i;
    if ((rest -= static_cast<double>(weights_[i])) < 0) break;
  }
  while (found < 0 || weights_[found] == 0) found = (found < 0 ? start : found) - 1;  // rounding ate the rest
  return id(found);
}

std::vector<int32_t> Candidates::ranked_ids() const {
  std::vector<int32_t> ranked(static_cast<size_t>(count_));
  std::iota(ranked.begin(), ranked.end(), 0);
  std::sort(ranked.begin(), ranked.end(), [this](int32_t a, int32_t b) { return is_before(a, b); });
  for (int32_t& i : ranked) i = id(i);
  return ranked;
}
