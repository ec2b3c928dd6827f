#include "server/session/job_facts.h"

#include "absl/status/statusor.h"
#include "proto/types/conversions.h"
#include "proto/types/status_macros.h"
#include "storage/allocated_bytes.h"
#include "storage/state_folder.h"
#include "storage/state_snapshot.h"

namespace optstate::session {
namespace {

absl::Status AddSnapshot(const std::string& job_dir, v1::Job* job) {
  const absl::StatusOr<storage::StateSnapshot> snapshot =
      storage::ReadStateSnapshot(job_dir);
  // The job's layout was never registered: the unset fields describe it
  // correctly.
  if (absl::IsNotFound(snapshot.status())) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(snapshot.status());
  OPTSTATE_ASSIGN_OR_RETURN(const JobDescription description,
                            ParseDescription(snapshot->description.payload));
  AddDescription(description, job);
  AddRecord(snapshot->record, job);
  SetTimestamp(snapshot->created_at_ns, job->mutable_created_at());
  job->set_recovered_steps(snapshot->steps_recovered);
  job->set_rolled_back_runs(snapshot->runs_rolled_back);
  return absl::OkStatus();
}

}  // namespace

void SetTimestamp(int64_t unix_ns, google::protobuf::Timestamp* timestamp) {
  timestamp->set_seconds(unix_ns / 1000000000);
  timestamp->set_nanos(static_cast<int32_t>(unix_ns % 1000000000));
}

StepOutcome OutcomeOf(const storage::StepRecord& record) {
  StepOutcome outcome;
  outcome.step = record.committed_step;
  outcome.applied = (record.flags & storage::kStepRecordApplied) != 0;
  outcome.found_inf = (record.flags & storage::kStepRecordFoundInf) != 0;
  outcome.gradient_norm = record.gradient_norm;
  outcome.clip_coefficient = record.clip_coefficient;
  outcome.update_ns = record.update_ns;
  outcome.loss_scale = record.loss_scale;
  outcome.good_steps = record.good_steps;
  outcome.hysteresis_left = record.hysteresis_left;
  outcome.digest = record.prepared_digest;
  return outcome;
}

void AddDescription(const JobDescription& description, v1::Job* job) {
  const Layout& layout = description.layout;
  job->set_optimizer(static_cast<v1::OptimizerKind>(layout.optimizer()));
  job->set_layout_hash(layout.hash());
  job->set_parameter_count(layout.parameters().size());
  job->set_element_count(layout.element_count());
  job->set_group_count(static_cast<uint32_t>(layout.groups().size()));
  job->set_world_size(description.world_size);
  job->set_partition(static_cast<v1::PartitionMode>(description.partition));
  job->set_accumulate(description.accumulate);
  job->set_ephemeral(description.ephemeral);
  *job->mutable_storage() = description.storage;
}

void AddRecord(const storage::StepRecord& record, v1::Job* job) {
  job->set_committed_step(record.committed_step);
  if ((record.flags & storage::kStepRecordHasOutcome) == 0) return;
  SetTimestamp(record.committed_at_ns, job->mutable_committed_at());
  *job->mutable_last_outcome() = ToProto(OutcomeOf(record));
}

void AddFromFiles(const std::string& job_dir, v1::Job* job) {
  job->set_state_bytes(
      storage::AllocatedBytesBelow(job_dir + storage::kStateFolder));
  job->set_state_unknown(!AddSnapshot(job_dir, job).ok());
}

}  // namespace optstate::session
