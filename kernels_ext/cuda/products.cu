// Products of a transformer layer with few rows, bfloat16 with float32 sums; see LayerOps in
// equivtest/kernels/contract.py. What stands around a product is part of its launch:
//
//   scale      the product is of RMSNorm's output: the norm's weight is in the matrix, and a row's 1 / rms, which is
//              found from the same reads of x, multiplies its sums
//   gate       SwiGLU: silu of the first half of the outputs times the second half
//   residual   the result is added to the float32 residual stream, and a bfloat16 copy of that is kept
//
// One or two rows, and up to kMaxFew of a large matrix: `few_rows`, on the CUDA cores, a warp an output. More: `tiles`,
// on the tensor cores (mma.sync m16n8k16), a block a tile, its warps sharing the tile's rows and then the sum. Both are
// bound by latency for the matrices of a small model, so weights, which no kernel writes, are on their way before the
// predecessor has ended.

#include "launch.cuh"

namespace {

using namespace equivtest::cuda;
using bf16 = __nv_bfloat16;

constexpr int kMaxFew = 8;
constexpr int kFewOfSmall = 2;
constexpr int64_t kLargeMatrix = 1 << 22;  // entries
constexpr int kMaxStaged = 24560;  // entries of x in shared memory: with `scales` 48 KiB, what a block has unasked

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

// A warp computes kOuts products for each of up to kRows rows: of adjacent outputs, or of kOuts / 2 gates and their ups.
// One row is read by every warp for itself; several are staged in shared memory.
template <int kRows, int kOuts, bool kGate, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) few_rows(const Product call) {
  extern __shared__ uint4 staged[];
  __shared__ float scales[kMaxFew];
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
  if constexpr (kRows > 1) {
    for (int row = warp; row < call.num_rows; row += kWarps) {
      float squares = 0;
      for (int c = lane; c < num_chunks; c += 32) {
        const uint4 chunk = x[row * num_chunks + c];
        staged[row * num_chunks + c] = chunk;
        squares = squared(chunk, squares);
      }
      squares = warp_sum(squares);
      if (lane == 0) scales[row] = inverse_rms(call, squares);
    }
    __syncthreads();
  }

  float sums[kOuts][kRows] = {}, own_squares = 0;
  for (int start = lane; start < num_chunks; start += 32 * kAhead) {
    uint4 one[kAhead];
    if constexpr (kRows == 1) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) one[a] = start + 32 * a < num_chunks ? x[start + 32 * a] : none;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int c = start + 32 * a;
      if (c >= num_chunks) break;
      float weights[kOuts][8];
#pragma unroll
      for (int i = 0; i < kOuts; ++i) unpack(w[a][i], weights[i]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= call.num_rows) break;
        float values[8];
        unpack(kRows == 1 ? one[a] : staged[r * num_chunks + c], values);
        if constexpr (kRows == 1) own_squares = squared(one[a], own_squares);
#pragma unroll
        for (int i = 0; i < kOuts; ++i) {
#pragma unroll
          for (int e = 0; e < 8; ++e) sums[i][r] += weights[i][e] * values[e];
        }
      }
    }
    if (start + 32 * kAhead - lane < num_chunks) load(start + 32 * kAhead);
  }
  const float own_scale = kRows == 1 ? inverse_rms(call, warp_sum(own_squares)) : 1.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= call.num_rows) break;
    const float scale = kRows == 1 ? own_scale : scales[r];
#pragma unroll
    for (int i = 0; i < kOuts; ++i) sums[i][r] = warp_sum(sums[i][r]) * scale;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int output = first + i;
      if (lane != i || output >= call.out_features) continue;
      const int64_t at = static_cast<int64_t>(r) * call.out_features + output;
      float y = sums[i][r];
      if constexpr (kGate) y = rounded<bf16>(silu(rounded<bf16>(y))) * rounded<bf16>(sums[kOutputs + i][r]);
      if (call.residual != nullptr) call.residual[at] = y += call.residual[at];
      call.out[at] = from_float<bf16>(y);
    }
  }
}

