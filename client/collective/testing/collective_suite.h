#ifndef OPTSTATE_CLIENT_COLLECTIVE_TESTING_COLLECTIVE_SUITE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TESTING_COLLECTIVE_SUITE_H_

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/collective/testing/ranks.h"
#include "gtest/gtest.h"

namespace optstate::client {

// An implementation of Collective, as the suite makes it.
struct CollectiveWorld {
  std::string name;
  std::vector<uint32_t> world_sizes;
  // Makes all ranks, each of which has this time-out for an operation.
  absl::StatusOr<Collectives> (*make)(uint32_t ranks, absl::Duration timeout);
};
inline void PrintTo(const CollectiveWorld& world, std::ostream* out) {
  *out << world.name;
}

// The promises of a collective in memory that the test can read, whatever
// connects its ranks. A binary that links the suite instantiates it:
//
//   INSTANTIATE_TEST_SUITE_P(Worlds, CollectiveSuite, testing::Values(...),
//                            CollectiveWorldName);
class CollectiveSuite : public testing::TestWithParam<CollectiveWorld> {
 protected:
  // Makes the ranks; on failure the test has failed, and there are none.
  Collectives Make(uint32_t ranks, absl::Duration timeout = kPatience);
  const std::vector<uint32_t>& world_sizes() const {
    return GetParam().world_sizes;
  }
  // The largest world.
  uint32_t largest() const { return GetParam().world_sizes.back(); }
};

std::string CollectiveWorldName(
    const testing::TestParamInfo<CollectiveWorld>& info);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TESTING_COLLECTIVE_SUITE_H_
