// The products and pointwise steps of a transformer layer on a GPU; see LayerOps in equivtest/kernels/contract.py.
//
// Values are rounded to the dtype where plain torch rounds them: after the norm and after its weight, after a product,
// after silu, after each product of the rotation. What bounds each:
//   few_rows    few rows of bfloat16 times a matrix, with what comes before and after in one launch. Bound by the read
//               of the weights, once, 16 bytes a lane, and for matrices below some MB by latency: one round of loads
//               (x, the norm, weights) and two reductions.
//   rms_norm, silu_mul, rotate_and_store
//               a launch each that reads and writes every value once: bound by latency up to some hundred rows.

#include "launch.cuh"

namespace {

using namespace equivtest::cuda;
using bf16 = __nv_bfloat16;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxStaged = 24576;  // entries of x in shared memory: 48 KiB, what a block has without asking

__device__ __forceinline__ void unpack(const uint4& from, float (&to)[8]) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) to[2 * i] = low_half(words[i]), to[2 * i + 1] = high_half(words[i]);
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

struct FewRows {
  const bf16* x;         // [num_rows, in_features]
  const bf16* norm;      // [in_features]: x is normalised first; null: it is not
  const bf16* weight;    // [out_features, in_features]; of a gate [2 * out_features, in_features], gate over up
  const bf16* residual;  // [num_rows, out_features], may be `out`; null: nothing is added
  bf16* out;             // [num_rows, out_features]
  int num_rows, in_features, out_features;
  float eps;
};

// x, normalised where asked for, into shared memory: a warp for each of up to kWarps rows.
__device__ __forceinline__ void stage(const FewRows& call, uint4* staged, int num_chunks) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= call.num_rows) return;
  const uint4* const row = reinterpret_cast<const uint4*>(call.x) + static_cast<int64_t>(warp) * num_chunks;
  uint4* const to = staged + warp * num_chunks;
  if (call.norm == nullptr) {
    for (int c = lane; c < num_chunks; c += 32) to[c] = row[c];
    return;
  }
  float squares = 0;
  for (int c = lane; c < num_chunks; c += 32) {
    const uint4 chunk = row[c];
    to[c] = chunk;
    float x[8];
    unpack(chunk, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
  }
  const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(call.in_features) + call.eps);
  for (int c = lane; c < num_chunks; c += 32) {  // the lane's own chunks again
    float x[8], w[8];
    unpack(to[c], x);
    unpack(reinterpret_cast<const uint4*>(call.norm)[c], w);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = rounded<bf16>(x[i] * scale) * w[i];
    to[c] = make_uint4(pack_halves(x[0], x[1]), pack_halves(x[2], x[3]), pack_halves(x[4], x[5]),
                       pack_halves(x[6], x[7]));
  }
}

// A warp computes kOuts products for each of up to kRows rows: of adjacent outputs, or of kOuts / 2 gates and their ups.
template <int kRows, int kOuts, bool kGate>
__global__ void __launch_bounds__(kThreads, 1) few_rows(const FewRows call) {
  extern __shared__ uint4 staged[];
  constexpr int kOutputs = kGate ? kOuts / 2 : kOuts;
  constexpr int kAhead = 8 / kOuts < 4 ? 8 / kOuts : 4;  // chunks of a weight row that a lane has on their way
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
  allow_next_launch();
  if constexpr (kOverlapLaunches) {
#pragma unroll
    for (int i = 0; i < kOuts; ++i)  // a line of 128 bytes is 8 chunks
      for (int c = 8 * lane; c < num_chunks; c += 8 * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(rows[i] + c));
  }
  wait_for_previous();
  uint4 w[kAhead][kOuts];
  const auto load = [&](int start) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int i = 0; i < kOuts; ++i)
        w[a][i] = start + 32 * a < num_chunks ? __ldg(rows[i] + start + 32 * a) : make_uint4(0, 0, 0, 0);
    }
  };
  load(lane);  // on their way while x is staged
  stage(call, staged, num_chunks);
  __syncthreads();

  float sums[kOuts][kRows] = {};
  for (int start = lane; start < num_chunks; start += 32 * kAhead) {
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
        float x[8];
        unpack(staged[r * num_chunks + c], x);
#pragma unroll
        for (int i = 0; i < kOuts; ++i) {
#pragma unroll
          for (int e = 0; e < 8; ++e) sums[i][r] += weights[i][e] * x[e];
        }
      }
    }
    load(start + 32 * kAhead);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= call.num_rows) break;
