// A draw from unnormalised weights by inverse distribution function, in vocabulary order, sums in float64.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "equivtest/fault.h"
#include "equivtest/simd.h"

namespace equivtest {

// p as it is.
struct Plain {
  const float* p;

  EQUIVTEST_INLINE void weights(int64_t i, f64x8* low, f64x8* high) const {
    const f32x16 x = load(p + i);
    *low = low_half(x);
    *high = high_half(x);
  }
  EQUIVTEST_INLINE double weight(int64_t i) const { return p[i]; }
};

// p without one token: the residual of p against a point mass.
struct Without {
  const float* p;
  int64_t hole;

  EQUIVTEST_INLINE void weights(int64_t i, f64x8* low, f64x8* high) const {
    f32x16 x = load(p + i);
    if (hole >= i && hole < i + kLanes) x[hole - i] = 0.0f;
    *low = low_half(x);
    *high = high_half(x);
  }
  EQUIVTEST_INLINE double weight(int64_t i) const { return i == hole ? 0.0 : p[i]; }
};

// relu(p - q), the difference in float64.
struct Residual {
  const float* p;
  const float* q;

  EQUIVTEST_INLINE void weights(int64_t i, f64x8* low, f64x8* high) const {
    const f32x16 x = load(p + i), y = load(q + i);
    const f64x8 zero = {};
    const f64x8 a = low_half(x) - low_half(y), b = high_half(x) - high_half(y);
    *low = a > zero ? a : zero;
    *high = b > zero ? b : zero;
  }
  EQUIVTEST_INLINE double weight(int64_t i) const {
    const double difference = static_cast<double>(p[i]) - static_cast<double>(q[i]);
    return difference > 0 ? difference : 0.0;
  }
};

EQUIVTEST_INLINE bool is_probability(float x) { return x >= 0 && x <= std::numeric_limits<float>::max(); }

// The first entry that is NaN, negative or infinite, as a fault.
inline Fault check_probs(const float* probs, int64_t vocab_size) {
  const float largest = std::numeric_limits<float>::max();
  i32x16 good = ~i32x16{};
  int64_t i = 0;
  for (; i + kLanes <= vocab_size; i += kLanes) {
    const f32x16 x = load(probs + i);
    good &= (x >= 0.0f) & (x <= largest);
  }
  bool found_bad = any(~good);
  for (; i < vocab_size; ++i) found_bad |= !is_probability(probs[i]);
  if (!found_bad) return {};
  for (i = 0; is_probability(probs[i]);) ++i;
  return {"probabilities must be finite and at least 0", probs[i]};
}

// Sums of blocks of weights; the blocks let a draw skip to the block that holds it.
class Drawer {
 public:
  // Sums the weights; returns their total.
  template <class Weights>
  double total(const Weights& weights, int64_t vocab_size) {
    block_sums_.clear();
    double total = 0;
    for (int64_t begin = 0; begin < vocab_size; begin += kDrawBlock) {
      const int64_t end = begin + kDrawBlock < vocab_size ? begin + kDrawBlock : vocab_size;
      f64x8 low = {}, high = {}, low_part, high_part;
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) {
        weights.weights(i, &low_part, &high_part);
        low += low_part;
        high += high_part;
      }
      double block_sum = sum(low + high);
      for (; i < end; ++i) block_sum += weights.weight(i);
      block_sums_.push_back(block_sum);
      total += block_sum;
    }
    return total;
  }

  // The first id whose cumulative weight exceeds u * total, after `total` was called with the same weights.
  //
  // Rounding can leave no such id in a block that should hold it, or none at all when u is almost 1: the last id with
  // weight is then the answer. An id without weight is never drawn.
  template <class Weights>
  int64_t draw(const Weights& weights, int64_t vocab_size, double total, double u) const {
    const double target = u * total;
    const int64_t num_blocks = static_cast<int64_t>(block_sums_.size());
    double cumulative = 0, before = 0;  // `before` is the weight in front of `chosen`
    int64_t chosen = 0;
    for (int64_t block = 0; block < num_blocks && !(cumulative > target); ++block) {
      if (!(block_sums_[block] > 0)) continue;
      chosen = block;
      before = cumulative;
      cumulative += block_sums_[block];
    }
    const int64_t begin = chosen * kDrawBlock;
    const int64_t end = begin + kDrawBlock < vocab_size ? begin + kDrawBlock : vocab_size;
    int64_t last_with_weight = begin;
    for (int64_t i = begin; i < end; ++i) {
      const double weight = weights.weight(i);
      if (!(weight > 0)) continue;
      last_with_weight = i;
      before += weight;
      if (before > target) break;
    }
    return last_with_weight;
  }

 private:
  static constexpr int64_t kDrawBlock = 512;

  std::vector<double> block_sums_;
};

}  // namespace equivtest
