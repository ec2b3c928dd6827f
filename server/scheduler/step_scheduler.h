#ifndef OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
#define OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/update_kernel.h"
#include "kernels/whole_kernel.h"
#include "proto/types/accumulation.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/first_error.h"
#include "server/scheduler/numa_memory.h"
#include "server/scheduler/piece_table.h"
#include "server/scheduler/step_observer.h"
#include "server/scheduler/worker_placement.h"
#include "server/scheduler/worker_pool.h"
#include "server/scheduler/worker_undo.h"
#include "storage/format/step_intent.h"
#include "storage/host_tier.h"
#include "storage/state_store.h"

namespace optstate {

// The action of staging on one piece's gradient.
enum class StageAction : uint8_t {
  kNothing = 0,  // a repeat
  kStage = 1,
};

// Does the arithmetic of a job's steps on the worker pool: statistics and
// accumulation as gradients arrive, the update when the step is decided. Knows
// no rules: the session decides which rank may push what when.
//
// Bits: independent of threads, sub-groups, partition and world size. Each
// element is computed by itself; the sum of squares is taken within runs in the
// kernels' order, then over the runs of each parameter, then over parameters.
// Crashes: a process that dies in Stage or Apply leaves state that RollBack
// brings to a point where each run has all of an update, or a push, or nothing
// of it; the same call then does the rest.
// Trust: gradients are arithmetic input. A peer that changes them between
// staging and update gets another sum, and no address or size depends on them.
//
// Threads: one caller at a time. Allocates only in Create and SetPartitions.
class StepScheduler {
 public:
  struct Options {
    StateStore* store = nullptr;     // outlives this, with its layout
    uint64_t grain_elements = 0;     // see SubGroupTable; 0: the default
    RecoveryArrays recovery;         // valid as long as this
    ControlFile* control = nullptr;  // "
    // WorkerUndoBytes(pool->participants()), zeroed or from a former engine.
    absl::Span<std::byte> undo;
    // RedoBytes(*layout, pool->participants()), likewise.
    absl::Span<std::byte> redo;
    // SpeculationBytes(*layout), likewise; empty: no speculation.
    absl::Span<std::byte> speculation;
    WorkerPool* pool = nullptr;
    StepObserver* observer = nullptr;  // tests only
  };

  // The update of one group; its factor is clip coefficient / grad_scale.
  using GroupUpdate = StepIntentGroup;

  // A step that will be applied. Runs that carry its stamp have it already.
  struct Update {
    uint64_t step = 0;
    absl::Span<const GroupUpdate> groups;
    double gradient_limit = 0;          // see UpdateInput
    absl::Span<const uint8_t> updated;  // by parameter: 1: in this step
    // When replicated, by parameter, bit r: rank r's gradient is in the sum.
    // Empty: the gradients of all ranks are.
    absl::Span<const uint64_t> pushed_by;
    absl::Span<const std::byte* const> gradient_areas;  // by rank
    bool speculative = false;                           // set by Speculate()

    bool HasPushed(uint32_t rank, uint32_t parameter) const {
      return pushed_by.empty() || (pushed_by[parameter] >> rank & 1) != 0;
    }
  };

  // Returns UNIMPLEMENTED when a parameter's dtypes have no kernel.
  static absl::Status CheckKernels(const Layout& layout,
                                   Accumulation accumulation);
  // Creates a scheduler. With accumulators, gradients are summed as they are
  // staged, those of several ranks in fp32 first, and the update takes the
  // sums.
  static absl::StatusOr<std::unique_ptr<StepScheduler>> Create(
      const Options& options);

  // Moves the state to the nodes whose workers own it, when there are several.
  // Returns the first error; memory that could not be moved stays in use where
  // it is.
  absl::Status MoveToNodes(const WorkerPlacement& placement);

  // Sets one partition per rank; they must live until the next call or this
  // object's end. When replicated, each rank has all parameters, and their
  // gradients are summed.
  void SetPartitions(absl::Span<const RankPartition> partitions,
                     bool replicated);
  const PieceTable& pieces() const { return *pieces_; }

  // Returns the bytes of the undo file for this many workers.
  static uint64_t WorkerUndoBytes(int workers);
  // Returns the bytes of the redo file; 0: the optimizer needs none.
  static uint64_t RedoBytes(const Layout& layout, int workers);
  // Returns the bytes of the process's own memory that Create takes for
  // non-separable updates, which need a whole parameter; 0: the optimizer has
  // none.
  static uint64_t WorkspaceBytes(const Layout& layout, int workers);
  // Returns the bytes that the redo file of an engine that died must have for
  // the runs that its undo slots name.
  static uint64_t RedoBytesInUse(const Layout& layout,
                                 absl::Span<const std::byte> undo);

