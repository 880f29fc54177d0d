// What the small kernels of a decode step share: launches, loads and stores of float and bfloat16, matrix products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace equivtest::cuda {

// Programmatic dependent launch (sm_90 and later): a kernel's blocks start while its predecessor still runs, bring
// their weights into the L2 cache and wait. Every kernel here waits before it reads or writes anything that another
// one writes, so that the completion of kernel n implies that of kernels 1 .. n - 1. What it reads before that (weights,
// rotary tables, positions, slots, page tables, lengths) must not be another of these kernels' output.
constexpr bool kOverlapLaunches = true;

__device__ __forceinline__ void allow_next_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kOverlapLaunches) asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kOverlapLaunches) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Of the current device; 0 where it does not say.
inline int device_attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  const bool told = cudaGetDevice(&device) == cudaSuccess &&
                    cudaDeviceGetAttribute(&value, which, device) == cudaSuccess;
  return told ? value : 0;
}

// Overlapped launches and clusters of blocks came with the same generation.
inline bool is_sm_90() { return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

// Launches on the stream, `cluster` blocks along z together (more than one from sm_90 on). Null, or what CUDA says is
// wrong.
template <class... Params, class... Args>
const char* launch_clusters(void (*kernel)(Params...), dim3 grid, unsigned cluster, unsigned threads,
                            size_t shared_bytes, void* stream, Args... args) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (kOverlapLaunches && is_sm_90()) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = 1;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = cluster;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class... Params, class... Args>
const char* launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes, void* stream,
                   Args... args) {
  return launch_clusters(kernel, grid, 1, threads, shared_bytes, stream, args...);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// x rounded to T.
template <class T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// The two bfloat16 of a word: the low half comes first in memory.
__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  const uint32_t first = __bfloat16_as_ushort(__float2bfloat16_rn(low));
  const uint32_t second = __bfloat16_as_ushort(__float2bfloat16_rn(high));
  return first | second << 16;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// c += a b: a [16, 16] row major, b [16, 8] column major, in the layout of the PTX manual (9.7.14.5.8).
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

}  // namespace equivtest::cuda
