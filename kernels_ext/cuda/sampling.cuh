// What one block does with one row of logits or probabilities: its law as a threshold, and draws from it.
//
// The cut of a filter is found without sorting and without writing probabilities. All filters are thresholds on the
// logit x, since z = x / temperature is monotone. One pass over the row gives for every thread the largest logit that
// it met, and so the row's. One of the smaller of those is a floor that some four thousand tokens reach, whatever the
// row looks like. A second pass gives the total mass and gathers these tokens in shared memory, in vocabulary order.
// Where the filters provably keep none but these, everything after is arithmetic on them; otherwise the same is done
// over the whole row.
//
// Both passes may be shared by the blocks of a cluster: the first of them has the tokens of all and goes on alone.
//
// Sums have a fixed order (no floating-point atomics) and none depends on how many blocks share a row: the total is one
// of integers. So a row gives the same tokens every time, alone and beside others.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "equivtest/philox.h"
#include "launch.cuh"

namespace equivtest::cuda {

constexpr int kThreads = 1024;     // one block on a multiprocessor: a row is bound by its latency
constexpr int kWarps = kThreads / 32;
constexpr int kCapacity = 8192;    // tokens of a row that shared memory holds
constexpr int kCuts = 7;           // thresholds tried in one pass of the cut search
constexpr int kSums = kCuts + 1;   // a power of two: what one reduction adds up
constexpr int kLoadsInFlight = 4;  // 16-byte loads of a thread before the first is used
// So many threads' largest logits lie above the floor: about four times as many tokens as threads do, by Poisson's law.
constexpr int kFloorRank = kThreads * 982 / 1000;
constexpr float kInfinity = __builtin_huge_valf();

// Indices into contract.REFUSALS.
enum Problem : uint32_t {
  kNoProblem = 0,
  kNotANumber = 1,
  kNothingFinite = 2,
  kOverflow = 3,
  kBadProbability = 4,
  kBadDraftProbability = 5,
  kNoMass = 6,
  kBadDraftId = 7,
  kBadRows = 8,
  kBadParams = 9
};

// The refusal of the lowest row wins, so that the message does not depend on timing.
__device__ inline void refuse(unsigned long long* refusal, int64_t row, Problem problem, float value) {
  const unsigned long long place = (static_cast<unsigned long long>(row) << 8) | problem;
  atomicMin(refusal, (place << 32) | __float_as_uint(value));
}

// Floats in the order of unsigned integers.
__device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// exp2 to two units in the last place; 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr int kSlices = 2048;

// Thresholds from .. to - 1, as keys, one of which is a filter's.
struct Interval {
  uint32_t from, to;
};

// Logits from `low` on in equal steps; the first slice has those below too, the last those above.
struct Slices {
  float low, step, pad;

  __device__ Slices(float low, float high)
      : low(low),
        step(fmaxf((high - low) / (kSlices - 1), FLT_MIN)),
        pad(1e-3f * step + 3e-7f * fmaxf(fabsf(low), fabsf(high))) {}

  __device__ __forceinline__ int of(float x) const {
    return static_cast<int>(fminf(fmaxf((x - low) / step, 0.0f), kSlices - 1.0f));
  }
  // Bounds of what slice `index` holds: wider than its ends by more than they and a logit's slice are rounded.
  __device__ __forceinline__ float begin(int index) const { return low + static_cast<float>(index) * step - pad; }
  __device__ __forceinline__ float end(int index) const { return low + static_cast<float>(index + 1) * step + pad; }
};

// The largest logit that a thread met, as a key, and the first vector of the row where it stands.
struct Best {
  uint32_t key;
  int vector;
};

// What a block finds in its part of a row.
struct Part {
  unsigned long long units;  // of mass
  int count;                 // of gathered tokens; -1 where they do not fit
  bool bad;                  // whether there is a NaN or +infinity
};

// Shared memory of a block beside the gathered tokens.
struct Shared {
  union {
    uint32_t counts_of[kSlices];
    Best best[kThreads];
  };
  Part part;
  unsigned long long units[kWarps];
  int found[2];
  double sums[kSums][kWarps];
  double total[kSums];
  float floats[kWarps];
  int ints[kWarps];
  uint32_t keys[2][kWarps];
  uint32_t counts[2][kLoadsInFlight / 2][kWarps];
  double coins[8];  // by purpose
  long long token;
};

// The blocks that share a row, each with memory that the others can reach.
struct Cluster {
  int rank, size;

  // All threads of all blocks have come here, and what they wrote in shared memory is seen by the others.
  __device__ __forceinline__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) {
      cooperative_groups::this_cluster().sync();
      return;
    }
#endif
    __syncthreads();
  }

  // Where block `other` keeps what this block keeps at `own`, in shared memory.
  template <class T>
  __device__ __forceinline__ T* in_block(int other, T* own) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) return cooperative_groups::this_cluster().map_shared_rank(own, other);
#endif
    return own;
  }
};

template <class Number>
__device__ __forceinline__ Number warp_sum(Number value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

// Of a warp's values, those of this lane and of the ones before it.
__device__ __forceinline__ double prefix_sum(double value) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(~0u, value, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) value += other;
  }
  return value;
}

