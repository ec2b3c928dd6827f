// Two ranks take steps through real processes that are killed and upgraded; a
// job that nobody disturbs says what should have come out.

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "server/daemon_harness.h"

namespace optstate {
namespace {

using client::Session;

constexpr size_t kParameters = 4;
constexpr size_t kElements = 5000;
constexpr size_t kBytes = kElements * sizeof(float);

// What differs from step to step, and from rank to rank.
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
  // After Join(): all parameters, one after another.
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

  absl::Status Step(uint64_t step) {
    const std::vector<float> gradient = Gradient(step, rank_);
    const std::vector<const void*> pointers(kParameters, gradient.data());
    const std::vector<uint32_t> parameters = {0, 1, 2, 3};
    const absl::Status pushed =
        session_->PushGradients(step, 0, parameters, pointers);
    if (!pushed.ok()) return pushed;
    client::CommitOptions commit;
    commit.step = step;
    commit.groups.resize(1, AdamHyperparams());
    return session_->Commit(commit).status();
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
  // Once its engine says so itself.
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
  bool Upgrade(const std::string& binary) const {
    grpc::ClientContext context;
    v1::UpgradeRequest request;
    request.set_binary(binary);
    v1::UpgradeReply reply;
    if (!Admin()->Upgrade(&context, request, &reply).ok()) return false;
    return Eventually([&] {
      grpc::ClientContext again;
      v1::ServerStatus status;
      return Admin()->GetStatus(&again, {}, &status).ok() &&
             status.upgrade().id() == reply.id() && status.upgrade().done();
    });
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
  // Lets both end at the same step and compares with a job that was left alone.
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
    AwaitFurtherSteps();  // nobody supervises
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
    ASSERT_TRUE(Upgrade(binary)) << Log();
    EXPECT_EQ(std::filesystem::read_symlink(
                  absl::StrCat("/proc/", AwaitJob().engine_pid(), "/exe")),
              binary);
    AwaitFurtherSteps();
  }
  ExpectUndisturbed();
}

INSTANTIATE_TEST_SUITE_P(Wires, SurvivalTest,
                         testing::Values("unix:", "grpc:unix:"),
                         [](const auto& wire) {
                           return wire.param == "unix:" ? "Shm" : "Grpc";
                         });

}  // namespace
}  // namespace optstate
