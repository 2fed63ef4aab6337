// What kernels of both transports do with pieces: copies and sums over memory that others write.
// `P` is a piece of a collective: rank, ranks, root, kind, part, at, n and slot(who, epoch).

#pragma once

#include <cstdint>

#include "calls.h"

namespace sparkjax {
namespace {

constexpr int kDeep = 4;  // loads in flight a thread: another rank's memory is a microsecond away

__device__ uint32_t volatile* word(volatile void* atomic) {
  return reinterpret_cast<uint32_t volatile*>(atomic);
}

__device__ uint32_t acquire(volatile void* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ void release(volatile void* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}

__device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ int64_t first_of_grid() {
  return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
}
__device__ int64_t step_of_grid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

__device__ bool aligned(const void* a, const void* b, int64_t n) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | n) & 15) == 0;
}

// Past all caches: other processes write it.
__device__ uint4 load(const char* at, int64_t i) {
  return __ldcv(reinterpret_cast<const uint4*>(at) + i);
}

// Copies by all threads of the grid.
__device__ void copy(char* to, const char* from, int64_t n) {
  const int64_t first = first_of_grid(), step = step_of_grid();
  if (!aligned(to, from, n)) {
    const volatile char* x = from;
    volatile char* y = to;
    for (int64_t i = first; i < n; i += step) y[i] = x[i];
    return;
  }
  const int64_t count = n / 16;
  for (int64_t base = first; base < count; base += step * kDeep) {
    uint4 got[kDeep];
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      if (base + k * step < count) got[k] = load(from, base + k * step);
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      if (base + k * step < count) reinterpret_cast<uint4*>(to)[base + k * step] = got[k];
  }
}

__device__ float widened(uint32_t half) { return __uint_as_float(half << 16); }

// To the nearest bfloat16, ties to even.
__device__ uint32_t narrowed(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16 | 0x40) & 0xffff;
  return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) & 0xffff;
}

// Four words of numbers: 4 of float32 or 8 of bfloat16.
template <bool kHalf>
struct Sum {
  float total[kHalf ? 8 : 4];

  __device__ void add(uint4 words, bool first) {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kHalf) {
        const float low = widened(w[i] & 0xffff), high = __uint_as_float(w[i] & 0xffff0000);
        total[2 * i] = first ? low : __fadd_rn(total[2 * i], low);
        total[2 * i + 1] = first ? high : __fadd_rn(total[2 * i + 1], high);
      } else {
        const float term = __uint_as_float(w[i]);
        total[i] = first ? term : __fadd_rn(total[i], term);
      }
    }
  }

  __device__ uint4 words() const {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = kHalf ? narrowed(total[2 * i]) | narrowed(total[2 * i + 1]) << 16 : __float_as_uint(total[i]);
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};

// The sum in rank order; our own term is read where it is.
template <bool kHalf, class P>
__device__ void sum(const P& p, uint32_t epoch, const char* x, char* out) {
  const int64_t first = first_of_grid(), step = step_of_grid();
  const bool whole = aligned(x, out, 0);
  const int64_t count = whole ? p.n / 16 : 0;
  for (int64_t base = first; base < count; base += step * kDeep) {
    Sum<kHalf> sums[kDeep];
    for (int who = 0; who < p.ranks; ++who) {
      const char* from = who == p.rank ? x : p.slot(who, epoch);
      uint4 got[kDeep];
#pragma unroll
      for (int k = 0; k < kDeep; ++k)
        if (base + k * step < count) got[k] = load(from, base + k * step);
#pragma unroll
      for (int k = 0; k < kDeep; ++k) sums[k].add(got[k], who == 0);
    }
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      if (base + k * step < count) reinterpret_cast<uint4*>(out)[base + k * step] = sums[k].words();
  }
  constexpr int kSize = kHalf ? 2 : 4;
  for (int64_t i = count * 16 / kSize + first; i < p.n / kSize; i += step) {
    float total = 0;
    for (int who = 0; who < p.ranks; ++who) {
      const char* from = who == p.rank ? x : p.slot(who, epoch);
      const float term = kHalf ? widened(reinterpret_cast<const volatile uint16_t*>(from)[i])
                               : reinterpret_cast<const volatile float*>(from)[i];
      total = who ? __fadd_rn(total, term) : term;
    }
    if (kHalf)
      reinterpret_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(narrowed(total));
    else
      reinterpret_cast<float*>(out)[i] = total;
  }
}

template <class P>
__device__ void fold(const P& p, const char* x, char* y, uint32_t epoch) {
  char* out = y + p.at;
  if (p.kind == kAllReduce && p.half) sum<true>(p, epoch, x + p.at, out);
  if (p.kind == kAllReduce && !p.half) sum<false>(p, epoch, x + p.at, out);
  if (p.kind == kBroadcast) copy(out, p.rank == p.root ? x + p.at : p.slot(p.root, epoch), p.n);
  if (p.kind == kBarrier) copy(out, x + p.at, p.n);
  for (int r = 0; r < p.ranks; ++r) {
    if (p.kind == kAllGather)
      copy(out + r * p.part, r == p.rank ? x + p.at : p.slot(r, epoch), p.n);
    if (p.kind == kAllToAll) copy(out + r * p.part, p.slot(r, epoch) + p.rank * p.n, p.n);
  }
}

}  // namespace
}  // namespace sparkjax