// Eight sums at once. In every step half of a lane's sums go to its partner, so that there are 9 shuffles and not 40.
__device__ inline void block_sum(double (&values)[kSums], Shared& shared) {
  static_assert(kSums == 8 && kWarps == 32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int half = kSums / 2, offset = 16; half > 0; half /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const double sent = upper ? values[j] : values[j + half];
      const double kept = upper ? values[j + half] : values[j];
      values[j] = kept + __shfl_xor_sync(~0u, sent, offset);
    }
  }
  values[0] += __shfl_xor_sync(~0u, values[0], 2);
  values[0] += __shfl_xor_sync(~0u, values[0], 1);
  __syncthreads();  // the last reader of these sums is done
  if (lane % 4 == 0) shared.sums[lane / 4][warp] = values[0];
  __syncthreads();
  if (warp < kSums) {
    const double sum = warp_sum(shared.sums[warp][lane]);
    if (lane == 0) shared.total[warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSums; ++j) values[j] = shared.total[j];
}

__device__ inline double block_sum(double value, Shared& shared) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.sums[0][threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(shared.sums[0][threadIdx.x % 32]);  // every warp alike
}

// Integers, whose order is of no matter.
__device__ inline unsigned long long block_sum(unsigned long long value, Shared& shared) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.units[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(shared.units[threadIdx.x % 32]);
}

// Of what the threads hold: what is before this one's, what is through it, and all. `through` is, to the bit, what the
// next thread has as `before`.
struct Prefix {
  double before, through, total;
};

__device__ inline Prefix block_prefix(double value, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const double in_warp = prefix_sum(value);
  __syncthreads();  // the last reader of these sums is done
  if (lane == 31) shared.sums[0][warp] = in_warp;
  __syncthreads();
  const double of_warps = prefix_sum(shared.sums[0][lane]);
  const double earlier = __shfl_sync(~0u, of_warps, max(warp - 1, 0));
  const double of_warp = __shfl_sync(~0u, of_warps, warp);
  Prefix out;
  const double start = warp > 0 ? earlier : 0.0;
  out.through = lane == 31 ? of_warp : start + in_warp;
  out.before = __shfl_up_sync(~0u, out.through, 1);
  if (lane == 0) out.before = start;
  out.total = __shfl_sync(~0u, of_warps, 31);
  return out;
}

