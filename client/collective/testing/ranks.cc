#include "client/collective/testing/ranks.h"

#include <thread>
#include <utility>

#include "client/collective/tcp/tcp_collective.h"
#include "client/collective/testing/memory_store.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

std::vector<absl::Status> OnRanks(
    uint32_t ranks, const std::function<absl::Status(uint32_t rank)>& what) {
  std::vector<absl::Status> results(ranks);
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = what(rank); });
  }
  for (std::thread& each : threads) each.join();
  return results;
}

std::vector<absl::Status> OnRanks(
    const Collectives& collectives,
    const std::function<absl::Status(Collective& collective)>& what) {
  return OnRanks(static_cast<uint32_t>(collectives.size()),
                 [&](uint32_t rank) { return what(*collectives[rank]); });
}

absl::StatusOr<Collectives> MakeRanks(
    uint32_t ranks,
    const std::function<
        absl::StatusOr<std::unique_ptr<Collective>>(uint32_t rank)>& make) {
  Collectives made(ranks);
  const std::vector<absl::Status> results =
      OnRanks(ranks, [&](uint32_t rank) -> absl::Status {
        OPTSTATE_ASSIGN_OR_RETURN(made[rank], make(rank));
        return absl::OkStatus();
      });
  for (const absl::Status& each : results) OPTSTATE_RETURN_IF_ERROR(each);
  return made;
}

absl::StatusOr<Collectives> MakeTcpRanks(uint32_t ranks, absl::Duration timeout,
                                         uint64_t slice_bytes) {
  MemoryStore store;
  return MakeRanks(ranks, [&](uint32_t rank) {
    TcpOptions options;
    options.rank = rank;
    options.world_size = ranks;
    options.connect_timeout = kPatience;
    options.timeout = timeout;
    options.slice_bytes = slice_bytes;
    return MakeTcpCollective(options, &store);
  });
}

}  // namespace optstate::client
