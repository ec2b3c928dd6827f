// The part of the supervisor that counts jobs and sessions.

#include <set>
#include <string>

#include "absl/time/clock.h"
#include "server/os/open_sockets.h"
#include "server/supervisor/supervisor.h"

namespace optstate::supervisor {

absl::Status Supervisor::CheckRoomForJob(
    const accept::PeerCredentials& peer) const {
  Counts jobs;
  jobs.all = hosts_.size() + sleeping_.Names().size();
  jobs.of_user = sleeping_.CountOf(peer.caller.uid);
  for (const auto& [name, host] : hosts_) {
    if (host->uid() == peer.caller.uid) ++jobs.of_user;
  }
  return CheckJobCount(limits(), peer, jobs);
}

absl::Status Supervisor::CheckRoomForSession(
    const accept::PeerCredentials& peer, uid_t owner) {
  const auto check = [&] {
    return CheckSessionCount(limits(), peer, CountSessions(owner));
  };
  absl::Status status = check();
  if (status.ok()) return status;
  // A user who has caused too many looks is refused by the counts as they are.
  const std::string who = peer.quota_name();
  if (!peer.is_operator() && !looks_.MayLook(who)) return status;
  const absl::Time begin = absl::Now();
  LookForEndedSessions();
  if (!peer.is_operator()) looks_.Charge(who, absl::Now() - begin);
  return check();
}

Counts Supervisor::CountSessions(uid_t owner) const {
  Counts sessions;
  sessions.all = sessions_.count();
  for (const auto& [name, host] : hosts_) {
    sessions.all += host->waiting_count();
    if (host->uid() != owner) continue;
    sessions.of_user += sessions_.count(name) + host->waiting_count();
  }
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
