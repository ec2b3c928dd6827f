#include "server/admin/admin_service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/conversions.h"
#include "proto/types/layout.h"
#include "storage/host_tier.h"

namespace optstate::admin {
namespace {

using supervisor::JobSummary;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A fake supervisor for Admin; records the calls.
class FakeControl : public supervisor::SupervisorControl {
 public:
  std::vector<JobSummary> Jobs() override {
    absl::MutexLock lock(&mutex);
    std::vector<JobSummary> all;
    for (const auto& [name, job] : jobs) all.push_back(job);
    return all;
  }
  absl::Status HoldJob(const std::string& name, uid_t uid) override {
    calls.push_back("hold " + name);
    if (!jobs.contains(name)) return absl::NotFoundError(name);
    if (jobs[name].uid != uid) return absl::PermissionDeniedError(name);
    return absl::OkStatus();
  }
  void ReleaseJob(const std::string& name) override {
    calls.push_back("release " + name);
  }
  absl::Status DeleteHeldJob(const std::string& name, absl::Time) override {
    calls.push_back("delete " + name);
    jobs.erase(name);
    return absl::OkStatus();
  }
  void EndJob(const std::string& name) {
    absl::MutexLock lock(&mutex);
    jobs.erase(name);
  }
  absl::Status RecoverJob(const std::string& name, uid_t,
                          pid_t failed_engine) override {
    calls.push_back(absl::StrCat("recover ", name, " ", failed_engine));
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> AwaitEngine(const std::string& name,
                                          absl::Time) override {
    return name;
  }
  absl::Status ReplaceEngine(const std::string& name, absl::Time) override {
    calls.push_back("replace " + name);
    return absl::OkStatus();
  }
  absl::Status SetDraining(bool value) override {
    is_draining = value;
    return absl::OkStatus();
  }
  bool draining() const override { return is_draining; }

  // Ends a job's engine while another thread may be asking.
  void EndEngine(const std::string& name) {
    absl::MutexLock lock(&mutex);
    jobs[name].engine_pid = 0;
  }

  absl::Mutex mutex;
  std::map<std::string, JobSummary> jobs;
  std::vector<std::string> calls;
  bool is_draining = false;
};

class FakeUpgrade : public UpgradeControl {
 public:
  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string& binary) override {
    progress.set_id(binary);
    v1::UpgradeReply reply;
    reply.set_id(binary);
    return reply;
  }
  v1::UpgradeProgress upgrade_progress() override { return progress; }

  v1::UpgradeProgress progress;
};

// Answers like an engine with `sessions` ranks. A hanging one answers at once
// with the error that its caller would get in the end: no time passes that a
// slow machine could stretch. A dying one is gone at the first question.
class FakeEngineService : public v1::Engine::Service {
 public:
  FakeEngineService(uint32_t sessions, bool hangs, bool dies)
      : sessions_(sessions), hangs_(hangs), dies_(dies) {
    server_ = grpc::ServerBuilder().RegisterService(this).BuildAndStart();
  }
  ~FakeEngineService() override {
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
    if (dies_) {
      asked_.Notify();
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
    }
    if (hangs_) return NoAnswer();
    job->set_name("what the engine thinks");
    job->set_phase(phase_);
    job->set_engine_pid(18);
    job->set_session_count(sessions_);
    job->set_state_bytes(100);
    for (uint32_t i = 0; i < sessions_; ++i) job->add_sessions()->set_rank(i);
    return grpc::Status::OK;
  }
  grpc::Status ListParameters(grpc::ServerContext*,
                              const v1::ListParametersRequest* request,
                              v1::ListParametersReply* reply) override {
    if (hangs_) return NoAnswer();
    reply->set_next_page_token(request->page_token() + "+");
    return grpc::Status::OK;
  }
  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest* request,
                     v1::DrainReply*) override {
    if (dies_) {
      asked_.Notify();
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
    }
    if (hangs_) return NoAnswer();
    if (!request->resume() && sessions_ == 2) {
      return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED,
                          "step 3 is open");
    }
    ++drains_;
    return grpc::Status::OK;
  }

