// What this machine can do at most, for benchmarks/kernels.py: products and sums a second, bytes read a second.
#include <immintrin.h>
#include <omp.h>

#include <cstdint>

// Without the instructions that the kernels would use there is no limit to compare with: 0.
extern "C" double peak_bf16_flops(int threads, int64_t steps) {
#ifdef __AVX512BF16__
  double total = 0, started = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    __m512 sums[12];
    for (int j = 0; j < 12; j++) sums[j] = _mm512_setzero_ps();
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) sums[j] = _mm512_dpbf16_ps(sums[j], ones, ones);
    for (int j = 0; j < 12; j++) total += static_cast<double>(_mm512_reduce_add_ps(sums[j]));
  }
  return total > 0 ? static_cast<double>(threads * steps) * 12 * 64 / (omp_get_wtime() - started) : 0;
#else
  return threads * steps < 0;
#endif
}

extern "C" double read_bandwidth(int threads, const uint64_t* data, int64_t size) {
  uint64_t total = 0;
  const double started = omp_get_wtime();
#pragma omp parallel for num_threads(threads) reduction(+ : total)
  for (int64_t i = 0; i < size; i++) total += data[i];
  return total ? static_cast<double>(size) * 8 / (omp_get_wtime() - started) : 0;
}
