// Sends pieces, relays those of neighbours, paces and bounds what is under way.
//
// One lock guards it: a collective (or the proxy of a GPU) pumps it, and any thread may end the
// world through it.

#pragma once

#include <algorithm>
#include <deque>
#include <mutex>
#include <vector>

#include "../rounds.h"
#include "image.h"
#include "network.h"
#include "topology.h"

namespace sparkjax {

constexpr uint64_t kChunk = 64 << 10;  // bytes of one write: what pacing goes by
constexpr uint64_t kDepth = 48;        // writes under way on a link

class Sender {
 public:
  Sender(Image image, Topology topology, int window, double bytes_a_second, uint32_t epoch)
      : image_(image), topology_(std::move(topology)), window_(window), rate_(bytes_a_second),
        queues_(topology_.links.size()), relayed_(image.ranks, epoch) {
    for (Queue& queue : queues_) queue.used.resize(image.ranks * image.slots, 0);
  }

  const Topology& topology() const { return topology_; }
  void connect(Network* network) { network_ = network; }
  void only(int path) {
    std::lock_guard<std::mutex> lock(mutex_);
    topology_.only = path;
  }

  // What is in our slot of `epoch`, to all ranks.
  void post(uint32_t epoch, const Piece& piece) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int me = image_.rank;
    const uint64_t bytes = carried(piece, me);
    for (int l = 0; l < static_cast<int>(queues_.size()); ++l) {
      const int peer = topology_.links[l].peer;
      const int first = topology_.first(), last = topology_.last(peer, bytes);
      for (int path = first; path < last; ++path) {
        if (topology_.paths[peer][path] != l) continue;
        payload(l, me, epoch, piece, peer, bytes, path, first, last);
        if (piece.kind == kAllToAll) relayed_parts(l, epoch, piece, bytes);
        flag(l, me, epoch, path);
      }
    }
    move();
  }

  // Takes in what has been done, relays what has come, hands over what may go.
  void pump() {
    std::lock_guard<std::mutex> lock(mutex_);
    Done done[32];
    const int count = network_->poll(done, 32);
    for (int i = 0; i < count; ++i) {
      Queue& queue = queues_[done[i].link];
      queue.done = std::max(queue.done, done[i].number);
      if (done[i].error) fail(done[i].link, done[i].error);
    }
    relay();
    move();
  }

