#include "server/observe/log_fields.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace optstate::observe {
namespace {

constexpr size_t kJobNameBytesMax = 128;

bool IsKeyByte(char byte, bool is_first) {
  return absl::ascii_islower(static_cast<unsigned char>(byte)) || byte == '_' ||
         (!is_first && absl::ascii_isdigit(static_cast<unsigned char>(byte)));
}

// Returns the length of the key of a pair that `text` begins with; 0: it begins
// with none.
size_t KeyBytes(absl::string_view text) {
  size_t size = 0;
  while (size < text.size() && IsKeyByte(text[size], size == 0)) ++size;
  return size < text.size() && text[size] == '=' ? size : 0;
}

// Returns the length of a quoted value, which `text` is behind the opening
// quote of.
size_t QuotedBytes(absl::string_view text) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
      continue;
    }
    if (text[i] != '"') continue;
    const absl::string_view after = text.substr(i + 1);
    if (after.empty()) return i;
    if (after[0] == ' ' && KeyBytes(after.substr(1)) != 0) return i;
  }
  return text.size();
}

bool IsNameByte(char byte) {
  return absl::ascii_isalnum(static_cast<unsigned char>(byte)) || byte == '.' ||
         byte == '_' || byte == '-';
}

// Returns the job's name that `text` begins with; empty: it begins with none.
absl::string_view NameAt(absl::string_view text) {
  size_t size = 0;
  while (size < text.size() && IsNameByte(text[size])) ++size;
  const bool is_name = size != 0 && size <= kJobNameBytesMax &&
                       absl::ascii_isalnum(static_cast<unsigned char>(text[0]));
  return is_name ? text.substr(0, size) : absl::string_view();
}

// Returns the name in what comes after the word "job"; empty: it names none.
absl::string_view NameAfterJob(absl::string_view rest, bool is_for) {
  const bool is_pair = absl::ConsumePrefix(&rest, "=");
  if (!is_pair && !absl::ConsumePrefix(&rest, " ")) return {};
  const bool is_quoted = absl::ConsumePrefix(&rest, "\"");
  const absl::string_view name = NameAt(rest);
  const absl::string_view after = rest.substr(name.size());
  if (is_quoted) return absl::StartsWith(after, "\"") ? name : "";
  // Other words follow "job " too: "job is over".
  if (is_pair || is_for || absl::StartsWith(after, ":")) return name;
  return {};
}

}  // namespace

std::vector<LogField> FieldsOf(absl::string_view line) {
  std::vector<LogField> fields;
  while (!line.empty()) {
    const size_t key = KeyBytes(line);
    if (key != 0) {
      LogField field = {line.substr(0, key), {}};
      line.remove_prefix(key + 1);
      if (absl::ConsumePrefix(&line, "\"")) {
        field.value = line.substr(0, QuotedBytes(line));
        line.remove_prefix(field.value.size());
      } else {
        field.value = line.substr(0, line.find(' '));
        line.remove_prefix(field.value.size());
        absl::ConsumeSuffix(&field.value, ",");
        absl::ConsumeSuffix(&field.value, ";");
      }
      fields.push_back(field);
    }
    const size_t space = line.find(' ');
    if (space == absl::string_view::npos) break;
    line.remove_prefix(space + 1);
  }
  return fields;
}

absl::string_view EventOf(absl::string_view line,
                          const std::vector<LogField>& fields) {
  if (fields.empty()) return {};
  for (size_t i = 0; i < fields.size(); ++i) {
    const absl::string_view value = fields[i].value;
    const char* const begin = value.data() + value.size();
    const char* const end = i + 1 < fields.size() ? fields[i + 1].key.data()
                                                  : line.data() + line.size();
    const absl::string_view between(begin, static_cast<size_t>(end - begin));
    if (between.find_first_not_of("\",; ") != absl::string_view::npos) {
      return {};
    }
  }
  absl::string_view event = absl::StripTrailingAsciiWhitespace(line.substr(
      0, static_cast<size_t>(fields.front().key.data() - line.data())));
  absl::ConsumeSuffix(&event, ":");
  const bool is_in_quotes =
      std::count(event.begin(), event.end(), '"') % 2 != 0;
  return is_in_quotes ? absl::string_view() : event;
}

absl::string_view JobOf(absl::string_view line) {
  constexpr absl::string_view kWord = "job";
  for (size_t at = line.find(kWord); at != absl::string_view::npos;
       at = line.find(kWord, at + 1)) {
    if (at > 0 && IsNameByte(line[at - 1])) continue;
    const absl::string_view name =
        NameAfterJob(line.substr(at + kWord.size()),
                     absl::EndsWith(line.substr(0, at), "for "));
    if (!name.empty()) return name;
  }
  return {};
}

}  // namespace optstate::observe
