#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_

#include <string>

namespace optstate::supervisor {

// What is there of a job, as its directory shows now.
enum class JobFiles {
  kGone,     // not even the directory: somebody removed it
  kNoState,  // no layout was ever registered
  kState,
};

JobFiles FindJobFiles(const std::string& job_directory);

// Sentences for whoever meets a FAILED job: whether its state is kept, where,
// and which commands are left.
std::string WhatIsKept(const std::string& job,
                       const std::string& job_directory);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_FILES_H_
