#ifndef OPTSTATE_TESTS_CRASH_UPGRADE_CALL_H_
#define OPTSTATE_TESTS_CRASH_UPGRADE_CALL_H_

#include <csignal>
#include <cstdint>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::crash {

// The way a daemon is upgraded to the build that it is. `optctl upgrade`
// replaces engines, SIGHUP leaves those of this build alone.
enum class UpgradeWay : uint8_t { kCall, kSignal };

// A request to upgrade a daemon, on a thread of its own, so that the daemon can
// be disturbed from the first instant on.
//
// Lifetime: the daemon outlives it. The destructor waits for the answer, which
// a daemon's death is too.
class UpgradeCall {
 public:
  UpgradeCall(const TestDaemon* daemon, UpgradeWay way)
      : thread_([this, daemon, way] {
          if (way == UpgradeWay::kSignal) {
            daemon->process().Signal(SIGHUP);
          } else {
            answer_ = daemon->Upgrade().status();
          }
        }) {}
  ~UpgradeCall() {
    if (thread_.joinable()) thread_.join();
  }
  UpgradeCall(const UpgradeCall&) = delete;
  UpgradeCall& operator=(const UpgradeCall&) = delete;

  // Returns why no upgrade has begun; a signal is not answered.
  absl::Status Answer() {
    if (thread_.joinable()) thread_.join();
    return answer_;
  }

 private:
  absl::Status answer_;
  std::thread thread_;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_UPGRADE_CALL_H_
