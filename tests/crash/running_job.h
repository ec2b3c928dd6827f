#ifndef OPTSTATE_TESTS_CRASH_RUNNING_JOB_H_
#define OPTSTATE_TESTS_CRASH_RUNNING_JOB_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/format/control_file.h"
#include "tests/crash/crash_rank.h"
#include "tests/crash/scenario.h"
#include "tests/crash/shared_page.h"
#include "tests/crash/wire.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::crash {

// A job whose ranks go through a scenario, seen from where it can be killed.
//
// Threads: one at a time.
class RunningJob {
 public:
  // Returns when the ranks have taken a step.
  static absl::StatusOr<std::unique_ptr<RunningJob>> Start(
      TestDaemon* daemon, Wire wire, const Scenario& scenario);

  TestDaemon& daemon() { return *daemon_; }
  const Scenario& scenario() const { return scenario_; }
  Wire wire() const { return wire_; }
  const std::string& name() const { return name_; }
  std::string endpoint() const;

  // Returns the control file, whichever processes live.
  const storage::ControlFile& control() const {
    return *static_cast<const storage::ControlFile*>(control_->data());
  }
  uint64_t committed_step() const {
    return storage::CurrentRecord(control()).committed_step;
  }
  bool in_step() const {
    return control().step_in_progress.load() == committed_step() + 1;
  }

  CrashRank& rank(uint32_t rank) { return *ranks_[rank]; }
  // Returns how often ranks were told to run a step again.
  uint64_t steps_again() const;
  // Starts a rank in the place of one that is dead.
  absl::Status StartRank(uint32_t rank);
  // Says whether every rank has come to the end of its scenario.
  bool finished() const;
  // Returns the error of a rank that ended early.
  absl::Status CheckRanks();

  // Removes all that is in memory, while no process of the job or the daemon
  // lives. control() comes back with AwaitFiles().
  absl::Status DropMemory();
  // Waits until an engine has made the job's files, also from what is on disk.
  absl::Status AwaitFiles();

  // Returns the engine's pid; 0: there is none.
  pid_t engine() const;

 private:
  RunningJob(TestDaemon* daemon, Wire wire, const Scenario& scenario)
      : daemon_(daemon), wire_(wire), scenario_(scenario), name_("crash") {}

  TestDaemon* const daemon_;
  const Wire wire_;
  const Scenario scenario_;
  const std::string name_;
  std::vector<std::unique_ptr<CrashRank>> ranks_;
  std::unique_ptr<SharedPage> control_;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_RUNNING_JOB_H_
