// The fabric's GPU half without RDMA: ranks of one process on two streams of one GPU, their proxies over
// the rehearsal network. Every collective against sums made here, then a captured loop of reductions
// that is replayed. Prints one JSON object; exits 1 where bits differ.
//
//   fabric_streams REPLAYS

#include <cstdlib>
#include <random>
#include <vector>

#include "../../sparkjax/mesh/transports/fabric/fabric.cu"

namespace sparkjax {
namespace {

constexpr int kTwo = 2, kChain = 100;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct Rank {
  int id;
  World* world;
  cudaStream_t stream;
  char *x, *y;
};

Rank open(int rank) {
  const int32_t peer = 1 - rank, rail = 0, rails[] = {0, 1}, peers[] = {peer, peer};
  const char* names[] = {"device0", "device1"};
  int32_t paths[kTwo * kMostPaths];
  std::fill(paths, paths + kTwo * kMostPaths, -1);
  paths[peer * kMostPaths] = 0, paths[peer * kMostPaths + 1] = 1;
  SparkjaxFabricShape shape{rank, kTwo, 2, 200, 64 << 10, 20.0, 0.0, 0xFFFFFF00u, 2, 0,
                            peers, rails, names, paths, &rail};
  char message[512];
  Rank made{sparkjax_fabric_open(&shape, message, sizeof message)};
  if (made.id < 0) std::fprintf(stderr, "%s\n", message), std::exit(1);
  sparkjax_fabric_rehearse(made.id, "streams", 1);
  sparkjax_fabric_start(made.id, -1, message, sizeof message);
  if (message[0]) std::fprintf(stderr, "%s\n", message), std::exit(1);
  made.world = world_of(made.id);
  must(cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking), "stream");
  must(cudaMalloc(&made.x, 8 << 20), "memory"), must(cudaMalloc(&made.y, 8 << 20), "memory");
  return made;
}

// What rank `rank` holds after a collective of `bytes`, from what both gave.
std::vector<char> wanted(int64_t kind, int rank, const std::vector<char> (&gave)[kTwo],
                         int64_t bytes, bool half) {
  if (kind == kBarrier) return gave[rank];
  if (kind == kBroadcast) return gave[1];
  if (kind == kAllReduce) {
    std::vector<char> out(bytes);
    sparkjax::sum([&](int who) { return gave[who].data(); }, kTwo, bytes, out.data(), half);
    return out;
  }
  std::vector<char> out;
  const int64_t part = kind == kAllToAll ? bytes / kTwo : bytes;
  for (const auto& from : gave) {
    const char* begin = from.data() + (kind == kAllToAll ? rank * part : 0);
    out.insert(out.end(), begin, begin + part);
  }
  return out;
}

int differing(std::vector<Rank>& ranks) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  int wrong = 0;
  for (const int64_t bytes : {8ll, 48ll, 4096ll, 16388ll, 49152ll, 262144ll, 2097160ll})
    for (int64_t kind = kAllReduce; kind <= kBarrier; ++kind)
      for (const bool half : {false, true}) {
        std::vector<char> gave[kTwo];
        for (int r = 0; r < kTwo; ++r) {
          gave[r].resize(bytes);
          for (int64_t i = 0; i < bytes / (half ? 2 : 4); ++i) {
            const float value = normal(random) * static_cast<float>(i % 1000);
            if (half) reinterpret_cast<uint16_t*>(gave[r].data())[i] = narrow(value);
            else reinterpret_cast<float*>(gave[r].data())[i] = value;
          }
          must(cudaMemcpy(ranks[r].x, gave[r].data(), bytes, cudaMemcpyHostToDevice), "copy");
        }
        for (Rank& r : ranks)
          must(enqueue(*r.world, kind, r.x, r.y, bytes, half, 1, r.stream), "enqueue");
        for (Rank& r : ranks) must(cudaStreamSynchronize(r.stream), "wait");
        for (int r = 0; r < kTwo; ++r) {
          const std::vector<char> want = wanted(kind, r, gave, bytes, half);
          std::vector<char> got(want.size());
          must(cudaMemcpy(got.data(), ranks[r].y, got.size(), cudaMemcpyDeviceToHost), "copy");
          wrong += got != want;
        }
      }
  return wrong;
}

// Microseconds of a reduction in a captured chain, replayed.
double replayed(std::vector<Rank>& ranks, int64_t bytes, int replays) {
  std::vector<cudaGraphExec_t> graphs;
  for (Rank& r : ranks) {
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    must(cudaStreamBeginCapture(r.stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kChain; ++i)
      must(enqueue(*r.world, kAllReduce, r.x, r.y, bytes, false, 0, r.stream), "enqueue");
    must(cudaStreamEndCapture(r.stream, &graph), "end of capture");
    must(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
    graphs.push_back(ready);
  }
  const auto begun = Clock::now();
  for (int i = 0; i < replays; ++i)
    for (int r = 0; r < kTwo; ++r) must(cudaGraphLaunch(graphs[r], ranks[r].stream), "launch");
  for (Rank& r : ranks) must(cudaStreamSynchronize(r.stream), "wait");
  const std::chrono::duration<double, std::micro> took = Clock::now() - begun;
  return took.count() / (static_cast<double>(replays) * kChain);
}

}  // namespace
}  // namespace sparkjax

int main(int, char** arguments) {
  using namespace sparkjax;
  std::vector<Rank> ranks{open(0), open(1)};
  const int wrong = differing(ranks);
  const int replays = std::atoi(arguments[1]);
  const double small = replayed(ranks, 8 << 10, replays), medium = replayed(ranks, 48 << 10, replays);
  const int after = differing(ranks);
  const std::string why = ranks[0].world->why() + ranks[1].world->why();
  std::printf("{\"wrong\": %d, \"reductions\": %d, \"us_8k\": %.1f, \"us_48k\": %.1f, \"why\": \"%s\"}\n",
              wrong + after, 2 * replays * kChain, small, medium, why.c_str());
  for (Rank& r : ranks) sparkjax_fabric_close(r.id, 1.0);
  return wrong || after || !why.empty();
}