__device__ inline float block_min(float value, Shared& shared) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fminf(value, __shfl_xor_sync(~0u, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.floats[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared.floats[threadIdx.x % 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fminf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// The largest value of the block and, of the threads that hold it, the lowest id.
__device__ inline void block_argmax(float* value, int* id, Shared& shared) {
  for (int level = 0; level < 2; ++level) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(~0u, *value, offset);
      const int other_id = __shfl_xor_sync(~0u, *id, offset);
      if (other > *value || (other == *value && other_id < *id)) *value = other, *id = other_id;
    }
    if (level == 1) break;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.floats[threadIdx.x / 32] = *value, shared.ints[threadIdx.x / 32] = *id;
    __syncthreads();
    *value = shared.floats[threadIdx.x % 32], *id = shared.ints[threadIdx.x % 32];
  }
}

// Integers from least to most.
struct Range {
  uint32_t least, most;
};

__device__ inline Range block_range(uint32_t value, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Range own{__reduce_min_sync(~0u, value), __reduce_max_sync(~0u, value)};
  __syncthreads();
  if (lane == 0) shared.keys[0][warp] = own.least, shared.keys[1][warp] = own.most;
  __syncthreads();
  return {__reduce_min_sync(~0u, shared.keys[0][lane]), __reduce_max_sync(~0u, shared.keys[1][lane])};
}

// The `rank`-th largest of the threads' keys, all in `range`, but for its last bits and as a float: at least so many
// reach it.
template <class T>
__device__ inline float block_rank(uint32_t key, int rank, const Range& range) {
  constexpr int kShift = sizeof(T) == 2 ? 16 : 12;  // a bfloat16 has no more bits
  key >>= kShift;
  const uint32_t most = range.most >> kShift, differing = most ^ range.least >> kShift;
  uint32_t bit = differing ? 1u << (31 - __clz(static_cast<int>(differing))) : 0;
  uint32_t from = most & ~(2 * bit - 1);  // the bits before are the same in all
  if (bit == 0) from = most;
#pragma unroll 1
  for (; bit > 0; bit >>= 1) {
    if (__syncthreads_count(key >= (from | bit)) >= rank) from |= bit;
  }
  return from <= key_of(-kInfinity) >> kShift ? -kInfinity : of_key(from << kShift);
}

// Reads a row 16 bytes at a time where its place in memory allows it.
template <class T>
struct Reader {
  static constexpr int kWidth = 16 / sizeof(T);

  const T* row;
  int vocab_size;
  bool aligned;

  __device__ Reader(const T* row, int vocab_size)
      : row(row),
        vocab_size(vocab_size),
        aligned(vocab_size % kWidth == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0) {}

  __device__ int num_vectors() const { return (vocab_size + kWidth - 1) / kWidth; }

  // The bits of a vector; those of -infinity past the end of the row.
  __device__ __forceinline__ uint4 bits(int vector) const {
    if (aligned) return *reinterpret_cast<const uint4*>(row + static_cast<int64_t>(vector) * kWidth);
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    constexpr int kPerWord = 4 / sizeof(T);
    uint32_t words[4] = {};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int id = vector * kWidth + j;
      const uint32_t entry = id < vocab_size ? reinterpret_cast<const Bits*>(row)[id] : 0xff800000u >> (32 - 8 * sizeof(T));
      words[j / kPerWord] |= entry << (j % kPerWord * 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ __forceinline__ void load(int vector, float (&x)[kWidth]) const { unpack(bits(vector), x); }

  // This thread's vectors from `first` on and before `end`, kThreads apart; asked for ahead, they arrive while others
  // are looked at.
  __device__ __forceinline__ void load_group(int first, int end, uint4 (&raw)[kLoadsInFlight]) const {
#pragma unroll
    for (int k = 0; k < kLoadsInFlight; ++k) {
      if (first + k * kThreads < end) raw[k] = bits(first + k * kThreads);
    }
  }

  // Entry j of a vector, where j is not known to the compiler.
  __device__ static __forceinline__ float entry(const uint4& raw, int j) {
    const int w = sizeof(T) == 2 ? j / 2 : j;
    const uint32_t word = w == 0 ? raw.x : w == 1 ? raw.y : w == 2 ? raw.z : raw.w;
    return __uint_as_float(sizeof(T) == 4 ? word : j % 2 ? word & 0xffff0000u : word << 16);
  }

  __device__ static __forceinline__ void unpack(const uint4& raw, float (&x)[kWidth]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 2) {
        x[2 * w] = __uint_as_float(words[w] << 16);
        x[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
      } else {
        x[w] = __uint_as_float(words[w]);
      }
    }
  }
};

// The tokens that the filters may keep, in vocabulary order: gathered ones, or the whole row.
template <class T>
struct Items {
  const T* row;
  const float* gathered_x;
  const int* gathered_ids;
  int count;
  bool whole_row;

  // Calls group_done() after at most 8 calls of each(x), for every item that this thread has.
  template <class Each, class GroupDone>
  __device__ __forceinline__ void for_each(const Each& each, const GroupDone& group_done) const {
    if (whole_row) {
      const Reader<T> reader(row, count);
      for (int vector = threadIdx.x; vector < reader.num_vectors(); vector += kThreads) {
        float x[Reader<T>::kWidth];
        reader.load(vector, x);
#pragma unroll
        for (int j = 0; j < Reader<T>::kWidth; ++j) {
          if (vector * Reader<T>::kWidth + j < count) each(x[j]);
        }
        group_done();
      }
    } else {
      for (int i = threadIdx.x; i < count; i += kThreads) {
        each(gathered_x[i]);
        group_done();
      }
    }
  }

  __device__ __forceinline__ float x(int i) const { return whole_row ? to_float(row[i]) : gathered_x[i]; }
  __device__ __forceinline__ int id(int i) const { return whole_row ? i : gathered_ids[i]; }
};

struct RowLaw {
  float temperature, top_p, min_p;
  int top_k;

  __device__ bool is_valid() const {
    return temperature >= 0 && temperature < kInfinity && top_k >= 0 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1;
  }
};

// What a token weighs under the law of a row of logits.
struct LogitWeight {
  float max, scale, cut;  // exp((x - max) / temperature) = exp2((x - max) * scale)
  double norm;            // sum of the weights

  __device__ __forceinline__ float raw(float x) const { return exp2_fast((x - max) * scale); }
  __device__ __forceinline__ float operator()(float x) const { return x >= cut ? raw(x) : 0.0f; }
  __device__ __forceinline__ float probability(float x) const {
    return static_cast<float>(static_cast<double>((*this)(x)) / norm);
  }
};

// What a token weighs where the row holds probabilities.
struct PlainWeight {
  __device__ __forceinline__ float operator()(float x) const { return x; }
  __device__ __forceinline__ float probability(float x) const { return x; }
};

// The bits of a logit that tell it from another, as an integer in its order: bfloat16 has no more than the upper ones.
template <class T>
constexpr int kKeyShift = sizeof(T) == 2 ? 16 : 0;

template <class T>
__device__ __forceinline__ float smallest_of(uint32_t key) {
  return of_key(key << kKeyShift<T>);
}

template <class T>
__device__ __forceinline__ Interval interval(float low, float high) {
  low = fmaxf(low, -FLT_MAX);  // what is below weighs nothing, and the upper bits of -infinity's key are a NaN's
  return {key_of(low) >> kKeyShift<T>, (key_of(high) >> kKeyShift<T>)+1};
}

// The largest bfloat16 of a key: the value itself, where that is the type.
template <class T>
__device__ __forceinline__ float largest_of(uint32_t key) {
  return sizeof(T) == 2 ? of_key(key << 16 | (key & 0x8000u ? 0 : 0xffffu)) : of_key(key);
}

// A threshold, and the weight of the items that reach it.
struct Cut {
  float at;
  double mass;
};

// The slices first .. last - 1 where the threshold of `target` lies, found by counting the tokens of each: what a slice
// weighs is between its count times the weight at either end. Counts are integers: their order is of no matter.
template <class T, class Weight>
__device__ int2 narrow(const Items<T>& items, const Weight& weight, double target, float low, float high,
                       const Slices& slices, Shared& shared) {
  constexpr double kSlack = 1e-6;  // for the rounding of weights
  static_assert(kSlices == 2 * kThreads);
  __syncthreads();
  for (int i = threadIdx.x; i < kSlices; i += kThreads) shared.counts_of[i] = 0;
  if (threadIdx.x == 0) shared.found[0] = 0, shared.found[1] = kSlices;
  __syncthreads();
  items.for_each(
      [&](float x) {
        if (x >= low) atomicAdd(&shared.counts_of[slices.of(x)], 1u);
      },
      [] {});
  __syncthreads();
  double sums[2] = {}, least[2], most[2];  // a thread has two slices; those of the largest logits come first
  const auto slice = [](int i) { return kSlices - 1 - (2 * static_cast<int>(threadIdx.x) + i); };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int index = slice(i);
    const uint32_t count = shared.counts_of[index];
    if (count > 0) {
      sums[0] += count * static_cast<double>(weight(index == 0 ? low : fmaxf(low, slices.begin(index))));
      sums[1] += count * static_cast<double>(weight(fminf(high, index == kSlices - 1 ? high : slices.end(index))));
    }
    least[i] = sums[0], most[i] = sums[1];
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double before[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const double through = prefix_sum(sums[side]);
    if (lane == 31) shared.sums[side][warp] = through;
    before[side] = through - sums[side];
  }
  __syncthreads();
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const double of_warps = prefix_sum(shared.sums[side][lane]);
    const double of_earlier = __shfl_sync(~0u, of_warps, max(warp - 1, 0));
    if (warp > 0) before[side] += of_earlier;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if ((before[0] + least[i]) * (1 - kSlack) >= target) atomicMax(&shared.found[0], slice(i));  // surely reached
    if ((before[1] + most[i]) * (1 + kSlack) < target) atomicMin(&shared.found[1], slice(i));    // surely not
  }
  __syncthreads();
  return make_int2(shared.found[0], shared.found[1]);
}

// The largest threshold of an interval that tokens of weight `target` reach; the smallest where none is reached. Every
// key of the interval, kSlices at most, has a count of its own: its tokens are equal and weigh the same.
template <class T, class Weight>
__device__ Cut cut_by_key(const Items<T>& items, const Weight& weight, double target, Interval in, Shared& shared) {
  static_assert(kSlices == 2 * kThreads);
  const uint32_t last = in.to - in.from - 1;
  __syncthreads();
  for (int i = threadIdx.x; i < kSlices; i += kThreads) shared.counts_of[i] = 0;
  if (threadIdx.x == 0) shared.found[0] = 0;
  __syncthreads();
  items.for_each(
      [&](float x) {
        const uint32_t key = key_of(x + 0.0f) >> kKeyShift<T>;  // -0 is 0
        if (key >= in.from) atomicAdd(&shared.counts_of[min(key - in.from, last)], 1u);
      },
      [] {});
  __syncthreads();
  double own[2];  // a thread has two keys; those of the largest logits come first
  const auto slice = [](int i) { return kSlices - 1 - (2 * static_cast<int>(threadIdx.x) + i); };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t count = shared.counts_of[slice(i)];
    own[i] = count > 0 ? count * static_cast<double>(weight(largest_of<T>(in.from + slice(i)))) : 0.0;
  }
  const Prefix prefix = block_prefix(own[0] + own[1], shared);
  const double reached[2] = {prefix.before + own[0], prefix.through};
  // Only where the sums come to reach the target, so that few threads write. Rounding may let them do so twice.
  if (reached[0] >= target && (threadIdx.x == 0 || prefix.before < target)) atomicMax(&shared.found[0], slice(0));
  if (reached[1] >= target && reached[0] < target) atomicMax(&shared.found[0], slice(1));
  __syncthreads();
  const int found = shared.found[0];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (slice(i) == found) shared.total[0] = reached[i];
  }
  __syncthreads();
  return {smallest_of<T>(in.from + min(static_cast<uint32_t>(found), last)), shared.total[0]};
}

