#include "server/supervisor/sleep/sleeping_jobs.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/supervisor/sleep/record_sync.h"
#include "server/supervisor/sleep/sleep_manifest.h"
#include "server/supervisor/sleep/wake_admission.h"

namespace optstate::supervisor {

SleepingJobs::SleepingJobs(os::EventLoop* loop, v1::DaemonConfig config,
                           StartEngine start)
    : loop_(loop), config_(std::move(config)), start_(std::move(start)) {}

SleepingJobs::~SleepingJobs() {
  Cancel();
  for (auto& [name, job] : jobs_) {
    if (job.thread.joinable()) job.thread.join();
    if (job.operation == nullptr) continue;
    job.operation->End(absl::AbortedError("the daemon ends"));
  }
}

void SleepingJobs::Cancel() {
  for (auto& [name, job] : jobs_) {
    if (job.operation != nullptr) job.operation->control().cancelled = true;
  }
}

void SleepingJobs::Note(const v1::SleepManifest& manifest, Job* job) {
  job->disk_bytes = DiskBytes(manifest);
  job->memory_bytes = MemoryBytes(manifest);
  job->slept_at_s = manifest.slept_at().seconds();
}

void SleepingJobs::Add(SleepPlace place) {
  const std::string name = place.job;
  Job& job = jobs_[name];
  job.place = std::move(place);
  const auto manifest = ReadManifest(job.place.folder);
  if (manifest.ok()) {
    Note(*manifest, &job);
    spdlog::info("job {}: asleep in {}", name, job.place.folder);
  } else {
    spdlog::error("job {}: asleep, and cannot be woken: {}", name,
                  manifest.status().ToString());
  }
}

bool SleepingJobs::Has(const std::string& job) const {
  const auto found = jobs_.find(job);
  return found != jobs_.end() && found->second.state != State::kStopping &&
         found->second.state != State::kStarting;
}

bool SleepingJobs::IsBusy(const std::string& job) const {
  const auto found = jobs_.find(job);
  return found != jobs_.end() && found->second.state != State::kAsleep;
}

bool SleepingJobs::IsStopping(const std::string& job) const {
  const auto found = jobs_.find(job);
  return found != jobs_.end() && found->second.state == State::kStopping;
}

std::vector<std::string> SleepingJobs::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, job] : jobs_) {
    if (Has(name)) names.push_back(name);
  }
  return names;
}

absl::Status SleepingJobs::CheckIdle(const std::string& job) const {
  if (!IsBusy(job)) return absl::OkStatus();
  return absl::UnavailableError(jobs_.at(job).operation->Describe(job));
}

absl::Status SleepingJobs::RefuseRank(const std::string& name) const {
  const Job& job = jobs_.at(name);
  if (job.state == State::kAsleep) return WhyNoEngine(name);
  return absl::UnavailableError(absl::StrCat(
      job.operation->Describe(name),
      job.state == State::kWaking
          ? "; start the rank again when `optctl get jobs` shows it awake"
          : absl::StrCat("; when it is asleep, `optctl wake ", name,
                         "` wakes it")));
}

absl::Status SleepingJobs::WhyNoEngine(const std::string& name) const {
  const Job& job = jobs_.at(name);
  if (job.state != State::kAsleep) {
    return absl::FailedPreconditionError(job.operation->Describe(name));
  }
  const std::string since =
      job.slept_at_s == 0
          ? ""
          : absl::StrCat(" since ",
                         absl::FormatTime("%Y-%m-%d %H:%M:%SZ",
                                          absl::FromUnixSeconds(job.slept_at_s),
                                          absl::UTCTimeZone()));
  return absl::FailedPreconditionError(
      absl::StrCat("job \"", name, "\" is asleep", since, ", in ",
                   job.place.folder, ": `optctl wake ", name, "` wakes it"));
}

