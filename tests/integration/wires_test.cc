// Tests one run over shared memory, one over gRPC, one that changes between the
// two: equal in every bit, whatever the layout.

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using client::Session;

// Returns the sockets that this process has open, as /proc names them.
std::set<std::string> OpenSockets() {
  std::set<std::string> sockets;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target =
        std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.rfind("socket:", 0) == 0) sockets.insert(target);
  }
  return sockets;
}

class WiresTest : public testing::Test {
 protected:
  void SetUp() override {
    auto daemon = TestDaemon::Start({.tcp = true, .flags = {}, .config = ""});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    const auto tcp = daemon_->tcp_endpoint();
    ASSERT_TRUE(tcp.ok()) << tcp.status();
    endpoints_ = {daemon_->shm_endpoint(), daemon_->grpc_endpoint(), *tcp};
  }

  std::unique_ptr<Session> Open(client::SessionOptions options,
                                const std::string& endpoint) {
    options.endpoint = endpoint;
    auto session = Session::Open(std::move(options));
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }

  // Runs `steps` steps, the session of step k over endpoints[k % size]; returns
  // what is to be seen at the end.
  absl::StatusOr<StateSnapshot> Run(const LayoutSpec& layout, uint64_t seed,
                                    uint64_t steps,
                                    const std::vector<std::string>& endpoints) {
    const client::SessionOptions options = NewJob(layout);
    auto session = Open(options, endpoints[0]);
    if (session == nullptr) return absl::UnknownError("not opened");
    const StepScript script(session->layout(), seed);
    absl::Status status = script.Load(*session);
    for (uint64_t step = 1; step <= steps && status.ok(); ++step) {
      if (endpoints.size() > 1) {
        session.reset();
        session = Open(options, endpoints[step % endpoints.size()]);
        if (session == nullptr) return absl::UnknownError("not opened");
      }
      status = script.Run(*session, step).status();
    }
    if (!status.ok()) return status;
    return Snapshot(*session);
  }

  void ExpectEqual(const LayoutSpec& layout, uint64_t seed, uint64_t steps) {
    const auto expected = Run(layout, seed, steps, {endpoints_[0]});
    ASSERT_TRUE(expected.ok()) << expected.status();
    for (const std::vector<std::string>& endpoints :
         {std::vector<std::string>{endpoints_[1]},
          {endpoints_[2]},
          endpoints_}) {
      const auto snapshot = Run(layout, seed, steps, endpoints);
      ASSERT_TRUE(snapshot.ok()) << snapshot.status();
      EXPECT_EQ(FirstDifference(*snapshot, *expected), "") << endpoints.back();
    }
  }

  std::unique_ptr<TestDaemon> daemon_;
  std::vector<std::string> endpoints_;
};

TEST_F(WiresTest, ManyStepsHaveEqualBits) {
  ExpectEqual(MixedLayout(), ScriptSeed(), 40);
}

TEST_F(WiresTest, RandomLayoutsHaveEqualBits) {
  RandomLayouts layouts;
  for (int i = 0; i < 4; ++i) {
    ExpectEqual(layouts.Next(24), layouts.Uniform(0, 1 << 30), 4);
  }
}

TEST_F(WiresTest, ManyParameters) {
  ExpectEqual(UniformLayout(1024, 33), ScriptSeed(), 3);
}

// The child must not hold the connection, or a rank would not be lost before
// its data loader's workers are.
TEST_F(WiresTest, ForkedChildHoldsNothingOfTheConnection) {
  for (const std::string& endpoint : endpoints_) {
    const std::set<std::string> before = OpenSockets();
    const client::SessionOptions options = NewJob(UniformLayout(3, 50));
    const auto session = Open(options, endpoint);
    ASSERT_NE(session, nullptr);
    const StepScript script(session->layout(), ScriptSeed());
    ASSERT_TRUE(script.Load(*session).ok());
    ASSERT_NE(OpenSockets(), before);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      session->Close();
      // Not by exit: ThreadSanitizer would miss the parent's threads here.
      ::syscall(SYS_exit_group, OpenSockets() == before ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << endpoint;
    const auto step = script.Run(*session, 1);
    EXPECT_TRUE(step.ok()) << endpoint << ": " << step.status();
  }
}

// Shared memory is for the daemon's own node.
TEST_F(WiresTest, SharedMemoryNeedsAUnixSocket) {
  client::SessionOptions options = NewJob(UniformLayout(1, 1));
  options.endpoint = "unix:" + endpoints_[2].substr(sizeof("grpc:") - 1);
  EXPECT_EQ(Session::Open(options).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace optstate
