#ifndef OPTSTATE_TESTS_BENCHMARKS_TENSORS_STEP_H_
#define OPTSTATE_TESTS_BENCHMARKS_TENSORS_STEP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"
#include "tests/benchmarks/additions.h"
#include "tests/benchmarks/tensors_step_c.h"

namespace optstate {

// The threads of an engine, each with its undo slot.
struct Workers {
  explicit Workers(int threads)
      : pool(threads, /*spin=*/true), undo(static_cast<size_t>(threads)) {}

  scheduler::WorkerPool pool;
  std::vector<scheduler::WorkerUndo> undo;
};

// An AdamW step on the caller's tensors, walked as the daemon walks a job: runs
// of at most a tile, each begun and ended in the worker's undo slot; runs of
// one range in a row by one thread. Facts known before the step are laid out
// once. The daemon's messages, norm and commit record are left out.
//
// Threads: one step at a time.
class TensorsStep {
 public:
  static absl::StatusOr<std::unique_ptr<TensorsStep>> Create(
      const kernels::UpdateKernelKey& key, size_t gradients,
      absl::Span<const OptstateBenchTensor> tensors, Workers* workers);

  void Update(const kernels::UpdateInput& input);
  // Makes the same walk, loads and stores with additions only (additions.h).
  void AddOnly(AdditionsOrder order);

 private:
  // A part of one tensor within one tile.
  struct Run {
    uint32_t tensor;
    uint32_t numel;
    uint64_t begin;
    uint64_t flat_begin;
  };

  TensorsStep(const kernels::UpdateKernelKey& key, size_t gradients,
              Workers* workers)
      : key_(key), gradients_(gradients), workers_(workers) {}
  void CutTensors();
  void CutRanges(uint64_t flat_elements);
  template <typename Visitor>
  void ForEachRun(const Visitor& visit);
  kernels::TileView ViewOf(const Run& run, const void** gradients) const;

  const kernels::UpdateKernelKey key_;
  const size_t gradients_;
  Workers* const workers_;
  const kernels::UpdateKernel* kernel_ = nullptr;
  std::vector<OptstateBenchTensor> tensors_;
  std::vector<Run> runs_;
  std::vector<size_t> ranges_;  // of runs: the first of each, and their number
  std::vector<std::atomic<uint64_t>> stamps_;  // of runs
};

}  // namespace optstate

#endif  // OPTSTATE_TESTS_BENCHMARKS_TENSORS_STEP_H_
