// y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]
#pragma once
#include "kernels.h"
#include "linear_weights.h"
#include "parallel.h"

namespace LLM_ISA {

// A row is cut into chunks along K. In each chunk, one output is one vector of partial sums that is added up at its
// end; then the chunks are added in their order. These are the same operations in the same order in whatever tile an
// output is computed, so the result of a token does not depend on its neighbours.
// As many rows as a tile has, of x and of the weight, fit into the L1 cache.
#if defined(LLM_BF16_PANELS) && !defined(__AVX512BF16__)
constexpr int64_t kChunk = 512;  // x is float32
#else
constexpr int64_t kChunk = 1280;
#endif

inline int64_t chunk_size(int64_t width) {
  const int64_t count = (width + kChunk - 1) / kChunk;
  return count > 1 ? round_up((width + count - 1) / count, 128) : width;
}

inline int64_t num_chunks_of(int64_t width) { return (width + chunk_size(width) - 1) / chunk_size(width); }

constexpr int64_t kPanelBytes = 64 << 10;  // weight rows that stay in the L2 cache while all rows of x pass

template <class X>
struct LinearArgs {
  const X* x;
  int64_t rows, width, num_out;  // T, K (of x and of the weight as they lie in memory), N
  const float* bias;             // [N], or null
  float* y;
};

// Rows t .. t_end of x times rows n .. n_end of the weight, and the address of the rows that are needed next (or null).
// These are prefetched during the multiplication, or every panel would begin with a wait.
struct Panel {
  int64_t t, t_end, n, n_end;
  const char* next;
  int64_t row_bytes;
};

struct Chunk {
  int64_t start, count, index, num_chunks;
  bool is_last() const { return index == num_chunks - 1; }
};

// The use of outputs (t .. t + M, n .. n + N) after the sums of a chunk.
template <int M, int N, class X>
inline void add_to_outputs(const LinearArgs<X>& a, int64_t t, int64_t n, const Chunk& chunk,
                           const Totals<M, N, X>& totals) {
  static_assert(N <= W, "a row's outputs are one vector");
  const vec bias = a.bias ? load_few<N>(a.bias + n) : set1(0.0f);
  auto each = [&](auto result) {
    float* y = a.y + t * a.num_out + n;
#pragma GCC unroll 8
    for (int i = 0; i < M; i++, y += a.num_out) {
      const vec total = result(totals.row(i), y);
      __builtin_memcpy(y, &total, sizeof(float) * N);
    }
  };
  if (chunk.num_chunks == 1) return each([&](vec sum, const float*) { return sum + bias; });
  if (chunk.index == 0) return each([](vec sum, const float*) { return sum; });
  if (!chunk.is_last()) return each([](vec sum, const float* y) { return load_few<N>(y) + sum; });
  each([&](vec sum, const float* y) { return load_few<N>(y) + sum + bias; });
}

// One chunk of M rows of x from t on times N rows of the weight, n the first output.
template <int M, int N, bool kFetch, class X, class Weight>
inline void tile(const LinearArgs<X>& a, const Weight& weight, const Panel& p, int64_t t, int64_t n,
                 const Chunk& chunk) {
  using D = Dot<X>;
  constexpr uint64_t kPerLine = 512 / Weight::bits;  // elements of a cache line
  const X* x = a.x + t * a.width + chunk.start;
  const char* next = kFetch ? p.next + (n - p.n) * p.row_bytes + chunk.start * Weight::bits / 8 : nullptr;
  typename D::sum_lanes sums[M * N] = {};
  auto multiply = [&](auto read) {
    typename D::lanes columns[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) columns[j] = read(weight.row(n + j, chunk.start));
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const typename D::lanes row = read(x + i * a.width);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sums[i * N + j] = D::add(row, columns[j], sums[i * N + j]);
    }
  };
  int64_t k = 0;
  for (; k + D::step <= chunk.count; k += D::step) {
    if (kFetch && static_cast<uint64_t>(k) % kPerLine < D::step)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) prefetch(next + j * p.row_bytes + k * Weight::bits / 8);
    multiply([=](auto* p) { return D::read(p + k); });
  }
  if (const int left = static_cast<int>(chunk.count - k)) multiply([=](auto* p) { return D::read_first(p + k, left); });
  add_to_outputs<M, N>(a, t, n, chunk, Totals<M, N, X>(sums));
}

// One pass of M rows of x over the panel in one chunk. Each of `num_passes` prefetches its share of the next rows.
template <int M, class X, class Weight>
inline void pass(const LinearArgs<X>& a, const Weight& weight, const Panel& p, int64_t t, int64_t num_passes,
                 const Chunk& chunk) {
  constexpr int N = Weight::columns(M);
  int64_t n = p.n, turn = (t - p.t) / kTileRows;
  for (; n + N <= p.n_end; n += N) {
    if (turn == 0 && p.next)
      tile<M, N, true>(a, weight, p, t, n, chunk);
    else
      tile<M, N, false>(a, weight, p, t, n, chunk);
    turn = (turn == 0 ? num_passes : turn) - 1;
  }
  for (; n < p.n_end; n++) tile<M, 1, false>(a, weight, p, t, n, chunk);
}

