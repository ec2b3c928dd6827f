#ifndef OPTSTATE_CLIENT_ENDPOINT_EMBEDDED_H_
#define OPTSTATE_CLIENT_ENDPOINT_EMBEDDED_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace optstate::client {

// Returns the session socket of this process's own daemon: a child process that
// is started at the first call (or when the last one is gone) and serves every
// session of the process. The daemon ends when the process ends, for any
// reason: the daemon holds the read end of a pipe whose only write end is here.
//
// The daemon's binary is `daemon_path`, else $OPTSTATE_DAEMON, else "optstated"
// beside the library or program that contains this code, else on PATH. Its
// state, socket and log are in a new directory under /dev/shm, or else $TMPDIR,
// which is removed with the daemon.
//
// NOT_FOUND: no binary. UNAVAILABLE: the daemon exited early; the message ends
// with the end of its log. A forked child gets a daemon of its own.
// Threads: thread-safe.
absl::StatusOr<std::string> EmbeddedDaemonSocket(const std::string& daemon_path,
                                                 absl::Time deadline);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_EMBEDDED_H_
