// Philox4x32-10 (Salmon et al., 2011): a random number as a function of (key, counter), without state.
#pragma once
#include <cstdint>

struct Uniforms {
  double draw, xtc;  // in [0, 1), independent of each other
};

// key = seed, counter = (counter, 0): 53 bits of the first two words, and of the last two.
inline Uniforms philox_uniforms(uint64_t seed, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  const auto uniform = [](uint64_t high, uint64_t low) {
    return static_cast<double>((high << 32 | low) >> 11) * 0x1p-53;
  };
  return {uniform(c0, c1), uniform(c2, c3)};
}
