// Runs the suite over each collective; NCCL over its fake.

#include "client/collective/testing/collective_suite.h"

#include <memory>
#include <utility>

#include "client/collective/nccl/nccl_collective.h"
#include "client/collective/single_rank.h"
#include "client/collective/testing/fake_nccl.h"
#include "client/collective/testing/memory_store.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

absl::StatusOr<Collectives> MakeSingle(uint32_t, absl::Duration) {
  Collectives all;
  all.push_back(MakeSingleRank());
  return all;
}

// Slices so small that the suite's sums take several.
absl::StatusOr<Collectives> MakeTcp(uint32_t ranks, absl::Duration timeout) {
  return MakeTcpRanks(ranks, timeout, /*slice_bytes=*/1024);
}

absl::StatusOr<Collectives> MakeNccl(uint32_t ranks, absl::Duration timeout) {
  OPTSTATE_ASSIGN_OR_RETURN(const FakeNccl fake, FakeNccl::Open());
  MemoryStore store;
  return MakeRanks(ranks, [&](uint32_t rank) {
    NcclOptions options;
    options.rank = rank;
    options.world_size = ranks;
    options.library = kFakeNcclPath;
    options.timeout = timeout;
    return MakeNcclCollective(options, &store, fake.MakeQueue());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, CollectiveSuite,
    testing::Values(CollectiveWorld{"Single", {1}, &MakeSingle},
                    CollectiveWorld{"Tcp", {1, 2, 3, 5}, &MakeTcp},
                    CollectiveWorld{"NcclOverFake", {1, 2, 3, 5}, &MakeNccl}),
    CollectiveWorldName);

}  // namespace
}  // namespace optstate::client
