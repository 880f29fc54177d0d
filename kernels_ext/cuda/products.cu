// Products of a transformer layer with few rows, bfloat16 with float32 sums; see LayerOps in
// equivtest/kernels/contract.py. What stands around a product is part of its launch:
//
//   scale      the product is of RMSNorm's output: the norm's weight is in the matrix, and a row's 1 / rms, which is
//              found from the same reads of x, multiplies its sums
//   gate       SwiGLU: silu of the first half of the outputs times the second half
//   residual   the result is added to the float32 residual stream, and a bfloat16 copy of that is kept
//
// One row: `one_row`, on the CUDA cores, a warp an output. More: `strips`, on the tensor cores (mma.sync m16n8k16), a
// block 16 rows of the matrix, its warps sharing the sum. Both are bound by latency for the matrices of a small model:
// weights, which no kernel writes, go straight to registers and are there before the predecessor has ended, and after it
// one read of x lies between a block and its products. A row's result does not depend on how many others there are, to
// the last bit, from two on.

#include "launch.cuh"

namespace {

using namespace equivtest::cuda;
using bf16 = __nv_bfloat16;

struct Product {
  const bf16* x;       // [num_rows, in_features]
  const bf16* weight;  // [out_features, in_features]; of a gate [2 * out_features, in_features], gate over up
  float* residual;     // [num_rows, out_features], added to in place, or null
  bf16* out;           // [num_rows, out_features]; with a residual its rounded copy
  int num_rows, in_features, out_features;
  bool scaled;
  float eps;
};

__device__ __forceinline__ float inverse_rms(const Product& call, float squares) {
  return call.scaled ? rsqrtf(squares / static_cast<float>(call.in_features) + call.eps) : 1.0f;
}

__device__ __forceinline__ void unpack(const uint4& from, float (&to)[8]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = low_half(words[i]), to[2 * i + 1] = high_half(words[i]);
}

__device__ __forceinline__ float squared(const uint4& chunk, float before) {
  float x[8];
  unpack(chunk, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) before += x[i] * x[i];
  return before;
}


// A warp computes kOuts products for the one row: of adjacent outputs, or of kOuts / 2 gates and their ups. It reads x for
// itself.
template <int kOuts, bool kGate, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) one_row(const Product call) {
  constexpr int kOutputs = kGate ? kOuts / 2 : kOuts;
  constexpr int kAhead = kOuts > 2 ? 2 : kOuts > 1 ? 4 : 6;  // chunks of a weight row that a lane has on their way
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int num_chunks = call.in_features / 8;
  const int first = (static_cast<int>(blockIdx.x) * kWarps + warp) * kOutputs;
  const uint4* rows[kOuts];
#pragma unroll
  for (int i = 0; i < kOuts; ++i) {
    const int output = min(first + i % kOutputs, call.out_features - 1);
    const int row = output + (kGate ? i / kOutputs * call.out_features : 0);
    rows[i] = reinterpret_cast<const uint4*>(call.weight) + static_cast<int64_t>(row) * num_chunks;
  }
  const auto* const x = reinterpret_cast<const uint4*>(call.x);
  const auto none = make_uint4(0, 0, 0, 0);
  allow_next_launch();
  uint4 w[kAhead][kOuts];
  const auto load = [&](int start) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int i = 0; i < kOuts; ++i) w[a][i] = start + 32 * a < num_chunks ? __ldg(rows[i] + start + 32 * a) : none;
    }
  };
  load(lane);
#pragma unroll
  for (int i = 0; i < kOuts; ++i)  // a line of 128 bytes is 8 chunks
    for (int c = 32 * kAhead + 8 * lane; c < num_chunks; c += 8 * 32)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(rows[i] + c));
  wait_for_previous();

  float sums[kOuts] = {}, squares = 0;
  for (int start = lane; start < num_chunks; start += 32 * kAhead) {
    uint4 chunks[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) chunks[a] = start + 32 * a < num_chunks ? x[start + 32 * a] : none;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (start + 32 * a >= num_chunks) break;
      float values[8];
      unpack(chunks[a], values);
      squares = squared(chunks[a], squares);
#pragma unroll
      for (int i = 0; i < kOuts; ++i) {
        float weights[8];
        unpack(w[a][i], weights);
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[i] += weights[e] * values[e];
      }
    }
    if (start + 32 * kAhead - lane < num_chunks) load(start + 32 * kAhead);
  }
  const float scale = inverse_rms(call, warp_sum(squares));
