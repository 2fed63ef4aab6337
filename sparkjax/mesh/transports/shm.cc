// Collectives between the processes of one host, as XLA FFI calls on a CPU.
//
// Sums run in rank order in float32 on every rank, so all hold the same bits. Calls of one program
// must depend on one another: a second call that begins before the first has ended is an error, as
// is a call of another kind or size than the other ranks make.

#include "handler.h"
#include "rounds.h"
#include "world.h"

namespace sparkjax {
namespace {

namespace ffi = xla::ffi;

// The shared memory as `run` wants it: two slots a rank, one piece at a time.
struct Exchange {
  World& world;
  Segment& segment;
  int rank, ranks, window;
  size_t slot_bytes;
  uint32_t& epoch;

  explicit Exchange(World& w)
      : world(w), segment(w.segment), rank(segment.rank), ranks(segment.ranks), window(1),
        slot_bytes(segment.slot_bytes), epoch(w.epoch) {}

  char* slot(int who, uint32_t e) { return segment.slot(who, e); }

  void open(uint32_t, const Piece&) {}  // whoever posted the last piece had read the one before

  void post(uint32_t e, const Piece& piece) {
    Post& mine = segment.post(rank, e);
    mine.kind = static_cast<uint32_t>(piece.kind), mine.bytes = piece.bytes;
    mine.call = world.call;
    mine.epoch.store(e, std::memory_order_release);
    wake(&mine.epoch);
  }

  void await(uint32_t e, const Piece& piece) {
    const auto begun = Clock::now();
    const uint32_t kind = static_cast<uint32_t>(piece.kind);
    for (int who = 0; who < ranks; ++who) {
      Post& post = segment.post(who, e);
      int polls = 0;
      while (post.epoch.load(std::memory_order_acquire) != e) {
        if (segment.header->aborted.load(std::memory_order_acquire)) {
          for (int i = 0; i < 1000 && segment.header->aborted.load() == kEnding; ++i) sched_yield();
          throw Failure{segment.why() + "; rank " + std::to_string(rank) + " was waiting for rank " +
                        std::to_string(who) + " in " + name_of(piece.kind) + " number " +
                        std::to_string(world.call)};
        }
        if (++polls < world.spins) continue;
        const uint32_t seen = post.epoch.load(std::memory_order_acquire);
        if (seen == e) break;
        doze(&post.epoch, seen, 20);
        const double waited = std::chrono::duration<double>(Clock::now() - begun).count();
        const double patience = segment.header->seconds[rank].load();
        if (waited > patience && post.epoch.load(std::memory_order_acquire) != e)
          end(Fault{rank, who, kind, 0, world.call, piece.bytes, 0, 0, waited});
      }
      if (post.kind != kind || post.bytes != piece.bytes || post.call != world.call)
        end(Fault{rank, who, kind, post.kind, world.call, piece.bytes, post.call, post.bytes, -1});
    }
  }

  [[noreturn]] void end(const Fault& fault) {
    segment.abort(fault.words().c_str());
    throw Failure{segment.why()};
  }
};

ffi::Error collective(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, int64_t id, int64_t kind,
                      int64_t root) {
  World* w = id >= 0 && id < kWorlds ? worlds[id].get() : nullptr;
  if (ffi::Error error = accepted("shm", w && w->segment.header, kind, x); error.failure())
    return error;
  if (w->busy.exchange(true)) {
    w->segment.abort("two collectives of one program ran at the same time: chain them");
    return ffi::Error(ffi::ErrorCode::kInternal, "shm: " + w->segment.why());
  }
  ffi::Error result = ffi::Error::Success();
  try {
    Exchange exchange(*w);
    run(exchange, kind, static_cast<const char*>(x.untyped_data()),
        static_cast<char*>(y->untyped_data()), static_cast<int64_t>(x.size_bytes()),
        static_cast<int>(root), is_half(x));
    ++w->call;
  } catch (const Failure& failure) {
    result = ffi::Error(ffi::ErrorCode::kDeadlineExceeded, "shm: " + failure.message);
  }
  w->busy.store(false);
  return result;
}

}  // namespace

std::string attach(World&) { return ""; }
void detach(World&) {}

}  // namespace sparkjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_shm, sparkjax::collective,
                              sparkjax::call_binding(xla::ffi::Ffi::Bind()));
