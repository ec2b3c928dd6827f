#include "client/ctl/output.h"

#include <yaml-cpp/yaml.h>

#include <array>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "google/protobuf/util/json_util.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// The tag that YAML's reader gives to quoted scalars.
constexpr char kNonPlainTag[] = "!";

// Writes JSON that a YAML reader has parsed in the block style for people.
// Strings stay quoted: a job may be called "007" or "no".
void EmitBlock(const YAML::Node& node, YAML::Emitter* out) {
  if (node.IsMap()) {
    *out << (node.size() == 0 ? YAML::Flow : YAML::Block) << YAML::BeginMap;
    for (const auto& entry : node) {
      *out << YAML::Key << entry.first.Scalar() << YAML::Value;
      EmitBlock(entry.second, out);
    }
    *out << YAML::EndMap;
  } else if (node.IsSequence()) {
    *out << (node.size() == 0 ? YAML::Flow : YAML::Block) << YAML::BeginSeq;
    for (const YAML::Node& element : node) EmitBlock(element, out);
    *out << YAML::EndSeq;
  } else if (node.Tag() == kNonPlainTag) {
    *out << YAML::DoubleQuoted << node.Scalar();
  } else {
    *out << node.Scalar();  // a number or a boolean
  }
}

absl::StatusOr<std::string> RenderJson(const google::protobuf::Message& message,
                                       bool add_whitespace) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = add_whitespace;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status =
      google::protobuf::util::MessageToJsonString(message, &json, options);
  if (status.ok()) return json;
  return absl::InternalError(absl::StrCat("JSON: ", status.ToString()));
}

}  // namespace

absl::StatusOr<OutputFormat> ParseOutputFormat(absl::string_view text) {
  if (text == "table") return OutputFormat::kTable;
  if (text == "wide") return OutputFormat::kWide;
  if (text == "json") return OutputFormat::kJson;
  if (text == "yaml") return OutputFormat::kYaml;
  return absl::InvalidArgumentError(absl::StrCat(
      "output format \"", text, "\": use table, wide, json or yaml"));
}

absl::StatusOr<std::string> RenderMessage(
    const google::protobuf::Message& message, OutputFormat format) {
  OPTSTATE_ASSIGN_OR_RETURN(std::string json,
                            RenderJson(message, /*add_whitespace=*/true));
  if (format == OutputFormat::kJson) return json;
  YAML::Emitter yaml;
  EmitBlock(YAML::Load(json), &yaml);
  return absl::StrCat(yaml.c_str(), "\n");
}

absl::StatusOr<std::string> RenderOne(const google::protobuf::Message& message,
                                      OutputFormat format) {
  if (format == OutputFormat::kJson) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::string json,
                              RenderJson(message, /*add_whitespace=*/false));
    return absl::StrCat(json, "\n");
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::string yaml,
                            RenderMessage(message, format));
  return absl::StrCat("---\n", yaml);
}

std::string HumanBytes(uint64_t bytes) {
  static constexpr std::array<const char*, 6> kUnits = {"B",   "KiB", "MiB",
                                                        "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return absl::StrCat(bytes, " B");
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string HumanCount(uint64_t count) {
  if (count < 10'000) return absl::StrCat(count);
  static constexpr std::array<const char*, 5> kUnits = {"", "K", "M", "G", "T"};
  double value = static_cast<double>(count);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.1f%s", value, kUnits[unit]);
}

std::string HumanAge(const google::protobuf::Timestamp& then, int64_t now_s) {
  if (then.seconds() == 0) return "-";
  const int64_t age_s = now_s > then.seconds() ? now_s - then.seconds() : 0;
  if (age_s < 60) return absl::StrCat(age_s, "s");
  if (age_s < 3600) return absl::StrCat(age_s / 60, "m", age_s % 60, "s");
  if (age_s < 86400) {
    return absl::StrCat(age_s / 3600, "h", age_s % 3600 / 60, "m");
  }
  return absl::StrCat(age_s / 86400, "d", age_s % 86400 / 3600, "h");
}

std::string HumanTime(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0) return "-";
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ",
                          absl::FromUnixSeconds(time.seconds()),
                          absl::UTCTimeZone());
}

}  // namespace optstate::ctl
