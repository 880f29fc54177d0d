// Drafts of a block, each depending on the one before; see LayerOps.markov_drafts in equivtest/kernels/contract.py.
//
// The best token of every stripe of the vocabulary is found for all places at once. Then a block a request fills its
// places in turn: a warp takes some of the candidates, whose rows of the head are few and come from the L2 cache, so a
// place costs about its latency. Filters and draws are sums over all candidates for each, without sorting them.

#include <climits>

#include "equivtest/philox.h"
#include "launch.cuh"

namespace {

using namespace equivtest::cuda;
using equivtest::Purpose;
using equivtest::uniform;
using bf16 = __nv_bfloat16;

constexpr int kStripes = 128;  // as equivtest.kernels.markov has it
constexpr int kGroups = 8;     // that share a row: each reads every eighth run of kStripes logits
constexpr int kWarps = 32;
constexpr int kEach = kStripes / kWarps;  // candidates of a warp, whose loads are in flight together
constexpr int kMaxHidden = 8192;

// A block per row: the largest logit of each stripe and its token, the lowest of equals. An empty stripe has -1.
template <class T>
__global__ void __launch_bounds__(kStripes* kGroups)
    stripe_maxima(const T* logits, float* values, int64_t* tokens, int vocab_size) {
  __shared__ float best_of[kGroups][kStripes];
  __shared__ int token_of[kGroups][kStripes];
  allow_next_launch();
  wait_for_previous();
  const int stripe = static_cast<int>(threadIdx.x) % kStripes, group = static_cast<int>(threadIdx.x) / kStripes;
  const T* row = logits + static_cast<int64_t>(blockIdx.x) * vocab_size;
  float best = -INFINITY;
  int token = -1;
#pragma unroll 8
  for (int v = group * kStripes + stripe; v < vocab_size; v += kGroups * kStripes) {
    const float x = to_float(row[v]);
    if (token < 0 || x > best) best = x, token = v;
  }
  best_of[group][stripe] = best, token_of[group][stripe] = token;
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int other = 1; other < kGroups; ++other) {
    const float x = best_of[other][stripe];
    const int v = token_of[other][stripe];
    if (v >= 0 && (token < 0 || x > best || (x == best && v < token))) best = x, token = v;
  }
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kStripes + stripe;
  values[at] = best, tokens[at] = token;
}

// Eight entries of a row.
struct Eight {
  float4 first, second;

  __device__ __forceinline__ static Eight of(const float* row, int i) {
    const float4* at = reinterpret_cast<const float4*>(row) + 2 * i;
    return {at[0], at[1]};
  }
  __device__ __forceinline__ static Eight of(const bf16* row, int i) {
    const uint4 w = reinterpret_cast<const uint4*>(row)[i];
    return {{low_half(w.x), high_half(w.x), low_half(w.y), high_half(w.y)},
            {low_half(w.z), high_half(w.z), low_half(w.w), high_half(w.w)}};
  }
  __device__ __forceinline__ float dot(const Eight& o) const {
    return first.x * o.first.x + first.y * o.first.y + first.z * o.first.z + first.w * o.first.w +
           second.x * o.second.x + second.y * o.second.y + second.z * o.second.z + second.w * o.second.w;
  }
};

// Sampling parameters and streams, an entry per request. Null: the likeliest token of each place.
struct Draw {
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* keys;
  const int64_t* positions;  // of the first place
};

template <class T>
struct Chain {
  const float* values;      // [batch, places, kStripes]
  const int64_t* tokens;    // [batch, places, kStripes]; -1: none
  const float* gates;       // [batch, places, hidden_size]
  const T* successors;      // [vocab_size, hidden_size]
  const T* head;            // [vocab_size, hidden_size]
  Draw draw;
  int64_t* drafts;          // [batch, places]
  float* probs;             // [batch, places, kStripes], or null
  int places, hidden_size;  // hidden_size is a multiple of 8
};

// Shared memory of a block beside the state.
struct Place {
  float scores[kStripes];
  double mass[kStripes];
  float law[kStripes];
  int best;         // the stripe with the largest score, the lowest of equals
  int chosen;       // the lowest token that the coin reaches
  int64_t previous;
};

