#include "tests/crash/crash_round.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"
#include "tests/crash/crash_script.h"
#include "tests/crash/killer.h"
#include "tests/crash/parameter_hash.h"

namespace optstate::crash {
namespace {

using client::Session;

// Kills are what an engine is restarted after, so it may be often.
constexpr char kConfig[] =
    "engine:\n"
    "  restarts_max: 1000000\n"
    "  restart_window_s: 1\n"
    "  doorbell_spin_us: 0\n";
// Between two disturbances.
constexpr uint64_t kStepsApartMax = 2;

struct End {
  StateSnapshot snapshot;
  uint64_t parameter_hash = 0;
};

absl::StatusOr<End> EndOf(Session& session) {
  End end;
  OPTSTATE_ASSIGN_OR_RETURN(end.snapshot, Snapshot(session));
  end.parameter_hash = HashOfParameters(session);
  return end;
}

// By one rank, in this process.
absl::StatusOr<End> RunUndisturbed(const TestDaemon& daemon,
                                   const Scenario& scenario) {
  const CrashScript script(scenario);
  client::SessionOptions options;
  options.endpoint = daemon.shm_endpoint();
  options.job = "undisturbed";
  options.layout = script.layout();
  options.accumulate = scenario.micro_steps > 1;
  OPTSTATE_ASSIGN_OR_RETURN(const auto session, Session::Open(options));
  OPTSTATE_RETURN_IF_ERROR(script.Load(*session));
  RankBoard board;
  for (uint64_t step = 1; step <= scenario.steps; ++step) {
    OPTSTATE_RETURN_IF_ERROR(
        script.RunStep(*session, step, scenario.world_size - 1, &board));
  }
  return EndOf(*session);
}

absl::Status CompareRanks(RunningJob& job, const End& expected) {
  for (uint32_t rank = 0; rank < job.scenario().world_size; ++rank) {
    OPTSTATE_ASSIGN_OR_RETURN(const uint64_t hash, job.rank(rank).Result());
    if (hash != expected.parameter_hash) {
      return absl::DataLossError(
          absl::StrCat("rank ", rank, " sees other parameters"));
    }
  }
  return absl::OkStatus();
}

absl::Status CompareState(const RunningJob& job, const End& expected) {
  client::SessionOptions options;
  options.endpoint = job.endpoint();
  options.job = job.name();
  options.layout = MakeLayout(job.scenario());
  options.world_size = job.scenario().world_size;
  options.accumulate = job.scenario().micro_steps > 1;
  OPTSTATE_ASSIGN_OR_RETURN(const auto session, Session::Open(options));
  OPTSTATE_ASSIGN_OR_RETURN(const End end, EndOf(*session));
  const std::string difference =
      FirstDifference(end.snapshot, expected.snapshot);
  return difference.empty() ? absl::OkStatus()
                            : absl::DataLossError(difference);
}

absl::Status RunOn(TestDaemon* daemon, Wire wire, const Scenario& scenario,
                   const Quota& quota, std::mt19937_64* random, Tally* tally) {
  OPTSTATE_ASSIGN_OR_RETURN(const End expected,
                            RunUndisturbed(*daemon, scenario));
  OPTSTATE_ASSIGN_OR_RETURN(const auto job,
                            RunningJob::Start(daemon, wire, scenario));
  Killer killer(job.get(), quota, random, tally);
  while (!job->finished() && !tally->Reaches(quota)) {
    OPTSTATE_RETURN_IF_ERROR(killer.Disturb());
    OPTSTATE_RETURN_IF_ERROR(
        killer.AwaitSteps(1 + (*random)() % kStepsApartMax));
  }
  OPTSTATE_RETURN_IF_ERROR(killer.AwaitSteps(scenario.steps));
  OPTSTATE_RETURN_IF_ERROR(CompareRanks(*job, expected));
  OPTSTATE_RETURN_IF_ERROR(CompareState(*job, expected));
  ++tally->rounds;
  tally->steps += scenario.steps;
  tally->steps_recovered += job->control().steps_recovered;
  tally->runs_rolled_back += job->control().runs_rolled_back;
  return absl::OkStatus();
}

}  // namespace

absl::Status RunRound(Wire wire, const Scenario& scenario, const Quota& quota,
                      std::mt19937_64* random, Tally* tally) {
  TestDaemon::Options options;
  options.config = kConfig;
  OPTSTATE_ASSIGN_OR_RETURN(const auto daemon,
                            TestDaemon::Start(std::move(options)));
  absl::Status status =
      RunOn(daemon.get(), wire, scenario, quota, random, tally);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "\n", daemon->Log()));
}

}  // namespace optstate::crash