  grpc::Status Rest(grpc::ServerContext*, const v1::RestRequest*,
                    v1::RestReply*) override {
    if (dies_) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "died");
    if (++rests_ < 3 && sessions_ == 2) {
      return grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "step 3");
    }
    return grpc::Status::OK;
  }

  static grpc::Status NoAnswer() {
    return {grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"};
  }
  void set_phase(v1::JobPhase phase) { phase_ = phase; }
  int drains() const { return drains_; }
  int rests() const { return rests_; }
  void AwaitQuestion() { asked_.WaitForNotification(); }

 private:
  const uint32_t sessions_;
  const bool hangs_;
  const bool dies_;
  absl::Notification asked_;
  int drains_ = 0;
  int rests_ = 0;
  std::atomic<v1::JobPhase> phase_{v1::JOB_PHASE_READY};
  std::unique_ptr<grpc::Server> server_;
};

class AdminServiceTest : public testing::Test {
 protected:
  AdminServiceTest() {
    info_.state_dir = "/tmp";
    info_.workers = 3;
    service_ = std::make_unique<AdminService>(&control_, &engines_, &upgrade_,
                                              info_, absl::InfiniteDuration());
  }

  ~AdminServiceTest() override {
    for (const std::string& directory : directories_) {
      std::filesystem::remove_all(directory);
    }
  }

  // Writes the files of an engine after 56 steps of a world of two.
  void GiveFiles(const std::string& job) {
    std::string directory = ::testing::TempDir() + "/admin_service-XXXXXX";
    ASSERT_NE(::mkdtemp(directory.data()), nullptr);
    directories_.push_back(directory);
    control_.jobs[job].directory = directory;
    LayoutSpec spec;
    spec.groups.resize(1);
    spec.parameters.resize(1);
    spec.parameters[0].name = "p";
    spec.parameters[0].shape = {3};
    spec.parameters[0].numel = 3;
    const auto layout = Layout::Make(std::move(spec));
    ASSERT_TRUE(layout.ok()) << layout.status();
    v1::RegisterRequest description;
    *description.mutable_layout() = ToProto(*layout);
    description.set_world_size(2);
    description.set_partition(v1::PARTITION_MODE_GREEDY);
    auto tier = HostTier::Create(directory, *layout, Accumulation(),
                                 description.SerializeAsString());
    ASSERT_TRUE(tier.ok()) << tier.status();
    StepRecord record = CurrentRecord(*tier->control());
    record.committed_step = 56;
    PublishRecord(record, tier->control());
  }

  FakeEngineService& AddJob(const std::string& name, uint32_t sessions,
                            bool hangs = false, bool dies = false) {
    JobSummary& job = control_.jobs[name];
    job.name = name;
    job.uid = ::geteuid();
    job.engine_pid = 17;
    return StartEngine(name, sessions, hangs, dies);
  }

  FakeEngineService& StartEngine(const std::string& name, uint32_t sessions,
                                 bool hangs = false, bool dies = false) {
    auto& engine = fakes_[name];
    engine = std::make_unique<FakeEngineService>(sessions, hangs, dies);
    engines_.Set(name, engine->Connect());
    return *engine;
  }

  static absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

  ServerInfo info_;
  FakeControl control_;
  FakeUpgrade upgrade_;
  std::map<std::string, std::unique_ptr<FakeEngineService>> fakes_;
  EngineChannels engines_;
  std::unique_ptr<AdminService> service_;
  std::vector<std::string> directories_;
};

TEST_F(AdminServiceTest, StatusSumsUpTheJobs) {
  AddJob("a", 1);
  AddJob("b", 2);
  const v1::ServerStatus status = service_->GetStatus(Soon());
  EXPECT_EQ(status.job_count(), 2u);
  EXPECT_EQ(status.session_count(), 3u);
  EXPECT_EQ(status.state_bytes(), 200u);
  EXPECT_EQ(status.workers(), 3u);
  EXPECT_EQ(status.pid(), ::getpid());
  EXPECT_GT(status.state_bytes_available(), 0u);
  EXPECT_FALSE(status.draining());
}

TEST_F(AdminServiceTest, StatusSaysWhatTheLimitsLeave) {
  info_.limits.set_memory_reserve_bytes(UINT64_MAX);
  info_.limits.set_state_bytes_max(1);
  info_.state_dir = ::testing::TempDir();
  AdminService full(&control_, &engines_, &upgrade_, info_);
  const v1::ServerStatus status = full.GetStatus(Soon());
  EXPECT_TRUE(status.has_state_bytes_available());
  EXPECT_LE(status.state_bytes_available(), 1u);
  info_.state_dir = "/nonexistent";
  AdminService gone(&control_, &engines_, &upgrade_, info_);
  EXPECT_FALSE(gone.GetStatus(Soon()).has_state_bytes_available());
  EXPECT_THAT(gone.GetStatus(Soon()).state_bytes_problem(),
              HasSubstr("No such file"));
}

