#ifndef OPTSTATE_SERVER_UPGRADE_BUILD_CHECK_H_
#define OPTSTATE_SERVER_UPGRADE_BUILD_CHECK_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"

namespace optstate::upgrade {

// The versions that this build reads, writes and speaks; --format-versions
// prints them as text.
v1::FormatVersions OwnFormatVersions();

// Returns FAILED_PRECONDITION, naming both builds and what they do not share,
// when `next` cannot take over from `current`: it does not read the existing
// state (usually a downgrade), or has no protocol in common with the running
// ranks or engines.
absl::Status CheckCanTakeOver(const v1::FormatVersions& current,
                              const v1::FormatVersions& next);

// Asks the executable at `path` whether it can take over from this process with
// its arguments `args` (args[0] is the name). NOT_FOUND, PERMISSION_DENIED: the
// file cannot be executed; FAILED_PRECONDITION: the file is no optstated,
// cannot take over, or refuses the configuration.
//
// Threads: thread-safe; blocks for as long as the executable takes.
absl::StatusOr<v1::FormatVersions> CheckBuild(
    const std::string& path, const std::vector<std::string>& args);

// The path from which the running executable was started; another build may be
// there by now.
absl::StatusOr<std::string> OwnPath();

}  // namespace optstate::upgrade

#endif  // OPTSTATE_SERVER_UPGRADE_BUILD_CHECK_H_
