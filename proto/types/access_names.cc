#include "proto/types/access_names.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/types/status_macros.h"

namespace optstate {
namespace {

// Some directory services have names with blanks, backslashes and @ in them.
bool CanBeName(absl::string_view name) {
  if (name.empty() || name.size() > kAccessNameBytesMax || name[0] == '@' ||
      name != absl::StripAsciiWhitespace(name)) {
    return false;
  }
  return std::none_of(name.begin(), name.end(), [](unsigned char c) {
    return absl::ascii_iscntrl(c) || c == ',' || c == ':' || c == '/';
  });
}

absl::Status CheckName(absl::string_view what, absl::string_view name) {
  if (CanBeName(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, " \"", absl::CHexEscape(name.substr(0, kAccessNameBytesMax)),
      "\" is no name or number of one of the daemon's machine: at most ",
      kAccessNameBytesMax, " characters, without commas, colons and slashes"));
}

}  // namespace

absl::string_view ReaderGroup(absl::string_view reader) {
  return absl::ConsumePrefix(&reader, "@") ? reader : "";
}

absl::Status CheckAccessNames(absl::string_view group, bool is_private,
                              absl::Span<const std::string> readers) {
  if (!group.empty()) OPTSTATE_RETURN_IF_ERROR(CheckName("group", group));
  if (!is_private && !readers.empty()) {
    return absl::InvalidArgumentError(
        "readers are of a private job alone, because all who may look at jobs "
        "may look at one that is not: set private too, or leave readers out");
  }
  if (readers.size() > kReadersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(readers.size(), " readers; at most ", kReadersMax,
                     ": put them into a group, and name that as @GROUP"));
  }
  for (const std::string& reader : readers) {
    const absl::string_view of_group = ReaderGroup(reader);
    OPTSTATE_RETURN_IF_ERROR(
        CheckName("reader", of_group.empty() ? reader : of_group));
  }
  return absl::OkStatus();
}

}  // namespace optstate
