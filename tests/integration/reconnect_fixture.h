#ifndef OPTSTATE_TESTS_INTEGRATION_RECONNECT_FIXTURE_H_
#define OPTSTATE_TESTS_INTEGRATION_RECONNECT_FIXTURE_H_

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "client/client.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"
#include "tests/integration/rank_process.h"

namespace optstate {

enum class Wire { kShm, kGrpc };

// A daemon with one job, "job", that is trained by a script of a seed.
class ReconnectTest : public testing::TestWithParam<Wire> {
 protected:
  void SetUp() override {
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    seed_ = ScriptSeed();
  }

  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
  }

  std::string endpoint() const {
    return GetParam() == Wire::kShm ? daemon_->shm_endpoint()
                                    : daemon_->grpc_endpoint();
  }

  client::SessionOptions Options(uint32_t rank = 0, uint32_t world_size = 1) {
    client::SessionOptions options;
    options.endpoint = endpoint();
    options.job = "job";
    options.layout = MixedLayout();
    options.rank = rank;
    options.world_size = world_size;
    return options;
  }

  std::unique_ptr<client::Session> Open(client::SessionOptions options) {
    auto session = client::Session::Open(std::move(options));
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }

  std::unique_ptr<RankProcess> StartRank(uint32_t rank, uint32_t world_size) {
    auto process = RankProcess::Start({.endpoint = endpoint(),
                                       .daemon_path = "",
                                       .job = "job",
                                       .rank = rank,
                                       .world_size = world_size,
                                       .seed = seed_});
    EXPECT_TRUE(process.ok()) << process.status();
    return process.ok() ? *std::move(process) : nullptr;
  }

  StepScript Script() const {
    return StepScript(*Layout::Make(MixedLayout()), seed_);
  }

  void RunSteps(client::Session& session, uint64_t first, uint64_t last) {
    for (uint64_t step = first; step <= last; ++step) {
      const auto outcome = Script().Run(session, step);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ASSERT_EQ(outcome->step, step);
    }
  }

  // Expects the state after `steps` steps in which nothing happened.
  void ExpectUndisturbed(client::Session& session, uint64_t steps) {
    client::FakeDaemon model;
    auto expected = client::Session::OpenOver(
        [&](client::ChannelSetup setup) {
          return client::MakeFakeChannel(&model, std::move(setup));
        },
        NewJob(MixedLayout()));
    ASSERT_TRUE(expected.ok()) << expected.status();
    ASSERT_TRUE(Script().Load(**expected).ok());
    RunSteps(**expected, 1, steps);
    const auto a = Snapshot(session);
    const auto b = Snapshot(**expected);
    ASSERT_TRUE(a.ok()) << a.status();
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_EQ(FirstDifference(*a, *b), "");
  }

  std::unique_ptr<TestDaemon> daemon_;
  uint64_t seed_ = 0;
};

inline std::string WireName(const testing::TestParamInfo<Wire>& wire) {
  return wire.param == Wire::kShm ? "Shm" : "Grpc";
}

}  // namespace optstate

#endif  // OPTSTATE_TESTS_INTEGRATION_RECONNECT_FIXTURE_H_
