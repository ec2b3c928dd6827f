#include "server/observe/log_logfmt.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/observe/log_fields.h"
#include "server/observe/log_json.h"
#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

bool IsOwnKey(absl::string_view key) {
  static constexpr absl::string_view kKeys[] = {"ts",  "level", "event",
                                                "job", "pid",   "process"};
  return std::find(std::begin(kKeys), std::end(kKeys), key) != std::end(kKeys);
}

// Returns whether a value can stand without quotes.
bool IsBare(absl::string_view value) {
  return !value.empty() &&
         std::all_of(value.begin(), value.end(), [](char byte) {
           return absl::ascii_isgraph(static_cast<unsigned char>(byte)) &&
                  byte != '"' && byte != '\\' && byte != '=';
         });
}

// Appends `key=value`. Returns false when the value may have been cut.
bool AppendPair(absl::string_view key, absl::string_view value,
                size_t bytes_max, std::string* out) {
  const std::string text = JsonText(value, bytes_max);
  const absl::string_view quote = IsBare(text) ? "" : "\"";
  absl::StrAppend(out, out->empty() ? "" : " ", key, "=", quote, text, quote);
  // The text of a cut value goes on with the count of what is missing.
  return text.size() <= bytes_max;
}

}  // namespace

std::string ToLogfmt(const LogLine& line) {
  const LogParts parts = PartsOf(line);
  std::string pairs;
  bool has_all = true;
  if (!parts.job.empty()) {
    AppendPair("job", parts.job, kFieldBytesMax, &pairs);
  }
  for (const LogField& field : parts.fields) {
    if (pairs.size() >= kLineBytesMax) {
      has_all = false;
      break;
    }
    const bool is_whole = AppendPair(
        absl::StrCat(IsOwnKey(field.key) ? "fields." : "", field.key),
        field.value, kFieldBytesMax, &pairs);
    has_all = has_all && is_whole;
  }
  const bool is_split = has_all && !parts.event.empty();
  std::string out = absl::StrCat("ts=", parts.time, " level=", line.level);
  AppendPair("event", is_split ? parts.event : line.message, kLineBytesMax,
             &out);
  // The process is last: `optctl logs` takes `engine NAME` for the begin of an
  // engine's line (client/ctl/journal.h).
  absl::StrAppend(&out, pairs.empty() ? "" : " ", pairs, " pid=", line.pid,
                  " process=", line.process);
  return out;
}

}  // namespace optstate::observe
