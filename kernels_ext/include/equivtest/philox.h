// Philox4x32-10 and the coins made of it: the C++ twin of equivtest/rng.py, bit for bit.
//
// Source: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EQUIVTEST_HD __host__ __device__
#else
#define EQUIVTEST_HD
#endif

namespace equivtest {

// What a coin is for. The values are counter words and part of the stream's definition (rng.Purpose).
enum class Purpose : uint32_t { kAccept = 0, kRecover = 1, kBonus = 2, kDraft = 3, kPlain = 4 };

struct PhiloxWords {
  uint32_t word[4];
};

EQUIVTEST_HD inline PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = PhiloxWords{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                           static_cast<uint32_t>(product1),
                           static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                           static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// A uniform in [0, 1) with 53 random bits; the counter is (position, purpose, 0, 0), the key's low word comes first.
EQUIVTEST_HD inline double uniform(int64_t stream_key, int64_t position, Purpose purpose) {
  const uint64_t key = static_cast<uint64_t>(stream_key);
  const PhiloxWords counter{{static_cast<uint32_t>(position), static_cast<uint32_t>(purpose), 0, 0}};
  const PhiloxWords out = philox4x32(counter, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  const uint64_t bits = (static_cast<uint64_t>(out.word[0] >> 5) << 26) | (out.word[1] >> 6);
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace equivtest
