#include "server/observe/log_parts.h"

#include <set>

#include "server/observe/log_text.h"

namespace optstate::observe {

LogParts PartsOf(const LogLine& line) {
  const absl::string_view shown = line.message.substr(0, kLineBytesMax);
  LogParts parts;
  parts.time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", line.time, absl::UTCTimeZone());
  parts.job = line.job.empty() ? JobOf(shown) : line.job;
  bool has_all = shown.size() == line.message.size();
  const std::vector<LogField> fields = FieldsOf(shown);
  std::set<absl::string_view> keys;
  for (const LogField& field : fields) {
    if (field.key == "job" && field.value == parts.job) continue;
    const absl::string_view key = field.key.substr(0, kFieldBytesMax);
    has_all = has_all && key.size() == field.key.size();
    if (keys.insert(key).second) {
      parts.fields.push_back({key, field.value});
    } else {
      has_all = false;
    }
  }
  if (has_all) parts.event = EventOf(shown, fields);
  return parts;
}

}  // namespace optstate::observe
