#ifndef OPTSTATE_CLIENT_CTL_METRICS_PAGE_H_
#define OPTSTATE_CLIENT_CTL_METRICS_PAGE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace optstate::ctl {

// Returns where a daemon serves its metrics (HOST:PORT or unix:PATH), by the
// text of its /proc/PID/cmdline and of its configuration file, over which the
// command line goes; "": nowhere, as far as they say.
std::string MetricsAddressIn(const std::string& command_line,
                             absl::string_view config);

// Reads the page /metrics at such an address, `bytes_max` bytes at most.
// INVALID_ARGUMENT: it is no address; UNAVAILABLE: nobody serves it there, or
// not with code 200; DEADLINE_EXCEEDED: not in time.
absl::StatusOr<std::string> ReadMetrics(const std::string& address,
                                        size_t bytes_max,
                                        absl::Duration timeout);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_METRICS_PAGE_H_
