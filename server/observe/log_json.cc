#include "server/observe/log_json.h"

#include <cstdint>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/observe/log_fields.h"
#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

constexpr size_t kFieldBytesMax = 512;
constexpr absl::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

void AppendControl(uint32_t code, std::string* out) {
  switch (code) {
    case '\n':
      out->append("\\n");
      break;
    case '\r':
      out->append("\\r");
      break;
    case '\t':
      out->append("\\t");
      break;
    default:
      absl::StrAppendFormat(out, "\\u%04x", code);
  }
}

std::string FieldsAsJson(absl::string_view message, absl::string_view job) {
  std::string out;
  std::set<absl::string_view> keys;
  for (const LogField& field : FieldsOf(message)) {
    if (out.size() >= kLineBytesMax) break;
    if (field.key == "job" && field.value == job) continue;
    if (!keys.insert(field.key).second) continue;
    // Keys need no escapes.
    absl::StrAppend(&out, out.empty() ? "" : ",", "\"",
                    field.key.substr(0, kFieldBytesMax), "\":\"",
                    JsonText(field.value, kFieldBytesMax), "\"");
  }
  return out;
}

}  // namespace

std::string JsonText(absl::string_view text, size_t bytes_max) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    if (out.size() >= bytes_max) {
      absl::StrAppend(&out, "... (", text.size(), " bytes more)");
      break;
    }
    uint32_t code = 0;
    const size_t size = DecodeCharacter(text, &code);
    if (size == 0) {
      out.append(kReplacement.data(), kReplacement.size());
    } else if (IsControl(code)) {
      AppendControl(code, &out);
    } else {
      if (code == '"' || code == '\\') out.push_back('\\');
      out.append(text.data(), size);
    }
    text.remove_prefix(size == 0 ? 1 : size);
  }
  return out;
}

std::string ToJson(const JsonLine& line) {
  const absl::string_view shown = line.message.substr(0, kLineBytesMax);
  const absl::string_view job = line.job.empty() ? JobOf(shown) : line.job;
  std::string out = absl::StrCat(
      "{\"time\":\"",
      absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", line.time, absl::UTCTimeZone()),
      "\",\"level\":\"", line.level, "\",\"process\":\"", line.process,
      "\",\"pid\":", line.pid);
  if (!job.empty()) {
    absl::StrAppend(&out, ",\"job\":\"", JsonText(job, kFieldBytesMax), "\"");
  }
  absl::StrAppend(&out, ",\"message\":\"",
                  JsonText(line.message, kLineBytesMax), "\"");
  const std::string fields = FieldsAsJson(shown, job);
  if (!fields.empty()) absl::StrAppend(&out, ",\"fields\":{", fields, "}");
  out.push_back('}');
  return out;
}

}  // namespace optstate::observe
