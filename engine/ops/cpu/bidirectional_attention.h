// out[t, h, :] = softmax(scale * q[t, h, :] . K^T) V over the rows of the segment that row t belongs to, after q and k
// are rotated by halves
#pragma once
#include <cmath>
#include <cstring>

#include "attention_factors.h"
#include "parallel.h"

namespace LLM_ISA {

constexpr int64_t kPieceKeys = 128;   // rows of a segment whose keys and values lie in the L1 cache together
constexpr int64_t kTileQueries = 96;  // rows that read all keys of their segment together
constexpr int64_t kStripQueries = 12;  // of these, rows whose scores are in the L1 cache together

// Up to kPieceKeys rows of a segment; and up to kTileQueries of them with the pieces of their segment.
struct SegmentRows {
  int32_t first, count, first_piece, end_of_pieces;
};

template <class Cache>
struct SegmentArgs : LlmBidirectionalAttention {
  using F = typename Factor<Cache>::type;
  const SegmentRows *pieces, *tiles;
  float* panels;  // keys and values of each piece and head, in the layout of products

  int64_t query_width() const { return padded_dim<Cache>(head_dim); }
  int64_t value_width() const { return round_up(head_dim, W); }
  int64_t keys_size() const { return query_width() * kPieceKeys * static_cast<int64_t>(sizeof(F)) / 4; }
  // The last row of values may be written beyond its end.
  int64_t panel_size() const {
    return keys_size() + kPieceKeys * value_width() * static_cast<int64_t>(sizeof(F)) / 4 + W;
  }
  float* panel(int64_t piece, int64_t head) const { return panels + (piece * num_heads + head) * panel_size(); }
  const float* part(int64_t t, int64_t which, int64_t head) const {
    return qkv + ((t * 3 + which) * num_heads + head) * head_dim;
  }
  const float* angles(int64_t t) const { return cos_sin + t * rotary_dim; }
};

// Write the keys and values of a piece and a head as panels.
template <class Cache>
void pack_piece(const SegmentArgs<Cache>& a, int64_t piece, int64_t head) {
  using F = typename Factor<Cache>::type;
  const SegmentRows rows = a.pieces[piece];
  const int64_t width = a.query_width(), size = kPieceKeys * width;
  auto* rotated = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(2 * size + width)));
  auto* keys = reinterpret_cast<Cache*>(rotated + width);
  Cache* values = keys + size;
  for (int64_t i = 0; i < rows.count; i++) {
    const int64_t t = rows.first + i;
    rotate(a.part(t, 1, head), a.angles(t), rotated, a.head_dim, a.rotary_dim, 1.0f);
    store_row(keys + i * width, rotated, a.head_dim);
    store_row(values + i * width, a.part(t, 2, head), a.head_dim);
  }
  auto rows_of = [&](const Cache* data) {
    return CachedRows<Cache>{data, reinterpret_cast<const char*>(data), width, rows.count, true};
  };
  CachedRows<Cache> of_keys = rows_of(keys), of_values = rows_of(values);
  float* panel = a.panel(piece, head);
  turn_keys<F>(of_keys, width * static_cast<int64_t>(sizeof(Cache)) / 4, panel, kPieceKeys);
  lay_values<F>(of_values, a.head_dim, panel + a.keys_size(), a.value_width());
}

// V vectors of columns from column j on, of all rows from `first` on.
template <int M, int V, class F>
inline void sum_columns(const SumArgs<F>& s, int64_t first, int64_t rows, int64_t j) {
  for (; first + M <= rows; first += M) sum_tile<M, V>(s.from_row(first), j);
  if constexpr (M > 1)
    if (first < rows) sum_columns<M - 1, V>(s, first, rows, j);
}

// The first `count` columns, rounded up to vectors. As many sums are in registers as there are for products.
template <class F>
inline void sum_strip_of(const SumArgs<F>& s, int64_t rows, int64_t count) {
  const int64_t end = round_up(count, W);
  for (int64_t j = 0; j < end;) {
    const int64_t left = (end - j) / W;
#ifdef __AVX512F__
    if (left == 5) {
      sum_columns<4, 5>(s, 0, rows, j), j += 5 * W;
    } else if (left >= 4) {
      sum_columns<6, 4>(s, 0, rows, j), j += 4 * W;
    } else if (left == 3) {
      sum_columns<6, 3>(s, 0, rows, j), j += 3 * W;
    } else
#endif
    if (left >= 2) {
      sum_columns<4, 2>(s, 0, rows, j), j += 2 * W;
    } else {
      sum_columns<4, 1>(s, 0, rows, j), j += W;
    }
  }
}

