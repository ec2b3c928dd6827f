// Reads of parameters within a step that a real daemon has begun early give the
// committed step's, over every wire.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using client::Session;
using Values = std::vector<std::vector<std::byte>>;

constexpr uint32_t kParameters = 4;
constexpr int64_t kNumel = 30000;
// The steps that each test has taken before it begins.
constexpr uint64_t kBefore = 8;  // the engine then expects another one
constexpr absl::Duration kPatience = absl::Seconds(60);

class EarlyReadsTest : public testing::Test {
 protected:
  void SetUp() override {
    auto daemon = TestDaemon::Start();
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }

  // Opens a speculative job with these ranks, and takes steps after which the
  // next one is expected to be as these were.
  void Open(const std::vector<std::string>& endpoints) {
    client::SessionOptions options = NewJob(UniformLayout(kParameters, kNumel));
    options.speculative = true;
    options.world_size = static_cast<uint32_t>(endpoints.size());
    job_ = options.job;
    for (const std::string& endpoint : endpoints) {
      options.rank = static_cast<uint32_t>(sessions_.size());
      options.endpoint = endpoint;
      auto session = Session::Open(options);
      ASSERT_TRUE(session.ok()) << session.status();
      sessions_.push_back(*std::move(session));
    }
    OnAllRanks([](Session& session) { return LoadConstant(session, 1); });
    for (uint64_t step = 1; step <= kBefore; ++step) {
      OnAllRanks([step](Session& session) {
        const absl::Status pushed = PushConstant(session, step, 0, 0.5);
        if (!pushed.ok()) return pushed;
        return session.Commit(CommitOf(session, step)).status();
      });
    }
    const auto job = daemon_->GetJob(job_);
    ASSERT_TRUE(job.ok()) << job.status();
    begun_before_ = job->speculation().steps_begun();
  }
  template <typename Call>
  void OnAllRanks(const Call& call) {
    std::vector<std::thread> threads;
    for (const auto& session : sessions_) {
      threads.emplace_back([&call, &session] {
        const absl::Status status = call(*session);
        EXPECT_TRUE(status.ok()) << status;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  void Push(uint32_t rank) {
    absl::Status pushed = PushConstant(*sessions_[rank], kBefore + 1, 0, 0.25);
    if (pushed.ok()) pushed = sessions_[rank]->Flush();
    ASSERT_TRUE(pushed.ok()) << pushed;
  }
  // Waits until the daemon has begun the open step.
  void AwaitBegun() {
    const absl::Time end = absl::Now() + kPatience;
    while (absl::Now() < end) {
      const auto job = daemon_->GetJob(job_);
      ASSERT_TRUE(job.ok()) << job.status();
      if (job->speculation().steps_begun() > begun_before_) return;
      std::this_thread::yield();
    }
    FAIL() << "nothing was begun early";
  }
  // Returns the values that the rank sees without a call of the engine.
  Values Area(uint32_t rank) const {
    Values values;
    for (uint32_t p = 0; p < kParameters; ++p) {
      const auto parameter = sessions_[rank]->parameter(p);
      values.emplace_back(parameter.begin(), parameter.end());
    }
    return values;
  }
  Values Read(uint32_t rank) {
    Values values(kParameters, std::vector<std::byte>(kNumel * sizeof(float)));
    std::vector<uint32_t> parameters;
    std::vector<void*> destinations;
    for (uint32_t p = 0; p < kParameters; ++p) {
      parameters.push_back(p);
      destinations.push_back(values[p].data());
    }
    const absl::Status read = sessions_[rank]->ReadParameters(
        {.parameters = parameters, .destinations = destinations});
    EXPECT_TRUE(read.ok()) << read;
    return values;
  }

  std::unique_ptr<TestDaemon> daemon_;
  std::string job_;
  uint64_t begun_before_ = 0;  // commits of one rank begin steps too
  std::vector<std::unique_ptr<Session>> sessions_;
};

TEST_F(EarlyReadsTest, OneRank) {
  Open({daemon_->shm_endpoint()});
  const Values committed = Area(0);
  Push(0);
  AwaitBegun();
  EXPECT_TRUE(Read(0) == committed);
  EXPECT_TRUE(Area(0) == committed);
  EXPECT_EQ(sessions_[0]->committed_step(), kBefore);
  ASSERT_TRUE(sessions_[0]->Commit(CommitOf(*sessions_[0], kBefore + 1)).ok());
  EXPECT_TRUE(Read(0) != committed);
  EXPECT_TRUE(Area(0) == Read(0));
}

// The job is begun by the pushes of both ranks over shared memory, and by the
// first commit over gRPC.
TEST_F(EarlyReadsTest, TwoRanksOnEveryWire) {
  const std::string shm = daemon_->shm_endpoint();
  const std::string grpc = daemon_->grpc_endpoint();
  for (const std::vector<std::string>& endpoints :
       {std::vector<std::string>{shm, shm}, {grpc, grpc}, {grpc, shm}}) {
    SCOPED_TRACE(endpoints[0] + " and " + endpoints[1]);
    sessions_.clear();
    Open(endpoints);
    const Values committed = Read(1);
    Push(0);
    Push(1);
    const auto commit = CommitOf(*sessions_[0], kBefore + 1);
    ASSERT_TRUE(sessions_[0]->CommitStart(commit).ok());
    AwaitBegun();
    EXPECT_TRUE(Read(1) == committed);
    EXPECT_TRUE(Area(1) == committed);
    // A rank that has committed cannot hold the step: it may be taken at any
    // time.
    if (endpoints[0] == shm) {
      EXPECT_EQ(sessions_[0]->RollBackSpeculation().code(),
                absl::StatusCode::kFailedPrecondition);
    }
    ASSERT_TRUE(sessions_[1]->Commit(commit).ok());
    ASSERT_TRUE(sessions_[0]->CommitWait().ok());
    EXPECT_TRUE(Read(0) != committed);
    EXPECT_TRUE(Read(0) == Read(1));
  }
}

// A rank that has dropped the step reads without rolling back that of others.
TEST_F(EarlyReadsTest, AfterAnAbort) {
  Open({daemon_->shm_endpoint()});
  const Values committed = Area(0);
  Push(0);
  AwaitBegun();
  ASSERT_TRUE(sessions_[0]->Abort(kBefore + 1).ok());
  EXPECT_TRUE(Area(0) == committed);
  EXPECT_TRUE(Read(0) == committed);
}

}  // namespace
}  // namespace optstate
