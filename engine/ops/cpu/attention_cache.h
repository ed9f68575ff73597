// Rows of a paged KV cache: their addresses, and how the key and value of a token are written and read.
#pragma once
#include <cstring>

#include "catalogue.h"
#include "vec.h"

namespace LLM_ISA {

template <class Cache>
struct AttentionArgs : LlmPagedAttention {
  using cache_type = Cache;
  int64_t key_dim() const { return head_dim; }
  int64_t value_dim() const { return head_dim; }
  int64_t group() const { return num_heads / num_kv_heads; }
  // Bytes of a cached key or value. An int8 one ends in the two bytes of its scale, a bf16.
  int64_t row_width() const { return head_dim + (sizeof(Cache) == 1 ? 2 : 0); }
  int64_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  const float* angles(int64_t t) const { return cos_sin + t * rotary_dim; }
  // Row 0 of the keys (part 0) or values (part 1) of one head in the block that holds a position of the request.
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

// code = round(x / scale), scale = max |x| / 127; numbers that are not finite get a scale that is not finite.
inline void store_codes(int8_t* to, void* scale_to, const float* from, int64_t size) {
  uint16_t scale;
  store_bf16(&scale, set1(magnitude(from, size) / 127.0f), 1);
  memcpy(scale_to, &scale, sizeof scale);
  const float inverse = widen(scale) > 0 ? 1.0f / widen(scale) : 0.0f;
  for_lanes(size, [=](int64_t i, int n) {
    const int_vec whole = rounded(load_n(from + i, n) * inverse);
    for (int j = 0; j < n; j++) to[i + j] = static_cast<int8_t>(whole[j] > 127 ? 127 : whole[j] < -127 ? -127 : whole[j]);
  });
}

inline void store_row(int8_t* to, const float* from, int64_t size) { store_codes(to, to + size, from, size); }

inline float scale_of(const int8_t* row, int64_t head_dim) {
  uint16_t scale;
  memcpy(&scale, row + head_dim, sizeof scale);
  return widen(scale);
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

}  // namespace LLM_ISA
