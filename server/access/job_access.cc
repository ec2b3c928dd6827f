#include "server/access/job_access.h"

#include <algorithm>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "proto/types/access_names.h"
#include "proto/types/status_macros.h"
#include "server/access/unix_names.h"

namespace optstate::access {
namespace {

// Has what does not exist be the caller's mistake; other errors are not.
absl::Status AsArgument(absl::string_view what, const absl::Status& found) {
  if (!absl::IsNotFound(found)) return found;
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", found.message()));
}

absl::Status CheckGroup(const std::string& group, uid_t owner) {
  const absl::StatusOr<gid_t> found = FindGroup(group);
  if (!found.ok()) return AsArgument("group", found.status());
  if (owner == 0) return absl::OkStatus();
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<gid_t> groups,
                            FindGroupsOf(owner));
  if (std::binary_search(groups.begin(), groups.end(), *found)) {
    return absl::OkStatus();
  }
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

absl::Status CheckAccessForm(const v1::JobAccess& access) {
  const std::vector<std::string> readers(access.readers().begin(),
                                         access.readers().end());
  return CheckAccessNames(access.group(), access.is_private(), readers);
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

bool IsSameAccess(const v1::JobAccess& one, const v1::JobAccess& other) {
  return one.group() == other.group() &&
         one.is_private() == other.is_private() &&
         std::equal(one.readers().begin(), one.readers().end(),
                    other.readers().begin(), other.readers().end());
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
