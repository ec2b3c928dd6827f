#ifndef OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/collective/collective.h"
#include "client/collective/nccl/device_queue.h"
#include "client/collective/store/store.h"

namespace optstate::client {

// One rank of a collective over NCCL, equal on all ranks but for `rank`.
struct NcclOptions {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  // Tells runs that share a store apart; at most 60 bytes.
  std::string name = "optstate";
  // NCCL's file; empty: $OPTSTATE_NCCL_LIBRARY, else libnccl.so.2.
  std::string library;
  // For all ranks to find each other and make the communicator.
  absl::Duration connect_timeout = absl::Seconds(120);
  // For one operation, from this rank's call on, with what the stream has to
  // do before it.
  absl::Duration timeout = absl::Minutes(10);
};

// Makes a communicator of NCCL. Device memory: gradients on the device, or in
// host memory that is registered with it, such as the segments of a session,
// are added up where they lie.
//
// `queue`: the device and its stream (MakeCudaQueue). An operation begins after
// all work that the stream has, and is over when it returns.
//
// The communicator is non-blocking: while an operation runs, NCCL's
// asynchronous error is asked for, and an error or the time-out aborts it
// (ncclCommAbort), so that a lost rank ends in an error and not in a hang. A
// rank that does not hear of another's abort ends at its own time-out.
//
// Errors besides those of Collective: NOT_FOUND, there is no NCCL;
// FAILED_PRECONDITION, it is older than 2.14, or ranks were told other world
// sizes; INVALID_ARGUMENT in an operation, the device does not reach the
// memory.
absl::StatusOr<std::unique_ptr<Collective>> MakeNcclCollective(
    const NcclOptions& options, Store* store,
    std::unique_ptr<DeviceQueue> queue);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NCCL_NCCL_COLLECTIVE_H_
