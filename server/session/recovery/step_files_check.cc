#include "server/session/recovery/step_files_check.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/scheduler/gradient_log.h"
#include "server/session/durability/job_storage.h"
#include "server/session/durability/store_maker.h"

namespace optstate::session {
namespace {

absl::Status CheckStepFile(const JobContext& job, absl::string_view file,
                           uint64_t bytes, uint64_t needed) {
  if (bytes >= needed) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(job.options.directory, "/state/", file,
                   bytes == 0 ? " is missing or empty"
                              : absl::StrCat(" has ", bytes, " bytes"),
                   ", it must have ", needed,
                   ": without it what an engine left half written in step ",
                   job.record().committed_step + 1, " cannot be put right. ",
                   job.DescribeWayOn()));
}

// Checks the frames of records on disk. New ones would be zeros, and a store
// with a new table removes what the job has on its disks.
absl::Status CheckFrames(const JobContext& job,
                         const JobDescription& description) {
  if (!UsesDisk(description.storage)) return absl::OkStatus();
  const storage::StepRecord& record = job.record();
  const uint64_t needed = FrameBytesOfTable(job);
  // An engine that died while it made the job leaves no table, and no state.
  const bool is_new = needed == 0 && record.committed_step == 0 &&
                      record.load_required_from == 0;
  if (is_new || (needed != 0 && job.tier->frames().size() >= needed)) {
    return absl::OkStatus();
  }
  const absl::string_view file = needed == 0 ? "frame_table" : "frames";
  return absl::DataLossError(absl::StrCat(
      job.options.directory, "/state/", file,
      needed == 0 ? " is missing or empty"
                  : absl::StrCat(" has ", job.tier->frames().size(),
                                 " bytes, it must have ", needed),
      ": without it the job's records are not whole. ", job.DescribeWayOn()));
}

// Checks that there is a log where records may lag behind devices: without it
// they would be of former steps.
absl::Status CheckGradientLog(const JobContext& job) {
  const scheduler::GradientLog log(job.tier->gradient_log());
  if (!storage::MayLag(*job.tier->control()) || !log.is_empty()) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat(job.options.directory,
                   "/state/gradient_log is missing or empty: without it "
                   "records may be of former steps. ",
                   job.DescribeWayOn()));
}

}  // namespace

// Checks the step files before any is enlarged or made anew, for its zeros
// would say that nothing was half written. Between two steps they hold nothing
// relevant, except sums that were being added to.
absl::Status CheckStepFiles(const JobContext& job,
                            const JobDescription& description) {
  const storage::ControlFile& control = *job.tier->control();
  const uint64_t next = job.record().committed_step + 1;
  OPTSTATE_RETURN_IF_ERROR(CheckFrames(job, description));
  const bool in_step = control.step_in_progress.load() == next;
  bool in_sum = false;
  for (uint32_t rank = 0; rank < kWorldSizeMax; ++rank) {
    in_sum |= description.accumulate && job.rank_mark(rank).step == next;
  }
  const bool in_replay =
      scheduler::GradientLog::HasResidents(job.tier->gradient_log());
  OPTSTATE_RETURN_IF_ERROR(CheckGradientLog(job));
  if (in_step || in_sum || in_replay) {
    // Whole slots, at least one, even where no number was recorded.
    const uint64_t slot = scheduler::StepScheduler::WorkerUndoBytes(1);
    const uint64_t bytes = job.tier->undo().size();
    const uint64_t slots = std::max<uint64_t>(1, (bytes + slot - 1) / slot);
    OPTSTATE_RETURN_IF_ERROR(CheckStepFile(
        job, "undo", bytes, std::max(control.undo_bytes, slots * slot)));
  }
  if (in_step) {
    OPTSTATE_RETURN_IF_ERROR(
        CheckStepFile(job, "redo", job.tier->redo().size(),
                      scheduler::StepScheduler::RedoBytesInUse(
                          description.layout, job.tier->undo())));
  }
  if (control.step_speculated.load() != next) return absl::OkStatus();
  if (!scheduler::StepScheduler::CanSpeculate(description.layout)) {
    return absl::DataLossError(absl::StrCat(
        job.options.directory, "/state/control: step_speculated is ", next,
        ", but the job's optimizer is never speculated with. ",
        job.DescribeWayOn()));
  }
  return CheckStepFile(
      job, "speculation", job.tier->speculation().size(),
      scheduler::StepScheduler::SpeculationBytes(description.layout));
}

}  // namespace optstate::session
