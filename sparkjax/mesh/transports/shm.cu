// Collectives between the processes of one host, as XLA FFI calls on a GPU.
//
// The segment is host memory that the GPU reads and writes in place. A call is plain kernels on
// XLA's stream: one puts the payload and the post into our slot, one waits for all posts and folds.
// The exchange's number lives in device memory, so a call may be part of a command buffer that is
// replayed. A wait that is too long, or ranks in different calls, leave a fault record and end all
// later calls at once; the host asks for it (`sparkjax_shm_why`) after a step.

#include <cuda_runtime.h>

#include <algorithm>

#include "world.h"
#include "xla/ffi/api/ffi.h"

namespace sparkjax {

struct Device {
  Header* header;  // as the GPU sees it
  char* slots;
  uint32_t* counters;  // epoch, blocks that have staged, blocks that have folded, calls made
};

namespace {

namespace ffi = xla::ffi;

constexpr int kThreads = 256, kMostBlocks = 16;

struct Piece {
  Device device;
  int rank, ranks, root;
  uint32_t kind;
  size_t slot_bytes;
  int64_t part, at, n;  // bytes of a part, of what was done, and of this piece
  bool half, last;
  double seconds;

  __device__ char* slot(int who, uint32_t epoch) const {
    return device.slots + (static_cast<size_t>(who) * 2 + (epoch & 1)) * slot_bytes;
  }
  __device__ volatile Post* post(int who, uint32_t epoch) const {
    return &device.header->posts[who][epoch & 1];
  }
};

__device__ uint32_t volatile* word(volatile void* atomic) {
  return reinterpret_cast<uint32_t volatile*>(atomic);
}

__device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Copies by all threads of the grid; volatile, since the other side is written by other processes.
__device__ void copy(char* to, const char* from, int64_t n) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | n) & 15) == 0) {
    const volatile ulonglong2* x = reinterpret_cast<const volatile ulonglong2*>(from);
    volatile ulonglong2* y = reinterpret_cast<volatile ulonglong2*>(to);
    for (int64_t i = first; i < n / 16; i += step) y[i].x = x[i].x, y[i].y = x[i].y;
  } else {
    const volatile char* x = from;
    volatile char* y = to;
    for (int64_t i = first; i < n; i += step) y[i] = x[i];
  }
}

__global__ void stage(Piece p, const char* x) {
  uint32_t* c = p.device.counters;
  const uint32_t epoch = *static_cast<volatile uint32_t*>(c);
  char* mine = p.slot(p.rank, epoch);
  if (p.kind == kAllToAll)
    for (int r = 0; r < p.ranks; ++r) copy(mine + r * p.n, x + r * p.part + p.at, p.n);
  else if (p.kind != kBroadcast || p.rank == p.root)
    copy(mine, x + p.at, p.n);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(c + 1, 1) == gridDim.x - 1) {
    c[1] = 0;
    volatile Post* post = p.post(p.rank, epoch);
    post->kind = p.kind, post->bytes = static_cast<uint64_t>(p.n), post->call = c[3];
    __threadfence_system();
    *word(&post->epoch) = epoch;
    __threadfence_system();
  }
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

// Whether every rank's post of this exchange is there, and says what ours says.
__device__ bool all_came(const Piece& p, uint32_t epoch, uint32_t call) {
  const uint64_t begun = now();
  volatile uint32_t* state = word(&p.device.header->aborted);
  Fault fault{p.rank, 0, p.kind, 0, call, static_cast<uint64_t>(p.n), 0, 0, -1};
  for (int who = 0; who < p.ranks; ++who) {
    volatile Post* post = p.post(who, epoch);
    while (*word(&post->epoch) != epoch) {
      if (*state != kRuns) return false;
      const double waited = static_cast<double>(now() - begun) * 1e-9;
      if (waited > p.seconds) {
        fault.who = who, fault.waited = waited;
        fail(p, fault);
        return false;
      }
    }
    __threadfence_system();
    if (post->kind != p.kind || post->bytes != static_cast<uint64_t>(p.n) || post->call != call) {
      fault.who = who, fault.their_kind = post->kind;
      fault.their_call = post->call, fault.their_bytes = post->bytes;
      fail(p, fault);
      return false;
    }
  }
  return true;
}

__device__ float widen(uint16_t half) { return __uint_as_float(static_cast<uint32_t>(half) << 16); }

