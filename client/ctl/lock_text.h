#ifndef OPTSTATE_CLIENT_CTL_LOCK_TEXT_H_
#define OPTSTATE_CLIENT_CTL_LOCK_TEXT_H_

#include <string>

#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// Returns how much is locked in memory, and why not all: "8.0 MiB", "1.0 MiB,
// 7.0 MiB being locked", "0 B; 8.0 MiB not: lock_memory: never".
std::string LockText(const v1::MemoryLock& lock);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_LOCK_TEXT_H_
