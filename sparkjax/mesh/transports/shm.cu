// Collectives between the processes of one host, as XLA FFI calls on a GPU.
//
// Every rank has two slots and its posts in its own GPU's memory, which the others' GPUs read (CUDA
// IPC); where any of them cannot, in the segment, host memory that GPUs read and write in place. A
// call is one plain kernel on XLA's stream (one for each piece of a large array): its blocks put the
// payload into our slot, the last of them posts it and waits for all posts, then each block folds
// its part. The exchange's number lives in device memory, so a call may be part of a command buffer
// that is replayed. A wait that is too long, or ranks in different calls, leave a fault record and
// end all later calls at once; the host asks for it (`sparkjax_shm_why`) after a step.

#include <cuda_runtime.h>

#include <algorithm>

#include "device.h"
#include "handler.h"
#include "world.h"

namespace sparkjax {

// What a GPU sees of the world. A fence of the whole system is slow where it reaches over PCIe, so
// one block makes it for all.
struct Device {
  Header* header;
  size_t slot_bytes;
  char* slots[kMaxRanks];  // of every rank, two each
  Post* posts[kMaxRanks];
  uint32_t* counters;  // epoch, blocks that have staged, that have folded, calls made, epoch that has
                       // come, whether the world has ended
  char* own = nullptr;  // memory of this GPU that the others read
};
constexpr int kEpoch = 0, kStaged = 1, kFolded = 2, kCalls = 3, kCame = 4, kOver = 5, kCounters = 6;

namespace {

namespace ffi = xla::ffi;

constexpr int kThreads = 256, kMostBlocks = 64;
constexpr int kPolls = 256;  // between two looks at the clock

struct Piece {
  Device device;
  int rank, ranks, root;
  uint32_t kind;
  int64_t part, at, n;  // bytes of a part, of what was done, and of this piece
  bool half, last;