#pragma unroll
    for (int i = 0; i < kOuts; ++i) sums[i][r] = rounded<bf16>(warp_sum(sums[i][r]));
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int output = first + i;
      if (lane != i || output >= call.out_features) continue;
      const int64_t at = static_cast<int64_t>(r) * call.out_features + output;
      float y = sums[i][r];
      if constexpr (kGate) y = rounded<bf16>(silu(y)) * sums[kOutputs + i][r];
      if (call.residual != nullptr) y += to_float(call.residual[at]);
      call.out[at] = from_float<bf16>(y);
    }
  }
}

template <int kOuts, bool kGate>
const char* launch_few_rows(const FewRows& call, void* stream) {
  constexpr int kPerBlock = kWarps * (kGate ? kOuts / 2 : kOuts);
  const dim3 grid((call.out_features + kPerBlock - 1) / kPerBlock);
  const size_t shared = sizeof(bf16) * call.num_rows * call.in_features;
  if (call.num_rows == 1) return launch(few_rows<1, kOuts, kGate>, grid, kThreads, shared, stream, call);
  if (call.num_rows == 2) return launch(few_rows<2, kOuts, kGate>, grid, kThreads, shared, stream, call);
  if (call.num_rows <= 4) return launch(few_rows<4, kOuts, kGate>, grid, kThreads, shared, stream, call);
  return launch(few_rows<8, kOuts, kGate>, grid, kThreads, shared, stream, call);
}

// A block per row.
template <class T>
__global__ void __launch_bounds__(kThreads) rms_norm(const T* x, const T* norm, T* out, int size, float eps) {
  __shared__ float parts[kWarps];
  allow_next_launch();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x);
  x += static_cast<int64_t>(blockIdx.x) * size;
  out += static_cast<int64_t>(blockIdx.x) * size;
  float squares = 0;
  for (int i = thread; i < size; i += kThreads) squares += to_float(x[i]) * to_float(x[i]);
  squares = warp_sum(squares);
  if (thread % 32 == 0) parts[thread / 32] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (const float part : parts) squares += part;
  const float scale = rsqrtf(squares / static_cast<float>(size) + eps);
  for (int i = thread; i < size; i += kThreads)
    out[i] = from_float<T>(rounded<T>(to_float(x[i]) * scale) * to_float(norm[i]));
}

// out[r, i] = silu(x[r, i]) * x[r, size + i]
template <class T>
__global__ void __launch_bounds__(kThreads) silu_mul(const T* x, T* out, int64_t num_entries, int64_t size) {
  allow_next_launch();
  wait_for_previous();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < num_entries; at += stride) {
    const int64_t gate = at + at / size * size;
    out[at] = from_float<T>(rounded<T>(silu(to_float(x[gate]))) * to_float(x[gate + size]));
  }
}

template <class T>
struct Rotation {
  const T* heads;            // [num_rows, num_heads + 2 * num_kv_heads, head_dim]
  const T* cosines;          // [max_position, head_dim]
  const T* sines;            // [max_position, head_dim]
  const int64_t* positions;  // [num_rows]
  const T* norm;             // [num_heads + num_kv_heads, head_dim], or null
  T* pages;                  // [num_pages, 2, page_size, num_kv_heads, head_dim]
  const int64_t* slots;      // [num_rows]
  T* query;                  // [num_rows, num_heads, head_dim]
  int64_t num_rows;
  int num_heads, num_kv_heads, head_dim;
  int64_t page_size;
  float eps;
};

