#include "server/supervisor/core_shares.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/config/job_weight.h"
#include "server/os/priority.h"

namespace optstate::supervisor {
namespace {

std::string GroupOf(const std::string& job) {
  return absl::StrCat("optstate-", job);
}

}  // namespace

CoreShares CoreShares::Find(const v1::EngineSettings& settings,
                            const std::string& root) {
  CoreShares shares(settings);
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
  const int best = config::NiceSteps(config::LargestWeight(settings_));
  description_ = "nice values";
  if (best >= 0 || os::MayRaisePriority()) return;
  // The ratios are kept: the heaviest job gets the daemon's own value, the
  // others less time.
  nice_of_100_ -= best;
  absl::StrAppend(&description_,
                  ", all of them lowered, for none may be raised");
}

int CoreShares::NiceOf(const std::string& job) const {
  return std::clamp(
      nice_of_100_ + config::NiceSteps(config::WeightOf(settings_, job)),
      os::kNiceMin, os::kNiceMax);
}

absl::Status CoreShares::Apply(const std::string& job, pid_t pid) const {
  if (!group_.has_value()) return os::SetNice(pid, NiceOf(job));
  return group_->Put(GroupOf(job), config::WeightOf(settings_, job), pid);
}

void CoreShares::Forget(const std::string& job) const {
  if (group_.has_value()) group_->Remove(GroupOf(job));
}

}  // namespace optstate::supervisor
