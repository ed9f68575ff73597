// Multi-head latent attention in absorbed form: all heads read one cached row per position, a key of latent_dim + rope_dim
// elements whose first latent_dim are the value.
#pragma once
#include <cmath>

#include "latent_int8.h"

namespace LLM_ISA {

// Query tokens of a request with all heads. Its partial results lie from run `first_run` of all tasks on.
struct LatentTask {
  int32_t request, first, count, num_runs;
  int64_t first_run;
};

// State of the online softmax of some rows.
struct Softmax {
  float *largest, *total, *sums;  // [rows], [rows], [rows, width]

  static int64_t size(int64_t rows, int64_t width) { return 2 * round_up(rows, 16) + rows * width; }
  static Softmax in(float* memory, int64_t rows) {
    return {memory, memory + round_up(rows, 16), memory + 2 * round_up(rows, 16)};
  }
  void clear(int64_t rows, int64_t width) const {
    for (int64_t i = 0; i < rows; i++) largest[i] = -INFINITY, total[i] = 0.0f;
    memset(sums, 0, sizeof(float) * static_cast<size_t>(rows * width));
  }
  // Adds positions that come later. Into an empty state it is a copy, and adding an empty state changes nothing.
  void add(const Softmax& later, int64_t rows, int64_t width) const {
    for (int64_t i = 0; i < rows; i++) {
      const float now = largest[i] < later.largest[i] ? later.largest[i] : largest[i];
      const vec keep = exp_of_negative(set1(largest[i] - now)), share = exp_of_negative(set1(later.largest[i] - now));
      largest[i] = now;
      total[i] = total[i] * keep[0] + later.total[i] * share[0];
      for (int64_t d = i * width; d < (i + 1) * width; d += W)
        store(sums + d, load(sums + d) * keep + load(later.sums + d) * share);
    }
  }
};

// Row j * num_heads + h is head h of the task's token j.
template <class Cache, class Rows>
void put_queries(const LatentArgs<Cache>& a, const Rows& r, const LatentTask& task) {
  auto* query = static_cast<float*>(llm_scratch(5, sizeof(float) * static_cast<size_t>(a.key_dim() + 2 * W)));
  for (int64_t i = 0; i < task.count * a.num_heads; i++) {
    const int64_t j = task.first + i / a.num_heads, t = a.query_starts[task.request] + j;
    const int64_t head = t * a.num_heads + i % a.num_heads;
    const float scale = a.scale_at(a.context_lens[task.request] + j);
    const float* latent = a.q_latent + head * a.latent_dim;
    for_lanes(a.latent_dim, [=](int64_t d, int n) { store_n(query + d, load_n(latent + d, n) * scale, n); });
    const float* turned = a.q + (head + 1) * a.q_dim - a.rope_dim;
    rotate(turned, a.cos_sin + t * a.rope_dim, query + a.latent_dim, a.rope_dim, a.rope_dim, scale);
    put_query(a, r, i, query);
  }
}

// The sums over one run of positions, as far as the task's tokens see them.
template <class Cache, class Rows>
void attend_run(const LatentArgs<Cache>& a, const Rows& r, const LatentTask& task, int64_t run) {
  const int64_t first_position = a.context_lens[task.request] + task.first, end = first_position + task.count;
  Softmax{r.largest, r.total, r.sums}.clear(task.count * a.num_heads, r.value_width);
  const int64_t end_of_run = min(end, (run + 1) * a.run_length());
  for (int64_t at = run * a.run_length(); at < end_of_run; at += a.block_size) {
    const int64_t next = min(at + a.block_size, (end - 1) / a.block_size * a.block_size);
    const auto* wanted = reinterpret_cast<const char*>(a.cached(task.request, next));
    const CachedRows<Cache> rows{a.cached(task.request, at), wanted, a.key_dim(), min(a.block_size, end - at), true};
    add_block(a, r, Block<Cache>{rows, rows, at}, first_position, task.count);
  }
}

template <class Cache>
void write_out(const LatentArgs<Cache>& a, const LatentTask& task, const Softmax& state, int64_t width) {
  const int64_t first_head = (a.query_starts[task.request] + task.first) * a.num_heads;
  for (int64_t i = 0; i < task.count * a.num_heads; i++) {
    float* out = a.out + (first_head + i) * a.latent_dim;
    const float* sums = state.sums + i * width;
    for_lanes(a.latent_dim, [=](int64_t d, int n) { store_n(out + d, load(sums + d) / state.total[i], n); });
  }
}

// The task's runs one after the other, by one thread.
template <class Cache>
void attend(const LatentArgs<Cache>& a, const LatentTask& task) {
  const int64_t rows = task.count * a.num_heads;
  const auto r = carve_scratch(a, rows);
  const int64_t width = r.value_width, size = Softmax::size(rows, width);
  const Softmax state = Softmax::in(static_cast<float*>(llm_scratch(4, sizeof(float) * static_cast<size_t>(size))), rows);
  state.clear(rows, width);
  put_queries(a, r, task);
  for (int64_t run = 0; run < task.num_runs; run++) {
    attend_run(a, r, task, run);
    state.add({r.largest, r.total, r.sums}, rows, width);
  }
  write_out(a, task, state, width);
}

// The runs of all tasks, of at most `rows` rows, by all threads, then their sums in the order of the runs: the same bits
// as of `attend`.
template <class Cache>
void attend_in_runs(const LatentArgs<Cache>& a, const LatentTask* tasks, int64_t num_tasks, int64_t rows, int64_t work) {
  const int64_t num_runs = tasks[num_tasks - 1].first_run + tasks[num_tasks - 1].num_runs;
  const int64_t width = round_up(a.latent_dim, 2 * W), size = round_up(Softmax::size(rows, width), 16);
  auto* partial = static_cast<float*>(llm_scratch(3, sizeof(float) * static_cast<size_t>(num_runs * size)));
  parallel_for(num_runs, 1, work, [=](int64_t i) {
    const LatentTask* task = tasks + num_tasks - 1;
    while (task->first_run > i) task--;
    auto r = carve_scratch(a, task->count * a.num_heads);
    const Softmax found = Softmax::in(partial + i * size, rows);
    r.largest = found.largest, r.total = found.total, r.sums = found.sums;
    put_queries(a, r, *task);
    attend_run(a, r, *task, i - task->first_run);
  });
  parallel_for(num_tasks, 1, num_runs * size, [=](int64_t i) {
    const LatentTask& task = tasks[i];
    const Softmax state = Softmax::in(partial + task.first_run * size, rows);
    for (int64_t run = task.first_run + 1; run < task.first_run + task.num_runs; run++)
      state.add(Softmax::in(partial + run * size, rows), task.count * a.num_heads, width);
    write_out(a, task, state, width);
  });
}

template <class Cache>
void latent_attention(const LatentArgs<Cache>& a) {
  constexpr int64_t kRowsAtOnce = 64, kMostPartial = 16 << 20;  // elements of all partial results
  const int64_t tokens_at_once = kRowsAtOnce > a.num_heads ? kRowsAtOnce / a.num_heads : 1;
  const auto most_tasks = static_cast<size_t>(a.query_starts[a.B]);
  auto* tasks = static_cast<LatentTask*>(llm_scratch(2, sizeof(LatentTask) * most_tasks));
  int64_t num_tasks = 0, num_runs = 0, most = 0, work = 0;
  for (int64_t b = 0; b < a.B; b++) {
    const int64_t count = a.query_starts[b + 1] - a.query_starts[b];
    work += count * (a.context_lens[b] + count) * a.num_heads * a.key_dim() / 8;
    for (int64_t first = 0; first < count; first += tokens_at_once) {
      const int64_t some = min(tokens_at_once, count - first), end = a.context_lens[b] + first + some;
      const int64_t runs = (end + a.run_length() - 1) / a.run_length();
      tasks[num_tasks++] = {static_cast<int32_t>(b), static_cast<int32_t>(first), static_cast<int32_t>(some),
                            static_cast<int32_t>(runs), num_runs};
      num_runs += runs;
      most = most < some * a.num_heads ? some * a.num_heads : most;
    }
  }
  parallel_for(num_tasks, 1, a.T * a.key_dim(), [=](int64_t i) {
    auto* row = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(a.key_dim())));
    const int64_t start = a.query_starts[tasks[i].request] + tasks[i].first;
    for (int64_t t = start; t < start + tasks[i].count; t++) write_latent(a, tasks[i].request, t, row);
  });
  const bool is_long = num_runs > num_tasks && num_runs * most * a.latent_dim <= kMostPartial;
  if (is_long && num_tasks < 4 * llm_num_threads())
    attend_in_runs(a, tasks, num_tasks, most, work);
  else  // the longest rows first
    parallel_for(num_tasks, 1, work, [=](int64_t i) { attend(a, tasks[num_tasks - 1 - i]); });
}

inline void latent_attention(const LlmLatentAttention& a) {
  if (a.kv_cache_type == kI8)
    latent_attention(LatentArgs<int8_t>{a});
  else if (a.kv_cache_type == kBf16)
    latent_attention(LatentArgs<uint16_t>{a});
  else
    latent_attention(LatentArgs<float>{a});
}

}  // namespace LLM_ISA
