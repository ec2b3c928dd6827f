#ifndef OPTSTATE_SERVER_OBSERVE_SD_NOTIFY_H_
#define OPTSTATE_SERVER_OBSERVE_SD_NOTIFY_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace optstate::observe {

// Tells the service manager a state ("READY=1", "STOPPING=1") when this process
// was started by one ($NOTIFY_SOCKET); otherwise does nothing.
//
// Written here although libsystemd has it: the protocol is this one datagram,
// Debian has no archive of libsystemd to link into release binaries, and they
// should run where there is no systemd.
absl::Status NotifyServiceManager(absl::string_view state);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_SD_NOTIFY_H_
