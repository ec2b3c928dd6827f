#include "tests/benchmarks/tensors_step.h"

#include <algorithm>

#include "proto/types/layout.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

// The most that a thread takes at a time: as the daemon does where a step is
// large, less where it is so small that threads would go without.
constexpr uint64_t kRangeElementsMax = 262144;
constexpr uint64_t kRangesPerThread = 4;

constexpr uint64_t RoundedUp(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorsStep>> TensorsStep::Create(
    const kernels::UpdateKernelKey& key, size_t gradients,
    absl::Span<const OptstateBenchTensor> tensors, Workers* workers) {
  std::unique_ptr<TensorsStep> step(new TensorsStep(key, gradients, workers));
  OPTSTATE_ASSIGN_OR_RETURN(step->kernel_, kernels::FindUpdateKernel(key));
  step->tensors_.assign(tensors.begin(), tensors.end());
  step->CutTensors();
  return step;
}

void TensorsStep::CutTensors() {
  uint64_t flat = 0;
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    const uint64_t numel = tensors_[tensor].numel;
    uint64_t begin = 0;
    while (begin < numel) {
      const uint64_t in_tile = kTileElements - (flat + begin) % kTileElements;
      const uint64_t length = std::min(in_tile, numel - begin);
      runs_.push_back(
          {tensor, static_cast<uint32_t>(length), begin, flat + begin});
      begin += length;
    }
    flat += RoundedUp(numel, kQuantizedBlockElements);
  }
  stamps_ = std::vector<std::atomic<uint64_t>>(runs_.size());
  CutRanges(flat);
}

void TensorsStep::CutRanges(uint64_t flat_elements) {
  const uint64_t share =
      flat_elements /
      (kRangesPerThread * static_cast<uint64_t>(workers_->pool.participants()));
  const uint64_t length =
      std::min(RoundedUp(std::max<uint64_t>(share, 1), kTileElements),
               kRangeElementsMax);
  uint64_t next = 0;
  for (size_t run = 0; run < runs_.size(); ++run) {
    if (runs_[run].flat_begin < next) continue;
    ranges_.push_back(run);
    next = runs_[run].flat_begin / length * length + length;
  }
  ranges_.push_back(runs_.size());
}

template <typename Visitor>
void TensorsStep::ForEachRun(const Visitor& visit) {
  workers_->pool.ParallelFor(ranges_.size() - 1, [&](size_t range) {
    // The variable is found once for all runs: in a library that Python has
    // loaded among others, glibc 2.36 takes 400 ns to find a thread's variable.
    scheduler::WorkerUndo& undo = workers_->undo[static_cast<size_t>(
        scheduler::WorkerPool::CurrentParticipant())];
    for (size_t run = ranges_[range]; run < ranges_[range + 1]; ++run) {
      visit(run, undo);
    }
  });
}

kernels::TileView TensorsStep::ViewOf(const Run& run,
                                      const void** gradients) const {
  const OptstateBenchTensor& tensor = tensors_[run.tensor];
  const auto at = [&](auto* array, uint64_t bytes) {
    return static_cast<std::byte*>(array) + bytes;
  };
  for (size_t k = 0; k < gradients_; ++k) {
    gradients[k] = static_cast<const std::byte*>(tensor.gradients[k]) +
                   run.begin * SizeInBytes(key_.gradient);
  }
  kernels::TileView view;
  view.gradients = absl::MakeConstSpan(gradients, gradients_);
  view.parameter =
      at(tensor.parameter, run.begin * SizeInBytes(key_.parameter));
  const bool is_split = key_.master == MasterFormat::kSplit;
  view.master = at(tensor.master, run.begin * (is_split ? 2 : sizeof(float)));
  for (size_t k = 0; k < std::size(tensor.state); ++k) {
    view.state[k] = at(tensor.state[k], run.begin * SizeInBytes(key_.state));
    if (tensor.scale[k] == nullptr) continue;
    view.scale[k] = tensor.scale[k] + run.begin / kQuantizedBlockElements;
  }
  view.numel = run.numel;
  view.flat_begin = run.flat_begin;
  return view;
}

void TensorsStep::Update(const kernels::UpdateInput& input) {
  const kernels::UpdateFactors factors = kernel_->prepare(input);
  ForEachRun([&](size_t run, scheduler::WorkerUndo& undo) {
    const void* gradients[kOptstateBenchGradientsMax];
    kernels::TileView view = ViewOf(runs_[run], gradients);
    undo.Begin(scheduler::UndoKind::kUpdate, run, input.step);
    view.undo = &undo.slot;
    kernel_->apply(factors, view);
    undo.End(&stamps_[run]);
  });
}

void TensorsStep::AddOnly(AdditionsOrder order) {
  ForEachRun([&](size_t run, scheduler::WorkerUndo& /*undo*/) {
    const void* gradients[kOptstateBenchGradientsMax];
    Additions(key_.gradient, ViewOf(runs_[run], gradients), order);
  });
}

}  // namespace optstate
