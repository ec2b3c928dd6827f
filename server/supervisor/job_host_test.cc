#include "server/supervisor/job_host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/types/unique_fd.h"
#include "server/config/config.h"
#include "server/observe/counters.h"
#include "server/os/private_directory.h"

namespace optstate::supervisor {
namespace {

// A fixture with one job and its fake_engine, in this thread's loop.
class JobHostTest : public testing::Test {
 protected:
  JobHostTest() {
    std::string name = "/tmp/job_host-XXXXXX";  // short, as socket paths are
    directory_ = ::mkdtemp(name.data());
  }
  ~JobHostTest() override {
    host_.reset();
    EXPECT_TRUE(os::RemoveTree(directory_).ok());
  }

  void Make(bool is_new, const std::string& job = "a") {
    JobHost::Options options;
    options.start_timeout = start_timeout_;
    options.stop_timeout = stop_timeout_;
    options.executable = "server/supervisor/fake_engine";
    options.is_new = is_new;
    options.config.set_job(job);
    options.config.set_job_dir(directory_);
    *options.config.mutable_daemon() = config::DefaultConfig({0, ""});
    options.config.mutable_daemon()->mutable_engine()->set_restarts_max(
        restarts_max_);
    options.config.mutable_daemon()->mutable_nvme()->add_directories(
        directory_ + "/disk");
    JobHost::Callbacks callbacks;
    callbacks.check_start = [] { return absl::OkStatus(); };
    callbacks.supervise = [] { return v1::SupervisorRequest::Supervise(); };
    callbacks.on_engine = [this](UniqueFd, const std::vector<uint64_t>&) {
      on_engine_();
    };
    callbacks.on_end_progress = [this] { ++end_progress_; };
    callbacks.on_process = [](pid_t) {};
    callbacks.on_engine_gone = [] {};
    callbacks.on_failed = [this] { loop_->Stop(); };
    callbacks.on_adopted = [](int) {};
    callbacks.on_hung_up = [](int) {};
    callbacks.on_stopped = [this](bool over) {
      over_ = over;
      loop_->Stop();
    };
    // A loop that was stopped does not run again.
    host_.reset();
    loop_ = *os::EventLoop::Create();
    host_ = std::make_unique<JobHost>(loop_.get(), std::move(options),
                                      std::move(callbacks));
  }
  // Starts an engine and abandons it as a killed supervisor would; the engine
  // goes on.
  pid_t StartAndAbandon() {
    Make(/*is_new=*/true);
    on_engine_ = [this] { loop_->Stop(); };
    host_->Start();
    loop_->Run();
    const pid_t engine = host_->engine_pid();
    host_.reset();
    return engine;
  }
  std::string directory_;
  std::unique_ptr<os::EventLoop> loop_;
  std::unique_ptr<JobHost> host_;
  std::function<void()> on_engine_;
  std::optional<bool> over_;
  int end_progress_ = 0;
  uint32_t restarts_max_ = 5;
  absl::Duration start_timeout_ = absl::Minutes(2);
  absl::Duration stop_timeout_ = absl::Minutes(2);
};

// Its engine takes twice its time in all, and says each tenth of that time that
// it has come on.
TEST_F(JobHostTest, AnEngineThatReadsRecordsHasTimeToGetReady) {
  start_timeout_ = absl::Seconds(1);
  Make(/*is_new=*/true, "works");
  std::string reason;
  uint64_t disk_bytes = 0;
  on_engine_ = [this] { loop_->Stop(); };
  host_->Start();
  const pid_t engine = host_->engine_pid();
  loop_->RunAfter(absl::Milliseconds(500), [&] {
    reason = host_->reason();
    disk_bytes = host_->start_disk_bytes();
  });
  loop_->Run();
  EXPECT_EQ(host_->state(), JobHost::State::kRunning);
  EXPECT_EQ(host_->engine_pid(), engine) << "another was started";
  EXPECT_THAT(reason, testing::HasSubstr("reads its records from disk"));
  EXPECT_EQ(host_->reason(), "");
  EXPECT_GE(disk_bytes, uint64_t{1} << 30);
  EXPECT_EQ(host_->start_disk_bytes(), 0u);
}

TEST_F(JobHostTest, AnEngineThatDoesNotComeOnIsKilled) {
  start_timeout_ = absl::Seconds(1);
  restarts_max_ = 1;
  Make(/*is_new=*/true, "stuck");
  on_engine_ = [this] { loop_->Stop(); };
  host_->Start();
  loop_->Run();
  EXPECT_EQ(host_->state(), JobHost::State::kFailed);
  EXPECT_THAT(host_->reason(), testing::HasSubstr("was killed by signal 9"));
}

TEST_F(JobHostTest, AnEngineThatBringsRecordsToDiskHasTimeToEnd) {
  stop_timeout_ = absl::Seconds(1);
  Make(/*is_new=*/true, "ends-slowly");
  on_engine_ = [this] { host_->Stop(); };
  host_->Start();
  loop_->Run();
  EXPECT_EQ(over_, false);
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/ended"))
      << "it was killed before";
  EXPECT_EQ(end_progress_, 20);
}

TEST_F(JobHostTest, ConnectionsThatWaitForTheEngineAreCounted) {
  const uint64_t others = observe::LengthOf(observe::Queue::kEngine);
  Make(/*is_new=*/true);
  on_engine_ = [this] { host_->Stop(); };
  host_->Start();
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  const UniqueFd peer(fds[0]);
  {
    Waiting waiting;
    waiting.fd.reset(fds[1]);
    ASSERT_TRUE(host_->Adopt(&waiting).ok());
  }
  EXPECT_EQ(observe::LengthOf(observe::Queue::kEngine), others + 1);
  loop_->Run();
  EXPECT_EQ(host_->TakeWaiting().size(), 1u);
  EXPECT_EQ(observe::LengthOf(observe::Queue::kEngine), others);
}

// While this object lives no fd can be opened; open fds stay usable.
class NoFds {
 public:
  NoFds() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &limit_), 0);
    const rlimit none = {0, limit_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoFds() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit_), 0); }

 private:
  rlimit limit_;
};

