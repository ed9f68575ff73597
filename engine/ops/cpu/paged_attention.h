// out[t, h, :] = softmax(scale * q[t, h, :] . K^T) V over the positions 0 .. p(t) of the request's blocks,
// after q and k are rotated by halves and k, v are written to the cache at position p(t)
#pragma once
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

template <class Cache>
struct AttentionArgs : LlmAttention {
  int64_t group() const { return num_heads / num_kv_heads; }
  // Of a cached key or value: that of bytes ends in the two of its scale, a bf16.
  int64_t row_width() const { return head_dim + (sizeof(Cache) == 1 ? 2 : 0); }
  int64_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  const float* angles(int64_t t) const { return cos_sin + t * rotary_dim; }
  // Row 0 of one head's keys (part 0) or values (part 1) in the block that holds a request's position.
  Cache* cached(int part, int64_t request, int64_t position, int64_t kv_head) const {
    const int64_t block = block_tables[request * max_blocks + position / block_size];
    return static_cast<Cache*>(kv_cache) + ((block * 2 + part) * num_kv_heads + kv_head) * block_size * row_width();
  }
};

// y = (x rotated by halves in its first R elements) * scale; y must not overlap x
inline void rotate(const float* x, const float* angles, float* y, int64_t head_dim, int64_t rotary_dim,
                   float scale) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float cos = angles[i], sin = angles[half + i], x1 = x[i], x2 = x[half + i];
    y[i] = (x1 * cos - x2 * sin) * scale;
    y[half + i] = (x2 * cos + x1 * sin) * scale;
  }
  for (int64_t i = rotary_dim; i < head_dim; i++) y[i] = x[i] * scale;
}

inline void store_row(float* to, const float* from, int64_t size) {
  memcpy(to, from, sizeof(float) * static_cast<size_t>(size));
}
inline void store_row(uint16_t* to, const float* from, int64_t size) {
  for_lanes(size, [=](int64_t i, int n) { store_bf16(to + i, load_n(from + i, n), n); });
}

// code = round(x / scale), scale = max |x| / 127; a row that is not finite gets a scale that is not
inline void store_row(int8_t* to, const float* from, int64_t size) {
  vec most = set1(0.0f), poison = set1(0.0f);
  for_lanes(size, [&](int64_t i, int n) {
    const vec v = load_n(from + i, n);
    most = max(v, max(-v, most));
    poison += v * 0.0f;
  });
  uint16_t scale;
  store_bf16(&scale, set1(largest(most) / 127.0f + sum(poison)), 1);
  memcpy(to + size, &scale, sizeof scale);
  const float inverse = widen(scale) > 0 ? 1.0f / widen(scale) : 0.0f, magic = 12582912.0f;  // rounds, as in bytes.h
  for_lanes(size, [=](int64_t i, int n) {
    const int_vec whole = (int_vec)(load_n(from + i, n) * inverse + magic) - 0x4b400000;
    for (int j = 0; j < n; j++) to[i + j] = static_cast<int8_t>(whole[j] > 127 ? 127 : whole[j] < -127 ? -127 : whole[j]);
  });
}

// Lanes d .. d + n of a cached row.
inline vec load_cached(const float* row, int64_t d, int n, int64_t) { return load_n(row + d, n); }
inline vec load_cached(const uint16_t* row, int64_t d, int n, int64_t) { return load_n(row + d, n); }
inline vec load_cached(const int8_t* row, int64_t d, int n, int64_t dim) {
  uint16_t scale;
  memcpy(&scale, row + dim, sizeof scale);
  return load_n(row + d, n) * widen(scale);
}

template <class Cache>
void write_token(const AttentionArgs<Cache>& a, int64_t request, int64_t t, float* rotated) {
  const int64_t position = a.context_lens[request] + t - a.query_starts[request];
  const int64_t at = position % a.block_size * a.row_width();
  const float* keys = a.qkv + t * a.qkv_width() + a.num_heads * a.head_dim;
  const float* values = keys + a.num_kv_heads * a.head_dim;
  for (int64_t h = 0; h < a.num_kv_heads; h++) {
    rotate(keys + h * a.head_dim, a.angles(t), rotated, a.head_dim, a.rotary_dim, 1.0f);
    store_row(a.cached(0, request, position, h) + at, rotated, a.head_dim);
    store_row(a.cached(1, request, position, h) + at, values + h * a.head_dim, a.head_dim);
  }
}

