// Rows of a paged cache of latents: their addresses, and how that of a token is written.
#pragma once
#include <cmath>

#include "attention_cache.h"
#include "rms_norm.h"

namespace LLM_ISA {

constexpr int64_t kRunPositions = 512;  // positions whose sums are made apart, so that threads can share a long context

template <class Cache>
struct LatentArgs : LlmLatentAttention {
  using cache_type = Cache;
  static constexpr int64_t window = 0;
  static constexpr float softcap = 0;
  int64_t key_dim() const { return latent_dim + rope_dim; }
  int64_t value_dim() const { return latent_dim; }
  int64_t group() const { return num_heads; }
  int64_t run_length() const { return round_up(kRunPositions, block_size); }
  // Row 0 of the block that holds a request's position.
  Cache* cached(int64_t request, int64_t position) const {
    const int64_t block = block_tables[request * max_blocks + position / block_size];
    return static_cast<Cache*>(kv_cache) + block * block_size * row_width;
  }
  float scale_at(int64_t position) const {
    if (!(log_scale > 0)) return scale;
    return scale * (1.0f + log_scale * logf(static_cast<float>(1 + position / log_scale_from)));
  }
};

// Elements of a row that share a scale, where a row has bytes: kGroup each, of the latents and of the others apart.
struct LatentGroup {
  int64_t start, size;
};
constexpr int64_t kGroup = 64;
inline int64_t groups_of(int64_t elements) { return (elements + kGroup - 1) / kGroup; }
inline LatentGroup latent_group(const LlmLatentAttention& a, int64_t g) {
  const int64_t others = g - groups_of(a.latent_dim);
  if (others < 0) return {g * kGroup, min(kGroup, a.latent_dim - g * kGroup)};
  return {a.latent_dim + others * kGroup, min(kGroup, a.rope_dim - others * kGroup)};
}

// Row `row` of the block that begins at `block`.
template <class Cache>
void put_latent(const LatentArgs<Cache>& a, Cache* block, int64_t row, const float* numbers) {
  store_row(block + row * a.key_dim(), numbers, a.key_dim());
}
inline void put_latent(const LatentArgs<int8_t>& a, int8_t* block, int64_t row, const float* numbers) {
  const int64_t num_groups = groups_of(a.latent_dim) + groups_of(a.rope_dim);
  int8_t* scales = block + a.block_size * a.key_dim() + 2 * row;
  for (int64_t g = 0; g < num_groups; g++) {
    const LatentGroup group = latent_group(a, g);
    store_codes(block + row * a.key_dim() + group.start, scales + 2 * g * a.block_size, numbers + group.start, group.size);
  }
}

template <class Cache>
void write_latent(const LatentArgs<Cache>& a, int64_t request, int64_t t, float* row) {
  const int64_t position = a.context_lens[request] + t - a.query_starts[request];
  const float* latent = a.latent + t * a.key_dim();
  norm_row(latent, a.norm_weight, row, a.latent_dim, a.epsilon);
  rotate(latent + a.latent_dim, a.cos_sin + t * a.rope_dim, row + a.latent_dim, a.rope_dim, a.rope_dim, 1.0f);
  put_latent(a, a.cached(request, position), position % a.block_size, row);
}

}  // namespace LLM_ISA
