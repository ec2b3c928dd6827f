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

absl::Status AddUser(uid_t uid, const v1::Use& use, access::Quotas* quotas,
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
  return absl::OkStatus();
}

// Returns the groups that the report is about.
absl::StatusOr<std::vector<access::GroupQuota>> GroupsAsked(
    access::Quotas* quotas, const UsersAsked& asked) {
  return asked.user.has_value() ? quotas->GroupsOf(*asked.user)
                                : quotas->OfGroups();
}

// Adds the groups; returns the users whose jobs they count.
absl::StatusOr<std::set<uid_t>> AddGroups(const Uses& uses,
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
  } else {
    for (const auto& [uid, use] : uses) shown.insert(uid);
    OPTSTATE_ASSIGN_OR_RETURN(const auto of_users, quotas->OfUsers());
    for (const auto& [uid, quota] : of_users) shown.insert(uid);
  }
  for (const uid_t uid : shown) {
    OPTSTATE_RETURN_IF_ERROR(AddUser(uid, uses[uid], quotas, &reply));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const std::set<uid_t> members,
                            AddGroups(uses, quotas, asked, &reply));
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
