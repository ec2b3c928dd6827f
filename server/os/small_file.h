#ifndef OPTSTATE_SERVER_OS_SMALL_FILE_H_
#define OPTSTATE_SERVER_OS_SMALL_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::os {

// Reads the whole file. RESOURCE_EXHAUSTED when it has more than `bytes_max`;
// otherwise the error of the call that failed.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path,
                                          size_t bytes_max);

// Writes a file that does not exist yet, readable by its owner alone.
// ALREADY_EXISTS when the file exists.
absl::Status CreateSmallFile(const std::string& path, absl::string_view text);

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_SMALL_FILE_H_
