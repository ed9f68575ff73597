// out[t, h, :] = softmax(scale * q[t, h, :] . K^T) V over the rows of the segment that row t belongs to, after q and k
// are rotated by halves
#pragma once
#include <cmath>
#include <cstring>

#include "attention_factors.h"
#include "parallel.h"

namespace LLM_ISA {

// Queries are the lanes of vectors. Scores are sums over a head, with a row for each key, and the results are sums over
// keys, with a row for each element of a head, so neither has lanes that are padding.
#ifdef __AVX512F__
constexpr int kStripVecs = 3, kStripRows = 8;  // of a tile of sums, in registers
#else
constexpr int kStripVecs = 2, kStripRows = 4;
#endif
constexpr int64_t kPieceKeys = 96;  // rows of a segment whose keys and values lie in the L1 cache together
constexpr int64_t kStripQueries = kStripVecs * W;  // rows whose scores are in the L1 cache together
constexpr int64_t kTileQueries = 96;  // whole strips of rows that read all keys of their segment together
constexpr int64_t kRowsAhead = 12;  // that are prefetched: between the rows of a head lie those of the others

// Up to kPieceKeys rows of a segment; and up to kTileQueries of them with the pieces of their segment.
struct SegmentRows {
  int32_t first, count, first_piece, end_of_pieces;
};

template <class Cache>
struct SegmentArgs : LlmBidirectionalAttention {
  using F = typename Factor<Cache>::type;
  const SegmentRows *pieces, *tiles;
  float* panels;  // of each piece and head: keys, [kPieceKeys, query_width()], and values, [head_dim, kPieceKeys]

