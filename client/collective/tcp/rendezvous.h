#ifndef OPTSTATE_CLIENT_COLLECTIVE_TCP_RENDEZVOUS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TCP_RENDEZVOUS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/collective/store/store.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// The place of one rank among those that find each other.
struct RendezvousOptions {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  // Begins the keys of the store: "NAME-rank-0". Another one for each run.
  std::string name;
  // Where the other ranks reach this one: a name or an address, IPv4 or IPv6.
  std::string host;
  // Where this rank listens; empty: at `host`. "::" is every address.
  std::string bind_host;
};

// Connects this rank to every other one by TCP; returns non-blocking sockets by
// rank, none at its own.
//
// Each rank listens at a port of its own and writes into the store where that
// is, with two random secrets of 16 bytes. Then it dials all lower ranks, and
// accepts all higher ones. Who dials says the first secret, and is answered
// with the second one, so that both know that the other one reads the store.
// A connection that says anything else, or nothing, is closed, and does not
// hold up the ranks.
//
// FAILED_PRECONDITION: ranks were told other world sizes. ALREADY_EXISTS: the
// name was used before. DEADLINE_EXCEEDED: names ranks that have not come.
// UNAVAILABLE: a rank cannot be reached. DATA_LOSS: the store has what no rank
// writes.
absl::StatusOr<std::vector<UniqueFd>> ConnectRanks(
    const RendezvousOptions& options, Store* store, absl::Time deadline);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TCP_RENDEZVOUS_H_
