// Collectives over a network, as XLA FFI calls on a GPU.
//
// The picture is host memory that the GPU reads and writes in place (no GPUDirect). Kernels on XLA's
// stream put a piece into our slot and raise our flag, or wait for the others' flags and fold. A
// thread of the host (the proxy) sees our flag and sends; it relays, and says how far slots are free
// again. All numbers live in memory, so calls may be part of a command buffer that is replayed. A wait
// that is too long, or ranks in different calls, leave a fault record and end all later calls at
// once; the host asks for it (`sparkjax_fabric_why`) after a step.

#include <cuda_runtime.h>
#include <pthread.h>

#include <algorithm>
#include <thread>

#include "../device.h"
#include "../handler.h"
#include "world.h"

namespace sparkjax {
namespace {

namespace ffi = xla::ffi;

constexpr int kThreads = 256, kMostBlocks = 32;
constexpr int kPolls = 256;  // between two looks at the clock
constexpr auto kRestless = std::chrono::milliseconds(2);  // the proxy naps after so long without work

struct Counters {
  uint32_t staging, staged_blocks, folding, folded_blocks, call;
};

struct Attached {
  Image image;  // as the GPU sees it
  Counters* counters = nullptr;
  std::thread proxy;
  std::atomic<bool> over{false};
};

struct GpuPiece {
  Image image;
  Counters* counters;
  int rank, ranks, root;
  uint32_t kind;
  int64_t part, at, n;  // bytes of a part, of what was done, and of this piece
  bool half, last;
  int8_t first_path, last_path[kMostRanks];

  __device__ char* slot(int who, uint32_t epoch) const { return image.slot(who, epoch); }
  __device__ uint32_t volatile* flag(int who, uint32_t epoch, int path) const {
    return reinterpret_cast<uint32_t volatile*>(image.base + image.flag_at(who, epoch, path));
  }
};

__device__ Fault fault_of(const GpuPiece& p) {
  return Fault{p.rank, p.rank, p.kind, 0, p.counters->call, static_cast<uint64_t>(p.n), 0, 0, -1, -1};
}

// Ends the world, unless it has ended.
__device__ void fail(const GpuPiece& p, const Fault& fault) {
  Control* control = p.image.control();
  uint32_t* state = reinterpret_cast<uint32_t*>(&control->state);
  if (atomicCAS_system(state, kRuns, kEnding) == kRuns) {
    control->fault = fault;
    __threadfence_system();
    *word(state) = kFault;
  }
}

// Between two looks at a word: whether to go on waiting.
struct Wait {
  uint64_t begun = now();
  int polls = 0;

