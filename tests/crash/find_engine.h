#ifndef OPTSTATE_TESTS_CRASH_FIND_ENGINE_H_
#define OPTSTATE_TESTS_CRASH_FIND_ENGINE_H_

#include <sys/types.h>

#include <string>

namespace optstate::crash {

// Returns the process of a job's engine, without asking any other process: a
// child of the daemon or, after that one's death, of ours. 0: there is none.
pid_t FindEngine(pid_t daemon, const std::string& job);

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_FIND_ENGINE_H_
