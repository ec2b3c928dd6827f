#include "server/session/ranks/rank_roster.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "server/os/process_stat.h"
#include "storage/persist_in_order.h"

namespace optstate {

void RankRoster::Reset(uint32_t world_size) {
  sessions_.assign(world_size, RankSession{});
  gradient_areas_.assign(world_size, nullptr);
  for (uint32_t rank = world_size; rank < kWorldSizeMax; ++rank) {
    job_.rank_mark(rank).attached = 0;
  }
}

void RankRoster::Clear() {
  sessions_.clear();
  gradient_areas_.clear();
}

void RankRoster::Answer(uint32_t rank, uint64_t request_id,
                        const absl::Status& status,
                        const StepOutcome& outcome) const {
  sessions_[rank].spec.listener->OnStepDone(request_id, status, outcome);
}

void RankRoster::Notify(uint32_t rank, const std::string& text) const {
  sessions_[rank].spec.listener->OnNotice(text);
}

void RankRoster::NoteCommittedStep(uint64_t step) {
  for (RankSession& session : sessions_) session.committed_step = step;
}

absl::Status RankRoster::CheckAttached(uint32_t rank) const {
  if (rank < size() && sessions_[rank].attached) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", rank, " is not attached to job \"", job_.options.name, "\""));
}

uint32_t RankRoster::AttachedCount() const {
  return static_cast<uint32_t>(
      std::count_if(sessions_.begin(), sessions_.end(),
                    [](const RankSession& rank) { return rank.attached; }));
}

bool RankRoster::IsAwaited(uint32_t rank) const {
  return !sessions_[rank].attached && job_.rank_mark(rank).attached != 0;
}

uint32_t RankRoster::AwaitedCount() const {
  uint32_t count = 0;
  for (uint32_t rank = 0; rank < size(); ++rank) {
    if (IsAwaited(rank)) ++count;
  }
  return count;
}

// Between two steps a rank is not held: nothing is lost when another session
// takes its place, and a process that closed its session unheard blocks no
// other.
bool RankRoster::IsHeld(uint32_t rank, const RankProcess& by) const {
  const RankMark& mark = job_.rank_mark(rank);
  return IsAwaited(rank) && mark.pid != 0 && mark.pid != by.pid &&
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
    if (!IsAwaited(rank)) continue;
    const RankMark& mark = job_.rank_mark(rank);
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

// Marks the rank as attached, for the next engine. A session that cannot
// identify itself is not awaited. A returning one stays attached throughout,
// with an unknown process in between.
void RankRoster::MarkAttached(const AttachSpec& spec) {
  RankMark& mark = job_.rank_mark(spec.rank);
  mark.pid = 0;
  PersistInOrder(PersistPoint::kRankProcessStart);
  mark.process_start_ticks = spec.process.start_ticks;
  PersistInOrder(PersistPoint::kRankProcessId);
  mark.pid = spec.process.pid;
  PersistInOrder(PersistPoint::kRankAttached);
  mark.attached = spec.client_instance != 0 ? 1 : 0;
  ForgetLoss(spec.rank);
}

void RankRoster::ForgetLoss(uint32_t rank) {
  job_.rank_mark(rank).lost_at_step = 0;
  job_.rank_mark(rank).loss_untold = 0;
}

}  // namespace optstate