#ifdef __AVX512F__
constexpr int kSumVecs = 4;
#else
constexpr int kSumVecs = 2;
#endif
constexpr int kSumRows = 4;

// Memory that will be read soon: a little of it is asked for at every step of the work at hand.
struct Ahead {
  const char *next, *end;
  void step() {
    if (next >= end) return;
    prefetch(next);
    prefetch(next + 64);
    next += 128;
  }
};

// c[i, :] = c[i, :] * keep[i] + sum_k a[i, k] * b[k, :] for M rows and V vectors; keep null: c starts at 0.
// The sum runs over k in order, whatever M and V are.
template <int M, int V>
inline void sum_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth, const float* keep, Ahead& ahead) {
  vec sums[M][V] = {};
  if (keep)
    for (int i = 0; i < M; i++)
      for (int v = 0; v < V; v++) sums[i][v] = load(c + i * c_stride + v * W) * keep[i];
  for (int64_t k = 0; k < depth; k++) {
    ahead.step();
    vec columns[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) columns[v] = load(b + k * b_stride + v * W);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[i][v] = fma(set1(a[i * a_stride + k]), columns[v], sums[i][v]);
  }
  for (int i = 0; i < M; i++)
    for (int v = 0; v < V; v++) store(c + i * c_stride + v * W, sums[i][v]);
}

template <int M>
inline void sum_strip(const float* a, int64_t a_stride, const float* b, float* c, int64_t width,
                      int64_t depth, const float* keep, Ahead& ahead) {
  int64_t j = 0;
  for (; j + kSumVecs * W <= width; j += kSumVecs * W)
    sum_tile<M, kSumVecs>(a, a_stride, b + j, width, c + j, width, depth, keep, ahead);
  for (; j < width; j += W) sum_tile<M, 1>(a, a_stride, b + j, width, c + j, width, depth, keep, ahead);
}

// As sum_tile for any number of rows; b and c have `width` columns, a multiple of W.
inline void sum_rows(const float* a, int64_t a_stride, const float* b, float* c, int64_t width, int64_t depth,
                     const float* keep, int64_t rows, Ahead& ahead) {
  int64_t i = 0;
  auto strip = [&](auto rows_at_once) {
    constexpr int M = decltype(rows_at_once)::value;
    for (; i + M <= rows; i += M)
      sum_strip<M>(a + i * a_stride, a_stride, b, c + i * width, width, depth, keep ? keep + i : nullptr, ahead);
  };
  strip(Count<kSumRows>());
  strip(Count<3>());
  strip(Count<2>());
  strip(Count<1>());
}

// The rows of one task: `count` query tokens times the heads that share one key/value head.
struct AttentionRows {
  int64_t key_width, value_width;  // block_size and head_dim, rounded up to W
  float *keys, *values;            // one block: [D, key_width] and [block_size, value_width]
  float *query, *weights, *sums;   // [rows, D], [rows, key_width], [rows, value_width]
  float *largest, *total, *keep;   // [rows]: of the online softmax; `keep` rescales what came before
};

// One block of a request's keys and values; the first `count` rows are written.
template <class Cache>
struct Block {
  const Cache *keys, *values;
  int64_t start, count;
  Ahead next_keys, next_values;
};

