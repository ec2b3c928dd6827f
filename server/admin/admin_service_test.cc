#include "server/admin/admin_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"
#include "server/admin/admin_service_fixture.h"

namespace optstate::admin {
namespace {

using supervisor::JobSummary;
using ::testing::HasSubstr;

TEST_F(AdminServiceTest, StatusSumsUpTheJobs) {
  AddJob("a", 1);
  AddJob("b", 2);
  const v1::ServerStatus status = service_->GetStatus(Operator(), Soon());
  EXPECT_EQ(status.job_count(), 2u);
  EXPECT_EQ(status.session_count(), 3u);
  EXPECT_EQ(status.state_bytes(), 200u);
  EXPECT_EQ(status.workers(), 3u);
  EXPECT_EQ(status.pid(), ::getpid());
  EXPECT_GT(status.state_bytes_available(), 0u);
  EXPECT_FALSE(status.draining());
}

TEST_F(AdminServiceTest, TheNodesReportAsksEachEngineOnce) {
  FakeEngineService& first = AddJob("a", 1);
  AddJob("b", 2);
  info_.config.set_state_dir("/tmp");
  AdminService service(&control_, &engines_, &upgrade_, info_);
  const v1::NodeReport report = service.DescribeNode(Soon());
  EXPECT_EQ(first.asks(), 1);
  EXPECT_EQ(report.status().job_count(), 2u);
  EXPECT_EQ(report.status().session_count(), 3u);
  ASSERT_EQ(report.jobs_size(), 2);
  EXPECT_EQ(report.jobs(0).name(), "a");
  EXPECT_EQ(report.jobs(1).session_count(), 2u);
  EXPECT_EQ(report.tiers().memory().directory(), "/tmp");
  EXPECT_TRUE(report.has_devices());
}

TEST_F(AdminServiceTest, StatusSaysWhatTheLimitsLeave) {
  info_.config.mutable_limits()->set_memory_reserve_bytes(UINT64_MAX);
  info_.config.mutable_limits()->set_state_bytes_max(1);
  info_.state_dir = ::testing::TempDir();
  AdminService full(&control_, &engines_, &upgrade_, info_);
  const v1::ServerStatus status = full.GetStatus(Operator(), Soon());
  EXPECT_TRUE(status.has_state_bytes_available());
  EXPECT_LE(status.state_bytes_available(), 1u);
  info_.state_dir = "/nonexistent";
  AdminService gone(&control_, &engines_, &upgrade_, info_);
  EXPECT_FALSE(gone.GetStatus(Operator(), Soon()).has_state_bytes_available());
  EXPECT_THAT(gone.GetStatus(Operator(), Soon()).state_bytes_problem(),
              HasSubstr("No such file"));
}

TEST_F(AdminServiceTest, JobsComeFromTheirEnginesNamesFromTheSupervisor) {
  AddJob("a", 1);
  control_.jobs["a"].restarts = 4;
  const auto job = service_->GetJob("a", Operator(), Soon());
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->name(), "a");
  EXPECT_EQ(job->phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job->engine_pid(), 17);
  EXPECT_EQ(job->engine_restarts(), 4u);
  EXPECT_TRUE(
      absl::IsNotFound(service_->GetJob("b", Operator(), Soon()).status()));
}

TEST_F(AdminServiceTest, ADeadOrHangingEngineDoesNotSpoilTheList) {
  AddJob("good", 1);
  AddJob("hanging", 1, /*hangs=*/true);
  JobSummary& failed = control_.jobs["failed"];
  failed.name = "failed";
  failed.failed = true;
  failed.reason = "its engine died too often";
  const v1::ListJobsReply list = service_->ListJobs(Operator(), Soon());
  const auto& jobs = list.jobs();
  ASSERT_EQ(jobs.size(), 3);
  EXPECT_EQ(jobs[0].name(), "failed");
  EXPECT_EQ(jobs[0].phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(jobs[0].reason(), "its engine died too often");
  EXPECT_EQ(jobs[1].phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(jobs[2].phase(), v1::JOB_PHASE_UNSPECIFIED);
  EXPECT_THAT(jobs[2].reason(), HasSubstr("hanging"));
}

// The deadline has passed already: no time decides whether the engine is
// awaited long enough.
TEST_F(AdminServiceTest, AnEngineThatDoesNotStartIsListedWithTheReason) {
  AddJob("starting", 1);
  engines_.Erase("starting");
  control_.jobs["starting"].reason = "its engine exited with status 1: locked";
  control_.jobs["starting"].start_disk_bytes = 4096;
  const v1::ListJobsReply list =
      service_->ListJobs(Operator(), absl::InfinitePast());
  ASSERT_EQ(list.jobs_size(), 1);
  EXPECT_EQ(list.jobs(0).phase(), v1::JOB_PHASE_UNSPECIFIED);
  EXPECT_THAT(
      list.jobs(0).reason(),
      HasSubstr("not running: its engine exited with status 1: locked"));
  EXPECT_EQ(list.jobs(0).engine_start().disk_bytes(), 4096u);
}

// The engine never answers, and the caller sets no deadline.
TEST_F(AdminServiceTest, AnEngineIsNotAwaitedForEver) {
  AddJob("silent", 1);
  int fds[2];
  ASSERT_EQ(
      ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds),
      0);
  const UniqueFd never_read(fds[0]);
  engines_.Set("silent", UniqueFd(fds[1]));
  AdminService service(&control_, &engines_, &upgrade_, info_,
                       absl::Milliseconds(1));
  v1::ListParametersRequest request;
  request.set_job("silent");
  const absl::Status parameters =
      service.ListParameters(request, Operator(), absl::InfiniteFuture())
          .status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(parameters)) << parameters;
  const v1::ListJobsReply list =
      service.ListJobs(Operator(), absl::InfiniteFuture());
  ASSERT_EQ(list.unanswered_size(), 1);
  EXPECT_EQ(list.unanswered(0).name(), "silent");
}

TEST_F(AdminServiceTest, ListsNameTheEnginesThatGaveNoAnswer) {
  AddJob("good", 1);
  AddJob("hanging", 1, /*hangs=*/true);
  GiveFiles("hanging");
  const v1::ListJobsReply list = service_->ListJobs(Operator(), Soon());
  ASSERT_EQ(list.jobs_size(), 2);
  EXPECT_FALSE(list.jobs(0).ranks_unknown());
  const v1::Job& hanging = list.jobs(1);
  EXPECT_TRUE(hanging.ranks_unknown());
  EXPECT_FALSE(hanging.state_unknown());
  EXPECT_EQ(hanging.committed_step(), 56u);
  EXPECT_EQ(hanging.parameter_count(), 1u);
  EXPECT_EQ(hanging.world_size(), 2u);
  EXPECT_GT(hanging.created_at().seconds(), 0);
  EXPECT_GE(hanging.state_bytes(), 4096u);
  ASSERT_EQ(list.unanswered_size(), 1);
  EXPECT_EQ(list.unanswered(0).name(), "hanging");
  EXPECT_THAT(list.unanswered(0).reason(), HasSubstr("Deadline Exceeded"));

  const v1::ServerStatus status = service_->GetStatus(Operator(), Soon());
  ASSERT_EQ(status.unanswered_size(), 1);
  EXPECT_EQ(status.session_count(), 1u);
  EXPECT_EQ(status.state_bytes(), 100 + hanging.state_bytes());
  for (const std::string job : {"", "hanging"}) {
    const auto sessions = service_->ListSessions(job, Operator(), Soon());
    ASSERT_TRUE(sessions.ok()) << sessions.status();
    ASSERT_EQ(sessions->unanswered_size(), 1);
    EXPECT_EQ(sessions->unanswered(0).name(), "hanging");
  }
}

// No engine is asked, and the job's files are described.
TEST_F(AdminServiceTest, AJobWithoutEngineIsWhatItsFilesSay) {
  for (const std::string job : {"files", "damaged", "empty"}) {
    control_.jobs[job].name = job;
    control_.jobs[job].failed = true;
    GiveFiles(job);
  }
  const auto state = [this](const std::string& job) {
    return control_.jobs[job].directory + "/state";
  };
  std::filesystem::remove(state("damaged") + "/job.binpb");
  std::filesystem::remove_all(state("empty"));
  const v1::ListJobsReply list = service_->ListJobs(Operator(), Soon());
  EXPECT_EQ(list.unanswered_size(), 0);
  ASSERT_EQ(list.jobs_size(), 3);
  for (const v1::Job& job : list.jobs()) {
    EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
    EXPECT_FALSE(job.ranks_unknown());
    EXPECT_EQ(job.state_unknown(), job.name() == "damaged");
    EXPECT_EQ(job.committed_step(), job.name() == "files" ? 56u : 0u);
    EXPECT_EQ(job.state_bytes() != 0, job.name() != "empty");
  }
}

TEST_F(AdminServiceTest, AnEngineThatCouldNotOpenItsJobSaysLessThanTheFiles) {
  AddJob("a", 0).set_phase(v1::JOB_PHASE_FAILED);
  GiveFiles("a");
  const auto job = service_->GetJob("a", Operator(), Soon());
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->committed_step(), 56u);
  EXPECT_FALSE(job->ranks_unknown());
}