  int64_t query_width() const { return padded_dim<Cache>(head_dim); }
  int64_t panel_size() const {
    return round_up(kPieceKeys * (query_width() + head_dim) * static_cast<int64_t>(sizeof(F)) / 4, W);
  }
  float* panel(int64_t piece, int64_t head) const { return panels + (piece * num_heads + head) * panel_size(); }
  const float* part(int64_t t, int64_t which, int64_t head) const {
    return qkv + ((t * 3 + which) * num_heads + head) * head_dim;
  }
  const float* angles(int64_t t) const { return cos_sin + t * rotary_dim; }
  void fetch(int64_t t, int64_t which, int64_t head) const {
    for (int64_t d = 0; d < head_dim; d += 16) __builtin_prefetch(part(t, which, head) + d);
  }
};

// Write the keys of a piece and a head, and its values transposed, with zeros behind the last one.
template <class Cache>
void pack_piece(const SegmentArgs<Cache>& a, int64_t piece, int64_t head) {
  using F = typename Factor<Cache>::type;
  constexpr bool is_rounded = Factor<Cache>::is_rounded;
  const SegmentRows rows = a.pieces[piece];
  const int64_t width = a.query_width();
  auto* rotated = static_cast<float*>(llm_scratch(1, sizeof(float) * static_cast<size_t>(width)));
  auto* keys = reinterpret_cast<F*>(a.panel(piece, head));
  F* values = keys + kPieceKeys * width;
  for (int64_t t = rows.first; t < rows.first + rows.count; t++, keys += width) {
    a.fetch(t + kRowsAhead, 1, head), a.fetch(t, 2, head);
    rotate(a.part(t, 1, head), a.angles(t), rotated, a.head_dim, a.rotary_dim, 1.0f);
    put_query(rotated, width, is_rounded, keys);
  }
  for (int64_t i = 0; i < rows.count; i += W)
    for_lanes(a.head_dim, [=](int64_t d, int n) {
      vec square[W];
      for (int64_t j = 0; j < W; j++)
        square[j] = i + j < rows.count ? load_n(a.part(rows.first + i + j, 2, head) + d, n) : set1(0.0f);
      transpose(square);
      for (int64_t j = 0; j < n; j++)
        put_query(reinterpret_cast<float*>(square + j), W, is_rounded, values + (d + j) * kPieceKeys + i);
    });
}

// The sums of a strip, of M rows at a time.
template <int M, class F>
inline void sum_rows_of(const SumArgs<F>& s, int64_t rows) {
  int64_t first = 0;
  for (; first + M <= rows; first += M) sum_tile<M, kStripVecs>(s.from_row(first), 0);
  if constexpr (M > 1)
    if (first < rows) sum_rows_of<M - 1>(s.from_row(first), rows - first);
}

// 2^x for x <= 0, relative error < 8e-5, which is little beside that of bf16; below 2^-120 it is that.
inline vec exp2_of_negative(vec x) {
  const vec clamped = max(set1(-120.0f), x), shifted = clamped + kMagic, f = clamped - (shifted - kMagic);
  vec y = set1(0.05517157f);
  y = fma(y, f, set1(0.24261114f));
  y = fma(y, f, set1(0.69326101f));
  y = fma(y, f, set1(0.99992807f));
  return (vec)((uint_vec)y + ((uint_vec)shifted << 23));
}
template <class Cache>
inline vec weight_of(vec below_largest) {
  return sizeof(Cache) == 2 ? exp2_of_negative(below_largest) : exp_of_negative(below_largest);
}

// Sums and online softmax of kStripQueries rows.
struct SegmentStrip {
  float *queries, *sums;  // in the layout of products, [query_width, kStripQueries]; [head_dim, kStripQueries]
  vec largest[kStripVecs], total[kStripVecs];
};

// Write the weights of a key and the next one in the layout of products, and add them to `total`.
inline void put_pair(float* to, vec first, vec second, vec& total, float) {
  store(to, first), store(to + kStripQueries, second);
  total += first + second;
}
#ifdef __AVX512BF16__
inline void put_pair(float* to, vec first, vec second, vec& total, uint16_t) {
  halves order;
  for (int i = 0; i < 2 * W; i++) order[i] = static_cast<int16_t>(i / 2 + i % 2 * W);
  const auto both = (halves)_mm512_cvtne2ps_pbh(second, first);  // which are no denormal numbers
  const auto pairs = (bf16_vec)__builtin_shuffle(both, order);
  store(to, (vec)pairs);
  total = dot_bf16(pairs, (bf16_vec)_mm512_set1_epi16(0x3f80), total);
}
#endif

// The online softmax of a strip over `count` keys: scores -> weights, in place. `keep` rescales what came before.
template <class Cache>
inline void soften_strip(SegmentStrip& r, float* scores, int64_t count, float* keep) {
  using F = typename Factor<Cache>::type;
  vec most[kStripVecs];
  for (int v = 0; v < kStripVecs; v++) most[v] = r.largest[v];
  for (int64_t i = 0; i < count; i++)
    for (int v = 0; v < kStripVecs; v++) most[v] = max(load(scores + i * kStripQueries + v * W), most[v]);
  for (int v = 0; v < kStripVecs; v++) {
    const vec kept = weight_of<Cache>(r.largest[v] - most[v]);
    r.largest[v] = most[v], r.total[v] *= kept;
    store(keep + v * W, kept);
  }
  for (int64_t i = 0; i < count; i += 2)
    for (int v = 0; v < kStripVecs; v++) {
      const float* from = scores + i * kStripQueries + v * W;
      float* to = scores + i * kStripQueries * static_cast<int64_t>(sizeof(F)) / 4 + v * W;
      vec first = weight_of<Cache>(load(from) - most[v]), second = set1(0.0f);
      if (i + 1 < count) second = weight_of<Cache>(load(from + kStripQueries) - most[v]);
      if (sizeof(Cache) < sizeof(F)) first = round_to_bf16(first), second = round_to_bf16(second);
      put_pair(to, first, second, r.total[v], F());
    }
}

// Write the queries of up to kStripQueries rows in the layout of products. `memory` has room for them in two more.
template <class Cache>
void begin_strip(const SegmentArgs<Cache>& a, const SegmentRows& strip, int64_t head, SegmentStrip& r, float* memory) {
  const int64_t width = a.query_width();
  const float scale = sizeof(Cache) == 2 ? a.scale * 1.44269504f : a.scale;
  float* rotated = memory + kStripQueries * width;
  auto* rows = reinterpret_cast<Cache*>(memory);
  for (int64_t i = 0; i < strip.count; i++) {
    const int64_t t = strip.first + i;
    a.fetch(t + kRowsAhead, 0, head);
    rotate(a.part(t, 0, head), a.angles(t), rotated, a.head_dim, a.rotary_dim, scale);
    store_row(rows + i * width, rotated, width);
  }
  CachedRows<Cache> queries = {rows, reinterpret_cast<const char*>(rows), width, strip.count, true};
  turn_keys<typename Factor<Cache>::type>(queries, width * static_cast<int64_t>(sizeof(Cache)) / 4, r.queries,
                                          kStripQueries, kStripQueries);
  memset(r.sums, 0, sizeof(float) * static_cast<size_t>(round_up(a.head_dim, W) * kStripQueries));
  for (int v = 0; v < kStripVecs; v++) r.largest[v] = set1(-INFINITY), r.total[v] = set1(0.0f);
}

template <class Cache>
void write_strip(const SegmentArgs<Cache>& a, const SegmentRows& strip, int64_t head, const SegmentStrip& r) {
  for (int64_t i = 0; i < strip.count; i += W)
    for_lanes(a.head_dim, [&](int64_t d, int n) {
      vec square[W];
      for (int64_t j = 0; j < W; j++) square[j] = load(r.sums + (d + j) * kStripQueries + i) / r.total[i / W];
      transpose(square);
      for (int64_t j = 0; j < min(W, strip.count - i); j++)
        store_n(a.out + ((strip.first + i + j) * a.num_heads + head) * a.head_dim + d, square[j], n);
    });
}

// The rows of a tile of one head.
template <class Cache>
void attend_to_segment(const SegmentArgs<Cache>& a, int64_t tile, int64_t head) {
  using F = typename Factor<Cache>::type;
  constexpr int64_t S = kStripQueries;
  const SegmentRows rows = a.tiles[tile];
  const int64_t width = a.query_width(), num_strips = (rows.count + S - 1) / S;
  const int64_t strip_size = (width + round_up(a.head_dim, W)) * S, size = (kPieceKeys + 1 + 2 * width) * S;
  auto* scores = static_cast<float*>(
      llm_scratch(1, sizeof(float) * static_cast<size_t>(num_strips * strip_size + size)));
  float *keep = scores + kPieceKeys * S, *memory = keep + S;
  SegmentStrip strips[kTileQueries / S];
  auto rows_of = [&](int64_t i) {
    const auto count = static_cast<int32_t>(min(S, rows.count - i * S));
    return SegmentRows{rows.first + static_cast<int32_t>(i * S), count, 0, 0};
  };
  for (int64_t i = 0; i < num_strips; i++) {
    strips[i].queries = scores + size + i * strip_size, strips[i].sums = strips[i].queries + width * S;
    begin_strip(a, rows_of(i), head, strips[i], memory);
  }
  for (int64_t piece = rows.first_piece; piece < rows.end_of_pieces; piece++) {
    const int64_t count = a.pieces[piece].count;
    const auto* keys = reinterpret_cast<const F*>(a.panel(piece, head));
    for (int64_t i = 0; i < num_strips; i++) {
      SegmentStrip& r = strips[i];
      sum_rows_of<kStripRows>(SumArgs<F>{keys, width, r.queries, scores, S, width, nullptr, scores}, count);
      soften_strip<Cache>(r, scores, count, keep);
      SumArgs<F> sums = {keys + kPieceKeys * width, kPieceKeys, scores, r.sums, S, round_up(count, 2), nullptr, scores};
      sums.keep_columns = keep;
      sum_rows_of<kStripRows>(sums, a.head_dim);
    }
  }
  for (int64_t i = 0; i < num_strips; i++) write_strip(a, rows_of(i), head, strips[i]);
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
