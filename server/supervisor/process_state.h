#ifndef OPTSTATE_SERVER_SUPERVISOR_PROCESS_STATE_H_
#define OPTSTATE_SERVER_SUPERVISOR_PROCESS_STATE_H_

#include <sys/types.h>

namespace optstate::supervisor {

// Whether process `pid` has begun to exit and was not reaped yet. A dying
// process closes its files one after another, and a pidfd tells of its end only
// after that: in between it looks alive, and what is sent to it is lost. False
// when /proc cannot tell.
bool IsExiting(pid_t pid);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_PROCESS_STATE_H_
