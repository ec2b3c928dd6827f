#include "server/transport/session_table.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace optstate::transport {

absl::Status SessionTable::Claim(uint32_t rank, const Owner& owner,
                                 absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  absl::MutexLock lock(&mutex_);
  // The check is repeated, because another session may claim the rank as soon
  // as it is free.
  while (HasOwner(rank)) {
    const Owner& other = owners_[rank];
    const bool is_same = owner.client_instance != 0 &&
                         owner.client_instance == other.client_instance;
    if (!is_same && !other.link->IsGone()) {
      return absl::AlreadyExistsError(absl::StrCat(
          "rank ", rank, " is attached by process ", other.pid, " over ",
          other.wire, "; end that one first, or use another rank"));
    }
    other.interrupt();
    const auto is_free = [this, rank] {
      mutex_.AssertHeld();
      return !HasOwner(rank);
    };
    if (!mutex_.AwaitWithDeadline(absl::Condition(&is_free), deadline)) {
      return absl::UnavailableError(absl::StrCat(
          "rank ", rank, "'s last session (process ", owners_[rank].pid,
          ") is gone but its step is still being finished; try again"));
    }
  }
  owners_.emplace(rank, owner);
  if (observers_.wires != nullptr && owner.queues != nullptr &&
      *owner.queues != nullptr) {
    observers_.wires->AddSession(owner.wire, owner.queues);
  }
  return absl::OkStatus();
}

void SessionTable::Release(uint32_t rank) {
  absl::MutexLock lock(&mutex_);
  const auto owner = owners_.find(rank);
  if (owner == owners_.end()) return;
  if (observers_.wires != nullptr) {
    observers_.wires->RemoveSession(owner->second.queues);
  }
  owners_.erase(owner);
}

}  // namespace optstate::transport
