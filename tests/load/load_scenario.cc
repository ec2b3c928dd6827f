#include "tests/load/load_scenario.h"

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"
#include "tests/load/job_fleet.h"
#include "tests/load/load_daemon.h"
#include "tests/load/needed_resources.h"
#include "tests/load/quantiles.h"

namespace optstate::load {
namespace {

// File descriptors that a session has open, in this process or in the
// supervisor, and a job in the supervisor, with room to spare; and all others.
constexpr uint64_t kFdsOfSession = 12;
constexpr uint64_t kFdsOfJob = 12;
constexpr uint64_t kOtherFds = 1024;
// A session has a segment on either side, each with a window of 4 MiB.
constexpr uint64_t kBytesOfSession = 10 << 20;
constexpr uint64_t kBytesOfJob = 24 << 20;
constexpr uint64_t kOtherBytes = 512 << 20;

// The small run that makes whatever is made at first use.
constexpr uint32_t kWarmUpJobs = 2;
constexpr uint64_t kWarmUpSteps = 3;
constexpr uint64_t kWarmUpCalls = 60;

std::string ConfigOf(const LoadOptions& options) {
  return absl::StrCat("limits:\n  jobs_max: ", options.jobs,
                      "\n  sessions_max: ", options.sessions, "\n");
}

JobFleet::Options FleetOf(const LoadOptions& options,
                          const TestDaemon& daemon) {
  return {
      .endpoint = options.grpc ? daemon.grpc_endpoint() : daemon.shm_endpoint(),
      .prefix = "load",
      .jobs = options.jobs,
      .sessions = options.sessions,
      .elements = options.elements,
      .step_interval = options.step_interval};
}

AdminLoad::Options CallsOf(const LoadOptions& options, const LoadDaemon& daemon,
                           const JobFleet& fleet) {
  return {.socket = daemon.daemon().socket(),
          .jobs = fleet.names(),
          .channels = options.channels,
          .threads = options.call_threads,
          .calls_per_second = options.calls_per_second,
          .lists_every = options.lists_every,
          .age_max_ms = options.age_max_ms};
}

CostSample SampleCosts(const LoadDaemon& daemon, bool with_pss = true) {
  return {.supervisor = CostsOf(daemon.pid(), with_pss),
          .engines = CostsOf(ChildrenOf(daemon.pid()), with_pss),
          .ranks = CostsOf(getpid(), with_pss)};
}

absl::Status WarmUp(const LoadOptions& options, const LoadDaemon& daemon) {
  LoadOptions small = options;
  small.jobs = std::min(options.jobs, kWarmUpJobs);
  small.sessions = std::min(options.sessions, 2 * small.jobs);
  {
    OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<JobFleet> fleet,
                              JobFleet::Open(FleetOf(small, daemon.daemon())));
    OPTSTATE_RETURN_IF_ERROR(fleet->Step({.count = kWarmUpSteps}).status());
    AdminLoad(CallsOf(options, daemon, *fleet)).Run({.count = kWarmUpCalls});
  }
  return daemon.DeleteJobs(/*force=*/false);
}

// Expects a session beyond limits.sessions_max to be refused.
absl::Status CheckOneMoreIsRefused(const JobFleet& fleet) {
  client::SessionOptions options = fleet.RankOptions(0, 0);
  options.job = "one-too-many";
  options.layout = UniformLayout(1, 1);
  options.world_size = 1;
  const absl::Status status =
      client::Session::Open(std::move(options)).status();
  if (absl::IsResourceExhausted(status)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "a session beyond the limits was not refused: ", status.ToString()));
}

absl::Status CheckSteps(const LoadDaemon& daemon, const JobFleet& fleet) {
  OPTSTATE_RETURN_IF_ERROR(fleet.CheckRanks());
  const std::vector<std::string> names = fleet.names();
  for (size_t i = 0; i < names.size(); ++i) {
    OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job,
                              daemon.daemon().GetJob(names[i]));
    if (job.committed_step() == fleet.steps(i)) continue;
    return absl::InternalError(absl::StrCat("job ", names[i], " is at step ",
                                            job.committed_step(), " of ",
                                            fleet.steps(i)));
  }
  return absl::OkStatus();
}

// Steps and calls at once; samples the costs meanwhile, unless `costs` is null.
absl::Status RunBoth(const LoadOptions& options, const LoadDaemon& daemon,
                     JobFleet* fleet, AdminLoad* calls, LoadReport* report,
                     CostSample* costs) {
  AdminTally tally;
  absl::StatusOr<std::vector<double>> steps;
  std::thread calling([&] { tally = calls->Run(options.calls); });
  std::thread stepping([&] { steps = fleet->Step(options.steps); });
  if (costs != nullptr) *costs = SampleCosts(daemon);
  stepping.join();
  calling.join();
  OPTSTATE_RETURN_IF_ERROR(steps.status());
  // The sample takes time of its own: what was measured beside it is left out.
  if (costs != nullptr) return absl::OkStatus();
  report->calls.Add(tally);
  report->steps_ms.insert(report->steps_ms.end(), steps->begin(), steps->end());
  return absl::OkStatus();
}

absl::Status RunRounds(const LoadOptions& options, const LoadDaemon& daemon,
                       JobFleet* fleet, AdminLoad* calls, LoadReport* report) {
  for (int round = 0; round < options.rounds; ++round) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::vector<double> alone,
                              fleet->Step(options.steps));
    report->steps_alone_ms.insert(report->steps_alone_ms.end(), alone.begin(),
                                  alone.end());
    report->calls_alone.Add(calls->Run(options.calls));
    report->calls_bare.Add(calls->RunBare(options.calls));
    OPTSTATE_RETURN_IF_ERROR(
        RunBoth(options, daemon, fleet, calls, report, nullptr));
  }
  return RunBoth(options, daemon, fleet, calls, report, &report->stepped);
}

