// The weight formats: GGUF blocks as published (ggml-common.h) and dense rows, decoded to float32.
//
// A block holds 32 weights. Q4_0: fp16 d, 16 bytes; w = d (q - 8). Q4_1: fp16 d, fp16 m, 16 bytes;
// w = d q + m. The low nibbles of the bytes are weights 0..15, the high ones 16..31. Q8_0: fp16 d,
// 32 int8; w = d q. Products of d and q are exact in float32, so a fused d q + m rounds once, like
// the unfused one.
#pragma once

#include "vec.h"

namespace sparkjax {

enum Kind : int64_t { kF32 = 0, kBF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 4, kKinds = 5 };

constexpr int64_t kBlock = 32;

SJ_INLINE int64_t block_bytes(int64_t kind) {
  return kind == kQ4_0 ? 18 : kind == kQ4_1 ? 20 : kind == kQ8_0 ? 34 : 0;
}

// Bytes of a row of k weights.
SJ_INLINE int64_t row_bytes(int64_t kind, int64_t k) {
  if (kind == kF32) return 4 * k;
  if (kind == kBF16) return 2 * k;
  return k / kBlock * block_bytes(kind);
}

SJ_INLINE float half_at(const uint8_t* p) {
#if defined(__F16C__)
  uint16_t h;
  std::memcpy(&h, p, 2);
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 h;
  std::memcpy(&h, p, 2);
  return static_cast<float>(h);
#else
  uint16_t h;
  std::memcpy(&h, p, 2);
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, body = h & 0x7FFF, bits;
  if (body >= 0x7C00) {
    bits = 0x7F800000 | (body & 0x3FF) << 13;
  } else if (body >= 0x400) {
    bits = (body << 13) + (112u << 23);
  } else {
    float f = static_cast<float>(body) * 0x1p-24f;
    std::memcpy(&bits, &f, 4);
  }
  bits |= sign;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

SJ_INLINE float bf16_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

#if SJ_AVX512
// float32 d (and m) of `count` consecutive blocks. Reads 4 bytes of each block and writes whole
// vectors: d and m have room for round_up(count, 16).
template <int64_t KIND>
SJ_INLINE void block_scales(const uint8_t* blocks, int64_t count, float* d, float* m) {
  constexpr int kBytes = KIND == kQ4_0 ? 18 : KIND == kQ4_1 ? 20 : 34;
  const __m512i lanes =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(kBytes));
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t left = count - i;
    const __mmask16 real = left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1);
    __m512i raw = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), real, at,
                                              blocks + i * kBytes, 1);
    _mm512_storeu_ps(d + i, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(raw)));
    if (KIND == kQ4_1) {
      _mm512_storeu_ps(m + i,
                       _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(raw, 16))));
    }
  }
}

// The 32 weights of one block, given its scales, as two vectors.
template <int64_t KIND>
SJ_INLINE void block_weights(const uint8_t* block, const float* d, const float* m, vf& low,
                             vf& high) {
  if (KIND == kQ8_0) {
    const __m512 scale = _mm512_set1_ps(*d);
    const __m128i* q = reinterpret_cast<const __m128i*>(block + 2);
    low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q))) * scale;
    high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q + 1))) * scale;
  } else {
    // All sixteen values that a code can stand for, then a look-up: the permutation reads only the
    // low four bits of each index.
    const vf codes =
        KIND == kQ4_0
            ? _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)
            : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const vf table = KIND == kQ4_0 ? codes * _mm512_set1_ps(*d)
                                   : fma(codes, _mm512_set1_ps(*d), _mm512_set1_ps(*m));
    const uint8_t* q = block + (KIND == kQ4_0 ? 2 : 4);
    const __m512i index =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
    low = _mm512_permutexvar_ps(index, table);
    high = _mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), table);
  }
}
#endif

template <int64_t KIND>
SJ_INLINE void decode_blocks(const uint8_t* blocks, int64_t count, float* out) {
#if SJ_AVX512
  float d[64], m[64];
  constexpr int64_t kBytes = KIND == kQ4_0 ? 18 : KIND == kQ4_1 ? 20 : 34;
  while (count > 0) {
    const int64_t some = count < 64 ? count : 64;
    block_scales<KIND>(blocks, some, d, m);
    for (int64_t i = 0; i < some; ++i) {
      vf low, high;
      block_weights<KIND>(blocks + i * kBytes, d + i, m + i, low, high);
      store(out + i * kBlock, low);
      store(out + i * kBlock + 16, high);
    }
    blocks += some * kBytes;
    out += some * kBlock;
    count -= some;
  }
#else
  for (int64_t i = 0; i < count; ++i, out += kBlock) {
    const float d = half_at(blocks);
    if (KIND == kQ8_0) {
      const int8_t* q = reinterpret_cast<const int8_t*>(blocks + 2);
      for (int j = 0; j < 32; ++j) out[j] = d * static_cast<float>(q[j]);
      blocks += 34;
    } else {
      const float m = KIND == kQ4_1 ? half_at(blocks + 2) : 0.0f;
      const int shift = KIND == kQ4_0 ? 8 : 0;
      const uint8_t* q = blocks + (KIND == kQ4_1 ? 4 : 2);
      for (int j = 0; j < 16; ++j) {
        out[j] = d * static_cast<float>((q[j] & 15) - shift) + m;
        out[j + 16] = d * static_cast<float>((q[j] >> 4) - shift) + m;
      }
      blocks += KIND == kQ4_1 ? 20 : 18;
    }
  }
#endif
}

// One row of k weights as float32.
inline void decode_row(int64_t kind, const uint8_t* row, int64_t k, float* out) {
  switch (kind) {
    case kF32:
      std::memcpy(out, row, 4 * k);
      break;
    case kBF16:
      for (int64_t i = 0; i < k; ++i) out[i] = bf16_at(row + 2 * i);
      break;
    case kQ4_0:
      decode_blocks<kQ4_0>(row, k / kBlock, out);
      break;
    case kQ4_1:
      decode_blocks<kQ4_1>(row, k / kBlock, out);
      break;
    case kQ8_0:
      decode_blocks<kQ8_0>(row, k / kBlock, out);
      break;
  }
}

}  // namespace sparkjax
