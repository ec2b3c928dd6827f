#ifndef OPTSTATE_SERVER_SUPERVISOR_DRAIN_MARKER_H_
#define OPTSTATE_SERVER_SUPERVISOR_DRAIN_MARKER_H_

#include <string>

#include "absl/status/status.h"

namespace optstate::supervisor {

// STATE_DIR/draining exists while the daemon drains, so that the next daemon
// goes on draining, whatever has ended this one.

bool HasDrainMarker(const std::string& state_dir);

// Creates or removes the marker; OK when that was done before.
absl::Status SetDrainMarker(const std::string& state_dir, bool draining);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_DRAIN_MARKER_H_
