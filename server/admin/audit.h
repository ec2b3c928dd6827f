#ifndef OPTSTATE_SERVER_ADMIN_AUDIT_H_
#define OPTSTATE_SERVER_ADMIN_AUDIT_H_

#include <string>

#include "absl/status/status.h"

namespace optstate::admin {

// A change that somebody has asked for through Admin.
struct Change {
  std::string method;
  std::string actor;   // Caller::name()
  std::string job;     // empty: it concerns the node
  std::string detail;  // what the request says besides, as key=value words
};

// Writes one line "audit: method=DeleteJob actor=... verdict=done" to the log,
// whether the change was made, refused or failed, and an event of kind "audit",
// unless it was made and has an event of its own kind.
// Both are limited for each actor: 1,000 changes at once that were made, and
// ten a second after that; refusals and failures as other lines that peers
// cause.
//
// Threads: thread-safe.
void Audit(const Change& change, const absl::Status& status);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_AUDIT_H_