  // Whether our slot may take piece `epoch`: nothing of it is still being read, here or (of what we
  // relay) by our writes of a window ago.
  bool open(uint32_t epoch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!read(image_.rank, epoch)) return false;
    for (const Relay& r : topology_.relays) {
      const uint32_t before = epoch - window_;
      if (static_cast<int32_t>(before - relayed_[r.origin]) >= 0 || !read(r.origin, before))
        return false;
    }
    return true;
  }

  // Whether all that others need of piece `epoch` has been handed to the network: ours, and what we
  // relay.
  bool settled(uint32_t epoch) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Relay& r : topology_.relays)
      if (static_cast<int32_t>(epoch - relayed_[r.origin]) >= 0) return false;
    return std::all_of(queues_.begin(), queues_.end(), [](auto& q) { return q.waiting.empty(); });
  }
  // Whether the network has done all of it.
  bool finished() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::all_of(queues_.begin(), queues_.end(),
                       [](auto& q) { return q.waiting.empty() && q.done >= q.signalled; });
  }

  // "" or what went wrong, with the rank and the rail.
  std::string failure() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

  // Which link still holds back piece `epoch`, in words.
  std::string behind() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t l = 0; l < queues_.size(); ++l)
      if (queues_[l].done < queues_[l].signalled || !queues_[l].waiting.empty())
        return "a write to " + words(static_cast<int>(l));
    return "a relayed piece";
  }

  // Tells the neighbours that the world has ended. Past all queues: nobody reads what they hold.
  void tell() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!network_) return;
    const uint64_t at = image_.ending_at(image_.rank), word = offsetof(Ending, set);
    std::vector<bool> told(image_.ranks, false);
    for (int l = 0; l < static_cast<int>(queues_.size()); ++l) {
      Queue& queue = queues_[l];
      if (told[topology_.links[l].peer]) continue;
      queue.waiting.clear();
      const Write text{at, at, static_cast<uint32_t>(word), false, ++queue.last};
      const Write set{at + word, at + word, 4, true, ++queue.last};
      told[topology_.links[l].peer] =
          network_->write(l, text).empty() && network_->write(l, set).empty();
    }
  }

 private:
  struct Queue {
    std::deque<Write> waiting;
    uint64_t last = 0, done = 0, signalled = 0;  // numbers of writes
    std::vector<uint64_t> used;  // by place: the last write that reads it
    Clock::time_point next{};
  };

  // Payload bytes that `who` gives to any one rank.
  static uint64_t carried(const Piece& piece, int who) {
    if (piece.kind == kBarrier || (piece.kind == kBroadcast && who != piece.root)) return 0;
    return piece.bytes;
  }

  void payload(int l, int origin, uint32_t epoch, const Piece& piece, int target, uint64_t bytes,
               int path, int first, int last) {
    const Stripe part = stripe(bytes, path, first, last);
    const uint64_t skip = piece.kind == kAllToAll ? target * piece.bytes : 0;
    uint64_t begin = image_.slot_at(origin, epoch) + skip + part.begin;
    const uint64_t end = image_.slot_at(origin, epoch) + skip + part.end;
    if (path == first) {
      if (skip) add(l, image_.details_at(origin, epoch), kLine, origin, epoch);
      else begin = image_.details_at(origin, epoch);
    }
    add(l, begin, end - begin, origin, epoch);
  }

  // Our parts for ranks behind link l, in the neighbour's copy of our slot.
  void relayed_parts(int l, uint32_t epoch, const Piece& piece, uint64_t bytes) {
    for (int far = 0; far < image_.ranks; ++far) {
      if (far == image_.rank || topology_.direct(far)) continue;
      const int first = topology_.first(), last = topology_.last(far, bytes);
      for (int path = first; path < last; ++path) {
        if (topology_.paths[far][path] != l) continue;
        const Stripe part = stripe(bytes, path, first, last);
        const uint64_t at = image_.slot_at(image_.rank, epoch) + far * piece.bytes;
        add(l, at + part.begin, part.end - part.begin, image_.rank, epoch);
      }
    }
  }

  void flag(int l, int origin, uint32_t epoch, int path) {
    Write write{image_.flag_at(origin, epoch, own_flag(origin)),
                image_.flag_at(origin, epoch, path), 4, true, 0};
    enqueue(l, write, origin, epoch);
  }

  // The word of our picture that holds the epoch of what `origin` sent: our own is our first.
  int own_flag(int origin) const { return origin == image_.rank ? 0 : topology_.first(); }

  void add(int l, uint64_t at, uint64_t bytes, int origin, uint32_t epoch) {
    for (uint64_t done = 0; done < bytes; done += kChunk) {
      const uint64_t n = std::min(kChunk, bytes - done);
      enqueue(l, Write{at + done, at + done, static_cast<uint32_t>(n), false, 0}, origin, epoch);
    }
  }

  void enqueue(int l, Write write, int origin, uint32_t epoch) {
    Queue& queue = queues_[l];
    write.number = ++queue.last;
    queue.used[image_.place(origin, epoch)] = write.number;
    queue.waiting.push_back(write);
  }

  void relay() {
    for (int origin = 0; origin < image_.ranks; ++origin) {
      if (std::none_of(topology_.relays.begin(), topology_.relays.end(),
                       [&](const Relay& r) { return r.origin == origin; }))
        continue;
      const uint32_t epoch = relayed_[origin];
      if (!came(origin, epoch, topology_.first())) continue;
      const Details& d = *image_.details(origin, epoch);
      const Piece piece{d.kind, d.bytes, d.root};
      const uint64_t bytes = carried(piece, origin);
      bool all = true;
      for (int path = topology_.first(); path < topology_.last(origin, bytes); ++path)
        all = all && came(origin, epoch, path);
      if (!all) continue;
      for (const Relay& r : topology_.relays) {
        const int first = topology_.first(), last = topology_.last_relayed(bytes);
        if (r.origin != origin || r.path < first || r.path >= last) continue;
        payload(r.link, origin, epoch, piece, r.target, bytes, r.path, first, last);
        flag(r.link, origin, epoch, r.path);
      }
      ++relayed_[origin];
    }
  }

  bool came(int origin, uint32_t epoch, int path) const {
    return image_.flag(origin, epoch, path).load(std::memory_order_acquire) == epoch;
  }

  // Whether no write under way or waiting reads the slot.
  bool read(int who, uint32_t epoch) const {
    const int place = image_.place(who, epoch);
    return std::all_of(queues_.begin(), queues_.end(),
                       [&](const Queue& q) { return q.used[place] <= q.done; });
  }

  void move() {
    for (int l = 0; l < static_cast<int>(queues_.size()); ++l) {
      Queue& queue = queues_[l];
      while (!queue.waiting.empty() && failure_.empty()) {
        Write& write = queue.waiting.front();
        if (write.number - queue.done > kDepth) break;
        if (rate_ > 0) {
          const auto now = Clock::now();
          if (now < queue.next) break;
          const std::chrono::duration<double> takes(write.bytes / rate_);
          queue.next = std::max(now, queue.next) + std::chrono::duration_cast<Clock::duration>(takes);
        }
        write.signal = write.signal || write.number % 8 == 0;
        const std::string error = network_->write(l, write);
        if (!error.empty()) fail(l, error.c_str());
        if (write.signal) queue.signalled = write.number;
        queue.waiting.pop_front();
      }
    }
  }

  std::string words(int l) const {
    const Link& link = topology_.links[l];
    return "rank " + std::to_string(link.peer) + " on rail " + std::to_string(link.rail) + " (" +
           link.name + ")";
  }

  void fail(int l, const char* error) {
    if (failure_.empty())
      failure_ = "rank " + std::to_string(image_.rank) + ": a write to " + words(l) +
                 " failed: " + error;
  }

  Image image_;
  Topology topology_;
  const int window_;
  const double rate_;  // bytes a second and link; 0 is as fast as it goes
  Network* network_ = nullptr;
  std::vector<Queue> queues_;
  std::vector<uint32_t> relayed_;  // of every origin: the next epoch to relay
  std::string failure_;
  std::mutex mutex_;
};

}  // namespace sparkjax
