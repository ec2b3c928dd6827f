#ifndef OPTSTATE_SERVER_UPGRADE_ENGINE_REPLACEMENT_H_
#define OPTSTATE_SERVER_UPGRADE_ENGINE_REPLACEMENT_H_

#include <atomic>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/admin/engine_channels.h"
#include "server/supervisor/supervisor_control.h"
#include "server/upgrade/upgrade_record.h"

namespace optstate::upgrade {

// Replaces the engines of another build, one job after another, after an
// upgrade of the supervisor.
//
// An engine is stopped between two steps, in a pause (see Job::Pause): its
// ranks' sessions end, they connect again and find the next engine. A drain
// would be worse: ranks are notified of it. A job whose steps overlap, or that
// waits for a rank, has no such moment; after `patience` its engine is stopped
// inside the step, which ranks push again, unless part of it cannot be pushed
// again: accumulated gradients, a load.
//
// Threads: one of its own, from construction to destruction. Destruction ends
// it between two jobs, or waits for an engine at most a second longer.
class EngineReplacement {
 public:
  struct Options {
    supervisor::SupervisorControl* control = nullptr;
    admin::EngineChannels* engines = nullptr;
    UpgradeRecord* record = nullptr;
    bool replace_all = false;  // engines of this build too
    // How long a job that is never between two steps keeps its engine. After
    // that, a job that could not push its whole step again keeps the engine for
    // good, and the record says so.
    absl::Duration patience = absl::Seconds(30);
  };

  // Everything in `options` outlives the object.
  explicit EngineReplacement(const Options& options);
  ~EngineReplacement();

 private:
  void Run();
  // Returns false when there is nothing to replace.
  absl::StatusOr<bool> Replace(const std::string& job);
  absl::StatusOr<std::string> AwaitEngine(const std::string& job);
  // Waits until the engine may be stopped.
  absl::Status AwaitPause(const std::string& job);
  absl::Status AskForPause(const std::string& job, absl::Time deadline);
  absl::Status CheckStopInside(const std::string& job);

  const Options options_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace optstate::upgrade

#endif  // OPTSTATE_SERVER_UPGRADE_ENGINE_REPLACEMENT_H_
