#ifndef OPTSTATE_SERVER_OBSERVE_SD_NOTIFY_H_
#define OPTSTATE_SERVER_OBSERVE_SD_NOTIFY_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace optstate::observe {

// Reports a state ("READY=1", "STOPPING=1", "WATCHDOG=1") to the service
// manager that started this process ($NOTIFY_SOCKET); without one does nothing.
//
// Written here although libsystemd has it: the protocol is this one datagram,
// Debian has no archive of libsystemd to link into release binaries, and they
// should run where there is no systemd.
absl::Status NotifyServiceManager(absl::string_view state);

// Returns the time within which the service manager wants a "WATCHDOG=1" from
// this process ($WATCHDOG_USEC, $WATCHDOG_PID); infinite: it wants none.
absl::Duration WatchdogLimit();

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_SD_NOTIFY_H_
