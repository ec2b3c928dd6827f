#include "server/access/unix_names.h"

#include <grp.h>
#include <pwd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
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

// Finds the entry of a number, whose texts lie in `memory`; nullopt: the tables
// have none.
absl::StatusOr<std::optional<passwd>> LookUpNumber(uid_t uid,
                                                   std::vector<char>* memory) {
  passwd entry;
  passwd* found = nullptr;
  int error = ERANGE;
  for (size_t size = 4096; error == ERANGE && size <= kEntryBytesMax;
       size *= 4) {
    memory->resize(size);
    error = ::getpwuid_r(uid, &entry, memory->data(), size, &found);
  }
  // Some sources answer so for a number that they do not have.
  if (error == ENOENT || error == ESRCH) return std::optional<passwd>();
  if (error != 0) return OsError(error, absl::StrCat("looking up uid ", uid));
  if (found == nullptr) return std::optional<passwd>();
  return std::optional<passwd>(entry);
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

std::string NameOfUser(uid_t uid) {
  std::vector<char> memory;
  const absl::StatusOr<std::optional<passwd>> entry =
      LookUpNumber(uid, &memory);
  return entry.ok() && entry->has_value() ? (*entry)->pw_name : "";
}

absl::StatusOr<std::vector<gid_t>> FindGroupsOf(uid_t uid) {
  constexpr int kGroupsMax = 1 << 20;
  std::vector<char> memory;
  OPTSTATE_ASSIGN_OR_RETURN(const std::optional<passwd> entry,
                            LookUpNumber(uid, &memory));
  std::vector<gid_t> groups;
  if (!entry.has_value()) return groups;
  for (int room = 64; room <= kGroupsMax; room *= 4) {
    groups.resize(static_cast<size_t>(room));
    int count = room;
    if (::getgrouplist(entry->pw_name, entry->pw_gid, groups.data(), &count) <
        0) {
      continue;
    }
    groups.resize(static_cast<size_t>(count));
    std::sort(groups.begin(), groups.end());
    groups.erase(std::unique(groups.begin(), groups.end()), groups.end());
    return groups;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("uid ", uid, " is in more than ", kGroupsMax, " groups"));
}

}  // namespace optstate::access
