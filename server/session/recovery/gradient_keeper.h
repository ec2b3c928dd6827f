#ifndef OPTSTATE_SERVER_SESSION_RECOVERY_GRADIENT_KEEPER_H_
#define OPTSTATE_SERVER_SESSION_RECOVERY_GRADIENT_KEEPER_H_

#include <cstdint>

#include "proto/types/unique_fd.h"

namespace optstate::session {

// The memory that held a rank's gradients when the engine before this one died.
struct KeptGradients {
  uint32_t rank = 0;
  uint64_t client_instance = 0;        // of the client that wrote them
  uint64_t gradient_offset_bytes = 0;  // where in the segment they begin
  UniqueFd segment;
};

// Receives the memory that holds a rank's gradients, and keeps it (through a
// process that outlives this one), so that a restarted engine can finish the
// step in which its predecessor died.
//
// Threads: thread-safe. Must not block: a Job calls it under its lock.
class GradientKeeper {
 public:
  virtual ~GradientKeeper() = default;

  // Sets the rank's memory from now on; replaces what was kept of the rank
  // before. Duplicates the fd.
  virtual void Keep(uint32_t rank, uint64_t client_instance,
                    uint64_t gradient_offset_bytes, int segment_fd) = 0;
  // Releases the rank's memory; no effect when none is kept.
  virtual void Drop(uint32_t rank) = 0;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_RECOVERY_GRADIENT_KEEPER_H_
