#ifndef OPTSTATE_SERVER_ADMIN_UPGRADE_CONTROL_H_
#define OPTSTATE_SERVER_ADMIN_UPGRADE_CONTROL_H_

#include <string>

#include "absl/status/statusor.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::admin {

// The daemon's upgrade, as the Admin service controls it.
//
// Threads: every function may be called from any thread but the supervisor's.
class UpgradeControl {
 public:
  virtual ~UpgradeControl() = default;

  // Checks the named build and begins to make way for it if it passes; see
  // Admin.Upgrade.
  virtual absl::StatusOr<v1::UpgradeReply> Upgrade(
      const std::string& binary) = 0;

  // Progress of the last upgrade; with an empty id if there was none.
  virtual v1::UpgradeProgress upgrade_progress() = 0;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_UPGRADE_CONTROL_H_