// The same for any interval: a few thresholds a pass.
template <class T, class Weight>
__device__ Cut find_cut(const Items<T>& items, Weight weight, double target, Interval in, Shared& shared) {
  if constexpr (sizeof(T) == 2) {
    if (in.to - in.from <= kSlices) return cut_by_key(items, weight, target, in, shared);
  }
  uint32_t from = in.from, to = in.to;
  double mass = -1;
  while (to - from > 1) {
    float cuts[kCuts], part[kCuts] = {};
    double reached[kSums] = {};
#pragma unroll
    for (int j = 0; j < kCuts; ++j) {
      const uint32_t step = static_cast<uint32_t>((static_cast<uint64_t>(to - from) * (j + 1)) / (kCuts + 1));
      cuts[j] = smallest_of<T>(from + step);
    }
    items.for_each(
        [&](float x) {
          const float w = weight(x);
#pragma unroll
          for (int j = 0; j < kCuts; ++j) part[j] += x >= cuts[j] ? w : 0.0f;
        },
        [&] {
#pragma unroll
          for (int j = 0; j < kCuts; ++j) reached[j] += part[j], part[j] = 0;
        });
    block_sum(reached, shared);
    uint32_t new_from = from, new_to = to;
#pragma unroll
    for (int j = 0; j < kCuts; ++j) {  // rising thresholds, falling weights
      const uint32_t key = from + static_cast<uint32_t>((static_cast<uint64_t>(to - from) * (j + 1)) / (kCuts + 1));
      if (reached[j] >= target) {
        new_from = key, mass = reached[j];
      } else if (key < new_to) {
        new_to = key;
      }
    }
    from = new_from, to = new_to;
  }
  const float at = smallest_of<T>(from);
  if (mass < 0) {  // no threshold that was tried is reached
    mass = 0;
    float part = 0;
    items.for_each([&](float x) { part += x >= at ? weight(x) : 0.0f; }, [&] { mass += part, part = 0; });
    mass = block_sum(mass, shared);
  }
  return {at, mass};
}

