#ifndef OPTSTATE_SERVER_SESSION_USER_BYTES_H_
#define OPTSTATE_SERVER_SESSION_USER_BYTES_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>

namespace optstate::session {

// Returns the owner of each job of a state directory, by the job's name:
// `owner` in its directory below STATE_DIR/jobs, as far as that can be read.
std::map<std::string, uid_t> OwnersOfJobs(const std::string& state_dir);

// Returns the bytes that the files of such jobs take, by owner.
std::map<uid_t, uint64_t> StateBytesByOwner(const std::string& state_dir);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_USER_BYTES_H_
