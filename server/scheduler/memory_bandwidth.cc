#include "server/scheduler/memory_bandwidth.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "server/scheduler/worker_placement.h"
#include "server/scheduler/worker_pool.h"

namespace optstate {
namespace {

using Clock = std::chrono::steady_clock;

// A worker's part at a time, of each of the three arrays.
constexpr size_t kBlock = size_t{1} << 16;  // floats
constexpr size_t kBlockBytes = 3 * kBlock * sizeof(float);
constexpr size_t kMovedBytes = 5 * kBlock * sizeof(float);

constexpr size_t kBytesOfWorker = size_t{16} << 20;
constexpr size_t kBytesMin = size_t{64} << 20;
constexpr size_t kBytesMax = size_t{1} << 30;

constexpr int kPassesMin = 2;
constexpr auto kTime = std::chrono::milliseconds(80);

// Four times the last cache that the kernel tells of: what is written last is
// gone when a pass comes back to it.
size_t BytesFor(int workers) {
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  const size_t bytes =
      std::max({kBytesMin, static_cast<size_t>(std::max(cache, 0L)) * 4,
                static_cast<size_t>(workers) * kBytesOfWorker});
  return std::min(bytes, kBytesMax) / kBlockBytes * kBlockBytes;
}

void Pass(float* block) {
  const float* __restrict__ gradient = block;
  float* __restrict__ first = block + kBlock;
  float* __restrict__ second = block + 2 * kBlock;
  for (size_t i = 0; i < kBlock; ++i) {
    first[i] += gradient[i];
    second[i] += gradient[i];
  }
}

}  // namespace

double MeasureMemoryBandwidth(int workers, const std::atomic<bool>& stop) {
  const size_t bytes = BytesFor(workers);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0;
  const size_t blocks = bytes / kBlockBytes;
  double best = 0;
  {
    WorkerPool pool(workers, /*spin=*/false,
                    PlaceWorkersHere(workers, Pinning::kAuto));
    const auto pass = [&] {
      pool.ParallelFor(blocks, [&](size_t i) {
        if (stop.load(std::memory_order_relaxed)) return;
        Pass(static_cast<float*>(memory) + i * 3 * kBlock);
      });
    };
    // Takes the pages, each by the worker that will use it. Not huge ones: to
    // make some, the kernel may move other memory about for seconds.
    pass();
    auto before = Clock::now();
    const auto end = before + kTime;
    for (int i = 0; i < kPassesMin || before < end; ++i) {
      pass();
      const auto after = Clock::now();
      const std::chrono::duration<double> elapsed = after - before;
      best = std::max(
          best, static_cast<double>(blocks * kMovedBytes) / elapsed.count());
      before = after;
    }
  }
  ::munmap(memory, bytes);
  return stop.load(std::memory_order_relaxed) ? 0 : best;
}

}  // namespace optstate
