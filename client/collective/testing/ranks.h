#ifndef OPTSTATE_CLIENT_COLLECTIVE_TESTING_RANKS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TESTING_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/collective/collective.h"

namespace optstate::client {

using Collectives = std::vector<std::unique_ptr<Collective>>;

// Long enough that no rank reaches it unless another one does not come.
inline constexpr absl::Duration kPatience = absl::Minutes(2);

// Does something on a thread for each rank; returns the results by rank.
std::vector<absl::Status> OnRanks(
    uint32_t ranks, const std::function<absl::Status(uint32_t rank)>& what);
// Does it with each collective.
std::vector<absl::Status> OnRanks(
    const Collectives& collectives,
    const std::function<absl::Status(Collective& collective)>& what);

// Makes a collective on a thread for each rank; the first error, if any.
absl::StatusOr<Collectives> MakeRanks(
    uint32_t ranks,
    const std::function<
        absl::StatusOr<std::unique_ptr<Collective>>(uint32_t rank)>& make);

// Makes the ranks of a tcp collective.
absl::StatusOr<Collectives> MakeTcpRanks(uint32_t ranks,
                                         absl::Duration timeout = kPatience,
                                         uint64_t slice_bytes = 1 << 20);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TESTING_RANKS_H_
