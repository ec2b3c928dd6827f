#include "server/supervisor/process_state.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/supervisor/small_file.h"

namespace optstate::supervisor {
namespace {

// The kernel's include/linux/sched.h; shown in /proc/PID/stat.
constexpr uint64_t kExitingFlag = 0x4;

}  // namespace

bool IsExiting(pid_t pid) {
  const absl::StatusOr<std::string> stat =
      ReadSmallFile(absl::StrCat("/proc/", pid, "/stat"), 4096);
  if (!stat.ok()) return false;
  // "PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS ..."; NAME may hold
  // anything, parentheses too.
  const size_t name_end = stat->rfind(") ");
  if (name_end == std::string::npos) return false;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(*stat).substr(name_end + 2), ' ');
  uint64_t flags = 0;
  if (fields.size() < 7 || !absl::SimpleAtoi(fields[6], &flags)) return false;
  return (flags & kExitingFlag) != 0;
}

}  // namespace optstate::supervisor