// The engine is being started or adopted, or the previous one has just died.
TEST_F(AdminServiceTest, AnEngineThatIsAboutToAnswerIsWaitedFor) {
  AddJob("good", 1);
  for (const char* job : {"starting", "adopted"}) {
    control_.jobs[job].name = job;
    control_.jobs[job].engine_pid = 17;
  }
  AddJob("dying", 1, /*hangs=*/false, /*dies=*/true);
  engines_.Lose("starting");
  v1::ListJobsReply list;
  std::thread listing([&] { list = service_->ListJobs(Operator(), Soon()); });
  fakes_["dying"]->AwaitQuestion();
  StartEngine("starting", 2);
  StartEngine("adopted", 3);
  StartEngine("dying", 4);
  listing.join();
  EXPECT_EQ(list.unanswered_size(), 0);
  ASSERT_EQ(list.jobs_size(), 4);
  EXPECT_EQ(list.jobs(0).session_count(), 3u);
  EXPECT_EQ(list.jobs(1).session_count(), 4u);
  EXPECT_EQ(list.jobs(2).session_count(), 1u);
  EXPECT_EQ(list.jobs(3).session_count(), 2u);
}

// The last rank has left, or the engine has died for good: no other engine is
// waited for.
TEST_F(AdminServiceTest, AnEngineThatIsOverIsNotWaitedFor) {
  AddJob("over", 1, /*hangs=*/false, /*dies=*/true);
  v1::ListJobsReply list;
  // The listing returns although nothing ends the wait for another engine.
  std::thread listing(
      [&] { list = service_->ListJobs(Operator(), absl::InfiniteFuture()); });
  fakes_["over"]->AwaitQuestion();
  control_.EndEngine("over");
  engines_.Erase("over");
  listing.join();
  EXPECT_EQ(list.unanswered_size(), 0);
  ASSERT_EQ(list.jobs_size(), 1);
  EXPECT_EQ(list.jobs(0).engine_pid(), 0);
}

