#ifndef OPTSTATE_TESTS_FAULTS_PROCESS_STATE_H_
#define OPTSTATE_TESTS_FAULTS_PROCESS_STATE_H_

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace optstate::faults {

// What /proc says of a process; 0 or false of one that is gone.
size_t OpenFds(pid_t pid);
// Memory that processes pass on by its fd: fds of it, and where it is mapped.
size_t MemfdFds(pid_t pid);
size_t MemfdMappings(pid_t pid);
// By SIGSTOP, every thread of it.
bool IsStopped(pid_t pid);

// Files of a directory whose names begin so.
size_t CountFiles(const std::string& directory, const std::string& prefix);

}  // namespace optstate::faults

#endif  // OPTSTATE_TESTS_FAULTS_PROCESS_STATE_H_