// A warp per (row, head): a lane has dimensions i and head_dim / 2 + i, which turn together.
template <class T>
__global__ void __launch_bounds__(kThreads) rotate_and_store(const Rotation<T> call) {
  constexpr int kMaxPairs = 2;  // of a lane: head_dim is at most 128
  allow_next_launch();
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int heads_each = call.num_heads + 2 * call.num_kv_heads, num_rotated = call.num_heads + call.num_kv_heads;
  const int64_t row = index / heads_each;
  const int head = static_cast<int>(index % heads_each), half = call.head_dim / 2;
  if (row >= call.num_rows) return;
  const T* const from = call.heads + index * call.head_dim;
  T* to = call.query + (row * call.num_heads + head) * call.head_dim;
  if (head >= call.num_heads) {
    const int64_t slot = call.slots[row];
    const bool is_value = head >= num_rotated;
    const int64_t cache_row = slot + (slot / call.page_size + (is_value ? 1 : 0)) * call.page_size;
    const int kv_head = (head - call.num_heads) % call.num_kv_heads;
    to = call.pages + (cache_row * call.num_kv_heads + kv_head) * call.head_dim;
  }
  float first[kMaxPairs] = {}, second[kMaxPairs] = {};
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = lane + 32 * j;
    if (i < half) first[j] = to_float(from[i]), second[j] = to_float(from[half + i]);
  }
  const bool turns = head < num_rotated;
  if (turns && call.norm != nullptr) {
    const T* const norm = call.norm + head * call.head_dim;
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) squares += first[j] * first[j] + second[j] * second[j];
    const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(call.head_dim) + call.eps);
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      const int i = lane + 32 * j;
      if (i >= half) continue;
      first[j] = rounded<T>(rounded<T>(first[j] * scale) * to_float(norm[i]));
      second[j] = rounded<T>(rounded<T>(second[j] * scale) * to_float(norm[half + i]));
    }
  }
  const int64_t angle = turns ? call.positions[row] * call.head_dim : 0;
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    float a = first[j], b = second[j];
    if (turns) {
      const T* const cosines = call.cosines + angle;
      const T* const sines = call.sines + angle;
      // Each product rounded by itself, as torch does: no fused multiply-add.
      a = __fadd_rn(rounded<T>(__fmul_rn(first[j], to_float(cosines[i]))),
                    rounded<T>(__fmul_rn(-second[j], to_float(sines[i]))));
      b = __fadd_rn(rounded<T>(__fmul_rn(second[j], to_float(cosines[half + i]))),
                    rounded<T>(__fmul_rn(first[j], to_float(sines[half + i]))));
    }
    to[i] = from_float<T>(a);
    to[half + i] = from_float<T>(b);
  }
}

template <class T>
const char* launch_rms_norm(const void* x, const void* norm, void* out, int64_t num_rows, int64_t size, double eps,
                            void* stream) {
  return launch(rms_norm<T>, dim3(static_cast<unsigned>(num_rows)), kThreads, 0, stream, static_cast<const T*>(x),
                static_cast<const T*>(norm), static_cast<T*>(out), static_cast<int>(size), static_cast<float>(eps));
}

template <class T>
const char* launch_silu_mul(const void* x, void* out, int64_t num_rows, int64_t size, void* stream) {
  const int64_t blocks = (num_rows * size + kThreads - 1) / kThreads;
  const unsigned grid = static_cast<unsigned>(blocks < 4096 ? blocks : 4096);
  return launch(silu_mul<T>, dim3(grid), kThreads, 0, stream, static_cast<const T*>(x), static_cast<T*>(out),
                num_rows * size, size);
}

