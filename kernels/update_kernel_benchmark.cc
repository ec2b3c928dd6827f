// Measures AdamW on one core, next to what memory allows.
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

#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "kernels/cpu/memory_roof.h"
#include "kernels/segment_array.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"

namespace optstate::kernels {
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
        // The bytes make about 0.75 in either dtype.
        gradient_(numel * SizeInBytes(dtype), uint8_t{0x3F}),
        parameter_(numel * SizeInBytes(dtype)),
        master_(numel, 1.0f),
        exp_avg_(numel, 0.5f),
        exp_avg_sq_(numel, 0.5f) {}

  // Returns seconds of this thread's time: other programs on the machine take
  // nothing from it.
  template <typename Function>
  double Seconds(Function function) {
    const double start = ThreadSeconds();
    for (size_t begin = 0; begin < numel_; begin += kTileElements) {
      const void* const gradient =
          gradient_.data() + begin * SizeInBytes(dtype_);
      TileView view = TileAt(begin);
      view.gradients = absl::MakeConstSpan(&gradient, 1);
      function(view);
    }
    return ThreadSeconds() - start;
  }

  // Returns the bytes that one walk reads and writes.
  double Bytes() const {
    // A parameter of floats is its own master.
    const size_t parameter =
        dtype_ == DType::kFloat32 ? 0 : SizeInBytes(dtype_);
    const size_t per_element =
        SizeInBytes(dtype_) + parameter + 6 * sizeof(float);
    return static_cast<double>(numel_ * per_element);
  }

 private:
  TileView TileAt(size_t begin) {
    TileView view;
    view.parameter = parameter_.data() + begin * SizeInBytes(dtype_);
    view.master = master_.data() + begin;
    if (dtype_ == DType::kFloat32) view.parameter = view.master;
    view.state[0] = exp_avg_.data() + begin;
    view.state[1] = exp_avg_sq_.data() + begin;
    view.numel = kTileElements;
    return view;
  }

  const DType dtype_;
  const size_t numel_;
  SegmentArray<uint8_t> gradient_;
  SegmentArray<uint8_t> parameter_;
  SegmentArray<float> master_;
  SegmentArray<float> exp_avg_;
  SegmentArray<float> exp_avg_sq_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2,
                   values.end());
  return values[values.size() / 2];
}

void BM_AdamW(benchmark::State& state, DType dtype) {
  Arrays arrays(dtype, static_cast<size_t>(state.range(0)));
  const UpdateKernel& kernel =
      **FindUpdateKernel({OptimizerKind::kAdamW, /*options=*/0, dtype, dtype});
  UpdateInput input;
  input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  input.step_count = 10;
  const UpdateFactors factors = kernel.prepare(input);

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

// The state of AdamW, zeros, in one of the formats; the rest in float32 or
// dtype.
class FormatArrays {
 public:
  FormatArrays(DType dtype, StateFormat state, size_t numel)
      : dtype_(dtype),
        numel_(numel),
        state_bytes_(state == StateFormat::kFloat32    ? 4
                     : state == StateFormat::kBFloat16 ? 2
                                                       : 1),
        kernel_(**FindUpdateKernel(
            {OptimizerKind::kAdamW, /*options=*/0, dtype, dtype, state})),
        gradient_(numel * SizeInBytes(dtype), uint8_t{0x3F}),
        parameter_(numel * SizeInBytes(dtype)),
        master_(numel, 1.0f) {
    for (int k = 0; k < 2; ++k) {
      state_.emplace_back(numel * state_bytes_);
      scale_.emplace_back(numel / kQuantizedBlockElements);
    }
  }

  // Returns the seconds of one walk.
  double Seconds(const UpdateInput& input) {
    const UpdateFactors factors = kernel_.prepare(input);
    const double start = ThreadSeconds();
    for (size_t begin = 0; begin < numel_; begin += kTileElements) {
      const void* const gradient =
          gradient_.data() + begin * SizeInBytes(dtype_);
      TileView view;
      view.gradients = absl::MakeConstSpan(&gradient, 1);
      view.parameter = parameter_.data() + begin * SizeInBytes(dtype_);
      view.master = master_.data() + begin;
      for (int k = 0; k < 2; ++k) {
        view.state[k] = state_[k].data() + begin * state_bytes_;
        view.scale[k] = scale_[k].data() + begin / kQuantizedBlockElements;
      }
      view.numel = kTileElements;
      view.flat_begin = begin;
      kernel_.apply(factors, view);
    }
    return ThreadSeconds() - start;
  }

 private:
  const DType dtype_;
  const size_t numel_;
  const size_t state_bytes_;
  const UpdateKernel& kernel_;
  SegmentArray<uint8_t> gradient_;
  SegmentArray<uint8_t> parameter_;
  SegmentArray<float> master_;
  std::vector<SegmentArray<uint8_t>> state_;
  std::vector<SegmentArray<float>> scale_;
};

// The formats take turns.
//   bfloat16_speed, dynamic8_speed  median of time with float32 state / time
void BM_StateFormat(benchmark::State& state, DType dtype) {
  const auto numel = static_cast<size_t>(state.range(0));
  FormatArrays floats(dtype, StateFormat::kFloat32, numel);
  FormatArrays halves(dtype, StateFormat::kBFloat16, numel);
  FormatArrays bytes(dtype, StateFormat::kDynamic8, numel);
  UpdateInput input;
  input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  std::vector<double> of_halves;
  std::vector<double> of_bytes;
  for (auto _ : state) {
    ++input.step_count;
    const double floats_s = floats.Seconds(input);
    of_halves.push_back(floats_s / halves.Seconds(input));
    of_bytes.push_back(floats_s / bytes.Seconds(input));
    state.SetIterationTime(floats_s);
  }
  state.counters["bfloat16_speed"] = Median(std::move(of_halves));
  state.counters["dynamic8_speed"] = Median(std::move(of_bytes));
}

constexpr int64_t kMi = 1 << 20;

BENCHMARK_CAPTURE(BM_StateFormat, float32, DType::kFloat32)
    ->Arg(kMi / 16)
    ->Arg(kMi)
    ->Arg(32 * kMi)
    ->UseManualTime();
BENCHMARK_CAPTURE(BM_StateFormat, bfloat16, DType::kBFloat16)
    ->Arg(kMi / 16)
    ->Arg(kMi)
    ->Arg(32 * kMi)
    ->UseManualTime();

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
}  // namespace optstate::kernels