template <int kOuts, bool kGate, int kWarps>
const char* launch_few_rows(const Product& call, void* stream) {
  constexpr int kPerBlock = kWarps * (kGate ? kOuts / 2 : kOuts);
  const dim3 grid((call.out_features + kPerBlock - 1) / kPerBlock);
  const size_t staged = sizeof(bf16) * call.num_rows * call.in_features;
  constexpr unsigned kThreads = 32 * kWarps;
  if (call.num_rows == 1) return launch(few_rows<1, kOuts, kGate, kWarps>, grid, kThreads, 0, stream, call);
  if (call.num_rows == 2) return launch(few_rows<2, kOuts, kGate, kWarps>, grid, kThreads, staged, stream, call);
  if (call.num_rows <= 4) return launch(few_rows<4, kOuts, kGate, kWarps>, grid, kThreads, staged, stream, call);
  return launch(few_rows<8, kOuts, kGate, kWarps>, grid, kThreads, staged, stream, call);
}

constexpr int kTileWarps = 8;
constexpr int kTileThreads = 32 * kTileWarps;
constexpr int kDepth = 128;  // of a stage, along in_features
constexpr int kChunks = kDepth / 8;
// All of a short sum is on its way at once, and of a long one as much as fits: a small model's product is bound by the
// time that one read takes.
constexpr int kShort = 5, kLong = 12;            // stages
constexpr size_t kMostAnywhere = 227 << 10;      // shared memory of a block: sm_90
constexpr size_t kLeastAnywhere = 99 << 10;      // sm_86, sm_89, sm_120

// 16 bytes to shared memory; zeros where there is nothing to read.
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool is_there) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Chunk c of a row of a stage: shifted by the row, so that eight rows of one column lie in different banks.
__device__ __forceinline__ int place_of(int row, int chunk) { return row * kChunks + (chunk ^ (row & 7)); }

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const uint4* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(from));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Shared memory of a tile's stages.
constexpr size_t tile_bytes(int rows, int outputs, bool is_gate, int stages) {
  return sizeof(uint4) * kChunks * stages * (rows + (is_gate ? 2 : 1) * outputs);
}

template <int kRows, int kOutputs, bool kGate, int kStages>
struct Tile {
  static constexpr int kWeights = kGate ? 2 * kOutputs : kOutputs;  // rows of the matrix
  static constexpr int kWarpsDown = kRows / 16;                     // warps side by side along the rows
  static constexpr int kParts = kTileWarps / kWarpsDown;            // of the sum, a warp each
  static constexpr int kStage = (kRows + kWeights) * kChunks;       // in chunks of 16 bytes
  static constexpr size_t kBytes = tile_bytes(kRows, kOutputs, kGate, kStages);
  static constexpr int kColumns = kWeights / 8;  // products of 8 columns that a warp holds
  static_assert(sizeof(float) * kTileWarps * 32 * (kColumns * 4 + 2) <= kBytes, "the parts of the sum fit");
};

