// The experts of each token and the factors of their outputs
#pragma once
#include <cmath>

#include "catalogue.h"
#include "linear.h"
#include "parallel.h"

namespace LLM_ISA {

enum Scoring : int64_t { kSoftmax, kSigmoid, kSoftmaxOfChosen };

// The first of the largest that are numbers, or -1.
inline int64_t first_largest(const float* x, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++)
    if (best < 0 ? x[i] == x[i] : x[i] > x[best]) best = i;
  return best;
}

// A sum in double, of few numbers, is the same to a float in any order.
inline void softmax(float* x, int64_t count) {
  const int64_t best = first_largest(x, count);
  const float largest = best < 0 ? NAN : x[best];
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += static_cast<double>(x[i] = expf(x[i] - largest));
  for (int64_t i = 0; i < count; i++) x[i] = static_cast<float>(static_cast<double>(x[i]) / total);
}

// The sum of the largest `best` of a group, the largest first; they are NaN afterwards.
inline float take_best(float* group, int64_t size, int64_t best) {
  float total = 0;
  for (int64_t rank = 0; rank < best; rank++) {
    const int64_t i = first_largest(group, size);
    total = rank ? total + group[i] : group[i];
    group[i] = NAN;
  }
  return total;
}

// Experts of groups that are not among the best get -inf in `choice`. `room` is for E + num_groups numbers.
inline void keep_best_groups(const LlmMoeRoute& a, float* choice, float* room) {
  const int64_t size = a.E / a.num_groups;
  float* sums = room + a.E;
  for (int64_t e = 0; e < a.E; e++) room[e] = choice[e];
  for (int64_t g = 0; g < a.num_groups; g++) sums[g] = take_best(room + g * size, size, a.group_best);
  for (int64_t kept = 0; kept < a.top_groups; kept++) {
    int64_t best = first_largest(sums, a.num_groups);
    sums[best] = NAN;
  }
  for (int64_t g = 0; g < a.num_groups; g++)
    if (sums[g] == sums[g])
      for (int64_t e = g * size; e < (g + 1) * size; e++) choice[e] = -INFINITY;
}

inline void weigh_chosen(const LlmMoeRoute& a, float* weights) {
  if (a.scoring == kSoftmaxOfChosen) softmax(weights, a.top_k);
  double divisor = 1;
  if (a.renormalize) {
    double total = 0;
    for (int64_t j = 0; j < a.top_k; j++) total += static_cast<double>(weights[j]);
    total += static_cast<double>(a.epsilon);
    divisor = total < static_cast<double>(a.minimum) ? static_cast<double>(a.minimum) : total;
  }
  for (int64_t j = 0; j < a.top_k; j++)
    weights[j] = static_cast<float>(static_cast<double>(weights[j]) / divisor * static_cast<double>(a.factor));
}

inline void route_row(const LlmMoeRoute& a, float* scores, int32_t* ids, float* weights) {
  if (a.scoring == kSoftmax) softmax(scores, a.E);
  if (a.scoring == kSigmoid)
    for (int64_t e = 0; e < a.E; e++) scores[e] = 1.0f / (1.0f + expf(-scores[e]));
  auto* choice = static_cast<float*>(llm_scratch(4, sizeof(float) * static_cast<size_t>(2 * a.E + a.num_groups)));
  for (int64_t e = 0; e < a.E; e++) {
    choice[e] = a.choice_bias ? scores[e] + a.choice_bias[e] : scores[e];
    if (choice[e] != choice[e]) choice[e] = -INFINITY;
  }
  if (a.num_groups > 1) keep_best_groups(a, choice, choice + a.E);
  for (int64_t j = 0; j < a.top_k; j++) {
    const int64_t best = first_largest(choice, a.E);
    ids[j] = static_cast<int32_t>(best - a.first_expert);
    weights[j] = scores[best];
    choice[best] = NAN;
  }
  weigh_chosen(a, weights);
}

inline void moe_route(const LlmMoeRoute& a) {
  auto* logits = static_cast<float*>(llm_scratch(6, sizeof(float) * static_cast<size_t>(a.T * a.E)));
  linear(a.x, a.weight, a.bias, logits, a.T, a.H, a.E);
  parallel_rows(a.T, a.E * (a.top_k + 8), [=](int64_t t) {
    route_row(a, logits + t * a.E, a.topk_ids + t * a.top_k, a.topk_weights + t * a.top_k);
  });
}

}  // namespace LLM_ISA