TEST_F(AdminServiceTest, JobsComeFromTheirEnginesNamesFromTheSupervisor) {
  AddJob("a", 1);
  control_.jobs["a"].restarts = 4;
  const auto job = service_->GetJob("a", Soon());
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->name(), "a");
  EXPECT_EQ(job->phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(job->engine_pid(), 17);
  EXPECT_EQ(job->engine_restarts(), 4u);
  EXPECT_TRUE(absl::IsNotFound(service_->GetJob("b", Soon()).status()));
}

TEST_F(AdminServiceTest, ADeadOrHangingEngineDoesNotSpoilTheList) {
  AddJob("good", 1);
  AddJob("hanging", 1, /*hangs=*/true);
  AddJob("starting", 1);
  engines_.Erase("starting");
  control_.jobs["starting"].reason = "its engine exited with status 1: locked";
  JobSummary& failed = control_.jobs["failed"];
  failed.name = "failed";
  failed.failed = true;
  failed.reason = "its engine died too often";
  AdminService service(&control_, &engines_, &upgrade_, info_,
                       absl::Seconds(5));
  const v1::ListJobsReply list = service.ListJobs(Soon());
  const auto& jobs = list.jobs();
  ASSERT_EQ(jobs.size(), 4);
  EXPECT_EQ(jobs[0].name(), "failed");
  EXPECT_EQ(jobs[0].phase(), v1::JOB_PHASE_FAILED);
  EXPECT_EQ(jobs[0].reason(), "its engine died too often");
  EXPECT_EQ(jobs[1].phase(), v1::JOB_PHASE_READY);
  EXPECT_EQ(jobs[2].phase(), v1::JOB_PHASE_UNSPECIFIED);
  EXPECT_THAT(jobs[2].reason(), HasSubstr("hanging"));
  EXPECT_THAT(
      jobs[3].reason(),
      HasSubstr("not running: its engine exited with status 1: locked"));
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
      service.ListParameters(request, absl::InfiniteFuture()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(parameters)) << parameters;
  const v1::ListJobsReply list = service.ListJobs(absl::InfiniteFuture());
  ASSERT_EQ(list.unanswered_size(), 1);
  EXPECT_EQ(list.unanswered(0).name(), "silent");
}

TEST_F(AdminServiceTest, ListsNameTheEnginesThatGaveNoAnswer) {
  AddJob("good", 1);
  AddJob("hanging", 1, /*hangs=*/true);
  GiveFiles("hanging");
  const v1::ListJobsReply list = service_->ListJobs(Soon());
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

  const v1::ServerStatus status = service_->GetStatus(Soon());
  ASSERT_EQ(status.unanswered_size(), 1);
  EXPECT_EQ(status.session_count(), 1u);
  EXPECT_EQ(status.state_bytes(), 100 + hanging.state_bytes());
  for (const std::string job : {"", "hanging"}) {
    const auto sessions = service_->ListSessions(job, Soon());
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
  const v1::ListJobsReply list = service_->ListJobs(Soon());
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
  const auto job = service_->GetJob("a", Soon());
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
  std::thread listing([&] { list = service_->ListJobs(Soon()); });
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
      [&] { list = service_->ListJobs(absl::InfiniteFuture()); });
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
  std::thread listing([&] { list = service_->ListJobs(Soon()); });
  fakes_["goes"]->AwaitQuestion();
  control_.EndJob("goes");
  engines_.Erase("goes");
  listing.join();
  EXPECT_EQ(list.unanswered_size(), 0);
  EXPECT_EQ(list.jobs_size(), 0);
}

