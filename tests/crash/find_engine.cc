#include "tests/crash/find_engine.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/unique_fd.h"

namespace optstate::crash {
namespace {

// Returns "" when the process is gone, which a stream would throw at.
std::string ReadProcFile(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char buffer[4096];
  ssize_t count = 0;
  while (fd.ok() && (count = read(fd.get(), buffer, sizeof(buffer))) > 0) {
    text.append(buffer, static_cast<size_t>(count));
  }
  return text;
}

bool IsEngineOf(pid_t pid, const std::string& job) {
  const std::string sought =
      absl::StrCat("--engine", std::string(1, '\0'), job, std::string(1, '\0'));
  return absl::StrContains(
      ReadProcFile(absl::StrCat("/proc/", pid, "/cmdline")), sought);
}

pid_t EngineAmongChildren(pid_t parent, const std::string& job) {
  std::error_code error;
  const std::string tasks = absl::StrCat("/proc/", parent, "/task");
  for (std::filesystem::directory_iterator task(tasks, error), end;
       !error && task != end; task.increment(error)) {
    std::istringstream children(ReadProcFile(task->path() / "children"));
    for (pid_t pid; children >> pid;) {
      if (IsEngineOf(pid, job)) return pid;
    }
  }
  return 0;
}

}  // namespace

pid_t FindEngine(pid_t daemon, const std::string& job) {
  const pid_t engine = EngineAmongChildren(daemon, job);
  return engine != 0 ? engine : EngineAmongChildren(getpid(), job);
}

}  // namespace optstate::crash
