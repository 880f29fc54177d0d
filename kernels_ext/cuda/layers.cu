// The pointwise steps of a transformer layer on a GPU; see LayerOps in equivtest/kernels/contract.py.
//
// Values are rounded to the dtype where plain torch rounds them: after the norm and after its weight, after silu, after
// each product of the rotation. A launch each that reads and writes every value once: bound by latency up to some
// hundred rows.

#include "launch.cuh"

namespace {

using namespace equivtest::cuda;
using bf16 = __nv_bfloat16;

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
// A block per row of x, which is rounded to T as it is written. norm may be null.
template <class T>
__global__ void __launch_bounds__(kThreads) rms_norm(const float* x, const T* norm, T* out, int size, float eps) {
  __shared__ float parts[kWarps];
  allow_next_launch();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x);
  x += static_cast<int64_t>(blockIdx.x) * size;
  out += static_cast<int64_t>(blockIdx.x) * size;
  float squares = 0;
  for (int i = thread; i < size; i += kThreads) squares += x[i] * x[i];
  squares = warp_sum(squares);
  if (thread % 32 == 0) parts[thread / 32] = squares;
  __syncthreads();
  squares = 0;
#pragma unroll
  for (const float part : parts) squares += part;
  const float scale = rsqrtf(squares / static_cast<float>(size) + eps);
  for (int i = thread; i < size; i += kThreads) {
    const float y = rounded<T>(x[i] * scale);
    out[i] = from_float<T>(norm == nullptr ? y : y * to_float(norm[i]));
  }
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
  // Everything that no kernel writes is read before the predecessor has ended.
  const bool turns = head < num_rotated, is_normed = turns && call.norm != nullptr;
  const int64_t angle = turns ? call.positions[row] * call.head_dim : 0;
  float cosines[kMaxPairs][2] = {}, sines[kMaxPairs][2] = {}, norm[kMaxPairs][2] = {};
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half || !turns) continue;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int at = i + side * half;
      cosines[j][side] = to_float(call.cosines[angle + at]), sines[j][side] = to_float(call.sines[angle + at]);
      if (is_normed) norm[j][side] = to_float(call.norm[head * call.head_dim + at]);
    }
  }
  wait_for_previous();
  float first[kMaxPairs] = {}, second[kMaxPairs] = {};
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = lane + 32 * j;
    if (i < half) first[j] = to_float(from[i]), second[j] = to_float(from[half + i]);
  }
  if (is_normed) {
    float squares = 0;
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) squares += first[j] * first[j] + second[j] * second[j];
    const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(call.head_dim) + call.eps);
#pragma unroll
    for (int j = 0; j < kMaxPairs; ++j) {
      first[j] = rounded<T>(rounded<T>(first[j] * scale) * norm[j][0]);
      second[j] = rounded<T>(rounded<T>(second[j] * scale) * norm[j][1]);
    }
  }
#pragma unroll
  for (int j = 0; j < kMaxPairs; ++j) {
    const int i = lane + 32 * j;
    if (i >= half) continue;
    float a = first[j], b = second[j];
    if (turns) {
      // Each product rounded by itself, as torch does: no fused multiply-add.
      a = __fadd_rn(rounded<T>(__fmul_rn(first[j], cosines[j][0])), rounded<T>(__fmul_rn(-second[j], sines[j][0])));
      b = __fadd_rn(rounded<T>(__fmul_rn(second[j], cosines[j][1])), rounded<T>(__fmul_rn(first[j], sines[j][1])));
    }
    to[i] = from_float<T>(a);
    to[half + i] = from_float<T>(b);
  }
}

template <class T>
const char* launch_rms_norm(const void* x, const void* norm, void* out, int64_t num_rows, int64_t size, double eps,
                            void* stream) {
  return launch(rms_norm<T>, dim3(static_cast<unsigned>(num_rows)), kThreads, 0, stream, static_cast<const float*>(x),
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

// x [num_rows, size] float, out [num_rows, size], norm [size] or null.
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
