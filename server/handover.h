#ifndef OPTSTATE_SERVER_HANDOVER_H_
#define OPTSTATE_SERVER_HANDOVER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/engine.pb.h"

namespace optstate {

// How one supervisor makes way for the next in the same process: it executes
// the new build in its own place. What it has open besides `handover` is
// closed; engines stay its children.

inline constexpr char kHandoverFdFlag[] = "--handover-fd";
// Of v1::SupervisorHandover; both builds must have the same.
inline constexpr uint32_t kHandoverVersion = 1;

// Returns only when it fails, and then everything is as before.
absl::Status ExecuteInPlace(const std::string& path,
                            std::vector<std::string> args,
                            const v1::SupervisorHandover& handover);

// What the one before has left; `fd` is closed, and those that it names belong
// to the caller, closed on exec again.
absl::StatusOr<v1::SupervisorHandover> ReadHandover(int fd);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_HANDOVER_H_
