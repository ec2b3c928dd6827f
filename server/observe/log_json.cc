#include "server/observe/log_json.h"

#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/observe/log_fields.h"
#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

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

std::string FieldsAsJson(const std::vector<LogField>& fields) {
  std::string out;
  for (const LogField& field : fields) {
    if (out.size() >= kLineBytesMax) break;
    // Keys need no escapes.
    absl::StrAppend(&out, out.empty() ? "" : ",", "\"", field.key, "\":\"",
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

std::string ToJson(const LogLine& line) {
  const LogParts parts = PartsOf(line);
  std::string out =
      absl::StrCat("{\"time\":\"", parts.time, "\",\"level\":\"", line.level,
                   "\",\"process\":\"", line.process, "\",\"pid\":", line.pid);
  if (!parts.job.empty()) {
    absl::StrAppend(&out, ",\"job\":\"", JsonText(parts.job, kFieldBytesMax),
                    "\"");
  }
  absl::StrAppend(&out, ",\"message\":\"",
                  JsonText(line.message, kLineBytesMax), "\"");
  const std::string fields = FieldsAsJson(parts.fields);
  if (!fields.empty()) absl::StrAppend(&out, ",\"fields\":{", fields, "}");
  out.push_back('}');
  return out;
}

}  // namespace optstate::observe
