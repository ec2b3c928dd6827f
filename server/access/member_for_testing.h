#ifndef OPTSTATE_SERVER_ACCESS_MEMBER_FOR_TESTING_H_
#define OPTSTATE_SERVER_ACCESS_MEMBER_FOR_TESTING_H_

#include <pwd.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/access/unix_names.h"

namespace optstate::access {

// A user of this machine, and a group that the tables have it in.
struct MemberForTesting {
  uid_t uid = 0;
  std::string group;  // by number
};

// Finds one who is neither root nor the user of this process. Nullopt: the
// machine has none, and the test that needs one is skipped.
inline std::optional<MemberForTesting> FindMemberForTesting() {
  ::setpwent();
  const absl::Cleanup end = [] { ::endpwent(); };
  while (const passwd* const entry = ::getpwent()) {
    if (entry->pw_uid == 0 || entry->pw_uid == ::geteuid()) continue;
    const uid_t uid = entry->pw_uid;
    const gid_t gid = entry->pw_gid;
    const auto groups = FindGroupsOf(uid);
    if (!groups.ok() ||
        !std::binary_search(groups->begin(), groups->end(), gid)) {
      continue;
    }
    return MemberForTesting{.uid = uid, .group = absl::StrCat(gid)};
  }
  return std::nullopt;
}

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_MEMBER_FOR_TESTING_H_
