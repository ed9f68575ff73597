// out[t, h, :] = softmax(scale * q[t, h, :] . K^T) V over the positions 0 .. p(t) of the request's blocks,
// after q and k are rotated by halves and k, v are written to the cache at position p(t)
#pragma once
#include <cmath>

#include "attention_cache.h"
#include "attention_sums.h"
#include "parallel.h"

namespace LLM_ISA {

// The rows of one task: `count` query tokens times the heads that share one key/value head.
template <class Factor>
struct AttentionRows {
  int64_t key_width, value_width;  // block_size and head_dim, rounded up to W
  float *keys, *values;            // one block: [D, key_width] and [block_size, value_width]
  Factor *query, *factors;         // [rows, D]; [rows, key_width], the weights as they are multiplied
  float *weights, *sums;           // [rows, key_width], [rows, value_width]
  float *largest, *total, *keep;   // [rows]: of the online softmax; `keep` rescales what came before
};
template <class Cache>
using RowsOf = AttentionRows<typename Factor<Cache>::type>;

// One block of a request's keys and values; the first `count` rows are written.
template <class Cache>
struct Block {
  const Cache *keys, *values;
  int64_t start, count;
  Ahead next_keys, next_values;
};

// keys[d, i] = K[i, d] for W positions i from `first` on; those at `count` and beyond are zero.
template <class Cache>
inline void turn_keys(const Cache* from, const AttentionRows<float>& r, int64_t first, int64_t count, int64_t dim,
                      int64_t width) {
  for (int64_t d = 0; d < dim; d += W) {
    const int n = static_cast<int>(min(W, dim - d));
    vec square[W];
#pragma GCC unroll 16
    for (int j = 0; j < W; j++)
      square[j] = first + j < count ? load_cached(from + (first + j) * width, d, n, dim) : set1(0.0f);
    transpose(square);
    for (int j = 0; j < n; j++) store(r.keys + (d + j) * r.key_width + first, square[j]);
  }
}

// Pairs of bf16 are turned as if they were one float; put(d, pairs) gets those of K[.., d] and K[.., d + 1].
template <class Put>
inline void turn_pairs(const uint16_t* from, int64_t first, int64_t count, int64_t dim, Put put) {
  for (int64_t d = 0; d < dim; d += 2 * W) {
    const int n = static_cast<int>(min(W, (dim - d) / 2));
    vec square[W];
#pragma GCC unroll 16
    for (int j = 0; j < W; j++) {
      const auto* pairs = reinterpret_cast<const float*>(from + (first + j) * dim + d);
      square[j] = first + j < count ? load_n(pairs, n) : set1(0.0f);
    }
    transpose(square);
    for (int j = 0; j < n; j++) put(d + 2 * j, square[j]);
  }
}
inline void turn_keys(const uint16_t* from, const AttentionRows<float>& r, int64_t first, int64_t count, int64_t dim,
                      int64_t) {
  turn_pairs(from, first, count, dim, [&](int64_t d, vec pairs) {
    float* to = r.keys + d * r.key_width + first;
    store(to, (vec)((int_vec)pairs << 16));
    store(to + r.key_width, (vec)((int_vec)pairs & static_cast<int32_t>(0xffff0000)));
  });
}
#ifdef __AVX512BF16__
inline void turn_keys(const uint16_t* from, const AttentionRows<uint16_t>& r, int64_t first, int64_t count,
                      int64_t dim, int64_t) {
  turn_pairs(from, first, count, dim,
             [&](int64_t d, vec pairs) { store(r.keys + d / 2 * r.key_width + first, pairs); });
}
#endif

// values[i, d] = V[i, d]
template <class Cache>
inline void widen_values(const Cache* from, const AttentionRows<float>& r, int64_t count, int64_t dim, int64_t width) {
  for (int64_t i = 0; i < count; i++)
    for_lanes(dim, [&](int64_t d, int n) {
      store(r.values + i * r.value_width + d, load_cached(from + i * width, d, n, dim));
    });
}

#ifdef __AVX512BF16__
// values[i / 2, d] = the pair V[i, d], V[i + 1, d]
inline void widen_values(const uint16_t* from, const AttentionRows<uint16_t>& r, int64_t count, int64_t dim, int64_t) {
  for (int64_t i = 0; i < count; i += 2)
    for_lanes(dim, [&](int64_t d, int n) {
      const vec second = i + 1 < count ? load_n(from + (i + 1) * dim + d, n) : set1(0.0f);
      const __m512i first = _mm512_srli_epi32((__m512i)load_n(from + i * dim + d, n), 16);
      store(r.values + i / 2 * r.value_width + d, (vec)_mm512_or_si512(first, (__m512i)second));
    });
}
template <class Cache>
inline vec store_weights(uint16_t* to, vec exact) {  // which are no denormal numbers
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(exact);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
  return widen(rounded);
}
inline void store_query(const float* from, uint16_t* to, int64_t dim, bool) {
  for_lanes(dim, [=](int64_t d, int n) { store_bf16(to + d, load_n(from + d, n), n); });
}
#endif
// Returns them as they are multiplied.
template <class Cache>
inline vec store_weights(float* to, vec exact) {
  const vec weights = Factor<Cache>::is_rounded ? round_to_bf16(exact) : exact;
  store(to, weights);
  return weights;
}
inline void store_query(const float* from, float* to, int64_t dim, bool is_rounded) {
  for_lanes(dim, [=](int64_t d, int n) {
    const vec exact = load_n(from + d, n);
    store_n(to + d, is_rounded ? round_to_bf16(exact) : exact, n);
  });
}

// One row of the online softmax: scores -> weights over the block's first `count` positions.
template <class Cache>
inline void soften(const RowsOf<Cache>& r, int64_t row, int64_t count) {
  float* weights = r.weights + row * r.key_width;
  vec block_largest = set1(-INFINITY);
  for_lanes(count, [&](int64_t i, int n) {
    block_largest = max(keep_first(load(weights + i), n, block_largest), block_largest);
  });
  const float before = r.largest[row], block_max = largest(block_largest);
  const float now = block_max > before ? block_max : before;
  vec total = set1(0.0f);
  for_lanes(count, [&](int64_t i, int n) {
    const vec exact = keep_first(exp<false>(load(weights + i) - now), n, set1(0.0f));
    total += store_weights<Cache>(r.factors + row * r.key_width + i, exact);
  });
  r.keep[row] = exp<false>(set1(before - now))[0];
  r.largest[row] = now;
  r.total[row] = r.total[row] * r.keep[row] + sum(total);
}

// Adds the part of the block that begins at position `start` to every row that sees it.
// Row j * group + g is head g of query token j, which has position `first_position` + j.
template <class Cache>
inline void add_block(const AttentionArgs<Cache>& a, const RowsOf<Cache>& r, const Block<Cache>& block,
                      int64_t first_position, int64_t num_tokens) {
  const int64_t group = a.group(), dim = a.head_dim;
  const int64_t seen_from = block.start > first_position ? block.start - first_position : 0;
  const int64_t row = seen_from * group, rows = num_tokens * group;
  Ahead next_keys = block.next_keys, next_values = block.next_values;
  for (int64_t i = 0; i < block.count; i += W) turn_keys(block.keys, r, i, block.count, dim, a.row_width());
  sum_rows(r.query + row * dim, dim, r.keys, r.weights + row * r.key_width, r.key_width, dim, nullptr, rows - row,
           next_keys);
  widen_values(block.values, r, block.count, dim, a.row_width());
  for (int64_t j = seen_from; j < num_tokens;) {
    const int64_t count = min(a.block_size, first_position + j + 1 - block.start);
    const int64_t alike = count == a.block_size ? num_tokens - j : 1;  // tokens that see as much of it
    for (int64_t i = j * group; i < (j + alike) * group; i++) soften<Cache>(r, i, count);
    sum_rows(r.factors + j * group * r.key_width, r.key_width, r.values, r.sums + j * group * r.value_width,
             r.value_width, count, r.keep + j * group, alike * group, next_values);
    j += alike;
  }
}

template <class Cache>
RowsOf<Cache> carve_scratch(const AttentionArgs<Cache>& a, int64_t rows) {
  RowsOf<Cache> r;
  r.key_width = round_up(a.block_size, W);
  r.value_width = round_up(a.head_dim, W);
  const int64_t padded = round_up(rows, 16);
  const int64_t sizes[] = {a.head_dim * r.key_width, a.block_size * r.value_width, rows * a.head_dim,
                           rows * r.key_width,       rows * r.key_width,           rows * r.value_width,
                           padded,                   padded,                       padded};
  float *query, *factors;
  float** parts[] = {&r.keys, &r.values, &query, &factors, &r.weights, &r.sums, &r.largest, &r.total, &r.keep};
  int64_t total = 0;
  for (const int64_t size : sizes) total += round_up(size, 16);
  auto* memory = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(total)));
  for (int i = 0; i < 9; i++) {
    *parts[i] = memory;
    memory += round_up(sizes[i], 16);
  }
  r.query = reinterpret_cast<typename Factor<Cache>::type*>(query);
  r.factors = reinterpret_cast<typename Factor<Cache>::type*>(factors);
  return r;
}