// 2^x for x <= 0, relative error < 3e-6; below 2^-120 it is that.
inline vec exp2_of_negative(vec x) {
  const vec clamped = max(set1(-120.0f), x), shifted = clamped + kMagic, f = clamped - (shifted - kMagic);
  vec y = set1(0.009570100f);
  y = fma(y, f, set1(0.055917859f));
  y = fma(y, f, set1(0.240247443f));
  y = fma(y, f, set1(0.693121791f));
  y = fma(y, f, set1(0.999999285f));
  return (vec)((uint_vec)y + ((uint_vec)shifted << 23));
}
template <class Cache>
inline vec weight_of(vec below_largest) {
  return sizeof(Cache) == 2 ? exp2_of_negative(below_largest) : exp_of_negative(below_largest);
}

template <class F>
struct SegmentStrip {
  F *query, *weights;                    // [rows, query_width], [rows, kPieceKeys]
  float *scores, *sums;                  // [rows, kPieceKeys], [rows, value_width]
  float *largest, *total, *keep, *units;  // [rows]: of the online softmax; `keep` rescales what came before
};

// The online softmax of some rows over `count` keys: scores -> weights.
template <class Cache, class F>
inline void soften_strip(const SegmentStrip<F>& r, int64_t rows, int64_t count) {
  for (int64_t row = 0; row < rows; row++) {
    vec most = set1(-INFINITY);
    const float* scores = r.scores + row * kPieceKeys;
    for_lanes(count, [&](int64_t i, int n) { most = max(keep_first(load(scores + i), n, most), most); });
    r.keep[row] = largest(most);
  }
  for_lanes(rows, [&](int64_t i, int n) {
    const vec before = load_n(r.largest + i, n), now = max(load_n(r.keep + i, n), before);
    store_n(r.keep + i, weight_of<Cache>(before - now), n);
    store_n(r.largest + i, now, n);
  });
  for (int64_t row = 0; row < rows; row++) {
    const int64_t at = row * kPieceKeys;
    const vec most = set1(r.largest[row]);
    Weighed all;
    auto weigh = [&](int64_t i, int64_t n) {
      vec first = weight_of<Cache>(load(r.scores + at + i) - most);
      vec second = weight_of<Cache>(load(r.scores + at + i + W) - most);
      if (n < 2 * W) {
        first = keep_first(first, static_cast<int>(n), set1(0.0f));
        second = keep_first(second, static_cast<int>(n - W), set1(0.0f));
      }
      put_weights<Cache>(r.weights + at + i, first, second, all);
    };
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) weigh(i, 2 * W);
    if (i < count) weigh(i, count - i);
    r.total[row] = r.total[row] * r.keep[row] + sum(all.total);
  }
}

