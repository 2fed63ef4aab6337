// Collective calls: their kinds, and the words for what ends a wait.

#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace sparkjax {

using Clock = std::chrono::steady_clock;

enum Kind : int64_t { kAllReduce, kAllGather, kAllToAll, kBroadcast, kBarrier };

inline std::string name_of(int64_t kind) {
  static const char* const names[] = {"all_reduce", "all_gather", "all_to_all", "broadcast",
                                      "barrier"};
  return kind >= 0 && kind <= kBarrier ? names[kind] : "?";
}

struct Failure {
  std::string message;
};

// What stopped a wait.
struct Fault {
  int32_t rank, who;
  uint32_t kind, their_kind;
  uint64_t call, bytes, their_call, their_bytes;
  double waited;  // seconds; below 0, the ranks are in different calls
  int32_t rail = -1;  // which of several was waited for

  std::string words() const {
    char text[300];
    if (waited >= 0)
      std::snprintf(text, sizeof text,
                    "%s number %llu of rank %d (%llu bytes): rank %d did not come%s in %.1f s",
                    name_of(kind).c_str(), number(call), rank, number(bytes), who,
                    rail < 0 ? "" : (" on rail " + std::to_string(rail)).c_str(), waited);
    else
      std::snprintf(text, sizeof text,
                    "rank %d is in %s number %llu of %llu bytes, rank %d in %s number %llu of "
                    "%llu bytes",
                    who, name_of(their_kind).c_str(), number(their_call), number(their_bytes), rank,
                    name_of(kind).c_str(), number(call), number(bytes));
    return text;
  }

 private:
  static unsigned long long number(uint64_t n) { return n; }
};

// How a word says that a world goes on, that its end is being written, and where it is.
constexpr uint32_t kRuns = 0, kEnding = 1, kReason = 2, kFault = 3;

}  // namespace sparkjax