// A row of logits as its blocks see it. All of them read it together; what comes after is for the first one.
template <class T>
class LogitRow {
 public:
  __device__ LogitRow(const T* row, int vocab_size, Cluster cluster, Shared& shared, float* gathered_x,
                      int* gathered_ids)
      : reader_(row, vocab_size),
        cluster_(cluster),
        shared_(shared),
        gathered_x_(gathered_x),
        gathered_ids_(gathered_ids) {
    // Blocks have whole rounds of kThreads vectors: what a thread meets in all of them does not depend on their number.
    const int rounds = (reader_.num_vectors() + kThreads - 1) / kThreads;
    const int each = (rounds + cluster.size - 1) / cluster.size * kThreads;
    const int begin = min(cluster.rank * each, reader_.num_vectors());
    ask_for(begin, min(begin + each, reader_.num_vectors()));
  }

  // Maximum and mass of the row, or what is wrong with it, and the tokens that the filters are likely to look at. Every
  // thread of the first block returns the same; the others have then done their part.
  __device__ Problem read(const RowLaw& law, float* value) {
    const float temperature = law.temperature > 0 ? law.temperature : 1.0f;
    weight_.scale = fminf(1.44269504088896f / temperature, 3e38f);
    find_max(law.temperature == 0);
    const bool filters =
        law.temperature > 0 && (law.top_p < 1 || law.min_p > 0 || (law.top_k > 0 && law.top_k < reader_.vocab_size));
    const bool bad = add_up(filters ? fmaxf(floor_, -FLT_MAX) : kInfinity);
    if (cluster_.rank != 0) return kNoProblem;
    if (bad) {
      *value = first_bad();
      return kNotANumber;
    }
    *value = weight_.max;
    if (weight_.max == -kInfinity) return kNothingFinite;
    *value = weight_.max / temperature;
    return isfinite(*value) ? kNoProblem : kOverflow;
  }

  // The threshold of the law and the mass that it keeps; `items` and `weight` are usable afterwards.
  __device__ void filter(const RowLaw& law) {
    const int vocab_size = reader_.vocab_size;
    const bool by_count = law.top_k > 0 && law.top_k < vocab_size, by_mass = law.top_p < 1, by_min = law.min_p > 0;
    weight_.cut = -kInfinity, weight_.norm = total_;
    items_ = Items<T>{reader_.row, nullptr, nullptr, vocab_size, true};
    if (!by_count && !by_mass && !by_min) return;
    float floor = floor_, mass_floor = -kInfinity;
    if (by_mass && !by_count) {
      // Tokens below this weigh less, all together, than the filter may cut; the slack covers the rounding of exp2.
      const float lost = static_cast<float>((1.0 - static_cast<double>(law.top_p)) * total_ / vocab_size);
      mass_floor = weight_.max + (log2f(lost) - 2e-3f) / weight_.scale - 2e-6f * fabsf(weight_.max);
      mass_floor = fminf(mass_floor, weight_.max);
      floor = fmaxf(floor, mass_floor);
    }
    if (num_gathered_ < 0 && floor > floor_) {  // many are equal at the floor, but they are not needed
      ask_for(0, reader_.num_vectors());
      num_gathered_ = gather([=](float x) { return x >= floor; }, [](const auto&) {});
    }
    const auto look_at_all = [&] {
      items_ = Items<T>{reader_.row, nullptr, nullptr, vocab_size, true};
      floor = by_count ? -kInfinity : mass_floor;
    };
    items_ = Items<T>{reader_.row, gathered_x_, gathered_ids_, num_gathered_, false};
    if (num_gathered_ < 0 || !holds_all(law, by_count, by_mass, floor)) look_at_all();
    Cut cut{-kInfinity, 0};
    if (by_count) cut = cut_at([](float) { return 1.0f; }, law.top_k, floor);
    if (by_mass) {
      weight_.cut = cut.at;
      const LogitWeight weight = weight_;
      const double target = static_cast<double>(law.top_p) * (by_count ? kept_mass() : total_);
      for (;; look_at_all()) {
        cut = cut_at(weight, target, floor);
        if (cut.mass >= target || items_.whole_row) break;  // else what is missing was not gathered
      }
      cut.at = fmaxf(cut.at, weight.cut);
    }
    if (by_min) {
      float smallest = weight_.max;
      items_.for_each(
          [&](float x) {
            if (weight_.raw(x) >= law.min_p) smallest = fminf(smallest, x);
          },
          [] {});
      cut.at = fmaxf(cut.at, block_min(smallest, shared_));
    }
    weight_.cut = cut.at;
    weight_.norm = by_mass && !by_min ? cut.mass : kept_mass();
  }

