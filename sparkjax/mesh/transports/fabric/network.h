// What a sender needs of a network: ordered queues of writes (links) into other ranks' pictures.

#pragma once

#include <cstdint>
#include <string>

namespace sparkjax {

// `bytes` from offset `from` of our picture to offset `to` of the picture at the link's other end.
struct Write {
  uint64_t from, to;
  uint32_t bytes;
  bool signal;      // tell when it, and all before it on this link, have been done
  uint64_t number;  // rises on each link
};

struct Done {
  int link;
  uint64_t number;
  const char* error;  // null, or what went wrong
};

class Network {
 public:
  virtual ~Network() = default;
  // Hands a write over; what it reads must stay as it is until it is done. "" or what went wrong.
  virtual std::string write(int link, const Write& write) = 0;
  // Fills `done` with at most `room` entries; returns how many.
  virtual int poll(Done* done, int room) = 0;
};

}  // namespace sparkjax