// keys[d, i] = K[i, d] for W positions i from `first` on; those at `count` and beyond are zero.
template <class Cache>
inline void turn_keys(const Cache* from, const AttentionRows& r, int64_t first, int64_t count, int64_t dim,
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

// Pairs of bf16 are turned as if they were one float, then parted.
inline void turn_keys(const uint16_t* from, const AttentionRows& r, int64_t first, int64_t count, int64_t dim,
                      int64_t) {
  for (int64_t d = 0; d < dim; d += 2 * W) {
    const int n = static_cast<int>(min(W, (dim - d) / 2));
    vec square[W];
#pragma GCC unroll 16
    for (int j = 0; j < W; j++) {
      const auto* pairs = reinterpret_cast<const float*>(from + (first + j) * dim + d);
      square[j] = first + j < count ? load_n(pairs, n) : set1(0.0f);
    }
    transpose(square);
    for (int j = 0; j < n; j++) {
      float* to = r.keys + (d + 2 * j) * r.key_width + first;
      store(to, (vec)((int_vec)square[j] << 16));
      store(to + r.key_width, (vec)((int_vec)square[j] & static_cast<int32_t>(0xffff0000)));
    }
  }
}

// values[i, d] = V[i, d]
template <class Cache>
inline void widen_values(const Cache* from, const AttentionRows& r, int64_t count, int64_t dim, int64_t width) {
  for (int64_t i = 0; i < count; i++)
    for_lanes(dim, [&](int64_t d, int n) {
      store(r.values + i * r.value_width + d, load_cached(from + i * width, d, n, dim));
    });
}

// One row of the online softmax: scores -> weights over the block's first `count` positions.
inline void soften(const AttentionRows& r, int64_t row, int64_t count) {
  float* weights = r.weights + row * r.key_width;
  vec block_largest = set1(-INFINITY);
  for_lanes(count, [&](int64_t i, int n) {
    block_largest = max(keep_first(load(weights + i), n, block_largest), block_largest);
  });
  const float before = r.largest[row], block_max = largest(block_largest);
  const float now = block_max > before ? block_max : before;
  vec total = set1(0.0f);
  for_lanes(count, [&](int64_t i, int n) {
    const vec weight = keep_first(exp(load(weights + i) - now), n, set1(0.0f));
    store(weights + i, weight);
    total += weight;
  });
  r.keep[row] = exp(set1(before - now))[0];
  r.largest[row] = now;
  r.total[row] = r.total[row] * r.keep[row] + sum(total);
}

// Adds the part of the block that begins at position `start` to every row that sees it.
// Row j * group + g is head g of query token j, which has position `first_position` + j.
template <class Cache>
inline void add_block(const AttentionArgs<Cache>& a, const AttentionRows& r, const Block<Cache>& block,
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
    for (int64_t i = j * group; i < (j + alike) * group; i++) soften(r, i, count);
    sum_rows(r.weights + j * group * r.key_width, r.key_width, r.values, r.sums + j * group * r.value_width,
             r.value_width, count, r.keep + j * group, alike * group, next_values);
    j += alike;
  }
}

template <class Cache>
AttentionRows carve_scratch(const AttentionArgs<Cache>& a, int64_t rows) {
  AttentionRows r;
  r.key_width = round_up(a.block_size, W);
  r.value_width = round_up(a.head_dim, W);
  const int64_t padded = round_up(rows, 16);
  const int64_t sizes[] = {a.head_dim * r.key_width, a.block_size * r.value_width, rows * a.head_dim,
                           rows * r.key_width,       rows * r.value_width,         padded, padded, padded};
  float** parts[] = {&r.keys, &r.values, &r.query, &r.weights, &r.sums, &r.largest, &r.total, &r.keep};
  int64_t total = 0;
  for (const int64_t size : sizes) total += round_up(size, 16);
  auto* memory = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(total)));
  for (int i = 0; i < 8; i++) {
    *parts[i] = memory;
    memory += round_up(sizes[i], 16);
  }
  return r;
}

// Tokens first .. first + count of a request, for the query heads that read one key/value head.
template <class Cache>
void attend(const AttentionArgs<Cache>& a, int64_t request, int64_t first, int64_t count, int64_t kv_head) {
  const int64_t group = a.group(), rows = count * group, dim = a.head_dim;
  const int64_t head = kv_head * group, start = a.query_starts[request];
  const AttentionRows r = carve_scratch(a, rows);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t t = start + first + i / group;
    rotate(a.qkv + t * a.qkv_width() + (head + i % group) * dim, a.angles(t), r.query + i * dim, dim,
           a.rotary_dim, a.scale);
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
