#ifndef OPTSTATE_SERVER_ACCESS_COLLEAGUES_H_
#define OPTSTATE_SERVER_ACCESS_COLLEAGUES_H_

#include <pwd.h>
#include <sys/types.h>
#include <unistd.h>

#include <map>
#include <optional>

namespace optstate::access {

// Two users of this machine who are in one group, neither of them root or the
// user of the test: for tests of quotas of groups.
struct Colleagues {
  gid_t group = 0;
  uid_t first = 0;
  uid_t second = 0;
};

// Finds some by the system's tables, if there are any: Debian's nobody and sync
// are in nogroup.
inline std::optional<Colleagues> FindColleagues() {
  std::map<gid_t, uid_t> known;
  std::optional<Colleagues> found;
  ::setpwent();
  while (const passwd* entry = ::getpwent()) {
    const uid_t uid = entry->pw_uid;
    if (uid == 0 || uid == ::geteuid()) continue;
    const auto [other, is_first] = known.emplace(entry->pw_gid, uid);
    if (is_first || other->second == uid) continue;
    found = Colleagues{entry->pw_gid, other->second, uid};
    break;
  }
  ::endpwent();
  return found;
}

}  // namespace optstate::access

#endif  // OPTSTATE_SERVER_ACCESS_COLLEAGUES_H_
