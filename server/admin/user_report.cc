#include "server/admin/user_report.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/access/unix_names.h"
#include "server/session/tiers/quota_rooms.h"
#include "server/session/user_bytes.h"

namespace optstate::admin {
namespace {

using Uses = std::map<uid_t, v1::Use>;

// Returns what the jobs of each owner take.
Uses UsesByOwner(const v1::DaemonConfig& config,
                 const v1::ListJobsReply& jobs) {
  Uses uses;
  for (const v1::Job& job : jobs.jobs()) {
    v1::Use& use = uses[job.uid()];
    use.set_jobs(use.jobs() + 1);
    if (!job.sleep().directory().empty()) {
      use.set_sleeping_jobs(use.sleeping_jobs() + 1);
    }
    use.set_sessions(use.sessions() + job.session_count());
  }
  const std::string& state_dir = config.state_dir();
  for (const auto& [owner, bytes] : session::StateBytesByOwner(state_dir)) {
    uses[owner].set_state_bytes(bytes);
  }
  for (const auto& [owner, bytes] : session::FramesByOwner(state_dir)) {
    uses[owner].set_frames_bytes(bytes);
  }
  for (const auto& [owner, bytes] :
       session::DiskBytesByOwner(state_dir, config.nvme())) {
    uses[owner].set_disk_bytes(bytes);
  }
  return uses;
}

void Add(const v1::Use& one, v1::Use* sum) {
  sum->set_jobs(sum->jobs() + one.jobs());
  sum->set_sleeping_jobs(sum->sleeping_jobs() + one.sleeping_jobs());
  sum->set_sessions(sum->sessions() + one.sessions());
  sum->set_state_bytes(sum->state_bytes() + one.state_bytes());
  sum->set_frames_bytes(sum->frames_bytes() + one.frames_bytes());
  sum->set_disk_bytes(sum->disk_bytes() + one.disk_bytes());
}

// Returns the entry of the configuration that a quota is a copy of, e.g.
// "quotas[1]."; each user and each group has one at most.
std::string EntryOf(const v1::DaemonConfig& config, const v1::Quota& quota) {
  for (int i = 0; i < config.quotas_size(); ++i) {
    const v1::Quota& entry = config.quotas(i);
    if (entry.user() == quota.user() && entry.group() == quota.group()) {
      return absl::StrCat("quotas[", i, "].");
    }
  }
  return "quotas.";
}

// Returns the keys of the limits that an entry of the configuration names.
v1::QuotaKeys KeysOf(const v1::DaemonConfig& config, const v1::Quota& quota) {
  const std::string entry = EntryOf(config, quota);
  const auto key = [&entry](bool is_named, absl::string_view field) {
    return is_named ? absl::StrCat(entry, field) : "";
  };
  v1::QuotaKeys keys;
  keys.set_jobs_max(key(quota.jobs_max() != 0, "jobs_max"));
  keys.set_sessions_max(key(quota.sessions_max() != 0, "sessions_max"));
  keys.set_state_bytes_max(
      key(quota.state_bytes_max() != 0, "state_bytes_max"));
  keys.set_frames_bytes_max(
      key(quota.frames_bytes_max() != 0, "frames_bytes_max"));
  keys.set_disk_bytes_max(key(quota.disk_bytes_max() != 0, "disk_bytes_max"));
  keys.set_weight(key(quota.weight() != 0, "weight"));
  return keys;
}

// Returns the keys of what is in force for a user: its own quota's, and where
// that says nothing those of the limits of all users (see Quotas::BoundsOf).
v1::QuotaKeys KeysOf(const v1::DaemonConfig& config,
                     const access::UserBounds& bounds) {
  const v1::Limits& limits = config.limits();
  const v1::Quota& in_force = bounds.in_force;
  v1::QuotaKeys keys = KeysOf(config, bounds.own);
  if (in_force.jobs_max() != 0 && keys.jobs_max().empty()) {
    keys.set_jobs_max(limits.user_jobs_max() != 0 ? "limits.user_jobs_max"
                                                  : "half of limits.jobs_max");
  }
  if (in_force.sessions_max() != 0 && keys.sessions_max().empty()) {
    keys.set_sessions_max(limits.user_sessions_max() != 0
                              ? "limits.user_sessions_max"
                              : "half of limits.sessions_max");
  }
  if (in_force.state_bytes_max() != 0 && keys.state_bytes_max().empty()) {
    keys.set_state_bytes_max("limits.user_state_bytes_max");
  }
  if (keys.weight().empty()) {
    const access::GroupQuota* const heaviest = access::Heaviest(bounds.groups);
    if (heaviest != nullptr) {
      keys.set_weight(KeysOf(config, heaviest->quota).weight());
    }
  }
  return keys;
}

// Divides by weights between the users whose engines run.
class Division {
 public:
  Division(const v1::ListJobsReply& jobs, access::Quotas* quotas)
      : quotas_(*quotas) {
    for (const v1::Job& job : jobs.jobs()) {
      if (job.engine_pid() == 0 || !users_.insert(job.uid()).second) continue;
      weights_ += quotas_.WeightOf(job.uid());
    }
  }

