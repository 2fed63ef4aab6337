// y[m, n] = sum_k x[m, k] w[n, k], float32, the weight in any of the formats of blocks.h.
//
// A sum always goes: V lanes, lane i over k = i, i + V, i + 2 V, ... by fused multiply-adds in that
// order, then the lanes by the tree of `reduce`. Neither the number of rows nor the tile that a
// (row, output) pair falls into changes it, so a row has the same bits in any batch.
#pragma once

#include "blocks.h"
#include "parallel.h"

namespace sparkjax {

// MR rows of x times NR rows of w, both dense, k a multiple of V.
template <int MR, int NR>
SJ_INLINE void dot_tile(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t k,
                        float* y, int64_t ldy) {
  vf acc[MR][NR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) acc[i][j] = zero();
  for (int64_t p = 0; p < k; p += V) {
    vf wv[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) wv[j] = load(w + j * ldw + p);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const vf xv = load(x + i * ldx + p);
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) acc[i][j] = fma(wv[j], xv, acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
    if constexpr (NR == 4) {
      reduce4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], y + i * ldy);
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) y[i * ldy + j] = reduce(acc[i][j]);
    }
  }
}

// MR rows of x times n rows of w.
template <int MR>
__attribute__((noinline)) void dot_panel(const float* x, int64_t ldx, const float* w, int64_t ldw,
                                         int64_t k, int64_t n, float* y, int64_t ldy) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) dot_tile<MR, 4>(x, ldx, w + j * ldw, ldw, k, y + j, ldy);
  for (; j < n; ++j) dot_tile<MR, 1>(x, ldx, w + j * ldw, ldw, k, y + j, ldy);
}

// m rows of x times n rows of w, in tiles of nearly equal numbers of rows.
inline void dot_rows(const float* x, int64_t ldx, int64_t m, const float* w, int64_t ldw, int64_t k,
                     int64_t n, float* y, int64_t ldy) {
  int64_t tiles = (m + kTileM - 1) / kTileM;
  while (tiles > 0) {
    const int64_t rows = (m + tiles - 1) / tiles;
    switch (rows) {
      case 1: dot_panel<1>(x, ldx, w, ldw, k, n, y, ldy); break;
      case 2: dot_panel<2>(x, ldx, w, ldw, k, n, y, ldy); break;
      case 3: dot_panel<3>(x, ldx, w, ldw, k, n, y, ldy); break;
      case 4: dot_panel<4>(x, ldx, w, ldw, k, n, y, ldy); break;
      case 5: dot_panel<5>(x, ldx, w, ldw, k, n, y, ldy); break;
      default: dot_panel<6>(x, ldx, w, ldw, k, n, y, ldy); break;
    }
    x += rows * ldx;
    y += rows * ldy;
    m -= rows;
    --tiles;
  }
}

#if SJ_AVX512
// Few rows of x: weights go from blocks to registers to products, without a buffer in between.
// MR rows of x times n rows of w; n a multiple of NR.
template <int64_t KIND, int MR, int NR>
__attribute__((noinline)) void few_rows(const float* x, int64_t ldx, const uint8_t* w,
                                        int64_t k, int64_t n, float* y, int64_t ldy) {
  const int64_t bytes = row_bytes(KIND, k), blocks = k / kBlock;
  float *d = nullptr, *mn = nullptr;
  if (KIND >= kQ4_0) {
    const int64_t room = round_up(NR * blocks, 16);
    d = scratch<2>(2 * room);
    mn = d + room;
  }
  for (int64_t j0 = 0; j0 < n; j0 += NR, w += NR * bytes) {
    if constexpr (KIND >= kQ4_0) block_scales<KIND>(w, NR * blocks, d, mn);
    vf acc[NR][MR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j)
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) acc[j][i] = zero();
    const uint8_t* at = w;
    for (int64_t b = 0; b < blocks; ++b) {
      vf low[NR], high[NR];
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) {
        if constexpr (KIND == kF32) {
          const float* row = reinterpret_cast<const float*>(w + j * bytes) + b * kBlock;
          low[j] = load(row);
          high[j] = load(row + 16);
        } else if constexpr (KIND == kBF16) {
          const __m256i* row = reinterpret_cast<const __m256i*>(w + j * bytes) + 2 * b;
          low[j] = _mm512_castsi512_ps(
              _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(row)), 16));
          high[j] = _mm512_castsi512_ps(
              _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(row + 1)), 16));
        } else {
          _mm_prefetch(reinterpret_cast<const char*>(at + j * bytes + 4096), _MM_HINT_T0);
          block_weights<KIND>(at + j * bytes, d + j * blocks + b, mn + j * blocks + b, low[j],
                              high[j]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const vf first = load(x + i * ldx + b * kBlock);
        const vf second = load(x + i * ldx + b * kBlock + 16);
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) {
          acc[j][i] = fma(low[j], first, acc[j][i]);
          acc[j][i] = fma(high[j], second, acc[j][i]);
        }
      }
      if (KIND >= kQ4_0) at += block_bytes(KIND);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      if constexpr (NR % 4 == 0) {
#pragma GCC unroll 8
        for (int j = 0; j < NR; j += 4)
          reduce4(acc[j][i], acc[j + 1][i], acc[j + 2][i], acc[j + 3][i], y + i * ldy + j0 + j);
      } else {
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) y[i * ldy + j0 + j] = reduce(acc[j][i]);
      }
    }
  }
}

