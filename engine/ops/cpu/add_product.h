// y[rows[s], n] += sum_r x[s, r] * b[r, n]
#pragma once
#include "parallel.h"
#include "vec.h"

namespace LLM_ISA {

constexpr int kVecs = 4;  // of outputs at a time, so that no instruction waits for the previous sum

// For few r: no sum has to be added up across lanes, as it would with b's rows along r.
inline void add_product(const LlmAddProduct& a) {
  const int64_t block = kVecs * W;
  auto add_to = [=](int64_t n, int count, auto vecs) {
    for (int64_t s = 0; s < a.num_rows; s++) {
      const float *x = a.x + s * a.rank, *b = a.b + n;
      vec sums[vecs.value] = {};
      for (int64_t r = 0; r < a.rank; r++, b += a.num_out) {
        const vec factor = set1(x[r]);
#pragma GCC unroll 4
        for (int i = 0; i < vecs.value; i++) sums[i] = fma(factor, load_n(b + i * W, count), sums[i]);
      }
      float* y = a.y + a.rows[s] * a.width + n;
#pragma GCC unroll 4
      for (int i = 0; i < vecs.value; i++) store_n(y + i * W, load_n(y + i * W, count) + sums[i], count);
    }
  };
  const int64_t num_blocks = (a.num_out + block - 1) / block;
  parallel_for(num_blocks, num_blocks / 8 + 1, a.num_rows * a.rank * a.num_out / 8, [=](int64_t i) {
    const int64_t start = i * block, end = min(start + block, a.num_out);
    if (end - start == block) return add_to(start, W, Count<kVecs>());
    for (int64_t n = start; n < end; n += W) add_to(n, static_cast<int>(min(W, end - n)), Count<1>());
  });
}

}  // namespace LLM_ISA
