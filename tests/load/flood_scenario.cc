#include "tests/load/flood_scenario.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "tests/load/flood_process.h"
#include "tests/load/job_fleet.h"
#include "tests/load/load_daemon.h"
#include "tests/load/quantiles.h"

namespace optstate::load {
namespace {

// The limits of the flooding user: its own job fits, its large one does not.
constexpr uint32_t kFloodSessionsMax = 8;
constexpr uint64_t kFloodStateBytesMax = 16 << 20;

std::string Config() {
  return absl::StrCat("limits:\n  user_jobs_max: ", kFloodJobsMax,
                      "\n  user_sessions_max: ", kFloodSessionsMax,
                      "\n  user_state_bytes_max: ", kFloodStateBytesMax, "\n");
}

// Lets other users reach the daemon's socket, and no more.
absl::Status OpenToOthers(const TestDaemon& daemon) {
  std::error_code error;
  std::filesystem::permissions(daemon.directory(),
                               std::filesystem::perms::owner_all |
                                   std::filesystem::perms::group_exec |
                                   std::filesystem::perms::others_exec,
                               error);
  if (!error) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("permissions of ", daemon.directory(),
                                          ": ", error.message()));
}

// Steps until `over`, and once more at least.
absl::Status StepUntil(JobFleet* fleet, std::vector<double>* times_ms,
                       absl::FunctionRef<bool()> over) {
  bool ends = false;
  while (!ends) {
    ends = over();
    OPTSTATE_ASSIGN_OR_RETURN(const std::vector<double> times,
                              fleet->Step({.count = 1}));
    times_ms->insert(times_ms->end(), times.begin(), times.end());
  }
  return absl::OkStatus();
}

class FloodRun {
 public:
  FloodRun(const FloodOptions& options, const LoadDaemon& daemon,
           FloodReport* report)
      : options_(options), daemon_(daemon), report_(report) {}

  absl::Status Run();

 private:
  absl::Status StepBeside(FloodProcess::Kind kind,
                          std::vector<double>* times_ms);
  absl::Status StepSlice(std::vector<double>* times_ms);
  absl::Status AskAsOperator();
  absl::Status WarmUp();

  const FloodOptions& options_;
  const LoadDaemon& daemon_;
  FloodReport* const report_;
  std::unique_ptr<JobFleet> fleet_;
};

// One slice by time.
absl::Status FloodRun::StepSlice(std::vector<double>* times_ms) {
  // A flood of a number of rounds has no slices to be compared with: a step is
  // enough.
  const Stretch stretch = {.count = options_.flood_rounds == 0 ? UINT64_MAX : 1,
                           .time = options_.slice};
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<double> times,
                            fleet_->Step(stretch));
  times_ms->insert(times_ms->end(), times.begin(), times.end());
  return absl::OkStatus();
}

absl::Status FloodRun::StepBeside(FloodProcess::Kind kind,
                                  std::vector<double>* times_ms) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<FloodProcess> flood,
      FloodProcess::Start({.socket = daemon_.daemon().socket(),
                           .uid = FloodUid(),
                           .seed = options_.seed,
                           .threads = options_.threads,
                           .rounds = options_.flood_rounds,
                           .kind = kind}));
  if (options_.flood_rounds == 0 || kind == FloodProcess::Kind::kSpin) {
    OPTSTATE_RETURN_IF_ERROR(StepSlice(times_ms));
  } else {
    absl::Status asked;
    OPTSTATE_RETURN_IF_ERROR(StepUntil(fleet_.get(), times_ms, [&] {
      asked.Update(AskAsOperator());
      return !asked.ok() || !flood->running();
    }));
    OPTSTATE_RETURN_IF_ERROR(asked);
  }
  OPTSTATE_ASSIGN_OR_RETURN(const FloodCounts counts, flood->End());
  for (const auto& [what, count] : counts) report_->counts[what] += count;
  return absl::OkStatus();
}

// Asks as an operator, whom the flood does not keep from an answer, what the
// other user has.
absl::Status FloodRun::AskAsOperator() {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ListJobsReply list, daemon_.ListJobs());
  const auto of_flood =
      std::count_if(list.jobs().begin(), list.jobs().end(),
                    [uid = FloodUid()](const v1::Job& job) {
                      return static_cast<uid_t>(job.uid()) == uid;
                    });
  report_->jobs_of_flood_max =
      std::max(report_->jobs_of_flood_max, static_cast<size_t>(of_flood));
  return absl::OkStatus();
}

