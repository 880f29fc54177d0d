// Drafts of a block, each depending on the one before; see LayerOps.markov_drafts in equivtest/kernels/contract.py.
//
// The best token of every stripe of the vocabulary is found for all places at once. Then a block a request fills its
// places in turn: a warp takes some of the candidates, whose rows of the head are few and come from the L2 cache, so a
// place costs about its latency.

#include "launch.cuh"

namespace {

using namespace equivtest::cuda;
using bf16 = __nv_bfloat16;

constexpr int kStripes = 128;  // as equivtest.kernels.markov has it
constexpr int kGroups = 8;     // that share a row: each reads every eighth run of kStripes logits
constexpr int kWarps = 32;
constexpr int kEach = kStripes / kWarps;  // candidates of a warp, whose loads are in flight together
constexpr int kMaxHidden = 8192;

// A block per row: the largest logit of each stripe and its token, the lowest of equals. An empty stripe has -1.
template <class T>
__global__ void __launch_bounds__(kStripes* kGroups)
    stripe_maxima(const T* logits, float* values, int* tokens, int vocab_size) {
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

template <class T>
struct Chain {
  const float* values;      // [batch, places, kStripes]
  const int* tokens;        // [batch, places, kStripes]; -1: none
  const float* gates;       // [batch, places, hidden_size]
  const int64_t* anchors;   // [batch]
  const T* successors;      // [vocab_size, hidden_size]
  const T* head;            // [vocab_size, hidden_size]
  int64_t* drafts;          // [batch, places]
  int places, hidden_size;  // hidden_size is a multiple of 8
};

// A block per request.
template <class T>
__global__ void __launch_bounds__(32 * kWarps) fill_places(const Chain<T> call) {
  extern __shared__ __align__(16) float state[];  // [hidden_size]
  __shared__ float scores[kStripes];
  __shared__ int64_t previous;
  allow_next_launch();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (thread == 0) previous = call.anchors[blockIdx.x];
  for (int place = 0; place < call.places; ++place) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * call.places + place;
    const float* gates = call.gates + at * call.hidden_size;
    const int* tokens = call.tokens + at * kStripes;
    __syncthreads();  // the token before is known, and nobody reads the state of the place before
    const T* successor = call.successors + previous * call.hidden_size;
    for (int i = thread; i < call.hidden_size; i += 32 * kWarps) state[i] = gates[i] * to_float(successor[i]);
    __syncthreads();
    const T* rows[kEach];
    float sums[kEach] = {};
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      rows[k] = call.head + static_cast<int64_t>(max(tokens[kEach * warp + k], 0)) * call.hidden_size;
    }
    for (int i = lane; i < call.hidden_size / 8; i += 32) {
      const Eight own = Eight::of(state, i);
#pragma unroll
      for (int k = 0; k < kEach; ++k) sums[k] += Eight::of(rows[k], i).dot(own);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int stripe = kEach * warp + k;
      const float sum = warp_sum(sums[k]);
      if (lane == 0) scores[stripe] = tokens[stripe] < 0 ? -INFINITY : call.values[at * kStripes + stripe] + sum;
    }
    __syncthreads();
    if (warp == 0) {
      // The first stripe has a token, whatever the logits are.
      float best = scores[lane];
      int stripe = lane;
#pragma unroll
      for (int other = lane + 32; other < kStripes; other += 32) {
        if (scores[other] > best) best = scores[other], stripe = other;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        const float x = __shfl_xor_sync(~0u, best, offset);
        const int from = __shfl_xor_sync(~0u, stripe, offset);
        if (x > best || (x == best && from < stripe)) best = x, stripe = from;
      }
      if (lane == 0) {
        const int token = tokens[stripe];
        previous = token < 0 ? tokens[0] : token;  // of NaN alone
        call.drafts[at] = previous;
      }
    }
  }
}

template <class T>
const char* launch_maxima(const void* logits, float* values, int* tokens, int64_t num_rows, int64_t vocab_size,
                          void* stream) {
  return launch(stripe_maxima<T>, dim3(static_cast<unsigned>(num_rows)), kStripes * kGroups, 0, stream,
                static_cast<const T*>(logits), values, tokens, static_cast<int>(vocab_size));
}

template <class T>
const char* launch_chain(const float* values, const int* tokens, const float* gates, const int64_t* anchors,
                         const void* successors, const void* head, int64_t* drafts, int64_t batch, int64_t places,
                         int64_t hidden_size, void* stream) {
  const Chain<T> call = {values, tokens, gates, anchors, static_cast<const T*>(successors), static_cast<const T*>(head),
                         drafts, static_cast<int>(places), static_cast<int>(hidden_size)};
  return launch(fill_places<T>, dim3(static_cast<unsigned>(batch)), 32 * kWarps, sizeof(float) * hidden_size, stream,
                call);
}

}  // namespace

// See LayerOps.markov_drafts. values and tokens are scratch of batch * places * 128 entries each.
extern "C" const char* equivtest_markov_drafts(const void* logits, int64_t logits_are_bfloat16, const float* gates,
                                               const int64_t* anchors, const void* successors, const void* head,
                                               int64_t weights_are_bfloat16, float* values, int* tokens,
                                               int64_t* drafts, int64_t batch, int64_t places, int64_t vocab_size,
                                               int64_t hidden_size, void* stream) {
  if (batch == 0 || places == 0) return nullptr;
  if (hidden_size % 8 != 0 || hidden_size > kMaxHidden) return "hidden_size must be a multiple of 8, at most 8192";
  const auto maxima = logits_are_bfloat16 ? launch_maxima<bf16> : launch_maxima<float>;
  if (const char* error = maxima(logits, values, tokens, batch * places, vocab_size, stream)) return error;
  const auto chain = weights_are_bfloat16 ? launch_chain<bf16> : launch_chain<float>;
  return chain(values, tokens, gates, anchors, successors, head, drafts, batch, places, hidden_size, stream);
}
