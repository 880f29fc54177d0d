// Causal grouped-query attention over paged keys and values; float32 softmax and sums.
//
// bfloat16, head_dim a multiple of 8: tensor cores (mma.sync m16n8k16). A block serves 16 (row, head) pairs of one kv
// head: a few rows of a sequence times the heads that share the keys. Its warps take every eighth tile of 16 tokens,
// with a running softmax each (Milakov & Gimelshein 2018; Dao et al. 2022), and combine in shared memory at the end. So
// one sequence is spread over eight warps, or two where there are many blocks; but for that, what a row gets does not
// depend on the rows beside it, to the last bit.
// Weights go through the tensor cores in two bfloat16 parts, high and low: their rounding is then 2^-18 and the result
// is rounded once. Bound by memory: each block reads its keys and values once, from registers on; at one row a sequence
// that is 4 * head_dim bytes per kv head and token.
//
// Anything else: a warp per (row, head), 32 tokens at a time, on the CUDA cores.
//
// Blocks are laid out without a look at the lengths on the host, so that a graph can hold the launch: see `find_last`.
// Rows past the last sequence's are set to zero.

#include "launch.cuh"

namespace {

using namespace equivtest::cuda;

constexpr int kWarps = 8;     // of a block, where few blocks must keep the device busy
constexpr int kFewWarps = 2;  // where there are many blocks, all of which can then run at once
constexpr int kThreads = 32 * kWarps;
constexpr int kManyBlocks = 512;
constexpr int kTile = 16;  // (row, head) pairs of a block, and tokens of a tile
constexpr int kMaxHeadDim = 128;

struct Attention {
  const void* query;           // [num_rows, num_heads, head_dim]
  const void* pages;           // [num_pages, 2, page_size, num_kv_heads, head_dim]
  const int32_t* page_table;   // [num_sequences, max_pages]
  const int32_t* kv_lens;      // [num_sequences]
  const int32_t* query_start;  // [num_sequences + 1]
  void* out;                   // like query
  int num_rows, num_heads, num_kv_heads, head_dim, page_size, max_pages, num_sequences;
  float scale;  // of the scores, in units of log 2
};

// The largest b in 0 .. count - 1 with first(b) <= value, for an increasing `first` with first(0) <= value. A warp
// looks at 32 places at a time.
template <class First>
__device__ __forceinline__ int find_last(int count, int value, const First& first) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int low = 0, high = count;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane * step;
    const unsigned holds = __ballot_sync(~0u, probe < high && first(probe) <= value);
    low += (31 - __clz(static_cast<int>(holds))) * step;
    high = min(high, low + step);
  }
  return low;
}

// Row of the cache, seen as [num_pages * 2 * page_size, num_kv_heads, head_dim], that holds a token's keys; its values
// are page_size rows further on.
__device__ __forceinline__ int key_row(const Attention& call, int sequence, int token) {
  const int page = call.page_table[static_cast<int64_t>(sequence) * call.max_pages + token / call.page_size];
  return page * 2 * call.page_size + token % call.page_size;
}

__device__ __forceinline__ uint32_t word(const uint4& x, int index) {
  return index == 0 ? x.x : index == 1 ? x.y : index == 2 ? x.z : x.w;
}

// kDim: head_dim rounded up to 64 or 128; the dimensions in between are zeros.
template <int kDim, int kWarps>
constexpr size_t shared_bytes() {
  return sizeof(float) * kWarps * kTile * (2 + kDim + 4);
}

