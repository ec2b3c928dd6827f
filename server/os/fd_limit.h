#ifndef OPTSTATE_SERVER_OS_FD_LIMIT_H_
#define OPTSTATE_SERVER_OS_FD_LIMIT_H_

#include <cstdint>

namespace optstate::os {

// Raises the process's limit of fds as far as it may: each session and each
// gRPC connection takes one.
void RaiseFdLimit();

// Returns the limit of fds; UINT64_MAX when the kernel does not say.
uint64_t FdLimit();

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_FD_LIMIT_H_