  __device__ const Items<T>& items() const { return items_; }
  __device__ const LogitWeight& weight() const { return weight_; }

  // The first token of the largest logit, where the law is greedy.
  __device__ int best_id() const {
    float x[Reader<T>::kWidth];
    reader_.load(best_vector_, x);
    int id = 0;
#pragma unroll
    for (int j = Reader<T>::kWidth - 1; j >= 0; --j) {
      if (x[j] == weight_.max) id = best_vector_ * Reader<T>::kWidth + j;
    }
    return id;
  }

 private:
  // The next pass is over the vectors begin .. end - 1; the first of them are on their way.
  __device__ void ask_for(int begin, int end) {
    begin_ = begin, end_ = end;
    reader_.load_group(begin + static_cast<int>(threadIdx.x), end, next_);
  }

  // The largest logit of every thread, of all blocks; from these the maximum, where it stands if asked, and the floor.
  __device__ void find_max(bool where) {
    constexpr int kWidth = Reader<T>::kWidth;
    float largest = -kInfinity;
    int vector = 0x7fffffff;
    for (int first = begin_ + static_cast<int>(threadIdx.x); first < end_; first += kThreads * kLoadsInFlight) {
      uint4 raw[kLoadsInFlight];
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) raw[k] = next_[k];
      reader_.load_group(first + kThreads * kLoadsInFlight, end_, next_);
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) {
        if (first + k * kThreads >= end_) break;
        float x[kWidth];
        reader_.unpack(raw[k], x);
#pragma unroll
        for (int j = 1; j < kWidth; ++j) x[0] = fmaxf(x[0], x[j]);
        if (x[0] > largest) largest = x[0], vector = first + k * kThreads;
      }
    }
    ask_for(begin_, end_);
    Best best{key_of(largest + 0.0f), vector};  // -0 is 0: the lower id wins
    if (cluster_.size > 1) {
      shared_.best[threadIdx.x] = best;
      cluster_.sync();
      for (int i = 1; i < cluster_.size; ++i) {
        const int block = cluster_.rank + i < cluster_.size ? cluster_.rank + i : cluster_.rank + i - cluster_.size;
        const Best other = cluster_.in_block(block, shared_.best)[threadIdx.x];
        if (other.key > best.key || (other.key == best.key && other.vector < best.vector)) best = other;
      }
    }
    const Range range = block_range(best.key, shared_);
    weight_.max = of_key(range.most);
    floor_ = block_rank<T>(best.key, kFloorRank, range);
    if (where) best_vector_ = block_range(best.key == range.most ? best.vector : 0x7fffffff, shared_).least;
  }

  // Total mass, and the tokens from `floor` on, of all blocks: the first one has them. Returns whether the row holds a
  // NaN or +infinity, which make its mass a NaN.
  __device__ bool add_up(float floor) {
    // A sum of integers, far from overflow, that is the same however the row is shared out. What a vector's mass is
    // rounded by, at most 2^(bits of the vocabulary - 62), is far less than float32 rounds a weight by.
    const float unit = static_cast<float>(1ull << (61 - (32 - __clz(reader_.vocab_size))));
    const float base = weight_.max == -kInfinity ? 0.0f : weight_.max;
    unsigned long long units = 0;
    bool bad = false;
    const int own_count = gather(
        [=](float x) { return x >= floor; },
        [&](const float(&x)[Reader<T>::kWidth]) {
          float part = 0;
#pragma unroll
          for (int j = 0; j < Reader<T>::kWidth; ++j) part += exp2_fast((x[j] - base) * weight_.scale);
          bad |= isnan(part);
          units += __float2ull_rn(part * unit);
        });
    units = block_sum(units, shared_);
    bad = __syncthreads_or(bad);
    if (threadIdx.x == 0) shared_.part = {units, own_count, bad};
    cluster_.sync();
    units = 0;
    int count = 0, before = 0;
    bool fits = true;
    for (int i = 0; i < cluster_.size; ++i) {
      const Part part = *cluster_.in_block(i, &shared_.part);
      if (i == cluster_.rank) before = count;
      units += part.units, count += max(part.count, 0);
      fits = fits && part.count >= 0, bad = bad || part.bad;
    }
    fits = fits && count <= kCapacity;
    if (cluster_.rank > 0 && fits) {
      float* x = cluster_.in_block(0, gathered_x_) + before;
      int* ids = cluster_.in_block(0, gathered_ids_) + before;
      for (int i = threadIdx.x; i < own_count; i += kThreads) x[i] = gathered_x_[i], ids[i] = gathered_ids_[i];
    }
    if (cluster_.size > 1) cluster_.sync();  // the first block has all; nobody looks at the others any more
    total_ = static_cast<double>(units) / unit;
    num_gathered_ = fits ? count : -1;
    return bad;
  }

  // Whether the filters keep none but the gathered tokens, which are the items; for top_p alone its cut will tell.
  __device__ bool holds_all(const RowLaw& law, bool by_count, bool by_mass, float floor) {
    if (by_count) return items_.count >= law.top_k;
    return by_mass || floor == -kInfinity || weight_.raw(floor) < law.min_p;
  }

  // The largest threshold that items of weight `target` reach; it is at least `low`. Of a whole row only the tokens near
  // it are looked at more than a few times.
  template <class Weight>
  __device__ Cut cut_at(const Weight& weight, double target, float low) {
    low = fmaxf(low, -FLT_MAX);
    double above = 0;
    Interval in = interval<T>(low, weight_.max);
    Items<T> near = items_;
    if (items_.whole_row) {
      // Below 2^-126 of the largest a token weighs nothing; where none is cut by weight, few are so far below.
      const float bottom = fmaxf(low, weight_.max - 126.0f / weight_.scale);
      const Slices slices(bottom, weight_.max);
      const int2 found = narrow(items_, weight, target, low, weight_.max, slices, shared_);
      const auto is_near = [&](float x) {
        const int slice = slices.of(x);
        return x >= low && slice >= found.x && slice < found.y;
      };
      ask_for(0, reader_.num_vectors());
      const int count = gather(is_near, [](const auto&) {});
      if (found.x > 0) low = fmaxf(low, slices.begin(found.x));
      in = interval<T>(low, found.y == kSlices ? weight_.max : fminf(weight_.max, slices.end(found.y - 1)));
      if (count >= 0) {
        float part = 0;
        items_.for_each([&](float x) { part += slices.of(x) >= found.y ? weight(x) : 0.0f; },
                        [&] { above += part, part = 0; });
        above = block_sum(above, shared_);
        near = Items<T>{reader_.row, gathered_x_, gathered_ids_, count, false};
      }
    }
    Cut cut = find_cut(near, weight, target - above, in, shared_);
    cut.mass += above;
    return cut;
  }

  __device__ double kept_mass() {
    double mass = 0;
    float part = 0;
    items_.for_each([&](float x) { part += weight_(x); }, [&] { mass += part, part = 0; });
    return block_sum(mass, shared_);
  }

  // Tokens that `keep` keeps of the vectors asked for, in vocabulary order; returns their number, -1 where they do not
  // fit. Calls see(x) for every vector of this thread.
  template <class Keep, class See>
  __device__ int gather(const Keep& keep, const See& see) {
    constexpr int kWidth = Reader<T>::kWidth, kPairs = kLoadsInFlight / 2;
    constexpr uint32_t kOwn = (1u << kWidth) - 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int count = 0, buffer = 0;
    for (int first = begin_; first < end_; first += kThreads * kLoadsInFlight, buffer ^= 1) {
      uint4 raw[kLoadsInFlight];
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) raw[k] = next_[k];
      uint32_t reached = 0;  // a bit an entry of this thread's vectors
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) {
        if (first + k * kThreads + static_cast<int>(threadIdx.x) >= end_) break;
        float x[kWidth];
        reader_.unpack(raw[k], x);
        see(x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) reached |= keep(x[j]) ? 1u << (k * kWidth + j) : 0u;
      }
      reader_.load_group(first + kThreads * kLoadsInFlight + static_cast<int>(threadIdx.x), end_, next_);
      if (count < 0) continue;
      uint32_t before[kPairs];  // two counts a word: no sum reaches 2^16
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint32_t own = reached >> (2 * pair * kWidth);
        before[pair] = __popc(own & kOwn) | __popc(own >> kWidth & kOwn) << 16;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
          const uint32_t other = __shfl_up_sync(~0u, before[pair], offset);
          if (lane >= offset) before[pair] += other;
        }
        if (lane == 31) shared_.counts[buffer][pair][warp] = before[pair];
      }
      __syncthreads();
      // Entries of earlier vectors, then of earlier warps, then of earlier lanes come first: the order of the ids.
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) {
        const uint32_t of_warp = shared_.counts[buffer][k / 2][lane] >> (k % 2 * 16) & 0xffffu;
        const int in_all = __reduce_add_sync(~0u, of_warp);
        if (count < 0 || count + in_all > kCapacity) {
          count = -1;
          continue;
        }
        const int in_warps = __reduce_add_sync(~0u, lane < warp ? of_warp : 0u);
        uint32_t own = reached >> (k * kWidth) & kOwn;
        int place = count + in_warps + static_cast<int>(before[k / 2] >> (k % 2 * 16) & 0xffffu) - __popc(own);
        for (; own != 0; own &= own - 1, ++place) {
          const int j = __ffs(static_cast<int>(own)) - 1;
          gathered_x_[place] = Reader<T>::entry(raw[k], j);
          gathered_ids_[place] = (first + k * kThreads + static_cast<int>(threadIdx.x)) * kWidth + j;
        }
        count += in_all;
      }
    }
    __syncthreads();
    return count;
  }

  __device__ float first_bad() {
    int id = 0x7fffffff;
    for (int i = threadIdx.x; i < reader_.vocab_size && id == 0x7fffffff; i += kThreads) {
      if (!(to_float(reader_.row[i]) < kInfinity)) id = i;
    }
    float found = id == 0x7fffffff ? -kInfinity : 0.0f;
    block_argmax(&found, &id, shared_);
    return to_float(reader_.row[id]);
  }

  Reader<T> reader_;
  Cluster cluster_;
  Shared& shared_;
  float* gathered_x_;
  int* gathered_ids_;
  LogitWeight weight_{};
  Items<T> items_{};
  int begin_, end_;             // vectors of the next pass
  uint4 next_[kLoadsInFlight];  // the first of them, of this thread
  double total_ = 0;
  float floor_ = 0;
  int num_gathered_ = -1;
  int best_vector_ = 0;
};

