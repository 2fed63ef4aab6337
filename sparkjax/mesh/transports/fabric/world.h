// One rank's end of a world over a network, and the C functions that Python calls. Included once by
// the library of each platform, which defines `attach` and `detach` for what it adds.

#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "../rounds.h"
#include "image.h"
#include "rehearsal.h"
#include "sender.h"
#ifdef SPARKJAX_VERBS
#include "verbs.h"
#endif

namespace sparkjax {

struct World {
  Image image;
  std::unique_ptr<Sender> sender;
  std::unique_ptr<Network> network;
  int rank = 0, ranks = 0, window = 0, spins = 0;
  size_t slot_bytes = 0;
  uint32_t epoch = 0;
  uint64_t call = 0;
  std::atomic<bool> busy{false};
  void* device = nullptr;  // what a platform keeps

  ~World() {
    network.reset();
    if (image.base) munmap(image.base, image.bytes());
  }

  // --- What `run` wants ---------------------------------------------------------------------------

  char* slot(int who, uint32_t e) const { return image.slot(who, e); }

  void open(uint32_t e, const Piece& piece) {
    Wait wait(*this);
    do {  // at least one look: the world may have ended since the last call
      if (wait.over())
        end(about(piece) + ": " + sender->behind() + " did not end in " + wait.seconds());
    } while (!sender->open(e));
  }

  void post(uint32_t e, const Piece& piece) {
    Details* details = image.details(rank, e);
    *details = {static_cast<uint32_t>(piece.kind), piece.root, piece.bytes, call};
    image.flag(rank, e, 0).store(e, std::memory_order_release);
    sender->post(e, piece);
  }

  void await(uint32_t e, const Piece& piece) {
    Wait wait(*this);
    const uint32_t kind = static_cast<uint32_t>(piece.kind);
    const Topology& topology = sender->topology();
    for (int who = 0; who < ranks; ++who) {
      if (who == rank) continue;
      const int first = topology.first();
      const bool silent = kind == kBarrier || (kind == kBroadcast && who != piece.root);
      const int last = topology.last(who, silent ? 0 : piece.bytes);
      for (int path = first; path < last; ++path) {
        while (image.flag(who, e, path).load(std::memory_order_acquire) != e)
          if (wait.over()) {
            const int rail = last - first > 1 ? topology.links[topology.paths[who][path]].rail : -1;
            end(Fault{rank, who, kind, 0, call, piece.bytes, 0, 0, wait.waited, rail}.words());
          }
        if (path != first) continue;
        const Details& theirs = *image.details(who, e);
        if (theirs.kind != kind || theirs.bytes != piece.bytes || theirs.call != call)
          end(Fault{rank, who, kind, theirs.kind, call, piece.bytes, theirs.call, theirs.bytes, -1}
                  .words());
      }
    }
    while (!sender->settled(e))  // what others need must not wait for our next call
      if (wait.over())
        end(about(piece) + ": " + sender->behind() + " did not go out in " + wait.seconds());
  }

  // --- The end ------------------------------------------------------------------------------------

  // Ends all waits here and tells the neighbours; the first reason stands.
  void abort(const std::string& reason) {
    Control* control = image.control();
    uint32_t running = kRuns;
    if (!control->state.compare_exchange_strong(running, kEnding)) return;
    std::snprintf(control->reason, sizeof control->reason, "%s", reason.c_str());
    control->state.store(kReason, std::memory_order_release);
    tell();
  }

  void tell() {
    Ending* mine = image.ending(rank);
    std::snprintf(mine->reason, sizeof mine->reason, "%s", why().c_str());
    mine->set.store(1, std::memory_order_release);
    sender->tell();
  }

  std::string why() const {
    const Control* control = image.control();
    const uint32_t state = control->state.load(std::memory_order_acquire);
    return state == kReason ? std::string(control->reason)
           : state == kFault ? control->fault.words()
                             : "";
  }

  [[noreturn]] void end(const std::string& reason) {
    abort(reason);
    stop();
  }

  [[noreturn]] void stop() {
    const auto& state = image.control()->state;
    for (int i = 0; i < 1000 && state.load() == kEnding; ++i) sched_yield();
    throw Failure{why()};
  }

  // What another rank or the network has to say of the end, or "".
  std::string ending() {
    for (int who = 0; who < ranks; ++who)
      if (who != rank && image.ending(who)->set.load(std::memory_order_acquire))
        return image.ending(who)->reason;
    return sender->failure();
  }

