#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_

#include <string>

namespace optstate::supervisor {

// The present state of a job's files, as its directory shows it.
enum class JobFiles {
  kGone,     // even the directory was removed
  kNoState,  // no layout was ever registered
  kState,
};

JobFiles FindJobFiles(const std::string& job_directory);

// Returns sentences for the user of a FAILED job: whether its state is kept,
// where, and which commands are left.
std::string WhatIsKept(const std::string& job,
                       const std::string& job_directory);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_
