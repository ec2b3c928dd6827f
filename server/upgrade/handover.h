#ifndef OPTSTATE_SERVER_UPGRADE_HANDOVER_H_
#define OPTSTATE_SERVER_UPGRADE_HANDOVER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"

namespace optstate::upgrade {

// One supervisor makes way for the next in the same process by executing the
// new build in its own place. Fds that are open and not named in `handover` are
// closed; engines stay children of the process.

// Version of v1::SupervisorHandover; both builds must have the same.
inline constexpr uint32_t kHandoverVersion = 1;

// Executes `path` in place of this process. Returns only on failure, and then
// everything is as before.
absl::Status ExecuteInPlace(const std::string& path,
                            std::vector<std::string> args,
                            const v1::SupervisorHandover& handover);

// Reads what the previous supervisor has left; closes `fd`. The fds named in
// the result belong to the caller and are close-on-exec again.
absl::StatusOr<v1::SupervisorHandover> ReadHandover(int fd);

}  // namespace optstate::upgrade

#endif  // OPTSTATE_SERVER_UPGRADE_HANDOVER_H_