// Tokens first .. first + count of a request, for the query heads that read one key/value head.
template <class Cache>
void attend(const AttentionArgs<Cache>& a, int64_t request, int64_t first, int64_t count, int64_t kv_head) {
  const int64_t group = a.group(), rows = count * group, dim = a.head_dim;
  const int64_t head = kv_head * group, start = a.query_starts[request];
  const RowsOf<Cache> r = carve_scratch(a, rows);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t t = start + first + i / group;
    float* rotated = r.sums + i * r.value_width;
    rotate(a.qkv + t * a.qkv_width() + (head + i % group) * dim, a.angles(t), rotated, dim, a.rotary_dim, a.scale);
    store_query(rotated, r.query + i * dim, dim, Factor<Cache>::is_rounded);
    r.largest[i] = -INFINITY;
    r.total[i] = 0.0f;
  }
  memset(r.sums, 0, sizeof(float) * static_cast<size_t>(rows * r.value_width));
  const int64_t first_position = a.context_lens[request] + first, end = first_position + count;
  auto ahead = [&](int part, int64_t at) {
    if (at >= end) return Ahead{nullptr, nullptr};
    const auto* from = reinterpret_cast<const char*>(a.cached(part, request, at, kv_head));
    return Ahead{from, from + static_cast<int64_t>(sizeof(Cache)) * min(a.block_size, end - at) * a.row_width()};
  };
  for (int64_t at = 0, next = a.block_size; at < end; at = next, next += a.block_size) {
    const Block<Cache> block = {a.cached(0, request, at, kv_head), a.cached(1, request, at, kv_head), at,
                                min(a.block_size, end - at), ahead(0, next), ahead(1, next)};
    add_block(a, r, block, first_position, count);
  }
  for (int64_t i = 0; i < rows; i++) {
    float* out = a.out + ((start + first + i / group) * a.num_heads + head + i % group) * dim;
    const float* sums = r.sums + i * r.value_width;
    for_lanes(dim, [=](int64_t d, int n) { store_n(out + d, load(sums + d) / r.total[i], n); });
  }
}

