#ifndef OPTSTATE_PROTO_TYPES_OS_ERROR_H_
#define OPTSTATE_PROTO_TYPES_OS_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace optstate {

// Makes a status from errno, in the only place that does so: code by errno
// (ENOENT NOT_FOUND, EACCES/EPERM PERMISSION_DENIED, ENOSPC/ENOMEM/EMFILE
// RESOURCE_EXHAUSTED, ECONNREFUSED/ECONNRESET/EPIPE UNAVAILABLE, ...), message
// "CALL: strerror [errno N]". `what` names the call and its object.
absl::Status OsError(int error_number, absl::string_view what);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_OS_ERROR_H_