  __device__ char* slot(int who, uint32_t epoch) const {
    return device.slots[who] + (epoch & 1) * device.slot_bytes;
  }
  __device__ volatile Post* post(int who, uint32_t epoch) const {
    return device.posts[who] + (epoch & 1);
  }
};

__device__ void stage(const Piece& p, const char* x, uint32_t epoch) {
  char* mine = p.slot(p.rank, epoch);
  if (p.kind == kAllToAll)
    for (int r = 0; r < p.ranks; ++r) copy(mine + r * p.n, x + r * p.part + p.at, p.n);
  else if (p.kind != kBarrier && (p.kind != kBroadcast || p.rank == p.root))
    copy(mine, x + p.at, p.n);
}

// Ends the world, unless it has ended.
__device__ void fail(const Piece& p, const Fault& fault) {
  Header* header = p.device.header;
  uint32_t* state = reinterpret_cast<uint32_t*>(&header->aborted);
  if (atomicCAS_system(state, kRuns, kEnding) == kRuns) {
    header->fault = fault;
    __threadfence_system();
    *word(state) = kFault;
  }
}

// Whether a rank's post of this exchange has come, and says what ours says.
__device__ bool came(const Piece& p, int who, uint32_t epoch, uint32_t call) {
  const uint64_t begun = now();
  Header* header = p.device.header;
  Fault fault{p.rank, who, p.kind, 0, call, static_cast<uint64_t>(p.n), 0, 0, -1};
  volatile Post* post = p.post(who, epoch);
  for (int polls = 1; acquire(&post->epoch) != epoch; ++polls) {
    if (polls % kPolls) continue;
    if (*word(&header->aborted) != kRuns) return false;
    const double waited = static_cast<double>(now() - begun) * 1e-9;
    // Read here: a call in a command buffer was recorded under another patience.
    if (waited > *reinterpret_cast<volatile double*>(&header->seconds[p.rank])) {
      fault.waited = waited;
      fail(p, fault);
      return false;
    }
  }
  fault.their_kind = post->kind, fault.their_bytes = post->bytes, fault.their_call = post->call;
  if (fault.their_kind == p.kind && fault.their_bytes == fault.bytes && fault.their_call == call)
    return true;
  fail(p, fault);
  return false;
}

// The block that was the last to stage: posts for all of them and waits for the other ranks.
__device__ void meet(const Piece& p, uint32_t epoch) {
  volatile uint32_t* c = p.device.counters;
  const uint32_t call = c[kCalls];
  if (threadIdx.x == 0) {
    volatile Post* post = p.post(p.rank, epoch);
    c[kStaged] = 0;
    post->kind = p.kind, post->bytes = static_cast<uint64_t>(p.n), post->call = call;
    release(&post->epoch, epoch);
  }
  const int who = threadIdx.x;
  const bool here = who >= p.ranks || who == p.rank || came(p, who, epoch, call);
  if (!__syncthreads_and(here) && threadIdx.x == 0) c[kOver] = 1;
  if (threadIdx.x == 0) {
    __threadfence();
    c[kCame] = epoch;
  }
}

// No block waits before it has staged, so a grid needs no room for all of its blocks at once.
__global__ void exchange(Piece p, const char* x, char* y) {
  volatile uint32_t* c = p.device.counters;
  const uint32_t epoch = c[kEpoch];
  __shared__ bool last;
  stage(p, x, epoch);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(p.device.counters + kStaged, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) meet(p, epoch);
  if (threadIdx.x == 0) {
    while (c[kCame] != epoch) continue;
    __threadfence();
  }
  __syncthreads();
  if (!c[kOver]) fold(p, x, y, epoch);
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(p.device.counters + kFolded, 1) == gridDim.x - 1) {
    c[kFolded] = 0;
    if (p.last) c[kCalls] = c[kCalls] + 1;
    __threadfence();
    c[kEpoch] = epoch + 1;
  }
}

// Puts a collective on a stream: what one rank gives, of so many bytes, and gets.
cudaError_t enqueue(World& w, int64_t kind, const char* x, char* y, int64_t bytes, bool half,
                    int64_t root, cudaStream_t stream) {
  const Segment& s = w.segment;
  Piece p{*static_cast<Device*>(w.device), s.rank, s.ranks, static_cast<int>(root),
          static_cast<uint32_t>(kind)};
  p.part = kind == kAllToAll ? bytes / s.ranks : bytes;
  p.half = half;
  int64_t most = static_cast<int64_t>(p.device.slot_bytes);
  if (kind == kAllToAll) most = most / s.ranks / 64 * 64;
  p.at = 0;
  do {
    p.n = std::min(most, p.part - p.at), p.last = p.at + p.n >= p.part;
    const int64_t wanted = (p.n + kThreads * 16 - 1) / (kThreads * 16);
    const int blocks = static_cast<int>(std::clamp<int64_t>(wanted, 1, kMostBlocks));
    exchange<<<blocks, kThreads, 0, stream>>>(p, x, y);
    p.at += p.n;
  } while (p.at < p.part);
  return cudaGetLastError();
}

ffi::Error collective(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                      int64_t id, int64_t kind, int64_t root) {
  World* w = id >= 0 && id < kWorlds ? worlds[id].get() : nullptr;
  if (ffi::Error error = accepted("shm", w && w->device, kind, x); error.failure()) return error;
  const cudaError_t error = enqueue(*w, kind, static_cast<const char*>(x.untyped_data()),
                                    static_cast<char*>(y->untyped_data()),
                                    static_cast<int64_t>(x.size_bytes()), is_half(x), root,
                                    stream);
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string("shm: ") + cudaGetErrorString(error));
}

}  // namespace

