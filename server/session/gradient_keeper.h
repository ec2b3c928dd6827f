#ifndef OPTSTATE_SERVER_SESSION_GRADIENT_KEEPER_H_
#define OPTSTATE_SERVER_SESSION_GRADIENT_KEEPER_H_

#include <cstdint>

#include "proto/types/unique_fd.h"

namespace optstate {

// The memory that held a rank's gradients when the engine before this one died.
struct KeptGradients {
  uint32_t rank = 0;
  uint64_t client_instance = 0;        // of the client library that wrote them
  uint64_t gradient_offset_bytes = 0;  // where in the segment they begin
  UniqueFd segment;
};

// Hears which memory holds a rank's gradients, and keeps it (through a process
// that outlives this one), so that an engine that is started again can finish
// the step that its predecessor died in.
//
// Threads: thread-safe. Must not block: a Job calls it under its lock.
class GradientKeeper {
 public:
  virtual ~GradientKeeper() = default;

  // From now on this is the rank's memory; replaces what was kept of it before.
  // Duplicates the fd.
  virtual void Keep(uint32_t rank, uint64_t client_instance,
                    uint64_t gradient_offset_bytes, int segment_fd) = 0;
  // No effect when nothing is kept of it.
  virtual void Drop(uint32_t rank) = 0;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SESSION_GRADIENT_KEEPER_H_
