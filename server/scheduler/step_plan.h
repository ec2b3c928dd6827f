#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_PLAN_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_PLAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "proto/types/runs.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/piece_table.h"

namespace optstate::scheduler {

// All that the steps of a job have in common: the layout, the kernels of its
// parameters, the ranges that are staged at a time, and which rank has which
// piece of which gradient. The rooms of the scheduler read it and nothing of
// each other's.
//
// Immutable between two calls of SetPartitions(), which is made between steps.
// Threads: SetPartitions() by one thread while no other uses the plan; the rest
// is const.
class StepPlan {
 public:
  // The kernel of a parameter: its arithmetic by name, for any device, and the
  // functions of it that run here.
  struct Kernel {
    kernels::UpdateKernelKey key;
    const kernels::UpdateKernel* functions = nullptr;
  };

  // Returns UNIMPLEMENTED when a parameter's dtypes have no kernel,
  // INVALID_ARGUMENT when a non-separable update cannot take its shape.
  static absl::Status CheckKernels(const Layout& layout,
                                   Accumulation accumulation);
  // Makes a plan without pieces. `layout` outlives it; `grain_elements` is as
  // in SubGroupTable.
  static absl::StatusOr<std::unique_ptr<StepPlan>> Make(
      const Layout* layout, Accumulation accumulation, uint64_t grain_elements);

  // Sets one partition per rank; they must live until the next call or this
  // object's end. When replicated, each rank has all parameters, and their
  // gradients are summed.
  void SetPartitions(absl::Span<const RankPartition> partitions,
                     bool replicated);

  const Layout& layout() const { return layout_; }
  // Returns the ranges that a worker stages at a time, however large records
  // are.
  const SubGroupTable& grains() const { return grains_; }
  bool accumulates() const { return accumulation_.has_value(); }
  uint64_t numel(uint32_t parameter) const {
    return static_cast<uint64_t>(layout_.parameters()[parameter].numel);
  }
  // Returns the dtype of what is reduced and updated with: of the sums of
  // micro-steps, without accumulation of the gradients themselves.
  DType sum_dtype(uint32_t parameter) const {
    return accumulation_ == AccumulateDType::kFloat32
               ? DType::kFloat32
               : layout_.parameters()[parameter].gradient_dtype;
  }

  // Returns null for optimizers whose update is separable; else kernel() has
  // none.
  const kernels::WholeKernel* non_separable_kernel() const {
    return non_separable_;
  }
  const Kernel& kernel(uint32_t parameter) const { return kernels_[parameter]; }
  // Returns the kernel of the same update that is given the sum of the
  // gradients, in float, in their place.
  const Kernel& sum_kernel(uint32_t parameter) const {
    return sum_kernels_[parameter];
  }

  absl::Span<const RankPartition> partitions() const { return partitions_; }
  bool is_replicated() const { return is_replicated_; }
  const PieceTable& pieces() const { return *pieces_; }
  // Returns the pieces of a parameter; when replicated, the first rank stands
  // for all.
  absl::Span<const PieceTable::Entry> OwnersOf(uint32_t parameter) const {
    const auto pieces = pieces_->pieces(parameter);
    return pieces.first(is_replicated_ ? 1 : pieces.size());
  }

  // Returns the parameter that has the run.
  uint32_t ParameterOfRun(uint64_t run) const;
  // Calls visit(run, begin, numel) for the runs of a parameter, in order.
  template <typename Visitor>
  void ForEachRunOf(uint32_t parameter, const Visitor& visit) const {
    ForEachRun(layout_, parameter, 0, numel(parameter), visit);
  }
  // Calls visit(parameter, begin, end) for the elements of each parameter that
  // lie in the range.
  template <typename Visitor>
  void ForEachParameterIn(const SubGroup& range, const Visitor& visit) const {
    for (uint32_t p = range.first_parameter; p < range.end_parameter; ++p) {
      const uint64_t flat = layout_.flat_offset(p);
      const uint64_t begin = std::max(flat, range.begin);
      const uint64_t end = std::min(flat + numel(p), range.end);
      if (begin < end) visit(p, begin - flat, end - flat);
    }
  }

  // Returns the bytes of gradients, state and parameters that an update of
  // these reads and writes, without the undo slots, which stay in the caches.
  uint64_t UpdateBytes(absl::Span<const uint8_t> updated) const;

 private:
  StepPlan(const Layout* layout, Accumulation accumulation,
           uint64_t grain_elements)
      : layout_(*layout),
        accumulation_(accumulation),
        grains_(layout, grain_elements, SubGroupTable::Cut::kTiles) {}
  uint64_t UpdateBytesOf(uint32_t parameter) const;

  const Layout& layout_;
  const Accumulation accumulation_;
  const SubGroupTable grains_;
  const kernels::WholeKernel* non_separable_ = nullptr;
  std::vector<Kernel> kernels_;      // by parameter
  std::vector<Kernel> sum_kernels_;  // by parameter
  absl::Span<const RankPartition> partitions_;
  bool is_replicated_ = false;
  std::optional<PieceTable> pieces_;
  std::vector<uint64_t> update_bytes_;  // by parameter
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_PLAN_H_