// Of eight neighbouring lanes.
template <class Number>
__device__ __forceinline__ Number sum_of_eight(Number x) {
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// The law of a place and a draw from it, as `candidate_law` in equivtest/kernels/markov.py has it. Eight threads a
// stripe. All threads of the block call it together; place.scores and place.best are known.
__device__ void draw_place(Place& place, const int64_t* tokens, const Draw& draw, int index, float* probs) {
  constexpr int kHelpers = 32 * kWarps / kStripes;
  static_assert(kHelpers == 8, "sum_of_eight");
  const int stripe = static_cast<int>(threadIdx.x) / kHelpers, helper = static_cast<int>(threadIdx.x) % kHelpers;
  const int request = static_cast<int>(blockIdx.x);
  const float temperature = draw.temperature[request], own = place.scores[stripe];
  const bool is_empty = tokens[stripe] < 0, is_first = helper == 0;
  if (temperature == 0) {
    if (is_first) place.law[stripe] = stripe == place.best ? 1.0f : 0.0f;
  } else {
    double mass = 0;
    if (is_first && !is_empty) {
      mass = exp((static_cast<double>(own) - static_cast<double>(place.scores[place.best])) /
                 static_cast<double>(temperature));
    }
    int rank = 0;
    for (int other = helper; other < kStripes; other += kHelpers) rank += place.scores[other] > own;
    rank = sum_of_eight(rank);
    const int top_k = draw.top_k[request];
    if (is_first) place.mass[stripe] = top_k == 0 || rank < top_k ? mass : 0.0;
    __syncthreads();
    double before = 0, total = 0;
    for (int other = helper; other < kStripes; other += kHelpers) {
      total += place.mass[other];
      if (place.scores[other] > own) before += place.mass[other];
    }
    before = sum_of_eight(before), total = sum_of_eight(total);
    mass = place.mass[stripe];
    const bool kept = before < static_cast<double>(draw.top_p[request]) * total &&
                      mass >= static_cast<double>(draw.min_p[request]);
    __syncthreads();  // all have read
    if (is_first) place.mass[stripe] = kept ? mass : 0.0;
    __syncthreads();
    total = 0;
    for (int other = helper; other < kStripes; other += kHelpers) total += place.mass[other];
    total = sum_of_eight(total);
    if (is_first) place.law[stripe] = static_cast<float>(place.mass[stripe] / total);
  }
  __syncthreads();
  double reached = 0, total = 0;
  for (int other = helper; other < kStripes; other += kHelpers) {
    total += place.law[other];
    if (tokens[other] <= tokens[stripe]) reached += place.law[other];
  }
  reached = sum_of_eight(reached), total = sum_of_eight(total);
  const double coin = uniform(draw.keys[request], draw.positions[request] + index, Purpose::kDraft);
  if (is_first) {
    probs[stripe] = place.law[stripe];
    if (place.law[stripe] > 0 && reached > coin * total) atomicMin(&place.chosen, static_cast<int>(tokens[stripe]));
  }
}

// A block per request.
template <class T>
__global__ void __launch_bounds__(32 * kWarps) fill_places(const Chain<T> call) {
  extern __shared__ __align__(16) float state[];  // [hidden_size]
  __shared__ Place place;
  allow_next_launch();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  for (int index = 0; index < call.places; ++index) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * call.places + index;
    const float* gates = call.gates + at * call.hidden_size;
    const float* values = call.values + at * kStripes;
    const int64_t* tokens = call.tokens + at * kStripes;
    __syncthreads();  // the token before is known, and nobody reads what belongs to its place
    if (index > 0) {
      const T* successor = call.successors + place.previous * call.hidden_size;
      for (int i = thread; i < call.hidden_size; i += 32 * kWarps) state[i] = gates[i] * to_float(successor[i]);
    }
    __syncthreads();
    float sums[kEach] = {};
    if (index > 0) {
      const T* rows[kEach];
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const int64_t token = tokens[kEach * warp + k];
        rows[k] = call.head + (token < 0 ? 0 : token) * call.hidden_size;
      }
      for (int i = lane; i < call.hidden_size / 8; i += 32) {
        const Eight own = Eight::of(state, i);
#pragma unroll
        for (int k = 0; k < kEach; ++k) sums[k] += Eight::of(rows[k], i).dot(own);
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int stripe = kEach * warp + k;
      const float sum = warp_sum(sums[k]);
      if (lane == 0) place.scores[stripe] = tokens[stripe] < 0 ? -INFINITY : values[stripe] + sum;
    }
    __syncthreads();
    if (warp == 0) {
      // The first stripe has a token, whatever the logits are.
      float best = place.scores[lane];
      int stripe = lane;
#pragma unroll
      for (int other = lane + 32; other < kStripes; other += 32) {
        if (place.scores[other] > best) best = place.scores[other], stripe = other;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        const float x = __shfl_xor_sync(~0u, best, offset);
        const int from = __shfl_xor_sync(~0u, stripe, offset);
        if (x > best || (x == best && from < stripe)) best = x, stripe = from;
      }
      if (lane == 0) place.best = tokens[stripe] < 0 ? 0 : stripe, place.chosen = INT_MAX;
    }
    __syncthreads();
    if (call.probs != nullptr) {
      draw_place(place, tokens, call.draw, index, call.probs + at * kStripes);
      __syncthreads();
    }
    if (thread == 0) {
      // The coin reaches nobody where its product with the sum rounds up to the sum itself.
      const int64_t token = place.chosen == INT_MAX ? tokens[place.best] : place.chosen;
      place.previous = token;
      call.drafts[at] = token;
    }
  }
}

