#include "tests/crash/crash_round.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "tests/conformance/step_script.h"
#include "tests/crash/crash_script.h"
#include "tests/crash/killer.h"
#include "tests/crash/parameter_hash.h"

namespace optstate::crash {
namespace {

using client::Session;

// Engines are restarted after kills, so restarts may be frequent. While a rank
// is lost no job is between two steps: upgrades need not wait long for that.
constexpr char kConfig[] =
    "drain_timeout_s: 1\n"
    "engine:\n"
    "  restarts_max: 1000000\n"
    "  restart_window_s: 1\n"
    "  doorbell_spin_us: 0\n";
// A folder that outlives losses of power, until it is destroyed.
class DiskFolder {
 public:
  static absl::StatusOr<std::unique_ptr<DiskFolder>> Make() {
    const char* temporary = std::getenv("TEST_TMPDIR");
    std::string path = absl::StrCat(
        temporary == nullptr ? "/var/tmp" : temporary, "/optstate-test-XXXXXX");
    if (mkdtemp(path.data()) == nullptr) return OsError(errno, path);
    return std::unique_ptr<DiskFolder>(new DiskFolder(path));
  }
  ~DiskFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  DiskFolder(const DiskFolder&) = delete;
  DiskFolder& operator=(const DiskFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  explicit DiskFolder(std::string path) : path_(std::move(path)) {}

  const std::string path_;
};

// The most steps between two disturbances.
constexpr uint64_t kStepsApartMax = 2;

struct End {
  StateSnapshot snapshot;
  uint64_t parameter_hash = 0;
  double loss_scale = 0;
};

absl::StatusOr<End> EndOf(Session& session) {
  End end;
  OPTSTATE_ASSIGN_OR_RETURN(end.snapshot, Snapshot(session));
  OPTSTATE_ASSIGN_OR_RETURN(end.parameter_hash, HashOfParameters(session));
  end.loss_scale = session.info().loss_scaler.loss_scale;
  return end;
}

// Runs one rank of a job that is not disturbed; how the job ends goes to `end`.
absl::Status RunUndisturbedRank(const TestDaemon& daemon,
                                const CrashScript& script, uint32_t rank,
                                uint32_t world_size, End* end) {
  client::SessionOptions options =
      script.Options(daemon.shm_endpoint(), "undisturbed", rank);
  options.world_size = world_size;
  // In memory, whatever the disturbed job's place.
  options.storage = {};
  options.fetches_parameters = false;
  OPTSTATE_ASSIGN_OR_RETURN(const auto session, Session::Open(options));
  OPTSTATE_RETURN_IF_ERROR(script.Load(*session));
  RankBoard board;
  // One rank alone is the last rank of the scenario in steps that only that one
  // knows to be skipped.
  const uint32_t as = rank + script.scenario().world_size - world_size;
  for (uint64_t step = 1; step <= script.scenario().steps; ++step) {
    OPTSTATE_RETURN_IF_ERROR(script.RunStep(*session, step, as, &board));
  }
  if (board.steps_again != 0) {
    return absl::InternalError("an undisturbed rank ran a step again");
  }
  OPTSTATE_ASSIGN_OR_RETURN(*end, EndOf(*session));
  return absl::OkStatus();
}

// Runs the job by threads of this process: one rank, which has the same results
// as two, but where the engine sums what different ranks push.
absl::StatusOr<End> RunUndisturbed(const TestDaemon& daemon,
                                   const Scenario& scenario) {
  const CrashScript script(scenario);
  const uint32_t world_size = scenario.partition == PartitionMode::kReplicated
                                  ? scenario.world_size
                                  : 1;
  std::vector<absl::Status> statuses(world_size);
  std::vector<End> ends(world_size);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      statuses[rank] =
          RunUndisturbedRank(daemon, script, rank, world_size, &ends[rank]);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const absl::Status& status : statuses) OPTSTATE_RETURN_IF_ERROR(status);
  return std::move(ends[0]);
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
  const CrashScript script(job.scenario());
  OPTSTATE_ASSIGN_OR_RETURN(
      const auto session,
      Session::Open(script.Options(job.endpoint(), job.name(), 0)));
  OPTSTATE_ASSIGN_OR_RETURN(const End end, EndOf(*session));
  const std::string difference =
      FirstDifference(end.snapshot, expected.snapshot);
  if (!difference.empty()) return absl::DataLossError(difference);
  if (end.loss_scale == expected.loss_scale) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the loss scale is ", end.loss_scale,
                                          " instead of ", expected.loss_scale));
}

// Only sums of micro-steps can be lost, and those of all ranks, to a rank that
// dies.
absl::Status CheckStepsAgain(const RunningJob& job, const Tally& before,
                             const Tally& after) {
  if (job.steps_again() == 0) return absl::OkStatus();
  const Scenario& scenario = job.scenario();
  if (scenario.accumulates_together() && after.rank > before.rank) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("ranks were told ", job.steps_again(),
                                          " times to run a step again"));
}

absl::Status RunOn(TestDaemon* daemon, Wire wire, const Scenario& scenario,
                   const Quota& quota, std::mt19937_64* random, Tally* tally) {
  OPTSTATE_ASSIGN_OR_RETURN(const End expected,
                            RunUndisturbed(*daemon, scenario));
  OPTSTATE_ASSIGN_OR_RETURN(const auto job,
                            RunningJob::Start(daemon, wire, scenario));
  const Tally before = *tally;
  Killer killer(job.get(), quota, random, tally);
  while (!job->finished() && !tally->Reaches(quota)) {
    OPTSTATE_RETURN_IF_ERROR(killer.Disturb());
    OPTSTATE_RETURN_IF_ERROR(
        killer.AwaitSteps(1 + (*random)() % kStepsApartMax));
  }
  OPTSTATE_RETURN_IF_ERROR(killer.AwaitSteps(scenario.steps));
  OPTSTATE_RETURN_IF_ERROR(CompareRanks(*job, expected));
  OPTSTATE_RETURN_IF_ERROR(CompareState(*job, expected));
  OPTSTATE_RETURN_IF_ERROR(CheckStepsAgain(*job, before, *tally));
  tally->NoteRound(wire, scenario);
  tally->steps_again += job->steps_again();
  tally->steps_recovered += job->control().steps_recovered;
  tally->runs_rolled_back += job->control().runs_rolled_back;
  return absl::OkStatus();
}

}  // namespace

absl::Status RunRound(Wire wire, const Scenario& scenario, const Quota& quota,
                      std::mt19937_64* random, Tally* tally) {
  TestDaemon::Options options;
  options.config = kConfig;
  OPTSTATE_ASSIGN_OR_RETURN(const auto disk, DiskFolder::Make());
  options.flags = {"--nvme-dir", disk->path(), "--devices", "emulated:2"};
  OPTSTATE_ASSIGN_OR_RETURN(const auto daemon,
                            TestDaemon::Start(std::move(options)));
  absl::Status status =
      RunOn(daemon.get(), wire, scenario, quota, random, tally);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "\n", daemon->Log()));
}

}  // namespace optstate::crash
