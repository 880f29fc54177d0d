// The law of one row: temperature, top-k, softmax, top-p, min-p, renormalise, all as one threshold on z.
//
// The cut is found without sorting the vocabulary. Top-k: the k-th largest maximum of a 64-token block bounds the k-th
// largest token from below, so only tokens above that bound are looked at. Top-p: the mass is measured at seven
// thresholds a pass, which narrows the bracket around the cut until few tokens are left. A weighted quickselect among
// those that are left makes both exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "equivtest/fault.h"
#include "equivtest/select.h"
#include "equivtest/simd.h"

namespace equivtest {

constexpr int64_t kBlock = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct RowLaw {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
};

// Largest logit of the row, or what is wrong with the row.
template <class T>
Fault find_max(const T* logits, int64_t vocab_size, float temperature, float* row_max) {
  f32x16 best = splat(-kInfinity);
  i32x16 bad = {};
  int64_t i = 0;
  for (; i + kLanes <= vocab_size; i += kLanes) {
    const f32x16 x = load(logits + i);
    best = x > best ? x : best;
    bad |= ~(x < kInfinity);
  }
  float maximum = max(best);
  bool found_bad = any(bad);
  for (; i < vocab_size; ++i) {
    const float x = to_float(logits[i]);
    maximum = x > maximum ? x : maximum;
    found_bad |= !(x < kInfinity);
  }
  if (found_bad) {
    for (i = 0; to_float(logits[i]) < kInfinity;) ++i;
    return {"logits must not hold NaN or +inf", to_float(logits[i])};
  }
  if (maximum == -kInfinity) return {"logits must hold at least one finite value", maximum};
  if (temperature > 0 && !std::isfinite(maximum / temperature)) {
    return {"the largest logit divided by temperature overflows float32", maximum / temperature};
  }
  *row_max = maximum;
  return {};
}

// Working memory of one thread, grown to the largest vocabulary it has met.
class LawBuffer {
 public:
  void reserve(int64_t vocab_size) {
    padded_ = (vocab_size + kBlock - 1) / kBlock * kBlock;
    if (static_cast<int64_t>(z_.size()) < padded_) {
      z_.resize(padded_);
      e_.resize(padded_);
      candidates_.resize(padded_);
      block_max_.resize(padded_ / kBlock);
      block_order_.resize(padded_ / kBlock);
    }
  }

  // Fills z, exp(z - max) and the block maxima.
  template <class T>
  void read(const T* logits, int64_t vocab_size, float temperature, float row_max) {
    vocab_size_ = vocab_size;
    z_max_ = row_max / temperature;
    alignas(64) float tail[kBlock];
    f64x8 low = {}, high = {};
    for (int64_t block = 0; block < padded_; block += kBlock) {
      f32x16 best = splat(-kInfinity);
      const bool whole = block + kBlock <= vocab_size;
      if (!whole) {  // padding never passes a threshold that a token sets, and weighs nothing
        for (int64_t i = 0; i < kBlock; ++i) tail[i] = block + i < vocab_size ? to_float(logits[block + i]) : -kInfinity;
      }
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const f32x16 x = whole ? load(logits + block + i) : load(tail + i);
        const f32x16 z = x / temperature;
        const f32x16 e = exp_nonpositive(z - z_max_);
        store(&z_[block + i], z);
        store(&e_[block + i], e);
        best = z > best ? z : best;
        low += low_half(e);
        high += high_half(e);
      }
      block_max_[block / kBlock] = max(best);
    }
    total_ = sum(low + high);
  }

  // The one threshold of the row: a token is kept if and only if its z is at least this.
  float threshold(const RowLaw& law) {
    float cut = -kInfinity;
    const bool by_count = law.top_k > 0 && law.top_k < vocab_size_;
    const bool by_mass = law.top_p < 1;
    if (by_count) {
      int64_t count = gather(count_bound(law.top_k), kInfinity);
      cut = weighted_cut(candidates_.data(), count, law.top_k, UnitWeight{});
      if (by_mass) {
        const auto kept = std::partition(candidates_.begin(), candidates_.begin() + count,
                                         [cut](const Candidate& item) { return item.z >= cut; });
        count = kept - candidates_.begin();
        double mass = 0;
        for (int64_t i = 0; i < count; ++i) mass += candidates_[i].e;
        cut = weighted_cut(candidates_.data(), count, static_cast<double>(law.top_p) * mass, MassWeight{});
      }
    } else if (by_mass) {
      cut = mass_cut(law.top_p);
    }
    return law.min_p > 0 ? std::max(cut, smallest_with(law.min_p)) : cut;
  }

  // Writes the renormalised law of what reaches `cut`.
  void write(float cut, float* out) const {
    const float scale = static_cast<float>(1.0 / (cut == -kInfinity ? total_ : mass_from(cut)));
    int64_t i = 0;
    for (; i + kLanes <= vocab_size_; i += kLanes) {
      store(out + i, load(&z_[i]) >= cut ? load(&e_[i]) * scale : splat(0.0f));
    }
    for (; i < vocab_size_; ++i) out[i] = z_[i] >= cut ? e_[i] * scale : 0.0f;
  }

 private:
  static constexpr int kThresholds = 7;
  static constexpr int kMaxPasses = 3;
  static constexpr int64_t kFewEnough = 512;

  // A z that at least `top_k` tokens reach.
  float count_bound(int64_t top_k) {
    const int64_t num_blocks = padded_ / kBlock;
    if (top_k > num_blocks / 2) return -kInfinity;
    std::copy_n(block_max_.begin(), num_blocks, block_order_.begin());
    std::nth_element(block_order_.begin(), block_order_.begin() + (top_k - 1), block_order_.begin() + num_blocks,
                     std::greater<float>());
    return block_order_[top_k - 1];
  }