template <int64_t KIND, int MR>
void few_rows_any_n(const float* x, int64_t ldx, const uint8_t* w, int64_t k, int64_t n, float* y,
                    int64_t ldy) {
  constexpr int NR = MR <= 6 ? 4 : 3;  // 24 sums in registers
  const int64_t whole = n / NR * NR;
  few_rows<KIND, MR, NR>(x, ldx, w, k, whole, y, ldy);
  few_rows<KIND, MR, 1>(x, ldx, w + whole * row_bytes(KIND, k), k, n - whole, y + whole, ldy);
}

template <int64_t KIND>
bool few_rows_of(const float* x, int64_t ldx, int64_t m, const uint8_t* w, int64_t k, int64_t n,
                 float* y, int64_t ldy) {
  switch (m) {
    case 1: few_rows_any_n<KIND, 1>(x, ldx, w, k, n, y, ldy); return true;
    case 2: few_rows_any_n<KIND, 2>(x, ldx, w, k, n, y, ldy); return true;
    case 3: few_rows_any_n<KIND, 3>(x, ldx, w, k, n, y, ldy); return true;
    case 4: few_rows_any_n<KIND, 4>(x, ldx, w, k, n, y, ldy); return true;
    case 5: few_rows_any_n<KIND, 5>(x, ldx, w, k, n, y, ldy); return true;
    case 6: few_rows_any_n<KIND, 6>(x, ldx, w, k, n, y, ldy); return true;
    case 7: few_rows_any_n<KIND, 7>(x, ldx, w, k, n, y, ldy); return true;
    case 8: few_rows_any_n<KIND, 8>(x, ldx, w, k, n, y, ldy); return true;
  }
  return false;
}

inline bool few_rows_any(int64_t kind, const float* x, int64_t ldx, int64_t m, const uint8_t* w,
                         int64_t k, int64_t n, float* y, int64_t ldy) {
  if (k % kBlock) return false;
  switch (kind) {
    case kF32: return few_rows_of<kF32>(x, ldx, m, w, k, n, y, ldy);
    case kBF16: return few_rows_of<kBF16>(x, ldx, m, w, k, n, y, ldy);
    case kQ4_0: return few_rows_of<kQ4_0>(x, ldx, m, w, k, n, y, ldy);
    case kQ4_1: return few_rows_of<kQ4_1>(x, ldx, m, w, k, n, y, ldy);
    case kQ8_0: return few_rows_of<kQ8_0>(x, ldx, m, w, k, n, y, ldy);
  }
  return false;
}
#else
inline bool few_rows_any(int64_t, const float*, int64_t, int64_t, const uint8_t*, int64_t, int64_t,
                         float*, int64_t) {
  return false;
}
#endif

// Up to this many rows, weights are decoded once for every eight rows and never stored.
constexpr int64_t kFewRows = 32;

struct Weight {
  int64_t kind;
  const uint8_t* data;  // of the layer
  int64_t n;
  float* y;  // [rows, n]
};