#pragma unroll
  for (int i = 0; i < kOuts; ++i) sums[i] = warp_sum(sums[i]) * scale;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int at = first + i;
    if (lane != i || at >= call.out_features) continue;
    float y = sums[i];
    if constexpr (kGate) y = rounded<bf16>(silu(rounded<bf16>(y))) * rounded<bf16>(sums[kOutputs + i]);
    if (call.residual != nullptr) call.residual[at] = y += call.residual[at];
    call.out[at] = from_float<bf16>(y);
  }
}

template <int kOuts, bool kGate, int kWarps>
const char* launch_one_row(const Product& call, void* stream) {
  constexpr int kPerBlock = kWarps * (kGate ? kOuts / 2 : kOuts);
  const dim3 grid((call.out_features + kPerBlock - 1) / kPerBlock);
  return launch(one_row<kOuts, kGate, kWarps>, grid, 32 * kWarps, 0, stream, call);
}

constexpr int kStrip = 16;  // rows of the matrix
constexpr int kStride = 4;  // chunks of 8 inputs that a warp multiplies at a time, one by each of the lanes of a row

// Rows go through in tiles of 8, outputs in strips of 16: for a gate 8 gates and their ups. Warp w has the w-th part of
// the sum, of all of them. A lane reads 16 bytes of two rows of the matrix and of one row of x and has with them its
// registers of two products of 16 x 8 x 16: the order of the inputs within 32 is not theirs, but it is the same for both.
template <int kTiles, int kAhead, bool kGate, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) strips(const Product call) {
  constexpr int kRows = 8 * kTiles, kThreads = 32 * kWarps;
  constexpr int kPitch = kStrip + 4;  // so that a warp writes its sums to 32 banks
  constexpr int kOutputs = kGate ? kStrip / 2 : kStrip;
  constexpr int kEach = (kRows * kOutputs + kThreads - 1) / kThreads;  // results that a thread puts out
  __shared__ float parts[kWarps][kRows * kPitch], squares[kWarps][kRows];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int row_of_lane = lane / 4, chunk_of_lane = lane % 4;
  const int first_output = static_cast<int>(blockIdx.x) * kOutputs, first_row = static_cast<int>(blockIdx.y) * kRows;
  const int num_chunks = call.in_features / 8, num_steps = (num_chunks + kStride - 1) / kStride;
  const int each = (num_steps + kWarps - 1) / kWarps, begin = warp * each, end = min(begin + each, num_steps);
  const auto none = make_uint4(0, 0, 0, 0);

  const uint4* weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int output = min(first_output + row_of_lane + (kGate ? 0 : 8 * i), call.out_features - 1);
    const int64_t row = output + (kGate ? static_cast<int64_t>(i) * call.out_features : 0);
    weights[i] = reinterpret_cast<const uint4*>(call.weight) + row * num_chunks;
  }
  uint4 w[kAhead][2];
  const auto load = [&](int a, int step) {
    const int chunk = step * kStride + chunk_of_lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) w[a][i] = step < end && chunk < num_chunks ? __ldg(weights[i] + chunk) : none;
  };
  allow_next_launch();
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load(a, begin + a);
  for (int step = begin + kAhead + 2 * chunk_of_lane; step < end; step += 8) {  // a line of 128 bytes is 2 steps
#pragma unroll
    for (int i = 0; i < 2; ++i) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights[i] + step * kStride));
  }
  wait_for_previous();

  // What the results are added to; it is there long before they are.
  float before[kEach] = {};
  const auto place = [&](int i) {  // of a thread's i-th result in residual and out, -1 for none
    const int index = thread + i * kThreads, row = first_row + index / kOutputs;
    const int output = first_output + index % kOutputs;
    const bool is_there = index < kRows * kOutputs && row < call.num_rows && output < call.out_features;
    return is_there ? static_cast<int64_t>(row) * call.out_features + output : int64_t{-1};
  };
  if (call.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t at = place(i);
      if (at >= 0) before[i] = call.residual[at];
    }
  }

  float c[kTiles][4] = {}, sums[kTiles] = {};
  for (int start = begin; start < end; start += kAhead) {
    uint4 x[kAhead][kTiles];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int chunk = (start + a) * kStride + chunk_of_lane;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int row = first_row + 8 * j + row_of_lane;
        const bool is_there = start + a < end && chunk < num_chunks && row < call.num_rows;
        x[a][j] = is_there ? reinterpret_cast<const uint4*>(call.x)[static_cast<int64_t>(row) * num_chunks + chunk] : none;
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        multiply_add(c[j], w[a][0].x, w[a][1].x, w[a][0].y, w[a][1].y, x[a][j].x, x[a][j].y);
        multiply_add(c[j], w[a][0].z, w[a][1].z, w[a][0].w, w[a][1].w, x[a][j].z, x[a][j].w);
        if (call.scaled) sums[j] = squared(x[a][j], sums[j]);
      }
      if (start + kAhead < end) load(a, start + kAhead + a);
    }
  }

