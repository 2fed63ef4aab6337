// The worlds of this process and the C functions that Python calls. Included once by the library of
// each platform, which defines `attach` and `detach` for what it adds to a world.

#pragma once

#include <memory>
#include <mutex>

#include "segment.h"

namespace sparkjax {

struct World {
  Segment segment;
  uint32_t epoch = 0;
  uint64_t call = 0;
  int spins = 0;                   // polls before sleeping
  std::atomic<bool> busy{false};
  void* device = nullptr;  // what a platform keeps
  bool direct = false;     // whether GPUs read one another's memory, not the segment
};

std::string attach(World& world);  // returns "" or what went wrong
void detach(World& world);

constexpr int kWorlds = 16;
static std::unique_ptr<World> worlds[kWorlds];
static std::mutex opening;

}  // namespace sparkjax

// The handle of a new world, or -1 with a message.
extern "C" int sparkjax_shm_open(const char* name, int rank, int ranks, uint64_t slot_bytes,
                                 double seconds, double wait, int spins, uint32_t epoch,
                                 char* message, uint64_t room) {
  using namespace sparkjax;
  std::lock_guard<std::mutex> lock(opening);
  auto world = std::make_unique<World>();
  world->epoch = epoch, world->spins = spins;
  std::string error = world->segment.open(name, rank, ranks, slot_bytes, epoch, wait);
  if (error.empty()) world->segment.header->seconds[rank].store(seconds);
  if (error.empty()) error = attach(*world);
  int id = 0;
  while (id < kWorlds && worlds[id]) ++id;
  if (error.empty() && id == kWorlds) error = "too many worlds";
  if (!error.empty()) {
    std::snprintf(message, room, "%s", error.c_str());
    return -1;
  }
  worlds[id] = std::move(world);
  return id;
}

extern "C" void sparkjax_shm_abort(int id, const char* reason) {
  if (sparkjax::worlds[id]) sparkjax::worlds[id]->segment.abort(reason);
}

extern "C" void sparkjax_shm_patience(int id, double seconds) {
  if (!sparkjax::worlds[id]) return;
  sparkjax::Segment& s = sparkjax::worlds[id]->segment;
  s.header->seconds[s.rank].store(seconds);
}

extern "C" void sparkjax_shm_why(int id, char* message, uint64_t room) {
  message[0] = 0;
  if (sparkjax::worlds[id])
    std::snprintf(message, room, "%s", sparkjax::worlds[id]->segment.why().c_str());
}

extern "C" int sparkjax_shm_direct(int id) {
  return sparkjax::worlds[id] && sparkjax::worlds[id]->direct;
}

extern "C" void sparkjax_shm_close(int id) {
  std::lock_guard<std::mutex> lock(sparkjax::opening);
  if (!sparkjax::worlds[id]) return;
  sparkjax::detach(*sparkjax::worlds[id]);
  sparkjax::worlds[id]->segment.unmap();
  sparkjax::worlds[id].reset();
}
