#include "server/os/priority.h"

#include <sys/resource.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::os {

int OwnNice() { return ::getpriority(PRIO_PROCESS, 0); }

bool MayRaisePriority() {
  const int nice = OwnNice();
  if (nice <= kNiceMin) return false;
  if (::setpriority(PRIO_PROCESS, 0, nice - 1) != 0) return false;
  (void)::setpriority(PRIO_PROCESS, 0, nice);
  return true;
}

absl::Status SetNice(pid_t pid, int nice) {
  absl::Status status;
  std::error_code error;
  std::filesystem::directory_iterator threads(
      absl::StrCat("/proc/", pid, "/task"), error);
  if (error) return OsError(error.value(), "list the process's threads");
  for (const auto& entry : threads) {
    id_t thread = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &thread)) continue;
    if (::setpriority(PRIO_PROCESS, thread, nice) != 0 && errno != ESRCH) {
      status.Update(OsError(errno, absl::StrCat("nice value ", nice)));
    }
  }
  return status;
}

}  // namespace optstate::os
