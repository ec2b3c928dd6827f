// Jobs that their trainer puts to sleep and wakes, with a real daemon and a
// real disk.
#include "client/admin/job_sleep.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kJob[] = "gpt";

class JobSleepTest : public ::testing::Test {
 protected:
  void SetUp() override {
    disk_ = ::testing::TempDir() + "/job_sleep-XXXXXX";
    ASSERT_NE(::mkdtemp(disk_.data()), nullptr);
    Start({"--nvme-dir=" + disk_});
  }
  void TearDown() override {
    daemon_ = nullptr;
    std::filesystem::remove_all(disk_);
  }

  void Start(std::vector<std::string> flags) {
    daemon_ = nullptr;
    TestDaemon::Options options;
    options.tcp = true;
    options.flags = std::move(flags);
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }

  absl::StatusOr<std::unique_ptr<Session>> Open() const {
    SessionOptions options;
    options.endpoint = daemon_->shm_endpoint();
    options.job = kJob;
    options.layout.groups.resize(1);
    options.layout.parameters = {{"weight", {2, 3}, 6}, {"bias", {3}, 3}};
    return Session::Open(options);
  }

  // Begins the job, or goes on with it, and takes a step.
  std::unique_ptr<Session> Train(uint64_t step) const {
    auto session = Open();
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return nullptr;
    const std::vector<float> ones(6, 1.0f);
    const auto bytes = absl::MakeConstSpan(
        reinterpret_cast<const std::byte*>(ones.data()), 24);
    if (step == 1) {
      EXPECT_TRUE((*session)->BeginLoad().ok());
      for (uint32_t p = 0; p < 2; ++p) {
        EXPECT_TRUE((*session)
                        ->Load(StateArray::kMaster, p, DType::kFloat32,
                               bytes.first(p == 0 ? 24 : 12))
                        .ok());
      }
      EXPECT_TRUE((*session)->FinishLoad().ok());
    }
    const void* const gradients[] = {ones.data(), ones.data()};
    EXPECT_TRUE((*session)->PushGradients(step, 0, {0, 1}, gradients).ok());
    CommitOptions commit;
    commit.step = step;
    commit.groups.resize(1);
    const auto outcome = (*session)->Commit(commit);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    return *std::move(session);
  }

  static std::vector<float> Masters(Session& session) {
    std::vector<float> masters(6);
    const auto fetched = session.Fetch(
        StateArray::kMaster, 0,
        absl::MakeSpan(reinterpret_cast<std::byte*>(masters.data()),
                       masters.size() * sizeof(float)));
    EXPECT_TRUE(fetched.ok()) << fetched.status();
    return masters;
  }

  SleepRequest Request() const { return Request(daemon_->shm_endpoint()); }
  static SleepRequest Request(const std::string& endpoint) {
    SleepRequest request;
    request.endpoint = endpoint;
    request.job = kJob;
    return request;
  }

  std::string disk_;
  std::unique_ptr<TestDaemon> daemon_;
};

TEST_F(JobSleepTest, AJobSleepsAndWakesOverEveryWire) {
  const auto tcp = daemon_->tcp_endpoint();
  ASSERT_TRUE(tcp.ok()) << tcp.status();
  uint64_t step = 0;
  for (const std::string& endpoint :
       {daemon_->shm_endpoint(), daemon_->grpc_endpoint(), *tcp}) {
    SCOPED_TRACE(endpoint);
    auto session = Train(++step);
    ASSERT_NE(session, nullptr);
    const std::vector<float> before = Masters(*session);
    // The engine may notice this while it is waited for.
    session->Close();
    session = nullptr;
    const SleepRequest request = Request(endpoint);
    const auto slept = PutJobToSleep(request);
    ASSERT_TRUE(slept.ok()) << slept.status();
    EXPECT_FALSE(slept->was_so);
    EXPECT_EQ(slept->directory, disk_ + "/asleep/jobs/gpt");
    EXPECT_GT(slept->memory_bytes, 0);
    EXPECT_GT(slept->mark.created_at_ns, 0);
    EXPECT_EQ(slept->mark.committed_step, step);

    const auto again = PutJobToSleep(request);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_TRUE(again->was_so);
    EXPECT_EQ(again->directory, slept->directory);
    EXPECT_EQ(again->memory_bytes, slept->memory_bytes);
    EXPECT_EQ(again->mark.created_at_ns, slept->mark.created_at_ns);
    EXPECT_EQ(again->mark.committed_step, step);

    const auto woken = WakeJob(request, slept->mark);
    ASSERT_TRUE(woken.ok()) << woken.status();
    EXPECT_FALSE(woken->was_so);
    EXPECT_EQ(woken->memory_bytes, slept->memory_bytes);
    const auto awake = WakeJob(request, slept->mark);
    ASSERT_TRUE(awake.ok()) << awake.status();
    EXPECT_TRUE(awake->was_so);
    auto next = Open();
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_EQ(Masters(**next), before);
  }
}

