#ifndef OPTSTATE_TESTS_FAULTS_PROCESS_STATE_H_
#define OPTSTATE_TESTS_FAULTS_PROCESS_STATE_H_

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace optstate::faults {

// The state of a process as /proc shows it; 0 or false of one that is gone.
size_t OpenFds(pid_t pid);
// Counts fds and mappings of memory that processes pass on by its fd (memfd).
size_t MemfdFds(pid_t pid);
size_t MemfdMappings(pid_t pid);
// Returns whether SIGSTOP has stopped every thread of the process.
bool IsStopped(pid_t pid);

// Counts files of a directory whose names begin with `prefix`.
size_t CountFiles(const std::string& directory, const std::string& prefix);

}  // namespace optstate::faults

#endif  // OPTSTATE_TESTS_FAULTS_PROCESS_STATE_H_
