// Two ranks take steps through real processes that are killed and upgraded; an
// undisturbed job gives the expected result.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "server/testing/daemon_harness.h"

namespace optstate::server {
namespace {

using client::Session;
using ::testing::HasSubstr;

constexpr size_t kParameters = 4;
constexpr size_t kElements = 5000;
constexpr size_t kBytes = kElements * sizeof(float);

// Returns gradients that differ between steps and between ranks.
std::vector<float> Gradient(uint64_t step, uint32_t rank) {
  std::vector<float> gradient(kElements);
  for (size_t i = 0; i < kElements; ++i) {
    gradient[i] = std::sin(static_cast<float>(i + 31 * step + 7 * rank));
  }
  return gradient;
}

// One rank, on a thread of its own: loads zeros, then steps up to `last`.
class Rank {
 public:
  Rank(const std::string& endpoint, const std::string& job, uint32_t rank,
       const std::atomic<uint64_t>* last)
      : rank_(rank), last_(last) {
    client::SessionOptions options;
    options.endpoint = endpoint;
    options.job = job;
    options.rank = rank;
    options.world_size = 2;
    // With the timeout, a step that never ends fails the test with the
    // preceding output.
    options.step_timeout = absl::Seconds(20);
    options.layout.groups.resize(1);
    for (size_t i = 0; i < kParameters; ++i) {
      options.layout.parameters.push_back(
          {absl::StrCat("p", i), {int64_t{kElements}}, kElements});
    }
    thread_ = std::thread([this, options] { Run(options); });
  }
  ~Rank() { Join(); }

  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  uint64_t taken() const { return taken_; }
  // The rank's session, to continue by hand after Join().
  Session& session() { return *session_; }
  absl::Status Push(uint64_t step) {
    const std::vector<float> gradient = Gradient(step, rank_);
    const std::vector<const void*> pointers(kParameters, gradient.data());
    const std::vector<uint32_t> parameters = {0, 1, 2, 3};
    return session_->PushGradients(step, 0, parameters, pointers);
  }
  static client::CommitOptions CommitOf(uint64_t step) {
    client::CommitOptions commit;
    commit.step = step;
    commit.groups.resize(1, AdamHyperparams());
    return commit;
  }
  absl::Status Step(uint64_t step) {
    absl::Status pushed = Push(step);
    if (!pushed.ok()) return pushed;
    return session_->Commit(CommitOf(step)).status();
  }
  // Returns all parameters, concatenated; after Join().
  std::vector<std::byte> Parameters() const {
    std::vector<std::byte> all;
    for (uint32_t i = 0; i < kParameters; ++i) {
      const auto one = session_->parameter(i);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

 private:
  void Run(const client::SessionOptions& options) {
    auto session = Session::Open(options);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    ASSERT_TRUE(session_->BeginLoad().ok());
    const std::vector<std::byte> zeros(kBytes);
    for (uint32_t i = 0; i < kParameters; ++i) {
      ASSERT_TRUE(
          session_->Load(client::StateArray::kMaster, i, DType::kFloat32, zeros)
              .ok());
    }
    ASSERT_TRUE(session_->FinishLoad().ok());
    while (taken_ < *last_) {
      const absl::Status status = Step(taken_ + 1);
      ASSERT_TRUE(status.ok()) << status;
      ++taken_;
    }
  }

  const uint32_t rank_;
  const std::atomic<uint64_t>* const last_;
  std::atomic<uint64_t> taken_{0};
  std::unique_ptr<Session> session_;
  std::thread thread_;
};

class SurvivalTest : public testing::TestWithParam<std::string>,
                     protected DaemonHarness {
 protected:
  std::string Endpoint() const { return GetParam() + socket(); }

  std::unique_ptr<v1::Admin::Stub> Admin() const {
    return v1::Admin::NewStub(grpc::CreateChannel(
        "unix:" + socket(), grpc::InsecureChannelCredentials()));
  }
  // Returns the job once its engine itself describes it.
  v1::Job AwaitJob() const {
    v1::Job job;
    EXPECT_TRUE(Eventually([&] {
      grpc::ClientContext context;
      v1::GetJobRequest request;
      request.set_name("job");
      return Admin()->GetJob(&context, request, &job).ok() &&
             job.phase() == v1::JOB_PHASE_READY;
    })) << Log();
    return job;
  }
  // Begins an upgrade, to this build unless another is named; returns the
  // upgrade's id, or "".
  std::string BeginUpgrade(const std::string& binary = "") const {
    grpc::ClientContext context;
    v1::UpgradeRequest request;
    request.set_binary(binary);
    v1::UpgradeReply reply;
    return Admin()->Upgrade(&context, request, &reply).ok() ? reply.id() : "";
  }
  // Awaits the progress that the build which has taken over reports.
  v1::UpgradeProgress AwaitUpgrade(const std::string& id, bool done) const {
    v1::UpgradeProgress progress;
    EXPECT_TRUE(Eventually([&] {
      grpc::ClientContext context;
      v1::ServerStatus status;
      if (!Admin()->GetStatus(&context, {}, &status).ok()) return false;
      progress = status.upgrade();
      return progress.id() == id && (progress.done() || !done);
    })) << Log();
    return progress;
  }

  // Afterwards rank 0 has committed step 2, and rank 1 has not begun it.
  void BeginStep2() {
    last_ = 1;
    StartRanks();
    first_->Join();
    second_->Join();
    ASSERT_TRUE(first_->Push(2).ok());
    ASSERT_TRUE(first_->session().CommitStart(Rank::CommitOf(2)).ok());
  }
  void EndStep2() {
    absl::Status first;
    std::thread waits([&] { first = first_->session().CommitWait().status(); });
    const absl::Status second = second_->Step(2);
    waits.join();
    EXPECT_TRUE(first.ok()) << first << Log();
    EXPECT_TRUE(second.ok()) << second << Log();
  }

  void StartImpatientDaemon(const std::string& settings) {
    const std::string config = root() + "/impatient.yaml";
    std::ofstream(config) << "drain_timeout_s: 1\n" << settings;
    StartDaemon({"--config", config});
  }
  void ReplaceInsideTheStep() const {
    const v1::UpgradeProgress progress =
        AwaitUpgrade(BeginUpgrade(), /*done=*/true);
    EXPECT_EQ(progress.engines_replaced(), 1u);
    EXPECT_EQ(progress.problems_size(), 0) << progress.ShortDebugString();
    EXPECT_THAT(Log(), HasSubstr("its engine is stopped inside one"));
  }

  void StartRanks() {
    first_ = std::make_unique<Rank>(Endpoint(), "job", 0, &last_);
    second_ = std::make_unique<Rank>(Endpoint(), "job", 1, &last_);
  }
  void AwaitFurtherSteps() const {
    const uint64_t goal = first_->taken() + 5;
    EXPECT_TRUE(Eventually([&] {
      return first_->taken() >= goal && second_->taken() >= goal;
    })) << Log();
  }
  // Lets both ranks end at the same step and compares with an undisturbed job.
  void ExpectUndisturbed() {
    last_ = first_->taken() + 5;
    first_->Join();
    second_->Join();
    Rank third(Endpoint(), "undisturbed", 0, &last_);
    Rank fourth(Endpoint(), "undisturbed", 1, &last_);
    third.Join();
    fourth.Join();
    EXPECT_EQ(first_->taken(), last_);
    EXPECT_EQ(first_->Parameters(), third.Parameters());
    EXPECT_EQ(second_->Parameters(), third.Parameters());
  }

  std::atomic<uint64_t> last_{UINT64_MAX};
  std::unique_ptr<Rank> first_;
  std::unique_ptr<Rank> second_;
};

TEST_P(SurvivalTest, TheSupervisorIsKilledAndKilledAgain) {
  pid_t daemon = StartDaemon();
  StartRanks();
  const int64_t engine_pid = AwaitJob().engine_pid();
  for (int i = 0; i < 2; ++i) {
    AwaitFurtherSteps();
    ::kill(daemon, SIGKILL);
    AwaitExit(daemon);
    AwaitFurtherSteps();  // without a supervisor
    daemon = StartDaemon();
    EXPECT_TRUE(Open("job").ok());
    const v1::Job job = AwaitJob();
    EXPECT_EQ(job.engine_pid(), engine_pid);
    EXPECT_EQ(job.engine_restarts(), 0u);
    EXPECT_EQ(job.session_count(), 2u);
  }
  AwaitFurtherSteps();
  ExpectUndisturbed();
}

TEST_P(SurvivalTest, TheBuildIsReplacedTwice) {
  StartDaemon();
  StartRanks();
  for (const std::string name : {"next", "after-next"}) {
    AwaitFurtherSteps();
    const std::string binary = root() + "/" + name;
    std::filesystem::copy_file("server/optstated", binary);
    EXPECT_TRUE(AwaitUpgrade(BeginUpgrade(binary), true).done());
    EXPECT_EQ(std::filesystem::read_symlink(
                  absl::StrCat("/proc/", AwaitJob().engine_pid(), "/exe")),
              binary);
    AwaitFurtherSteps();
  }
  ExpectUndisturbed();
}

TEST_P(SurvivalTest, AnEngineIsReplacedBetweenTwoSteps) {
  StartDaemon();
  BeginStep2();
  const std::string id = BeginUpgrade();
  EXPECT_FALSE(AwaitUpgrade(id, /*done=*/false).done());
  EndStep2();
  const v1::UpgradeProgress progress = AwaitUpgrade(id, /*done=*/true);
  EXPECT_EQ(progress.engines_replaced(), 1u);
  EXPECT_EQ(progress.problems_size(), 0) << progress.ShortDebugString();
  EXPECT_THAT(Log(),
              HasSubstr("engine ends between two steps: job=job step=2"));
  for (Rank* rank : {first_.get(), second_.get()}) {
    EXPECT_TRUE(rank->Push(3).ok()) << Log();
  }
}

// A step that does not end is pushed again.
TEST_P(SurvivalTest, AnEngineIsReplacedInsideAStepThatDoesNotEnd) {
  StartImpatientDaemon("");
  BeginStep2();
  ReplaceInsideTheStep();
  EndStep2();
}

// No rank is lost in the replacement, though a loss would abort the step.
TEST_P(SurvivalTest, AnEngineIsReplacedInsideAStepThatLossesAbort) {
  StartImpatientDaemon("engine:\n  on_rank_loss: abort\n");
  BeginStep2();
  ReplaceInsideTheStep();
  EndStep2();
}

INSTANTIATE_TEST_SUITE_P(Wires, SurvivalTest,
                         testing::Values("unix:", "grpc:unix:"),
                         [](const auto& wire) {
                           return wire.param == "unix:" ? "Shm" : "Grpc";
                         });

}  // namespace
}  // namespace optstate::server