// A short flood makes whatever the daemon makes at first use.
absl::Status FloodRun::WarmUp() {
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<FloodProcess> flood,
      FloodProcess::Start({.socket = daemon_.daemon().socket(),
                           .uid = FloodUid(),
                           .seed = options_.seed,
                           .threads = options_.threads,
                           .rounds = 1}));
  OPTSTATE_RETURN_IF_ERROR(flood->End().status());
  return daemon_.DeleteJobsOf(FloodUid());
}

absl::Status FloodRun::Run() {
  OPTSTATE_ASSIGN_OR_RETURN(
      fleet_, JobFleet::Open({.endpoint = daemon_.daemon().shm_endpoint(),
                              .prefix = "calm",
                              .jobs = 1,
                              .sessions = 1,
                              .elements = options_.elements}));
  OPTSTATE_RETURN_IF_ERROR(WarmUp());
  std::vector<double> ignored;
  OPTSTATE_RETURN_IF_ERROR(StepSlice(&ignored));
  for (int round = 0; round < options_.rounds; ++round) {
    OPTSTATE_RETURN_IF_ERROR(StepSlice(&report_->calm_ms));
    if (options_.spins) {
      OPTSTATE_RETURN_IF_ERROR(
          StepBeside(FloodProcess::Kind::kSpin, &report_->spin_ms));
    }
    OPTSTATE_RETURN_IF_ERROR(
        StepBeside(FloodProcess::Kind::kFlood, &report_->flood_ms));
    OPTSTATE_RETURN_IF_ERROR(AskAsOperator());
  }
  OPTSTATE_RETURN_IF_ERROR(fleet_->CheckRanks());
  OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job,
                            daemon_.daemon().GetJob(fleet_->names()[0]));
  report_->steps = fleet_->steps(0);
  if (job.committed_step() == report_->steps) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "the job is at step ", job.committed_step(), " of ", report_->steps));
}

absl::Status RunOn(const FloodOptions& options, const LoadDaemon& daemon,
                   FloodReport* report) {
  OPTSTATE_RETURN_IF_ERROR(OpenToOthers(daemon.daemon()));
  // The first run of all makes whatever is made at first use.
  FloodOptions first = options;
  first.rounds = 0;
  FloodReport ignored;
  OPTSTATE_RETURN_IF_ERROR(FloodRun(first, daemon, &ignored).Run());
  OPTSTATE_RETURN_IF_ERROR(daemon.DeleteJobs(/*force=*/true));
  OPTSTATE_ASSIGN_OR_RETURN(const LoadDaemon::Fds fds, daemon.SettledFds());
  OPTSTATE_RETURN_IF_ERROR(FloodRun(options, daemon, report).Run());
  OPTSTATE_RETURN_IF_ERROR(daemon.DeleteJobs(/*force=*/true));
  return daemon.AwaitFds(fds);
}

}  // namespace

uint64_t FloodReport::CountOf(const std::string& what) const {
  uint64_t all = 0;
  for (const auto& [name, count] : counts) {
    if (absl::StartsWith(name, what)) all += count;
  }
  return all;
}

std::string FloodReport::ToString() const {
  std::string text = absl::StrCat(
      steps, " steps\ncalm:  ", QuantilesOf(calm_ms).ToString(),
      "\nspin:  ", QuantilesOf(spin_ms).ToString(),
      "\nflood: ", QuantilesOf(flood_ms).ToString(),
      absl::StrFormat("\np99 flood / calm: %.2f\np99 flood / spin: %.2f\n",
                      P99Ratio(flood_ms, calm_ms),
                      P99Ratio(flood_ms, spin_ms)));
  for (const auto& [what, count] : counts) {
    absl::StrAppend(&text, "    ", what, ": ", count, "\n");
  }
  return text;
}

absl::StatusOr<FloodReport> RunFlood(const FloodOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(CheckMayFlood());
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<LoadDaemon> daemon,
                            LoadDaemon::Start(Config()));
  FloodReport report;
  const absl::Status status = RunOn(options, *daemon, &report);
  if (status.ok()) return report;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "\nthe daemon's log:\n",
                                   daemon->daemon().Log()));
}

}  // namespace optstate::load
