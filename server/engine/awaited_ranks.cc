#include "server/engine/awaited_ranks.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "server/os/process_stat.h"
#include "spdlog/spdlog.h"

namespace optstate::engine {
namespace {

// Returns whether a later process has the rank's pid now. A process that cannot
// be inspected (hidepid) counts as the rank's.
bool IsAnother(const session::RankProcess& process) {
  const absl::StatusOr<os::ProcessStat> stat = os::ReadProcessStat(process.pid);
  return stat.ok() && process.start_ticks != 0 &&
         stat->start_ticks != process.start_ticks;
}

}  // namespace

AwaitedRanks::AwaitedRanks(session::Job* job, absl::Duration patience)
    : job_(job), patience_(patience) {
  Refresh();
}

void AwaitedRanks::Refresh() {
  const std::vector<session::FormerRank> awaited = job_->Awaited();
  std::erase_if(awaited_, [&awaited](const Awaited& one) {
    return std::count(awaited.begin(), awaited.end(), one.rank) == 0;
  });
  for (const session::FormerRank& rank : awaited) {
    const bool is_watched =
        std::any_of(awaited_.begin(), awaited_.end(),
                    [&rank](const Awaited& one) { return one.rank == rank; });
    if (!is_watched) awaited_.push_back(Watch(rank));
  }
}

AwaitedRanks::Awaited AwaitedRanks::Watch(
    const session::FormerRank& rank) const {
  Awaited one{.rank = rank, .deadline = absl::Now() + patience_};
  if (rank.process.pid == 0) return one;
  one.pidfd.reset(
      static_cast<int>(::syscall(SYS_pidfd_open, rank.process.pid, 0)));
  const int error = errno;
  // The pidfd is opened first: once it is open, the pid is not reused
  // unnoticed.
  if ((!one.pidfd.ok() && error == ESRCH) || IsAnother(rank.process)) {
    one.pidfd.reset();
    one.deadline = absl::InfinitePast();
  } else if (!one.pidfd.ok()) {
    spdlog::warn("rank {} cannot be watched: {}", rank.rank,
                 OsError(error, "pidfd_open").ToString());
  }
  return one;
}

void AwaitedRanks::AppendTo(std::vector<pollfd>* fds) const {
  for (const Awaited& one : awaited_) {
    if (one.pidfd.ok()) fds->push_back({one.pidfd.get(), POLLIN, 0});
  }
}

absl::Time AwaitedRanks::deadline() const {
  absl::Time earliest = absl::InfiniteFuture();
  for (const Awaited& one : awaited_) {
    if (!one.pidfd.ok()) earliest = std::min(earliest, one.deadline);
  }
  return earliest;
}

bool AwaitedRanks::HasEnded(const Awaited& one) {
  if (!one.pidfd.ok()) return absl::Now() >= one.deadline;
  pollfd ended{one.pidfd.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) == 1;
}

void AwaitedRanks::GiveUpEnded() {
  std::erase_if(awaited_, [this](const Awaited& one) {
    if (!HasEnded(one)) return false;
    job_->GiveUp(one.rank);
    return true;
  });
}

}  // namespace optstate::engine
