#ifndef OPTSTATE_CLIENT_CTL_JOURNAL_H_
#define OPTSTATE_CLIENT_CTL_JOURNAL_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace optstate::ctl {

// A unit of systemd, whose processes write to the journal.
struct JournalUnit {
  std::string name;       // "optstated.service"
  bool is_users = false;  // of a user's own systemd
};

// The unit that the packages install.
inline constexpr char kPackagedUnit[] = "optstated.service";

// Finds the unit in the text of /proc/PID/cgroup, of cgroup v1 or v2. nullopt:
// the process belongs to no service.
std::optional<JournalUnit> UnitInCgroup(absl::string_view cgroup);

// Finds the unit of the daemon with this pid. FAILED_PRECONDITION: its log is
// not in the journal, and where its stderr goes; NOT_FOUND: this machine, or
// this pid namespace, has no such process.
absl::StatusOr<JournalUnit> UnitOfDaemon(pid_t pid);

struct JournalQuery {
  JournalUnit unit;
  std::string job;  // lines about this job alone; empty: all
  bool follow = false;
  absl::Duration since;  // 0: from the beginning
  int lines_max = 0;     // the last ones; 0: all
};

// Returns the command line of journalctl for the query. INVALID_ARGUMENT: no
// job can have that name.
absl::StatusOr<std::vector<std::string>> JournalCommand(
    const JournalQuery& query);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_JOURNAL_H_
