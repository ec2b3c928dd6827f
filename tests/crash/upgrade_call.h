#ifndef OPTSTATE_TESTS_CRASH_UPGRADE_CALL_H_
#define OPTSTATE_TESTS_CRASH_UPGRADE_CALL_H_

#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::crash {

// A request to upgrade a daemon, on a thread of its own, so that the daemon can
// be disturbed from the first instant on.
//
// Lifetime: the daemon outlives it. It waits for the answer, which a daemon's
// death is too.
class UpgradeCall {
 public:
  explicit UpgradeCall(const TestDaemon* daemon)
      : thread_([this, daemon] { id_ = daemon->Upgrade(); }) {}
  ~UpgradeCall() {
    if (thread_.joinable()) thread_.join();
  }
  UpgradeCall(const UpgradeCall&) = delete;
  UpgradeCall& operator=(const UpgradeCall&) = delete;

  // The upgrade that has begun, or why none has.
  absl::StatusOr<std::string> Answer() {
    if (thread_.joinable()) thread_.join();
    return id_;
  }

 private:
  absl::StatusOr<std::string> id_ = absl::UnknownError("no answer");
  std::thread thread_;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_UPGRADE_CALL_H_
