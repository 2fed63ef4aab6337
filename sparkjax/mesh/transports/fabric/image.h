// The memory picture of a world over a network: every rank has the whole of it, at an address of its
// own, and a write of rank r puts a piece of r's picture at the same place of another rank's.
//
//   control        of this rank alone: how the world ends, patience, how far the sender is
//   endings[who]   why rank `who` ended the world
//   flags          [who][slot][path]: the epoch of what has wholly come from `who` on a path
//   slots          [who][slot]: what a piece is (Details), then its payload
//
// Flags are words of 64 bytes apart, written after all that they speak of, on the same queue pair.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../calls.h"

#ifdef __CUDACC__
#define SPARKJAX_BOTH __host__ __device__
#else
#define SPARKJAX_BOTH
#endif

namespace sparkjax {

constexpr int kMostRanks = 16;
constexpr int kMostPaths = 4;  // two rails, twice where a ring goes both ways round
constexpr size_t kLine = 64, kPageBytes = 4096;

struct Control {
  std::atomic<uint32_t> state;  // kRuns, kEnding, kReason, kFault
  std::atomic<uint32_t> open;   // pieces before this epoch may be put into our slots
  std::atomic<double> seconds;  // the longest wait
  char reason[400];
  Fault fault;
};

struct Ending {
  char reason[400];
  std::atomic<uint32_t> set;
};

struct Details {
  uint32_t kind;
  int32_t root;
  uint64_t bytes;
  uint64_t call;
};

struct Image {
  char* base = nullptr;
  int rank = 0, ranks = 0, slots = 0;  // slots a rank
  size_t slot_bytes = 0;

  SPARKJAX_BOTH static size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
  SPARKJAX_BOTH static size_t endings() { return up(sizeof(Control), kPageBytes); }
  SPARKJAX_BOTH size_t flags() const { return endings() + ranks * up(sizeof(Ending), kLine); }
  SPARKJAX_BOTH size_t first_slot() const {
    return up(flags() + static_cast<size_t>(ranks) * slots * kMostPaths * kLine, kPageBytes);
  }
  SPARKJAX_BOTH size_t stride() const { return up(kLine + slot_bytes, kLine); }
  SPARKJAX_BOTH size_t bytes() const {
    return up(first_slot() + static_cast<size_t>(ranks) * slots * stride(), kPageBytes);
  }

  // Offsets, the same on every rank.
  SPARKJAX_BOTH size_t ending_at(int who) const {
    return endings() + who * up(sizeof(Ending), kLine);
  }
  SPARKJAX_BOTH int place(int who, uint32_t epoch) const {
    return who * slots + static_cast<int>(epoch % static_cast<uint32_t>(slots));
  }
  SPARKJAX_BOTH size_t flag_at(int who, uint32_t epoch, int path) const {
    return flags() + (static_cast<size_t>(place(who, epoch)) * kMostPaths + path) * kLine;
  }
  SPARKJAX_BOTH size_t details_at(int who, uint32_t epoch) const {
    return first_slot() + place(who, epoch) * stride();
  }
  SPARKJAX_BOTH size_t slot_at(int who, uint32_t epoch) const {
    return details_at(who, epoch) + kLine;
  }

  SPARKJAX_BOTH Control* control() const { return reinterpret_cast<Control*>(base); }
  SPARKJAX_BOTH Ending* ending(int who) const {
    return reinterpret_cast<Ending*>(base + ending_at(who));
  }
  SPARKJAX_BOTH Details* details(int who, uint32_t epoch) const {
    return reinterpret_cast<Details*>(base + details_at(who, epoch));
  }
  SPARKJAX_BOTH char* slot(int who, uint32_t epoch) const { return base + slot_at(who, epoch); }
  std::atomic<uint32_t>& flag(int who, uint32_t epoch, int path) const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(base + flag_at(who, epoch, path));
  }
};

static_assert(sizeof(Details) <= kLine, "details stand in front of a payload");

}  // namespace sparkjax