// Of gathered items every thread has so few, at most 9, that one scan of the block does.
template <class T, class Of>
__device__ int64_t draw_gathered(const Items<T>& items, double u, const Of& of, Shared& shared) {
  // Consecutive items a thread, an odd number of them: neighbouring threads read from different banks.
  const int each = (items.count + kThreads - 1) / kThreads | 1;
  const int begin = min(static_cast<int>(threadIdx.x) * each, items.count), end = min(begin + each, items.count);
  double own = 0;
  int last = -1;  // of this thread's, with weight
  for (int i = begin; i < end; ++i) {
    const double weight = of(i);
    own += weight;
    if (weight > 0) last = i;
  }
  if (threadIdx.x == 0) shared.found[0] = items.count, shared.found[1] = -1;
  const Prefix prefix = block_prefix(own, shared);
  if (!(prefix.total > 0)) return -1;
  const double target = u * prefix.total;
  const unsigned past = __ballot_sync(~0u, last >= 0 && prefix.through > target);
  if (past != 0 && static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(past)) - 1) {
    double sum = prefix.before;
    int found = last;
    for (int i = begin; i < last && found == last; ++i) {
      const double weight = of(i);
      sum += weight;
      if (weight > 0 && sum > target) found = i;
    }
    atomicMin(&shared.found[0], found);
  }
  __syncthreads();
  int found = shared.found[0];
  if (found == items.count) {
    if (last >= 0) atomicMax(&shared.found[1], last);
    __syncthreads();
    found = shared.found[1];
  }
  return items.id(found);
}

