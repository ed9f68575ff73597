// out[t, h, :] = softmax(scale * q[t, h, :] . K^T) V over the positions 0 .. p(t) of the request's blocks,
// after q and k are rotated by halves and k, v are written to the cache at position p(t)
#pragma once
#include <cmath>

#include "attention_factors.h"
#include "parallel.h"
#include "softcap.h"

namespace LLM_ISA {

// The rows of one task: `count` query tokens times the heads that share one key/value head.
template <class F>
struct AttentionRows {
  int64_t query_width, key_width, value_width;  // head_dim, block_size and head_dim, rounded up
  float *keys, *values;           // one block: [D, key_stride] and [block_size, value_stride], where they are written down
  F *query, *factors;             // [rows, query_width], [rows, key_width]: queries and weights as they are multiplied
  float *weights, *sums;          // [rows, key_width], [rows, value_width]
  float *largest, *total, *keep;  // [rows]: of the online softmax; `keep` rescales what came before
  float *query_units, *weight_units, *key_scales, *value_scales;  // [rows], [rows], [key_width]: of whole numbers
  float softcap;

  int64_t key_stride() const { return stride_of(key_width); }
  int64_t value_stride() const { return stride_of(value_width); }
  SumArgs<F> scores() const {
    return {query, query_width, keys, weights, key_width, query_width, nullptr, query_units, nullptr, 0, key_stride()};
  }
  SumArgs<F> output(int64_t depth) const {
    return {factors, key_width, values, sums, value_width, depth, keep, weight_units, nullptr, 0, value_stride()};
  }
};
template <class Cache>
using RowsOf = AttentionRows<typename Factor<Cache>::type>;

template <class Args>  // of this op or of latent_attention
RowsOf<typename Args::cache_type> carve_scratch(const Args& a, int64_t rows) {
  using Cache = typename Args::cache_type;
  RowsOf<Cache> r;
  r.softcap = a.softcap;
  r.query_width = padded_dim<Cache>(a.key_dim());
  r.key_width = round_up(a.block_size, 2 * W);
  r.value_width = round_up(a.value_dim(), 2 * W);
  const int64_t padded = round_up(rows, 16);
  float *query, *factors;
  const struct {
    float** part;
    int64_t size;
  } parts[] = {{&r.keys, r.query_width * r.key_stride()}, {&r.values, a.block_size * r.value_stride()},
               {&query, rows * r.query_width + W},     {&factors, rows * r.key_width},
               {&r.weights, rows * r.key_width},       {&r.sums, rows * r.value_width},
               {&r.largest, padded},                   {&r.total, padded},
               {&r.keep, padded},                      {&r.query_units, padded},
               {&r.weight_units, padded},              {&r.key_scales, r.key_width},
               {&r.value_scales, r.key_width}};
  int64_t total = 0;
  for (const auto& each : parts) total += round_up(each.size, 16);
  auto* memory = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(total)));
  for (const auto& each : parts) {
    *each.part = memory;
    memory += round_up(each.size, 16);
  }
  r.query = reinterpret_cast<typename Factor<Cache>::type*>(query);
  r.factors = reinterpret_cast<typename Factor<Cache>::type*>(factors);
  return r;
}

template <class Cache>
struct Block {
  CachedRows<Cache> keys, values;
  int64_t start;  // its first position
};

// 2 W numbers of a row from lane i on, of which n are used: scores -> weights; for bytes times the scales of the
// values.
template <class Cache>
[[gnu::always_inline]] inline void weigh(const RowsOf<Cache>& r, int64_t row, int64_t i, int64_t n, Weighed& all) {
  const int64_t at = row * r.key_width + i;
  auto wanted = [=](vec x, int v) { return n < 2 * W ? keep_first(x, static_cast<int>(n) - v * W, set1(0.0f)) : x; };
  vec weights[2];
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    weights[v] = wanted(exp_of_negative(load(r.weights + at + v * W) - r.largest[row]), v);
    if constexpr (sizeof(Cache) == 1) {
      const vec scaled = wanted(weights[v] * load(r.value_scales + i + v * W), v);
      store(r.weights + at + v * W, scaled);
      all.total += weights[v];
      const int_vec bits = (int_vec)scaled & 0x7fffffff;  // a NaN may have a sign
      all.most = bits > all.most ? bits : all.most;
    }
  }
  if constexpr (sizeof(Cache) > 1) put_weights<Cache>(r.factors + at, weights[0], weights[1], all);
}