// Empty stripes name the first one's token, with probability 0.
__global__ void __launch_bounds__(kStripes) name_empty(int64_t* tokens) {
  wait_for_previous();
  int64_t* row = tokens + static_cast<int64_t>(blockIdx.x) * kStripes;
  if (row[threadIdx.x] < 0) row[threadIdx.x] = row[0];
}

template <class T>
const char* launch_maxima(const void* logits, float* values, int64_t* tokens, int64_t num_rows, int64_t vocab_size,
                          void* stream) {
  return launch(stripe_maxima<T>, dim3(static_cast<unsigned>(num_rows)), kStripes * kGroups, 0, stream,
                static_cast<const T*>(logits), values, tokens, static_cast<int>(vocab_size));
}

template <class T>
const char* launch_chain(const float* values, const int64_t* tokens, const float* gates, const void* successors,
                         const void* head, const Draw& draw, int64_t* drafts, float* probs, int64_t batch,
                         int64_t places, int64_t hidden_size, void* stream) {
  const Chain<T> call = {values, tokens, gates, static_cast<const T*>(successors), static_cast<const T*>(head), draw,
                         drafts, probs, static_cast<int>(places), static_cast<int>(hidden_size)};
  return launch(fill_places<T>, dim3(static_cast<unsigned>(batch)), 32 * kWarps, sizeof(float) * hidden_size, stream,
                call);
}

}  // namespace

// See LayerOps.markov_drafts. values is scratch of batch * places * 128 entries. Where there is a law, tokens and probs
// are its candidates and their probabilities; otherwise probs and the law's columns are null, and tokens is scratch.
extern "C" const char* equivtest_markov_drafts(const void* logits, int64_t logits_are_bfloat16, const float* gates,
                                               const void* successors, const void* head, int64_t weights_are_bfloat16,
                                               const float* temperature, const int* top_k, const float* top_p,
                                               const float* min_p, const int64_t* keys, const int64_t* positions,
                                               float* values, int64_t* tokens, int64_t* drafts, float* probs,
                                               int64_t batch, int64_t places, int64_t vocab_size, int64_t hidden_size,
                                               void* stream) {
  if (batch == 0 || places == 0) return nullptr;
  if (hidden_size % 8 != 0 || hidden_size > kMaxHidden) return "hidden_size must be a multiple of 8, at most 8192";
  const auto maxima = logits_are_bfloat16 ? launch_maxima<bf16> : launch_maxima<float>;
  if (const char* error = maxima(logits, values, tokens, batch * places, vocab_size, stream)) return error;
  const Draw draw = {temperature, top_k, top_p, min_p, keys, positions};
  const auto chain = weights_are_bfloat16 ? launch_chain<bf16> : launch_chain<float>;
  const char* error =
      chain(values, tokens, gates, successors, head, draw, drafts, probs, batch, places, hidden_size, stream);
  if (error != nullptr || probs == nullptr || vocab_size >= kStripes) return error;
  return launch(name_empty, dim3(static_cast<unsigned>(batch * places)), kStripes, 0, stream, tokens);
}