struct AttentionTask {
  int32_t request, first, count;
};

template <class Cache>
void paged_attention(const AttentionArgs<Cache>& a) {
  constexpr int64_t kRowsAtOnce = 64;
  const int64_t tokens_at_once = kRowsAtOnce > a.group() ? kRowsAtOnce / a.group() : 1;
  const int64_t num_tokens = a.query_starts[a.num_requests];
  const auto task_bytes = sizeof(AttentionTask) * static_cast<size_t>(num_tokens);
  auto* tasks = static_cast<AttentionTask*>(llm_scratch(2, task_bytes));
  int64_t num_tasks = 0, work = 0;
  for (int64_t b = 0; b < a.num_requests; b++) {
    const int64_t count = a.query_starts[b + 1] - a.query_starts[b];
    work += count * (a.context_lens[b] + count) * a.num_heads * a.head_dim / 8;
    for (int64_t first = 0; first < count; first += tokens_at_once)
      tasks[num_tasks++] = {static_cast<int32_t>(b), static_cast<int32_t>(first),
                            static_cast<int32_t>(min(tokens_at_once, count - first))};
  }
  parallel_for(num_tasks, 1, num_tokens * a.qkv_width(), [=](int64_t i) {
    auto* rotated = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(a.head_dim)));
    const int64_t start = a.query_starts[tasks[i].request] + tasks[i].first;
    for (int64_t t = start; t < start + tasks[i].count; t++) write_token(a, tasks[i].request, t, rotated);
  });
  parallel_for(num_tasks * a.num_kv_heads, 1, work, [=](int64_t i) {
    const AttentionTask& task = tasks[num_tasks - 1 - i / a.num_kv_heads];  // the longest rows first
    attend(a, task.request, task.first, task.count, i % a.num_kv_heads);
  });
}

}  // namespace LLM_ISA
