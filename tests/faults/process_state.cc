#include "tests/faults/process_state.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace optstate::faults {
namespace {

constexpr char kMemfd[] = "/memfd:";

bool IsTaskStopped(const std::filesystem::path& task) {
  std::ifstream file(task / "stat");
  std::string stat;
  std::getline(file, stat);
  // The command's name, in parentheses, can hold anything.
  const size_t end = stat.rfind(')');
  return end == std::string::npos || absl::StartsWith(stat.substr(end), ") T");
}

}  // namespace

size_t OpenFds(pid_t pid) {
  return CountFiles(absl::StrCat("/proc/", pid, "/fd"), "");
}

size_t MemfdFds(pid_t pid) {
  std::error_code error;
  size_t count = 0;
  for (std::filesystem::directory_iterator
           fd(absl::StrCat("/proc/", pid, "/fd"), error),
       end;
       !error && fd != end; fd.increment(error)) {
    std::error_code closed;
    const auto target = std::filesystem::read_symlink(fd->path(), closed);
    if (absl::StartsWith(target.string(), kMemfd)) ++count;
  }
  return count;
}

size_t MemfdMappings(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/maps"));
  size_t count = 0;
  for (std::string line; std::getline(file, line);) {
    if (absl::StrContains(line, kMemfd)) ++count;
  }
  return count;
}

bool IsStopped(pid_t pid) {
  std::error_code error;
  std::filesystem::directory_iterator task(absl::StrCat("/proc/", pid, "/task"),
                                           error);
  if (error) return false;
  for (const std::filesystem::directory_iterator end; !error && task != end;
       task.increment(error)) {
    if (!IsTaskStopped(task->path())) return false;
  }
  return true;
}

size_t CountFiles(const std::string& directory, const std::string& prefix) {
  std::error_code error;
  size_t count = 0;
  for (std::filesystem::directory_iterator file(directory, error), end;
       !error && file != end; file.increment(error)) {
    if (absl::StartsWith(file->path().filename().string(), prefix)) ++count;
  }
  return count;
}

}  // namespace optstate::faults