// The positions of a block that a token sees.
struct Seen {
  int64_t begin, end;
};

// The online softmax of rows first .. end: scores -> weights over the seen positions of the block.
template <class Cache>
inline void soften(const RowsOf<Cache>& r, int64_t first, int64_t end, Seen seen) {
  const int64_t count = seen.end;
  for (int64_t row = first; row < end; row++) {
    float* scores = r.weights + row * r.key_width;
    vec most = set1(-INFINITY);
    const bool is_plain = !(r.softcap > 0) && !seen.begin;
    if (!is_plain) {
      for_lanes(count, [&](int64_t i, int) {
        vec score = load(scores + i);
        if (sizeof(Cache) == 1) score *= load(r.key_scales + i);
        store(scores + i, r.softcap > 0 ? capped(score, r.softcap) : score);
      });
      for (int64_t i = 0; i < seen.begin; i++) scores[i] = -INFINITY;
    }
    for_lanes(count, [&](int64_t i, int n) {
      if (sizeof(Cache) == 1 && is_plain) store(scores + i, load(scores + i) * load(r.key_scales + i));
      most = max(keep_first(load(scores + i), n, most), most);
    });
    r.keep[row] = largest(most);
  }
  for_lanes(end - first, [&](int64_t i, int n) {
    const vec before = load_n(r.largest + first + i, n), now = max(load_n(r.keep + first + i, n), before);
    store_n(r.keep + first + i, exp_of_negative(before - now), n);
    store_n(r.largest + first + i, now, n);
  });
  for (int64_t row = first; row < end; row++) {
    const int64_t at = row * r.key_width;
    Weighed all;
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) weigh<Cache>(r, row, i, 2 * W, all);
    if (i < count) weigh<Cache>(r, row, i, count - i, all);
    r.total[row] = r.total[row] * r.keep[row] + sum(all.total);
    if constexpr (sizeof(Cache) == 1)
      r.weight_units[row] = put_whole(r.weights + at, count, as_float(largest(all.most)), r.key_width, r.factors + at);
  }
}

#ifdef __AVX512F__
constexpr int kFewRows = 8;
#else
constexpr int kFewRows = 4;
#endif

// few(M) for the number of rows, or many() if there are more.
template <int M = kFewRows, class Few, class Many>
inline void by_rows(int64_t rows, Few few, Many many) {
  if (rows > M)
    many();
  else if (rows == M)
    few(Count<M>());
  else if constexpr (M > 1)
    by_rows<M - 1>(rows, few, many);
}