// out[kRows x kOutputs] = x W^T. Warp (i, p) has rows 16 i .. 16 i + 15 and every kParts-th step of 16 along the sum.
template <int kRows, int kOutputs, bool kGate, int kStages>
__global__ void __launch_bounds__(kTileThreads) tiles(const Product call) {
  using T = Tile<kRows, kOutputs, kGate, kStages>;
  extern __shared__ uint4 stages[];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int down = warp % T::kWarpsDown, part = warp / T::kWarpsDown;
  const int first_output = static_cast<int>(blockIdx.x) * kOutputs, first_row = static_cast<int>(blockIdx.y) * kRows;
  const int num_chunks = call.in_features / 8, num_steps = (num_chunks + kChunks - 1) / kChunks;

  const auto copy_weights = [&](int step) {
    uint4* const to = stages + step % kStages * T::kStage + kRows * kChunks;
    for (int index = thread; index < T::kWeights * kChunks; index += kTileThreads) {
      const int row = index / kChunks, chunk = step * kChunks + index % kChunks;
      const int output = first_output + row % kOutputs;
      const bool is_there = output < call.out_features && chunk < num_chunks;
      const int64_t from = output + static_cast<int64_t>(row / kOutputs) * call.out_features;
      const auto* const source = reinterpret_cast<const uint4*>(call.weight) + (is_there ? from * num_chunks + chunk : 0);
      copy_async(to + place_of(row, index % kChunks), source, is_there);
    }
  };
  const auto copy_rows = [&](int step) {
    uint4* const to = stages + step % kStages * T::kStage;
    for (int index = thread; index < kRows * kChunks; index += kTileThreads) {
      const int row = index / kChunks, chunk = step * kChunks + index % kChunks;
      const bool is_there = first_row + row < call.num_rows && chunk < num_chunks;
      const int64_t from = is_there ? static_cast<int64_t>(first_row + row) * num_chunks + chunk : 0;
      copy_async(to + place_of(row, index % kChunks), reinterpret_cast<const uint4*>(call.x) + from, is_there);
    }
  };

  allow_next_launch();
  for (int step = 0; step < min(kStages, num_steps); ++step) copy_weights(step);
  commit_copies();
  wait_for_previous();
#pragma unroll
  for (int step = 0; step < kStages; ++step) {
    if (step < num_steps) copy_rows(step);
    commit_copies();
  }

  // What the sum is added to, by the warps that will put it out; it is there long before the sum is.
  float2 before[kOutputs / 8][2] = {};
  const auto place = [&](int j, int i) {  // of two results in residual and out, -1 for nobody's
    const int row = first_row + 16 * down + lane / 4 + 8 * i, output = first_output + 8 * j + lane % 4 * 2;
    if (row >= call.num_rows || output >= call.out_features) return int64_t{-1};  // out_features is even
    return static_cast<int64_t>(row) * call.out_features + output;
  };
  if (call.residual != nullptr && part == 0) {
#pragma unroll
    for (int j = 0; j < kOutputs / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t at = place(j, i);
        if (at >= 0) before[j][i] = *reinterpret_cast<const float2*>(call.residual + at);
      }
    }
  }

  float c[T::kColumns][4] = {}, squares[2] = {};
  for (int step = 0; step < num_steps; ++step) {
    wait_copies<kStages - 1>();
    __syncthreads();
    const uint4* const x = stages + step % kStages * T::kStage;
    const uint4* const w = x + kRows * kChunks;
#pragma unroll
    for (int k = 0; k < kChunks / 2; k += T::kParts) {
      const int chunk = 2 * (k + part);
      if (step * kChunks + chunk >= num_chunks) break;
      uint32_t a[4];
      load_matrices(a, x + place_of(16 * down + lane % 16, chunk + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = low_half(a[i]), high = high_half(a[i]);
        squares[i % 2] += low * low;
        squares[i % 2] += high * high;
      }
#pragma unroll
      for (int j = 0; j < T::kColumns; j += 2) {
        uint32_t b[4];
        load_matrices(b, w + place_of(8 * j + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
        multiply_add(c[j], a[0], a[1], a[2], a[3], b[0], b[1]);
        multiply_add(c[j + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    __syncthreads();
    if (step + kStages < num_steps) copy_weights(step + kStages), copy_rows(step + kStages);
    commit_copies();
  }
  wait_copies<0>();  // none is left that would write where the sums go
  __syncthreads();

  // The parts of a sum, in their order, by the warp of the first.
  constexpr int kHeld = T::kColumns * 4 + 2;
  auto* const held = reinterpret_cast<float*>(stages) + (warp * kHeld) * 32 + lane;
  if (part > 0) {
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) held[(4 * j + e) * 32] = c[j][e];
    }
    held[(kHeld - 2) * 32] = squares[0], held[(kHeld - 1) * 32] = squares[1];
  }
  __syncthreads();
  if (part > 0) return;
#pragma unroll
  for (int p = 1; p < T::kParts; ++p) {
    const float* const other = held + p * T::kWarpsDown * kHeld * 32;
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[j][e] += other[(4 * j + e) * 32];
    }
    squares[0] += other[(kHeld - 2) * 32], squares[1] += other[(kHeld - 1) * 32];
  }
  float scales[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    squares[i] += __shfl_xor_sync(~0u, squares[i], 1);
    squares[i] += __shfl_xor_sync(~0u, squares[i], 2);
    scales[i] = inverse_rms(call, squares[i]);
  }
#pragma unroll
  for (int j = 0; j < kOutputs / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t at = place(j, i);
      if (at < 0) continue;
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        y[e] = c[j][2 * i + e] * scales[i];
        if constexpr (kGate) {
          const float up = rounded<bf16>(c[kOutputs / 8 + j][2 * i + e] * scales[i]);
          y[e] = rounded<bf16>(silu(rounded<bf16>(y[e]))) * up;
        }
      }
      y[0] += before[j][i].x, y[1] += before[j][i].y;
      if (call.residual != nullptr) *reinterpret_cast<float2*>(call.residual + at) = make_float2(y[0], y[1]);
      *reinterpret_cast<uint32_t*>(call.out + at) = pack_halves(y[0], y[1]);
    }
  }
}

template <int kRows, int kOutputs, bool kGate, int kStages>
const char* launch_tiles(const Product& call, void* stream) {
  constexpr size_t kBytes = Tile<kRows, kOutputs, kGate, kStages>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(tiles<kRows, kOutputs, kGate, kStages>,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const dim3 grid((call.out_features + kOutputs - 1) / kOutputs, (call.num_rows + kRows - 1) / kRows);
  return launch(tiles<kRows, kOutputs, kGate, kStages>, grid, kTileThreads, kBytes, stream, call);
}

// Shared memory that a block of this device may ask for: 99 KiB at the least from sm_80 on.
size_t most_shared() {
  int device = 0, bytes = 0;
  const bool is_known = cudaGetDevice(&device) == cudaSuccess &&
                        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
  return is_known ? static_cast<size_t>(bytes) : 0;
}

template <int kRows, int kOutputs, bool kGate>
const char* launch_tiles(const Product& call, void* stream) {
  constexpr size_t kBytes = tile_bytes(kRows, kOutputs, kGate, kLong);
  if constexpr (kBytes <= kMostAnywhere) {
    if (call.in_features > kShort * kDepth && kBytes <= most_shared())
      return launch_tiles<kRows, kOutputs, kGate, kLong>(call, stream);
  }
  return launch_tiles<kRows, kOutputs, kGate, kShort>(call, stream);
}

template <int kRows, int kOutputs, bool kGate>
bool fits() {
  return tile_bytes(kRows, kOutputs, kGate, kShort) <= most_shared();
}

// The largest tile that still keeps most of a device's processors busy.
template <bool kGate>
const char* launch_tiles(const Product& call, void* stream) {
  constexpr int kEnoughBlocks = 100;
  const auto blocks = [&](int rows, int outputs) {
    return (call.num_rows + rows - 1) / rows * ((call.out_features + outputs - 1) / outputs);
  };
  static_assert(tile_bytes(32, 16, kGate, kShort) <= kLeastAnywhere, "the smaller tiles fit every device");
  if (blocks(64, 32) >= kEnoughBlocks && fits<64, 32, kGate>()) return launch_tiles<64, 32, kGate>(call, stream);
  if (blocks(64, 16) >= kEnoughBlocks && fits<64, 16, kGate>()) return launch_tiles<64, 16, kGate>(call, stream);
  if (blocks(32, 16) >= kEnoughBlocks) return launch_tiles<32, 16, kGate>(call, stream);
  return launch_tiles<16, 16, kGate>(call, stream);
}

}  // namespace

// See `Product`; residual may be null. in_features is a multiple of 8, and out_features even above kMaxFew rows.
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
  const bool is_large = (is_gate ? 2 : 1) * out_features * in_features > kLargeMatrix;
  const bool fits = num_rows <= kMaxFew && num_rows * in_features <= kMaxStaged;
  if (!(fits && (is_large || out_features % 2 || num_rows <= kFewOfSmall))) {
    if (out_features % 2) return "a product of tiles needs whole pairs";
    return is_gate ? launch_tiles<true>(call, stream) : launch_tiles<false>(call, stream);
  }
  // Small matrices need every warp that there is; large ones a wave or two of blocks, each of which stages x.
  constexpr int64_t kManyOutputs = 8192;
  if (is_gate) return out_features < kManyOutputs ? launch_few_rows<2, true, 4>(call, stream)
                                                  : launch_few_rows<4, true, 8>(call, stream);
  return out_features < kManyOutputs ? launch_few_rows<1, false, 4>(call, stream)
                                     : launch_few_rows<4, false, 8>(call, stream);
}