template <class T>
const char* launch_rotation(const void* heads, const void* cosines, const void* sines, const void* positions,
                            const void* norm, void* pages, const void* slots, void* query, int64_t num_rows,
                            int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t page_size, double eps,
                            void* stream) {
  const Rotation<T> call = {
      static_cast<const T*>(heads),
      static_cast<const T*>(cosines),
      static_cast<const T*>(sines),
      static_cast<const int64_t*>(positions),
      static_cast<const T*>(norm),
      static_cast<T*>(pages),
      static_cast<const int64_t*>(slots),
      static_cast<T*>(query),
      num_rows,
      static_cast<int>(num_heads),
      static_cast<int>(num_kv_heads),
      static_cast<int>(head_dim),
      page_size,
      static_cast<float>(eps),
  };
  const int64_t blocks = (num_rows * (num_heads + 2 * num_kv_heads) + kWarps - 1) / kWarps;
  return launch(rotate_and_store<T>, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, call);
}

}  // namespace

// bfloat16; norm or residual may be null. At most kWarps rows, in_features a multiple of 8, num_rows * in_features at
// most kMaxStaged. With is_gate, weight has 2 * out_features rows.
extern "C" const char* equivtest_few_rows(const void* x, const void* norm, const void* weight, const void* residual,
                                          void* out, int64_t num_rows, int64_t in_features, int64_t out_features,
                                          int64_t is_gate, double eps, void* stream) {
  if (num_rows == 0 || out_features == 0) return nullptr;
  if (num_rows > kWarps || in_features % 8 || num_rows * in_features > kMaxStaged) return "not few rows";
  const FewRows call = {
      static_cast<const bf16*>(x),
      static_cast<const bf16*>(norm),
      static_cast<const bf16*>(weight),
      static_cast<const bf16*>(residual),
      static_cast<bf16*>(out),
      static_cast<int>(num_rows),
      static_cast<int>(in_features),
      static_cast<int>(out_features),
      static_cast<float>(eps),
  };
  // Small matrices need every warp that there is; large ones a wave or two of blocks, each of which stages x.
  constexpr int64_t kManyOutputs = 8192;
  if (is_gate) return out_features < kManyOutputs ? launch_few_rows<2, true>(call, stream)
                                                  : launch_few_rows<4, true>(call, stream);
  return out_features < kManyOutputs ? launch_few_rows<1, false>(call, stream)
                                     : launch_few_rows<4, false>(call, stream);
}

// x, out [num_rows, size], norm [size].
extern "C" const char* equivtest_rms_norm(const void* x, const void* norm, void* out, int64_t num_rows, int64_t size,
                                          int64_t is_bfloat16, double eps, void* stream) {
  if (num_rows == 0 || size == 0) return nullptr;
  return is_bfloat16 ? launch_rms_norm<bf16>(x, norm, out, num_rows, size, eps, stream)
                     : launch_rms_norm<float>(x, norm, out, num_rows, size, eps, stream);
}

// x [num_rows, 2 * size], out [num_rows, size].
extern "C" const char* equivtest_silu_mul(const void* x, void* out, int64_t num_rows, int64_t size,
                                          int64_t is_bfloat16, void* stream) {
  if (num_rows == 0 || size == 0) return nullptr;
  return is_bfloat16 ? launch_silu_mul<bf16>(x, out, num_rows, size, stream)
                     : launch_silu_mul<float>(x, out, num_rows, size, stream);
}

// See `Rotation`. head_dim is even and at most 128; positions and slots are in range.
extern "C" const char* equivtest_rotate_and_store(const void* heads, const void* cosines, const void* sines,
                                                  const void* positions, const void* norm, void* pages,
                                                  const void* slots, void* query, int64_t num_rows, int64_t num_heads,
                                                  int64_t num_kv_heads, int64_t head_dim, int64_t page_size,
                                                  int64_t is_bfloat16, double eps, void* stream) {
  if (num_rows == 0) return nullptr;
  return is_bfloat16 ? launch_rotation<bf16>(heads, cosines, sines, positions, norm, pages, slots, query, num_rows,
                                             num_heads, num_kv_heads, head_dim, page_size, eps, stream)
                     : launch_rotation<float>(heads, cosines, sines, positions, norm, pages, slots, query, num_rows,
                                              num_heads, num_kv_heads, head_dim, page_size, eps, stream);
}
