#include "server/supervisor/job_files.h"

#include "absl/strings/str_cat.h"
#include "storage/disk_folder.h"
#include "storage/state_folder.h"

namespace optstate::supervisor {

JobFiles FindJobFiles(const std::string& job_directory) {
  if (!storage::MayExist(job_directory)) return JobFiles::kGone;
  return storage::MayExist(job_directory + storage::kStateFolder)
             ? JobFiles::kState
             : JobFiles::kNoState;
}

std::string FindDurableFolder(const v1::NvmeSettings& nvme,
                              const std::string& job) {
  for (const std::string& directory : nvme.directories()) {
    std::string folder = storage::DiskFolder(directory, job);
    if (storage::IsDurableFolder(folder)) return folder;
  }
  return "";
}

std::string WhatIsKept(const std::string& job, const std::string& job_directory,
                       const std::string& durable_folder) {
  const std::string recover = absl::StrCat("`optctl recover ", job, "`");
  const std::string discard = absl::StrCat("`optctl delete job ", job, "`");
  const JobFiles files = FindJobFiles(job_directory);
  if (files != JobFiles::kState && !durable_folder.empty()) {
    return absl::StrCat("Its durable state is kept in ", durable_folder,
                        "; the daemon's log says more. ", recover,
                        " tries again, ", discard, " discards it");
  }
  switch (files) {
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