  // Tokens with low <= z < high (or z == high == +inf never) into the candidates; returns how many.
  int64_t gather(float low, float high) {
    int64_t count = 0;
    for (int64_t block = 0; block < padded_; block += kBlock) {
      if (!(block_max_[block / kBlock] >= low)) continue;
      i32x16 inside = {};
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const f32x16 z = load(&z_[block + i]);
        inside |= (z >= low) & (z < high);
      }
      if (!any(inside)) continue;
      const int64_t end = std::min(block + kBlock, vocab_size_);
      for (int64_t i = block; i < end; ++i) {
        candidates_[count] = Candidate{z_[i], e_[i]};
        count += (z_[i] >= low) & (z_[i] < high);
      }
    }
    return count;
  }

  // The largest z at which the mass from the top reaches top_p of the whole.
  float mass_cut(float top_p) {
    const double target = static_cast<double>(top_p) * total_;
    // All tokens below this together weigh less than the 1 - top_p that may be cut; the slack covers exp's rounding.
    const double tail = (1.0 - static_cast<double>(top_p)) * total_ / static_cast<double>(vocab_size_);
    const float floor = z_max_ + static_cast<float>(std::log(tail) - 1e-3 - 1e-6 * std::fabs(z_max_));
    float low = std::min(floor, z_max_), high = kInfinity;  // mass(z >= low) >= target > mass(z >= high)
    for (int pass = 0; pass < kMaxPasses; ++pass) {
      const float top = high == kInfinity ? z_max_ : high;
      float cuts[kThresholds], masses[kThresholds];
      int32_t counts[kThresholds];
      for (int j = 0; j < kThresholds; ++j) {
        cuts[j] = low + (top - low) * (static_cast<float>(kThresholds - j) / (kThresholds + 1));
      }
      measure(cuts, masses, counts);
      int32_t count_low = -1, count_high = 0;
      for (int j = 0; j < kThresholds; ++j) {  // from the top down
        if (masses[j] >= target) {
          low = cuts[j];
          count_low = counts[j];
          break;
        }
        high = cuts[j];
        count_high = counts[j];
      }
      if (!(low < high) || (count_low >= 0 && count_low - count_high <= kFewEnough)) break;
    }
    // `measure` sums in float32 to choose the bracket; the cut itself is decided by sums in float64.
    double above = high == kInfinity ? 0.0 : mass_from(high);
    int64_t count = above < target ? gather(low, high) : 0;
    double inside = 0;
    for (int64_t i = 0; i < count; ++i) inside += candidates_[i].e;
    if (!(above < target && above + inside >= target)) {
      above = 0;
      count = gather(-kInfinity, kInfinity);
    }
    return weighted_cut(candidates_.data(), count, target - above, MassWeight{});
  }

  // Mass and number of the tokens that reach each of the thresholds, sums in float32.
  void measure(const float* cuts, float* masses, int32_t* counts) const {
    f32x16 mass[kThresholds] = {};
    i32x16 count[kThresholds] = {};
    for (int64_t i = 0; i < padded_; i += kLanes) {
      const f32x16 z = load(&z_[i]), e = load(&e_[i]);
      for (int j = 0; j < kThresholds; ++j) {
        const i32x16 reached = z >= cuts[j];
        mass[j] += reached ? e : splat(0.0f);
        count[j] -= reached;
      }
    }
    for (int j = 0; j < kThresholds; ++j) {
      masses[j] = static_cast<float>(sum(low_half(mass[j]) + high_half(mass[j])));
      counts[j] = 0;
      for (int64_t lane = 0; lane < kLanes; ++lane) counts[j] += count[j][lane];
    }
  }

  // Mass of the tokens that reach `cut`, in float64.
  double mass_from(float cut) const {
    f64x8 low = {}, high = {};
    for (int64_t i = 0; i < padded_; i += kLanes) {
      const f32x16 e = load(&z_[i]) >= cut ? load(&e_[i]) : splat(0.0f);
      low += low_half(e);
      high += high_half(e);
    }
    return sum(low + high);
  }

  // The smallest z among the tokens with at least `min_p` of the largest probability (whose e is 1).
  float smallest_with(float min_p) const {
    f32x16 smallest = splat(z_max_);
    for (int64_t i = 0; i < padded_; i += kLanes) {
      const f32x16 z = load(&z_[i]);
      smallest = ((load(&e_[i]) >= min_p) & (z < smallest)) ? z : smallest;
    }
    return -max(-smallest);
  }

  int64_t vocab_size_ = 0, padded_ = 0;
  float z_max_ = 0;
  double total_ = 0;
  std::vector<float> z_, e_, block_max_, block_order_;
  std::vector<Candidate> candidates_;
};

// The law of a row that `find_max` passed.
template <class T>
void write_law(const T* logits, int64_t vocab_size, const RowLaw& law, float row_max, LawBuffer& buffer, float* out) {
  if (law.temperature == 0) {  // greedy: a point mass on the largest logit, the lowest id on a tie
    std::fill_n(out, vocab_size, 0.0f);
    int64_t best = 0;
    while (to_float(logits[best]) != row_max) ++best;
    out[best] = 1.0f;
    return;
  }
  buffer.reserve(vocab_size);
  buffer.read(logits, vocab_size, law.temperature, row_max);
  buffer.write(buffer.threshold(law), out);
}

}  // namespace equivtest
