// Causal grouped-query attention of one sequence and one key/value head over paged keys and values.
//
// Sixteen tokens at a time are gathered into float32; scores come out as one vector per query row and tile. The softmax
// is two-pass (all scores of a row are kept), so a row's result does not depend on which other rows share the call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "equivtest/simd.h"

namespace equivtest {

template <class T>
struct PagedSequence {
  const T* kv_pages;          // [num_pages, 2, page_size, num_kv_heads, head_dim]
  const int32_t* page_table;  // [max_pages]
  int64_t page_size, num_kv_heads, head_dim;
  int64_t kv_head;

  // Keys (which = 0) or values (1) of tokens [begin, begin + kLanes) as float32 [kLanes, padded_dim], zero past `end` and head_dim.
  void gather(int64_t which, int64_t begin, int64_t end, int64_t padded_dim, float* tile) const {
    int64_t page = begin / page_size, slot = begin % page_size;
    for (int64_t token = begin; token < begin + kLanes; ++token, tile += padded_dim) {
      if (token >= end) {
        std::fill_n(tile, padded_dim, 0.0f);
        continue;
      }
      const T* from =
          kv_pages + (((page_table[page] * int64_t{2} + which) * page_size + slot) * num_kv_heads + kv_head) * head_dim;
      int64_t i = 0;
      for (; i + kLanes <= head_dim; i += kLanes) store(tile + i, load(from + i));
      for (; i < head_dim; ++i) tile[i] = to_float(from[i]);
      for (; i < padded_dim; ++i) tile[i] = 0.0f;  // the query is 0 there, and 0 times what was left here may be NaN
      if (++slot == page_size) slot = 0, ++page;
    }
  }
};

// Lane-pair sums of a, then of b: four rounds fold sixteen vectors into one whose lane i is the sum of vector i.
EQUIVTEST_INLINE f32x16 pair_sums(f32x16 a, f32x16 b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Working memory of one thread.
struct AttentionBuffer {
  std::vector<float> query, scores, output;
};

// `num_rows` query rows of a head group; row r sees tokens 0 .. visible[r] - 1 (visible is at least 1, ascending).
// query: float32 [num_rows, 16 * kVectors], already scaled. output: the same shape.
template <int kVectors, class T>
void attend(const PagedSequence<T>& sequence, const float* query, const int64_t* visible, int64_t num_rows,
            AttentionBuffer& buffer, float* output) {
  constexpr int64_t kDim = kVectors * kLanes;
  const int64_t end = visible[num_rows - 1], padded_end = (end + kLanes - 1) / kLanes * kLanes;
  alignas(64) float tile[kLanes * kDim];
  if (static_cast<int64_t>(buffer.scores.size()) < num_rows * padded_end) buffer.scores.resize(num_rows * padded_end);
  float* scores = buffer.scores.data();

  for (int64_t begin = 0; begin < end; begin += kLanes) {
    sequence.gather(0, begin, end, kDim, tile);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (begin >= visible[row]) continue;
      f32x16 q[kVectors];
      for (int v = 0; v < kVectors; ++v) q[v] = load(query + row * kDim + v * kLanes);
      f32x16 fold[kLanes];
      for (int64_t token = 0; token < kLanes; ++token) {
        f32x16 products = q[0] * load(tile + token * kDim);
        for (int v = 1; v < kVectors; ++v) products += q[v] * load(tile + token * kDim + v * kLanes);
        fold[token] = products;
      }
      for (int64_t width = kLanes / 2; width > 0; width /= 2) {
        for (int64_t i = 0; i < width; ++i) fold[i] = pair_sums(fold[2 * i], fold[2 * i + 1]);
      }
      store(scores + row * padded_end + begin, fold[0]);
    }
  }

  for (int64_t row = 0; row < num_rows; ++row) {  // scores become weights: softmax over what the row sees
    float* row_scores = scores + row * padded_end;
    const int64_t seen = visible[row], seen_end = (seen + kLanes - 1) / kLanes * kLanes;
    std::fill(row_scores + seen, row_scores + seen_end, -std::numeric_limits<float>::infinity());
    f32x16 best = load(row_scores), total = {};
    for (int64_t i = kLanes; i < seen_end; i += kLanes) {
      const f32x16 x = load(row_scores + i);
      best = x > best ? x : best;
    }
    const float row_max = max(best);
    for (int64_t i = 0; i < seen_end; i += kLanes) {
      const f32x16 weight = exp_nonpositive(load(row_scores + i) - row_max);
      store(row_scores + i, weight);
      total += weight;
    }
    const float scale = static_cast<float>(1.0 / sum(low_half(total) + high_half(total)));
    for (int64_t i = 0; i < seen_end; i += kLanes) store(row_scores + i, load(row_scores + i) * scale);
  }

  std::fill_n(output, num_rows * kDim, 0.0f);
  for (int64_t begin = 0; begin < end; begin += kLanes) {
    sequence.gather(1, begin, end, kDim, tile);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (begin >= visible[row]) continue;
      f32x16 sums[kVectors];
      for (int v = 0; v < kVectors; ++v) sums[v] = load(output + row * kDim + v * kLanes);
      const float* weights = scores + row * padded_end + begin;
      for (int64_t token = 0; token < kLanes; ++token) {
        for (int v = 0; v < kVectors; ++v) sums[v] += weights[token] * load(tile + token * kDim + v * kLanes);
      }
      for (int v = 0; v < kVectors; ++v) store(output + row * kDim + v * kLanes, sums[v]);
    }
  }
}

}  // namespace equivtest
