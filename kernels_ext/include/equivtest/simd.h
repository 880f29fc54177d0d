// Fixed-width vectors by the compiler's own vector extension (GCC, Clang): one source for every instruction set.
//
// Sums are kept in a fixed number of lanes that are folded in a fixed order, so a result depends on the values alone
// and never on the alignment of a row, the instruction set's width or the number of threads.
#pragma once

#include <cstdint>
#include <cstring>

namespace equivtest {

constexpr int64_t kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));

// Storage of a bfloat16: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};

#define EQUIVTEST_INLINE inline __attribute__((always_inline))

EQUIVTEST_INLINE f32x16 load(const float* from) {
  f32x16 lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

EQUIVTEST_INLINE f32x16 load(const bf16* from) {
  u16x16 bits;
  std::memcpy(&bits, from, sizeof bits);
  const u32x16 wide = __builtin_convertvector(bits, u32x16) << 16;
  f32x16 lanes;
  std::memcpy(&lanes, &wide, sizeof lanes);
  return lanes;
}

EQUIVTEST_INLINE void store(float* to, f32x16 lanes) { std::memcpy(to, &lanes, sizeof lanes); }

EQUIVTEST_INLINE float to_float(float value) { return value; }

EQUIVTEST_INLINE float to_float(bf16 value) {
  const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

EQUIVTEST_INLINE void from_float(float value, float* to) { *to = value; }

// Rounds to nearest, ties to even; a NaN stays one.
EQUIVTEST_INLINE void from_float(float value, bf16* to) {
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  if (value != value) {
    to->bits = static_cast<uint16_t>((wide >> 16) | 0x40u);
    return;
  }
  to->bits = static_cast<uint16_t>((wide + 0x7FFFu + ((wide >> 16) & 1u)) >> 16);
}

EQUIVTEST_INLINE f32x16 splat(float value) {
  return f32x16{value, value, value, value, value, value, value, value,
                value, value, value, value, value, value, value, value};
}

EQUIVTEST_INLINE f64x8 low_half(f32x16 x) {
  f32x8 half;
  std::memcpy(&half, &x, sizeof half);
  return __builtin_convertvector(half, f64x8);
}

EQUIVTEST_INLINE f64x8 high_half(f32x16 x) {
  f32x8 half;
  std::memcpy(&half, reinterpret_cast<const char*>(&x) + sizeof half, sizeof half);
  return __builtin_convertvector(half, f64x8);
}

EQUIVTEST_INLINE double sum(f64x8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

EQUIVTEST_INLINE float max(f32x16 x) {
  float best = x[0];
  for (int64_t i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

EQUIVTEST_INLINE bool any(i32x16 mask) {
  i64x8 words;
  std::memcpy(&words, &mask, sizeof words);
  return ((words[0] | words[1]) | (words[2] | words[3]) | (words[4] | words[5]) | (words[6] | words[7])) != 0;
}

// exp(x) for x <= 0, within 2 ulp; 0 below -87.3 (where the result would be subnormal) and at -inf; NaN stays NaN.
// Range reduction and polynomial: Cephes expf (Moshier), two-part ln 2.
EQUIVTEST_INLINE f32x16 exp_nonpositive(f32x16 x) {
  const f32x16 lowest = splat(-87.3f);
  const i32x16 underflow = x < lowest;
  const f32x16 clamped = underflow ? lowest : x;
  const f32x16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const f32x16 shifted = clamped * 1.44269504088896341f + shift;
  const f32x16 n = shifted - shift;
  const f32x16 r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  f32x16 poly = splat(1.9875691500e-4f);
  poly = poly * r + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  const f32x16 value = (poly * (r * r) + r) + 1.0f;
  i32x16 exponent, bits;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  std::memcpy(&bits, &value, sizeof bits);
  bits += exponent << 23;  // the low bits of `shifted` hold n; the rest is shifted out
  f32x16 result;
  std::memcpy(&result, &bits, sizeof result);
  const i32x16 is_nan = x != x;
  result = underflow ? splat(0.0f) : result;
  return is_nan ? x : result;
}

}  // namespace equivtest
