#include "server/supervisor/core_shares.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/config/job_weight.h"
#include "server/os/priority.h"
#include "server/supervisor/share_division.h"

namespace optstate::supervisor {
namespace {

constexpr double kPlainWeight = 100;

std::string GroupOf(const std::string& job) {
  return absl::StrCat("optstate-", job);
}

// A name that no job's group can have.
std::string GroupOfUser(uid_t user) {
  return absl::StrCat("optstate.user-", user);
}

}  // namespace

CoreShares::CoreShares(const v1::EngineSettings& settings, UserWeights users)
    : settings_(settings), users_(std::move(users)) {}

CoreShares CoreShares::Find(const v1::EngineSettings& settings,
                            UserWeights users, const std::string& root) {
  CoreShares shares(settings, std::move(users));
  absl::StatusOr<os::CpuGroup> group = os::CpuGroup::Find(root);
  if (group.ok()) {
    shares.description_ =
        absl::StrCat("cgroup v2 cpu.weight below ", group->path());
    shares.group_ = *std::move(group);
  } else {
    shares.UseNice();
    absl::StrAppend(&shares.description_,
                    "; not by cgroups: ", group.status().message());
  }
  return shares;
}

void CoreShares::UseNice() {
  nice_of_100_ = os::OwnNice();
  description_ = "nice values";
  may_raise_ = os::MayRaisePriority();
  if (may_raise_) return;
  absl::StrAppend(&description_,
                  ", none of which may be raised again: a user's jobs do not "
                  "divide the user's part");
  const int best = config::NiceSteps(config::LargestWeight(settings_) *
                                     (users_.largest / kPlainWeight));
  if (best >= 0) return;
  // The ratios are kept: the heaviest job gets the daemon's own value, the
  // others less time.
  nice_of_100_ -= best;
  absl::StrAppend(&description_,
                  ", all of them lowered, for none may be raised");
}

uint32_t CoreShares::WeightOf(uid_t user) const {
  if (users_.of == nullptr) return static_cast<uint32_t>(kPlainWeight);
  return users_.of(user);
}

int CoreShares::NiceOfWeight(double weight) const {
  return std::clamp(nice_of_100_ + config::NiceSteps(weight), os::kNiceMin,
                    os::kNiceMax);
}

std::map<std::string, int> CoreShares::NiceValues() const {
  std::map<std::string, WeighedJob> jobs;
  for (const auto& [job, engine] : engines_) {
    jobs[job] = {engine.owner, config::WeightOf(settings_, job)};
  }
  std::map<std::string, int> values;
  if (!may_raise_) {
    for (const auto& [job, weighed] : jobs) {
      values[job] = NiceOfWeight(weighed.weight *
                                 (WeightOf(weighed.owner) / kPlainWeight));
    }
    return values;
  }
  const auto divided =
      DivideByOwners(jobs, [this](uid_t user) { return WeightOf(user); });
  for (const auto& [job, weight] : divided) values[job] = NiceOfWeight(weight);
  return values;
}

int CoreShares::NiceOf(const std::string& job, uid_t owner) const {
  const std::map<std::string, int> values = NiceValues();
  const auto found = values.find(job);
  if (found != values.end()) return found->second;
  const double weight = config::WeightOf(settings_, job);
  return NiceOfWeight(may_raise_ ? weight
                                 : weight * (WeightOf(owner) / kPlainWeight));
}

absl::Status CoreShares::Renice() {
  absl::Status status;
  for (const auto& [job, nice] : NiceValues()) {
    Engine& engine = engines_.at(job);
    if (engine.nice == nice) continue;
    const absl::Status set = os::SetNice(engine.pid, nice);
    // An engine that has just ended needs none.
    if (set.ok() || (absl::IsNotFound(set) && engine.nice.has_value())) {
      engine.nice = nice;
    } else {
      status.Update(Annotate(set, absl::StrCat("job \"", job, "\"")));
    }
  }
  return status;
}

absl::Status CoreShares::Apply(const std::string& job, uid_t owner, pid_t pid) {
  engines_[job] = {.owner = owner, .pid = pid};
  if (!group_.has_value()) return Renice();
  const absl::Status put =
      group_->Put({GroupOfUser(owner), WeightOf(owner)},
                  {GroupOf(job), config::WeightOf(settings_, job)}, pid);
  // An engine of a former daemon has left the group that it had beside those of
  // users.
  if (put.ok()) group_->Remove(GroupOf(job));
  return put;
}

absl::Status CoreShares::Forget(const std::string& job) {
  const auto engine = engines_.extract(job);
  if (!group_.has_value()) {
    return engine.empty() ? absl::OkStatus() : Renice();
  }
  group_->Remove(GroupOf(job));
  if (engine.empty()) return absl::OkStatus();
  const std::string user = GroupOfUser(engine.mapped().owner);
  group_->Remove(absl::StrCat(user, "/", GroupOf(job)));
  // The group of a user with other engines stays.
  group_->Remove(user);
  return absl::OkStatus();
}

}  // namespace optstate::supervisor