template <int kDim, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, (kDim == 64 ? 16 : 8) / kWarps) attend_tiles(const Attention call) {
  constexpr int kThreads = 32 * kWarps;
  // Each warp's running maximum [kWarps][kTile], sum [kWarps][kTile] and output [kWarps][kTile][kDim + 4].
  extern __shared__ float shared[];
  float* const shared_max = shared;
  float* const shared_sum = shared_max + kWarps * kTile;
  float* const shared_out = shared_sum + kWarps * kTile;
  constexpr int kStride = kDim + 4;  // rows start in different banks

  allow_next_launch();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = call.num_heads / call.num_kv_heads;
  const int tile_heads = min(group, kTile), chunk = kTile / tile_heads;
  const int kv_head = static_cast<int>(blockIdx.y) % call.num_kv_heads;
  const int skipped_heads = static_cast<int>(blockIdx.y) / call.num_kv_heads * tile_heads;
  const int first_head = kv_head * group + skipped_heads;
  const int num_heads = min(tile_heads, group - skipped_heads);

  // Sequence b has blocks query_start[b] / chunk + b and on, at least as many as it needs. One more sequence at the
  // end stands for the rows that belong to nobody.
  const auto first_block = [&](int b) { return call.query_start[b] / chunk + b; };
  const int block = static_cast<int>(blockIdx.x);
  const int sequence = find_last(call.num_sequences + 1, block, first_block);
  const bool nobody = sequence == call.num_sequences;
  const int stop = nobody ? call.num_rows : call.query_start[sequence + 1];
  const int first_row = call.query_start[sequence] + (block - first_block(sequence)) * chunk;
  const int num_rows = min(chunk, stop - first_row);
  if (num_rows <= 0) return;
  const int length = nobody ? 0 : call.kv_lens[sequence];
  const auto is_pair = [&](int m) { return m / tile_heads < num_rows && m % tile_heads < num_heads; };
  const auto place = [&](int m) {  // of pair m in query and out
    return (static_cast<int64_t>(first_row + m / tile_heads) * call.num_heads + first_head + m % tile_heads) *
           call.head_dim;
  };

  // Where the tokens are, no kernel writes: it is read, and what they hold is on its way to the L2 cache, before the
  // predecessor has ended. Only then may any of it be read.
  const int num_tokens = nobody ? 0 : length - stop + first_row + num_rows;  // that the last row sees
  const int64_t row_stride = static_cast<int64_t>(call.num_kv_heads) * call.head_dim;
  const auto* const pages = static_cast<const __nv_bfloat16*>(call.pages) + static_cast<int64_t>(kv_head) * call.head_dim;
  const auto row_of = [&](int tile) {  // the lane's token of a tile, -1 past the last
    const int token = tile * kTile + lane % kTile;
    return token < num_tokens ? key_row(call, sequence, token) : -1;
  };
  const auto fetch = [&](int row) {  // keys by the first half of a warp, values by the second
    const auto* const from = pages + (row + lane / kTile * call.page_size) * row_stride;
    if (row < 0) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    if constexpr (kDim > 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + call.head_dim - 1));
  };
  int own_row = row_of(warp), next_row = row_of(warp + kWarps);
  fetch(own_row);
  fetch(next_row);
  wait_for_previous();

  // Lane 4 g + t has rows g and g + 8 of a tile. Sums over dimensions run in an order that lets it read 8 adjacent ones.
  const int g = lane / 4, t = lane % 4;
  const auto* const query = static_cast<const __nv_bfloat16*>(call.query);
  uint4 q[2][kDim / 32];
  int num_seen[2];  // tokens that the pair sees
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = g + 8 * i;
    num_seen[i] = is_pair(m) ? length - stop + first_row + m / tile_heads + 1 : 0;
#pragma unroll
    for (int c = 0; c < kDim / 32; ++c) {
      const int dim = 32 * c + 8 * t;
      q[i][c] = make_uint4(0, 0, 0, 0);
      if (is_pair(m) && dim < call.head_dim) q[i][c] = *reinterpret_cast<const uint4*>(query + place(m) + dim);
    }
  }

  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  float o[kDim / 64][8][4] = {};

  for (int tile = warp; tile * kTile < num_tokens; tile += kWarps) {
    const int later_row = row_of(tile + 2 * kWarps);
    fetch(later_row);
    uint4 k[2][kDim / 32], v[4][kDim / 64];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = __shfl_sync(~0u, own_row, 8 * n + g);
#pragma unroll
      for (int c = 0; c < kDim / 32; ++c) {
        const int dim = 32 * c + 8 * t;
        k[n][c] = make_uint4(0, 0, 0, 0);
        if (row >= 0 && dim < call.head_dim)
          k[n][c] = *reinterpret_cast<const uint4*>(pages + row * row_stride + dim);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = __shfl_sync(~0u, own_row, 2 * t + i % 2 + i / 2 * 8);
#pragma unroll
      for (int h = 0; h < kDim / 64; ++h) {
        const int dim = 64 * h + 8 * g;
        v[i][h] = make_uint4(0, 0, 0, 0);  // past the end too: a weight of 0 does not silence a NaN
        if (row >= 0 && dim < call.head_dim)
          v[i][h] = *reinterpret_cast<const uint4*>(pages + (row + call.page_size) * row_stride + dim);
      }
    }

    float s[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < kDim / 32; ++c) {
        multiply_add(s[n], q[0][c].x, q[1][c].x, q[0][c].y, q[1][c].y, k[n][c].x, k[n][c].y);
        multiply_add(s[n], q[0][c].z, q[1][c].z, q[0][c].w, q[1][c].w, k[n][c].z, k[n][c].w);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = tile * kTile + 8 * n + 2 * t + e % 2;
        s[n][e] = token < num_seen[e / 2] ? s[n][e] * call.scale : -INFINITY;
      }
    }

    uint32_t high[2][2], low[2][2];  // [row][tokens] of the weights
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top, largest[i]);
      const float base = top == -INFINITY ? 0.0f : top;
      const float shrink = exp2f(largest[i] - base);
      largest[i] = top;
      sum[i] *= shrink;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float p0 = exp2f(s[n][2 * i] - base), p1 = exp2f(s[n][2 * i + 1] - base);
        sum[i] += p0 + p1;
        high[i][n] = pack_halves(p0, p1);
        low[i][n] = pack_halves(p0 - low_half(high[i][n]), p1 - high_half(high[i][n]));
      }
