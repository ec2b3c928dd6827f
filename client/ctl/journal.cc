#include "client/ctl/journal.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

// Returns what a process has open as stderr ("/var/log/x", "pipe:[17]"), or ""
// when this user may not know.
std::string StderrOf(pid_t pid) {
  std::error_code error;
  const auto target = std::filesystem::read_symlink(
      absl::StrCat("/proc/", pid, "/fd/2"), error);
  return error ? "" : target.string();
}

absl::Status NotInJournal(pid_t pid, const std::string& target) {
  std::string text =
      absl::StrCat("the daemon (pid ", pid,
                   ") is no service of systemd, so its log is not in the "
                   "journal: it writes to its stderr, ");
  if (target.empty()) {
    absl::StrAppend(&text, "which this user may not see (/proc/", pid,
                    "/fd/2)");
  } else if (absl::StartsWith(target, "pipe:") ||
             absl::StartsWith(target, "socket:")) {
    absl::StrAppend(&text, target,
                    ", which the program that started it reads: in a container "
                    "`kubectl logs` or `podman logs` show it");
  } else {
    absl::StrAppend(&text, target);
  }
  return absl::FailedPreconditionError(text);
}

absl::StatusOr<std::string> JobPattern(const std::string& job) {
  for (const char c : job) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
        c == '_' || c == '-') {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("\"", job, "\": no job can have that name"));
  }
  // Lines say `job NAME` or `job=NAME`; an engine's own begin with
  // `engine NAME: `. Names have dots and hyphens, but none at their end here.
  // Lines of JSON have "job":"NAME", and those of logfmt job=NAME; quotes in
  // the text of both are escaped.
  return absl::StrCat("(\\b(job|engine)[ =]\\\\?\"?|\"job\":\")",
                      absl::StrReplaceAll(job, {{".", "\\."}}),
                      "(\"|[.]?$|[.]? |[.]\"|[^A-Za-z0-9._-])");
}

}  // namespace

std::optional<JournalUnit> UnitInCgroup(absl::string_view cgroup) {
  for (const absl::string_view line : absl::StrSplit(cgroup, '\n')) {
    const std::vector<absl::string_view> fields =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const bool is_systemds = fields[1].empty() || fields[1] == "name=systemd";
    if (!is_systemds) continue;
    JournalUnit unit;
    for (const absl::string_view part : absl::StrSplit(fields[2], '/')) {
      if (absl::EndsWith(part, ".service")) {
        unit.is_users = unit.is_users || absl::StartsWith(unit.name, "user@");
        unit.name = std::string(part);
      } else if (absl::EndsWith(part, ".scope")) {
        unit.name.clear();
      }
    }
    // A program started by hand may be in the group of the user's manager.
    if (!unit.name.empty() && !absl::StartsWith(unit.name, "user@")) {
      return unit;
    }
  }
  return std::nullopt;
}

absl::StatusOr<JournalUnit> UnitOfDaemon(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/cgroup"));
  if (!file) {
    return absl::NotFoundError(absl::StrCat(
        "the daemon has pid ", pid,
        ", and here is no such process: it runs in a container or on another "
        "machine. Run optctl there, or ask its runtime (`kubectl logs`)"));
  }
  const std::string cgroup{std::istreambuf_iterator<char>(file), {}};
  const std::optional<JournalUnit> unit = UnitInCgroup(cgroup);
  const std::string target = StderrOf(pid);
  // A service may still have its stderr elsewhere (StandardError=file:PATH).
  const bool is_journal = target.empty() || absl::StartsWith(target, "socket:");
  if (!unit.has_value() || !is_journal) return NotInJournal(pid, target);
  return *unit;
}

absl::StatusOr<std::vector<std::string>> JournalCommand(
    const JournalQuery& query) {
  std::vector<std::string> command = {"journalctl"};
  if (query.unit.is_users) command.push_back("--user");
  command.push_back(absl::StrCat("--unit=", query.unit.name));
  command.push_back("--output=short-iso");
  if (!query.job.empty()) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::string pattern, JobPattern(query.job));
    command.push_back(absl::StrCat("--grep=", pattern));
    command.push_back("--case-sensitive=yes");
  }
  if (query.since > absl::ZeroDuration()) {
    command.push_back(
        absl::StrCat("--since=-", absl::ToInt64Seconds(query.since), "s"));
  }
  if (query.lines_max > 0) {
    command.push_back(absl::StrCat("--lines=", query.lines_max));
    command.push_back("--no-pager");
  }
  if (query.follow) command.push_back("--follow");
  return command;
}

}  // namespace optstate::ctl
