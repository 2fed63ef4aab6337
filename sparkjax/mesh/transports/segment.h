// The shared memory of one world on one host: who has posted what, and the words that end a wait.
//
// Every rank has two slots. Epoch e goes through slot e % 2: a rank puts its payload there and then
// its post, and reads the others' once their posts say e. A rank that posts e + 2 has seen all
// posts of e + 1, which each rank made after it had read everything of e: so a slot is never
// written while somebody reads it.

#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>

#include "calls.h"

namespace sparkjax {

constexpr uint64_t kMagic = 0x73706b6a73686d31;  // "spkjshm1"
constexpr int kMaxRanks = 64;
constexpr size_t kPage = 4096;

struct alignas(64) Post {
  std::atomic<uint32_t> epoch;
  uint32_t kind;
  uint64_t bytes;
  uint64_t call;
};

struct Header {
  std::atomic<uint64_t> magic;
  uint64_t ranks;
  uint64_t slot_bytes;
  std::atomic<uint32_t> joined;
  std::atomic<uint32_t> aborted;
  std::atomic<double> seconds[kMaxRanks];  // each rank's longest wait
  char reason[400];
  Fault fault;
  Post posts[kMaxRanks][2];
};

inline size_t header_bytes() { return (sizeof(Header) + kPage - 1) / kPage * kPage; }

inline void wake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sleeps while *word is `seen`, at most `ms`.
inline void doze(std::atomic<uint32_t>* word, uint32_t seen, int ms) {
  timespec limit{ms / 1000, (ms % 1000) * 1000000L};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

struct Segment {
  Header* header = nullptr;
  char* slots = nullptr;
  size_t size = 0;
  int rank = 0, ranks = 0;
  size_t slot_bytes = 0;

  Post& post(int who, uint32_t epoch) { return header->posts[who][epoch & 1]; }
  char* slot(int who, uint32_t epoch) { return slots + (who * 2 + (epoch & 1)) * slot_bytes; }

  // Maps the segment; rank 0 makes it. Returns "" or what went wrong.
  std::string open(const char* name, int rank_, int ranks_, size_t slot_bytes_, uint32_t epoch,
                   double seconds) {
    rank = rank_, ranks = ranks_, slot_bytes = slot_bytes_;
    size = header_bytes() + static_cast<size_t>(ranks) * 2 * slot_bytes;
    const auto until = Clock::now() + std::chrono::duration<double>(seconds);
    int fd = -1;
    if (rank == 0) {
      fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
      if (fd < 0) return failed("cannot make", name);
      // Reserved now: a page that does not exist when it is touched would be a SIGBUS.
      if (int error = posix_fallocate(fd, 0, static_cast<off_t>(size))) {
        errno = error;
        std::string why = failed("cannot reserve", name);
        close(fd), shm_unlink(name);
        return why + " (" + std::to_string(size >> 20) + " MiB in /dev/shm)";
      }
    } else {
      while (true) {
        struct stat info {};
        fd = shm_open(name, O_RDWR, 0600);
        if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size == static_cast<off_t>(size)) break;
        if (fd >= 0) close(fd);
        else if (errno != ENOENT) return failed("cannot open", name);
        if (Clock::now() > until) return "rank 0 did not make shared memory of this size in time";
        usleep(2000);
      }
    }
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) return failed("cannot map", name);
    header = static_cast<Header*>(base);
    slots = static_cast<char*>(base) + header_bytes();
    if (rank == 0) {
      header->ranks = ranks, header->slot_bytes = slot_bytes;
      for (auto& posts : header->posts)
        for (auto& p : posts) p.epoch.store(epoch - 2, std::memory_order_relaxed);
      header->magic.store(kMagic, std::memory_order_release);
    }
    while (header->magic.load(std::memory_order_acquire) != kMagic) {
      if (Clock::now() > until) return "rank 0 did not prepare the shared memory in time";
      usleep(1000);
    }
    if (header->ranks != static_cast<uint64_t>(ranks) || header->slot_bytes != slot_bytes)
      return "this shared memory belongs to a world of another shape";
    header->joined.fetch_add(1, std::memory_order_acq_rel);
    wake(&header->joined);
    uint32_t here;
    while ((here = header->joined.load(std::memory_order_acquire)) < header->ranks) {
      if (Clock::now() > until)
        return std::to_string(here) + " of " + std::to_string(ranks) + " ranks joined in time";
      doze(&header->joined, here, 50);
    }
    if (rank == 0) shm_unlink(name);  // all have it: nothing stays behind, whoever dies
    return "";
  }

  void unmap() {
    if (header) munmap(header, size);
    header = nullptr;
  }

  // Ends all waits, everywhere; the first reason stands.
  void abort(const char* reason) {
    uint32_t running = kRuns;
    if (header->aborted.compare_exchange_strong(running, kEnding)) {
      std::snprintf(header->reason, sizeof(header->reason), "%s", reason);
      header->aborted.store(kReason, std::memory_order_release);
    }
    for (auto& posts : header->posts)
      for (auto& p : posts) wake(&p.epoch);
  }

  std::string why() {
    const uint32_t state = header->aborted.load(std::memory_order_acquire);
    return state == kReason ? std::string(header->reason)
           : state == kFault ? header->fault.words()
                             : "";
  }

 private:
  static std::string failed(const char* what, const char* name) {
    return std::string(what) + " shared memory " + name + ": " + std::strerror(errno);
  }
};

}  // namespace sparkjax
