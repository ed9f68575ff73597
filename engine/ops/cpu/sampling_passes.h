// Passes over one row of logits: the part of sampling that touches every token of the vocabulary.
#pragma once
#include <cmath>

#include "vec.h"

namespace LLM_ISA {

inline float largest_of(const float* x, int64_t size) {
  vec m[4] = {set1(-INFINITY), set1(-INFINITY), set1(-INFINITY), set1(-INFINITY)};
  int64_t i = 0;
  for (; i + 4 * W <= size; i += 4 * W)
    for (int j = 0; j < 4; j++) m[j] = max(load(x + i + j * W), m[j]);
  float found = largest(max(max(m[0], m[1]), max(m[2], m[3])));
  for (; i < size; i++) found = x[i] > found ? x[i] : found;
  return found;
}

// The first group of 4 W elements that may hold one >= threshold, from i on; `size` rounded down if none.
inline int64_t skip_below(const float* x, int64_t i, int64_t size, float threshold) {
  for (; i + 4 * W <= size; i += 4 * W) {
    vec group = set1(-INFINITY);
    for (int j = 0; j < 4; j++) group = max(load(x + i + j * W), group);  // in this order a NaN hides nothing
    if (!(largest(group) < threshold)) break;
  }
  return i;
}

inline int64_t find(const float* x, int64_t size, float value) {
  for (int64_t i = 0; i < size;) {
    i = skip_below(x, i, size, value);
    for (const int64_t end = min(size, i + 4 * W); i < end; i++)
      if (x[i] == value) return i;
  }
  return -1;
}

// ids has room for one vector more than it gets.
inline int64_t at_least(const float* x, int64_t size, float threshold, int32_t* ids) {
  int64_t count = 0, i = 0;
  while ((i = skip_below(x, i, size, threshold)) + 4 * W <= size)
    for (const int64_t end = i + 4 * W; i < end; i += W)
      count += store_ids_at_least(load(x + i), threshold, static_cast<int32_t>(i), ids + count);
  for (; i < size; i++)
    if (x[i] >= threshold) ids[count++] = static_cast<int32_t>(i);
  return count;
}

// How many x[i] are >= threshold, and the sum of their weights.
inline int64_t weight_at_least(const float* x, const float* weights, int64_t size, float threshold,
                               double* weight) {
  int64_t count = 0;
  *weight = 0;
  for (int64_t start = 0; start < size; start += 1024) {
    vec part = set1(0.0f);
    int_vec found = {};
    for_lanes(min(1024, size - start), [&](int64_t i, int n) {
      const int_vec in = keep_first(load_n(x + start + i, n), n, set1(-INFINITY)) >= threshold;
      part += in ? load_n(weights + start + i, n) : set1(0.0f);
      found -= in;
    });
    *weight += static_cast<double>(sum(part));
    for (int i = 0; i < W; i++) count += found[i];
  }
  return count;
}

inline void weigh(const float* x, float* weights, int64_t size, float largest, float factor) {
  for_lanes(size, [=](int64_t i, int n) {
    const vec v = load_n(x + i, n);
    store_n(weights + i, v == v ? exp((v - largest) * factor) : set1(0.0f), n);
  });
}

inline double add_up(const float* x, int64_t size) {
  double total = 0;
  for (int64_t start = 0; start < size; start += 1024) {
    vec part = set1(0.0f);
    for_lanes(min(1024, size - start), [&](int64_t i, int n) { part += load_n(x + start + i, n); });
    total += static_cast<double>(sum(part));
  }
  return total;
}

}  // namespace LLM_ISA
