// Who is reached over what: links, paths and relays, as Python lays them out (topology.py).

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "image.h"

namespace sparkjax {

constexpr uint64_t kOneRail = 16 << 10;  // up to here a payload takes one path

struct Link {
  int peer, rail;
  std::string name;  // of its device
};

// Here the payload of `origin` for `target` goes on over `link`, as the target's `path`.
struct Relay {
  int origin, target, path, link;
};

struct Topology {
  std::vector<Link> links;
  std::vector<std::vector<int>> paths;  // of every rank: the first link of each path to it
  std::vector<Relay> relays;
  int only = -1;  // a single path, for measuring it

  // Which paths carry a payload: [first, last).
  int first() const { return only < 0 ? 0 : only; }
  int last(int who, uint64_t bytes) const {
    if (only >= 0) return only + 1;
    return bytes <= kOneRail ? 1 : static_cast<int>(paths[who].size());
  }
  // The same of what is relayed: all links of a ring lead to the rank opposite.
  int last_relayed(uint64_t bytes) const {
    if (only >= 0) return only + 1;
    return bytes <= kOneRail ? 1 : static_cast<int>(links.size());
  }
  bool direct(int who) const { return links[paths[who][0]].peer == who; }
};

// The part of `bytes` that goes over path `at` of [first, last): whole lines.
struct Stripe {
  uint64_t begin, end;
};
inline Stripe stripe(uint64_t bytes, int at, int first, int last) {
  const uint64_t count = last - first, lines = (bytes + kLine - 1) / kLine;
  const uint64_t i = at - first;
  const uint64_t begin = lines * i / count * kLine, end = lines * (i + 1) / count * kLine;
  return {begin < bytes ? begin : bytes, end < bytes ? end : bytes};
}

}  // namespace sparkjax