 private:
  std::string about(const Piece& piece) const {
    return name_of(piece.kind) + " number " + std::to_string(call) + " of rank " +
           std::to_string(rank) + " (" + std::to_string(piece.bytes) + " bytes)";
  }

  // Between two looks at a word: keeps the sender going, and sees to it that a wait has an end.
  struct Wait {
    World& world;
    const Clock::time_point begun = Clock::now();
    int polls = 0;
    double waited = 0;

    explicit Wait(World& w) : world(w) {}

    bool over() {
      world.sender->pump();
      if (world.image.control()->state.load(std::memory_order_acquire) != kRuns) world.stop();
      if (const std::string said = world.ending(); !said.empty()) world.end(said);
      if (++polls < world.spins || polls == 1) return false;
      waited = std::chrono::duration<double>(Clock::now() - begun).count();
      // An eighth of what was waited so far: little is added, and the core is free for whoever has
      // to come.
      if (polls % 2) sched_yield();
      else usleep(static_cast<useconds_t>(std::clamp(waited * 125e3, 20.0, 1000.0)));
      return waited > world.image.control()->seconds.load();
    }
    std::string seconds() const {
      char text[40];
      std::snprintf(text, sizeof text, "%.1f s", waited);
      return text;
    }
  };
};

std::string attach(World& world, int core);  // returns "" or what went wrong
void detach(World& world);

constexpr int kWorlds = 64;
static std::unique_ptr<World> worlds[kWorlds];
static std::mutex opening;

inline World* world_of(int64_t id) {
  return id >= 0 && id < kWorlds ? worlds[id].get() : nullptr;
}

// A collective between host arrays. "" or why it failed.
inline std::string on_host(World& w, int64_t kind, const char* x, char* y, int64_t bytes, int root,
                           bool half) {
  if (w.busy.exchange(true)) {
    w.abort("two collectives of one program ran at the same time: chain them");
    return w.why();
  }
  std::string error;
  try {
    run(w, kind, x, y, bytes, root, half);
    ++w.call;
  } catch (const Failure& failure) {
    error = failure.message.empty() ? "the world has ended" : failure.message;
  }
  w.busy.store(false);
  return error;
}

}  // namespace sparkjax

// As in native.py.
struct SparkjaxFabricShape {
  int32_t rank, ranks, window, spins;
  uint64_t slot_bytes;
  double seconds, bytes_a_second;
  uint32_t epoch;
  int32_t links, relays;
  const int32_t *peers, *rails;      // of links
  const char* const* names;          // of links
  const int32_t* paths;              // [ranks][kMostPaths]: a link, or -1
  const int32_t* relay;              // [relays][4]: origin, target, path, link
};

