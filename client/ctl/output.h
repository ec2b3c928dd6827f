#ifndef OPTSTATE_CLIENT_CTL_OUTPUT_H_
#define OPTSTATE_CLIENT_CTL_OUTPUT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"
#include "google/protobuf/timestamp.pb.h"

namespace optstate::ctl {

enum class OutputFormat { kTable, kWide, kJson, kYaml };

// Parses "table", "wide", "json" or "yaml". INVALID_ARGUMENT names these four.
absl::StatusOr<OutputFormat> ParseOutputFormat(absl::string_view text);

// Renders the message as JSON (proto3's mapping, fields by their proto names,
// defaults included) or the same tree as YAML with quoted strings. `format`
// must be kJson or kYaml.
absl::StatusOr<std::string> RenderMessage(
    const google::protobuf::Message& message, OutputFormat format);

// Renders one message of many: JSON in one line, or a document of YAML.
absl::StatusOr<std::string> RenderOne(const google::protobuf::Message& message,
                                      OutputFormat format);

// Renders bytes as "1.5 GiB"; exact below 1 KiB.
std::string HumanBytes(uint64_t bytes);
// Renders a count as "12.3M", in powers of 1000; exact below 10,000.
std::string HumanCount(uint64_t count);
// Renders the time since `then` as "3h12m"; "-" when `then` is unset. `now_s`:
// Unix seconds.
std::string HumanAge(const google::protobuf::Timestamp& then, int64_t now_s);
// Renders a time in RFC 3339 in UTC; "-" when unset.
std::string HumanTime(const google::protobuf::Timestamp& time);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_OUTPUT_H_
