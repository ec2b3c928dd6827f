#include "tests/load/process_costs.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tests/faults/process_state.h"

namespace optstate::load {
namespace {

// Returns the number of the line "NAME: NUMBER" or "NAME: NUMBER kB"; 0: there
// is none.
uint64_t NumberIn(const std::string& path, absl::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    absl::string_view text = line;
    if (!absl::ConsumePrefix(&text, name) || !absl::ConsumePrefix(&text, ":")) {
      continue;
    }
    absl::ConsumeSuffix(&text, " kB");
    uint64_t number = 0;
    return absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &number) ? number
                                                                       : 0;
  }
  return 0;
}

}  // namespace

void ProcessCosts::Add(const ProcessCosts& other) {
  processes += other.processes;
  fds += other.fds;
  threads += other.threads;
  resident_bytes += other.resident_bytes;
  private_bytes += other.private_bytes;
  proportional_bytes += other.proportional_bytes;
}

std::string ProcessCosts::ToString() const {
  constexpr double kMiB = 1 << 20;
  return absl::StrFormat(
      "%d processes, %d fds, %d threads, RSS %.1f MiB, private %.1f MiB%s",
      processes, fds, threads, static_cast<double>(resident_bytes) / kMiB,
      static_cast<double>(private_bytes) / kMiB,
      proportional_bytes == 0
          ? ""
          : absl::StrFormat(", PSS %.1f MiB",
                            static_cast<double>(proportional_bytes) / kMiB));
}

ProcessCosts CostsOf(pid_t pid, bool with_pss) {
  const std::string directory = absl::StrCat("/proc/", pid);
  ProcessCosts costs;
  costs.threads = NumberIn(directory + "/status", "Threads");
  if (costs.threads == 0) return costs;
  costs.processes = 1;
  costs.fds = faults::OpenFds(pid);
  costs.resident_bytes = NumberIn(directory + "/status", "VmRSS") << 10;
  costs.private_bytes = NumberIn(directory + "/status", "RssAnon") << 10;
  if (with_pss) {
    costs.proportional_bytes = NumberIn(directory + "/smaps_rollup", "Pss")
                               << 10;
  }
  return costs;
}

ProcessCosts CostsOf(const std::vector<pid_t>& pids, bool with_pss) {
  ProcessCosts costs;
  for (const pid_t pid : pids) costs.Add(CostsOf(pid, with_pss));
  return costs;
}

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::vector<pid_t> children;
  std::error_code error;
  for (std::filesystem::directory_iterator
           task(absl::StrCat("/proc/", pid, "/task"), error),
       end;
       !error && task != end; task.increment(error)) {
    std::ifstream file(task->path() / "children");
    for (pid_t child; file >> child;) children.push_back(child);
  }
  return children;
}

}  // namespace optstate::load
