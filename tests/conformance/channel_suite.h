#ifndef OPTSTATE_TESTS_CONFORMANCE_CHANNEL_SUITE_H_
#define OPTSTATE_TESTS_CONFORMANCE_CHANNEL_SUITE_H_

#include <memory>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "gtest/gtest.h"

namespace optstate {

// The place where the suite's sessions are opened: a wire with a daemon behind
// it.
class ChannelWorld {
 public:
  virtual ~ChannelWorld() = default;
  virtual absl::StatusOr<std::unique_ptr<client::Session>> Open(
      client::SessionOptions options) = 0;
};

// Makes the world of the daemon's model, for what a test compares with.
std::unique_ptr<ChannelWorld> MakeFakeWorld();

struct ChannelWorldParam {
  std::string name;
  // Returns the world, which lives as long as the process.
  ChannelWorld* (*world)();
};
inline void PrintTo(const ChannelWorldParam& param, std::ostream* out) {
  *out << param.name;
}

// The guarantees of a rank's session, whatever carries it. A binary that links
// the suite instantiates it:
//
//   INSTANTIATE_TEST_SUITE_P(Wires, ChannelSuite, testing::Values(...),
//                            ChannelWorldName);
class ChannelSuite : public testing::TestWithParam<ChannelWorldParam> {
 protected:
  absl::StatusOr<std::unique_ptr<client::Session>> Open(
      client::SessionOptions options) {
    return GetParam().world()->Open(std::move(options));
  }
  // Opens and loads every parameter with `value`; one rank.
  std::unique_ptr<client::Session> OpenLoaded(client::SessionOptions options,
                                              float value = 1);
  // Opens `world_size` ranks of the job and loads them.
  std::vector<std::unique_ptr<client::Session>> OpenRanks(
      client::SessionOptions options, uint32_t world_size, float value = 1);
};

std::string ChannelWorldName(
    const testing::TestParamInfo<ChannelWorldParam>& info);

}  // namespace optstate

#endif  // OPTSTATE_TESTS_CONFORMANCE_CHANNEL_SUITE_H_
