#include "tests/crash/find_engine.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace optstate::crash {
namespace {

bool IsEngineOf(pid_t pid, const std::string& job) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/cmdline"));
  const std::string words((std::istreambuf_iterator<char>(file)),
                          std::istreambuf_iterator<char>());
  const std::string sought =
      absl::StrCat("--engine", std::string(1, '\0'), job, std::string(1, '\0'));
  return absl::StrContains(words, sought);
}

pid_t EngineAmongChildren(pid_t parent, const std::string& job) {
  std::error_code error;
  const std::string tasks = absl::StrCat("/proc/", parent, "/task");
  for (std::filesystem::directory_iterator task(tasks, error), end;
       !error && task != end; task.increment(error)) {
    std::ifstream children(task->path() / "children");
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
