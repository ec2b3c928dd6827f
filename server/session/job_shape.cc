#include "server/session/job_shape.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/optimizer.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/piece_table.h"
#include "server/scheduler/step_scheduler.h"
#include "server/session/durability/job_storage.h"

namespace optstate::session {

absl::StatusOr<std::unique_ptr<JobShape>> MakeShape(
    JobDescription description) {
  auto shape = std::make_unique<JobShape>();
  shape->description = std::move(description);
  shape->text = SerializeDescription(shape->description);
  const JobDescription& what = shape->description;
  shape->partitions.reserve(what.world_size);
  for (uint32_t rank = 0; rank < what.world_size; ++rank) {
    OPTSTATE_ASSIGN_OR_RETURN(
        RankPartition partition,
        MakeRankPartition(what.layout, what.partition, what.world_size, rank));
    shape->partitions.push_back(std::move(partition));
  }
  return shape;
}

storage::HostArrays HostArraysOf(const JobDescription& description) {
  return {description.accumulation(), !UsesDisk(description.storage),
          !description.storage.parameters_on_disk()};
}

uint64_t SpeculationBytes(const JobDescription& description) {
  return description.speculative
             ? scheduler::StepScheduler::SpeculationBytes(description.layout)
             : 0;
}

// Records that are swapped are not speculated with: each would be written
// twice.
absl::Status CheckSpeculation(const JobDescription& description) {
  if (!description.speculative) return absl::OkStatus();
  if (UsesDisk(description.storage)) {
    return absl::UnimplementedError(
        "speculative: the job's state is on a disk, where each record would be "
        "written twice; leave speculative out, or place the state in host "
        "memory");
  }
  if (!scheduler::StepScheduler::CanSpeculate(description.layout)) {
    return absl::UnimplementedError(absl::StrCat(
        "speculative: an update of optimizer ",
        description.layout.optimizer_info().name,
        " needs whole parameters and is not rolled back; leave speculative "
        "out"));
  }
  return absl::OkStatus();
}

uint64_t TableBytes(const JobDescription& description) {
  const uint64_t ranks = description.world_size;
  const uint64_t parameters = description.layout.parameters().size();
  const uint64_t groups = description.layout.groups().size();
  const uint64_t pieces = description.partition == PartitionMode::kReplicated
                              ? parameters * ranks
                              : parameters + ranks;
  // Covers RankPartition (a vector that grew), PieceTable, OpenStep, LoadRound
  // and MicroSteps.
  constexpr uint64_t kPieceBytes = 2 * sizeof(Piece) +
                                   sizeof(scheduler::PieceTable::Entry) +
                                   3 * sizeof(uint64_t);
  // Covers a group's norms, decision, sub-group, and part of the layouts.
  constexpr uint64_t kGroupBytes = 256;
  // The copy of the step counts that is made before a pass (JobContext).
  constexpr uint64_t kParameterBytes = sizeof(int64_t);
  return pieces * kPieceBytes + parameters * kParameterBytes +
         groups * (kGroupBytes + ranks * sizeof(Hyperparams));
}

}  // namespace optstate::session