// To the nearest bfloat16, ties to even.
__device__ uint16_t narrow(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ void sum(const Piece& p, uint32_t epoch, char* out) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t n = p.n / (p.half ? 2 : 4);
  for (int64_t i = first; i < n; i += step) {
    float total = 0;
    for (int who = 0; who < p.ranks; ++who) {
      const char* x = p.slot(who, epoch);
      const float term = p.half ? widen(reinterpret_cast<const volatile uint16_t*>(x)[i])
                                : reinterpret_cast<const volatile float*>(x)[i];
      total = who ? __fadd_rn(total, term) : term;
    }
    if (p.half)
      reinterpret_cast<uint16_t*>(out)[i] = narrow(total);
    else
      reinterpret_cast<float*>(out)[i] = total;
  }
}

__global__ void fold(Piece p, const char* x, char* y) {
  uint32_t* c = p.device.counters;
  const uint32_t epoch = *static_cast<volatile uint32_t*>(c);
  __shared__ bool came;
  if (threadIdx.x == 0) came = all_came(p, epoch, c[3]);
  __syncthreads();
  if (came) {
    char* out = y + p.at;
    if (p.kind == kAllReduce) sum(p, epoch, out);
    if (p.kind == kBroadcast) copy(out, p.slot(p.root, epoch), p.n);
    if (p.kind == kBarrier) copy(out, x + p.at, p.n);
    for (int r = 0; r < p.ranks; ++r) {
      if (p.kind == kAllGather) copy(out + r * p.part, p.slot(r, epoch), p.n);
      if (p.kind == kAllToAll) copy(out + r * p.part, p.slot(r, epoch) + p.rank * p.n, p.n);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(c + 2, 1) == gridDim.x - 1) {
    c[2] = 0;
    if (p.last) c[3] += 1;
    __threadfence();
    *static_cast<volatile uint32_t*>(c) = epoch + 1;
  }
}

ffi::Error collective(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                      int64_t id, int64_t kind, int64_t root) {
  World* w = id >= 0 && id < kWorlds ? worlds[id].get() : nullptr;
  if (!w || !w->device) return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "shm: no such world");
  const bool half = x.element_type() == ffi::DataType::BF16;
  if (kind == kAllReduce && !half && x.element_type() != ffi::DataType::F32)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "shm: all_reduce takes float32 or bfloat16");
  Segment& s = w->segment;
  Piece p{*static_cast<Device*>(w->device), s.rank, s.ranks, static_cast<int>(root),
          static_cast<uint32_t>(kind), s.slot_bytes};
  const int64_t bytes = static_cast<int64_t>(x.size_bytes());
  p.part = kind == kAllToAll ? bytes / s.ranks : bytes;
  p.half = half, p.seconds = w->seconds.load();
  int64_t most = static_cast<int64_t>(s.slot_bytes);
  if (kind == kAllToAll) most = most / s.ranks / 64 * 64;
  p.at = 0;
  do {
    p.n = std::min(most, p.part - p.at), p.last = p.at + p.n >= p.part;
    const int64_t wanted = p.n / (kThreads * 64) + 1;
    const int blocks = static_cast<int>(std::min<int64_t>(wanted, kMostBlocks));
    stage<<<blocks, kThreads, 0, stream>>>(p, static_cast<const char*>(x.untyped_data()));
    fold<<<blocks, kThreads, 0, stream>>>(p, static_cast<const char*>(x.untyped_data()),
                                          static_cast<char*>(y->untyped_data()));
    p.at += p.n;
  } while (p.at < p.part);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string("shm: ") + cudaGetErrorString(error));
}

}  // namespace

std::string attach(World& world) {
  Segment& s = world.segment;
  auto device = std::make_unique<Device>();
  char* base = nullptr;
  cudaError_t error = cudaHostRegister(s.header, s.size, cudaHostRegisterMapped);
  if (error == cudaSuccess)
    error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&base), s.header, 0);
  if (error == cudaSuccess) error = cudaMalloc(&device->counters, 4 * sizeof(uint32_t));
  const uint32_t counters[4] = {world.epoch, 0, 0, 0};
  if (error == cudaSuccess)
    error = cudaMemcpy(device->counters, counters, sizeof counters, cudaMemcpyHostToDevice);
  if (error != cudaSuccess) return std::string("cannot map for the GPU: ") + cudaGetErrorString(error);
  device->header = reinterpret_cast<Header*>(base);
  device->slots = base + header_bytes();
  world.device = device.release();
  return "";
}

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(sparkjax_shm, sparkjax::collective,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("world")
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("root"),
                              {xla::ffi::Traits::kCmdBufferCompatible});