std::optional<v1::SleepState> SleepingJobs::StateOf(
    const std::string& name) const {
  const auto found = jobs_.find(name);
  if (found == jobs_.end()) return std::nullopt;
  const Job& job = found->second;
  v1::SleepState state;
  if (job.state == State::kAsleep || job.state == State::kWaking) {
    state.set_directory(job.place.folder);
    state.set_disk_bytes(job.disk_bytes);
    state.set_memory_bytes(job.memory_bytes);
    if (job.slept_at_s != 0) {
      state.mutable_since()->set_seconds(job.slept_at_s);
    }
  }
  if (job.state != State::kAsleep) {
    state.set_progress(job.operation->Describe(name));
  }
  return state;
}

std::shared_ptr<SleepOperation> SleepingJobs::Begin(SleepPlace place) {
  const std::string name = place.job;
  Job& job = jobs_[name];
  job.state = State::kStopping;
  job.operation = std::make_shared<SleepOperation>(SleepOperation::Kind::kSleep,
                                                   place.folder);
  job.place = std::move(place);
  job.began_at = absl::Now();
  spdlog::info("job {}: being put to sleep in {}", name, job.place.folder);
  return job.operation;
}

void SleepingJobs::GiveUp(const std::string& job, const absl::Status& why) {
  const Job given_up = std::move(jobs_.extract(job).mapped());
  EventsOf(given_up).NotPutToSleep(why, given_up.operation->control().bytes,
                                   absl::Now() - given_up.began_at);
  given_up.operation->End(why);
}

template <typename Result>
void SleepingJobs::Run(
    Job* job, std::function<Result(const SleepPlace&, CopyControl*)> work,
    void (SleepingJobs::*finish)(Job*, const Result&)) {
  job->thread = std::thread(
      [this, job, operation = job->operation, work = std::move(work), finish] {
        const Result result = work(job->place, &operation->control());
        // Jobs that are on their way stay where they are in the map.
        loop_->Post([this, job, finish, result] {
          job->thread.join();
          (this->*finish)(job, result);
        });
      });
}

void SleepingJobs::CopyAway(const std::string& name) {
  Job& job = jobs_.at(name);
  job.state = State::kCopying;
  Run<absl::StatusOr<v1::SleepManifest>>(
      &job,
      [this](const SleepPlace& place, CopyControl* control) {
        auto slept = PutToSleep(
            place,
            [this, &place] {
              return SyncRecords(config_.nvme(), place.job, place.folder);
            },
            control);
        if (!slept.ok() && !IsAsleep(place)) {
          ForgetSleep(config_.nvme(), place.job);
        }
        return slept;
      },
      &SleepingJobs::FinishSleep);
}

void SleepingJobs::FinishSleep(Job* job,
                               const absl::StatusOr<v1::SleepManifest>& slept) {
  const std::string name = job->place.job;
  const std::shared_ptr<SleepOperation> operation =
      std::exchange(job->operation, nullptr);
  const JobEvents events = EventsOf(*job);
  const absl::Duration took = absl::Now() - job->began_at;
  if (!slept.ok() && !IsAsleep(job->place)) {
    events.NotPutToSleep(slept.status(), operation->control().bytes, took);
    jobs_.erase(name);
    start_(name);
    return operation->End(slept.status());
  }
  job->state = State::kAsleep;
  if (slept.ok()) {
    Note(*slept, job);
  } else {
    spdlog::error("job {}: {}", name, slept.status().ToString());
    const auto manifest = ReadManifest(job->place.folder);
    if (manifest.ok()) Note(*manifest, job);
  }
  events.Asleep(job->place.folder, job->disk_bytes, job->memory_bytes, took);
  operation->End(slept.status(), job->memory_bytes);
}

