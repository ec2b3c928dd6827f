#include "server/access/job_access.h"

#include <algorithm>
#include <set>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "proto/types/status_macros.h"
#include "server/access/unix_names.h"

namespace optstate::access {
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

// Has what does not exist be the caller's mistake; other errors are not.
absl::Status AsArgument(absl::string_view what, const absl::Status& found) {
  if (!absl::IsNotFound(found)) return found;
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", found.message()));
}

absl::Status CheckGroup(const std::string& group, uid_t owner) {
  const absl::StatusOr<gid_t> found = FindGroup(group);
  if (!found.ok()) return AsArgument("group", found.status());
  if (owner == 0) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(const std::set<gid_t> groups, GroupsOf(owner));
  if (groups.contains(*found)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "group: the job's owner, uid ", owner, ", is not in the group \"", group,
      "\" of the daemon's machine: name one of the owner's own groups (id "
      "-nG)"));
}

absl::Status CheckReader(const std::string& reader) {
  const absl::string_view group = ReaderGroup(reader);
  return AsArgument("readers", group.empty()
                                   ? FindUser(reader).status()
                                   : FindGroup(std::string(group)).status());
}

}  // namespace

absl::string_view ReaderGroup(absl::string_view reader) {
  return absl::ConsumePrefix(&reader, "@") ? reader : "";
}

absl::Status CheckAccessForm(const v1::JobAccess& access) {
  if (!access.group().empty()) {
    OPTSTATE_RETURN_IF_ERROR(CheckName("group", access.group()));
  }
  if (!access.is_private() && !access.readers().empty()) {
    return absl::InvalidArgumentError(
        "readers are of a private job alone, because all who may look at jobs "
        "may look at one that is not: set private too, or leave readers out");
  }
  if (access.readers_size() > kReadersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(access.readers_size(), " readers; at most ", kReadersMax,
                     ": put them into a group, and name that as @GROUP"));
  }
  for (const std::string& reader : access.readers()) {
    const absl::string_view group = ReaderGroup(reader);
    OPTSTATE_RETURN_IF_ERROR(
        CheckName("reader", group.empty() ? reader : group));
  }
  return absl::OkStatus();
}

absl::Status CheckJobAccess(const v1::JobAccess& access, uid_t owner) {
  OPTSTATE_RETURN_IF_ERROR(CheckAccessForm(access));
  if (!access.group().empty()) {
    OPTSTATE_RETURN_IF_ERROR(CheckGroup(access.group(), owner));
  }
  for (const std::string& reader : access.readers()) {
    OPTSTATE_RETURN_IF_ERROR(CheckReader(reader));
  }
  return absl::OkStatus();
}

std::string AccessText(const v1::JobAccess& access) {
  std::string text = access.is_private() ? "private" : "not private";
  if (!access.group().empty()) {
    absl::StrAppend(&text, "; group ", access.group());
  }
  if (!access.readers().empty()) {
    absl::StrAppend(&text, "; readers ", absl::StrJoin(access.readers(), ", "));
  }
  return text;
}

}  // namespace optstate::access
