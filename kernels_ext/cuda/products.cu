// Products of a transformer layer with few rows, bfloat16 with float32 sums; see LayerOps in
// equivtest/kernels/contract.py. What stands around a product is part of its launch:
//
//   scale      the product is of RMSNorm's output: the norm's weight is in the matrix, and a row's 1 / rms, which is
//              found from the same reads of x, multiplies its sums
//   gate       SwiGLU: silu of the first half of the outputs times the second half
//   residual   the result is added to the float32 residual stream, and a bfloat16 copy of that is kept
//
// All on the tensor cores (mma.sync m16n8k16), a block 16 rows of the matrix, its warps sharing the sum. For a small
// model's matrices that is bound by latency: weights, which no kernel writes, go straight to registers and are there
// before the predecessor has ended, and after it one read of x lies between a block and its products. A row's result
// does not depend on how many others there are, to the last bit.

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

constexpr int kStrip = 16;  // rows of the matrix
constexpr int kStride = 4;  // chunks of 8 inputs that a warp multiplies at a time, one by each of the lanes of a row

// Rows go through in tiles of 8, outputs in strips of 16: for a gate 8 gates and their ups. Warp w has the w-th part of
// the sum, of all of them. A lane reads 16 bytes of two rows of the matrix and of one row of x and has with them its
// registers of two products of 16 x 8 x 16: the order of the inputs within 32 is another, but the same for both.
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

  const auto* const rows = reinterpret_cast<const uint4*>(call.x);
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
        x[a][j] = is_there ? rows[static_cast<int64_t>(row) * num_chunks + chunk] : none;
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

template <int kTiles, bool kGate>
dim3 grid_of(const Product& call) {
  constexpr int kOutputs = kGate ? kStrip / 2 : kStrip;
  return dim3((call.out_features + kOutputs - 1) / kOutputs, (call.num_rows + 8 * kTiles - 1) / (8 * kTiles));
}

// Whether all blocks are on the device at once.
template <int kTiles, int kAhead, bool kGate, int kWarps>
bool is_one_wave(const Product& call) {
  static const int at_once = [] {
    int each = 0;
    const auto error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, strips<kTiles, kAhead, kGate, kWarps>, 32 * kWarps, 0);
    return error == cudaSuccess ? each * device_attribute(cudaDevAttrMultiProcessorCount) : 0;
  }();
  const dim3 grid = grid_of<kTiles, kGate>(call);
  return static_cast<int>(grid.x * grid.y) <= at_once;
}

template <int kTiles, int kAhead, bool kGate, int kWarps>
const char* launch_tiles(const Product& call, void* stream) {
  return launch(strips<kTiles, kAhead, kGate, kWarps>, grid_of<kTiles, kGate>(call), 32 * kWarps, 0, stream, call);
}

// Each block reads its strip for itself, so few tiles make many reads, and many tiles a long wait: the fewest that make
// one wave of blocks, and two where none do.
template <int kAhead, bool kGate, int kWarps>
const char* launch_strips(const Product& call, void* stream) {
  const bool is_single = call.num_rows <= 8 || is_one_wave<1, kAhead, kGate, kWarps>(call);
  if (is_single) return launch_tiles<1, kAhead, kGate, kWarps>(call, stream);
  const bool is_double = is_one_wave<2, kAhead, kGate, kWarps>(call) || !is_one_wave<4, kAhead, kGate, kWarps>(call);
  if (is_double) return launch_tiles<2, kAhead, kGate, kWarps>(call, stream);
  return launch_tiles<4, kAhead, kGate, kWarps>(call, stream);
}

// All that a warp reads of a small model's matrix is on its way at once. How the sum is shared depends on the matrix
// alone.
template <bool kGate>
const char* launch_product(const Product& call, void* stream) {
  const bool is_short = call.in_features <= 9 * 2 * 8 * kStride;
  return is_short ? launch_strips<2, kGate, 9>(call, stream) : launch_strips<4, kGate, 12>(call, stream);
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
  return is_gate ? launch_product<true>(call, stream) : launch_product<false>(call, stream);
}
