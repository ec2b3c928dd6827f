#include "server/supervisor/job_files.h"

#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "storage/state_folder.h"

namespace optstate::supervisor {
namespace {

// Whether the file exists. One that exists and cannot be inspected does not
// count as gone.
bool IsThere(const std::string& path) {
  return ::access(path.c_str(), F_OK) == 0 ||
         (errno != ENOENT && errno != ENOTDIR);
}

}  // namespace

JobFiles FindJobFiles(const std::string& job_directory) {
  if (!IsThere(job_directory)) return JobFiles::kGone;
  return IsThere(job_directory + kStateFolder) ? JobFiles::kState
                                               : JobFiles::kNoState;
}

std::string WhatIsKept(const std::string& job,
                       const std::string& job_directory) {
  const std::string recover = absl::StrCat("`optctl recover ", job, "`");
  const std::string discard = absl::StrCat("`optctl delete job ", job, "`");
  switch (FindJobFiles(job_directory)) {
    case JobFiles::kGone:
      return absl::StrCat(
          "Its state was removed with the directory: nothing is left to "
          "recover. ",
          discard, " forgets the job; start it again from a checkpoint");
    case JobFiles::kNoState:
      return absl::StrCat(
          "It has no state yet, so nothing is lost; the "
          "daemon's log says more. ",
          recover, " tries again, ", discard, " removes it");
    case JobFiles::kState:
      break;
  }
  return absl::StrCat("Its state is kept in ", job_directory,
                      "; the daemon's log says more. ", recover,
                      " tries again, ", discard, " discards it");
}

}  // namespace optstate::supervisor
