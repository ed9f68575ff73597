// Latent attention with a cache of bytes: products of whole numbers, a group of elements at a time.
#pragma once
#include "latent_cache.h"
#include "paged_attention.h"

namespace LLM_ISA {

// The softmax runs in float32. Queries and weights have 16 bits, and a unit for each row and group.
struct LatentRows : AttentionRows<float> {
  int16_t *whole_query, *whole_weights;  // [rows, query_width], [rows, key_width]: the latter of one group
  float *units, *group_scales;           // [groups, unit_rows], [groups, key_width]
  float *row_units, *shares;             // [unit_rows]: of weights, [key_width]
  int64_t unit_rows, column_stride;      // the latter of `values`: no multiple of 4 KB, so that they fit in the L1 cache
};

inline LatentRows carve_scratch(const LatentArgs<int8_t>& a, int64_t rows) {
  LatentRows r;
  static_cast<AttentionRows<float>&>(r) = carve_scratch(LatentArgs<float>{a}, rows);
  r.unit_rows = round_up(rows, 16);
  r.column_stride = r.value_width + 2 * W;
  r.whole_query = reinterpret_cast<int16_t*>(r.query);
  const int64_t num_groups = groups_of(a.latent_dim) + groups_of(a.rope_dim);
  const int64_t weights = round_up(rows * r.key_width / 2, 16), units = num_groups * r.unit_rows;
  const int64_t size = weights + units + (num_groups + 1) * r.key_width + r.unit_rows;
  auto* memory = static_cast<float*>(llm_scratch(6, sizeof(float) * static_cast<size_t>(size)));
  r.whole_weights = reinterpret_cast<int16_t*>(memory);
  r.units = memory + weights;
  r.group_scales = r.units + units;
  r.row_units = r.group_scales + num_groups * r.key_width;
  r.shares = r.row_units + r.unit_rows;
  return r;
}

template <class Cache>
inline void put_query(const LatentArgs<Cache>& a, const RowsOf<Cache>& r, int64_t row, const float* query) {
  r.query_units[row] = put_query(query, a.key_dim(), Factor<Cache>::is_rounded, r.query + row * r.query_width);
}
// Behind the last group of a row come numbers of the next row, which is written later.
inline void put_query(const LatentArgs<int8_t>& a, const LatentRows& r, int64_t row, const float* query) {
  for (int64_t g = 0; g < groups_of(a.latent_dim) + groups_of(a.rope_dim); g++) {
    const LatentGroup group = latent_group(a, g);
    int16_t* to = r.whole_query + row * r.query_width + group.start;
    r.units[g * r.unit_rows + row] = put_query(query + group.start, group.size, false, to);
  }
}

// Adds a group's part of the scores of all rows from `first` on with the positions of a block.
inline void score_group(const LatentArgs<int8_t>& a, const LatentRows& r, CachedRows<int8_t> keys, int64_t g,
                        int64_t first, int64_t rows) {
  const LatentGroup group = latent_group(a, g);
  SumArgs<int16_t> scores{r.whole_query + group.start, r.query_width, r.keys + group.start / 2 * r.key_width, r.weights,
                          r.key_width, group.size, nullptr, r.units + g * r.unit_rows,
                          r.group_scales + g * r.key_width};
  scores = scores.from_row(first);
  keys.data += group.start, keys.next += group.start * keys.count;
  by_rows(rows, [&](auto m) { score_few<decltype(m)::value>(scores, keys); }, [&] { sum_rows(scores, rows); });
}

// Scales x so that its largest magnitude becomes `limit`. Returns the unit, which is not finite if x is not.
inline float normalize(float* to, const float* x, int64_t count, float limit) {
  const float most = magnitude(x, count), inverse = most > 1e-30f ? limit / most : 0.0f;
  for_lanes(count, [=](int64_t i, int) { store(to + i, load(x + i) * inverse); });
  return most / limit;
}

// The weights of rows first .. end, normalized, times the scales of a group, as whole numbers.
inline void put_group_weights(const LatentRows& r, int64_t first, int64_t end, int64_t depth, const float* scales) {
  const float unit = normalize(r.shares, scales, depth, 1.0f);
  for (int64_t row = first; row < end; row++) {
    const float* weights = r.factors + row * r.key_width;
    auto scaled = [=](int64_t i) { return fma(load(weights + i), load(r.shares + i), set1(kMagic)); };
    for (int64_t i = 0; i < depth; i += 2 * W) {
      const halves codes = as_halves(scaled(i), scaled(i + W));
      memcpy(r.whole_weights + row * r.key_width + i, &codes, sizeof codes);
    }
    r.weight_units[row] = r.row_units[row] * unit;
  }
}

// Adds the part of the block that begins at position `start` to every row that sees it.
inline void add_block(const LatentArgs<int8_t>& a, const LatentRows& r, Block<int8_t> block, int64_t first_position,
                      int64_t num_tokens) {
  const int64_t heads = a.num_heads, values = groups_of(a.latent_dim), num_groups = values + groups_of(a.rope_dim);
  const int64_t seen_from = block.start > first_position ? block.start - first_position : 0;
  const int64_t rows = (num_tokens - seen_from) * heads;
  const auto* scales = reinterpret_cast<const uint16_t*>(block.keys.data + a.block_size * a.key_dim());
  const char* wanted = block.keys.next + a.block_size * a.key_dim();  // behind the codes, which are prefetched with rows
  for (int64_t b = 0; b < 2 * num_groups * a.block_size; b += 64) prefetch(wanted + b);
  for (int64_t g = 0; g < num_groups; g++)
    for_lanes(block.keys.count, [=](int64_t i, int n) {
      store(r.group_scales + g * r.key_width + i, load_n(scales + g * a.block_size + i, n));
    });
  CachedRows<int8_t> read = block.keys;
  if (rows > kFewRows) {
    turn_keys<int16_t>(read, a.key_dim() / 4, r.keys, r.key_width, r.key_width);
    lay_values<int16_t>(block.values, a.latent_dim, r.values, r.column_stride);
  }
  float* scores = r.weights + seen_from * heads * r.key_width;
  memset(scores, 0, sizeof(float) * static_cast<size_t>(rows * r.key_width));
  for (int64_t g = 0; g < num_groups; g++) score_group(a, r, block.keys, g, seen_from * heads, rows);
  for (int64_t j = seen_from; j < num_tokens;) {
    const int64_t depth = min(a.block_size, first_position + j + 1 - block.start);
    const int64_t first = j * heads, alike = (depth == a.block_size ? num_tokens - j : 1) * heads;
    soften<float>(r, first, first + alike, {0, depth});
    for (int64_t row = first; row < first + alike; row++) {
      float* weights = r.factors + row * r.key_width;
      r.row_units[row] = normalize(weights, weights, depth, largest_whole(r.key_width));
    }
    CachedRows<int8_t> seen = block.values;
    seen.count = depth;
    for (int64_t g = 0; g < values; g++) {
      const LatentGroup group = latent_group(a, g);
      put_group_weights(r, first, first + alike, depth, r.group_scales + g * r.key_width);
      SumArgs<int16_t> output{r.whole_weights, r.key_width, r.values + group.start, r.sums + group.start,
                              r.value_width, depth, r.keep, r.weight_units};
      output.columns = round_up(group.size, 2 * W), output.b_width = r.column_stride;
      output = output.from_row(first);
      CachedRows<int8_t> columns = seen;
      columns.data += group.start, columns.next += group.start * depth;
      auto add_them = [&](auto m) { add_few<decltype(m)::value>(output, columns, group.size); };
      by_rows(rows > kFewRows ? rows : alike, add_them, [&] { sum_rows(output, alike); });
    }
    j += alike / heads;
  }
}

}  // namespace LLM_ISA
