#ifndef OPTSTATE_SERVER_ADMIN_UPGRADE_CONTROL_H_
#define OPTSTATE_SERVER_ADMIN_UPGRADE_CONTROL_H_

#include <string>

#include "absl/status/statusor.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::admin {

// What the Admin service asks of the daemon about its own upgrade.
//
// Threads: every function may be called from any thread but the supervisor's.
class UpgradeControl {
 public:
  virtual ~UpgradeControl() = default;

  // Checks that build and begins to make way for it, if it is fit for that; see
  // Admin.Upgrade.
  virtual absl::StatusOr<v1::UpgradeReply> Upgrade(
      const std::string& binary) = 0;

  // Of the last one; with an empty id if there was none.
  virtual v1::UpgradeProgress upgrade_progress() = 0;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_UPGRADE_CONTROL_H_
