#ifndef OPTSTATE_SERVER_SUPERVISOR_KEPT_SEGMENTS_H_
#define OPTSTATE_SERVER_SUPERVISOR_KEPT_SEGMENTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::supervisor {

// The memory of one rank's gradients, kept for a successor of the engine that
// mapped it.
struct KeptSegment {
  v1::KeptGradientsInfo info;
  std::shared_ptr<const UniqueFd> segment;
};
using KeptSegments = std::map<uint32_t, KeptSegment>;  // by rank
using KeptByJob = std::map<std::string, KeptSegments>;

// Adds what is kept, by job, to what the next build inherits.
void HandOverKept(const KeptByJob& kept, v1::SupervisorHandover* handover);

// Returns what the previous build kept; takes the fds that `handover` names.
KeptByJob InheritKept(const v1::SupervisorHandover& handover);

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_KEPT_SEGMENTS_H_
