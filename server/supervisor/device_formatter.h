#ifndef OPTSTATE_SERVER_SUPERVISOR_DEVICE_FORMATTER_H_
#define OPTSTATE_SERVER_SUPERVISOR_DEVICE_FORMATTER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::supervisor {

// Formats the device of "DIR,device=DEVICE" for that directory, as
// storage::FormatDevice() does; no daemon may use the directory meanwhile.
// Returns a sentence for the operator. INVALID_ARGUMENT: the text names no
// device.
absl::StatusOr<std::string> FormatDeviceOf(absl::string_view text, bool force);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_DEVICE_FORMATTER_H_