// The first id in vocabulary order whose cumulative weight exceeds u * total, or -1 where nothing weighs anything.
//
// of(i): the weight of item i, in float64. Every warp sums a piece of the items; the piece that holds the answer is cut
// up again until one warp can walk through it. Where rounding leaves no such id, it is the last one with weight. Every
// thread returns the same.
template <class T, class Of>
__device__ int64_t draw(const Items<T>& items, double u, const Of& of, Shared& shared) {
  if (!items.whole_row) return draw_gathered(items, u, of, shared);
  constexpr int kWalk = 256;  // items
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int from = 0, to = items.count;
  double before = 0, target = -1;  // what weighs in front of `from`; u * total, once it is known
  do {
    const int piece = ((to - from + kWarps - 1) / kWarps + 31) / 32 * 32;
    const int begin = min(from + warp * piece, to), end = min(begin + piece, to);
    double own = 0;
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) own += of(i);
    own = warp_sum(own);
    __syncthreads();
    if (lane == 0) shared.sums[0][warp] = own;
    __syncthreads();
    if (target < 0) {
      const double total = warp_sum(shared.sums[0][lane]);
      if (!(total > 0)) return -1;
      target = u * total;
    }
    own = shared.sums[0][lane];
    const double sum = prefix_sum(own);
    const unsigned past = __ballot_sync(~0u, own > 0 && before + sum > target);
    const unsigned weighing = __ballot_sync(~0u, own > 0);
    const int chosen = past != 0 ? __ffs(static_cast<int>(past)) - 1 : 31 - __clz(static_cast<int>(weighing));
    if (chosen > 0) before += __shfl_sync(~0u, sum, chosen - 1);
    from = min(from + chosen * piece, to), to = min(from + piece, to);
  } while (to - from > kWalk);
  if (warp == 0) {
    int found = -1;
    for (int first = from; first < to && found < 0; first += 32) {
      const int i = first + lane;
      const double weight = i < to ? of(i) : 0.0;
      const double sum = prefix_sum(weight);
      const unsigned past = __ballot_sync(~0u, weight > 0 && before + sum > target);
      if (past != 0) found = first + __ffs(past) - 1;
      before += __shfl_sync(~0u, sum, 31);
    }
    for (int first = from + (to - 1 - from) / 32 * 32; first >= from && found < 0; first -= 32) {
      const int i = first + lane;
      const unsigned weighing = __ballot_sync(~0u, i < to && of(i) > 0);
      if (weighing != 0) found = first + 31 - __clz(weighing);
    }
    if (lane == 0) shared.token = items.id(found);
  }
  __syncthreads();
  return shared.token;
}

}  // namespace equivtest::cuda
