#ifndef OPTSTATE_SERVER_CONFIG_YAML_MESSAGE_H_
#define OPTSTATE_SERVER_CONFIG_YAML_MESSAGE_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace google::protobuf {
class Message;
}

namespace optstate::config {

// Lines (from 1) of values by field path ("limits.jobs_max"), and of the
// elements of lists ("quotas[1]").
using FieldLines = std::map<std::string, int>;

// Sets the fields of `message` that the YAML text names; the others keep what
// they have. Works on any message by reflection:
//   messages are mappings; repeated fields are sequences, also of mappings,
//   which replace;
//   enum values are written in lower case without their prefix ("auto");
//   fields with "bytes" in their name take KiB, MiB, GiB, TiB ("256 MiB");
//   fields named *_mode are octal, with or without a leading 0 ("0660").
// INVALID_ARGUMENT "FILE:LINE: ..." for an unknown key (the known ones are
// named), a repeated key, a wrong type, a value out of range or a second
// document, and for text that is not UTF-8; `file` is used for these texts
// alone. When `lines` is given, it gets every value's line.
absl::Status MergeYaml(absl::string_view text, absl::string_view file,
                       google::protobuf::Message* message,
                       FieldLines* lines = nullptr);

// Writes every field of `message` as YAML that MergeYaml can read back.
std::string ToYaml(const google::protobuf::Message& message);

// Parses "4096", "256 MiB" or "1TiB". INVALID_ARGUMENT: any other text, or a
// value over 2^64-1.
absl::StatusOr<uint64_t> ParseByteCount(absl::string_view text);

}  // namespace optstate::config

#endif  // OPTSTATE_SERVER_CONFIG_YAML_MESSAGE_H_
