#include "tests/load/needed_resources.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "proto/types/memory_available.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::load {

absl::Status RaiseOpenFiles(uint64_t needed) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return OsError(errno, "getrlimit");
  rlimit wanted = limit;
  wanted.rlim_cur = limit.rlim_max;
  // Only root may raise the hard limit; for others the try fails.
  if (limit.rlim_max < needed) wanted = {needed, needed};
  if (setrlimit(RLIMIT_NOFILE, &wanted) == 0) return absl::OkStatus();
  if (errno != EPERM) return OsError(errno, "setrlimit RLIMIT_NOFILE");
  return absl::ResourceExhaustedError(absl::StrCat(
      needed, " open files are needed, and the hard limit is ", limit.rlim_max,
      ": raise it (ulimit -Hn ", needed, " as root), or ask for fewer"));
}

absl::Status CheckMemory(uint64_t needed) {
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t available, AvailableMemoryBytes());
  if (available >= needed) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(needed >> 20, " MiB of memory are needed, and ",
                   available >> 20, " MiB are left: ask for fewer sessions"));
}

}  // namespace optstate::load