TEST_F(JobSleepTest, AJobSleepsOverARestart) {
  Train(1)->Close();
  const auto slept = PutJobToSleep(Request());
  ASSERT_TRUE(slept.ok()) << slept.status();
  ASSERT_TRUE(daemon_->Kill().ok());
  ASSERT_TRUE(daemon_->Restart().ok());
  const auto woken = WakeJob(Request(), slept->mark);
  ASSERT_TRUE(woken.ok()) << woken.status();
  EXPECT_FALSE(woken->was_so);
  EXPECT_TRUE(Open().ok());
}

TEST_F(JobSleepTest, ADaemonThatIsBeingStartedIsAwaited) {
  Train(1)->Close();
  ASSERT_TRUE(daemon_->Kill().ok());
  absl::StatusOr<JobSleep> slept = absl::UnknownError("not called");
  std::thread sleeper([&] { slept = PutJobToSleep(Request()); });
  EXPECT_TRUE(daemon_->Restart().ok());
  sleeper.join();
  EXPECT_TRUE(slept.ok()) << slept.status();
}

TEST_F(JobSleepTest, RanksThatStayAreNamed) {
  const auto session = Train(1);
  SleepRequest request = Request();
  // The time for which ranks are awaited bounds each answer of the daemon too.
  request.timeout = absl::Seconds(4);
  const absl::Status refused = PutJobToSleep(request).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("1 ranks are attached: 0 (pid "));
  // The job is as it was.
  EXPECT_EQ(Masters(*session).size(), 6u);
}

TEST_F(JobSleepTest, AJobThatWentOnIsNotWoken) {
  Train(1)->Close();
  const auto slept = PutJobToSleep(Request());
  ASSERT_TRUE(slept.ok()) << slept.status();
  JobMark other = slept->mark;
  ++other.created_at_ns;
  absl::Status refused = WakeJob(Request(), other).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("another one"));
  other = slept->mark;
  other.committed_step = 0;
  refused = WakeJob(Request(), other).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("at step 0"), HasSubstr("is at step 1")));
  const auto still = PutJobToSleep(Request());
  ASSERT_TRUE(still.ok()) << still.status();
  EXPECT_TRUE(still->was_so);
  // Somebody else wakes it, and goes on.
  ASSERT_TRUE(WakeJob(Request()).ok());
  Train(2)->Close();
  refused = WakeJob(Request(), slept->mark).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
}

TEST_F(JobSleepTest, SeveralMayAskAtOnce) {
  Train(1)->Close();
  std::vector<absl::Status> slept(4, absl::UnknownError("not called"));
  std::atomic<int> were_so = 0;
  std::vector<std::thread> askers;
  for (absl::Status& status : slept) {
    askers.emplace_back([&] {
      const auto done = PutJobToSleep(Request());
      status = done.status();
      if (done.ok() && done->was_so) ++were_so;
    });
  }
  for (std::thread& asker : askers) asker.join();
  for (const absl::Status& status : slept) EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(were_so, 3);
}

TEST_F(JobSleepTest, AnInterruptEndsTheWaitAlone) {
  auto session = Train(1);
  SleepRequest request = Request();
  request.interrupted = [] { return true; };
  const absl::Status ended = PutJobToSleep(request).status();
  EXPECT_TRUE(absl::IsCancelled(ended)) << ended;
  session->Close();
  session = nullptr;
  request = Request();
  request.whole_timeout = absl::ZeroDuration();
  const absl::Status late = PutJobToSleep(request).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_TRUE(PutJobToSleep(Request()).ok());
}

TEST_F(JobSleepTest, ProgressComesToTheEnd) {
  Train(1)->Close();
  SleepRequest request = Request();
  uint64_t last = 0;
  uint64_t total = 0;
  request.progress = [&](uint64_t bytes, uint64_t bytes_total) {
    last = bytes;
    total = bytes_total;
  };
  ASSERT_TRUE(PutJobToSleep(request).ok());
  EXPECT_GT(last, 0);
  EXPECT_EQ(last, total);
}

TEST_F(JobSleepTest, WhatCannotBeIsRefusedWithItsReason) {
  const absl::Status none = PutJobToSleep(Request()).status();
  EXPECT_TRUE(absl::IsNotFound(none)) << none;
  EXPECT_TRUE(absl::IsNotFound(WakeJob(Request()).status()));
  const absl::Status own = PutJobToSleep(Request("embedded")).status();
  EXPECT_TRUE(absl::IsInvalidArgument(own)) << own;
  EXPECT_THAT(std::string(own.message()), HasSubstr("private daemon"));
  const absl::Status nowhere =
      PutJobToSleep(Request("unix:/nonexistent/sock")).status();
  EXPECT_TRUE(absl::IsUnavailable(nowhere)) << nowhere;

  Start({});  // without a disk
  Train(1)->Close();
  const absl::Status no_disk = PutJobToSleep(Request()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(no_disk)) << no_disk;
  EXPECT_THAT(std::string(no_disk.message()), HasSubstr("sleep_directory"));
  EXPECT_TRUE(Open().ok());  // it is awake
}

}  // namespace
}  // namespace optstate::client