TEST_F(AdminServiceTest, DrainChecksItsTimeout) {
  v1::DrainRequest request;
  for (const auto& [seconds, nanos] : {std::pair<int64_t, int>{-1, 0},
                                       {0, -1},
                                       {0, 1'000'000'000},
                                       {1LL << 60, 0}}) {
    request.mutable_timeout()->set_seconds(seconds);
    request.mutable_timeout()->set_nanos(nanos);
    const absl::Status refused =
        service_->Drain(request, ::geteuid(), Soon()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  }
  EXPECT_FALSE(control_.is_draining);
}

TEST_F(AdminServiceTest, SessionsOfAllOrOne) {
  AddJob("a", 1);
  AddJob("b", 3);
  EXPECT_EQ(service_->ListSessions("", Soon())->sessions_size(), 4);
  const auto one = service_->ListSessions("b", Soon());
  ASSERT_EQ(one->sessions_size(), 3);
  EXPECT_EQ(one->sessions(2).job(), "b");
  EXPECT_TRUE(absl::IsNotFound(service_->ListSessions("c", Soon()).status()));
}

TEST_F(AdminServiceTest, ParametersAreTheEngines) {
  AddJob("a", 1);
  v1::ListParametersRequest request;
  request.set_job("a");
  request.set_page_token("7");
  EXPECT_EQ(service_->ListParameters(request, Soon())->next_page_token(), "7+");
  request.set_job("b");
  EXPECT_TRUE(
      absl::IsNotFound(service_->ListParameters(request, Soon()).status()));
}

TEST_F(AdminServiceTest, DeleteSparesAJobWithRanks) {
  AddJob("busy", 1);
  AddJob("idle", 0);
  const absl::Status busy =
      service_->DeleteJob("busy", false, ::geteuid(), Soon());
  EXPECT_TRUE(absl::IsFailedPrecondition(busy)) << busy;
  EXPECT_THAT(control_.calls, ElementsAre("hold busy", "release busy"));
  control_.calls.clear();
  EXPECT_TRUE(service_->DeleteJob("idle", false, ::geteuid(), Soon()).ok());
  EXPECT_TRUE(service_->DeleteJob("busy", true, ::geteuid(), Soon()).ok());
  EXPECT_THAT(control_.calls, ElementsAre("hold idle", "delete idle",
                                          "hold busy", "delete busy"));
}

TEST_F(AdminServiceTest, DeleteOfAnEngineThatDoesNotAnswerNeedsForce) {
  AddJob("hanging", 0, /*hangs=*/true);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      service_->DeleteJob("hanging", false, ::geteuid(), Soon())));
  control_.jobs["hanging"].engine_pid = 0;
  engines_.Erase("hanging");
  EXPECT_TRUE(service_->DeleteJob("hanging", false, ::geteuid(), Soon()).ok());
}

TEST_F(AdminServiceTest, DeleteChecksNameAndUser) {
  AddJob("a", 0);
  EXPECT_TRUE(absl::IsInvalidArgument(
      service_->DeleteJob("../a", false, ::geteuid(), Soon())));
  EXPECT_TRUE(
      absl::IsNotFound(service_->DeleteJob("b", false, ::geteuid(), Soon())));
  EXPECT_TRUE(absl::IsPermissionDenied(
      service_->DeleteJob("a", true, ::geteuid() + 1, Soon())));
}

// The engine is named by the pid that it reports: the supervisor's pid may be
// the next engine's.
TEST_F(AdminServiceTest, RecoverNamesTheEngineThatCallsItsJobFailed) {
  AddJob("ready", 1);
  AddJob("failed", 1).set_phase(v1::JOB_PHASE_FAILED);
  AddJob("hanging", 1, /*hangs=*/true);
  AddJob("dead", 1);
  engines_.Erase("dead");
  for (const char* job : {"ready", "failed", "hanging", "dead"}) {
    EXPECT_TRUE(service_->RecoverJob(job, ::geteuid(), Soon()).ok());
  }
  EXPECT_THAT(control_.calls,
              ElementsAre("recover ready 0", "recover failed 18",
                          "recover hanging 0", "recover dead 0"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      service_->RecoverJob("../a", ::geteuid(), Soon())));
}

TEST_F(AdminServiceTest, DrainReachesEveryEngineAndNamesWhoIsLate) {
  FakeEngineService& quick = AddJob("quick", 1);
  AddJob("slow", 2);
  v1::DrainRequest request;
  const absl::Status drained =
      service_->Drain(request, ::geteuid(), Soon()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(drained)) << drained;
  EXPECT_THAT(std::string(drained.message()),
              testing::AllOf(HasSubstr("slow"), HasSubstr("step 3 is open"),
                             HasSubstr("draining stays in force"),
                             HasSubstr("`optctl drain --resume`")));
  EXPECT_TRUE(control_.is_draining);
  EXPECT_EQ(quick.drains(), 1);
  request.set_resume(true);
  const auto resumed = service_->Drain(request, ::geteuid(), Soon());
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(resumed->was_draining());
  EXPECT_FALSE(control_.is_draining);
  EXPECT_FALSE(service_->Drain(request, ::geteuid(), Soon())->was_draining());
  EXPECT_TRUE(absl::IsPermissionDenied(
      service_->Drain(request, ::geteuid() + 1, Soon()).status()));
}

