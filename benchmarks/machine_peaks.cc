// What this machine can do at most, for benchmarks/kernels.py: products and sums a second, bytes read a second.
#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#ifdef __AMX_BF16__
#define LLM_ISA limits
#define LLM_TILES
#include "../engine/ops/cpu/tiles.h"
#endif

// With AVX2, bf16 is multiplied as float32. Without the instructions that the kernels would use there is no limit to
// compare with: 0.
extern "C" double peak_bf16_flops(int threads, int64_t steps) {
#if defined(__AMX_BF16__)
  constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kAskFor, kTileData)) return 0;
  const double started = omp_get_wtime();
#pragma omp parallel num_threads(threads)
  {
    using namespace limits;
    TileRegisters registers;
    registers.set_rows(kTileHeight, kTileHeight);
    for (int64_t i = 0; i < steps / 16; i++) {
      add_bf16_products<0, 4, 6>(), add_bf16_products<1, 4, 7>();
      add_bf16_products<2, 5, 6>(), add_bf16_products<3, 5, 7>();
    }
  }
  return static_cast<double>(threads * (steps / 16)) * 4 * 2 * 16 * 16 * 32 / (omp_get_wtime() - started);
#elif defined(__AVX512BF16__)
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
#elif defined(__FMA__)
  double total = 0, started = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    __m256 sums[12];
    for (int j = 0; j < 12; j++) sums[j] = _mm256_setzero_ps();
    const __m256 ones = _mm256_set1_ps(1);
    for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) sums[j] = _mm256_fmadd_ps(ones, ones, sums[j]);
    for (int j = 0; j < 12; j++) total += static_cast<double>(_mm256_cvtss_f32(sums[j]));
  }
  return total > 0 ? static_cast<double>(threads * steps) * 12 * 16 / (omp_get_wtime() - started) : 0;
#else
  return threads * steps < 0;
#endif
}

// Each thread reads its part in `streams` places at once: how many are best depends on the machine.
extern "C" double read_bandwidth(int threads, const uint64_t* data, int64_t size, int streams) {
  uint64_t total = 0;
  const int64_t of_stream = size / threads / streams / 8 * 8;
  const double started = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    const uint64_t* mine = data + omp_get_thread_num() * streams * of_stream;
    for (int64_t i = 0; i < of_stream; i += 8)
      for (int s = 0; s < streams; s++)
        for (int j = 0; j < 8; j++) total += mine[s * of_stream + i + j];
  }
  const double bytes = 8.0 * static_cast<double>(threads * streams * of_stream);
  return total ? bytes / (omp_get_wtime() - started) : 0;
}