#pragma unroll
      for (int h = 0; h < kDim / 64; ++h) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          o[h][j][2 * i] *= shrink;
          o[h][j][2 * i + 1] *= shrink;
        }
      }
    }
    // Column n of product (h, j) is dimension 64 h + 8 n + j: what a lane read of a value is its part of eight products.
#pragma unroll
    for (int h = 0; h < kDim / 64; ++h) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int halves = j % 2 ? 0x7632 : 0x5410;
        const uint32_t b0 = __byte_perm(word(v[0][h], j / 2), word(v[1][h], j / 2), halves);
        const uint32_t b1 = __byte_perm(word(v[2][h], j / 2), word(v[3][h], j / 2), halves);
        multiply_add(o[h][j], high[0][0], high[1][0], high[0][1], high[1][1], b0, b1);
        multiply_add(o[h][j], low[0][0], low[1][0], low[0][1], low[1][1], b0, b1);
      }
    }
    own_row = next_row, next_row = later_row;
  }

  const int num_parts = min(kWarps, (num_tokens + kTile - 1) / kTile);
  if (warp < num_parts) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      const int m = warp * kTile + g + 8 * i;
      if (t == 0) shared_max[m] = largest[i], shared_sum[m] = sum[i];
#pragma unroll
      for (int h = 0; h < kDim / 64; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          auto* const to = reinterpret_cast<float4*>(shared_out + m * kStride + 64 * h + (2 * t + e) * 8);
          const int c = 2 * i + e;
          to[0] = make_float4(o[h][0][c], o[h][1][c], o[h][2][c], o[h][3][c]);
          to[1] = make_float4(o[h][4][c], o[h][5][c], o[h][6][c], o[h][7][c]);
        }
      }
    }
  }
  __syncthreads();
  for (int index = static_cast<int>(threadIdx.x); index < kTile * kDim / 4; index += kThreads) {
    const int m = index / (kDim / 4), dim = index % (kDim / 4) * 4;
    if (!is_pair(m) || dim >= call.head_dim) continue;
    float top = -INFINITY;
    for (int part = 0; part < num_parts; ++part) top = fmaxf(top, shared_max[part * kTile + m]);
    float total = 0;
    float4 out = make_float4(0, 0, 0, 0);
    for (int part = 0; part < num_parts; ++part) {
      const float weight = exp2f(shared_max[part * kTile + m] - top);
      const float4 x = *reinterpret_cast<const float4*>(shared_out + (part * kTile + m) * kStride + dim);
      total += weight * shared_sum[part * kTile + m];
      out.x += weight * x.x, out.y += weight * x.y, out.z += weight * x.z, out.w += weight * x.w;
    }
    const float scale = nobody ? 0.0f : 1.0f / total;
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(call.out) + place(m) + dim) =
        make_uint2(pack_halves(out.x * scale, out.y * scale), pack_halves(out.z * scale, out.w * scale));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) attend_heads(const Attention call) {
  __shared__ float shared_query[kWarps][kMaxHeadDim];
  allow_next_launch();
  wait_for_previous();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + warp;  // of row and head
  const int row = static_cast<int>(pair / call.num_heads), head = static_cast<int>(pair % call.num_heads);
  if (row >= call.num_rows) return;
  const int sequence = find_last(call.num_sequences + 1, row, [&](int b) { return call.query_start[b]; });
  T* const out = static_cast<T*>(call.out) + pair * call.head_dim;
  if (sequence == call.num_sequences) {
    for (int dim = lane; dim < call.head_dim; dim += 32) out[dim] = from_float<T>(0.0f);
    return;
  }
  const int num_seen = call.kv_lens[sequence] - call.query_start[sequence + 1] + row + 1;
  float* const query = shared_query[warp];
  for (int dim = lane; dim < call.head_dim; dim += 32)
    query[dim] = to_float(static_cast<const T*>(call.query)[pair * call.head_dim + dim]);
  __syncwarp();

  const int64_t row_stride = static_cast<int64_t>(call.num_kv_heads) * call.head_dim;
  const int kv_head = head / (call.num_heads / call.num_kv_heads);
  const T* const pages = static_cast<const T*>(call.pages) + static_cast<int64_t>(kv_head) * call.head_dim;
  float largest = -INFINITY, sum = 0, o[kMaxHeadDim / 32] = {};
  for (int start = 0; start < num_seen; start += 32) {
    const int count = min(32, num_seen - start);
    int own_row = 0;
    float score = -INFINITY;
    if (lane < count) {
      own_row = key_row(call, sequence, start + lane);
      const T* const key = pages + own_row * row_stride;
      float parts[4] = {};
      int dim = 0;
      for (; dim + 4 <= call.head_dim; dim += 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) parts[i] += query[dim + i] * to_float(key[dim + i]);
      }
      for (; dim < call.head_dim; ++dim) parts[0] += query[dim] * to_float(key[dim]);
      score = ((parts[0] + parts[1]) + (parts[2] + parts[3])) * call.scale;
    }
    const float top = fmaxf(largest, warp_max(score));
    const float base = top == -INFINITY ? 0.0f : top;
    const float shrink = exp2f(largest - base), weight = exp2f(score - base);
    largest = top;
    sum = sum * shrink + warp_sum(weight);
#pragma unroll
    for (float& x : o) x *= shrink;
    for (int token = 0; token < count; ++token) {
      const float p = __shfl_sync(~0u, weight, token);
      const int value_row = __shfl_sync(~0u, own_row, token) + call.page_size;
      const T* const value = pages + value_row * row_stride;
#pragma unroll
      for (int i = 0; i < kMaxHeadDim / 32; ++i)
        if (lane + 32 * i < call.head_dim) o[i] += p * to_float(value[lane + 32 * i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / 32; ++i)
    if (lane + 32 * i < call.head_dim) out[lane + 32 * i] = from_float<T>(o[i] / sum);
}

template <int kDim, int kWarps>
const char* launch_tiles(const Attention& call, dim3 grid, void* stream) {
  constexpr auto kBytes = shared_bytes<kDim, kWarps>();
  const cudaError_t error = cudaFuncSetAttribute(
      attend_tiles<kDim, kWarps>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return launch(attend_tiles<kDim, kWarps>, grid, 32 * kWarps, kBytes, stream, call);
}

template <int kDim>
const char* launch_tiles(const Attention& call, void* stream) {
  const int group = call.num_heads / call.num_kv_heads;
  const int chunk = kTile / min(group, kTile);
  const dim3 grid(call.num_rows / chunk + call.num_sequences + 1,
                  call.num_kv_heads * ((group + kTile - 1) / kTile));
  return static_cast<int64_t>(grid.x) * grid.y > kManyBlocks ? launch_tiles<kDim, kFewWarps>(call, grid, stream)
                                                              : launch_tiles<kDim, kWarps>(call, grid, stream);
}

}  // namespace

// The caller has checked shapes, lengths and page ids. Row r of sequence b sees the first
// kv_lens[b] - query_start[b + 1] + r + 1 tokens.
extern "C" const char* equivtest_paged_attention(const void* query, const void* pages, const void* page_table,
                                                 const void* kv_lens, const void* query_start, void* out,
                                                 int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
                                                 int64_t head_dim, int64_t page_size, int64_t max_pages,
                                                 int64_t num_sequences, int64_t is_bfloat16, double scale,
                                                 void* stream) {
  if (num_rows == 0) return nullptr;
  const double log2_e = 1.4426950408889634;
  const Attention call = {
      query,
      pages,
      static_cast<const int32_t*>(page_table),
      static_cast<const int32_t*>(kv_lens),
      static_cast<const int32_t*>(query_start),
      out,
      static_cast<int>(num_rows),
      static_cast<int>(num_heads),
      static_cast<int>(num_kv_heads),
      static_cast<int>(head_dim),
      static_cast<int>(page_size),
      static_cast<int>(max_pages),
      static_cast<int>(num_sequences),
      static_cast<float>(scale * log2_e),
  };
  if (is_bfloat16 && head_dim % 8 == 0)
    return head_dim <= 64 ? launch_tiles<64>(call, stream) : launch_tiles<128>(call, stream);
  const unsigned blocks = static_cast<unsigned>((num_rows * num_heads + kWarps - 1) / kWarps);
  return is_bfloat16 ? launch(attend_heads<__nv_bfloat16>, dim3(blocks), kThreads, 0, stream, call)
                     : launch(attend_heads<float>, dim3(blocks), kThreads, 0, stream, call);
}
