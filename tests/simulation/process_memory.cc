#include "tests/simulation/process_memory.h"

#include <sys/resource.h>
#include <sys/time.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/os/fd_limit.h"

namespace optstate::simulation {
namespace {

absl::Duration DurationOf(const timeval& time) {
  return absl::Seconds(time.tv_sec) + absl::Microseconds(time.tv_usec);
}

}  // namespace

uint64_t AnonymousBytes() {
  std::ifstream file("/proc/self/status");
  std::string word;
  while (file >> word) {
    uint64_t kib = 0;
    if (word == "RssAnon:" && file >> kib) return kib << 10;
  }
  return 0;
}

absl::Duration CpuTime() {
  rusage usage = {};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) return absl::ZeroDuration();
  return DurationOf(usage.ru_utime) + DurationOf(usage.ru_stime);
}

absl::Status ReserveFilesAndMappings(uint64_t files, uint64_t mappings) {
  os::RaiseFdLimit();
  if (os::FdLimit() < files) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the simulation needs ", files, " open files, the process may have ",
        os::FdLimit(),
        ": raise the hard limit (`ulimit -Hn`), or simulate fewer nodes "
        "(--nodes) or ranks (--ranks)"));
  }
  std::ifstream file("/proc/sys/vm/max_map_count");
  uint64_t mappings_max = 0;
  if (!(file >> mappings_max) || mappings <= mappings_max) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "the simulation needs ", mappings, " mappings, a process may have ",
      mappings_max,
      ": raise vm.max_map_count (`sysctl -w vm.max_map_count=N`), or simulate "
      "fewer nodes (--nodes) or ranks (--ranks)"));
}

}  // namespace optstate::simulation