// The job has no state that would keep it; but its engine runs and has ranks,
// and would go on for ever without a directory and a supervisor.
TEST_F(JobHostTest, AJobWhoseEngineCannotBeAdoptedIsNotGivenUp) {
  const pid_t engine = StartAndAbandon();
  ASSERT_GT(engine, 0);
  Make(/*is_new=*/false);
  {
    const NoFds none;
    host_->Start();
  }
  EXPECT_EQ(host_->state(), JobHost::State::kBackingOff);
  EXPECT_THAT(host_->reason(), testing::HasSubstr("Too many open files"));
  EXPECT_FALSE(over_.has_value());
  pid_t adopted = 0;
  on_engine_ = [&] {
    adopted = host_->engine_pid();
    loop_->Post([this] { host_->Stop(); });
  };
  loop_->Run();
  EXPECT_EQ(adopted, engine);
  EXPECT_EQ(over_, false);
  EXPECT_NE(::kill(engine, 0), 0) << "it has ended";
}

// Deleting the job meanwhile also stops the engine.
TEST_F(JobHostTest, AnEngineThatWasNotAdoptedYetIsStoppedWithItsJob) {
  const pid_t engine = StartAndAbandon();
  ASSERT_GT(engine, 0);
  Make(/*is_new=*/false);
  {
    const NoFds none;
    host_->Start();
  }
  host_->Stop();
  loop_->Run();
  EXPECT_NE(::kill(engine, 0), 0) << "it has ended";
}

// No engine of a new job can be running.
TEST_F(JobHostTest, ANewJobForWhichThereAreNoFdsIsGivenUp) {
  Make(/*is_new=*/true);
  {
    const NoFds none;
    host_->Start();
  }
  EXPECT_EQ(host_->state(), JobHost::State::kStopping);
  loop_->Run();
  EXPECT_EQ(over_, true);
}

// After a reboot the job is in files on a disk, and nowhere else.
TEST_F(JobHostTest, AJobThatIsOnDiskAloneIsNotGivenUp) {
  for (const char* file : {"commits", "durable"}) {
    SCOPED_TRACE(file);
    const std::string folder = directory_ + "/disk/jobs/a";
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/" + file).flush();
    Make(/*is_new=*/true);
    {
      const NoFds none;
      host_->Start();
    }
    EXPECT_EQ(host_->state(), JobHost::State::kBackingOff);
    std::filesystem::remove_all(folder);
  }
}

}  // namespace
}  // namespace optstate::supervisor