// The handle of a new world, or -1 with a message.
extern "C" int sparkjax_fabric_open(const SparkjaxFabricShape* shape, char* message,
                                    uint64_t room) {
  using namespace sparkjax;
  std::lock_guard<std::mutex> lock(opening);
  int id = 0;
  while (id < kWorlds && worlds[id]) ++id;
  if (id == kWorlds) {
    std::snprintf(message, room, "too many worlds");
    return -1;
  }
  auto w = std::make_unique<World>();
  w->rank = shape->rank, w->ranks = shape->ranks, w->window = shape->window;
  w->spins = shape->spins, w->slot_bytes = shape->slot_bytes, w->epoch = shape->epoch;
  Image image{nullptr, shape->rank, shape->ranks, 2 * shape->window, shape->slot_bytes};
  void* base = mmap(nullptr, image.bytes(), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (base == MAP_FAILED) {
    std::snprintf(message, room, "no memory for %zu bytes of slots: %s", image.bytes(),
                  std::strerror(errno));
    return -1;
  }
  madvise(base, image.bytes(), MADV_DONTFORK);  // a child must not move pages that are registered
  image.base = static_cast<char*>(base);
  w->image = image;
  new (image.control()) Control{};
  image.control()->seconds.store(shape->seconds);
  image.control()->open.store(shape->epoch);
  for (int who = 0; who < image.ranks; ++who)
    for (int i = 0; i < image.slots; ++i)  // no epoch that is soon waited for
      for (int path = 0; path < kMostPaths; ++path)
        image.flag(who, shape->epoch + i, path).store(shape->epoch + i - image.slots);
  Topology topology;
  for (int l = 0; l < shape->links; ++l)
    topology.links.push_back({shape->peers[l], shape->rails[l], shape->names[l]});
  topology.paths.resize(image.ranks);
  for (int who = 0; who < image.ranks; ++who)
    for (int path = 0; path < kMostPaths; ++path)
      if (int link = shape->paths[who * kMostPaths + path]; link >= 0)
        topology.paths[who].push_back(link);
  for (int r = 0; r < shape->relays; ++r) {
    const int32_t* relay = shape->relay + 4 * r;
    topology.relays.push_back({relay[0], relay[1], relay[2], relay[3]});
  }
  w->sender = std::make_unique<Sender>(image, std::move(topology), shape->window,
                                       shape->bytes_a_second, shape->epoch);
  worlds[id] = std::move(w);
  return id;
}

// Where the picture lies, to be registered.
extern "C" uint64_t sparkjax_fabric_base(int id) {
  return reinterpret_cast<uint64_t>(sparkjax::worlds[id]->image.base);
}
extern "C" uint64_t sparkjax_fabric_bytes(int id) { return sparkjax::worlds[id]->image.bytes(); }

#ifdef SPARKJAX_VERBS
// The queue pairs of all links.
extern "C" void sparkjax_fabric_connect(int id, const sparkjax::End* ends, int count) {
  using namespace sparkjax;
  World& w = *worlds[id];
  w.network = std::make_unique<Verbs>(w.image.base, std::vector<End>(ends, ends + count));
  w.sender->connect(w.network.get());
}
#endif

// A network in this process instead (rehearsal.h).
extern "C" void sparkjax_fabric_rehearse(int id, const char* hall, uint64_t seed) {
  using namespace sparkjax;
  World& w = *worlds[id];
  auto network = std::make_unique<Rehearsal>(Hall::named(hall, seed), w.rank);
  std::vector<int> peers;
  for (const Link& link : w.sender->topology().links) peers.push_back(link.peer);
  network->hall().enter(w.rank, w.image.base, peers);
  w.network = std::move(network);
  w.sender->connect(w.network.get());
}
extern "C" void sparkjax_fabric_cut(int id, int link) {
  using namespace sparkjax;
  if (auto* network = dynamic_cast<Rehearsal*>(worlds[id]->network.get()))
    network->hall().cut(worlds[id]->rank, link);
}

// A collective between host arrays, before `start`. 0, or -1 with a message.
extern "C" int sparkjax_fabric_on_host(int id, int64_t kind, const void* x, void* y, int64_t bytes,
                                       int root, int half, char* message, uint64_t room) {
  const std::string error =
      sparkjax::on_host(*sparkjax::worlds[id], kind, static_cast<const char*>(x),
                        static_cast<char*>(y), bytes, root, half != 0);
  std::snprintf(message, room, "%s", error.c_str());
  return error.empty() ? 0 : -1;
}

// All payloads over one path from now on, or (below 0) over all. A barrier must follow.
extern "C" void sparkjax_fabric_only(int id, int path) {
  sparkjax::worlds[id]->sender->only(path);
}

// From here on programs of the platform may call. `core` is for the thread that sends for a GPU; below
// 0, any. "" or a message.
extern "C" void sparkjax_fabric_start(int id, int core, char* message, uint64_t room) {
  std::snprintf(message, room, "%s", sparkjax::attach(*sparkjax::worlds[id], core).c_str());
}

extern "C" void sparkjax_fabric_abort(int id, const char* reason) {
  if (auto* w = sparkjax::world_of(id)) w->abort(reason);
}

extern "C" void sparkjax_fabric_patience(int id, double seconds) {
  if (auto* w = sparkjax::world_of(id)) w->image.control()->seconds.store(seconds);
}

extern "C" void sparkjax_fabric_why(int id, char* message, uint64_t room) {
  message[0] = 0;
  if (auto* w = sparkjax::world_of(id)) std::snprintf(message, room, "%s", w->why().c_str());
}

// Waits until what was written has gone, at most `seconds`; then no picture is written any more.
extern "C" void sparkjax_fabric_close(int id, double seconds) {
  using namespace sparkjax;
  std::lock_guard<std::mutex> lock(opening);
  World* w = world_of(id);
  if (!w) return;
  detach(*w);
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  while (w->network && w->why().empty() && w->sender->failure().empty() && !w->sender->finished() &&
         Clock::now() < until) {
    w->sender->pump();
    usleep(20);
  }
  worlds[id].reset();
}