absl::StatusOr<std::shared_ptr<SleepOperation>> SleepingJobs::Wake(
    const std::string& name) {
  const auto found = jobs_.find(name);
  if (found == jobs_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job \"", name, "\" is not asleep"));
  }
  const absl::Status idle = CheckIdle(name);
  if (!idle.ok()) return idle;
  Job& job = found->second;
  job.state = State::kWaking;
  job.operation = std::make_shared<SleepOperation>(SleepOperation::Kind::kWake,
                                                   job.place.folder);
  job.began_at = absl::Now();
  spdlog::info("job {}: being woken from {}", name, job.place.folder);
  Run<absl::Status>(
      &job,
      [this](const SleepPlace& place, CopyControl* control) {
        const absl::Status woken = supervisor::Wake(
            place,
            [this, &place](const v1::SleepManifest& manifest,
                           absl::FunctionRef<absl::Status()> reserve) {
              return AdmitToWake(config_, place, manifest, reserve);
            },
            control);
        if (woken.ok()) ForgetSleep(config_.nvme(), place.job);
        return woken;
      },
      &SleepingJobs::FinishWake);
  return job.operation;
}

void SleepingJobs::FinishWake(Job* job, const absl::Status& woken) {
  const std::string name = job->place.job;
  if (!woken.ok() && IsAsleep(job->place)) {
    EventsOf(*job).NotWoken(woken, job->operation->control().bytes,
                            absl::Now() - job->began_at);
    job->state = State::kAsleep;
    return std::exchange(job->operation, nullptr)->End(woken);
  }
  job->state = State::kStarting;
  start_(name);
}

void SleepingJobs::OnEngine(const std::string& name,
                            const absl::Status& status) {
  const auto found = jobs_.find(name);
  if (found == jobs_.end() || found->second.state != State::kStarting) return;
  const Job job = std::move(jobs_.extract(found).mapped());
  const std::string old = OldFolder(job.place.folder);
  const absl::Duration took = absl::Now() - job.began_at;
  if (!status.ok()) {
    // The memory is the job, and the copy may still help an operator.
    EventsOf(job).NotWoken(
        absl::Status(status.code(),
                     absl::StrCat("its files are back in memory, and it has no "
                                  "engine; ",
                                  old,
                                  " is kept until the next start of the "
                                  "daemon: ",
                                  status.message())),
        job.operation->control().bytes, took);
    return job.operation->End(status);
  }
  remover_.Remove(old, [old](const absl::Status& removed) {
    if (!removed.ok()) spdlog::warn("{}: {}", old, removed.ToString());
  });
  EventsOf(job).Awake(job.disk_bytes, job.memory_bytes, took);
  job.operation->End(absl::OkStatus(), job.memory_bytes);
}

std::vector<SleepingJobs::UnderWay> SleepingJobs::AllUnderWay() const {
  std::vector<UnderWay> all;
  for (const auto& [name, job] : jobs_) {
    if (job.operation == nullptr) continue;
    UnderWay& one = all.emplace_back();
    one.set_job(name);
    one.set_is_wake(job.operation->kind() == SleepOperation::Kind::kWake);
    one.set_began_at_ns(absl::ToUnixNanos(job.began_at));
    one.set_bytes(job.operation->progress().bytes());
    one.set_disk_bytes(job.disk_bytes);
    one.set_memory_bytes(job.memory_bytes);
  }
  return all;
}

void SleepingJobs::NoteInterrupted(const UnderWay& interrupted,
                                   uid_t owner) const {
  const JobEvents events(interrupted.job(), owner);
  const absl::Duration took =
      absl::Now() - absl::FromUnixNanos(interrupted.began_at_ns());
  const absl::Status why = absl::AbortedError(
      "an upgrade of the daemon has ended it: ask for it again");
  const auto found = jobs_.find(interrupted.job());
  if (found == jobs_.end()) {
    if (interrupted.is_wake()) {
      return events.Awake(interrupted.disk_bytes(), interrupted.memory_bytes(),
                          took);
    }
    return events.NotPutToSleep(why, interrupted.bytes(), took);
  }
  if (interrupted.is_wake()) {
    return events.NotWoken(why, interrupted.bytes(), took);
  }
  const Job& job = found->second;
  events.Asleep(job.place.folder, job.disk_bytes, job.memory_bytes, took);
}

}  // namespace optstate::supervisor