// The rows of a tile of one head.
template <class Cache>
void attend_to_segment(const SegmentArgs<Cache>& a, int64_t tile, int64_t head) {
  using F = typename Factor<Cache>::type;
  const SegmentRows rows = a.tiles[tile];
  const int64_t width = a.query_width(), value_width = a.value_width();
  const int64_t sizes[] = {kTileQueries * width + W, kStripQueries * kPieceKeys, kStripQueries * kPieceKeys,
                           kTileQueries * value_width, kTileQueries + W, kTileQueries + W, kTileQueries + W, width + W};
  int64_t size = 0;
  for (const int64_t each : sizes) size += round_up(each, 16);
  auto* memory = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(size)));
  float* parts[8];
  for (int i = 0; i < 8; i++) parts[i] = memory, memory += round_up(sizes[i], 16);
  SegmentStrip<F> all = {reinterpret_cast<F*>(parts[0]), reinterpret_cast<F*>(parts[1]), parts[2], parts[3],
                         parts[4], parts[5], parts[6], parts[6]};
  const float scale = sizeof(Cache) == 2 ? a.scale * 1.44269504f : a.scale;
  for (int64_t i = 0; i < rows.count; i++) {
    rotate(a.part(rows.first + i, 0, head), a.angles(rows.first + i), parts[7], a.head_dim, a.rotary_dim, scale);
    put_query(parts[7], a.head_dim, Factor<Cache>::is_rounded, all.query + i * width);
    all.largest[i] = -INFINITY, all.total[i] = 0.0f;
  }
  memset(all.sums, 0, sizeof(float) * static_cast<size_t>(rows.count * value_width));
  for (int64_t piece = rows.first_piece; piece < rows.end_of_pieces; piece++) {
    const int64_t count = a.pieces[piece].count;
    const float *keys = a.panel(piece, head), *values = keys + a.keys_size();
    for (int64_t first = 0; first < rows.count; first += kStripQueries) {
      const int64_t some = min(kStripQueries, rows.count - first);
      const SegmentStrip<F> r = {all.query + first * width, all.weights, all.scores, all.sums + first * value_width,
                                 all.largest + first, all.total + first, all.keep + first, all.units};
      sum_strip_of(SumArgs<F>{r.query, width, keys, r.scores, kPieceKeys, width, nullptr, r.units}, some, count);
      soften_strip<Cache>(r, some, count);
      sum_strip_of(SumArgs<F>{r.weights, kPieceKeys, values, r.sums, value_width, count, r.keep, r.units}, some,
                   value_width);
    }
  }
  for (int64_t i = 0; i < rows.count; i++) {
    float* out = a.out + ((rows.first + i) * a.num_heads + head) * a.head_dim;
    const float *sums = all.sums + i * value_width, total = all.total[i];
    for_lanes(a.head_dim, [=](int64_t d, int n) { store_n(out + d, load(sums + d) / total, n); });
  }
}

template <class Cache>
void bidirectional_attention(SegmentArgs<Cache> a) {
  const int64_t most = 2 * (a.T / kTileQueries + a.B + 1);
  auto* rows = static_cast<SegmentRows*>(llm_scratch(2, sizeof(SegmentRows) * static_cast<size_t>(2 * most)));
  SegmentRows *pieces = rows, *tiles = rows + most;
  int64_t num_pieces = 0, num_tiles = 0, work = 0;
  for (int64_t b = 0; b < a.B; b++) {
    const int32_t start = b ? a.segment_ends[b - 1] : 0, end = a.segment_ends[b];
    const auto first_piece = static_cast<int32_t>(num_pieces);
    for (int32_t at = start; at < end; at += kPieceKeys)
      pieces[num_pieces++] = {at, static_cast<int32_t>(min(kPieceKeys, end - at)), 0, 0};
    for (int32_t at = start; at < end; at += kTileQueries)
      tiles[num_tiles++] = {at, static_cast<int32_t>(min(kTileQueries, end - at)), first_piece,
                            static_cast<int32_t>(num_pieces)};
    work += (end - start) * static_cast<int64_t>(end - start) * a.num_heads * a.head_dim / 8;
  }
  a.pieces = pieces, a.tiles = tiles;
  const int64_t size = num_pieces * a.num_heads * a.panel_size();
  a.panels = static_cast<float*>(llm_scratch(3, sizeof(float) * static_cast<size_t>(size)));
  parallel_for(num_pieces * a.num_heads, 1, 2 * a.T * a.num_heads * a.head_dim, [&](int64_t i) {
    pack_piece(a, i / a.num_heads, i % a.num_heads);
  });
  parallel_for(num_tiles * a.num_heads, 1, work, [&](int64_t i) {  // a head's keys and values stay in the L2 cache
    attend_to_segment(a, i % num_tiles, i / num_tiles);
  });
}

inline void bidirectional_attention(const LlmBidirectionalAttention& a) {
  if (a.is_bf16)
    bidirectional_attention(SegmentArgs<uint16_t>{a, nullptr, nullptr, nullptr});
  else
    bidirectional_attention(SegmentArgs<float>{a, nullptr, nullptr, nullptr});
}

}  // namespace LLM_ISA
