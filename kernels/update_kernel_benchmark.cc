// AdamW on one core, next to what memory allows.
//
// Each iteration walks all arrays twice, tile by tile as the engine does: with
// the kernel, and with the same loads and stores and only additions between
// them. Taking turns, the two see the same machine.
//   roof_ratio        median over the iterations of kernel time / roof time; 1
//   means
//                     that memory, not arithmetic, is the limit
//   bytes_per_second  read and written by the kernel

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/cpu/memory_roof.h"
#include "kernels/hyperparams.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer_kind.h"

namespace optstate {
namespace {

constexpr size_t kTileElements = 4096;

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

// The arrays of `numel` elements, a multiple of a tile.
class Arrays {
 public:
  Arrays(DType dtype, size_t numel)
      : dtype_(dtype),
        numel_(numel),
        // About 0.75 in either dtype.
        gradient_(numel * SizeInBytes(dtype), uint8_t{0x3F}),
        parameter_(numel * SizeInBytes(dtype)),
        master_(numel, 1.0f),
        exp_avg_(numel, 0.5f),
        exp_avg_sq_(numel, 0.5f) {}

  // Of this thread: other programs on the machine take nothing from it.
  template <typename Function>
  double Seconds(Function function) {
    const double start = ThreadSeconds();
    for (size_t begin = 0; begin < numel_; begin += kTileElements) {
      function(TileAt(begin));
    }
    return ThreadSeconds() - start;
  }

  // Read and written by one walk.
  double Bytes() const {
    const size_t per_element = 2 * SizeInBytes(dtype_) + 6 * sizeof(float);
    return static_cast<double>(numel_ * per_element);
  }

 private:
  TileView TileAt(size_t begin) {
    TileView view;
    view.gradient = gradient_.data() + begin * SizeInBytes(dtype_);
    view.parameter = parameter_.data() + begin * SizeInBytes(dtype_);
    view.master = master_.data() + begin;
    view.state[0] = exp_avg_.data() + begin;
    view.state[1] = exp_avg_sq_.data() + begin;
    view.numel = kTileElements;
    return view;
  }

  const DType dtype_;
  const size_t numel_;
  std::vector<uint8_t> gradient_;
  std::vector<uint8_t> parameter_;
  std::vector<float> master_;
  std::vector<float> exp_avg_;
  std::vector<float> exp_avg_sq_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2,
                   values.end());
  return values[values.size() / 2];
}

void BM_AdamW(benchmark::State& state, DType dtype) {
  Arrays arrays(dtype, static_cast<size_t>(state.range(0)));
  const UpdateKernel& kernel = **FindUpdateKernel(
      {OptimizerKind::kAdamW, /*amsgrad=*/false, dtype, dtype});
  Hyperparams hyperparams;
  hyperparams.weight_decay = 0.1;
  const UpdateFactors factors = kernel.prepare(hyperparams, 10, 1);

  std::vector<double> ratios;
  for (auto _ : state) {
    const double kernel_s = arrays.Seconds(
        [&](const TileView& view) { kernel.apply(factors, view); });
    const double roof_s = arrays.Seconds(
        [&](const TileView& view) { cpu::MemoryRoof(dtype, view); });
    state.SetIterationTime(kernel_s);
    ratios.push_back(kernel_s / roof_s);
  }
  state.counters["roof_ratio"] = Median(std::move(ratios));
  state.SetBytesProcessed(static_cast<int64_t>(
      arrays.Bytes() * static_cast<double>(state.iterations())));
}

constexpr int64_t kMi = 1 << 20;

BENCHMARK_CAPTURE(BM_AdamW, float32, DType::kFloat32)
    ->Arg(kMi / 16)
    ->Arg(kMi)
    ->Arg(16 * kMi)
    ->Arg(64 * kMi)
    ->UseManualTime();
BENCHMARK_CAPTURE(BM_AdamW, bfloat16, DType::kBFloat16)
    ->Arg(kMi / 16)
    ->Arg(kMi)
    ->Arg(16 * kMi)
    ->Arg(64 * kMi)
    ->UseManualTime();

}  // namespace
}  // namespace optstate