// Steps and calls at once, for long, and what they cost from beginning to end.
absl::Status Soak(const LoadOptions& options, const LoadDaemon& daemon,
                  JobFleet* fleet, AdminLoad* calls, SoakReport* report) {
  absl::StatusOr<std::vector<double>> steps;
  absl::Notification ended;
  std::thread calling([&] { report->calls = calls->Run(options.soak_calls); });
  std::thread stepping([&] { steps = fleet->Step(options.soak_steps); });
  std::thread sampling([&] {
    // A sample that took longer than the interval is followed by the next one.
    absl::Time due = absl::Now();
    do {
      report->samples.push_back(SampleCosts(daemon, /*with_pss=*/false));
      due = std::max(due + options.soak->sample_every, absl::Now());
    } while (!ended.WaitForNotificationWithDeadline(due));
  });
  stepping.join();
  calling.join();
  ended.Notify();
  sampling.join();
  OPTSTATE_RETURN_IF_ERROR(steps.status());
  report->steps_ms = *std::move(steps);
  return absl::OkStatus();
}

absl::Status RunSoak(const LoadOptions& options, const LoadDaemon& daemon,
                     JobFleet* fleet, AdminLoad* calls, LoadReport* report) {
  SoakReport& soak = report->soak.emplace();
  OPTSTATE_ASSIGN_OR_RETURN(soak.steps_before_ms, fleet->Step(options.steps));
  OPTSTATE_RETURN_IF_ERROR(Soak(options, daemon, fleet, calls, &soak));
  report->stepped = soak.samples.back();
  OPTSTATE_ASSIGN_OR_RETURN(soak.steps_after_ms, fleet->Step(options.steps));
  return absl::OkStatus();
}

// Everything from the first job to the last rank's end.
absl::Status RunFleet(const LoadOptions& options, const LoadDaemon& daemon,
                      LoadReport* report) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<JobFleet> fleet,
                            JobFleet::Open(FleetOf(options, daemon.daemon())));
  AdminLoad calls(CallsOf(options, daemon, *fleet));
  report->opened = SampleCosts(daemon);
  OPTSTATE_RETURN_IF_ERROR(CheckOneMoreIsRefused(*fleet));
  const auto run = options.soak.has_value() ? RunSoak : RunRounds;
  OPTSTATE_RETURN_IF_ERROR(run(options, daemon, fleet.get(), &calls, report));
  OPTSTATE_RETURN_IF_ERROR(CheckSteps(daemon, *fleet));
  for (size_t i = 0; i < fleet->size(); ++i) report->steps += fleet->steps(i);
  return absl::OkStatus();
}

absl::Status RunOn(const LoadOptions& options, const LoadDaemon& daemon,
                   LoadReport* report) {
  OPTSTATE_RETURN_IF_ERROR(WarmUp(options, daemon));
  OPTSTATE_ASSIGN_OR_RETURN(const LoadDaemon::Fds fds, daemon.SettledFds());
  report->before = SampleCosts(daemon);
  OPTSTATE_RETURN_IF_ERROR(RunFleet(options, daemon, report));
  OPTSTATE_RETURN_IF_ERROR(daemon.DeleteJobs(/*force=*/false));
  OPTSTATE_RETURN_IF_ERROR(daemon.AwaitFds(fds));
  report->after = SampleCosts(daemon);
  return absl::OkStatus();
}

std::string TextOfRounds(const LoadReport& report) {
  return absl::StrCat(
      "steps alone: ", QuantilesOf(report.steps_alone_ms).ToString(),
      "\nsteps beside calls: ", QuantilesOf(report.steps_ms).ToString(),
      "\ncalls alone: ", report.calls_alone.ToString(),
      "\ncalls that do nothing: ", report.calls_bare.ToString(),
      "\ncalls beside steps: ", report.calls.ToString(),
      absl::StrFormat(
          "\np99 of steps beside calls / alone: %.2f"
          "\np99 of calls beside steps / alone: %.2f\n",
          P99Ratio(report.steps_ms, report.steps_alone_ms),
          P99Ratio(report.calls.all_ms(), report.calls_alone.all_ms())));
}

}  // namespace

std::string LoadReport::ToString() const {
  return absl::StrCat(
      "before:", before.ToString(), "\nall ranks attached:", opened.ToString(),
      "\nwhile jobs step and operators ask:", stepped.ToString(),
      "\nall jobs deleted:", after.ToString(), "\n", steps, " steps in all\n",
      soak.has_value() ? soak->ToString() : TextOfRounds(*this));
}

absl::Status CheckResources(const LoadOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(RaiseOpenFiles(
      kOtherFds + kFdsOfSession * options.sessions + kFdsOfJob * options.jobs));
  return CheckMemory(kOtherBytes + kBytesOfSession * options.sessions +
                     kBytesOfJob * options.jobs);
}

absl::StatusOr<LoadReport> RunLoad(const LoadOptions& options) {
  OPTSTATE_RETURN_IF_ERROR(
      JobFleet::CheckSpread(options.jobs, options.sessions));
  OPTSTATE_RETURN_IF_ERROR(CheckResources(options));
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<LoadDaemon> daemon,
                            LoadDaemon::Start(ConfigOf(options)));
  LoadReport report;
  const absl::Status status = RunOn(options, *daemon, &report);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat(status.message(), "\nthe daemon's log:\n",
                                     daemon->daemon().Log()));
  }
  return report;
}

}  // namespace optstate::load
