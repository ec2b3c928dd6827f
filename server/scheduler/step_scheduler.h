#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_

#include <algorithm>
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
#include "server/scheduler/worker_undo.h"
#include "storage/host_tier.h"

namespace optstate {

// What staging does with one piece's gradient.
enum class StageAction : uint8_t {
  kNothing = 0,  // a repeat
  kStage = 1,
};

// Does the arithmetic of a job's steps on the worker pool: statistics and
// accumulation as gradients arrive, the update when the step is decided. Knows
// no rules: who may push what when is the session's business.
//
// Bits: independent of threads, sub-groups, partition and world size. Each
// element is computed by itself; the sum of squares is taken within runs in the
// kernels' order, then over runs in parameter order.
// Crashes: a process that dies in Stage or Apply leaves state that RollBack
// takes to where each run has all of an update, or a push, or nothing of it;
// the same call then does the rest.
// Trust: gradients are arithmetic input. A peer that changes them between
// staging and update gets another sum, and no address or size depends on them.
//
// Threads: one caller at a time. Allocates only in Create and SetPartitions.
class StepScheduler {
 public:
  struct Options {
    const Layout* layout = nullptr;  // outlives this
    uint64_t subgroup_elements = 0;  // 0: the default
    StateArrays arrays;              // valid as long as this
    RecoveryArrays recovery;         // "
    ControlFile* control = nullptr;  // "
    // WorkerUndoBytes(pool->participants()), zeroed or from a former engine.
    absl::Span<std::byte> undo;
    // SpeculationBytes(*layout), likewise; empty: no speculation.
    absl::Span<std::byte> speculation;
    std::byte* parameters = nullptr;  // the parameter area
    WorkerPool* pool = nullptr;
    StepObserver* observer = nullptr;  // tests only
  };

  // A step that will be applied. Runs that carry its stamp have it already.
  struct Update {
    uint64_t step = 0;
    absl::Span<const Hyperparams> groups;
    double gradient_factor = 1;         // clip coefficient / grad_scale
    absl::Span<const uint8_t> updated;  // by parameter: 1: in this step
    absl::Span<const std::byte* const> gradient_areas;  // by rank
    bool speculative = false;                           // set by Speculate()
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

  // Bytes of the undo file for this many workers.
  static uint64_t WorkerUndoBytes(int workers);

  // Takes back what a process that died was writing, in any number of slots:
  // of runs of the update of `step` (0: no step is in progress) the vector in
  // flight, of pushes the whole run. Apply() goes on with the former. Returns
  // how many runs were in flight. DATA_LOSS when a slot is impossible.
  absl::StatusOr<uint64_t> RollBack(uint64_t step);
  // Takes the sums of squares anew of what is accumulated under these epochs
  // (one per rank; 0: the rank has staged nothing).
  void RestoreSums(absl::Span<const uint32_t> epochs);
  // The micro-step up to which a piece is accumulated under this epoch, or -1:
  // of its runs the one that has least. A piece without elements has -1.
  int64_t StagedMicroStep(const Piece& piece, uint32_t epoch) const;
  // Whether the update needs gradients of the rank that lie in its area.
  bool NeedsGradients(uint32_t rank, const Update& update) const;
  // Before the state is loaded anew: no run carries the stamp of a step, and
  // none is to be rolled back.
  void ForgetStep();
  // Before runs change hands between ranks: nothing is accumulated.
  void ForgetStaged();

  // Stages the gradients of the rank's pieces [first_piece, +actions.size()).
  // With accumulation each run is given `staged_mark` (storage/format/
  // rank_mark.h), and one that has it already is left alone.
  void Stage(uint32_t rank, const std::byte* gradient_area, size_t first_piece,
             absl::Span<const StageAction> actions, uint64_t staged_mark);

  // Sum of squares of what was staged for the parameters with updated != 0.
  double SumOfSquares(absl::Span<const uint8_t> updated) const;

  // One fused pass over the state of the updated parameters; writes the
  // parameter area and counts the step for each of them.
  void Apply(const Update& update);

  static uint64_t SpeculationBytes(const Layout& layout);
  // Applies what is known so far of a step that is not decided, and keeps what
  // it overwrites; an Apply() of the same step does the rest. Counts nothing.
  void Speculate(Update update);
  // Puts everything back that was speculated about the step.
  void TakeBackSpeculation(uint64_t step);

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
                     absl::Span<const StageAction> actions,
                     uint64_t staged_mark);
  void StagePiece(const Piece& piece, uint64_t begin, uint64_t end,
                  const std::byte* gradient_area, uint64_t staged_mark);
  void AccumulateRun(uint64_t run, DType dtype, const std::byte* gradient,
                     float* sum, uint64_t numel, uint64_t staged_mark);
  void ApplySubGroup(const RunTable::SubGroup& subgroup, const Update& update);
  void ApplyParameter(uint32_t parameter, uint64_t begin, uint64_t end,
                      const UpdateFactors& factors, const Update& update);
  const void* GradientOf(uint32_t parameter, const PieceTable::Entry& piece,
                         uint64_t begin, const Update& update) const;
  void FinishRunsInFlight(const Update& update);
  void FinishRun(const Update& update, WorkerUndo* undo);
  uint32_t ParameterOfRun(uint64_t run) const;
  TileView ViewOf(uint32_t parameter, uint64_t begin, uint64_t numel) const;
  // Of run `run`: its entry in the speculation file, and where its old values
  // of array 0 (master) or 1 + k (state array k) lie.
  std::atomic<uint64_t>& SpeculatedStep(uint64_t run) const;
  float* SpeculatedArray(int array, uint64_t flat) const;
  void KeepRun(uint64_t run, uint64_t step, const TileView& view,
               uint64_t flat);
  void TakeBackRun(uint32_t parameter, uint64_t run, uint64_t begin,
                   uint64_t numel);
  void CountStep(absl::Span<const uint8_t> updated);
  absl::Span<WorkerUndo> worker_undos() const;
  WorkerUndo& worker_undo() const;
  template <typename Visitor>
  void ForEachRunOf(uint32_t parameter, const Visitor& visit) const;
  absl::Status RollBackRun(WorkerUndo* undo);
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

template <typename Visitor>
void StepScheduler::ForEachElementRange(uint32_t first_parameter,
                                        const Visitor& visit) {
  const Layout& layout = *options_.layout;
  options_.pool->ParallelFor(runs_.subgroups().size(), [&](size_t i) {
    const RunTable::SubGroup& subgroup = runs_.subgroups()[i];
    for (uint32_t p = std::max(first_parameter, subgroup.first_parameter);
         p < subgroup.end_parameter; ++p) {
      const uint64_t flat = layout.flat_offset(p);
      const uint64_t begin = std::max(flat, subgroup.begin);
      const uint64_t end =
          std::min(flat + static_cast<uint64_t>(layout.parameters()[p].numel),
                   subgroup.end);
      if (begin < end) visit(p, begin - flat, end - begin);
    }
  });
}

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
