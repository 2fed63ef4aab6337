// A network without any: the ranks of one process write into one another's pictures.
//
// It does what a fabric may do and a test would hardly see there: a thread delivers, link by link in
// any order, the bytes of one write in any order, whenever it likes; only on one link is a write whole
// before the next begins. A write reads its source when it is delivered, not when it is handed
// over. A link can be cut: what waits on it fails.

#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "network.h"

namespace sparkjax {

class Hall {
 public:
  explicit Hall(uint64_t seed) : random_(seed), carrier_([this] { carry(); }) {}
  ~Hall() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    wake_.notify_all();
    carrier_.join();
  }

  static std::shared_ptr<Hall> named(const std::string& name, uint64_t seed) {
    static std::mutex guard;
    static std::map<std::string, std::weak_ptr<Hall>> halls;
    std::lock_guard<std::mutex> lock(guard);
    std::shared_ptr<Hall> hall = halls[name].lock();
    if (!hall) halls[name] = hall = std::make_shared<Hall>(seed);
    return hall;
  }

  void enter(int rank, char* base, const std::vector<int>& peers) {
    std::lock_guard<std::mutex> lock(mutex_);
    bases_[rank] = base;
    for (size_t l = 0; l < peers.size(); ++l)
      links_[{rank, static_cast<int>(l)}].peer = peers[l];
  }
  void leave(int rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    bases_.erase(rank);
    for (auto& [key, link] : links_)
      if (key.first == rank || link.peer == rank) link.waiting.clear();
  }

  bool write(int rank, int link, const Write& write) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      links_[{rank, link}].waiting.push_back(write);
    }
    wake_.notify_one();
    return true;
  }

  int poll(int rank, Done* done, int room) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& mine = done_[rank];
    int count = 0;
    for (; count < room && !mine.empty(); mine.pop_front()) done[count++] = mine.front();
    return count;
  }

  void cut(int rank, int link) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      links_[{rank, link}].cut = true;
    }
    wake_.notify_one();
  }

 private:
  struct Line {
    int peer = -1;
    bool cut = false;
    std::deque<Write> waiting;
  };

  void carry() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!over_) {
      std::vector<std::pair<const std::pair<int, int>, Line>*> busy;
      for (auto& entry : links_)
        if (!entry.second.waiting.empty()) busy.push_back(&entry);
      if (busy.empty()) {
        wake_.wait(lock);
        continue;
      }
      auto& [key, line] = *busy[random_() % busy.size()];
      const Write write = line.waiting.front();
      line.waiting.pop_front();
      const char* error = line.cut ? "the link was cut" : nullptr;
      if (!error && bases_.count(key.first) && bases_.count(line.peer))
        copy(bases_[line.peer] + write.to, bases_[key.first] + write.from, write.bytes);
      if (write.signal || error) done_[key.first].push_back({key.second, write.number, error});
      if (random_() % 4 == 0) {
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
      }
    }
  }

  // A flag is one store; anything larger comes last half first.
  static void copy(char* to, const char* from, uint32_t bytes) {
    if (bytes == 4) {
      uint32_t word;
      std::memcpy(&word, from, 4);
      __atomic_store_n(reinterpret_cast<uint32_t*>(to), word, __ATOMIC_RELEASE);
      return;
    }
    const uint32_t half = bytes / 2;
    std::memcpy(to + half, from + half, bytes - half);
    std::memcpy(to, from, half);
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  bool over_ = false;
  std::map<int, char*> bases_;
  std::map<std::pair<int, int>, Line> links_;
  std::map<int, std::deque<Done>> done_;
  std::mt19937_64 random_;
  std::thread carrier_;
};

class Rehearsal : public Network {
 public:
  Rehearsal(std::shared_ptr<Hall> hall, int rank) : hall_(std::move(hall)), rank_(rank) {}
  ~Rehearsal() override { hall_->leave(rank_); }
  std::string write(int link, const Write& write) override {
    return hall_->write(rank_, link, write) ? "" : "refused";
  }
  int poll(Done* done, int room) override { return hall_->poll(rank_, done, room); }
  Hall& hall() { return *hall_; }

 private:
  std::shared_ptr<Hall> hall_;
  const int rank_;
};

}  // namespace sparkjax
