#ifndef OPTSTATE_PROTO_TYPES_ACCESS_NAMES_H_
#define OPTSTATE_PROTO_TYPES_ACCESS_NAMES_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate {

// Limits of a v1::JobAccess, which goes in a Hello and in a small file.
inline constexpr size_t kReadersMax = 32;
inline constexpr size_t kAccessNameBytesMax = 100;

// Returns the group of a reader such as "@ops"; empty: the reader is a user.
absl::string_view ReaderGroup(absl::string_view reader);

// Checks what can be checked of a v1::JobAccess without the daemon's tables of
// users. INVALID_ARGUMENT: a name that no user or group can have, readers of a
// job that is not private, too many readers.
absl::Status CheckAccessNames(absl::string_view group, bool is_private,
                              absl::Span<const std::string> readers);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_ACCESS_NAMES_H_