// Adds the part of the block that begins at position `start` to every row that sees it.
// Row j * group + g is head g of query token j, which has position `first_position` + j.
template <class Args, class Cache = typename Args::cache_type>
inline void add_block(const Args& a, const RowsOf<Cache>& r, Block<Cache> block, int64_t first_position,
                      int64_t num_tokens) {
  using F = typename Factor<Cache>::type;
  const int64_t group = a.group(), dim = a.value_dim();
  const int64_t seen_from = block.start > first_position ? block.start - first_position : 0;
  const int64_t end_of_window = block.start - first_position + a.window - 1;  // the last token that sees its beginning
  const int64_t seen_until = a.window ? min(num_tokens, end_of_window + a.block_size) : num_tokens;
  const int64_t rows = (seen_until - seen_from) * group;
  const SumArgs<F> scores = r.scores().from_row(seen_from * group);
  auto score_them = [&](auto m) { score_few<decltype(m)::value>(scores, block.keys); };
  by_rows(rows, score_them, [&] {
    turn_keys<F>(block.keys, r.query_width * static_cast<int64_t>(sizeof(Cache)) / 4, r.keys, r.key_width, r.key_stride());
    sum_rows(scores, rows);
    lay_values<F>(block.values, dim, r.values, r.value_stride());
  });
  if constexpr (sizeof(Cache) == 1)
    for (int64_t i = 0; i < block.keys.count; i++) {
      r.key_scales[i] = scale_of(block.keys.data + i * block.keys.stride, dim);
      r.value_scales[i] = scale_of(block.values.data + i * block.values.stride, dim);
    }
  for (int64_t j = seen_from; j < seen_until;) {
    const int64_t depth = min(a.block_size, first_position + j + 1 - block.start);
    const int64_t hidden = a.window && j > end_of_window ? j - end_of_window : 0;
    const int64_t last_alike = a.window ? min(seen_until, end_of_window + 1) : seen_until;
    const int64_t alike = depth == a.block_size && !hidden ? last_alike - j : 1;  // tokens that see as much of it
    soften<Cache>(r, j * group, (j + alike) * group, {hidden, depth});
    const SumArgs<F> output = r.output(depth).from_row(j * group);
    CachedRows<Cache> seen = block.values;
    seen.count = depth;
    auto add_them = [&](auto m) { add_few<decltype(m)::value>(output, seen, dim); };
    by_rows(rows > kFewRows ? rows : alike * group, add_them, [&] { sum_rows(output, alike * group); });
    j += alike;
  }
}

// Tokens first .. first + count of a request, for the query heads that read one key/value head.
template <class Cache>
void attend(const AttentionArgs<Cache>& a, int64_t request, int64_t first, int64_t count, int64_t kv_head) {
  const int64_t group = a.group(), rows = count * group, dim = a.head_dim;
  const int64_t head = kv_head * group, start = a.query_starts[request];
  const int64_t first_position = a.context_lens[request] + first, end = first_position + count;
  auto rows_at = [&](int part, int64_t at) {
    const int64_t next = min(at + a.block_size, (end - 1) / a.block_size * a.block_size);
    const auto* wanted = reinterpret_cast<const char*>(a.cached(part, request, next, kv_head));
    return CachedRows<Cache>{a.cached(part, request, at, kv_head), wanted, a.row_width(), min(a.block_size, end - at)};
  };
  const RowsOf<Cache> r = carve_scratch(a, rows);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t t = start + first + i / group;
    float* rotated = r.sums + i * r.value_width;
    rotate(a.qkv + t * a.qkv_width() + (head + i % group) * dim, a.angles(t), rotated, dim, a.rotary_dim, a.scale);
    r.query_units[i] = put_query(rotated, dim, Factor<Cache>::is_rounded, r.query + i * r.query_width);
    r.largest[i] = a.sinks ? a.sinks[head + i % group] : -INFINITY;
    r.total[i] = a.sinks ? 1.0f : 0.0f;
  }
  memset(r.sums, 0, sizeof(float) * static_cast<size_t>(rows * r.value_width));
  const int64_t outside = a.window && first_position >= a.window ? first_position - a.window + 1 : 0;
  const int64_t begin = outside / a.block_size * a.block_size;
  for (int64_t at = begin; at < end; at += a.block_size)
    add_block(a, r, Block<Cache>{rows_at(0, at), rows_at(1, at), at}, first_position, count);
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
  const int64_t num_tokens = a.query_starts[a.B];
  const auto task_bytes = sizeof(AttentionTask) * static_cast<size_t>(num_tokens);
  auto* tasks = static_cast<AttentionTask*>(llm_scratch(2, task_bytes));
  int64_t num_tasks = 0, work = 0;
  for (int64_t b = 0; b < a.B; b++) {
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

inline void paged_attention(const LlmPagedAttention& a) {
  if (a.kv_cache_type == kI8)
    paged_attention(AttentionArgs<int8_t>{a});
  else if (a.kv_cache_type == kBf16)
    paged_attention(AttentionArgs<uint16_t>{a});
  else
    paged_attention(AttentionArgs<float>{a});
}

}  // namespace LLM_ISA
