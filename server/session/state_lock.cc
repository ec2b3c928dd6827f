#include "server/session/state_lock.h"

#include <sys/sysinfo.h>

#include <cerrno>
#include <cstring>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/session/lock_admission.h"
#include "spdlog/spdlog.h"
#include "storage/memory/memory_locker.h"

namespace optstate::session {
namespace {

bool HasSwap() {
  struct sysinfo info = {};
  return ::sysinfo(&info) == 0 && info.totalswap != 0;
}

}  // namespace

bool StateLock::IsAlways() const {
  return job_.options.config.lock_memory() == v1::LOCK_MEMORY_ALWAYS;
}

absl::Status StateLock::CheckInMemory() const {
  return CheckLockable(job_.options.directory);
}

absl::Status StateLock::Admit(uint64_t job_state_bytes) const {
  if (!IsAlways()) return absl::OkStatus();
  uint64_t may_lock = storage::MemoryLocker::BytesLeft();
  if (may_lock != storage::MemoryLocker::kUnlimited) {
    may_lock += job_.memory_locker.counts().locked_bytes +
                job_.memory_locker.counts().pending_bytes;
  }
  return AdmitLock(job_.options.config, job_.options.directory, job_state_bytes,
                   may_lock);
}

std::string StateLock::WhyRefused(int error) const {
  if (!why_not_.empty()) return why_not_;
  const std::string why =
      error == ENOMEM || error == EPERM
          ? LockLimitText()
          : absl::StrCat("the kernel refuses it: ", std::strerror(error));
  return HasSwap() ? why
                   : absl::StrCat(why,
                                  ". This machine has no swap now, so the "
                                  "state stays in memory all the same");
}

absl::Status StateLock::Lock() {
  if (job_.options.config.lock_memory() == v1::LOCK_MEMORY_NEVER) {
    why_not_ = "lock_memory: never";
    return absl::OkStatus();
  }
  const absl::Status in_memory = CheckInMemory();
  if (!in_memory.ok()) {
    if (IsAlways()) return Annotate(in_memory, "lock_memory: always");
    why_not_ = std::string(in_memory.message());
    return absl::OkStatus();
  }
  job_.tier->LockMemory(&job_.memory_locker);
  const storage::MemoryLocker::Counts counts = job_.memory_locker.counts();
  if (counts.refused_bytes != 0 && IsAlways()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "lock_memory: always, and ", counts.refused_bytes, " of ",
        job_.tier->bytes(), " bytes of state cannot be locked in memory: ",
        WhyRefused(counts.error)));
  }
  Log();
  return absl::OkStatus();
}

void StateLock::Log() {
  const storage::MemoryLocker::Counts counts = job_.memory_locker.counts();
  if (counts.refused_bytes == told_bytes_) return;
  told_bytes_ = counts.refused_bytes;
  if (told_bytes_ == 0) return;
  spdlog::log(HasSwap() ? spdlog::level::warn : spdlog::level::info,
              "the state is not locked in memory whole: job={} "
              "locked_bytes={} unlocked_bytes={} reason=\"{}\"",
              job_.options.name, counts.locked_bytes + counts.pending_bytes,
              counts.refused_bytes, WhyRefused(counts.error));
}

void StateLock::Describe(v1::MemoryLock* lock) const {
  if (!why_not_.empty()) {
    lock->set_unlocked_bytes(job_.tier->bytes());
    lock->set_reason(why_not_);
    return;
  }
  const storage::MemoryLocker::Counts counts = job_.memory_locker.counts();
  lock->set_locked_bytes(counts.locked_bytes);
  lock->set_pending_bytes(counts.pending_bytes);
  lock->set_unlocked_bytes(counts.refused_bytes);
  if (counts.refused_bytes != 0) lock->set_reason(WhyRefused(counts.error));
}

}  // namespace optstate::session
