// Both ranks of a world in one process, on two streams of one GPU: what a collective of `shm` takes
// where ranks do not have to share the GPU in turns. Prints one JSON object; see mesh_one_gpu.py.
//
//   shm_streams NAME BYTES...

#include <cstdlib>
#include <thread>
#include <vector>

#include "../sparkjax/mesh/transports/shm.cu"

namespace sparkjax {
namespace {

constexpr int kRanks = 2, kChain = 100, kRounds = 21, kLoops = 100;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct Rank {
  World* world;
  cudaStream_t stream;
  cudaGraphExec_t graph;
  char *x, *y;
};

// kChain collectives of a rank, captured as a step's command buffer captures them.
void capture(Rank& rank, int64_t kind, int64_t bytes) {
  cudaGraph_t graph;
  must(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kChain; ++i)
    must(enqueue(*rank.world, kind, rank.x, rank.y, bytes, true, 0, rank.stream), "enqueue");
  must(cudaStreamEndCapture(rank.stream, &graph), "end of capture");
  must(cudaGraphInstantiate(&rank.graph, graph, 0), "instantiate");
  must(cudaGraphDestroy(graph), "destroy");
}

// Milliseconds of `times` replays on both streams.
float replay(std::vector<Rank>& ranks, int times) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin), "event"), must(cudaEventCreate(&end), "event");
  must(cudaEventRecord(begin, ranks[0].stream), "record");
  for (int i = 0; i < times; ++i)
    for (Rank& rank : ranks) must(cudaGraphLaunch(rank.graph, rank.stream), "launch");
  must(cudaEventRecord(end, ranks[0].stream), "record");
  must(cudaDeviceSynchronize(), "synchronize");
  float ms = 0;
  must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
  must(cudaEventDestroy(begin), "event"), must(cudaEventDestroy(end), "event");
  return ms;
}

uint16_t half_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float value_of(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Whether both ranks hold exactly what the host makes of what both brought.
bool right(const std::vector<Rank>& ranks, int64_t kind, int64_t bytes) {
  const int64_t n = bytes / 2, outs = kind == kAllGather ? kRanks * n : n;
  std::vector<uint16_t> x[kRanks], y(outs), wanted(outs);
  for (int r = 0; r < kRanks; ++r) {
    x[r].resize(n);
    must(cudaMemcpy(x[r].data(), ranks[r].x, bytes, cudaMemcpyDeviceToHost), "copy");
  }
  for (int64_t i = 0; i < n; ++i)
    if (kind == kAllReduce)
      wanted[i] = half_of(value_of(x[0][i]) + value_of(x[1][i]));
    else
      wanted[i] = x[0][i], wanted[n + i] = x[1][i];
  for (const Rank& rank : ranks) {
    must(cudaMemcpy(y.data(), rank.y, 2 * outs, cudaMemcpyDeviceToHost), "copy");
    if (y != wanted) return false;
  }
  return true;
}

int run(int argc, char** argv) {
  std::vector<Rank> ranks(kRanks);
  int64_t most = 0;
  for (int i = 2; i < argc; ++i) most = std::max<int64_t>(most, std::atoll(argv[i]));
  int ids[kRanks];
  std::vector<std::thread> threads;
  char said[kRanks][512] = {};
  must(cudaFree(nullptr), "device");
  // Each waits for the other, and one at a time may open.
  for (int r = 0; r < kRanks; ++r)
    threads.emplace_back([&, r] {
      auto world = std::make_unique<World>();
      world->epoch = 2;
      std::string error = world->segment.open(argv[1], r, kRanks, 1 << 20, 2, 20);
      if (error.empty()) error = attach(*world);
      if (error.empty()) world->segment.header->seconds[r].store(5);
      std::snprintf(said[r], sizeof said[r], "%s", error.c_str());
      ids[r] = r, worlds[r] = std::move(world);
    });
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < kRanks; ++r) {
    if (said[r][0]) return std::fprintf(stderr, "rank %d: %s\n", r, said[r]), 1;
    ranks[r].world = worlds[ids[r]].get();
    must(cudaStreamCreateWithFlags(&ranks[r].stream, cudaStreamNonBlocking), "stream");
    must(cudaMalloc(&ranks[r].x, most), "malloc"), must(cudaMalloc(&ranks[r].y, kRanks * most), "malloc");
    std::vector<uint16_t> x(most / 2);
    uint32_t state = 12345 + r;
    for (auto& number : x) {
      state = state * 1664525 + 1013904223;
      number = half_of(static_cast<float>(static_cast<int32_t>(state)) * 1e-9f);
    }
    must(cudaMemcpy(ranks[r].x, x.data(), most, cudaMemcpyHostToDevice), "copy");
  }
  std::printf("{\"collectives_of_a_graph\": %d, \"sizes\": [", kChain);
  bool all = true;
  for (int i = 2; i < argc; ++i)
    for (int64_t kind : {kAllReduce, kAllGather}) {
      const int64_t bytes = std::atoll(argv[i]);
      for (Rank& rank : ranks) capture(rank, kind, bytes);
      replay(ranks, 2);
      std::vector<float> us;
      for (int round = 0; round < kRounds; ++round) us.push_back(replay(ranks, 1) / kChain * 1e3f);
      std::sort(us.begin(), us.end());
      bool same = right(ranks, kind, bytes);
      std::printf("%s{\"what\": \"%s\", \"bytes\": %lld, \"us\": %.2f, \"least_us\": %.2f, "
                  "\"most_us\": %.2f", i == 2 && kind == kAllReduce ? "" : ", ", name_of(kind).c_str(),
                  static_cast<long long>(bytes), us[kRounds / 2], us.front(), us.back());
      if (kind == kAllReduce && bytes <= 1 << 16) {
        replay(ranks, kLoops);
        same = same && right(ranks, kind, bytes);
        std::printf(", \"replayed\": %d", kLoops * kChain);
      }
      const std::string why = ranks[0].world->segment.why();
      std::printf(", \"right\": %s}", same && why.empty() ? "true" : "false");
      if (!why.empty()) std::fprintf(stderr, "%s\n", why.c_str());
      all = all && same && why.empty();
      std::fflush(stdout);
      for (Rank& rank : ranks) must(cudaGraphExecDestroy(rank.graph), "destroy");
    }
  std::printf("]}\n");
  return all ? 0 : 1;
}

}  // namespace
}  // namespace sparkjax

int main(int argc, char** argv) { return sparkjax::run(argc, argv); }
