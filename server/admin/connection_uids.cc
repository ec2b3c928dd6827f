#include "server/admin/connection_uids.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/types/os_error.h"

namespace optstate::admin {
namespace {

// Returns the inode of an fd; 0: not open.
ino_t Inode(int fd) {
  struct stat info;
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

int ConnectionUids::FirstNumber() {
  constexpr rlim_t kMost = 512;
  rlimit limit;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMost;
  return static_cast<int>(std::min(kMost, limit.rlim_cur / 2));
}

template <typename Counts>
size_t ConnectionUids::CountOpenIf(const Counts& counts) const {
  size_t count = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.used || !counts(slot.caller)) continue;
    // gRPC does not report when it closes a connection: the number is free
    // then, or has another file.
    if (slot.inode == Inode(first_ + static_cast<int>(i))) ++count;
  }
  return count;
}

absl::Status ConnectionUids::CheckRoom(const Caller& caller) const {
  absl::MutexLock lock(&mutex_);
  const size_t own =
      CountOpenIf([&](const Caller& each) { return each == caller; });
  if (own >= connections_of_user_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        caller.via == access::Via::kInsecureTcp ? "TCP" : caller.name(),
        " already has ", own,
        " gRPC connections to this daemon (limits.user_grpc_connections_max): "
        "close some"));
  }
  if (caller.is_operator()) return absl::OkStatus();
  const size_t strangers =
      CountOpenIf([](const Caller& each) { return !each.is_operator(); });
  if (strangers < kStrangersConnectionsMax) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("users of this daemon already have ", strangers,
                   " gRPC connections, all that there are but for operators': "
                   "try again"));
}

size_t ConnectionUids::CountOpen(const Caller& caller) const {
  absl::MutexLock lock(&mutex_);
  return CountOpenIf([&](const Caller& each) { return each == caller; });
}

absl::StatusOr<int> ConnectionUids::Move(UniqueFd connection,
                                         const Caller& caller) {
  absl::MutexLock lock(&mutex_);
  // Free numbers of other users are held until one of this user's is found, so
  // that the kernel offers the next one.
  std::vector<UniqueFd> others;
  while (true) {
    UniqueFd moved(::fcntl(connection.get(), F_DUPFD_CLOEXEC, first_));
    if (!moved.ok()) {
      return OsError(errno, "fcntl F_DUPFD_CLOEXEC of a gRPC connection");
    }
    const auto index = static_cast<size_t>(moved.get() - first_);
    if (index >= slots_.size()) slots_.resize(index + 1);
    Slot& slot = slots_[index];
    if (slot.used && !(slot.caller == caller)) {
      others.push_back(std::move(moved));
      continue;
    }
    slot = {true, caller, Inode(moved.get())};
    return moved.release();
  }
}

absl::StatusOr<Caller> ConnectionUids::Find(absl::string_view peer) const {
  int fd = 0;
  if (absl::ConsumePrefix(&peer, "fd:") && absl::SimpleAtoi(peer, &fd) &&
      fd >= first_) {
    absl::MutexLock lock(&mutex_);
    const auto index = static_cast<size_t>(fd - first_);
    if (index < slots_.size() && slots_[index].used) {
      return slots_[index].caller;
    }
  }
  return absl::NotFoundError("the connection's user is unknown");
}

}  // namespace optstate::admin
