// Tests a rank over shared memory whose engine dies before the pages of all its
// gradients have come.

#include <atomic>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "client/channel/shm/shm_channel.h"
#include "client/client.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using client::Session;

// Two parameters of 6 MiB: the pages come 4 MiB at a time.
constexpr int64_t kNumel = 3 << 19;

// Pushes gradients of the first `count` parameters and commits.
absl::Status Push(Session& session, uint64_t step, uint32_t count) {
  std::vector<std::vector<std::byte>> gradients;
  std::vector<const void*> addresses;
  std::vector<uint32_t> parameters(count);
  std::iota(parameters.begin(), parameters.end(), 0);
  for (const uint32_t p : parameters) {
    gradients.push_back(ConstantGradient(session.layout(), p, 1));
    addresses.push_back(gradients.back().data());
  }
  return session.PushGradients(step, 0, parameters, addresses);
}

void ExpectCommit(Session& session, uint64_t step) {
  const auto outcome = session.Commit(CommitOf(session, step));
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->applied);
  EXPECT_EQ(outcome->step, step);
}

TEST(FollowingPagesTest, TheNextEngineTakesWhatHasItsPages) {
  auto daemon = TestDaemon::Start();
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  absl::Notification rest;
  std::atomic<int> calls = 0;
  client::SessionOptions options = NewJob(UniformLayout(2, kNumel));
  options.job = "job";
  auto opened = Session::OpenOver(
      [&](client::ChannelSetup setup)
          -> absl::StatusOr<std::unique_ptr<client::Channel>> {
        return std::make_unique<client::ShmChannel>(
            *client::ParseEndpoint((*daemon)->shm_endpoint()), std::move(setup),
            [&](std::byte* data, uint64_t bytes) {
              // The pages before the gradients, then 8 MiB of them.
              if (++calls > 3) rest.WaitForNotification();
              return shm::PopulatePages(data, bytes);
            });
      },
      options);
  ASSERT_TRUE(opened.ok()) << opened.status();
  Session& session = **opened;
  ASSERT_TRUE(LoadConstant(session, 1).ok());
  ASSERT_TRUE(Push(session, 1, 1).ok());
  absl::Status status = session.Flush();
  ASSERT_TRUE(status.ok()) << status;
  status = (*daemon)->KillEngine("job");
  ASSERT_TRUE(status.ok()) << status;
  ExpectCommit(session, 1);
  rest.Notify();
  ASSERT_TRUE(Push(session, 2, 2).ok());
  ExpectCommit(session, 2);

  client::FakeDaemon model;
  const auto expected = Session::OpenOver(
      [&](client::ChannelSetup setup) {
        return client::MakeFakeChannel(&model, std::move(setup));
      },
      NewJob(UniformLayout(2, kNumel)));
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_TRUE(LoadConstant(**expected, 1).ok());
  for (const uint32_t step : {1, 2}) {
    ASSERT_TRUE(Push(**expected, step, step).ok());
    ExpectCommit(**expected, step);
  }
  const auto a = Snapshot(session);
  const auto b = Snapshot(**expected);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(FirstDifference(*a, *b), "");
}

}  // namespace
}  // namespace optstate
