#include "server/os/process_stat.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/types/os_error.h"
#include "proto/types/unique_fd.h"

namespace optstate::os {
namespace {

// PF_EXITING of the kernel's include/linux/sched.h.
constexpr uint64_t kExitingFlag = 0x4;
// "PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS ... STARTTIME ...";
// indices among the fields after NAME.
constexpr size_t kFlagsField = 6;
constexpr size_t kStartField = 19;

}  // namespace

absl::StatusOr<ProcessStat> ReadProcessStat(pid_t pid) {
  const std::string path = absl::StrCat("/proc/", pid, "/stat");
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.ok()) return OsError(errno, absl::StrCat("open ", path));
  char text[4096];
  const ssize_t size = ::read(file.get(), text, sizeof(text));
  if (size < 0) {
    // The process has ended since the file was opened.
    if (errno == ESRCH) return absl::NotFoundError(path);
    return OsError(errno, absl::StrCat("read ", path));
  }
  // NAME may hold anything, parentheses too.
  const absl::string_view stat(text, static_cast<size_t>(size));
  const size_t name_end = stat.rfind(") ");
  ProcessStat result;
  uint64_t flags = 0;
  if (name_end != absl::string_view::npos) {
    const std::vector<absl::string_view> fields =
        absl::StrSplit(stat.substr(name_end + 2), ' ');
    if (fields.size() > kStartField &&
        absl::SimpleAtoi(fields[kFlagsField], &flags) &&
        absl::SimpleAtoi(fields[kStartField], &result.start_ticks)) {
      result.is_exiting = (flags & kExitingFlag) != 0;
      return result;
    }
  }
  return absl::InternalError(
      absl::StrCat(path, " is not as proc(5) has it: \"", stat, "\""));
}

bool IsRunning(pid_t pid, uint64_t start_ticks) {
  return ReadProcessStat(pid).ok() && !HasEnded(pid, start_ticks);
}

bool HasEnded(pid_t pid, uint64_t start_ticks) {
  const absl::StatusOr<ProcessStat> stat = ReadProcessStat(pid);
  // The process may be hidden (hidepid).
  if (!stat.ok()) return ::kill(pid, 0) != 0 && errno == ESRCH;
  return stat->is_exiting ||
         (start_ticks != 0 && stat->start_ticks != start_ticks);
}

}  // namespace optstate::os