// Outputs [n0, n1) of one weight for rows [0, m) of x.
inline void linear_part(const Weight& weight, const float* x, int64_t m, int64_t k, int64_t n0,
                        int64_t n1, float* y) {
  const int64_t bytes = row_bytes(weight.kind, k), ldy = weight.n;
  const uint8_t* w = weight.data + n0 * bytes;
  const int64_t n = n1 - n0;
  y += n0;
  if (m <= kFewRows) {
    int64_t done = 0;
    for (int64_t part = (m + 7) / 8; part > 0; --part) {
      const int64_t rows = (m - done + part - 1) / part;
      if (!few_rows_any(weight.kind, x + done * k, k, rows, w, k, n, y + done * ldy, ldy)) break;
      done += rows;
    }
    if (done == m) return;
  }
  const int64_t padded = round_up(k, V);
  int64_t ldx = k;
  if (padded != k) {
    float* packed = scratch<1>(m * padded);
    for (int64_t i = 0; i < m; ++i) {
      std::memcpy(packed + i * padded, x + i * k, 4 * k);
      for (int64_t j = k; j < padded; ++j) packed[i * padded + j] = 0.0f;
    }
    x = packed;
    ldx = padded;
  } else if (weight.kind == kF32) {
    dot_rows(x, ldx, m, reinterpret_cast<const float*>(w), k, k, n, y, ldy);
    return;
  }
  // Few rows: weights stay in L1 for the products. Many: as many as fit well in L2, so that a tile
  // of x stays in L1 meanwhile.
  const int64_t room = m <= 2 * kTileM ? 16 << 10 : 128 << 10;
  int64_t chunk = room / (4 * padded) / 4 * 4;
  chunk = chunk < 4 ? 4 : chunk > 64 ? 64 : chunk;
  float* dense = scratch<0>(chunk * padded);
  for (int64_t j = 0; j < n; j += chunk) {
    const int64_t some = n - j < chunk ? n - j : chunk;
    for (int64_t r = 0; r < some; ++r) {
      float* row = dense + r * padded;
      decode_row(weight.kind, w + (j + r) * bytes, k, row);
      for (int64_t i = k; i < padded; ++i) row[i] = 0.0f;
    }
    dot_rows(x, ldx, m, dense, padded, padded, some, y + j, ldy);
  }
}

// All weights for rows [0, live) of x [rows, k]; the other rows of the results are zeros.
template <typename Pool>
void linear_group(Pool& pool, int64_t threads, const float* x, int64_t rows, int64_t live,
                  int64_t k, const Weight* weights, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    total += weights[i].n;
    std::memset(weights[i].y + live * weights[i].n, 0, 4 * (rows - live) * weights[i].n);
  }
  if (live == 0 || total == 0) return;
  // Rows of x in a task: about a megabyte. Outputs in a task: a few tasks a thread, not tiny.
  int64_t block = (1 << 18) / (k > 0 ? k : 1) / kTileM * kTileM;
  block = block < 8 * kTileM ? 8 * kTileM : block;
  const int64_t bands = (live + block - 1) / block;
  if (threads < 1 || total * k * live < (1 << 16)) threads = 1;
  int64_t chunk = round_up(total / (threads * 4) + 1, 8);
  const int64_t most = live <= 8 ? 512 : 128;
  chunk = chunk > most ? most : chunk < 16 ? 16 : chunk;
  int64_t pieces = 0;
  for (int64_t i = 0; i < count; ++i) pieces += (weights[i].n + chunk - 1) / chunk;
  parallel_for(pool, bands * pieces, threads, [&](int64_t task) {
    const int64_t band = task / pieces, m0 = live * band / bands, m1 = live * (band + 1) / bands;
    int64_t piece = task % pieces;
    const Weight* weight = weights;
    for (int64_t here; piece >= (here = (weight->n + chunk - 1) / chunk); ++weight) piece -= here;
    const int64_t n0 = piece * chunk, n1 = n0 + chunk < weight->n ? n0 + chunk : weight->n;
    linear_part(*weight, x + m0 * k, m1 - m0, k, n0, n1, weight->y + m0 * weight->n);
  });
}

// out[i] = row ids[i] of a table of n rows, decoded; ids out of range are clamped.
template <typename Pool>
void embed(Pool& pool, int64_t threads, int64_t kind, const uint8_t* table, int64_t n, int64_t k,
           const int32_t* ids, int64_t count, float* out) {
  const int64_t bytes = row_bytes(kind, k), batch = 16;
  if (count * k < (1 << 15)) threads = 1;
  parallel_for(pool, (count + batch - 1) / batch, threads, [&](int64_t task) {
    const int64_t end = (task + 1) * batch < count ? (task + 1) * batch : count;
    for (int64_t i = task * batch; i < end; ++i) {
      const int64_t id = ids[i] < 0 ? 0 : ids[i] >= n ? n - 1 : ids[i];
      decode_row(kind, table + id * bytes, k, out + i * k);
    }
  });
}

}  // namespace sparkjax
