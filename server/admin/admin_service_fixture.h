#ifndef OPTSTATE_SERVER_ADMIN_ADMIN_SERVICE_FIXTURE_H_
#define OPTSTATE_SERVER_ADMIN_ADMIN_SERVICE_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/conversions.h"
#include "proto/types/layout.h"
#include "server/access/caller.h"
#include "server/access/job_access.h"
#include "server/admin/admin_service.h"
#include "server/admin/engine_channels.h"
#include "server/admin/fake_engine_service.h"
#include "server/admin/server_info.h"
#include "server/admin/upgrade_control.h"
#include "server/supervisor/permissions.h"
#include "server/supervisor/supervisor_control.h"
#include "storage/host_tier.h"

namespace optstate::admin {

// A fake supervisor for Admin; records the calls.
class FakeControl : public supervisor::SupervisorControl {
 public:
  std::vector<supervisor::JobSummary> Jobs() override {
    absl::MutexLock lock(&mutex);
    std::vector<supervisor::JobSummary> all;
    for (const auto& [name, job] : jobs) all.push_back(job);
    return all;
  }
  absl::StatusOr<supervisor::JobSummary> FindJob(
      const std::string& name) override {
    if (before_find != nullptr) std::exchange(before_find, nullptr)();
    absl::MutexLock lock(&mutex);
    const auto found = jobs.find(name);
    if (found != jobs.end()) return found->second;
    return absl::NotFoundError(
        absl::StrCat("there is no job \"", name, "\" on this node"));
  }
  absl::Status HoldJob(const std::string& name,
                       const access::Caller& caller) override {
    Record("hold " + name);
    return CheckMayChange(name, caller);
  }
  void ReleaseJob(const std::string& name) override {
    Record("release " + name);
  }
  std::shared_ptr<supervisor::JobDeletion> BeginDeletion(
      const std::string& name) override {
    Record("delete " + name);
    EndJob(name);
    auto deletion = std::make_shared<supervisor::JobDeletion>();
    if (deletion_goes_on) return deletion;
    deletion->BeginRemoval();
    deletion->removal().bytes = 10;
    deletion->removal().bytes_total = 10;
    deletion->End(delete_status);
    return deletion;
  }
  void Record(std::string call) {
    absl::MutexLock lock(&mutex);
    calls.push_back(std::move(call));
  }
  void EndJob(const std::string& name) {
    absl::MutexLock lock(&mutex);
    jobs.erase(name);
  }
  absl::StatusOr<std::shared_ptr<supervisor::SleepOperation>> PutToSleep(
      const std::string& name, pid_t engine) override {
    Record(absl::StrCat("sleep ", name, " ", engine));
    return Operation(supervisor::SleepOperation::Kind::kSleep);
  }
  absl::StatusOr<std::shared_ptr<supervisor::SleepOperation>> WakeJob(
      const std::string& name, const access::Caller& caller) override {
    Record("wake " + name);
    const absl::Status may = CheckMayChange(name, caller);
    if (!may.ok()) return may;
    return Operation(supervisor::SleepOperation::Kind::kWake);
  }
  absl::Status RecoverJob(const std::string& name, const access::Caller& caller,
                          pid_t failed_engine, bool) override {
    Record(absl::StrCat("recover ", name, " ", failed_engine));
    return CheckMayChange(name, caller);
  }
  absl::Status SetAccess(const std::string& name, const v1::JobAccess& access,
                         const v1::JobAccess* before,
                         const access::Caller& caller) override {
    Record("set access " + name);
    const absl::StatusOr<supervisor::JobSummary> job = FindJob(name);
    if (!job.ok()) return job.status();
    const absl::Status may =
        supervisor::CheckMayChangeAccess(name, job->uid, job->access, caller);
    if (!may.ok()) return may;
    absl::MutexLock lock(&mutex);
    if (before != nullptr &&
        !access::IsSameAccess(*before, jobs[name].access)) {
      return absl::AbortedError("it was changed meanwhile");
    }
    jobs[name].access = access;
    return absl::OkStatus();
  }
  // No one sees the events of jobs that are not there.
  bool MaySee(const v1::Event& event,
              const access::Caller* caller) const override {
    absl::MutexLock lock(&mutex);
    const auto found = jobs.find(event.job());
    if (event.job().empty()) return true;
    if (found == jobs.end()) return false;
    return caller == nullptr
               ? !found->second.access.is_private()
               : supervisor::MayLook(found->second.uid, found->second.access,
                                     *caller);
  }
  absl::StatusOr<std::string> AwaitEngine(const std::string& name,
                                          absl::Time) override {
    return name;
  }
  absl::Status ReplaceEngine(const std::string& name, absl::Time) override {
    Record("replace " + name);
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

  // Returns an operation that has copied 5 of 10 bytes, and ends at once as
  // `sleep_status` says.
  std::shared_ptr<supervisor::SleepOperation> Operation(
      supervisor::SleepOperation::Kind kind) {
    auto operation =
        std::make_shared<supervisor::SleepOperation>(kind, "/disk/jobs/a");
    operation->control().bytes = 5;
    operation->control().bytes_total = 10;
    operation->End(sleep_status, /*memory_bytes=*/20);
    return operation;
  }

  // Checks as the supervisor does.
  absl::Status CheckMayChange(const std::string& name,
                              const access::Caller& caller) {
    const absl::StatusOr<supervisor::JobSummary> job = FindJob(name);
    if (!job.ok()) return job.status();
    return supervisor::CheckMayChangeJob(name, job->uid, job->access, caller);
  }

  mutable absl::Mutex mutex;
  std::function<void()> before_find;  // happens before a job is looked up, once
  absl::Status sleep_status;
  absl::Status delete_status;
  bool deletion_goes_on = false;  // for ever
  std::map<std::string, supervisor::JobSummary> jobs;
  std::vector<std::string> calls;
  std::atomic<bool> is_draining = false;
};

// Records which build it was asked for.
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

// An Admin service between a fake supervisor and fake engines.
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
    auto tier = storage::HostTier::Create(directory, *layout, Accumulation(),
                                          description.SerializeAsString());
    ASSERT_TRUE(tier.ok()) << tier.status();
    storage::StepRecord record = storage::CurrentRecord(*tier->control());
    record.committed_step = 56;
    storage::PublishRecord(record, tier->control());
  }

  FakeEngineService& AddJob(const std::string& name, uint32_t sessions,
                            bool hangs = false, bool dies = false) {
    supervisor::JobSummary& job = control_.jobs[name];
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

  // A caller who sees all jobs.
  static access::Caller Operator() { return access::UnixCaller(::geteuid()); }
  static absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

  ServerInfo info_;
  FakeControl control_;
  FakeUpgrade upgrade_;
  std::map<std::string, std::unique_ptr<FakeEngineService>> fakes_;
  EngineChannels engines_;
  std::unique_ptr<AdminService> service_;
  std::vector<std::string> directories_;
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ADMIN_SERVICE_FIXTURE_H_
