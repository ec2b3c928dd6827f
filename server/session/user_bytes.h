#ifndef OPTSTATE_SERVER_SESSION_USER_BYTES_H_
#define OPTSTATE_SERVER_SESSION_USER_BYTES_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace optstate::session {

// Returns the bytes that the files of a user's jobs take, by `owner` in each
// job's directory below STATE_DIR/jobs, as far as that can be read.
uint64_t AllocatedBytesOfUser(const std::string& state_dir, uid_t uid);

// Returns whether this is root or the daemon's own user, for whom others leave
// room.
bool IsOperator(uid_t uid);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_USER_BYTES_H_
