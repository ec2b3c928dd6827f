#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/hyperparams.h"
#include "kernels/update_kernel.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"
#include "server/scheduler/piece_table.h"
#include "server/scheduler/run_table.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/worker_pool.h"
#include "storage/host_tier.h"

namespace optstate {

// What staging does with one piece's gradient.
enum class StageAction : uint8_t {
  kNothing = 0,  // a repeat
  kFirst = 1,    // the piece's first gradient in this step
  kAdd = 2,      // a further micro-step (accumulation only)
};

// Does the arithmetic of a job's steps on the worker pool: statistics and
// accumulation as gradients arrive, the update when the step is decided. Knows
// no rules: who may push what when is the session's business.
//
// Bits: independent of threads, sub-groups, partition and world size. Each
// element is computed by itself; the sum of squares is taken within runs in the
// kernels' order, then over runs in parameter order.
// Trust: gradients are arithmetic input. A peer that changes them between
// staging and update gets another sum, and no address or size depends on them.
//
// Threads: one caller at a time. Allocates only in Create and SetPartitions.
class StepScheduler {
 public:
  struct Options {
    const Layout* layout = nullptr;   // outlives this
    uint64_t subgroup_elements = 0;   // 0: the default
    StateArrays arrays;               // valid as long as this
    std::byte* parameters = nullptr;  // the parameter area
    WorkerPool* pool = nullptr;
    StepObserver* observer = nullptr;  // tests only
  };

  // A step that will be applied.
  struct Update {
    uint64_t step = 0;
    absl::Span<const Hyperparams> groups;
    double gradient_factor = 1;         // clip coefficient / grad_scale
    absl::Span<const uint8_t> updated;  // by parameter: 1: in this step
    absl::Span<const std::byte* const> gradient_areas;  // by rank
  };

  // UNIMPLEMENTED when a parameter's dtypes have no kernel.
  static absl::Status CheckKernels(const Layout& layout, bool accumulate);
  // With arrays.accumulator gradients are summed in fp32 as they are staged,
  // and the update takes the sums.
  static absl::StatusOr<std::unique_ptr<StepScheduler>> Create(
      const Options& options);

  // One partition per rank; they outlive this or the next call.
  void SetPartitions(absl::Span<const RankPartition> partitions);
  const PieceTable& pieces() const { return *pieces_; }

  // Stages the gradients of the rank's pieces [first_piece, +actions.size()).
  void Stage(uint32_t rank, const std::byte* gradient_area, size_t first_piece,
             absl::Span<const StageAction> actions);

  // Sum of squares of what was staged for the parameters with updated != 0.
  double SumOfSquares(absl::Span<const uint8_t> updated) const;

  // One fused pass over the state of the updated parameters; writes the
  // parameter area and counts the step for each of them.
  void Apply(const Update& update);

  // Writes the parameter area of parameters [first, count) from the masters.
  void CastParameters(uint32_t first_parameter);
  // Zeroes all state of parameters [first, count).
  void ClearState(uint32_t first_parameter);

 private:
  // Of the parameters of one group: where the kernel's state arrays are.
  using StateBases = std::array<float*, kMaxStateArrays>;

  explicit StepScheduler(const Options& options);
  absl::Status ResolveKernels();
  void StageSubGroup(const RunTable::SubGroup& subgroup, uint32_t rank,
                     const std::byte* gradient_area, size_t first_piece,
                     absl::Span<const StageAction> actions);
  void StagePiece(const Piece& piece, uint64_t begin, uint64_t end,
                  const std::byte* gradient_area, StageAction action);
  void ApplySubGroup(const RunTable::SubGroup& subgroup, const Update& update);
  void ApplyParameter(uint32_t parameter, uint64_t begin, uint64_t end,
                      const UpdateFactors& factors, const Update& update);
  void ApplyRun(uint32_t parameter, uint64_t begin, uint64_t numel,
                const void* gradient, const UpdateFactors& factors);
  template <typename Visitor>
  void ForEachElementRange(uint32_t first_parameter, const Visitor& visit);

  const Options options_;
  const RunTable runs_;
  std::vector<const UpdateKernel*> kernels_;  // by parameter
  std::vector<StateBases> state_;             // by group
  std::vector<double> run_sums_;              // by run
  absl::Span<const RankPartition> partitions_;
  std::optional<PieceTable> pieces_;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
