#include "tests/conformance/channel_suite.h"

#include <thread>
#include <utility>
#include <vector>

#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "tests/conformance/step_script.h"

namespace optstate {
namespace {

class FakeWorld final : public ChannelWorld {
 public:
  absl::StatusOr<std::unique_ptr<client::Session>> Open(
      client::SessionOptions options) override {
    return client::Session::OpenOver(
        [this](client::ChannelSetup setup) {
          return client::MakeFakeChannel(&daemon_, std::move(setup));
        },
        std::move(options));
  }

 private:
  client::FakeDaemon daemon_;
};

}  // namespace

std::unique_ptr<ChannelWorld> MakeFakeWorld() {
  return std::make_unique<FakeWorld>();
}

std::string ChannelWorldName(
    const testing::TestParamInfo<ChannelWorldParam>& info) {
  return info.param.name;
}

std::unique_ptr<client::Session> ChannelSuite::OpenLoaded(
    client::SessionOptions options, float value) {
  auto session = Open(std::move(options));
  EXPECT_TRUE(session.ok()) << session.status();
  if (!session.ok()) return nullptr;
  const absl::Status loaded = LoadConstant(**session, value);
  EXPECT_TRUE(loaded.ok()) << loaded;
  return *std::move(session);
}

std::vector<std::unique_ptr<client::Session>> ChannelSuite::OpenRanks(
    client::SessionOptions options, uint32_t world_size, float value) {
  std::vector<std::unique_ptr<client::Session>> ranks;
  options.world_size = world_size;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    options.rank = rank;
    auto session = Open(options);
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return {};
    ranks.push_back(*std::move(session));
  }
  // FinishLoad waits for the others.
  std::vector<std::thread> threads;
  threads.reserve(ranks.size());
  for (auto& session : ranks) {
    threads.emplace_back([&session, value] {
      const absl::Status loaded = LoadConstant(*session, value);
      EXPECT_TRUE(loaded.ok()) << loaded;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

}  // namespace optstate
