#include "server/session/ranks/rank_roster.h"

#include <fcntl.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "server/os/process_stat.h"
#include "server/session/transition_check.h"
#include "storage/persist_in_order.h"

namespace optstate::session {

void RankRoster::Reset(uint32_t world_size) {
  ranks_.assign(world_size, Rank{});
  losses_.Reset();
  gradient_areas_.assign(world_size, nullptr);
  for (uint32_t rank = world_size; rank < kWorldSizeMax; ++rank) {
    job_.rank_mark(rank).attached = 0;
  }
}

void RankRoster::Clear() {
  ranks_.clear();
  gradient_areas_.clear();
}

void RankRoster::Answer(uint32_t rank, uint64_t request_id,
                        const absl::Status& status,
                        const StepOutcome& outcome) const {
  session(rank).spec.listener->OnStepDone(request_id, status, outcome);
}

void RankRoster::Notify(uint32_t rank, const std::string& text) const {
  session(rank).spec.listener->OnNotice(text);
}

void RankRoster::NoteCommittedStep(uint64_t step) {
  for (Rank& rank : ranks_) rank.session.committed_step = step;
}

absl::Status RankRoster::CheckAttached(uint32_t rank) const {
  if (rank < size() && state(rank) == RankState::kAttached) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", rank, " is not attached to job \"", job_.options.name, "\""));
}

uint32_t RankRoster::AttachedCount() const {
  return Count(RankState::kAttached);
}

uint32_t RankRoster::AwaitedCount() const { return Count(RankState::kAwaited); }

uint32_t RankRoster::Count(RankState which) const {
  uint32_t count = 0;
  for (uint32_t rank = 0; rank < size(); ++rank) {
    if (state(rank) == which) ++count;
  }
  return count;
}

// Between two steps a rank is not held: nothing is lost when another session
// takes its place, and a process that closed its session unheard blocks no
// other.
bool RankRoster::IsHeld(uint32_t rank, const RankProcess& by) const {
  const storage::RankMark& mark = job_.rank_mark(rank);
  return state(rank) == RankState::kAwaited && mark.pid != 0 &&
         mark.pid != by.pid &&
         (job_.recovery.has_value() ||
          WasBegun(job_.record().committed_step + 1)) &&
         os::IsRunning(mark.pid, mark.process_start_ticks);
}

absl::Status RankRoster::HeldError(uint32_t rank) const {
  return absl::AlreadyExistsError(absl::StrCat(
      "rank ", rank, " of job \"", job_.options.name, "\" is process ",
      job_.rank_mark(rank).pid, ", which lost its engine within step ",
      job_.record().committed_step + 1,
      ", runs, and comes back by itself: end it first"));
}

absl::Status RankRoster::CheckNoneHeld(const RankProcess& by) const {
  for (uint32_t rank = 0; rank < size(); ++rank) {
    if (IsHeld(rank, by)) return HeldError(rank);
  }
  return absl::OkStatus();
}

std::vector<FormerRank> RankRoster::Awaited() const {
  std::vector<FormerRank> awaited;
  for (uint32_t rank = 0; rank < size(); ++rank) {
    if (state(rank) != RankState::kAwaited) continue;
    const storage::RankMark& mark = job_.rank_mark(rank);
    awaited.push_back({.rank = rank,
                       .client_instance = mark.client_instance,
                       .process = {.pid = mark.pid,
                                   .start_ticks = mark.process_start_ticks}});
  }
  return awaited;
}

bool RankRoster::WasAttachedLast(const AttachSpec& spec) const {
  return spec.client_instance != 0 &&
         spec.client_instance == job_.rank_mark(spec.rank).client_instance;
}

// Returns whether some rank has staged for the step, in this engine or a former
// one.
bool RankRoster::WasBegun(uint64_t step) const {
  for (uint32_t rank = 0; rank < size(); ++rank) {
    if (job_.staging_mark(rank).step == step) return true;
  }
  return false;
}

RankState RankRoster::state(uint32_t rank) const {
  if (ranks_[rank].has_session) return RankState::kAttached;
  return job_.rank_mark(rank).attached != 0 ? RankState::kAwaited
                                            : RankState::kAbsent;
}

void RankRoster::CheckMayBecome(uint32_t rank, RankState to) const {
  CheckTransition("rank", rank, state(rank), to);
}

// The next engine awaits the rank, unless its session cannot identify itself.
// The mark of a returning one says throughout that it is attached, with an
// unknown process in between.
void RankRoster::Attach(const AttachSpec& spec) {
  CheckMayBecome(spec.rank, RankState::kAttached);
  storage::RankMark& mark = job_.rank_mark(spec.rank);
  mark.pid = 0;
  storage::PersistInOrder(storage::PersistPoint::kRankProcessStart);
  mark.process_start_ticks = spec.process.start_ticks;
  storage::PersistInOrder(storage::PersistPoint::kRankProcessId);
  mark.pid = spec.process.pid;
  storage::PersistInOrder(storage::PersistPoint::kRankAttached);
  mark.attached = spec.client_instance != 0 ? 1 : 0;
  losses_.Forget(spec.rank);
  Rank& rank = ranks_[spec.rank];
  rank.has_session = true;
  rank.session.spec = spec;
  if (spec.gradient_segment >= 0) {
    rank.session.gradient_segment = std::make_shared<const UniqueFd>(
        ::fcntl(spec.gradient_segment, F_DUPFD_CLOEXEC, 0));
  }
  rank.session.attached_at = absl::Now();
}

void RankRoster::Await(uint32_t rank) {
  CheckMayBecome(rank, RankState::kAwaited);
  ranks_[rank] = Rank{};
  // The mark alone says that the rank is awaited.
  if (state(rank) == RankState::kAwaited) return;
  AbortTransition("rank", rank, NameOf(RankState::kAbsent),
                  NameOf(RankState::kAwaited));
}

void RankRoster::Leave(uint32_t rank) {
  CheckMayBecome(rank, RankState::kAbsent);
  job_.rank_mark(rank).attached = 0;
  if (ranks_[rank].has_session) ranks_[rank] = Rank{};
}

}  // namespace optstate::session