// A job that is removed while the list is made is not in the list.
TEST_F(AdminServiceTest, AJobThatGoesMeanwhileIsNotListed) {
  AddJob("goes", 1, /*hangs=*/false, /*dies=*/true);
  v1::ListJobsReply list;
  std::thread listing([&] { list = service_->ListJobs(Operator(), Soon()); });
  fakes_["goes"]->AwaitQuestion();
  control_.EndJob("goes");
  engines_.Erase("goes");
  listing.join();
  EXPECT_EQ(list.unanswered_size(), 0);
  EXPECT_EQ(list.jobs_size(), 0);
}

TEST_F(AdminServiceTest, SessionsOfAllOrOne) {
  AddJob("a", 1);
  AddJob("b", 3);
  EXPECT_EQ(service_->ListSessions("", Operator(), Soon())->sessions_size(), 4);
  const auto one = service_->ListSessions("b", Operator(), Soon());
  ASSERT_EQ(one->sessions_size(), 3);
  EXPECT_EQ(one->sessions(2).job(), "b");
  EXPECT_TRUE(absl::IsNotFound(
      service_->ListSessions("c", Operator(), Soon()).status()));
}

TEST_F(AdminServiceTest, ParametersAreTheEngines) {
  AddJob("a", 1);
  v1::ListParametersRequest request;
  request.set_job("a");
  request.set_page_token("7");
  EXPECT_EQ(
      service_->ListParameters(request, Operator(), Soon())->next_page_token(),
      "7+");
  request.set_job("b");
  EXPECT_TRUE(absl::IsNotFound(
      service_->ListParameters(request, Operator(), Soon()).status()));
}

}  // namespace
}  // namespace optstate::admin
