// The part of the supervisor that counts jobs and sessions.

#include <map>
#include <set>
#include <string>

#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/os/open_sockets.h"
#include "server/supervisor/supervisor.h"

namespace optstate::supervisor {

absl::StatusOr<access::UserBounds> Supervisor::BoundsOf(
    const accept::PeerCredentials& peer, uid_t owner) {
  if (HasNoQuota(peer)) return access::UserBounds();  // nothing to look up
  return quotas_.BoundsOf(owner);
}

absl::Status Supervisor::CheckRoomForJob(const accept::PeerCredentials& peer) {
  std::map<uid_t, uint64_t> by_owner;
  for (const auto& [name, host] : hosts_) ++by_owner[host->uid()];
  for (const std::string& name : sleeping_.Names()) {
    ++by_owner[sleeping_.uid(name)];
  }
  Counts jobs;
  jobs.all = hosts_.size() + sleeping_.Names().size();
  jobs.of_user = by_owner[peer.caller.uid];
  OPTSTATE_ASSIGN_OR_RETURN(const access::UserBounds bounds,
                            BoundsOf(peer, peer.caller.uid));
  OPTSTATE_ASSIGN_OR_RETURN(jobs.of_groups,
                            quotas_.SumOverMembers(bounds.groups, by_owner));
  return CheckJobCount(limits(), peer, jobs, bounds);
}

absl::Status Supervisor::CheckRoomForSession(
    const accept::PeerCredentials& peer, uid_t owner) {
  OPTSTATE_ASSIGN_OR_RETURN(const access::UserBounds bounds,
                            BoundsOf(peer, owner));
  const auto check = [&]() -> absl::Status {
    OPTSTATE_ASSIGN_OR_RETURN(const Counts sessions,
                              CountSessions(owner, bounds));
    return CheckSessionCount(limits(), peer, sessions, bounds);
  };
  absl::Status status = check();
  if (!absl::IsResourceExhausted(status)) return status;
  // A user who has caused too many looks is refused by the counts as they are.
  const std::string who = peer.quota_name();
  if (!peer.is_operator() && !looks_.MayLook(who)) return status;
  const absl::Time begin = absl::Now();
  LookForEndedSessions();
  if (!peer.is_operator()) looks_.Charge(who, absl::Now() - begin);
  return check();
}

absl::StatusOr<Counts> Supervisor::CountSessions(
    uid_t owner, const access::UserBounds& bounds) {
  Counts sessions;
  sessions.all = sessions_.count();
  std::map<uid_t, uint64_t> by_owner;
  for (const auto& [name, host] : hosts_) {
    sessions.all += host->waiting_count();
    by_owner[host->uid()] += sessions_.count(name) + host->waiting_count();
  }
  sessions.of_user = by_owner[owner];
  OPTSTATE_ASSIGN_OR_RETURN(sessions.of_groups,
                            quotas_.SumOverMembers(bounds.groups, by_owner));
  return sessions;
}

void Supervisor::LookForEndedSessions() {
  for (const auto& [name, host] : hosts_) {
    host->DropEnded();
    if (host->engine_pid() == 0) continue;
    absl::StatusOr<std::set<ino_t>> open = os::OpenSockets(host->engine_pid());
    // When unreadable, the old count is the safe side.
    if (!open.ok()) continue;
    for (const UniqueFd& fd : host->unread()) {
      const absl::StatusOr<ino_t> inode = os::SocketInode(fd.get());
      if (inode.ok()) open->insert(*inode);
    }
    sessions_.Retain(name, *open);
  }
}

}  // namespace optstate::supervisor
