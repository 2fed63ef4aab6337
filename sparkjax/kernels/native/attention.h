// Causal grouped-query attention over paged float32 keys and values, and writes into pages.
//
// softmax(scale q k^T) v by the online method (Milakov & Gimelshein 2018; Dao et al. 2022): keys are
// taken in chunks at absolute positions [kChunk c, kChunk (c + 1)); a chunk gives a partial result
// (its maximum, sum and weighted values), and partials are merged in ascending order. All of that
// depends on a query's position only, so its bits are the same in any batch and any tile, and when
// the chunks of one query are computed by several threads.
#pragma once

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "linear.h"

namespace sparkjax {

constexpr int64_t kChunk = 128;
// Values of V floats that a register tile spans.
constexpr int kTileV = 4;

struct Attention {
  const float *q, *k, *v;  // k and v of the layer: [pages, page, kv_heads, dim or value_dim]
  float* out;
  int64_t batch, queries, heads, kv_heads, dim, value_dim, pages, page, table;
  const int32_t *page_table, *start, *lengths;
  const float* sinks;  // or null
  float scale, softcap;
  int64_t window;  // 0: none
};

// MR rows of weights p over keys [0, count) times values: out[r] (+)= sum_j p[r][j] v[j], j upward.
template <int MR, int NV>
SJ_INLINE void weigh_tile(const float* p, int64_t ldp, const float* v, int64_t ldv, int64_t count,
                          float* out, int64_t ldo) {
  vf acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) acc[i][j] = load(out + i * ldo + j * V);
  for (int64_t s = 0; s < count; ++s) {
    vf value[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) value[j] = load(v + s * ldv + j * V);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const vf weight = splat(p[i * ldp + s]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) acc[i][j] = fma(weight, value[j], acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) store(out + i * ldo + j * V, acc[i][j]);
}

template <int MR>
__attribute__((noinline)) void weigh_panel(const float* p, int64_t ldp, const float* v, int64_t ldv,
                                           int64_t count, int64_t width, float* out, int64_t ldo) {
  int64_t c = 0;
  for (; c + kTileV * V <= width; c += kTileV * V)
    weigh_tile<MR, kTileV>(p, ldp, v + c, ldv, count, out + c, ldo);
  for (; c < width; c += V) weigh_tile<MR, 1>(p, ldp, v + c, ldv, count, out + c, ldo);
}

inline void weigh_rows(int64_t rows, const float* p, int64_t ldp, const float* v, int64_t ldv,
                       int64_t count, int64_t width, float* out, int64_t ldo) {
  while (rows > 0) {
    const int64_t some = rows < kTileM ? rows : kTileM;
    switch (some) {
      case 1: weigh_panel<1>(p, ldp, v, ldv, count, width, out, ldo); break;
      case 2: weigh_panel<2>(p, ldp, v, ldv, count, width, out, ldo); break;
      case 3: weigh_panel<3>(p, ldp, v, ldv, count, width, out, ldo); break;
      case 4: weigh_panel<4>(p, ldp, v, ldv, count, width, out, ldo); break;
      case 5: weigh_panel<5>(p, ldp, v, ldv, count, width, out, ldo); break;
      default: weigh_panel<6>(p, ldp, v, ldv, count, width, out, ldo); break;
    }
    rows -= some;
    p += some * ldp;
    out += some * ldo;
  }
}

// Rows of work of one sequence: for each of some kv heads, queries i0 .. i0 + queries - 1 (all of
// them real), for each the query heads of that kv head; in this order.
struct Tile {
  int64_t b, kv, kv_count, i0, queries;
};

// Keys that a query at `position` sees: [low, high).
SJ_INLINE void span_of(const Attention& a, int64_t position, int64_t& low, int64_t& high) {
  low = a.window > 0 && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
  const int64_t room = a.table * a.page;
  high = position + 1 < room ? position + 1 : room;
  if (low > high) low = high;
}

// The query head of a tile's row, and its query.
SJ_INLINE void row_of(const Attention& a, const Tile& t, int64_t r, int64_t& head, int64_t& query) {
  const int64_t group = a.heads / a.kv_heads, per_kv = t.queries * group;
  head = (t.kv + r / per_kv) * group + r % group;
  query = t.i0 + r % per_kv / group;
}

// Copies the tile's queries to rows of `padded` floats.
inline void pack_queries(const Attention& a, const Tile& t, int64_t padded, float* to) {
  const int64_t rows = t.kv_count * t.queries * (a.heads / a.kv_heads);
  for (int64_t r = 0; r < rows; ++r, to += padded) {
    int64_t head, query;
    row_of(a, t, r, head, query);
    std::memcpy(to, a.q + ((t.b * a.queries + query) * a.heads + head) * a.dim, 4 * a.dim);
    for (int64_t d = a.dim; d < padded; ++d) to[d] = 0.0f;
  }
}

SJ_INLINE void prefetch(const float* p, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(p + i, 0, 2);
}

// One chunk's partial for every row of a tile: top[r] (the maximum, -infinity if nothing is seen),
// sum[r], values[r][width].
inline void chunk_partial(const Attention& a, const Tile& t, int64_t chunk, const float* q,
                          int64_t padded, int64_t width, float* top, float* sum, float* values) {
  const int64_t group = a.heads / a.kv_heads, per_kv = t.queries * group;
  const int64_t rows = t.kv_count * per_kv;
  const int64_t first = chunk * kChunk, room = a.table * a.page;
  int64_t low, high, unused;
  span_of(a, a.start[t.b] + t.i0, low, unused);
  span_of(a, a.start[t.b] + t.i0 + t.queries - 1, unused, high);
  low = low > first ? low : first;
  high = high < first + kChunk ? high : first + kChunk;
  high = high < room ? high : room;
  const bool pad_keys = padded != a.dim, pad_values = width != a.value_dim;
  const int64_t ldk = a.kv_heads * a.dim, ldv = a.kv_heads * a.value_dim;
  float* logits = scratch<4>(rows * kChunk);
  float* copy = scratch<5>(a.page * (padded > width ? padded : width));
  const float infinite = std::numeric_limits<float>::infinity();

  // Where position s lies in the layer's plane, in tokens.
  auto place_of = [&](int64_t s) {
    const int64_t page = a.page_table[t.b * a.table + s / a.page];
    return (page < 0 ? 0 : page >= a.pages ? a.pages - 1 : page) * a.page + s % a.page;
  };
  // A run of keys lies within one page.
  auto runs = [&](auto&& body) {
    for (int64_t s = low; s < high;) {
      int64_t count = a.page - s % a.page;
      count = count < high - s ? count : high - s;
      body(s, count, place_of(s));
      s += count;
    }
  };
  // With few rows the memory is what takes time: values are fetched while keys are used.
  const bool ahead = t.queries <= 4;
  runs([&](int64_t s, int64_t count, int64_t at) {
    if (ahead) {
      prefetch(a.v + at * ldv + t.kv * a.value_dim, (count - 1) * ldv + t.kv_count * a.value_dim);
      if (s + count < high) {
        const int64_t left = high - s - count;
        prefetch(a.k + place_of(s + count) * ldk + t.kv * a.dim,
                 ((left < a.page ? left : a.page) - 1) * ldk + t.kv_count * a.dim);
      }
    }
    for (int64_t h = 0; h < t.kv_count; ++h) {
      const float* keys = a.k + at * ldk + (t.kv + h) * a.dim;
      int64_t ld = ldk;
      if (pad_keys) {
        for (int64_t j = 0; j < count; ++j) {
          std::memcpy(copy + j * padded, keys + j * ldk, 4 * a.dim);
          for (int64_t d = a.dim; d < padded; ++d) copy[j * padded + d] = 0.0f;
        }
        keys = copy;
        ld = padded;
      }
      dot_rows(q + h * per_kv * padded, padded, per_kv, keys, ld, padded, count,
               logits + h * per_kv * kChunk + (s - first), kChunk);
    }
  });

  for (int64_t r = 0; r < rows; ++r) {
    int64_t lo, hi;
    span_of(a, a.start[t.b] + t.i0 + r % per_kv / group, lo, hi);
    lo = (lo > first ? lo : first) - first;
    hi = (hi < first + kChunk ? hi : first + kChunk) - first;
    float* row = logits + r * kChunk;
    if (lo >= hi) {
      for (int64_t j = 0; j < kChunk; ++j) row[j] = 0.0f;
      top[r] = -infinite;
      sum[r] = 0.0f;
      continue;
    }
    for (int64_t j = 0; j < lo; ++j) row[j] = -infinite;
    for (int64_t j = hi; j < kChunk; ++j) row[j] = -infinite;
    if (a.softcap > 0) {
      for (int64_t j = lo; j < hi; ++j)
        row[j] = a.softcap * std::tanh(row[j] * a.scale / a.softcap);
    } else {
      for (int64_t j = lo; j < hi; ++j) row[j] *= a.scale;
    }
    vf most = splat(-infinite);
    for (int64_t j = 0; j < kChunk; j += V) most = vmax(most, load(row + j));
    float lanes[V];
    store(lanes, most);
    float peak = lanes[0];
    for (int j = 1; j < V; ++j) peak = lanes[j] > peak ? lanes[j] : peak;
    vf total = zero();
    for (int64_t j = 0; j < kChunk; j += V) {
      const vf weight = vexp(load(row + j) - splat(peak));
      store(row + j, weight);
      total = total + weight;
    }
    top[r] = peak;
    sum[r] = reduce(total);
  }

  // Weighted values. A row reads the values of the keys that it sees and no others (a weight of
  // zero does not hide an infinity or a NaN). Neighbouring rows share the keys that all see.
  for (int64_t i = 0; i < rows * width; ++i) values[i] = 0.0f;
  runs([&](int64_t s, int64_t count, int64_t at) {
    for (int64_t h = 0; h < t.kv_count; ++h) {
      const float* v = a.v + at * ldv + (t.kv + h) * a.value_dim;
      int64_t ld = ldv;
      if (pad_values) {
        for (int64_t j = 0; j < count; ++j) {
          std::memcpy(copy + j * width, v + j * ldv, 4 * a.value_dim);
          for (int64_t d = a.value_dim; d < width; ++d) copy[j * width + d] = 0.0f;
        }
        v = copy;
        ld = width;
      }
      const float* weights = logits + h * per_kv * kChunk - first;
      float* out = values + h * per_kv * width;
      // Rows [r0, r1) over keys [lo, hi).
      auto weigh = [&](int64_t r0, int64_t r1, int64_t lo, int64_t hi) {
        if (lo < hi)
          weigh_rows(r1 - r0, weights + r0 * kChunk + lo, kChunk, v + (lo - s) * ld, ld, hi - lo,
                     width, out + r0 * width, width);
      };
      auto clip = [&](int64_t r, int64_t& lo, int64_t& hi) {
        span_of(a, a.start[t.b] + t.i0 + r / group, lo, hi);
        lo = lo > s ? lo : s;
        hi = hi < s + count ? hi : s + count;
      };
      for (int64_t r0 = 0; r0 < per_kv; r0 += kTileM) {
        const int64_t r1 = r0 + kTileM < per_kv ? r0 + kTileM : per_kv;
        int64_t lo, hi, all_lo, all_hi, unused_lo, unused_hi;
        // Later queries begin and end later: what all see is [all_lo, all_hi).
        clip(r0, unused_lo, all_hi);
        clip(r1 - 1, all_lo, unused_hi);
        const bool common = all_lo < all_hi;
        for (int64_t r = r0; r < r1; ++r) {
          clip(r, lo, hi);
          weigh(r, r + 1, lo, common ? all_lo : hi);
        }
        if (!common) continue;
        weigh(r0, r1, all_lo, all_hi);
        for (int64_t r = r0; r < r1; ++r) {
          clip(r, lo, hi);
          weigh(r, r + 1, all_hi, hi);
        }
      }
    }
  });
}

// Adds a chunk's partial of one row to what came before.
SJ_INLINE void merge(float& top, float& sum, float* values, float chunk_top, float chunk_sum,
                     const float* chunk_values, int64_t width) {
  if (chunk_top == -std::numeric_limits<float>::infinity()) return;
  const float most = chunk_top > top ? chunk_top : top;
  const float before = exp1(top - most), here = exp1(chunk_top - most);
  top = most;
  sum = sum * before + chunk_sum * here;
  const vf vb = splat(before), vh = splat(here);
  for (int64_t i = 0; i < width; i += V)
    store(values + i, fma(load(chunk_values + i), vh, load(values + i) * vb));
}

// Divides by the sum, with the head's sink in it, and writes the row's result.
SJ_INLINE void finish(const Attention& a, const Tile& t, int64_t r, float top, float sum,
                      const float* values) {
  int64_t head, i;
  row_of(a, t, r, head, i);
  float* out = a.out + ((t.b * a.queries + i) * a.heads + head) * a.value_dim;
  float factor = 1.0f;
  if (a.sinks) {
    const float sink = a.sinks[head], most = sink > top ? sink : top;
    factor = exp1(top - most);
    sum = sum * factor + exp1(sink - most);
  }
  const float scale = sum > 0.0f ? factor / sum : sum == 0.0f ? 0.0f : sum;
  for (int64_t d = 0; d < a.value_dim; ++d) out[d] = values[d] * scale;
}

SJ_INLINE int64_t chunks_of(const Attention& a, const Tile& t, int64_t& first) {
  int64_t low, high, unused;
  span_of(a, a.start[t.b] + t.i0, low, unused);
  span_of(a, a.start[t.b] + t.i0 + t.queries - 1, unused, high);
  first = low / kChunk;
  return high > low ? (high - 1) / kChunk + 1 - first : 0;
}

template <typename Pool>
void attention(Pool& pool, int64_t threads, const Attention& a) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t padded = round_up(a.dim, V), width = round_up(a.value_dim, V);
  // Few queries: all kv heads together, so that memory is read in order.
  const int64_t per_tile = a.queries < 16 ? a.queries : 16;
  const int64_t kvs = a.queries <= 4 ? a.kv_heads : 1;
  struct Work {
    Tile tile;
    int64_t first, chunks, rows, offset;
  };
  std::vector<Work> tiles;
  int64_t partials = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t real = a.lengths[b];
    real = real < 0 ? 0 : real > a.queries ? a.queries : real;
    if (a.start[b] < 0) real = 0;
    std::memset(a.out + (b * a.queries + real) * a.heads * a.value_dim, 0,
                4 * (a.queries - real) * a.heads * a.value_dim);
    for (int64_t i = 0; i < real; i += per_tile)
      for (int64_t kv = 0; kv < a.kv_heads; kv += kvs) {
        Work w{{b, kv, kvs, i, real - i < per_tile ? real - i : per_tile}, 0, 0, 0, partials};
        w.rows = kvs * w.tile.queries * group;
        w.chunks = chunks_of(a, w.tile, w.first);
        partials += w.chunks * w.rows;
        tiles.push_back(w);
      }
  }
  const int64_t count = static_cast<int64_t>(tiles.size());
  if (partials * kChunk * (a.dim + a.value_dim) < (1 << 17)) threads = 1;

  if (count >= 4 * threads || threads <= 1) {
    // A task is a tile, the longest first.
    parallel_for(pool, count, threads, [&](int64_t task) {
      const Work& w = tiles[count - 1 - task];
      const int64_t rows = w.rows;
      float* q = scratch<2>(rows * padded);
      float* state = scratch<3>(rows * (2 * width + 4));
      float *top = state, *sum = top + rows, *chunk_top = sum + rows, *chunk_sum = chunk_top + rows;
      float *values = chunk_sum + rows, *chunk_values = values + rows * width;
      pack_queries(a, w.tile, padded, q);
      for (int64_t r = 0; r < rows; ++r) {
        top[r] = -std::numeric_limits<float>::infinity();
        sum[r] = 0.0f;
      }
      for (int64_t i = 0; i < rows * width; ++i) values[i] = 0.0f;
      for (int64_t c = 0; c < w.chunks; ++c) {
        chunk_partial(a, w.tile, w.first + c, q, padded, width, chunk_top, chunk_sum, chunk_values);
        for (int64_t r = 0; r < rows; ++r)
          merge(top[r], sum[r], values + r * width, chunk_top[r], chunk_sum[r],
                chunk_values + r * width, width);
      }
      for (int64_t r = 0; r < rows; ++r)
        finish(a, w.tile, r, top[r], sum[r], values + r * width);
    });
    return;
  }

  // Few tiles: a task is one chunk of one tile; partials are merged afterwards.
  std::vector<std::pair<int64_t, int64_t>> tasks;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < tiles[i].chunks; ++c) tasks.emplace_back(i, c);
  std::vector<float> store_of(partials * (width + 2));
  float *tops = store_of.data(), *sums = tops + partials, *all = sums + partials;
  parallel_for(pool, static_cast<int64_t>(tasks.size()), threads, [&](int64_t task) {
    const Work& w = tiles[tasks[task].first];
    const int64_t c = tasks[task].second, at = w.offset + c * w.rows;
    float* q = scratch<2>(w.rows * padded);
    pack_queries(a, w.tile, padded, q);
    chunk_partial(a, w.tile, w.first + c, q, padded, width, tops + at, sums + at, all + at * width);
  });
  std::vector<float> values(width);
  for (const Work& w : tiles) {
    for (int64_t r = 0; r < w.rows; ++r) {
      float top = -std::numeric_limits<float>::infinity(), sum = 0.0f;
      for (int64_t i = 0; i < width; ++i) values[i] = 0.0f;
      for (int64_t c = 0; c < w.chunks; ++c) {
        const int64_t at = w.offset + c * w.rows + r;
        merge(top, sum, values.data(), tops[at], sums[at], all + at * width, width);
      }
      finish(a, w.tile, r, top, sum, values.data());
    }
  }
}

// plane[page_table[b, p / page], p % page] = rows[b, i], p = start[b] + i, i < lengths[b]; entries
// of `bytes` bytes, the plane being that of the layer. Places outside it are dropped.
inline void paged_write(uint8_t* plane, const uint8_t* rows, int64_t batch, int64_t queries,
                        int64_t bytes, int64_t pages, int64_t page, int64_t table,
                        const int32_t* page_table, const int32_t* start, const int32_t* lengths) {
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t real = lengths[b] < queries ? lengths[b] : queries;
    for (int64_t i = 0; i < real;) {
      const int64_t p = static_cast<int64_t>(start[b]) + i, slot = p % page;
      if (p < 0 || p >= table * page) {
        ++i;
        continue;
      }
      const int64_t run = page - slot < real - i ? page - slot : real - i;
      const int64_t at = page_table[b * table + p / page];
      if (at >= 0 && at < pages)
        std::memcpy(plane + (at * page + slot) * bytes, rows + (b * queries + i) * bytes,
                    run * bytes);
      i += run;
    }
  }
}

}  // namespace sparkjax