  __device__ bool goes_on(const GpuPiece& p, int who, int rail) {
    if (++polls % kPolls) return true;
    Control* control = p.image.control();
    if (*word(&control->state) != kRuns) return false;
    const double waited = static_cast<double>(now() - begun) * 1e-9;
    // Read here: a call in a command buffer was recorded under another patience.
    if (waited <= *reinterpret_cast<volatile double*>(&control->seconds)) return true;
    Fault fault = fault_of(p);
    fault.who = who, fault.waited = waited, fault.rail = rail;
    fail(p, fault);
    return false;
  }
};

// Whether our slot may be written: the proxy says how far all that read it have.
__device__ bool opened(const GpuPiece& p, uint32_t epoch) {
  Wait wait;
  while (static_cast<int32_t>(epoch - *word(&p.image.control()->open)) >= 0)
    if (!wait.goes_on(p, p.rank, -1)) return false;
  __threadfence_system();
  return true;
}

// Whether every rank's flags of this piece are there, and say what ours say.
__device__ bool all_came(const GpuPiece& p, uint32_t epoch) {
  Wait wait;
  for (int who = 0; who < p.ranks; ++who) {
    if (who == p.rank) continue;
    for (int path = p.first_path; path < p.last_path[who]; ++path) {
      const int rail = p.last_path[who] - p.first_path > 1 ? path : -1;
      while (*p.flag(who, epoch, path) != epoch)
        if (!wait.goes_on(p, who, rail)) return false;
      __threadfence_system();
      if (path != p.first_path) continue;
      const volatile Details* theirs = p.image.details(who, epoch);
      if (theirs->kind != p.kind || theirs->bytes != static_cast<uint64_t>(p.n) ||
          theirs->call != p.counters->call) {
        Fault fault = fault_of(p);
        fault.who = who, fault.their_kind = theirs->kind;
        fault.their_call = theirs->call, fault.their_bytes = theirs->bytes;
        fail(p, fault);
        return false;
      }
    }
  }
  return true;
}

__device__ void put(const GpuPiece& p, const char* x) {
  Counters* c = p.counters;
  const uint32_t epoch = *word(&c->staging);
  __shared__ bool may;
  if (threadIdx.x == 0) may = opened(p, epoch);
  __syncthreads();
  if (may) {
    char* mine = p.slot(p.rank, epoch);
    if (p.kind == kAllToAll)
      for (int r = 0; r < p.ranks; ++r) copy(mine + r * p.n, x + r * p.part + p.at, p.n);
    else if (p.kind != kBarrier && (p.kind != kBroadcast || p.rank == p.root))
      copy(mine, x + p.at, p.n);
  }
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence_system();
  if (atomicAdd(&c->staged_blocks, 1) != gridDim.x - 1) return;
  c->staged_blocks = 0;
  if (may) {
    volatile Details* details = p.image.details(p.rank, epoch);
    details->kind = p.kind, details->root = p.root;
    details->bytes = static_cast<uint64_t>(p.n), details->call = c->call;
    __threadfence_system();
    *p.flag(p.rank, epoch, 0) = epoch;
  }
  __threadfence();
  *word(&c->staging) = epoch + 1;
}

__device__ void take(const GpuPiece& p, const char* x, char* y) {
  Counters* c = p.counters;
  const uint32_t epoch = *word(&c->folding);
  __shared__ bool came;
  if (threadIdx.x == 0) came = all_came(p, epoch);
  __syncthreads();
  if (came) fold(p, x, y, epoch);
  __syncthreads();
  if (threadIdx.x || atomicAdd(&c->folded_blocks, 1) != gridDim.x - 1) return;
  c->folded_blocks = 0;
  if (p.last) c->call += 1;
  __threadfence();
  *word(&c->folding) = epoch + 1;
}

__global__ void stage_piece(GpuPiece p, const char* x) { put(p, x); }
__global__ void fold_piece(GpuPiece p, const char* x, char* y) { take(p, x, y); }

// Of an array that is one piece. No block waits for another rank before it has staged, so a grid needs
// no room for all of its blocks at once.
__global__ void exchange(GpuPiece p, const char* x, char* y) {
  put(p, x);
  take(p, x, y);
}

// Puts a collective on a stream: what one rank gives, of so many bytes, and gets. Up to `window`
// pieces are under way at a time, as in rounds.h.
cudaError_t enqueue(World& w, int64_t kind, const char* x, char* y, int64_t bytes, bool half,
                    int64_t root, cudaStream_t stream) {
  const auto& attached = *static_cast<Attached*>(w.device);
  const Topology& topology = w.sender->topology();
  const int64_t part = kind == kAllToAll ? bytes / w.ranks : bytes;
  int64_t most = static_cast<int64_t>(w.slot_bytes);
  if (kind == kAllToAll) most = most / w.ranks / 64 * 64;
  const int64_t pieces = std::max<int64_t>(1, (part + most - 1) / most);
  const auto piece = [&](int64_t i) {
    GpuPiece p{attached.image, attached.counters, w.rank, w.ranks, static_cast<int>(root),
               static_cast<uint32_t>(kind)};
    p.part = part, p.at = i * most, p.n = std::min(most, part - p.at);
    p.half = half, p.last = i == pieces - 1;
    p.first_path = static_cast<int8_t>(topology.first());
    for (int who = 0; who < w.ranks; ++who) {
      const bool silent = kind == kBarrier || (kind == kBroadcast && who != root);
      p.last_path[who] = static_cast<int8_t>(topology.last(who, silent ? 0 : p.n));
    }
    return p;
  };
  const auto blocks = [&](const GpuPiece& p) {
    const int64_t wanted = (p.n + kThreads * 16 - 1) / (kThreads * 16);
    return static_cast<int>(std::clamp<int64_t>(wanted, 1, kMostBlocks));
  };
  if (pieces == 1) {
    const GpuPiece p = piece(0);
    exchange<<<blocks(p), kThreads, 0, stream>>>(p, x, y);
    return cudaGetLastError();
  }
  for (int64_t i = 0; i < pieces + w.window - 1; ++i) {
    if (i < pieces) {
      const GpuPiece p = piece(i);
      stage_piece<<<blocks(p), kThreads, 0, stream>>>(p, x);
    }
    if (i >= w.window - 1) {
      const GpuPiece p = piece(i - w.window + 1);
      fold_piece<<<blocks(p), kThreads, 0, stream>>>(p, x, y);
    }
  }
  return cudaGetLastError();
}

ffi::Error collective(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                      int64_t id, int64_t kind, int64_t root) {
  World* w = world_of(id);
  if (ffi::Error error = accepted("fabric", w && w->device, kind, x); error.failure()) return error;
  const cudaError_t error = enqueue(*w, kind, static_cast<const char*>(x.untyped_data()),
                                    static_cast<char*>(y->untyped_data()),
                                    static_cast<int64_t>(x.size_bytes()), is_half(x), root,
                                    stream);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string("fabric: ") + cudaGetErrorString(error));
}

// The proxy: from the first piece after `start` on.
void serve(World& w, const std::atomic<bool>& over) {
  const Image& image = w.image;
  Control* control = image.control();
  uint32_t next = w.epoch, open = w.epoch;
  auto busy = Clock::now();
  while (!over.load(std::memory_order_acquire)) {
    if (image.flag(w.rank, next, 0).load(std::memory_order_acquire) == next) {
      const Details& d = *image.details(w.rank, next);
      w.sender->post(next, Piece{d.kind, d.bytes, d.root});
      ++next, busy = Clock::now();
    }
    w.sender->pump();
    // A slot is free once what was in it has been sent, which has to have been posted before.
    while (static_cast<int32_t>(open - next) < image.slots && w.sender->open(open)) ++open;
    control->open.store(open, std::memory_order_release);
    const uint32_t state = control->state.load(std::memory_order_acquire);
    if (state == kRuns) {
      if (const std::string said = w.ending(); !said.empty()) w.abort(said);
    } else if (state == kFault && !image.ending(w.rank)->set.load()) {
      w.tell();  // a kernel found it
    }
    if (!w.sender->finished()) busy = Clock::now();
    if (Clock::now() - busy > kRestless) usleep(20);
  }
}

void pin(std::thread& thread, int core) {
  if (core < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
}

}  // namespace

std::string attach(World& world, int core) {
  auto attached = std::make_unique<Attached>();
  attached->image = world.image;
  cudaError_t error =
      cudaHostRegister(world.image.base, world.image.bytes(), cudaHostRegisterMapped);
  void* base = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&base, world.image.base, 0);
  if (error == cudaSuccess) error = cudaMalloc(&attached->counters, sizeof(Counters));
  const Counters counters{world.epoch, 0, world.epoch, 0, static_cast<uint32_t>(world.call)};
  if (error == cudaSuccess)
    error = cudaMemcpy(attached->counters, &counters, sizeof counters, cudaMemcpyHostToDevice);
  if (error != cudaSuccess) return std::string("cannot map for the GPU: ") + cudaGetErrorString(error);
  attached->image.base = static_cast<char*>(base);
  Attached* kept = attached.release();
  kept->proxy = std::thread([&world, kept] { serve(world, kept->over); });
  pin(kept->proxy, core);
  world.device = kept;
  return "";
}

void detach(World& world) {
  auto* attached = static_cast<Attached*>(world.device);
  if (!attached) return;
  cudaDeviceSynchronize();
  attached->over.store(true);
  attached->proxy.join();
  cudaFree(attached->counters);
  cudaHostUnregister(world.image.base);
  delete attached;
  world.device = nullptr;
}

}  // namespace sparkjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_fabric, sparkjax::collective,
                              sparkjax::call_binding(xla::ffi::Ffi::Bind().Ctx<
                                                     xla::ffi::PlatformStream<cudaStream_t>>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