  // Returns the user's part, from 0 to 1; of one without an engine that which
  // it would have with one.
  double PartOf(uid_t uid) const {
    const double weight = quotas_.WeightOf(uid);
    return weight / (users_.contains(uid) ? weights_ : weights_ + weight);
  }

 private:
  access::Quotas& quotas_;
  std::set<uid_t> users_;
  double weights_ = 0;  // of all of them
};

absl::Status AddUser(const v1::DaemonConfig& config, uid_t uid,
                     const v1::Use& use, access::Quotas* quotas,
                     v1::ListUsersReply* reply) {
  OPTSTATE_ASSIGN_OR_RETURN(const access::UserBounds bounds,
                            quotas->BoundsOf(uid));
  v1::UserUse& user = *reply->add_users();
  user.set_uid(uid);
  user.set_user(access::NameOfUser(uid));
  *user.mutable_use() = use;
  *user.mutable_quota() = bounds.in_force;
  user.mutable_quota()->set_weight(quotas->WeightOf(uid));
  user.set_is_operator(access::IsOperator(uid));
  *user.mutable_keys() = KeysOf(config, bounds);
  return absl::OkStatus();
}

// Returns the groups that the report is about.
absl::StatusOr<std::vector<access::GroupQuota>> GroupsAsked(
    access::Quotas* quotas, const UsersAsked& asked) {
  if (asked.user.has_value()) return quotas->GroupsOf(*asked.user);
  OPTSTATE_ASSIGN_OR_RETURN(std::vector<access::GroupQuota> groups,
                            quotas->OfGroups());
  if (!asked.group.has_value()) return groups;
  std::erase_if(groups, [&asked](const access::GroupQuota& each) {
    return each.gid != *asked.group;
  });
  if (!groups.empty()) return groups;
  return absl::NotFoundError(absl::StrCat(
      "the group with number ", *asked.group,
      " has no quota: the daemon's configuration has none in `quotas`, and its "
      "members are bounded one by one"));
}

// Adds the groups; returns the users whose jobs they count.
absl::StatusOr<std::set<uid_t>> AddGroups(const v1::DaemonConfig& config,
                                          const Uses& uses,
                                          access::Quotas* quotas,
                                          const UsersAsked& asked,
                                          v1::ListUsersReply* reply) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::vector<access::GroupQuota> groups,
                            GroupsAsked(quotas, asked));
  std::set<uid_t> members;
  if (groups.empty()) return members;
  std::map<gid_t, v1::Use> sums;
  for (const auto& [uid, use] : uses) {
    OPTSTATE_ASSIGN_OR_RETURN(const std::vector<access::GroupQuota> of_user,
                              quotas->GroupsOf(uid));
    for (const access::GroupQuota& group : of_user) {
      Add(use, &sums[group.gid]);
      if (absl::c_any_of(groups, [&group](const access::GroupQuota& shown) {
            return shown.gid == group.gid;
          })) {
        members.insert(uid);
      }
    }
  }
  for (const access::GroupQuota& group : groups) {
    v1::GroupUse& shown = *reply->add_groups();
    shown.set_group(group.quota.group());
    *shown.mutable_use() = sums[group.gid];
    *shown.mutable_quota() = group.quota;
    *shown.mutable_keys() = KeysOf(config, group.quota);
  }
  return members;
}

}  // namespace

absl::StatusOr<v1::ListUsersReply> DescribeUsers(const v1::DaemonConfig& config,
                                                 access::Quotas* quotas,
                                                 const v1::ListJobsReply& jobs,
                                                 const UsersAsked& asked) {
  Uses uses = UsesByOwner(config, jobs);
  v1::ListUsersReply reply;
  std::set<uid_t> shown;
  if (asked.user.has_value()) {
    shown.insert(*asked.user);
  } else if (!asked.group.has_value()) {
    for (const auto& [uid, use] : uses) shown.insert(uid);
    OPTSTATE_ASSIGN_OR_RETURN(const auto of_users, quotas->OfUsers());
    for (const auto& [uid, quota] : of_users) shown.insert(uid);
  }
  const Division division(jobs, quotas);
  for (const uid_t uid : shown) {
    OPTSTATE_RETURN_IF_ERROR(AddUser(config, uid, uses[uid], quotas, &reply));
    reply.mutable_users()->rbegin()->set_part(division.PartOf(uid));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::set<uid_t> members,
                            AddGroups(config, uses, quotas, asked, &reply));
  for (const v1::Job& job : jobs.jobs()) {
    if (!job.ranks_unknown()) continue;
    const bool is_theirs = shown.contains(job.uid());
    if (!is_theirs && !members.contains(job.uid())) continue;
    v1::UnansweredJob& unanswered = *reply.add_unanswered();
    if (is_theirs || asked.shows_all_names) {
      unanswered.set_name(job.name());
      unanswered.set_reason(job.reason());
    } else {
      // Another member of a group may keep its job to itself.
      unanswered.set_name(absl::StrCat("a job of uid ", job.uid()));
      unanswered.set_reason("its engine gives no answer");
    }
  }
  return reply;
}

}  // namespace optstate::admin