  // Rolls back what a process that died was writing, in any number of slots: in
  // runs of the update of `step` (0: no step is in progress) the vectors in
  // flight (Apply() finishes those with a kept xor), in pushes the whole run.
  // Apply() goes on with the former. Returns the number of runs that were in
  // flight. DATA_LOSS when a slot is impossible.
  absl::StatusOr<uint64_t> RollBack(uint64_t step);
  // Returns DATA_LOSS when a run is stamped with a step after `last_step`, the
  // last that can have begun: the update of that step would leave the run out.
  absl::Status CheckStamps(uint64_t last_step) const;
  // Recomputes the sums of squares of what is accumulated under these epochs
  // (one per rank; 0: the rank has staged nothing).
  void RestoreSums(absl::Span<const uint32_t> epochs);
  // Returns the micro-step up to which a piece is accumulated under this epoch,
  // or -1: the least of its runs. A piece without elements has -1.
  int64_t StagedMicroStep(const Piece& piece, uint32_t epoch) const;
  // Returns whether the update needs gradients that lie in the rank's area.
  bool NeedsGradients(uint32_t rank, const Update& update) const;
  // Clears the stamps of all runs and the undo slots, before the state is
  // loaded anew.
  void ForgetStep();
  // Clears the marks of what is accumulated, before runs change hands between
  // ranks.
  void ForgetStaged();

  // A request to stage the rank's pieces [first_piece, +actions.size()). When
  // replicated, the gradients are those of the ranks that have pushed the
  // parameter, at least one, in `gradient_areas` (by rank).
  // With accumulation each run is given `staged_mark` (storage/format/
  // rank_mark.h), and one that has it already is left alone.
  struct Staging {
    uint32_t rank = 0;
    absl::Span<const std::byte* const> gradient_areas;
    size_t first_piece = 0;
    absl::Span<const StageAction> actions;
    uint64_t staged_mark = 0;
    absl::FunctionRef<bool(uint32_t rank, uint32_t parameter)> has_pushed =
        HasEveryRank;
  };
  void Stage(const Staging& staging);

  // Returns the sum of squares of what was staged for the parameters with
  // updated != 0, and writes that of each group to `by_group`. Squares are
  // added up within each parameter first, in the order of its runs, then over
  // parameters in their order, so that the sums of parameters alone give the
  // same bits.
  double SumOfSquares(absl::Span<const uint8_t> updated,
                      absl::Span<double> by_group) const;
  // Writes the norm of each parameter, 0 with updated == 0.
  void NormsByParameter(absl::Span<const uint8_t> updated,
                        absl::Span<double> norms) const;
  // Returns the L1 norm (type 1) or the largest absolute value (infinity) of
  // the same gradients, which are read once more.
  double Norm(double type, const Update& update);

  // Makes one fused pass over the state of the updated parameters; writes the
  // parameter area and counts the step for each parameter. An error is one of
  // the store: a part of the runs has the step, and the same call, of this or a
  // later process, does the rest.
  absl::Status Apply(const Update& update);

  // Returns the bytes of gradients, state and parameters that an Apply() of
  // these reads and writes, without the undo slots, which stay in the caches.
  uint64_t UpdateBytes(absl::Span<const uint8_t> updated) const;

  // Returns false for optimizers with non-separable updates, which are not
  // rolled back.
  static bool CanSpeculate(const Layout& layout) {
    return FindWholeKernel(layout.optimizer()) == nullptr;
  }
  static uint64_t SpeculationBytes(const Layout& layout);
  // Applies the known part of an undecided step, and keeps the overwritten
  // values; an Apply() of the same step does the rest. Counts no step.
  absl::Status Speculate(Update update);
  // Rolls back all that was speculated about the step.
  absl::Status TakeBackSpeculation(uint64_t step);

  // Zeroes all state of parameters [first, count).
  absl::Status ClearState(uint32_t first_parameter);

 private:
  bool accumulates() const { return store_.accumulates(); }
  DType SumDTypeOf(uint32_t parameter) const;
  // Sums one value per run over the runs of a parameter, in order.
  double SumOfRuns(absl::Span<const double> by_run, uint32_t parameter) const;
  // The addresses from which the gradient of one run is summed.
  using GradientSources = std::array<const void*, kWorldSizeMax>;

