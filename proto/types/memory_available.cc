#include "proto/types/memory_available.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/types/os_error.h"

namespace optstate {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The file names of one cgroup version.
struct CgroupFiles {
  absl::string_view mount;
  absl::string_view limit;
  absl::string_view usage;
  // The lines of memory.stat that count page cache, including the cgroup's
  // children.
  absl::string_view inactive_file;
  absl::string_view active_file;
};

constexpr CgroupFiles kV2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                             "inactive_file", "active_file"};
constexpr CgroupFiles kV1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                             "memory.usage_in_bytes", "total_inactive_file",
                             "total_active_file"};

std::optional<std::string> ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  // An empty file sets failbit on the stream that it is copied to.
  if (!file || !(text << file.rdbuf())) return std::nullopt;
  return text.str();
}

std::optional<uint64_t> ReadNumber(const std::string& path) {
  const std::optional<std::string> text = ReadAll(path);
  uint64_t number;
  if (!text || !absl::SimpleAtoi(*text, &number)) return std::nullopt;
  return number;
}

// Returns the number after `key` in a file of "KEY NUMBER ..." lines.
std::optional<uint64_t> Lookup(absl::string_view text, absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t number;
    if (words.size() >= 2 && words[0] == key &&
        absl::SimpleAtoi(words[1], &number)) {
      return number;
    }
  }
  return std::nullopt;
}

// Returns the unused rest of one cgroup's limit; kUnlimited when the cgroup has
// no limit ("max") or does not exist below this mount, as in a container that
// sees the host's path but mounts only its own part.
uint64_t CgroupLeaves(const std::string& directory, const CgroupFiles& files) {
  const auto limit = ReadNumber(absl::StrCat(directory, "/", files.limit));
  const auto usage = ReadNumber(absl::StrCat(directory, "/", files.usage));
  if (!limit || !usage) return kUnlimited;
  uint64_t cache = 0;
  if (const auto stat = ReadAll(absl::StrCat(directory, "/memory.stat"))) {
    cache = Lookup(*stat, files.inactive_file).value_or(0) +
            Lookup(*stat, files.active_file).value_or(0);
  }
  const uint64_t used = *usage - std::min(*usage, cache);
  return *limit - std::min(*limit, used);
}

// Returns the minimum over a cgroup and its ancestors.
uint64_t HierarchyLeaves(const std::string& mount, absl::string_view path,
                         const CgroupFiles& files) {
  uint64_t least = kUnlimited;
  path = absl::StripSuffix(path, "/");
  while (true) {
    least = std::min(least, CgroupLeaves(absl::StrCat(mount, path), files));
    if (path.empty()) return least;
    path = path.substr(0, path.rfind('/'));
  }
}

// Lines of /proc/self/cgroup are "ID:CONTROLLERS:PATH"; v2's is "0::PATH".
uint64_t CgroupsLeave(const std::string& root) {
  const auto text = ReadAll(absl::StrCat(root, "/proc/self/cgroup"));
  if (!text) return kUnlimited;  // a kernel without cgroups
  uint64_t least = kUnlimited;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    const std::vector<absl::string_view> fields =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3 || !absl::StartsWith(fields[2], "/")) continue;
    const std::vector<absl::string_view> controllers =
        absl::StrSplit(fields[1], ',');
    const bool v2 = fields[0] == "0" && fields[1].empty();
    const bool v1 = std::find(controllers.begin(), controllers.end(),
                              "memory") != controllers.end();
    if (!v1 && !v2) continue;
    const CgroupFiles& files = v2 ? kV2 : kV1;
    least = std::min(least, HierarchyLeaves(absl::StrCat(root, files.mount),
                                            fields[2], files));
  }
  return least;
}

}  // namespace

absl::StatusOr<uint64_t> AvailableMemoryBytesBelow(const std::string& root) {
  const std::string path = absl::StrCat(root, "/proc/meminfo");
  const auto meminfo = ReadAll(path);
  if (!meminfo) return OsError(errno, absl::StrCat("read ", path));
  const auto available_kib = Lookup(*meminfo, "MemAvailable:");
  if (!available_kib) {
    return absl::InternalError(absl::StrCat(path, " has no MemAvailable"));
  }
  return std::min(*available_kib * 1024, CgroupsLeave(root));
}

absl::StatusOr<uint64_t> AvailableMemoryBytes() {
  return AvailableMemoryBytesBelow("");
}

}  // namespace optstate
