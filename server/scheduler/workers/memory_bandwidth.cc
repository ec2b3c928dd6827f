#include "server/scheduler/workers/memory_bandwidth.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/memory_roof.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/memory_available.h"
#include "server/scheduler/workers/worker_placement.h"
#include "server/scheduler/workers/worker_pool.h"

namespace optstate::scheduler {
namespace {

using Clock = std::chrono::steady_clock;

// The part of each of the four arrays that a worker takes at a time.
constexpr size_t kBlock = size_t{1} << 16;  // floats
constexpr size_t kArrays = 4;
constexpr size_t kBlockBytes = kArrays * kBlock * sizeof(float);
constexpr size_t kMovedBytes = 7 * kBlock * sizeof(float);
// A gap between arrays, so that they do not share cache sets.
constexpr size_t kGapBytes = (size_t{2} << 20) + (size_t{4} << 10);

constexpr size_t kBytesOfWorker = size_t{16} << 20;
constexpr size_t kBytesMin = size_t{64} << 20;
constexpr size_t kBytesMax = size_t{1} << 30;

constexpr int kPassesMin = 2;
constexpr auto kTime = std::chrono::milliseconds(80);

// Arrays that are read and written as by a float32 update, at the speed of the
// best instruction set.
class Arrays {
 public:
  Arrays(void* memory, size_t blocks)
      : base_(static_cast<float*>(memory)),
        stride_(blocks * kBlock + kGapBytes / sizeof(float)) {}
  static size_t Bytes(size_t blocks) {
    return blocks * kBlockBytes + (kArrays - 1) * kGapBytes;
  }

  void Pass(size_t block) const {
    const void* const gradient = At(0, block);
    kernels::TileView view;
    view.gradients = absl::MakeConstSpan(&gradient, 1);
    view.master = view.parameter = At(1, block);
    view.state[0] = At(2, block);
    view.state[1] = At(3, block);
    view.numel = kBlock;
    kernels::cpu::MemoryRoof(DType::kFloat32, view);
  }

 private:
  float* At(size_t array, size_t block) const {
    return base_ + array * stride_ + block * kBlock;
  }

  float* const base_;
  const size_t stride_;
};

}  // namespace

// The size is four times the last cache that the kernel reports: data written
// last is no longer cached when a pass returns to it.
size_t MemoryBandwidthBytes(int workers, uint64_t available_bytes) {
  const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  const size_t bytes =
      std::max({kBytesMin, static_cast<size_t>(std::max(cache, 0L)) * 4,
                static_cast<size_t>(workers) * kBytesOfWorker});
  const size_t taken = std::min(bytes, kBytesMax);
  return taken <= available_bytes / 4 ? taken : 0;
}

double MeasureMemoryBandwidth(int workers, const std::atomic<bool>& stop) {
  const absl::StatusOr<uint64_t> available = AvailableMemoryBytes();
  const size_t blocks =
      MemoryBandwidthBytes(workers, available.value_or(0)) / kBlockBytes;
  if (blocks == 0) return 0;
  const size_t bytes = Arrays::Bytes(blocks);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 0;
  const Arrays arrays(memory, blocks);
  double best = 0;
  {
    WorkerPool pool(workers, /*spin=*/false,
                    PlaceWorkersHere(workers, Pinning::kAuto));
    const auto pass = [&] {
      pool.ParallelFor(blocks, [&](size_t i) {
        if (stop.load(std::memory_order_relaxed)) return;
        arrays.Pass(i);
      });
    };
    // Takes the pages, each by the worker that will use it. Huge pages are
    // avoided: to make some, the kernel may move other memory about for
    // seconds.
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

}  // namespace optstate::scheduler
