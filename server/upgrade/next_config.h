#ifndef OPTSTATE_SERVER_UPGRADE_NEXT_CONFIG_H_
#define OPTSTATE_SERVER_UPGRADE_NEXT_CONFIG_H_

#include "absl/status/status.h"
#include "optstate/v1/config.pb.h"

namespace optstate::upgrade {

// Returns FAILED_PRECONDITION, naming both values, when `next` keeps its state
// or its socket in another place than the running daemon's `own`, or mounts its
// state directory anew: jobs would be left behind.
absl::Status CheckSamePlace(const v1::DaemonConfig& own,
                            const v1::DaemonConfig& next);

// Converts an error in the next build's configuration for the caller of an
// upgrade, whose own request is neither invalid nor for a missing object.
absl::Status AsRefusal(const absl::Status& status);

}  // namespace optstate::upgrade

#endif  // OPTSTATE_SERVER_UPGRADE_NEXT_CONFIG_H_
