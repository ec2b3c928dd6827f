#ifndef OPTSTATE_SERVER_SCHEDULER_PASSES_GRADIENT_STAGER_H_
#define OPTSTATE_SERVER_SCHEDULER_PASSES_GRADIENT_STAGER_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "proto/types/partition.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_addresses.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"

namespace optstate::scheduler {

// The action of staging on one piece's gradient.
enum class StageAction : uint8_t {
  kNothing = 0,  // a repeat
  kStage = 1,
};

// A request to stage the rank's pieces [first_piece, +actions.size()). When
// replicated, the gradients are those of the ranks that have pushed the
// parameter, at least one, in `gradient_areas` (by rank).
// With accumulation each run is given `staged_mark` (storage/format/
// rank_mark.h), and one that has it already is left alone.
struct StagingRequest {
  static bool HasEveryRank(uint32_t /*rank*/, uint32_t /*parameter*/) {
    return true;
  }

  uint32_t rank = 0;
  absl::Span<const std::byte* const> gradient_areas;
  size_t first_piece = 0;
  absl::Span<const StageAction> actions;
  uint64_t staged_mark = 0;
  absl::FunctionRef<bool(uint32_t rank, uint32_t parameter)> has_pushed =
      HasEveryRank;
};

// Takes gradients in as they arrive: their sums of squares by run, and with
// accumulation the sums of micro-steps, whose squares those are then. After the
// last micro-step these are the squares of the whole gradient.
//
// Threads: one caller at a time.
class GradientStager {
 public:
  // All outlive this. `sums_of_squares` has one number for each run.
  GradientStager(const StepPlan* plan, const StepMemory* memory,
                 UpdateExecutor* executor, absl::Span<double> sums_of_squares)
      : plan_(*plan),
        memory_(*memory),
        executor_(*executor),
        addresses_(plan, memory->store),
        sums_of_squares_(sums_of_squares) {}

  void Stage(const StagingRequest& staging);

 private:
  using Visit = absl::FunctionRef<void(const ReduceTask&)>;

  void StageGrain(const SubGroup& grain, const StagingRequest& staging,
                  Visit visit) const;
  void StagePiece(const StagingRequest& staging, const Piece& piece,
                  uint64_t begin, uint64_t end, ReduceTask* task,
                  GradientAddresses::Buffer* buffer, Visit visit) const;
  bool SetSumTarget(uint32_t parameter, uint64_t begin, uint64_t staged_mark,
                    ReduceTask* task) const;

  const StepPlan& plan_;
  const StepMemory& memory_;
  UpdateExecutor& executor_;
  const GradientAddresses addresses_;
  const absl::Span<double> sums_of_squares_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_PASSES_GRADIENT_STAGER_H_
