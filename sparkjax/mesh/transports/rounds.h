// How a collective of any size goes through slots of one size, on a CPU.
//
// An array goes in pieces, each with a number of its own (its epoch). A rank has 2 `window` slots
// and puts piece e into slot e % (2 window). It posts e only after it has folded e - window; every
// other rank posted that one after it had folded e - 2 window. So when a slot is written again,
// everybody has read what was in it, and up to `window` pieces are under way without a word more.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "calls.h"
#include "sums.h"

namespace sparkjax {

// What one rank gives in a piece.
struct Piece {
  int64_t kind;
  uint64_t bytes;  // of an all_to_all, for each rank
  int root;
};

// x and y in bytes: what one rank gives and gets. `W` has rank, ranks, window, slot_bytes, epoch
// (of the next piece) and
//   char* slot(who, epoch);        where the payload of a rank lies
//   void open(epoch, piece);       waits until our own slot may be written
//   void post(epoch, piece);       shows what is in our slot to the others
//   void await(epoch, piece);      waits until all have posted
// of which the waits throw Failure.
template <class W>
void run(W& w, int64_t kind, const char* x, char* y, int64_t bytes, int root, bool half) {
  const int64_t ranks = w.ranks;
  // Of an all_to_all each rank gives every other one its own part.
  const int64_t part = kind == kAllToAll ? bytes / ranks : bytes;
  int64_t most = static_cast<int64_t>(w.slot_bytes);
  if (kind == kAllToAll) most = most / ranks / 64 * 64;
  const int64_t pieces = std::max<int64_t>(1, (part + most - 1) / most);
  const uint32_t first = w.epoch;

  const auto stage = [&](int64_t i) {
    const uint32_t epoch = first + static_cast<uint32_t>(i);
    const int64_t at = i * most, n = std::min(most, part - at);
    const Piece piece{kind, static_cast<uint64_t>(n), root};
    w.open(epoch, piece);
    char* mine = w.slot(w.rank, epoch);
    if (kind == kAllToAll)
      for (int64_t r = 0; r < ranks; ++r) std::memcpy(mine + r * n, x + r * part + at, n);
    else if (kind != kBarrier && (kind != kBroadcast || w.rank == root))
      std::memcpy(mine, x + at, n);
    w.post(epoch, piece);
  };
  const auto fold = [&](int64_t i) {
    const uint32_t epoch = first + static_cast<uint32_t>(i);
    const int64_t at = i * most, n = std::min(most, part - at);
    w.await(epoch, Piece{kind, static_cast<uint64_t>(n), root});
    const auto slot = [&](int64_t who) { return w.slot(static_cast<int>(who), epoch); };
    if (kind == kAllReduce) sum(slot, w.ranks, n, y + at, half);
    if (kind == kAllGather)
      for (int64_t r = 0; r < ranks; ++r) std::memcpy(y + r * part + at, slot(r), n);
    if (kind == kAllToAll)
      for (int64_t r = 0; r < ranks; ++r)
        std::memcpy(y + r * part + at, slot(r) + w.rank * n, n);
    if (kind == kBroadcast) std::memcpy(y + at, slot(root), n);
    if (kind == kBarrier) std::memcpy(y + at, x + at, n);
  };

  for (int64_t i = 0; i < pieces + w.window - 1; ++i) {
    if (i < pieces) stage(i);
    if (i >= w.window - 1) fold(i - w.window + 1);
  }
  w.epoch = first + static_cast<uint32_t>(pieces);
}

}  // namespace sparkjax