#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float* const to = parts[warp] + (8 * j + 2 * chunk_of_lane) * kPitch + row_of_lane;
    to[0] = c[j][0], to[kPitch] = c[j][1], to[8] = c[j][2], to[kPitch + 8] = c[j][3];
    if (!call.scaled) continue;
    sums[j] += __shfl_xor_sync(~0u, sums[j], 1);
    sums[j] += __shfl_xor_sync(~0u, sums[j], 2);
    if (chunk_of_lane == 0) squares[warp][8 * j + row_of_lane] = sums[j];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int64_t at = place(i);
    if (at < 0) continue;
    const int index = thread + i * kThreads, row = index / kOutputs;
    float y = 0, up = 0, square = 0;
#pragma unroll
    for (int p = 0; p < kWarps; ++p) {
      const float* const from = parts[p] + row * kPitch + index % kOutputs;
      y += from[0];
      if constexpr (kGate) up += from[8];
      if (call.scaled) square += squares[p][row];
    }
    const float scale = inverse_rms(call, square);
    y *= scale;
    if constexpr (kGate) y = rounded<bf16>(silu(rounded<bf16>(y))) * rounded<bf16>(up * scale);
    y += before[i];
    if (call.residual != nullptr) call.residual[at] = y;
    call.out[at] = from_float<bf16>(y);
  }
}

template <int kTiles, int kAhead, bool kGate, int kWarps>
const char* launch_strips(const Product& call, void* stream) {
  constexpr int kOutputs = kGate ? kStrip / 2 : kStrip;
  const dim3 grid((call.out_features + kOutputs - 1) / kOutputs, (call.num_rows + 8 * kTiles - 1) / (8 * kTiles));
  return launch(strips<kTiles, kAhead, kGate, kWarps>, grid, 32 * kWarps, 0, stream, call);
}

// By how many steps a warp has: all that it reads of a small model's matrix is on its way at once. The parts of a sum are
// the same for every number of rows.
template <int kTiles, bool kGate>
const char* launch_strips(const Product& call, void* stream) {
  const int num_steps = (call.in_features + 8 * kStride - 1) / (8 * kStride);
  if (num_steps <= 4 * 6) return launch_strips<kTiles, 3, kGate, 6>(call, stream);
  return launch_strips<kTiles, 3, kGate, 16>(call, stream);
}

// The most rows a block that still keep most of a device's processors busy: each block reads its strip for itself.
template <bool kGate>
const char* launch_strips(const Product& call, void* stream) {
  constexpr int kEnoughBlocks = 100, kOutputs = kGate ? kStrip / 2 : kStrip;
  const auto suits = [&](int tiles) {
    const int blocks = (call.out_features + kOutputs - 1) / kOutputs * ((call.num_rows + 8 * tiles - 1) / (8 * tiles));
    return call.num_rows > 4 * tiles && blocks >= kEnoughBlocks;
  };
  if (suits(4)) return launch_strips<4, kGate>(call, stream);
  if (suits(2)) return launch_strips<2, kGate>(call, stream);
  return launch_strips<1, kGate>(call, stream);
}

}  // namespace

// See `Product`; residual may be null. in_features is a multiple of 8.
extern "C" const char* equivtest_product(const void* x, const void* weight, void* residual, void* out,
                                         int64_t num_rows, int64_t in_features, int64_t out_features, int64_t is_scaled,
                                         int64_t is_gate, double eps, void* stream) {
  if (num_rows == 0 || out_features == 0) return nullptr;
  const Product call = {
      static_cast<const bf16*>(x),
      static_cast<const bf16*>(weight),
      static_cast<float*>(residual),
      static_cast<bf16*>(out),
      static_cast<int>(num_rows),
      static_cast<int>(in_features),
      static_cast<int>(out_features),
      is_scaled != 0,
      static_cast<float>(eps),
  };
  if (in_features % 8) return "a product needs whole chunks";
  if (num_rows > 1) return is_gate ? launch_strips<true>(call, stream) : launch_strips<false>(call, stream);
  // Small matrices need every warp that there is; large ones a wave or two of blocks.
  constexpr int64_t kManyOutputs = 8192;
  if (is_gate) return out_features < kManyOutputs ? launch_one_row<2, true, 4>(call, stream)
                                                  : launch_one_row<4, true, 8>(call, stream);
  return out_features < kManyOutputs ? launch_one_row<1, false, 4>(call, stream)
                                     : launch_one_row<4, false, 8>(call, stream);
}