// The request is in force whether or not the engine confirms it.
TEST_F(AdminServiceTest, AStoppedEngineDoesNotUndoWhatItIsTold) {
  AddJob("stopped", 1, /*hangs=*/true);
  const absl::Status drained =
      service_->Drain({}, ::geteuid(), Soon()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(drained)) << drained;
  EXPECT_THAT(std::string(drained.message()),
              testing::AllOf(HasSubstr("draining stays in force"),
                             HasSubstr("engine of job \"stopped\"")));
  EXPECT_TRUE(control_.is_draining);
  v1::DrainRequest resume;
  resume.set_resume(true);
  const absl::Status resumed =
      service_->Drain(resume, ::geteuid(), Soon()).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(resumed)) << resumed;
  EXPECT_THAT(std::string(resumed.message()),
              testing::AllOf(HasSubstr("draining has ended"),
                             HasSubstr("engine of job \"stopped\"")));
  EXPECT_FALSE(control_.is_draining);
}

// An engine dies while it finishes its step; the next one finishes it.
TEST_F(AdminServiceTest, DrainAsksTheEngineThatComesNext) {
  AddJob("over", 0, /*hangs=*/false, /*dies=*/true);
  AddJob("dying", 0, /*hangs=*/false, /*dies=*/true);
  AddJob("starting", 1);
  engines_.Lose("starting");
  absl::Status drained = absl::UnknownError("");
  std::thread drain(
      [&] { drained = service_->Drain({}, ::geteuid(), Soon()).status(); });
  for (const char* job : {"over", "dying"}) fakes_[job]->AwaitQuestion();
  engines_.Erase("over");  // its last rank has left
  engines_.Lose("dying");
  FakeEngineService& next = AddJob("dying", 1);
  FakeEngineService& started = AddJob("starting", 1);
  drain.join();
  EXPECT_TRUE(drained.ok()) << drained;
  EXPECT_EQ(next.drains(), 1);
  EXPECT_EQ(started.drains(), 1);
  // A resume does not wait for an engine to take steps.
  engines_.Lose("dying");
  v1::DrainRequest resume;
  resume.set_resume(true);
  EXPECT_TRUE(service_->Drain(resume, ::geteuid(), Soon()).ok());
  // No next engine comes in time.
  const absl::Status late =
      service_->Drain({}, ::geteuid(), absl::InfinitePast()).status();
  EXPECT_TRUE(absl::IsUnavailable(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("dying"));
}

// A rest ends by itself, so resting engines are asked again while another one
// is late.
TEST_F(AdminServiceTest, AllRestUntilTheLastOneDoes) {
  FakeEngineService& quick = AddJob("quick", 1);
  FakeEngineService& late = AddJob("late", 2);
  AddJob("dying", 1, /*hangs=*/false, /*dies=*/true);
  AddJob("starting", 1);
  engines_.Lose("starting");
  const absl::Status rest = engines_.RestAll(Soon());
  EXPECT_TRUE(rest.ok()) << rest;
  EXPECT_EQ(late.rests(), 3);
  EXPECT_EQ(quick.rests(), 3);
  AddJob("late", 2);
  const absl::Status not_in_time = engines_.RestAll(absl::InfinitePast());
  EXPECT_TRUE(absl::IsDeadlineExceeded(not_in_time)) << not_in_time;
}

// A peer over TCP must not choose the program that runs as the daemon's user.
TEST_F(AdminServiceTest, UpgradeIsForOperatorsOfThisMachine) {
  const uid_t self = ::geteuid();
  EXPECT_TRUE(absl::IsPermissionDenied(
      service_->Upgrade("b", self + 1, /*is_local=*/true).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(
      service_->Upgrade("b", self, /*is_local=*/false).status()));
  EXPECT_FALSE(service_->GetStatus(absl::InfiniteFuture()).has_upgrade());
  EXPECT_TRUE(service_->Upgrade("b", self, /*is_local=*/true).ok());
  EXPECT_EQ(service_->GetStatus(absl::InfiniteFuture()).upgrade().id(), "b");
}

}  // namespace
}  // namespace optstate::admin
