#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_

#include <string>

#include "optstate/v1/config.pb.h"

namespace optstate::supervisor {

// The present state of a job's files, as its directory shows it.
enum class JobFiles {
  kGone,     // even the directory was removed
  kNoState,  // no layout was ever registered
  kState,
};

JobFiles FindJobFiles(const std::string& job_directory);

// Returns the job's folder on a disk that may hold its durable state, which is
// removed on request alone; empty: there is none.
std::string FindDurableFolder(const v1::NvmeSettings& nvme,
                              const std::string& job);

// Returns sentences for the user of a FAILED job: whether its state is kept,
// where, and which commands are left. `durable_folder`: as FindDurableFolder.
std::string WhatIsKept(const std::string& job, const std::string& job_directory,
                       const std::string& durable_folder);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_
