#ifndef OPTSTATE_CLIENT_COLLECTIVE_TCP_TCP_COLLECTIVE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TCP_TCP_COLLECTIVE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/collective/collective.h"
#include "client/collective/store/store.h"

namespace optstate::client {

// One rank of a collective over TCP, equal on all ranks but for `rank` and the
// hosts.
struct TcpOptions {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  // Tells runs that share a store apart; at most 60 bytes.
  std::string name = "optstate";
  // Where the other ranks reach this one: a name or an address.
  std::string host = "127.0.0.1";
  // Where this rank listens; empty: at `host`. "::" is every address.
  std::string bind_host;
  // For all ranks to find each other.
  absl::Duration connect_timeout = absl::Seconds(60);
  // For one operation, from this rank's call on: how long other ranks may
  // compute before they make it too, and how long it takes.
  absl::Duration timeout = absl::Minutes(10);
  // Bytes that a rank sends to each other one before it adds up what it has
  // received; a multiple of 8. A rank has buffers of world_size times as much.
  uint64_t slice_bytes = uint64_t{4} << 20;
};

// Connects the ranks, each with each. Host memory.
//
// A sum is made part by part: each rank receives its part from all others, adds
// them up in the order of the ranks, and sends the result to all. So a rank
// sends and receives twice the gradients' bytes, as in a ring, in two rounds.
//
// Frames are neither encrypted nor signed, as those of NCCL and gloo: who reads
// the network reads gradients, and who can inject into a TCP connection can
// change them. Use it on a network of your own. Ranks recognise each other by
// secrets in the store.
//
// Errors are those of ConnectRanks() (rendezvous.h), and INVALID_ARGUMENT.
absl::StatusOr<std::unique_ptr<Collective>> MakeTcpCollective(
    const TcpOptions& options, Store* store);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TCP_TCP_COLLECTIVE_H_
