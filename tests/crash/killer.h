#ifndef OPTSTATE_TESTS_CRASH_KILLER_H_
#define OPTSTATE_TESTS_CRASH_KILLER_H_

#include <cstdint>
#include <random>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "tests/crash/running_job.h"
#include "tests/crash/tally.h"
#include "tests/crash/upgrade_call.h"

namespace optstate::crash {

// Kills the processes of a job at random instants, and restarts those that
// nothing else restarts; or has the daemon upgraded. Every function returns
// with all of them running or being started, or with what went wrong.
// Size: one method for each kind of kill.
class Killer {
 public:
  Killer(RunningJob* job, const Quota& quota, std::mt19937_64* random,
         Tally* tally)
      : job_(*job), quota_(quota), random_(*random), tally_(*tally) {}

  // Kills a process or upgrades, as the quota still asks for.
  absl::Status Disturb();
  // Waits until the job has taken some steps more, or all of them.
  absl::Status AwaitSteps(uint64_t steps);

 private:
  absl::Status AwaitInsideLoad();
  absl::Status DisturbEngine();
  absl::Status DisturbSupervisor();
  absl::Status DisturbRanks();
  absl::Status DisturbByUpgrade();

  absl::Status KillSupervisorAlone();
  absl::Status KillEngineThenSupervisor();
  absl::Status KillSupervisorThenEngine();
  absl::Status KillSupervisorAndRank();
  absl::Status EndDaemon();
  absl::Status KillRanks();
  absl::Status KillRankAndEngine();

  absl::Status CutPower();

  absl::Status UpgradeAlone();
  absl::Status UpgradeAndKillEngine();
  absl::Status UpgradeAndKillSupervisor();
  void AwaitUpgradeInstant();
  UpgradeWay DrawUpgradeWay();
  void NoteUpgrade(UpgradeWay way);
  // Returns what the daemon calls its last upgrade.
  absl::StatusOr<std::string> LastUpgrade();
  // Waits until another upgrade is over, which leaves the job with an engine.
  absl::Status AwaitUpgraded(const std::string& before);

  absl::Status AwaitAdoption();
  // Kills up to three times the engine that follows.
  absl::Status KillEngineAgain();
  absl::Status KillEngine(bool again);
  absl::Status KillSupervisor();
  absl::Status RestartSupervisor();
  absl::Status KillRank(uint32_t rank);

  // Waits for `done`, unless the ranks finish first.
  absl::Status Await(absl::string_view what, absl::FunctionRef<bool()> done);
  // Waits until somewhere inside a step, if one comes soon.
  absl::Status AwaitInsideStep();
  absl::Status AwaitNotForLong(absl::FunctionRef<bool()> done);
  absl::Status AwaitRecovery();
  void SpinInsideStep();
  // Spins until some instant within `longest`.
  void Spin(absl::Duration longest);
  double Unit() { return std::uniform_real_distribution<double>()(random_); }
  uint64_t Below(uint64_t count) {
    return std::uniform_int_distribution<uint64_t>(0, count - 1)(random_);
  }
  uint32_t SomeRank() {
    return static_cast<uint32_t>(Below(job_.scenario().world_size));
  }

  RunningJob& job_;
  const Quota quota_;
  std::mt19937_64& random_;
  Tally& tally_;
  bool supervised_ = true;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_KILLER_H_
