// One float vector type of the widest kind this machine was compiled for, with explicit fused
// multiply-adds. The library is compiled with -ffp-contract=off: a product and a sum are fused
// where this code says so and nowhere else, so that every path through a kernel (one row or many)
// does the same roundings.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define SJ_INLINE inline __attribute__((always_inline))

namespace sparkjax {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define SJ_AVX512 1
constexpr int V = 16;
// Rows of x and rows of w that a register tile holds.
constexpr int kTileM = 6;
using vf = __m512;
SJ_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
SJ_INLINE void store(float* p, vf a) { _mm512_storeu_ps(p, a); }
SJ_INLINE vf splat(float a) { return _mm512_set1_ps(a); }
SJ_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
SJ_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
// Lanes i + (i + 8), then i + (i + 4), i + (i + 2), i + (i + 1): the one order of a sum of lanes.
SJ_INLINE float reduce(vf a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_permute_ps(c, 0x4E));
  c = _mm_add_ps(c, _mm_permute_ps(c, 0xB1));
  return _mm_cvtss_f32(c);
}
SJ_INLINE void reduce4(vf a, vf b, vf c, vf d, float* out) {
  vf ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xEE);
  vf cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xEE);
  vf s = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xDD);
  s = s + _mm512_permute_ps(s, 0x4E);
  s = s + _mm512_permute_ps(s, 0xB1);
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int V = 8;
constexpr int kTileM = 3;
using vf = __m256;
SJ_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
SJ_INLINE void store(float* p, vf a) { _mm256_storeu_ps(p, a); }
SJ_INLINE vf splat(float a) { return _mm256_set1_ps(a); }
SJ_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
SJ_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
SJ_INLINE float reduce(vf a) {
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  c = _mm_add_ps(c, _mm_permute_ps(c, 0x4E));
  c = _mm_add_ps(c, _mm_permute_ps(c, 0xB1));
  return _mm_cvtss_f32(c);
}
SJ_INLINE void reduce4(vf a, vf b, vf c, vf d, float* out) {
  out[0] = reduce(a);
  out[1] = reduce(b);
  out[2] = reduce(c);
  out[3] = reduce(d);
}
#elif defined(__aarch64__)
constexpr int V = 4;
constexpr int kTileM = 6;
using vf = float32x4_t;
SJ_INLINE vf load(const float* p) { return vld1q_f32(p); }
SJ_INLINE void store(float* p, vf a) { vst1q_f32(p, a); }
SJ_INLINE vf splat(float a) { return vdupq_n_f32(a); }
SJ_INLINE vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
SJ_INLINE vf vmax(vf a, vf b) { return vmaxnmq_f32(a, b); }
SJ_INLINE void reduce4(vf a, vf b, vf c, vf d, float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
SJ_INLINE float reduce(vf a) {
  a = vpaddq_f32(a, a);
  return vgetq_lane_f32(vpaddq_f32(a, a), 0);
}
#else
// Any other machine: a four-lane GCC vector, no fused operations.
constexpr int V = 4;
constexpr int kTileM = 2;
typedef float vf __attribute__((vector_size(16)));
SJ_INLINE vf load(const float* p) {
  vf a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
SJ_INLINE void store(float* p, vf a) { std::memcpy(p, &a, sizeof a); }
SJ_INLINE vf splat(float a) { return vf{a, a, a, a}; }
SJ_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
SJ_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
SJ_INLINE float reduce(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
SJ_INLINE void reduce4(vf a, vf b, vf c, vf d, float* out) {
  out[0] = reduce(a);
  out[1] = reduce(b);
  out[2] = reduce(c);
  out[3] = reduce(d);
}
#endif

constexpr int kTileN = 4;
typedef int32_t vi __attribute__((vector_size(4 * V)));

SJ_INLINE vf zero() { return splat(0.0f); }
constexpr int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// e^x for x <= 0 (and a little above), about one unit in the last place; 0 below -87.
// Range reduction and polynomial: Cephes expf (S. Moshier).
SJ_INLINE vf vexp(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  vf clamped = vmax(x, splat(-87.0f));
  vf t = fma(clamped, splat(1.44269504088896341f), splat(magic));
  vf n = t - splat(magic);
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  vi bits = (vi)p + ((vi)t << 23);
  vi keep = (vi)(x >= splat(-87.0f));
  return (vf)(bits & keep);
}

SJ_INLINE float exp1(float x) {
  float out[V];
  store(out, vexp(splat(x)));
  return out[0];
}

}  // namespace sparkjax
