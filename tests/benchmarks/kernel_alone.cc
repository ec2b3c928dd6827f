#include "tests/benchmarks/kernel_alone.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/types/span.h"
#include "kernels/reduce.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

enum Array : size_t { kGradient, kParameter, kMaster, kExpAvg, kExpAvgSq };
constexpr size_t kArrays = 5;

// The byte makes about 0.75 in every dtype.
constexpr int kGradientByte = 0x3f;

size_t ElementBytes(size_t array, DType dtype) {
  return array <= kParameter ? SizeInBytes(dtype) : sizeof(float);
}

}  // namespace

KernelAlone::KernelAlone(DType dtype, size_t numel, size_t threads)
    : dtype_(dtype),
      numel_(numel),
      threads_(threads),
      sums_(threads),
      barrier_(static_cast<std::ptrdiff_t>(threads + 1)) {}

absl::StatusOr<std::unique_ptr<KernelAlone>> KernelAlone::Create(
    DType dtype, size_t numel, size_t threads) {
  std::unique_ptr<KernelAlone> alone(new KernelAlone(dtype, numel, threads));
  OPTSTATE_ASSIGN_OR_RETURN(
      alone->kernel_,
      kernels::FindUpdateKernel({.optimizer = OptimizerKind::kAdamW,
                                 .options = 0,
                                 .gradient = dtype,
                                 .parameter = dtype}));
  kernels::UpdateInput input;
  input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  input.step_count = 100;
  alone->factors_ = alone->kernel_->prepare(input);
  for (size_t array = 0; array < kArrays; ++array) {
    OPTSTATE_ASSIGN_OR_RETURN(
        shm::SealedSegment segment,
        shm::SealedSegment::Create("kernel-alone",
                                   numel * ElementBytes(array, dtype)));
    std::memset(segment.data(), array == kGradient ? kGradientByte : 0,
                segment.size());
    alone->arrays_.push_back(std::move(segment));
  }
  for (size_t thread = 0; thread < threads; ++thread) {
    alone->team_.emplace_back(
        [self = alone.get(), thread] { self->Serve(thread); });
  }
  return alone;
}

KernelAlone::~KernelAlone() {
  if (team_.empty()) return;
  work_ = Work::kEnd;
  barrier_.arrive_and_wait();
  for (std::thread& thread : team_) thread.join();
}

double KernelAlone::Update() { return Run(Work::kUpdate); }

double KernelAlone::SumOfSquares() { return Run(Work::kSumOfSquares); }

double KernelAlone::Run(Work work) {
  work_ = work;
  const auto begin = std::chrono::steady_clock::now();
  barrier_.arrive_and_wait();
  barrier_.arrive_and_wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

void KernelAlone::Serve(size_t thread) {
  const size_t tiles = (numel_ + kTileElements - 1) / kTileElements;
  const size_t first = tiles * thread / threads_ * kTileElements;
  const size_t last =
      std::min(tiles * (thread + 1) / threads_ * kTileElements, numel_);
  while (true) {
    barrier_.arrive_and_wait();
    if (work_ == Work::kEnd) return;
    double sum = 0;
    for (size_t begin = first; begin < last; begin += kTileElements) {
      const size_t numel = std::min<size_t>(kTileElements, last - begin);
      if (work_ == Work::kUpdate) {
        UpdateTile(begin, numel);
      } else {
        sum += kernels::SumOfSquares(
            dtype_, arrays_[kGradient].data() + begin * SizeInBytes(dtype_),
            numel);
      }
    }
    sums_[thread] = sum;
    barrier_.arrive_and_wait();
  }
}

void KernelAlone::UpdateTile(size_t begin, size_t numel) {
  const auto floats = [&](size_t array) {
    return reinterpret_cast<float*>(arrays_[array].data()) + begin;
  };
  const void* const gradient =
      arrays_[kGradient].data() + begin * SizeInBytes(dtype_);
  kernels::TileView view;
  view.gradients = absl::MakeConstSpan(&gradient, 1);
  view.parameter = arrays_[kParameter].data() + begin * SizeInBytes(dtype_);
  view.master = floats(kMaster);
  if (dtype_ == DType::kFloat32) view.parameter = view.master;
  view.state[0] = floats(kExpAvg);
  view.state[1] = floats(kExpAvgSq);
  view.numel = numel;
  kernel_->apply(factors_, view);
}

}  // namespace optstate
