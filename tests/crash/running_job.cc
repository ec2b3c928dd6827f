#include "tests/crash/running_job.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "tests/crash/find_engine.h"
#include "tests/crash/poll_until.h"

namespace optstate::crash {

absl::StatusOr<std::unique_ptr<RunningJob>> RunningJob::Start(
    TestDaemon* daemon, Wire wire, const Scenario& scenario) {
  std::unique_ptr<RunningJob> job(new RunningJob(daemon, wire, scenario));
  job->ranks_.resize(scenario.world_size);
  for (uint32_t rank = 0; rank < scenario.world_size; ++rank) {
    OPTSTATE_RETURN_IF_ERROR(job->StartRank(rank));
  }
  OPTSTATE_RETURN_IF_ERROR(job->AwaitFiles());
  absl::Status ranks;
  OPTSTATE_RETURN_IF_ERROR(PollUntil("the first step", [&] {
    ranks = job->CheckRanks();
    return !ranks.ok() || job->committed_step() > 0;
  }));
  OPTSTATE_RETURN_IF_ERROR(ranks);
  return job;
}

absl::Status RunningJob::AwaitFiles() {
  const std::string folder =
      absl::StrCat(daemon_->state_dir(), "/jobs/", name_);
  const std::string control = folder + "/state/control";
  absl::Status ranks;
  OPTSTATE_RETURN_IF_ERROR(PollUntil("the job's files", [&] {
    ranks = CheckRanks();
    return !ranks.ok() || (std::filesystem::exists(control) &&
                           !std::filesystem::exists(folder + "/restoring"));
  }));
  OPTSTATE_RETURN_IF_ERROR(ranks);
  OPTSTATE_ASSIGN_OR_RETURN(
      SharedPage page, SharedPage::Map(control, SharedPage::Access::kRead));
  control_ = std::make_unique<SharedPage>(std::move(page));
  return absl::OkStatus();
}

absl::Status RunningJob::DropMemory() {
  control_.reset();
  std::error_code error;
  std::filesystem::remove_all(daemon_->state_dir(), error);
  return error ? OsError(error.value(), daemon_->state_dir())
               : absl::OkStatus();
}

std::string RunningJob::endpoint() const {
  return wire_ == Wire::kShm ? daemon_->shm_endpoint()
                             : daemon_->grpc_endpoint();
}

absl::Status RunningJob::StartRank(uint32_t rank) {
  OPTSTATE_ASSIGN_OR_RETURN(
      ranks_[rank], CrashRank::Start({.endpoint = endpoint(),
                                      .job = name_,
                                      .rank = rank,
                                      .scenario = scenario_,
                                      .directory = daemon_->directory()}));
  return absl::OkStatus();
}

uint64_t RunningJob::steps_again() const {
  uint64_t steps = 0;
  for (const auto& rank : ranks_) steps += rank->steps_again();
  return steps;
}

bool RunningJob::finished() const {
  for (const auto& rank : ranks_) {
    if (rank->running()) return false;
  }
  return true;
}

absl::Status RunningJob::CheckRanks() {
  for (const auto& rank : ranks_) {
    if (rank->running()) continue;
    if (control_ != nullptr && committed_step() == scenario_.steps) continue;
    const absl::Status ended = rank->Result().status();
    return ended.ok() ? absl::InternalError("a rank ended early") : ended;
  }
  return absl::OkStatus();
}

pid_t RunningJob::engine() const {
  return FindEngine(daemon_->process().pid(), name_);
}

}  // namespace optstate::crash
