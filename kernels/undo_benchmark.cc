// Measures AdamW with undo against AdamW without, taking turns.
//
// Each thread walks arrays of its own, tile by tile as the engine does, chunk
// after chunk, every other one with undo; the next walk swaps them. All threads
// are in the same mode at the same time. Taking turns so finely, both modes see
// the same machine, whatever else runs on it.
//   on_over_off       median over the iterations of time without / time with:
//                     the speed with undo as a part of that without
//   bytes_per_second  read and written with undo by all threads together, the
//                     slot's own not counted
//
// Arguments: elements of all threads together, threads.

#include <time.h>

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "kernels/segment_array.h"
#include "kernels/undo.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
namespace {

constexpr int64_t kMi = 1 << 20;
// The chunk exceeds the caches, and takes some milliseconds.
constexpr size_t kChunkElements = kMi;
// The least number of elements that one iteration walks in each mode.
constexpr size_t kIterationElementsMin = kMi;

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

// The arrays of one thread: `numel` elements, a multiple of a tile.
class Work {
 public:
  Work(DType dtype, size_t numel)
      : dtype_(dtype),
        numel_(numel),
        // The bytes make about 0.75 in either dtype.
        gradient_(numel * SizeInBytes(dtype), uint8_t{0x3F}),
        parameter_(numel * SizeInBytes(dtype)),
        master_(numel, 1.0f),
        exp_avg_(numel, 0.5f),
        exp_avg_sq_(numel, 0.5f),
        slot_(sizeof(UndoSlot)) {}

  // Walks everything `walks` times, an even number; adds to seconds[with undo].
  // The threads wait for each other before each chunk.
  void Walk(const UpdateKernel& kernel, const UpdateFactors& factors,
            size_t walks, std::barrier<>* turn, double seconds[2]) {
    for (size_t walk = 0; walk < walks; ++walk) {
      size_t with_undo = walk % 2;
      for (size_t begin = 0; begin < numel_; begin += kChunkElements) {
        const size_t end = std::min(begin + kChunkElements, numel_);
        turn->arrive_and_wait();
        const double start = ThreadSeconds();
        for (size_t at = begin; at < end; at += kTileElements) {
          slot()->progress.store(0, std::memory_order_relaxed);
          const void* const gradient = GradientAt(at);
          TileView view = ViewAt(at, with_undo == 1);
          view.gradients = absl::MakeConstSpan(&gradient, 1);
          kernel.apply(factors, view);
        }
        seconds[with_undo] += ThreadSeconds() - start;
        with_undo ^= 1;
      }
    }
  }

 private:
  UndoSlot* slot() const { return reinterpret_cast<UndoSlot*>(slot_.data()); }
  const void* GradientAt(size_t begin) const {
    return gradient_.data() + begin * SizeInBytes(dtype_);
  }

  TileView ViewAt(size_t begin, bool with_undo) {
    TileView view;
    view.parameter = parameter_.data() + begin * SizeInBytes(dtype_);
    view.master = master_.data() + begin;
    if (dtype_ == DType::kFloat32) view.parameter = view.master;
    view.state[0] = exp_avg_.data() + begin;
    view.state[1] = exp_avg_sq_.data() + begin;
    view.numel = kTileElements;
    view.undo = with_undo ? slot() : nullptr;
    return view;
  }

  const DType dtype_;
  const size_t numel_;
  const SegmentArray<uint8_t> gradient_;
  const SegmentArray<uint8_t> parameter_;
  const SegmentArray<float> master_;
  const SegmentArray<float> exp_avg_;
  const SegmentArray<float> exp_avg_sq_;
  const SegmentArray<uint8_t> slot_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2,
                   values.end());
  return values[values.size() / 2];
}

void BM_Undo(benchmark::State& state, DType dtype) {
  const auto numel = static_cast<size_t>(state.range(0));
  const auto threads = static_cast<size_t>(state.range(1));
  const size_t walks = 2 * std::max<size_t>(1, kIterationElementsMin / numel);
  const UpdateKernel& kernel =
      **FindUpdateKernel({OptimizerKind::kAdamW, /*options=*/0, dtype, dtype});
  UpdateInput input;
  input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  input.step_count = 10;
  const UpdateFactors factors = kernel.prepare(input);
  std::vector<std::unique_ptr<Work>> works;
  for (size_t t = 0; t < threads; ++t) {
    works.push_back(std::make_unique<Work>(dtype, numel / threads));
  }

  std::vector<double> ratios;
  std::barrier<> turn(static_cast<ptrdiff_t>(threads));
  for (auto _ : state) {
    std::vector<double> seconds(2 * threads);
    std::vector<std::thread> workers;
    for (size_t t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        works[t]->Walk(kernel, factors, walks, &turn, &seconds[2 * t]);
      });
    }
    for (std::thread& worker : workers) worker.join();
    double off_s = 0;
    double on_s = 0;
    for (size_t t = 0; t < threads; ++t) {
      off_s += seconds[2 * t];
      on_s += seconds[2 * t + 1];
    }
    state.SetIterationTime(on_s / static_cast<double>(threads));
    ratios.push_back(off_s / on_s);
  }
  state.counters["on_over_off"] = Median(std::move(ratios));
  const size_t bytes_per_element = 2 * SizeInBytes(dtype) + 6 * sizeof(float);
  state.SetBytesProcessed(static_cast<int64_t>(
      state.iterations() * numel * (walks / 2) * bytes_per_element));
}

void Arguments(benchmark::internal::Benchmark* benchmark) {
  for (int64_t numel : {kMi / 16, kMi, 16 * kMi, 64 * kMi, 256 * kMi}) {
    for (int64_t threads : {1, 2}) {
      benchmark->Args({numel, threads});
    }
  }
  benchmark->UseManualTime();
}

BENCHMARK_CAPTURE(BM_Undo, float32, DType::kFloat32)->Apply(Arguments);
BENCHMARK_CAPTURE(BM_Undo, bfloat16, DType::kBFloat16)->Apply(Arguments);

}  // namespace
}  // namespace optstate::kernels
