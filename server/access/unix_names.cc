#include "server/access/unix_names.h"

#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::access {
namespace {

constexpr size_t kEntryBytesMax = 1 << 20;

// Calls getpwnam_r or getgrnam_r with more and more memory.
template <typename Entry, typename Lookup>
absl::StatusOr<Entry> LookUp(const char* kind, const std::string& name,
                             const Lookup& lookup, std::vector<char>* memory) {
  Entry entry;
  Entry* found = nullptr;
  int error = ERANGE;
  for (size_t size = 4096; error == ERANGE && size <= kEntryBytesMax;
       size *= 4) {
    memory->resize(size);
    error = lookup(name.c_str(), &entry, memory->data(), size, &found);
  }
  if (error != 0) return OsError(error, absl::StrCat("looking up ", name));
  if (found != nullptr) return entry;
  return absl::NotFoundError(absl::StrCat("this machine has no ", kind, " \"",
                                          name, "\": name one, or its number"));
}

}  // namespace

absl::StatusOr<uid_t> FindUser(const std::string& text) {
  uint32_t number = 0;
  // The highest number means "no user" to the system.
  if (absl::SimpleAtoi(text, &number) && number != UINT32_MAX) return number;
  std::vector<char> memory;
  const auto user = LookUp<passwd>("user", text, ::getpwnam_r, &memory);
  if (!user.ok()) return user.status();
  return user->pw_uid;
}

absl::StatusOr<gid_t> FindGroup(const std::string& text) {
  uint32_t number = 0;
  if (absl::SimpleAtoi(text, &number) && number != UINT32_MAX) return number;
  std::vector<char> memory;
  const auto found = LookUp<group>("group", text, ::getgrnam_r, &memory);
  if (!found.ok()) return found.status();
  return found->gr_gid;
}

absl::StatusOr<std::set<gid_t>> GroupsOf(uid_t uid) {
  constexpr size_t kGroupsMax = 65536;  // NGROUPS_MAX of Linux
  std::vector<char> memory;
  const auto by_uid = [uid](const char*, passwd* entry, char* buffer,
                            size_t size, passwd** found) {
    return ::getpwuid_r(uid, entry, buffer, size, found);
  };
  const auto user =
      LookUp<passwd>("user", absl::StrCat("number ", uid), by_uid, &memory);
  if (absl::IsNotFound(user.status())) return std::set<gid_t>();
  if (!user.ok()) return user.status();
  std::vector<gid_t> groups(64);
  auto count = static_cast<int>(groups.size());
  while (::getgrouplist(user->pw_name, user->pw_gid, groups.data(), &count) <
         0) {
    if (groups.size() >= kGroupsMax) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "user ", user->pw_name, " is in more than ", kGroupsMax, " groups"));
    }
    groups.resize(std::max(2 * groups.size(), static_cast<size_t>(count)));
    count = static_cast<int>(groups.size());
  }
  return std::set<gid_t>(groups.begin(), groups.begin() + count);
}

absl::StatusOr<std::set<gid_t>> FindOperatorGroups(
    const v1::AccessSettings& access) {
  std::set<gid_t> groups;
  for (const std::string& text : access.operator_groups()) {
    const absl::StatusOr<gid_t> found = FindGroup(text);
    if (!found.ok()) return Annotate(found.status(), "access.operator_groups");
    groups.insert(*found);
  }
  return groups;
}

bool PeerIsIn(int socket, gid_t gid, const std::set<gid_t>& groups) {
  if (groups.empty()) return false;
  if (groups.contains(gid)) return true;
  std::vector<gid_t> further(64);
  while (true) {
    auto size = static_cast<socklen_t>(further.size() * sizeof(gid_t));
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, further.data(),
                     &size) == 0) {
      further.resize(size / sizeof(gid_t));
      break;
    }
    // The kernel says how much room it needs.
    if (errno != ERANGE || size <= further.size() * sizeof(gid_t)) return false;
    further.resize(size / sizeof(gid_t));
  }
  return std::any_of(further.begin(), further.end(),
                     [&groups](gid_t each) { return groups.contains(each); });
}

}  // namespace optstate::access
