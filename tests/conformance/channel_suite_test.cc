// Runs the channel suite over the model and over every wire of the real daemon.

#include "tests/conformance/channel_suite.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

// The one daemon of all tests: their jobs have names of their own.
TestDaemon* daemon_of_suite = nullptr;

class DaemonEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    // Each test leaves its jobs there.
    auto daemon = TestDaemon::Start(
        {.tcp = true,
         .flags = {},
         .config = "limits:\n  jobs_max: 1024\n  user_jobs_max: 1024\n"});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    daemon_of_suite = daemon_.get();
  }
  void TearDown() override {
    if (HasFailure()) std::cerr << daemon_->Log();
    daemon_of_suite = nullptr;
    daemon_.reset();
  }

 private:
  static bool HasFailure() {
    return testing::UnitTest::GetInstance()->failed_test_count() > 0;
  }

  std::unique_ptr<TestDaemon> daemon_;
};

const auto* const kEnvironment =
    testing::AddGlobalTestEnvironment(new DaemonEnvironment);

enum class Wire { kShm, kGrpcUnix, kGrpcTcp };

template <Wire kWire>
class WireWorld final : public ChannelWorld {
 public:
  absl::StatusOr<std::unique_ptr<client::Session>> Open(
      client::SessionOptions options) override {
    if (daemon_of_suite == nullptr) {
      return absl::FailedPreconditionError("the daemon does not run");
    }
    const auto endpoint = Endpoint();
    if (!endpoint.ok()) return endpoint.status();
    options.endpoint = *endpoint;
    return client::Session::Open(std::move(options));
  }

 private:
  static absl::StatusOr<std::string> Endpoint() {
    switch (kWire) {
      case Wire::kShm:
        return daemon_of_suite->shm_endpoint();
      case Wire::kGrpcUnix:
        return daemon_of_suite->grpc_endpoint();
      case Wire::kGrpcTcp:
        break;
    }
    return daemon_of_suite->tcp_endpoint();
  }
};

template <Wire kWire>
ChannelWorld* World() {
  static WireWorld<kWire> world;
  return &world;
}

ChannelWorld* Fake() {
  static ChannelWorld* const world = MakeFakeWorld().release();
  return world;
}

INSTANTIATE_TEST_SUITE_P(
    Wires, ChannelSuite,
    testing::Values(ChannelWorldParam{"Fake", &Fake},
                    ChannelWorldParam{"Shm", &World<Wire::kShm>},
                    ChannelWorldParam{"GrpcUnix", &World<Wire::kGrpcUnix>},
                    ChannelWorldParam{"GrpcTcp", &World<Wire::kGrpcTcp>}),
    ChannelWorldName);

}  // namespace
}  // namespace optstate
