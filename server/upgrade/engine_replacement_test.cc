// Tests when an engine whose build knows no pause may be stopped;
// survival_test.cc covers the others.

#include "server/upgrade/engine_replacement.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "optstate/v1/engine.grpc.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::upgrade {
namespace {

using ::testing::HasSubstr;

// An engine that answers UNIMPLEMENTED to v1::Engine.Rest; its step ends after
// some GetJob calls.
class OlderEngine : public v1::Engine::Service {
 public:
  OlderEngine(bool accumulate, int looks_inside)
      : accumulate_(accumulate), looks_inside_(looks_inside) {
    server_ = grpc::ServerBuilder().RegisterService(this).BuildAndStart();
  }
  ~OlderEngine() override {
    server_->Shutdown(std::chrono::system_clock::now());
  }

  UniqueFd Connect() {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC,
                           0, fds),
              0);
    grpc::AddInsecureChannelFromFd(server_.get(), fds[0]);
    return UniqueFd(fds[1]);
  }

  grpc::Status GetJob(grpc::ServerContext*, const v1::GetJobRequest*,
                      v1::Job* job) override {
    job->set_phase(v1::JOB_PHASE_READY);
    job->set_accumulate(accumulate_);
    inside_ = looks_inside_-- > 0;
    if (inside_) job->set_open_step("rank 0 has pushed");
    return grpc::Status::OK;
  }

  bool inside() const { return inside_; }

 private:
  const bool accumulate_;
  std::atomic<int> looks_inside_;
  std::atomic<bool> inside_{true};
  std::unique_ptr<grpc::Server> server_;
};

// A supervisor of one job, whose engine is of another build.
class FakeControl : public supervisor::SupervisorControl {
 public:
  explicit FakeControl(const OlderEngine* engine) : engine_(engine) {}

  std::vector<supervisor::JobSummary> Jobs() override {
    return {{.name = "job", .reason = "", .directory = ""}};
  }
  absl::StatusOr<supervisor::JobSummary> FindJob(
      const std::string& name) override {
    return absl::NotFoundError(name);
  }
  absl::Status HoldJob(const std::string&, const access::Caller&) override {
    return absl::OkStatus();
  }
  void ReleaseJob(const std::string&) override {}
  std::shared_ptr<supervisor::JobDeletion> BeginDeletion(
      const std::string&) override {
    auto deletion = std::make_shared<supervisor::JobDeletion>();
    deletion->End(absl::OkStatus());
    return deletion;
  }
  absl::StatusOr<std::shared_ptr<supervisor::SleepOperation>> PutToSleep(
      const std::string&, pid_t) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::shared_ptr<supervisor::SleepOperation>> WakeJob(
      const std::string&, const access::Caller&) override {
    return absl::UnimplementedError("");
  }
  absl::Status RecoverJob(const std::string&, const access::Caller&, pid_t,
                          bool) override {
    return absl::OkStatus();
  }
  absl::Status SetAccess(const std::string&, const v1::JobAccess&,
                         const v1::JobAccess*, const access::Caller&) override {
    return absl::OkStatus();
  }
  bool MaySee(const v1::Event&, const access::Caller*) const override {
    return true;
  }
  absl::StatusOr<std::string> AwaitEngine(const std::string&,
                                          absl::Time) override {
    return "another build";
  }
  absl::Status ReplaceEngine(const std::string&, absl::Time) override {
    (engine_->inside() ? replaced_inside : replaced_between) = true;
    return absl::OkStatus();
  }
  absl::Status SetDraining(bool) override { return absl::OkStatus(); }
  bool draining() const override { return false; }

  std::atomic<bool> replaced_inside{false};
  std::atomic<bool> replaced_between{false};

 private:
  const OlderEngine* const engine_;
};

class EngineReplacementTest : public testing::Test {
 protected:
  void Start(bool accumulate, int looks_inside, absl::Duration patience) {
    engine_ = std::make_unique<OlderEngine>(accumulate, looks_inside);
    control_ = std::make_unique<FakeControl>(engine_.get());
    engines_.Set("job", engine_->Connect());
    EngineReplacement replacement({.control = control_.get(),
                                   .engines = &engines_,
                                   .record = &record_,
                                   .patience = patience});
    while (!record_.Get().done()) std::this_thread::yield();
  }

  std::unique_ptr<OlderEngine> engine_;
  std::unique_ptr<FakeControl> control_;
  admin::EngineChannels engines_;
  UpgradeRecord record_;
};

TEST_F(EngineReplacementTest, BetweenTwoSteps) {
  for (const bool accumulate : {false, true}) {
    Start(accumulate, /*looks_inside=*/5, absl::Minutes(2));
    EXPECT_TRUE(control_->replaced_between);
    EXPECT_FALSE(control_->replaced_inside);
    EXPECT_EQ(record_.Get().problems_size(), 0);
    record_.Begin("next");
  }
}

TEST_F(EngineReplacementTest, InsideAStepInTheEnd) {
  Start(/*accumulate=*/false, /*looks_inside=*/1 << 30, absl::ZeroDuration());
  EXPECT_TRUE(control_->replaced_inside);
}

TEST_F(EngineReplacementTest, NeverWithAccumulatedGradients) {
  Start(/*accumulate=*/true, /*looks_inside=*/1 << 30, absl::ZeroDuration());
  EXPECT_FALSE(control_->replaced_inside);
  ASSERT_EQ(record_.Get().problems_size(), 1);
  EXPECT_THAT(record_.Get().problems(0), HasSubstr("it keeps its engine"));
}

}  // namespace
}  // namespace optstate::upgrade
