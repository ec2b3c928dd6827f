#include "server/supervisor/job_audience.h"

#include "server/supervisor/permissions.h"

namespace optstate::supervisor {
namespace {

bool AreEqual(const v1::JobAccess& a, const v1::JobAccess& b) {
  return a.SerializeAsString() == b.SerializeAsString();
}

// The number that no user has.
constexpr uid_t kNoUser = ~uid_t{0};

// The access that lets nobody but the owner and operators look.
v1::JobAccess OwnerAlone() {
  v1::JobAccess access;
  access.set_is_private(true);
  return access;
}

}  // namespace

void JobAudience::Begin(const std::string& job, uid_t owner,
                        const v1::JobAccess& access, uint64_t after_sequence) {
  const absl::MutexLock lock(&mutex_);
  jobs_[job] = {
      .owner = owner, .access = access, .after_sequence = after_sequence};
}

void JobAudience::Change(const std::string& job, const v1::JobAccess& access) {
  const absl::MutexLock lock(&mutex_);
  const auto found = jobs_.find(job);
  if (found != jobs_.end()) found->second.access = access;
}

void JobAudience::End(const std::string& job) {
  const absl::MutexLock lock(&mutex_);
  const auto node = jobs_.extract(job);
  if (node.empty()) return;
  const Job& ended = node.mapped();
  const Ended key = {job, ended.owner};
  const auto [place, is_first] = ended_.try_emplace(key, ended.access);
  if (!is_first) {
    if (!AreEqual(place->second, ended.access)) place->second = OwnerAlone();
    return;
  }
  ended_in_order_.push_back(key);
  if (ended_in_order_.size() <= kEndedMax) return;
  ended_.erase(ended_in_order_.front());
  ended_in_order_.pop_front();
}

JobAudience::Job JobAudience::Find(const v1::Event& event) const {
  const absl::MutexLock lock(&mutex_);
  const auto job = jobs_.find(event.job());
  if (job != jobs_.end() && event.sequence() > job->second.after_sequence &&
      (!event.has_owner_uid() || event.owner_uid() == job->second.owner)) {
    return job->second;
  }
  Job found = {.owner = kNoUser, .access = OwnerAlone(), .after_sequence = 0};
  if (!event.has_owner_uid()) return found;
  found.owner = event.owner_uid();
  const auto ended = ended_.find({event.job(), found.owner});
  if (ended != ended_.end()) found.access = ended->second;
  return found;
}

bool JobAudience::MaySee(const v1::Event& event,
                         const access::Caller& caller) const {
  if (caller.role < access::Role::kViewer) return false;
  if (event.job().empty() || caller.role == access::Role::kOperator ||
      event.actor() == caller.name()) {
    return true;
  }
  const Job job = Find(event);
  return MayLook(job.owner, job.access, caller);
}

bool JobAudience::IsPublic(const v1::Event& event) const {
  return event.job().empty() || !Find(event).access.is_private();
}

}  // namespace optstate::supervisor