  explicit StepScheduler(const Options& options);
  absl::Status ResolveKernels();
  absl::Status MoveShare(const NodeShare& share);
  // whole_update.cc
  static absl::Status CheckWholeKernel(const Layout& layout,
                                       const WholeKernel& kernel);
  absl::Status MakeWorkspace();
  void ApplyWholesOf(const RecordView& record, const Update& update);
  void ApplyWhole(const RecordView& record, uint32_t parameter,
                  const Update& update);
  void GatherGradient(uint32_t parameter, const Update& update, float* out);
  void PutInPlace(const RecordView& record, WorkerUndo* undo, std::byte* redo);
  std::byte* RedoOf(const WorkerUndo& undo) const;
  bool IsUpdated(uint32_t parameter, uint64_t step) const;
  absl::Status ClearPrefixes(uint32_t parameter);
  bool MayHaveHoles(int part) const;
  bool HasPrefixes() const;
  static bool HasEveryRank(uint32_t /*rank*/, uint32_t /*parameter*/) {
    return true;
  }
  void StageGrain(const SubGroup& grain, const Staging& staging);
  void StagePiece(const Staging& staging, const Piece& piece, uint64_t begin,
                  uint64_t end);
  void AccumulateRun(uint64_t run, uint32_t parameter, uint64_t begin,
                     uint64_t numel, absl::Span<const void* const> gradients,
                     uint64_t staged_mark);
  absl::Status MakePass(const Update& update);
  void FindWanted(const Update& update);
  bool IsWanted(const SubGroup& sub_group, const Update& update) const;
  void ApplyRecord(const RecordView& record, const Update& update);
  void ApplyParameter(const RecordView& record, uint32_t parameter,
                      uint64_t begin, uint64_t end,
                      const UpdateFactors& factors, const Update& update);
  absl::Span<const void* const> PushedGradients(
      uint32_t parameter, const PieceTable::Entry& piece, uint64_t begin,
      absl::Span<const std::byte* const> gradient_areas,
      absl::FunctionRef<bool(uint32_t rank, uint32_t parameter)> has_pushed,
      GradientSources* sources) const;
  absl::Span<const void* const> GradientsOf(uint32_t parameter,
                                            const PieceTable::Entry& piece,
                                            uint64_t begin,
                                            const Update& update,
                                            GradientSources* sources) const;
  UpdateInput InputOf(uint32_t parameter, const Update& update) const;
  absl::Span<const PieceTable::Entry> OwnersOf(uint32_t parameter) const;
  absl::Status FinishRunsInFlight(const Update& update);
  absl::Status FinishRun(const Update& update, WorkerUndo* undo);
  uint32_t ParameterOfRun(uint64_t run) const;
  TileView ViewOf(const RecordView& record, uint32_t parameter, uint64_t begin,
                  uint64_t numel) const;
  static uint64_t SpeculationEntryBytes(const Layout& layout);
  // Returns the run's entry in the speculation file.
  std::atomic<uint64_t>& SpeculatedStep(uint64_t run) const;
  void KeepRun(const RecordView& record, uint64_t run, uint64_t step,
               uint32_t parameter, uint64_t begin, uint64_t numel);
  std::byte* KeptMaster(uint64_t flat) const;
  std::byte* KeptState(int part, uint64_t flat) const;
  void TakeBackRun(const RecordView& record, uint32_t parameter, uint64_t run,
                   uint64_t begin, uint64_t numel);
  void CountStep(const Update& update);
  uint64_t UpdateBytes(uint32_t parameter) const;
  absl::Span<WorkerUndo> worker_undos() const;
  WorkerUndo& worker_undo() const;
  template <typename Visitor>
  void ForEachRunOf(uint32_t parameter, const Visitor& visit) const;
  absl::StatusOr<bool> CheckReplacement(WorkerUndo& undo, uint64_t step);
  absl::Status RollBackRun(WorkerUndo* undo);
  template <typename Visitor>
  absl::Status ForEachElementRange(uint32_t first_parameter,
                                   const Visitor& visit);

  const Options options_;
  StateStore& store_;
  const Layout& layout_;
  // The ranges that a worker stages at a time, however large records are.
  const SubGroupTable grains_;
  std::vector<const UpdateKernel*> kernels_;  // by parameter
  std::vector<double> run_sums_;              // by run
  std::vector<double> run_norms_;             // by run, of another norm
  absl::Span<const RankPartition> partitions_;
  bool replicated_ = false;
  // Set for optimizers with a non-separable update, which needs the whole
  // parameter; then kernels_ is empty, and whole_update.cc does the work.
  const WholeKernel* whole_ = nullptr;
  std::unique_ptr<float, decltype(&std::free)> workspace_{nullptr, &std::free};
  uint64_t workspace_elements_ = 0;  // per worker
  std::optional<PieceTable> pieces_;
  std::vector<uint64_t> update_bytes_;  // by parameter
  std::vector<uint8_t> wanted_;  // by sub-group; empty for a resident store
};

template <typename Visitor>
absl::Status StepScheduler::ForEachElementRange(uint32_t first_parameter,
                                                const Visitor& visit) {
  FirstError error;
  options_.pool->ParallelFor(store_.sub_groups().size(), [&](size_t i) {
    const SubGroup& range = store_.sub_groups()[i];
    if (range.end_parameter <= first_parameter || error.failed()) return;
    const auto pin = store_.PinSubGroup(i, StateStore::Access::kWrite);
    if (!pin.ok()) return error.Note(pin.status());
    const RecordView& record = pin->record();
    for (uint32_t p = std::max(first_parameter, range.first_parameter);
         p < range.end_parameter; ++p) {
      const uint64_t flat = layout_.flat_offset(p);
      const uint64_t begin = std::max(flat, range.begin);
      const uint64_t end =
          std::min(flat + static_cast<uint64_t>(layout_.parameters()[p].numel),
                   range.end);
      if (begin < end) visit(record, p, begin - flat, end - begin);
    }
  });
  return error.status();
}

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_STEP_SCHEDULER_H_
