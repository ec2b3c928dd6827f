#ifndef OPTSTATE_SERVER_SCHEDULER_SCHEDULER_TEST_JOB_H_
#define OPTSTATE_SERVER_SCHEDULER_SCHEDULER_TEST_JOB_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "proto/types/accumulation.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "server/scheduler/passes/gradient_stager.h"
#include "server/scheduler/step_memory.h"
#include "server/scheduler/step_plan.h"
#include "server/scheduler/step_update.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/tiers/host_store.h"

namespace optstate::scheduler {

// A job in anonymous memory, for tests of the scheduler and its parts: two
// groups with parameters of several tiles, of one element and of none, float32
// and bfloat16, all with random values that follow from a seed. Records are two
// tiles large, so that passes have several.
class SchedulerTestJob {
 public:
  struct Setup {
    OptimizerKind optimizer = OptimizerKind::kAdamW;
    StateFormat state = StateFormat::kFloat32;
    MasterFormat master = MasterFormat::kFloat32;
    Accumulation accumulation = {};
    uint32_t ranks = 1;
    bool replicated = false;
    int workers = 2;
    uint64_t seed = 1;
  };

  explicit SchedulerTestJob(const Setup& setup);

  const Layout& layout() const { return layout_; }
  const StepPlan& plan() const { return *plan_; }
  const StepMemory& memory() const { return memory_; }
  storage::HostStore& store() { return *store_; }
  // Returns the record that has this element of a parameter.
  storage::RecordView RecordOf(uint32_t parameter, uint64_t element) const {
    return store_->record(store_->sub_groups().IndexOf(parameter, element));
  }
  WorkerPool& pool() { return pool_; }
  storage::ControlFile& control() { return control_; }
  WorkerUndo& undo(size_t worker) { return undo_[worker]; }
  absl::Span<const RankPartition> partitions() const { return partitions_; }
  absl::Span<std::atomic<uint64_t>> run_stamps() {
    return absl::MakeSpan(run_stamps_);
  }
  absl::Span<std::atomic<uint64_t>> staged_marks() {
    return absl::MakeSpan(staged_marks_);
  }
  absl::Span<int64_t> step_counts() { return absl::MakeSpan(step_counts_); }

  // Draws new gradients for all ranks.
  void FillGradients(uint64_t seed);
  absl::Span<const std::byte* const> gradient_areas() const { return areas_; }
  // Returns a request to stage all of a rank's pieces.
  StagingRequest StagingOf(uint32_t rank, uint64_t mark) const;
  // Returns an update of all parameters with staged gradients.
  StepUpdate UpdateOf(uint64_t step) const;
  // Sets which parameters the updates of UpdateOf() update.
  void SetUpdated(std::vector<uint8_t> updated) {
    updated_ = std::move(updated);
  }

  // Returns the bytes of parameters, records, counts and numbers: all that a
  // step is to change.
  std::vector<std::byte> State() const;

 private:
  static Layout MakeLayout(const Setup& setup);
  void Place(const Setup& setup);
  void FillState(uint64_t seed);

  const Layout layout_;
  const std::vector<RankPartition> partitions_;
  std::vector<std::byte> parameters_, master_;
  std::array<std::vector<std::byte>, kStateArraysMax> state_;
  std::array<std::vector<float>, kStateArraysMax> scale_;
  std::vector<std::byte> sums_;
  std::vector<int64_t> step_counts_;
  std::vector<double> scalars_;
  std::vector<std::atomic<uint64_t>> run_stamps_, staged_marks_;
  std::vector<StageAction> actions_;
  std::vector<std::vector<std::byte>> gradients_;
  std::vector<const std::byte*> areas_;
  std::vector<uint8_t> updated_;
  std::vector<GroupUpdate> groups_;
  storage::ControlFile control_ = {};
  WorkerPool pool_;
  std::vector<WorkerUndo> undo_;
  std::vector<std::byte> redo_, speculation_;
  std::unique_ptr<storage::HostStore> store_;
  std::unique_ptr<StepPlan> plan_;
  StepMemory memory_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_SCHEDULER_TEST_JOB_H_
