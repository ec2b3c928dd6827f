#include "client/ctl/log_line.h"

#include <map>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace optstate::ctl {
namespace {

// How each object of the daemon begins.
constexpr absl::string_view kBegin = "{\"time\":\"";

// Takes a string of JSON with its quotes from the begin of `*text`. Returns
// what is between them, still escaped; nullopt: there is none.
std::optional<absl::string_view> TakeString(absl::string_view* text) {
  if (!absl::ConsumePrefix(text, "\"")) return std::nullopt;
  for (size_t i = 0; i < text->size(); ++i) {
    if ((*text)[i] == '\\') {
      ++i;
    } else if ((*text)[i] == '"') {
      const absl::string_view found = text->substr(0, i);
      text->remove_prefix(i + 1);
      return found;
    }
  }
  return std::nullopt;
}

// Takes a string or a number.
std::optional<absl::string_view> TakeValue(absl::string_view* text) {
  size_t digits = 0;
  while (digits < text->size() &&
         absl::ascii_isdigit(static_cast<unsigned char>((*text)[digits]))) {
    ++digits;
  }
  if (digits == 0) return TakeString(text);
  const absl::string_view number = text->substr(0, digits);
  text->remove_prefix(digits);
  return number;
}

using Members = std::map<absl::string_view, absl::string_view>;

// Reads the members of an object up to the message, which is before all that
// peers have a say in but the job's name. nullopt: this is no object of a
// daemon.
std::optional<Members> MembersOf(absl::string_view json) {
  Members members;
  if (!absl::ConsumePrefix(&json, "{")) return std::nullopt;
  while (!members.contains("message")) {
    const auto key = TakeString(&json);
    if (!key || !absl::ConsumePrefix(&json, ":")) return std::nullopt;
    const auto value = TakeValue(&json);
    if (!value) return std::nullopt;
    members.emplace(*key, *value);
    // A comma, or the object's end.
    if (json.empty()) return std::nullopt;
    json.remove_prefix(1);
  }
  return members;
}

// Shows escaped quotes and backslashes as they are; other escapes stay.
std::string Shown(absl::string_view escaped) {
  std::string text;
  text.reserve(escaped.size());
  for (size_t i = 0; i < escaped.size(); ++i) {
    const bool is_plain = escaped[i] == '\\' && i + 1 < escaped.size() &&
                          (escaped[i + 1] == '"' || escaped[i + 1] == '\\');
    if (is_plain) ++i;
    text.push_back(escaped[i]);
  }
  return text;
}

}  // namespace

std::string TextOfLogLine(absl::string_view line) {
  const size_t begin = line.find(kBegin);
  // An object that stands in another line's text is not a line of its own.
  const bool may_begin =
      begin == 0 ||
      (begin != absl::string_view::npos && begin >= 2 &&
       line.substr(begin - 2, 2) == ": " && line.find(": ") == begin - 2);
  if (!may_begin) return std::string(line);
  const std::optional<Members> members = MembersOf(line.substr(begin));
  if (!members) return std::string(line);
  std::string text(line.substr(0, begin));
  const auto process = members->find("process");
  const auto job = members->find("job");
  if (process != members->end() && process->second == "engine" &&
      job != members->end()) {
    absl::StrAppend(&text, "engine ", Shown(job->second), ": ");
  }
  absl::StrAppend(&text, Shown(members->at("message")));
  return text;
}

}  // namespace optstate::ctl