namespace {

// Where a rank's own memory is, said through its slot of the segment before any exchange.
struct Place {
  std::atomic<uint32_t> said, taken;  // kYes or kNo
  int32_t process;
  char* address;
  cudaIpcMemHandle_t handle;
};
constexpr uint32_t kYes = 1, kNo = 2;
constexpr size_t kWider = 8;  // a GPU's slots, in slots of the segment

Place& place_of(Segment& s, int who) { return *reinterpret_cast<Place*>(s.slot(who, 0)); }

// Whether every rank answered kYes; waits for all.
bool all(Segment& s, std::atomic<uint32_t> Place::*answer) {
  const auto until = Clock::now() + std::chrono::seconds(60);
  bool yes = true;
  for (int who = 0; who < s.ranks; ++who) {
    std::atomic<uint32_t>& word = place_of(s, who).*answer;
    while (!word.load(std::memory_order_acquire) && Clock::now() < until) usleep(500);
    yes = yes && word.load() == kYes;
  }
  return yes;
}

// Slots and posts in the memory of each rank's GPU, if every rank's GPU reaches all of them.
bool use_gpus(Segment& s, Device& device) {
  static_assert(sizeof(Place) <= 512, "a slot is larger");
  const size_t bytes = kWider * s.slot_bytes, room = 2 * bytes + kPage;
  Place& mine = place_of(s, s.rank);
  bool yes = cudaMalloc(&device.own, room) == cudaSuccess &&
             cudaIpcGetMemHandle(&mine.handle, device.own) == cudaSuccess;
  mine.process = getpid(), mine.address = device.own;
  if (yes) {
    Post posts[2] = {};
    for (int i = 0; i < 2; ++i) posts[i].epoch.store(s.post(s.rank, i).epoch.load());
    yes = cudaMemcpy(device.own + 2 * bytes, posts, sizeof posts, cudaMemcpyHostToDevice) ==
          cudaSuccess;
  }
  mine.said.store(yes ? kYes : kNo, std::memory_order_release);
  yes = all(s, &Place::said);
  for (int who = 0; yes && who < s.ranks; ++who) {
    Place& theirs = place_of(s, who);
    void* base = theirs.address;
    if (theirs.process != getpid())
      yes = cudaIpcOpenMemHandle(&base, theirs.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    device.slots[who] = static_cast<char*>(base);
    device.posts[who] = reinterpret_cast<Post*>(device.slots[who] + 2 * bytes);
  }
  (void)cudaGetLastError();
  mine.taken.store(yes ? kYes : kNo, std::memory_order_release);
  device.slot_bytes = bytes;
  return all(s, &Place::taken);
}

}  // namespace

static int ordinal = 0;  // of the GPU that this process computes on

std::string attach(World& world) {
  Segment& s = world.segment;
  auto device = std::make_unique<Device>();
  char* base = nullptr;
  cudaError_t error = cudaSetDevice(ordinal);
  if (error == cudaSuccess)
    error = cudaHostRegister(s.header, s.size, cudaHostRegisterMapped);
  if (error == cudaSuccess)
    error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&base), s.header, 0);
  if (error == cudaSuccess) error = cudaMalloc(&device->counters, kCounters * sizeof(uint32_t));
  const uint32_t counters[kCounters] = {world.epoch, 0, 0, 0, world.epoch - 1, 0};
  if (error == cudaSuccess)
    error = cudaMemcpy(device->counters, counters, sizeof counters, cudaMemcpyHostToDevice);
  if (error != cudaSuccess) return std::string("cannot map for the GPU: ") + cudaGetErrorString(error);
  device->header = reinterpret_cast<Header*>(base);
  world.direct = use_gpus(s, *device);
  if (!world.direct) {
    cudaFree(device->own);
    device->slot_bytes = s.slot_bytes;
    for (int who = 0; who < s.ranks; ++who) {
      device->slots[who] = base + header_bytes() + static_cast<size_t>(who) * 2 * s.slot_bytes;
      device->posts[who] = &device->header->posts[who][0];
    }
  }
  world.device = device.release();
  return "";
}

// The others' memory stays mapped: whoever leaves ends its process.
void detach(World& world) {
  auto* device = static_cast<Device*>(world.device);
  if (!device) return;
  cudaDeviceSynchronize();
  cudaFree(device->counters);
  cudaHostUnregister(world.segment.header);
  delete device;
  world.device = nullptr;
}

}  // namespace sparkjax

extern "C" void sparkjax_shm_device(int ordinal) { sparkjax::ordinal = ordinal; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_shm, sparkjax::collective,
                              sparkjax::call_binding(xla::ffi::Ffi::Bind().Ctx<
                                                     xla::ffi::PlatformStream<cudaStream_t>>()),
                              {xla::ffi::Traits::kCmdBufferCompatible});
