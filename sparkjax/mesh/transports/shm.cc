// Collectives between the processes of one host, as XLA FFI calls on a CPU.
//
// Sums run in rank order in float32 on every rank, so all hold the same bits. Calls of one program
// must depend on one another: a second call that begins before the first has ended is an error, as
// is a call of another kind or size than the other ranks make.

#include <algorithm>

#include "world.h"
#include "xla/ffi/api/ffi.h"

namespace sparkjax {
namespace {

namespace ffi = xla::ffi;

struct Failure {
  std::string message;
};

// One piece of a collective: the payload is in our slot; posts it and waits for all the others.
void exchange(World& w, int64_t kind, uint64_t bytes) {
  Segment& s = w.segment;
  const uint32_t epoch = w.epoch;
  Post& mine = s.post(s.rank, epoch);
  mine.kind = static_cast<uint32_t>(kind), mine.bytes = bytes, mine.call = w.call;
  mine.epoch.store(epoch, std::memory_order_release);
  wake(&mine.epoch);
  const auto begun = Clock::now();
  for (int who = 0; who < s.ranks; ++who) {
    Post& post = s.post(who, epoch);
    int polls = 0;
    while (post.epoch.load(std::memory_order_acquire) != epoch) {
      if (s.header->aborted.load(std::memory_order_acquire)) {
        for (int i = 0; i < 1000 && s.header->aborted.load() == kEnding; ++i) sched_yield();
        throw Failure{s.why()};
      }
      if (++polls < w.spins) continue;
      const uint32_t seen = post.epoch.load(std::memory_order_acquire);
      if (seen == epoch) break;
      doze(&post.epoch, seen, 20);
      const double waited = std::chrono::duration<double>(Clock::now() - begun).count();
      if (waited > s.header->seconds[s.rank].load() && post.epoch.load(std::memory_order_acquire) != epoch) {
        s.abort(Fault{s.rank, who, mine.kind, 0, w.call, bytes, 0, 0, waited}.words().c_str());
        throw Failure{s.why()};
      }
    }
    if (post.kind != static_cast<uint32_t>(kind) || post.bytes != bytes || post.call != w.call) {
      const Fault fault{s.rank, who, mine.kind, post.kind, w.call, bytes, post.call, post.bytes, -1};
      s.abort(fault.words().c_str());
      throw Failure{s.why()};
    }
  }
  ++w.epoch;
}

float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To the nearest bfloat16, ties to even.
uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void sum(World& w, uint32_t epoch, int64_t bytes, char* out, bool half) {
  Segment& s = w.segment;
  if (!half) {
    const int64_t n = bytes / 4;
    float* y = reinterpret_cast<float*>(out);
    std::memcpy(y, s.slot(0, epoch), bytes);
    for (int who = 1; who < s.ranks; ++who) {
      const float* x = reinterpret_cast<const float*>(s.slot(who, epoch));
      for (int64_t i = 0; i < n; ++i) y[i] = y[i] + x[i];
    }
    return;
  }
  constexpr int64_t kBlock = 2048;
  float total[kBlock];
  const int64_t n = bytes / 2;
  uint16_t* y = reinterpret_cast<uint16_t*>(out);
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t m = std::min(kBlock, n - at);
    for (int who = 0; who < s.ranks; ++who) {
      const uint16_t* x = reinterpret_cast<const uint16_t*>(s.slot(who, epoch)) + at;
      if (who == 0)
        for (int64_t i = 0; i < m; ++i) total[i] = widen(x[i]);
      else
        for (int64_t i = 0; i < m; ++i) total[i] = total[i] + widen(x[i]);
    }
    for (int64_t i = 0; i < m; ++i) y[at + i] = narrow(total[i]);
  }
}

// x and y in bytes: what one rank gives and gets.
void run(World& w, int64_t kind, const char* x, char* y, int64_t bytes, int64_t root, bool half) {
  Segment& s = w.segment;
  const int64_t ranks = s.ranks;
  // Of an all_to_all each rank gives every other one its own part.
  const int64_t part = kind == kAllToAll ? bytes / ranks : bytes;
  int64_t most = static_cast<int64_t>(s.slot_bytes);
  if (kind == kAllToAll) most = most / ranks / 64 * 64;
  int64_t at = 0;
  do {
    const uint32_t epoch = w.epoch;
    const int64_t n = std::min(most, part - at);
    char* mine = s.slot(s.rank, epoch);
    if (kind == kAllToAll)
      for (int64_t r = 0; r < ranks; ++r) std::memcpy(mine + r * n, x + r * part + at, n);
    else if (kind != kBroadcast || s.rank == root)
      std::memcpy(mine, x + at, n);
    exchange(w, kind, static_cast<uint64_t>(n));
    if (kind == kAllReduce) sum(w, epoch, n, y + at, half);
    if (kind == kAllGather)
      for (int64_t r = 0; r < ranks; ++r)
        std::memcpy(y + r * part + at, s.slot(static_cast<int>(r), epoch), n);
    if (kind == kAllToAll)
      for (int64_t r = 0; r < ranks; ++r)
        std::memcpy(y + r * part + at, s.slot(static_cast<int>(r), epoch) + s.rank * n, n);
    if (kind == kBroadcast) std::memcpy(y + at, s.slot(static_cast<int>(root), epoch), n);
    if (kind == kBarrier) std::memcpy(y + at, x + at, n);
    at += n;
  } while (at < part);
}

ffi::Error guarded(int64_t id, int64_t kind, const char* x, char* y, int64_t bytes, int64_t root,
                   bool half) {
  World* w = id >= 0 && id < kWorlds ? worlds[id].get() : nullptr;
  if (!w || !w->segment.header)
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "shm: no such world");
  if (w->busy.exchange(true)) {
    w->segment.abort("two collectives of one program ran at the same time: chain them");
    return ffi::Error(ffi::ErrorCode::kInternal, "shm: " + w->segment.why());
  }
  ffi::Error result = ffi::Error::Success();
  try {
    run(*w, kind, x, y, bytes, root, half);
    ++w->call;
  } catch (const Failure& failure) {
    result = ffi::Error(ffi::ErrorCode::kDeadlineExceeded, "shm: " + failure.message);
  }
  w->busy.store(false);
  return result;
}

ffi::Error collective(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, int64_t world, int64_t kind,
                      int64_t root) {
  const bool half = x.element_type() == ffi::DataType::BF16;
  if (kind == kAllReduce && !half && x.element_type() != ffi::DataType::F32)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "shm: all_reduce takes float32 or bfloat16");
  return guarded(world, kind, static_cast<const char*>(x.untyped_data()),
                 static_cast<char*>(y->untyped_data()), static_cast<int64_t>(x.size_bytes()), root,
                 half);
}

}  // namespace

std::string attach(World&) { return ""; }
void detach(World&) {}

}  // namespace sparkjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_shm, sparkjax::collective,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("world")
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("root"));
