// y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]
#pragma once
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

// One output is one vector of partial sums along K, added up at the end: the same operations in the same
// order whatever tile it was computed in, so a token's result does not depend on its neighbours.
template <class X, class Weight>
struct Dot {
  static constexpr int step = W;
  using lanes = vec;
  static vec add(vec x, vec weight, vec sums) { return fma(x, weight, sums); }
  template <class T>
  static vec load_step(const T* p) { return load(p); }
  template <class T>
  static vec load_tail(const T* p, int n) { return load_first(p, n); }
};

#ifdef __AVX512BF16__
using bf16_x = uint16_t;
template <>
struct Dot<uint16_t, uint16_t> {
  static constexpr int step = 2 * W;
  using lanes = bf16_vec;
  static vec add(bf16_vec x, bf16_vec weight, vec sums) { return dot_bf16(x, weight, sums); }
  static bf16_vec load_step(const uint16_t* p) { return load_bf16(p); }
  static bf16_vec load_tail(const uint16_t* p, int n) { return load_bf16_first(p, n); }
};
inline void round_row(const float* x, uint16_t* rounded, int64_t cols) {
  for_lanes(cols, [=](int64_t k, int n) { store_bf16(rounded + k, load_n(x + k, n), n); });
}
#else
using bf16_x = float;  // rounded to bf16, kept as float32
inline void round_row(const float* x, float* rounded, int64_t cols) {
  for_lanes(cols, [=](int64_t k, int n) {
    uint16_t bits[W];
    store_bf16(bits, load_n(x + k, n), n);
    store_n(rounded + k, load_n(bits, n), n);
  });
}
#endif

// A tile holds kTileSums vectors in registers: up to kTileRows rows of x by as many of the weight as fit.
#ifdef __AVX512F__
constexpr int kTileRows = 8, kTileSums = 24;
#else
constexpr int kTileRows = 4, kTileSums = 12;
#endif
constexpr int64_t kPanelBytes = 64 << 10;  // weight rows that stay in the L2 cache while all rows of x pass

template <class X, class Weight>
struct LinearArgs {
  const X* x;
  const Weight* weight;
  const float* bias;  // or null
  float* y;
  int64_t rows, width, num_out;  // T, K, N
};

// Rows t .. t_end of x times rows n .. n_end of the weight, and how far behind them in memory lies the weight
// that is wanted next: it is fetched while this one is multiplied, or every panel would begin with a wait.
struct Panel {
  int64_t t, t_end, n, n_end, ahead;
};

template <int M, int N, bool kFetch, class X, class Weight>
inline void tile(const LinearArgs<X, Weight>& a, int64_t t, int64_t n, int64_t ahead) {
  using D = Dot<X, Weight>;
  const X* x = a.x + t * a.width;
  const Weight* weight = a.weight + n * a.width;
  vec sums[M][N] = {};
  auto add_step = [&](auto load) {
    typename D::lanes columns[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) columns[j] = load(weight + j * a.width);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const typename D::lanes row = load(x + i * a.width);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sums[i][j] = D::add(row, columns[j], sums[i][j]);
    }
  };
  int64_t k = 0;
  for (; k + D::step <= a.width; k += D::step) {
    if (kFetch)
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) prefetch(weight + j * a.width + k + ahead);
    add_step([=](auto* p) { return D::load_step(p + k); });
  }
  if (const int left = static_cast<int>(a.width - k))
    add_step([=](auto* p) { return D::load_tail(p + k, left); });
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++)
      a.y[(t + i) * a.num_out + n + j] = sum(sums[i][j]) + (a.bias ? a.bias[n + j] : 0.0f);
}

// One pass of M rows of x over a panel. Of `num_passes`, each fetches its share of what comes next.
template <int M, class X, class Weight>
inline void pass(const LinearArgs<X, Weight>& a, const Panel& p, int64_t t, int64_t num_passes) {
  constexpr int N = kTileSums / (M < 4 ? 4 : M);
  int64_t n = p.n, turn = (t - p.t) / kTileRows;
  for (; n + N <= p.n_end; n += N) {
    if (p.ahead && turn == 0)
      tile<M, N, true>(a, t, n, p.ahead);
    else
      tile<M, N, false>(a, t, n, 0);
    turn = (turn == 0 ? num_passes : turn) - 1;
  }
  for (; n < p.n_end; n++) tile<M, 1, false>(a, t, n, 0);
}

template <class X, class Weight>
inline void multiply(const LinearArgs<X, Weight>& a, const Panel& p) {
  const int64_t num_passes = (p.t_end - p.t + kTileRows - 1) / kTileRows;
  int64_t t = p.t;
  for (; t + kTileRows <= p.t_end; t += kTileRows) pass<kTileRows>(a, p, t, num_passes);
  switch (p.t_end - t) {
    case 1: return pass<1>(a, p, t, num_passes);
    case 2: return pass<2>(a, p, t, num_passes);
    case 3: return pass<3>(a, p, t, num_passes);
    case 4: return pass<4>(a, p, t, num_passes);
    case 5: return pass<5>(a, p, t, num_passes);
    case 6: return pass<6>(a, p, t, num_passes);
    case 7: return pass<7>(a, p, t, num_passes);
  }
}

template <class X, class Weight>
void multiply(const LinearArgs<X, Weight>& a) {
  const int64_t row_bytes = a.width * static_cast<int64_t>(sizeof(Weight));
  const int64_t cols = round_up(kPanelBytes / row_bytes + 1, kTileSums);
  const int64_t num_panels = (a.num_out + cols - 1) / cols;
  const int64_t wanted = 4 * llm_num_threads();  // pieces, so that nobody waits long for the last
  const int64_t cuts = num_panels >= wanted ? 1 : min(wanted / num_panels + 1, a.rows / 64 + 1);
  const int64_t rows = round_up((a.rows + cuts - 1) / cuts, kTileRows);
  const int64_t count = a.rows > 0 ? num_panels * cuts : 0;
  const int threads = count == 1 || a.rows * a.num_out * a.width / 8 < kSerialWork ? 1 : llm_num_threads();
  int64_t taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    // Whoever is free takes the next piece, and knows it one piece ahead.
    auto take = [&] { return __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); };
    for (int64_t i = take(), next; i < count; i = next) {
      next = take();
      const int64_t n = i / cuts * cols, t = i % cuts * rows;
      const int64_t ahead = next < count ? (next / cuts - i / cuts) * cols * a.width : 0;
      multiply(a, Panel{t, min(a.rows, t + rows), n, min(a.num_out, n + cols), ahead});
    }
  }
}

inline void linear(const float* x, const float* weight, const float* bias, float* y, int64_t rows,
                   int64_t width, int64_t num_out) {
  multiply(LinearArgs<float, float>{x, weight, bias, y, rows, width, num_out});
}

inline void linear(const float* x, const uint16_t* weight, const float* bias, float* y, int64_t rows,
                   int64_t width, int64_t num_out) {
  auto* rounded = static_cast<bf16_x*>(llm_scratch(0, sizeof(bf16_x) * static_cast<size_t>(rows * width)));
  parallel_rows(rows, width, [=](int64_t t) { round_row(x + t * width, rounded + t * width, width); });
  multiply(LinearArgs<bf16_x, uint16_t>{rounded, weight, bias, y, rows, width, num_out});
}

}  // namespace LLM_ISA