template <class X, class Weight>
inline void multiply_chunk(const LinearArgs<X>& a, const Weight& weight, const Panel& p, const Chunk& chunk) {
  const int64_t num_passes = (p.t_end - p.t + kTileRows - 1) / kTileRows;
  int64_t t = p.t;
  for (; t + kTileRows <= p.t_end; t += kTileRows) pass<kTileRows>(a, weight, p, t, num_passes, chunk);
  switch (p.t_end - t) {
    case 1: return pass<1>(a, weight, p, t, num_passes, chunk);
    case 2: return pass<2>(a, weight, p, t, num_passes, chunk);
    case 3: return pass<3>(a, weight, p, t, num_passes, chunk);
    case 4: return pass<4>(a, weight, p, t, num_passes, chunk);
    case 5: return pass<5>(a, weight, p, t, num_passes, chunk);
    case 6: return pass<6>(a, weight, p, t, num_passes, chunk);
    case 7: return pass<7>(a, weight, p, t, num_passes, chunk);
  }
}

template <class X, class Weight>
void multiply(const LinearArgs<X>& a, const Weight& weight, const Panel& p) {
  const int64_t size = chunk_size(a.width), num_chunks = num_chunks_of(a.width);
  for (int64_t index = 0; index < num_chunks; index++) {
    const int64_t start = index * size;
    multiply_chunk(a, weight, p, Chunk{start, min(size, a.width - start), index, num_chunks});
  }
}

struct Pieces {
  int64_t first, end;
};

// A share of the pieces that are not taken yet. The last ones are taken one by one, so that no thread waits long.
inline Pieces some_pieces(int64_t* taken, int64_t count, int threads) {
  int64_t first = __atomic_load_n(taken, __ATOMIC_RELAXED), end;
  do end = first + 1 + (count - first) / (4 * threads);
  while (!__atomic_compare_exchange_n(taken, &first, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return {first, end};
}

// body(i, next) for each of the pieces that a thread gets; it does `next` after i, which is `count` behind the last.
// A free thread takes more pieces, many at first, because consecutive memory is read faster. looks_ahead: even before
// its own are done, so that `next` is known; of few pieces other threads then get none. Without it `next` is i + 1.
template <class Body>
inline void take_pieces(int64_t* taken, int64_t count, int threads, bool looks_ahead, Body body) {
  Pieces mine = some_pieces(taken, count, threads);
  while (mine.first < count) {
    const Pieces then = looks_ahead ? some_pieces(taken, count, threads) : Pieces{mine.end, mine.end};
    for (int64_t i = mine.first; i < mine.end; i++) body(i, i + 1 < mine.end ? i + 1 : min(then.first, count));
    mine = looks_ahead ? then : some_pieces(taken, count, threads);
  }
}

template <class X, class Weight>
void multiply(const LinearArgs<X>& a, const Weight& weight) {
  const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(X));
  // A panel that is read once need not stay in a cache, and its rows are best read from end to end.
  const bool is_read_once = a.rows <= kTileRows && num_chunks_of(a.width) > 1;
  const int64_t cols = is_read_once ? Weight::columns(a.rows) : round_up(kPanelBytes / row_bytes + 1, kTileSums);
  const int64_t num_panels = (a.num_out + cols - 1) / cols;
  const int64_t wanted = 4 * llm_num_threads();  // pieces, so that no thread waits long for the last one
  const int64_t cuts = num_panels >= wanted ? 1 : min(wanted / num_panels + 1, a.rows / 64 + 1);
  const int64_t rows = round_up((a.rows + cuts - 1) / cuts, kTileRows);
  const int64_t count = a.rows > 0 ? num_panels * cuts : 0;
  const int threads = count == 1 || a.rows * a.num_out * a.width / 8 < kSerialWork ? 1 : llm_num_threads();
  int64_t taken = 0;
  run_on_threads(threads, [&] {
    take_pieces(&taken, count, threads, true, [&](int64_t i, int64_t next) {
      const int64_t n = i / cuts * cols, t = i % cuts * rows, next_n = next / cuts * cols;
      const char* address = next < count && next_n != n ? weight.address(next_n) : nullptr;
      multiply(a, weight, Panel{t, min(a.rows, t + rows), n, min(a.num_out, n + cols), address,
                                a.width * Weight::bits / 8});
    });
  });
}

inline void linear(const float* x, const float* weight, const float* bias, float* y, int64_t rows,
                   int64_t width, int64_t num_out) {
  multiply(LinearArgs<float>{x, rows, width, num_out, bias, y}, Stored<float, float>{weight, width});
}

// Every `step` elements of a row begin a new one; the elements between two rows are zero.
inline bf16_x* rounded_rows(const float* x, int64_t rows, int64_t width, int64_t step = 1) {
  const int64_t stride = round_up(width, step);
  auto* rounded = static_cast<bf16_x*>(llm_scratch(0, sizeof(bf16_x) * static_cast<size_t>(rows * stride)));
  parallel_rows(rows, width, [=](int64_t t) {
    round_row(x + t * width, rounded + t * stride, width);
    for (int64_t k = width; k < stride; k++) rounded[t * stride + k] = 0;
  });
  return rounded;
}

}  // namespace LLM_ISA
