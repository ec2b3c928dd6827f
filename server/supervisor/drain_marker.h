#ifndef OPTSTATE_SERVER_SUPERVISOR_DRAIN_MARKER_H_
#define OPTSTATE_SERVER_SUPERVISOR_DRAIN_MARKER_H_

#include <string>

#include "absl/status/status.h"

namespace optstate::supervisor {

// STATE_DIR/draining, which is there while the daemon drains: the next one goes
// on with it, whatever has ended this one.

bool HasDrainMarker(const std::string& state_dir);

// Makes or removes it; OK when that was done before.
absl::Status SetDrainMarker(const std::string& state_dir, bool draining);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_DRAIN_MARKER_H_
